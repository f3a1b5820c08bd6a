"""What the POSIX storage does when the system calls fail, lie, stop short or hang."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from posix_kit import SlowReads, cancel_within, hurry_once

from tierstore.errors import AccessError, DeadlineError, IntegrityError, StorageError, TierFullError, TierStoreError
from tierstore.storage._calls import all_of
from tierstore.storage._syscalls import OsSyscalls
from tierstore.storage.posix import PosixStorage
from tierstore.storage.sources import BytesSource
from tierstore.testing.sources import GatedSource, PatternSource, pattern

MIB = 1 << 20
CHANGING = ("open", "allocate", "pwrite", "fsync", "close", "link", "rename", "unlink", "mkdir", "rmdir", "fsync_folder")


class FailingSyscalls(OsSyscalls):
    """The operating system's, of which the `nth` call of `names` fails with `code`, before or after it was made."""

    def __init__(self, code: int, names: tuple[str, ...], nth: int = 1, *, after: bool = False) -> None:
        self.code = code
        self.names = names
        self.nth = nth
        self.after = after
        self.count = 0
        self.calls: Counter[str] = Counter()
        for name in CHANGING:
            setattr(self, name, self._wrap(name, getattr(OsSyscalls, name)))

    def _wrap(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            self.calls[name] += 1
            fails = False
            if name in self.names and not (name == "open" and not args[1] & os.O_CREAT):  # type: ignore[operator]
                self.count += 1
                fails = self.count == self.nth
            if fails and (self.after or name == "close"):  # a close that fails has closed all the same
                real(self, *args)
            if fails:
                raise OSError(self.code, os.strerror(self.code))
            return real(self, *args)

        return call

    @property
    def met(self) -> bool:
        return self.count >= self.nth


def _leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".tmp").glob("*"))


def _write_over(root: Path, syscalls: OsSyscalls, nbytes: int = 3 * MIB) -> TierStoreError | None:
    """Writes over an existing file; returns the error. Asserts that the file is the old or the new one, whole."""
    asyncio.run(PosixStorage(root).put("a/file", b"the old content"))
    storage = PosixStorage(root, syscalls=syscalls)
    failed = None
    try:
        asyncio.run(storage.write("a/file", PatternSource(pattern(nbytes))))
    except TierStoreError as error:
        failed = error
    found = (root / "a" / "file").read_bytes()
    whole = found in ((b"the old content", pattern(nbytes)) if failed else (pattern(nbytes),))
    assert whole, failed
    return failed


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["allocate", "pwrite", "fsync", "close"])
def test_no_space_says_how_much_and_leaves_nothing(tmp_path: Path, call: str, code: int) -> None:
    failed = _write_over(tmp_path, FailingSyscalls(code, (call,)))
    assert isinstance(failed, TierFullError)
    assert failed.errno == errno.ENOSPC
    assert failed.context["wanted_nbytes"] == 3 * MIB
    assert failed.context["free_nbytes"] > 0
    assert str(tmp_path / "a" / "file") in str(failed)
    assert "hint" in str(failed)
    assert (tmp_path / "a" / "file").read_bytes() == b"the old content"
    assert _leftovers(tmp_path) == []


def test_no_space_shows_before_a_byte_is_written(tmp_path: Path) -> None:
    syscalls = FailingSyscalls(errno.ENOSPC, ("allocate",))
    _write_over(tmp_path, syscalls)
    assert syscalls.calls["pwrite"] == 0


@pytest.mark.parametrize(("code", "kind"), [(errno.EACCES, AccessError), (errno.EPERM, AccessError), (errno.EROFS, AccessError)])
def test_a_folder_that_is_not_writable_is_an_access_error(tmp_path: Path, code: int, kind: type[Exception]) -> None:
    failed = _write_over(tmp_path, FailingSyscalls(code, ("open",)))
    assert isinstance(failed, kind)
    assert isinstance(failed, PermissionError)
    assert str(tmp_path / "a" / "file") in str(failed)


