"""The one contract of every storage: bytes in one place, by relative path.

Rules (each has a test in `tierstore.testing.conformance`):

- A path is relative, ``/``-separated and already validated; a storage never leaves its root.
- `write` and `put` are atomic: under `path` there is the old content or all of the new, at every instant and after
  every crash. On any failure nothing is published and nothing is left behind (temporaries, multipart uploads).
- When `write`, `put`, `create` or `delete` return, the effect is durable, as far as the storage can make it so.
- Reads are exact: a short answer is an error, a zero-length read never reaches the storage.
- Errors are `tierstore.errors` only; the underlying exception is the ``__cause__``. `retryable` errors were retried
  inside already. Names in errors are full, credentials never are.
- Coroutines run on any event loop; an instance builds its clients anew on a new loop or in a new process, and is picklable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tierstore.storage.bandwidth import Bandwidth

__all__ = [
    "Capabilities",
    "FileInfo",
    "Growing",
    "InBlocks",
    "InMemory",
    "InOrder",
    "KeepsForms",
    "Listing",
    "MadeFrom",
    "MakesBytes",
    "PacesWrites",
    "PackHints",
    "PackedFacts",
    "Reading",
    "ReadsEach",
    "ReadsPieces",
    "ReadsProved",
    "Source",
    "Storage",
    "Unchanged",
    "WritesOn",
    "WritesPacked",
]


class Source(Protocol):
    """Bytes to be written, pulled by the storage in ranges: in any order, concurrently, again on a retry."""

    @property
    def nbytes(self) -> int:
        """The exact length, in bytes."""

    async def read(self, offset: int, nbytes: int) -> memoryview:
        """Exactly `nbytes` bytes at `offset`. The view stays valid and constant until the write has ended.

        Raises:
            IntegrityError: The bytes are not what was promised; the write is abandoned.
        """


@runtime_checkable
class InMemory(Protocol):
    """Beyond the contract: a source whose bytes lie in memory already.

    A storage that moves bytes in threads takes them there, in the thread that moves them: no trip to the event loop for each piece, and
    what a wrapper does with the bytes (hashing) is done while they are in that core's cache. A wrapper has `view` only where what it
    wraps has it; one that has to wait (for its turn, for bandwidth) has none.
    """

    def view(self, offset: int, nbytes: int) -> memoryview:
        """As `Source.read`, but callable from any thread, several at once; it may compute, and never waits for anything else.

        Raises:
            IntegrityError: The bytes are not what was promised; the write is abandoned.
        """


@runtime_checkable
class WorksBeside(InMemory, Protocol):
    """Beyond the contract: a source in memory whose own work on the bytes (hashing, counting) need not come before their write.

    `view` is both: `bare`, and `work`. A storage that has a disk to keep busy lets some threads write what is bare while others do the
    work; both for every piece, once, before the write ends.
    """

    def bare(self, offset: int, nbytes: int) -> memoryview:
        """The bytes, without the work."""

    def work(self, offset: int, nbytes: int) -> None:
        """The work, without the bytes; raises as `view`."""


@runtime_checkable
class InOrder(Protocol):
    """Beyond the contract: a source of which some bytes are made from others. A storage that writes in any order pulls it in this one."""

    @property
    def order(self) -> Sequence[tuple[int, int]]:
        """Ranges ``(begin, end)`` that are the whole source, in the order in which it costs least; none: any order is as good."""


@runtime_checkable
class InBlocks(Protocol):
    """Beyond the contract: a source that gives whole blocks only."""

    @property
    def block_nbytes(self) -> int:
        """Pulls begin at multiples of so many bytes and are multiples of it long, but for the last one of the source."""


@runtime_checkable
class Growing(Protocol):
    """Beyond the contract: a source whose length is known only when its last byte has been made. `Storage.write` and `write_on` take it.

    Bytes are made from front to back; what was made before can be asked for again, and is the same then.
    """

    @property
    def nbytes(self) -> int:
        """What its length is at most, in bytes."""

    @property
    def length(self) -> int | None:
        """Its length, in bytes; None until it is known."""

    async def read(self, offset: int, nbytes: int) -> memoryview:
        """The bytes at `offset`: `nbytes` of them, or as many as there are before the end; none beyond it. As `Source.read` otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """What a storage says of a file. Times are the storage's own and steer nothing that matters."""

    path: str
    nbytes: int
    modified_at: datetime | None = None
    etag: str = ""
    checksum: str = ""
    """What the server computed and returned, e.g. ``sha256:<base64>`` or ``crc32c:<base64>-<parts>``; empty if it has none."""
    stored_nbytes: int | None = None
    """What it takes up there, in bytes, where that is not `nbytes` (a packed file); see `taken_nbytes`."""

    @property
    def taken_nbytes(self) -> int:
        """What it takes up in the storage, in bytes."""
        return self.nbytes if self.stored_nbytes is None else self.stored_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One level of a listing, in no particular order: files, and the names of folders directly below."""

    files: tuple[FileInfo, ...]
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a storage can do beyond the contract's minimum."""

    create: bool
    """Create-if-absent has one winner: the storage can be an authority (claimed; `doctor --probe` proves it)."""
    checksums: bool
    """The server checks and returns checksums of uploads."""
    part_nbytes: int
    """The unit in which `write` pulls its source, in bytes; a whole number of MiB."""
    local: bool
    """Files are reachable through the operating system (`local_path`)."""


