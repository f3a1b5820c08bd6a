"""Deletion itself: in order, bounded, out of the way of saves, and at no instant half a checkpoint, also where the authority is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from gc_kit import World, policy_of, run
from tiers_kit import Hooked, SteppedClock, tiers_in

from tierstore.errors import AccessError, TierStoreError
from tierstore.names import INDEX, MANIFEST, OBJECTS, Attempt, part_name, shard_name
from tierstore.storage.contract import FileInfo
from tierstore.testing.around import AroundStorage, Call
from tierstore.tiers.catalog import RecordCache, scan
from tierstore.tiers.gc.deleting import Emptying, Found, Remover, find, grammatical
from tierstore.tiers.gc.evict import evict
from tierstore.tiers.gc.sweep import read_gone
from tierstore.tiers.replica import open_replica

T = TypeVar("T")
RESERVED = ["step-x", "tierstore.json", "shard-00000-of-1.safetensors", "part-1.safetensors", "manifest.json.bak", "a/manifest.json", ""]


def test_the_grammar_knows_its_own_and_nothing_else() -> None:
    for name in (MANIFEST, INDEX, OBJECTS, part_name(7), shard_name(3, 123456)):
        assert grammatical(name)
    for name in RESERVED:
        assert not grammatical(name)


def test_each_step_is_done_before_the_next_and_metadata_is_out_of_sight_first(tmp_path: Path) -> None:
    async def work() -> None:
        calls: list[list[str]] = []

        async def hook(operation: str, path: str) -> None:
            if operation == "delete":
                calls.append([name.rpartition("/")[2] for name in path.split(",")])

        world = World(tmp_path, wrap={name: lambda storage: Hooked(storage, hook) for name in ("node", "far")})
        old, _ = await world.save(1, 2, near=True)
        await world.expire()
        for name in ("far", "node"):
            calls.clear()
            job = Emptying(attempt=old, tier=world.tiers.get(name), kind="sweep", why="test")
            found = await find(world.h(), job)
            assert await Remover(world.h(), 2).remove([found]) == [None]
            assert calls[0] == ["000000.json"]
            assert calls[1][0] == MANIFEST
            assert sorted(calls[2]) == [INDEX, OBJECTS, shard_name(0, 1)]
            assert calls[3] == [part_name(0)]
            assert all(leaf.startswith("0000") for call in calls[4:] for leaf in call)
            assert ("receipt-00000.json" in calls[1]) == (name == "node")
            assert world.files(name, old) == []

    run(work())


async def offered(world: World, names: tuple[str, ...]) -> list[Attempt]:
    """What a reader of these tiers alone would take for a whole checkpoint; each must be whole then."""
    tiers = tiers_in(world.folder, names)
    found = []
    for info in (await scan(tiers, "run", RecordCache())).checkpoints:
        if info.usable:
            replica = await open_replica(tiers, info)
            for file in replica.manifest.files:
                sizes = [
                    path.stat().st_size
                    for name in info.complete_on
                    if (path := world.folder / name / info.attempt.path(file.name)).exists()
                ]
                assert file.nbytes in sizes, (names, info.attempt.step, file.name)
            found.append(info.attempt)
    return found


def test_at_every_instant_what_looks_like_a_checkpoint_is_one_also_to_who_sees_one_tier_only(tmp_path: Path) -> None:
    """Before every single operation of a collection everything is looked at, as after a crash there; and as if the authority were gone."""

    async def work() -> None:
        world = World(tmp_path, policy=policy_of({"last": 2}, tiers={"shared": {"keep": [{"last": 1}]}, "node": {"keep": [{"last": 1}]}}))
        attempts = await world.save(1, 2, 3, near=True)
        await world.expire()
        looks = 0
        turn = asyncio.Lock()

        class Watched(AroundStorage):
            """One change at a time: what is looked at must stand still, as after a crash."""

            async def around(self, operation: str, path: str, call: Call[T]) -> T:
                nonlocal looks
                if operation not in ("delete", "put", "create", "write"):
                    return await call()
                async with turn:
                    looks += 1
                    assert set(attempts[1:]) <= set(await offered(world, ("node", "shared", "far")))
                    for alone in (("far",), ("node",), ("node", "far")):
                        await offered(world, alone)
                    return await call()

        real = world.tiers
        hooked = tuple(replace(tier, storage=Watched(tier.storage)) for tier in real)
        world.tiers = replace(real, tiers=hooked, authority=hooked[1], durable_at=hooked[1])
        report = await world.collect()
        assert report.failed == ()
        assert looks > 20
        world.tiers = real
        assert await world.steps() == [2, 3]

    run(work())


class Ticking(SteppedClock):
    """A clock that runs as the event loop sleeps; the sleeps take no time."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)


def found_files(world: World, attempt: Attempt, count: int) -> Found:
    job = Emptying(attempt=attempt, tier=world.tiers.get("far"), kind="sweep", why="test")
    return Found(job=job, steps={"payload": tuple(FileInfo(path=attempt.path(shard_name(n, count)), nbytes=1) for n in range(count))})


