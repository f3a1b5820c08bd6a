"""A limit in bytes per second: a token bucket that may go into debt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from tierstore.clock import Clock
from tierstore.errors import UsageError

__all__ = ["Bandwidth"]


class Bandwidth:
    """Lets `bytes_per_s` bytes pass each second in the long run, in the order in which they were asked for.

    A request larger than the bucket is let through after the time that it takes at this rate, so that a limit below the size of
    one part works too. Can be shared between threads and event loops.

    Args:
        bytes_per_s: The limit.
        clock: Its `monotonic` is read.
        burst_s: How many seconds' worth of bytes may pass at once after a pause.
        sleep: How to wait, in seconds; tests inject one that moves the clock.
    """

    def __init__(
        self,
        bytes_per_s: float,
        clock: Clock,
        *,
        burst_s: float = 0.1,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        if not bytes_per_s > 0:
            raise UsageError(f"a bandwidth of {bytes_per_s} bytes per second lets nothing pass", hint="give a rate above zero, or none")
        self._rate = float(bytes_per_s)
        self._burst = burst_s * self._rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._tokens = self._burst
        self._at = clock.monotonic()

    async def take(self, nbytes: int) -> None:
        """Waits until `nbytes` more bytes may pass; cancelled, it gives them back."""
        with self._lock:
            now = self._clock.monotonic()
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
            self._at = now
            self._tokens -= nbytes
            wait_s = -self._tokens / self._rate
        if wait_s > 0:
            try:
                await self._sleep(wait_s)
            except asyncio.CancelledError:
                with self._lock:
                    self._tokens += nbytes
                raise
