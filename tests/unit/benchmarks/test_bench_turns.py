"""Planned turns: who matters most has theirs, slow ones fewer, nobody is forgotten; ratios are taken within a turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import fitting
import pytest
import turns as module
from measure import Row, Table, ratio
from turns import NO_TIME, SLOW_TURNS, SURE, Turns, part_of

COSTS = {"ours": 2.0, "limit": 1.0, "peer": 4.0, "sluggish": 20.0}


class Run:
    """A suite on a clock of its own.

    Attributes:
        counted: How many turns each had that counted.
        order: Who was measured when, warm-up included.
    """

    def __init__(self, budget_s: float | None, costs: Mapping[str, float] = COSTS, *, repeat: int = 5) -> None:
        self.now, self.counted, self.order = 0.0, Counter[str](), list[tuple[int, str]]()
        self.turns = Turns(costs, repeat=repeat, first=lambda name: name in ("ours", "limit"), until=budget_s, clock=lambda: self.now)
        for turn, order in self.turns:
            for name in order:
                self.turns.attempt(name, [], lambda name=name: self.spend(costs[name]))
                self.turns.took(name, costs[name])
                self.order.append((turn, name))
                self.counted[name] += turn >= 0

    def spend(self, seconds: float) -> None:
        self.now += seconds


def test_with_time_enough_all_have_their_turns_and_slow_ones_two() -> None:
    run = Run(1000)
    assert run.counted == {"ours": 5, "limit": 5, "peer": 3, "sluggish": SLOW_TURNS}


def test_all_have_a_turn_before_anybody_has_more_than_what_is_sure() -> None:
    budget_s = 27 + 27 + 2 * 3  # everybody warms up, everybody has a turn, and those that matter two more
    run = Run(budget_s)
    assert run.counted == {"ours": SURE, "limit": SURE, "peer": 1, "sluggish": 1}
    assert run.now == budget_s


def test_what_does_not_fit_is_left_out_and_listed() -> None:
    run = Run(27 + SURE * 3 + 5)
    assert run.counted["ours"] >= SURE
    assert run.counted["peer"] == 1
    assert run.counted["sluggish"] == 0
    table = Table("T", 0, "ours")
    run.turns.list_left_out([table])
    assert table.failed == {"sluggish": NO_TIME}


def test_those_that_matter_have_one_turn_whatever_the_time() -> None:
    run = Run(0.5)
    assert (run.counted["ours"], run.counted["limit"]) == (1, 1)
    assert run.counted["peer"] == run.counted["sluggish"] == 0


def test_those_that_matter_are_measured_side_by_side_each_turn_another_one_first() -> None:
    run = Run(1000)
    for turn in range(5):
        names = [name for at, name in run.order if at == turn]
        assert set(names[:2]) == {"ours", "limit"}
    assert {next(name for at, name in run.order if at == turn) for turn in range(2)} == {"ours", "limit"}


def test_an_error_that_is_no_exception_is_listed_too_but_not_an_interrupt() -> None:
    class Checkpoint(BaseException):
        """As that of torch.distributed.checkpoint."""

    def fail(error: BaseException) -> None:
        raise error

    table, turns = Table("T", 0, "a"), Turns("ab", repeat=1)
    assert turns.attempt("a", [table], lambda: fail(Checkpoint("no metadata"))) is None
    assert table.failed == {"a": "Checkpoint: no metadata"}
    with pytest.raises(KeyboardInterrupt):
        turns.attempt("b", [table], lambda: fail(KeyboardInterrupt()))


def test_who_was_measured_and_did_not_fail_is_able() -> None:
    run = Run(27 + SURE * 3 + 5)
    run.turns.failed["peer"] = "why"
    assert run.turns.able() == ["ours", "limit", "sluggish"]


def test_without_a_limit_only_the_slow_have_fewer() -> None:
    assert Run(None).counted == Run(1000).counted


def test_who_was_not_warmed_up_is_not_measured_cold() -> None:
    costs = {"ours": 10.0, "limit": 10.0, "peer": 31.0}
    run = Run(2 * 20 + 40, costs)
    assert run.counted["peer"] == 0
    assert (-1, "peer") not in run.order


def test_a_part_of_the_time_is_a_part_of_what_is_left() -> None:
    assert part_of(110.0, 0.5, clock=lambda: 10.0) == 60.0
    assert part_of(5.0, 0.5, clock=lambda: 10.0) == 10.0
    assert part_of(None, 0.5) is None


def test_a_ratio_is_the_median_of_what_the_turns_say() -> None:
    base, row = Row(name="base"), Row(name="row")
    for turn, slow_by in enumerate([1.0, 10.0, 1.5]):
        base.add(2.0 * slow_by, turn)
        if turn != 2:
            row.add(1.0 * slow_by, turn)
    assert row.median / base.median == pytest.approx(5.5 / 3)
    assert ratio(row, base) == 0.5, "each turn says a half, however slow the machine was in it"
    row.values[1] *= 9
    assert ratio(row, base) * ratio(base, row) == pytest.approx(1)


def test_without_turns_in_common_a_ratio_is_that_of_the_medians() -> None:
    base, row = Row(name="base", values=[4.0]), Row(name="row")
    row.add(1.0, 0)
    assert ratio(row, base) == 0.25


def test_a_state_is_halved_until_two_turns_fit_into_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(fitting, "fact", lambda name, value: told.append(name))
    monkeypatch.setattr(fitting, "time", SimpleNamespace(monotonic=lambda: 0.0))
    size, second = 2 << 30, 3 * 2**28
    speed = fitting.Speed(copy=second, write=second, hash=second)  # a second for 256 MiB

    def fitted(until: float | None) -> int:
        return fitting.affordable("save", size, None, until, 50, speed=lambda directory: speed)

    assert fitted(400.0) == size  # eight times 256 MiB, 50 seconds each
    assert told == ["save: machine at its start"]
    assert fitted(399.0) == size // 2
    assert told[-1] == "save: size"
    assert fitted(None) == size
    assert fitted(-5.0) == 64 << 20


def test_the_machine_is_looked_at_in_three_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_PROBE", 1 << 20)
    try:
        found = fitting.probe(tmp_path)
    except OSError as error:
        pytest.skip(f"the temporary folder's file system has no O_DIRECT: {error}")
    assert min(found.copy, found.write, found.hash) > 0
    assert "SHA-256 by one thread" in str(found)


def test_the_clock_of_turns_is_monotonic_time_unless_told() -> None:
    assert Turns("a", repeat=1)._clock is module.time.monotonic
