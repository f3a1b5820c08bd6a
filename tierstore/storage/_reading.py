"""Reading ranges of files with several threads: past the page cache what is large and cold, and proved or copied while it is warm.

Each thread takes the next piece, reads it, and gives it to the caller's `Reading` a little at a time, so that what is hashed and copied
is still in the CPU's cache. What the page cache has is read straight to where it belongs; so is what lies in memory just as aligned as in
the file. All else passes through memory of the thread's own (`Bounces`), which costs a copy out of the cache and no page fault.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from tierstore.errors import IntegrityError, TierStoreError
from tierstore.storage._direct import ALIGNMENT, DIRECT_READ_NBYTES, OpenFile, address_of
from tierstore.storage._oserrors import translate
from tierstore.storage._pouring import Beat
from tierstore.storage.bounce import Bounces, copy_bytes
from tierstore.storage.contract import Reading

__all__ = ["BOUNCE_NBYTES", "THREADS_EACH", "PieceReader", "Proving", "short"]

PIECE_NBYTES = 2 << 20
"""What a thread reads at once, in bytes. Short, so that threads don't all hash at one time and all wait for the disk at another."""
BOUNCE_NBYTES = 8 << 20
"""The length of a thread's own memory, in bytes, of which it touches no more than it needs."""
THREADS_EACH = 2
"""How many threads read for each one that may work on what was read: while some hash, the disk has enough to do."""
_STEP_NBYTES = 1 << 20
"""What is given to the caller at once, in bytes: it fits into the cache of one core."""
_TURN_S = 0.05
"""How long a thread goes on although others wait for one, in seconds."""


class Proving:
    """The `Reading` behind `contract.ReadsProved`."""

    def __init__(self, path: str, offset: int, buffer: memoryview, prove: Callable[[int, memoryview], None], unit: int) -> None:
        self.path = path
        self.ranges = ((offset, offset + buffer.nbytes),)
        self.unit = unit
        self._offset = offset
        self._buffer = buffer
        self._prove = prove

    def place(self, begin: int, end: int) -> memoryview | None:
        return self._buffer[begin - self._offset : end - self._offset]

    def take(self, begin: int, piece: memoryview, placed: bool) -> None:
        self._prove(begin, piece)
        if not placed:
            copy_bytes(self._buffer[begin - self._offset : begin - self._offset + piece.nbytes], piece)

    def failed(self, begin: int, end: int, error: Exception) -> None:
        raise error


