"""Several processes that save together make one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_kit import run_ranks

import tierstore
from tierstore.errors import UsageError


def saves(rank: int, world_size: int, folder: Path) -> Any:
    with tierstore.open([str(folder / "node"), str(folder / "shared")], run="r", rank=rank, world_size=world_size) as store:
        tickets = [store.save(step, {f"w{rank}": torch.full((4,), float(step))}) for step in (1, 2)]
        for ticket in tickets:
            ticket.wait("durable", 200)
        return [ticket.attempt.save_id for ticket in tickets]


def test_ranks_of_one_save_share_its_save_id_and_commit_one_checkpoint(tmp_path: Path) -> None:
    """Each rank used to make an id of its own: none of the attempts ever had all its parts."""
    first, second = run_ranks(2, saves, tmp_path)
    assert first == second
    with tierstore.open([str(tmp_path / "node"), str(tmp_path / "shared")], run="r") as store:
        assert [c.step for c in store.checkpoints()] == [1, 2]
        opened = store.open_checkpoint(2)
        assert sorted(opened) == ["w0", "w1"]
        assert torch.equal(opened["w1"].full(), torch.full((4,), 2.0))


def test_ranks_that_can_not_agree_on_a_save_id_are_refused(tmp_path: Path) -> None:
    with tierstore.open([str(tmp_path)], run="r", rank=1, world_size=2) as store:
        with pytest.raises(UsageError, match="no process group"):
            store.save(1, {"w": torch.ones(1)})
        assert store.checkpoints() == []
