"""A few threads that a store keeps for what its saves do with large memory: copying, hashing fingerprints, faulting pages in.

The caller's thread works too, so that nothing waits for a thread to wake up, and a save of little is done by the caller alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice

__all__ = ["CopyThreads", "default_threads"]


def default_threads() -> int:
    """Threads that saturate a memory bus with memmove: few, and never more than this process may run on."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


class CopyThreads:
    """Started at the first use that has work for several, ended by `close`; a forked child starts its own. Safe from several threads.

    Args:
        count: How many threads work, the caller's included; None: `default_threads`.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or default_threads()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the threads now, so that no save waits for that."""
        if (pool := self._threads()) is not None:
            go = threading.Event()  # the pool starts a thread only where none is idle
            begun = [pool.submit(go.wait) for _ in range(self.count - 1)]
            go.set()
            for one in begun:
                one.result()

    def run(self, works: Iterable[Callable[[], None]], meanwhile: Callable[[], None] | None = None) -> None:
        """Runs all of `works`, in any order, and returns when they are done.

        Args:
            works: What releases the GIL, for the most part; asked for one by one, by the threads as they get to them.
            meanwhile: Run by the caller's thread first.

        Raises:
            Exception: What one of them raised; the others that were begun have ended, the rest is not run.
        """
        source = iter(works)
        known = list(islice(source, 2))
        left, turn = chain(known, source), threading.Lock()
        ended = False

        def drain() -> None:
            nonlocal ended
            while not ended:
                with turn:
                    work = next(left, None)
                if work is None:
                    return
                try:
                    work()
                except BaseException:
                    ended = True
                    raise

        helpers: list[Future[None]] = []
        pool = self._threads() if len(known) > 1 or (known and meanwhile is not None) else None
        if pool is not None:
            try:
                for _ in range(self.count - 1):
                    helpers.append(pool.submit(drain))  # each is waited for, also where the next is refused
            except RuntimeError:
                pass  # closed meanwhile, or the interpreter is ending and starts no thread any more: this one does the rest
        try:
            if meanwhile is not None:
                meanwhile()
            drain()
        except BaseException:
            ended = True
            raise
        finally:
            errors = [helper.exception() for helper in helpers]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """Ends the threads; what is run later is run by its caller. Idempotent."""
        if self._pid != os.getpid():
            return  # the parent's threads are not here, and its lock may be held by one of them
        with self._lock:
            pool, self._pool, self._closed = self._pool, None, True
        if pool is not None:
            pool.shutdown()

    def _threads(self) -> ThreadPoolExecutor | None:
        if os.getpid() != self._pid:  # the parent's threads are not here, and its lock may be held by one of them
            self._lock, self._pid, self._pool, self._closed = threading.Lock(), os.getpid(), None, False
        with self._lock:
            if self._pool is None and not self._closed and self.count > 1:
                self._pool = ThreadPoolExecutor(self.count - 1, thread_name_prefix="tierstore-copy")
            return self._pool
