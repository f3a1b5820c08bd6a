"""Doing many small things at once, bounded, without leaving any of them behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

__all__ = ["together"]

_T = TypeVar("_T")
_R = TypeVar("_R")


async def together(work: Callable[[_T], Awaitable[_R]], items: Iterable[_T], *, at_once: int = 32) -> list[_R]:
    """Calls `work` for each item, `at_once` at a time; returns the results in order.

    After a failure nothing new is begun, what runs is waited for, and the first error is raised: no task outlives the call.
    """
    slots = asyncio.Semaphore(at_once)
    failed = False

    async def one(item: _T) -> _R | None:
        nonlocal failed
        async with slots:
            if failed:
                return None
            try:
                return await work(item)
            except BaseException:
                failed = True
                raise

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        done = await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        await asyncio.gather(*tasks, return_exceptions=True)  # gather has cancelled them; they end before we do
        raise
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return done  # type: ignore[return-value]  # no failure: every item has its result
