"""Every trap of PROTOCOLS.md §8 has a test here, named after it: our code does not fall in, whatever fsspec and s3fs do.

"A fork while fsspec's lock is held", "an unpickled file system" and "ranges past the end" are also in the conformance suite, for
every storage.
"""

from __future__ import annotations

import ast
import asyncio
import multiprocessing
import os
import pickle
import threading
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import pytest

from tierstore.errors import ConfigError, IntegrityError, UsageError
from tierstore.names import plain_uri
from tierstore.storage.contract import Storage
from tierstore.storage.fsspec_storage import FsspecStorage
from tierstore.storage.opening import open_storage
from tierstore.storage.posix import PosixStorage
from tierstore.storage.s3 import S3Storage
from tierstore.storage.s3_options import parse_s3_options
from tierstore.testing.proxy import CuttingProxy
from tierstore.testing.servers import MotoServer
from tierstore.testing.sources import FailingSource, GatedSource, PatternSource, pattern

T = TypeVar("T")
MIB = 1 << 20


@pytest.fixture(params=["posix", "memory", "s3", "generic-s3"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    """Makes instances over the same stored bytes, for each kind of storage."""
    if request.param == "posix":
        return lambda: PosixStorage(tmp_path)
    if request.param == "memory":
        return lambda: FsspecStorage(f"memory://{tmp_path.name}")
    server: MotoServer = request.getfixturevalue("moto_server")
    uri = f"s3://{server.make_bucket('traps')}/{tmp_path.name}"
    if request.param == "s3":
        return lambda: S3Storage(uri, server.options())
    options = {name: value for name, value in server.options().items() if name != "region_name"}
    return lambda: FsspecStorage(uri, {**options, "client_kwargs": {"region_name": "us-east-1"}})


def use(make: Callable[[], Storage], body: Callable[[Storage], Awaitable[T]]) -> T:
    async def main() -> T:
        storage = make()
        try:
            return await body(storage)
        finally:
            await storage.close()

    return asyncio.run(main())


def test_an_exception_while_writing_publishes_no_truncated_bytes(make: Callable[[], Storage]) -> None:
    async def body(storage: Storage) -> None:
        await storage.put("kept", b"old")
        for path in ("kept", "new"):
            with pytest.raises(IntegrityError):
                await storage.write(path, FailingSource(pattern(20 * MIB), at=17 * MIB))
        assert [info.path for info in await storage.list()] == ["kept"]
        assert await storage.read("kept") == b"old"

    use(make, body)


def test_a_cancelled_call_raises_and_never_returns_none(make: Callable[[], Storage]) -> None:
    """`fsspec.asyn.sync` returns None when its coroutine was cancelled; nothing of ours goes through it."""

    async def body(storage: Storage) -> None:
        source = GatedSource(pattern(1000), at=500)
        writing = asyncio.ensure_future(storage.write("file", source))
        await source.reached.wait()
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing

    use(make, body)


def test_no_storage_module_bridges_with_fsspecs_sync() -> None:
    import tierstore.storage

    for folder in tierstore.storage.__path__:
        for module in Path(folder).glob("*.py"):
            tree = ast.parse(module.read_text(encoding="utf-8"))
            named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            sources = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            assert not {"asyn", "transaction"} & named, f"{module} uses fsspec's own bridge or transactions"
            assert "fsspec.asyn" not in sources, f"{module} uses fsspec's own bridge"


def test_a_fork_while_fsspecs_lock_is_held_does_not_hang_the_child(moto_server: MotoServer) -> None:
    storage = S3Storage(f"s3://{moto_server.make_bucket('forked')}/x", moto_server.options())
    asyncio.run(storage.put("by/parent", b"parent"))
    lock: Any = fsspec.asyn.get_lock()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(250)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork with threads: that is what is tested
            child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(storage,))
            child.start()
        child.join(200)
        if child.is_alive():
            child.kill()
        assert child.exitcode == 0
    finally:
        done.set()
        holder.join(60)

    async def end() -> None:
        assert await storage.read("by/parent") == b"parent"
        await storage.close()

    asyncio.run(end())


def _read_in_child(storage: S3Storage) -> None:
    ended = asyncio.run(storage.read("by/parent")) == b"parent"
    os._exit(0 if ended else 1)


def test_a_create_of_zero_bytes_never_reaches_the_storage(make: Callable[[], Storage]) -> None:
    async def body(storage: Storage) -> None:
        await storage.put("record", b"kept")
        with pytest.raises(UsageError):
            await storage.create("record", b"")
        assert await storage.read("record") == b"kept"

    use(make, body)


def test_a_cancelled_upload_leaves_no_orphan_multipart(moto_server: MotoServer, tmp_path: Path) -> None:
    uri = f"s3://{moto_server.make_bucket('traps')}/{tmp_path.name}"

    async def body(storage: Storage) -> None:
        source = GatedSource(pattern(30 * MIB), at=29 * MIB)
        writing = asyncio.ensure_future(storage.write("big", source))
        await source.reached.wait()
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert isinstance(storage, S3Storage)
        assert await storage.abort_stale_uploads(-10) == []

    use(lambda: S3Storage(uri, moto_server.options()), body)


def test_an_empty_range_and_a_range_past_the_end(make: Callable[[], Storage]) -> None:
    async def body(storage: Storage) -> None:
        await storage.put("file", b"0123456789")
        assert await storage.read("file", 3, 0) == b""
        for offset, nbytes in ((5, 6), (10, 1), (99, 1)):
            with pytest.raises(IntegrityError):
                await storage.read("file", offset, nbytes)

    use(make, body)


def test_an_empty_range_sends_no_request(moto_server: MotoServer, tmp_path: Path) -> None:
    uri = f"s3://{moto_server.make_bucket('traps')}/{tmp_path.name}"

    async def body(storage: Storage) -> None:
        assert await storage.read("missing", 3, 0) == b""
        await storage.read_into("missing", 3, memoryview(bytearray()))

    with CuttingProxy(moto_server.endpoint_url) as proxy:
        use(lambda: S3Storage(uri, {**moto_server.options(), "endpoint_url": proxy.endpoint_url}), body)
        assert proxy.requests == []


def test_a_range_is_a_range_and_never_a_version(make: Callable[[], Storage]) -> None:
    """`s3fs.cat_file` takes `version_id` as second positional argument: ``cat_file(p, 0, 8)`` gave everything from byte 8."""

    async def body(storage: Storage) -> None:
        await storage.put("file", bytes(range(100)))
        assert await storage.read("file", 0, 8) == bytes(range(8))
        assert await storage.read("file", 8, 1) == b"\x08"

    use(make, body)


def test_errors_of_concurrent_reads_are_raised_and_not_returned(make: Callable[[], Storage]) -> None:
    """`cat_ranges` puts exceptions into its result list; ours reads one range at a time, and raises."""

    async def body(storage: Storage) -> None:
        await storage.put("file", b"0123456789")
        ends = await asyncio.gather(storage.read("file", 0, 5), storage.read("file", 5, 50), return_exceptions=True)
        assert ends[0] == b"01234"
        assert isinstance(ends[1], IntegrityError)

    use(make, body)


def test_a_second_client_is_never_stale(make: Callable[[], Storage]) -> None:
    async def body(storage: Storage) -> None:
        other = make()
        try:
            assert await other.list() == []
            assert (await other.children()).files == ()
            await storage.put("file", b"12345")
            assert [info.path for info in await other.list()] == ["file"]
            assert [info.path for info in (await other.children()).files] == ["file"]
            await storage.put("file", b"1")
            assert (await other.stat("file")).nbytes == 1
            await storage.delete(["file"])
            assert await other.list() == []
        finally:
            await other.close()

    use(make, body)


@pytest.mark.parametrize("uri", ["simplecache::s3://b/x", "filecache://b/x", "simplecache://x", "blockcache::memory://x", "cached://x"])
def test_a_cache_that_serves_truncated_files_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"chained|truncated"):
        open_storage(uri)


