"""The ticket of one save: which levels and tiers it has reached, and what went wrong on the way (DESIGN.md §6.6)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from tierstore.clock import Clock, SystemClock
from tierstore.errors import DeadlineError, SaveError, TierStoreError, UsageError, reason_of
from tierstore.names import Attempt
from tierstore.tiers.stall import StageTimes

__all__ = ["LEVELS", "Ticket", "TicketEvent"]

log = logging.getLogger(__name__)

LEVELS = ("staged", "committed", "durable")
"""The levels that every save goes through; beside them, each tier's name is a level of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketEvent:
    """One thing that happened to a save: a level was reached (`error` is None), or an attempt at it failed."""

    attempt: Attempt
    level: str
    at: datetime
    error: Exception | None = None


class Ticket:
    """What `save` returns. Safe from any thread; the background work reports through `reach`, `report` and `fail`.

    - ``staged``: this process's part is complete on the nearest tier (or in its memory, see the worker) and survives the process.
    - ``committed``: the commit record exists in the authority: it survives power loss.
    - ``durable``: committed, with a verified copy on the tier that the configuration names as ``durable_at``.
    - a tier's name: a complete copy is committed on that tier.

    Args:
        attempt: The attempt that this ticket follows.
        tiers: The names of the store's tiers.
        clock: The clock of events and deadlines.
    """

    def __init__(self, attempt: Attempt, *, tiers: Sequence[str], clock: Clock | None = None) -> None:
        self.attempt = attempt
        self.stall_s = 0.0
        """How long the call of `save` kept its caller, in seconds."""
        self.stall: StageTimes | None = None
        """Where most of that went; None where the caller was not kept by a copy (`Store.adopt`)."""
        self._levels = (*LEVELS, *(t for t in tiers if t not in LEVELS))
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._reached: dict[str, TicketEvent] = {}
        self._failed: dict[str, Exception] = {}
        self._callbacks: dict[str, list[Callable[[TicketEvent], None]]] = {level: [] for level in self._levels}
        self._events: list[TicketEvent] = []

    # ---- for the caller

    @property
    def staged(self) -> bool:
        """Whether the save survives the end of this process."""
        return self.done("staged")

    @property
    def errors(self) -> tuple[Exception, ...]:
        """Everything that went wrong so far, also what a retry has mended since."""
        with self._changed:
            return tuple(e.error for e in self._events if e.error is not None)

    @property
    def events(self) -> tuple[TicketEvent, ...]:
        """What happened, in order."""
        with self._changed:
            return tuple(self._events)

    @property
    def failure(self) -> Exception | None:
        """The error that ended the save, or one of its levels, for good; None while nothing did."""
        with self._changed:
            return next(iter(self._failed.values()), None)

    def done(self, level: str) -> bool:
        """Whether `level` (``staged``, ``committed``, ``durable`` or a tier's name) was reached."""
        self._check(level)
        with self._changed:
            return level in self._reached

    def wait(self, level: str = "committed", timeout: float | None = None) -> None:
        """Returns when `level` is reached.

        Args:
            level: ``staged``, ``committed``, ``durable`` or a tier's name.
            timeout: Seconds; None waits for ever.

        Raises:
            SaveError: The save, or its way to this level, failed for good; ``__cause__`` has the reason.
            DeadlineError: Not reached in time; names what is pending. The work goes on.
            UsageError: There is no such level or tier.
        """
        self._check(level)
        with self._changed:
            self._changed.wait_for(lambda: level in self._reached or level in self._failed, timeout)
            if level in self._reached:
                return
            failure = self._failed.get(level)
            if failure is None:
                raise self._deadline_error(level, timeout or 0.0)
        raise self._save_error(level, failure) from failure

    def on(self, level: str, callback: Callable[[TicketEvent], None]) -> None:
        """Calls `callback` once when `level` is reached, from the background thread; at once where it is reached already.

        An exception of the callback is logged and goes no further. Nothing is called where the level is never reached.
        """
        self._check(level)
        with self._changed:
            event = self._reached.get(level)
            if event is None:
                self._callbacks[level].append(callback)
        if event is not None:
            self._call(callback, event)

    # ---- for the background work

    def reach(self, *levels: str) -> None:
        """Reports levels as reached, in order; a second report of one is ignored."""
        for level in levels:
            self._check(level)
            with self._changed:
                if level in self._reached:
                    continue
                event = TicketEvent(attempt=self.attempt, level=level, at=self._clock.now())
                self._reached[level] = event
                self._failed.pop(level, None)  # a later process or retry mended it
                self._events.append(event)
                callbacks, self._callbacks[level] = self._callbacks[level], []
                self._changed.notify_all()
            for callback in callbacks:
                self._call(callback, event)

    def report(self, level: str, error: Exception) -> None:
        """Notes a failure that will be retried: it shows in `errors`, and `wait` goes on waiting."""
        self._check(level)
        with self._changed:
            self._events.append(TicketEvent(attempt=self.attempt, level=level, at=self._clock.now(), error=error))

    def fail(self, error: Exception, *, levels: Sequence[str] | None = None) -> None:
        """Ends the way to `levels` (None: to all that are not reached yet): everyone who waits for them gets `error`."""
        for level in levels or ():
            self._check(level)
        with self._changed:
            lost = [level for level in (levels or self._levels) if level not in self._reached and level not in self._failed]
            if not lost:
                return
            self._failed.update(dict.fromkeys(lost, error))
            for level in lost:
                self._callbacks[level] = []
            self._events.append(TicketEvent(attempt=self.attempt, level=lost[0], at=self._clock.now(), error=error))
            self._changed.notify_all()

    def __repr__(self) -> str:
        with self._changed:
            reached, failed = sorted(self._reached), sorted(self._failed)
        return f"Ticket(run={self.attempt.run!r}, step={self.attempt.step}, reached={reached}, failed={failed})"

    # ---- inside

    def _check(self, level: str) -> None:
        if level not in self._levels:
            raise UsageError(f"there is no level or tier {level!r}", hint=f"use one of {', '.join(self._levels)}", level=str(level))

    def _call(self, callback: Callable[[TicketEvent], None], event: TicketEvent) -> None:
        try:
            callback(event)
        except Exception:
            log.exception("run=%s step=%d the callback for %s failed", self.attempt.run, self.attempt.step, event.level)

    def _deadline_error(self, level: str, timeout: float) -> DeadlineError:
        reached = [name for name in self._levels if name in self._reached]
        pending = [name for name in self._levels if name not in self._reached and name not in self._failed]
        told = (f"; last error on the way to {e.level}: {reason_of(e.error)}" for e in reversed(self._events) if e.error is not None)
        trouble = next(told, "")
        return DeadlineError(
            f"step {self.attempt.step} of run {self.attempt.run!r} did not reach {level!r} within {timeout:g} s: "
            f"reached {', '.join(reached) or 'nothing'}, pending {', '.join(pending)}{trouble}",
            hint="the work goes on in the background; wait longer, or see `tierstore status`",
            run=self.attempt.run,
            step=self.attempt.step,
            level=level,
        )

    def _save_error(self, level: str, failure: Exception) -> SaveError:
        return SaveError(
            f"step {self.attempt.step} of run {self.attempt.run!r} will not reach {level!r}: {reason_of(failure)}",
            hint=failure.hint if isinstance(failure, TierStoreError) else "",
            run=self.attempt.run,
            step=self.attempt.step,
            level=level,
        )
