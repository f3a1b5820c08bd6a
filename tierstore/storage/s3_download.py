"""Ranged reads from S3, exact or an error; a broken transfer goes on where it stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from tierstore.errors import IntegrityError, StorageError, TemporaryError
from tierstore.storage.s3_client import S3Requests
from tierstore.storage.s3_direct import DirectReads

__all__ = ["Download"]


class Download:
    """One range of one object, on its way into memory.

    Args:
        requests: The bucket's requests.
        key: The object's key.
        offset: Where the range begins, in bytes.
        buffer: The caller's memory, which is filled whole (``format "B"``, one dimension, not empty), or None to read to the end
            of the object into memory of its own.
        direct: Reads large ranges beside the client; None: nothing is.
        prove: Sees the bytes as they come, in the thread that reads them where that is possible (`contract.ReadsProved`).
        unit: In pieces of a multiple of so many bytes.
    """

    def __init__(
        self,
        requests: S3Requests,
        key: str,
        offset: int,
        buffer: memoryview | None,
        *,
        direct: DirectReads | None = None,
        prove: Callable[[int, memoryview], None] | None = None,
        unit: int = 1 << 20,
    ) -> None:
        self._requests = requests
        self._key = key
        self._offset = offset
        self._own = buffer is None
        self._buffer = buffer
        self._filled = 0
        self._etag = ""
        self._direct = direct
        self._prove = prove
        self._unit = unit
        self._proved = 0
        self._refusal: Exception | None = None

    @property
    def _name(self) -> str:
        return self._requests.place.of(self._key)

    async def run(self) -> memoryview:
        """Reads; returns the filled memory.

        Raises:
            NotFoundError: There is no such object.
            IntegrityError: The object ends before the range does.
            StorageError: The server does not answer exactly what was asked.
            Exception: Of `prove`.
        """
        try:
            await self._requests.retrying(self._attempt, self._requests.patience.attempts)
            assert self._buffer is not None
            if self._prove is not None and self._proved < self._filled:
                await asyncio.to_thread(self._landed, self._filled)
        except _Refused:
            assert self._refusal is not None
            raise self._refusal from None
        return self._buffer

    async def _attempt(self) -> None:
        stall_s = self._requests.patience.stall_timeout_s
        client = self._requests.client()
        async with client.transfers:
            if self._direct is not None and self._buffer is not None and await self._directly(self._direct, self._buffer):
                return
            start = self._offset + self._filled
            end = None if self._buffer is None else self._offset + self._buffer.nbytes
            wanted = {} if end is None and not start else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
            call = client.fs._call_s3("get_object", Bucket=self._requests.place.bucket, Key=self._key, **wanted)
            try:
                answer = await self._requests.watched("reading", self._key, call, stall_s)
            except StorageError as error:
                if error.context.get("code") not in ("InvalidRange", "416"):
                    raise
                await self._beyond_the_end(error)
                return
            body = answer["Body"]
            try:
                self._check(answer, start, end)
                if self._buffer is None:
                    self._buffer = memoryview(bytearray(int(answer["ContentLength"])))
                await self._requests.watched("reading", self._key, self._drain(body, self._buffer), stall_s, lambda: self._filled)
            finally:
                if self._buffer is None or self._filled < self._buffer.nbytes:
                    body.close()  # the rest of the answer is not wanted: the connection can't be used again

    async def _directly(self, direct: DirectReads, buffer: memoryview) -> bool:
        """Reads what is still missing beside the client; False where that has to do it."""
        begun = self._filled
        start, end = self._offset + begun, self._offset + buffer.nbytes

        def check(told: Mapping[str, str]) -> None:
            length = told.get("content-length", "")
            self._check(
                {
                    "ETag": told.get("etag"),
                    "ContentRange": told.get("content-range"),
                    "ContentLength": int(length) if length.isdigit() else None,
                },
                start,
                end,
            )

        read = await direct.read(
            self._key,
            start,
            buffer[begun:],
            check=check,
            landed=lambda nbytes: self._landed(begun + nbytes),
            unit=self._unit,
            first=begun % self._unit,
        )
        if read is None:
            return False
        stall_s = self._requests.patience.stall_timeout_s
        try:
            return await self._requests.watched("reading", self._key, direct.run(self._key, read), stall_s, lambda: read.filled)
        finally:
            if self._filled == begun:  # it did not begin anew
                self._filled += read.filled

    def _landed(self, nbytes: int) -> None:
        """So many bytes of the whole range are there: what is new among them is proved, in whole units."""
        if self._prove is None or self._buffer is None:
            return
        until = nbytes if nbytes == self._buffer.nbytes else nbytes - nbytes % self._unit
        if until > self._proved:
            piece, at = self._buffer[self._proved : until], self._offset + self._proved
            self._proved = until
            try:
                self._prove(at, piece)
            except Exception as error:  # the caller's own: it passes as it is, and is no failure of the transfer
                self._refusal = error
                raise _Refused from error

    async def _drain(self, body: Any, buffer: memoryview) -> None:
        while self._filled < buffer.nbytes:
            piece = await body.read(buffer.nbytes - self._filled)
            if not piece:
                raise TemporaryError(f"reading {self._name}: the connection ended early", hint="it is tried again")
            buffer[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
        if self._filled == buffer.nbytes == 0:
            await body.read()  # an empty body is read too, so that its connection can be used again

    def _check(self, answer: dict[str, Any], start: int, end: int | None) -> None:
        """Checks that the answer holds exactly ``[start, end)`` of the object that the transfer began with.

        Servers shorten a range past the end; some ignore ranges.
        """
        etag = str(answer.get("ETag") or "")
        if self._filled and etag != self._etag:
            if self._proved:  # each byte is proved once
                raise IntegrityError(f"{self._name} was replaced while it was read", hint="read it again", key=self._key)
            self._filled, self._buffer = 0, None if self._own else self._buffer
            raise TemporaryError(f"{self._name} was replaced while it was read", hint="it is read again")
        self._etag = etag
        told = str(answer.get("ContentRange") or "")
        first, _, rest = told.removeprefix("bytes ").partition("-")
        last, _, total = rest.partition("/")
        if end is not None and total.isdigit() and int(total) < end:
            raise self._too_short(int(total))
        if not told:  # the whole object
            exact = start == 0 and end in (None, answer.get("ContentLength"))
        else:
            length = answer.get("ContentLength")
            exact = first == str(start) and last.isdigit() and int(last) + 1 - start == length and end in (None, int(last) + 1)
            exact = exact and (end is not None or total in ("*", str(int(last) + 1)))
        if not exact:
            raise StorageError(
                f"reading {self._name}: bytes {start} to {'the end' if end is None else end} were asked for, not the answered {told!r}",
                hint="the server does not do exact ranged reads: it can't hold a tier",
            )

    async def _beyond_the_end(self, error: StorageError) -> None:
        """The range begins at the end or past it: nothing is there, which is right only for a read to the end from the end."""
        head = await self._requests.send("looking at", self._key, "head_object", Key=self._key)
        whole = int(head["ContentLength"])
        if self._own and whole == self._offset:
            self._buffer = memoryview(b"")
            return
        raise self._too_short(whole) from error

    def _too_short(self, whole: int) -> IntegrityError:
        wanted = "bytes" if self._own or self._buffer is None else f"{self._buffer.nbytes} bytes"
        return IntegrityError(
            f"{self._name} has {whole} bytes, but {wanted} from {self._offset} were wanted",
            hint="the file was cut short, or its manifest is of another file: run `tierstore verify`",
            key=self._key,
        )


class _Refused(Exception):
    """The caller's proof failed: no error of a client's, so that nothing translates or repeats it."""
