"""The POSIX storage's own promises: links, O_DIRECT, temporaries, crash points."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from posix_kit import has_direct

from tierstore.crashpoints import CRASH_EXIT
from tierstore.errors import AccessError, NotFoundError, StorageError, UsageError
from tierstore.storage._direct import address_of
from tierstore.storage._syscalls import OsSyscalls
from tierstore.storage.posix import PosixStorage
from tierstore.storage.sources import BytesSource, StorageSource
from tierstore.storage.temporaries import owner_is_dead, temporary_name, this_process
from tierstore.testing.sources import PatternSource, pattern

MIB = 1 << 20


class CountingSyscalls(OsSyscalls):
    """Counts calls, and the bytes that pass the page cache by."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # several threads count
        self.calls: Counter[str] = Counter()
        self.direct: set[int] = set()

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        self.direct.discard(fd)
        if flags & os.O_DIRECT:
            self.direct.add(fd)
        return fd

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        wrote = super().pwrite(fd, data, offset)
        with self.lock:
            self.calls["written direct" if fd in self.direct else "written"] += wrote
        return wrote

    def preadv(self, fd: int, buffer: memoryview, offset: int, flags: int = 0) -> int:
        got = super().preadv(fd, buffer, offset, flags)
        with self.lock:
            self.calls["read direct" if fd in self.direct else "read"] += got
        return got

    def fsync(self, fd: int) -> None:
        self.calls["fsync"] += 1
        super().fsync(fd)

    def fsync_folder(self, path: str) -> None:
        self.calls["fsync"] += 1
        super().fsync_folder(path)


def _mapped(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


def test_the_address_of_a_view_is_that_of_its_first_byte() -> None:
    memory = bytearray(100)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert address_of(memoryview(memory)) == address
    assert address_of(memoryview(memory)[7:]) == address + 7
    assert address_of(memoryview(b"read-only")) > 0


def test_aligned_memory_goes_past_the_page_cache_both_ways(tmp_path: Path) -> None:
    if not has_direct(tmp_path):
        pytest.skip(f"the file system of {tmp_path} has no O_DIRECT: run with --basetemp on a disk")
    data = pattern(17 * MIB + 1234)
    syscalls = CountingSyscalls()
    memory, back = _mapped(data), _mapped(bytes(len(data)))

    async def main() -> None:
        storage = PosixStorage(tmp_path, syscalls=syscalls)
        await storage.write("file", BytesSource(memory))
        await storage.read_into("file", 0, memoryview(back))
        await storage.close()

    asyncio.run(main())
    same = back[:] == data and (tmp_path / "file").read_bytes() == data
    assert same
    assert syscalls.calls["written direct"] == len(data) // 4096 * 4096
    assert syscalls.calls["written"] == len(data) % 4096
    assert syscalls.calls["read direct"] >= 8 * MIB


def test_unaligned_memory_goes_through_the_page_cache(tmp_path: Path) -> None:
    syscalls = CountingSyscalls()
    asyncio.run(PosixStorage(tmp_path, syscalls=syscalls).write("file", PatternSource(pattern(3 * MIB), aligned=False)))
    assert syscalls.calls["written direct"] == 0
    assert syscalls.calls["written"] == 3 * MIB


def test_memory_is_not_synced(tmp_path: Path) -> None:
    syscalls = CountingSyscalls()

    async def main() -> None:
        storage = PosixStorage(tmp_path / "new", durable=False, syscalls=syscalls)
        await storage.put("a/file", b"x")
        await storage.create("a/record", b"x")
        await storage.delete(["a/file"])
        await storage.close()

    asyncio.run(main())
    assert syscalls.calls["fsync"] == 0


def test_a_new_root_is_durable_in_its_parent(tmp_path: Path) -> None:
    synced: list[str] = []

    class Noting(OsSyscalls):
        def fsync_folder(self, path: str) -> None:
            synced.append(path)
            super().fsync_folder(path)

    asyncio.run(PosixStorage(tmp_path / "new" / "root", syscalls=Noting()).put("a/file", b"x"))
    wanted = {tmp_path, tmp_path / "new", tmp_path / "new" / "root", tmp_path / "new" / "root" / "a"}
    assert {Path(path) for path in synced} == wanted


def test_links_out_of_the_root_are_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "leaf").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    (root / "real").write_bytes(b"inside")
    (root / "within").symlink_to("real")

    async def main() -> None:
        storage = PosixStorage(root)
        for path in ("leaf", "folder/secret"):
            with pytest.raises(AccessError, match="leads out of"):
                await storage.read(path)
            with pytest.raises(AccessError, match="leads out of"):
                await storage.read_into(path, 0, memoryview(bytearray(6)))
            with pytest.raises(AccessError, match="leads out of"):
                await storage.read_into(path, 0, memoryview(bytearray(9 * MIB)))
            with pytest.raises(AccessError, match="leads out of"):
                await storage.stat(path)
        with pytest.raises(AccessError, match="leads out of"):
            await storage.put("folder/new", b"x")
        with pytest.raises(AccessError, match="leads out of"):
            await storage.create("folder/new", b"x")
        with pytest.raises(AccessError, match="leads out of"):
            await storage.delete(["folder/secret"])
        with pytest.raises(AccessError, match="leads out of"):
            await storage.list("folder")
        assert sorted(info.path for info in await storage.list()) == ["real", "within"]
        assert await storage.read("within") == b"inside"
        await storage.put("leaf", b"replaces the link, not what it leads to")
        await storage.close()

    asyncio.run(main())
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_a_root_that_is_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to("real")
    asyncio.run(PosixStorage(tmp_path / "root").put("a/file", b"x"))
    assert (tmp_path / "real" / "a" / "file").read_bytes() == b"x"


