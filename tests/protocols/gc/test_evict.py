"""A copy leaves a tier only while enough recorded copies stand elsewhere, looked at and not believed; two evictors never take the last."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from gc_kit import World, policy_of, run
from retention_kit import load_whole
from tiers_kit import flip, path_of

from tierstore.clock import utc_text
from tierstore.errors import LockedError, NotFoundError, RefusedError
from tierstore.format.record import Record
from tierstore.names import MANIFEST, OBJECTS, Attempt
from tierstore.tiers.decisions import hold, release
from tierstore.tiers.gc.deleting import Remover, find
from tierstore.tiers.gc.evict import decide_eviction, evict
from tierstore.tiers.leases import hold_lease
from tierstore.tiers.log import append, read_log
from tierstore.tiers.promote import pending, reconcile
from tierstore.tiers.repair import repair
from tierstore.tiers.replica import open_replica
from tierstore.tiers.retention import Reason
from tierstore.tiers.verify import verify

KEEP_ONE_ON_SHARED = policy_of({"last": 9}, tiers={"shared": {"keep": [{"last": 1}]}, "node": {"keep": [{"last": 1}]}})


async def kinds(world: World, attempt: Attempt) -> list[str]:
    return [record.kind for record in await read_log(world.tiers.authority.storage, attempt)]


def test_a_tier_drops_what_its_own_rules_do_not_keep_and_the_checkpoint_stays_loadable(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, policy=KEEP_ONE_ON_SHARED)
        old, new = await world.save(1, 2, near=True)
        report = await world.collect()
        assert {(f.attempt, f.tier, f.kind) for f in report.freed} == {(old, "shared", "evict"), (old, "node", "evict")}
        assert (report.failed, report.waiting) == ((), ())
        assert await kinds(world, old) == ["committed", "replicated", "evicting", "evicted"]
        info = await world.info(old)
        assert info.dropped == {"shared", "node"}
        assert dict(info.replicas) == {"far": "complete"}
        assert world.files("node", old) == [f".log/{old.name}/evicted.json"]
        assert [name for name in world.files("shared", old) if ".log" not in name] == []
        replica = await open_replica(world.tiers, info)
        assert replica.manifest.step == 1
        assert (await verify(world.tiers, "run", level="full")).damage == ()
        assert pending(await world.catalog(), world.tiers) == []
        await reconcile(world.tiers, "run", clock=world.clock)
        assert await world.info(old) == info  # nobody copies it back
        assert (await world.collect()).freed == ()
        assert (await world.info(new)).complete_on == ("node", "shared", "far")

    run(work())


def test_the_last_copy_never_goes(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1, copy=False)
        with pytest.raises(RefusedError, match="far has no recorded copy") as caught:
            await evict(world.h(), await world.info(only), "shared")
        assert caught.value.exit_code == 7
        assert "hint:" in str(caught.value)
        await reconcile(world.tiers, "run", clock=world.clock)
        freed = await evict(world.h(), await world.info(only), "shared", reason="a test")
        assert freed.files == 5
        assert freed.nbytes > 30_000
        with pytest.raises(RefusedError, match="shared has dropped its copy"):
            await evict(world.h(), await world.info(only), "far")
        assert (await world.info(only)).usable

    run(work())


@pytest.mark.parametrize("damage", ["manifest", "size", "missing", "quarantined", "not durable"])
def test_a_copy_that_does_not_stand_does_not_count(tmp_path: Path, damage: str) -> None:
    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1)
        info = await world.info(only)
        if damage == "manifest":
            flip(path_of(world.tiers, "far", only, MANIFEST))
        elif damage == "size":
            path_of(world.tiers, "far", only, OBJECTS).write_bytes(b"")
        elif damage == "missing":
            path_of(world.tiers, "far", only, OBJECTS).unlink()
        elif damage == "quarantined":
            data = {"tier": "far", "file": OBJECTS}
            await append(world.tiers.authority.storage, only, "quarantined", data, clock=world.clock)
        else:
            far = replace(world.tiers.get("far"), durable=False)
            world.tiers = replace(world.tiers, tiers=(*world.tiers.tiers[:2], far))
        before = world.left(only)
        with pytest.raises(RefusedError, match="at least 1 copy must stand elsewhere, and these do: none"):
            await evict(world.h(), info, "shared")
        assert world.left(only) == before

    run(work())


def test_two_evictors_that_each_look_at_the_others_copy_do_not_take_both(tmp_path: Path) -> None:
    """Both have looked and found the other's copy; the second to write loses its number, looks again, and is refused."""

    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1)
        both_looked = asyncio.Barrier(2) if hasattr(asyncio, "Barrier") else _Barrier(2)
        storage = world.tiers.authority.storage
        create = storage.create

        async def together(path: str, data: bytes) -> None:
            if b'"evicting"' in data:
                await both_looked.wait()
            await create(path, data)

        storage.create = together  # type: ignore[method-assign]
        tiers = [world.tiers.get(name) for name in ("shared", "far")]
        ends = await asyncio.gather(*(decide_eviction(world.h(), only, tier, "test") for tier in tiers), return_exceptions=True)
        assert sorted(type(end).__name__ for end in ends) == ["Emptying", "RefusedError"]
        assert (await kinds(world, only)).count("evicting") == 1

    run(work())


