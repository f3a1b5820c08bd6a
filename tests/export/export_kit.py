"""A saved state, opened: what the tests of exports begin with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import tierstore
from tierstore.state.lazy import Checkpoint
from tierstore.store import Store
from tierstore.testing.equality import assert_same_state


@contextmanager
def saved(root: Path, state: Any) -> Iterator[Checkpoint]:
    """`state` as step 1 of run ``r``, opened."""
    with stored(root, state) as store:
        yield store.open_checkpoint(1)


@contextmanager
def stored(root: Path, state: Any) -> Iterator[Store]:
    """A store on ``root/tier`` with `state` as step 1 of run ``r``."""
    with tierstore.open([str(root / "tier")], run="r") as store:
        store.save(1, state)
        store.sync(250)
        yield store


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """A tensor whose elements are all different as far as the dtype allows."""
    count = 1
    for size in shape:
        count *= size
    return torch.arange(start, start + count).to(dtype).reshape(shape)


def hf_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory, read by safetensors itself through the index (if there is one)."""
    import json

    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    weight_map = json.loads(index.read_text())["weight_map"]
    for name in sorted(set(weight_map.values())):
        found.update(load_file(folder / name))
    assert set(found) == set(weight_map)
    return found


def assert_tensors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same names in any order, with the same dtypes, shapes and bits."""
    assert set(found) == set(wanted)
    assert_same_state({name: found[name] for name in wanted}, dict(wanted))
