"""The conformance suite of every storage: inherit `StorageConformance`, say how to make yours, run pytest.

::

    class TestMine(StorageConformance):
        def make_storage(self, place: Path) -> Storage:
            return MyStorage(place)

Each test states one rule of `tierstore.storage.contract`. The suite needs pytest and nothing else; it runs the coroutines with
`asyncio.run`, a new event loop for each use, as the contract allows.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tierstore.errors import ConflictError, FormatError, IntegrityError, NotFoundError, StorageError, UsageError
from tierstore.storage.contract import Storage
from tierstore.testing.sources import FailingSource, GatedSource, GrowingSource, PatternSource, pattern

__all__ = ["StorageConformance"]

T = TypeVar("T")
MIB = 1 << 20
_UNSAFE = ("..", "../x", "a/../b", "/etc/passwd", "", ".", "a//b", "a/", "./a", "a\x00b", "a\nb", "a\\b", "a" * 256)
_ODD = (
    "space in name",
    "ünïcödé-日本語-🙂",
    "e\u0301-and-\u00e9",
    "a+b=c,d@e%41",
    "#?&~!'()[]{}*;:$|<>^`\"",
    ".hidden",
    "-dash",
    "con.tar.gz",
)
_IN_A_NEW_PROCESS = (
    "import asyncio, pickle, sys\n"
    "async def main():\n"
    "    storage = pickle.load(sys.stdin.buffer)\n"
    "    try:\n"
    "        await storage.put('by/child', await storage.read('by/parent') + b' and child')\n"
    "    finally:\n"
    "        await storage.close()\n"
    "asyncio.run(main())\n"
)


class StorageConformance:
    """Every rule of the contract as a test."""

    many: int = 40
    """How many files the tests about listings and deletions make."""
    racers: int = 8
    """How many race for one name."""
    longest_name: int = 255
    """The longest component of a path, in bytes, that the storage can hold."""
    secrets: tuple[str, ...] = ()
    """Credentials in use: none may be seen in a URI, repr or error."""

    def make_storage(self, place: Path) -> Storage:
        """A new instance. The same `place` (a fresh folder for each test) means the same stored bytes; called from any thread."""
        raise NotImplementedError

    def leftovers(self, place: Path) -> list[str]:
        """What lies in the store without being a published file: temporaries, unfinished uploads. A backdoor beside the storage."""
        return []

    def use(self, place: Path, body: Callable[[Storage], Awaitable[T]]) -> T:
        """Runs `body` with a new instance on a new event loop."""

        async def main() -> T:
            storage = self.make_storage(place)
            try:
                return await body(storage)
            finally:
                await storage.close()

        return asyncio.run(main())

    # Capabilities and identity

    def test_says_what_it_is(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            assert storage.uri
            assert storage.capabilities.part_nbytes > 0
            assert storage.capabilities.part_nbytes % MIB == 0
            assert (storage.local_path("a/b") is not None) == storage.capabilities.local
            free = await storage.free_nbytes()
            assert free is None or free >= 0

        self.use(tmp_path, body)

    def test_credentials_are_never_seen(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            with pytest.raises(NotFoundError) as caught:
                await storage.read("missing")
            for text in (storage.uri, repr(storage), str(caught.value), repr(caught.value), str(caught.value.context)):
                for secret in self.secrets:
                    assert secret not in text

        self.use(tmp_path, body)

    # Reading

    def test_reads_ranges_exactly(self, tmp_path: Path) -> None:
        data = pattern(3 * MIB + 17)

        async def body(storage: Storage) -> None:
            await storage.put("a/file", data)
            assert await storage.read("a/file") == data
            assert await storage.read("a/file", 0, 1) == data[:1]
            assert await storage.read("a/file", MIB - 1, 2) == data[MIB - 1 : MIB + 1]
            assert await storage.read("a/file", 5) == data[5:]
            assert await storage.read("a/file", len(data) - 3, 3) == data[-3:]
            assert await storage.read("a/file", len(data)) == b""

        self.use(tmp_path, body)

    def test_reads_into_the_callers_memory_and_nowhere_else(self, tmp_path: Path) -> None:
        data = pattern(300_000)

        async def body(storage: Storage) -> None:
            await storage.put("file", data)
            memory = bytearray(b"#" * 1000)
            await storage.read_into("file", 123_457, memoryview(memory)[100:900])
            assert memory == b"#" * 100 + data[123_457 : 123_457 + 800] + b"#" * 100

        self.use(tmp_path, body)

    def test_reads_a_large_range_into_mapped_memory(self, tmp_path: Path) -> None:
        data = pattern(9 * MIB + 5)

        async def body(storage: Storage) -> None:
            await storage.put("file", data)
            memory = mmap.mmap(-1, 10 * MIB)
            for offset, nbytes in ((0, 8 * MIB), (4096, 8 * MIB), (0, len(data)), (3, 8 * MIB + 1), (MIB, 5 * MIB + 9)):
                memory[:] = b"\xee" * len(memory)
                with memoryview(memory) as whole, whole[:nbytes] as view:
                    await storage.read_into("file", offset, view)
                assert memory[:nbytes] == data[offset : offset + nbytes]
                assert memory[nbytes:] == b"\xee" * (len(memory) - nbytes)
            memory.close()

        self.use(tmp_path, body)

    def test_a_short_file_is_an_error_that_names_it(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            await storage.put("a/short", b"0123456789")
            for offset, nbytes in ((0, 11), (9, 2), (10, 1), (11, 1), (500, 5), (11, None)):
                with pytest.raises(IntegrityError, match="a/short"):
                    await storage.read("a/short", offset, nbytes)
            for offset, nbytes in ((0, 11), (9, 2), (10, 1), (500, 5), (0, 6 * MIB)):
                with pytest.raises(IntegrityError, match="a/short"):
                    await storage.read_into("a/short", offset, memoryview(bytearray(nbytes)))

        self.use(tmp_path, body)

    def test_a_zero_length_read_never_reaches_the_storage(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            await storage.put("file", b"0123456789")
            assert await storage.read("file", 3, 0) == b""
            assert await storage.read("missing", 3, 0) == b""
            await storage.read_into("missing", 3, memoryview(bytearray(0)))

        self.use(tmp_path, body)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            await storage.put("folder/file", b"x")
            for path in ("folder/other", "folder", "nowhere/at/all", "folder/file/below"):
                with pytest.raises(NotFoundError, match=path):
                    await storage.read(path)
                with pytest.raises(NotFoundError, match=path):
                    await storage.read(path, 0, 1)
                with pytest.raises(NotFoundError, match=path):
                    await storage.read_into(path, 0, memoryview(bytearray(1)))
                with pytest.raises(NotFoundError, match=path):
                    await storage.stat(path)

        self.use(tmp_path, body)

    # Writing

    def test_a_write_is_there_when_it_returns(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            source = PatternSource(pattern(100_001))
            info = await storage.write("a/b/file", source)
            assert (info.path, info.nbytes) == ("a/b/file", 100_001)
            assert source.covered()
            assert await storage.read("a/b/file") == pattern(100_001)
            again = await storage.stat("a/b/file")
            assert (again.path, again.nbytes) == ("a/b/file", 100_001)
            info = await storage.put("a/c", b"small")
            assert (info.path, info.nbytes) == ("a/c", 5)

        self.use(tmp_path, body)
        assert self.leftovers(tmp_path) == []

    def test_an_empty_file_is_a_file(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            assert (await storage.write("by-write", PatternSource(b""))).nbytes == 0
            assert (await storage.put("by-put", b"")).nbytes == 0
            for path in ("by-write", "by-put"):
                assert (await storage.stat(path)).nbytes == 0
                assert await storage.read(path) == b""
                with pytest.raises(IntegrityError, match=path):
                    await storage.read(path, 0, 1)
            assert sorted(info.path for info in await storage.list()) == ["by-put", "by-write"]

        self.use(tmp_path, body)

    @pytest.mark.parametrize("aligned", [True, False])
    def test_a_large_write_pulls_parts_in_bounded_number(self, tmp_path: Path, aligned: bool) -> None:
        data = pattern(20 * MIB + 4097)

        async def body(storage: Storage) -> None:
            source = PatternSource(data, aligned=aligned)
            await storage.write("big", source)
            assert source.covered()
            assert max(nbytes for _, nbytes in source.pulls) <= storage.capabilities.part_nbytes
            assert source.most_in_flight <= 64
            assert (await storage.stat("big")).nbytes == len(data)
            same = await storage.read("big") == data
            assert same

        self.use(tmp_path, body)

    def test_a_write_replaces_whole_files(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            for nbytes in (5000, 10, 9 * MIB, 0, 77):
                await storage.write("file", PatternSource(pattern(nbytes, nbytes)))
                assert (await storage.stat("file")).nbytes == nbytes
                same = await storage.read("file") == pattern(nbytes, nbytes)
                assert same

        self.use(tmp_path, body)
        assert self.leftovers(tmp_path) == []

    def test_a_reader_sees_the_old_or_the_new_whole(self, tmp_path: Path) -> None:
        sizes = {value: 60_000 + 1000 * value for value in range(12)}

        async def body(storage: Storage) -> None:
            await storage.put("file", bytes([0]) * sizes[0])

            async def replace() -> None:
                for value in range(1, 12):
                    await storage.write("file", PatternSource(bytes([value]) * sizes[value]))

            writing = asyncio.ensure_future(replace())
            seen = []
            while not writing.done():
                seen.append(await storage.read("file"))
            await writing
            seen.append(await storage.read("file"))
            for data in seen:
                assert len(data) == sizes[data[0]]
                assert len(set(data)) == 1
            assert seen[-1][0] == 11

        self.use(tmp_path, body)

    def test_concurrent_writers_of_one_name_leave_one_of_them_whole(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            versions = [pattern(100_000 + i, i) for i in range(6)]
            await asyncio.gather(*(storage.write("file", PatternSource(version)) for version in versions))
            found = await storage.read("file") in versions
            assert found

        self.use(tmp_path, body)
        assert self.leftovers(tmp_path) == []

    # Failing and cancelled writes

    @pytest.mark.parametrize("short", [False, True], ids=["raises", "too-short"])
    @pytest.mark.parametrize("at", [0, 9 * MIB, 20 * MIB - 1])
    def test_a_failing_source_publishes_nothing(self, tmp_path: Path, at: int, short: bool) -> None:
        data = pattern(20 * MIB)

        async def body(storage: Storage) -> None:
            await storage.put("kept", b"the old content")
            for path in ("kept", "new/file"):
                with pytest.raises(IntegrityError):
                    await storage.write(path, FailingSource(data, at=at, short=short))
            assert await storage.read("kept") == b"the old content"
            assert [info.path for info in await storage.list()] == ["kept"]
            assert (await storage.write("kept", PatternSource(b"the new content"))).nbytes == 15
            assert await storage.read("kept") == b"the new content"

        self.use(tmp_path, body)
        assert self.leftovers(tmp_path) == []

    @pytest.mark.parametrize("nbytes", [100, 20 * MIB])
    def test_a_cancelled_write_publishes_nothing(self, tmp_path: Path, nbytes: int) -> None:
        data = pattern(nbytes)

        async def body(storage: Storage) -> None:
            await storage.put("kept", b"the old content")
            for path in ("kept", "new/file"):
                source = GatedSource(data, at=nbytes // 2)
                writing = asyncio.ensure_future(storage.write(path, source))
                reached = asyncio.ensure_future(source.reached.wait())
                await asyncio.wait({writing, reached}, return_when=asyncio.FIRST_COMPLETED)
                assert reached.done()
                writing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await writing
            assert await storage.read("kept") == b"the old content"
            assert [info.path for info in await storage.list()] == ["kept"]

        self.use(tmp_path, body)
        assert self.leftovers(tmp_path) == []

    # Sources that grow

    @pytest.mark.parametrize("nbytes", [0, 8 * MIB, 20 * MIB + 4097])
    def test_a_source_whose_length_shows_at_its_end_is_written_exactly(self, tmp_path: Path, nbytes: int) -> None:
        data = pattern(nbytes)

        async def body(storage: Storage) -> None:
            await storage.put("kept", b"the old content")
            for path in ("kept", "new/file"):
                source = GrowingSource(PatternSource(data), bound=30 * MIB)
                info = await storage.write(path, source)
                assert (info.path, info.nbytes) == (path, nbytes)
                assert (await storage.stat(path)).nbytes == nbytes
                assert source.inner.covered()
                assert source.inner.most_in_flight <= 1
                assert max((length for _, length in source.inner.pulls), default=0) <= storage.capabilities.part_nbytes
            same = await storage.read("kept") == await storage.read("new/file") == data
            assert same

        self.use(tmp_path, body)
        assert self.leftovers(tmp_path) == []

    @pytest.mark.parametrize(("at", "short"), [(0, False), (20 * MIB - 1, False), (20 * MIB - 1, True)])
    def test_a_failing_source_that_grows_publishes_nothing(self, tmp_path: Path, at: int, short: bool) -> None:
        data = pattern(20 * MIB)

        async def body(storage: Storage) -> None:
            await storage.put("kept", b"the old content")
            for path in ("kept", "new/file"):
                with pytest.raises(IntegrityError):
                    await storage.write(path, GrowingSource(FailingSource(data, at=at, short=short)))
            assert await storage.read("kept") == b"the old content"
            assert [info.path for info in await storage.list()] == ["kept"]

        self.use(tmp_path, body)
        assert self.leftovers(tmp_path) == []

    # Create-if-absent

    def creates(self, storage: Storage) -> bool:
        """True if the storage claims create-if-absent."""
        return storage.capabilities.create

    def test_create_makes_exactly_these_bytes_once(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            if not self.creates(storage):
                with pytest.raises(StorageError):
                    await storage.create("log/000000.json", b"mine")
                assert await storage.list() == []
                return
            await storage.create("log/000000.json", b"mine")
            assert await storage.read("log/000000.json") == b"mine"
            await storage.create("log/000000.json", b"mine")  # a repeat after a lost acknowledgement
            with pytest.raises(ConflictError, match=r"log/000000\.json") as caught:
                await storage.create("log/000000.json", b"theirs")
            assert caught.value.context["existing"] == b"mine"
            assert await storage.read("log/000000.json") == b"mine"
            await storage.delete(["log/000000.json"])
            await storage.create("log/000000.json", b"theirs")
            assert await storage.read("log/000000.json") == b"theirs"

        self.use(tmp_path, body)
        assert self.leftovers(tmp_path) == []

    def test_create_of_nothing_is_refused(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            with pytest.raises(UsageError if self.creates(storage) else (UsageError, StorageError)):
                await storage.create("record", b"")
            assert await storage.list() == []

        self.use(tmp_path, body)

    def test_of_racing_tasks_one_wins(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            if not self.creates(storage):
                pytest.skip(f"{storage.uri} does not claim create-if-absent")
            for number in range(3):
                path = f"log/{number:06d}.json"
                mine = [f"racer {racer}".encode() for racer in range(self.racers)]
                ends = await asyncio.gather(*(storage.create(path, data) for data in mine), return_exceptions=True)
                _one_winner(mine, ends, await storage.read(path))

        self.use(tmp_path, body)
        assert self.leftovers(tmp_path) == []

    def test_of_racing_threads_one_wins(self, tmp_path: Path) -> None:
        if not self.use(tmp_path, self._creates_async):
            pytest.skip("the storage does not claim create-if-absent")
        mine = [f"racer {racer}".encode() * 100 for racer in range(self.racers)]
        ends: list[BaseException | None] = [TimeoutError("the racer did not end")] * self.racers
        start = threading.Barrier(self.racers)

        def race(racer: int) -> None:
            async def body(storage: Storage) -> None:
                await storage.children("log")  # the client is made and connected before the start
                await asyncio.to_thread(start.wait, 120)
                await storage.create("log/record", mine[racer])

            try:
                self.use(tmp_path, body)
                ends[racer] = None
            except (ConflictError, StorageError) as error:
                ends[racer] = error

        threads = [threading.Thread(target=race, args=(racer,)) for racer in range(self.racers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
        _one_winner(mine, ends, self.use(tmp_path, lambda storage: storage.read("log/record")))

    async def _creates_async(self, storage: Storage) -> bool:
        return self.creates(storage)

    # Listing

    def test_lists_every_file_below_a_folder(self, tmp_path: Path) -> None:
        wanted = {"a/1": 1, "a/b/2": 2, "a/b/c/3": 3, "ab/4": 4, "a.x": 5, "top": 6}

        async def body(storage: Storage) -> None:
            assert await storage.list() == []
            assert await storage.list("nowhere") == []
            for path, nbytes in wanted.items():
                await storage.put(path, b"x" * nbytes)
            for folder in ("", "a", "a/b", "ab", "nowhere", "top", "a/1"):
                below = {path: n for path, n in wanted.items() if not folder or path.startswith(folder + "/")}
                assert {info.path: info.nbytes for info in await storage.list(folder)} == below, folder

        self.use(tmp_path, body)

    def test_shows_one_level(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            empty = await storage.children()
            assert (empty.files, empty.folders) == ((), ())
            for path in ("a/1", "a/2", "a/b/3", "a/c/d/4", "ab/5", "top"):
                await storage.put(path, b"x")
            for folder, files, folders in (
                ("", {"top"}, {"a", "ab"}),
                ("a", {"a/1", "a/2"}, {"b", "c"}),
                ("a/c", set(), {"d"}),
                ("nowhere", set(), set()),
                ("top", set(), set()),
            ):
                level = await storage.children(folder)
                assert {info.path for info in level.files} == files, folder
                assert sorted(level.folders) == sorted(folders), folder

        self.use(tmp_path, body)

    def test_temporaries_are_not_listed(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            await storage.put(".tmp/leftover", b"x")
            await storage.put("file", b"x")
            assert [info.path for info in await storage.list()] == ["file"]
            level = await storage.children()
            assert ([info.path for info in level.files], level.folders) == (["file"], ())

        self.use(tmp_path, body)

    def test_another_instance_sees_every_change_at_once(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            other = self.make_storage(tmp_path)
            try:
                for number in range(3):
                    path = f"folder/{number}"
                    assert len(await other.list("folder")) == number
                    with pytest.raises(NotFoundError):
                        await other.stat(path)
                    await storage.put(path, b"12345")
                    assert len(await other.list("folder")) == len((await other.children("folder")).files) == number + 1
                    assert (await other.stat(path)).nbytes == 5
                    await storage.put(path, b"123")
                    assert (await other.stat(path)).nbytes == 3
                    assert await other.read(path) == b"123"
                await storage.delete(["folder/0", "folder/1", "folder/2"])
                assert await other.list() == []
                with pytest.raises(NotFoundError):
                    await other.read("folder/0")
            finally:
                await other.close()

        self.use(tmp_path, body)

    # Deleting

    def test_deletes_what_is_named_and_nothing_else(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            names = [f"run/step/{number:03d}" for number in range(self.many)]
            await asyncio.gather(*(storage.put(name, b"x") for name in [*names, "run/keep", "runner/keep"]))
            await storage.delete([])
            await storage.delete([*names, "run/step/missing", "nowhere/missing"])
            assert sorted(info.path for info in await storage.list()) == ["run/keep", "runner/keep"]
            level = await storage.children("run")
            assert ([info.path for info in level.files], level.folders) == (["run/keep"], ())
            await storage.delete(names)
            await storage.put("run/step/000", b"again")
            assert await storage.read("run/step/000") == b"again"

        self.use(tmp_path, body)

    # Names

    def test_keeps_odd_names_apart(self, tmp_path: Path) -> None:
        deep = "/".join(f"level-{number}" for number in range(12)) + "/leaf"
        names = [*(f"odd/{name}" for name in _ODD), "odd/" + "n" * self.longest_name, "odd/" + "é" * (self.longest_name // 2), deep]

        async def body(storage: Storage) -> None:
            for number, name in enumerate(names):
                await storage.put(name, b"%d" % number)
            assert sorted(info.path for info in await storage.list()) == sorted(names)
            for number, name in enumerate(names):
                assert await storage.read(name) == b"%d" % number
                assert (await storage.stat(name)).nbytes == len(b"%d" % number)
            await storage.delete(names)
            assert await storage.list() == []

        self.use(tmp_path, body)

    def test_no_name_leaves_the_root(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            for path in _UNSAFE:
                with pytest.raises(FormatError):
                    await storage.read(path)
                with pytest.raises(FormatError):
                    await storage.read_into(path, 0, memoryview(bytearray(1)))
                with pytest.raises(FormatError):
                    await storage.put(path, b"x")
                with pytest.raises(FormatError):
                    await storage.write(path, PatternSource(b"x"))
                with pytest.raises(FormatError):
                    await storage.create(path, b"x")
                with pytest.raises(FormatError):
                    await storage.stat(path)
                with pytest.raises(FormatError):
                    await storage.delete([path])
                if path:
                    with pytest.raises(FormatError):
                        await storage.list(path)
                    with pytest.raises(FormatError):
                        await storage.children(path)
                with pytest.raises(FormatError):
                    storage.local_path(path)
            assert await storage.list() == []

        self.use(tmp_path, body)

    # Loops, processes, life

    def test_one_instance_serves_several_event_loops(self, tmp_path: Path) -> None:
        storage = self.make_storage(tmp_path)
        asyncio.run(_put(storage, "first", b"1"))
        asyncio.run(_put(storage, "second", b"2"))
        assert asyncio.run(_read_and_close(storage, "first")) == b"1"

    def test_a_pickled_instance_works_in_a_new_process(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            await storage.put("by/parent", b"parent")
            copy: Storage = pickle.loads(pickle.dumps(storage))  # noqa: S301 - our own bytes
            assert copy.uri == storage.uri
            assert copy.capabilities == storage.capabilities
            assert await copy.read("by/parent") == b"parent"
            await copy.close()
            ended = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-W", "error", "-c", _IN_A_NEW_PROCESS],
                input=pickle.dumps(storage),
                capture_output=True,
                timeout=240,
                check=False,
            )
            assert ended.returncode == 0, ended.stderr.decode()
            assert await storage.read("by/child") == b"parent and child"

        self.use(tmp_path, body)

    def test_an_instance_in_use_works_after_a_fork(self, tmp_path: Path) -> None:
        storage = self.make_storage(tmp_path)
        asyncio.run(_put(storage, "by/parent", b"parent"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork with threads: that is what is tested
            pid = os.fork()
        if pid == 0:
            status = 1
            try:
                asyncio.run(_put(storage, "by/child", b"child"))
                status = 0
            finally:
                os._exit(status)
        assert _exit_status(pid, deadline_s=240) == 0
        asyncio.run(_put(storage, "by/parent-again", b"parent"))
        assert asyncio.run(_read_and_close(storage, "by/child")) == b"child"

    def test_close_twice_is_fine(self, tmp_path: Path) -> None:
        async def body(storage: Storage) -> None:
            await storage.put("file", b"x")
            await storage.close()
            await storage.close()

        self.use(tmp_path, body)


async def _put(storage: Storage, path: str, data: bytes) -> None:
    await storage.put(path, data)


async def _read_and_close(storage: Storage, path: str) -> bytes:
    try:
        return await storage.read(path)
    finally:
        await storage.close()


def _one_winner(mine: list[bytes], ends: list[BaseException | None], stored: bytes) -> None:
    """Asserts that one racer won, that its bytes are stored, and that every loser was told them."""
    winners = [data for data, end in zip(mine, ends, strict=True) if end is None]
    assert winners == [stored], [repr(end) for end in ends]
    for end in ends:
        if end is not None:
            assert isinstance(end, ConflictError), repr(end)
            assert end.context["existing"] == stored


def _exit_status(pid: int, *, deadline_s: float) -> int:
    """The child's exit status; kills it and returns -SIGKILL if it does not end in time."""
    deadline = time.monotonic() + deadline_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL
        time.sleep(0.01)
