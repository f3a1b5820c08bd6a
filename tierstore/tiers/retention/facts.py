"""What the rules know of the tiers, and which copies of a checkpoint count (PROTOCOLS.md §5). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.tier import Scope, Tiers
from tierstore.tiers.view import staging

__all__ = ["TierFacts", "counted_copies", "freed_nbytes", "held_nbytes", "holds", "is_recorded", "tier_facts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFacts:
    """One tier as the plan sees it; sizes in bytes, None where unknown.

    Attributes:
        durable: It survives a power loss.
        authority: Its log decides.
        staging: It stands before the authority: a node's disk, whose copy is not one that lasts.
        durable_at: A counted copy here makes a checkpoint durable.
        capacity: How much it may hold, as configured.
        used_nbytes: What it holds of its capacity, of all runs; None: only the run that is planned is counted.
        total_nbytes: The size of its disk.
        free_nbytes: What is free of that.
        reachable: It answered.
    """

    name: str
    scope: Scope = "shared"
    durable: bool = True
    authority: bool = False
    staging: bool = False
    durable_at: bool = False
    capacity: int | None = None
    used_nbytes: int | None = None
    total_nbytes: int | None = None
    free_nbytes: int | None = None
    reachable: bool = True


def tier_facts(tiers: Tiers) -> tuple[TierFacts, ...]:
    """The facts that the configuration tells, nearest first; what a disk says of its space is for the caller to add."""
    nodes = {tier.name for tier in staging(tiers)}
    return tuple(
        TierFacts(
            name=tier.name,
            scope=tier.scope,
            durable=tier.durable,
            authority=tiers.is_authority(tier),
            staging=tier.name in nodes,
            durable_at=tier.name == tiers.durable_at.name,
            capacity=tier.capacity,
            reachable=tier.name not in tiers.outages,
        )
        for tier in tiers
    )


def counted_copies(info: CheckpointInfo, tiers: Sequence[TierFacts]) -> tuple[str, ...]:
    """The tiers whose copy counts against losing the checkpoint, nearest first: durable, recorded, undamaged, and seen just now."""
    return tuple(tier.name for tier in tiers if _counts(info, tier))


def is_recorded(info: CheckpointInfo, tier: TierFacts) -> bool:
    """Whether the log gives the tier an exact copy that would count; whether it is there is another matter."""
    return (
        tier.durable
        and not tier.staging
        and (tier.authority or tier.name in info.replicated)
        and tier.name not in info.dropped
        and info.quantised_on(tier.name) is None
        and all(name != tier.name for name, _ in info.quarantined)
    )


def _counts(info: CheckpointInfo, tier: TierFacts) -> bool:
    return tier.reachable and is_recorded(info, tier) and info.replicas.get(tier.name) == "complete"


def holds(info: CheckpointInfo, tier: str) -> bool:
    """Whether the tier has the checkpoint, or a node's share of it, to lose."""
    return tier not in info.dropped and info.replicas.get(tier) in ("complete", "receipt", "quantised")


def freed_nbytes(info: CheckpointInfo, tier: str) -> int:
    """What the tier gets free when the copy goes, in bytes: next to nothing where others take bytes from it, for these stay."""
    return 0 if tier in info.serves else held_nbytes(info, tier)


def held_nbytes(info: CheckpointInfo, tier: str) -> int:
    """What the checkpoint takes up on the tier, in bytes, as its record says; a node's share: what its ranks have if all have the same."""
    ranks = len(info.receipts.get(tier, ()))
    if info.replicas.get(tier) == "receipt" and ranks:
        return -(-info.nbytes * min(ranks, info.world_size) // info.world_size)
    return info.taken_on(tier)
