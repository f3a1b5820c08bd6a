"""Uploads to S3: a single PUT, or a multipart upload that is completed whole or aborted, whatever happens (PROTOCOLS.md §4)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from base64 import b64encode
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tierstore import crashpoints
from tierstore.errors import ConfigError, IntegrityError, NotFoundError, TierStoreError
from tierstore.storage.contract import InMemory, Source
from tierstore.storage.s3_checksums import Algorithm, Checksums
from tierstore.storage.s3_client import S3Requests
from tierstore.storage.tasks import end_all, to_the_end

__all__ = [
    "MAX_PARTS",
    "MIB",
    "HeldPart",
    "Upload",
    "Uploaded",
    "digest_of_body",
    "etag_of",
    "matches",
    "part_nbytes_for",
    "put_object",
    "put_parts",
]

_log = logging.getLogger(__name__)

MIB = 1024 * 1024
MAX_PARTS = 10_000  # of one multipart upload, https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
MAX_OBJECT_NBYTES = 5 * 1024**4
_AT_ONCE_NBYTES = 64 * 1024
_NONCE = "tierstore-upload"
"""The object's metadata that names the attempt which wrote it: proves a completion whose answer was lost to be ours."""


def part_nbytes_for(nbytes: int, at_least: int) -> int:
    """The size of the parts of an object of `nbytes`: whole MiB, `at_least` bytes, grown so that 10,000 parts suffice."""
    if nbytes > MAX_OBJECT_NBYTES:
        raise ConfigError(
            f"a file of {nbytes} bytes is larger than an S3 object can be (5 TiB)", hint="save with more ranks, or a smaller shard size"
        )
    needed = -(-nbytes // MAX_PARTS)
    return max(at_least, -(-needed // MIB) * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """What was uploaded, as far as this process knows it."""

    etag: str
    """What the server gave; some give none for multipart."""
    algorithm: Algorithm | None
    """Of `checksum`; None where none was sent."""
    checksum: str
    """As S3 writes it: base64, and ``-N`` for N parts."""


async def put_object(requests: S3Requests, key: str, data: memoryview, checksums: Checksums, algorithm: Algorithm) -> Uploaded:
    """Uploads `data` by one PUT with the checksum of `algorithm`, tried again with the same bytes."""
    what = f"writing {requests.place.of(key)}"
    digest = await digest_of_body(algorithm, data)
    crashpoints.reach("s3.before-complete")
    while True:
        carried = checksums.of(algorithm, digest)
        signed = not (carried and checksums.taken)
        try:
            answer = await requests.send("writing", key, "put_object", body=data, signed=signed, Key=key, **carried)
        except TierStoreError as error:
            if checksums.refused(error, carried):
                continue
            raise
        checksums.check(answer, algorithm, digest, what)
        crashpoints.reach("s3.after-complete")
        return Uploaded(etag=etag_of(answer), algorithm=algorithm, checksum=b64encode(digest).decode())


async def put_parts(requests: S3Requests, key: str, source: Source, part_nbytes: int, in_flight: int, checksums: Checksums) -> Uploaded:
    """Uploads `source` in parts, `in_flight` at once, each tried again alone.

    On any failure, cancellation included, the upload is aborted before the error goes on.
    """
    upload = Upload(requests, key, source, part_nbytes, checksums)
    await upload.begin()
    try:
        return await upload.run(in_flight)
    except BaseException:
        await to_the_end(upload.abort())
        raise


class Upload:
    """One multipart upload."""

    def __init__(self, requests: S3Requests, key: str, source: Source, part_nbytes: int, checksums: Checksums) -> None:
        self._requests = requests
        self._key = key
        self._source = source
        self._part_nbytes = part_nbytes
        self._checksums = checksums
        self._count = -(-source.nbytes // part_nbytes)
        self._nonce = secrets.token_hex(16)
        self._held: Mapping[int, HeldPart] = {}
        self._etags = [""] * self._count
        self._digests = [b""] * self._count
        self.algorithm: Algorithm | None = checksums.large if checksums.sent else None
        self.id = ""
        self.source_failure: BaseException | None = None
        """What the source raised, so that the caller can tell its failures from the server's."""
        self.reused = 0
        """How many parts the server had already."""

    @property
    def _what(self) -> str:
        return f"writing {self._requests.place.of(self._key)}"

    async def begin(self) -> None:
        # A creation whose answer was lost leaves an empty upload that nobody knows: the sweep finds it.
        while True:
            self.algorithm = self._checksums.large if self._checksums.sent else None
            carried: dict[str, Any] = {} if self.algorithm is None else {"ChecksumAlgorithm": self.algorithm.name}
            try:
                answer = await self._requests.send(
                    "writing", self._key, "create_multipart_upload", Key=self._key, Metadata={_NONCE: self._nonce}, **carried
                )
            except TierStoreError as error:
                if self._checksums.refused(error, carried):
                    continue
                raise
            if self.algorithm is not None and answer.get("ChecksumAlgorithm") == self.algorithm.name:
                self._checksums.taken = True
            self.id = str(answer["UploadId"])
            return

    def adopt(self, upload_id: str, algorithm: Algorithm | None, parts: Mapping[int, HeldPart]) -> None:
        """Goes on with an upload that another process, or an earlier call, began: what it holds is compared before it is trusted.

        Args:
            upload_id: The upload.
            algorithm: Of its checksums; None: it has none.
            parts: What the server holds, by index from 0.
        """
        self.id, self.algorithm, self._held = upload_id, algorithm, parts
        self._nonce = ""  # whoever began it has it

    async def run(self, in_flight: int) -> Uploaded:
        """Sends what the server does not hold, and completes."""
        await _run((self._part(index) for index in range(self._count)), in_flight)
        crashpoints.reach("s3.before-complete")
        etag = await self._complete()
        crashpoints.reach("s3.after-complete")
        return Uploaded(etag=etag, algorithm=self.algorithm, checksum=self.checksum)

    async def prove_there(self) -> bool:
        """Whether the object under the key is the source's bytes, by its size and the server's checksum of its parts.

        Reads those parts of the source whose checksums this process does not know yet. Where the server tells no checksum, the size
        has to do: who asks knows that no other content of that size can be there.
        """
        head = await self._head()
        if head is None or int(head["ContentLength"]) != self._source.nbytes:
            return False
        if self.algorithm is None or not head.get(self.algorithm.argument):
            return True
        for index in range(self._count):
            if not self._digests[index]:
                _, self._digests[index] = await self._pull(index)
        return matches(head, self.algorithm, self.checksum)

    @property
    def checksum(self) -> str:
        """Of the whole, once all parts are known, as S3 writes it; empty where there is none."""
        return "" if self.algorithm is None else self.algorithm.composite(self._digests)

    async def _pull(self, index: int) -> tuple[memoryview, bytes]:
        """The bytes of a part, and their checksum."""
        start = index * self._part_nbytes
        nbytes = min(self._part_nbytes, self._source.nbytes - start)
        try:
            if isinstance(self._source, InMemory):
                data, digest = await asyncio.to_thread(self._view, self._source, start, nbytes)
            else:
                data = await self._source.read(start, nbytes)
                digest = await digest_of_body(self.algorithm, data)
            if data.nbytes != nbytes:
                raise IntegrityError(
                    f"{self._what}: its source gave {data.nbytes} bytes of {nbytes} at {start}", hint="the source was cut short"
                )
        except Exception as error:
            self.source_failure = error
            raise
        return data, digest

    def _view(self, source: InMemory, start: int, nbytes: int) -> tuple[memoryview, bytes]:
        """Both in one thread: what the source computes of the bytes is done while they are in that core's cache, and so is this."""
        data = source.view(start, nbytes)
        return data, b"" if self.algorithm is None else self.algorithm.of(data)

    async def _part(self, index: int) -> None:
        async with self._requests.client().pulls:
            data, digest = await self._pull(index)
            held = self._held.get(index)
            if held is not None and await held.is_of(data, self.algorithm, digest):
                self.reused += 1
                etag = held.etag
            else:
                etag = await self._send(index, data, digest)
        self._digests[index] = digest
        self._etags[index] = etag
        crashpoints.reach("s3.after-part")

    async def _send(self, index: int, data: memoryview, digest: bytes) -> str:
        carried = self._checksums.of(self.algorithm, digest)
        answer = await self._requests.send(
            f"writing part {index + 1} of {self._count} of",
            self._key,
            "upload_part",
            body=data,
            signed=not (carried and self._checksums.taken),
            Key=self._key,
            UploadId=self.id,
            PartNumber=index + 1,
            **carried,
        )
        self._checksums.check(answer, self.algorithm, digest, f"{self._what}, part {index + 1}")
        return str(answer["ETag"])

    async def _complete(self) -> str:
        """Completes; returns the ETag, empty where the server told none or its answer was lost."""
        listed = [
            {"PartNumber": index + 1, "ETag": etag, **self._checksums.of(self.algorithm, digest)}
            for index, (etag, digest) in enumerate(zip(self._etags, self._digests, strict=True))
        ]

        async def attempt() -> str:
            try:
                answer = await self._requests.once(
                    "completing",
                    self._key,
                    "complete_multipart_upload",
                    Key=self._key,
                    UploadId=self.id,
                    MultipartUpload={"Parts": listed},
                )
            except TierStoreError as error:
                # The upload is gone, or the answer was lost: an earlier try, or who goes on with the same upload, may have completed it.
                if (isinstance(error, NotFoundError) or error.retryable) and await self._is_done():
                    return ""
                raise
            return etag_of(answer)

        return await self._requests.retrying(attempt, self._requests.patience.part_attempts)

    async def _is_done(self) -> bool:
        """Whether the object under the key was made by this upload: it has its nonce, or it is an adopted one's bytes."""
        if not self._nonce:
            return await self.prove_there()
        head = await self._head()
        return head is not None and dict(head.get("Metadata") or {}).get(_NONCE) == self._nonce

    async def _head(self) -> dict[str, Any] | None:
        try:
            return await self._requests.send("checking", self._key, "head_object", Key=self._key, ChecksumMode="ENABLED")
        except NotFoundError:
            return None

    async def abort(self) -> None:
        """Aborts; twice, because a part that was under way may have arrived after the first time."""
        for _ in range(2):
            try:
                await self._requests.send("aborting the upload of", self._key, "abort_multipart_upload", Key=self._key, UploadId=self.id)
            except NotFoundError:  # NoSuchUpload on AWS, NoSuchKey on radosgw: both mean gone
                return
            except TierStoreError as error:
                _log.warning("event=abort-failed upload_id=%s reason=%s", self.id, error.message)
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """A part that the server holds of an unfinished upload."""

    nbytes: int
    etag: str
    checksums: Mapping[str, str]
    """By the parameter's name, for example ``ChecksumCRC32C``; empty where the server tells none of parts."""

    async def is_of(self, data: memoryview, algorithm: Algorithm | None, digest: bytes) -> bool:
        """Whether it is `data`, whose checksum `digest` is: by the server's checksum, else by an ETag that is an MD5."""
        if self.nbytes != data.nbytes:
            return False
        told = "" if algorithm is None else self.checksums.get(algorithm.argument, "")
        if told:
            return told == b64encode(digest).decode()
        return self.etag.strip('"') == (await asyncio.to_thread(hashlib.md5, data, usedforsecurity=False)).hexdigest()


def matches(head: Mapping[str, Any], algorithm: Algorithm | None, checksum: str) -> bool:
    """Whether the answer to a HEAD does not contradict `checksum`.

    moto leaves out the number of parts. A checksum of the whole object can't be compared with one of its parts' checksums.
    """
    told = "" if algorithm is None else str(head.get(algorithm.argument) or "")
    if not told or ("-" in checksum and head.get("ChecksumType") == "FULL_OBJECT"):
        return True
    return told.partition("-")[0] == checksum.partition("-")[0]


def etag_of(answer: Mapping[str, Any]) -> str:
    return str(answer.get("ETag") or "").strip('"')


async def digest_of_body(algorithm: Algorithm | None, data: memoryview) -> bytes:
    """The checksum of `data`, in a thread where it takes long enough to be worth one; nothing where there is no algorithm."""
    if algorithm is None:
        return b""
    if data.nbytes <= _AT_ONCE_NBYTES:
        return algorithm.of(data)
    return await asyncio.to_thread(algorithm.of, data)


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
