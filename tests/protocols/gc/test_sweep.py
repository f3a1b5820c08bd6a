"""The point of no return and what follows it: readers, late writers, tiers that are down, other nodes, a second collector."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from gc_kit import DAY, HOUR, World, condemned_log, policy_of, run, swept_log
from tiers_kit import Hooked, LeapingClock, persist_rank

from tierstore.clock import utc_text
from tierstore.errors import NotFoundError, TemporaryError, TierStoreError
from tierstore.names import MANIFEST, Attempt
from tierstore.storage.contract import Storage
from tierstore.tiers.decisions import hold, pin, set_metrics
from tierstore.tiers.gc import housekeeping, sweep
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.housekeeping import look
from tierstore.tiers.gc.sweep import decide_sweep
from tierstore.tiers.leases import Lease, LeaseWatch, hold_lease
from tierstore.tiers.log import append, read_log
from tierstore.tiers.replica import open_replica
from tierstore.tiers.retention import Reason
from tierstore.tiers.tier import Tier, Tiers


async def last_seq(world: World, attempt: Attempt) -> int:
    return (await read_log(world.tiers.authority.storage, attempt))[-1].seq


def test_a_reader_that_came_before_is_waited_for_and_one_that_comes_after_is_told(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2)
        await world.expire()
        storage = world.tiers.authority.storage
        create, lease = storage.create, hold_lease(world.tiers, old, ttl_s=600, clock=world.clock)

        async def read_first(path: str, data: bytes) -> None:
            if b'"swept"' in data:
                await lease.__aenter__()
            await create(path, data)

        storage.create = read_first  # type: ignore[method-assign]
        info = await world.info(old)
        report = await world.collect()
        assert report.freed == ()
        assert [(a, "but read by" in why) for a, why in report.waiting] == [(old, True)]
        replica = await open_replica(world.tiers, info)
        assert await replica.objects()
        with pytest.raises(NotFoundError, match="deleted"):
            async with hold_lease(world.tiers, old, ttl_s=600, clock=world.clock):
                pass
        assert (await world.collect()).freed == ()  # swept long ago, and still read
        await lease.__aexit__(None, None, None)
        await world.collect()
        assert world.left(old) == swept_log(old, await last_seq(world, old))

    run(work())


class _Patient(LeaseWatch):
    """An observer in whose fifth look the reader has ended."""

    def __init__(self, world: World, reader: Lease) -> None:
        super().__init__(world.clock)
        self.reader, self.looks = reader, 0

    async def living(self, tiers: Tiers, run: str) -> Any:
        self.looks += 1
        if self.looks == 5:
            await self.reader.release()
        return await super().living(tiers, run)


def test_what_is_due_and_only_read_is_waited_for_too_after_all_else_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of what has expired keeps it from being swept: without waiting for it nothing would ever come of waiting."""
    monkeypatch.setattr(sweep, "_POLL_S", 0)

    async def work() -> None:
        world = World(tmp_path)
        read, other, _ = await world.save(1, 2, 3)
        await world.expire()
        async with hold_lease(world.tiers, read, ttl_s=600, clock=world.clock) as lease:
            seen = await world.collect(dry_run=True)
            assert (seen.held, {f.attempt for f in seen.freed}) == ({read}, {other})
            watch = _Patient(world, lease)
            report = await collect(world.h(leases=watch), wait_s=float("inf"))
        assert [f.attempt for f in report.freed] == [other, other, read, read]
        assert (report.waiting, report.failed, report.held) == ((), (), frozenset())
        assert watch.looks == 7, "the plan's, after swept, three times waiting; then again the plan's and after swept"

    run(work())


def test_a_reader_that_goes_on_is_waited_for_no_longer_than_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_POLL_S", 0)

    async def work() -> None:
        world = World(tmp_path)
        read, _ = await world.save(1, 2)
        await world.expire()
        async with hold_lease(world.tiers, read, ttl_s=600, clock=world.clock):
            clock = LeapingClock()
            clock.wall = world.clock.wall
            report = await collect(world.h(clock=clock, leases=LeaseWatch(world.clock)), wait_s=100)
        assert (report.freed, report.held) == ((), {read})

    run(work())


