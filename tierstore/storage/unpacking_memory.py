"""Memory of reads of packed files: extents that were read, what runs are made of, and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tierstore.errors import IntegrityError
from tierstore.format.packed.rounding import round_into
from tierstore.storage.unpacking_footers import Part

__all__ = ["HELD_NBYTES", "Frames", "Held", "Pieces", "Sources", "Spare", "copy_bytes", "fill"]

HELD_NBYTES = 256 << 20
"""Of what the runs of one batch are made of, and what that is made of; 32 MiB are usual."""
_UNIT_NBYTES = 1 << 20
_MOST_KEPT = 2
"""So many times what is wanted of them are the blocks that are kept as they are."""

Pieces = Sequence[tuple[int, memoryview]]
"""Bytes of a raw file, in pieces with their places."""


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


class Held:
    """Bytes of what runs are made of that one batch holds, and those that are made for it: a footer can ask for very much.

    Args:
        path: Of the raw shard that is read, for the error.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._nbytes = 0

    def take(self, nbytes: int) -> None:
        """So many more are to be held.

        Raises:
            IntegrityError: No file of ours needs as much.
        """
        self._nbytes += nbytes
        if self._nbytes > HELD_NBYTES:
            raise IntegrityError(
                f"{self._path} is damaged, or made to do harm: a few MiB of it are made of more than {HELD_NBYTES >> 20} MiB",
                hint="run `tierstore verify --level full`; docs/guides/recovery.md shows how to put a good copy back",
                file=self._path,
            )

    def give_back(self, nbytes: int) -> None:
        self._nbytes -= nbytes


class Sources:
    """What the runs of one batch are made of: of blocks that hardly anything is wanted of, only that is kept.

    Args:
        held: Told of it.
    """

    def __init__(self, held: Held) -> None:
        self.held = held
        self._nbytes = 0
        self._found: dict[tuple[int, int, int], Pieces] = {}

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *error: object) -> None:
        self._found.clear()
        self.held.give_back(self._nbytes)

    def expect(self, part: Part) -> None:
        """Before the bytes of a part are read; raises as `Held.take`."""
        nbytes = _MOST_KEPT * (part.source_end - part.source)
        self._nbytes += nbytes
        self.held.take(nbytes)

    def add(self, part: Part, members: Sequence[Part], pieces: Pieces) -> None:
        """`pieces` has the source of `part`, which is all of `members` in one."""
        if sum(piece.nbytes for _, piece in pieces) > _MOST_KEPT * (part.source_end - part.source):
            wanted = _within(pieces, part.source, part.source_end)
            pieces = [(part.source, memoryview(b"".join(piece for _, piece in wanted)))]
        self._found.update(((one.file, one.source, one.source_end), pieces) for one in members)

    def pieces(self, part: Part) -> Iterator[tuple[int, memoryview]]:
        """The source of one of the members, in pieces with their places."""
        return _within(self._found[part.file, part.source, part.source_end], part.source, part.source_end)


def _within(pieces: Pieces, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
    for at, piece in pieces:
        low, high = max(begin, at), min(end, at + piece.nbytes)
        if low < high:
            yield low, piece[low - at : high - at]


def fill(target: memoryview, begin: int, parts: Sequence[Part], sources: Sources) -> None:
    """Makes the bytes of runs in `target`, that begins at `begin` of the raw file."""
    for part in parts:
        into = target[part.begin - begin : part.end - begin]
        pieces = list(sources.pieces(part))
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
