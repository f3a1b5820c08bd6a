"""Contenders take turns, each turn another one first; where the time is limited, those that matter most have theirs before the others.

A plan has three rules. Everybody warms up and has one turn, as long as that leaves those named `first` their `SURE` turns. Who takes more
than `SLOW` times as long as the fastest has `SLOW_TURNS` at most, others `OTHER_TURNS`: more would not change what is said of them. What
time is left goes to those named first, up to `repeat`. Who had fewer turns than others has that in its row.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TypeVar

from measure import Table, reason_of, tell

T = TypeVar("T")

SURE, OTHER_TURNS, SLOW_TURNS = 3, 3, 2
SLOW = 5.0
NO_TIME = "there was no time for it: a slow hour, or a small --limit"


class Overdue(Exception):
    """A measurement did not end in the time that it has."""


class Turns:
    """Takes contenders in turns; one that fails is left out from then on.

    Args:
        names: Who takes part.
        repeat: Turns that count.
        warm_ups: Turns before them: buffers are allocated, modules imported, processes forked.
        limit_s: Seconds that one measurement may take (it is interrupted where Python can be).
        first: Who matters most: those that a target is about. None: all alike, and nothing is planned.
        until: When the time is over, by `clock`; None: never.
        costs: What measurements are known to take, all around them included, in seconds.
        clock: Seconds.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        repeat: int,
        warm_ups: int = 1,
        limit_s: float = 120,
        first: Callable[[str], bool] | None = None,
        until: float | None = None,
        costs: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.names = list(names)
        self.repeat, self.warm_ups, self.limit_s = repeat, warm_ups, limit_s
        self.failed: dict[str, str] = {}
        self.costs: dict[str, float] = dict(costs or {})
        self._first, self._until, self._clock = first, until, clock
        self._warm: Counter[str] = Counter()
        self._had: Counter[str] = Counter()
        self._took: dict[str, list[float]] = {}

    def __iter__(self) -> Iterator[tuple[int, Iterable[str]]]:
        """The turn (negative while warming up) and the order of those who are still in, each asked for when the one before it is done."""
        for turn in range(-self.warm_ups, self.repeat):
            if self._first is None:
                yield turn, [name for name in rotated(self.names, turn) if name not in self.failed]
            elif turn <= 0 or self._left() > 0:
                yield turn, self._planned(turn)

    def took(self, name: str, seconds: float) -> None:
        """Says how long what is measured has taken, without all that is around it; by that it is told who is slow."""
        self._took.setdefault(name, []).append(seconds)

    def attempt(self, name: str, tables: Iterable[Table], work: Callable[[], T]) -> T | None:
        """Runs one measurement. None if it failed: it is then listed with its reason in all `tables`."""
        tell({"doing": name})
        began = self._clock()
        try:
            with deadline(self.limit_s):
                return work()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  a contender that can't is part of the result; DCP's own error is no Exception
            self.failed[name] = reason_of(error)
            for table in tables:
                table.fail(name, self.failed[name])
            return None
        finally:
            self.costs[name] = self._clock() - began
            tell({"doing": None})

    def list_left_out(self, tables: Sequence[Table]) -> None:
        """Lists in all tables for whom there was no time at all."""
        for name in self.names:
            if name not in self.failed and not self._had[name]:
                for table in tables:
                    table.fail(name, NO_TIME)

    def able(self) -> list[str]:
        """Who has been measured, or has warmed up, and has not failed."""
        return [name for name in self.names if name in self.costs and name not in self.failed]

    def slow(self, name: str) -> bool:
        """It takes more than `SLOW` times as long as the fastest does."""
        medians = {known: statistics.median(values) for known, values in self._took.items()}
        return name in medians and medians[name] > SLOW * min(medians.values())

    def _planned(self, turn: int) -> Iterator[str]:
        """Whose turn it is: first those that matter most, side by side, so that what hits one hits the next.

        Once they have had what is sure to them, others that had none yet come before them.
        """
        others = rotated([name for name in self.names if not self._matters(name)], turn)
        if turn >= SURE:
            yield from self._others([name for name in others if not self._had[name]], turn)
        for name in self._mine(turn):
            if self._left() > 0 or not self._had[name]:
                yield from self._give(name, turn)
        yield from self._others([name for name in others if turn < SURE or self._had[name]], turn)

    def _others(self, names: Iterable[str], turn: int) -> Iterator[str]:
        for name in sorted(names, key=lambda name: self._had[name]):
            if self._may(name, turn):
                yield from self._give(name, turn)

    def _give(self, name: str, turn: int) -> Iterator[str]:
        yield name
        (self._had if turn >= 0 else self._warm)[name] += 1

    def _may(self, name: str, turn: int) -> bool:
        """Whether another than the first ones has its turn now."""
        if name in self.failed:
            return False
        if turn >= 0 and self.warm_ups and not self._warm[name]:
            return False  # it would be measured cold
        if turn >= 0 and self._had[name] >= (SLOW_TURNS if self.slow(name) else OTHER_TURNS):
            return False
        sure = self.repeat if self._had[name] else SURE
        reserved = max(0, min(sure, self.repeat) - max(0, turn + 1)) * sum(self._cost(mine) for mine in self._mine(turn))
        return self._left() - self._cost(name) >= reserved

    def _mine(self, turn: int) -> list[str]:
        return rotated([name for name in self.names if self._matters(name) and name not in self.failed], turn)

    def _matters(self, name: str) -> bool:
        return self._first is None or self._first(name)

    def _cost(self, name: str) -> float:
        """What it took; of whom that is not known, what the others take."""
        return self.costs[name] if name in self.costs else statistics.mean(self.costs.values()) if self.costs else 0.0

    def _left(self) -> float:
        return float("inf") if self._until is None else self._until - self._clock()


def part_of(until: float | None, part: float, *, clock: Callable[[], float] = time.monotonic) -> float | None:
    """When so much of the time that is left is over; None where it is not limited."""
    return None if until is None else clock() + part * max(0.0, until - clock())


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The same in an order that begins one later at each turn, so that nobody always comes after the same one."""
    return [items[(turn + n) % len(items)] for n in range(len(items))] if items else []


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises `Overdue` in the main thread when its body takes longer; elsewhere it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def overdue(number: int, frame: FrameType | None) -> None:
        raise Overdue(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, overdue)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