@pytest.mark.parametrize("late", ["a pin", "a hold", "a late metric", "an unpin", "a resume"])
def test_what_is_decided_between_the_plan_and_swept_wins(tmp_path: Path, late: str) -> None:
    """Also a record that would not keep it: it was not seen when the plan was made, so the plan is made again."""

    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2)
        await world.expire()
        storage = world.tiers.authority.storage
        create, came = storage.create, False

        async def something_first(path: str, data: bytes) -> None:
            nonlocal came
            if b'"swept"' in data and not came:
                came = True
                if late == "a pin":
                    await pin(world.tiers, old, clock=world.clock)
                elif late == "a hold":
                    await hold(world.tiers, old, "audit", clock=world.clock)
                elif late == "a late metric":
                    await set_metrics(world.tiers, old, {"loss": 0.1}, clock=world.clock)
                elif late == "an unpin":
                    await append(storage, old, "unpinned", {"name": "pin"}, clock=world.clock)
            await create(path, data)

        async def resumed_first(path: str, *args: Any) -> bytes:
            if path.endswith(MANIFEST):
                world.protected[old] = Reason(kind="resumed-from", text="resumed from")
            return await read(path, *args)

        read = storage.read
        storage.create = something_first  # type: ignore[method-assign]
        if late == "a resume":
            storage.read = resumed_first  # type: ignore[method-assign,assignment]
        report = await world.collect()
        assert (report.freed, report.failed) == ((), ())
        assert [attempt for attempt, _ in report.waiting] == [old]
        assert (await world.info(old)).usable
        assert not any(record.kind == "swept" for record in await read_log(storage, old))

    run(work())


def test_a_dead_readers_lease_holds_for_one_ttl_of_one_observer(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2)
        await world.expire()
        storage = world.tiers.authority.storage
        create = storage.create

        async def die_reading(path: str, data: bytes) -> None:
            if b'"swept"' in data:
                lease = hold_lease(world.tiers, old, ttl_s=600, clock=world.clock)
                await lease.beat()  # and is killed: nothing releases it
            await create(path, data)

        storage.create = die_reading  # type: ignore[method-assign]
        assert (await world.collect()).freed == ()
        world.clock.advance(10 * DAY)
        assert (await collect(world.h(leases=LeaseWatch(world.clock)))).freed == ()  # a new observer has seen nothing yet
        assert {f.tier for f in (await world.collect()).freed} == {"shared", "far"}  # this one has seen the same beat for days

    run(work())


def test_what_was_swept_while_this_process_uses_it_is_left_until_it_does_not(tmp_path: Path) -> None:
    """Another collector could not know: the user's lease had ended."""

    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2)
        await world.expire()
        await decide_sweep(world.h(), await look(world.h()), await world.info(old), ())
        world.protected[old] = Reason(kind="resumed-from", text="resumed from")
        report = await world.collect()
        assert (report.freed, dict(report.waiting)) == ((), {old: "resumed from"})
        world.protected.clear()
        assert {f.tier for f in (await world.collect()).freed} == {"shared", "far"}

    run(work())


def test_late_writers_into_swept_and_condemned_folders_are_emptied_again(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2, near=True)
        await world.expire()
        await world.collect()
        seq = await last_seq(world, old)
        for tier in world.tiers:
            await persist_rank(world.tiers, old, tier)
        report = await world.collect()
        assert {f.tier for f in report.freed} == {"node", "shared", "far"}
        assert world.left(old) == swept_log(old, seq)
        assert (await world.catalog()).remains == {}

    run(work())


def test_a_tier_that_is_down_does_its_share_when_it_comes_back(tmp_path: Path) -> None:
    async def work() -> None:
        down = False

        async def hook(operation: str, path: str) -> None:
            if down:
                raise TemporaryError("the endpoint is down", hint="wait")

        world = World(tmp_path, wrap={"far": lambda storage: Hooked(storage, hook)})
        old, _ = await world.save(1, 2)
        await world.expire()
        down = True
        report = await world.collect()
        assert {f.tier for f in report.freed} == {"shared"}
        assert len(await read_log(world.tiers.authority.storage, old)) > 2  # its log is not trimmed yet
        assert (await world.catalog()).remains == {old: ("shared",)}
        down = False
        assert (await world.catalog()).remains == {old: ("shared", "far")}
        assert {f.tier for f in (await world.collect()).freed} == {"far"}
        assert world.left(old) == swept_log(old, await last_seq(world, old))

    run(work())


