"""What the tests of the tiers share: tiers on folders, small real checkpoints, damage, and a storage that fails on demand."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

from tierstore.errors import TierStoreError
from tierstore.format.index import TensorEntry
from tierstore.format.objects import encode_objects
from tierstore.format.shard import ChunkSpec, plan_shard, tensor_entries
from tierstore.names import INDEX, MANIFEST, OBJECTS, Attempt, new_save_id, part_name, shard_name
from tierstore.storage.contract import Storage
from tierstore.storage.posix import PosixStorage
from tierstore.storage.sources import BytesSource
from tierstore.testing.around import AroundStorage, Call
from tierstore.tiers.commit import commit
from tierstore.tiers.direct import Refers
from tierstore.tiers.persist import persist
from tierstore.tiers.tier import Tier, Tiers

T = TypeVar("T")
BLOCK = 4096


class SteppedClock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.wall = datetime(2026, 11, 29, 12, 0, tzinfo=timezone.utc)
        self.seconds = 0.0

    def now(self) -> datetime:
        return self.wall

    def monotonic(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.wall += timedelta(seconds=seconds)
        self.seconds += seconds


class LeapingClock(SteppedClock):
    """Time runs ten seconds further at each look: deadlines pass without anybody waiting."""

    def monotonic(self) -> float:
        self.advance(10.0)
        return self.seconds


def run(coro: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coro)


def tiers_in(
    folder: Path, names: Sequence[str] = ("node", "shared", "far"), *, wrap: dict[str, Callable[[Storage], Storage]] | None = None
) -> Tiers:
    """The first tier is the node's where there are several, the next one is the authority."""
    made = []
    for number, name in enumerate(names):
        storage: Storage = PosixStorage(folder / name, durable=False)
        if wrap and name in wrap:
            storage = wrap[name](storage)
        made.append(Tier(name=name, storage=storage, scope="node" if number == 0 and len(names) > 1 else "shared"))
    authority = made[min(1, len(made) - 1)]
    return Tiers(tiers=tuple(made), authority=authority, durable_at=authority, store_id="kit")


def attempt_at(step: int, run_name: str = "run", *, at: datetime | None = None) -> Attempt:
    return Attempt(
        run=run_name, step=step, save_id=new_save_id(at or datetime(2026, 11, 29, tzinfo=timezone.utc) + timedelta(seconds=step))
    )


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's shard: bytes in a row-split tensor ``w`` that all ranks share, and a tensor of its own."""

    data: bytes
    tensors: Sequence[TensorEntry]