def test_foreign_names_and_special_files_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"x")
    (tmp_path / "line\nbreak").write_bytes(b"x")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/not-utf8-\xff")).write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")

    async def main() -> None:
        storage = PosixStorage(tmp_path)
        assert [info.path for info in await storage.list()] == ["good"]
        assert [info.path for info in (await storage.children()).files] == ["good"]
        with pytest.raises(NotFoundError):
            await storage.stat("pipe")
        await storage.close()

    asyncio.run(main())


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(StorageError, match="a/file") as caught:
        asyncio.run(PosixStorage(tmp_path).put("a/file", b"x"))
    assert "name of a folder" in caught.value.hint


def test_misuse_is_answered(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    with pytest.raises(UsageError):
        asyncio.run(storage.read("file", -1, 1))
    with pytest.raises(UsageError):
        asyncio.run(storage.read_into("file", 0, memoryview(b"read-only")))
    with pytest.raises(UsageError):
        PosixStorage(tmp_path, threads=0)


def test_a_storage_source_copies_between_storages(tmp_path: Path) -> None:
    data = pattern(9 * MIB + 1)

    async def main() -> None:
        one, two = PosixStorage(tmp_path / "one"), PosixStorage(tmp_path / "two")
        await one.put("file", data)
        await two.write("copy", StorageSource(one, "file", len(data)))
        same = await two.read("copy") == data
        assert same
        with pytest.raises(UsageError):
            await StorageSource(one, "file", 10).read(5, 6)
        await one.close()
        await two.close()

    asyncio.run(main())


_DIES = """
import asyncio, sys
from pathlib import Path
from tierstore.storage.posix import PosixStorage
async def main():
    storage = PosixStorage(Path(sys.argv[1]))
    await storage.put("file", b"new" * 1000)
    await storage.create("record", b"mine")
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("point", "file", "record"),
    [
        ("posix.before-rename", b"old", None),
        ("posix.after-rename", b"new" * 1000, None),
        ("posix.create-before-link", b"new" * 1000, None),
        ("posix.create-after-link", b"new" * 1000, b"mine"),
    ],
)
def test_a_killed_process_leaves_whole_files_and_a_temporary_that_is_swept(
    tmp_path: Path, point: str, file: bytes, record: bytes | None
) -> None:
    asyncio.run(PosixStorage(tmp_path).put("file", b"old"))
    environment = {**os.environ, "TIERSTORE_CRASH_AT": point}
    ended = subprocess.run([sys.executable, "-c", _DIES, str(tmp_path)], env=environment, capture_output=True, timeout=200, check=False)
    assert ended.returncode == CRASH_EXIT, ended.stderr.decode()

    async def recover() -> None:
        storage = PosixStorage(tmp_path)
        assert await storage.read("file") == file
        if record is None:
            await storage.create("record", b"another's")
        else:
            assert await storage.read("record") == record
        left = sorted(path.name for path in (tmp_path / ".tmp").iterdir())
        assert len(left) == (0 if point == "posix.after-rename" else 1)
        assert await storage.sweep_temporaries() == left
        assert await storage.sweep_temporaries() == []
        assert list((tmp_path / ".tmp").iterdir()) == []
        await storage.close()

    asyncio.run(recover())


def test_only_temporaries_of_the_provably_dead_are_swept(tmp_path: Path) -> None:
    me = this_process()
    mine = temporary_name("write")
    dead = f"write-{me.host}-{me.boot}-{me.namespace}-{me.pid}-{me.start + 1}-0123456789abcdef"  # the pid was used again
    kept = [
        mine,
        "image.bin",
        "reconcile-0123456789abcdef.lock",
        f"write-{'0' * 12}-{me.boot}-{me.namespace}-{me.pid}-{me.start + 1}-0123456789abcdef",  # another node of a shared file system
        f"write-{me.host}-{me.boot}-{me.namespace + 1}-{me.pid}-{me.start + 1}-0123456789abcdef",  # another container
        f"write-{me.host}-none-{me.namespace}-{me.pid}-{me.start + 1}-0123456789abcdef",
    ]
    (tmp_path / ".tmp").mkdir()
    for name in [*kept, dead]:
        (tmp_path / ".tmp" / name).write_bytes(b"x")
    assert asyncio.run(PosixStorage(tmp_path).sweep_temporaries()) == [dead]
    assert sorted(path.name for path in (tmp_path / ".tmp").iterdir()) == sorted(kept)
    assert not owner_is_dead(mine)


@pytest.mark.parametrize("gone", ["a dangling link", "never made"])
def test_deleting_where_the_root_is_gone_ends(tmp_path: Path, gone: str) -> None:
    root = tmp_path / "above" / "root"
    root.parent.mkdir()
    if gone == "a dangling link":
        root.symlink_to(tmp_path / "nowhere")

    async def delete() -> None:
        storage = PosixStorage(root)
        try:
            await asyncio.wait_for(storage.delete(["folder/file", "file"]), 120)
        finally:
            await storage.close()

    asyncio.run(delete())


def test_the_system_is_asked_to_flush_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own fsync does nothing (conftest.py), so it is shown here that the code calls the system's."""
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")))
    storage = PosixStorage(tmp_path / "tier")
    asyncio.run(storage.write("run/file", PatternSource(b"x" * 10)))
    assert str(tmp_path / "tier" / "run") in flushed
    assert any(Path(path).is_relative_to(tmp_path / "tier" / ".tmp") for path in flushed), flushed
