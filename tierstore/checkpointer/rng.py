"""The random states of this process: Python's, numpy's, torch's, the current CUDA device's; as small tensors, for each rank has its own."""

from __future__ import annotations

import hashlib
import logging
import random
from typing import Any

import numpy as np
import torch

__all__ = ["capture_rng", "new_stream", "restore_rng"]

log = logging.getLogger(__name__)


def capture_rng() -> dict[str, Any]:
    """What `restore_rng` takes."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    state = np.random.get_state(legacy=False)
    if isinstance(state, dict) and state["bit_generator"] == "MT19937":  # another one is somebody's own: it belongs into `extra`
        words = torch.from_numpy(state["state"]["key"].astype(np.int64))
        found["numpy"] = {"words": words, "pos": int(state["state"]["pos"]), "has_gauss": int(state["has_gauss"]), "gauss": state["gauss"]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore_rng(saved: Any) -> None:
    """Sets the generators to what `capture_rng` returned; a bare tensor is torch's state."""
    if isinstance(saved, torch.Tensor):
        saved = {"torch": saved}
    torch.set_rng_state(saved["torch"])
    if python := saved.get("python"):
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if numpy := saved.get("numpy"):
        words = {"key": numpy["words"].numpy().astype(np.uint32), "pos": numpy["pos"]}
        np.random.set_state({"bit_generator": "MT19937", "state": words, "has_gauss": numpy["has_gauss"], "gauss": numpy["gauss"]})
    if "cuda" in saved:
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["cuda"])
        else:
            log.info("the checkpoint has the random state of a CUDA device, and there is none here: it is left out")


def new_stream(rank: int) -> None:
    """Gives a rank that no saved rank stands for random numbers of its own: the same ones each time that it begins at this state."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    torch.manual_seed(seed)  # CUDA's generators too
    random.seed(seed)
    np.random.seed(seed % 2**32)
