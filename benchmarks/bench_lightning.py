"""Saves from Lightning: how long training stands still, and until the bytes are on the disk, against Lightning's own plugins."""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from common import Table, arguments, change, scratch, settle, state_nbytes, training_state

warnings.simplefilter("ignore")
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO  # noqa: E402

from tierstore.integrations.lightning import TierCheckpointIO  # noqa: E402


def checkpoint_of(state: dict[str, dict[str, torch.Tensor]], step: int) -> dict[str, Any]:
    """A checkpoint as Lightning's connector makes it: weights, and an optimizer's state by parameters' numbers."""
    moments = zip(state["master"].values(), state["exp_avg"].values(), state["exp_avg_sq"].values(), strict=True)
    per_parameter = {
        number: {"step": torch.tensor(float(step)), "master": master, "exp_avg": mean, "exp_avg_sq": square}
        for number, (master, mean, square) in enumerate(moments)
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(per_parameter)}]
    return {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": dict(state["weights"]),
        "loops": {},
        "callbacks": {"ModelCheckpoint": {"monitor": None, "last_model_path": f"last-{step}.ckpt"}},
        "optimizer_states": [{"state": per_parameter, "param_groups": groups}],
        "lr_schedulers": [],
    }


def save(io: Any, checkpoint: dict[str, Any], path: Path, stall: Table, total: Table, name: str) -> None:
    """One save, and what it takes until the plugin has nothing left to do; a plugin that is ended is begun anew by its next save."""
    settle()
    began = time.perf_counter()
    io.save_checkpoint(checkpoint, path)
    stall.add(name, time.perf_counter() - began)
    if isinstance(io, TierCheckpointIO):
        io.body._publisher.settle(str(path))  # committed: synced, digests and all; and the pointer is there
    else:
        io.teardown()
    total.add(name, time.perf_counter() - began)


def main() -> None:
    args = arguments(__doc__ or "")
    logging.getLogger("tierstore").setLevel(logging.ERROR)
    state = training_state(args.nbytes)
    nbytes = state_nbytes(state)
    stock, threaded, ours, last = "TorchCheckpointIO", "AsyncCheckpointIO", "TierCheckpointIO", "TierCheckpointIO, last.ckpt beside it"
    stall = Table("Stall: how long save_checkpoint keeps training", nbytes, stock)
    total = Table("Until the save is done (ours: committed, synced and with digests; Lightning's: written, not synced)", nbytes, stock)
    with scratch(args.directory) as root:
        plugins = {stock: TorchCheckpointIO(), threaded: AsyncCheckpointIO(TorchCheckpointIO())}
        io = TierCheckpointIO([str(root / "node")], run="bench")
        for warm in (0, 1):  # the images are allocated once
            io.save_checkpoint(checkpoint_of(state, warm), root / "warm.ckpt")
            io.body._publisher.settle(str(root / "warm.ckpt"))
        for turn in range(2, args.repeat + 2):
            change(state)
            checkpoint = checkpoint_of(state, turn)
            for name, plugin in plugins.items():
                save(plugin, checkpoint, root / f"{name}.ckpt", stall, total, name)
            save(io, checkpoint, root / "epoch.ckpt", stall, total, ours)
            save(io, {**checkpoint, "callbacks": {}}, root / "last.ckpt", stall, total, last)
        io.teardown()
    stall.show()
    total.show()


if __name__ == "__main__":
    main()
