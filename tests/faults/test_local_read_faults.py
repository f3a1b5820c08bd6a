"""Loads from local copies when the disk hangs, the file is replaced in the middle, or the process forks; and the memory that they take."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
from posix_kit import BrokenShards, hurry_once
from tiers_kit import BLOCK, attempt_at, copy_to, path_of, run, save, shard_of, tiers_in

from tierstore.errors import DeadlineError, StorageError
from tierstore.format.digest import block_digests
from tierstore.format.index import FileEntry
from tierstore.names import shard_name
from tierstore.storage._syscalls import OsSyscalls
from tierstore.storage.posix import PosixStorage
from tierstore.testing.sources import pattern
from tierstore.tiers.catalog import scan
from tierstore.tiers.nearby import FileReading
from tierstore.tiers.reads import Handover, Want
from tierstore.tiers.replica import Replica, open_replica
from tierstore.tiers.tier import Tiers

MIB = 1 << 20
FILE = shard_name(0, 1)
DATA = shard_of(0, 1).data


def unproved(offset: int, piece: memoryview) -> None:
    """Proves nothing."""


class Hanging(OsSyscalls):
    """Reads of more than 100 bytes hang until they are let go."""

    def __init__(self) -> None:
        self.hangs, self.go, self.woken = threading.Event(), threading.Event(), threading.Event()

    def preadv(self, fd: int, buffer: memoryview, offset: int, flags: int = 0) -> int:
        if buffer.nbytes <= 100:
            return super().preadv(fd, buffer, offset, flags)
        self.hangs.set()
        self.go.wait(60)
        try:
            raise OSError(errno.EIO, "the server came back and knows nothing")  # it writes nothing into memory of others
        finally:
            self.woken.set()


async def read_in_time(storage: PosixStorage, path: str, back: bytearray) -> None:
    """Reads, once more if a machine that stood still let a short deadline pass; without a thread it would pass each time."""
    for _ in range(20):
        with suppress(DeadlineError):
            await storage.read_proved(path, 0, memoryview(back), unproved)
            return
    raise AssertionError("no read came through in twenty times the deadline")


def test_a_read_that_hangs_ends_with_the_deadline_and_others_get_threads(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pattern(8 * MIB))
    (tmp_path / "small").write_bytes(b"small")
    syscalls = Hanging()

    async def main() -> None:
        storage = PosixStorage(tmp_path, syscalls=syscalls)
        hurry_once(syscalls.hangs, storage, 0.2)
        task = asyncio.ensure_future(storage.read_proved("file", 0, memoryview(bytearray(8 * MIB)), unproved))
        assert await asyncio.to_thread(syscalls.hangs.wait, 60)
        back = bytearray(5)
        await read_in_time(storage, "small", back)
        assert back == b"small"
        with pytest.raises(DeadlineError, match=r"can't read .*file: no answer within 0\.2 s"):
            await asyncio.wait_for(task, 60)
        await read_in_time(storage, "small", back)  # new threads took the place of those that hang
        syscalls.go.set()
        assert await asyncio.to_thread(syscalls.woken.wait, 60)
        await storage.close()

    asyncio.run(main())


def test_a_file_replaced_in_the_middle_is_read_to_its_end_as_it_was(tmp_path: Path) -> None:
    old, new = pattern(9 * MIB), pattern(9 * MIB, seed=1)
    (tmp_path / "file").write_bytes(old)
    (tmp_path / "new").write_bytes(new)
    replaced: list[int] = []

    def prove(offset: int, piece: memoryview) -> None:
        if not replaced:
            os.replace(tmp_path / "new", tmp_path / "file")
            replaced.append(offset)

    async def main() -> None:
        storage, back = PosixStorage(tmp_path, threads=1), bytearray(9 * MIB)
        await storage.read_proved("file", 0, memoryview(back), prove)
        same = back == old
        assert same
        await storage.read_proved("file", 0, memoryview(back), prove)
        same = back == new
        assert same
        await storage.close()

    asyncio.run(main())
    assert len(replaced) == 1


def test_a_forked_child_reads_with_threads_and_memory_of_its_own(tmp_path: Path) -> None:
    data = pattern(9 * MIB)
    (tmp_path / "file").write_bytes(data)
    storage = PosixStorage(tmp_path)

    async def once() -> bool:
        back = bytearray(len(data))
        await storage.read_proved("file", 0, memoryview(back), unproved)
        return back == data

    assert asyncio.run(once())
    mine = storage._lent()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads: that is what is tested
        child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if asyncio.run(once()) and storage._lent() is not mine else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asyncio.run(once())
    assert storage._lent() is mine
    asyncio.run(storage.close())


# ---- through a replica


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    """One checkpoint on three tiers."""
    made = tiers_in(tmp_path)
    attempt = run(save(made, 5, attempt=attempt_at(5)))
    for name in ("node", "far"):
        run(copy_to(made, attempt, name))
    return made


def read(tiers: Tiers, wants: list[Want | Handover], budget_nbytes: int | None = None) -> Replica:
    async def work() -> Replica:
        info = (await scan(tiers, "run")).find(5)
        assert info is not None
        replica = await open_replica(tiers, info, budget_nbytes=budget_nbytes)
        await replica.read(wants)
        return replica

    return run(work())


def test_four_failures_in_a_row_end_the_attempt_and_fewer_do_not() -> None:
    good = memoryview(bytes(BLOCK))
    entry = FileEntry(name=FILE, nbytes=BLOCK, block_digests=block_digests(good, BLOCK))
    reading = FileReading(entry, FILE, [], BLOCK, time.monotonic)
    for at in range(3):
        reading.failed(at, at + 1, StorageError("broken"))
    reading.take(0, good, True)
    for at in range(3):
        reading.failed(at, at + 1, StorageError("broken"))
    with pytest.raises(StorageError, match="the fourth"):
        reading.failed(9, 10, StorageError("the fourth"))
    assert len(reading.errors) == 7


def test_a_broken_disk_is_asked_four_times_for_what_lies_apart_and_the_rest_is_read_elsewhere(tmp_path: Path, tiers: Tiers) -> None:
    broken = BrokenShards()
    object.__setattr__(tiers.tiers[0], "storage", PosixStorage(tmp_path / "node", durable=False, threads=1, syscalls=broken))
    numbers = range(0, len(DATA) // BLOCK, 2)
    buffers = [bytearray(10) for _ in numbers]
    replica = read(tiers, [Want(FILE, at * BLOCK, memoryview(buffer)) for at, buffer in zip(numbers, buffers, strict=True)])
    assert [bytes(buffer) for buffer in buffers] == [DATA[at * BLOCK : at * BLOCK + 10] for at in numbers]
    assert 1 <= broken.reads <= 4 + 2  # two threads read for one that works: each may be at a piece when it ends
    assert [(bad.tier, bad.file) for bad in replica.bad_copies] == [("node", FILE)]


def test_a_copy_replaced_by_another_is_proved_like_any_and_its_bad_blocks_come_from_elsewhere(tiers: Tiers) -> None:
    info = run(scan(tiers, "run")).find(5)
    assert info is not None
    there = path_of(tiers, "node", info.attempt, FILE)
    there.with_name("other").write_bytes(bytes(len(DATA)))
    os.replace(there.with_name("other"), there)
    buffer = bytearray(len(DATA))
    replica = read(tiers, [Want(FILE, 0, memoryview(buffer))])
    assert buffer == DATA
    assert [(bad.tier, bad.file) for bad in replica.bad_copies] == [("node", FILE)]


def test_what_no_want_covers_passes_through_the_threads_own_memory_and_no_scratch(tiers: Tiers) -> None:
    """Wants of a few bytes in each block: the blocks around them take no memory of the load's budget, which is one block here."""
    numbers = range(len(DATA) // BLOCK)
    buffers = [bytearray(8) for _ in numbers]
    replica = read(tiers, [Want(FILE, at * BLOCK + 5, memoryview(buffer)) for at, buffer in zip(numbers, buffers, strict=True)], BLOCK)
    assert [bytes(buffer) for buffer in buffers] == [DATA[at * BLOCK + 5 : at * BLOCK + 13] for at in numbers]
    storage = tiers.tiers[0].storage
    assert isinstance(storage, PosixStorage)
    assert storage._lent().made <= 4
    assert replica.bytes_fetched["shared"] == 0
