"""Unchanged bytes once: a later checkpoint's file takes them from an earlier one's on the same tier, and nothing of it ever dangles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from packed_kit import PackedMemory, lora_shard, packed_tiers, persist_lora, save_lora
from retention_kit import RUN, info_of, load_whole, policy_of
from stepping_kit import MemoryStorage
from tiers_kit import BLOCK, SteppedClock, persist_rank

from tierstore.errors import NotFoundError, RefusedError
from tierstore.names import Attempt, new_save_id, shard_name
from tierstore.storage.sources import BytesSource
from tierstore.tiers import references
from tierstore.tiers.bring import BRING, bring
from tierstore.tiers.catalog import Catalog, RecordCache, scan
from tierstore.tiers.commit import commit
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.decisions import pin, undelete
from tierstore.tiers.direct import Refers
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.evict import evict
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.gc.reports import CollectReport
from tierstore.tiers.leases import LeaseWatch, hold_lease
from tierstore.tiers.log import append, read_log
from tierstore.tiers.log_facts import fold
from tierstore.tiers.promote import promote, reconcile
from tierstore.tiers.quarantine import quarantine
from tierstore.tiers.recover import recover
from tierstore.tiers.referrers import kept_text
from tierstore.tiers.repair import repair
from tierstore.tiers.tier import Tiers
from tierstore.tiers.verify import verify

T = TypeVar("T")
HOUR = 3600.0
POLICY = policy_of({"last": 1}, min_age_s=1.0, undelete_window_s=1.0, orphan_grace_s=HOUR, max_clock_skew_s=1.0)


class World:
    """A node's disk, a plain authority and a packed further tier; and who works there. `packed`: which tiers are packed."""

    def __init__(self, *packed: str) -> None:
        self.storages: dict[str, MemoryStorage] = {
            name: PackedMemory(f"memory://{name}") if name in (packed or ("far",)) else MemoryStorage(f"memory://{name}")
            for name in ("node", "shared", "far")
        }
        self.clock = SteppedClock()
        self.policy: Any = POLICY
        self.context = CopyContext.make(self.tiers, self.clock)

    @property
    def tiers(self) -> Tiers:
        return packed_tiers(self.storages)

    @property
    def far(self) -> PackedMemory:
        found = self.storages["far"]
        assert isinstance(found, PackedMemory)
        return found

    def h(self, **changes: Any) -> Housekeeping:
        made = Housekeeping(
            tiers=self.tiers, run=RUN, policy=self.policy, clock=self.clock, cache=RecordCache(), leases=LeaseWatch(self.clock)
        )
        return replace(made, **changes)

    def attempt(self, step: int) -> Attempt:
        self.clock.advance(60)
        return Attempt(run=RUN, step=step, save_id=new_save_id(self.clock.now()))

    async def save(self, step: int, *, to: str = "far", fresh: bool = False, **shape: Any) -> Attempt:
        """Commits a step and copies it; `fresh`: by a process that knows nothing yet."""
        attempt = await save_lora(self.tiers, self.attempt(step), **shape)
        if to:
            context = CopyContext.make(self.tiers, self.clock) if fresh else self.context
            await promote(self.tiers, attempt, to, clock=self.clock, context=context)
        return attempt

    async def catalog(self) -> Catalog:
        return await scan(self.tiers, RUN, RecordCache())

    async def collect(self, **options: Any) -> CollectReport:
        report = await collect(self.h(), **options)
        assert not report.failed, report.failed
        return report

    async def let_go(self, *, keep: int = 1, grace_s: float = HOUR) -> CollectReport:
        """Decides what goes but for the last ones, and frees it."""
        self.policy = policy_of({"last": keep}, min_age_s=1.0, undelete_window_s=1.0, orphan_grace_s=grace_s, max_clock_skew_s=1.0)
        self.clock.advance(HOUR)
        await prune(self.h())
        self.clock.advance(HOUR)
        return await self.collect()

    def left(self, attempt: Attempt, tier: str = "far") -> list[str]:
        """The names of what lies in an attempt's two folders on a tier."""
        files = self.storages[tier].files
        return sorted(p.rpartition("/")[2] for p in files if p.startswith((f"{attempt.folder}/", f"{attempt.log_folder}/")))

    def stored(self, attempt: Attempt, tier: str = "far") -> int:
        """Bytes that its shards take up on a tier."""
        return sum(len(data) for path, data in self.storages[tier].files.items() if path.startswith(f"{attempt.folder}/shard-"))

    async def load(self, attempt: Attempt, *tiers: str) -> None:
        """Every byte, proved, from these tiers alone."""
        info = await info_of(self.tiers, attempt)
        await load_whole(self.tiers, attempt, info=replace(info, replicas=dict.fromkeys(tiers or ("far",), "complete")))

    async def facts(self, attempt: Attempt) -> Any:
        return fold(await read_log(self.tiers.authority.storage, attempt))


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def test_a_second_checkpoint_costs_what_changed_and_loads_when_the_first_one_is_deleted() -> None:
    async def act() -> None:
        world = World()
        one, two = await world.save(1), await world.save(2)
        assert world.stored(two) < world.stored(one) // 2
        assert world.far.refers_to(two.path(shard_name(0, 1))) == (one.path(shard_name(0, 1)),)
        await world.load(two)
        report = await world.let_go()
        assert [kept for attempt, kept in report.waiting if attempt == one]
        assert world.left(one) == ["000000.json", "000001.json", "000002.json", "000003.json", "000004.json", shard_name(0, 1)]
        assert world.left(one, "shared") == world.left(one)[:-1]
        await world.load(two)
        assert [info.attempt for info in (await world.catalog()).checkpoints] == [two]
        three = await world.save(3, seed=5)  # nothing like the others
        assert not world.far.refers_to(three.path(shard_name(0, 1)))
        await world.let_go()
        await world.collect()
        assert world.left(one) == world.left(two) == []
        assert len(world.left(one, "shared")) == len(world.left(two, "shared")) == 2
        assert not (await world.catalog()).reduced

    run(act())


def test_what_a_reduced_checkpoint_is_to_everybody_is_deleted() -> None:
    async def act() -> None:
        world = World()
        one, two = await world.save(1), await world.save(2)
        await world.let_go()
        catalog = await world.catalog()
        assert catalog.swept == (one,)
        assert catalog.reduced[one].serves == {"far": (two,)}
        assert kept_text(catalog.reduced[one].serves) == "its bytes on far are kept for step 2"
        with pytest.raises(NotFoundError, match="it was deleted"):
            catalog.resolve(_step(1))
        for decide in (pin, undelete):
            with pytest.raises(RefusedError, match="too late: step 1"):
                await decide(world.tiers, one, clock=world.clock)
        with pytest.raises(NotFoundError, match="was deleted by"):
            await bring(
                world.context, one, world.tiers.get("far"), lease=hold_lease(world.tiers, one, ttl_s=9, clock=world.clock, kind=BRING)
            )
        with pytest.raises(NotFoundError, match="was deleted by"):
            async with hold_lease(world.tiers, one, ttl_s=9, clock=world.clock):
                pass
        assert (await reconcile(world.tiers, RUN, clock=world.clock)).ok
        await world.let_go()
        assert shard_name(0, 1) in world.left(one)
        report = await verify(world.tiers, RUN, level="full", clock=world.clock)
        assert not report.findings, report.findings

    run(act())


def _step(step: int) -> Any:
    from tierstore.names import Reference

    return Reference(run=RUN, selector="step", step=step)


def test_without_the_authority_a_reduced_checkpoint_is_gone_and_its_referrer_is_whole() -> None:
    async def act() -> None:
        world = World()
        one, two = await world.save(1), await world.save(2)
        await world.let_go()
        world.storages["shared"] = MemoryStorage("memory://shared")
        catalog = await world.catalog()
        assert [info.attempt for info in catalog.checkpoints] == [two]
        assert catalog.swept == (one,)
        assert catalog.reduced[one].authority_lost
        await world.load(two)
        report = await recover(world.tiers, RUN, clock=world.clock)
        assert report.ok, report
        facts = await world.facts(one)
        assert facts.reduced == {"far"}
        assert two.folder in facts.referenced["far"]
        await world.let_go()
        await world.load(two)
        assert world.left(one, "shared") == ["000000.json", "000001.json", "000002.json", "000003.json", "000004.json"]
        await world.save(3, seed=5)
        await world.let_go()
        await world.collect()
        assert not world.far.dangling()
        assert world.left(one) == world.left(two) == []

    run(act())


def test_a_reference_that_the_copies_of_a_lost_log_did_not_have_is_found_in_the_files() -> None:
    async def act() -> None:
        world = World()
        one, two = await world.save(1), await world.save(2)
        assert "000002.json" not in world.left(one)  # no collection has copied it yet
        world.storages["shared"] = MemoryStorage("memory://shared")
        assert (await recover(world.tiers, RUN, clock=world.clock)).ok
        assert (await world.facts(one)).referenced == {"far": (two.folder,)}
        await world.let_go()
        await world.load(two)

    run(act())


def test_a_copy_that_is_dropped_leaves_its_shards_for_who_refers_to_them() -> None:
    async def act() -> None:
        world = World()
        one, two = await world.save(1), await world.save(2)
        freed = await evict(world.h(), await info_of(world.tiers, one), "far")
        assert freed.kept_for == (two,)
        assert world.left(one) == [shard_name(0, 1)]
        await world.load(two)
        await world.collect()
        assert world.left(one) == [shard_name(0, 1)]
        info = await info_of(world.tiers, one)
        assert info.serves == {"far": (two,)}
        assert not (await verify(world.tiers, RUN, level="full", clock=world.clock)).findings
        three = await world.save(3)  # the first one's copy is no base any more, nor are its bytes: stored anew
        assert not world.far.refers_to(three.path(shard_name(0, 1)))
        await world.let_go()
        await world.collect()
        assert world.left(one) == world.left(two) == []
        await world.load(three)

    run(act())


def test_a_copy_that_was_dropped_comes_back_over_its_shards() -> None:
    async def act() -> None:
        world = World()
        one, two = await world.save(1), await world.save(2)
        await evict(world.h(), await info_of(world.tiers, one), "far")
        lease = hold_lease(world.tiers, one, ttl_s=9, clock=world.clock, kind=BRING)
        assert await bring(world.context, one, world.tiers.get("far"), lease=lease)
        await world.load(one)
        await world.load(two)

    run(act())


def test_a_referrer_whose_copy_was_dropped_still_keeps_the_shards_for_it_may_come_back() -> None:
    async def act() -> None:
        world = World()
        one, two = await world.save(1), await world.save(2)
        await evict(world.h(), await info_of(world.tiers, two), "far")
        await world.let_go()
        assert shard_name(0, 1) in world.left(one)
        assert world.left(two) == []
        lease = hold_lease(world.tiers, two, ttl_s=9, clock=world.clock, kind=BRING)
        assert await bring(world.context, two, world.tiers.get("far"), lease=lease)
        assert not world.far.refers_to(two.path(shard_name(0, 1)))  # what is brought back is self-contained
        await world.load(two)

    run(act())


def test_references_are_one_deep_and_a_chain_goes_with_its_last_referrer() -> None:
    async def act() -> None:
        world = World()
        made = [await world.save(step, fresh=step % 2 == 0) for step in range(1, 6)]
        first = made[0].path(shard_name(0, 1))
        assert {world.far.refers_to(attempt.path(shard_name(0, 1))) for attempt in made[1:]} == {(first,)}
        await world.let_go(keep=2)
        assert [world.left(attempt) for attempt in made[1:3]] == [[], []]
        assert shard_name(0, 1) in world.left(made[0])
        last = await world.save(6, fresh=True)  # a reduced one is still referred to
        assert world.far.refers_to(last.path(shard_name(0, 1))) == (first,)
        await world.let_go()
        await world.load(last)
        await world.save(7, seed=9)
        await world.let_go()
        await world.collect()
        assert {path.split("/")[1] for path in world.far.files if "shard" in path} == {(await world.catalog()).checkpoints[0].attempt.name}

    run(act())


def test_after_so_many_referrers_the_next_one_stores_the_bytes_and_is_the_base_of_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "MOST_REFERRERS", 3)

    async def act() -> None:
        world = World()
        made = [await world.save(step) for step in range(1, 8)]
        shards = [attempt.path(shard_name(0, 1)) for attempt in made]
        assert [world.far.refers_to(shard) for shard in shards] == [(), *[(shards[0],)] * 3, (), *[(shards[4],)] * 2]

    run(act())


def test_a_base_that_is_damaged_expired_or_not_whole_there_gives_nothing() -> None:
    async def act() -> None:
        world = World()
        one = await world.save(1)
        await quarantine(world.tiers, one, world.tiers.get("far"), {shard_name(0, 1): "a bit"}, world_size=1, clock=world.clock)
        two = await world.save(2)
        assert not world.far.refers_to(two.path(shard_name(0, 1)))
        await append(world.tiers.authority.storage, two, "expired", {"reason": "by hand"}, clock=world.clock)
        three = await world.save(3)
        assert not world.far.refers_to(three.path(shard_name(0, 1)))
        await world.save(4, to="")
        five = await world.save(5)
        assert world.far.refers_to(five.path(shard_name(0, 1))) == (three.path(shard_name(0, 1)),)

    run(act())


