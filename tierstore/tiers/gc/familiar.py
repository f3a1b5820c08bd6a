"""Which policies a run is used to: the brake on too many deletions at once is for a policy's first plan, not for a busy night.

A policy that was narrowed by mistake shows in the first plan that it makes. One that has decided here before may be behind with its
work (quick saves, a worker that was away), and refusing it would fill the disk until a person comes. So a policy's rules are
remembered beside the audit files once a plan of theirs was within the share, or a person said that it is meant.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from tierstore.clock import utc_text
from tierstore.config_retention import RetentionConfig
from tierstore.tiers.gc.audit import audit_root
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.log import actor_name
from tierstore.tiers.retention import Plan, PlanEntry

__all__ = ["at_last", "is_familiar", "make_familiar"]

_PASSING = frozenset({"min-age", "revived", "leased", "resumed-from", "in-flight", "future", "no-rule"})
"""Reasons that keep a checkpoint for a while only; ``no-rule`` keeps none."""


async def is_familiar(h: Housekeeping) -> bool:
    """Whether this run is used to the policy's rules.

    Raises:
        StorageError: The authority can't be listed.
    """
    level = await h.tiers.authority.storage.children(audit_root(h.run))
    return any(info.path == _mark(h) for info in level.files)


async def make_familiar(h: Housekeeping) -> None:
    """Remembers the policy's rules; nothing where they are known.

    Raises:
        StorageError: The authority can't be listed or written.
    """
    if not await is_familiar(h):
        note = {"at": utc_text(h.clock.now()), "actor": actor_name(), "policy": _rules(h.required)}
        await h.tiers.authority.storage.put(_mark(h), (json.dumps(note, ensure_ascii=False) + "\n").encode())


def at_last(plan: Plan) -> Iterable[PlanEntry]:
    """What a plan's rules let go in the end: what expires now, and what is kept only for a while."""
    return (
        entry
        for entry in plan.entries
        if entry.action == "expire" or (entry.action == "keep" and all(reason.kind in _PASSING for reason in entry.reasons))
    )


def _mark(h: Housekeeping) -> str:
    digest = hashlib.sha256(json.dumps(_rules(h.required), sort_keys=True).encode()).hexdigest()
    return f"{audit_root(h.run)}/policy-{digest[:20]}.json"


def _rules(policy: RetentionConfig) -> dict[str, object]:
    """What decides which checkpoints go; not how tiers are emptied, or how carefully."""
    return policy.model_dump(mode="json", exclude_none=True, include={"group_by", "timezone", "keep", "protect"})
