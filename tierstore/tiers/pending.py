"""What has to be copied where, computed from what the tiers hold and nothing else (DESIGN.md §2.3). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tierstore.names import Attempt
from tierstore.tiers.catalog import Catalog, CheckpointInfo
from tierstore.tiers.tier import Tiers
from tierstore.tiers.view import further, staging

__all__ = ["Copy", "CopyKind", "pending"]

CopyKind = Literal["commit", "complete", "promote"]
"""``commit``: carry parts to the authority and commit; ``complete``: a staging tier's replica; ``promote``: a further tier's replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One thing to do: bring an attempt onto a tier. `nbytes` is what the checkpoint has (0 where unknown: not committed yet)."""

    attempt: Attempt
    tier: str
    kind: CopyKind
    nbytes: int = 0


def pending(catalog: Catalog, tiers: Tiers) -> list[Copy]:
    """Everything that is to be copied, newest first; of one attempt, nearer tiers first. Pure.

    Hidden (expired) and superseded checkpoints go nowhere. A replica that was dropped is not made again, nor is it a source while it goes.
    """
    copies: list[Copy] = []
    for found in catalog.incomplete:
        held: set[int] = set()
        for tier in staging(tiers):
            here = set(found.receipts.get(tier.name, ()))
            if held - here:
                copies.append(Copy(attempt=found.attempt, tier=tier.name, kind="complete"))
            held |= here
        copies.append(Copy(attempt=found.attempt, tier=tiers.authority.name, kind="commit"))
    for info in catalog.checkpoints:
        if not (info.hidden or info.superseded or info.damaged or info.authority_lost):
            copies += _wanted(info, tiers)
    order = {name: number for number, name in enumerate(tiers.names)}
    return sorted(copies, key=lambda c: (-c.attempt.step, _descending(c.attempt.save_id), order[c.tier]))


def _wanted(info: CheckpointInfo, tiers: Tiers) -> list[Copy]:
    copies: list[Copy] = []
    held: set[int] = set()
    for tier in staging(tiers):
        if tier.name in info.dropped:
            continue
        here = set(info.receipts.get(tier.name, ()))
        # A share (some of the ranks) is never complete in itself: that its documents are there can't be told from the catalog.
        undocumented = len(here) == info.world_size and info.replicas.get(tier.name) == "receipt"
        if held - here or undocumented:
            copies.append(Copy(attempt=info.attempt, tier=tier.name, kind="complete", nbytes=info.nbytes))
        held |= here
    for tier in further(tiers):
        if tier.name not in info.replicated and tier.name not in info.dropped:
            copies.append(Copy(attempt=info.attempt, tier=tier.name, kind="promote", nbytes=info.nbytes))
    return copies


def _descending(save_id: str) -> tuple[int, ...]:
    return tuple(-ord(c) for c in save_id)
