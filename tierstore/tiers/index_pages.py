"""The parts of an index file that a reader asks for, each proved: groups of tensors by the head, block digests by the manifest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from tierstore.errors import IntegrityError
from tierstore.format.digest import digest_of
from tierstore.format.index import IndexHead
from tierstore.format.manifest import FileRecord, Manifest
from tierstore.names import INDEX, OBJECTS
from tierstore.tiers.together import together

__all__ = ["WHOLE_NBYTES", "IndexPages", "ReadProved", "opening_nbytes", "read_whole"]

WHOLE_NBYTES = 1 << 20
"""An index up to this length is read as a whole, in bytes: it costs less than asking twice."""

_AT_ONCE = 16
_GAP_NBYTES = 64 << 10
_RUN_NBYTES = 4 << 20

ReadProved = Callable[[int, int, Callable[[bytes], None]], Awaitable[bytes]]
"""Reads ``(begin, nbytes)`` of the index from the nearest tier whose bytes pass the proof, which raises IntegrityError."""


def read_whole(index: FileRecord) -> bool:
    """Whether an index is opened by reading all of it: it is short, or has no head."""
    return not index.head_nbytes or index.nbytes <= WHOLE_NBYTES


def opening_nbytes(manifest: Manifest) -> dict[str, int]:
    """How many bytes a reader asks for first of the files that it opens a checkpoint with."""
    files = {file.name: file for file in manifest.files}
    index = files[INDEX]
    return {INDEX: index.nbytes if read_whole(index) else index.head_nbytes, OBJECTS: files[OBJECTS].nbytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    begin: int
    end: int
    digest: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPages:
    """Reads parts of one index file. Methods run on the event loop.

    Attributes:
        head: The index's head, proved.
        shards: The manifest's records of the shards, by name: a shard's digest is the SHA-256 of its block digests.
        read: Reads a range of the file.
    """

    head: IndexHead
    shards: dict[str, FileRecord]
    read: ReadProved

    async def groups(self, numbers: Sequence[int]) -> list[bytes]:
        """The bytes of groups, in the order of `numbers`.

        Raises:
            IntegrityError: No tier has good bytes of one of them.
        """
        groups = self.head.groups
        return await self._pieces(
            _Piece(
                begin=groups.extent(number)[0],
                end=groups.extent(number)[1],
                digest=groups.digest(number),
                what=f"the rows of the tensors from {groups.first_names[number].decode('utf-8', 'replace')!r} on",
            )
            for number in numbers
        )

    async def digests(self, numbers: Sequence[int]) -> list[bytes]:
        """The block digests of files, in the order of `numbers`.

        Raises:
            IntegrityError: No tier has good bytes of one of them.
        """
        names = self.head.files.file_names
        return await self._pieces(
            _Piece(
                begin=self.head.digests_extent(number)[0],
                end=self.head.digests_extent(number)[1],
                digest=self.shards[names[number]].digest,
                what=f"the block digests of {names[number]}",
            )
            for number in numbers
        )

    async def _pieces(self, wanted: Iterable[_Piece]) -> list[bytes]:
        pieces = list(wanted)
        found: dict[_Piece, bytes] = {}

        async def read(run: Sequence[_Piece]) -> None:
            begin, end = run[0].begin, max(piece.end for piece in run)

            def cut(data: bytes, piece: _Piece) -> memoryview:
                return memoryview(data)[piece.begin - begin : piece.end - begin]

            def prove(data: bytes) -> None:
                for piece in run:
                    if digest_of(cut(data, piece)) != piece.digest:
                        raise IntegrityError(f"{piece.what} (bytes {piece.begin} to {piece.end}) are damaged: their SHA-256 is another")

            if begin == end:  # of an empty file
                await asyncio.to_thread(prove, b"")
                found.update((piece, b"") for piece in run)
                return
            data = await self.read(begin, end - begin, prove)
            found.update((piece, bytes(cut(data, piece))) for piece in run)

        await together(read, _runs(pieces), at_once=_AT_ONCE)
        return [found[piece] for piece in pieces]


def _runs(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Neighbours together: what one request reads."""
    runs: list[list[_Piece]] = []
    for piece in sorted(set(pieces), key=lambda p: (p.begin, p.end)):
        if runs and piece.begin <= runs[-1][-1].end + _GAP_NBYTES and piece.end <= runs[-1][0].begin + _RUN_NBYTES:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs
