"""A storage that packs shards: shows raw paths, lengths and bytes, and keeps packed files (`docs/design/format.md`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tierstore.storage.bandwidth import Bandwidth
from tierstore.storage.contract import Capabilities, FileInfo, Listing, PackedFacts, PackHints, Source, Storage, Unchanged

__all__ = ["PACKED_MARKER", "PackedStorage", "Packing", "QuantiseRule"]

PACKED_MARKER = ".packed"
"""The marker at a tier's root that says: packed files were written here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiseRule:
    """Which tensors of a shard are quantised, and how.

    Attributes:
        scheme: ``q8`` or ``q4`` (`format.quantise`).
        include: Patterns (`fnmatch`) of keys in the shard's header, of which one must match.
        exclude: Patterns of which none may match.
        min_numel: Smaller tensors stay as they are, in elements.
    """

    scheme: Literal["q8", "q4"]
    include: tuple[str, ...] = ("*exp_avg", "*exp_avg_sq", "*max_exp_avg_sq")
    exclude: tuple[str, ...] = ()
    min_numel: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How shards are packed.

    Attributes:
        codec: ``raw``: frames are stored without compression; ``zstd``.
        level: Of zstd; 0: few matches, fast.
        threads: How many threads encode and decode.
        nice: By how much those that encode are nicer than the process, 0 to 19.
        master_once: 16-bit tensors that are the rounding of a float32 tensor in the same shard are not stored.
        quantise: Which tensors are quantised; None: none.
    """

    codec: Literal["raw", "zstd"] = "zstd"
    level: int = 0
    threads: int = 2
    nice: int = 0
    master_once: bool = False
    quantise: QuantiseRule | None = None


class PackedStorage:
    """`inner` with packed shards in it.

    Args:
        inner: Where the bytes lie.
        packing: How shards are packed; None: they are written as they are, and packed ones are read.
    """

    def __init__(self, inner: Storage, packing: Packing | None) -> None:
        self.inner = inner
        self.packing = packing

    @property
    def uri(self) -> str:
        return self.inner.uri

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def local_path(self, path: str) -> Path | None:
        return self.inner.local_path(path)

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return await self.inner.read(path, offset, nbytes)

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        await self.inner.read_into(path, offset, buffer)

    async def read_proved(
        self, path: str, offset: int, buffer: memoryview, prove: Callable[[int, memoryview], None], *, unit: int = 1 << 20
    ) -> None:
        raise NotImplementedError

    async def write(self, path: str, source: Source) -> FileInfo:
        return await self.inner.write(path, source)

    async def write_on(self, path: str, source: Source) -> FileInfo:
        return await self.inner.write(path, source)

    async def write_packed(self, path: str, source: Source, hints: PackHints) -> FileInfo:
        return await self.inner.write(path, source)

    async def packed_facts(self, path: str) -> PackedFacts | None:
        return None

    async def origins(self, path: str, begin: int, end: int) -> Sequence[Unchanged]:
        return ()

    async def put(self, path: str, data: bytes) -> FileInfo:
        return await self.inner.put(path, data)

    async def create(self, path: str, data: bytes) -> None:
        await self.inner.create(path, data)

    async def stat(self, path: str) -> FileInfo:
        return await self.inner.stat(path)

    async def list(self, folder: str = "") -> list[FileInfo]:
        return await self.inner.list(folder)

    async def children(self, folder: str = "") -> Listing:
        return await self.inner.children(folder)

    async def delete(self, paths: Sequence[str]) -> None:
        await self.inner.delete(paths)

    async def free_nbytes(self) -> int | None:
        return await self.inner.free_nbytes()

    def pace_writes(self, limit: Bandwidth | None) -> None:
        """As `contract.PacesWrites`, where the inner storage does."""

    async def close(self) -> None:
        await self.inner.close()