def test_a_tier_that_fails_in_the_middle_is_reported_and_keeps_no_other_from_going(tmp_path: Path) -> None:
    async def work() -> None:
        broken = True

        async def hook(operation: str, path: str) -> None:
            if broken and operation == "delete":
                raise TemporaryError("the endpoint is down", hint="wait")

        world = World(tmp_path, wrap={"far": lambda storage: Hooked(storage, hook)})
        old, _ = await world.save(1, 2)
        await world.expire()
        report = await world.collect()
        assert {f.tier for f in report.freed} == {"shared"}
        assert [(f.attempt, f.tier) for f in report.failed] == [(old, "far")]
        assert report.exit_code == 3
        broken = False
        assert (await world.collect()).failed == ()
        assert world.left(old) == swept_log(old, await last_seq(world, old))

    run(work())


def other_node(world: World, folder: Path) -> World:
    """Another node of the same store: the shared tiers are the same, its own tier is another disk."""
    other = World(folder, policy=world.policy, clock=world.clock)
    own = other.tiers.nearest
    tiers: tuple[Tier, ...] = (own, *world.tiers.tiers[1:])
    other.tiers = Tiers(tiers=tiers, authority=world.tiers.authority, durable_at=world.tiers.durable_at, store_id="kit")
    return other


def test_each_node_empties_its_own_tier_also_when_the_log_is_trimmed(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path / "one")
        old, _ = await world.save(1, 2, near=True)
        other = other_node(world, tmp_path / "two")
        await persist_rank(other.tiers, old, other.tiers.nearest)
        await world.expire()
        await collect(world.h(local=False))
        assert world.left(old, ["node"])
        assert world.left(old, ["shared", "far"]) == swept_log(old, await last_seq(world, old))
        assert len(await read_log(world.tiers.authority.storage, old)) == 2
        report = await collect(world.h(shared=False))
        assert {f.tier for f in report.freed} == {"node"}
        assert world.left(old, ["node"]) == {}
        assert other.left(old, ["node"])
        await collect(other.h(shared=False))
        assert other.left(old, ["node"]) == {}

    run(work())


def test_two_collectors_at_once_do_no_harm(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, policy=policy_of({"last": 2}, tiers={"shared": {"keep": [{"last": 1}]}}))
        attempts = await world.save(1, 2, 3, 4, near=True)
        world.clock.advance(2 * HOUR)
        pruned = await asyncio.gather(world.prune(), world.prune())
        assert {a for report in pruned for a in report.expired} == set(attempts[:2])
        world.clock.advance(2 * DAY)
        reports = await asyncio.gather(*(collect(world.h(leases=LeaseWatch(world.clock))) for _ in range(3)))
        assert [f for report in reports for f in report.failed] == []
        await world.collect()
        assert await world.steps() == [3, 4]
        assert (await world.info(attempts[2])).replicas == {"node": "complete", "far": "complete"}
        for attempt in attempts[:2]:
            assert world.left(attempt) == swept_log(attempt, await last_seq(world, attempt))
        assert (await world.catalog()).remains == {}

    run(work())


def test_names_that_only_the_manifest_knows_go_by_the_swept_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2)
        await world.expire()
        monkeypatch.setattr("tierstore.tiers.gc.standing.grammatical", lambda name: not name.startswith("shard"))
        monkeypatch.setattr("tierstore.tiers.gc.deleting.grammatical", lambda name: not name.startswith("shard"))
        monkeypatch.setattr("tierstore.tiers.gc.deleting.parse_file_name", lambda name: None)
        report = await world.collect()
        (swept,) = [r for r in await read_log(world.tiers.authority.storage, old) if r.kind == "swept"]
        assert swept.data["files"] == ["shard-00000-of-00001.safetensors"]
        assert (report.foreign, report.failed) == ((), ())
        assert world.left(old) == swept_log(old, swept.seq)

    run(work())


