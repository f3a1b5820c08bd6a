"""What a request to a tier costs: from its latency and bandwidth, configured or measured from the reads that are made anyway.

A gap of unwanted bytes is worth reading where it passes sooner than a further request would answer: latency times bandwidth. Both are
what one request sees while others are under way; so a slow link that is shared by many is judged by its share.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations

from tierstore.tiers.reads import ReadCost

__all__ = ["BUDGET_NBYTES", "LOCAL_COST", "REMOTE_COST", "ReadSpeed", "Speed", "cost_of"]

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

BUDGET_NBYTES = 256 << 20
"""Scratch memory of one load, in bytes, where nothing else is said."""

MIN_GAP_NBYTES = 64 * _KIB
MAX_GAP_NBYTES = 2 * _MIB
"""Two blocks: what verification may fetch needlessly at two ends anyway. So a slice never costs more than that, however far the tier."""

_PITCH_NBYTES = 8 * _MIB
"""Object stores bill requests and throttle those who send too many, so that there they are counted, however fast they are answered."""

_LEAST_NBYTES = 1 * _MIB
"""A shorter request to an object store would mostly wait."""

_WAITING_S = 312.5e-6
_MAX_AT_ONCE = 64

_SAMPLES = 64
_MIN_SAMPLES = 16
_MIN_NBYTES = 32 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """`latency_s`: seconds until the first byte of an answer. `bandwidth`: bytes per second that one request then gets."""

    latency_s: float
    bandwidth: float


LOCAL = Speed(latency_s=125e-6, bandwidth=2 * _GIB)
"""A file system: a request costs about what 256 KiB cost."""

REMOTE = Speed(latency_s=10e-3, bandwidth=100 * _MIB)
"""An object store: a request costs what 1 MiB costs."""


def cost_of(speed: Speed, *, local: bool) -> ReadCost:
    """What the planner needs to know, within bounds that keep a wrong number from doing harm. `local`: it is a file system."""
    gap = int(min(max(speed.latency_s * speed.bandwidth, MIN_GAP_NBYTES), MAX_GAP_NBYTES))
    waiting = round(speed.latency_s / _WAITING_S)  # requests that mostly wait take nothing from each other
    return ReadCost(
        gap_nbytes=gap,
        concurrency=min(max(waiting, 4), _MAX_AT_ONCE),
        pitch_nbytes=0 if local else _PITCH_NBYTES,
        least_nbytes=0 if local else _LEAST_NBYTES,
    )


LOCAL_COST = cost_of(LOCAL, local=True)
REMOTE_COST = cost_of(REMOTE, local=False)


@dataclass(slots=True, kw_only=True)
class ReadSpeed:
    """How fast one tier answers: as configured, else as measured by its reads, else what is usual for its kind.

    Measured numbers count once there are 16 reads of 32 MiB together, so that a short load is planned the same every time. They are
    medians: a read that hung says nothing. Belongs to one event loop.

    Attributes:
        latency_s: Configured, in seconds; None: measured.
        bandwidth: Configured, in bytes per second; None: measured.
        now: Seconds of a monotonic clock; for tests.
    """

    latency_s: float | None = None
    bandwidth: float | None = None
    now: Callable[[], float] = time.monotonic
    _samples: deque[tuple[int, float]] = field(init=False, default_factory=lambda: deque(maxlen=_SAMPLES))
    _fresh: int = field(init=False, default=0)
    _nbytes: int = field(init=False, default=0)
    _measured: Speed | None = field(init=False, default=None)

    def note(self, nbytes: int, seconds: float) -> None:
        """A read of `nbytes` was answered after `seconds`."""
        if nbytes > 0 and seconds > 0:
            self._samples.append((nbytes, seconds))
            self._fresh += 1
            self._nbytes += nbytes

    def speed(self, *, local: bool) -> Speed:
        """What is known now. `local`: the kind of tier, for what is neither configured nor measured."""
        usual = LOCAL if local else REMOTE
        usual = Speed(
            latency_s=usual.latency_s if self.latency_s is None else self.latency_s,
            bandwidth=usual.bandwidth if self.bandwidth is None else self.bandwidth,
        )
        if self._nbytes >= _MIN_NBYTES and self._fresh >= _MIN_SAMPLES and None in (self.latency_s, self.bandwidth):
            self._fresh = 0
            self._measured = self._measure(usual)
        return self._measured or usual

    def cost(self, *, local: bool) -> ReadCost:
        return cost_of(self.speed(local=local), local=local)

    def _measure(self, usual: Speed) -> Speed:
        """Time over length as a straight line, by the median of the slopes between reads of different lengths (Theil 1950, Sen 1968).

        Where all reads have about one length, the usual latency is taken for granted.
        """
        latency, bandwidth = self.latency_s, self.bandwidth
        if latency is None:
            slope = 1 / bandwidth if bandwidth is not None else _slope(self._samples)
            if slope is None:
                latency = usual.latency_s
            else:
                latency = max(statistics.median(s - slope * n for n, s in self._samples), 1e-6)
        if bandwidth is None:
            bandwidth = statistics.median(n / max(s - latency, s / 10) for n, s in self._samples)
        return Speed(latency_s=latency, bandwidth=bandwidth)


def _slope(samples: Iterable[tuple[int, float]]) -> float | None:
    """Seconds per byte; None where the lengths differ too little, or the times do not grow with them."""
    slopes = [(t - s) / (m - n) for (n, s), (m, t) in combinations(samples, 2) if max(m, n) >= 2 * min(m, n)]
    slope = statistics.median(slopes) if len(slopes) >= _MIN_SAMPLES else 0.0
    return slope if slope > 0 else None
