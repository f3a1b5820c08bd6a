"""A clock that only moves when somebody sleeps."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from datetime import datetime, timezone

__all__ = ["ManualClock"]


class ManualClock:
    """Sleepers wake in the order of their time; the clock jumps to the next one when it is told to."""

    def __init__(self) -> None:
        self.at = 100.0
        self._numbers = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.at, timezone.utc)

    def monotonic(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        heapq.heappush(self._sleepers, (self.at + seconds, next(self._numbers), event))
        await event.wait()

    def wake_next(self) -> None:
        """The next sleeper's time has come, if there is one."""
        if self._sleepers:
            self.at, _, event = heapq.heappop(self._sleepers)
            event.set()

    async def drive(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wakes one after the other, each time that all tasks wait, until they have ended; raises what they raise."""
        while not all(task.done() for task in tasks):
            for _ in range(5):
                await asyncio.sleep(0)
            if not all(task.done() for task in tasks):
                self.wake_next()
        for task in tasks:
            task.result()
