"""`should_save` with several ranks: rank 0's clock and losses decide, all get the same answer, and rarely is anything said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks_kit import run_ranks
from tiers_kit import SteppedClock

import tierstore
from tierstore.errors import UsageError


def asks(rank: int, world_size: int, folder: Path) -> Any:
    clock = SteppedClock()
    config = {"version": 1, "run": "r", "tiers": [str(folder / "shared")], "save": {"every": {"seconds": 60}}}
    with tierstore.Store(tierstore.load_config(config), rank=rank, world_size=world_size, clock=clock) as store:
        due = []
        for step in range(1, 400):
            clock.advance(1.0 if rank == 0 else 0.3 + rank)  # each has a clock of its own
            if store.should_save(step, {"loss": float(rank)}):
                due.append(step)
                store._cadence.saved(step)
        said = store.agreement._heard if store.agreement is not None else 0
    return [due, said]


def test_time_is_rank_0s(tmp_path: Path) -> None:
    found = run_ranks(3, asks, tmp_path)
    assert [due for due, _ in found] == [[61, 121, 181, 241, 301, 361]] * 3
    assert found[0][1] < 60, "between saves, half of the way at a time"


def disagree(rank: int, world_size: int, folder: Path) -> Any:
    config = {"version": 1, "run": "r", "tiers": [str(folder / "shared")], "save": {"every": {"better": {"metric": "loss", "mode": "min"}}}}
    with tierstore.Store(tierstore.load_config(config), rank=rank, world_size=world_size) as store:
        first = store.should_save(5, {"loss": 1.0} if rank == 0 else None)
        try:
            store.should_save(6 + rank)
        except UsageError as error:
            return [first, error.message]
        return [first, ""]


def test_ranks_that_ask_about_other_steps_are_told(tmp_path: Path) -> None:
    assert run_ranks(2, disagree, tmp_path) == [[True, ""], [True, "rank 1 asks whether to save at step 7, rank 0 at step 6"]]
