"""Carrying out planned reads: several at once, in bounded memory, each brought to those who want it while others are being read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import numpy as np

from tierstore.storage.tasks import in_thread_to_the_end
from tierstore.tiers.costs import BUDGET_NBYTES
from tierstore.tiers.reads import Handover, Span

__all__ = ["BUDGET_NBYTES", "Place", "Read", "fetch"]

Read = Callable[[Span, memoryview], Awaitable[None]]
"""Fills memory with a span's bytes, proved."""
Place = Callable[[Span], Awaitable[tuple[Sequence[Span], Read]]]
"""Brings a span straight to those who want it, proved; gives what of it could not be brought so, and how that is to be read."""

_IN_PASSING_NBYTES = 1 << 20
"""What is copied on the event loop itself: a thread costs more."""


async def fetch(
    spans: Sequence[Span], read: Read, *, concurrency: int, budget_nbytes: int = BUDGET_NBYTES, place: Place | None = None
) -> None:
    """Reads all spans: straight into the buffer of the want that a span lies in, else into scratch memory, and from there.

    Args:
        spans: From `plan_spans`, in the order in which they are begun.
        read: Reads a span into memory.
        concurrency: How many are read at once, at most.
        budget_nbytes: Scratch memory, in bytes; what is put together from several spans (`Handover`) included. One span at a time is
            read whatever its length.
        place: Is asked first for spans that no one want has room for; None: there is only `read`.

    Raises:
        Exception: The first error of `read`, of `place`, or of a `Handover.take`; nobody writes into the buffers after that.
    """
    if not spans:
        return
    places = _Places(spans, budget_nbytes)
    queue = iter(spans)
    tasks = [asyncio.ensure_future(_work(queue, read, place, places)) for _ in range(min(concurrency, len(spans)))]
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


async def _work(queue: Iterator[Span], read: Read, place: Place | None, places: _Places) -> None:
    for span in queue:
        if place is None or span.direct() is not None:
            await _read_one(span, read, places)
            continue
        left, how = await place(span)
        for one in left:
            await _read_one(one, how, places)


async def _read_one(span: Span, read: Read, places: _Places) -> None:
    view = span.direct()
    if view is not None:
        await read(span, view)
        return
    place = await places.take()
    try:
        part = place[: span.nbytes]
        await read(span, part)
        if span.nbytes <= _IN_PASSING_NBYTES:
            span.scatter(part)
        else:
            await in_thread_to_the_end(partial(span.scatter, part))
    finally:
        places.give_back(place)
