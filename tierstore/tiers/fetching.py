"""Carrying out planned reads: several at once, in bounded memory, each brought to those who want it while others are being read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np

from tierstore.tiers.costs import BUDGET_NBYTES
from tierstore.tiers.reads import Handover, Span

__all__ = ["BUDGET_NBYTES", "fetch"]

_IN_PASSING_NBYTES = 1 << 20
"""What is copied on the event loop itself: a thread costs more."""


async def fetch(
    spans: Sequence[Span], read: Callable[[Span, memoryview], Awaitable[None]], *, concurrency: int, budget_nbytes: int = BUDGET_NBYTES
) -> None:
    """Reads all spans: straight into the buffer of the want that a span lies in, else into scratch memory, and from there.

    Args:
        spans: From `plan_spans`, in the order in which they are begun.
        read: Fills memory with a span's bytes, proved.
        concurrency: How many are read at once, at most.
        budget_nbytes: Scratch memory, in bytes; what is put together from several spans (`Handover`) included. One span at a time is
            read whatever its length.

    Raises:
        Exception: The first error of `read`, or of a `Handover.take`; nobody writes into the buffers after that.
    """
    if not spans:
        return
    places = _Places(spans, budget_nbytes)
    queue = iter(spans)
    tasks = [asyncio.ensure_future(_work(queue, read, places)) for _ in range(min(concurrency, len(spans)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Places:
    """Scratch memory, made when it is needed and used again: as many places for a span as the budget has room for."""

    def __init__(self, spans: Sequence[Span], budget_nbytes: int) -> None:
        scratched = [span for span in spans if span.direct() is None]
        self._longest = max((span.nbytes for span in scratched), default=0)
        # A handover that crosses from one span into the next is put together in memory of its own: at both ends of each span at worst.
        crossing = max(
            (w.nbytes for s in scratched for w in s.wants if isinstance(w, Handover) and not s.begin <= w.offset <= w.end <= s.end),
            default=0,
        )
        self._free = asyncio.Semaphore(max(1, budget_nbytes // max(1, self._longest + 2 * crossing)))
        self._spare: list[memoryview] = []

    async def take(self) -> memoryview:
        await self._free.acquire()
        return self._spare.pop() if self._spare else np.empty(self._longest, dtype=np.uint8).data

    def give_back(self, place: memoryview) -> None:
        self._spare.append(place)
        self._free.release()


async def _work(queue: Iterator[Span], read: Callable[[Span, memoryview], Awaitable[None]], places: _Places) -> None:
    for span in queue:
        view = span.direct()
        if view is not None:
            await read(span, view)
            continue
        place = await places.take()
        try:
            part = place[: span.nbytes]
            await read(span, part)
            if span.nbytes <= _IN_PASSING_NBYTES:
                span.scatter(part)
            else:
                await _to_the_end(span.scatter, part)
        finally:
            places.give_back(place)


async def _to_the_end(work: Callable[[memoryview], None], part: memoryview) -> None:
    """Runs `work` in a thread. A thread can't be cancelled: who is cancelled meanwhile, however often, waits for it, and lets go then."""
    working = asyncio.get_running_loop().run_in_executor(None, work, part)  # no task: a loop that is closed cancels those
    cancelled = False
    while not working.done():
        try:
            await asyncio.wait({working})
        except asyncio.CancelledError:
            cancelled = True
    failure = working.exception()
    if cancelled:
        raise asyncio.CancelledError
    if failure is not None:
        raise failure
