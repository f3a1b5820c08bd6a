"""Blocking system calls in threads: with deadlines, after which a hanging thread is left to itself, and cleanups that run to their end."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from tierstore.errors import DeadlineError, TierStoreError
from tierstore.storage._oserrors import translate
from tierstore.storage._pouring import Beat
from tierstore.storage._threads import DaemonPool
from tierstore.storage.tasks import end_all

__all__ = ["Calls", "all_of"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Calls:
    """The threads of one storage, in two pools, made at their first use and anew after a fork.

    Args:
        threads: How many calls run at once.
        reading: How many more that read: they mostly wait for the disk.
        nice: By how much the threads are nicer than the process, 0 to 19.
        deadline_s: Seconds within which a call, or a step of it, has to end; None: wait for ever.
    """

    def __init__(self, *, threads: int, reading: int, nice: int, deadline_s: float | None) -> None:
        self.deadline_s = deadline_s
        self._sizes = (threads, reading)
        self._nice = nice
        self._pool: DaemonPool | None = None
        self._readers: DaemonPool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_readers": None}

    def crowded(self) -> bool:
        """Whether calls wait for a thread."""
        return self._pool is not None and self._pool.crowded

    def reading_crowded(self) -> bool:
        """`crowded`, of those that read."""
        return self._readers is not None and self._readers.crowded

    def close(self) -> None:
        """Ends the threads when they are through; a later call makes new ones."""
        pools = (self._pool, self._readers)
        self._pool = self._readers = None
        for pool in pools:
            if pool is not None and pool.pid == os.getpid():
                pool.shutdown()

    async def run(
        self,
        doing: str,
        full: str,
        fn: Callable[..., T],
        *args: Any,
        nbytes: int | None = None,
        beat: Beat | None = None,
        reading: bool = False,
    ) -> T:
        """Runs a blocking function in a thread; its OSError becomes one of the error family, a hanging thread a `DeadlineError`.

        A function that takes several steps tells of them in `beat`: the deadline is for each.
        """
        while True:
            pool = self._threads(reading)
            started = threading.Event()
            call = pool.submit(_run, started, fn, args)
            future = asyncio.wrap_future(call)
            try:
                if await self._begun(pool, started, call, future):
                    return await self._in_time(doing, full, pool, future, nbytes=nbytes, beat=beat)
            finally:
                if not future.done():
                    future.cancel()

    def _threads(self, reading: bool) -> DaemonPool:
        """A pool of this process: threads don't survive a fork."""
        pool = self._readers if reading else self._pool
        if pool is not None and pool.pid == os.getpid():
            return pool
        pool = DaemonPool(self._sizes[reading], "tierstore-posix-read" if reading else "tierstore-posix", self._nice)
        if reading:
            self._readers = pool
        else:
            self._pool = pool
        return pool

    async def _begun(self, pool: DaemonPool, started: threading.Event, call: Future[T], future: asyncio.Future[T]) -> bool:
        """Waits in the queue, for which there is no deadline; False if all the threads ahead hang, and the call was taken back."""
        while self.deadline_s is not None and not started.is_set() and not future.done():
            completed = pool.completed
            await asyncio.wait({future}, timeout=self.deadline_s)
            if not started.is_set() and pool.completed == completed and call.cancel():
                self._abandon(pool)
                return False
        return True

    def _abandon(self, pool: DaemonPool) -> None:
        """Leaves a pool with a hanging thread to itself; the next call gets a new one."""
        if self._pool is pool:
            self._pool = None
        if self._readers is pool:
            self._readers = None
        pool.shutdown()

    async def _in_time(
        self, doing: str, full: str, pool: DaemonPool, future: asyncio.Future[T], *, nbytes: int | None, beat: Beat | None
    ) -> T:
        future.add_done_callback(_retrieved)
        try:
            left_s = self.deadline_s
            while not future.done() and (left_s is None or left_s > 0):
                await asyncio.wait({future}, timeout=left_s)
                left_s = None if self.deadline_s is None else 0.0 if beat is None else beat.at + self.deadline_s - time.monotonic()
            if not future.done():
                self._abandon(pool)
                raise DeadlineError(
                    f"can't {doing} {full}: no answer within {self.deadline_s:g} s",
                    hint="check that the disk or the file server answers, or raise the tier's deadline",
                    path=full,
                )
            return future.result()
        except OSError as error:
            if isinstance(error, TierStoreError):
                raise
            raise translate(error, doing, full, nbytes=nbytes) from error
        finally:
            if not future.done():
                future.cancel()

    async def clean_up(self, doing: str, full: str, fn: Callable[[], None]) -> None:
        """Runs a cleanup to its end, however often the caller is cancelled; its own failure is logged, as another error is on its way."""
        task = asyncio.ensure_future(self.run(doing, full, fn))
        cancelled = False
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                cancelled = True
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("event=cleanup-failed path=%r error=%r", full, str(error))
        if cancelled:
            raise asyncio.CancelledError


def _run(started: threading.Event, fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    started.set()
    return fn(*args)


def _retrieved(future: asyncio.Future[Any]) -> None:
    """Marks the error of an abandoned call as seen: whoever waited has another one."""
    if not future.cancelled():
        future.exception()


async def all_of(
    works: Sequence[Awaitable[None]], moved: asyncio.Event | None = None, stall_s: float | None = None, full: str = ""
) -> None:
    """Runs all until the first failure, then cancels the others and waits for their end.

    Raises:
        DeadlineError: `moved` was not set for `stall_s` seconds.
    """
    tasks = {asyncio.ensure_future(work) for work in works}
    pending = tasks
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=stall_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if moved is not None and pending and not done and not moved.is_set():
                raise DeadlineError(
                    f"can't write {full}: no part of it was finished within {stall_s:g} s",
                    hint="check that its source and the file server answer, or raise the tier's deadline",
                    path=full,
                )
            if moved is not None:
                moved.clear()
    finally:
        with suppress(asyncio.CancelledError):
            await end_all(tasks)
