"""Which tiers' copies go while their checkpoints stay, and what stands in the way (PROTOCOLS.md §5: never the last copies). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, tzinfo

from tierstore.config_retention import KeepRule, RetentionConfig, TierRetention
from tierstore.names import Attempt
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.retention.facts import TierFacts, counted_copies, freed_nbytes, held_nbytes, holds
from tierstore.tiers.retention.plan import Drop, Reason
from tierstore.tiers.retention.protections import holds_in_force
from tierstore.tiers.retention.room import needs, unknown_size
from tierstore.tiers.retention.rules import grouped, judge, rule_text, series_of
from tierstore.units import format_size

__all__ = ["Fate", "plan_drops"]

_BLOCKING = ("leased", "in-flight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """A checkpoint of which copies may go: whether it stays, whether it ranks, and whether it is freed everywhere by this plan."""

    info: CheckpointInfo
    stays: bool
    ranked: bool
    swept: bool = False


@dataclass(slots=True, kw_only=True)
class _Work:
    """What has been planned so far: tiers that drop a checkpoint can't be leaned on by the next one."""

    policy: RetentionConfig
    tiers: Sequence[TierFacts]
    now: datetime
    zone: tzinfo
    future: Collection[Attempt]
    protected: Mapping[Attempt, Reason]
    verified: Collection[Attempt]
    gone: dict[Attempt, set[str]] = field(default_factory=dict)
    drops: dict[Attempt, list[Drop]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def plan_drops(
    fates: Sequence[Fate],
    policy: RetentionConfig,
    *,
    tiers: Sequence[TierFacts],
    now: datetime,
    zone: tzinfo,
    future: Collection[Attempt],
    protected: Mapping[Attempt, Reason],
    verified: Collection[Attempt],
) -> tuple[Mapping[Attempt, list[Drop]], list[str]]:
    """The drops of each checkpoint, nearest tier first, and warnings about tiers that stay over their limits.

    `verified` are the newest verified checkpoints: they stay on the tier of `durable_at`, or others would become the newest verified.
    """
    work = _Work(policy=policy, tiers=tiers, now=now, zone=zone, future=future, protected=protected, verified=verified)
    for number, tier in enumerate(tiers):
        rules = (policy.tiers or {}).get(tier.name)
        if rules is not None:
            there = [fate for fate in fates if holds(fate.info, tier.name)]
            _of_tier(work, number, rules, there)
    return work.drops, work.warnings


def _of_tier(work: _Work, number: int, rules: TierRetention, there: Sequence[Fate]) -> None:
    tier = work.tiers[number]
    kept = _kept(work, rules.keep, there)
    held = sum(held_nbytes(fate.info, tier.name) for fate in there)
    freed = sum(freed_nbytes(fate.info, tier.name) for fate in there if fate.swept)
    wanted = Reason(kind="tier-rule", text=f"{tier.name} keeps {', '.join(rule_text(rule) for rule in rules.keep or ())}")
    hidden = Reason(kind="hidden", text=f"it goes: {tier.name} does not wait for it")
    rest = []
    for fate in there:
        if fate.swept:
            continue
        if fate.stays and (rules.keep is None or fate.info.attempt in kept):
            rest.append(fate)
        else:
            freed += _drop(work, number, fate, wanted if fate.stays else hidden)
    freed += _make_room(work, number, rules, rest, held=held, freed=freed)
    if (over := needs(rules, tier, held_nbytes=held, freed_nbytes=freed)) is not None:
        work.warnings.append(
            f"tier {tier.name} stays over its limit: {over.text}; {format_size(over.nbytes)} more would have to go, "
            "but what is left there is protected, or has too few copies elsewhere"
        )
    if unknown_size(rules, tier):
        work.warnings.append(
            f"tier {tier.name}: nothing tells how large it is, so its evict limits can't be followed: give it a capacity, or use max_bytes"
        )


def _kept(work: _Work, keep: Sequence[KeepRule] | None, there: Iterable[Fate]) -> set[Attempt]:
    """What the tier's own rules keep, of the checkpoints that it has and that stay."""
    kept: set[Attempt] = set()
    for group in grouped((fate.info for fate in there if fate.stays and fate.ranked), work.policy.group_by):
        series = series_of(group, zone=work.zone, future=work.future)
        for rule in keep or ():
            kept.update(judge(rule, series).kept)
    return kept


def _make_room(work: _Work, number: int, rules: TierRetention, rest: Sequence[Fate], *, held: int, freed: int) -> int:
    """Drops the oldest until no limit is left that the tier is over; returns the bytes that this frees.

    The newest on the tier stays: the highest step, and after a rewind also the latest save.
    """
    tier = work.tiers[number]
    need = needs(rules, tier, held_nbytes=held, freed_nbytes=freed)
    if need is None or not rest:
        return 0
    reason = Reason(kind="room", text=need.text)
    newest = {max(rest, key=_step).info.attempt, max(rest, key=_saving).info.attempt}
    gained = 0
    for fate in sorted(rest, key=_saving):
        if gained >= need.nbytes:
            break
        if fate.info.attempt not in newest and tier.name not in fate.info.serves:  # that would make no room
            gained += _drop(work, number, fate, reason)
    return gained


def _step(fate: Fate) -> tuple[int, str]:
    return fate.info.attempt.step, fate.info.attempt.save_id


def _saving(fate: Fate) -> str:
    return fate.info.attempt.save_id


def _drop(work: _Work, number: int, fate: Fate, reason: Reason) -> int:
    """Plans one drop, or writes down what blocks it; returns the bytes that it frees."""
    info, tier = fate.info, work.tiers[number]
    gone = work.gone.setdefault(info.attempt, set())
    copies = tuple(name for name in counted_copies(info, work.tiers) if name != tier.name and name not in gone)
    blocked = "; ".join(_blocks(work, number, fate, copies))
    nbytes = freed_nbytes(info, tier.name)
    drop = Drop(tier=tier.name, reason=reason, copies=copies, blocked=blocked, nbytes=nbytes)
    work.drops.setdefault(info.attempt, []).append(drop)
    if blocked:
        return 0
    gone.add(tier.name)
    return nbytes


def _blocks(work: _Work, number: int, fate: Fate, copies: Sequence[str]) -> Iterable[str]:
    info, least = fate.info, work.policy.protect.min_copies
    if held := holds_in_force(info, work.now, work.policy.gc.max_clock_skew_s):
        yield f"held: {', '.join(hold.name for hold in held)}"
    why = work.protected.get(info.attempt)
    if why is not None and why.kind in _BLOCKING:
        yield why.text
    if work.tiers[number].durable_at and info.attempt in work.verified:
        yield f"the newest verified checkpoint stays on {work.tiers[number].name}"
    if len(copies) < least:
        yield f"{len(copies) or 'no'} counted {'copy' if len(copies) < 2 else 'copies'} elsewhere, min_copies is {least}"
    # What is hidden is copied nowhere any more, so it is not waited for on the next tier.
    if fate.stays and number + 1 < len(work.tiers):
        further = work.tiers[number + 1]
        if not holds(info, further.name) and further.name not in info.dropped:
            yield f"{further.name} does not have it yet" if further.reachable else f"{further.name} can't be reached"
