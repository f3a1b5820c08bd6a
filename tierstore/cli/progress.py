"""Progress bars, with rate and time left: of copies one per tier, of an export one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

from tierstore.cli.terminal import Terminal
from tierstore.names import Attempt
from tierstore.tiers.progress import NO_PROGRESS, Progress
from tierstore.tiers.promote import Copy

__all__ = ["CopyBars", "copy_bars", "one_bar"]


class CopyBars:
    """A `Progress` that fills one bar per tier. Called on the event loop's thread; rich draws on its own.

    Args:
        bars: Where they are drawn.
        copies: What is going to be copied, for the totals; a commit's size shows only as its files come.
    """

    def __init__(self, bars: RichProgress, copies: Sequence[Copy]) -> None:
        self._bars = bars
        self._lock = threading.Lock()
        self._promised: dict[str, int] = {}
        for copy in copies:
            self._promised[copy.tier] = self._promised.get(copy.tier, 0) + copy.nbytes
        self._files: dict[str, dict[tuple[Attempt, str], tuple[int, int]]] = {}
        self._tasks: dict[str, TaskID] = {tier: bars.add_task(tier, total=nbytes or None) for tier, nbytes in self._promised.items()}

    def __call__(self, tier: str, attempt: Attempt, file: str, nbytes_done: int, nbytes: int) -> None:
        with self._lock:
            files = self._files.setdefault(tier, {})
            files[attempt, file] = (nbytes_done, nbytes)
            if tier not in self._tasks:
                self._tasks[tier] = self._bars.add_task(tier, total=None)
            done = sum(d for d, _ in files.values())
            total = max(self._promised.get(tier, 0), sum(n for _, n in files.values()))
        self._bars.update(self._tasks[tier], completed=done, total=total)


@contextmanager
def copy_bars(terminal: Terminal, copies: Sequence[Copy]) -> Iterator[Progress]:
    """Bars on stderr while it lasts; nothing where stderr is no terminal or bars are not wanted."""
    if not terminal.progress:
        yield NO_PROGRESS
        return
    with _bars(terminal) as bars:
        yield CopyBars(bars, copies)


@contextmanager
def one_bar(terminal: Terminal, what: str) -> Iterator[Callable[[int, int], None] | None]:
    """One bar, told how many bytes are done and of how many; None where there is none."""
    if not terminal.progress:
        yield None
        return
    with _bars(terminal) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _bars(terminal: Terminal) -> RichProgress:
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=terminal.err,
        transient=True,
    )
