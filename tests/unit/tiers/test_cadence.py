"""When to save: each rule, its reasons, and the arithmetic against the papers."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from tiers_kit import SteppedClock

from tierstore.config_cadence import SaveEvery
from tierstore.errors import TemporaryError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers.cadence import Cadence
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.intervals import daly_interval, observed_failures

START = datetime(2026, 11, 29, 12, 0, tzinfo=timezone.utc)


def cadence(history: Sequence[CheckpointInfo] = (), **every: Any) -> tuple[Cadence, SteppedClock]:
    clock = SteppedClock()
    return Cadence(SaveEvery(**every), clock, history=lambda: history), clock


def checkpoint(step: int, minutes: float, actor: str = "n0:1", **metrics: float) -> CheckpointInfo:
    at = START + timedelta(minutes=minutes)
    record = Record(seq=0, kind="committed", at=at, nonce="0" * 32, actor=actor)
    attempt = Attempt(run="r", step=step, save_id=f"{step:026d}")
    return CheckpointInfo(attempt=attempt, committed_at=at, manifest_digest="", metrics=metrics, records=(record,))


def test_steps() -> None:
    rule, _ = cadence(steps=500)
    assert [s for s in range(0, 2001, 250) if rule.look(s).due] == [500, 1000, 1500, 2000]
    assert rule.look(700).ask_again == 1000
    assert rule.explain() == "every 500 steps"


def test_seconds_count_from_the_last_save_or_the_first_question() -> None:
    rule, clock = cadence(seconds=600)
    assert not rule.look(1).due
    clock.advance(599)
    assert not rule.look(2).due
    clock.advance(1)
    assert rule.look(3).due
    assert rule.look(3).due, "nothing was saved yet"
    rule.saved(3)
    assert not rule.look(4).due


def test_the_next_look_is_half_of_the_way_by_the_measured_time_of_a_step() -> None:
    rule, clock = cadence(seconds=1000)
    assert rule.look(0).ask_again == 1
    clock.advance(10)
    assert rule.look(10).ask_again == 10 + 495


def test_a_better_metric() -> None:
    rule, _ = cadence(
        [checkpoint(1, 0, **{"val/loss": 2.0}), checkpoint(2, 1, **{"val/loss": math.nan})], better={"metric": "val/loss", "mode": "min"}
    )
    assert not rule.look(10).due
    assert not rule.look(10, {"val/loss": 2.0}).due, "as good as a checkpoint of an earlier process is not better"
    assert not rule.look(10, {"val/loss": math.nan}).due
    verdict = rule.look(20, {"val/loss": 1.9})
    assert (verdict.due, verdict.why) == (True, "val/loss is 1.9, better than 2")
    rule.saved(20)
    assert not rule.look(30, {"val/loss": 1.95}).due
    assert not rule.look(31).due, "what was measured once is not asked about again"
    assert rule.explain() == "when val/loss is better than 1.9"


def test_better_by_a_margin_and_by_more() -> None:
    rule, _ = cadence(better={"metric": "acc", "mode": "max", "by": 0.5})
    assert rule.look(1, {"acc": 1.0}).due
    rule.saved(1, {"acc": 1.0})
    assert not rule.look(2, {"acc": 1.25}).due
    assert rule.look(3, {"acc": 1.5}).due


def test_dynamic_is_denser_while_the_loss_moves() -> None:
    rule, _ = cadence(dynamic={"metric": "loss", "change": 0.05, "least": 10, "most": 200})
    saves = []
    for step in range(1001):
        loss = 4.0 * math.exp(-step / 150) + 1.0
        if rule.look(step, {"loss": loss}).due:
            rule.saved(step)
            saves.append(step)
    gaps = [b - a for a, b in itertools.pairwise(saves)]
    assert gaps[0] == 10
    assert gaps[-1] == 200
    assert gaps == sorted(gaps), "the loss only gets flatter"


def test_dynamic_waits_for_the_most_where_the_loss_is_not_finite() -> None:
    rule, _ = cadence(dynamic={"metric": "loss", "most": 100})
    assert not any(rule.look(step, {"loss": math.nan if step % 2 else math.inf}).due for step in range(100))
    assert rule.look(100, {"loss": math.nan}).why == "100 steps since the last save (most 100)"


def test_dynamic_after_going_back_to_an_older_step() -> None:
    rule, _ = cadence(dynamic={"metric": "loss", "most": 100})
    rule.saved(500)
    assert rule.look(200).due, "a save of a step to come says nothing about this one"


def test_any_of_several_rules() -> None:
    rule, clock = cadence(any=[{"steps": 100}, {"seconds": 60}])
    assert rule.look(100).why == "every 100 steps"
    rule.saved(100)
    clock.advance(60)
    assert rule.look(101).why == "every 1m"
    assert rule.explain() == "every 100 steps; or every 1m"


@pytest.mark.parametrize(("cost", "mtbf"), [(1.0, 3600.0), (300.0, 86400.0), (600.0, 6 * 3600.0)])
def test_the_interval_loses_the_least_work(cost: float, mtbf: float) -> None:
    """Daly's estimate against his own cost function (equation 20, failures exponentially distributed), minimised by search."""

    def wall(interval: float) -> float:
        restart = 0.0
        return mtbf * math.exp(restart / mtbf) * (math.exp((interval + cost) / mtbf) - 1.0) / interval

    best = min((i * mtbf / 20000 for i in range(1, 40000)), key=wall)
    found = daly_interval(cost, mtbf)
    assert found == pytest.approx(best, rel=0.02)
    assert wall(found) <= wall(math.sqrt(2 * cost * mtbf)) + 1e-9, "not worse than Young's"


