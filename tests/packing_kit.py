"""Shards to pack, and a storage under whose every name a shard lies, so that the suite of all storages tests packed files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tierstore.format.packed.rounding import round_into
from tierstore.format.shard import ChunkSpec, plan_shard
from tierstore.names import check_relative
from tierstore.storage.contract import FileInfo, Listing, Source, Storage
from tierstore.storage.packed import PACKED_MARKER
from tierstore.testing.around import AroundStorage

T = TypeVar("T")
MIB = 1 << 20
SHARD = "run/step/shard-00000-of-00001.safetensors"
_LEAF = "/shard-00000-of-00001.safetensors"


def run(body: Callable[[], Awaitable[T]]) -> T:
    async def main() -> T:
        return await body()

    return asyncio.run(main())


def shard_of_tensors(tensors: Mapping[str, np.ndarray[Any, Any]], dtypes: Mapping[str, str] | None = None) -> bytes:
    """A shard as tierstore lays it out; `dtypes` names those that numpy has not (bfloat16, given as uint16)."""
    specs = [
        ChunkSpec(
            name=name,
            dtype=(dtypes or {}).get(name, str(value.dtype)),
            shape=value.shape,
            global_shape=value.shape,
            offsets=(0,) * value.ndim,
        )
        for name, value in tensors.items()
    ]
    plan = plan_shard(specs)
    data = bytearray(plan.nbytes)
    data[: len(plan.header)] = plan.header
    for placed in plan.placements:
        data[placed.begin : placed.end] = np.ascontiguousarray(tensors[placed.spec.name]).tobytes()
    return bytes(data)


def rounded(values: np.ndarray[Any, Any], kind: Any = "bfloat16") -> np.ndarray[Any, Any]:
    """float32 numbers rounded to 16 bits, as uint16."""
    out = bytearray(values.size * 2)
    round_into(np.ascontiguousarray(values).data.cast("B"), memoryview(out), kind)
    words: np.ndarray[Any, Any] = np.frombuffer(out, dtype=np.uint16).reshape(values.shape)
    return words


def training_shard(*, layers: int = 2, rows: int = 300, columns: int = 700, seed: int = 0, kind: str = "bfloat16") -> bytes:
    """Weights, their masters, both moments, and something small, of each layer."""
    chance = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    dtypes: dict[str, str] = {}
    for layer in range(layers):
        master = (chance.standard_normal((rows, columns)) * 0.02).astype(np.float32)
        second = (chance.standard_normal((rows, columns)) ** 2 * 1e-6).astype(np.float32)
        second[0, :] = 0
        first = (chance.standard_normal((rows, columns)) * np.sqrt(second) * 0.3).astype(np.float32)
        tensors |= {
            f"model.{layer}.weight": rounded(master, kind),
            f"optimizer.{layer}.exp_avg": first,
            f"optimizer.{layer}.exp_avg_sq": second,
            f"optimizer.{layer}.master": master,
            f"model.{layer}.bias": chance.standard_normal(77).astype(np.float32),
        }
        dtypes[f"model.{layer}.weight"] = kind
    return shard_of_tensors(tensors, dtypes)


class ShardNames(AroundStorage):
    """A storage in which ``a/b`` is a shard in the folder ``a/b`` of `inner`, a `PackedStorage`."""

    def local_path(self, path: str) -> Path | None:
        return self.inner.local_path(_shard(path))

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return await self.inner.read(_shard(path), offset, nbytes)

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        await self.inner.read_into(_shard(path), offset, buffer)

    async def write(self, path: str, source: Source) -> FileInfo:
        return _plain(await self.inner.write(_shard(path), source))

    async def put(self, path: str, data: bytes) -> FileInfo:
        return _plain(await self.inner.put(_shard(path), data))

    async def create(self, path: str, data: bytes) -> None:
        await self.inner.create(_shard(path), data)

    async def stat(self, path: str) -> FileInfo:
        return _plain(await self.inner.stat(_shard(path)))

    async def list(self, folder: str = "") -> list[FileInfo]:
        return [_plain(info) for info in await self.inner.list(folder) if info.path.endswith(_LEAF) and info.path != f"{folder}{_LEAF}"]

    async def children(self, folder: str = "") -> Listing:
        if folder:
            check_relative(folder)
        files, folders = [], dict[str, None]()
        for info in await self.list(folder):
            name, slash, _ = info.path[len(folder) + 1 if folder else 0 :].partition("/")
            if slash:
                folders[name] = None
            else:
                files.append(info)
        return Listing(files=tuple(files), folders=tuple(folders))

    async def delete(self, paths: Sequence[str]) -> None:
        await self.inner.delete([_shard(path) for path in paths])


def _shard(path: str) -> str:
    return check_relative(path) + _LEAF


def _plain(info: FileInfo) -> FileInfo:
    return replace(info, path=info.path.removesuffix(_LEAF))


async def stored(inner: Storage, folder: str = "") -> list[str]:
    """What lies in the inner storage, without the marker."""
    return sorted(info.path for info in await inner.list(folder) if info.path != PACKED_MARKER)