class _File:
    """One file of a call: opened by the first thread that comes to it, closed by the last one."""

    def __init__(self, reading: Reading, full: str, file: OpenFile) -> None:
        self.reading = reading
        self.full = full
        self.file = file
        self.lock = threading.Lock()
        self.opened = False
        self.error: TierStoreError | None = None
        self.left = sum(-(-(end - begin) // self.piece_nbytes) for begin, end in reading.ranges)
        """Pieces that are not done."""

    @property
    def piece_nbytes(self) -> int:
        return _whole(PIECE_NBYTES, self.reading.unit)

    def pieces(self) -> Iterator[tuple[int, int, bool]]:
        """Where they begin and end, and whether they are parts of something large."""
        for begin, end in self.reading.ranges:
            for at in range(begin, end, self.piece_nbytes):
                yield at, min(at + self.piece_nbytes, end), end - begin >= DIRECT_READ_NBYTES


class PieceReader:
    """One call of `ReadsPieces.read_pieces`. Threads call `turn` until it says that nothing is left; then, or early, one calls `close`.

    Args:
        readings: What is read, with the absolute paths of the files.
        make_file: Makes the file of an absolute path, without I/O.
        open_file: Opens it, in a thread.
        bounces: Memory for pieces, `BOUNCE_NBYTES` each.
        direct: Past the page cache where it makes sense.
        crowded: Whether others wait for a thread.
        threads: How many pieces are worked on at once; `THREADS_EACH` times as many are read.
    """

    def __init__(
        self,
        readings: Sequence[tuple[Reading, str]],
        make_file: Callable[[str], OpenFile],
        open_file: Callable[[OpenFile, str], None],
        bounces: Bounces,
        *,
        direct: bool,
        crowded: Callable[[], bool],
        threads: int,
    ) -> None:
        self._files = [_File(reading, full, make_file(full)) for reading, full in readings]
        self._open_file = open_file
        self._bounces = bounces
        self._direct = direct
        self._crowded = crowded
        self._changed = threading.Condition()
        self._queue = ((file, *piece) for file in self._files for piece in file.pieces())
        self._working = threading.Semaphore(threads)
        self._threads = threads
        self._active = 0
        self._stopped = False

    @property
    def n_threads(self) -> int:
        """How many threads there is work for; together they need no more memory than `BOUNCE_NBYTES` for each that may work."""
        pieces = sum(file.left for file in self._files)
        longest = max((file.piece_nbytes for file in self._files if file.left), default=1)
        return min(pieces, THREADS_EACH * self._threads, max(1, self._threads * BOUNCE_NBYTES // longest))

    def turn(self, beat: Beat) -> bool:
        """Reads pieces; True if there may be more to begin, but others wait for the thread."""
        began = beat.at
        own: list[memoryview] = []

        def memory(nbytes: int) -> memoryview:
            if nbytes > self._bounces.nbytes:
                return memoryview(mmap.mmap(-1, nbytes))  # units longer than pieces: only foreign files have them
            if not own:
                own.append(self._bounces.take())
            return own[0][:nbytes]

        try:
            while (piece := self._next()) is not None:
                try:
                    self._serve(*piece, memory)
                except BaseException:
                    self._stopped = True
                    raise
                finally:
                    self._done(piece[0])
                beat()
                if beat.at - began >= _TURN_S and self._crowded():
                    return True
            return False
        finally:
            if own:
                self._bounces.give_back(own[0])

    def close(self) -> None:
        """Lets no thread begin another piece, and waits for those that are at one: then nobody uses the caller's memory any more."""
        with self._changed:
            self._stopped = True
            self._changed.wait_for(lambda: not self._active)
        for file in self._files:
            _close(file)

    def _next(self) -> tuple[_File, int, int, bool] | None:
        with self._changed:
            piece = None if self._stopped else next(self._queue, None)
            self._active += piece is not None
            return piece

    def _done(self, file: _File) -> None:
        with self._changed:
            file.left -= 1
            last = not file.left
            self._active -= 1
            self._changed.notify_all()
        if last:
            _close(file)

    def _serve(self, file: _File, begin: int, end: int, large: bool, memory: Callable[[int], memoryview]) -> None:
        """Reads one piece, and tells the reading if it can't be had. What the reading raises passes."""
        parts = self._parts(file, begin, end, large, memory)
        taken = begin
        while True:
            try:
                part = next(parts, None)
            except TierStoreError as error:
                file.reading.failed(taken, end, error)
                return
            except OSError as error:
                found = translate(error, "read", file.full)
                found.__cause__ = error
                file.reading.failed(taken, end, found)
                return
            if part is None or self._stopped:
                return
            at, view, placed = part
            with self._working:
                file.reading.take(at, view, placed)
            taken = at + view.nbytes

    def _parts(
        self, file: _File, begin: int, end: int, large: bool, memory: Callable[[int], memoryview]
    ) -> Iterator[tuple[int, memoryview, bool]]:
        """What of the piece has been read, a little at a time: its offset, the bytes, and whether they are where they belong."""
        self._open(file)
        reading, opened = file.reading, file.file
        step = _whole(_STEP_NBYTES, reading.unit)
        wanted = end - begin
        if self._direct and large and begin % ALIGNMENT == 0 and not opened.is_cached(begin, wanted):
            view = reading.place(begin, end)
            placed = view is not None and address_of(view) % ALIGNMENT == 0
            if view is None or not placed:
                view = memory(-(-wanted // ALIGNMENT) * ALIGNMENT)  # up to a whole sector, of which a file that ends there gives its part
            got = opened.read_direct(view, begin)
            if got < wanted:
                raise short(file.full, begin, wanted, opened.facts().st_size)
            for at in range(0, wanted, step):
                yield begin + at, view[at : min(at + step, wanted)], placed
            return
        for at in range(begin, end, step):
            stop = min(at + step, end)
            place = reading.place(at, stop)
            view = memory(stop - at) if place is None else place
            got = opened.read_buffered(view, at)
            if got < stop - at:
                raise short(file.full, at, stop - at, opened.facts().st_size)
            yield at, view, place is not None

    def _open(self, file: _File) -> None:
        with file.lock:
            if file.error is not None:
                raise file.error
            if file.opened:
                return
            try:
                self._open_file(file.file, file.full)
            except TierStoreError as error:
                file.error = error
                raise
            except OSError as error:
                file.error = translate(error, "read", file.full)
                raise file.error from error
            file.opened = True


def short(full: str, offset: int, wanted: int, size: int) -> IntegrityError:
    """The error for the file `full` of `size` bytes, of which `wanted` bytes from `offset` on were wanted."""
    return IntegrityError(
        f"{full} is too short: {max(wanted, 0)} bytes from {offset} on were wanted, it has {size}",
        hint="the file was cut off: `tierstore verify` finds what else is, another tier may have it whole",
        path=full,
        offset=offset,
        wanted_nbytes=wanted,
        file_nbytes=size,
    )


def _whole(nbytes: int, unit: int) -> int:
    """`nbytes` or less, as a multiple of `unit`; one unit at least."""
    return unit * max(1, nbytes // unit)


def _close(file: _File) -> None:
    with suppress(OSError):  # nothing was written
        file.file.close()
