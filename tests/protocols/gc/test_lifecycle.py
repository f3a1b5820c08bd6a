"""From save to gone: expire, wait, sweep, delete, trim; nothing goes early, and what was decided can be taken back until it is swept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gc_kit import DAY, HOUR, World, policy_of, run, swept_log

from tierstore.errors import NotFoundError, RefusedError
from tierstore.names import Reference
from tierstore.tiers.decisions import pin, set_metrics, undelete
from tierstore.tiers.gc.collect import tend
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.log import read_log
from tierstore.tiers.replica import open_replica
from tierstore.tiers.retention import Reason
from tierstore.tiers.verify import verify


def test_what_no_rule_keeps_is_hidden_then_swept_then_gone_and_the_rest_is_whole(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, new = await world.save(1, 2, near=True)
        world.clock.advance(2 * HOUR)
        pruned = await world.prune()
        assert (pruned.expired, pruned.passed_over) == ((old,), ())
        assert await world.steps(hidden=False) == [2]
        early = await world.collect()
        assert early.freed == ()
        assert [(a, why.split(" until ")[0]) for a, why in early.waiting] == [(old, "can be taken back")]
        replica = await open_replica(world.tiers, await world.info(old))
        assert replica.manifest.step == 1  # hidden, but it can still be read
        world.clock.advance(DAY + 60)
        over = await world.collect()
        assert (over.freed, [(a, "clocks may differ" in why) for a, why in over.waiting]) == ((), [(old, True)])
        world.clock.advance(241)
        report = await world.collect()
        assert {(f.tier, f.kind) for f in report.freed} == {("node", "sweep"), ("shared", "sweep"), ("far", "sweep")}
        assert (report.failed, report.foreign, report.exit_code) == ((), (), 0)
        assert await world.steps() == [2]
        records = await read_log(world.tiers.authority.storage, old)
        assert [r.kind for r in records] == ["committed", "swept"]
        assert world.left(old) == swept_log(old, records[-1].seq)
        found = await verify(world.tiers, "run", level="full")
        assert found.damage == ()
        again = await world.collect()
        assert (again.freed, again.waiting, again.failed) == ((), (), ())
        assert (await world.catalog()).remains == {}
        assert sorted(world.files("far", new)) != []

    run(work())


def test_a_round_of_housekeeping_decides_and_frees(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2)
        world.clock.advance(2 * HOUR)
        first = await tend(world.h())
        assert first.pruned is not None
        assert first.pruned.expired == (old,)
        world.clock.advance(2 * DAY)
        second = await tend(world.h())
        assert {f.tier for f in second.collected.freed} == {"shared", "far"}
        other = await tend(world.h(shared=False))
        assert other.pruned is None

    run(work())


def test_a_pin_between_expired_and_swept_wins(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2)
        await world.expire()
        await pin(world.tiers, old, clock=world.clock)
        report = await world.collect()
        assert report.freed == ()
        assert await world.steps(hidden=False) == [1, 2]

    run(work())


def test_undelete_after_the_window_wins_as_long_as_nobody_swept(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2)
        await world.expire()
        await undelete(world.tiers, old, clock=world.clock)
        assert (await world.collect()).freed == ()
        await world.prune()
        assert await world.steps(hidden=False) == [1, 2]  # what was taken back is left alone for a window
        world.clock.advance(2 * DAY)
        await world.prune()
        world.clock.advance(2 * DAY)
        await world.collect()
        with pytest.raises(RefusedError, match="too late"):
            await undelete(world.tiers, old, clock=world.clock)

    run(work())


def test_a_wider_policy_or_a_late_metric_keeps_what_had_expired(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, policy=policy_of({"last": 1}, {"best": {"metric": "loss", "mode": "min", "missing": "worst"}}))
        one, two, three = await world.save(1, 2, 3)
        await set_metrics(world.tiers, three, {"loss": 2.0}, clock=world.clock)
        await world.expire()
        assert await world.steps(hidden=False) == [3]
        await set_metrics(world.tiers, one, {"loss": 1.0}, clock=world.clock)
        report = await world.collect()
        assert [a for a, _ in report.waiting] == [one]
        assert {f.attempt for f in report.freed} == {two}
        await world.prune()
        assert await world.steps(hidden=False) == [1, 3]
        assert (await world.info(one)).usable

    run(work())


def test_a_decision_in_between_is_respected_by_number(tmp_path: Path) -> None:
    """A pin comes after the plan was made and before its record is appended: the pin wins, whatever the clocks say."""

    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2)
        world.clock.advance(2 * HOUR)
        h = world.h()
        plan = (await world.prune(dry_run=True)).plan
        storage = world.tiers.authority.storage
        create, pinned = storage.create, False

        async def late(path: str, data: bytes) -> None:
            nonlocal pinned
            if b'"expired"' in data and not pinned:
                pinned = True
                await pin(world.tiers, old, clock=world.clock)
            await create(path, data)

        storage.create = late  # type: ignore[method-assign]
        report = await prune(h, plan)
        assert pinned
        assert report.expired == ()
        assert [a for a, _ in report.passed_over] == [old]
        assert (await world.info(old)).pins == ("pin",)
        assert not (await world.info(old)).hidden

    run(work())


def test_only_what_was_agreed_to_and_is_still_so_is_decided(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        one, two, three = await world.save(1, 2, 3)
        world.clock.advance(2 * HOUR)
        agreed = (await world.prune(dry_run=True)).plan
        assert agreed.deletes == 2
        await pin(world.tiers, one, clock=world.clock)
        await world.save(4)  # three is not the last any more, but nobody has agreed to that
        world.clock.advance(2 * HOUR)
        report = await world.prune(plan=agreed)
        assert report.expired == (two,)
        assert [a for a, why in report.passed_over if "pinned" in why] == [one]
        assert await world.steps(hidden=False) == [1, 3, 4]
        assert three.step == 3

    run(work())


def test_now_does_not_wait_but_protections_still_protect(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        one, two, _ = await world.save(1, 2, 3)
        world.clock.advance(2 * HOUR)
        await world.prune()
        world.protected[two] = Reason(kind="resumed-from", text="resumed from")
        report = await world.collect(now=True)
        assert {f.attempt for f in report.freed} == {one}
        assert await world.steps() == [2, 3]

    run(work())


def test_a_dry_run_says_what_would_go_and_changes_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2, near=True)
        await world.expire()
        before = sorted(str(p) for p in tmp_path.rglob("*"))
        report = await world.collect(dry_run=True)
        assert report.dry_run
        assert {f.tier for f in report.freed} == {"node", "shared", "far"}
        assert sorted(str(p) for p in tmp_path.rglob("*")) == before
        real = await world.collect()
        assert {(f.tier, f.files, f.nbytes) for f in real.freed} == {(f.tier, f.files, f.nbytes) for f in report.freed}
        assert old.step == 1

    run(work())


def test_every_file_is_written_down_before_it_goes(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2, near=True)
        await world.expire()
        before = {(tier, f"run/{name}") for tier in ("node", "shared", "far") for name in world.files(tier, old)}
        storage = world.tiers.get("far").storage
        delete = storage.delete

        async def checked(paths: list[str]) -> None:
            for path in paths:
                assert f'"path": "{path}"' in world.audit()
            await delete(paths)

        storage.delete = checked  # type: ignore[method-assign,assignment]
        report = await world.collect()
        lines = [json.loads(line) for line in (world.audit() + world.audit("node")).splitlines()]
        assert {line["tier"] for line in map(json.loads, world.audit("node").splitlines())} == {"node"}
        gone = {(tier, path) for tier, path in before if not (tmp_path / tier / path).exists()}
        assert {(line["tier"], line["path"]) for line in lines} == gone
        assert all(set(line) == {"at", "actor", "tier", "path", "nbytes", "why"} for line in lines)
        assert sum(line["nbytes"] for line in lines if ".log" not in line["path"] or line["tier"] != "shared") == report.nbytes

    run(work())


def test_without_a_policy_nothing_is_decided_and_what_was_decided_is_finished(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        old, _ = await world.save(1, 2)
        await world.expire()
        world.policy = None
        with pytest.raises(RefusedError, match="no retention policy"):
            await world.prune()
        assert (await world.collect()).freed == ()
        assert await world.steps() == [1, 2]
        world.policy = policy_of()
        await world.collect()
        late = tmp_path / "far" / old.folder / "part-00000.safetensors"  # a zombie writes once more
        late.parent.mkdir()
        late.write_bytes(b"late")
        world.policy = None
        report = await world.collect()
        assert [(f.tier, f.files) for f in report.freed] == [("far", 1)]
        assert not late.parent.exists()

    run(work())


def test_what_was_swept_is_not_found_by_a_reader(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        await world.save(1, 2)
        await world.expire()
        await world.collect()
        with pytest.raises(NotFoundError, match="deleted"):
            (await world.catalog()).resolve(Reference(run="run", selector="step", step=1))

    run(work())


def test_a_store_of_one_tier_and_one_of_two(tmp_path: Path) -> None:
    async def work() -> None:
        for names in (("only",), ("node", "only")):
            world = World(tmp_path / names[0], names=names)
            old, _ = await world.save(1, 2, near=len(names) > 1, copy=False)
            await world.expire()
            report = await world.collect()
            assert {f.tier for f in report.freed} == set(names)
            assert await world.steps() == [2]
            assert world.left(old, names) == {"only": swept_log(old, 2)["shared"]}

    run(work())