def test_writing_twice_does_not_nest(make: Callable[[], Storage]) -> None:
    """`put(dir, dst, recursive=True)` twice nests the tree; ours are always explicit file names."""

    async def body(storage: Storage) -> None:
        for _ in range(2):
            for name in ("tree/a", "tree/below/b"):
                await storage.put(name, b"x")
        assert sorted(info.path for info in await storage.list()) == ["tree/a", "tree/below/b"]

    use(make, body)


def test_a_write_makes_a_new_inode_and_never_writes_in_place(tmp_path: Path) -> None:
    async def body(storage: Storage) -> None:
        await storage.put("file", b"old content")
        before = (tmp_path / "file").stat().st_ino
        (tmp_path / "reader").hardlink_to(tmp_path / "file")
        await storage.write("file", PatternSource(b"new"))
        assert (tmp_path / "file").stat().st_ino != before
        assert (tmp_path / "reader").read_bytes() == b"old content"

    use(lambda: PosixStorage(tmp_path), body)


def test_an_unpickled_storage_has_instances_of_its_own(make: Callable[[], Storage]) -> None:
    async def body(storage: Storage) -> None:
        await storage.put("file", b"x")
        data = pickle.dumps(storage)
        for word in (b"S3FileSystem", b"MemoryFileSystem", b"AioSession"):
            assert word not in data
        copy: Storage = pickle.loads(data)  # noqa: S301 - our own bytes
        assert await copy.read("file") == b"x"
        if isinstance(storage, S3Storage) and isinstance(copy, S3Storage):
            assert copy._requests.client().fs is not storage._requests.client().fs
        if isinstance(storage, FsspecStorage) and isinstance(copy, FsspecStorage):
            assert copy._system() is not storage._system()
        await copy.close()

    use(make, body)


def test_an_instance_is_not_shared_across_loops(moto_server: MotoServer, tmp_path: Path) -> None:
    storage = S3Storage(f"s3://{moto_server.make_bucket('traps')}/{tmp_path.name}", moto_server.options())
    seen: list[Any] = []

    async def body() -> None:
        await storage.put("file", b"x")
        seen.append(storage._requests.client().fs)
        await storage.close()

    asyncio.run(body())
    asyncio.run(body())
    assert seen[0] is not seen[1]


def test_default_crc_trailers_are_not_sent(moto_server: MotoServer) -> None:
    arguments = parse_s3_options({}, connections=1, connect_timeout_s=1, read_timeout_s=1).s3fs["config_kwargs"]
    assert arguments["request_checksum_calculation"] == "when_required"
    assert arguments["response_checksum_validation"] == "when_required"
    wanted = {"config_kwargs": {"request_checksum_calculation": "when_supported"}}
    arguments = parse_s3_options(wanted, connections=1, connect_timeout_s=1, read_timeout_s=1).s3fs["config_kwargs"]
    assert arguments["request_checksum_calculation"] == "when_supported"


def test_a_path_that_swallowed_a_scheme_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for damaged in (Path("s3://b/x"), Path("memory://x"), "s3:/b/x"):
        with pytest.raises(UsageError):
            plain_uri(damaged)
        with pytest.raises(UsageError):
            open_storage(damaged)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
