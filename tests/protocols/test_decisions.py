"""Decisions about a checkpoint: what each does, that it is said once, and that after `swept` nothing is decided any more."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tiers_kit import Hooked, SteppedClock, attempt_at, copy_to, flip, path_of, persist_rank, run, save, tiers_in

from tierstore.clock import utc_text
from tierstore.errors import IntegrityError, NotFoundError, RefusedError, UsageError
from tierstore.format.record import Record
from tierstore.names import Attempt, parse_reference
from tierstore.tiers import decisions
from tierstore.tiers.catalog import CheckpointInfo, RecordCache, scan
from tierstore.tiers.copies import sources_of as copy_sources
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.log import append, decide_fate, read_log
from tierstore.tiers.promote import pending, promote, reconcile
from tierstore.tiers.recover import recover
from tierstore.tiers.sources import sources_of
from tierstore.tiers.tier import Tiers
from tierstore.tiers.verify import verify
from tierstore.tiers.view import observe

CLOCK = SteppedClock()
Decide = Callable[[Tiers, Attempt], Coroutine[Any, Any, Record | None]]


def seen(tiers: Tiers, attempt: Attempt) -> CheckpointInfo:
    return next(c for c in run(scan(tiers, attempt.run)).checkpoints if c.attempt == attempt)


async def expire(tiers: Tiers, attempt: Attempt, *, window_s: float = 0) -> None:
    until = utc_text(CLOCK.now() + timedelta(seconds=window_s))
    await append(tiers.authority.storage, attempt, "expired", {"not_before": until, "reason": "no rule"}, clock=CLOCK)


async def sweep(tiers: Tiers, attempt: Attempt, *, trim: bool = True) -> None:
    """Expired, swept and freed everywhere, as a collector leaves it."""
    await expire(tiers, attempt)
    swept = await append(tiers.authority.storage, attempt, "swept", {}, clock=CLOCK, actor="collector:1")
    for tier in tiers:
        await tier.storage.delete([f.path for f in await tier.storage.list(attempt.folder)])
        if tier is not tiers.authority:
            await tier.storage.delete([f.path for f in await tier.storage.list(attempt.log_folder)])
    if trim:
        await tiers.authority.storage.delete([attempt.record_path(seq) for seq in range(1, swept.seq)])


DECISIONS: dict[str, tuple[Decide, Callable[[CheckpointInfo], bool], Decide | None]] = {
    "pin": (
        lambda t, a: decisions.pin(t, a, "paper", clock=CLOCK, reason="figure 3"),
        lambda i: i.pins == ("paper",),
        lambda t, a: decisions.unpin(t, a, "paper", clock=CLOCK),
    ),
    "tag": (
        lambda t, a: decisions.tag(t, a, ["release/1", "good"], clock=CLOCK),
        lambda i: set(i.tags) == {"release/1", "good"},
        lambda t, a: decisions.untag(t, a, ["good", "release/1"], clock=CLOCK),
    ),
    "hold": (
        lambda t, a: decisions.hold(t, a, "audit", reason="legal", until=CLOCK.now() + timedelta(days=9), clock=CLOCK),
        lambda i: [(h.name, h.reason, h.until) for h in i.holds] == [("audit", "legal", CLOCK.now() + timedelta(days=9))],
        lambda t, a: decisions.release(t, a, "audit", clock=CLOCK),
    ),
    "metrics": (
        lambda t, a: decisions.set_metrics(t, a, {"val/loss": 1.5, "bad": math.nan}, clock=CLOCK),
        lambda i: i.metrics.get("val/loss") == 1.5 and math.isnan(i.metrics["bad"]),
        None,
    ),
}
REVIVING = ("pin", "tag", "hold")


@pytest.mark.parametrize("name", DECISIONS)
def test_each_decision_is_one_record_is_said_once_and_can_be_taken_back(tmp_path: Path, name: str) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 3))
    decide, holds, undo = DECISIONS[name]
    record = run(decide(tiers, attempt))
    assert record is not None
    assert (record.seq, holds(seen(tiers, attempt))) == (1, True)
    assert run(decide(tiers, attempt)) is None
    assert len(seen(tiers, attempt).records) == 2
    if undo is not None:
        assert run(undo(tiers, attempt)) is not None
        assert not holds(seen(tiers, attempt))
        assert run(undo(tiers, attempt)) is None
        assert len(seen(tiers, attempt).records) == 3


def test_pins_of_different_names_and_tags_are_independent(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 3, tags=["a"]))
    run(decisions.pin(tiers, attempt, clock=CLOCK))
    run(decisions.pin(tiers, attempt, "mine", clock=CLOCK))
    run(decisions.unpin(tiers, attempt, clock=CLOCK))
    run(decisions.tag(tiers, attempt, ["a", "b"], clock=CLOCK))
    run(decisions.untag(tiers, attempt, ["a", "unknown"], clock=CLOCK))
    assert (seen(tiers, attempt).pins, seen(tiers, attempt).tags) == (("mine",), ("b",))


def test_a_hold_can_be_prolonged_and_one_that_has_ended_is_refused(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 3))
    later = CLOCK.now() + timedelta(days=30)
    run(decisions.hold(tiers, attempt, "audit", until=CLOCK.now() + timedelta(days=1), clock=CLOCK))
    assert run(decisions.hold(tiers, attempt, "audit", until=later, clock=CLOCK)) is not None
    assert [(h.name, h.until) for h in seen(tiers, attempt).holds] == [("audit", later)]
    with pytest.raises(UsageError, match="would have ended at 2026-11-29T11:00"):
        run(decisions.hold(tiers, attempt, "audit", until=CLOCK.now() - timedelta(hours=1), clock=CLOCK))
    with pytest.raises(UsageError, match="no time zone"):
        run(decisions.hold(tiers, attempt, "audit", until=CLOCK.now().replace(tzinfo=None), clock=CLOCK))


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (lambda t, a: decisions.pin(t, a, "", clock=CLOCK), "can't name a pin"),
        (lambda t, a: decisions.hold(t, a, "two\nlines", clock=CLOCK), "can't name a hold"),
        (lambda t, a: decisions.tag(t, a, "release", clock=CLOCK), "tags are a list"),
        (lambda t, a: decisions.tag(t, a, [], clock=CLOCK), "tags are a list"),
        (lambda t, a: decisions.set_metrics(t, a, {}, clock=CLOCK), "mapping of names to numbers"),
        (lambda t, a: decisions.set_metrics(t, a, {"loss": "low"}, clock=CLOCK), "'loss' is 'low', not a number"),
    ],
)
def test_what_says_nothing_is_refused_before_anything_is_written(tmp_path: Path, decide: Decide, message: str) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 3))
    with pytest.raises(UsageError, match=message):
        run(decide(tiers, attempt))
    assert len(seen(tiers, attempt).records) == 1


def test_metrics_that_arrive_late_decide_which_is_best(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempts = [run(save(tiers, step, metrics={"val/loss": 2.0})) for step in (1, 2, 3)]
    run(decisions.set_metrics(tiers, attempts[1], {"val/loss": 1.0, "acc": 0.5}, clock=CLOCK))
    run(decisions.set_metrics(tiers, attempts[2], {"val/loss": math.nan}, clock=CLOCK))
    assert run(scan(tiers, "run")).resolve(parse_reference("run@best:val/loss")).attempt == attempts[1]
    run(decisions.set_metrics(tiers, attempts[0], {"val/loss": 0.5}, clock=CLOCK))
    catalog = run(scan(tiers, "run"))
    assert catalog.resolve(parse_reference("run@best:val/loss")).attempt == attempts[0]
    assert catalog.resolve(parse_reference("run@best:acc")).attempt == attempts[1]


@pytest.mark.parametrize("name", [*REVIVING, "undelete"])
def test_an_expired_checkpoint_comes_back_also_after_its_window(tmp_path: Path, name: str) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 3))
    decide: Decide = (lambda t, a: decisions.undelete(t, a, clock=late)) if name == "undelete" else DECISIONS[name][0]
    late = SteppedClock()
    late.advance(365 * 86400)
    for _ in range(2):  # what is pinned already and expires all the same comes back again
        run(expire(tiers, attempt, window_s=3600))
        assert seen(tiers, attempt).hidden
        assert run(decide(tiers, attempt)) is not None
        assert not seen(tiers, attempt).hidden
        assert seen(tiers, attempt).revived is not None
    assert run(decide(tiers, attempt)) is None


def test_metrics_and_an_unpin_do_not_bring_an_expired_checkpoint_back(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 3))
    run(decisions.pin(tiers, attempt, clock=CLOCK))
    run(expire(tiers, attempt))
    run(decisions.set_metrics(tiers, attempt, {"loss": 1.0}, clock=CLOCK))
    run(decisions.unpin(tiers, attempt, clock=CLOCK))
    assert seen(tiers, attempt).hidden


@pytest.mark.parametrize("trim", [True, False])
def test_after_the_sweep_every_decision_is_refused_and_told_when_and_by_whom(tmp_path: Path, trim: bool) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 3))
    run(decisions.pin(tiers, attempt, "paper", clock=CLOCK))
    run(sweep(tiers, attempt, trim=trim))
    before = run(tiers.authority.storage.list(attempt.log_folder))
    undos = [undo for *_, undo in DECISIONS.values() if undo is not None]
    undelete: Decide = lambda t, a: decisions.undelete(t, a, clock=CLOCK)  # noqa: E731
    for decide in [undelete, *(d for d, *_ in DECISIONS.values()), *undos]:
        with pytest.raises(RefusedError, match=r"too late: step 3 of run 'run' was deleted at 29 Nov 2026 12:00Z by collector:1"):
            run(decide(tiers, attempt))
    assert run(tiers.authority.storage.list(attempt.log_folder)) == before


def test_nothing_is_decided_about_what_never_committed_or_whose_log_cannot_be_read(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    with pytest.raises(NotFoundError, match="has no commit record"):
        run(decisions.pin(tiers, attempt_at(1), clock=CLOCK))
    condemned = attempt_at(2)
    run(decide_fate(tiers.authority.storage, condemned, "condemned", {"reason": "rank 3 is gone"}, CLOCK))
    with pytest.raises(NotFoundError, match=r"condemned \(rank 3 is gone\)"):
        run(decisions.pin(tiers, condemned, clock=CLOCK))
    attempt = run(save(tiers, 3))
    run(decisions.pin(tiers, attempt, clock=CLOCK))
    flip(tmp_path / "shared" / attempt.record_path(1))
    with pytest.raises(IntegrityError, match=r"000001\.json"):
        run(decisions.unpin(tiers, attempt, clock=CLOCK))
    assert len(list((tmp_path / "shared" / attempt.log_folder).iterdir())) == 2


# ---- trimmed logs


def test_a_trimmed_log_is_one_read_and_no_damage_to_anybody(tmp_path: Path) -> None:
    asked: list[str] = []

    async def hook(operation: str, path: str) -> None:
        if operation == "read" and "/.log/" in path:
            asked.append(path)

    tiers = tiers_in(tmp_path, wrap={"shared": lambda storage: Hooked(storage, hook)})
    kept, gone = run(save(tiers, 1)), run(save(tiers, 2))
    run(decisions.pin(tiers, gone, clock=CLOCK))
    run(decisions.unpin(tiers, gone, clock=CLOCK))
    run(copy_to(tiers, gone, "far"))
    run(sweep(tiers, gone))
    asked.clear()
    cache = RecordCache()
    catalog = run(scan(tiers, "run", cache))
    assert [path for path in asked if gone.name in path] == [gone.record_path(4)]
    assert ([c.attempt for c in catalog.checkpoints], catalog.swept, catalog.remains, catalog.known) == ([kept], (gone,), {}, 2)
    assert catalog.warnings == ()
    asked.clear()
    assert run(scan(tiers, "run", cache)).swept == (gone,)
    assert asked == []
    assert [r.kind for r in run(read_log(tiers.authority.storage, gone))] == ["committed", "swept"]
    assert run(verify(tiers, "run")).damage == ()
    assert run(recover(tiers, "run", clock=CLOCK)).rebuilt == ()
    with pytest.raises(NotFoundError, match="it was deleted"):
        catalog.resolve(parse_reference("run@2"))


def test_what_is_left_of_a_swept_or_condemned_attempt_is_told_by_tier(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    swept, condemned = run(save(tiers, 1)), attempt_at(2)
    run(decisions.pin(tiers, swept, clock=CLOCK))
    run(sweep(tiers, swept, trim=False))
    run(decide_fate(tiers.authority.storage, condemned, "condemned", {"reason": "late"}, CLOCK))
    assert run(scan(tiers, "run")).remains == {swept: ("shared",)}  # its log is to be trimmed
    run(tiers.authority.storage.delete([swept.record_path(1), swept.record_path(2)]))
    assert run(scan(tiers, "run")).remains == {}
    run(tiers.get("far").storage.put(swept.record_path(0), b"a copy"))
    run(tiers.get("node").storage.put(swept.evicted_path, b"{}"))
    run(tiers.get("shared").storage.put(condemned.path("part-00000.safetensors"), b"part"))
    catalog = run(scan(tiers, "run"))
    assert catalog.remains == {swept: ("node", "far"), condemned: ("shared",)}
    assert (catalog.swept, [c.attempt for c in catalog.condemned], catalog.known) == ((swept,), [condemned], 2)


def test_a_scan_while_a_log_is_trimmed_sees_no_damage(tmp_path: Path) -> None:
    """The listing shows a log without `swept`, and the records that it names go before they are read."""
    begun: list[str] = []
    plain = tiers_in(tmp_path)
    attempt = run(save(plain, 2))
    run(decisions.pin(plain, attempt, clock=CLOCK))
    run(decisions.unpin(plain, attempt, clock=CLOCK))

    async def hook(operation: str, path: str) -> None:
        if operation == "read" and path.endswith("000001.json") and not begun:
            begun.append(path)
            await sweep(plain, attempt)

    tiers = tiers_in(tmp_path, wrap={"shared": lambda storage: Hooked(storage, hook)})
    catalog = run(scan(tiers, "run"))
    assert begun != []
    assert (catalog.swept, catalog.checkpoints, catalog.warnings) == ((attempt,), (), ())


# ---- dropped copies


async def drop(tiers: Tiers, attempt: Attempt, name: str) -> None:
    for kind in ("evicting", "evicted"):
        await append(tiers.authority.storage, attempt, kind, {"tier": name}, clock=CLOCK)


def test_a_node_s_marker_says_that_its_copy_is_not_wanted_there(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 3))
    run(copy_to(tiers, attempt, "node"))
    assert seen(tiers, attempt).complete_on == ("node", "shared")
    run(tiers.get("node").storage.put(attempt.evicted_path, b"{}"))
    info = seen(tiers, attempt)
    assert (info.dropped, dict(info.replicas)) == ({"node"}, {"node": "evicting", "shared": "complete"})
    assert [s.tier.name for s in sources_of(tiers, info)] == ["shared", "node"], "as long as there is something, after all others"
    view = run(observe(tiers, attempt))
    context = CopyContext.make(tiers, CLOCK)
    assert [t.name for t in copy_sources(context, view, tiers.get("far"), "manifest.json")] == ["shared"]
    assert run(scan(tiers, "run")).foreign == ()
    run(tiers.get("far").storage.put(attempt.evicted_path, b"{}"))  # only nodes have such markers
    assert run(scan(tiers, "run")).foreign == (f"far:{attempt.evicted_path}",)


def test_a_copy_dropped_from_a_node_is_not_made_again_and_carries_nothing_further(tmp_path: Path) -> None:
    made = tiers_in(tmp_path, ("memory", "nvme", "shared"))
    memory, nvme, shared = made
    tiers = Tiers(tiers=made.tiers, authority=shared, durable_at=shared, store_id="kit")
    attempt = attempt_at(3)
    run(persist_rank(tiers, attempt, memory))
    assert run(reconcile(tiers, "run", clock=CLOCK)).ok
    assert seen(tiers, attempt).complete_on == ("memory", "nvme", "shared")
    for folder in (attempt.folder, attempt.log_folder):
        run(nvme.storage.delete([f.path for f in run(nvme.storage.list(folder))]))
    assert [c.tier for c in pending(run(scan(tiers, "run")), tiers)] == ["nvme"]
    for dropped, other in ((nvme, memory), (memory, nvme)):
        run(other.storage.delete([attempt.evicted_path]))
        run(dropped.storage.put(attempt.evicted_path, b"{}"))
        assert pending(run(scan(tiers, "run")), tiers) == []
        assert run(promote(tiers, attempt, nvme, clock=CLOCK)).done
        assert run(nvme.storage.list(attempt.folder)) == []


def test_a_checkpoint_dropped_from_the_authority_is_read_from_elsewhere_and_copied_from_there(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path, ("node", "shared", "far", "cold"))
    attempt = run(save(tiers, 3))
    assert run(promote(tiers, attempt, "far", clock=CLOCK)).done
    run(drop(tiers, attempt, "shared"))
    assert [s.tier.name for s in sources_of(tiers, seen(tiers, attempt))] == ["far", "shared"]
    path_of(tiers, "shared", attempt, "manifest.json").write_bytes(b"half gone")  # not looked at: far is good
    assert run(promote(tiers, attempt, "cold", clock=CLOCK)).done
    info = seen(tiers, attempt)
    assert (info.complete_on, info.quarantined) == (("far", "cold"), frozenset())


@pytest.mark.parametrize("meanwhile", ["dropped", "swept"])
def test_a_promoter_that_slept_while_its_target_was_dropped_or_the_checkpoint_went_records_nothing(tmp_path: Path, meanwhile: str) -> None:
    done: list[str] = []
    plain = tiers_in(tmp_path)
    attempt = run(save(plain, 3))

    async def hook(operation: str, path: str) -> None:
        if operation == "put" and path.endswith("000000.json") and not done:
            done.append(path)
            await (drop(plain, attempt, "far") if meanwhile == "dropped" else sweep(plain, attempt))

    tiers = tiers_in(tmp_path, wrap={"far": lambda storage: Hooked(storage, hook)})
    run(promote(tiers, attempt, "far", clock=CLOCK))
    assert done != []
    assert "replicated" not in [r.kind for r in run(read_log(plain.authority.storage, attempt))]
    catalog = run(scan(plain, "run"))
    assert [dict(c.replicas)["far"] for c in catalog.checkpoints] == (["evicting"] if meanwhile == "dropped" else [])
    assert catalog.remains == ({} if meanwhile == "dropped" else {attempt: ("far",)})
