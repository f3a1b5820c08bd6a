"""`Store.retention`: decisions, the plan, deciding by it and freeing, from Python; the details are tested where they are made."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers_kit import SteppedClock

import tierstore
from tierstore.errors import ClosedError, NotFoundError, RefusedError, UsageError

KEEP = {
    "keep": [{"last": 1}, {"best": {"metric": "acc", "mode": "max", "missing": "worst"}}, {"tags": ["release/*"]}],
    "gc": {"undelete_window": "24h"},
}


def opened(root: Path, clock: SteppedClock, **config: Any) -> tierstore.Store:
    tiers = [{"name": "pfs", "uri": str(root / "pfs"), "scope": "shared"}, {"name": "far", "uri": str(root / "far"), "scope": "shared"}]
    return tierstore.open({"version": 1, "run": "r", "tiers": tiers, **config}, clock=clock)


def save(root: Path, clock: SteppedClock, *steps: int) -> None:
    """By a store without a policy: nothing is decided and nothing goes meanwhile, nor in the background of the stores after it."""
    with opened(root, clock) as store:
        for step in steps:
            store.save(step, {"w": torch.full((8,), float(step))}, metrics={"loss": 1.0 / step})
            store.sync(200)
            clock.advance(7200)


def gone(store: tierstore.Store, *steps: int) -> list[int]:
    missing = []
    for step in steps:
        try:
            store.load(step)
        except NotFoundError:
            missing.append(step)
    return missing


def test_from_a_plan_to_free_space_and_nothing_that_somebody_wants_goes(tmp_path: Path) -> None:
    clock = SteppedClock()
    save(tmp_path, clock, 1, 2, 3, 4, 5, 6)
    with opened(tmp_path, clock, retention=KEEP) as store:
        keeper = store.retention
        assert keeper.pin(1, "paper", reason="figure 3") is True
        assert keeper.pin(1, "paper") is False
        assert keeper.tag(2, ["release/1"]) is True
        assert keeper.set_metrics(3, {"acc": 0.9}) is True
        assert keeper.hold(4, "audit", until=clock.now() + timedelta(days=90)) is True
        plan = keeper.plan()
        assert {e.attempt.step for e in plan.entries if e.action not in ("keep", "revive")} == {5}
        assert any(word.matched and word.rule == "pinned" for word in keeper.explain(1))
        assert not any(word.matched for word in keeper.explain(5))
        keeper.prune(plan)
        assert keeper.undelete(5) is True
        assert keeper.undelete(5) is False
        clock.advance(90000)
        keeper.prune()
        assert keeper.collect().freed == ()
        assert gone(store, 1, 2, 3, 4, 5, 6) == []
        clock.advance(90000)
        report = keeper.collect()
        assert {f.attempt.step for f in report.freed} == {5}
        assert gone(store, 1, 2, 3, 4, 5, 6) == [5]
        with pytest.raises(NotFoundError, match="it was deleted"):
            keeper.pin(5)
        assert keeper.unpin(1, "paper") is True
        assert keeper.untag(2, ["release/1"]) is True
        assert keeper.release(4, "audit") is True
        assert {e.attempt.step for e in keeper.plan().entries if e.action == "expire"} == {1, 2, 4}
    with pytest.raises(ClosedError):
        store.retention.plan()


def test_a_copy_is_dropped_by_hand_but_never_the_last(tmp_path: Path) -> None:
    clock = SteppedClock()
    save(tmp_path, clock, 1)
    with opened(tmp_path, clock, retention=KEEP) as store:
        assert store.retention.evict(1, "pfs", dry_run=True).files > 0
        assert store.retention.evict("latest", "pfs", reason="full").files > 0
        assert not list((tmp_path / "pfs" / "r").rglob("*.safetensors"))
        with pytest.raises(RefusedError):
            store.retention.evict(1, "far")
        assert float(store.load(1)["w"][0]) == 1.0


def test_without_a_policy_nothing_is_planned_and_decisions_are_made_all_the_same(tmp_path: Path) -> None:
    clock = SteppedClock()
    save(tmp_path, clock, 1)
    with opened(tmp_path, clock) as store:
        assert store.retention.pin("latest") is True
        with pytest.raises(RefusedError, match="no retention policy"):
            store.retention.plan()
        with pytest.raises(RefusedError):
            store.retention.prune()
        assert store.retention.collect().freed == ()


@pytest.mark.parametrize("share", [0.0, -0.5, 90, float("nan")])
def test_a_brake_is_not_let_go_by_a_slip_of_the_unit(tmp_path: Path, share: float) -> None:
    with opened(tmp_path, SteppedClock(), retention=KEEP) as store, pytest.raises(UsageError, match="no share"):
        store.retention.prune(max_delete_fraction=share)