def test_a_quarantined_base_keeps_its_referrers_bytes_until_it_is_mended() -> None:
    async def act() -> None:
        world = World()
        one, two = await world.save(1), await world.save(2)
        shard = one.path(shard_name(0, 1))
        data = bytearray(world.far.files[shard])
        data[BLOCK + 5] ^= 1
        world.far.files[shard] = bytes(data)
        report = await verify(world.tiers, RUN, level="full", clock=world.clock, note_damage=True)
        assert {finding.checkpoint for finding in report.damage} == {one.folder, two.folder}
        await repair(world.tiers, RUN, clock=world.clock)
        assert not (await verify(world.tiers, RUN, level="full", clock=world.clock)).damage
        await world.load(one)
        await world.load(two)

    run(act())


@pytest.mark.parametrize("lost", [False, True])
def test_a_base_is_mended_first_and_those_that_take_its_bytes_are_good_again_as_they_are(lost: bool) -> None:
    async def act() -> None:
        world = World()
        one, *later = [await world.save(step) for step in (1, 2, 3)]
        shard = one.path(shard_name(0, 1))
        if lost:
            await world.far.delete([shard])
        else:
            world.far.files[shard] = world.far.files[shard][:-1000] + bytes(1000)
        report = await repair(world.tiers, RUN, clock=world.clock)
        assert [mended.attempt for mended in report.mended] == [one]
        assert all(world.far.refers_to(attempt.path(shard_name(0, 1))) == (shard,) for attempt in later)
        assert not (await verify(world.tiers, RUN, level="full", clock=world.clock)).damage
        for attempt in (one, *later):
            await world.load(attempt)

    run(act())


def test_a_referrer_whose_bytes_are_gone_is_found_named_and_mended() -> None:
    async def act() -> None:
        world = World()
        one, two = await world.save(1), await world.save(2)
        await world.let_go()
        await world.far.delete([one.path(shard_name(0, 1))])  # by hand: nothing of ours does
        report = await verify(world.tiers, RUN, level="quick", clock=world.clock)
        (finding,) = report.damage
        assert (finding.code, finding.checkpoint, finding.file) == ("V101", two.folder, shard_name(0, 1))
        assert one.path(shard_name(0, 1)) in finding.detail
        await repair(world.tiers, RUN, clock=world.clock)
        assert not world.far.refers_to(two.path(shard_name(0, 1)))
        await world.load(two)

    run(act())


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 4)])
def test_of_another_world_size_equal_blocks_are_found_wherever_they_lie(sizes: tuple[int, int]) -> None:
    async def act() -> None:
        world = World()
        one = await world.save(1, world_size=sizes[0])
        two = await world.save(2, world_size=sizes[1])
        await world.load(two)
        if sizes[0] == sizes[1]:
            assert world.stored(two) < world.stored(one) // 2
        await world.let_go()
        await world.load(two)

    run(act())


def test_a_packed_authority_refers_before_the_commit_and_the_bytes_stay_for_a_save_under_way() -> None:
    async def act() -> None:
        world = World("shared")
        shared = world.storages["shared"]
        assert isinstance(shared, PackedMemory)
        one, two = world.attempt(1), world.attempt(2)
        await persist_lora(world.tiers, one, tier="node", world_size=2)
        assert (await reconcile(world.tiers, RUN, clock=world.clock)).ok
        await persist_rank(world.tiers, two, world.tiers.nearest, world_size=2, shard=lora_shard(2, world_size=2))
        assert (await reconcile(world.tiers, RUN, clock=world.clock)).ok
        assert shared.refers_to(two.path(shard_name(0, 2))) == (one.path(shard_name(0, 2)),)
        await save_lora(world.tiers, world.attempt(9), seed=7)
        await world.let_go(grace_s=100 * HOUR)
        assert [item.attempt for item in (await world.catalog()).incomplete] == [two]
        assert world.left(one, "node") == []
        assert (await world.catalog()).reduced[one].serves == {"shared": (two,)}
        await persist_rank(world.tiers, two, world.tiers.nearest, rank=1, world_size=2, shard=lora_shard(2, rank=1, world_size=2))
        assert (await reconcile(world.tiers, RUN, clock=world.clock)).ok
        assert (await world.facts(two)).committed
        await world.load(two, "shared")

    run(act())


