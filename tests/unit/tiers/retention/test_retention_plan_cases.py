"""What went wrong in other tools (CASES.md, retention), as cases of the pure function."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta

import pytest
from plan_kit import GIB, NOW, NVME, PFS, TIERS, attempt_of, carry_out, checkpoint, policy, steps, why

from tierstore.tiers.checkpoint import CheckpointInfo, IncompleteAttempt
from tierstore.tiers.log_facts import fold
from tierstore.tiers.retention import Reason, evaluate

HOUR_S = 3600.0
DAY_S = 86400.0


def test_case_22_a_limit_of_one_never_ends_with_nothing_and_spares_the_best_and_the_newest() -> None:
    """HF#25129: `save_total_limit=1` with an older best deleted everything."""
    infos = [checkpoint(s, metrics={"loss": loss}) for s, loss in ((1, 0.1), (2, 0.5), (3, 0.9))]
    plan = evaluate(infos, policy({"last": 1}, {"best": {"metric": "loss", "mode": "min"}}), NOW, tiers=TIERS)
    assert steps(plan, "keep") == [1, 3]
    assert steps(evaluate(infos, policy({"steps": [99]}), NOW, tiers=TIERS), "keep") == [3]


def test_case_23_the_order_is_that_of_steps_whatever_the_times_say() -> None:
    """HF#27138, #11769, #11748: the newest went because copying had turned the files' times around."""
    infos = [checkpoint(step, age_s=DAY_S * (10 + step), saved=NOW + timedelta(seconds=step)) for step in range(1, 6)]
    assert steps(evaluate(infos, policy({"last": 2}), NOW), "expire") == [1, 2, 3]


def test_case_25_steps_are_integers() -> None:
    """acc#1163: checkpoint_10 was deleted before checkpoint_9, as text sorts."""
    plan = evaluate([checkpoint(step) for step in range(8, 13)], policy({"last": 2}), NOW)
    assert steps(plan, "keep") == [11, 12]
    assert [entry.attempt.step for entry in plan.entries] == [12, 11, 10, 9, 8]


def test_case_28_what_is_in_flight_takes_no_place() -> None:
    """MB#4678, #5184, #4820: the only durable checkpoint went while newer ones were under way."""
    in_flight = [IncompleteAttempt(attempt=attempt_of(step, NOW), world_size=2, parts={"pfs": (0,)}) for step in (20, 30)]
    plan = evaluate([checkpoint(10)], policy({"last": 1}), NOW, tiers=TIERS, incomplete=in_flight)
    assert (steps(plan, "keep"), plan.deletes) == ([10], 0)
    assert [item.attempt.step for item in plan.incomplete] == [30, 20]


def test_case_28_a_newer_checkpoint_without_a_verified_copy_does_not_cost_the_one_that_has_it() -> None:
    infos = [checkpoint(9), checkpoint(10), checkpoint(20, on=["nvme"])]  # 20 is committed, its copy on pfs was lost
    plan = evaluate(infos, policy({"last": 1}), NOW, tiers=TIERS)
    assert steps(plan, "expire") == [9]
    assert why(plan, 10) == ["newest-verified"]


def test_case_30_a_pinned_step_stays_through_restarts_and_every_nth_is_exempt() -> None:
    """tt#4197, #4420: users need exempt steps; what is staged or abandoned is known."""
    infos = [checkpoint(100, pins=("pin",)), *(checkpoint(step) for step in (150, 200, 250))]
    rules = policy({"last": 1}, {"every": {"steps": 200}})
    for days in (0, 2, 4, 400):  # each time a process that knows nothing but the logs
        plan = evaluate(infos, rules, NOW + timedelta(days=days), tiers=TIERS)
        infos = carry_out(infos, plan)
    assert [info.step for info in infos] == [100, 200, 250]


