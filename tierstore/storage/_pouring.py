"""Writing a source that lies in memory, in threads that need no event loop: some write, the others do the source's work. Blocking.

Its work is hashing. A thread that hashed its piece before it wrote it would leave the disk idle while all hash, and the cores while all
write: with four threads on two cores a third of the speed. So both are done apart, and whoever is through with one helps with the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime

from tierstore.errors import IntegrityError
from tierstore.storage._publish import WritingFile
from tierstore.storage.contract import InMemory
from tierstore.storage.sources import bare_of, work_of

__all__ = ["Beat", "Pouring"]

_TURN_S = 0.05
"""For so long a thread goes on although others wait for it: a small call waits this much and one piece at most."""


class Beat:
    """Told by a thread that it gets on; whoever waits for the thread gives it up only when this stands still."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = time.monotonic()

    def __call__(self) -> None:
        self.at = time.monotonic()


class Pouring:
    """One file's write, for several threads.

    Args:
        file: What is written; `WritingFile.discard` ends all threads at their next step.
        source: The bytes.
        nbytes: How many there are.
        part_nbytes: The length of a piece, in bytes.
        crowded: Whether others wait for a thread.
    """

    def __init__(self, file: WritingFile, source: InMemory, nbytes: int, *, part_nbytes: int, crowded: Callable[[], bool]) -> None:
        self._file = file
        self._view, self._bare, self._work = source.view, bare_of(source), work_of(source)
        self._nbytes = nbytes
        self._part_nbytes = part_nbytes
        # `next` of a range's iterator is one step of the interpreter: no piece is taken twice. A piece is counted out the same way.
        self._to_write, self._to_work_on, self._left = self._offsets(), self._offsets(), self._offsets()
        next(self._left, None)
        self._crowded = crowded
        self._ended = False

    def _offsets(self) -> Iterator[int]:
        return iter(range(0, self._nbytes, self._part_nbytes))

    def end(self) -> None:
        """No thread takes another piece; without waiting for those that are at one."""
        self._ended = True

    def turn(self, beat: Beat, *, work_first: bool) -> bool:
        """Takes pieces; True if there may be more, but others wait for the thread.

        The bytes are durable when no turn is left.

        Args:
            beat: Told after each piece.
            work_first: Do the source's work and then help to write, or the reverse.

        Raises:
            OSError: What the system said; ECANCELED once the file was given up.
            IntegrityError: The source did not give what was asked for; what else the source raises.
        """
        jobs = [(self._to_write, self._write), (self._to_work_on, self._work_on)]
        began = time.monotonic()
        for offsets, do in reversed(jobs) if work_first else jobs:
            for offset in offsets:
                if self._ended:
                    return False
                do(offset)
                beat()
                if beat.at - began >= _TURN_S and self._crowded():
                    return True
        return False

    def at_once(self, beat: Beat) -> datetime:
        """All of a short file, of one piece: makes it, writes it, publishes it; returns as `WritingFile.publish`, raises as `turn`."""
        self._file.open()
        beat()
        if self._nbytes:
            self._file.write_from(lambda: self._checked(self._view(0, self._nbytes), 0), 0)
            beat()
        return self._file.publish()

    def _write(self, offset: int) -> None:
        self._file.write_from(lambda: self._checked(self._bare(offset, self._length(offset)), offset), offset)
        if next(self._left, None) is None:  # this was the last of all: the disk need not wait for what is still to be hashed
            self._file.sync()

    def _work_on(self, offset: int) -> None:
        self._file.beside(lambda: self._work(offset, self._length(offset)))

    def _length(self, offset: int) -> int:
        return min(self._part_nbytes, self._nbytes - offset)

    def _checked(self, data: memoryview, offset: int) -> memoryview:
        if data.nbytes != self._length(offset):
            raise IntegrityError(
                f"the source of {self._file.final} gave {data.nbytes} bytes at {offset} where {self._length(offset)} were asked for",
                hint="the file was not written",
                path=self._file.final,
            )
        return data
