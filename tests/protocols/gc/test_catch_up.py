"""The copies of the log beside the replicas catch up with the log, so that a lost authority takes no decision with it."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from gc_kit import DAY, HOUR, World, policy_of, run, swept_log
from tiers_kit import Hooked, path_of

from tierstore.errors import AccessError, TemporaryError
from tierstore.format.record import Record
from tierstore.names import INDEX, MANIFEST, Attempt
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.decisions import hold, pin, tag, undelete
from tierstore.tiers.gc.collect import collect, tend
from tierstore.tiers.log import append, read_log
from tierstore.tiers.recover import recover
from tierstore.tiers.verify import verify


async def log_on(world: World, tier: str, attempt: Attempt) -> tuple[Record, ...]:
    return await read_log(world.tiers.get(tier).storage, attempt)


def numbers(world: World, tier: str, attempt: Attempt) -> list[int]:
    leaves = [path.rpartition("/")[2] for path in world.files(tier, attempt)]
    return sorted(int(leaf[:6]) for leaf in leaves if leaf[:6].isdigit())


async def lose_the_authority(world: World) -> None:
    shutil.rmtree(world.folder / "shared")
    (world.folder / "shared").mkdir()
    assert (await recover(world.tiers, "run", clock=world.clock)).ok


def facts_of(info: CheckpointInfo) -> tuple[object, ...]:
    return (info.pins, info.tags, info.metrics, [h.name for h in info.holds], info.expired, info.quarantined, set(info.replicated))


def test_a_pin_survives_the_loss_of_the_authority_and_keeps_what_it_kept(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        pinned, other, _ = await world.save(1, 2, 3)
        await pin(world.tiers, pinned, "paper", clock=world.clock)
        await world.collect()
        await lose_the_authority(world)
        assert (await world.info(pinned)).pins == ("paper",)
        assert (await world.expire()).expired == (other,)
        await world.collect()
        assert await world.steps() == [1, 3]
        assert {"shared", "far"} <= set(world.left(pinned))

    run(work())


def test_everything_that_was_decided_comes_back_with_the_log(tmp_path: Path) -> None:
    """Also that it expired, until when it can be taken back, that it was, and which copies were dropped."""

    async def work() -> None:
        world = World(tmp_path, policy=policy_of({"last": 1}, tiers={"node": {"keep": [{"last": 1}]}}))
        held, tagged, back, going, new = await world.save(1, 2, 3, 4, 5, near=True)
        await hold(world.tiers, held, "audit", clock=world.clock)
        await tag(world.tiers, tagged, ["paper"], clock=world.clock)
        world.clock.advance(2 * HOUR)
        await world.prune()
        await undelete(world.tiers, back, clock=world.clock)
        await tag(world.tiers, tagged, ["paper"], clock=world.clock)
        await world.collect()
        before = {a: facts_of(await world.info(a)) for a in (held, tagged, back, going, new)}
        assert sum(info.hidden for info in (await world.catalog()).checkpoints) >= 1
        await lose_the_authority(world)
        for attempt, facts in before.items():
            assert facts_of(await world.info(attempt)) == facts
        assert not (await verify(world.tiers, "run", level="full")).damage

    run(work())


def test_it_needs_no_policy_writes_once_and_only_where_it_may(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, wrap={name: lambda s: Hooked(s, nothing) for name in ("node", "far")})
        world.policy = None
        (old,) = await world.save(1, near=True)
        await pin(world.tiers, old, clock=world.clock)
        behind = (await world.catalog()).behind
        assert behind == {old: ("node", "far")}
        dry = await world.collect(dry_run=True)
        assert (dry.log_copies, dry.freed, dry.failed) == (4, (), ())
        assert (await world.catalog()).behind == behind
        assert (await collect(world.h(shared=False))).log_copies == 2
        assert (numbers(world, "node", old), numbers(world, "far", old)) == ([0, 1, 2], [0])
        done = (await tend(world.h(local=False))).collected
        assert (done.log_copies, done.log_copies_left, done.failed, done.freed) == (2, 0, (), ())
        for name in ("node", "far"):
            assert await log_on(world, name, old) == await log_on(world, "shared", old)
        assert (await world.catalog()).behind == {}
        puts = world.calls("far", "put")
        again = await world.collect()
        assert (again.log_copies, world.calls("far", "put")) == (0, puts)

    run(work())


async def nothing(operation: str, path: str) -> None:
    return


def test_a_round_in_the_background_does_so_many_the_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr("tierstore.tiers.gc.collect._LOGS_IN_A_ROUND", 2)
        world = World(tmp_path)
        attempts = await world.save(1, 2, 3)
        collected = (await tend(world.h())).collected
        assert (collected.log_copies, collected.log_copies_left) == (2, 1)
        assert [numbers(world, "far", a) for a in attempts] == [[0], [0, 1], [0, 1]]
        collected = (await tend(world.h())).collected
        assert (collected.log_copies, collected.log_copies_left) == (1, 0)

    run(work())


def test_a_tier_that_fails_is_said_once_and_keeps_no_other_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.tiers.gc.log_round._AT_A_TIME", 6)
    monkeypatch.setattr("tierstore.tiers.gc.log_round._AT_ONCE", 3)

    async def work() -> None:
        down = ""

        async def hook(operation: str, path: str) -> None:
            if down == "all":
                raise TemporaryError("connection refused")
            if down == "puts" and operation == "put":
                raise AccessError("read only")

        world = World(tmp_path, wrap={"far": lambda s: Hooked(s, hook)})
        attempts = await world.save(*range(1, 14), near=True)
        down = "all"
        report = await world.collect()
        assert (report.failed, report.log_copies) == ((), 13)
        down = "puts"
        report = await world.collect()
        assert {f.tier for f in report.failed} == {"far"}
        assert len(report.failed) <= 3, "those that were under way"
        assert all(numbers(world, "node", a) == [0, 1] for a in attempts)
        down = ""
        assert (await world.collect()).log_copies == 13
        assert (await world.catalog()).behind == {}

    run(work())


def test_where_it_stops_midway_no_record_is_missing_before_a_later_one(tmp_path: Path) -> None:
    async def work() -> None:
        broken = False

        async def hook(operation: str, path: str) -> None:
            if broken and operation == "put" and path.endswith("000003.json"):
                raise TemporaryError("connection reset")

        world = World(tmp_path, wrap={"far": lambda s: Hooked(s, hook)})
        (old,) = await world.save(1)
        for name in ("a", "b", "c"):
            await pin(world.tiers, old, name, clock=world.clock)
        broken = True
        assert len((await world.collect()).failed) == 1
        assert numbers(world, "far", old) == [0, 1, 2]
        broken = False
        assert (await world.collect()).log_copies == 2
        assert await log_on(world, "far", old) == await log_on(world, "shared", old)

    run(work())


# ---- never beside a copy that was let go

Late = Callable[[World, Attempt], Awaitable[None]]


async def swept_meanwhile(world: World, attempt: Attempt) -> None:
    await append(world.tiers.authority.storage, attempt, "swept", {"files": []}, clock=world.clock)
    await collect(world.h())


async def dropped_meanwhile(world: World, attempt: Attempt) -> None:
    for kind in ("evicting", "evicted"):
        await append(world.tiers.authority.storage, attempt, kind, {"tier": "far", "files": []}, clock=world.clock)
    storage = world.tiers.get("far").storage
    for folder in (attempt.log_folder, attempt.folder):
        await storage.delete([info.path for info in await storage.list(folder)])


@pytest.mark.parametrize("at", [("put", "000001.json"), ("put", "000002.json"), ("list", "")])
@pytest.mark.parametrize("late", [swept_meanwhile, dropped_meanwhile])
def test_what_is_let_go_while_its_copies_are_made_keeps_none(tmp_path: Path, late: Late, at: tuple[str, str]) -> None:
    async def work() -> None:
        armed = False

        async def hook(operation: str, path: str) -> None:
            nonlocal armed
            if armed and operation == at[0] and path.startswith(old.log_folder) and path.endswith(at[1]):
                armed = False
                await late(world, old)

        world = World(tmp_path, wrap={"far": lambda s: Hooked(s, hook)})
        world.policy = None
        old, _ = await world.save(1, 2)
        await pin(world.tiers, old, clock=world.clock)
        armed = True
        report = await world.collect()
        assert not armed
        assert report.failed == ()
        assert "far" not in world.left(old)
        if late is swept_meanwhile:
            assert world.left(old) == swept_log(old, 3)
        assert not (await verify(world.tiers, "run")).damage

    run(work())


def test_what_a_copier_wrote_that_died_behind_a_sweep_goes_with_the_next_collection(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2)
        record = (world.folder / "shared" / old.record_path(1)).read_bytes()
        await world.expire()
        await world.collect()
        await world.tiers.get("far").storage.put(old.record_path(1), record)
        world.policy = None
        await world.collect()
        assert "far" not in world.left(old)

    run(work())


def test_a_node_that_dropped_its_copy_gets_no_records(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, policy=policy_of({"last": 9}, tiers={"node": {"keep": [{"last": 1}]}}))
        old, _ = await world.save(1, 2, near=True)
        world.clock.advance(DAY)
        await world.collect()
        assert world.left(old, ["node"]) == {"node": [f".log/{old.name}/evicted.json"]}
        await pin(world.tiers, old, clock=world.clock)
        await world.collect()
        assert world.left(old, ["node"]) == {"node": [f".log/{old.name}/evicted.json"]}

    run(work())


# ---- the commit record, which makes a copy readable by itself


@pytest.mark.parametrize("lost", ["", MANIFEST, INDEX])
def test_a_lost_copy_of_the_commit_record_comes_back_where_the_copy_stands(tmp_path: Path, lost: str) -> None:
    async def work() -> None:
        world = World(tmp_path)
        (old,) = await world.save(1)
        (tmp_path / "far" / old.record_path(0)).unlink()
        if lost:
            path_of(world.tiers, "far", old, lost).unlink()
        assert [f.code for f in (await verify(world.tiers, "run")).damage][:1] == ["V114"]
        await world.collect()
        assert numbers(world, "far", old) == ([] if lost else [0, 1])
        assert [f.code for f in (await verify(world.tiers, "run")).damage if f.code == "V114"] == (["V114"] if lost else [])
        assert (await world.info(old)).replicas["far"] == ("partial" if lost else "complete")

    run(work())
