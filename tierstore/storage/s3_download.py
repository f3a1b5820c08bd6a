"""Ranged reads from S3, exact or an error; a broken transfer goes on where it stopped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tierstore.errors import IntegrityError, StorageError, TemporaryError
from tierstore.storage.s3_client import S3Requests
from tierstore.storage.s3_direct import DirectReads
from tierstore.storage.s3_landing import Landing, Memory
from tierstore.storage.tasks import in_thread_to_the_end

__all__ = ["Download", "download", "read_to_the_end"]


async def download(requests: S3Requests, key: str, offset: int, landing: Landing, *, direct: DirectReads | None = None) -> None:
    """Reads the range that begins at `offset` and is as long as `landing`, which is not empty; raises as `Download.run`."""
    await Download(requests, key, offset, landing, direct=direct).run()


async def read_to_the_end(requests: S3Requests, key: str, offset: int) -> memoryview:
    """An object from `offset` to its end; raises as `Download.run`."""
    read = Download(requests, key, offset, None)
    await read.run()
    assert isinstance(read.landing, Memory)
    return read.landing.buffer


class Download:
    """One range of one object.

    Args:
        requests: The bucket's requests.
        key: The object's key.
        offset: Where the range begins, in bytes.
        landing: Where its bytes go; as long as it, and not empty. None: to the end of the object, into memory of its own.
        direct: Reads large ranges beside the client; None: nothing is.
    """

    def __init__(self, requests: S3Requests, key: str, offset: int, landing: Landing | None, *, direct: DirectReads | None = None) -> None:
        self.landing = landing
        self._requests = requests
        self._key = key
        self._offset = offset
        self._own = landing is None
        self._filled = 0
        self._etag = ""
        self._direct = direct
        self._refusal: Exception | None = None

    @property
    def _name(self) -> str:
        return self._requests.place.of(self._key)

    async def run(self) -> None:
        """Reads.

        Raises:
            NotFoundError: There is no such object.
            IntegrityError: The object ends before the range does.
            StorageError: The server does not answer exactly what was asked.
            Exception: Of `landing`.
        """
        try:
            await self._requests.retrying(self._attempt, self._requests.patience.attempts)
        except _Refused:
            assert self._refusal is not None
            raise self._refusal from None

    # For who reads: `RangeRead`, and below

    @property
    def nbytes(self) -> int:
        assert self.landing is not None
        return self.landing.nbytes

    def room(self, filled: int) -> memoryview:
        assert self.landing is not None
        try:
            return self.landing.room(filled)
        except Exception as error:
            raise self._refused(error) from error

    def landed(self, filled: int) -> None:
        assert self.landing is not None
        try:
            self.landing.landed(filled)
        except Exception as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> _Refused:
        """The caller's own error: it passes as it is, and is no failure of the transfer."""
        self._refusal = error
        return _Refused()

    # Inside

    async def _attempt(self) -> None:
        # An attempt that was given up had its thread go on with what was there: that may have been refused, and may have been the rest.
        if self._refusal is not None:
            raise _Refused
        if self.landing is not None and 0 < self.nbytes == self._filled:
            return
        stall_s = self._requests.patience.stall_timeout_s
        client = self._requests.client()
        async with client.transfers:
            if self._direct is not None and self.landing is not None and await self._directly(self._direct):
                return
            start = self._offset + self._filled
            end = None if self.landing is None else self._offset + self.nbytes
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
                if self.landing is None:
                    self.landing = Memory(memoryview(bytearray(int(answer["ContentLength"]))))
                await self._requests.watched("reading", self._key, self._drain(body), stall_s, lambda: self._filled)
            finally:
                if self.landing is None or self._filled < self.nbytes:
                    body.close()  # the rest of the answer is not wanted: the connection can't be used again

    async def _directly(self, direct: DirectReads) -> bool:
        """Reads what is still missing beside the client; False where that has to do it."""
        begun = self._filled
        start, end = self._offset + begun, self._offset + self.nbytes

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

        read = await direct.read(self._key, self._offset, self, begun, check=check)
        if read is None:
            return False
        stall_s = self._requests.patience.stall_timeout_s
        try:
            return await self._requests.watched("reading", self._key, direct.run(self._key, read), stall_s, lambda: read.filled)
        finally:
            if self._filled == begun:  # it did not begin anew
                self._filled = read.filled

    async def _drain(self, body: Any) -> None:
        assert self.landing is not None
        while self._filled < self.nbytes:
            room = self.room(self._filled)
            got = 0
            while got < room.nbytes:
                piece = await body.read(room.nbytes - got)
                if not piece:
                    raise TemporaryError(f"reading {self._name}: the connection ended early", hint="it is tried again")
                room[got : got + len(piece)] = piece
                got += len(piece)
                self._filled += len(piece)
            if self.landing.due(self._filled):
                await in_thread_to_the_end(partial(self.landed, self._filled))
        if not self.nbytes:
            await body.read()  # an empty body is read too, so that its connection can be used again

    def _check(self, answer: dict[str, Any], start: int, end: int | None) -> None:
        """Checks that the answer holds exactly ``[start, end)`` of the object that the transfer began with.

        Servers shorten a range past the end; some ignore ranges.
        """
        etag = str(answer.get("ETag") or "")
        if self._filled and etag != self._etag:
            if self.landing is not None and self.landing.delivered:
                raise IntegrityError(f"{self._name} was replaced while it was read", hint="read it again", key=self._key)
            self._filled, self.landing = 0, None if self._own else self.landing
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
            wanted = f"bytes {start} to {'the end' if end is None else end} were asked for"
            raise StorageError(
                f"reading {self._name}: {wanted}, not the answered {told!r} in {answer.get('ContentLength')} bytes",
                hint="the server does not do exact ranged reads: it can't hold a tier",
            )

    async def _beyond_the_end(self, error: StorageError) -> None:
        """The range begins at the end or past it: nothing is there, which is right only for a read to the end from the end."""
        head = await self._requests.send("looking at", self._key, "head_object", Key=self._key)
        whole = int(head["ContentLength"])
        if self._own and whole == self._offset:
            self.landing = Memory(memoryview(b""))
            return
        raise self._too_short(whole) from error

    def _too_short(self, whole: int) -> IntegrityError:
        wanted = "bytes" if self._own or self.landing is None else f"{self.nbytes} bytes"
        return IntegrityError(
            f"{self._name} has {whole} bytes, but {wanted} from {self._offset} were wanted",
            hint="the file was cut short, or its manifest is of another file: run `tierstore verify`",
            key=self._key,
        )


class _Refused(Exception):
    """The caller's proof failed: no error of a client's, so that nothing translates or repeats it."""
