"""The n-th operation of a whole housekeeping fails: it is told, nothing is lost, and the next one finishes (PROTOCOLS.md §9.3)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest
from collection_kit import KEPT, NEWEST, build, finish, tidy
from retention_kit import (
    NAMES,
    Truth,
    check_alone,
    check_step,
    client_tiers,
    files_of_storages,
    garbage,
    load_whole,
)
from stepping_kit import MemoryStorage, run_virtually

from tierstore.errors import TierStoreError
from tierstore.storage.contract import Storage
from tierstore.storage.posix import PosixStorage
from tierstore.storage.s3 import S3Storage
from tierstore.testing.faults import FaultKind, FaultPlan, FaultStorage

KINDS: tuple[FaultKind, ...] = ("error_before", "error_after", "short_read", "bit_flip", "no_space", "cancel")
NEVER = 1_000_000


async def meet(storages: Mapping[str, Storage], plan: FaultPlan) -> None:
    """One housekeeping that meets a fault, and the next one, which does not; the promises after each."""
    before = Truth(await files_of_storages(storages))
    task = asyncio.ensure_future(tidy(client_tiers({name: FaultStorage(storage, plan) for name, storage in storages.items()})))
    await asyncio.wait({task})
    told = [] if task.cancelled() else task.result()
    what = f"{plan.kind} {plan.nth}: {plan.fired}; told {told}"
    for error in told:
        assert str(error), what
    met = Truth(await files_of_storages(storages))
    try:
        check_step(before, met)
        await check_alone(storages, met)
        await finish(client_tiers(storages))
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
    assert run(tidy(client_tiers({name: FaultStorage(storage, plan) for name, storage in storages.items()}))) == []
    return plan.count


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_fails_in_a_housekeeping_loses_nothing_and_the_next_one_finishes(kind: FaultKind, long_run: bool) -> None:
    built: dict[str, Storage] = {name: MemoryStorage(f"memory://{name}") for name in NAMES}
    run_virtually(build(client_tiers(built)))

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
            await build(client_tiers(storages))
            if plan is None:
                counting = FaultPlan(kind, NEVER)
                assert await tidy(client_tiers({name: FaultStorage(storage, counting) for name, storage in storages.items()})) == []
                return counting.count
            await meet(storages, plan)
            return 0
        finally:
            for storage in storages.values():
                await storage.close()

    count = asyncio.run(one("count", None))
    for nth in numbers_of(count, 60 if long_run else 1, kind):
        asyncio.run(one(str(nth), FaultPlan(kind, nth)))
