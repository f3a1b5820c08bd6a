"""When a run is tidied up by its worker: after commits and copies, now and then, out of the way of saves; and what came of it.

It decides nothing itself (`gc/` does). Whatever happens in it, saving goes on: a refusal or a failure is logged once, shown by `status`,
and tried again the next time. Nobody waits for it; it is cancelled where the worker ends, and the next process goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from tierstore.errors import AccessError, LockedError, TierStoreError, reason_of
from tierstore.tiers.catalog import Catalog
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.gc.reports import Tended
from tierstore.tiers.locks import RunLock
from tierstore.tiers.together import happens, only_ours_to_cancel
from tierstore.tiers.view import staging

__all__ = ["HousekeepingStatus", "Tending"]

log = logging.getLogger(__name__)

_NUMBERS = re.compile(r"[0-9a-f]*\d[0-9a-f]*")
"""Counts, steps, and the names of plans: where nothing else differs, it is the same trouble."""

Tend = Callable[[Housekeeping], Coroutine[Any, Any, Tended]]
"""One round: decide, then free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HousekeepingStatus:
    """What the housekeeping of this process came to. Counts since it began, sizes in bytes."""

    last_run: datetime | None = None
    """When it last went through, also where something was refused or failed; None: not yet."""
    expired: int = 0
    """Checkpoints that it decided to delete."""
    freed_files: int = 0
    freed_nbytes: int = 0
    waiting: int = 0
    """What the last run could not free yet: undelete windows, leases."""
    trouble: str = ""
    """Why the last run was refused, or what failed in it; empty if nothing did."""


@dataclass(slots=True, kw_only=True)
class Tending:
    """The task. On the event loop's thread.

    Attributes:
        housekeeping: What it works with; `shared` where this process is the owner of the run. Node tiers are worked on under the lock.
        tend: One round of it.
        lock: The run's lock on this node; held while this node's tiers are worked on, and no longer.
        every_s: The longest pause between two rounds, in seconds.
    """

    housekeeping: Housekeeping
    tend: Tend
    lock: RunLock
    every_s: float
    status: HousekeepingStatus = field(default_factory=HousekeepingStatus)
    _due: asyncio.Event = field(default_factory=asyncio.Event)
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)

    def nudge(self) -> None:
        """Something was committed or copied: there may be something to do. Without a policy there is not."""
        if self.housekeeping.policy is not None:
            self._due.set()

    def quiet(self) -> None:
        """A save was written, or no tier takes it for now, maybe for want of room: whoever waits for that looks again."""
        self._quiet.set()

    def seen(self, catalog: Catalog) -> None:
        """The tiers were looked at: what was decided before, and is not done or copied yet, is finished, with a policy or without."""
        begun = any(c.hidden or "evicting" in c.replicas.values() for c in catalog.checkpoints)
        own = {tier.name for tier in self.housekeeping.own}
        behind = any(not own.isdisjoint(names) for names in catalog.behind.values())
        if begun or catalog.remains or behind or self.housekeeping.policy is not None:
            self._due.set()

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            if not await happens(self._due, self.every_s) and self.housekeeping.policy is None:
                continue
            while self.housekeeping.busy():
                self._quiet.clear()
                await self._quiet.wait()
            self._due.clear()
            await self._round()

    async def _round(self) -> None:
        """First what all processes see, without the node's lock: commits of this node's ranks need it, and deletions may take long."""
        h, rounds = self.housekeeping, list[Tended]()
        try:
            if h.shared:
                await self._part(replace(h, local=False), rounds)
            if staging(h.tiers):
                with self._node() as local:
                    if local:
                        await self._part(replace(h, shared=False), rounds)
        except TierStoreError as error:
            self._ended(reason_of(error))
        except Exception as fault:  # boundary: a fault in the program ends this round, not the worker
            log.exception("run=%s housekeeping failed unexpectedly", h.run)
            self._ended(f"unexpected {type(fault).__name__}: {fault}", said=True)
        else:
            if rounds:
                self._ended("; ".join(text for text in map(_trouble_of, rounds) if text))
                if any(t.collected.log_copies_left and not t.collected.failed for t in rounds):
                    self._due.set()

    async def _part(self, h: Housekeeping, rounds: list[Tended]) -> None:
        tended = await only_ours_to_cancel(self.tend(h))
        rounds.append(tended)
        self._count(tended, waiting=len({attempt for one in rounds for attempt, _ in one.collected.waiting}))

    @contextmanager
    def _node(self) -> Iterator[bool]:
        """Whether this process is the one of its node that works on the node's tiers."""
        try:
            self.lock.acquire()
        except (LockedError, AccessError) as error:
            log.debug("run=%s this node's tiers are left to another process: %s", self.housekeeping.run, error.message)
            yield False
            return
        try:
            yield True
        finally:
            self.lock.release()

    def _count(self, tended: Tended, *, waiting: int) -> None:
        expired = len(tended.pruned.expired) if tended.pruned is not None else 0
        collected = tended.collected
        self.status = replace(
            self.status,
            expired=self.status.expired + expired,
            freed_files=self.status.freed_files + collected.files,
            freed_nbytes=self.status.freed_nbytes + collected.nbytes,
            waiting=waiting,
        )
        if expired or collected.files:
            log.info(
                "run=%s housekeeping decided to delete %d checkpoints and freed %d files, %d bytes",
                self.housekeeping.run,
                expired,
                collected.files,
                collected.nbytes,
            )

    def _ended(self, trouble: str, *, said: bool = False) -> None:
        """Notes a round's end; trouble is said when it is new, and when it has passed."""
        before = self.status.trouble
        self.status = replace(self.status, last_run=self.housekeeping.clock.now(), trouble=trouble)
        if trouble and _NUMBERS.sub("", trouble) != _NUMBERS.sub("", before) and not said:
            log.warning("run=%s housekeeping: %s", self.housekeeping.run, trouble)
        elif before and not trouble:
            log.warning("run=%s housekeeping works again", self.housekeeping.run)


def _trouble_of(tended: Tended) -> str:
    """What a round that went through has to tell: a brake's refusal, and the first thing that failed."""
    told = [tended.refused] if tended.refused else []
    failed = tended.collected.failed
    if failed:
        first = failed[0]
        what = "the log" if not first.tier else f"tier {first.tier!r}"
        which = f"step {first.attempt.step} on {what}" if first.attempt is not None else what
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        told.append(f"{which}: {reason_of(first.error)}{more}")
    return "; ".join(told)
