"""Reading with a proof: every byte once, in the thread that read it, past the page cache or out of it, and nothing after the end."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from posix_kit import SlowReads, cancel_within, has_direct

from tierstore.errors import AccessError, IntegrityError, NotFoundError, StorageError, UsageError
from tierstore.storage import _reading
from tierstore.storage._syscalls import OsSyscalls
from tierstore.storage.contract import ReadsPieces, ReadsProved
from tierstore.storage.posix import PosixStorage
from tierstore.storage.sources import BytesSource
from tierstore.testing.sources import pattern

MIB = 1 << 20


class CountingSyscalls(OsSyscalls):
    """Counts the bytes that were read, by way."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # several threads count
        self.nbytes: Counter[str] = Counter()
        self.opened: Counter[str] = Counter()
        self.direct: set[int] = set()
        self.fds: set[int] = set()

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        self.fds.add(fd)
        self.direct.discard(fd)
        if flags & os.O_DIRECT:
            self.direct.add(fd)
        with self.lock:
            self.opened["direct" if flags & os.O_DIRECT else "buffered"] += 1
        return fd

    def close(self, fd: int) -> None:
        self.fds.discard(fd)
        super().close(fd)

    def preadv(self, fd: int, buffer: memoryview, offset: int, flags: int = 0) -> int:
        got = super().preadv(fd, buffer, offset, flags)
        with self.lock:
            self.nbytes["direct" if fd in self.direct else "buffered"] += got
        return got