@pytest.mark.parametrize("call", ["fsync", "close"])
def test_a_failed_sync_or_close_is_final_and_publishes_nothing(tmp_path: Path, call: str) -> None:
    syscalls = FailingSyscalls(errno.EIO, (call,))
    failed = _write_over(tmp_path, syscalls)
    assert isinstance(failed, StorageError)
    assert isinstance(failed.__cause__, OSError)
    assert syscalls.calls["fsync"] == 1
    assert syscalls.calls["rename"] == 0
    assert _leftovers(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_whichever_call_fails_a_write_is_whole_or_not_at_all(tmp_path: Path, code: int) -> None:
    for nth in range(1, 100):
        root = tmp_path / str(nth)
        syscalls = FailingSyscalls(code, CHANGING, nth)
        failed = _write_over(root, syscalls)
        asyncio.run(PosixStorage(root).put("a/file", b"and again"))
        assert (root / "a" / "file").read_bytes() == b"and again"
        if not syscalls.met:
            assert failed is None
            assert nth > 6
            return
        # A cleanup that fails is not worth an error of its own: what it leaves is swept later.
        assert failed is not None or _leftovers(root)
    raise AssertionError("the write never ended")


@pytest.mark.parametrize("after", [False, True])
def test_whichever_call_fails_a_create_is_whole_or_not_at_all(tmp_path: Path, after: bool) -> None:
    for nth in range(1, 100):
        root = tmp_path / str(nth)
        root.mkdir()
        syscalls = FailingSyscalls(errno.EIO, CHANGING, nth, after=after)
        failed = None
        try:
            asyncio.run(PosixStorage(root, syscalls=syscalls).create("log/record", b"mine"))
        except TierStoreError as error:
            failed = error
        if failed is None or (root / "log" / "record").exists():
            assert (root / "log" / "record").read_bytes() == b"mine"
        asyncio.run(PosixStorage(root).create("log/record", b"mine"))
        if not syscalls.met:
            assert failed is None
            assert nth > 6
            return
    raise AssertionError("the creation never ended")


@pytest.mark.parametrize("code", [errno.EIO, errno.EEXIST, errno.ETIMEDOUT])
def test_a_link_whose_answer_was_lost_is_a_success(tmp_path: Path, code: int) -> None:
    syscalls = FailingSyscalls(code, ("link",), after=True)
    asyncio.run(PosixStorage(tmp_path, syscalls=syscalls).create("record", b"mine"))
    assert (tmp_path / "record").read_bytes() == b"mine"
    assert _leftovers(tmp_path) == []


def test_a_file_system_without_hard_links_is_refused_by_name(tmp_path: Path) -> None:
    syscalls = FailingSyscalls(errno.EPERM, ("link",))
    with pytest.raises(StorageError, match="no hard links") as caught:
        asyncio.run(PosixStorage(tmp_path, syscalls=syscalls).create("record", b"mine"))
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "record").exists()
    assert _leftovers(tmp_path) == []