class Storage(Protocol):
    """One place that keeps bytes. All methods but `local_path` are coroutines."""

    @property
    def uri(self) -> str:
        """Where it is, without credentials."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """The bytes ``[offset, offset + nbytes)``, or to the end; exactly as many.

        Raises:
            NotFoundError: There is no such file.
            IntegrityError: The file is shorter than asked.
        """

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (writable, contiguous bytes) from `offset`; raises as `read` does. No other copy where avoidable."""

    async def write(self, path: str, source: Source) -> FileInfo:
        """Writes `source` under `path` atomically and durably, replacing what is there; returns what the storage says of it."""

    async def put(self, path: str, data: bytes) -> FileInfo:
        """`write` for a small document in memory."""

    async def create(self, path: str, data: bytes) -> None:
        """Creates `path` with exactly `data`, if absent: one winner among any number of racers (PROTOCOLS.md §3).

        `data` is not empty and contains a nonce of the caller's, so that equal bytes mean "mine": finding exactly `data`
        there is a success (a lost acknowledgement of our own write).

        Raises:
            UsageError: `data` is empty.
            ConflictError: It exists with other bytes, given as ``context["existing"]``.
            StorageError: The storage can't do it (`Capabilities.create` is False); nothing was written.
            OutcomeUnknownError: The request was sent, its answer lost, and the name can't be read back.
        """

    async def stat(self, path: str) -> FileInfo:
        """Size and server-side facts, never from a cache.

        Raises:
            NotFoundError: There is no such file.
        """

    async def list(self, folder: str = "") -> list[FileInfo]:
        """Every file below `folder`, at any depth (``""``: the root), temporaries of `names.TMP` left out; empty if absent."""

    async def children(self, folder: str = "") -> Listing:
        """One level of `folder`: its files and the names of its sub-folders; empty if absent.

        On an object store a folder's name is only a hint: SeaweedFS shows an emptied one for a while.
        """

    async def delete(self, paths: Sequence[str]) -> None:
        """Removes files, durably; a missing one is fine. Folders that became empty vanish. Batched where the storage can."""

    async def free_nbytes(self) -> int | None:
        """Free space in bytes, or None where that has no meaning."""

    def local_path(self, path: str) -> Path | None:
        """The operating system's path, or None for a remote storage."""

    async def close(self) -> None:
        """Ends clients and pools; idempotent."""


@runtime_checkable
class ReadsEach(Protocol):
    """Beyond the contract: a storage that reads many small files for the price of one call. Who has very many to read asks for it."""

    async def read_each(self, paths: Sequence[str]) -> list[bytes | Exception]:
        """The files, whole; in the place of one that can't be read stands the error that `Storage.read` would raise."""