def test_where_a_save_costs_more_than_a_failure_interval() -> None:
    assert daly_interval(100.0, 10.0) == 10.0


def test_auto_measures_and_says_its_reasoning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tierstore")
    rule, clock = cadence(auto={"mtbf_s": 10800.0})
    assert not rule.look(0).due
    assert "assumed, none was measured yet" in caplog.text
    caplog.clear()
    for stall in (0.9, 1.0, 30.0):
        rule.stalled(stall)
    rule.stalled(1.1)
    rule.stalled(1.0)
    seconds = daly_interval(1.0, 10800.0)
    clock.advance(seconds - 1)
    assert not rule.look(1).due
    clock.advance(1.1)
    verdict = rule.look(2)
    assert verdict.due
    assert verdict.why == (
        "a save stalls training for 1s (median of 5), failures come every 3h (configured): "
        "least is lost with a save every 2m26s (Daly 2006)"
    )
    assert caplog.text == "", "an interval that did not change is not told again"


def test_auto_never_saves_faster_than_saves_get_through() -> None:
    rule, _ = cadence(auto={"mtbf_s": 3600.0})
    rule.stalled(0.5)
    rule.committed(400.0)
    assert "raised to 6m40s, which a save takes until it is committed" in rule.explain()


@pytest.mark.parametrize(
    ("bounds", "text"),
    [({"least_s": 900.0}, "raised to the configured least, 15m"), ({"most_s": 30.0}, "lowered to the configured most, 30s")],
)
def test_auto_within_bounds(bounds: dict[str, float], text: str) -> None:
    rule, _ = cadence(auto={"mtbf_s": 3600.0, **bounds})
    rule.stalled(1.0)
    assert text in rule.explain()


def test_failures_are_observed_from_the_commits() -> None:
    """Two restarts; the hours in which the job waited to be started again are no uptime."""
    history = [checkpoint(s, m, a) for s, m, a in [(1, 0, "n:1"), (2, 60, "n:1"), (3, 600, "n:2"), (4, 660, "n:2"), (5, 900, "m:7")]]
    found = observed_failures(list(reversed(history)))
    assert (found.uptime_s, found.restarts) == (7200.0, 2)
    assert found.mtbf_s == (7200.0 + 86400.0) / 3
    rule, _ = cadence(history, auto={})
    assert "failures come every 8h40m (observed: 2 restarts in 2h of this run, and one a day assumed)" in rule.explain()


def test_history_that_cannot_be_read_is_no_reason_not_to_save(caplog: pytest.LogCaptureFixture) -> None:
    def down() -> Sequence[CheckpointInfo]:
        raise TemporaryError("the bucket is down")

    rule = Cadence(SaveEvery(better={"metric": "loss", "mode": "min"}), SteppedClock(), history=down)  # type: ignore[arg-type]
    assert rule.look(1, {"loss": 3.0}).due
    assert "the bucket is down" in caplog.text
