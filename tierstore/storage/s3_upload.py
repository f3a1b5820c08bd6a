"""Uploads to S3: a single PUT, or a multipart upload that is completed whole or aborted, whatever happens (PROTOCOLS.md §4)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from base64 import b64encode
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from tierstore import crashpoints
from tierstore.errors import ConfigError, IntegrityError, NotFoundError, StorageError, TierStoreError
from tierstore.storage.contract import Source
from tierstore.storage.s3_client import S3Requests
from tierstore.storage.tasks import end_all, to_the_end

__all__ = ["MAX_PARTS", "MIB", "Checksums", "Uploaded", "composite", "part_nbytes_for", "put_object", "put_parts"]

_log = logging.getLogger(__name__)

MIB = 1024 * 1024
MAX_PARTS = 10_000  # of one multipart upload, https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MAX_OBJECT_NBYTES = 5 * 1024**4
_NONCE = "tierstore-upload"
"""The object's metadata that names the attempt which wrote it: proves a completion whose answer was lost to be ours."""


class Checksums:
    """Which transport checksums are sent. SHA-256 as a header, until the server refuses the header as such."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.sent = mode != "off"

    def of(self, sha256: str) -> dict[str, Any]:
        """The arguments of a PUT or of a part whose SHA-256 (base64) this is."""
        return {"ChecksumSHA256": sha256} if self.sent else {}

    def check(self, answer: dict[str, Any], sha256: str, what: str) -> None:
        """Checks the checksum that the server returned, if it returned one.

        Raises:
            IntegrityError: It computed another one: the bytes were damaged on their way.
            StorageError: It returned none where the options require one.
        """
        told = str(answer.get("ChecksumSHA256") or "")
        if self.sent and told and told != sha256:
            raise IntegrityError(
                f"{what}: the server received other bytes than were sent", hint="check the network and its proxies", code="BadDigest"
            )
        if self._mode == "required" and not told:
            raise StorageError(
                f"{what}: the server returned no SHA-256", hint="it does not check uploads: set checksums: auto to accept that"
            )

    def refused(self, error: TierStoreError) -> bool:
        """Whether `error` says that the server can't take the checksum header; then it is left out from now on."""
        told = error.context.get("code")
        if self._mode != "auto" or not self.sent or told not in ("NotImplemented", "InvalidRequest", "InvalidArgument", "501"):
            return False
        _log.warning(
            "event=checksums-off code=%s reason=%s",
            told,
            "the server refuses SHA-256 checksum headers; digests are checked by tierstore alone",
        )
        self.sent = False
        return True


