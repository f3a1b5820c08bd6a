"""The n-th operation of a whole housekeeping fails: it is told, nothing is lost, and the next one finishes (PROTOCOLS.md §9.3)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from retention_kit import (
    NAMES,
    RUN,
    Truth,
    check_alone,
    check_step,
    client_tiers,
    files_of_storages,
    garbage,
    housekeeping,
    load_whole,
    persist_small,
    policy_of,
    save_id_at,
    save_small,
)
from stepping_kit import START, MemoryStorage, run_virtually
from tiers_kit import SteppedClock

from tierstore.errors import TierStoreError
from tierstore.names import Attempt
from tierstore.storage.contract import Storage
from tierstore.storage.posix import PosixStorage
from tierstore.storage.s3 import S3Storage
from tierstore.testing.faults import FaultKind, FaultPlan, FaultStorage
from tierstore.tiers.catalog import scan
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.evict import evict
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.promote import promote, reconcile

KINDS: tuple[FaultKind, ...] = ("error_before", "error_after", "short_read", "bit_flip", "no_space", "cancel")
NEVER = 1_000_000
POLICY = policy_of(
    {"last": 2}, min_age_s=1.0, undelete_window_s=1.0, orphan_grace_s=60.0, max_clock_skew_s=1.0, tiers={"node": {"keep": [{"last": 1}]}}
)
VICTIM, KEPT, NEWEST, ORPHAN = (
    Attempt(run=RUN, step=step, save_id=save_id_at(START + timedelta(seconds=step), 0)) for step in (1, 7, 9, 5)
)


def later() -> SteppedClock:
    clock = SteppedClock()
    clock.wall = datetime.now(timezone.utc) + timedelta(hours=30)
    return clock


async def build(storages: Mapping[str, Storage]) -> None:
    tiers = client_tiers(storages)
    for attempt in (VICTIM, KEPT, NEWEST):
        await save_small(tiers, attempt, tier="node")
    await reconcile(tiers, RUN, clock=SteppedClock())
    for attempt in (VICTIM, KEPT, NEWEST):
        await promote(tiers, attempt, "far", clock=SteppedClock())
    await persist_small(tiers, ORPHAN, 0, world_size=2)


async def tidy(storages: Mapping[str, Storage]) -> list[TierStoreError]:
    """Decides, frees and evicts; returns what it was told."""
    told: list[TierStoreError] = []
    tiers = client_tiers(storages)
    keeper = housekeeping(tiers, POLICY, later())
    try:
        await prune(keeper)
        told += [failed.error for failed in (await collect(keeper, now=True)).failed]
        info = next((c for c in (await scan(tiers, RUN)).checkpoints if c.attempt == KEPT), None)
        if info is not None and "far" not in info.dropped:
            await evict(keeper, info, "far", reason="by hand")
    except TierStoreError as error:
        told.append(error)
    return told


async def finish(storages: Mapping[str, Storage]) -> None:
    keeper = housekeeping(client_tiers(storages), POLICY, later())
    for _ in range(2):
        report = await collect(keeper, now=True)
        assert not report.failed, report.failed


async def meet(storages: Mapping[str, Storage], plan: FaultPlan) -> None:
    """One housekeeping that meets a fault, and the next one, which does not; the promises after each."""
    before = Truth(await files_of_storages(storages))
    task = asyncio.ensure_future(tidy({name: FaultStorage(storage, plan) for name, storage in storages.items()}))
    await asyncio.wait({task})
    told = [] if task.cancelled() else task.result()
    what = f"{plan.kind} {plan.nth}: {plan.fired}; told {told}"
    for error in told:
        assert str(error), what
    met = Truth(await files_of_storages(storages))
    try:
        check_step(before, met)
        await check_alone(storages, met)
        await finish(storages)
        done = Truth(await files_of_storages(storages))
        check_step(met, done)
        assert not garbage(done), garbage(done)
        assert {KEPT, NEWEST} <= done.existing().keys()
        for attempt in done.existing():
            await load_whole(client_tiers(storages), attempt)
    except (AssertionError, TierStoreError) as error:
        raise AssertionError(what) from error


def numbers_of(count: int, many: int, kind: str) -> list[int]:
    """Which n are tried: all, or a random choice, the same in each run."""
    everything = range(1, count + 1)
    return list(everything) if count <= many else sorted(random.Random(kind).sample(everything, many))


def counted(storages: Mapping[str, Storage], kind: FaultKind, run: Any) -> int:
    plan = FaultPlan(kind, NEVER)
    assert run(tidy({name: FaultStorage(storage, plan) for name, storage in storages.items()})) == []
    return plan.count


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_fails_in_a_housekeeping_loses_nothing_and_the_next_one_finishes(kind: FaultKind, long_run: bool) -> None:
    built: dict[str, Storage] = {name: MemoryStorage(f"memory://{name}") for name in NAMES}
    run_virtually(build(built))

    def copies() -> dict[str, Storage]:
        return {name: MemoryStorage(storage.uri, storage.files) for name, storage in built.items() if isinstance(storage, MemoryStorage)}

    count = counted(copies(), kind, run_virtually)
    numbers = numbers_of(count, count if long_run else 7, kind)
    print(f"{kind}: {len(numbers)} of {count} operations")
    for nth in numbers:
        run_virtually(meet(copies(), FaultPlan(kind, nth)))


@pytest.mark.s3
@pytest.mark.parametrize("kind", ["error_before", "error_after"])
def test_whatever_fails_in_a_housekeeping_on_folders_and_a_real_server_is_finished(
    kind: FaultKind, tmp_path: Any, s3_bucket: str, s3_options: dict[str, Any], long_run: bool
) -> None:
    async def one(place: str, plan: FaultPlan | None) -> int:
        storages: dict[str, Storage] = {name: PosixStorage(tmp_path / place / name, durable=False) for name in ("node", "shared")}
        storages["far"] = S3Storage(f"{s3_bucket}/{place}", s3_options)
        try:
            await build(storages)
            if plan is None:
                counting = FaultPlan(kind, NEVER)
                assert await tidy({name: FaultStorage(storage, counting) for name, storage in storages.items()}) == []
                return counting.count
            await meet(storages, plan)
            return 0
        finally:
            for storage in storages.values():
                await storage.close()

    count = asyncio.run(one("count", None))
    for nth in numbers_of(count, 60 if long_run else 1, kind):
        asyncio.run(one(str(nth), FaultPlan(kind, nth)))
