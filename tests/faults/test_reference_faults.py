"""The n-th operation fails while a checkpoint's packed file begins to take bytes from another one's, and while that one is deleted: it is
told, or the bytes are stored whole; nothing dangles, and the next process finishes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest
from packed_kit import save_lora
from retention_kit import NAMES, RUN, client_tiers, housekeeping, info_of, load_whole, policy_of, save_id_at
from stepping_kit import START, MemoryStorage
from tiers_kit import SteppedClock

from tierstore.errors import TierStoreError
from tierstore.names import Attempt
from tierstore.storage.contract import Storage
from tierstore.storage.packed import PackedStorage, Packing
from tierstore.testing.faults import FaultKind, FaultPlan, FaultStorage
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.promote import promote
from tierstore.tiers.tier import Tiers
from tierstore.tiers.verify import verify

KINDS: tuple[FaultKind, ...] = ("error_before", "error_after", "short_read", "bit_flip", "no_space", "cancel")
POLICY = policy_of({"last": 1}, min_age_s=1.0, undelete_window_s=1.0, orphan_grace_s=60.0, max_clock_skew_s=1.0)
BASE, REFERRER, OTHER = (Attempt(run=RUN, step=step, save_id=save_id_at(START + timedelta(seconds=step), 0)) for step in (1, 7, 9))
Places = dict[str, MemoryStorage]


def later() -> SteppedClock:
    clock = SteppedClock()
    clock.advance(100_000)
    return clock


def tiers_of(places: Places, plan: FaultPlan | None = None) -> Tiers:
    """The further tier packs its shards, and takes unchanged bytes once; faults happen beneath."""
    below: Mapping[str, Storage] = {name: FaultStorage(place, plan) if plan else place for name, place in places.items()}
    plain = client_tiers(below)
    far = replace(plain.get("far"), storage=PackedStorage(below["far"], Packing(codec="raw", threads=1)), unchanged_once=True)
    return replace(plain, tiers=tuple(far if tier.name == "far" else tier for tier in plain))


async def build() -> Places:
    places = {name: MemoryStorage(f"memory://{name}") for name in NAMES}
    for attempt in (BASE, REFERRER):
        await save_lora(tiers_of(places), attempt)
    await promote(tiers_of(places), BASE, "far", clock=later())
    return places


async def work(tiers: Tiers) -> list[TierStoreError]:
    """Copies the later one, lets the earlier one go; returns what it was told."""
    try:
        await promote(tiers, REFERRER, "far", clock=later())
        await prune(housekeeping(tiers, POLICY, later()))
        return [failed.error for failed in (await collect(housekeeping(tiers, POLICY, later()), now=True)).failed]
    except TierStoreError as error:
        return [error]


async def whole(places: Places) -> None:
    """Where the copy counts it is whole, by itself."""
    info = await info_of(tiers_of(places), REFERRER)
    if "far" in info.replicated:
        await load_whole(tiers_of(places), REFERRER, info=replace(info, replicas={"far": "complete"}))


async def meet(built: Places, plan: FaultPlan) -> None:
    places = {name: MemoryStorage(place.uri, place.files) for name, place in built.items()}
    task = asyncio.ensure_future(work(tiers_of(places, plan)))
    await asyncio.wait({task})
    told = [] if task.cancelled() else task.result()
    try:
        await whole(places)
        assert await work(tiers_of(places)) == []
        assert "far" in (await info_of(tiers_of(places), REFERRER)).replicated
        await whole(places)
        assert not (await verify(tiers_of(places), RUN, level="full", clock=later())).damage
        await save_lora(tiers_of(places), OTHER, seed=5)
        await prune(housekeeping(tiers_of(places), POLICY, later()))
        for _ in range(2):
            report = await collect(housekeeping(tiers_of(places), POLICY, later()), now=True)
            assert not report.failed, report.failed
        left = [path for path in places["far"].files if BASE.name in path or REFERRER.name in path]
        assert not left, left
    except (AssertionError, TierStoreError) as error:
        raise AssertionError(f"{plan.kind} {plan.nth}: {plan.fired}; told {told}") from error


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_fails_nothing_dangles_and_the_next_process_finishes(kind: FaultKind, long_run: bool) -> None:
    async def act() -> None:
        built = await build()
        counting = FaultPlan(kind, 1_000_000)
        assert await work(tiers_of({n: MemoryStorage(p.uri, p.files) for n, p in built.items()}, counting)) == []
        everything = range(1, counting.count + 1)
        chosen = everything if long_run or len(everything) <= 5 else sorted(random.Random(kind).sample(everything, 5))
        for nth in chosen:
            await meet(built, FaultPlan(kind, nth))

    asyncio.run(act())