def test_deletions_keep_to_their_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        clock = Ticking()
        deleted: list[tuple[float, int]] = []

        async def hook(operation: str, path: str) -> None:
            if operation == "delete":
                deleted.append((clock.seconds, path.count(",") + 1))

        world = World(tmp_path, policy=policy_of(gc={"max_deletes_per_s": 10}), clock=clock, wrap={"far": lambda s: Hooked(s, hook)})
        (only,) = await world.save(1)
        monkeypatch.setattr("tierstore.tiers.gc.deleting.asyncio.sleep", clock.sleep)
        began = clock.seconds
        await Remover(world.h(), 1).remove([found_files(world, only, 45)])
        assert sum(count for _, count in deleted) == 45
        assert max(count for _, count in deleted) <= 10
        for at, _ in deleted:  # in no second, from the beginning on, more than the rate and one batch
            done = sum(count for then, count in deleted if then <= at)
            assert done <= 10 * (at - began) + 10 + 1e-6

    run(work())


def test_no_deletion_begins_while_a_save_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        clock, busy = Ticking(), True
        deleting_while_busy: list[str] = []

        async def hook(operation: str, path: str) -> None:
            if operation == "delete" and busy:
                deleting_while_busy.append(path)

        async def sleep(seconds: float) -> None:
            nonlocal busy
            await clock.sleep(seconds)
            busy = len(clock.slept) < 5

        world = World(tmp_path, clock=clock, wrap={name: lambda s: Hooked(s, hook) for name in ("node", "shared", "far")})
        old, _ = await world.save(1, 2)
        await world.expire()
        monkeypatch.setattr("tierstore.tiers.gc.deleting.asyncio.sleep", sleep)
        h = world.h(busy=lambda: busy)
        job = Emptying(attempt=old, tier=world.tiers.get("far"), kind="sweep", why="test")
        assert await Remover(h, 2).remove([await find(h, job)]) == [None]
        assert (deleting_while_busy, busy, world.files("far", old)) == ([], False, [])

    run(work())


def test_one_file_that_may_not_be_deleted_keeps_only_its_own_checkpoint(tmp_path: Path) -> None:
    async def work() -> None:
        locked = ""

        async def hook(operation: str, path: str) -> None:
            if operation == "delete" and locked and locked in path:
                raise AccessError("an object lock forbids it", hint="wait for its end")

        world = World(tmp_path, wrap={"far": lambda storage: Hooked(storage, hook)})
        one, two, _ = await world.save(1, 2, 3)
        await world.expire()
        locked = one.path(shard_name(0, 1))
        report = await world.collect()
        assert [(f.attempt, f.tier) for f in report.failed] == [(one, "far")]
        assert world.files("far", two) == []
        assert [name for name in world.files("far", one) if name.endswith(MANIFEST)] == []
        locked = ""
        assert {f.attempt for f in (await world.collect()).freed} == {one}
        assert world.files("far", one) == []

    run(work())


@pytest.mark.parametrize("nth", [1, 4, 9, 14])
def test_a_cancelled_collection_leaves_nothing_running_and_the_next_one_finishes(tmp_path: Path, nth: int) -> None:
    async def work() -> None:
        reached = asyncio.Event()
        count = 0

        async def hook(operation: str, path: str) -> None:
            nonlocal count
            if operation in ("delete", "put", "create"):
                count += 1
                if count == nth:
                    reached.set()
                    await asyncio.Event().wait()

        world = World(tmp_path, policy=policy_of({"last": 2}, tiers={"shared": {"keep": [{"last": 1}]}}))
        attempts = await world.save(1, 2, 3)
        await world.expire()
        real = world.tiers
        hooked = tuple(replace(tier, storage=Hooked(tier.storage, hook)) for tier in real)
        world.tiers = replace(real, tiers=hooked, authority=hooked[1], durable_at=hooked[1])
        before = asyncio.all_tasks()
        collecting = asyncio.ensure_future(world.collect())
        await reached.wait()
        collecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await collecting
        assert collecting.cancelled()
        assert asyncio.all_tasks() == before
        world.tiers = real
        assert (await world.collect()).failed == ()
        assert await world.steps() == [2, 3]
        assert (await world.catalog()).remains == {}
        assert dict((await world.info(attempts[1])).replicas) == {"far": "complete"}

    run(work())


Step = Callable[[], Awaitable[object]]


def test_errors_name_what_they_are_about(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1, copy=False)
        steps: list[Step] = [lambda: read_gone(world.h(), only), lambda: world.info(only)]
        with pytest.raises(TierStoreError, match="step 1 of run 'run'") as caught:
            await steps[0]()
        assert caught.value.hint
        info = await world.info(only)
        with pytest.raises(TierStoreError, match="step 1 of run 'run' on tier 'shared'") as refused:
            await evict(world.h(), info, "shared")
        assert refused.value.context == {"run": "run", "step": 1, "tier": "shared"}

    run(work())
