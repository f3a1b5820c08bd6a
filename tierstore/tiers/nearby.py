"""Reading a checkpoint's file from a storage with threads of its own: each piece is proved where it was read, and put where it belongs.

So a block passes the CPU's cache once: read, hashed, copied. What is damaged or can't be had is left over, for the next tier.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from tierstore.errors import StorageError, TierStoreError
from tierstore.format.digest import DIGEST_NBYTES
from tierstore.format.index import FileEntry, RoutingIndex
from tierstore.storage.bounce import copy_bytes
from tierstore.storage.contract import ReadsPieces
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.passed_over import PassedOver, damaged_block
from tierstore.tiers.reads import AnyWant, Handover, Span, Want, plan_spans
from tierstore.tiers.sources import Source

__all__ = ["FileReading", "NearRead", "note_damage"]

_HANDOVER_NBYTES = 8 << 20
"""What is taken at once where there are handovers, in bytes: what crosses from one piece into the next is put together elsewhere."""
_IN_A_ROW = 4
"""So many pieces that a storage can't read, with none between that it can, end the attempt: each may have taken its time."""
_SAMPLES = 64
_UNSPLIT_NBYTES = 1 << 62


class FileReading:
    """What one load wants of one file, as a `storage.contract.Reading`.

    Args:
        entry: The file with its blocks' digests.
        path: Where it is in the storage.
        spans: What is read of it, from `plan_spans` with the block size as `align`; sorted.
        block_nbytes: The block size.
        now: Seconds of a monotonic clock.

    Attributes:
        bad: The blocks that were read and are damaged, as ranges of bytes.
        errors: What could not be read, and why.
        nbytes: Bytes read.
        samples: Lengths and seconds of the last reads.
    """

    def __init__(self, entry: FileEntry, path: str, spans: Sequence[Span], block_nbytes: int, now: Callable[[], float]) -> None:
        self.entry = entry
        self.path = path
        self.ranges = [(span.begin, span.end) for span in spans]
        self.bad: list[tuple[int, int]] = []
        self.errors: list[tuple[int, int, Exception]] = []
        self.samples: deque[tuple[int, float]] = deque(maxlen=_SAMPLES)
        self._block_nbytes = block_nbytes
        self._now = now
        wants = {id(want): want for span in spans for want in span.wants}
        self._wants = sorted(wants.values(), key=lambda want: want.offset)
        self._begins = [want.offset for want in self._wants]
        self._ends: list[int] = []  # of each want and all before it: they may overlap
        end = 0
        for want in self._wants:
            end = max(end, want.end)
            self._ends.append(end)
        handing = any(isinstance(want, Handover) for want in self._wants)
        self.unit = block_nbytes * max(1, (_HANDOVER_NBYTES if handing else 0) // block_nbytes)
        self._taken: list[tuple[int, int]] = []
        self._asked: dict[int, tuple[int, float]] = {}
        self._failed = 0

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in (*self._taken, *self.bad))

    def place(self, begin: int, end: int) -> memoryview | None:
        self._asked[threading.get_ident()] = (end - begin, self._now())
        found = self._between(begin, end)
        want = next(found, None)
        if not isinstance(want, Want) or want.offset > begin or want.end < end or next(found, None) is not None:
            return None
        return want.buffer[begin - want.offset : end - want.offset]

    def take(self, begin: int, piece: memoryview, placed: bool) -> None:
        asked = self._asked.pop(threading.get_ident(), None)
        if asked is not None:
            self.samples.append((asked[0], self._now() - asked[1]))
        self._failed = 0
        for first, last in self._good(begin, piece):
            if not placed:
                self._deliver(begin + first, piece[first:last])
            self._taken.append((begin + first, begin + last))

    def failed(self, begin: int, end: int, error: Exception) -> None:
        self.errors.append((begin, end, error))
        if isinstance(error, StorageError):
            self._failed += 1
            if self._failed >= _IN_A_ROW:
                raise error

    def left(self) -> list[tuple[int, int]]:
        """The ranges of bytes that were not put in place: they are whole blocks."""
        taken = sorted(self._taken)
        found: list[tuple[int, int]] = []
        number = 0
        for begin, end in self.ranges:
            at = begin
            while number < len(taken) and taken[number][0] < end:
                if taken[number][0] > at:
                    found.append((at, taken[number][0]))
                at = taken[number][1]
                number += 1
            if at < end:
                found.append((at, end))
        return found

    def spans(self, ranges: Sequence[tuple[int, int]], nbytes: int) -> Iterator[Span]:
        """Ranges of `left` as spans of at most `nbytes` bytes, but of one block at least."""
        step = max(1, nbytes // self._block_nbytes) * self._block_nbytes
        for begin, end in ranges:
            for at in range(begin, end, step):
                stop = min(at + step, end)
                wants = tuple(self._between(at, stop))
                if wants:
                    yield Span(file=self.entry.name, begin=at, end=stop, wants=wants)

    def _good(self, begin: int, piece: memoryview) -> Iterator[tuple[int, int]]:
        """Hashes the piece's blocks; gives the runs of good ones, as places in the piece, and notes the others in `bad`."""
        size, nbytes = self._block_nbytes, piece.nbytes
        run = 0
        digest = begin // size * DIGEST_NBYTES
        for at in range(0, nbytes, size):
            stop = min(at + size, nbytes)
            if hashlib.sha256(piece[at:stop]).digest() != self.entry.block_digests[digest : digest + DIGEST_NBYTES]:
                self.bad.append((begin + at, begin + stop))
                if run < at:
                    yield run, at
                run = stop
            digest += DIGEST_NBYTES
        if run < nbytes:
            yield run, nbytes

    def _deliver(self, begin: int, piece: memoryview) -> None:
        end = begin + piece.nbytes
        for want in self._between(begin, end):
            low, high = max(want.offset, begin), min(want.end, end)
            part = piece[low - begin : high - begin]
            if isinstance(want, Want):
                copy_bytes(want.buffer[low - want.offset : high - want.offset], part)
            else:
                want.receive(low, part)

    def _between(self, begin: int, end: int) -> Iterator[AnyWant]:
        """The wants that overlap the range."""
        for number in range(bisect_right(self._ends, begin), bisect_left(self._begins, end)):
            if self._wants[number].end > begin:
                yield self._wants[number]


class NearRead:
    """What one load reads from a copy whose storage has its pieces proved while it reads (`storage.contract.ReadsPieces`).

    Args:
        info: The checkpoint.
        source: The copy.
        passed: Told what is wrong with it.
        wants: What is wanted of it.
        index: The checkpoint's index.

    Attributes:
        left: What is to be read elsewhere, or once more.
        tried: Tier and file of each copy that is no good for what is left.
        requests: Reads sent to the storage.
        nbytes: Bytes read.
    """

    def __init__(self, info: CheckpointInfo, source: Source, passed: PassedOver, wants: Sequence[AnyWant], index: RoutingIndex) -> None:
        self.left: list[Span] = []
        self.tried: set[tuple[str, str]] = set()
        self.requests = 0
        self.nbytes = 0
        self._info = info
        self._source = source
        self._passed = passed
        self._wants = wants
        self._index = index

    async def read(self, entry_of: Callable[[str], Awaitable[FileEntry]]) -> None:
        """Reads; what was not good is in `left` afterwards. `entry_of` gives a file with the digests of its blocks."""
        tier, block_nbytes = self._source.tier, self._index.block_nbytes
        assert isinstance(tier.storage, ReadsPieces)
        cost = tier.speed.cost(local=tier.storage.capabilities.local)
        by_file: dict[str, list[Span]] = {}
        whole = replace(cost, span_nbytes=_UNSPLIT_NBYTES)  # its threads cut what they read as they need it
        for span in plan_spans(self._wants, file_nbytes=self._index.file_nbytes, align=block_nbytes, cost=whole):
            by_file.setdefault(span.file, []).append(span)
        readings = [
            FileReading(await entry_of(file), self._info.attempt.path(file), spans, block_nbytes, tier.speed.now)
            for file, spans in by_file.items()
        ]
        self.requests += sum(len(reading.ranges) for reading in readings)
        failure: StorageError | None = None
        try:
            await tier.storage.read_pieces(readings)
        except StorageError as error:
            failure = error
        for reading in readings:
            self.nbytes += reading.nbytes
            for nbytes, seconds in reading.samples:
                tier.speed.note(nbytes, seconds)
            ranges = reading.left()
            self.left.extend(reading.spans(ranges, cost.span_nbytes))
            if note_damage(self._passed, self._source, reading, block_nbytes, failure if ranges else None):
                self.tried.add((tier.name, reading.entry.name))
        if failure is None and self.nbytes:
            self._passed.answers(tier)


def note_damage(passed: PassedOver, source: Source, reading: FileReading, block_nbytes: int, failure: StorageError | None = None) -> bool:
    """Notes what was wrong with a file's copy, if anything was; False if it may well be read from there once more."""
    file = reading.entry.name
    for _, end, error in reading.errors:
        assert isinstance(error, TierStoreError)
        passed.note(source, file, error, partial(source.tier.storage.read, reading.path, end - 1, 1))
    if reading.bad:
        passed.note(source, file, damaged_block(min(reading.bad)[0] // block_nbytes))
    if not reading.errors and not reading.bad and failure is not None:
        passed.note(source, file, failure)
    return bool(reading.errors or reading.bad)
