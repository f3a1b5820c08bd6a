"""What retention would do with a copy that a tier does not have yet: asked before somebody copies it there. Changes nothing."""

from __future__ import annotations

from dataclasses import replace

from tierstore.names import Attempt
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.gc.housekeeping import Housekeeping, Situation, plan_of
from tierstore.tiers.tier import Tier

__all__ = ["would_drop"]


def would_drop(h: Housekeeping, situation: Situation, attempt: Attempt, tier: Tier) -> str:
    """Why the next collection would drop a copy that the tier got now, in words; empty: it would keep it, or there is no policy."""
    if h.policy is None:
        return ""
    infos = tuple(_with_copy(h, info, tier.name) if info.attempt == attempt else info for info in situation.catalog.checkpoints)
    plan = plan_of(h, replace(situation, catalog=replace(situation.catalog, checkpoints=infos)))
    if (entry := plan.entry(attempt)) is None:
        return ""
    return next((drop.reason.text for drop in entry.drops if drop.tier == tier.name and not drop.blocked), "")


def _with_copy(h: Housekeeping, info: CheckpointInfo, name: str) -> CheckpointInfo:
    states = {**info.replicas, name: "complete"}
    return replace(
        info,
        replicas={tier: states[tier] for tier in h.tiers.names if tier in states},
        replicated={**info.replicated, name: {}},
        dropped=info.dropped - {name},
        receipts={tier: ranks for tier, ranks in info.receipts.items() if tier != name},
    )
