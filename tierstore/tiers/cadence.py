"""When the next save is due by ``save.every`` of the configuration."""

from __future__ import annotations

import math
import threading

from tierstore.clock import Clock
from tierstore.config_models import SaveEvery

__all__ = ["Cadence"]


class Cadence:
    """Counts from the last save, or from the first question. Safe from several threads.

    Args:
        every: The rule; None: no save is ever due by itself.
        clock: The clock.

    Attributes:
        stall_s: How long the last save held the trainer up, seconds.
    """

    def __init__(self, every: SaveEvery | None, clock: Clock) -> None:
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()
        self._last_at: float | None = None
        self.stall_s = 0.0

    def saved(self) -> None:
        """A save was taken now."""
        with self._lock:
            self._last_at = self._clock.monotonic()

    def due(self, step: int) -> bool:
        """Whether to save at `step`.

        ``{auto: {mtbf: …}}`` uses the first-order optimum of Young (CACM 17, 1974) for the interval, ``sqrt(2 * cost * MTBF)`` seconds,
        with `stall_s` as the cost.
        """
        every = self._every
        if every is None:
            return False
        if every.steps is not None:
            return step > 0 and step % every.steps == 0
        if every.seconds is not None:
            interval_s = float(every.seconds)
        elif every.auto is not None:
            interval_s = math.sqrt(2.0 * max(self.stall_s, 1e-3) * every.auto.mtbf_s)
        else:
            return False
        with self._lock:
            if self._last_at is None:
                self._last_at = self._clock.monotonic()
            return self._clock.monotonic() - self._last_at >= interval_s
