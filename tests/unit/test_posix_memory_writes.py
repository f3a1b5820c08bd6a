"""What lies in memory is written by the storage's own threads: hashed once, synced once, ended in time, and not looked at afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierstore.clock import SystemClock
from tierstore.errors import DeadlineError, IntegrityError
from tierstore.format.digest import block_digests
from tierstore.names import Attempt, new_save_id
from tierstore.storage._syscalls import OsSyscalls
from tierstore.storage._threads import DaemonPool
from tierstore.storage.contract import InMemory, WorksBeside
from tierstore.storage.posix import PosixStorage
from tierstore.storage.sources import BytesSource, CountingSource, LocalSource, StorageSource, ThrottledSource
from tierstore.testing.sources import PatternSource, pattern
from tierstore.tiers.persist import HashingSource
from tierstore.tiers.progress import telling

MIB = 1 << 20
PART = 8 * MIB


class Memory:
    """A source in memory that calls `at` in the thread that takes or works on a piece."""

    def __init__(self, data: bytes | mmap.mmap, at: Callable[[str, int], None] = lambda _what, _offset: None) -> None:
        self.data = memoryview(data)
        self.at = at
        self.threads: set[int] = set()

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        raise AssertionError("a source in memory was pulled through the event loop")

    def view(self, offset: int, nbytes: int) -> memoryview:
        self.work(offset, nbytes)
        return self.bare(offset, nbytes)

    def bare(self, offset: int, nbytes: int) -> memoryview:
        self.threads.add(threading.get_ident())
        self.at("bare", offset)
        return self.data[offset : offset + nbytes]

    def work(self, offset: int, nbytes: int) -> None:
        self.threads.add(threading.get_ident())
        self.at("work", offset)


class Noting(OsSyscalls):
    """Notes what changes the folder, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        wrote = super().pwrite(fd, data, offset)
        self.calls.append("pwrite")
        return wrote

    def fsync(self, fd: int) -> None:
        self.calls.append("fsync")
        super().fsync(fd)

    def rename(self, source: str, target: str) -> None:
        self.calls.append("rename")
        super().rename(source, target)


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".tmp").glob("*"))


