"""Progress bars on a terminal: one per tier, with bytes, rate and time left. For the command line, and for a store that is being closed.

They are drawn on stderr, and only where that is a terminal; a program's logs and pipes never see one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from tierstore.config import progress_wanted
from tierstore.names import Attempt
from tierstore.tiers.progress import Progress
from tierstore.units import format_size

__all__ = ["TierBars", "closing_bars", "loading_bars", "new_bars"]


class TierBars:
    """A `Progress` that fills one bar per tier. Called on the event loop's thread; rich draws on a thread of its own.

    Args:
        bars: Where they are drawn.
        totals: Tier → bytes that are going to be moved, where they are known; a file that exceeds them makes its bar longer.
    """

    def __init__(self, bars: RichProgress, totals: Mapping[str, int]) -> None:
        self._bars = bars
        self._lock = threading.Lock()
        self._promised = dict(totals)
        self._files: dict[tuple[str, Attempt, str], tuple[int, int]] = {}
        self._told: dict[tuple[str, Attempt], int] = {}
        self._whole: dict[tuple[str, Attempt], int] = {}
        self._rest: dict[tuple[str, Attempt], int] = {}
        self._done: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._tasks: dict[str, TaskID] = {tier: bars.add_task(tier, total=nbytes or None) for tier, nbytes in totals.items()}

    def __call__(self, tier: str, attempt: Attempt, file: str, nbytes_done: int, nbytes: int) -> None:
        copy = tier, attempt
        with self._lock:
            rest = self._rest.get(copy, 0)
            more_done = more_seen = 0
            if file:
                before, size = self._files.get((tier, attempt, file), (0, 0))
                self._files[tier, attempt, file] = nbytes_done, nbytes
                self._told[copy] = self._told.get(copy, 0) + nbytes - size
                more_done, more_seen = nbytes_done - before, nbytes - size
            else:
                self._whole[copy] = nbytes
            # What was neither moved nor read of a checkpoint that has been dealt with counts as done.
            left = self._rest[copy] = max(0, self._whole.get(copy, 0) - self._told.get(copy, 0))
            done = self._done[tier] = self._done.get(tier, 0) + more_done + left - rest
            seen = self._seen[tier] = self._seen.get(tier, 0) + more_seen + left - rest
            if tier not in self._tasks:
                self._tasks[tier] = self._bars.add_task(tier, total=None)
            promised = self._promised.get(tier, 0)
        self._bars.update(self._tasks[tier], completed=done, total=max(promised, seen) or None)


class _Moved(ProgressColumn):
    """``1.2GiB/3.4GiB``; of what nobody knows how long it is, what came."""

    def render(self, task: Task) -> Text:
        done = format_size(int(task.completed))
        return Text(done if task.total is None else f"{done}/{format_size(int(task.total))}", justify="right")


class _Rate(ProgressColumn):
    """Bytes a second: just now, and when it is done over all."""

    def render(self, task: Task) -> Text:
        speed = task.completed / task.finished_time if task.finished and task.finished_time else task.speed
        return Text(f"{format_size(int(speed))}/s" if speed else "-", justify="right")


def new_bars(console: Console) -> RichProgress:
    """Bars that fit 80 columns, and are gone when the work is done."""
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        _Moved(),
        _Rate(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        redirect_stdout=False,  # results go where they are to go, bars or not
    )


@contextmanager
def loading_bars() -> Iterator[Progress | None]:
    """Bars on this process's stderr for whatever arrives on tiers meanwhile; None where that is no terminal, or they are switched off."""
    stream = sys.stderr
    if stream is None or not stream.isatty() or not progress_wanted():
        yield None
        return
    with new_bars(Console(file=stream, markup=False, emoji=False, highlight=False)) as bars:
        yield TierBars(bars, {})


@contextmanager
def closing_bars(left: Callable[[], Mapping[str, int]]) -> Iterator[Progress | None]:
    """Bars on this process's stderr while a store is drained; None where that is no terminal, they are switched off, or nothing is left.

    Args:
        left: Tier → bytes that are not there yet; asked only where there is a terminal.
    """
    stream = sys.stderr  # None in a program that was started without one
    totals = left() if stream is not None and stream.isatty() and progress_wanted() else {}
    if not totals:
        yield None
        return
    with new_bars(Console(file=stream, markup=False, emoji=False, highlight=False)) as bars:
        yield TierBars(bars, totals)
