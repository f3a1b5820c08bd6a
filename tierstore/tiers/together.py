"""Doing many small things at once, bounded, without leaving any of them behind; and one that nobody may cancel but its caller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from tierstore.errors import TemporaryError

__all__ = ["happens", "only_ours_to_cancel", "together"]

_T = TypeVar("_T")
_R = TypeVar("_R")


async def together(work: Callable[[_T], Awaitable[_R]], items: Iterable[_T], *, at_once: int = 32) -> list[_R]:
    """Calls `work` for each item, `at_once` at a time; returns the results in order.

    After a failure nothing new is begun, what runs is waited for, and the first error is raised: no task outlives the call.
    """
    waiting = list(items)
    results: list[Any] = [None] * len(waiting)
    numbers = iter(range(len(waiting)))
    failed = False

    async def worker() -> None:
        nonlocal failed
        for number in numbers:
            if failed:
                return
            try:
                results[number] = await work(waiting[number])
            except BaseException:
                failed = True
                raise

    tasks = [asyncio.ensure_future(worker()) for _ in range(min(at_once, len(waiting)))]  # not one for each of 100,000 items
    try:
        done = await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        await asyncio.gather(*tasks, return_exceptions=True)  # gather has cancelled them; they end before we do
        raise
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return results


async def happens(event: asyncio.Event, within_s: float | None) -> bool:
    """Waits until `event` is set, `within_s` seconds at most (None: without end); returns whether it is.

    Before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes at the same moment as the event: a task that waits in a
    loop would then never end.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=within_s)
    finally:
        waiting.cancel()
    return event.is_set()


async def only_ours_to_cancel(coro: Coroutine[Any, Any, _R]) -> _R:
    """Awaits `coro`; a cancellation from beneath (a client library that cancels its own requests) is an error like any other.

    A stray `asyncio.CancelledError` would end the task that it comes up in, and with it a background worker, without a word. In a
    task of its own the two kinds can be told apart. Cancelling the caller cancels `coro`, and it ends before the caller does.

    Raises:
        TemporaryError: `coro` was cancelled, and not by us.
    """
    task = asyncio.ensure_future(coro)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # we are cancelled: nobody asks what it came to
        raise
    if task.cancelled():
        raise TemporaryError("an operation was cancelled from beneath, by its storage or a client library", hint="it is tried again")
    return task.result()