def part_nbytes_for(nbytes: int, at_least: int) -> int:
    """The size of the parts of an object of `nbytes`: whole MiB, `at_least` bytes, grown so that 10,000 parts suffice."""
    if nbytes > MAX_OBJECT_NBYTES:
        raise ConfigError(
            f"a file of {nbytes} bytes is larger than an S3 object can be (5 TiB)", hint="save with more ranks, or a smaller shard size"
        )
    needed = -(-nbytes // MAX_PARTS)
    return max(at_least, -(-needed // MIB) * MIB)


def composite(part_sha256: list[bytes]) -> str:
    """The composite SHA-256 of a multipart upload as S3 writes it: base64 of the hash of the parts' hashes, ``-``, their number."""
    return f"{b64encode(hashlib.sha256(b''.join(part_sha256)).digest()).decode()}-{len(part_sha256)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """What was uploaded: the ETag that the server gave (some give none for multipart), and our SHA-256 in S3's notation."""

    etag: str
    sha256: str


async def put_object(requests: S3Requests, key: str, data: memoryview, checksums: Checksums) -> Uploaded:
    """Uploads `data` by one PUT, tried again with the same bytes."""
    what = f"writing {requests.place.of(key)}"
    sha256 = b64encode((await _sha256(data)).digest()).decode()
    crashpoints.reach("s3.before-complete")
    while True:
        try:
            answer = await requests.send("writing", key, "put_object", body=data, Key=key, **checksums.of(sha256))
        except TierStoreError as error:
            if checksums.refused(error):
                continue
            raise
        checksums.check(answer, sha256, what)
        crashpoints.reach("s3.after-complete")
        return Uploaded(etag=_etag(answer), sha256=sha256)


async def put_parts(requests: S3Requests, key: str, source: Source, part_nbytes: int, in_flight: int, checksums: Checksums) -> Uploaded:
    """Uploads `source` in parts, `in_flight` at once, each tried again alone.

    On any failure, cancellation included, the upload is aborted before the error goes on.
    """
    upload = _Upload(requests, key, source, part_nbytes, checksums)
    await upload.begin()
    try:
        await _run(upload.parts(), in_flight)
        crashpoints.reach("s3.before-complete")
        etag = await upload.complete()
        crashpoints.reach("s3.after-complete")
    except BaseException:
        await to_the_end(upload.abort())
        raise
    return Uploaded(etag=etag, sha256=composite(upload.sha256))


class _Upload:
    """One multipart upload."""

    def __init__(self, requests: S3Requests, key: str, source: Source, part_nbytes: int, checksums: Checksums) -> None:
        self._requests = requests
        self._key = key
        self._source = source
        self._part_nbytes = part_nbytes
        self._checksums = checksums
        self._count = -(-source.nbytes // part_nbytes)
        self._nonce = secrets.token_hex(16)
        self._id = ""
        self._etags = [""] * self._count
        self.sha256 = [b""] * self._count

    @property
    def _what(self) -> str:
        return f"writing {self._requests.place.of(self._key)}"

    async def begin(self) -> None:
        # A creation whose answer was lost leaves an empty upload that nobody knows: the sweep finds it.
        while True:
            algorithm: dict[str, Any] = {"ChecksumAlgorithm": "SHA256"} if self._checksums.sent else {}
            try:
                answer = await self._requests.send(
                    "writing", self._key, "create_multipart_upload", Key=self._key, Metadata={_NONCE: self._nonce}, **algorithm
                )
            except TierStoreError as error:
                if self._checksums.refused(error):
                    continue
                raise
            self._id = str(answer["UploadId"])
            return

    def parts(self) -> Iterator[Coroutine[Any, Any, None]]:
        for index in range(self._count):
            yield self._part(index)

    async def _part(self, index: int) -> None:
        start = index * self._part_nbytes
        nbytes = min(self._part_nbytes, self._source.nbytes - start)
        data = await self._source.read(start, nbytes)
        if data.nbytes != nbytes:
            raise IntegrityError(
                f"{self._what}: its source gave {data.nbytes} bytes of {nbytes} at {start}", hint="the source was cut short"
            )
        digest = (await _sha256(data)).digest()
        sha256 = b64encode(digest).decode()
        answer = await self._requests.send(
            f"writing part {index + 1} of {self._count} of",
            self._key,
            "upload_part",
            body=data,
            Key=self._key,
            UploadId=self._id,
            PartNumber=index + 1,
            **self._checksums.of(sha256),
        )
        self._checksums.check(answer, sha256, f"{self._what}, part {index + 1}")
        self.sha256[index] = digest
        self._etags[index] = str(answer["ETag"])

    async def complete(self) -> str:
        """Completes; returns the ETag, empty where the server told none or its answer was lost."""
        listed = [
            {"PartNumber": index + 1, "ETag": etag, **self._checksums.of(b64encode(digest).decode())}
            for index, (etag, digest) in enumerate(zip(self._etags, self.sha256, strict=True))
        ]

        async def attempt() -> str:
            try:
                answer = await self._requests.once(
                    "completing",
                    self._key,
                    "complete_multipart_upload",
                    Key=self._key,
                    UploadId=self._id,
                    MultipartUpload={"Parts": listed},
                )
            except TierStoreError as error:
                # The upload is gone, or the answer was lost: an earlier try of ours may have completed it.
                if (isinstance(error, NotFoundError) or error.retryable) and await self._is_ours():
                    return ""
                raise
            return _etag(answer)

        return await self._requests.retrying(attempt, self._requests.patience.part_attempts)

    async def _is_ours(self) -> bool:
        """Whether the object under the key was made by this upload."""
        try:
            head = await self._requests.send("checking", self._key, "head_object", Key=self._key)
        except NotFoundError:
            return False
        return dict(head.get("Metadata") or {}).get(_NONCE) == self._nonce

    async def abort(self) -> None:
        """Aborts; twice, because a part that was under way may have arrived after the first time."""
        for _ in range(2):
            try:
                await self._requests.send("aborting the upload of", self._key, "abort_multipart_upload", Key=self._key, UploadId=self._id)
            except NotFoundError:  # NoSuchUpload on AWS, NoSuchKey on radosgw: both mean gone
                return
            except TierStoreError as error:
                _log.warning("event=abort-failed upload_id=%s reason=%s", self._id, error.message)
                return


def _etag(answer: dict[str, Any]) -> str:
    return str(answer.get("ETag") or "").strip('"')


async def _sha256(data: memoryview) -> Any:
    return await asyncio.to_thread(hashlib.sha256, data)


async def _run(jobs: Iterator[Coroutine[Any, Any, None]], at_once: int) -> None:
    """Runs `jobs`, `at_once` at a time, pulled as they start; on the first failure the others are cancelled and awaited."""
    running: set[asyncio.Task[None]] = set()
    try:
        for job in jobs:
            running.add(asyncio.ensure_future(job))
            if len(running) >= at_once:
                running = await _next(running)
        while running:
            running = await _next(running)
    finally:
        await end_all(running)


async def _next(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Waits for one or more to end; returns those that still run, or raises the first failure."""
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return running - done
