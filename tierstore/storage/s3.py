"""S3 and what speaks it, over async s3fs: exact ranged reads, checksummed uploads, create-if-absent (PROTOCOLS.md §1, §3)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tierstore.clock import Clock, SystemClock
from tierstore.errors import (
    AccessError,
    ConfigError,
    IntegrityError,
    NotFoundError,
    StorageError,
    TemporaryError,
    TierStoreError,
    UsageError,
)
from tierstore.names import TMP, check_relative
from tierstore.storage.bandwidth import Bandwidth
from tierstore.storage.bounce import Bounces
from tierstore.storage.contract import Capabilities, FileInfo, Growing, Listing, Reading, Source
from tierstore.storage.s3_checksums import Checksums, told_of
from tierstore.storage.s3_client import Clients, Patience, S3Requests
from tierstore.storage.s3_create import Creation
from tierstore.storage.s3_direct import DirectReads
from tierstore.storage.s3_download import download, read_to_the_end
from tierstore.storage.s3_errors import Place, no_bucket
from tierstore.storage.s3_landing import Memory, Pieces
from tierstore.storage.s3_options import parse_s3_options, split_s3_uri
from tierstore.storage.s3_resume import go_on, stale_uploads
from tierstore.storage.s3_upload import MIB, Begun, Uploaded, matches, part_nbytes_for, put_object, put_parts

__all__ = ["S3Storage"]

_DELETE_AT_ONCE = 1000  # keys in one DeleteObjects request
_SLACK = 16  # connections for small requests beside the transfers


class S3Storage:
    """One prefix of one bucket.

    Args:
        uri: ``s3://BUCKET/PREFIX``.
        options: As s3fs takes them (``key``, ``secret``, ``token``, ``anon``, ``profile``, ``endpoint_url``, ``client_kwargs``,
            ``config_kwargs``, ``s3_additional_kwargs``, …), and ``region_name``, ``addressing_style`` (``auto``, ``path``,
            ``virtual``), ``client`` (``s3fs``, ``direct``), ``checksums`` (``auto``, ``sha256``, ``required``, ``off``). Without
            credentials, botocore's usual places are read.
        part_nbytes: The smallest part of a multipart upload, in bytes: whole MiB, 8 MiB and up.
        request_timeout_s: Seconds within which a request without a large body must be answered.
        stall_timeout_s: Seconds without a moved byte after which a transfer has stalled.
        concurrency: Transfers at once.
        attempts: Tries of a request; those of uploads get three more, so that they outlive a restart of the server. 1: no retries.

    Raises:
        ConfigError: The URI or an option is wrong.
    """

    def __init__(
        self,
        uri: str,
        options: Mapping[str, Any] | None = None,
        *,
        part_nbytes: int = 8 * MIB,
        request_timeout_s: float = 30,
        stall_timeout_s: float = 30,
        concurrency: int = 8,
        attempts: int = 5,
        clock: Clock | None = None,
    ) -> None:
        if part_nbytes < 5 * MIB or part_nbytes % MIB:
            raise ConfigError(f"a part of {part_nbytes} bytes is not possible on S3", hint="parts are whole MiB, from 5 MiB")
        if concurrency < 1 or attempts < 1:
            raise ConfigError("concurrency and attempts of an S3 tier are at least 1", hint="leave them out for the defaults")
        bucket, prefix = split_s3_uri(uri)
        self._settings = {
            "part_nbytes": part_nbytes,
            "request_timeout_s": request_timeout_s,
            "stall_timeout_s": stall_timeout_s,
            "concurrency": concurrency,
            "attempts": attempts,
            "clock": clock,
        }
        self._options = dict(options or {})
        self._uri = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self._bucket = bucket
        self._root = f"{prefix}/" if prefix else ""
        self._part_nbytes = part_nbytes
        self._concurrency = concurrency
        parsed = parse_s3_options(
            self._options,
            connections=concurrency + 2 * _SLACK,
            connect_timeout_s=min(5.0, request_timeout_s),
            read_timeout_s=stall_timeout_s,
        )
        self._endpoint = parsed.endpoint_url
        self._bucket_seen = False
        self._checksums = Checksums(parsed.checksums)
        self._requests = S3Requests(
            Clients(parsed, concurrency, _SLACK, self._uri),
            Place(bucket=bucket, endpoint=parsed.endpoint_url, key_id=parsed.key_id),
            Patience(
                request_timeout_s=request_timeout_s,
                stall_timeout_s=stall_timeout_s,
                attempts=attempts,
                part_attempts=attempts + 3 if attempts > 1 else 1,
            ),
            clock or SystemClock(),
        )
        direct = DirectReads(self._requests, concurrency, min(5.0, request_timeout_s))
        self._direct = direct if parsed.client == "direct" else None
        self._bounces: Bounces | None = None

    def __repr__(self) -> str:
        return f"S3Storage({self._uri!r}, endpoint_url={self._endpoint!r})"

    def __reduce__(self) -> Any:
        return _rebuild, (self._uri, self._options, self._settings)

    @property
    def uri(self) -> str:
        return self._uri

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create=True, checksums=self._checksums.sent, part_nbytes=self._part_nbytes, local=False)

    def local_path(self, path: str) -> Path | None:
        check_relative(path)
        return None

    async def free_nbytes(self) -> int | None:
        return None

    async def close(self) -> None:
        if self._direct is not None:
            await self._direct.close()
        await self._requests.close()
        self._bounces = None  # what a read still has of it is freed when it comes back

    # Reading

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        key = self._key(path)
        if nbytes is None:
            return bytes(await read_to_the_end(self._requests, key, offset))
        if not nbytes:
            return b""
        memory = Memory(memoryview(bytearray(nbytes)))
        await download(self._requests, key, offset, memory, direct=self._direct)
        return bytes(memory.buffer)

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        key = self._key(path)
        if buffer.nbytes:
            await download(self._requests, key, offset, Memory(buffer.cast("B")), direct=self._direct)

    async def read_proved(
        self, path: str, offset: int, buffer: memoryview, prove: Callable[[int, memoryview], None], *, unit: int = 1 << 20
    ) -> None:
        key = self._key(path)
        if buffer.nbytes:
            memory = Memory(buffer.cast("B"), offset=offset, prove=prove, unit=unit)
            await download(self._requests, key, offset, memory, direct=self._direct)

    async def read_placed(self, reading: Reading) -> bool:
        """`contract.ReadsPlaced`: each range is one request, and passes the CPU's cache once."""
        key = self._key(reading.path)
        bounces = self._bounces
        if bounces is None or bounces.pid != os.getpid() or bounces.nbytes != reading.unit:
            bounces = self._bounces = Bounces(reading.unit)
        for begin, end in reading.ranges:
            pieces = Pieces(reading, begin, end, bounces)
            try:
                await download(self._requests, key, begin, pieces, direct=self._direct)
            except (TierStoreError, OSError) as error:
                reading.failed(begin + pieces.delivered, end, error)
            finally:
                pieces.close()
        return True

    # Writing

    async def write(self, path: str, source: Source) -> FileInfo:
        return await self._write(path, source, put_parts)

    async def write_on(self, path: str, source: Source) -> FileInfo:
        return await self._write(path, source, go_on)

    async def _write(self, path: str, source: Source, in_parts: Callable[..., Awaitable[Uploaded]]) -> FileInfo:
        key = self._key(path)
        if isinstance(source, Growing):
            return await self._write_growing(path, source, in_parts)
        if source.nbytes > self._part_nbytes:
            part_nbytes = part_nbytes_for(source.nbytes, self._part_nbytes)
            at_once = self._concurrency + 2  # the storage's slots decide; two more read ahead
            uploaded = await in_parts(self._requests, key, source, part_nbytes, at_once, self._checksums)
            return await self._written(path, source.nbytes, uploaded)
        async with self._requests.client().pulls:
            data = await source.read(0, source.nbytes) if source.nbytes else memoryview(b"")
            if data.nbytes != source.nbytes:
                raise IntegrityError(
                    f"writing {self._uri}/{path}: its source gave {data.nbytes} bytes of {source.nbytes}", hint="the source was cut short"
                )
            uploaded = await put_object(self._requests, key, data, self._checksums, self._checksums.large)
            del data
        return await self._written(path, source.nbytes, uploaded)

    async def _write_growing(self, path: str, source: Growing, in_parts: Callable[..., Awaitable[Uploaded]]) -> FileInfo:
        """Parts have the size that suits the longest that it may become; what ends within the first one goes by one PUT."""
        key, part_nbytes = self._key(path), part_nbytes_for(source.nbytes, self._part_nbytes)
        first: memoryview | TierStoreError
        async with self._requests.client().pulls:
            try:
                first = await source.read(0, part_nbytes)
            except TierStoreError as error:
                if in_parts is put_parts:
                    raise
                first = error  # what an earlier call left on the server is ended or left as always
            if isinstance(first, memoryview) and source.length == first.nbytes:
                uploaded = await put_object(self._requests, key, first, self._checksums, self._checksums.large)
                return await self._written(path, first.nbytes, uploaded)
        begun = Begun(source, first)
        del first
        uploaded = await in_parts(self._requests, key, begun, part_nbytes, self._concurrency + 2, self._checksums)
        assert source.length is not None
        return await self._written(path, source.length, uploaded)

    async def put(self, path: str, data: bytes) -> FileInfo:
        algorithm = self._checksums.document if len(data) <= MIB else self._checksums.large
        uploaded = await put_object(self._requests, self._key(path), memoryview(data), self._checksums, algorithm)
        return await self._written(path, len(data), uploaded)

    def pace_writes(self, limit: Bandwidth | None) -> None:
        self._requests.pace = limit

    async def _written(self, path: str, nbytes: int, uploaded: Uploaded) -> FileInfo:
        """Asks the server what it has now, and proves by size and checksum that it is what was sent."""
        head = await self._head(path)
        info = self._info(path, head)
        if uploaded.etag and info.etag != uploaded.etag:  # replaced by another writer since
            return FileInfo(path=path, nbytes=nbytes, etag=uploaded.etag)
        if info.nbytes != nbytes or not matches(head, uploaded.algorithm, uploaded.checksum):
            raise IntegrityError(
                f"{self._uri}/{path}: {nbytes} bytes were written, but the server has other bytes ({info.nbytes} of them)",
                hint="the server, or something on the way to it, is damaged: run `tierstore doctor --probe`",
                file=path,
            )
        return info

    async def create(self, path: str, data: bytes) -> None:
        key = self._key(path)
        if not data:
            raise UsageError(f"creating {self._uri}/{path}: a record is never empty", hint="give it a nonce")
        await Creation(self._requests, key, data, self._checksums).run()

    # Looking

    async def stat(self, path: str) -> FileInfo:
        return self._info(path, await self._head(path))

    async def _head(self, path: str) -> dict[str, Any]:
        key = self._key(path)
        try:
            return await self._requests.send("looking at", key, "head_object", Key=key, ChecksumMode="ENABLED")
        except NotFoundError:
            await self._check_bucket()  # the answer to a HEAD has no body that would tell a missing bucket from a missing object
            raise

    def _info(self, path: str, head: Mapping[str, Any]) -> FileInfo:
        return FileInfo(
            path=path,
            nbytes=int(head["ContentLength"]),
            modified_at=head.get("LastModified"),
            etag=str(head.get("ETag") or "").strip('"'),
            checksum=told_of(head),
        )

    async def _check_bucket(self) -> None:
        if self._bucket_seen:
            return
        try:
            await self._requests.send("looking at", "", "head_bucket")
        except NotFoundError as error:
            raise no_bucket(self._requests.place) from error
        except AccessError:  # a key that may read objects need not be allowed to look at their bucket
            return
        self._bucket_seen = True

    # Deleting

    async def delete(self, paths: Sequence[str]) -> None:
        keys = [self._key(path) for path in dict.fromkeys(paths)]
        for start in range(0, len(keys), _DELETE_AT_ONCE):
            batch = keys[start : start + _DELETE_AT_ONCE]

            async def attempt() -> None:
                nonlocal batch
                batch = await self._delete_batch(batch)
                if batch:
                    raise TemporaryError(f"deleting {self._uri}: {len(batch)} files, {batch[0]} first, failed", hint="they are tried again")

            await self._requests.retrying(attempt, self._requests.patience.attempts)

    async def _delete_batch(self, keys: list[str]) -> list[str]:
        """Deletes up to 1000 keys; returns those that failed for a reason that may pass."""
        try:
            answer = await self._requests.once(
                "deleting", keys[0], "delete_objects", Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
            )
        except StorageError as error:
            if error.context.get("code") not in ("NotImplemented", "501", "MissingContentMD5", "MethodNotAllowed"):
                raise
            await asyncio.gather(*(self._requests.send("deleting", key, "delete_object", Key=key) for key in keys))
            return []
        again = []
        for failure in answer.get("Errors") or ():
            key, code = str(failure.get("Key")), str(failure.get("Code"))
            if code in ("SlowDown", "InternalError", "ServiceUnavailable"):
                again.append(key)
            elif code not in ("NoSuchKey", "NoSuchVersion"):
                raise StorageError(
                    f"deleting s3://{self._bucket}/{key}: refused ({code})",
                    hint="check the bucket's policy and object locks",
                    key=key,
                    code=code,
                )
        return again

    async def stale_uploads(self, older_than_s: float) -> list[str]:
        """The paths below this prefix with an unfinished upload that got nothing for `older_than_s` seconds, by the server's clock."""
        return [key[len(self._root) :] for key, _ in await stale_uploads(self._requests, self._root, older_than_s)]

    async def abort_stale_uploads(self, older_than_s: float) -> list[str]:
        """Aborts unfinished multipart uploads below this prefix that began, and got their last part, more than `older_than_s` seconds ago.

        By the server's clock. Returns the paths whose uploads were aborted.
        """
        stale = await stale_uploads(self._requests, self._root, older_than_s)
        for key, upload_id in stale:
            try:
                await self._requests.send("aborting the upload of", key, "abort_multipart_upload", Key=key, UploadId=upload_id)
            except NotFoundError:
                continue  # ended by its writer meanwhile
        return [key[len(self._root) :] for key, _ in stale]

    # Listing

    async def _pages(self, prefix: str, **more: Any) -> AsyncIterator[dict[str, Any]]:
        token: dict[str, Any] = {}
        while True:
            page = await self._requests.send("listing", prefix, "list_objects_v2", Prefix=prefix, **more, **token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": str(page["NextContinuationToken"])}

    def _entry(self, entry: dict[str, Any]) -> FileInfo | None:
        path = str(entry["Key"])[len(self._root) :]
        if not path or path.endswith("/") or path.startswith(f"{TMP}/"):
            return None  # a folder's marker, or a temporary
        return FileInfo(
            path=path, nbytes=int(entry["Size"]), modified_at=entry.get("LastModified"), etag=str(entry.get("ETag") or "").strip('"')
        )

    async def list(self, folder: str = "") -> list[FileInfo]:
        prefix = self._folder(folder)
        found: dict[str, FileInfo] = {}
        async for page in self._pages(prefix):
            for entry in page.get("Contents") or ():
                info = self._entry(entry)
                if info is not None:
                    found[info.path] = info
        return list(found.values())

    async def children(self, folder: str = "") -> Listing:
        prefix = self._folder(folder)
        files: dict[str, FileInfo] = {}
        folders: set[str] = set()
        async for page in self._pages(prefix, Delimiter="/"):
            for entry in page.get("Contents") or ():
                info = self._entry(entry)
                if info is not None:
                    files[info.path] = info
            for entry in page.get("CommonPrefixes") or ():
                folders.add(str(entry["Prefix"])[len(prefix) :].rstrip("/"))
        if not folder:
            folders.discard(TMP)
        return Listing(files=tuple(files.values()), folders=tuple(folders - {""}))

    def _key(self, path: str) -> str:
        return self._root + check_relative(path)

    def _folder(self, folder: str) -> str:
        return f"{self._key(folder)}/" if folder else self._root


def _rebuild(uri: str, options: dict[str, Any], settings: dict[str, Any]) -> S3Storage:
    return S3Storage(uri, options, **settings)
