"""How many transfers one S3 storage has in flight: as many as allowed, halved when the server asks to slow down."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from types import TracebackType

from tierstore.errors import UsageError
from tierstore.storage.s3_errors import is_throttling

__all__ = ["Slots"]

_log = logging.getLogger(__name__)


class Slots:
    """Slots for transfers, handed out in the order of asking: ``async with slots: ...`` around each.

    Additive increase, multiplicative decrease (Chiu and Jain, 1989; as TCP has it): an answer that asks to slow down halves the
    limit, once for all transfers that were under way when it was halved, for they all met the same congestion; a limit's worth of
    successes while all of the limit was in use raises it by one, up to `most`.

    Belongs to one event loop.

    Args:
        most: The limit to begin with, and the highest.
        name: Whose transfers they are, for the log.
    """

    def __init__(self, most: int, name: str = "") -> None:
        if most < 1:
            raise UsageError(f"{most} transfers at once move nothing", hint="give one or more")
        self.most = most
        self.limit = most
        """How many may be in flight now."""
        self.in_flight = 0
        self.peak = 0
        """The most that ever were."""
        self.slowdowns = 0
        """How often the limit was halved."""
        self._name = name
        self._good = 0
        self.generation = 0
        """Counts the halvings: which of them a transfer began after."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._begun: dict[asyncio.Task[object] | None, list[int]] = {}

    async def acquire(self) -> int:
        """Waits for a slot; returns what `release` and `slow_down` are to be told."""
        if self._waiting or self.in_flight >= self.limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self.in_flight -= 1  # it was granted in the same instant
                elif turn in self._waiting:  # else it was passed over in the same instant
                    self._waiting.remove(turn)
                self._grant()
                raise
        else:
            self._take()
        return self.generation

    def release(self) -> None:
        self.in_flight -= 1
        self._grant()

    def succeeded(self) -> None:
        """A transfer ended well; its slot is not given back yet."""
        if self.limit == self.most or self.in_flight < self.limit:
            return  # what was not used was not proved to be borne
        self._good += 1
        if self._good >= self.limit:
            self._good, self.limit = 0, self.limit + 1
            if self.limit == self.most:
                _log.info("event=full-speed storage=%s transfers=%d", self._name, self.limit)
            self._grant()

    def slow_down(self, generation: int) -> None:
        """The server asked for it in answer to a request that was sent in `generation`."""
        if generation != self.generation:
            return  # it was on its way when the limit was halved: one congestion, one answer
        before, self.limit = self.limit, max(1, self.limit // 2)
        self._good = 0
        self.generation += 1
        self.slowdowns += 1
        if self.limit < before:
            _log.warning("event=slow-down storage=%s transfers=%d before=%d reason=the server asks for it", self._name, self.limit, before)

    def _take(self) -> None:
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)

    def _grant(self) -> None:
        while self._waiting and self.in_flight < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._take()
                turn.set_result(None)

    async def __aenter__(self) -> Slots:
        generation = await self.acquire()
        self._begun.setdefault(asyncio.current_task(), []).append(generation)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        task = asyncio.current_task()
        begun = self._begun[task]
        generation = begun.pop()
        if not begun:
            del self._begun[task]
        if error is None:
            self.succeeded()
        elif is_throttling(error):
            self.slow_down(generation)
        self.release()
