"""Damage noted in the log: a copy with a file in quarantine counts nowhere, so that no tier drops a good copy because of it.

Who copies, repairs, verifies or loads finds damage, and notes it here. Nothing is deleted. `repair`, or a copy that is recorded anew,
ends the quarantine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from tierstore.clock import Clock
from tierstore.errors import IntegrityError, NotFoundError, RefusedError, StorageError, TierStoreError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.log import append
from tierstore.tiers.log_facts import fold
from tierstore.tiers.tier import Tier, Tiers, read_store_id, recheck
from tierstore.tiers.view import many_disks, staging

__all__ = ["Noting", "ReadAgain", "counts", "quarantine"]

log = logging.getLogger(__name__)

ReadAgain = Callable[[], Awaitable[object]]
"""Reads once more what came wrong; raises where it still is."""

_MOST = 16
"""Files that are named for one copy at a time: one is enough for it to count nowhere, and the log stays short."""

_SINCE = ("replicated", "evicting", "evicted")


def counts(tiers: Tiers, tier: Tier) -> bool:
    """Whether a copy there can let another one go: the authority's and those after it. No node's own."""
    return tier.name not in {t.name for t in staging(tiers)}


async def quarantine(
    tiers: Tiers, attempt: Attempt, tier: Tier, damage: Mapping[str, str], *, world_size: int, clock: Clock, known: int | None = None
) -> None:
    """Appends `quarantined` for each damaged file of a tier's copy, unless the log says so already.

    Not where the tier's name stands for many disks, nor where there is no log to note it in (the authority has lost it, or the checkpoint
    was deleted).

    Args:
        tiers: The store's tiers.
        attempt: Whose copy.
        tier: Where it lies.
        damage: File → what is wrong with it.
        world_size: Of the checkpoint.
        clock: Dates the records.
        known: The number of the last record that was known when the copy was read: where the copy was recorded anew or dropped since,
            nothing is noted. None: that is not asked.

    Raises:
        StorageError: The log can't be read or written.
    """
    if not damage or many_disks(tiers, tier, world_size):
        return
    try:
        tiers.check_writable()
        await recheck(tiers, tiers.authority)
        for file in sorted(damage)[:_MOST]:
            await _append(tiers, attempt, tier.name, file, damage[file], clock=clock, known=known)
    except (RefusedError, NotFoundError) as error:
        log.debug("tier=%s checkpoint=%s damage not noted: %s", tier.name, attempt.folder, error.message)


async def _append(tiers: Tiers, attempt: Attempt, tier: str, file: str, detail: str, *, clock: Clock, known: int | None) -> None:
    data = {"tier": tier, "file": file, "detail": detail}
    try:
        await append(tiers.authority.storage, attempt, "quarantined", data, clock=clock, allow=partial(_is_news, tier, file, known))
    except RefusedError as error:  # another process was first
        log.debug("tier=%s checkpoint=%s file=%s %s", tier, attempt.folder, file, error.message)


def _is_news(tier: str, file: str, known: int | None, records: Sequence[Record]) -> bool:
    facts = fold(records)
    since = known is not None and any(r.seq > known and r.kind in _SINCE and r.data.get("tier") == tier for r in records)
    return not (since or tier in facts.dropped or (tier, file) in facts.quarantined)


class Noting:
    """Notes in the background what loads find damaged: nobody waits for it, and it fails no load. Lives on the event loop.

    Args:
        tiers: The store's tiers.
        clock: Dates the records.
    """

    def __init__(self, tiers: Tiers, clock: Clock) -> None:
        self._tiers = tiers
        self._clock = clock
        self._under_way: set[asyncio.Task[None]] = set()

    def note(self, info: CheckpointInfo, tier: Tier, file: str, detail: str, again: ReadAgain | None) -> None:
        """Begins to note a file. `again`: what was found is no proof yet, and is read once more. None: it is one."""
        if not counts(self._tiers, tier):
            return
        task = asyncio.ensure_future(self._note(info, tier, file, detail, again))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def close(self, timeout_s: float) -> None:
        """Waits for what is under way, and gives up what takes longer than `timeout_s` seconds."""
        loop = asyncio.get_running_loop()
        mine = {task for task in self._under_way if task.get_loop() is loop}  # a forked child inherits the parent's
        if mine:
            _, left = await asyncio.wait(mine, timeout=timeout_s)
            for task in left:
                task.cancel()

    async def _note(self, info: CheckpointInfo, tier: Tier, file: str, detail: str, again: ReadAgain | None) -> None:
        known = info.records[-1].seq if info.records else None
        try:
            found = detail if again is None else await self._still(tier, again)
            if found:
                damage = {file: found}
                await quarantine(self._tiers, info.attempt, tier, damage, world_size=info.world_size, clock=self._clock, known=known)
        except TierStoreError as error:
            log.debug("tier=%s checkpoint=%s file=%s damage not noted: %s", tier.name, info.attempt.folder, file, error.message)

    async def _still(self, tier: Tier, again: ReadAgain) -> str:
        """What is wrong with the file by a second look; empty where nothing is, or the tier as a whole is not what it should be."""
        try:
            await again()
        except IntegrityError as error:
            return error.message
        except NotFoundError as error:
            try:
                there = await read_store_id(tier) == self._tiers.store_id
            except (StorageError, NotFoundError, IntegrityError):
                there = False
            return error.message if there else ""  # an empty mount point lacks every file
        return ""
