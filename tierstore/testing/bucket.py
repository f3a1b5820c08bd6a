"""A bucket in memory that counts requests as an object store bills them, for what measures or tests how costs grow."""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import ConflictError, IntegrityError, NotFoundError
from tierstore.names import TMP
from tierstore.storage.contract import Capabilities, FileInfo, Growing, Listing, Source
from tierstore.tiers.tier import Tier, Tiers

__all__ = ["PAGE", "Bucket", "bucket_tiers", "requests"]

PAGE = 1000
"""Names on one page of a listing, as S3 has it."""


class Bucket:
    """A `Storage`. `requests`: by kind; a listing counts one for each page, and one where it is empty."""

    def __init__(self, name: str = "bucket") -> None:
        self.uri = f"memory://{name}"
        self.capabilities = Capabilities(create=True, checksums=False, part_nbytes=8 << 20, local=False)
        self.requests: Counter[str] = Counter()
        self._files: dict[str, bytes] = {}
        self._names: list[str] = []
        self._etags: dict[str, str] = {}

    @property
    def total(self) -> int:
        return sum(self.requests.values())

    def pages(self, folder: str) -> int:
        """How many requests a listing of everything below `folder` takes."""
        return max(1, -(-len(self._below(folder)) // PAGE))

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        await self._ask("read")
        return self._part(path, offset, nbytes)

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        await self._ask("read")
        buffer[:] = self._part(path, offset, buffer.nbytes)

    async def write(self, path: str, source: Source) -> FileInfo:
        data, part_nbytes = bytearray(), self.capabilities.part_nbytes
        grows = isinstance(source, Growing)
        while grows or len(data) < source.nbytes:
            part = await source.read(len(data), part_nbytes if grows else min(part_nbytes, source.nbytes - len(data)))
            data += part
            if part.nbytes < part_nbytes:
                break
        length = source.length if isinstance(source, Growing) else source.nbytes
        if len(data) != length:
            raise IntegrityError(f"{path}: its source gave {len(data)} bytes of {length}", hint="")
        return await self.put(path, bytes(data))

    async def put(self, path: str, data: bytes) -> FileInfo:
        await self._ask("write")
        return self._set(path, data)

    async def create(self, path: str, data: bytes) -> None:
        await self._ask("write")
        if self._files.get(path, data) != data:
            raise ConflictError(f"{path} exists", hint="", existing=self._files[path])
        self._set(path, data)

    async def stat(self, path: str) -> FileInfo:
        await self._ask("stat")
        self._get(path)
        return self._info(path)

    async def list(self, folder: str = "") -> list[FileInfo]:
        await self._ask("list", self.pages(folder))
        return [self._info(path) for path in self._below(folder) if f"/{TMP}/" not in f"/{path}"]

    async def children(self, folder: str = "") -> Listing:
        begin = len(folder) + 1 if folder else 0
        files, folders = [], dict[str, None]()
        for path in self._below(folder):
            name, slash, _ = path[begin:].partition("/")
            if slash:
                folders[name] = None
            else:
                files.append(self._info(path))
        await self._ask("list", max(1, -(-(len(files) + len(folders)) // PAGE)))
        return Listing(files=tuple(files), folders=tuple(folders))

    async def delete(self, paths: Sequence[str]) -> None:
        await self._ask("delete", -(-len(paths) // PAGE))
        for path in paths:
            if self._files.pop(path, None) is not None:
                self._names.pop(bisect_left(self._names, path))

    async def free_nbytes(self) -> int | None:
        return None

    def local_path(self, path: str) -> Path | None:
        return None

    async def close(self) -> None:
        return None

    async def _ask(self, kind: str, count: int = 1) -> None:
        self.requests[kind] += count
        await asyncio.sleep(0)  # who waits for another task here would wait for ever

    def _get(self, path: str) -> bytes:
        if path not in self._files:
            raise NotFoundError(f"{self.uri} has no {path}", hint="")
        return self._files[path]

    def _part(self, path: str, offset: int, nbytes: int | None) -> bytes:
        data = self._get(path)[offset:] if nbytes is None else self._get(path)[offset : offset + nbytes]
        if nbytes is not None and len(data) != nbytes:
            raise IntegrityError(f"{path} is shorter than asked", hint="")
        return data

    def _set(self, path: str, data: bytes) -> FileInfo:
        if path not in self._files:
            insort(self._names, path)
        self._files[path] = bytes(data)
        self._etags[path] = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return self._info(path)

    def _info(self, path: str) -> FileInfo:
        return FileInfo(path=path, nbytes=len(self._files[path]), etag=self._etags[path])

    def _below(self, folder: str) -> Sequence[str]:
        if not folder:
            return self._names
        return self._names[bisect_left(self._names, f"{folder}/") : bisect_left(self._names, f"{folder}0")]  # '0' follows '/'


def bucket_tiers(*names: str) -> Tiers:
    """A store of buckets; the first is the authority."""
    made = tuple(Tier(name=name, storage=Bucket(name), scope="shared") for name in names)
    return Tiers(tiers=made, authority=made[0], durable_at=made[0], store_id="scale")


def requests(tiers: Tiers) -> Counter[str]:
    """What was asked of all tiers together since the last call."""
    found: Counter[str] = Counter()
    for tier in tiers:
        assert isinstance(tier.storage, Bucket)
        found += tier.storage.requests
        tier.storage.requests.clear()
    return found
