"""Writing a source that lies in memory: each thread takes the next piece, has it hashed by the source, and writes it. Blocking.

A piece is hashed and written by one thread while others hash and write theirs, so that the disk and the cores are busy at the same time,
and no piece costs a trip to the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from tierstore.errors import IntegrityError
from tierstore.storage._publish import WritingFile

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
        view: Gives the bytes at an offset, as `contract.InMemory.view`.
        nbytes: How many there are.
        part_nbytes: The length of a piece, in bytes.
        crowded: Whether others wait for a thread.
    """

    def __init__(
        self, file: WritingFile, view: Callable[[int, int], memoryview], nbytes: int, *, part_nbytes: int, crowded: Callable[[], bool]
    ) -> None:
        self._file = file
        self._view = view
        self._nbytes = nbytes
        self._part_nbytes = part_nbytes
        self._offsets = iter(range(0, nbytes, part_nbytes))  # `next` of it is one step of the interpreter: no piece is taken twice
        self._crowded = crowded
        self._ended = False

    def end(self) -> None:
        """No thread takes another piece; without waiting for those that are being written."""
        self._ended = True

    def turn(self, beat: Beat) -> bool:
        """Takes and writes pieces; True if there may be more, but others wait for the thread.

        Raises:
            OSError: What the system said; ECANCELED once the file was given up.
            IntegrityError: The source did not give what was asked for; what else the source raises.
        """
        began = time.monotonic()
        for offset in self._offsets:
            if self._ended:
                break
            self._piece(offset, min(self._part_nbytes, self._nbytes - offset))
            beat()
            if beat.at - began >= _TURN_S and self._crowded():
                return True
        return False

    def at_once(self, beat: Beat) -> datetime:
        """All of a short file: makes it, writes it, publishes it. Returns as `WritingFile.publish`, and raises as `turn`."""
        self._file.open()
        beat()
        self.turn(beat)
        return self._file.publish()

    def _piece(self, offset: int, nbytes: int) -> None:
        def taken() -> memoryview:
            data = self._view(offset, nbytes)
            if data.nbytes != nbytes:
                raise IntegrityError(
                    f"the source of {self._file.final} gave {data.nbytes} bytes at {offset} where {nbytes} were asked for",
                    hint="the file was not written",
                    path=self._file.final,
                )
            return data

        self._file.write_from(taken, offset)
