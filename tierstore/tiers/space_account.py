"""What a tier with a capacity holds, reckoned on from the last listing, so that not each copy lists the whole tier."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Promise", "SpaceAccount"]

FRESH_S = 60.0
"""So long a listing is reckoned on from where nothing tells what others write."""

FRESH_LOCAL_S = 600.0
"""The same where the storage tells its free space, in which whatever anybody writes there shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What somebody was let write, in bytes, and how many listings had begun by then."""

    nbytes: int
    listings: int


class SpaceAccount:
    """The running account of one tier. It may say too much (what was deleted meanwhile is not seen), and then the tier is listed.

    Of what others write it sees what their file system lacks since the listing; a bucket shows nothing, and is listed once a minute.

    Args:
        now: Seconds of a monotonic clock; for tests.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._listed_at: float | None = None
        self._used = 0
        self._free: int | None = None
        self._promised = 0
        """Bytes that this process was let write since the account was opened."""
        self._counted = 0
        """Of these the ones that were promised before the last listing began."""
        self._listings = 0

    def begin(self) -> int:
        """Before a listing: a mark for `listed`. What is promised while it goes on is not in it."""
        self._listings += 1
        return self._promised

    def listed(self, used: int, free: int | None, mark: int) -> None:
        """After it: bytes on the tier, and what its storage has free, as far as that tells."""
        self._listed_at, self._used, self._free, self._counted = self._now(), used, free, mark

    def estimate(self, free: int | None) -> int | None:
        """Bytes on the tier, at least as far as anything tells; None: it has to be listed. `free`: what its storage has free now."""
        if self._listed_at is None:
            return None
        tells = free is not None and self._free is not None
        if self._now() - self._listed_at > (FRESH_LOCAL_S if tells else FRESH_S):
            return None
        gone = self._free - free if free is not None and self._free is not None else 0
        return self._used + max(self._promised - self._counted, gone)

    def promise(self, nbytes: int) -> Promise:
        """Somebody was let write so many bytes."""
        self._promised += nbytes
        return Promise(nbytes=nbytes, listings=self._listings)

    def written(self, promise: Promise, nbytes: int) -> None:
        """What was promised took up so many bytes. Where the tier was listed meanwhile, nothing is changed: the listing may count them."""
        if promise.listings == self._listings:
            self._promised += nbytes - promise.nbytes