def written(root: Path, source: Any, **options: Any) -> None:
    async def main() -> None:
        storage = PosixStorage(root, **options)
        await storage.write("a/file", source)
        await storage.close()

    asyncio.run(main())


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of all that is hashed for `block_digests`, in bytes."""
    seen: list[int] = []

    class Counting:
        @staticmethod
        def sha256(data: Any) -> Any:
            seen.append(memoryview(data).nbytes)
            return hashlib.sha256(data)

    monkeypatch.setattr("tierstore.format.digest.hashlib", Counting)
    return seen


def test_which_sources_lie_in_memory(tmp_path: Path) -> None:
    async def main() -> None:
        loop, memory, pulled = asyncio.get_running_loop(), BytesSource(b"x"), PatternSource(b"x")
        local = LocalSource(memory, tmp_path, hard=True)
        assert all(isinstance(source, InMemory) for source in (memory, local, CountingSource(memory, print, loop), HashingSource(memory)))
        assert isinstance(HashingSource(CountingSource(memory, print, loop)), WorksBeside)
        waits = ThrottledSource(memory, None)  # type: ignore[arg-type]
        for source in (pulled, waits, CountingSource(memory, print), CountingSource(waits, print, loop), HashingSource(pulled)):
            assert not isinstance(source, InMemory)
        assert not isinstance(StorageSource(PosixStorage(tmp_path), "a", 1), InMemory)

    asyncio.run(main())


@pytest.mark.parametrize("nbytes", [0, 1, MIB, PART, PART + 1, 2 * PART + MIB + 123])
@pytest.mark.parametrize("threads", [1, 4])
def test_each_block_is_hashed_exactly_once_the_tail_too(tmp_path: Path, hashes: list[int], nbytes: int, threads: int) -> None:
    data = pattern(nbytes)
    source = HashingSource(BytesSource(data))
    written(tmp_path, source, durable=False, threads=threads)
    digests = asyncio.run(source.finish())
    assert sorted(hashes) == sorted([MIB] * (nbytes // MIB) + [nbytes % MIB] * (nbytes % MIB > 0))
    assert digests == block_digests(data)
    assert (tmp_path / "a" / "file").read_bytes() == data


def test_a_piece_that_is_taken_again_is_compared_with_the_first_time() -> None:
    data = bytearray(3 * 4096)
    source = HashingSource(BytesSource(data), 4096)
    assert source.view(0, 3 * 4096) == data
    assert source.view(4096, 4096) == bytes(4096)
    data[4096] ^= 1
    with pytest.raises(IntegrityError, match="block 1 changed while it was written"):
        source.view(4096, 4096)
    with pytest.raises(IntegrityError, match="block 1 changed"):
        asyncio.run(source.finish())


def test_many_pieces_cost_no_more_trips_to_the_threads_than_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trips: list[str] = []
    real = DaemonPool.submit

    def submit(self: DaemonPool, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        trips.append(repr(args))
        return real(self, fn, *args, **kwargs)

    monkeypatch.setattr(DaemonPool, "submit", submit)
    monkeypatch.setattr("tierstore.storage._pouring._TURN_S", 3600.0)  # else a thread that is late takes the first one's turn
    source = Memory(bytes(6 * PART))
    written(tmp_path, source, durable=False, threads=2)
    assert len(trips) == 4, "opened, two threads, published"
    assert threading.get_ident() not in source.threads
    trips.clear()
    written(tmp_path, Memory(bytes(1000)), durable=False, threads=2)
    assert len(trips) == 1, "a short file is made in one"


def test_it_is_synced_once_after_the_last_byte_without_waiting_for_the_work_and_named_after_both(tmp_path: Path) -> None:
    syscalls, synced = Noting(), threading.Event()

    def fsync(fd: int) -> None:
        Noting.fsync(syscalls, fd)
        synced.set()

    syscalls.fsync = fsync  # type: ignore[method-assign]

    def at(what: str, offset: int) -> None:
        if what == "work" and offset == 3 * PART:
            assert synced.wait(60)
            syscalls.calls.append("work")

    written(tmp_path, Memory(bytes(4 * PART), at), syscalls=syscalls, threads=2)
    assert syscalls.calls == ["pwrite"] * 4 + ["fsync", "work", "rename"]


@pytest.mark.parametrize("what", ["bare", "work"])
@pytest.mark.parametrize("nbytes", [1000, 3 * PART])
def test_a_source_that_is_damaged_publishes_nothing_and_leaves_nothing(tmp_path: Path, what: str, nbytes: int) -> None:
    def at(doing: str, offset: int) -> None:
        if doing == what and offset == (nbytes - 1) // PART * PART:
            raise IntegrityError("damaged", offset=offset)

    with pytest.raises(IntegrityError, match="damaged"):
        written(tmp_path, Memory(bytes(nbytes), at), durable=False)
    assert not (tmp_path / "a" / "file").exists()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("nbytes", [1000, 3 * PART])
def test_a_source_that_gives_too_little_is_refused(tmp_path: Path, nbytes: int) -> None:
    class Short(Memory):
        def bare(self, offset: int, nbytes: int) -> memoryview:
            return super().bare(offset, nbytes)[:-1]

    with pytest.raises(IntegrityError, match=rf"a/file gave \d+ bytes at \d+ where {min(nbytes, PART)} were asked for"):
        written(tmp_path, Short(bytes(nbytes)), durable=False)
    assert not (tmp_path / "a" / "file").exists()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("nbytes", [1000, 3 * PART])
def test_a_cancelled_write_has_ended_only_when_no_thread_looks_at_the_memory(tmp_path: Path, nbytes: int) -> None:
    """The image is recycled then: the next save's tensors are copied into it."""
    hashing, go = threading.Event(), threading.Event()
    events: list[str] = []

    def at(what: str, offset: int) -> None:
        if what == "work":
            hashing.set()
            assert go.wait(60)
            events.append("looked at")

    async def main() -> None:
        storage = PosixStorage(tmp_path, durable=False, threads=2)
        write = asyncio.ensure_future(storage.write("a/file", Memory(bytes(nbytes), at)))
        assert await asyncio.to_thread(hashing.wait, 60)
        write.cancel()
        assert not (await asyncio.wait({write}, timeout=0.05))[0], "it ended while a thread looked at the memory"
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await write
        count = len(events)
        assert count <= 2, "threads went on taking pieces"
        await storage.list()
        assert len(events) == count
        await storage.close()

    asyncio.run(main())
    assert not (tmp_path / "a" / "file").exists()
    assert leftovers(tmp_path) == []


class Hanging(OsSyscalls):
    """The first pwrite hangs until it is released."""

    def __init__(self) -> None:
        self.hanging, self.released = threading.Event(), threading.Event()

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if not self.hanging.is_set():
            self.hanging.set()
            assert self.released.wait(200)
        return super().pwrite(fd, data, offset)


