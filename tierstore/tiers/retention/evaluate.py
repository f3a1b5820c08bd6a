"""From a run's checkpoints and a policy to the plan: every rule's and every protection's reasons, and what follows from them. Pure."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from tierstore.config_retention import KeepRule, RetentionConfig
from tierstore.errors import UsageError
from tierstore.names import Attempt, save_id_time
from tierstore.tiers.checkpoint import CheckpointInfo, IncompleteAttempt
from tierstore.tiers.referrers import kept_text
from tierstore.tiers.retention.calendar import zone_of
from tierstore.tiers.retention.drops import Fate, plan_drops
from tierstore.tiers.retention.facts import TierFacts, counted_copies
from tierstore.tiers.retention.plan import Action, Drop, Plan, PlanEntry, PlanIncomplete, Reason, make_plan
from tierstore.tiers.retention.protections import RETURNING, future_dated, of_run, own
from tierstore.tiers.retention.rules import grouped, judge, series_of
from tierstore.units import format_some

__all__ = ["evaluate"]

_NO_RULE = Reason(kind="no-rule", text="no rule matched")
_UNJUDGED = ("damaged", "authority-lost", "unusable", "successor-unusable")
_WORSE_OFF = ("successor-unusable", "which can't be loaded, or has no copy that counts")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdicts:
    """What speaks for each checkpoint, and `aside`: why one takes no place in the rules."""

    rules: Mapping[Attempt, list[Reason]]
    run: Mapping[Attempt, list[Reason]]
    aside: Mapping[Attempt, Reason]
    protected: Mapping[Attempt, Reason]


def evaluate(
    checkpoints: Sequence[CheckpointInfo],
    policy: RetentionConfig,
    now: datetime,
    *,
    tiers: Sequence[TierFacts] = (),
    protected: Mapping[Attempt, Reason] | None = None,
    incomplete: Sequence[IncompleteAttempt] = (),
    run: str = "",
) -> Plan:
    """Plans the retention of one run. The order of the checkpoints does not matter; it takes O(n log n), 70 µs for each of 100,000.

    Args:
        checkpoints: The committed ones that are not swept, of one run.
        policy: For this run, overrides resolved (`StoreConfig.retention_for`).
        now: Aware UTC time of who plans; it steers policy, never safety.
        tiers: Nearest first. Without them no copy counts and none is dropped.
        protected: What must not be deleted for reasons that the log does not know: leased, resumed from, in flight.
        incomplete: Attempts that are no checkpoints; the plan lists them.
        run: The run's name; needed only where there is no attempt to tell it.

    Raises:
        UsageError: The policy keeps nothing (an empty policy never means "delete all"), the attempts are of several runs or stand
            there twice, or `now` is naive.
    """
    run = _run_of(checkpoints, incomplete, run)
    _check(checkpoints, policy, now, run)
    protected = protected or {}
    ordered = sorted(checkpoints, key=lambda c: (c.attempt.step, c.attempt.save_id), reverse=True)
    future = future_dated(ordered, now, policy.gc.max_clock_skew_s)
    aside = _aside(ordered, tiers)
    ranked = [info for info in ordered if info.attempt not in aside]
    verdicts = _Verdicts(rules=_by_rules(ranked, policy, future), run=of_run(ranked, policy, tiers), aside=aside, protected=protected)
    decided = [(info, *_decide(info, verdicts, policy, now)) for info in ordered]
    fates = [
        Fate(info=info, stays=action in ("keep", "revive"), ranked=info.attempt not in aside, swept=action == "sweep")
        for info, action, _ in decided
        if info.attempt not in aside or aside[info.attempt].kind not in _UNJUDGED
    ]
    drops, notes = plan_drops(
        fates,
        policy,
        tiers=tiers,
        now=now,
        zone=zone_of(policy.timezone),
        future=future,
        protected=protected,
        verified={attempt for attempt, reasons in verdicts.run.items() if any(r.kind == "newest-verified" for r in reasons)},
    )
    named = {rule.best.metric for rule in _all_rules(policy) if rule.best is not None}
    return make_plan(
        run=run,
        at=now.astimezone(timezone.utc),
        policy=policy,
        entries=tuple(
            _entry(info, action, reasons, drops.get(info.attempt, ()), policy, now, named, info.attempt not in aside)
            for info, action, reasons in decided
        ),
        incomplete=tuple(_incomplete(item, policy, protected) for item in sorted(incomplete, key=lambda i: i.attempt, reverse=True)),
        warnings=(*_metric_warnings(ordered, named), *_other_warnings(ordered, future), *notes),
    )


def _run_of(checkpoints: Sequence[CheckpointInfo], incomplete: Sequence[IncompleteAttempt], run: str) -> str:
    runs = sorted({c.attempt.run for c in checkpoints} | {i.attempt.run for i in incomplete} | ({run} if run else set()))
    if len(runs) > 1:
        raise UsageError(f"a plan is of one run, not of {format_some(runs, 5)}", hint="plan each run by itself, with its own policy")
    return runs[0] if runs else ""


def _check(checkpoints: Sequence[CheckpointInfo], policy: RetentionConfig, now: datetime, run: str) -> None:
    empty = [f"tiers.{name}.keep" for name, rules in (policy.tiers or {}).items() if rules.keep is not None and not rules.keep]
    if not policy.keep or empty:
        raise UsageError(
            f"run {run!r}: retention.{'keep' if not policy.keep else empty[0]} is empty; an empty policy does not mean 'delete all'",
            hint="give at least one rule, e.g. {last: 5}; without a policy nothing is deleted",
            run=run,
        )
    if now.tzinfo is None:
        raise UsageError("the time of a plan is aware", hint="pass clock.now(), or datetime.now(timezone.utc)", run=run)
    if len({c.attempt for c in checkpoints}) < len(checkpoints):
        raise UsageError(f"run {run!r}: an attempt is given twice", hint="pass the catalog's checkpoints once", run=run)


def _aside(ordered: Sequence[CheckpointInfo], tiers: Sequence[TierFacts]) -> dict[Attempt, Reason]:
    """Those that take no place in the rules: what can't be read or used, and what a later attempt at the same step replaced.

    A superseded attempt only goes while the attempt that replaced it can be loaded, and is not worse off in counted copies.
    """
    aside: dict[Attempt, Reason] = {}
    winners: dict[int, CheckpointInfo] = {}
    for info in ordered:  # newest first: of one step the latest attempt comes first
        if info.damaged:
            aside[info.attempt] = Reason(kind="damaged", text="a record of its log can't be read: `tierstore verify` tells which")
        elif info.authority_lost:
            aside[info.attempt] = Reason(kind="authority-lost", text="the authority has lost its log: `tierstore recover` rebuilds it")
        elif not info.superseded:
            winners.setdefault(info.step, info)
    for info in ordered:
        if info.attempt in aside:
            continue
        winner = winners.get(info.step) if info.superseded else None
        if winner is not None and winner.attempt > info.attempt:
            kind, note = ("superseded", "a later attempt at this step") if _replaces(winner, info, tiers) else _WORSE_OFF
            aside[info.attempt] = Reason(kind=kind, text=f"superseded by {winner.attempt.save_id}, {note}")
        elif not info.usable:
            aside[info.attempt] = Reason(kind="unusable", text="no tier that was reached has a complete copy")
    return aside


def _replaces(winner: CheckpointInfo, info: CheckpointInfo, tiers: Sequence[TierFacts]) -> bool:
    return winner.usable and (bool(counted_copies(winner, tiers)) or not counted_copies(info, tiers))


def _by_rules(ranked: Sequence[CheckpointInfo], policy: RetentionConfig, future: Collection[Attempt]) -> dict[Attempt, list[Reason]]:
    found: dict[Attempt, list[Reason]] = {}
    zone = zone_of(policy.timezone)
    for group in grouped(ranked, policy.group_by):
        series = series_of(group, zone=zone, future=future)
        for rule in policy.keep:
            verdict = judge(rule, series)
            for attempt, text in verdict.kept.items():
                found.setdefault(attempt, []).append(Reason(kind=verdict.kind, text=text))
    return found


def _decide(info: CheckpointInfo, verdicts: _Verdicts, policy: RetentionConfig, now: datetime) -> tuple[Action, tuple[Reason, ...]]:
    attempt = info.attempt
    matched = verdicts.rules.get(attempt, [])
    for_it = [*matched, *own(info, policy, now), *verdicts.run.get(attempt, ())]
    if attempt in verdicts.protected:
        for_it.append(verdicts.protected[attempt])
    aside = verdicts.aside.get(attempt)
    against = [_NO_RULE] if aside is None else [aside] if aside.kind not in _UNJUDGED else []
    if aside is not None and aside.kind in _UNJUDGED:
        for_it.append(aside)
    if info.expired is None:
        if not for_it:
            return "expire", tuple(against)
        return "keep", tuple(for_it) if aside is None else (*for_it, *against)
    if matched or any(reason.kind in RETURNING for reason in for_it):
        return "revive", tuple(for_it)
    due = (now - info.expired.not_before).total_seconds() >= policy.gc.max_clock_skew_s
    return "sweep" if due and not for_it else "expired", (*against, *for_it)


def _entry(
    info: CheckpointInfo,
    action: Action,
    reasons: tuple[Reason, ...],
    drops: Sequence[Drop],
    policy: RetentionConfig,
    now: datetime,
    named: Collection[str],
    ranked: bool,
) -> PlanEntry:
    not_before = None
    if action == "expire":
        not_before = now.astimezone(timezone.utc) + timedelta(seconds=policy.gc.undelete_window_s)
    elif action in ("expired", "sweep") and info.expired is not None:
        not_before = info.expired.not_before
    if info.serves and action in ("expire", "expired", "sweep"):
        reasons = (*reasons, Reason(kind="serves", text=kept_text(info.serves)))
    return PlanEntry(
        attempt=info.attempt,
        committed_at=info.committed_at,
        nbytes=info.nbytes,
        replicas=info.replicas,
        action=action,
        reasons=reasons,
        drops=tuple(drops),
        not_before=not_before,
        metrics={name: value for name, value in info.metrics.items() if name in named},
        tags=info.tags,
        final=info.final,
        ranked=ranked,
        taken=info.taken,
    )


def _incomplete(item: IncompleteAttempt, policy: RetentionConfig, protected: Mapping[Attempt, Reason]) -> PlanIncomplete:
    """An attempt that is open becomes an orphan; one that is condemned, unreadable, spoken for or complete does not."""
    missing, why = item.missing, protected.get(item.attempt)
    orphan_at: datetime | None = None
    if item.unreadable:
        note = f"its commit record can't be read: {item.unreadable}"
    elif item.condemned:
        note = f"condemned: {item.condemned}"
    elif why is not None:
        note = why.text
    elif missing == ():
        note = "all parts are there: `tierstore recover` finishes it"
    else:
        note = f"rank {format_some(missing, 5)} missing" if missing else "nothing tells how many ranks it has"
        with contextlib.suppress(OverflowError):  # a save id of the year 9999
            orphan_at = save_id_time(item.attempt.save_id) + timedelta(seconds=policy.gc.orphan_grace_s)
    return PlanIncomplete(attempt=item.attempt, missing=missing, orphan_at=orphan_at, note=note)


def _metric_warnings(ordered: Sequence[CheckpointInfo], named: Collection[str]) -> Iterator[str]:
    """A rule whose metric no checkpoint has: a slip of the pen more often than a metric that is late."""
    if not ordered:
        return
    known = sorted({name for info in ordered for name in info.metrics})
    for metric in sorted(set(named) - set(known)):
        near = difflib.get_close_matches(metric, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {format_some(known, 5)}" if known else "none has any metric"
        yield f"no checkpoint has the metric {metric!r} that a rule goes by: {hint}"


def _other_warnings(ordered: Sequence[CheckpointInfo], future: Collection[Attempt]) -> Iterator[str]:
    steps = [info.step for info in ordered if info.attempt in future]
    if steps:
        yield f"dated in the future, so kept and left out of within and the calendar rules: step {format_some(steps, 5)}"
    steps = [info.step for info in ordered if info.damaged]
    if steps:
        yield f"a record of the log can't be read: step {format_some(steps, 5)}"


def _all_rules(policy: RetentionConfig) -> Iterator[KeepRule]:
    yield from policy.keep
    for rules in (policy.tiers or {}).values():
        yield from rules.keep or ()
