"""A small pool of daemon threads for blocking system calls.

Not `concurrent.futures.ThreadPoolExecutor`: its threads are joined at interpreter exit, so that one read that hangs on a dead
file server would keep the process from ever ending. These threads can be abandoned.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

__all__ = ["DaemonPool", "lower_priority"]

P = ParamSpec("P")
T = TypeVar("T")


def lower_priority(nice: int) -> None:
    """Makes the calling thread nicer than its process by `nice`, 19 at most: it takes a core only as far as others leave it.

    Linux alone has that for a thread; elsewhere, and where it is forbidden, nothing happens. A thread that is as nice already (it has that
    from the one that made it) stays as it is: most processes may not take niceness back.
    """
    if nice and sys.platform == "linux":
        with suppress(OSError):  # a thread that did not begin for that would leave everybody who waits for it waiting for ever
            wanted = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + nice, 19)
            if os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < wanted:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), wanted)


class DaemonPool(Executor):
    """At most `size` threads, made as they are needed, nicer than the process by `nice`; belongs to the process that made it."""

    def __init__(self, size: int, name: str, nice: int = 0) -> None:
        self.pid = os.getpid()
        self.completed = 0
        """How many calls have ended: one that waits in the queue learns from it whether the threads hang."""
        self._size = size
        self._name = name
        self._nice = nice
        self._changed = threading.Condition()
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._idle = 0
        self._threads = 0
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool was shut down")
            self._work.append((future, lambda: fn(*args, **kwargs)))
            if self._idle < len(self._work) and self._threads < self._size:
                self._threads += 1
                threading.Thread(target=self._serve, name=f"{self._name}-{self._threads}", daemon=True).start()
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Lets the threads end when the work that was submitted is done; never waits for them."""
        with self._changed:
            self._closed = True
            dropped = list(self._work) if cancel_futures else []
            if cancel_futures:
                self._work.clear()
            self._changed.notify_all()
        for future, _ in dropped:
            future.cancel()

    @property
    def crowded(self) -> bool:
        """Whether a call waits for a thread and none is idle: one that could go on for long had better let it have its own."""
        return len(self._work) > self._idle

    def _serve(self) -> None:
        lower_priority(self._nice)
        while True:
            with self._changed:
                self._idle += 1
                while not self._work and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if not self._work:
                    self._threads -= 1
                    return
                future, call = self._work.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                    call = _nothing  # before anybody is told: who gets the result may close the memory that the call was about
                except BaseException as error:  # noqa: BLE001 - the boundary of a thread: the error goes to whoever waits
                    future.set_exception(error)
                    del error
                else:
                    future.set_result(result)
                    del result
            self.completed += 1  # a rare lost count of two threads at once does not matter: it still changes
            del future, call  # an idle thread keeps no buffer alive


def _nothing() -> None:
    """What a thread holds in place of a call that it has made."""