def test_files_of_others_stay_and_are_named(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2)
        await world.expire()
        notes = tmp_path / "far" / old.folder / "notes" / "mine.txt"
        notes.parent.mkdir()
        notes.write_text("keep me")
        log_note = tmp_path / "far" / old.log_folder / "why.md"
        log_note.write_text("keep me too")
        report = await world.collect()
        assert set(report.foreign) == {f"far:{old.folder}/notes/mine.txt", f"far:{old.log_folder}/why.md"}
        assert notes.exists()
        assert log_note.exists()
        assert world.left(old, ["shared"]) == swept_log(old, await last_seq(world, old))
        assert sorted(world.files("far", old)) == [f".log/{old.name}/why.md", f"{old.name}/notes", f"{old.name}/notes/mine.txt"]
        assert set((await world.collect()).foreign) == set(report.foreign)

    run(work())


def test_the_newest_is_never_swept_whatever_a_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        world = World(tmp_path)
        _, new = await world.save(1, 2)
        await world.expire()
        past = {"plan": "", "reason": "a fault", "not_before": utc_text(world.clock.now() - timedelta(days=2))}
        await append(world.tiers.authority.storage, new, "expired", past, clock=world.clock)
        planned = housekeeping.plan_of

        def all_go(*args: Any) -> Any:
            plan = planned(*args)
            return replace(plan, entries=tuple(replace(entry, action="sweep") for entry in plan.entries))

        monkeypatch.setattr("tierstore.tiers.gc.collect.plan_of", all_go)
        assert dict((await world.collect()).waiting)[new] == "the newest checkpoint is never deleted"
        assert await world.steps() == [2]

    run(work())


def test_an_empty_folder_that_an_interrupted_deletion_left_goes_too(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2)
        await world.expire()
        await world.collect()
        (tmp_path / "far" / old.folder).mkdir()
        assert old in (await world.catalog()).remains
        await world.collect()
        assert (await world.catalog()).remains == {}
        assert condemned_log(old)["shared"][0] in world.files("shared", old)

    run(work())


def failing_when(error: TierStoreError, when: Callable[[str, str], bool]) -> Callable[[Storage], Storage]:
    async def hook(operation: str, path: str) -> None:
        if when(operation, path):
            raise error

    return lambda storage: Hooked(storage, hook)


def test_nothing_is_deleted_that_could_not_be_written_down(tmp_path: Path) -> None:
    async def work() -> None:
        error = TemporaryError("no more room for an audit file", hint="make room")
        world = World(tmp_path, wrap={"shared": failing_when(error, lambda op, path: op == "put" and "/.audit/" in path)})
        old, _ = await world.save(1, 2)
        before = world.left(old, ["far"])
        await world.expire()
        report = await world.collect()
        assert {(f.attempt, f.tier) for f in report.failed} == {(old, "shared"), (old, "far")}
        assert report.freed == ()
        assert world.left(old, ["far"]) == before

    run(work())


@pytest.mark.parametrize("damage", ["shard gone", "shard cut", "manifest garbled"])
def test_nothing_is_swept_while_the_newest_is_broken_on_every_tier(tmp_path: Path, damage: str) -> None:
    """The rest goes because the newest is there to go back to: that is looked at, not believed."""

    async def work() -> None:
        world = World(tmp_path, policy=policy_of({"last": 1}))
        old, new = await world.save(1, 2)
        await world.expire()
        for tier in ("shared", "far"):
            folder = tmp_path / tier / new.folder
            shard = next(folder.glob("shard-*"))
            if damage == "shard gone":
                shard.unlink()
            elif damage == "shard cut":
                shard.write_bytes(shard.read_bytes()[:-1])
            else:
                (folder / MANIFEST).write_bytes(b"{}")
        report = await world.collect()
        assert [a for a, _ in report.waiting] == [old]
        assert "the newest verified checkpoint, step 2, has no copy that stands" in report.waiting[0][1]
        assert all(freed.kind != "sweep" for freed in report.freed)
        assert (tmp_path / "shared" / old.folder / MANIFEST).exists()

    run(work())
