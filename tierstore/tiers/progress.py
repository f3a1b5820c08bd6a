"""Progress of background work, as plain events for progress bars and status lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tierstore.names import Attempt

__all__ = ["NO_PROGRESS", "Progress", "Transfer", "TransferBoard"]


class Progress(Protocol):
    """Called as bytes arrive; on the event loop's thread, so it returns at once and never blocks."""

    def __call__(self, tier: str, attempt: Attempt, file: str, nbytes_done: int, nbytes: int) -> None:
        """`nbytes_done` of the `nbytes` bytes of `file` have been taken for `tier` (a retry starts again at 0)."""


def NO_PROGRESS(tier: str, attempt: Attempt, file: str, nbytes_done: int, nbytes: int) -> None:
    """Tells nobody."""


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
        if nbytes_done >= nbytes:
            self._under_way.pop(key, None)
        else:
            self._under_way[key] = Transfer(tier=tier, attempt=attempt, file=file, nbytes_done=nbytes_done, nbytes=nbytes)
        self._onward(tier, attempt, file, nbytes_done, nbytes)

    def drop(self, tier: str, attempt: Attempt) -> None:
        """Forgets what was under way for a copy that ended, well or badly."""
        for key in [k for k in self._under_way if k[0] == tier and k[1] == attempt]:
            del self._under_way[key]

    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(self._under_way.values())
