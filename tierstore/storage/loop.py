"""The process's event loop: one daemon thread that synchronous code hands its coroutines to.

Not `fsspec.asyn.sync`: it returns None when the coroutine was cancelled, and deadlocks in a child forked at the wrong moment
(PROTOCOLS.md §8).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tierstore.errors import ClosedError, DeadlineError, UsageError
from tierstore.storage._threads import lower_priority

__all__ = ["EventLoop"]

T = TypeVar("T")
_JOIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """A loop and its thread, which exist in the process `pid` only."""

    pid: int
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread


class EventLoop:
    """An event loop in a daemon thread, started at the first use and made anew in a forked child.

    Safe from several threads. A daemon, so that a process whose owner forgot `close` still ends.

    Args:
        name: The thread's name.
        threads: How many threads compute for its coroutines (`asyncio.to_thread`: hashing, encoding). None of them may wait for the
            loop: with all of them waiting, what they wait for would never get one.
        nice: By how much those are nicer than the process.
    """

    def __init__(self, name: str = "tierstore-loop", *, threads: int = 4, nice: int = 0) -> None:
        self._name = name
        self._threads = threads
        self._nice = nice
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._closed = False
        _renew_in_children(self)

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts `coro` on the loop; its result, its error or its cancellation comes out of the future.

        Raises:
            ClosedError: `close` was called.
        """
        try:
            with self._lock:
                loop = self._start()
                # Inside the lock: a loop that `close` stops must not take in a coroutine that nobody will ever run.
                return asyncio.run_coroutine_threadsafe(coro, loop)
        except Exception:
            # Not for KeyboardInterrupt: it may come when the loop has the coroutine already, which is not to be closed under its feet.
            coro.close()
            raise

    @property
    def asyncio_loop(self) -> asyncio.AbstractEventLoop:
        """The loop itself, in this process, started if need be; for code that compares loops, or wants one.

        Raises:
            ClosedError: `close` was called.
        """
        with self._lock:
            return self._start()

    def run(self, coro: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs `coro` on the loop and waits for its result.

        Args:
            coro: What to run.
            timeout: Seconds to wait; then the coroutine is cancelled.

        Raises:
            DeadlineError: It did not end within `timeout`.
            concurrent.futures.CancelledError: It was cancelled.
            UsageError: Called from the loop's own thread, which would wait for itself for ever.
            ClosedError: `close` was called.
        """
        running = self._running
        if running is not None and running.pid == os.getpid() and threading.current_thread() is running.thread:
            coro.close()
            raise UsageError("a synchronous call was made on tierstore's own event loop", hint="await the coroutine, or call from a thread")
        future = self.submit(coro)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise  # the coroutine's own TimeoutError
            future.cancel()
            raise DeadlineError(f"not done within {timeout:g} s", hint="raise the timeout, or look at `tierstore status`") from error
        except BaseException:
            future.cancel()  # KeyboardInterrupt: what nobody waits for any more must not go on
            raise

    def close(self) -> None:
        """Cancels what still runs, lets it clean up, and joins the thread; idempotent. A forked child ends nothing of its parent's."""
        with self._lock:
            self._closed = True
            running, self._running = self._running, None
        if running is None or running.pid != os.getpid():
            return
        if threading.current_thread() is running.thread:
            raise UsageError("tierstore's event loop can't join itself", hint="call close from another thread")
        running.loop.call_soon_threadsafe(running.loop.stop)
        running.thread.join(_JOIN_S)
        if running.thread.is_alive():
            raise DeadlineError(
                f"tierstore's event loop did not end within {_JOIN_S:g} s",
                hint="a task ignores its cancellation: the loop's thread is left behind and ends with the process",
            )

    def _start(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise ClosedError("tierstore's event loop was closed", hint="open the store again")
        if self._running is None or self._running.pid != os.getpid():
            loop = asyncio.new_event_loop()
            loop.set_default_executor(
                ThreadPoolExecutor(self._threads, "tierstore-work", initializer=lower_priority, initargs=(self._nice,))
            )
            thread = threading.Thread(target=_serve, args=(loop,), name=self._name, daemon=True)
            self._running = _Running(pid=os.getpid(), loop=loop, thread=thread)
            thread.start()
        return self._running.loop

    def _renew(self) -> None:
        """After a fork, in the child: the lock may have been held by a thread that does not exist here."""
        self._lock = threading.Lock()
        self._running = None


def _renew_in_children(owner: EventLoop) -> None:
    reference = weakref.ref(owner)

    def renew() -> None:
        alive = reference()
        if alive is not None:
            alive._renew()

    os.register_at_fork(after_in_child=renew)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
