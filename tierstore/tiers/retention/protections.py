"""What is not deleted whatever the rules say (PROTOCOLS.md §6): pins, holds, the newest, the newest verified, the young. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from tierstore.clock import when_text
from tierstore.config_retention import RetentionConfig
from tierstore.names import Attempt
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.log_facts import Hold
from tierstore.tiers.retention.facts import TierFacts, counted_copies, is_recorded
from tierstore.tiers.retention.plan import Reason
from tierstore.units import format_duration

__all__ = ["RETURNING", "future_dated", "holds_in_force", "of_run", "own"]

RETURNING = frozenset({"pinned", "held", "newest", "newest-verified", "min-keep"})
"""These bring an expired checkpoint back; the others only keep it from being swept."""


def holds_in_force(info: CheckpointInfo, now: datetime, skew_s: float) -> tuple[Hold, ...]:
    """The holds that have not run out, by whichever of two clocks is the later."""
    return tuple(h for h in info.holds if h.until is None or (now - h.until).total_seconds() <= skew_s)


def future_dated(checkpoints: Iterable[CheckpointInfo], now: datetime, skew_s: float) -> frozenset[Attempt]:
    """The checkpoints that were committed later than now, by more than clocks may differ."""
    return frozenset(c.attempt for c in checkpoints if (c.committed_at - now).total_seconds() > skew_s)


def of_run(ranked: Sequence[CheckpointInfo], policy: RetentionConfig, tiers: Sequence[TierFacts]) -> Mapping[Attempt, list[Reason]]:
    """The protections that go by the place in the run.

    The newest is the one with the highest step and, after a rewind, also the one that was saved last. Verified is a checkpoint with
    a counted copy on the tier of `durable_at`; where none has one: with any counted copy. While that tier can't be reached, the newest
    with a recorded copy there stays too: it is the newest durable one for all that is known.
    """
    found: dict[Attempt, list[Reason]] = {}

    def protect(info: CheckpointInfo, kind: str, text: str) -> None:
        found.setdefault(info.attempt, []).append(Reason(kind=kind, text=text))

    if not ranked:
        return found
    by_step = sorted(ranked, key=lambda c: (c.attempt.step, c.attempt.save_id), reverse=True)
    by_saving = sorted(ranked, key=lambda c: c.attempt.save_id, reverse=True)
    protect(by_step[0], "newest", "newest")
    if by_saving[0].attempt != by_step[0].attempt:
        protect(by_saving[0], "newest", "saved last")
    durable = [tier for tier in tiers if tier.durable_at]
    for counting in (durable, tiers):
        verified = [next((c for c in order if counted_copies(c, counting)), None) for order in (by_step, by_saving)]
        if verified[0] is not None and verified[1] is not None:
            protect(verified[0], "newest-verified", "newest verified")
            if verified[1].attempt != verified[0].attempt:
                protect(verified[1], "newest-verified", "verified, saved last")
            break
    for tier in (t for t in durable if not t.reachable):
        first, last = (next((c for c in order if is_recorded(c, tier)), None) for order in (by_step, by_saving))
        for info in (first,) if first is last else (first, last):
            if info is not None:
                protect(info, "newest-verified", f"newest recorded on {tier.name}, which can't be reached")
    for place, info in enumerate(by_step[: policy.protect.min_keep], start=1):
        protect(info, "min-keep", f"min_keep #{place}")
    return found


def own(info: CheckpointInfo, policy: RetentionConfig, now: datetime) -> Iterator[Reason]:
    """The protections that a checkpoint has by itself."""
    skew_s = policy.gc.max_clock_skew_s
    if info.pins:
        named = [name for name in info.pins if name != "pin"]
        yield Reason(kind="pinned", text=f"pinned: {', '.join(named)}" if named else "pinned")
    for hold in holds_in_force(info, now, skew_s):
        until = f" until {when_text(hold.until, now)}" if hold.until else ""
        yield Reason(kind="held", text=f"held: {hold.name}{until}" + (f" ({hold.reason})" if hold.reason else ""))
    age_s = (now - info.committed_at).total_seconds()
    if age_s < -skew_s:
        yield Reason(kind="future", text="dated in the future")
    elif age_s < policy.protect.min_age_s:
        yield Reason(kind="min-age", text=f"younger than {format_duration(policy.protect.min_age_s)}")
    if info.revived is not None and (now - info.revived).total_seconds() < policy.gc.undelete_window_s:
        yield Reason(kind="revived", text=f"taken back, kept for {format_duration(policy.gc.undelete_window_s)}")
