"""Sparse tensors on several ranks: replicated ones are stored once, those that differ are each rank's own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from ranks_kit import run_ranks

import tierstore
from tierstore.testing.equality import assert_same_state


def state_of(rank: int) -> dict[str, Any]:
    dense = torch.arange(12.0).view(4, 3)
    own = torch.zeros(4, 3)
    own[: rank + 1] = rank + 1.0  # as many elements as the rank's number says
    return {"same": dense.to_sparse_csr(), "coo": dense.to_sparse(), "own": own.to_sparse(), "w": torch.ones(2)}


def saves_and_loads(rank: int, world_size: int, folder: Path) -> Any:
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    with tierstore.open([str(folder / "node"), str(folder / "shared")], run="r") as store:
        store.save(1, state_of(rank)).wait("durable", 120)
        assert_same_state(store.load(1), state_of(rank))
        into = state_of(1 - rank)
        loaded = store.load(1, into=into)
        assert loaded["own"] is into["own"]
        assert_same_state(loaded, state_of(rank))
        return list(store.open_checkpoint(1))


def test_ranks_save_and_load_replicated_and_own_sparse_tensors(tmp_path: Path) -> None:
    names, again = run_ranks(2, saves_and_loads, tmp_path)
    assert names == again
    assert [name for name in names if name.startswith("same")] == ["same.col_indices", "same.crow_indices", "same.values"]
    assert sum(name.startswith("own") for name in names) == 4
