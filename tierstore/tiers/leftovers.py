"""What killed processes leave on tiers beside checkpoints: temporaries on file systems, unfinished multipart uploads on S3.

Nobody else would ever remove them: a shard that was being written when its process was killed fills the disk, and parts of an
upload cost money and are in no listing (PROTOCOLS.md §1, §8). Only what provably belongs to nobody any more is touched.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Protocol, runtime_checkable

from tierstore.errors import NotFoundError, StorageError
from tierstore.storage.contract import Storage
from tierstore.storage.packed import PackedStorage
from tierstore.tiers.tier import UPLOAD_GRACE_S, Tier, Tiers

__all__ = ["UPLOAD_GRACE_S", "bare", "sweep_leftovers"]

log = logging.getLogger(__name__)


@runtime_checkable
class _HasTemporaries(Protocol):
    async def stale_temporaries(self) -> list[str]: ...

    async def sweep_temporaries(self) -> list[str]: ...


@runtime_checkable
class _HasUploads(Protocol):
    async def stale_uploads(self, older_than_s: float) -> list[str]: ...

    async def abort_stale_uploads(self, older_than_s: float) -> list[str]: ...


def bare(tier: Tier) -> Storage:
    """The storage that has the leftovers: the one below a storage that packs."""
    return tier.storage.inner if isinstance(tier.storage, PackedStorage) else tier.storage


async def sweep_leftovers(
    tiers: Tiers, *, only: Collection[str] | None = None, upload_grace_s: float | None = None, dry_run: bool = False
) -> dict[str, list[str]]:
    """Removes the leftovers of dead processes from every tier that answers; returns their names by tier.

    A tier that fails is passed over with a warning: its leftovers are there the next time.

    Args:
        tiers: The store's tiers.
        only: Names of the tiers to look at; None: all.
        upload_grace_s: How long ago an upload must have begun, in seconds of the server's clock; None: as the store says.
        dry_run: Only say what would be removed.
    """
    find = _find if dry_run else _sweep
    removed: dict[str, list[str]] = {}
    for tier in tiers:
        if tier.name in tiers.outages or (only is not None and tier.name not in only):
            continue
        try:
            found = await find(tier, tiers.upload_grace_s if upload_grace_s is None else upload_grace_s)
        except (StorageError, NotFoundError) as error:
            log.warning("tier=%s leftovers can't be swept: %s", tier.name, error.message)
            continue
        if found:
            did = "would sweep" if dry_run else "swept"
            log.info("tier=%s %s %d leftovers of dead processes: %s", tier.name, did, len(found), ", ".join(found[:8]))
            removed[tier.name] = found
    return removed


async def _sweep(tier: Tier, upload_grace_s: float) -> list[str]:
    storage = bare(tier)
    if isinstance(storage, _HasTemporaries):
        return await storage.sweep_temporaries()
    if isinstance(storage, _HasUploads):
        return await storage.abort_stale_uploads(upload_grace_s)
    return []


async def _find(tier: Tier, upload_grace_s: float) -> list[str]:
    storage = bare(tier)
    if isinstance(storage, _HasTemporaries):
        return await storage.stale_temporaries()
    if isinstance(storage, _HasUploads):
        return await storage.stale_uploads(upload_grace_s)
    return []
