"""The command line's progress bars: of copies and of reading one per tier, of an export one. How they look is `tierstore.bars`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tierstore.bars import TierBars, new_bars
from tierstore.cli.terminal import Terminal
from tierstore.tiers.pending import Copy
from tierstore.tiers.progress import NO_PROGRESS, Progress

__all__ = ["copy_bars", "one_bar", "tier_bars"]


@contextmanager
def tier_bars(terminal: Terminal, totals: Mapping[str, int]) -> Iterator[Progress]:
    """Bars on stderr while it lasts; nothing where stderr is no terminal or bars are not wanted.

    Args:
        terminal: Where.
        totals: Tier → bytes that will be moved; a tier that is not there gets its bar with its first file.
    """
    if not terminal.progress:
        yield NO_PROGRESS
        return
    with new_bars(terminal.err) as bars:
        yield TierBars(bars, totals)


@contextmanager
def copy_bars(terminal: Terminal, copies: Sequence[Copy]) -> Iterator[Progress]:
    """`tier_bars` for copies that are going to be made; a commit's size shows only as its files come."""
    totals: dict[str, int] = {}
    for copy in copies:
        totals[copy.tier] = totals.get(copy.tier, 0) + copy.nbytes
    with tier_bars(terminal, totals) as progress:
        yield progress


@contextmanager
def one_bar(terminal: Terminal, what: str) -> Iterator[Callable[[int, int], None] | None]:
    """One bar, told how many bytes are done and of how many; None where there is none."""
    if not terminal.progress:
        yield None
        return
    with new_bars(terminal.err) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
