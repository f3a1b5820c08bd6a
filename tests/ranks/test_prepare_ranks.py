"""Ranks prepare together: each has memory for what it will write, and a rank that can't is named on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ranks_kit import run_ranks

import tierstore
from tierstore.errors import TierStoreError
from tierstore.state import image_memory


def config_of(rank: int, folder: Path) -> dict[str, Any]:
    node = {"name": "node", "uri": str(folder / f"node-{rank}"), "scope": "node", "durable": False}
    return {"run": "r", "tiers": [node, {"name": "shared", "uri": str(folder / "shared"), "scope": "shared"}]}


def prepares(rank: int, world_size: int, folder: Path) -> Any:
    with tierstore.open(config_of(rank, folder)) as store:
        state = {"shared": torch.ones(300_000), "own": torch.full((50_000,), float(rank)), "step": 1}
        prepared = store.prepare(state)
        again = store.prepare(state)
        ticket = store.save(1, state)
        ticket.wait("durable", 60)
        assert ticket.stall is not None
        assert torch.equal(store.load()["own"], state["own"])
        return [prepared.nbytes, prepared.images, again.images, ticket.stall.allocate_s, store._pool.made]


def fails(rank: int, world_size: int, folder: Path) -> Any:
    with tierstore.open(config_of(rank, folder)) as store:
        state = {"own": torch.full((50_000,), float(rank))}
        if rank == 1:

            def full(fd: int, offset: int, nbytes: int) -> None:
                raise OSError(28, "No space left on device")

            real, image_memory.os.posix_fallocate = image_memory.os.posix_fallocate, full
        try:
            store.prepare(state)
        except TierStoreError as error:
            told = [type(error).__name__, error.message]
        if rank == 1:
            image_memory.os.posix_fallocate = real
        store.save(1, state).wait("durable", 60)
        return told


def test_each_rank_has_memory_for_what_it_writes(tmp_path: Path) -> None:
    told = run_ranks(2, prepares, tmp_path)
    for _, images, again, allocate_s, made in told:
        assert (images, again, allocate_s, made) == (2, 0, 0, 2)
    assert max(nbytes for nbytes, *_ in told) > 1_200_000 > 400_000 > min(nbytes for nbytes, *_ in told)


def test_a_rank_without_room_is_named_on_all_and_saving_goes_on(tmp_path: Path) -> None:
    (first, message), (second, _) = run_ranks(2, fails, tmp_path)
    assert (first, second) == ("RankError", "TierFullError")
    assert "preparing saves" in message
