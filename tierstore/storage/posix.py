"""Bytes in a folder: node-local disks, tmpfs, parallel file systems, NFS."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from tierstore.errors import DeadlineError, IntegrityError, TierStoreError, UsageError
from tierstore.names import check_relative
from tierstore.storage._clone import clone_file
from tierstore.storage._direct import OpenFile
from tierstore.storage._oserrors import free_nbytes, translate
from tierstore.storage._pouring import Beat, Pouring
from tierstore.storage._publish import Tree, WritingFile, create_file
from tierstore.storage._reading import BOUNCE_NBYTES, THREADS_EACH, PieceReader, Proving, short
from tierstore.storage._syscalls import OsSyscalls, Syscalls
from tierstore.storage._threads import DaemonPool
from tierstore.storage._walk import delete_files, list_dead, list_files, list_level, stat_file, sweep
from tierstore.storage.bounce import Bounces
from tierstore.storage.contract import Capabilities, FileInfo, InMemory, Listing, Reading, Source
from tierstore.storage.sources import BytesSource
from tierstore.storage.tasks import end_all

__all__ = ["PosixStorage"]

T = TypeVar("T")
_PART_NBYTES = 8 << 20

_log = logging.getLogger(__name__)


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
        self._nice = nice
        self._direct = direct and durable
        self._deadline_s = deadline_s
        self._pool: DaemonPool | None = None
        self._readers: DaemonPool | None = None
        self._bounces: Bounces | None = None

    def __repr__(self) -> str:
        return f"PosixStorage({self._tree.root!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None, "_readers": None, "_bounces": None}

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
        return await self._call("read", full, self._read, full, offset, nbytes)

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
        return await self._call("read", f"{full[0]} and {len(full) - 1} more", self._read_each, full)

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
            crowded=lambda: self._reading_threads().crowded,
            threads=self._n_threads,
        )
        if not work.n_threads:
            return
        full = self._full(readings[0].path) + (f" and {len(readings) - 1} more" if len(readings) > 1 else "")

        async def serve() -> None:
            more = True
            while more:
                beat = Beat()
                more = await self._call("read", full, work.turn, beat, beat=beat, reading=True)

        ended = False
        try:
            await _all([serve() for _ in range(work.n_threads)])
            ended = True
        finally:
            if not ended:  # a thread that is still at it would fill memory that its owner has taken back meanwhile
                await self._finally("read", full, work.close)

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        full = self._full(path)
        target = _writable(full, offset, buffer)
        if target.nbytes == 0:
            return
        file = OpenFile(self._tree.syscalls, full, os.O_RDONLY, direct=self._direct)
        if target.nbytes <= _PART_NBYTES:
            ended = False
            try:
                await self._call("read", full, self._read_at_once, file, full, offset, target)
                ended = True
            finally:
                if not ended:  # a thread that is still at it would fill memory that its owner has taken back meanwhile
                    await self._finally("read", full, file.close)
            return

        async def take(starts: Any) -> None:
            for start in starts:
                part = target[start : start + _PART_NBYTES]
                got = await self._call("read", full, file.read, part, offset + start)
                if got < part.nbytes:
                    raise short(full, offset, target.nbytes, offset + start + got)

        try:
            await self._call("read", full, self._open_inside, file, full)
            starts = iter(range(0, target.nbytes, _PART_NBYTES))
            await _all([take(starts) for _ in range(self._n_threads)])
        finally:
            await self._finally("read", full, file.close)

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
        file = WritingFile(self._tree, full, nbytes, direct=self._direct)
        published = False
        try:
            if isinstance(source, InMemory):
                modified_at = await self._pour_memory(full, source, file, nbytes)
            else:
                await self._call("write", full, file.open, nbytes=nbytes)
                await self._pour(full, source, file)
                modified_at = await self._call("write", full, file.publish, nbytes=nbytes)
            published = True
        finally:
            if not published:
                await self._finally("remove a temporary of", full, file.discard)
        return FileInfo(path=path, nbytes=nbytes, modified_at=modified_at)

    async def _pour_memory(self, full: str, source: InMemory, file: WritingFile, nbytes: int) -> datetime:
        """Lets threads take pieces of the source and write them."""
        pouring = Pouring(file, source, nbytes, part_nbytes=_PART_NBYTES, crowded=self._crowded)
        if nbytes <= _PART_NBYTES:
            beat = Beat()
            return await self._call("write", full, pouring.at_once, beat, nbytes=nbytes, beat=beat)

        async def work(number: int) -> None:
            turn, more = functools.partial(pouring.turn, work_first=number % 2 == 1), True
            while more:
                beat = Beat()
                more = await self._call("write", full, turn, beat, nbytes=nbytes, beat=beat)

        await self._call("write", full, file.open, nbytes=nbytes)
        try:
            await _all([work(number) for number in range(min(self._n_threads, 2 * -(-nbytes // _PART_NBYTES)))])
        finally:
            pouring.end()
        return await self._call("write", full, file.publish, nbytes=nbytes)

    async def _pour(self, full: str, source: Source, file: WritingFile) -> None:
        """Pulls the source part by part and writes the parts in any order: while some are hashed by the source, others are written."""
        nbytes = source.nbytes
        offsets = iter(range(0, nbytes, _PART_NBYTES))
        moved = asyncio.Event()

        async def work() -> None:
            for offset in offsets:
                wanted = min(_PART_NBYTES, nbytes - offset)
                with (await source.read(offset, wanted)).cast("B") as data:
                    if data.nbytes != wanted:
                        raise IntegrityError(
                            f"the source of {full} gave {data.nbytes} bytes at {offset} where {wanted} were asked for",
                            hint="the file was not written",
                            path=full,
                        )
                    await self._call("write", full, file.write, data[:], offset, nbytes=nbytes)
                moved.set()

        await _all([work() for _ in range(min(2 * self._n_threads, -(-nbytes // _PART_NBYTES)))], moved, self._deadline_s, full)

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
        nbytes = await self._call("write", full, functools.partial(clone_file, hard=hard), self._tree, full, origin)
        return None if nbytes is None else FileInfo(path=path, nbytes=nbytes)

    async def put(self, path: str, data: bytes) -> FileInfo:
        return await self.write(path, BytesSource(data))

    async def create(self, path: str, data: bytes) -> None:
        full = self._full(path)
        if not data:
            raise UsageError(f"can't create {full} empty", hint="a record holds a nonce of its writer")
        await self._call("create", full, create_file, self._tree, full, data, nbytes=len(data))

    # Names

    async def stat(self, path: str) -> FileInfo:
        full = self._full(path)
        return await self._call("stat", full, stat_file, self._tree, path)

    async def stale_temporaries(self) -> list[str]:
        """The names of what `sweep_temporaries` would remove."""
        return await self._call("list", self._tree.root, list_dead, self._tree)

    async def sweep_temporaries(self) -> list[str]:
        """Removes the temporaries of processes that provably live no more (`tierstore.storage.temporaries`); returns their names."""
        return await self._call("sweep", self._tree.root, sweep, self._tree)

    async def list(self, folder: str = "") -> list[FileInfo]:
        full = self._full(folder) if folder else self._tree.root
        return await self._call("list", full, list_files, self._tree, folder)

    async def children(self, folder: str = "") -> Listing:
        full = self._full(folder) if folder else self._tree.root
        return await self._call("list", full, list_level, self._tree, folder)

    async def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._full(path)
        if paths:
            what = self._full(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
            await self._call("delete", what, delete_files, self._tree, tuple(paths))

    async def free_nbytes(self) -> int:
        return await self._call("measure", self._tree.root, free_nbytes, self._tree.root)

    async def close(self) -> None:
        self._tree.durable_folders.clear()
        bounces, self._bounces = self._bounces, None
        if bounces is not None:
            bounces.close()
        pools = (self._pool, self._readers)
        self._pool = self._readers = None
        for pool in pools:
            if pool is not None and pool.pid == os.getpid():
                pool.shutdown()

    # Threads

    def _full(self, path: str) -> str:
        return f"{self._tree.root}/{check_relative(path)}"

    def _threads(self) -> DaemonPool:
        """The pool of this process: threads don't survive a fork."""
        pool = self._pool
        if pool is None or pool.pid != os.getpid():
            pool = self._pool = DaemonPool(self._n_threads, "tierstore-posix", self._nice)
        return pool

    def _reading_threads(self) -> DaemonPool:
        """More of them, as they mostly wait for the disk; what they do beside that is bounded by `PieceReader`."""
        pool = self._readers
        if pool is None or pool.pid != os.getpid():
            pool = self._readers = DaemonPool(THREADS_EACH * self._n_threads, "tierstore-posix-read", self._nice)
        return pool

    def _crowded(self) -> bool:
        pool = self._pool
        return pool is not None and pool.crowded

    def _lent(self) -> Bounces:
        """The memory of this process's reading threads."""
        bounces = self._bounces
        if bounces is None or bounces.pid != os.getpid():
            bounces = self._bounces = Bounces(BOUNCE_NBYTES)
        return bounces

    async def _call(
        self,
        doing: str,
        full: str,
        fn: Callable[..., T],
        *args: Any,
        nbytes: int | None = None,
        beat: Beat | None = None,
        reading: bool = False,
    ) -> T:
        """Runs a blocking function in a thread; its OSError becomes one of the error family, a hanging thread a `DeadlineError`.

        A function that takes several steps tells of them in `beat`: the deadline is for each.
        """
        while True:
            pool = self._reading_threads() if reading else self._threads()
            started = threading.Event()
            call = pool.submit(_run, started, fn, args)
            future = asyncio.wrap_future(call)
            try:
                if await self._begun(pool, started, call, future):
                    return await self._in_time(doing, full, pool, future, nbytes=nbytes, beat=beat)
            finally:
                if not future.done():
                    future.cancel()

    async def _begun(self, pool: DaemonPool, started: threading.Event, call: Future[T], future: asyncio.Future[T]) -> bool:
        """Waits in the queue, for which there is no deadline; False if all the threads ahead hang, and the call was taken back."""
        while self._deadline_s is not None and not started.is_set() and not future.done():
            completed = pool.completed
            await asyncio.wait({future}, timeout=self._deadline_s)
            if not started.is_set() and pool.completed == completed and call.cancel():
                self._abandon(pool)
                return False
        return True

    def _abandon(self, pool: DaemonPool) -> None:
        """Leaves a pool with a hanging thread to itself; the next call gets a new one."""
        if self._pool is pool:
            self._pool = None
        if self._readers is pool:
            self._readers = None
        pool.shutdown()

    async def _in_time(
        self, doing: str, full: str, pool: DaemonPool, future: asyncio.Future[T], *, nbytes: int | None, beat: Beat | None
    ) -> T:
        future.add_done_callback(_retrieved)
        try:
            left_s = self._deadline_s
            while not future.done() and (left_s is None or left_s > 0):
                await asyncio.wait({future}, timeout=left_s)
                left_s = None if self._deadline_s is None else 0.0 if beat is None else beat.at + self._deadline_s - time.monotonic()
            if not future.done():
                self._abandon(pool)
                raise DeadlineError(
                    f"can't {doing} {full}: no answer within {self._deadline_s:g} s",
                    hint="check that the disk or the file server answers, or raise the tier's deadline",
                    path=full,
                )
            return future.result()
        except OSError as error:
            if isinstance(error, TierStoreError):
                raise
            raise translate(error, doing, full, nbytes=nbytes) from error
        finally:
            if not future.done():
                future.cancel()

    async def _finally(self, doing: str, full: str, fn: Callable[[], None]) -> None:
        """Runs a cleanup to its end, however often the caller is cancelled; its own failure is logged, as another error is on its way."""
        task = asyncio.ensure_future(self._call(doing, full, fn))
        cancelled = False
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                cancelled = True
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("event=cleanup-failed path=%r error=%r", full, str(error))
        if cancelled:
            raise asyncio.CancelledError


