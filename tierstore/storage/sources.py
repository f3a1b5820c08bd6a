"""What is written: bytes, a file of another storage, and wrappers that slow a source down or count it."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

from tierstore.errors import UsageError
from tierstore.storage.bandwidth import Bandwidth
from tierstore.storage.contract import InMemory, InOrder, Source, Storage, WorksBeside

__all__ = ["BytesSource", "CountingSource", "LocalSource", "StorageSource", "ThrottledSource", "bare_of", "work_of"]


def _check(offset: int, nbytes: int, total: int) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > total:
        raise UsageError(f"a source of {total} bytes has no {nbytes} bytes at {offset}", hint="pull inside the source")


class BytesSource:
    """Bytes in memory, not copied; `data` must not change until the write has ended."""

    def __init__(self, data: bytes | bytearray | memoryview | mmap.mmap) -> None:
        self._view = memoryview(data).cast("B")

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        return self.view(offset, nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """`contract.InMemory`."""
        _check(offset, nbytes, self.nbytes)
        return self._view[offset : offset + nbytes]


class StorageSource:
    """A file of a storage, read range by range as it is pulled, into fresh page-aligned memory (which O_DIRECT can use on both ends).

    Args:
        storage: Where it lies.
        path: Its name there.
        nbytes: Its length; a shorter file is an `IntegrityError` in the pull that misses bytes.
    """

    def __init__(self, storage: Storage, path: str, nbytes: int) -> None:
        self._storage = storage
        self._path = path
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        _check(offset, nbytes, self._nbytes)
        if nbytes == 0:
            return memoryview(b"")
        view = memoryview(mmap.mmap(-1, nbytes))  # given back to the system when the last view of it is gone
        await self._storage.read_into(self._path, offset, view)
        return view


class LocalSource:
    """A file of this machine, that a folder on the same file system can take in without copying it (`PosixStorage.clone`).

    Args:
        source: Its bytes, for whoever copies them after all.
        origin: Its path.
        hard: A hard link will do where blocks can't be shared: who changes the file in place later changes what was taken in.
        memory: It is a staged image, a file of a memory tier's own: that tier alone takes it in, and its bytes are read through
            `source`, not through the file that was taken in.
    """

    view: Callable[[int, int], memoryview]
    """`contract.InMemory`; there only if `source` has it."""

    def __init__(self, source: Source, origin: Path, *, hard: bool, memory: bool = False) -> None:
        self._source = source
        self.origin = origin
        self.hard = hard
        self.memory = memory
        if isinstance(source, InMemory):
            self.view = source.view

    @property
    def nbytes(self) -> int:
        return self._source.nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        return await self._source.read(offset, nbytes)


class ThrottledSource:
    """Waits for `limiter` before each pull: how a tier's bandwidth limit is kept, whatever the storage."""

    def __init__(self, source: Source, limiter: Bandwidth) -> None:
        self._source = source
        self._limiter = limiter

    @property
    def nbytes(self) -> int:
        return self._source.nbytes

    @property
    def order(self) -> Sequence[tuple[int, int]]:
        """`contract.InOrder`."""
        return self._source.order if isinstance(self._source, InOrder) else ()

    async def read(self, offset: int, nbytes: int) -> memoryview:
        await self._limiter.take(nbytes)
        return await self._source.read(offset, nbytes)


class CountingSource:
    """Tells `on_bytes` how many bytes each pull gave; a part that is pulled again counts again.

    Args:
        source: What is counted.
        on_bytes: Told on the event loop's thread.
        loop: That loop, where pulls may come from other threads (`contract.WorksBeside`); without it they can't.
    """

    view: Callable[[int, int], memoryview]
    bare: Callable[[int, int], memoryview]
    work: Callable[[int, int], None]
    """`contract.WorksBeside`; there only if `source` is in memory and `loop` is given."""

    def __init__(self, source: Source, on_bytes: Callable[[int], None], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._source = source
        self._on_bytes = on_bytes
        if loop is not None and isinstance(source, InMemory):
            bare, inner = bare_of(source), work_of(source)

            def work(offset: int, nbytes: int) -> None:
                inner(offset, nbytes)
                loop.call_soon_threadsafe(on_bytes, nbytes)  # before the thread's own end: whoever awaits that has heard of all bytes

            def view(offset: int, nbytes: int) -> memoryview:
                found = bare(offset, nbytes)
                work(offset, nbytes)
                return found

            self.view, self.bare, self.work = view, bare, work

    @property
    def nbytes(self) -> int:
        return self._source.nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        view = await self._source.read(offset, nbytes)
        self._on_bytes(view.nbytes)
        return view


def bare_of(source: InMemory) -> Callable[[int, int], memoryview]:
    """How to take the bytes of `source` without the work on them (`contract.WorksBeside`)."""
    return source.bare if isinstance(source, WorksBeside) else source.view


def work_of(source: InMemory) -> Callable[[int, int], None]:
    """How to do that work; nothing where there is none that can be done apart."""
    return source.work if isinstance(source, WorksBeside) else _no_work


def _no_work(offset: int, nbytes: int) -> None:
    pass
