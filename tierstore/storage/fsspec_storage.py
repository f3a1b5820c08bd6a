"""Any other fsspec file system, used so that its traps (PROTOCOLS.md §8) can't bite.

Files are written to a temporary name below ``.tmp/`` and then moved: a rename where the file system has one, a copy on the server's side
where it is an object store. Nothing is ever written to a final name, no transaction of fsspec is used, and no `with fs.open(...)`, which
publishes truncated bytes when its body fails. Asynchronous file systems run on the caller's own event loop, synchronous ones in threads;
instances are made per loop and process, never shared, cached or pickled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

from tierstore.errors import ConfigError, ConflictError, IntegrityError, NotFoundError, OutcomeUnknownError, StorageError, UsageError
from tierstore.names import TMP, check_relative
from tierstore.storage._sessions import abandon_connections
from tierstore.storage._threads import DaemonPool
from tierstore.storage.contract import Capabilities, FileInfo, Growing, Listing, Source
from tierstore.storage.fsspec_errors import may_pass, translate_fsspec
from tierstore.storage.tasks import to_the_end

__all__ = ["FsspecStorage"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MIB = 1024 * 1024
_EXCLUSIVE = frozenset({"gcs", "gs", "s3", "s3a"})
"""Protocols whose ``pipe_file(mode="create")`` is one conditional request to the server. All others look first and write then
(memory), or leave an empty file when killed between making and filling it (sftp): they can't be an authority."""
_CACHES = frozenset({"blockcache", "cached", "filecache", "simplecache"})
_WRITES = frozenset({"cp_file", "mv_file", "pipe_file", "put_file"})