def shard_of(rank: int, world_size: int, *, seed: int = 0, rows: int = 6, columns: int = 5000) -> Shard:
    """``w`` has `rows` rows for each rank, of `columns` bytes; every shard also has ``own.<rank>``, 77 float32."""
    specs = [
        ChunkSpec(name="w", dtype="uint8", shape=(rows, columns), global_shape=(rows * world_size, columns), offsets=(rows * rank, 0)),
        ChunkSpec(name=f"own.{rank}", dtype="float32", shape=(77,), global_shape=(77,), offsets=(0,)),
    ]
    plan = plan_shard(specs)
    data = bytearray(plan.nbytes)
    data[: len(plan.header)] = plan.header
    for placed in plan.placements:
        period = bytes((i * 31 + rank * 7 + seed + placed.begin) % 251 for i in range(251))
        nbytes = placed.end - placed.begin
        data[placed.begin : placed.end] = (period * (nbytes // 251 + 1))[:nbytes]
    return Shard(data=bytes(data), tensors=tensor_entries(plan, shard_name(rank, world_size)))


async def persist_rank(
    tiers: Tiers,
    attempt: Attempt,
    tier: Tier,
    *,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    shard: Shard | None = None,
    refer: Refers | None = None,
    **facts: Any,
) -> None:
    shard = shard or shard_of(rank, world_size, seed=seed)
    await persist(
        tier,
        attempt,
        rank=rank,
        world_size=world_size,
        shard=BytesSource(shard.data),
        tensors=shard.tensors,
        objects=encode_objects({"rank": rank, "seed": seed, "step": attempt.step}),
        facts={"created_at": "2026-11-29T00:00:00.000000Z", "metrics": {}, "tags": [], "final": False, **facts},
        clock=SteppedClock(),
        authority=tiers.is_authority(tier),
        block_nbytes=BLOCK,
        reserve_nbytes=0,
        refer=refer,
    )


async def save(tiers: Tiers, step: int, *, world_size: int = 1, seed: int = 0, attempt: Attempt | None = None, **facts: Any) -> Attempt:
    """Saves through the authority: persist all ranks, commit."""
    attempt = attempt or attempt_at(step)
    for rank in range(world_size):
        await persist_rank(tiers, attempt, tiers.authority, rank=rank, world_size=world_size, seed=seed, **facts)
    await commit(tiers, attempt, deadline_s=0, clock=SteppedClock())
    return attempt


async def copy_to(tiers: Tiers, attempt: Attempt, name: str, *, record: bool = True) -> None:
    """A plain copy of a committed checkpoint's files, and then of its log, to another tier."""
    source, target = tiers.authority.storage, tiers.get(name).storage
    for info in await source.list(attempt.folder):
        await target.put(info.path, await source.read(info.path))
    if record:
        for info in await source.list(attempt.log_folder):
            await target.put(info.path, await source.read(info.path))


def files_of(world_size: int = 1) -> list[str]:
    """Every file that a load of a checkpoint may touch."""
    return [MANIFEST, INDEX, OBJECTS, *(shard_name(r, world_size) for r in range(world_size))]


def path_of(tiers: Tiers, name: str, attempt: Attempt, file: str) -> Path:
    local = tiers.get(name).storage.local_path(attempt.path(file))
    assert local is not None
    return local


def flip(path: Path, at: int | None = None) -> None:
    """Flips one bit in the middle of a file, or at `at`."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def part_path(tiers: Tiers, name: str, attempt: Attempt, rank: int) -> Path:
    return path_of(tiers, name, attempt, part_name(rank))


class Hooked(AroundStorage):
    """A storage that asks `hook(operation, path)` before every operation; the hook may raise, or wait."""

    def __init__(self, inner: Storage, hook: Callable[[str, str], Awaitable[None]]) -> None:
        super().__init__(inner)
        self.hook = hook
        self.calls: list[tuple[str, str]] = []

    async def _ask(self, operation: str, path: str) -> None:
        self.calls.append((operation, path))
        await self.hook(operation, path)

    async def around(self, operation: str, path: str, call: Call[T]) -> T:
        await self._ask(operation, path)
        return await call()


class Gate:
    """A hook that holds back some operations until it is opened, or lets them fail."""

    def __init__(self, *operations: str, error: Callable[[], TierStoreError] | None = None, matching: str = "") -> None:
        self.operations = operations
        self.matching = matching
        self.error = error
        self.open = threading.Event()
        self.reached = threading.Event()
        self.before: Gate | None = None
        """The gate whose place it took: operations may still wait at that one."""

    def let_through(self) -> None:
        self.open.set()
        if self.before is not None:
            self.before.let_through()

    async def __call__(self, operation: str, path: str) -> None:
        if operation not in self.operations or self.matching not in path or self.open.is_set():
            return
        opened = self.open  # a test may put another one in its place for those that come later
        self.reached.set()
        if self.error is None:
            await was_set(opened)
        if self.error is not None:  # perhaps only since it waits
            raise self.error()


async def was_set(event: threading.Event) -> None:
    """Returns when the test has set it. No thread waits: a loop has four, and with all of them here nothing else would get on.

    A test that failed before it got there says so: the store that it closes does not wait for ever.
    """
    end = time.monotonic() + 240
    while not event.is_set():
        assert time.monotonic() < end, "the test never let this go on"
        await asyncio.sleep(0.005)


def failing(error: TierStoreError, *operations: str) -> Callable[[Storage], Storage]:
    """A wrapper for `tiers_in`: the named operations (none: all) always fail with `error`."""

    async def hook(operation: str, path: str) -> None:
        if not operations or operation in operations:
            raise error

    return lambda storage: Hooked(storage, hook)
