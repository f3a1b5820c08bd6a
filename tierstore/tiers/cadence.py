"""When the next save is due by ``save.every`` of the configuration, and why."""

from __future__ import annotations

import logging
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tierstore.clock import Clock
from tierstore.config_cadence import AutoEvery, BetterEvery, DynamicEvery, SaveEvery
from tierstore.errors import TierStoreError
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.intervals import ObservedFailures, daly_interval, observed_failures
from tierstore.units import format_duration

__all__ = ["Cadence", "Verdict"]

log = logging.getLogger(__name__)

_REMEMBERED = 5
_UNMEASURED_S = 1.0
"""What a save is taken to cost before the first one was measured, in seconds."""

_TOLD_CHANGE = 0.1
"""An interval is told of again when it has changed by this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An answer: whether to save now, why (empty where not), and the first step at which it can be otherwise as far as is known."""

    due: bool
    why: str = ""
    ask_again: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interval:
    seconds: float
    reasoning: str


class Cadence:
    """Counts from the last save, or from the first question. Safe from several threads.

    Args:
        every: The rule; None: no save is ever due by itself.
        clock: The clock.
        history: Asked once, if the rule needs it: the run's checkpoints.
    """

    def __init__(
        self,
        every: SaveEvery | None,
        clock: Clock,
        *,
        history: Callable[[], Sequence[CheckpointInfo]] = lambda: (),
    ) -> None:
        self._rules = every.rules if every is not None else ()
        self._clock = clock
        self._ask_history = history
        self._lock = threading.RLock()
        self._last_at: float | None = None
        self._last_step: int | None = None
        self._stalls: deque[float] = deque(maxlen=_REMEMBERED)
        self._commits: deque[float] = deque(maxlen=_REMEMBERED)
        self._metrics: dict[str, float] = {}
        self._at_save: dict[str, float] = {}
        self._best: dict[tuple[str, str], float | None] = {}
        self._checkpoints: Sequence[CheckpointInfo] | None = None
        self._failures: ObservedFailures | None = None
        self._told_s: float | None = None
        self._first: tuple[int, float] | None = None

    # ---- what happens

    def saved(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """A save was taken now."""
        with self._lock:
            self._last_at, self._last_step = self._clock.monotonic(), step
            self._metrics.update(metrics or {})
            self._at_save = dict(self._metrics)
            for metric, mode in self._best:
                value = self._metrics.get(metric)
                if value is not None and _better(value, self._best[metric, mode], mode, 0.0):
                    self._best[metric, mode] = value

    def stalled(self, seconds: float) -> None:
        """How long a save kept its caller."""
        with self._lock:
            self._stalls.append(seconds)

    def committed(self, seconds: float) -> None:
        """How long it took from the call of `save` to the commit."""
        with self._lock:
            self._commits.append(seconds)

    # ---- questions

    def look(self, step: int, metrics: Mapping[str, float] | None = None) -> Verdict:
        """Whether to save at `step`.

        Args:
            step: The step that was just trained.
            metrics: What was measured at it; what is not given keeps its last value.
        """
        with self._lock:
            self._metrics.update(metrics or {})
            now = self._clock.monotonic()
            self._last_at = now if self._last_at is None else self._last_at
            self._last_step = step if self._last_step is None else self._last_step
            self._first = (step, now) if self._first is None else self._first
            verdicts = [self._ask(rule, step, now, metrics or {}) for rule in self._rules]
        return next((v for v in verdicts if v.due), Verdict(due=False, ask_again=min((v.ask_again for v in verdicts), default=step + 1)))

    def explain(self) -> str:
        """The rules in words, with what they come to now and why."""
        with self._lock:
            told = [self._told(rule) for rule in self._rules]
        return "; or ".join(told) if told else "no save is due by itself: save.every is not set"

    # ---- inside

    def _ask(self, rule: SaveEvery, step: int, now: float, given: Mapping[str, float]) -> Verdict:
        if rule.steps is not None:
            return _by_step(rule.steps, step)
        if rule.better is not None:
            return self._by_metric(rule.better, step, given)
        if rule.dynamic is not None:
            return self._by_movement(rule.dynamic, step)
        if rule.auto is not None:
            interval = self._interval(rule.auto)
            self._tell(interval)
            return self._by_time(interval.seconds, step, now, interval.reasoning)
        assert rule.seconds is not None
        return self._by_time(rule.seconds, step, now, f"every {_told(rule.seconds)}")

    def _by_time(self, interval_s: float, step: int, now: float, why: str) -> Verdict:
        assert self._last_at is not None
        assert self._first is not None
        left = interval_s - (now - self._last_at)
        if left <= 0:
            return Verdict(due=True, why=why)
        steps, seconds = step - self._first[0], now - self._first[1]
        # Half of the way, for steps may become quicker; without a measure of a step, the next one.
        ahead = int(left / (seconds / steps) / 2) if steps > 0 and seconds > 0 else 1
        return Verdict(due=False, ask_again=step + max(1, min(ahead, 1000)))

    def _by_metric(self, rule: BetterEvery, step: int, given: Mapping[str, float]) -> Verdict:
        value = given.get(rule.metric)
        again = Verdict(due=False, ask_again=step + 1)
        if value is None:
            return again
        best = self._best_of(rule)
        if not _better(value, best, rule.mode, rule.by):
            return again
        than = f"than {best:.6g}" if best is not None else "than nothing before it"
        return Verdict(due=True, why=f"{rule.metric} is {value:.6g}, better {than}")

    def _by_movement(self, rule: DynamicEvery, step: int) -> Verdict:
        assert self._last_step is not None
        since = step - self._last_step
        if 0 <= since < rule.least:
            return Verdict(due=False, ask_again=self._last_step + rule.least)
        if since < 0 or since >= rule.most:
            return Verdict(due=True, why=f"{abs(since)} steps since the last save (most {rule.most})")
        moved = self._moved(rule.metric)
        if moved is not None and moved >= rule.change:
            return Verdict(due=True, why=f"{rule.metric} has moved by {moved:.1%} since the last save ({since} steps)")
        return Verdict(due=False, ask_again=step + 1)

    def _moved(self, metric: str) -> float | None:
        """By which share of its size at the last save a metric has changed; None where nothing can be said."""
        value, before = self._metrics.get(metric), self._at_save.get(metric)
        if value is None or not math.isfinite(value):
            return None
        if before is None or not math.isfinite(before):
            self._at_save[metric] = value  # the first value is what later ones are measured by
            return None
        return abs(value - before) / max(abs(before), 1e-12)

    def _best_of(self, rule: BetterEvery) -> float | None:
        key = (rule.metric, rule.mode)
        if key not in self._best:
            values = [c.metrics[rule.metric] for c in self._history() if not math.isnan(c.metrics.get(rule.metric, math.nan))]
            self._best[key] = None if not values else min(values) if rule.mode == "min" else max(values)
        return self._best[key]

    def _history(self) -> Sequence[CheckpointInfo]:
        if self._checkpoints is None:
            try:
                self._checkpoints = self._ask_history()
            except TierStoreError as error:  # a tier that is down is no reason not to save
                log.warning("save.every: the run's history can't be read, and is taken to be empty: %s", error.message)
                self._checkpoints = ()
        return self._checkpoints

    def _interval(self, rule: AutoEvery) -> _Interval:
        cost = statistics.median(self._stalls) if self._stalls else _UNMEASURED_S
        measured = f"median of {len(self._stalls)}" if self._stalls else "assumed, none was measured yet"
        if rule.mtbf_s is not None:
            mtbf, origin = rule.mtbf_s, "configured"
        else:
            if self._failures is None:
                self._failures = observed_failures(self._history())
            mtbf = self._failures.mtbf_s
            origin = f"observed: {self._failures.restarts} restarts in {_told(self._failures.uptime_s)} of this run, and one a day assumed"
        best = daly_interval(max(cost, 1e-3), mtbf)
        text = (
            f"a save stalls training for {_told(cost)} ({measured}), failures come every {_told(mtbf)} ({origin}): "
            f"least is lost with a save every {_told(best)} (Daly 2006)"
        )
        seconds = best
        if self._commits and (drain := statistics.median(self._commits)) > seconds:
            seconds = drain
            text += f"; raised to {_told(drain)}, which a save takes until it is committed: more often they would queue"
        if rule.least_s is not None and seconds < rule.least_s:
            seconds = rule.least_s
            text += f"; raised to the configured least, {_told(seconds)}"
        if rule.most_s is not None and seconds > rule.most_s:
            seconds = rule.most_s
            text += f"; lowered to the configured most, {_told(seconds)}"
        return _Interval(seconds=seconds, reasoning=text)

    def _tell(self, interval: _Interval) -> None:
        if self._told_s is None or abs(interval.seconds - self._told_s) > _TOLD_CHANGE * self._told_s:
            self._told_s = interval.seconds
            log.info("save.every auto: %s: %s", _told(interval.seconds), interval.reasoning)

    def _told(self, rule: SaveEvery) -> str:
        if rule.steps is not None:
            return f"every {rule.steps} steps"
        if rule.better is not None:
            best = self._best_of(rule.better)
            return f"when {rule.better.metric} is better than " + (f"{best:.6g}" if best is not None else "ever (none is known yet)")
        if rule.dynamic is not None:
            moved = self._moved(rule.dynamic.metric)
            so_far = f", {moved:.1%} so far" if moved is not None else ""
            return (
                f"when {rule.dynamic.metric} has moved by {rule.dynamic.change:.1%} since the last save{so_far}, "
                f"after {rule.dynamic.least} to {rule.dynamic.most} steps"
            )
        if rule.auto is not None:
            interval = self._interval(rule.auto)
            return f"every {_told(interval.seconds)}: {interval.reasoning}"
        assert rule.seconds is not None
        return f"every {_told(rule.seconds)}"


def _by_step(every: int, step: int) -> Verdict:
    if step > 0 and step % every == 0:
        return Verdict(due=True, why=f"every {every} steps")
    return Verdict(due=False, ask_again=(step // every + 1) * every)


def _better(value: float, best: float | None, mode: str, by: float) -> bool:
    """NaN is never better, and anything is better than NaN."""
    if math.isnan(value):
        return False
    if best is None or math.isnan(best):
        return True
    gain = best - value if mode == "min" else value - best
    return gain > 0 and gain >= by


def _told(seconds: float) -> str:
    return f"{seconds:.2g}s" if seconds < 10 else format_duration(seconds)