def _run(started: threading.Event, fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    started.set()
    return fn(*args)


def _retrieved(future: asyncio.Future[Any]) -> None:
    """Marks the error of an abandoned call as seen: whoever waited has another one."""
    if not future.cancelled():
        future.exception()


def _check_range(offset: int, nbytes: int | None) -> None:
    if offset < 0 or (nbytes is not None and nbytes < 0):
        raise UsageError(f"no file has {nbytes} bytes at {offset}", hint="offset and length are not negative")


def _writable(full: str, offset: int, buffer: memoryview) -> memoryview:
    """`buffer` as bytes to read into."""
    _check_range(offset, buffer.nbytes)
    if buffer.readonly or not buffer.c_contiguous:
        raise UsageError(f"can't read {full} into memory that is read-only or not contiguous", hint="pass a writable memoryview")
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray())


async def _all(works: Sequence[Awaitable[None]], moved: asyncio.Event | None = None, stall_s: float | None = None, full: str = "") -> None:
    """Runs all until the first failure, then cancels the others and waits for their end.

    Raises:
        DeadlineError: `moved` was not set for `stall_s` seconds.
    """
    tasks = {asyncio.ensure_future(work) for work in works}
    pending = tasks
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=stall_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if moved is not None and pending and not done and not moved.is_set():
                raise DeadlineError(
                    f"can't write {full}: no part of it was finished within {stall_s:g} s",
                    hint="check that its source and the file server answer, or raise the tier's deadline",
                    path=full,
                )
            if moved is not None:
                moved.clear()
    finally:
        with suppress(asyncio.CancelledError):
            await end_all(tasks)
