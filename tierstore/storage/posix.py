"""Bytes in a folder: node-local disks, tmpfs, parallel file systems, NFS."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tierstore.errors import IntegrityError, TierStoreError, UsageError
from tierstore.names import check_relative
from tierstore.storage._calls import Calls, all_of
from tierstore.storage._clone import clone_file
from tierstore.storage._direct import OpenFile
from tierstore.storage._oserrors import free_nbytes, translate
from tierstore.storage._pouring import Beat, Pouring
from tierstore.storage._publish import Tree, WritingFile, create_file
from tierstore.storage._reading import BOUNCE_NBYTES, THREADS_EACH, PieceReader, Proving, short
from tierstore.storage._syscalls import OsSyscalls, Syscalls
from tierstore.storage._walk import delete_files, list_dead, list_files, list_level, stat_file, sweep
from tierstore.storage.bounce import Bounces
from tierstore.storage.contract import Capabilities, FileInfo, Growing, InMemory, InOrder, Listing, Reading, Source
from tierstore.storage.sources import BytesSource

__all__ = ["PosixStorage"]

_PART_NBYTES = 8 << 20


class PosixStorage:
    """One folder, made at the first write.

    Args:
        root: The folder.
        durable: fsync files and folders; False for memory (tmpfs), where it means nothing.
        threads: How many system calls run at once; also how many parts of one file are written at once.
        nice: By how much those threads are nicer than the process, 0 to 19.
        direct: Go past the page cache for large aligned extents, where the file system allows.
        deadline_s: Seconds within which a system call (one part, one fsync) has to end and a write has to make progress; a thread
            that hangs longer is abandoned and `DeadlineError` raised. None: wait for ever. fsync on a parallel file system can take
            30 s.
        syscalls: The system calls; tests record them or let them fail.
    """

    def __init__(
        self,
        root: Path,
        *,
        durable: bool = True,
        threads: int = 2,
        nice: int = 0,
        direct: bool = True,
        deadline_s: float | None = None,
        syscalls: Syscalls | None = None,
    ) -> None:
        if threads < 1:
            raise UsageError(f"threads={threads} does no work", hint="give 1 or more")
        self._tree = Tree(os.path.abspath(root), syscalls or OsSyscalls(), durable=durable)
        self._n_threads = threads
        self._direct = direct and durable
        self._calls = Calls(threads=threads, reading=THREADS_EACH * threads, nice=nice, deadline_s=deadline_s)
        self._bounces: Bounces | None = None

    def __repr__(self) -> str:
        return f"PosixStorage({self._tree.root!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bounces": None}

    @property
    def uri(self) -> str:
        return self._tree.root

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create=True, checksums=False, part_nbytes=_PART_NBYTES, local=True)

    def local_path(self, path: str) -> Path:
        return Path(self._full(path))

    # Reading

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        _check_range(offset, nbytes)
        full = self._full(path)
        if nbytes == 0:
            return b""
        return await self._calls.run("read", full, self._read, full, offset, nbytes)

    def _read(self, full: str, offset: int, nbytes: int | None) -> bytes:
        # Not aiofiles: it takes four trips to a thread where one does, and its file stays open when the caller is cancelled meanwhile.
        syscalls = self._tree.syscalls
        self._tree.inside(full)
        fd = syscalls.open(full, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            wanted = size - offset if nbytes is None else nbytes
            if wanted < 0 or offset + wanted > size:  # before anything is allocated
                raise short(full, offset, wanted, size)
            pieces: list[bytes] = []
            done = 0
            while done < wanted:
                piece = syscalls.pread(fd, wanted - done, offset + done)
                if not piece:
                    raise short(full, offset, wanted, offset + done)
                pieces.append(piece)
                done += len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        finally:
            syscalls.close(fd)

    async def read_each(self, paths: Sequence[str]) -> list[bytes | Exception]:
        """Small files, read in one thread one after the other (`contract.ReadsEach`)."""
        if not paths:
            return []
        full = [self._full(path) for path in paths]
        return await self._calls.run("read", f"{full[0]} and {len(full) - 1} more", self._read_each, full)

    def _read_each(self, full: Sequence[str]) -> list[bytes | Exception]:
        found: list[bytes | Exception] = []
        for path in full:
            try:
                found.append(self._read(path, 0, None))
            except TierStoreError as error:
                found.append(error)
            except OSError as error:
                found.append(translate(error, "read", path))
        return found

    async def read_proved(
        self, path: str, offset: int, buffer: memoryview, prove: Callable[[int, memoryview], None], *, unit: int = 1 << 20
    ) -> None:
        """`read_into`, with a proof (`contract.ReadsProved`)."""
        target = _writable(self._full(path), offset, buffer)
        await self.read_pieces([Proving(path, offset, target, prove, unit)])

    async def read_pieces(self, readings: Sequence[Reading]) -> None:
        """Ranges of many files, each piece given to its `Reading` in the thread that read it (`contract.ReadsPieces`)."""
        work = PieceReader(
            [(reading, self._full(reading.path)) for reading in readings],
            lambda full: OpenFile(self._tree.syscalls, full, os.O_RDONLY, direct=self._direct),
            self._open_inside,
            self._lent(),
            direct=self._direct,
            crowded=self._calls.reading_crowded,
            threads=self._n_threads,
        )
        if not work.n_threads:
            return
        full = self._full(readings[0].path) + (f" and {len(readings) - 1} more" if len(readings) > 1 else "")

        async def serve() -> None:
            more = True
            while more:
                beat = Beat()
                more = await self._calls.run("read", full, work.turn, beat, beat=beat, reading=True)

        ended = False
        try:
            await all_of([serve() for _ in range(work.n_threads)])
            ended = True
        finally:
            if not ended:  # a thread that is still at it would fill memory that its owner has taken back meanwhile
                await self._calls.clean_up("read", full, work.close)

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        full = self._full(path)
        target = _writable(full, offset, buffer)
        if target.nbytes == 0:
            return
        file = OpenFile(self._tree.syscalls, full, os.O_RDONLY, direct=self._direct)
        if target.nbytes <= _PART_NBYTES:
            ended = False
            try:
                await self._calls.run("read", full, self._read_at_once, file, full, offset, target)
                ended = True
            finally:
                if not ended:  # a thread that is still at it would fill memory that its owner has taken back meanwhile
                    await self._calls.clean_up("read", full, file.close)
            return

        async def take(starts: Any) -> None:
            for start in starts:
                part = target[start : start + _PART_NBYTES]
                got = await self._calls.run("read", full, file.read, part, offset + start)
                if got < part.nbytes:
                    raise short(full, offset, target.nbytes, offset + start + got)

        try:
            await self._calls.run("read", full, self._open_inside, file, full)
            starts = iter(range(0, target.nbytes, _PART_NBYTES))
            await all_of([take(starts) for _ in range(self._n_threads)])
        finally:
            await self._calls.clean_up("read", full, file.close)

    def _open_inside(self, file: OpenFile, full: str) -> None:
        self._tree.inside(full)
        file.open()

    def _read_at_once(self, file: OpenFile, full: str, offset: int, target: memoryview) -> None:
        try:
            self._open_inside(file, full)
            got = file.read(target, offset)
            if got < target.nbytes:
                raise short(full, offset, target.nbytes, file.facts().st_size)
        finally:
            file.close()

    # Writing

    async def write(self, path: str, source: Source) -> FileInfo:
        full = self._full(path)
        nbytes = source.nbytes
        grows = isinstance(source, Growing)
        file = WritingFile(self._tree, full, nbytes, direct=self._direct, grows=grows)
        published = False
        try:
            if isinstance(source, Growing):
                await self._calls.run("write", full, file.open)
                nbytes = await self._pour_growing(full, source, file)
                modified_at = await self._calls.run("write", full, file.publish, nbytes=nbytes)
            elif isinstance(source, InMemory):
                modified_at = await self._pour_memory(full, source, file, nbytes)
            else:
                await self._calls.run("write", full, file.open, nbytes=nbytes)
                await self._pour(full, source, file)
                modified_at = await self._calls.run("write", full, file.publish, nbytes=nbytes)
            published = True
        finally:
            if not published:
                await self._calls.clean_up("remove a temporary of", full, file.discard)
        return FileInfo(path=path, nbytes=nbytes, modified_at=modified_at)

    async def _pour_memory(self, full: str, source: InMemory, file: WritingFile, nbytes: int) -> datetime:
        """Lets threads take pieces of the source and write them."""
        pouring = Pouring(file, source, nbytes, part_nbytes=_PART_NBYTES, crowded=self._calls.crowded)
        if nbytes <= _PART_NBYTES:
            beat = Beat()
            return await self._calls.run("write", full, pouring.at_once, beat, nbytes=nbytes, beat=beat)

        async def work(number: int) -> None:
            turn, more = functools.partial(pouring.turn, work_first=number % 2 == 1), True
            while more:
                beat = Beat()
                more = await self._calls.run("write", full, turn, beat, nbytes=nbytes, beat=beat)

        await self._calls.run("write", full, file.open, nbytes=nbytes)
        try:
            await all_of([work(number) for number in range(min(self._n_threads, 2 * -(-nbytes // _PART_NBYTES)))])
        finally:
            pouring.end()
        return await self._calls.run("write", full, file.publish, nbytes=nbytes)

    async def _pour(self, full: str, source: Source, file: WritingFile) -> None:
        """Pulls the source part by part and writes the parts in any order: while some are hashed by the source, others are written."""
        nbytes = source.nbytes
        parts = _parts_of(source)
        left = iter(parts)
        moved = asyncio.Event()

        async def work() -> None:
            for offset, end in left:
                wanted = end - offset
                with (await source.read(offset, wanted)).cast("B") as data:
                    if data.nbytes != wanted:
                        raise IntegrityError(
                            f"the source of {full} gave {data.nbytes} bytes at {offset} where {wanted} were asked for",
                            hint="the file was not written",
                            path=full,
                        )
                    await self._calls.run("write", full, file.write, data[:], offset, nbytes=nbytes)
                moved.set()

        await all_of([work() for _ in range(min(2 * self._n_threads, len(parts)))], moved, self._calls.deadline_s, full)

    async def _pour_growing(self, full: str, source: Growing, file: WritingFile) -> int:
        """Pulls the source from front to back, and writes a part while the next one is made; returns the length, in bytes."""
        parts = itertools.count(0, _PART_NBYTES)
        moved, turn = asyncio.Event(), asyncio.Lock()
        ended = False

        async def work() -> None:
            nonlocal ended
            while True:
                async with turn:
                    if ended:
                        return
                    offset, ended = next(parts), True  # if this fails, nobody goes on
                    data = await source.read(offset, _PART_NBYTES)
                    ended = data.nbytes < _PART_NBYTES or source.length == offset + data.nbytes
                    if ended and source.length != offset + data.nbytes:
                        raise IntegrityError(
                            f"the source of {full} gave {data.nbytes} bytes at {offset} where {_PART_NBYTES} were asked for",
                            hint="the file was not written",
                            path=full,
                        )
                    moved.set()
                if data.nbytes:
                    await self._calls.run("write", full, file.write, data, offset, nbytes=offset + data.nbytes)
                    moved.set()
                del data

        await all_of([work() for _ in range(2)], moved, self._calls.deadline_s, full)
        assert source.length is not None
        file.grown(source.length)
        return source.length

    async def clone(self, path: str, origin: Path, *, hard: bool = False) -> FileInfo | None:
        """Takes in a local file without copying its bytes; beyond the contract of storages.

        Args:
            path: The name here.
            origin: The file.
            hard: Make a hard link where the file system can't share blocks.

        Returns:
            What is there now; None where it can't be done, and nothing was.
        """
        full = self._full(path)
        nbytes = await self._calls.run("write", full, functools.partial(clone_file, hard=hard), self._tree, full, origin)
        return None if nbytes is None else FileInfo(path=path, nbytes=nbytes)

    async def put(self, path: str, data: bytes) -> FileInfo:
        return await self.write(path, BytesSource(data))

    async def create(self, path: str, data: bytes) -> None:
        full = self._full(path)
        if not data:
            raise UsageError(f"can't create {full} empty", hint="a record holds a nonce of its writer")
        await self._calls.run("create", full, create_file, self._tree, full, data, nbytes=len(data))

    # Names

    async def stat(self, path: str) -> FileInfo:
        full = self._full(path)
        return await self._calls.run("stat", full, stat_file, self._tree, path)

    async def stale_temporaries(self) -> list[str]:
        """The names of what `sweep_temporaries` would remove."""
        return await self._calls.run("list", self._tree.root, list_dead, self._tree)

    async def sweep_temporaries(self) -> list[str]:
        """Removes the temporaries of processes that provably live no more (`tierstore.storage.temporaries`); returns their names."""
        return await self._calls.run("sweep", self._tree.root, sweep, self._tree)

    async def list(self, folder: str = "") -> list[FileInfo]:
        full = self._full(folder) if folder else self._tree.root
        return await self._calls.run("list", full, list_files, self._tree, folder)

    async def children(self, folder: str = "") -> Listing:
        full = self._full(folder) if folder else self._tree.root
        return await self._calls.run("list", full, list_level, self._tree, folder)

    async def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._full(path)
        if paths:
            what = self._full(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
            await self._calls.run("delete", what, delete_files, self._tree, tuple(paths))

    async def free_nbytes(self) -> int:
        return await self._calls.run("measure", self._tree.root, free_nbytes, self._tree.root)

    async def close(self) -> None:
        bounces, self._bounces = self._bounces, None
        if bounces is not None:
            bounces.close()
        self._calls.close()

    # Inside

    def _full(self, path: str) -> str:
        return f"{self._tree.root}/{check_relative(path)}"

    def _lent(self) -> Bounces:
        """The memory of this process's reading threads."""
        bounces = self._bounces
        if bounces is None or bounces.pid != os.getpid():
            bounces = self._bounces = Bounces(BOUNCE_NBYTES)
        return bounces


def _parts_of(source: Source) -> list[tuple[int, int]]:
    """The ranges that a source is pulled in, in order."""
    wanted = list(source.order) if isinstance(source, InOrder) else []
    edges = [0, *(end for _, end in sorted(wanted))]
    if wanted and edges[-1] == source.nbytes and [begin for begin, _ in sorted(wanted)] == edges[:-1]:
        return wanted
    return [(begin, min(begin + _PART_NBYTES, source.nbytes)) for begin in range(0, source.nbytes, _PART_NBYTES)]


def _check_range(offset: int, nbytes: int | None) -> None:
    if offset < 0 or (nbytes is not None and nbytes < 0):
        raise UsageError(f"no file has {nbytes} bytes at {offset}", hint="offset and length are not negative")


def _writable(full: str, offset: int, buffer: memoryview) -> memoryview:
    """`buffer` as bytes to read into."""
    _check_range(offset, buffer.nbytes)
    if buffer.readonly or not buffer.c_contiguous:
        raise UsageError(f"can't read {full} into memory that is read-only or not contiguous", hint="pass a writable memoryview")
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray())
