"""What nobody finished is condemned first, and then removed; what has committed, may still be finished, or is young, is left alone."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
from gc_kit import DAY, HOUR, World, condemned_log, run
from tiers_kit import Hooked, attempt_at, persist_rank, shard_of

from tierstore.errors import CondemnedError, TemporaryError
from tierstore.names import Attempt, part_name
from tierstore.storage.sources import BytesSource
from tierstore.tiers.catalog import scan
from tierstore.tiers.commit import commit
from tierstore.tiers.log import read_fate
from tierstore.tiers.promote import reconcile
from tierstore.tiers.retention import Reason


async def abandon(world: World, step: int, *, tiers: tuple[str, ...] = ("shared",)) -> Attempt:
    """Rank 0 of two has written its part, and nobody comes back; the files are as old as the test's clock says."""
    attempt = attempt_at(step, at=world.clock.now())
    for name in tiers:
        await persist_rank(world.tiers, attempt, world.tiers.get(name), world_size=2)
    return attempt


def as_old_as_files(world: World) -> None:
    """Files have the machine's time: the test's clock goes there."""
    world.clock.advance(max(0.0, time.time() - world.clock.now().timestamp()))


def test_an_attempt_that_nobody_finishes_is_condemned_after_the_grace_and_removed(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        await world.save(1)
        as_old_as_files(world)
        lost = await abandon(world, 2, tiers=("node", "shared"))
        world.clock.advance(DAY - HOUR)
        early = await world.collect()
        assert (early.freed, [a for a, _ in early.waiting]) == ((), [lost])
        world.clock.advance(2 * HOUR)
        report = await world.collect()
        assert {(f.attempt, f.tier, f.kind) for f in report.freed} == {(lost, "node", "orphan"), (lost, "shared", "orphan")}
        fate = await read_fate(world.tiers.authority.storage, lost)
        assert fate is not None
        assert (fate.kind, fate.data["missing"], fate.data["world_size"]) == ("condemned", [1], 2)
        assert world.left(lost) == condemned_log(lost)
        with pytest.raises(CondemnedError, match="an orphan"):
            await commit(world.tiers, lost, deadline_s=0, clock=world.clock)
        assert await world.steps() == [1]
        assert (await world.collect()).freed == ()

    run(work())


def test_a_commit_that_comes_first_wins_and_the_checkpoint_is_whole(tmp_path: Path) -> None:
    """The collector has looked and found no commit; the last part and the commit come before it can condemn."""

    async def work() -> None:
        late = None

        async def hook(operation: str, path: str) -> None:
            nonlocal late
            if late is not None and operation == "create" and path.endswith("000000.json"):
                attempt, late = late, None
                await persist_rank(world.tiers, attempt, world.tiers.authority, rank=1, world_size=2)
                await commit(world.tiers, attempt, deadline_s=0, clock=world.clock)

        world = World(tmp_path, wrap={"shared": lambda storage: Hooked(storage, hook)})
        await world.save(1)
        as_old_as_files(world)
        slow = await abandon(world, 2)
        world.clock.advance(2 * DAY)
        late = slow
        report = await world.collect()
        assert (report.freed, report.failed) == ((), ())
        info = await world.info(slow)
        assert info.usable
        assert {path.name for path in (tmp_path / "shared" / slow.folder).iterdir()} >= {part_name(0), part_name(1), "manifest.json"}

    run(work())


def test_what_can_still_be_finished_is_left_for_recover(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        await world.save(1)
        as_old_as_files(world)
        whole = attempt_at(2, at=world.clock.now())
        await persist_rank(world.tiers, whole, world.tiers.authority)
        world.clock.advance(30 * DAY)
        report = await world.collect()
        assert report.freed == ()
        assert ("recover" in dict(report.waiting)[whole]) is True

    run(work())


def test_what_this_process_is_saving_is_not_touched_nor_what_is_dated_in_the_future(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        await world.save(1)
        as_old_as_files(world)
        saving = await abandon(world, 2)
        world.clock.advance(2 * DAY)
        world.protected[saving] = Reason(kind="in-flight", text="being saved")
        future = attempt_at(3, at=world.clock.now() + timedelta(days=400))
        await persist_rank(world.tiers, future, world.tiers.authority, world_size=2)
        report = await world.collect()
        assert report.freed == ()
        assert dict(report.waiting)[saving] == "being saved"
        assert "unfinished" in dict(report.waiting)[future]
        assert (await read_fate(world.tiers.authority.storage, future)) is None

    run(work())


def test_a_tier_that_cannot_be_seen_keeps_an_attempt_from_being_condemned(tmp_path: Path) -> None:
    async def work() -> None:
        down = False

        async def hook(operation: str, path: str) -> None:
            if down:
                raise TemporaryError("the endpoint is down", hint="wait")

        world = World(tmp_path, wrap={"node": lambda storage: Hooked(storage, hook)})
        await world.save(1)
        as_old_as_files(world)
        lost = await abandon(world, 2)
        world.clock.advance(2 * DAY)
        down = True
        report = await world.collect()
        assert dict(report.waiting)[lost] == "what tier node has of it can't be seen"
        down = False
        assert {f.attempt for f in (await world.collect()).freed} == {lost}

    run(work())


def test_condemned_long_ago_and_written_to_since_is_emptied_again(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        await world.save(1)
        attempt = await abandon(world, 2)
        with pytest.raises(CondemnedError):
            await commit(world.tiers, attempt, deadline_s=0, clock=world.clock)
        for _ in range(2):  # a rank that has not heard of it writes on
            await persist_rank(world.tiers, attempt, world.tiers.authority, rank=1, world_size=2)
            await persist_rank(world.tiers, attempt, world.tiers.nearest, rank=1, world_size=2)
            report = await world.collect()
            assert {f.tier for f in report.freed} == {"node", "shared"}
            assert world.left(attempt) == condemned_log(attempt)

    run(work())


def test_a_condemned_attempt_keeps_files_that_the_grammar_does_not_know(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        await world.save(1)
        as_old_as_files(world)
        lost = await abandon(world, 2)
        storage = world.tiers.authority.storage
        await storage.write(lost.path("weights.bin"), BytesSource(shard_of(0, 1).data))
        world.clock.advance(2 * DAY)
        report = await world.collect()
        assert report.foreign == (f"shared:{lost.folder}/weights.bin",)
        assert [info.path for info in await storage.list(lost.folder)] == [lost.path("weights.bin")]
        assert (await scan(world.tiers, "run")).remains == {lost: ("shared",)}

    run(work())


def test_what_a_node_has_staged_while_the_authority_was_down_for_days_is_carried_first(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        await world.save(1)
        as_old_as_files(world)
        staged = await abandon(world, 2, tiers=("node",))
        world.clock.advance(3 * DAY)
        report = await world.collect()
        assert report.freed == ()
        assert "not on the authority yet" in dict(report.waiting)[staged]
        await reconcile(world.tiers, "run", clock=world.clock)
        await persist_rank(world.tiers, staged, world.tiers.authority, rank=1, world_size=2)  # the other node brings its part
        await reconcile(world.tiers, "run", clock=world.clock)
        assert await world.steps() == [1, 2]

    run(work())
