"""Nothing is decided and nothing freed where the run is not known for certain, or where too much would go at once."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
from gc_kit import DAY, HOUR, World, policy_of, run
from tiers_kit import Hooked, flip

from tierstore.errors import RefusedError, TemporaryError, UsageError
from tierstore.tiers.gc.collect import tend
from tierstore.tiers.gc.evict import evict
from tierstore.tiers.gc.prune import prune


async def refuses(world: World, match: str) -> None:
    """Every door refuses, and no file has changed since."""
    before = {str(p): p.read_bytes() for p in world.folder.rglob("*") if p.is_file()}
    newest = (await world.catalog()).checkpoints[-1]
    doors = (lambda: prune(world.h()), world.collect, lambda: tend(world.h()), lambda: evict(world.h(), newest, "far"))
    for door in doors:
        with pytest.raises(RefusedError, match=match) as caught:
            await door()
        assert caught.value.exit_code == 7
        assert "hint:" in str(caught.value)
    assert {str(p): p.read_bytes() for p in world.folder.rglob("*") if p.is_file()} == before


def test_one_log_that_cannot_be_read_keeps_the_whole_run(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        _, two, _ = await world.save(1, 2, 3)
        await world.expire()
        flip(tmp_path / "shared" / two.record_path(1))
        await refuses(world, "the logs of step 2 can't be read")

    run(work())


def test_a_commit_record_that_no_tier_can_read_keeps_the_whole_run(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        (one,) = await world.save(1, copy=False)
        await world.save(2, 3)
        await world.expire()
        flip(tmp_path / "shared" / one.record_path(0))
        shutil.rmtree(tmp_path / "far" / one.log_folder)
        await refuses(world, "the logs of step 1 can't be read")

    run(work())


def test_an_authority_that_lost_a_log_or_all_of_them_keeps_the_run(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        _, two, _ = await world.save(1, 2, 3)
        await world.expire()
        shutil.rmtree(tmp_path / "shared" / two.log_folder)
        await refuses(world, "has lost the logs of step 2")
        shutil.rmtree(tmp_path / "shared" / "run")
        await refuses(world, "has lost the logs of steps 1, 2, 3")

    run(work())


def test_an_authority_that_is_down_keeps_the_run(tmp_path: Path) -> None:
    async def work() -> None:
        down = False

        async def hook(operation: str, path: str) -> None:
            if down:
                raise TemporaryError("not mounted", hint="mount it")

        world = World(tmp_path, wrap={"shared": lambda storage: Hooked(storage, hook)})
        await world.save(1, 2)
        await world.expire()
        down = True
        await refuses(world, "whose logs decide, can't be reached: not mounted")

    run(work())


def test_a_listing_that_shrank_keeps_the_run(tmp_path: Path) -> None:
    """Also where no replica remembers: the audit files say how many there were."""

    async def work() -> None:
        world = World(tmp_path)
        _, _, three = await world.save(1, 2, 3)
        await world.expire()
        await world.collect()  # sweeps 1 and 2; their logs stay
        shutil.rmtree(tmp_path / "shared" / three.log_folder)
        shutil.rmtree(tmp_path / "shared" / three.folder)
        shutil.rmtree(tmp_path / "far" / "run")
        await refuses_collecting(world, r"lists 2 logs, and once listed 3 \(run/\.audit/")

    run(work())


async def refuses_collecting(world: World, match: str) -> None:
    for door in (lambda: prune(world.h()), world.collect):
        with pytest.raises(RefusedError, match=match):
            await door()


def test_a_plan_that_deletes_too_much_is_refused_and_two_are_never_too_many(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, policy=policy_of({"last": 1}, gc={"max_delete_fraction": 0.5}))
        await world.save(1, 2, 3, copy=False)
        world.clock.advance(2 * HOUR)
        assert len((await world.prune(dry_run=True)).expired) == 2
        await world.save(4, copy=False)
        world.clock.advance(2 * HOUR)
        with pytest.raises(RefusedError, match="deletes 3 of 4 checkpoints, and at most 50% may go at once"):
            await world.prune()
        assert await world.steps(hidden=False) == [1, 2, 3, 4]
        round_ = await tend(world.h())  # in the background it is said, and what was decided before is freed
        assert (round_.pruned, "deletes 3 of 4" in round_.refused) == (None, True)
        assert len((await world.prune(max_delete_fraction=0.75)).expired) == 3

    run(work())


def test_a_run_that_is_used_to_its_rules_catches_up_by_itself(tmp_path: Path) -> None:
    """Quick saves, or a worker that was away: the share that is due only grows, and the disk would fill until a person comes."""

    async def work() -> None:
        world = World(tmp_path, policy=policy_of({"last": 1}, gc={"max_delete_fraction": 0.5}))
        await world.save(1, copy=False)
        assert (await tend(world.h())).refused == ""
        await world.save(*range(2, 11), copy=False)
        world.clock.advance(2 * HOUR)
        narrower = policy_of({"every": {"steps": 10}}, gc={"max_delete_fraction": 0.5})
        assert "deletes 9 of 10" in (await tend(world.h(policy=narrower))).refused, "other rules are still to be looked at"
        round_ = await tend(world.h())
        assert (round_.refused, len(round_.pruned.expired) if round_.pruned else 0) == ("", 9)

    run(work())


def test_rules_that_only_wait_for_the_least_age_are_not_got_used_to(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, policy=policy_of({"last": 9}))
        await world.save(1, 2, 3, 4, 5, copy=False)
        narrow = policy_of({"last": 1}, gc={"max_delete_fraction": 0.5})
        early = await tend(world.h(policy=narrow))
        assert (early.refused, early.pruned.expired if early.pruned else None) == ("", ())
        world.clock.advance(2 * HOUR)
        assert "deletes 4 of 5" in (await tend(world.h(policy=narrow))).refused
        assert len((await prune(world.h(policy=narrow), max_delete_fraction=1.0)).expired) == 4
        await world.save(6, 7, 8, 9, copy=False)
        world.clock.advance(2 * HOUR)
        assert (await tend(world.h(policy=narrow))).refused == "", "a person has said that these rules are meant"

    run(work())


def test_superseded_attempts_do_not_count_as_deletions(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path, policy=policy_of({"last": 9}, gc={"max_delete_fraction": 0.1}))
        for _ in range(4):
            await world.save(1, copy=False)
        world.clock.advance(2 * HOUR)
        assert len((await world.prune()).expired) == 3
        assert await world.steps(hidden=False) == [1]

    run(work())


def test_a_plan_of_another_run_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        world = World(tmp_path)
        await world.save(1)
        plan = (await world.prune(dry_run=True)).plan
        with pytest.raises(UsageError, match="is of run 'run', not 'other'"):
            await prune(world.h(run="other"), plan)

    run(work())


@pytest.mark.parametrize("skew_days", [-400.0, 400.0])
def test_a_collector_whose_clock_is_off_by_a_year_loses_nothing_that_a_policy_keeps(tmp_path: Path, skew_days: float) -> None:
    async def work() -> None:
        world = World(tmp_path, policy=policy_of({"last": 2}))
        await world.save(1, 2, 3)
        world.clock.wall += timedelta(days=skew_days)
        await world.prune()
        await world.collect()
        await world.collect()
        found = await world.steps()
        assert found[-2:] == [2, 3]
        if skew_days < 0:  # everything seems to come from the future: nothing goes
            assert found == [1, 2, 3]
        else:  # it seems to be old enough; the undelete window is by the clock of who decided
            assert found == [1, 2, 3]
            assert await world.steps(hidden=False) == [2, 3]

    run(work())


def test_days_are_long(tmp_path: Path) -> None:
    """The window is counted from the decision and ends later by the skew that clocks may have."""

    async def work() -> None:
        world = World(tmp_path)
        await world.save(1, 2)
        world.clock.advance(2 * HOUR)
        await world.prune()
        world.clock.advance(DAY + 299)
        assert (await world.collect()).freed == ()
        world.clock.advance(2)
        assert (await world.collect()).freed != ()

    run(work())
