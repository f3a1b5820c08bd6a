"""What holds for every run, policy and moment: what must stay stays, more rules keep more, a plan carried out leaves nothing to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from plan_kit import GIB, NOW, NVME, OBJECT, PFS, attempt_of, carry_out, checkpoint, policy

from tierstore.config_retention import RetentionConfig
from tierstore.names import Attempt
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.log_facts import Expiry, Hold
from tierstore.tiers.retention import Plan, Reason, TierFacts, counted_copies, evaluate, plan_from_json
from tierstore.tiers.retention.facts import held_nbytes, holds

ATTIC = TierFacts(name="attic", total_nbytes=20 * GIB, free_nbytes=2 * GIB)
FOUR = (replace(NVME, capacity=6 * GIB), PFS, OBJECT, ATTIC)
NAMES = tuple(tier.name for tier in FOUR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a plan is made from."""

    infos: Sequence[CheckpointInfo]
    rules: RetentionConfig
    tiers: Sequence[TierFacts]
    protected: Mapping[Attempt, Reason]

    def plan(self, **changes: Any) -> Plan:
        scene = replace(self, **changes)
        return evaluate(scene.infos, scene.rules, NOW, tiers=scene.tiers, protected=scene.protected)


KINDS = st.sampled_from(["", "leased", "resumed-from"])
keep_rules = st.one_of(
    st.builds(lambda n: {"last": n}, st.integers(1, 4)),
    st.builds(lambda n: {"every": {"steps": n}}, st.integers(1, 6)),
    st.builds(lambda n: {"within": f"{n}h"}, st.integers(1, 100)),
    st.builds(lambda kind, n: {kind: n}, st.sampled_from(["hourly", "daily", "weekly", "monthly", "yearly"]), st.integers(1, 4)),
    st.builds(
        lambda metric, mode, n, missing: {"best": {"metric": metric, "mode": mode, "count": n, "missing": missing}},
        st.sampled_from(["loss", "acc"]),
        st.sampled_from(["min", "max"]),
        st.integers(1, 3),
        st.sampled_from(["keep", "worst"]),
    ),
    st.builds(lambda steps: {"steps": steps}, st.lists(st.integers(0, 12), min_size=1, max_size=3)),
    st.builds(lambda tag: {"tags": [tag]}, st.sampled_from(["a", "b*", "a+b"])),
    st.just({"final": True}),
)
tier_rules = st.sampled_from(
    [
        {"max_bytes": "2GiB"},
        {"evict": {"high_watermark": "70%", "low_watermark": "40%"}},
        {"evict": {"min_free": "4GiB"}},
        {"keep": [{"last": 1}], "max_bytes": "1GiB"},
    ]
) | keep_rules.map(lambda rule: {"keep": [rule]})


@st.composite
def policies(draw: st.DrawFn) -> RetentionConfig:
    tiers = draw(st.dictionaries(st.sampled_from(NAMES), tier_rules, max_size=4))
    return policy(
        *draw(st.lists(keep_rules, min_size=1, max_size=4)),
        group_by=draw(st.sampled_from([["run"], ["run", "tags"]])),
        timezone=draw(st.sampled_from(["UTC", "Europe/Berlin"])),
        protect={
            "min_copies": draw(st.integers(1, 2)),
            "min_keep": draw(st.integers(1, 3)),
            "min_age": draw(st.sampled_from(["1m", "30h"])),
        },
        **({"tiers": tiers} if tiers else {}),
    )


