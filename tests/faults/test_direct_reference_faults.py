"""The n-th operation fails while a save straight to a packed authority begins to take bytes from an earlier checkpoint, and while that one
is deleted: it is told, or the bytes are stored whole; nothing dangles, and the same save, tried again, commits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest
from packed_kit import persist_lora, save_lora
from retention_kit import NAMES, RUN, client_tiers, housekeeping, info_of, load_whole, save_id_at
from stepping_kit import START, MemoryStorage
from test_reference_faults import BASE, KINDS, OTHER, POLICY, REFERRER, Places, later

from tierstore.errors import CondemnedError, TierStoreError
from tierstore.names import Attempt
from tierstore.storage.contract import Storage
from tierstore.storage.packed import PackedStorage, Packing
from tierstore.testing.faults import FaultKind, FaultPlan, FaultStorage
from tierstore.tiers.commit import commit
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.tier import Tiers
from tierstore.tiers.verify import verify

AGAIN = Attempt(run=RUN, step=7, save_id=save_id_at(START + timedelta(seconds=8), 0))


def tiers_of(places: Places, plan: FaultPlan | None = None) -> Tiers:
    """The authority packs its shards, and takes unchanged bytes once; faults happen beneath."""
    below: Mapping[str, Storage] = {name: FaultStorage(place, plan) if plan else place for name, place in places.items()}
    plain = client_tiers(below)
    packed = replace(plain.authority, storage=PackedStorage(below["shared"], Packing(codec="raw", threads=1)), unchanged_once=True)
    made = tuple(packed if tier.name == "shared" else tier for tier in plain)
    return replace(plain, tiers=made, authority=packed, durable_at=packed)


async def work(tiers: Tiers, attempt: Attempt = REFERRER) -> list[TierStoreError]:
    """Saves the later one, lets the earlier one go; returns what it was told."""
    try:
        await persist_lora(tiers, attempt, context=CopyContext.make(tiers, later()))
        await commit(tiers, attempt, deadline_s=0, clock=later())
        await prune(housekeeping(tiers, POLICY, later()))
        return [failed.error for failed in (await collect(housekeeping(tiers, POLICY, later()), now=True)).failed]
    except TierStoreError as error:
        return [error]


async def meet(built: Places, plan: FaultPlan) -> None:
    places = {name: MemoryStorage(place.uri, place.files) for name, place in built.items()}
    task = asyncio.ensure_future(work(tiers_of(places, plan)))
    await asyncio.wait({task})
    told = [] if task.cancelled() else task.result()
    try:
        tiers = tiers_of(places)
        assert not (await verify(tiers, RUN, level="full", clock=later())).damage
        attempt = AGAIN if any(isinstance(error, CondemnedError) for error in told) else REFERRER  # its part could not be read
        assert await work(tiers, attempt) == []
        await load_whole(tiers, attempt, info=replace(await info_of(tiers, attempt), replicas={"shared": "complete"}))
        assert not (await verify(tiers, RUN, level="full", clock=later())).damage
        await save_lora(tiers, OTHER, seed=5)
        clock = later()
        clock.advance(100_000)
        await prune(housekeeping(tiers, POLICY, clock))
        for _ in range(2):
            report = await collect(housekeeping(tiers, POLICY, clock), now=True)
            assert not report.failed, report.failed
        left = [path for path in places["shared"].files if "/shard-" in path and OTHER.name not in path]
        assert not left, left
    except (AssertionError, TierStoreError) as error:
        raise AssertionError(f"{plan.kind} {plan.nth}: {plan.fired}; told {told}") from error


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_fails_a_save_straight_to_a_packed_tier_leaves_nothing_dangling_and_commits_when_tried_again(
    kind: FaultKind, long_run: bool
) -> None:
    async def act() -> None:
        built = {name: MemoryStorage(f"memory://{name}") for name in NAMES}
        await save_lora(tiers_of(built), BASE)
        counting = FaultPlan(kind, 1_000_000)
        places = {name: MemoryStorage(place.uri, place.files) for name, place in built.items()}
        assert await work(tiers_of(places, counting)) == []
        facts = await tiers_of(places).authority.storage.packed_facts(REFERRER.path("shard-00000-of-00001.safetensors"))  # type: ignore[attr-defined]
        assert facts.refers_to, "nothing is referred to: this test looks at nothing"
        everything = range(1, counting.count + 1)
        chosen = everything if long_run or len(everything) <= 5 else sorted(random.Random(kind).sample(everything, 5))
        for nth in chosen:
            await meet(built, FaultPlan(kind, nth))

    asyncio.run(act())