def test_each_rank_of_a_save_straight_to_the_authority_refers_for_its_own_shard() -> None:
    async def act() -> None:
        world = World("shared")
        one, two, three = (world.attempt(step) for step in (1, 2, 3))
        await persist_lora(world.tiers, one, world_size=2, context=world.context)
        await commit(world.tiers, one, deadline_s=0, clock=world.clock)
        contexts = [CopyContext.make(world.tiers, world.clock) for _ in range(2)]  # a process each
        for attempt in (two, three):
            for rank, context in enumerate(contexts):
                shard = lora_shard(attempt.step, rank=rank, world_size=2)
                refer = Refers(context=context, attempt=attempt, tier=world.tiers.authority, block_nbytes=BLOCK, whole=False)
                await persist_rank(world.tiers, attempt, world.tiers.authority, rank=rank, world_size=2, shard=shard, refer=refer)
            await commit(world.tiers, attempt, deadline_s=0, clock=world.clock)
        shared = world.storages["shared"]
        assert isinstance(shared, PackedMemory)
        for attempt in (two, three):
            for rank in range(2):
                assert shared.refers_to(attempt.path(shard_name(rank, 2))) == (one.path(shard_name(rank, 2)),)
        facts = await world.facts(one)
        assert sorted(facts.referenced["shared"]) == [two.folder, three.folder]  # one record for all ranks
        assert world.stored(three, "shared") < world.stored(one, "shared") / 4
        await world.let_go()
        assert not world.stored(two, "shared")
        assert world.stored(one, "shared")
        await world.load(three, "shared")

    run(act())


def test_where_a_direct_save_found_nothing_the_next_ones_are_hashed_beside_the_write_until_something_is_the_same() -> None:
    async def act() -> None:
        world = World("shared")
        found = []
        for step, seed in enumerate((0, 1, 2, 2, 2, 2)):
            attempt = world.attempt(step)
            shard = BytesSource(lora_shard(step, seed=seed).data)
            refer = Refers(context=world.context, attempt=attempt, tier=world.tiers.authority, block_nbytes=BLOCK, whole=True)
            first = await refer.expected(shard_name(0, 1), shard)
            await persist_lora(world.tiers, attempt, seed=seed, context=world.context)
            await commit(world.tiers, attempt, deadline_s=0, clock=world.clock)
            found.append((first, world.stored(attempt, "shared") < 8000))
        nothing, looked, small = (False, False), (True, False), (True, True)
        assert found == [nothing, looked, nothing, nothing, small, small]

    run(act())


def test_a_referrer_that_was_never_heard_of_again_is_condemned_and_holds_nothing() -> None:
    async def act() -> None:
        world = World()
        one, lost = await world.save(1), world.attempt(2)
        data: Mapping[str, str] = {"tier": "far", "by": lost.folder}
        await append(world.tiers.authority.storage, one, "referenced", data, clock=world.clock)
        await world.save(3, seed=8)
        world.policy = policy_of({"last": 1}, min_age_s=1.0, undelete_window_s=1.0, orphan_grace_s=10 * HOUR, max_clock_skew_s=1.0)
        world.clock.advance(HOUR)
        await prune(world.h())
        world.clock.advance(HOUR)
        await world.collect()
        assert shard_name(0, 1) in world.left(one)
        world.clock.advance(20 * HOUR)
        await world.collect()
        assert world.left(one) == []
        assert (await world.facts(lost)).condemned

    run(act())


def test_a_run_without_unchanged_blocks_writes_no_record() -> None:
    async def act() -> None:
        world = World()
        one, _ = await world.save(1), await world.save(2, seed=3)
        assert not (await world.facts(one)).referenced

    run(act())


def test_a_reader_of_the_referrer_keeps_what_it_refers_to() -> None:
    async def act() -> None:
        world = World()
        one, two = await world.save(1), await world.save(2)
        await world.save(3, seed=4)
        async with hold_lease(world.tiers, two, ttl_s=10 * HOUR, clock=world.clock):
            await world.let_go()
            await world.collect()
            await world.load(two)
        world.clock.advance(HOUR)
        await world.let_go()
        await world.collect()
        await world.collect()
        assert world.left(one) == world.left(two) == []

    run(act())


@pytest.mark.parametrize("payload", [True, False])
def test_where_the_base_has_lost_its_log_for_good_the_referrer_is_written_anew(payload: bool) -> None:
    async def act() -> None:
        world = World()
        one, two = await world.save(1), await world.save(2)
        files = {path: data for path, data in world.storages["shared"].files.items() if path.startswith(f"{two.folder}/") and payload}
        world.storages["shared"] = MemoryStorage("memory://shared", files)
        lost = (f"{one.log_folder}/", f"{one.folder}/part-")  # with its parts it would be finished, and committed again
        await world.far.delete([path for path in world.far.files if path.startswith(lost)])
        assert (await recover(world.tiers, RUN, clock=world.clock)).ok
        assert not world.far.refers_to(two.path(shard_name(0, 1)))
        late_s = max(0.0, time.time() - world.clock.now().timestamp())  # files are as old as they are, whatever day it is where this runs
        world.clock.advance(late_s + 1000 * HOUR)
        await world.collect()  # what is left of the first one is nobody's
        assert world.left(one) == []
        await world.load(two)

    run(act())
