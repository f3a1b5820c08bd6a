"""The background work of one store: persist each save, commit it, promote it; as tasks on the store's event loop.

Saves are written to the nearest tier oldest first, one at a time, and their memory is free again at once; from there on a save is
only what the tiers hold of it, and lanes (one per tier) bring it on, as they do with whatever a dead process left. So there is
nothing to recover after a kill but to look.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from tierstore.clock import Clock
from tierstore.config_models import StoreConfig
from tierstore.errors import AccessError, ClosedError, DeadlineError, LockedError, TierStoreError
from tierstore.names import Attempt
from tierstore.storage.tasks import end_all
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.engine import Engine
from tierstore.tiers.jobs import PendingCopy, SaveJob, WorkerOptions, worker_options
from tierstore.tiers.leases import Lease
from tierstore.tiers.locks import RunLock, lock_path
from tierstore.tiers.progress import NO_PROGRESS, Progress, TransferBoard
from tierstore.tiers.promote import ReconcileReport, reconcile
from tierstore.tiers.record_cache import RecordCache
from tierstore.tiers.resume_source import ResumeSource
from tierstore.tiers.retention import Reason
from tierstore.tiers.saves import Save, SaveQueue, closed_before_written, closed_on_the_way
from tierstore.tiers.status import Status, WorkerView, collect_status
from tierstore.tiers.ticket import Ticket
from tierstore.tiers.tier import Tiers

__all__ = ["SaveJob", "Worker", "WorkerOptions", "WorkerSession"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_ADOPT_WAIT_S = 30.0
_POLL_S = 0.02
_STOP_S = 60.0


class WorkerSession(Protocol):
    """What the worker needs of a `Session`."""

    config: StoreConfig
    clock: Clock

    @property
    def tiers(self) -> Tiers: ...

    def run(self, coro: Coroutine[Any, Any, T], timeout: float | None = None) -> T: ...

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]: ...


class Worker:
    """The background work of one run in one process. Thread-safe; inert in a forked child; starts with the first save.

    Args:
        session: Tiers, clock and event loop.
        run: The run.
        rank: This process's rank.
        options: The rules; by default those of the session's configuration.
        progress: Told as bytes arrive on tiers.
        cache: Records that this process knows; None: none yet.
    """

    def __init__(
        self,
        session: WorkerSession,
        run: str,
        *,
        rank: int = 0,
        options: WorkerOptions | None = None,
        progress: Progress = NO_PROGRESS,
        cache: RecordCache | None = None,
    ) -> None:
        self._session = session
        self._cache = cache if cache is not None else RecordCache()
        self.run = run
        self.rank = rank
        self.options = options or worker_options(session.config)
        self._queue = SaveQueue(self.options, self._wake)
        self._source = ResumeSource()
        self._board = TransferBoard(progress)
        self._starting = threading.Lock()
        self._engine: Engine | None = None
        self._main: concurrent.futures.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock: RunLock | None = None
        self._pid = os.getpid()
        self._closed = False
        self._hurry_at: float | None = None

    # ---- saving

    def make_room(self, nbytes: int = 0, *, timeout_s: float | None = None) -> None:
        """Waits, or skips the oldest save, until an image of `nbytes` bytes fits: call it before staging one.

        Raises:
            DeadlineError: No room within `timeout_s` seconds.
            RefusedError: Nothing may be written: the authority has lost what it decided about.
        """
        self._check_usable()
        self._session.tiers.check_writable()
        self._queue.make_room(nbytes, timeout_s=timeout_s)

    def submit(self, job: SaveJob, *, timeout_s: float | None = None) -> Ticket:
        """Takes a staged save; returns when its image fits into the bound of bytes in memory.

        What went wrong with earlier saves is `raise_errors`' to tell, before anything is staged: an attempt that other ranks have begun
        must not end for an older one's failure.

        Raises:
            DeadlineError: No room within `timeout_s` seconds; this save was not taken.
            ClosedError: The worker is closed, or belongs to another process.
        """
        self._check_usable()
        tiers = self._start().tiers
        ticket = Ticket(job.attempt, tiers=tiers.names, clock=self._session.clock)
        self._source.follow(ticket)
        self._queue.put(Save(job=job, ticket=ticket), timeout_s=timeout_s)
        return ticket

    def told(self, attempt: Attempt) -> None:
        """The failure of `attempt` was raised by another call; `raise_errors` and `close` do not raise it again."""
        self._queue.told(attempt)

    def raise_errors(self) -> None:
        """Raises the first background error that no call has raised yet; each is raised once and stays on its ticket.

        Raises:
            SaveError: Names step and tier; ``__cause__`` is the reason.
        """
        self._queue.raise_errors()

    # ---- what others left

    def protected(self) -> Mapping[Attempt, Reason]:
        """What must not go under this process's hands, and why. To be asked on the event loop."""
        return self._engine.protected() if self._engine is not None else self._source.protected()

    def writing(self) -> bool:
        """Whether a save is being written: no deletion begins then."""
        return self._engine is not None and self._engine.queue.writing()

    def resumed_from(self, attempt: Attempt, lease: Lease | None) -> None:
        """Training goes on from `attempt`: it is not deleted, and its lease is kept, until a save that begins after this is durable."""
        self._source.set(attempt, lease)

    def adopt(self) -> ReconcileReport | None:
        """Commits what a dead process left complete on this node, then lets the background work go on with the rest.

        Returns:
            What was done, and what failed: that is tried again in the background. None where another process on this node is at it, or
            the lock can't be had.

        Raises:
            StorageError: What an earlier process left can't be looked at.
        """
        self._check_usable()
        engine = self._start()
        tiers, clock, lock = engine.tiers, self._session.clock, self._run_lock(engine.tiers)
        work = reconcile(tiers, self.run, clock=clock, commit_only=True, lock=lock, wait_s=_ADOPT_WAIT_S, cache=engine.cache)
        try:
            report = self._session.run(work)
        except (LockedError, AccessError) as error:
            log.warning("%s", error.message)
            return None
        self._call(lambda engine: engine.kick())
        return report

    # ---- waiting and ending

    def drain(self, deadline_s: float | None = None) -> None:
        """Returns when every save is written, committed and on every tier, and nothing that other processes left is pending.

        Args:
            deadline_s: Seconds; None: until done, but a tier that has been failing for `WorkerOptions.patience_s` is given up.

        Raises:
            DeadlineError: Names what is pending where (``context["pending"]``: `PendingCopy`). Nothing is lost: what is on a tier is
                resumed by this worker, the next process, or `tierstore sync`.
            SaveError: A save failed and no call has said so yet.
            StorageError: Everything of this process is done, but what other processes left can't be looked for.
        """
        self._check_usable()
        self._drain(self._start(), deadline_s, rescan=True)

    def hurry(self, deadline_s: float) -> None:
        """No `drain` or `close`, one under way included, waits longer than `deadline_s` seconds from now."""
        self._hurry_at = time.monotonic() + deadline_s

    def pending(self) -> tuple[PendingCopy, ...]:
        """What is not where it should be yet, newest first for each tier."""
        engine = self._engine
        return () if engine is None or self._forked() else tuple(self._session.run(_ask(engine)))

    @property
    def progress(self) -> Progress:
        """Who is told as bytes arrive on tiers: also by what writes to them beside the background work."""
        return self._board

    def tell(self, progress: Progress) -> None:
        """Tells `progress`, from now on, as bytes arrive on tiers."""
        self._board.tell(progress)

    def status(self) -> Status:
        """What each tier holds and lacks, what is under way, and the last errors.

        Raises:
            StorageError: No tier can be reached.
        """
        self._check_usable()
        engine = self._engine
        view = WorkerView(transfers=self._board.transfers()) if engine is None else self._session.run(_view(engine, self._board))
        return self._session.run(collect_status(self._session.tiers, self.run, clock=self._session.clock, worker=view))

    def close(self, deadline_s: float | None = None) -> None:
        """Drains, then ends; idempotent. After a missed deadline the work is ended where it is: nothing half-done is visible.

        Raises:
            DeadlineError, SaveError: As `drain`; the worker is closed all the same.
        """
        if self._closed or self._forked():
            self._closed = True
            return
        self._queue.close()
        try:
            if self._engine is not None:
                self._drain(self._engine, deadline_s, rescan=False)
            self.raise_errors()
        finally:
            self._closed = True
            self._stop()

    # ---- inside

    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _check_usable(self) -> None:
        if self._forked():
            raise ClosedError("this worker belongs to the parent process", hint="open a store of its own in each forked process")
        if self._closed:
            raise ClosedError(f"the background worker of run {self.run!r} is closed", hint="open the store again with tierstore.open(...)")

    def _run_lock(self, tiers: Tiers) -> RunLock:
        if self._lock is None:
            self._lock = RunLock(lock_path(tiers, self.run), self.run)
        return self._lock

    def _start(self) -> Engine:
        self._session.tiers.check_writable()
        with self._starting:
            if self._engine is None:
                tiers = self._session.tiers
                self._engine = self._session.run(self._make(tiers))
                started = threading.Event()
                self._main = self._session.submit(self._engine.main(started.set))
                started.wait()
            return self._engine

    async def _make(self, tiers: Tiers) -> Engine:
        self._loop = asyncio.get_running_loop()
        context = CopyContext.make(
            tiers,
            self._session.clock,
            budget_nbytes=self.options.copy_nbytes,
            files_in_flight=self.options.files_in_flight,
            progress=self._board,
        )
        return Engine(
            tiers=tiers,
            run=self.run,
            clock=self._session.clock,
            options=self.options,
            queue=self._queue,
            lock=self._run_lock(tiers),
            context=context,
            policy=self._session.config.retention_for(self.run),
            owner=self.rank == 0,
            source=self._source,
            cache=self._cache,
        )

    def _stop(self) -> None:
        main, self._main = self._main, None
        if main is None:
            return
        self._call(lambda engine: engine.stop.set())
        try:
            main.result(_STOP_S)
        except concurrent.futures.TimeoutError:
            log.error("run=%s the background work did not end within %g s and is abandoned", self.run, _STOP_S)
            main.cancel()
        except concurrent.futures.CancelledError:
            log.debug("run=%s the event loop was closed first", self.run)
        for save in self._queue.waiting():
            save.ticket.fail(closed_before_written())
            self._queue.finish(save)
        for save in self._engine.saves.values() if self._engine is not None else ():
            save.ticket.fail(closed_on_the_way())

    def _wake(self) -> None:
        self._call(lambda engine: engine.wake.set())

    def _call(self, action: Any) -> None:
        engine, loop = self._engine, self._loop
        if engine is not None and loop is not None:
            try:
                loop.call_soon_threadsafe(action, engine)
            except RuntimeError:
                log.debug("run=%s the event loop has ended", self.run)

    def _drain(self, engine: Engine, deadline_s: float | None, *, rescan: bool) -> None:
        left, looked = self._session.run(self._drained(engine, deadline_s, rescan=rescan))
        if left:
            if self._ended():
                self.raise_errors()  # what ended the background work is the reason why nothing gets on
            self._log_unraised()
            raise self._deadline_error(left, deadline_s)
        self.raise_errors()
        if not looked:
            raise DeadlineError(
                f"run {self.run!r}: not within {deadline_s or 0.0:g} s: looking for what other processes left",
                hint="nothing of this process is pending; give it more time, or run `tierstore sync`",
                run=self.run,
            )
        if rescan and engine.scan_error is not None:
            raise engine.scan_error

    def _ended(self) -> bool:
        """Whether the background work has come to an end that nobody asked for."""
        return self._main is not None and self._main.done()

    async def _drained(self, engine: Engine, deadline_s: float | None, *, rescan: bool) -> tuple[list[PendingCopy], bool]:
        """Waits; returns what is left when the deadline, or the patience with failing tiers, is over, and whether it looked for more."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        looking = asyncio.ensure_future(engine.rescan()) if rescan else None
        engine.kick()
        try:
            while True:
                looked = looking is None or looking.done()
                left = engine.pending()
                waited = loop.time() - began
                if not left and looked:
                    return left, True
                hurried = self._hurry_at is not None and time.monotonic() >= self._hurry_at
                if hurried and not left:
                    return left, True  # no time for what others left
                if hurried or (deadline_s is not None and waited >= deadline_s) or (left and self._ended()):
                    return left, looked
                if deadline_s is None and left and all(min(p.failing_s, waited) >= self.options.patience_s for p in left):
                    return left, looked
                await asyncio.sleep(_POLL_S)
        finally:
            if looking is not None:
                await end_all([looking])

    def _log_unraised(self) -> None:
        try:
            self.raise_errors()
        except TierStoreError as error:
            log.error("reported with the missed deadline: %s", error.message)

    def _deadline_error(self, left: list[PendingCopy], deadline_s: float | None) -> DeadlineError:
        unwritten = {s.job.attempt.step for s in self._queue.waiting()}
        by_tier: dict[str, list[PendingCopy]] = {}
        for copy in left:
            by_tier.setdefault(copy.tier, []).append(copy)
        texts = [
            f"{tier}: steps {', '.join(str(s) for s in sorted({c.attempt.step for c in copies}))} "
            f"({sum(c.nbytes for c in copies)} bytes; {copies[0].reason})"
            for tier, copies in by_tier.items()
        ]
        when = f"within {deadline_s:g} s" if deadline_s is not None else f"while tiers kept failing for {self.options.patience_s:g} s"
        if self._hurry_at is not None and time.monotonic() >= self._hurry_at:
            when = "in the time that was left"
        if self._ended():
            when = "before the background work ended"
        lost = f"; steps {', '.join(map(str, sorted(unwritten)))} are in memory only" if unwritten else ""
        return DeadlineError(
            f"run {self.run!r}: not done {when}: {'; '.join(texts)}{lost}",
            hint="what lies on a tier is resumed by the next process or by `tierstore sync`",
            run=self.run,
            pending=left,
        )


async def _ask(engine: Engine) -> list[PendingCopy]:
    return engine.pending()


async def _view(engine: Engine, board: TransferBoard) -> WorkerView:
    errors = {name: lane.last_error for name, lane in engine.lanes.items() if lane.trouble is not None}
    errors.update(engine.trouble)
    return WorkerView(
        pending=tuple(engine.pending()),
        transfers=board.transfers(),
        in_memory_nbytes=engine.queue.in_flight_nbytes,
        housekeeping=engine.tending.status,
        errors=errors,
        last_errors={name: lane.last_error for name, lane in engine.lanes.items() if lane.last_error},
    )
