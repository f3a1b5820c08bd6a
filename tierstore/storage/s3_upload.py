"""Uploads to S3: a single PUT, or a multipart upload that is completed whole or aborted, whatever happens (PROTOCOLS.md §4)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from base64 import b64encode
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from tierstore import crashpoints
from tierstore.errors import ConfigError, IntegrityError, NotFoundError, TierStoreError
from tierstore.storage.contract import Growing, InMemory, Source
from tierstore.storage.s3_checksums import Algorithm, Checksums
from tierstore.storage.s3_client import S3Requests
from tierstore.storage.tasks import end_all, to_the_end

__all__ = [
    "MAX_PARTS",
    "MIB",
    "Begun",
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


class Begun:
    """A source that grows, whose first bytes were taken to learn whether they are all: given once without being made again.

    Args:
        source: The source.
        first: Its first bytes, or why they can't be had.
    """

    def __init__(self, source: Growing, first: memoryview | TierStoreError) -> None:
        self._source = source
        self._first: memoryview | TierStoreError | None = first

    @property
    def nbytes(self) -> int:
        return self._source.nbytes

    @property
    def length(self) -> int | None:
        return self._source.length

    async def read(self, offset: int, nbytes: int) -> memoryview:
        first = self._first
        if isinstance(first, TierStoreError):
            raise first
        if first is not None and offset == 0 and nbytes == first.nbytes:
            self._first = None
            return first
        return await self._source.read(offset, nbytes)


class Upload:
    """One multipart upload."""

    def __init__(self, requests: S3Requests, key: str, source: Source, part_nbytes: int, checksums: Checksums) -> None:
        self._requests = requests
        self._key = key
        self._source = source
        self._part_nbytes = part_nbytes
        self._checksums = checksums
        self._grows = isinstance(source, Growing)
        self._count = 0 if self._grows else -(-source.nbytes // part_nbytes)
        """How many parts there are; of a source that grows, as many as are known of."""
        self._whole = not self._grows
        """All parts are known of."""
        self._pulling = asyncio.Lock()
        self._nonce = secrets.token_hex(16)
        self._held: Mapping[int, HeldPart] = {}
        self._etags: dict[int, str] = {}
        self._digests: dict[int, bytes] = {}
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
        numbers = takewhile(lambda _: not self._whole, count()) if self._grows else iter(range(self._count))
        await _run((self._part(index) for index in numbers), in_flight)
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
        if head is None:
            return False
        while not self._whole:
            await self._next(self._count)
        if int(head["ContentLength"]) != self.nbytes:
            return False
        if self.algorithm is None or not head.get(self.algorithm.argument):
            return True
        for index in range(self._count):
            if index not in self._digests:
                _, self._digests[index] = await self._pull(index)
        return matches(head, self.algorithm, self.checksum)

    @property
    def nbytes(self) -> int:
        """The length of the whole, in bytes, once all parts are known of."""
        length = self._length
        assert length is not None
        return length

    @property
    def _length(self) -> int | None:
        return self._source.length if isinstance(self._source, Growing) else self._source.nbytes

    @property
    def checksum(self) -> str:
        """Of the whole, once all parts are known, as S3 writes it; empty where there is none."""
        return "" if self.algorithm is None else self.algorithm.composite([self._digests[index] for index in range(self._count)])

    async def _pull(self, index: int) -> tuple[memoryview, bytes]:
        """The bytes of a part, and their checksum."""
        start = index * self._part_nbytes
        nbytes = self._part_nbytes if self._grows else min(self._part_nbytes, self._source.nbytes - start)
        try:
            if isinstance(self._source, InMemory):
                data, digest = await asyncio.to_thread(self._view, self._source, start, nbytes)
            else:
                data = await self._source.read(start, nbytes)
                digest = await digest_of_body(self.algorithm, data)
            if data.nbytes != nbytes and not (self._grows and data.nbytes < nbytes and start + data.nbytes == self._length):
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

    async def _next(self, index: int) -> tuple[memoryview, bytes]:
        """`_pull` of a source that grows: its parts one after the other. Empty beyond its end."""
        if self._whole:
            return memoryview(b""), b""
        data, digest = await self._pull(index)
        if data.nbytes:
            self._count, self._digests[index] = index + 1, digest
        self._whole = index * self._part_nbytes + data.nbytes == self._length
        return data, digest

    async def _part(self, index: int) -> None:
        async with AsyncExitStack() as held:
            data, digest = await self._take(index, held)
            if index >= self._count:
                return  # a source that grows has ended before it
            part = self._held.get(index)
            if part is not None and await part.is_of(data, self.algorithm, digest):
                self.reused += 1
                etag = part.etag
            else:
                etag = await self._send(index, data, digest)
        self._digests[index] = digest
        self._etags[index] = etag
        crashpoints.reach("s3.after-part")

    async def _take(self, index: int, held: AsyncExitStack) -> tuple[memoryview, bytes]:
        """`_pull` within a slot, that is `held` until the part is sent."""
        slots = self._requests.client().pulls
        if not self._grows:
            await held.enter_async_context(slots)
            return await self._pull(index)
        async with self._pulling:  # before the slot: who waits for its turn keeps no other file from sending
            if self.source_failure is not None:
                raise self.source_failure  # beyond what can't be had there is nothing to be had
            if self._whole:
                return memoryview(b""), b""
            await held.enter_async_context(slots)
            return await self._next(index)

    async def _send(self, index: int, data: memoryview, digest: bytes) -> str:
        carried = self._checksums.of(self.algorithm, digest)
        answer = await self._requests.send(
            f"writing part {index + 1}{'' if self._grows else f' of {self._count}'} of",
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
            for index, (etag, digest) in ((index, (self._etags[index], self._digests[index])) for index in range(self._count))
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