class _Barrier:
    """asyncio.Barrier of Python 3.11, once."""

    def __init__(self, parties: int) -> None:
        self._left = parties
        self._open = asyncio.Event()

    async def wait(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._open.set()
        await self._open.wait()


@pytest.mark.parametrize("tier", ["shared", "node"])
def test_a_hold_keeps_every_copy_and_its_end_lets_them_go(tmp_path: Path, tier: str) -> None:
    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1, near=True)
        await hold(world.tiers, only, "audit", clock=world.clock, until=world.clock.now() + timedelta(hours=1))
        with pytest.raises(RefusedError, match="it is held: audit"):
            await evict(world.h(), await world.info(only), tier)
        world.clock.advance(3600 + 299)  # clocks may differ by five minutes
        with pytest.raises(RefusedError, match="it is held: audit"):
            await evict(world.h(), await world.info(only), tier)
        world.clock.advance(2)
        assert (await evict(world.h(), await world.info(only), tier)).files

    run(work())


def test_a_hold_that_comes_while_a_node_drops_its_copy_keeps_it_or_comes_too_late(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1, near=True)
        before = world.files("node", only)
        storage = world.tiers.nearest.storage
        put = storage.put

        async def held(path: str, data: bytes) -> object:
            if path == only.evicted_path:
                await hold(world.tiers, only, "audit", clock=world.clock)
            return await put(path, data)

        storage.put = held  # type: ignore[method-assign,assignment]
        with pytest.raises(RefusedError, match="held just now"):
            await evict(world.h(), await world.info(only), "node")
        assert world.files("node", only) == before
        assert (await world.info(only)).dropped == frozenset()
        storage.put = put  # type: ignore[method-assign]
        await release(world.tiers, only, "audit", clock=world.clock)
        assert (await evict(world.h(), await world.info(only), "node")).files

    run(work())


def test_what_is_read_or_in_use_is_not_dropped(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, policy=KEEP_ONE_ON_SHARED)
        old, _ = await world.save(1, 2, near=True)
        async with hold_lease(world.tiers, old, ttl_s=600, clock=world.clock):
            with pytest.raises(LockedError, match="is in use: read by"):
                await evict(world.h(), await world.info(old), "shared")
            assert (await world.collect()).freed == ()
        world.protected[old] = Reason(kind="in-flight", text="being copied")
        assert (await world.collect()).freed == ()
        world.protected.clear()
        assert len((await world.collect()).freed) == 2

    run(work())


def test_nothing_to_drop_is_said(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1, copy=False)
        with pytest.raises(NotFoundError, match="'far' has nothing of step 1"):
            await evict(world.h(), await world.info(only), "far")

    run(work())


def test_names_outside_our_grammar_go_by_the_record_even_when_the_manifest_is_gone(tmp_path: Path) -> None:
    """An adopted checkpoint's other names are written into `evicting` before the manifest goes; what else lies there stays."""

    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1)
        strange = tmp_path / "shared" / only.folder / "model-00001-of-00002.safetensors"
        strange.write_bytes(b"named by the manifest")
        other = strange.with_name("notes.txt")
        other.write_bytes(b"somebody's")
        data = {"tier": "shared", "reason": "test", "files": [strange.name]}
        await append(world.tiers.authority.storage, only, "evicting", data, clock=world.clock)
        (tmp_path / "shared" / only.folder / MANIFEST).unlink()
        report = await world.collect()
        assert not strange.exists()
        assert other.exists()
        assert report.foreign == (f"shared:{only.folder}/notes.txt",)
        assert (await kinds(world, only))[-1] == "evicted"

    run(work())