class Digits:
    """Choices out of one number: drawn by itself, each of the twenty facts of a checkpoint would make the tests take minutes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def of(self, count: int) -> int:
        self.number, digit = divmod(self.number, count)
        return digit

    def maybe(self) -> bool:
        return self.of(6) == 5

    def hour(self) -> datetime:
        """Up to half a month ago, or, rarely, more than a day from now."""
        return NOW - timedelta(hours=-30 if self.of(16) == 15 else self.of(400))


def checkpoint_of(step: int, number: int, told: int) -> CheckpointInfo:
    digits = Digits(told)
    states = {name: (None, "complete", "complete", "complete", "partial", "receipt")[digits.of(6)] for name in NAMES}
    held = {name: state for name, state in states.items() if state}
    values = (None, 0.0, 1.0, 2.0, math.inf, math.nan)
    metrics = {name: values[digits.of(6)] for name in ("loss", "acc")}
    info = checkpoint(
        step,
        committed_at=digits.hour(),
        attempt=attempt_of(step, digits.hour(), number),
        nbytes=digits.of(3) * GIB,
        replicas=held,
        replicated={name: {} for name in held if not digits.maybe()},
        dropped=frozenset({NAMES[digits.of(4)]} - set(held)),
        metrics={name: value for name, value in metrics.items() if value is not None},
        tags=((), ("a",), ("a", "b"), ("b2",))[digits.of(4)],
        pins=("pin",) if digits.maybe() else (),
        final=digits.maybe(),
        damaged=digits.of(30) == 29,
    )
    if digits.maybe():
        info = replace(info, holds=(Hold(name="h", at=NOW, until=None if digits.maybe() else digits.hour()),))
    if digits.maybe():
        info = replace(info, expired=Expiry(at=info.committed_at, not_before=digits.hour()))
    return replace(info, revived=digits.hour()) if digits.maybe() else info


@st.composite
def scenes(draw: st.DrawFn, *, attempts: int = 1) -> Scene:
    """A run; with `attempts` above 1 a step may have as many, of which the latest that can be read supersedes the others."""
    told = draw(st.dictionaries(st.integers(0, 12), st.lists(st.integers(0, 2**80), min_size=1, max_size=attempts), min_size=1, max_size=8))
    infos = [checkpoint_of(step, number, facts) for step, attempts_at in told.items() for number, facts in enumerate(attempts_at)]
    winners = {c.step: c.attempt for c in sorted(infos, key=lambda c: c.attempt) if not c.damaged}
    infos = [replace(c, superseded=winners.get(c.step, c.attempt) > c.attempt) for c in infos]
    spoken = {info.attempt: kind for info, kind in zip(infos, draw(st.lists(KINDS, max_size=3)), strict=False) if kind}
    return Scene(
        infos=infos,
        rules=draw(policies()),
        tiers=FOUR,
        protected={attempt: Reason(kind=kind, text=kind) for attempt, kind in spoken.items()},
    )


def stays(plan: Plan) -> set[Attempt]:
    return {entry.attempt for entry in plan.entries if entry.stays}


def goes(plan: Plan) -> set[Attempt]:
    """What this plan begins to delete, or deletes."""
    return {entry.attempt for entry in plan.entries if entry.action in ("expire", "sweep")}


def ranking(scene: Scene) -> list[CheckpointInfo]:
    """The checkpoints that can be offered and loaded, the newest step first."""
    return sorted(
        (c for c in scene.infos if c.usable and not c.damaged and not c.superseded), key=lambda c: (c.step, c.attempt.save_id), reverse=True
    )


@given(scenes(attempts=2))
def test_what_must_stay_stays(scene: Scene) -> None:
    kept, gone = stays(scene.plan()), goes(scene.plan())
    skew = timedelta(seconds=scene.rules.gc.max_clock_skew_s)
    for info in scene.infos:
        if info.pins or any(h.until is None or h.until >= NOW - skew for h in info.holds):
            assert info.attempt in kept
        if info.attempt in scene.protected or info.damaged or NOW - info.committed_at < timedelta(seconds=scene.rules.protect.min_age_s):
            assert info.attempt not in gone
        if info.expired is not None and info.expired.not_before > NOW - skew:
            assert info.attempt not in gone
    order = ranking(scene)
    assert {info.attempt for info in order[: scene.rules.protect.min_keep]} <= kept
    if order:
        assert max(order, key=lambda c: c.attempt.save_id).attempt in kept
    for tiers in ([tier for tier in scene.tiers if tier.durable_at], scene.tiers):
        verified = next((info for info in order if counted_copies(info, tiers)), None)
        if verified is not None:
            assert verified.attempt in kept
            break


@given(scenes(attempts=2))
def test_never_everything_goes(scene: Scene) -> None:
    if any(info.usable and not info.damaged for info in scene.infos):
        assert any(info.usable and info.attempt in stays(scene.plan()) for info in scene.infos)


@given(scenes(), st.sampled_from(["loss", "acc"]), st.sampled_from(["min", "max"]), st.integers(1, 3))
def test_the_best_stay(scene: Scene, metric: str, mode: str, count: int) -> None:
    rules = policy({"best": {"metric": metric, "mode": mode, "count": count}})
    kept = stays(scene.plan(rules=rules))
    values = {c.attempt: c.metrics[metric] for c in ranking(scene) if metric in c.metrics}
    numbers = [(value, attempt) for attempt, value in values.items() if not math.isnan(value)]
    for value, attempt in numbers:
        better = [a for v, a in numbers if (v < value if mode == "min" else v > value) or (v == value and a > attempt)]
        assert attempt in kept or len(better) >= count
    assert {c.attempt for c in ranking(scene) if metric not in c.metrics} <= kept


@given(scenes(attempts=2), st.lists(keep_rules, min_size=1, max_size=2), st.integers(0, 4))
def test_more_rules_never_keep_less(scene: Scene, more: list[dict[str, Any]], place: int) -> None:
    keep = list(scene.rules.keep)
    keep[place:place] = policy(*more).keep
    wider = scene.plan(rules=scene.rules.model_copy(update={"keep": tuple(keep)}))
    assert stays(scene.plan()) <= stays(wider)
    assert goes(wider) <= goes(scene.plan())


@given(scenes(attempts=2), st.randoms())
def test_the_order_of_the_input_does_not_matter(scene: Scene, random: Any) -> None:
    shuffled = list(scene.infos)
    random.shuffle(shuffled)
    assert scene.plan(infos=shuffled).to_json() == scene.plan().to_json()


@given(scenes(attempts=2))
def test_a_plan_survives_its_json_and_gives_every_checkpoint_a_reason(scene: Scene) -> None:
    plan = scene.plan()
    assert plan_from_json(plan.to_json()).to_json() == plan.to_json()
    assert {entry.attempt for entry in plan.entries} == {info.attempt for info in scene.infos}
    assert all(entry.reasons for entry in plan.entries)
    assert all((entry.not_before is None) == entry.stays for entry in plan.entries)


def freed(plan: Plan, scene: Scene) -> tuple[TierFacts, ...]:
    """The tiers after the plan was carried out: their disks have that much more room."""
    gone = dict.fromkeys(NAMES, 0)
    for entry in plan.entries:
        for drop in entry.drops:
            gone[drop.tier] += 0 if drop.blocked else drop.nbytes
    for info in scene.infos:
        if info.attempt in goes(plan) and info.expired is not None:
            for name in info.replicas:
                gone[name] += held_nbytes(info, name) if holds(info, name) else 0
    return tuple(replace(t, free_nbytes=None if t.free_nbytes is None else t.free_nbytes + gone[t.name]) for t in scene.tiers)


@given(scenes())
def test_a_plan_that_was_carried_out_leaves_nothing_new_to_do(scene: Scene) -> None:
    first = scene.plan()
    again = scene.plan(infos=carry_out(scene.infos, first), tiers=freed(first, scene))
    assert {entry.action for entry in again.entries} <= {"keep", "expired"}
    assert not [drop for entry in again.entries for drop in entry.drops if not drop.blocked]
    assert stays(again) == stays(first)


@given(scenes(attempts=2))
def test_all_drops_together_leave_enough_counted_copies(scene: Scene) -> None:
    plan = scene.plan()
    after = {info.attempt: info for info in carry_out(scene.infos, plan)}
    dropped = [entry for entry in plan.entries if any(not drop.blocked for drop in entry.drops)]
    assume(dropped)
    for entry in dropped:
        info = after[entry.attempt]
        left = counted_copies(info, scene.tiers)
        assert len(left) >= scene.rules.protect.min_copies
        assert entry.attempt not in scene.protected or scene.protected[entry.attempt].kind != "leased"
        for drop in entry.drops:
            if not drop.blocked:
                # No copy that a drop leans on is dropped after it, but by one that still leaves enough.
                assert drop.tier not in drop.copies
                assert set(drop.copies) >= set(left)


@given(scenes())
def test_room_is_never_made_by_the_newest_of_a_tier(scene: Scene) -> None:
    plan = scene.plan()
    for tier in NAMES:
        rules = (scene.rules.tiers or {}).get(tier)
        if rules is None or rules.keep is not None:
            continue
        there = [c for c in ranking(scene) if holds(c, tier) and c.attempt in stays(plan)]
        entry = plan.entry(there[0].attempt) if there else None
        assert entry is None or not [drop for drop in entry.drops if drop.tier == tier]


@given(scenes())
def test_the_newest_verified_stays_on_the_tier_that_makes_it_durable(scene: Scene) -> None:
    durable = [tier for tier in scene.tiers if tier.durable_at]
    verified = next((info for info in ranking(scene) if counted_copies(info, durable)), None)
    assume(verified is not None)
    assert verified is not None
    after = {info.attempt: info for info in carry_out(scene.infos, scene.plan())}
    assert counted_copies(after[verified.attempt], durable)
