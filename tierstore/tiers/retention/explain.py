"""Every rule's word on one checkpoint: also of the rules that do not keep it, and why not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import tzinfo

from tierstore.config_retention import KeepRule
from tierstore.errors import NotFoundError
from tierstore.names import Attempt
from tierstore.tiers.retention.calendar import zone_of
from tierstore.tiers.retention.plan import Plan, PlanEntry, Reason
from tierstore.tiers.retention.rules import grouped, judge, rule_text, series_of
from tierstore.units import format_some

__all__ = ["Word", "explain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What one rule says: `rule` as a person would name it, `tier` whose rule it is (empty: the store's), `text` why or why not.

    Protections are named by their kind. `matched`: it speaks for keeping the checkpoint there.
    """

    rule: str
    tier: str = ""
    matched: bool
    text: str


def explain(plan: Plan, attempt: Attempt) -> tuple[Word, ...]:
    """The store's rules in the policy's order, then the protections, then the rules of the tiers that hold the checkpoint.

    Raises:
        NotFoundError: The plan has no such checkpoint.
    """
    entry = plan.entry(attempt)
    if entry is None:
        steps = sorted({e.attempt.step for e in plan.entries}, key=lambda step: (abs(step - attempt.step), step))
        hint = f"its plan has steps {format_some(steps, 5)}" if steps else "its plan has no checkpoint"
        raise NotFoundError(f"run {plan.run!r}: there is no checkpoint {attempt.name}", hint=hint, run=plan.run, step=attempt.step)
    zone = zone_of(plan.policy.timezone)
    ranked = [e for e in plan.entries if e.ranked]
    rules = {rule.kind for rule in plan.policy.keep}
    others = [reason for reason in entry.reasons if reason.kind not in rules and reason.kind != "no-rule"]
    return (
        *_words(plan, entry, plan.policy.keep, ranked, zone),
        *(Word(rule=reason.kind, matched=not _speaks_against(reason), text=reason.text) for reason in others),
        *_of_tiers(plan, entry, ranked, zone),
    )


def _speaks_against(reason: Reason) -> bool:
    return reason.kind == "superseded"


def _words(
    plan: Plan, entry: PlanEntry, keep: Iterable[KeepRule], ranked: Sequence[PlanEntry], zone: tzinfo, tier: str = ""
) -> Iterator[Word]:
    if not entry.ranked:
        yield from (Word(rule=rule_text(rule), tier=tier, matched=False, text="it takes no place in the rules") for rule in keep)
        return
    skew_s = plan.policy.gc.max_clock_skew_s
    future = {e.attempt for e in ranked if (e.committed_at - plan.at).total_seconds() > skew_s}
    group = next(group for group in grouped(ranked, plan.policy.group_by) if entry in group)
    series = series_of(group, zone=zone, future=future)
    for rule in keep:
        verdict = judge(rule, series)
        kept = verdict.kept.get(entry.attempt)
        yield Word(rule=verdict.rule, tier=tier, matched=kept is not None, text=verdict.missed(entry) if kept is None else kept)


def _of_tiers(plan: Plan, entry: PlanEntry, ranked: Sequence[PlanEntry], zone: tzinfo) -> Iterator[Word]:
    for tier, rules in (plan.policy.tiers or {}).items():
        if not _on(entry, tier):
            continue
        if rules.keep is not None and entry.stays:
            there = [e for e in ranked if e.stays and _on(e, tier)]
            yield from _words(plan, entry, rules.keep, there, zone, tier)
        for drop in entry.drops:
            if drop.tier == tier:
                text = f"{drop.reason.text}; it stays there: {drop.blocked}" if drop.blocked else drop.reason.text
                yield Word(rule=drop.reason.kind, tier=tier, matched=bool(drop.blocked), text=text)


def _on(entry: PlanEntry, tier: str) -> bool:
    return entry.replicas.get(tier) in ("complete", "receipt", "quantised")
