"""Memory for copies: recycled buffers under one budget of bytes in flight, shared by all copies of a process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

__all__ = ["ByteBudget"]

log = logging.getLogger(__name__)

_ALIGN = 4096
_KEEP_AT_MOST = 24  # parts in memory of one storage at the default concurrency, and some


class ByteBudget:
    """Hands out buffers whose sizes add up to `nbytes` at most, in the order of asking.

    A `Source` must keep the views that it returned valid until the write has ended, and is not told when a storage is done
    with one of them. So the budget follows the memory itself: a buffer is given back when the last view of it is gone, and is
    then recycled (fresh memory costs more than the copy: page faults).

    A request that exceeds the whole budget is served alone. A storage may hold several views before it lets the first one go;
    should all of the budget be held in such a way that nobody gets on, one request is let through every `patience_s` seconds.

    Args:
        nbytes: The budget, in bytes.
        patience_s: Seconds without any give-back after which one waiting request is served over the budget.
    """

    def __init__(self, nbytes: int, *, patience_s: float = 20.0) -> None:
        if nbytes < 1:
            raise ValueError("a budget of bytes in flight is at least one byte")
        self.nbytes = nbytes
        self.patience_s = patience_s
        self.in_flight = 0
        self.peak = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._spare: dict[int, list[NDArray[np.uint8]]] = {}

    async def take(self, nbytes: int) -> memoryview:
        """A writable buffer of `nbytes` bytes; waits while the budget is used up."""
        loop = asyncio.get_running_loop()
        if self._waiting or not self._fits(nbytes):
            turn: asyncio.Future[None] = loop.create_future()
            entry = (nbytes, turn)
            self._waiting.append(entry)
            try:
                await self._wait(turn)
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self._give_back(nbytes, None)  # it was granted in the same instant
                else:
                    self._waiting.remove(entry)
                    self._grant()
                raise
        else:
            self._account(nbytes)
        return self._buffer(nbytes, loop)

    async def _wait(self, turn: asyncio.Future[None]) -> None:
        while True:
            before = self.in_flight
            done, _ = await asyncio.wait([turn], timeout=self.patience_s)
            if done:
                return
            first = self._waiting[0]
            if first[1] is turn and self.in_flight >= before:
                log.warning(
                    "budget=%d in_flight=%d nothing was given back for %gs: one request goes over", self.nbytes, before, self.patience_s
                )
                self._waiting.popleft()
                self._account(first[0])
                turn.set_result(None)

    def _fits(self, nbytes: int) -> bool:
        return self.in_flight == 0 or self.in_flight + nbytes <= self.nbytes

    def _account(self, nbytes: int) -> None:
        self.in_flight += nbytes
        self.peak = max(self.peak, self.in_flight)

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            nbytes, turn = self._waiting.popleft()
            if not turn.done():
                self._account(nbytes)
                turn.set_result(None)

    def _buffer(self, nbytes: int, loop: asyncio.AbstractEventLoop) -> memoryview:
        spare = self._spare.get(nbytes)
        whole = spare.pop() if spare else np.empty(nbytes + _ALIGN, dtype=np.uint8)
        start = -whole.ctypes.data % _ALIGN  # page-aligned, for storages that write past the page cache
        lent = whole[start : start + nbytes]
        weakref.finalize(lent, _returned, weakref.ref(self), loop, nbytes, whole).atexit = False
        return lent.data

    def _give_back(self, nbytes: int, whole: NDArray[np.uint8] | None) -> None:
        self.in_flight -= nbytes
        if whole is not None:
            spare = self._spare.setdefault(nbytes, [])
            kept = sum(len(s) for s in self._spare.values())
            if kept < _KEEP_AT_MOST:
                spare.append(whole)
            elif not spare:
                self._spare.clear()  # sizes have changed: keep what is in use now
                self._spare[nbytes] = [whole]
        self._grant()


def _returned(budget: weakref.ref[ByteBudget], loop: asyncio.AbstractEventLoop, nbytes: int, whole: NDArray[np.uint8]) -> None:
    """The last view of a buffer went, in whichever thread: the budget itself is only touched on its loop's thread."""
    alive = budget()
    if alive is not None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the budget with it
            loop.call_soon_threadsafe(alive._give_back, nbytes, whole)
