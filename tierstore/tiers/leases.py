"""Leases: a reader's hold on a checkpoint, that a collector waits for (PROTOCOLS.md §6).

A lease is a small file on the authority that its holder rewrites again and again (it beats). It holds because of an order: the holder
makes it and then looks at the log, the collector writes ``swept`` and then lists the leases. So either the holder sees that the
checkpoint is gone, or the collector sees the lease. No clock of two machines is compared: an observer calls a lease dead when it has
seen the same beat for a full TTL by its own monotonic clock, and a holder that could not beat for three quarters of it knows by its own
that it may be called dead.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Sequence
from types import TracebackType

from tierstore.clock import Clock, utc_text, when_text
from tierstore.errors import AccessError, NotFoundError, TierStoreError, reason_of
from tierstore.format.document import encode_document
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.storage.contract import Storage
from tierstore.storage.tasks import all_or_none
from tierstore.tiers.lease_watch import LEASE_DOCUMENT, LeaseSeen, LeaseWatch, lease_path, lease_root
from tierstore.tiers.log import actor_name, gone_in, new_nonce, read_log, record_seq
from tierstore.tiers.tier import Tiers, recheck
from tierstore.tiers.together import happens, only_ours_to_cancel

__all__ = ["Lease", "LeaseSeen", "LeaseWatch", "hold_lease", "lease_path", "lease_root"]

log = logging.getLogger(__name__)


def hold_lease(
    tiers: Tiers,
    attempt: Attempt,
    *,
    ttl_s: float,
    clock: Clock,
    kind: str = "reader",
    known: int | None = None,
    warned: set[str] | None = None,
) -> Lease:
    """A lease on one checkpoint; nothing is done before it is begun or entered.

    Args:
        tiers: The store's tiers; the lease lies on their authority.
        attempt: Whose files are to stay.
        ttl_s: How long an observer waits for the next beat before it calls the lease dead, in seconds.
        clock: Its monotonic time decides when this holder gives it up.
        kind: What it is for, told to people: ``reader``, ``verify``, ``repair``; ``bring`` also to collectors.
        known: The number of the last record of the log that the holder has seen; only what is newer is looked at. None: all of it.
        warned: Texts that were warned of already: what they share says it once. None: this lease alone.
    """
    return Lease(tiers, attempt, ttl_s=ttl_s, clock=clock, kind=kind, known=known, warned=warned)


class Lease:
    """A hold on one checkpoint. An async context manager; or `begin`, which returns at once, and `let_go`.

    What can't be written (read-only credentials, an authority that is down) is warned of once, and reading goes on without a lease:
    every byte is proved anyway, so that the worst is an error that says what became of the checkpoint.

    Attributes:
        attempt: Whose.
        gone: The checkpoint was deleted: the error that says so; None while that is not known.
    """

    def __init__(
        self, tiers: Tiers, attempt: Attempt, *, ttl_s: float, clock: Clock, kind: str, known: int | None, warned: set[str] | None
    ) -> None:
        self.attempt = attempt
        self.gone: NotFoundError | None = None
        self._tiers = tiers
        self._ttl_s = ttl_s
        self._clock = clock
        self._kind = kind
        self._known = known
        self._warned = set() if warned is None else warned
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        """What a process has for itself."""
        self._pid = -1
        self._id = ""
        self._made: list[str] = []
        self._beats = 0
        self._beaten_at = -math.inf
        self._confirmed = False
        self._lost = False
        self._trouble = "it was not begun"
        self._hopeless = False
        self._looked = asyncio.Event()
        self._ending = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    # ---- for the holder

    @property
    def alive(self) -> bool:
        """Whether every collector sees it: it was there before a look at the log that found no sweep, and has beaten since then."""
        return self._confirmed and not self._lapsed and self._pid == os.getpid()

    @property
    def trouble(self) -> str:
        """Why it is not alive, for messages; empty while it is."""
        if self.alive:
            return ""
        if self._trouble:
            return self._trouble
        return f"it has not beaten for {self._clock.monotonic() - self._beaten_at:.0f} s: the process stood still"

    def begin(self) -> None:
        """Takes the lease in a task of its own and keeps it until `let_go`; on the event loop. Once begun, again only in a forked child.

        The child's lease is its own: what the parent holds ends with the parent.
        """
        if self._closed or self._pid == os.getpid():
            return
        self._reset()
        self._pid = os.getpid()
        self._trouble = "it is being made"
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(self._keep())

    def let_go(self) -> None:
        """Ends it soon. From any thread, also from a finalizer: takes no lock and waits for nothing."""
        self._closed = True
        if self._loop is not None and self._pid == os.getpid():
            try:
                self._loop.call_soon_threadsafe(self._ending.set)
            except RuntimeError:
                return  # the loop has ended: a collector removes the file when it has been still for a TTL

    async def release(self) -> None:
        """Ends it, and returns when its file is removed."""
        self._closed = True
        if self._task is not None and self._pid == os.getpid():
            self._ending.set()
            await asyncio.wait({self._task})

    async def settled(self) -> bool:
        """Waits for the look at the log that follows its making; returns whether it is held.

        Raises:
            NotFoundError: The checkpoint was deleted.
        """
        await self._looked.wait()
        if self.gone is not None:
            raise self.gone
        return self.alive

    async def explain(self, error: TierStoreError) -> TierStoreError:
        """A failed read's error, for the caller: that the checkpoint was deleted, where the log says so now; else `error` itself.

        Where the lease had ended that is said too: the log may not tell the whole story.
        """
        if self.gone is None:
            try:
                await only_ours_to_cancel(self._look())
            except TierStoreError as failure:
                log.debug("checkpoint=%s its log can't be looked at: %s", self.attempt.folder, failure.message)
        if self.gone is not None:
            return self.gone
        self._note_lapse()
        if not self._lost:
            return error
        return type(error)(f"{error.message}; this reader's lease had ended: {self.trouble}", hint=error.hint, **error.context)

    async def __aenter__(self) -> Lease:
        self.begin()
        try:
            await self.settled()
        except BaseException:
            await self.release()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.release()

    # ---- beating

    async def beat(self) -> None:
        """Rewrites the file; where it may be called dead already, makes another and looks at the log again.

        Raises:
            TierStoreError: It can't be written, or the log can't be read.
        """
        since = self._beaten_at
        if not self._confirmed or self._lapsed:
            await self._take()
            return
        await self._write()
        if self._clock.monotonic() - since >= 0.75 * self._ttl_s:  # on its way for so long that it may have come too late
            await self._take()

    @property
    def _lapsed(self) -> bool:
        return self._clock.monotonic() - self._beaten_at >= 0.75 * self._ttl_s

    @property
    def _storage(self) -> Storage:
        return self._tiers.authority.storage

    async def _keep(self) -> None:
        """The task: takes it, beats, and removes it at the end."""
        try:
            while not (self._ending.is_set() or self._hopeless or self.gone):
                await self._step()
                self._looked.set()
                if self._hopeless or self.gone:
                    break
                await happens(self._ending, self._ttl_s / 4)
        except Exception as fault:  # boundary: a fault in the program must not end what is being read
            self._fail(fault)
            log.exception("checkpoint=%s the lease ended unexpectedly", self.attempt.folder)
        finally:
            self._looked.set()
        self._confirmed = False
        self._trouble = self._trouble or "it was released"
        await self._remove(tuple(self._made))

    async def _step(self) -> None:
        self._note_lapse()
        try:
            await only_ours_to_cancel(self.beat())
        except TierStoreError as error:
            self._hopeless = isinstance(error, AccessError) and not (self._confirmed or self._lost)
            self._fail(error)

    def _note_lapse(self) -> None:
        if self._confirmed and self._lapsed:
            self._trouble = self.trouble
            self._confirmed, self._lost = False, True
            self._warn(f"run={self.attempt.run} step={self.attempt.step} the {self._kind}'s lease ended: {self._trouble}")

    def _fail(self, error: BaseException) -> None:
        self._trouble = reason_of(error)
        self._note_lapse()
        if not (self._confirmed or self._lost):
            where = f"tier {self._tiers.authority.name!r}"
            self._warn(f"run={self.attempt.run} is read without a lease, which a collector would wait for: {where}: {self._trouble}")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    async def _take(self) -> None:
        """Makes the lease, then looks at the log; the order is what holds."""
        self._tiers.check_writable()
        await recheck(self._tiers, self._tiers.authority)
        self._id = new_nonce()  # another name: a collector may be about to remove the one before
        self._confirmed = False
        self._made.append(lease_path(self.attempt, self._id))
        await self._write()
        await self._look()
        self._confirmed = self.gone is None
        self._lost = self._lost and not self._confirmed
        await self._remove(self._made[:-1])

    async def _write(self) -> None:
        at = self._clock.monotonic()  # before the file is there: an observer can't have seen it earlier
        self._beats += 1
        document = {
            "holder": actor_name(),
            "kind": self._kind,
            "beat": self._beats,
            "ttl_s": self._ttl_s,
            "nonce": self._id,
            "at": utc_text(self._clock.now()),
        }
        await self._storage.put(self._made[-1], encode_document(LEASE_DOCUMENT, document))
        self._beaten_at = at
        self._trouble = ""

    async def _look(self) -> None:
        """Reads what the log has that is new; sets `gone` if that is its end."""
        if self._known is not None and not await self._has_grown(self._known):
            return
        records = await read_log(self._storage, self.attempt)
        gone = gone_in(records)
        if gone is not None:
            self.gone = _deleted(self.attempt, gone)
        elif records:
            self._known = records[-1].seq

    async def _has_grown(self, known: int) -> bool:
        """Whether the log has more than record `known`: by its listing, and by asking for the next, for some file systems list late."""

        async def listed() -> bool:
            names = [info.path.rpartition("/")[2] for info in await self._storage.list(self.attempt.log_folder)]
            return max((seq for name in names if (seq := record_seq(name)) is not None), default=known) > known

        async def there() -> bool:
            try:
                await self._storage.stat(self.attempt.record_path(known + 1))
            except NotFoundError:
                return False
            return True

        return any(await all_or_none([listed(), there()]))

    async def _remove(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        try:
            await only_ours_to_cancel(self._storage.delete(paths))
            self._made = [path for path in self._made if path not in paths]
        except TierStoreError as error:  # a collector does, when it has been still for a TTL
            log.debug("checkpoint=%s its lease can't be removed: %s", self.attempt.folder, error.message)


def _deleted(attempt: Attempt, gone: Record) -> NotFoundError:
    return NotFoundError(
        f"step {attempt.step} of run {attempt.run!r} was deleted by {gone.actor} at {when_text(gone.at)}, by the retention policy",
        hint="load another step: `tierstore ls` shows what there is",
        run=attempt.run,
        step=attempt.step,
    )
