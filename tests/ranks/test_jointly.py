"""What one rank meets all of them hear, as the same kind of error where that decides what they do next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks_kit import run_ranks

from tierstore.errors import IntegrityError, RankError, StateMismatchError, TemporaryError
from tierstore.state.agreement import Agreement
from tierstore.state.jointly import asked_by_none, jointly, time_to_read

FAILURES = {
    "damage": lambda: IntegrityError("block 3 is damaged"),
    "heard": lambda: RankError("rank 0 failed: IntegrityError: block 3 is damaged"),
    "mismatch": lambda: StateMismatchError("w has another shape"),
    "down": lambda: TemporaryError("the share is away"),
    "bug": lambda: ValueError("a bug"),
}


def works(rank: int, world_size: int, folder: Path, cases: list[list[str]]) -> Any:
    ranks, told = Agreement(deadline_s=60), []
    for case in cases:

        def work(kind: str = case[rank]) -> int:
            if kind in FAILURES:
                raise FAILURES[kind]()
            return rank

        try:
            heard = jointly(ranks, "the load", work, flag=lambda result: result == 1, most=lambda result: 10 * result)
            told.append([heard.result, heard.flag, heard.most])
        except Exception as error:  # noqa: BLE001 - told to the test
            told.append([type(error).__name__, str(error)])
    return told


def test_all_ranks_end_alike_whatever_one_of_them_meets(tmp_path: Path) -> None:
    cases = {
        ("", "", ""): ["0", "1", "2"],
        ("damage", "", ""): ["IntegrityError"] * 3,
        ("damage", "heard", "damage"): ["IntegrityError"] * 3,
        ("", "damage", "heard"): ["IntegrityError"] * 3,
        ("damage", "mismatch", ""): ["RankError", "StateMismatchError", "RankError"],
        ("down", "damage", "heard"): ["TemporaryError", "RankError", "RankError"],
        ("", "", "bug"): ["RankError", "RankError", "ValueError"],
    }
    found = run_ranks(3, works, tmp_path, cases=[list(case) for case in cases])
    for number, (case, kinds) in enumerate(cases.items()):
        assert [str(rank[number][0]) for rank in found] == kinds, case
    assert [rank[0] for rank in found] == [[0, True, 20], [1, True, 20], [2, True, 20]]
    assert "ranks 0, 1 of 3 failed: rank 1: StateMismatchError: w has another shape" in found[2][4][1]
    assert "ranks 0, 2 of 3 failed: rank 0: IntegrityError: block 3" in found[1][2][1]


def asks(rank: int, world_size: int, folder: Path) -> Any:
    ranks = Agreement(deadline_s=60)
    names = [f"n{number:04d}" for number in range(1000)]
    left = [{"n0001", "n0500", "n0999"}, {"n0500", "n0999", "n0002"}, set(names) - {"n0002"}]
    found = asked_by_none(ranks, "who wants what", names, lambda: left[rank])
    try:
        asked_by_none(ranks, "who wants what", names[rank:], set)
    except (RankError, StateMismatchError) as error:
        return [found, error.message]
    return None


def test_what_no_rank_asks_for_is_found_among_many_names(tmp_path: Path) -> None:
    for found, message in run_ranks(3, asks, tmp_path):
        assert found == ["n0500", "n0999"]
        assert "ranks [1, 2] see other names" in message


def waits(rank: int, world_size: int, folder: Path) -> Any:
    ranks = Agreement(deadline_s=60)
    with time_to_read(ranks, 160 << 20):
        inside = ranks.deadline_s
    return [inside, ranks.deadline_s]


def test_ranks_wait_longer_for_one_that_has_much_to_read(tmp_path: Path) -> None:
    assert run_ranks(2, waits, tmp_path) == [[70.0, 60.0]] * 2