def test_an_eviction_that_was_interrupted_is_continued_also_for_a_zombies_late_files(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1, near=True)
        await decide_eviction(world.h(), only, world.tiers.get("far"), "test")  # and then the collector dies
        await decide_eviction(world.h(), only, world.tiers.get("node"), "test")
        assert {(f.tier, f.kind) for f in (await world.collect()).freed} == {("far", "evict"), ("node", "evict")}
        assert (await kinds(world, only))[-2:] == ["evicting", "evicted"]
        for tier in ("far", "node"):
            late = tmp_path / tier / only.folder / "shard-00000-of-00001.safetensors"
            late.parent.mkdir(parents=True)
            late.write_bytes(b"late")
            record = tmp_path / tier / only.record_path(0)
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_bytes((tmp_path / "shared" / only.record_path(0)).read_bytes())
        again = await world.collect()
        assert {(f.tier, f.files) for f in again.freed} == {("far", 2), ("node", 2)}
        assert world.left(only, ["far", "node"]) == {"node": [f".log/{only.name}/evicted.json"]}

    run(work())


def test_an_eviction_that_was_interrupted_waits_where_the_copy_that_it_leaned_on_is_lost_and_repair_takes_from_it(tmp_path: Path) -> None:
    """`evicting` is written, nothing is deleted yet, and the other copy breaks: what should go is the last good copy now."""

    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1)
        await decide_eviction(world.h(), only, world.tiers.get("shared"), "test")  # and then the collector dies
        before = world.files("shared", only)
        shard = path_of(world.tiers, "far", only, "shard-00000-of-00001.safetensors")
        shard.write_bytes(b"")
        report = await world.collect()
        assert (report.freed, world.files("shared", only)) == ((), before)
        assert [(a, "no copy stands elsewhere any more" in why) for a, why in report.waiting] == [(only, True)]
        with pytest.raises(RefusedError, match="no copy stands elsewhere any more"):
            await evict(world.h(), await world.info(only), "shared")
        await load_whole(world.tiers, only)  # a reader takes from it too, after all others
        assert (await open_replica(world.tiers, await world.info(only))).tiers == ("far", "shared")
        mended = await repair(world.tiers, "run", clock=world.clock)
        assert [(m.tier, m.sources) for m in mended.mended] == [("far", ("shared",))]
        assert {(f.tier, f.kind) for f in (await world.collect()).freed} == {("shared", "evict")}
        assert (await verify(world.tiers, "run", level="full")).damage == ()

    run(work())


def test_a_collector_that_died_before_it_recorded_the_end_of_an_eviction_is_continued(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1)
        job = await decide_eviction(world.h(), only, world.tiers.get("far"), "test")
        assert await Remover(world.h(), 1).remove([await find(world.h(), job)]) == [None]  # and then it dies
        assert world.files("far", only) == []
        assert (await world.collect()).freed == ()
        assert (await kinds(world, only))[-2:] == ["evicting", "evicted"]

    run(work())


def test_a_dry_run_checks_and_writes_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1)
        before = world.left(only)
        freed = await evict(world.h(), await world.info(only), "shared", dry_run=True)
        assert (freed.files, world.left(only)) == (5, before)
        assert await kinds(world, only) == ["committed", "replicated"]

    run(work())


def test_the_marker_says_who_and_why(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1, near=True)
        await evict(world.h(), await world.info(only), "node", reason="make room")
        said = json.loads((tmp_path / "node" / only.evicted_path).read_text())
        assert said["reason"] == "make room"
        assert said["actor"]
        assert said["at"] == utc_text(world.clock.now())
        records: tuple[Record, ...] = await read_log(world.tiers.authority.storage, only)
        assert not any(record.data.get("tier") == "node" for record in records)

    run(work())


def test_copies_of_the_log_that_a_late_copier_leaves_without_any_payload_go_again(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        (only,) = await world.save(1, near=True)
        for tier in ("far", "node"):
            await evict(world.h(), await world.info(only), tier)
            record = tmp_path / tier / only.record_path(0)
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_bytes((tmp_path / "shared" / only.record_path(0)).read_bytes())
        assert {f.tier for f in (await world.collect()).freed} == {"far", "node"}
        assert world.left(only, ["far", "node"]) == {"node": [f".log/{only.name}/evicted.json"]}
        assert (await world.collect()).freed == ()

    run(work())


def test_as_many_copies_as_the_policy_says_stay_elsewhere(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, policy=policy_of(protect={"min_copies": 2}))
        (only,) = await world.save(1, near=True)
        with pytest.raises(RefusedError, match="at least 2 copies must stand elsewhere, and these do: far"):
            await evict(world.h(), await world.info(only), "shared")
        assert (await evict(world.h(), await world.info(only), "node")).files  # two stand elsewhere
        assert (await world.info(only)).complete_on == ("shared", "far")

    run(work())