class StingySyscalls(OsSyscalls):
    """Writes and reads less than asked, and refuses O_DIRECT while writing as some file systems do."""

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not aligned enough")
        return super().pwrite(fd, data[: 1 + data.nbytes // 3], offset)

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        return super().pread(fd, 1 + nbytes // 3, offset)

    def preadv(self, fd: int, buffer: memoryview, offset: int, flags: int = 0) -> int:
        return super().preadv(fd, buffer[: 1 + buffer.nbytes // 3], offset, flags)


def test_short_writes_and_reads_are_continued(tmp_path: Path) -> None:
    data = pattern(9 * MIB + 3)
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    back = bytearray(len(data))

    async def main() -> None:
        storage = PosixStorage(tmp_path, syscalls=StingySyscalls())
        await storage.write("file", BytesSource(memory))
        await storage.read_into("file", 0, memoryview(back))
        whole = await storage.read("file") == data
        assert whole
        await storage.close()

    asyncio.run(main())
    same = back == data and (tmp_path / "file").read_bytes() == data
    assert same


class HangingSyscalls(OsSyscalls):
    """One pwrite hangs until it is released."""

    def __init__(self) -> None:
        self.hangs = threading.Event()
        self.released = threading.Event()
        self.events: list[str] = []
        self._armed = True

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if self._armed:
            self._armed = False
            self.hangs.set()
            assert self.released.wait(60)
            self.events.append("pwrite returned")
        return super().pwrite(fd, data, offset)

    def close(self, fd: int) -> None:
        self.events.append("close")
        super().close(fd)


def test_a_hanging_call_is_abandoned_after_the_deadline(tmp_path: Path) -> None:
    syscalls = HangingSyscalls()

    async def main() -> None:
        storage = PosixStorage(tmp_path, threads=1, syscalls=syscalls)
        hurry_once(syscalls.hangs, storage, 0.2)
        with pytest.raises(DeadlineError, match=r"a/file: no answer within 0\.2 s"):
            await storage.write("a/file", PatternSource(b"x" * 1000))
        storage._calls.deadline_s = 60.0  # what follows may take as long as a busy machine needs
        await storage.put("other", b"works")  # one thread hangs, another took its place
        assert await storage.read("other") == b"works"
        assert [info.path for info in await storage.list()] == ["other"]
        await storage.close()

    asyncio.run(main())
    syscalls.released.set()
    end = time.monotonic() + 60
    while _leftovers(tmp_path):  # the cleanup waits for the call that hung, with a thread of its own
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_source_that_stands_still_ends_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sooner(works: Any, moved: Any, stall_s: float, full: str) -> Any:
        return all_of(works, moved, stall_s / 300, full)  # the calls before it keep a deadline that a busy machine meets

    monkeypatch.setattr("tierstore.storage.posix.all_of", sooner)

    async def main() -> None:
        storage = PosixStorage(tmp_path, deadline_s=60)
        with pytest.raises(DeadlineError, match="no part of it was finished"):
            await storage.write("file", GatedSource(pattern(20 * MIB), at=10 * MIB))
        assert await storage.list() == []
        await storage.close()

    asyncio.run(main())
    assert _leftovers(tmp_path) == []


def test_a_cancelled_write_closes_no_descriptor_under_a_running_call(tmp_path: Path) -> None:
    syscalls = HangingSyscalls()

    async def main() -> None:
        storage = PosixStorage(tmp_path, threads=2, syscalls=syscalls)
        writing = asyncio.ensure_future(storage.write("file", PatternSource(b"x" * 1000)))
        await asyncio.to_thread(syscalls.hangs.wait, 60)
        writing.cancel()
        await asyncio.sleep(0.01)
        writing.cancel()  # once more, into the cleanup
        syscalls.released.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await storage.close()

    asyncio.run(main())
    assert syscalls.events[0] == "pwrite returned"
    assert syscalls.events.count("close") == 1
    assert _leftovers(tmp_path) == []
    assert not (tmp_path / "file").exists()


def test_a_cancelled_read_leaves_the_memory_alone_once_it_has_ended(tmp_path: Path) -> None:
    """A thread that was still reading filled the buffer later, when its owner may have put other bytes there."""
    (tmp_path / "file").write_bytes(b"x" * 4096)

    async def work() -> None:
        slow = SlowReads()
        await cancel_within(PosixStorage(tmp_path, syscalls=slow).read_into("file", 0, memoryview(bytearray(4096))), slow)

    asyncio.run(work())


def test_writes_survive_deletions_that_take_their_folder_away(tmp_path: Path) -> None:
    async def main() -> None:
        storage = PosixStorage(tmp_path, threads=4)

        async def churn(number: int) -> None:
            for turn in range(25):
                await storage.put(f"a/b/{number}", b"x")
                if turn % 5 == 0:
                    await storage.delete([f"a/b/{number}-record"])
                    await storage.create(f"a/b/{number}-record", b"mine")
                await storage.delete([f"a/b/{number}", f"a/b/{number}-record"])

        await asyncio.gather(*(churn(number) for number in range(4)))
        assert await storage.list() == []
        assert (await storage.children()).folders == ()
        await storage.close()

    asyncio.run(main())
    assert _leftovers(tmp_path) == []


def test_a_folder_that_another_writer_made_and_a_deletion_took_at_that_instant_is_made_again(tmp_path: Path) -> None:
    """Found in a loaded CI: "Not a directory: a file has the name of a folder that is needed"."""

    class OnceTaken(OsSyscalls):
        taken = False

        def mkdir(self, path: str) -> None:
            if path.endswith("/b") and not self.taken:
                self.taken = True
                raise FileExistsError(errno.EEXIST, "exists", path)
            super().mkdir(path)

    async def main() -> None:
        storage = PosixStorage(tmp_path, syscalls=OnceTaken())
        await storage.put("a/b/1", b"x")
        assert await storage.read("a/b/1") == b"x"
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(StorageError, match="Not a directory"):
            await storage.put("file/1", b"x")
        await storage.close()

    asyncio.run(main())


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 16 MiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs: run as root, or in a container with CAP_SYS_ADMIN")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_really_full_keeps_what_it_has(tiny: Path) -> None:
    async def main() -> None:
        storage = PosixStorage(tiny)
        await storage.write("kept", PatternSource(pattern(8 * MIB)))
        with pytest.raises(TierFullError, match=r"20MiB wanted, 8MiB free"):
            await storage.write("big", PatternSource(pattern(20 * MIB)))
        with pytest.raises(TierFullError):
            await storage.write("kept", PatternSource(pattern(9 * MIB, 1)))
        same = await storage.read("kept") == pattern(8 * MIB)
        assert same
        assert await storage.free_nbytes() == 8 * MIB
        await storage.put("small", b"still works")
        assert sorted(info.path for info in await storage.list()) == ["kept", "small"]
        await storage.close()

    asyncio.run(main())
    assert _leftovers(tiny) == []


def test_a_read_only_mount_is_an_access_error(tiny: Path) -> None:
    asyncio.run(PosixStorage(tiny).put("kept", b"x"))
    subprocess.run(["mount", "-o", "remount,ro", str(tiny)], check=True)
    for storage in (PosixStorage(tiny), PosixStorage(tiny, durable=False)):
        with pytest.raises(AccessError, match="Read-only"):
            asyncio.run(storage.put("new", b"x"))
        with pytest.raises(AccessError, match="Read-only"):
            asyncio.run(storage.create("new", b"x"))
        with pytest.raises(AccessError, match="Read-only"):
            asyncio.run(storage.delete(["kept"]))
        assert asyncio.run(storage.read("kept")) == b"x"


def test_a_file_cut_off_on_disk_names_both_sizes(tmp_path: Path) -> None:
    async def main() -> None:
        storage = PosixStorage(tmp_path)
        await storage.put("file", b"x" * 1000)
        os.truncate(tmp_path / "file", 900)
        with pytest.raises(IntegrityError, match="1000 bytes from 0 on were wanted, it has 900"):
            await storage.read("file", 0, 1000)
        with pytest.raises(IntegrityError, match="1000 bytes from 0 on were wanted, it has 900"):
            await storage.read_into("file", 0, memoryview(bytearray(1000)))
        await storage.close()

    asyncio.run(main())