def test_case_32_the_limit_applies_to_all_kinds_of_checkpoints_and_bytes_stay_bounded_on_every_tier() -> None:
    """PL#11451, diffusers#2466, #3802: `last` or the limit was ignored, and disks filled."""
    infos: list[CheckpointInfo] = []
    rules = policy({"last": 2}, tiers={"nvme": {"keep": [{"last": 1}]}}, gc={"undelete_window": "1h"}, protect={"min_age": "1m"})
    for number in range(20):
        now = NOW + timedelta(hours=2 * number)
        made = checkpoint(
            number, on=["nvme", "pfs"], committed_at=now, attempt=attempt_of(number, now), tags=("t",) * (number % 2), final=number % 3 == 0
        )
        infos.append(made)
        for later in (5, 70):
            infos = carry_out(infos, evaluate(infos, rules, now + timedelta(minutes=later), tiers=TIERS))
        held = {tier: sum(info.nbytes for info in infos if tier in info.replicas) for tier in ("nvme", "pfs")}
        # One that expired waits out its window beside the two that stay.
        assert held["nvme"] <= GIB
        assert held["pfs"] <= 3 * GIB
    assert [info.step for info in infos if info.expired is None] == [18, 19]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_hf_28862_after_a_rewind_the_new_low_steps_are_not_deleted_by_the_old_high_ones(keep: int) -> None:
    """HF#28862: a reused directory: the saves of the new run went, as their steps were lower."""
    old = [checkpoint(step, age_s=10 * DAY_S - step) for step in (60, 70, 80, 90, 100)]
    new = [checkpoint(step, age_s=2 * DAY_S - step) for step in (10, 20, 30)]
    plan = evaluate([*old, *new], policy({"last": keep}), NOW, tiers=TIERS)
    assert steps(plan, "keep") == sorted([100, 90, 80][:keep] + [30, 20, 10][:keep])


def test_pl_a_metric_that_is_nan_is_never_the_best() -> None:
    infos = [checkpoint(step, metrics={"loss": loss}) for step, loss in ((1, math.nan), (2, 0.9), (3, math.nan), (4, math.nan))]
    for mode in ("min", "max"):
        plan = evaluate(infos, policy({"best": {"metric": "loss", "mode": mode}}), NOW)
        assert [reason.text for reason in plan.entries[2].reasons] == ["best loss #1 (0.9)"]
        assert steps(plan, "expire") == [1, 3]


def test_pl_a_metric_that_arrives_late_takes_effect_and_until_then_nothing_goes() -> None:
    infos = [checkpoint(step, metrics={"loss": loss} if loss else {}) for step, loss in ((1, 0.1), (2, 0.0), (3, 0.3))]
    rules = policy({"best": {"metric": "loss", "mode": "min"}})
    assert steps(evaluate(infos, rules, NOW), "expire") == []
    late = [replace(info, metrics={"loss": 0.2}) if info.step == 2 else info for info in infos]
    assert steps(evaluate(late, rules, NOW), "expire") == [2]


def test_a_metric_that_nothing_has_is_told_and_deletes_nothing() -> None:
    infos = [checkpoint(step, metrics={"val/loss": 1.0}) for step in range(3)]
    plan = evaluate(infos, policy({"best": {"metric": "val_loss", "mode": "min"}}), NOW)
    assert plan.deletes == 0
    assert plan.warnings == ("no checkpoint has the metric 'val_loss' that a rule goes by: did you mean 'val/loss'?",)


def test_the_source_of_a_resume_stays_whatever_the_rules_say() -> None:
    infos = [checkpoint(step) for step in range(4)]
    protected = {infos[1].attempt: Reason(kind="resumed-from", text="this run was resumed from it")}
    assert steps(evaluate(infos, policy({"last": 1}), NOW, protected=protected), "keep") == [1, 3]


def test_memory_does_not_fill_with_checkpoints_that_are_too_young_to_delete() -> None:
    """min_age keeps from deletion; from a tier a copy goes as soon as others count."""
    infos = [checkpoint(step, age_s=60.0 * (9 - step), on=["nvme", "pfs"]) for step in range(9)]
    plan = evaluate(infos, policy({"last": 1}, tiers={"nvme": {"keep": [{"last": 2}]}}), NOW, tiers=(NVME, PFS))
    assert plan.deletes == 0
    assert [entry.attempt.step for entry in plan.entries if entry.drops] == [6, 5, 4, 3, 2, 1, 0]


def test_the_log_of_a_checkpoint_that_came_back_protects_it_for_the_time_in_which_it_could_have_been_taken_back() -> None:
    assert fold(()).revived is None
    infos = [checkpoint(1, revived=NOW - timedelta(hours=23)), checkpoint(2, revived=NOW - timedelta(hours=25)), checkpoint(3)]
    assert steps(evaluate(infos, policy({"last": 1}), NOW), "expire") == [2]