class FsspecStorage:
    """One folder of an fsspec file system.

    Args:
        uri: ``PROTOCOL://…``, without credentials.
        options: The file system's own arguments.
        threads: Threads for a synchronous file system.
        nice: By how much those are nicer than the process, 0 to 19.
        part_nbytes: The unit in which sources are pulled and ranges are read, in bytes.
        request_timeout_s: Seconds within which a small request must be answered.
        stall_timeout_s: Seconds within which a part must be moved.
        attempts: Tries of a request whose failure may pass.

    Raises:
        ConfigError: The protocol is unknown or its package missing, or the URI is of no use.
    """

    def __init__(
        self,
        uri: str,
        options: Mapping[str, Any] | None = None,
        *,
        threads: int = 2,
        nice: int = 0,
        part_nbytes: int = 8 * _MIB,
        request_timeout_s: float = 30,
        stall_timeout_s: float = 30,
        attempts: int = 3,
    ) -> None:
        if part_nbytes < _MIB or part_nbytes % _MIB:
            raise ConfigError(f"a part of {part_nbytes} bytes is not possible", hint="parts are whole MiB")
        self._protocol = _check_uri(uri)
        self._class = _file_system_class(self._protocol)
        self._uri = uri.rstrip("/") if not uri.endswith("://") else uri
        self._options = dict(options or {})
        self._settings = {
            "threads": threads,
            "nice": nice,
            "part_nbytes": part_nbytes,
            "request_timeout_s": request_timeout_s,
            "stall_timeout_s": stall_timeout_s,
            "attempts": attempts,
        }
        self._threads = threads
        self._nice = nice
        self._part_nbytes = part_nbytes
        self._request_timeout_s = request_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._attempts = attempts
        self._root = str(self._class._strip_protocol(uri)).rstrip("/")
        self._native = bool(self._class.async_impl)
        self._pid = os.getpid()
        self._systems: dict[int, tuple[asyncio.AbstractEventLoop | None, Any]] = {}
        self._pool: DaemonPool | None = None
        self._inherited: list[Any] = []

    def __repr__(self) -> str:
        return f"FsspecStorage({self._uri!r})"

    def __reduce__(self) -> Any:
        return _rebuild, (self._uri, self._options, self._settings)

    @property
    def uri(self) -> str:
        return self._uri

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create=self._protocol in _EXCLUSIVE, checksums=False, part_nbytes=self._part_nbytes, local=False)

    def local_path(self, path: str) -> Path | None:
        check_relative(path)
        return None

    async def free_nbytes(self) -> int | None:
        return None

    async def close(self) -> None:
        if self._pid != os.getpid():
            return
        running = asyncio.get_running_loop()
        for key, (loop, fs) in list(self._systems.items()):
            if loop is None or loop is running or loop.is_closed():
                del self._systems[key]
                if loop is running:
                    await _close_sessions(fs)
                elif loop is not None:
                    abandon_connections(fs)
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    # Reading

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        full = self._full(path)
        if nbytes == 0:
            return b""
        if nbytes is None:
            whole = (await self.stat(path)).nbytes
            if whole == offset:
                return b""
            if whole < offset:
                raise self._too_short(path, whole, offset, None)
            if offset == 0:  # one request: a file that is replaced meanwhile is read whole, old or new
                return bytes(await self._call("reading", path, "cat_file", full, timeout_s=self._long(whole)))
            nbytes = whole - offset
        buffer = bytearray(nbytes)
        await self._fill(path, full, offset, memoryview(buffer))
        return bytes(buffer)

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        full = self._full(path)
        if buffer.nbytes:
            await self._fill(path, full, offset, buffer.cast("B"))

    async def _fill(self, path: str, full: str, offset: int, buffer: memoryview) -> None:
        for start in range(0, buffer.nbytes, self._part_nbytes):
            piece = buffer[start : start + self._part_nbytes]
            begin, end = offset + start, offset + start + piece.nbytes
            # Keywords only: s3fs's second positional argument is a version. A range past the end is silently short.
            try:
                data = await self._call("reading", path, "cat_file", full, start=begin, end=end, timeout_s=self._stall_timeout_s)
            except StorageError as error:  # some refuse a range that begins at the end or past it
                whole = (await self.stat(path)).nbytes
                if error.retryable or whole >= end:
                    raise
                raise self._too_short(path, whole, offset, buffer.nbytes) from error
            if len(data) != piece.nbytes:
                raise self._too_short(path, (await self.stat(path)).nbytes, offset, buffer.nbytes)
            piece[:] = data

    def _too_short(self, path: str, whole: int, offset: int, nbytes: int | None) -> IntegrityError:
        wanted = "bytes" if nbytes is None else f"{nbytes} bytes"
        return IntegrityError(
            f"{self._uri}/{path} has {whole} bytes, but {wanted} from {offset} were wanted",
            hint="the file was cut short, or its manifest is of another file: run `tierstore verify`",
            file=path,
        )

    async def stat(self, path: str) -> FileInfo:
        info = await self._call("looking at", path, "info", self._full(path))
        if info.get("type") != "file":
            raise NotFoundError(f"{self._uri}/{path} is a folder, not a file", hint="name a file in it", file=path)
        return self._info(path, info)

    def _info(self, path: str, info: Mapping[str, Any]) -> FileInfo:
        size = info.get("size")
        if size is None:
            raise StorageError(f"{self._uri}/{path}: the file system does not say its size", hint="it can't hold a tier", file=path)
        return FileInfo(path=path, nbytes=int(size), etag=str(info.get("ETag") or info.get("etag") or "").strip('"'))

    # Writing

    async def put(self, path: str, data: bytes) -> FileInfo:
        full, temporary = self._full(path), self._temporary()
        return await self._publish(path, full, temporary, self._store(path, temporary, data), len(data))

    async def write(self, path: str, source: Source) -> FileInfo:
        full, temporary = self._full(path), self._temporary()
        if isinstance(source, Growing):
            first = await self._pull_growing(path, source, 0)
            if source.length == first.nbytes:
                return await self._publish(path, full, temporary, self._store(path, temporary, bytes(first)), first.nbytes)
            return await self._publish(path, full, temporary, self._spool_growing(path, temporary, source, first), None, source)
        if source.nbytes <= self._part_nbytes:
            data = bytes(await self._pull(path, source, 0)) if source.nbytes else b""
            return await self._publish(path, full, temporary, self._store(path, temporary, data), source.nbytes)
        return await self._publish(path, full, temporary, self._spool(path, temporary, source), source.nbytes)

    async def _store(self, path: str, temporary: str, data: bytes) -> None:
        await self._write_call("writing", path, temporary, "pipe_file", temporary, data)

    async def _spool(self, path: str, temporary: str, source: Source) -> None:
        """Takes the parts into a local file first: the file system then streams it in its own way, with bounded memory."""
        with tempfile.NamedTemporaryFile(prefix="tierstore-") as file:
            for offset in range(0, source.nbytes, self._part_nbytes):
                view = await self._pull(path, source, offset)
                await asyncio.to_thread(file.write, view)
            await asyncio.to_thread(file.flush)
            await self._write_call("writing", path, temporary, "put_file", file.name, temporary, timeout_s=self._long(source.nbytes))

    async def _spool_growing(self, path: str, temporary: str, source: Growing, first: memoryview) -> None:
        with tempfile.NamedTemporaryFile(prefix="tierstore-") as file:
            offset, view = 0, first
            del first
            while True:
                await asyncio.to_thread(file.write, view)
                offset += view.nbytes
                if source.length == offset:
                    break
                view = await self._pull_growing(path, source, offset)
            await asyncio.to_thread(file.flush)
            await self._write_call("writing", path, temporary, "put_file", file.name, temporary, timeout_s=self._long(offset))

    async def _pull_growing(self, path: str, source: Growing, offset: int) -> memoryview:
        view = await source.read(offset, self._part_nbytes)
        if view.nbytes < self._part_nbytes and source.length != offset + view.nbytes:
            raise IntegrityError(
                f"writing {self._uri}/{path}: its source gave {view.nbytes} bytes at {offset}, and more were to come",
                hint="it was cut short",
            )
        return view

    async def _pull(self, path: str, source: Source, offset: int) -> memoryview:
        nbytes = min(self._part_nbytes, source.nbytes - offset)
        view = await source.read(offset, nbytes)
        if view.nbytes != nbytes:
            raise IntegrityError(
                f"writing {self._uri}/{path}: its source gave {view.nbytes} of {nbytes} bytes at {offset}", hint="it was cut short"
            )
        return view

    async def _publish(
        self, path: str, full: str, temporary: str, storing: Awaitable[None], nbytes: int | None, grown: Growing | None = None
    ) -> FileInfo:
        """Runs `storing`, checks what it made, and moves it to its name; on any failure the temporary goes and nothing is published.

        Args:
            path, full, temporary: The file's names.
            storing: Writes the temporary.
            nbytes: The length, in bytes; None: `grown` knows it when `storing` has ended.
            grown: The source, where it grows.
        """
        try:
            await storing
            if nbytes is None:
                assert grown is not None
                nbytes = grown.length
                assert nbytes is not None
            stored = await self._call("checking", path, "info", temporary)
            if stored.get("size") != nbytes:
                raise IntegrityError(
                    f"writing {self._uri}/{path}: {nbytes} bytes were written, {stored.get('size')} are there",
                    hint="the file system loses bytes: it can't hold a tier",
                    file=path,
                )
            await self._write_call(
                "publishing", path, full, "mv_file" if self._native else "mv", temporary, full, timeout_s=self._long(nbytes)
            )
        except BaseException:
            await to_the_end(self._remove_temporary(temporary))
            raise
        return FileInfo(path=path, nbytes=nbytes)

    async def _remove_temporary(self, temporary: str) -> None:
        try:
            await self._once("removing a temporary of", TMP, "rm_file", temporary)
        except NotFoundError:  # it was never made, or was moved already
            return
        except StorageError as error:
            _log.warning("event=temporary-left path=%s reason=%s", temporary, error.message)

    async def create(self, path: str, data: bytes) -> None:
        full = self._full(path)
        if not data:
            raise UsageError(f"creating {self._uri}/{path}: a record is never empty", hint="give it a nonce")
        if not self.capabilities.create:
            raise StorageError(
                f"creating {self._uri}/{path}: {self._protocol}:// can't create a file only if it is absent",
                hint="it can hold replicas; let a shared path or an S3 bucket be the tier that decides (the first of scope `shared`)",
            )
        try:
            await self._once("creating", path, "pipe_file", full, data, mode="create")
            return
        except (StorageError, NotFoundError, ConflictError) as error:
            lost = error
        try:
            existing = await self.read(path)
        except NotFoundError:
            raise lost from None
        except StorageError as error:
            raise OutcomeUnknownError(
                f"creating {self._uri}/{path}: whether it was made is not known ({lost.message})", hint="read the name later", file=path
            ) from error
        if existing != data:
            hint = "somebody else was first: read it, then decide"
            raise ConflictError(f"{self._uri}/{path} exists already, with other bytes", hint=hint, existing=existing)

    # Listing and deleting

    async def delete(self, paths: Sequence[str]) -> None:
        for path, full in {path: self._full(path) for path in paths}.items():
            try:
                await self._call("deleting", path, "rm_file", full)
            except NotFoundError:
                continue  # a missing one is fine

    async def children(self, folder: str = "") -> Listing:
        full = self._full(folder) if folder else self._root
        try:
            entries = await self._call("listing", folder, "ls", full, detail=True)
        except NotFoundError:
            entries = []
        files, folders = [], []
        for entry in entries:
            path = self._relative(str(entry["name"]))
            if path is None or path.rpartition("/")[0] != folder:
                continue  # the folder itself, or a file of its name
            if entry.get("type") == "directory":
                folders.append(path.rpartition("/")[2])
            else:
                files.append(self._info(path, entry))
        return Listing(files=tuple(files), folders=tuple(name for name in folders if folder or name != TMP))

    async def list(self, folder: str = "") -> list[FileInfo]:
        full = self._full(folder) if folder else self._root
        try:
            found = await self._call("listing", folder, "find", full, detail=True, timeout_s=4 * self._request_timeout_s)
        except NotFoundError:
            return []
        below = f"{folder}/" if folder else ""
        named = [(self._relative(str(name)), info) for name, info in found.items() if info.get("type") == "file"]
        return [self._info(path, info) for path, info in named if path and path.startswith(below) and not path.startswith(f"{TMP}/")]

    # Calls

    def _long(self, nbytes: int) -> float:
        """Seconds for a transfer whose progress can't be seen: the stall timeout, and 1 s for each MiB."""
        return self._stall_timeout_s + nbytes / _MIB

    async def _write_call(self, doing: str, path: str, target: str, name: str, *arguments: Any, timeout_s: float | None = None) -> None:
        """A writing call; where folders have to exist first (sftp), they are made when it misses them."""
        try:
            await self._call(doing, path, name, *arguments, timeout_s=timeout_s)
        except NotFoundError:
            if self._native:
                raise
            await self._call(doing, path, "makedirs", target.rpartition("/")[0], exist_ok=True)
            await self._call(doing, path, name, *arguments, timeout_s=timeout_s)

    async def _call(self, doing: str, path: str, name: str, *arguments: Any, timeout_s: float | None = None, **keywords: Any) -> Any:
        retry = AsyncRetrying(
            stop=stop_after_attempt(self._attempts),
            wait=wait_exponential(multiplier=0.2, max=8) + wait_random(0, 0.2),
            retry=retry_if_exception(may_pass),
            reraise=True,
        )
        return await retry(self._once, doing, path, name, *arguments, timeout_s=timeout_s, **keywords)

    async def _once(self, doing: str, path: str, name: str, *arguments: Any, timeout_s: float | None = None, **keywords: Any) -> Any:
        what = f"{doing} {self._uri}/{path}"
        limit_s = timeout_s or (self._stall_timeout_s if name in _WRITES else self._request_timeout_s)
        try:
            fs = self._system()
            if self._native:
                future: asyncio.Future[Any] = asyncio.ensure_future(getattr(fs, f"_{name}")(*arguments, **keywords))
            else:
                future = asyncio.get_running_loop().run_in_executor(self._executor(), _bind(getattr(fs, name), arguments, keywords))
            return await _bounded(future, limit_s, cancel=self._native and name not in _WRITES)
        except Exception as error:
            raise translate_fsspec(error, what, limit_s) from error

    def _executor(self) -> DaemonPool:
        if self._pool is None or self._pool.pid != os.getpid():
            self._pool = DaemonPool(self._threads, "tierstore-fsspec", self._nice)
        return self._pool

    def _system(self) -> Any:
        if self._pid != os.getpid():
            self._inherited.append(self._systems)  # the parent's connections are kept, untouched: no destructor speaks on them
            self._systems, self._pid = {}, os.getpid()
        loop = asyncio.get_running_loop() if self._native else None
        known = self._systems.get(id(loop))
        if known is not None and known[0] is loop:
            return known[1]
        arguments = {
            **self._class._get_kwargs_from_urls(self._uri),
            **self._options,
            "skip_instance_cache": True,
            "use_listings_cache": False,
        }
        if self._native:
            arguments["asynchronous"] = True
        self._systems[id(loop)] = (loop, self._class(**arguments))
        return self._systems[id(loop)][1]

    def _full(self, path: str) -> str:
        return f"{self._root}/{check_relative(path)}"

    def _temporary(self) -> str:
        return f"{self._root}/{TMP}/{secrets.token_hex(16)}"

    def _relative(self, name: str) -> str | None:
        """The path below the root of a name in a listing; None for the root itself or a foreign name."""
        full = str(self._class._strip_protocol(name))
        for candidate in (full, f"/{full}"):
            if candidate.startswith(f"{self._root}/"):
                return candidate[len(self._root) + 1 :].rstrip("/") or None
        return None