class Noted:
    """A proof that notes what it was given."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.pieces: list[tuple[int, int]] = []
        self.wrong = 0
        self.threads: set[int] = set()

    def __call__(self, offset: int, piece: memoryview) -> None:
        self.pieces.append((offset, piece.nbytes))
        self.wrong += self.data[offset : offset + piece.nbytes] != piece
        self.threads.add(threading.get_ident())

    def covers(self, begin: int, end: int) -> bool:
        """Whether every byte of the range was given exactly once."""
        at = begin
        for offset, nbytes in sorted(self.pieces):
            if offset != at:
                return False
            at += nbytes
        return at == end


def evict(path: Path) -> None:
    """Drops a file from the page cache."""
    fd = os.open(path, os.O_RDWR)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read(storage: PosixStorage, offset: int, buffer: memoryview, prove: Callable[[int, memoryview], None], unit: int = MIB) -> None:
    async def main() -> None:
        await storage.read_proved("file", offset, buffer, prove, unit=unit)
        await storage.close()

    asyncio.run(main())


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("unit", [4096, MIB, 16 * MIB])
def test_every_byte_is_proved_once_and_is_in_the_buffer(tmp_path: Path, cold: bool, unit: int) -> None:
    data = pattern(19 * MIB + 1234)
    (tmp_path / "file").write_bytes(data)
    if cold:
        evict(tmp_path / "file")
    syscalls = CountingSyscalls()
    back, noted = bytearray(len(data) + 1), Noted(data)
    read(PosixStorage(tmp_path, syscalls=syscalls), 0, memoryview(back)[1:], noted, unit)
    same = back[1:] == data
    assert same
    assert noted.wrong == 0
    assert noted.covers(0, len(data))
    assert all(offset % unit == 0 and (nbytes % unit == 0 or offset + nbytes == len(data)) for offset, nbytes in noted.pieces)
    assert not syscalls.fds


def test_it_is_what_the_contract_names(tmp_path: Path) -> None:
    assert isinstance(PosixStorage(tmp_path), ReadsProved)
    assert isinstance(PosixStorage(tmp_path), ReadsPieces)


def test_cold_bytes_go_past_the_page_cache_into_memory_however_it_is_aligned(tmp_path: Path) -> None:
    if not has_direct(tmp_path):
        pytest.skip(f"the file system of {tmp_path} has no O_DIRECT: run with --basetemp on a disk")
    data = pattern(17 * MIB + 1234)
    asyncio.run(PosixStorage(tmp_path).write("file", BytesSource(_mapped(data))))
    evict(tmp_path / "file")
    syscalls, back = CountingSyscalls(), bytearray(len(data) + 3)
    read(PosixStorage(tmp_path, syscalls=syscalls), 0, memoryview(back)[3:], Noted(data))
    assert +syscalls.nbytes == {"direct": len(data)}  # its end, too, which is no whole sector
    assert syscalls.opened == {"direct": 1, "buffered": 1}


def test_a_look_whether_bytes_are_cached_reads_none_of_them(tmp_path: Path) -> None:
    """`preadv2(RWF_NOWAIT)` made the kernel read ahead all that was asked for, so that cold files were read twice."""
    if not has_direct(tmp_path):
        pytest.skip(f"the file system of {tmp_path} has no O_DIRECT: run with --basetemp on a disk")
    data = pattern(16 * MIB)
    (tmp_path / "file").write_bytes(data)
    evict(tmp_path / "file")
    read(PosixStorage(tmp_path), 0, memoryview(bytearray(len(data))), Noted(data))
    assert _resident(tmp_path / "file") <= 16 * mmap.PAGESIZE


def test_bytes_in_the_page_cache_go_straight_into_the_buffer(tmp_path: Path) -> None:
    data = pattern(16 * MIB)
    (tmp_path / "file").write_bytes(data)

    async def main() -> tuple[Counter[str], int]:
        syscalls, back = CountingSyscalls(), bytearray(len(data))
        storage = PosixStorage(tmp_path, syscalls=syscalls)
        await storage.read_proved("file", 0, memoryview(back), Noted(data))
        made = storage._lent().made
        await storage.close()
        assert back == data
        return syscalls.nbytes, made

    for _ in range(20):
        found = asyncio.run(main())
        if found == ({"buffered": len(data)}, 0):
            break
        (tmp_path / "file").write_bytes(data)  # the system may have needed that memory for somebody else
    assert found == ({"buffered": len(data)}, 0)


def test_memory_on_the_way_is_made_once_for_each_thread_and_freed_on_close(tmp_path: Path) -> None:
    if not has_direct(tmp_path):
        pytest.skip(f"the file system of {tmp_path} has no O_DIRECT: run with --basetemp on a disk")
    data = pattern(40 * MIB)
    (tmp_path / "file").write_bytes(data)
    storage = PosixStorage(tmp_path, threads=3)

    async def main() -> None:
        for _ in range(3):
            evict(tmp_path / "file")
            await storage.read_proved("file", 0, memoryview(bytearray(len(data) + 8))[8:], Noted(data))
        lent = storage._lent()
        assert 1 <= lent.made <= 6
        assert lent.nbytes == 8 * MIB
        await storage.close()
        assert lent._spare == []
        assert storage._lent() is not lent

    asyncio.run(main())


def test_what_the_proof_raises_ends_the_read_and_passes(tmp_path: Path) -> None:
    data = pattern(24 * MIB)
    (tmp_path / "file").write_bytes(data)
    began: list[int] = []

    def prove(offset: int, piece: memoryview) -> None:
        began.append(offset)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read(PosixStorage(tmp_path, threads=2), 0, memoryview(bytearray(len(data))), prove)
    assert len(began) <= 4


def test_errors_are_those_of_a_plain_read(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").write_bytes(b"x" * 100)
    (tmp_path / "root" / "leaf").symlink_to(tmp_path / "secret")
    (tmp_path / "root" / "short").write_bytes(b"x" * (9 * MIB))

    def prove(offset: int, piece: memoryview) -> None:
        pass

    async def main() -> None:
        storage = PosixStorage(tmp_path / "root")
        with pytest.raises(NotFoundError, match="missing"):
            await storage.read_proved("missing", 0, memoryview(bytearray(1)), prove)
        with pytest.raises(AccessError, match="leads out of"):
            await storage.read_proved("leaf", 0, memoryview(bytearray(1)), prove)
        for nbytes in (9 * MIB + 1, 17 * MIB):
            with pytest.raises(IntegrityError, match=f"it has {9 * MIB}"):
                await storage.read_proved("short", 0, memoryview(bytearray(nbytes)), prove)
        with pytest.raises(UsageError, match="read-only"):
            await storage.read_proved("short", 0, memoryview(b"read-only"), prove)
        with pytest.raises(UsageError):
            await storage.read_proved("short", -1, memoryview(bytearray(1)), prove)
        await storage.read_proved("missing", 3, memoryview(bytearray(0)), prove)  # nothing is asked for
        await storage.close()

    asyncio.run(main())


@pytest.mark.parametrize("direct", [True, False])
def test_whatever_the_disk_refuses_is_an_error_and_short_reads_are_continued(tmp_path: Path, direct: bool) -> None:
    data = pattern(10 * MIB + 7)
    (tmp_path / "file").write_bytes(data)
    evict(tmp_path / "file")

    class Stingy(OsSyscalls):
        def preadv(self, fd: int, buffer: memoryview, offset: int, flags: int = 0) -> int:
            return super().preadv(fd, buffer[: 1 + buffer.nbytes // 3], offset, flags)

    class Broken(OsSyscalls):
        def preadv(self, fd: int, buffer: memoryview, offset: int, flags: int = 0) -> int:
            raise OSError(errno.EIO, "broken")

    back, noted = bytearray(len(data)), Noted(data)
    read(PosixStorage(tmp_path, syscalls=Stingy(), direct=direct), 0, memoryview(back), noted)
    assert back == data
    assert noted.covers(0, len(data))
    with pytest.raises(StorageError, match="Input/output error"):
        read(PosixStorage(tmp_path, syscalls=Broken(), direct=direct), 0, memoryview(back), noted)


@pytest.mark.parametrize("cold", [True, False])
def test_a_cancelled_read_leaves_the_memory_alone_once_it_has_ended(tmp_path: Path, cold: bool) -> None:
    data = pattern(8 * MIB)
    (tmp_path / "file").write_bytes(data)
    if cold:
        evict(tmp_path / "file")

    async def work() -> None:
        buffer, noted = bytearray(len(data)), Noted(data)
        slow = SlowReads()
        storage = PosixStorage(tmp_path, syscalls=slow)
        await cancel_within(storage.read_proved("file", 0, memoryview(buffer), noted), slow)
        assert noted.pieces == []
        await storage.close()

    asyncio.run(work())


class Ranges:
    """A reading of several ranges that keeps what it is given."""

    def __init__(self, path: str, ranges: list[tuple[int, int]], unit: int = 4096) -> None:
        self.path, self.ranges, self.unit = path, ranges, unit
        self.got: dict[int, bytes] = {}
        self.lost: list[tuple[int, int, str]] = []

    def place(self, begin: int, end: int) -> memoryview | None:
        return None

    def take(self, begin: int, piece: memoryview, placed: bool) -> None:
        assert not placed
        self.got[begin] = bytes(piece)

    def failed(self, begin: int, end: int, error: Exception) -> None:
        self.lost.append((begin, end, type(error).__name__))


def test_many_ranges_of_many_files_are_one_call_and_a_bad_one_ends_nothing_else(tmp_path: Path) -> None:
    data = pattern(9 * MIB)
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "cut").write_bytes(data[:5000])
    syscalls = CountingSyscalls()
    a, b = Ranges("a", [(0, 4096), (3 * MIB, 9 * MIB)]), Ranges("b", [(8192, 8193)])
    cut, gone = Ranges("cut", [(0, 4096), (4096, 8192), (MIB, 2 * MIB)]), Ranges("gone", [(0, 1), (2, 3)])

    async def main() -> None:
        storage = PosixStorage(tmp_path, syscalls=syscalls)
        await storage.read_pieces([a, cut, gone, b, Ranges("nothing", [])])
        assert storage._lent().made <= 4
        await storage.close()

    asyncio.run(main())
    joined = b"".join(a.got[at] for at in sorted(a.got))
    assert joined == data[:4096] + data[3 * MIB :]
    assert b.got == {8192: data[8192:8193]}
    assert cut.got == {0: data[:4096]}
    assert sorted(cut.lost) == [(4096, 8192, "IntegrityError"), (MIB, 2 * MIB, "IntegrityError")]
    assert sorted(gone.lost) == [(0, 1, "NotFoundError"), (2, 3, "NotFoundError")]
    assert syscalls.opened["buffered"] == 3
    assert not syscalls.fds


def test_a_small_call_gets_a_thread_while_a_long_read_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece lets the other go on: the small call is served although the read has not ended."""
    monkeypatch.setattr(_reading, "_TURN_S", 0.0)
    data = pattern(32 * MIB)
    (tmp_path / "file").write_bytes(data)
    served = threading.Event()
    asked = threading.Event()

    def prove(offset: int, piece: memoryview) -> None:
        if offset == 0:
            asked.set()
        elif offset >= 24 * MIB:
            assert served.wait(60)

    async def main() -> None:
        storage = PosixStorage(tmp_path, threads=1)
        task = asyncio.ensure_future(storage.read_proved("file", 0, memoryview(bytearray(len(data))), prove))
        assert await asyncio.to_thread(asked.wait, 120)
        await storage.stat("file")
        served.set()
        await task
        await storage.close()

    asyncio.run(main())


def _mapped(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


def _resident(path: Path) -> int:
    """Bytes of a file that are in the page cache."""
    from tierstore.storage._cachestat import cached_pages

    with open(path, "rb") as file:
        pages = cached_pages(file.fileno(), 0, path.stat().st_size)
    if pages is None:
        pytest.skip("this kernel does not say what the page cache holds (cachestat, Linux 6.5)")
    return pages * mmap.PAGESIZE
