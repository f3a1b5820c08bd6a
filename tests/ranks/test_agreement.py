"""Ranks agree with a deadline: nobody hangs, and who is missing or failed is named on every rank that is left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ranks_kit import die, run_ranks, wait_only_for

from tierstore.errors import DeadlineError, RankError, UsageError
from tierstore.state.agreement import Agreement


def agrees(rank: int, world_size: int, folder: Path) -> Any:
    ranks, large = Agreement(deadline_s=60), bytes([rank]) * (9 << 20)
    second = Agreement(deadline_s=60)
    return [
        ranks.agree("sum", bytes([rank]), lambda values: bytes([sum(v[0] for v in values)]))[0],
        ranks.share("save id", b"of rank %d" % rank).decode(),
        [v.decode() for v in second.gather("names", b"rank %d" % rank)],
        [(v[:1] * len(v) == v, len(v)) for v in ranks.gather("large", large)],
    ]


def test_all_ranks_get_the_same_answer_of_any_size(tmp_path: Path) -> None:
    names = ["rank 0", "rank 1", "rank 2"]
    large = [[True, 9 << 20]] * 3
    assert run_ranks(3, agrees, tmp_path) == [[3, "of rank 0", names, large]] * 3


def hears(rank: int, world_size: int, folder: Path) -> Any:
    ranks = Agreement(deadline_s=60)
    heard = [ranks.hear("a word", lambda n=n: b"%d" % n).decode() for n in range(3)]  # type: ignore[misc]
    ranks.share("a question", b"x")
    return [*heard, ranks.hear("a word", lambda: b"last").decode()]


def test_rank_0_is_heard_without_waiting_for_the_others(tmp_path: Path) -> None:
    assert run_ranks(3, hears, tmp_path) == [["0", "1", "2", "last"]] * 3


def fails_on_one(rank: int, world_size: int, folder: Path, failing: int) -> Any:
    ranks = Agreement(deadline_s=60)
    try:
        if rank == failing:
            ranks.fail("the save of step 5", UsageError("tensor 'w' is sparse", hint="make it dense"))
        ranks.share("the save of step 5", b"x")
    except (RankError, UsageError) as error:
        told = [type(error).__name__, error.message]
    return [*told, ranks.share("the save of step 6", b"goes on").decode()]


def test_a_failure_on_one_rank_is_raised_on_all_and_the_next_question_works(tmp_path: Path) -> None:
    for failing in (0, 1):
        found = run_ranks(3, fails_on_one, tmp_path, failing=failing)
        for rank, (kind, message, after) in enumerate(found):
            assert kind == ("UsageError" if rank == failing else "RankError")
            assert "tensor 'w' is sparse" in message
            assert rank == failing or f"rank {failing} of 3" in message
            assert after == "goes on"


def one_dies(rank: int, world_size: int, folder: Path, dead: int) -> Any:
    ranks = Agreement(deadline_s=60)
    ranks.share("start", b"")
    if rank == dead:
        die()
    ranks.deadline_s = 2.5  # beyond the store's own wait
    wait_only_for(ranks, {dead})
    try:
        ranks.share("the save of step 5", b"x")
    except DeadlineError as error:
        return [error.message, error.context["ranks"]]
    return None


def test_a_dead_rank_is_named_on_every_other(tmp_path: Path) -> None:
    found = run_ranks(3, one_dies, tmp_path, dead=2, may_die={2: -9})
    assert found[:2] == [["the save of step 5: rank 2 of 3 did not come within 2.5 s", [2]]] * 2


def one_is_late(rank: int, world_size: int, folder: Path) -> Any:
    ranks = Agreement(deadline_s=0.5)
    wait_only_for(ranks, {1})
    told = []
    while rank == 1 and not (folder / "missed").exists():
        time.sleep(0.01)
    try:
        ranks.share("step 1", b"")
    except DeadlineError as error:
        told.append(error.context["ranks"])
        (folder / "missed").touch()
    ranks.deadline_s = 60
    return [*told, ranks.share("step 2", b"together again").decode()]


def test_a_late_rank_hears_that_it_was_missed_and_joins_the_next_question(tmp_path: Path) -> None:
    assert run_ranks(3, one_is_late, tmp_path) == [[[1], "together again"]] * 3
