"""A storage that does something around each operation of another one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tierstore.storage.contract import Capabilities, FileInfo, Listing, Source, Storage

__all__ = ["AroundStorage", "Call"]

T = TypeVar("T")
Call = Callable[[], Coroutine[Any, Any, T]]
"""Does the operation."""


class AroundStorage:
    """A storage that is `inner`; a class made of it says in `around` what else happens."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner

    async def around(self, operation: str, path: str, call: Call[T]) -> T:
        """Does an operation by ``await call()``.

        Args:
            operation: The method's name.
            path: Of the file or folder; of several files all, joined by commas; empty where there is none.
            call: The operation of `inner`.
        """
        return await call()

    @property
    def uri(self) -> str:
        return self.inner.uri

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def local_path(self, path: str) -> Path | None:
        return self.inner.local_path(path)

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return await self.around("read", path, lambda: self.inner.read(path, offset, nbytes))

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        await self.around("read_into", path, lambda: self.inner.read_into(path, offset, buffer))

    async def write(self, path: str, source: Source) -> FileInfo:
        return await self.around("write", path, lambda: self.inner.write(path, source))

    async def put(self, path: str, data: bytes) -> FileInfo:
        return await self.around("put", path, lambda: self.inner.put(path, data))

    async def create(self, path: str, data: bytes) -> None:
        await self.around("create", path, lambda: self.inner.create(path, data))

    async def stat(self, path: str) -> FileInfo:
        return await self.around("stat", path, lambda: self.inner.stat(path))

    async def children(self, folder: str = "") -> Listing:
        return await self.around("children", folder, lambda: self.inner.children(folder))

    async def delete(self, paths: Sequence[str]) -> None:
        await self.around("delete", ",".join(paths), lambda: self.inner.delete(paths))

    async def free_nbytes(self) -> int | None:
        return await self.around("free_nbytes", "", self.inner.free_nbytes)

    async def close(self) -> None:
        await self.inner.close()

    async def list(self, folder: str = "") -> list[FileInfo]:
        return await self.around("list", folder, lambda: self.inner.list(folder))
