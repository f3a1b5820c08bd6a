"""Memory of reads of packed files: extents that were read, what runs are made of, and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tierstore.format.packed.rounding import round_into
from tierstore.storage.unpacking_footers import Part

__all__ = ["Frames", "Sources", "Spare", "copy_bytes", "fill"]

_UNIT_NBYTES = 1 << 20


class Spare:
    """Memory that frames were read into, kept for the next ones: fresh memory costs as much as what is done in it."""

    def __init__(self) -> None:
        self.users = 0
        self._free: list[memoryview] = []

    def take(self, nbytes: int) -> memoryview:
        for number, memory in enumerate(self._free):
            if memory.nbytes >= nbytes:
                return self._free.pop(number)
        return np.empty(-(-nbytes // _UNIT_NBYTES) * _UNIT_NBYTES, dtype=np.uint8).data

    def give_back(self, memories: Sequence[memoryview]) -> None:
        self._free += memories
        if not self.users:
            self._free.clear()  # nobody reads: it would only be held


class Frames:
    """Extents of a packed file that were read, as long as they are needed."""

    def __init__(self, spare: Spare) -> None:
        self._spare = spare
        self._memories: list[memoryview] = []
        self._extents: list[tuple[int, memoryview]] = []

    def __enter__(self) -> Frames:
        self._spare.users += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._spare.users -= 1
        memories, self._memories = self._memories, []
        self._extents.clear()
        if error[0] is None:  # else somebody may still be reading into it
            self._spare.give_back(memories)

    def memory(self, nbytes: int) -> memoryview:
        """Memory for an extent."""
        memory = self._spare.take(nbytes)
        self._memories.append(memory)
        return memory[:nbytes]

    def add(self, begin: int, data: memoryview) -> None:
        self._extents.append((begin, data))

    def of(self, begin: int, end: int) -> memoryview:
        """Those bytes; they are among what was read."""
        if begin == end:
            return memoryview(b"")
        return next(data[begin - at : end - at] for at, data in self._extents if at <= begin and end <= at + data.nbytes)


class Sources:
    """What runs are made of."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int, int, Sequence[tuple[int, memoryview]]]] = []

    def add(self, file: int, begin: int, end: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self._found.append((file, begin, end, pieces))

    def pieces(self, file: int, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """The bytes ``[begin, end)`` of a file, in pieces with their places."""
        pieces = next(pieces for of, first, last, pieces in self._found if of == file and first <= begin and end <= last)
        for at, piece in pieces:
            low, high = max(begin, at), min(end, at + piece.nbytes)
            if low < high:
                yield low, piece[low - at : high - at]


def fill(target: memoryview, begin: int, parts: Sequence[Part], sources: Sources) -> None:
    """Makes the bytes of runs in `target`, that begins at `begin` of the raw file."""
    for part in parts:
        into = target[part.begin - begin : part.end - begin]
        pieces = list(sources.pieces(part.file, part.source, part.source_end))
        if part.kind == "copy":
            for at, piece in pieces:
                copy_bytes(into[at - part.source : at - part.source + piece.nbytes], piece)
            continue
        if any((at - part.source) % 4 for at, _ in pieces):
            pieces = [(part.source, memoryview(b"".join(piece for _, piece in pieces)))]
        whole = into
        if part.skipped or 2 * into.nbytes != part.source_end - part.source:
            whole = memoryview(bytearray((part.source_end - part.source) // 2))
        for at, piece in pieces:
            low = (at - part.source) // 2
            round_into(piece, whole[low : low + piece.nbytes // 2], part.kind)
        if whole is not into:
            copy_bytes(into, whole[part.skipped : part.skipped + into.nbytes])


def copy_bytes(target: memoryview, data: memoryview) -> None:
    if target.nbytes:
        np.frombuffer(target, dtype=np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)
