"""What killed processes leave on tiers beside checkpoints: temporaries on file systems, unfinished multipart uploads on S3.

Nobody else would ever remove them: a shard that was being written when its process was killed fills the disk, and parts of an
upload cost money and are in no listing (PROTOCOLS.md §1, §8). Only what provably belongs to nobody any more is touched.
"""

from __future__ import annotations

import logging
from typing import Protocol, runtime_checkable

from tierstore.errors import NotFoundError, StorageError
from tierstore.tiers.tier import Tier, Tiers

__all__ = ["UPLOAD_GRACE_S", "sweep_leftovers"]

log = logging.getLogger(__name__)

UPLOAD_GRACE_S = 24 * 3600.0
"""An upload that began longer ago, by the server's clock, has no living writer. Seconds."""


@runtime_checkable
class _HasTemporaries(Protocol):
    async def sweep_temporaries(self) -> list[str]: ...


@runtime_checkable
class _HasUploads(Protocol):
    async def abort_stale_uploads(self, older_than_s: float) -> list[str]: ...


async def sweep_leftovers(tiers: Tiers) -> dict[str, list[str]]:
    """Removes the leftovers of dead processes from every tier that answers; returns their names by tier.

    A tier that fails is passed over with a warning: its leftovers are there the next time.
    """
    removed: dict[str, list[str]] = {}
    for tier in tiers:
        if tier.name in tiers.outages:
            continue
        try:
            found = await _sweep(tier)
        except (StorageError, NotFoundError) as error:
            log.warning("tier=%s leftovers can't be swept: %s", tier.name, error.message)
            continue
        if found:
            log.info("tier=%s swept %d leftovers of dead processes: %s", tier.name, len(found), ", ".join(found[:8]))
            removed[tier.name] = found
    return removed


async def _sweep(tier: Tier) -> list[str]:
    if isinstance(tier.storage, _HasTemporaries):
        return await tier.storage.sweep_temporaries()
    if isinstance(tier.storage, _HasUploads):
        return await tier.storage.abort_stale_uploads(UPLOAD_GRACE_S)
    return []