@runtime_checkable
class ReadsProved(Protocol):
    """Beyond the contract: a storage whose reading threads let the caller look at the bytes while the CPU's cache still holds them."""

    async def read_proved(
        self, path: str, offset: int, buffer: memoryview, prove: Callable[[int, memoryview], None], *, unit: int = 1 << 20
    ) -> None:
        """`Storage.read_into`, with a proof: fills `buffer`, and raises as that does.

        Args:
            path: The file.
            offset: Where in it, in bytes.
            buffer: Writable, contiguous bytes. After an error they are anything, and nobody writes into them.
            prove: Called as ``prove(at, piece)`` in the reading threads, several at once, for every byte once: `at` is the piece's place
                in the file; for all of them once more where the file turns out to have been written anew meanwhile. The piece is the
                storage's own memory, and only lent. What it raises ends the read, and passes.
            unit: Pieces begin at `offset` plus a multiple of so many bytes, and are a multiple of it long, but for the last one.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFrom:
    """Bytes ``[begin, end)`` of a file that are not stored, but made from ``[source, source_end)`` of `path` (maybe the same file)."""

    begin: int
    end: int
    path: str
    source: int
    source_end: int


@runtime_checkable
class MakesBytes(Protocol):
    """Beyond the contract: a storage that makes some bytes from others, for little if these were read just before. `reading_order` makes
    use of that."""

    async def made_from(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Sequence[MadeFrom]]:
        """What of each range of `path` is made from what, as far as it is followed; sorted. Empty: nothing of it.

        Raises:
            NotFoundError: There is no such file.
            IntegrityError: It can't be read.
        """


class Reading(Protocol):
    """What is read of one file, and where it goes; given by who asks a `ReadsPieces` for it. Its methods are called in reading threads,
    several at once, never after the call has ended, and never twice for the same byte."""

    @property
    def path(self) -> str:
        """The file."""

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """``(begin, end)`` in bytes, sorted, not overlapping; read in this order."""

    @property
    def unit(self) -> int:
        """Pieces begin at a range's begin plus a multiple of so many bytes, and are a multiple of it long, but for a range's last."""

    def place(self, begin: int, end: int) -> memoryview | None:
        """The memory into which these bytes may be read, where they all belong to one place; None: they are taken from lent memory."""

    def take(self, begin: int, piece: memoryview, placed: bool) -> None:
        """Proves the bytes of the file from `begin` on, and puts them where they belong. The piece is warm in the CPU's cache, and lent.

        Args:
            begin: Where in the file, in bytes.
            piece: The bytes.
            placed: `piece` is in the memory that `place` gave for them.
        """

    def failed(self, begin: int, end: int, error: Exception) -> None:
        """These bytes can't be had; those of them that were not taken never will be. Raises `error` to end the whole call, or returns:
        then everything else is read on, where the file is still there."""


@runtime_checkable
class ReadsPieces(Protocol):
    """Beyond the contract: a storage that reads ranges of many files with its own threads, without a trip to the event loop for each."""

    async def read_pieces(self, readings: Sequence[Reading]) -> None:
        """Reads all of them, the first ones first. Errors go to `Reading.failed`, as `Storage.read_into` would raise them."""


@runtime_checkable
class ReadsPlaced(Protocol):
    """Beyond the contract: a storage far away that gives the pieces of a range to whom they belong while it reads, so that a range which
    many want needs no memory of its own."""

    async def read_placed(self, reading: Reading) -> bool:
        """Reads the ranges one after the other, each in one request. Errors go to `Reading.failed`, as `Storage.read_into` raises them.

        Returns:
            Whether that can be done for this file; False: nothing was read.
        """


@runtime_checkable
class WritesOn(Protocol):
    """Beyond the contract: a storage that goes on with a write which another call, or a process that was killed, did not end."""

    async def write_on(self, path: str, source: Source) -> FileInfo:
        """`Storage.write`, for a path whose content can only ever be one (a file of one attempt).

        What an unfinished write of `path` left on the server is compared with the source's bytes, and not sent again where it is the
        same. Unlike `write`, a failure that may pass, and a cancellation, leave what arrived for the next call (a sweep takes it when
        nobody came for it in time); a damaged source, and a failure for good, leave nothing.
        """


@runtime_checkable
class PacesWrites(Protocol):
    """Beyond the contract: a storage that keeps a limit on what it sends, what it has to send again included."""

    def pace_writes(self, limit: Bandwidth | None) -> None:
        """From now on all bodies that are sent wait for `limit`; None: for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchanged:
    """Bytes ``[begin, end)`` of a file that is written which are, by their digests, those of the file `path` from `source` on."""

    begin: int
    end: int
    path: str
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackHints:
    """What a writer knows of a shard that is packed.

    Attributes:
        unchanged: Whole blocks (or the last, shorter one) that lie in the storage already; sorted, without overlaps. They must stay there
            for as long as the file that is written.
        exact: Nothing is to be quantised, whatever the storage is told to do.
        scheme: The scheme to quantise by, where the storage quantises at all; None: its own.
    """

    unchanged: Sequence[Unchanged] = ()
    exact: bool = False
    scheme: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFacts:
    """What a packed file says of itself.

    Attributes:
        digest: ``sha256:`` and the SHA-256 of its footer, which proves all frames that are not exact.
        stored_nbytes: Its length, in bytes.
        lossy: Numbers of the blocks that are not exactly what they were; empty: the file is exact.
        block_nbytes: The length of these blocks, in bytes of the raw file.
        refers_to: Paths of the other files that some of its bytes are taken from.
        quantised: Tensor (key in the shard's header) → facts of how it was quantised, JSON.
    """

    digest: str
    stored_nbytes: int
    lossy: frozenset[int]
    refers_to: tuple[str, ...]
    quantised: Mapping[str, Mapping[str, Any]]
    block_nbytes: int = 1 << 20


@runtime_checkable
class KeepsForms(Protocol):
    """Beyond the contract: a storage in which a file may lie in more than one form, after several wrote it in different ones."""

    async def keep_one(self, folder: str) -> Sequence[str]:
        """Removes the forms that readers don't choose of the files in a folder, and returns the paths of these files.

        Another process may remove another form at the same moment: who calls this looks whether each of these files is still there, and
        writes it anew if not. As all do so, the last one finds or leaves one.
        """


@runtime_checkable
class WritesPacked(Protocol):
    """Beyond the contract: a storage that packs shards, and takes hints. Paths, lengths and bytes are those of the raw files."""

    async def write_packed(self, path: str, source: Source, hints: PackHints) -> FileInfo:
        """`WritesOn.write_on`, with hints; a path that is not packed is written as it is."""

    async def packed_facts(self, path: str) -> PackedFacts | None:
        """What the packed file at `path` says of itself; None: it is a plain file.

        Raises:
            NotFoundError: There is no such file.
            IntegrityError: Its footer is damaged.
        """

    async def origins(self, path: str, begin: int, end: int) -> Sequence[Unchanged]:
        """The parts of ``[begin, end)`` that the packed file at `path` takes unchanged from other files, and from where."""
