"""An S3 server in this process's memory, in the place of s3fs's client: exact counts, no sockets, pages as short as a test wants."""

from __future__ import annotations

import asyncio
import hashlib
from base64 import b64encode
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

import pytest
from botocore.exceptions import ClientError

from tierstore.storage.s3 import S3Storage
from tierstore.storage.s3_client import Body, Client

MIB = 1 << 20
T = TypeVar("T")


def refusal_of(code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "?"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Faked")


@dataclass
class FakeUpload:
    key: str
    metadata: dict[str, str]
    algorithm: str
    initiated: datetime
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)


class FakeS3:
    """What a bucket does, without checking signatures. All bodies in flight are counted; a request yields to the loop `turns` times."""

    def __init__(self, *, page: int = 1000, most_in_flight: int = 10**9, turns: int = 3, tells_part_checksums: bool = False) -> None:
        self.page = page
        self.most_in_flight = most_in_flight
        self.turns = turns
        self.tells_part_checksums = tells_part_checksums
        self.objects: dict[str, dict[str, Any]] = {}
        self.uploads: dict[str, FakeUpload] = {}
        self.counts: Counter[str] = Counter()
        self.signed: Counter[bool] = Counter()
        self.sent_nbytes = 0
        self.in_flight = 0
        self.peak = 0
        self.failures: list[tuple[str, Exception]] = []
        """``(method, error)``: the next request of that method fails so."""
        self.at = datetime(2026, 11, 30, tzinfo=timezone.utc)

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self.counts[method] += 1
        body = arguments.get("Body")
        self.in_flight += body is not None
        self.peak = max(self.peak, self.in_flight)
        try:
            for _ in range(self.turns):
                await asyncio.sleep(0)
            if body is not None:
                assert isinstance(body, Body)
                self.sent_nbytes += len(body)
                self.signed[body.signed] += 1
                if self.in_flight > self.most_in_flight:
                    raise refusal_of("SlowDown", 503)
            for number, (failing, error) in enumerate(self.failures):
                if failing == method:
                    del self.failures[number]
                    raise error
            answer: dict[str, Any] = getattr(self, method)(**arguments)
            when = self.at.strftime("%a, %d %b %Y %H:%M:%S GMT")
            return {**answer, "ResponseMetadata": {"HTTPHeaders": {"date": when}, "HTTPStatusCode": 200}}
        finally:
            self.in_flight -= body is not None

    def put_object(self, Key: str, Body: Body, **more: Any) -> dict[str, Any]:
        data = bytes(Body.read())
        told = {name: value for name, value in more.items() if name.startswith("Checksum")}
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        self.objects[Key] = {"data": data, "ETag": etag, "ContentLength": len(data), "Metadata": more.get("Metadata", {}), **told}
        return {"ETag": etag, **told}

    def create_multipart_upload(self, Key: str, Metadata: dict[str, str], ChecksumAlgorithm: str = "", **_: Any) -> dict[str, Any]:
        upload_id = f"upload-{len(self.uploads)}-{self.counts['create_multipart_upload']}"
        self.uploads[upload_id] = FakeUpload(Key, Metadata, ChecksumAlgorithm, self.at)
        return {"UploadId": upload_id, **({"ChecksumAlgorithm": ChecksumAlgorithm} if ChecksumAlgorithm else {})}

    def _upload(self, upload_id: str) -> FakeUpload:
        if upload_id not in self.uploads:
            raise refusal_of("NoSuchUpload", 404)
        return self.uploads[upload_id]

    def upload_part(self, UploadId: str, PartNumber: int, Body: Body, **more: Any) -> dict[str, Any]:
        data = bytes(Body.read())
        told = {name: value for name, value in more.items() if name.startswith("Checksum")}
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        self._upload(UploadId).parts[PartNumber] = {"data": data, "ETag": etag, "at": self.at, "told": told}
        return {"ETag": etag, **told}

    def list_multipart_uploads(self, Prefix: str, KeyMarker: str = "", UploadIdMarker: str = "", **_: Any) -> dict[str, Any]:
        all_of_them = sorted((u.key, upload_id) for upload_id, u in self.uploads.items() if u.key.startswith(Prefix))
        left = [one for one in all_of_them if one > (KeyMarker, UploadIdMarker)]
        listed = [{"Key": key, "UploadId": i, "Initiated": self.uploads[i].initiated} for key, i in left[: self.page]]
        more = {"NextKeyMarker": listed[-1]["Key"], "NextUploadIdMarker": listed[-1]["UploadId"]} if listed else {}
        return {"Uploads": listed, "IsTruncated": len(left) > self.page, **more}

    def list_parts(self, UploadId: str, PartNumberMarker: int = 0, **_: Any) -> dict[str, Any]:
        parts = sorted((n, p) for n, p in self._upload(UploadId).parts.items() if n > PartNumberMarker)
        listed = [
            {
                "PartNumber": number,
                "ETag": part["ETag"],
                "Size": len(part["data"]),
                "LastModified": part["at"],
                **(part["told"] if self.tells_part_checksums else {}),
            }
            for number, part in parts[: self.page]
        ]
        more = {"NextPartNumberMarker": listed[-1]["PartNumber"]} if listed else {}
        return {"Parts": listed, "IsTruncated": len(parts) > self.page, **more}

    def complete_multipart_upload(self, Key: str, UploadId: str, MultipartUpload: dict[str, Any], **_: Any) -> dict[str, Any]:
        from tierstore.storage.s3_checksums import computable

        upload = self._upload(UploadId)
        held = [upload.parts.get(line["PartNumber"]) for line in MultipartUpload["Parts"]]
        if any(part is None or part["ETag"] != line["ETag"] for part, line in zip(held, MultipartUpload["Parts"], strict=True)):
            raise refusal_of("InvalidPart", 400)
        data = b"".join(part["data"] for part in held if part)
        algorithm = computable(upload.algorithm)
        told: dict[str, Any] = {}
        if algorithm is not None:
            digests = [algorithm.of(memoryview(part["data"])) for part in held if part]
            told = {algorithm.argument: algorithm.composite(digests), "ChecksumType": "COMPOSITE"}
        etag = f'"{hashlib.md5(data).hexdigest()}-{len(held)}"'
        self.objects[Key] = {"data": data, "ETag": etag, "ContentLength": len(data), "Metadata": upload.metadata, **told}
        del self.uploads[UploadId]
        return {"ETag": etag}

    def abort_multipart_upload(self, UploadId: str, **_: Any) -> dict[str, Any]:
        self._upload(UploadId)
        del self.uploads[UploadId]
        return {}

    def head_object(self, Key: str, **_: Any) -> dict[str, Any]:
        if Key not in self.objects:
            raise refusal_of("404", 404)
        return {name: value for name, value in self.objects[Key].items() if name != "data"}

    def head_bucket(self, **_: Any) -> dict[str, Any]:
        return {}

    def pass_time(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


def fake_storage(monkeypatch: pytest.MonkeyPatch, server: FakeS3, *, part_nbytes: int = 64 * 1024, **settings: Any) -> S3Storage:
    """A storage whose requests go to `server`, with parts as small as a test wants."""

    async def call(self: Client, method: str, **arguments: Any) -> dict[str, Any]:
        return await server.call(method, **{name: value for name, value in arguments.items() if name != "Bucket"})

    monkeypatch.setattr(Client, "call", call)
    monkeypatch.setattr("tierstore.storage.s3.part_nbytes_for", lambda nbytes, at_least: at_least)
    storage = S3Storage("s3://bucket/tier", {"key": "k", "secret": "s", "region_name": "us-east-1"}, **settings)
    storage._part_nbytes = part_nbytes
    return storage


def crc32_base64(data: bytes) -> str:
    import zlib

    return b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def use(uri: str, options: dict[str, Any], body: Callable[[S3Storage], Awaitable[T]], **settings: Any) -> T:
    """Runs `body` with a storage of its own, which is closed afterwards."""

    async def main() -> T:
        storage = S3Storage(uri, options, **{"attempts": 3, **settings})
        try:
            return await body(storage)
        finally:
            await storage.close()

    return asyncio.run(main())
