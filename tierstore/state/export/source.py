"""Files that are made while they are written: window by window, from range reads, in bounded memory."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tierstore.errors import UsageError

__all__ = ["WindowSource"]

Make = Callable[[int, int], memoryview]
"""Makes the bytes ``[begin, end)`` of a file; called on a thread."""


class WindowSource:
    """A `storage.contract.Source` whose bytes are made by `make`, one window at a time and one ahead; a pull waits for its window.

    What is pulled in order is made once. A part that is pulled again later (a retry) is made again. Close it when the write has ended.

    Args:
        cuts: Where windows begin, from 0, and at the end the file's length.
        make: Makes a window.
        on_bytes: Told how many bytes more are made.
    """

    def __init__(self, cuts: Sequence[int], make: Make, on_bytes: Callable[[int], None] = lambda nbytes: None) -> None:
        self._cuts = cuts
        self._make = make
        self._on_bytes = on_bytes
        self._windows: dict[int, asyncio.Future[memoryview]] = {}
        self._newest = -1
        self._made_to = 0
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tierstore-export")

    @property
    def nbytes(self) -> int:
        return self._cuts[-1]

    async def read(self, offset: int, nbytes: int) -> memoryview:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise UsageError(f"a source of {self.nbytes} bytes has no {nbytes} bytes at {offset}", hint="pull inside the source")
        if nbytes == 0:
            return memoryview(b"")
        number = bisect.bisect_right(self._cuts, offset) - 1
        begin, end = self._cuts[number], self._cuts[number + 1]
        if offset + nbytes <= end:
            return (await self._window(number))[offset - begin : offset - begin + nbytes]
        joined = memoryview(bytearray(nbytes))
        at = offset
        while at < offset + nbytes:
            begin, end = self._cuts[number], self._cuts[number + 1]
            stop = min(end, offset + nbytes)
            joined[at - offset : stop - offset] = (await self._window(number))[at - begin : stop - begin]
            at, number = stop, number + 1
        return joined

    def close(self) -> None:
        """Waits for the window that is being made, and lets go of all."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._windows.clear()

    async def _window(self, number: int) -> memoryview:
        window = self._start(number)
        if number > self._newest:
            self._newest = number
            for old in [n for n in self._windows if n < number - 1]:
                del self._windows[old]  # parts that are still on their way keep its memory alive
        if number == self._newest and number + 2 < len(self._cuts):
            self._start(number + 1)
        try:
            return await asyncio.shield(window)  # several pulls wait for one window: that one of them is cancelled is no news to it
        except Exception:
            if self._windows.get(number) is window:
                del self._windows[number]  # the storage may pull again: then it is tried again
            raise

    def _start(self, number: int) -> asyncio.Future[memoryview]:
        window = self._windows.get(number)
        if window is None:
            loop = asyncio.get_running_loop()
            window = self._windows[number] = loop.run_in_executor(self._pool, self._made, number)
            window.add_done_callback(_look)
        return window

    def _made(self, number: int) -> memoryview:
        begin, end = self._cuts[number], self._cuts[number + 1]
        window = self._make(begin, end)
        if window.nbytes != end - begin:
            raise RuntimeError(f"a window of {end - begin} bytes was made with {window.nbytes}")  # a fault of ours
        if end > self._made_to:  # there is one thread
            self._on_bytes(end - self._made_to)
            self._made_to = end
        return window


def _look(window: asyncio.Future[Any]) -> None:
    """A window that was made ahead and failed is told when it is pulled; if it never is, nobody has to hear of it."""
    if not window.cancelled():
        window.exception()
