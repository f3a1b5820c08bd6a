"""Making room on a full node tier: files that are safe on the tier that makes things durable leave it, the oldest first."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tierstore.crashpoints import reach
from tierstore.errors import NotFoundError, StorageError
from tierstore.tiers.files.looking import group
from tierstore.tiers.files.places import ROOT, Mark, leaf_name, place_of
from tierstore.tiers.tier import Tier, Tiers

if TYPE_CHECKING:
    from tierstore.tiers.files.mover import Mover

__all__ = ["make_room"]

log = logging.getLogger(__name__)


async def make_room(tiers: Tiers, tier: Tier, nbytes: int, mover: Mover) -> bool:
    """Evicts files from `tier` until `nbytes` bytes were freed; returns whether anything was.

    A copy leaves only while another one, of the right length and with its entry, lies on `Tiers.durable_at`; never from the tier that
    decides, which is asked for what exists, and not what is still being copied on.
    """
    if tier.scope != "node" or tiers.is_authority(tier) or tier.name == tiers.durable_at.name:
        return False
    found = group(await tier.storage.list(ROOT))
    candidates: list[tuple[str, str, Mark, int]] = []
    for (path, is_folder), on_tier in found.items():
        newest = on_tier.newest
        if is_folder or newest is None or not (held := on_tier.marks[newest]).whole or not held.entry:
            continue
        candidates.append((newest.save_id, path, newest, held.entry))
    freed = 0
    for _, path, mark, length in sorted(candidates):
        if freed >= nbytes:
            break
        if mover.is_moving(path, mark):
            continue
        place = place_of(path)
        entry, data = f"{place}/{leaf_name('entry', mark, length)}", f"{place}/{leaf_name('data', mark)}"
        try:
            await tiers.durable_at.storage.stat(entry)
            if (await tiers.durable_at.storage.stat(data)).nbytes != length:
                continue
        except (StorageError, NotFoundError):
            continue
        reach("files.before-evict")
        await tier.storage.delete([entry])
        await tier.storage.delete([data])
        reach("files.after-evict")
        freed += length
        log.info("tier=%s file=%r evicted: %d bytes, safe on %s", tier.name, path, length, tiers.durable_at.name)
    return freed > 0
