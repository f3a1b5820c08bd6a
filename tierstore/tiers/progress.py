"""Progress of background work, as plain events for progress bars and status lines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tierstore.names import Attempt
from tierstore.storage.contract import Source
from tierstore.storage.sources import CountingSource, LocalSource

__all__ = ["NO_PROGRESS", "Progress", "Transfer", "TransferBoard", "telling"]


class Progress(Protocol):
    """Called as bytes arrive; on the event loop's thread, so it returns at once and never blocks."""

    def __call__(self, tier: str, attempt: Attempt, file: str, nbytes_done: int, nbytes: int) -> None:
        """`nbytes_done` of the `nbytes` bytes of `file` have been taken for `tier` (a retry starts again at 0).

        `file` empty: that is all of the checkpoint there, of `nbytes` bytes, whatever of it had to be moved or read.
        """


def NO_PROGRESS(tier: str, attempt: Attempt, file: str, nbytes_done: int, nbytes: int) -> None:
    """Tells nobody."""


@contextmanager
def telling(progress: Progress, tier: str, attempt: Attempt, file: str, source: Source) -> Iterator[Source]:
    """`source`, which tells `progress` as it is written to `tier`; the whole of it when the block ends well, nothing where it fails.

    A local file stays as it is: a folder may take it in without reading it. To be entered on the event loop that `progress` is told on.
    """
    done = 0

    def tell(nbytes: int) -> None:
        nonlocal done
        done = min(done + nbytes, max(0, source.nbytes - 1))  # complete only when it is durable
        progress(tier, attempt, file, done, source.nbytes)

    try:
        yield source if isinstance(source, LocalSource) else CountingSource(source, tell, asyncio.get_running_loop())
    except BaseException:
        progress(tier, attempt, file, 0, 0)
        raise
    progress(tier, attempt, file, source.nbytes, source.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One file on its way."""

    tier: str
    attempt: Attempt
    file: str
    nbytes_done: int
    nbytes: int


class TransferBoard:
    """A `Progress` that remembers the transfers under way, for `status`, and passes events on."""

    def __init__(self, onward: Progress = NO_PROGRESS) -> None:
        self._onward = onward
        self._under_way: dict[tuple[str, Attempt, str], Transfer] = {}

    def __call__(self, tier: str, attempt: Attempt, file: str, nbytes_done: int, nbytes: int) -> None:
        key = (tier, attempt, file)
        if nbytes_done >= nbytes or not file:
            self._under_way.pop(key, None)
        else:
            self._under_way[key] = Transfer(tier=tier, attempt=attempt, file=file, nbytes_done=nbytes_done, nbytes=nbytes)
        self._onward(tier, attempt, file, nbytes_done, nbytes)

    def tell(self, onward: Progress) -> None:
        """Passes events on to somebody else from now on."""
        self._onward = onward

    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(self._under_way.values())
