"""Small stores and synthetic saves, for tests of what happens between tiers (no torch, no configuration file)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tierstore.clock import Clock, SystemClock, utc_text
from tierstore.config_models import StoreConfig
from tierstore.format.objects import encode_objects
from tierstore.format.shard import ChunkSpec, plan_shard, tensor_entries
from tierstore.names import Attempt, new_save_id, shard_name
from tierstore.storage.contract import Capabilities, FileInfo, Listing, Source, Storage
from tierstore.storage.loop import EventLoop
from tierstore.storage.posix import PosixStorage
from tierstore.storage.sources import BytesSource
from tierstore.tiers.jobs import SaveJob
from tierstore.tiers.tier import Scope, Tier, Tiers

__all__ = ["HookedStorage", "LoopSession", "folder_tiers", "new_attempt", "save_job", "shard_bytes"]

T = TypeVar("T")

Hook = Callable[[str, str], Awaitable[None]]
"""Awaited before each operation with its name and path; raises to let it fail, waits to stall it."""


async def _pass(operation: str, path: str) -> None:
    """Lets everything through."""


@dataclass(slots=True)
class HookedStorage:
    """A storage with a hook before each operation, and a count of what was asked; `hook` may be changed at any time.

    `free` overrides what `free_nbytes` says, in bytes; `capabilities_override` what the storage claims to be.
    """

    inner: Storage
    hook: Hook = _pass
    free: int | None = None
    capabilities_override: Capabilities | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def uri(self) -> str:
        return self.inner.uri

    @property
    def capabilities(self) -> Capabilities:
        return self.capabilities_override or self.inner.capabilities

    async def _enter(self, operation: str, path: str) -> None:
        self.calls.append((operation, path))
        await self.hook(operation, path)

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        await self._enter("read", path)
        return await self.inner.read(path, offset, nbytes)

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        await self._enter("read_into", path)
        await self.inner.read_into(path, offset, buffer)

    async def write(self, path: str, source: Source) -> FileInfo:
        await self._enter("write", path)
        return await self.inner.write(path, source)

    async def put(self, path: str, data: bytes) -> FileInfo:
        await self._enter("put", path)
        return await self.inner.put(path, data)

    async def create(self, path: str, data: bytes) -> None:
        await self._enter("create", path)
        await self.inner.create(path, data)

    async def stat(self, path: str) -> FileInfo:
        await self._enter("stat", path)
        return await self.inner.stat(path)

    async def list(self, folder: str = "") -> list[FileInfo]:
        await self._enter("list", folder)
        return await self.inner.list(folder)

    async def children(self, folder: str = "") -> Listing:
        await self._enter("children", folder)
        return await self.inner.children(folder)

    async def delete(self, paths: Sequence[str]) -> None:
        await self._enter("delete", ",".join(paths))
        await self.inner.delete(paths)

    async def free_nbytes(self) -> int | None:
        return self.free if self.free is not None else await self.inner.free_nbytes()

    def local_path(self, path: str) -> Path | None:
        return self.inner.local_path(path)

    async def close(self) -> None:
        await self.inner.close()


def folder_tiers(root: Path, layout: Mapping[str, Scope], *, durable_at: str | None = None, durable: bool = False) -> Tiers:
    """A store whose tiers are folders of `root`, nearest first, each behind a `HookedStorage`.

    The authority is the first shared tier, else the first. No file is written: there is no descriptor to check.
    With `durable` files are forced to the disk, which only tests of power loss need.
    """
    tiers = tuple(
        Tier(name=name, storage=HookedStorage(PosixStorage(root / name, durable=durable, direct=False)), scope=scope)
        for name, scope in layout.items()
    )
    authority = next((t for t in tiers if t.scope == "shared"), tiers[0])
    named = next((t for t in tiers if t.name == durable_at), authority)
    return Tiers(tiers=tiers, authority=authority, durable_at=named, store_id="test-store")


def new_attempt(run: str, step: int, clock: Clock | None = None) -> Attempt:
    return Attempt(run=run, step=step, save_id=new_save_id((clock or SystemClock()).now()))


def shard_bytes(rank: int, world_size: int, *, seed: int, nbytes: int) -> tuple[bytes, Any]:
    """A shard with two float32 tensors, one split over the ranks and one of this rank's own: its bytes and its plan."""
    rows = max(1, nbytes // 4 // 64)
    specs = [
        ChunkSpec(name="split", dtype="float32", shape=(rows, 64), global_shape=(rows * world_size, 64), offsets=(rows * rank, 0)),
        ChunkSpec(name=f"own.{rank}", dtype="float32", shape=(7,), global_shape=(7,), offsets=(0,)),
    ]
    plan = plan_shard(specs)
    data = bytearray(random.Random(f"{seed}/{rank}").randbytes(plan.nbytes))
    data[: len(plan.header)] = plan.header
    return bytes(data), plan


def save_job(
    attempt: Attempt,
    *,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    nbytes: int = 300_000,
    release: Callable[[], None] = lambda: None,
    clock: Clock | None = None,
) -> SaveJob:
    """One rank's share of a synthetic save of about `nbytes` bytes, different for each seed."""
    data, plan = shard_bytes(rank, world_size, seed=seed, nbytes=nbytes)
    return SaveJob(
        attempt=attempt,
        rank=rank,
        world_size=world_size,
        shard=BytesSource(data),
        tensors=tensor_entries(plan, shard_name(rank, world_size)),
        objects=encode_objects({"seed": seed, "rank": rank}),
        facts={"created_at": utc_text((clock or SystemClock()).now()), "metrics": {"loss": float(seed)}, "tags": [], "final": False},
        nbytes=len(data),
        release=release,
    )


class LoopSession:
    """Tiers with an event loop of their own: what `tierstore.tiers.worker.Worker` needs of a session."""

    def __init__(self, tiers: Tiers, *, clock: Clock | None = None, config: StoreConfig | None = None) -> None:
        self.tiers = tiers
        self.clock: Clock = clock or SystemClock()
        self.config = config or StoreConfig.model_validate(
            {"tiers": [{"name": t.name, "uri": t.storage.uri, "scope": t.scope} for t in tiers.tiers]}
        )
        self.loop = EventLoop()

    def run(self, coro: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        return self.loop.run(coro, timeout)

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return self.loop.submit(coro)

    def close(self) -> None:
        self.loop.run(_close_all(self.tiers))
        self.loop.close()

    def __enter__(self) -> LoopSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _close_all(tiers: Tiers) -> None:
    await asyncio.gather(*(tier.storage.close() for tier in tiers))
