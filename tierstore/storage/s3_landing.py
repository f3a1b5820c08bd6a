"""Where the bytes of a range go as they come from S3: into the caller's memory, or block by block to where each belongs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tierstore.storage.bounce import Bounces
from tierstore.storage.contract import Reading

__all__ = ["Landing", "Memory", "Pieces"]


class Landing(Protocol):
    """Takes one range, from front to back, from one thread at a time. Places are bytes, counted from the range's begin."""

    @property
    def nbytes(self) -> int:
        """The range's length."""

    @property
    def delivered(self) -> int:
        """How many bytes were given to somebody, who gets no byte twice."""

    def room(self, filled: int) -> memoryview:
        """Memory for the bytes from `filled` on; of some of them, one at least."""

    def due(self, filled: int) -> bool:
        """Whether that so many bytes are there can't go untold: more must not be read before, or there is no more."""

    def landed(self, filled: int) -> None:
        """So many bytes are there: told when a room is full, in any thread; it may take its time, and write into the caller's memory."""


class Memory:
    """The whole range in one piece of memory.

    Args:
        buffer: Writable bytes (``format "B"``, one dimension).
        offset: Where the range begins in its file, for `prove`.
        prove: Sees the bytes as they come (`contract.ReadsProved`).
        unit: In pieces of a multiple of so many bytes.
    """

    def __init__(
        self, buffer: memoryview, *, offset: int = 0, prove: Callable[[int, memoryview], None] | None = None, unit: int = 1 << 20
    ) -> None:
        self.buffer = buffer
        self.delivered = 0
        self._offset = offset
        self._prove = prove
        self._unit = unit

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def room(self, filled: int) -> memoryview:
        return self.buffer[filled : filled - filled % self._unit + self._unit]

    def due(self, filled: int) -> bool:
        return self._prove is not None and filled == self.nbytes

    def landed(self, filled: int) -> None:
        if self._prove is None:
            return
        until = filled if filled == self.nbytes else filled - filled % self._unit
        if until > self.delivered:
            at, self.delivered = self.delivered, until
            self._prove(self._offset + at, self.buffer[at:until])


class Pieces:
    """One range of a `contract.Reading`: what lies within one place goes straight there, all else through memory that is used again.

    Args:
        reading: Gives places, and takes what is there.
        begin: Where the range begins in the file, in bytes.
        end: Where it ends.
        bounces: Memory of `reading.unit` bytes each.
    """

    def __init__(self, reading: Reading, begin: int, end: int, bounces: Bounces) -> None:
        self.nbytes = end - begin
        self.delivered = 0
        self._reading = reading
        self._begin = begin
        self._bounces = bounces
        self._own: memoryview | None = None
        self._piece: memoryview | None = None
        """For the bytes from `delivered` on, up to the end of their unit."""
        self._placed = False

    def room(self, filled: int) -> memoryview:
        if self._piece is None:
            begin, nbytes = self._begin + self.delivered, min(self._reading.unit, self.nbytes - self.delivered)
            place = self._reading.place(begin, begin + nbytes)
            self._placed = place is not None
            if place is None:
                if self._own is None:
                    self._own = self._bounces.take()
                place = self._own[:nbytes]
            self._piece = place
        return self._piece[filled - self.delivered :]

    def due(self, filled: int) -> bool:
        return self._piece is not None and filled == self.delivered + self._piece.nbytes

    def landed(self, filled: int) -> None:
        if self._piece is None or not self.due(filled):
            return
        at, piece, self._piece = self._begin + self.delivered, self._piece, None
        self.delivered = filled
        self._reading.take(at, piece, self._placed)

    def close(self) -> None:
        """Gives its memory back, when nobody fills it any more."""
        own, self._own, self._piece = self._own, None, None
        if own is not None:
            self._bounces.give_back(own)
