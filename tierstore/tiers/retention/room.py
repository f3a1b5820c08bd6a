"""A tier's limits, and which of them it is over: watermarks, space to keep free, bytes that it may hold. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.config_retention import TierRetention
from tierstore.tiers.retention.facts import TierFacts
from tierstore.units import format_size

__all__ = ["Need", "needs", "unknown_size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A limit that a tier is over: how many bytes have to go, and what it is over, for people."""

    nbytes: int
    text: str


def needs(rules: TierRetention, tier: TierFacts, *, held_nbytes: int, freed_nbytes: int) -> Need | None:
    """The limit that asks most of a tier; None where it is over none.

    Args:
        rules: What the tier's policy says. Watermarks are shares of the tier's capacity or, where it has none, of its disk: above the
            high one begins what ends at the low one. `max_nbytes` is what the run may hold there.
        tier: What is known of it.
        held_nbytes: What the run holds there.
        freed_nbytes: How much of that goes anyway.
    """
    found = []
    if rules.max_nbytes is not None and held_nbytes - freed_nbytes > rules.max_nbytes:
        text = f"{tier.name} holds {format_size(held_nbytes)} of the run, max_bytes is {format_size(rules.max_nbytes)}"
        found.append(Need(nbytes=held_nbytes - freed_nbytes - rules.max_nbytes, text=text))
    evict = rules.evict
    used, total = _use(tier, held_nbytes)
    free = _free(tier, used)
    if evict is not None and evict.min_free_nbytes is not None and free is not None and free + freed_nbytes < evict.min_free_nbytes:
        text = f"{tier.name} has {format_size(max(0, free))} free, min_free is {format_size(evict.min_free_nbytes)}"
        found.append(Need(nbytes=evict.min_free_nbytes - free - freed_nbytes, text=text))
    if evict is not None and evict.high_watermark is not None and evict.low_watermark is not None and total:
        left = used - freed_nbytes
        if left > evict.high_watermark * total:
            text = f"{tier.name} is {used / total:.0%} full, {evict.high_watermark:.0%} is its high watermark"
            found.append(Need(nbytes=left - int(evict.low_watermark * total), text=text))
    return max(found, key=lambda need: need.nbytes, default=None)


def unknown_size(rules: TierRetention, tier: TierFacts) -> bool:
    """Whether the tier's `evict` can't be followed, because neither a capacity nor the size of a disk is known."""
    return rules.evict is not None and tier.reachable and tier.capacity is None and (tier.total_nbytes is None or tier.free_nbytes is None)


def _use(tier: TierFacts, held_nbytes: int) -> tuple[int, int | None]:
    """Bytes used, and what they are a share of."""
    if tier.capacity is not None:
        return held_nbytes if tier.used_nbytes is None else max(tier.used_nbytes, held_nbytes), tier.capacity
    if tier.total_nbytes is not None and tier.free_nbytes is not None:
        return tier.total_nbytes - tier.free_nbytes, tier.total_nbytes
    return held_nbytes, None


def _free(tier: TierFacts, used: int) -> int | None:
    """What is free: of the disk and of the capacity, where both are known the smaller."""
    known = [] if tier.free_nbytes is None else [tier.free_nbytes]
    if tier.capacity is not None:
        known.append(tier.capacity - used)
    return min(known, default=None)
