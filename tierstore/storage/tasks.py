"""Ending asyncio tasks: none of them outlives the call that began it, and no failure is reported a second time by asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

__all__ = ["all_or_none", "end_all", "in_thread_to_the_end", "to_the_end"]

_R = TypeVar("_R")


async def end_all(tasks: Collection[asyncio.Future[Any]]) -> list[Any]:
    """Cancels those of `tasks` that still run and waits until all have ended; returns what each came to, an exception included."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def all_or_none(works: Collection[Awaitable[_R]]) -> list[_R]:
    """Runs all of `works` at once; on the first failure, or when cancelled, the others are ended and awaited."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


async def in_thread_to_the_end(work: Callable[[], None]) -> None:
    """Runs `work` in a thread. A thread can't be cancelled: who is cancelled meanwhile, however often, waits for it, and lets go then."""
    working = asyncio.get_running_loop().run_in_executor(None, work)  # no task: a loop that is closed cancels those
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


async def to_the_end(cleanup: Awaitable[None]) -> None:
    """Awaits `cleanup` even while being cancelled (again): what it leaves behind costs room or money, and nobody sees it."""
    task = asyncio.ensure_future(cleanup)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                return
    task.result()
