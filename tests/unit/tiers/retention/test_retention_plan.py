"""The plan as a value: its id and JSON, every rule's word, what is refused, overrides, and that it grows with n log n."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from plan_kit import GIB, GOLDEN, NOW, NVME, OBJECT, PFS, TIERS, attempt_of, checkpoint, golden_plan, policy, steps

from tierstore.config import load_config
from tierstore.config_retention import EvictConfig, RetentionConfig, TierRetention
from tierstore.errors import FormatError, NotFoundError, UsageError
from tierstore.names import Attempt
from tierstore.storage.posix import PosixStorage
from tierstore.tiers.checkpoint import IncompleteAttempt
from tierstore.tiers.retention import Plan, Word, counted_copies, evaluate, explain, plan_from_json, tier_facts
from tierstore.tiers.retention.calendar import period_of, zone_of
from tierstore.tiers.retention.facts import held_nbytes
from tierstore.tiers.retention.room import needs
from tierstore.tiers.retention.rules import judge, series_of
from tierstore.tiers.tier import Tier, Tiers

# The plan and its JSON


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda p: p.stem)
def test_a_plan_survives_its_json(path: Path) -> None:
    plan = golden_plan(path)
    again = plan_from_json(plan.to_json())
    assert again.to_json() == plan.to_json()
    assert [(e.action, e.reasons, e.drops, e.not_before, e.ranked) for e in again.entries] == [
        (e.action, e.reasons, e.drops, e.not_before, e.ranked) for e in plan.entries
    ]
    assert (again.incomplete, again.warnings, again.policy) == (plan.incomplete, plan.warnings, plan.policy)


def test_the_same_input_in_any_order_gives_the_same_bytes() -> None:
    infos = [checkpoint(step, metrics={"loss": step % 7}, tags=("a",) * (step % 2)) for step in range(40)]
    rules = policy({"last": 3}, {"best": {"metric": "loss", "mode": "min", "count": 4}}, {"daily": 2}, group_by=["run", "tags"])
    texts = set()
    for seed in range(10):
        random.Random(seed).shuffle(infos)
        texts.add(evaluate(infos, rules, NOW, tiers=TIERS).to_json())
    assert len(texts) == 1


def test_another_decision_policy_or_time_has_another_id() -> None:
    infos = [checkpoint(step) for step in range(4)]
    plans = [
        evaluate(infos, policy({"last": 1}), NOW),
        evaluate(infos, policy({"last": 2}), NOW),
        evaluate(infos, policy({"last": 1}), NOW + timedelta(seconds=1)),
        evaluate([*infos[:3], replace(infos[3], pins=("pin",))], policy({"last": 1}), NOW),
        evaluate(infos, policy({"last": 1}), NOW, tiers=TIERS),
    ]
    assert len({plan.id for plan in plans}) == 5
    assert plans[0].id == evaluate(infos, policy({"last": 1}), NOW).id


def _changed(text: str, change: Mapping[str, object]) -> str:
    return json.dumps({**json.loads(text), **change})


@pytest.mark.parametrize("change", [{"run": "other"}, {"entries": []}, {"plan": 2}, {"at": "soon"}, {"policy": {}}, {"id": "x"}])
def test_a_plan_that_was_changed_is_refused(change: Mapping[str, object]) -> None:
    text = golden_plan(GOLDEN / "example.txt").to_json()
    assert plan_from_json(_changed(text, {})).to_json() == text
    with pytest.raises(FormatError):
        plan_from_json(_changed(text, change))
    for broken in ("", "[]", "null", "{}", text[:-5]):
        with pytest.raises(FormatError):
            plan_from_json(broken)


# What is refused


@pytest.mark.parametrize("field", ["keep", "tiers"])
def test_an_empty_policy_never_means_delete_all(field: str) -> None:
    empty = {"keep": {"keep": ()}, "tiers": {"tiers": {"nvme": TierRetention.model_construct(keep=())}}}[field]
    with pytest.raises(UsageError, match="does not mean 'delete all'"):
        evaluate([checkpoint(1), checkpoint(2)], policy({"last": 1}).model_copy(update=empty), NOW, tiers=TIERS)


def test_a_plan_is_of_one_run_at_an_aware_time_and_each_attempt_stands_there_once() -> None:
    one = checkpoint(1)
    for infos, now, run in (
        ([one, checkpoint(2, run="other")], NOW, ""),
        ([one], NOW, "other"),
        ([one], NOW.replace(tzinfo=None), ""),
        ([one, one], NOW, ""),
    ):
        with pytest.raises(UsageError):
            evaluate(infos, policy({"last": 1}), now, run=run)


def test_nothing_comes_to_an_empty_plan_of_the_run_that_was_named() -> None:
    plan = evaluate([], policy({"best": {"metric": "x", "mode": "min"}}), NOW, tiers=TIERS, run="new")
    assert (plan.run, plan.entries, plan.warnings) == ("new", (), ())
    alone = IncompleteAttempt(attempt=attempt_of(1, NOW, run="begun"))
    assert evaluate([], policy({"last": 1}), NOW, incomplete=[alone]).run == "begun"


# Every rule's word


def _words(plan: Plan, step: int) -> list[tuple[str, bool, str]]:
    entry = next(e for e in plan.entries if e.attempt.step == step)
    return [(f"{w.tier}: {w.rule}" if w.tier else w.rule, w.matched, w.text) for w in explain(plan, entry.attempt)]


def test_explain_tells_why_each_rule_does_not_keep_it() -> None:
    infos = [checkpoint(step, age_s=3600.0 * 10 * (20 - step), metrics={"loss": float(step)}, tags=("t",)) for step in range(20)]
    rules = policy(
        {"last": 2},
        {"every": {"steps": 7}},
        {"within": "12h"},
        {"daily": 2},
        {"weekly": 1},
        {"best": {"metric": "loss", "mode": "min", "count": 3}},
        {"steps": [1, 2]},
        {"tags": ["release/*"]},
        {"final": True},
    )
    plan = plan_from_json(evaluate(infos, rules, NOW).to_json())  # explained from the plan alone
    assert _words(plan, 10) == [
        ("last 2", False, "it is #10"),
        ("every 7", False, "10 is no multiple of 7"),
        ("within 12h", False, "it is 3d18h older than the newest, step 19"),
        ("daily 2", False, "step 11 stands for 2026-11-25"),
        ("weekly 1", False, "step 19 stands for 2026-W48"),
        ("best loss (min) 3", False, "it is #11 of 20 (10)"),
        ("steps 1, 2", False, "10 is not among them"),
        ("tags release/*", False, "none of its tags matches (t)"),
        ("final", False, "it was not saved as the final one"),
    ]
    assert _words(plan, 11)[3] == ("daily 2", False, "2026-11-25 is #5 of the periods that have one")
    assert _words(plan, 14)[1] == ("every 7", True, "every 7")
    assert ("newest", True, "newest") in _words(plan, 19)


def test_explain_tells_of_rewinds_futures_groups_and_of_what_takes_no_place() -> None:
    infos = [checkpoint(step, age_s=7200.0 - step) for step in range(5)]
    late = checkpoint(9, age_s=-9000.0, saved=NOW - timedelta(days=9))
    gone = checkpoint(7, on=[])
    plan = evaluate([*infos, late, gone], policy({"last": 1}, {"within": "1s"}, {"hourly": 1}), NOW)
    assert _words(plan, 3)[0] == ("last 1", False, "it is #3 by step and #2 by time of saving")
    assert _words(plan, 9)[1:3] == [("within 1s", False, "it is dated in the future"), ("hourly 1", False, "it is dated in the future")]
    assert _words(plan, 7)[0] == ("last 1", False, "it takes no place in the rules")
    assert _words(plan, 7)[-1][0] == "unusable"
    by_tags = evaluate([replace(infos[0], tags=("x",)), infos[1], infos[2]], policy({"last": 1}, group_by=["run", "tags"]), NOW)
    assert _words(by_tags, 1)[0] == ("last 1", False, "it is #2")


def test_explain_tells_what_the_tiers_say() -> None:
    plan = golden_plan(GOLDEN / "drops.txt")
    assert ("nvme: last 2", False, "it is #15") in _words(plan, 1)
    assert ("nvme: tier-rule", False, "nvme keeps last 2") in _words(plan, 1)
    assert ("nvme: tier-rule", True, "nvme keeps last 2; it stays there: pfs does not have it yet") in _words(plan, 5)
    assert ("nvme: last 2", True, "last #1") in _words(plan, 16)
    superseded = golden_plan(GOLDEN / "superseded.txt")
    old = next(e for e in superseded.entries if e.action == "expire")
    assert [(w.rule, w.matched) for w in explain(superseded, old.attempt)] == [("every 1", False), ("superseded", False)]


def test_explain_refuses_what_the_plan_does_not_have_and_names_the_nearest() -> None:
    plan = golden_plan(GOLDEN / "example.txt")
    with pytest.raises(NotFoundError, match="12000, 11500"):
        explain(plan, attempt_of(12001, NOW))
    assert all(isinstance(word, Word) for entry in plan.entries for word in explain(plan, entry.attempt))


# Overrides, time zones, copies, room


def test_an_override_decides_for_the_runs_that_it_matches() -> None:
    config = load_config(
        {
            "tiers": ["/a"],
            "retention": {"keep": [{"last": 3}]},
            "overrides": [{"match": {"run": "debug/*"}, "retention": {"keep": [{"last": 1}]}}],
        },
        env={},
    )
    for run, kept in (("debug/x", [4]), ("sft", [2, 3, 4])):
        rules = config.retention_for(run)
        assert rules is not None
        assert steps(evaluate([checkpoint(step, run=run) for step in range(5)], rules, NOW), "keep") == kept


@pytest.mark.parametrize(
    ("kind", "zone", "at", "period"),
    [
        ("daily", "UTC", "2026-11-29T23:59:59+00:00", "2026-11-29"),
        ("daily", "Asia/Tokyo", "2026-11-29T15:00:00+00:00", "2026-11-30"),
        ("daily", "America/Los_Angeles", "2026-11-29T07:59:59+00:00", "2026-11-28"),
        ("hourly", "Europe/Berlin", "2026-03-29T00:59:00+00:00", "2026-03-29 01h"),
        ("hourly", "Europe/Berlin", "2026-03-29T01:00:00+00:00", "2026-03-29 03h"),  # 02h does not exist
        ("hourly", "Europe/Berlin", "2026-10-25T00:59:00+00:00", "2026-10-25 02h"),
        ("hourly", "Europe/Berlin", "2026-10-25T01:00:00+00:00", "2026-10-25 02h again"),
        ("hourly", "Australia/Lord_Howe", "2026-04-04T15:10:00+00:00", "2026-04-05 01h again"),  # put back by half an hour
        ("hourly", "Asia/Kolkata", "2026-11-29T12:29:00+00:00", "2026-11-29 17h"),
        ("daily", "Pacific/Apia", "2011-12-30T09:59:00+00:00", "2011-12-29"),
        ("daily", "Pacific/Apia", "2011-12-30T10:00:00+00:00", "2011-12-31"),  # a day that never was
        ("weekly", "UTC", "2027-01-03T00:00:00+00:00", "2026-W53"),
        ("weekly", "UTC", "2025-12-29T00:00:00+00:00", "2026-W01"),
        ("monthly", "Asia/Tokyo", "2026-10-31T15:00:00+00:00", "2026-11"),
        ("yearly", "America/Los_Angeles", "2026-01-01T07:00:00+00:00", "2025"),
        ("daily", "America/Los_Angeles", "0001-01-01T00:00:00+00:00", "0001-01-01"),
    ],
)
def test_a_period_is_what_the_clock_on_the_wall_shows(kind: str, zone: str, at: str, period: str) -> None:
    assert period_of(datetime.fromisoformat(at), kind, zone_of(zone)) == period  # type: ignore[arg-type]


def test_a_copy_counts_if_it_lasts_is_recorded_is_sound_and_was_seen() -> None:
    info = checkpoint(1, on=["nvme", "pfs", "object"], replicated={"nvme": {}, "object": {}})
    assert counted_copies(info, TIERS) == ("pfs", "object")  # the authority's needs no record; a node's disk does not last
    assert counted_copies(info, (replace(PFS, durable=False), OBJECT)) == ("object",)
    assert counted_copies(info, (PFS, replace(OBJECT, reachable=False))) == ("pfs",)
    assert counted_copies(replace(info, replicated={}), TIERS) == ("pfs",)
    assert counted_copies(replace(info, dropped=frozenset({"pfs"})), TIERS) == ("object",)
    assert counted_copies(replace(info, quarantined=frozenset({("pfs", "a")})), TIERS) == ("object",)
    assert counted_copies(replace(info, replicas={"pfs": "partial", "object": "receipt"}), TIERS) == ()


def test_a_node_holds_its_share_of_the_bytes() -> None:
    info = checkpoint(1, replicas={"nvme": "receipt", "pfs": "complete"}, receipts={"nvme": (0, 1)}, world_size=8, nbytes=801)
    assert (held_nbytes(info, "nvme"), held_nbytes(info, "pfs")) == (201, 801)


def test_the_facts_of_tiers_are_those_of_the_configuration(tmp_path: Path) -> None:
    made = [
        Tier(name=name, storage=PosixStorage(tmp_path / name, durable=False), scope=scope, durable=durable, capacity=capacity)
        for name, scope, durable, capacity in (("m", "node", False, 7), ("pfs", "shared", True, None), ("far", "shared", True, None))
    ]
    facts = tier_facts(Tiers(tiers=tuple(made), authority=made[1], durable_at=made[2], store_id="x"))
    assert [(f.name, f.staging, f.authority, f.durable_at, f.durable, f.capacity) for f in facts] == [
        ("m", True, False, False, False, 7),
        ("pfs", False, True, False, True, None),
        ("far", False, False, True, True, None),
    ]


def test_how_much_has_to_go() -> None:
    marks = TierRetention(evict=EvictConfig(high_watermark=0.8, low_watermark=0.5))
    disk = replace(PFS, total_nbytes=100, free_nbytes=15)
    free = TierRetention(evict=EvictConfig(min_free_nbytes=30))
    for rules, tier, held, freed, wanted in (
        (marks, replace(NVME, capacity=100), 80, 0, None),
        (marks, replace(NVME, capacity=100), 81, 0, 31),
        (marks, replace(NVME, capacity=100), 81, 1, None),
        (marks, replace(NVME, capacity=100, used_nbytes=90), 20, 0, 40),  # other runs are there too
        (marks, disk, 20, 0, 35),
        (marks, replace(PFS, total_nbytes=100), 99, 0, None),  # nothing tells how full it is
        (free, disk, 20, 0, 15),
        (free, disk, 20, 15, None),
        (free, replace(disk, capacity=100, used_nbytes=90), 20, 0, 20),  # the capacity is tighter than the disk
        (TierRetention(max_nbytes=10), disk, 20, 4, 6),
        (TierRetention(max_nbytes=16), disk, 20, 4, None),
        (TierRetention(max_nbytes=19, evict=free.evict), disk, 20, 0, 15),
    ):
        need = needs(rules, tier, held_nbytes=held, freed_nbytes=freed)
        assert (need.nbytes if need else None) == wanted, (rules, tier, held, freed)


# Size


class CountingAttempt:
    """A candidate that counts how often it is looked at."""

    looks = 0

    def __init__(self, step: int) -> None:
        self._attempt = attempt_of(step, NOW - timedelta(days=300) + timedelta(minutes=step))
        self.committed_at = NOW - timedelta(days=300) + timedelta(minutes=step)
        self.metrics = {"loss": float(step % 997)}
        self.tags = ("a",)
        self.final = False

    @property
    def attempt(self) -> Attempt:
        CountingAttempt.looks += 1
        return self._attempt


ALL_RULES = policy(
    {"last": 100},
    {"every": {"steps": 1000}},
    {"within": "12h"},
    {"hourly": 100},
    {"daily": 7},
    {"weekly": 5},
    {"monthly": 12},
    {"yearly": 3},
    {"best": {"metric": "loss", "mode": "min", "count": 100}},
    {"steps": [0, 1000]},
    {"tags": ["release/*"]},
    {"final": True},
    timezone="Europe/Berlin",
    tiers={"nvme": {"keep": [{"last": 2}], "max_bytes": "10GiB"}, "pfs": {"keep": [{"last": 100}]}},
)


def test_the_rules_look_at_each_checkpoint_a_fixed_number_of_times() -> None:
    looks = {}
    for count in (1000, 4000):
        candidates = [CountingAttempt(step) for step in range(count)]
        CountingAttempt.looks = 0
        series = series_of(candidates, zone=timezone.utc, future=())
        for rule in ALL_RULES.keep:
            judge(rule, series)
        looks[count] = CountingAttempt.looks / count
    assert looks[4000] <= looks[1000] <= 20


def test_twenty_thousand_checkpoints_are_planned() -> None:
    infos = [checkpoint(step, metrics={"loss": float(step % 997)}, nbytes=GIB) for step in range(20_000)]
    plan = evaluate(infos, ALL_RULES, NOW, tiers=TIERS)
    assert len(plan.entries) == 20_000
    assert 19_000 < plan.deletes < 20_000
    assert isinstance(plan.policy, RetentionConfig)