def _check_uri(uri: str) -> str:
    protocol, found, rest = uri.partition("://")
    if "::" in uri:
        raise ConfigError(f"{uri!r} is a chained URI", hint="name the storage itself: a tier is its own cache")
    if not found or not protocol:
        raise ConfigError(f"{uri!r} is no URI", hint="write PROTOCOL://…")
    if protocol in _CACHES:
        raise ConfigError(f"{protocol}:// can serve truncated files: it can't hold a tier", hint="name the storage that it caches")
    if urlsplit(f"x://{rest}").password:
        raise ConfigError(f"a {protocol}:// URI must not hold a password", hint="put it into the tier's options")
    return protocol


def _file_system_class(protocol: str) -> Any:
    try:
        return fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        raise ConfigError(
            f"no file system is known for {protocol}://", hint="pip install the package that adds it to fsspec, or correct the URI"
        ) from error
    except ImportError as error:
        raise ConfigError(f"the package for {protocol}:// is not installed", hint=str(error)) from error


def _bind(function: Callable[..., _T], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Callable[[], _T]:
    return lambda: function(*arguments, **keywords)


async def _bounded(future: asyncio.Future[_T], limit_s: float, *, cancel: bool) -> _T:
    """Awaits `future` for `limit_s`. When we are cancelled, a call that writes is awaited first: what it does can be removed only then."""
    try:
        done, _ = await asyncio.wait({future}, timeout=limit_s)
        if not done:
            raise asyncio.TimeoutError
        return future.result()
    except asyncio.CancelledError:
        if not cancel and not future.done():
            await asyncio.wait({future}, timeout=limit_s)
        raise
    finally:
        if not future.done():
            future.cancel()
            if isinstance(future, asyncio.Task):
                await asyncio.wait({future})
        if future.done() and not future.cancelled():
            future.exception()  # seen, so that asyncio does not report it a second time


async def _close_sessions(fs: Any) -> None:
    """Closes what an asynchronous file system holds on this loop; fsspec has no common call for it."""
    creator = getattr(fs, "_s3creator", None)
    if creator is not None and getattr(fs, "_s3", None) is not None:
        await creator.__aexit__(None, None, None)
    for name in ("_session", "session"):
        close = getattr(getattr(fs, name, None), "close", None)
        if close is not None and creator is None:
            closing = close()
            if inspect.isawaitable(closing):
                await closing
            return


def _rebuild(uri: str, options: dict[str, Any], settings: dict[str, Any]) -> FsspecStorage:
    return FsspecStorage(uri, options, **settings)
