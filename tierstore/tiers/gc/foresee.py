"""What retention would do with a copy that a tier does not have yet: asked before somebody copies it there. Changes nothing."""

from __future__ import annotations

from dataclasses import replace

from tierstore.names import Attempt
from tierstore.tiers.checkpoint import CheckpointInfo, ReplicaState
from tierstore.tiers.gc.housekeeping import Housekeeping, Situation, plan_of
from tierstore.tiers.tier import Tier

__all__ = ["would_drop"]


def would_drop(h: Housekeeping, situation: Situation, attempt: Attempt, tier: Tier, *, scheme: str = "") -> str:
    """Why the next collection would drop a copy that the tier got now, in words; empty: it would keep it, or there is no policy.

    Args:
        h: Whose policy.
        situation: What there is.
        attempt: What would be copied.
        tier: Where to.
        scheme: The copy would be quantised so, and count for nothing where exact ones are wanted; empty: exact.
    """
    if h.policy is None:
        return ""
    known = situation.catalog.checkpoints
    share = next((found for info in reversed(known) if (found := _share(info, tier.name, lossy=bool(scheme))) is not None), None)
    infos = tuple(_with_copy(h, info, tier.name, scheme, share) if info.attempt == attempt else info for info in known)
    plan = plan_of(h, replace(situation, catalog=replace(situation.catalog, checkpoints=infos)))
    if (entry := plan.entry(attempt)) is None:
        return ""
    return next((drop.reason.text for drop in entry.drops if drop.tier == tier.name and not drop.blocked), "")


def _share(info: CheckpointInfo, tier: str, *, lossy: bool) -> float | None:
    """How much of its bytes a checkpoint's copy takes up on the tier; None: nothing is known, or the copy is not of that kind."""
    if tier not in info.taken or not info.nbytes or (info.quantised_on(tier) is not None) != lossy:
        return None
    return info.taken[tier] / info.nbytes


def _with_copy(h: Housekeeping, info: CheckpointInfo, name: str, scheme: str, share: float | None) -> CheckpointInfo:
    states: dict[str, ReplicaState] = {**info.replicas, name: "quantised" if scheme else "complete"}
    facts = {"quantised": {"scheme": scheme}} if scheme else {}
    taken = {tier: nbytes for tier, nbytes in info.taken.items() if tier != name}
    return replace(
        info,
        replicas={tier: states[tier] for tier in h.tiers.names if tier in states},
        replicated={**info.replicated, name: facts},
        taken=taken if share is None else {**taken, name: int(info.nbytes * share)},
        dropped=info.dropped - {name},
        receipts={tier: ranks for tier, ranks in info.receipts.items() if tier != name},
    )