@pytest.mark.parametrize("nbytes", [1000, 3 * PART])
def test_a_thread_that_hangs_in_one_piece_is_abandoned_after_the_deadline(tmp_path: Path, nbytes: int) -> None:
    syscalls = Hanging()

    async def main() -> None:
        storage = PosixStorage(tmp_path, durable=False, threads=1, deadline_s=0.2, syscalls=syscalls)
        while not syscalls.hanging.is_set():  # where the machine stood still before that, it is tried again
            with pytest.raises(DeadlineError, match="a/file"):
                await storage.write("a/file", Memory(bytes(nbytes)))
        storage._calls.deadline_s = 120.0  # what follows may take as long as a busy machine needs
        await storage.put("other", b"works")
        assert [info.path for info in await storage.list()] == ["other"]
        await storage.close()

    asyncio.run(main())
    syscalls.released.set()
    end = time.monotonic() + 120
    while leftovers(tmp_path):  # the cleanup has a thread of its own, which may be late too
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_write_that_gets_on_may_take_longer_than_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock by which a thread is given up moves with its work: however long the machine stands still, a step takes four fifths."""
    deadline_s, now_s, never = 0.05, [0.0], threading.Event()
    for module in ("_calls", "_pouring"):
        monkeypatch.setattr(f"tierstore.storage.{module}.time", SimpleNamespace(monotonic=lambda: now_s[0]))

    class Opening(OsSyscalls):
        def open(self, path: str, flags: int) -> int:
            storage._calls.deadline_s = deadline_s  # for what comes next, the pieces; making the file is no step of those
            return super().open(path, flags)

    def at(what: str, offset: int) -> None:
        if what == "bare":
            now_s[0] += 0.8 * deadline_s
            never.wait(2 * deadline_s)  # so that whoever waits for the thread looks at the clock meanwhile
        elif offset == 4 * PART:
            storage._calls.deadline_s = 60.0  # nor is publishing it

    storage = PosixStorage(tmp_path, durable=False, threads=1, deadline_s=60.0, syscalls=Opening())

    async def main() -> None:
        await storage.write("a/file", Memory(bytes(5 * PART), at))
        await storage.close()

    asyncio.run(main())
    assert now_s[0] > 3 * deadline_s
    assert (tmp_path / "a" / "file").stat().st_size == 5 * PART


def test_a_small_file_does_not_wait_for_the_end_of_a_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.storage._pouring._TURN_S", 0.0)
    begun, go, served = threading.Event(), threading.Event(), threading.Event()
    pieces: list[int] = []

    def at(what: str, offset: int) -> None:
        if what == "bare":
            begun.set()
            assert go.wait(60)
            if offset == 5 * PART:
                assert served.wait(120), "the small file waits for the end of the large one"
            pieces.append(offset)

    async def main() -> None:
        storage = PosixStorage(tmp_path, durable=False, threads=1)
        large = asyncio.ensure_future(storage.write("large", Memory(bytes(6 * PART), at)))
        assert await asyncio.to_thread(begun.wait, 60)
        small = asyncio.ensure_future(storage.put("small", b"x"))
        while not storage._calls.crowded():  # noqa: ASYNC110 - until it waits in the queue
            await asyncio.sleep(0)
        go.set()
        await small
        assert len(pieces) < 6
        served.set()
        await large
        await storage.close()

    asyncio.run(main())
    assert sorted(pieces) == list(range(0, 6 * PART, PART))


def test_progress_is_told_on_the_loop_and_complete_only_at_the_end(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    threads: set[int] = set()

    def progress(tier: str, attempt: Attempt, file: str, nbytes_done: int, nbytes: int) -> None:
        told.append((nbytes_done, nbytes))
        threads.add(threading.get_ident())

    async def main() -> None:
        storage = PosixStorage(tmp_path, durable=False)
        attempt = Attempt(run="r", step=1, save_id=new_save_id(SystemClock().now()))
        with telling(progress, "t", attempt, "f", BytesSource(bytes(3 * PART))) as source:
            hashing = HashingSource(source)
            await storage.write("file", hashing)
            await hashing.finish()
        await storage.close()

    asyncio.run(main())
    assert threads == {threading.get_ident()}
    assert told == [(PART, 3 * PART), (2 * PART, 3 * PART), (3 * PART - 1, 3 * PART), (3 * PART, 3 * PART)]


def test_a_save_takes_no_memory_beside_its_image(tmp_path: Path) -> None:
    """At most 64 MiB with everything, promotion to a second tier not counted: here it is less than a sixth of that."""
    script = """
import asyncio, mmap, sys
from pathlib import Path
from tierstore.clock import SystemClock
from tierstore.names import Attempt, new_save_id
from tierstore.storage.posix import PosixStorage
from tierstore.storage.sources import BytesSource
from tierstore.tiers.persist import persist
from tierstore.tiers.tier import Tier

def most_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

async def main():
    image = mmap.mmap(-1, 160 << 20)
    for at in range(0, len(image), 4096):
        image[at] = 1
    storage = PosixStorage(Path(sys.argv[1]), threads=4)
    tier = Tier(name="t", storage=storage, scope="shared")
    await storage.put("warm", b"up")
    async def save(step, nbytes):
        attempt = Attempt(run="r", step=step, save_id=new_save_id(SystemClock().now()))
        await persist(tier, attempt, rank=0, world_size=1, shard=BytesSource(memoryview(image)[:nbytes]), tensors=[], objects=b"",
                      facts={}, clock=SystemClock(), authority=True)
    await save(1, 1 << 20)
    before = most_kib()
    await save(2, len(image))
    await storage.close()
    print(most_kib() - before)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=250, check=True)
    assert int(done.stdout) < 10 * 1024


def test_the_threads_of_a_folder_are_as_nice_as_asked(tmp_path: Path) -> None:
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    seen: set[int] = set()

    def at(what: str, offset: int) -> None:
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    written(tmp_path, Memory(bytes(1000), at), durable=False, nice=3)
    assert seen == {min(own + 3, 19)}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
    seen.clear()
    written(tmp_path, Memory(bytes(1000), at), durable=False)
    assert seen == {own}
