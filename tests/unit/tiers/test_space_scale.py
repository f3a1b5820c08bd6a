"""The check of a tier's capacity: listings where they matter, none where there is room, and never more on the tier than it may hold."""

from __future__ import annotations

import asyncio

import pytest

from tierstore.errors import TierFullError
from tierstore.testing.bucket import Bucket
from tierstore.tiers.space import check_space, used_on
from tierstore.tiers.space_account import FRESH_LOCAL_S, FRESH_S, SpaceAccount
from tierstore.tiers.tier import Tier


class Time:
    """Seconds that only the test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Disk(Bucket):
    """A storage that tells its free space."""

    size = 1_000_000

    async def free_nbytes(self) -> int | None:
        return self.size - sum(info.nbytes for info in map(self._info, self._names))


def tier_of(storage: Bucket, time: Time, capacity: int = 100_000) -> Tier:
    return Tier(name="t", storage=storage, scope="shared", capacity=capacity, account=SpaceAccount(time))


async def fill(tier: Tier, step: int, nbytes: int) -> None:
    """A copy as the tiers make it: checked, then written."""
    await check_space(tier, nbytes, reserve_nbytes=0)
    await tier.storage.put(f"r/{step}", bytes(nbytes))


@pytest.mark.parametrize("storage", [Bucket(), Disk()], ids=["bucket", "disk"])
def test_copies_with_room_list_once_and_the_last_of_the_room_is_checked_exactly(storage: Bucket) -> None:
    async def work() -> None:
        tier = tier_of(storage, Time())
        for step in range(93):
            await fill(tier, step, 1000)
        assert storage.requests["list"] == 1
        await fill(tier, 93, 6000)
        with pytest.raises(TierFullError, match="holds 99000 of its 100000 bytes"):
            await fill(tier, 94, 1500)
        assert await used_on(tier) <= 100_000

    asyncio.run(work())


def test_room_that_a_deletion_made_is_found_when_it_is_needed() -> None:
    async def work() -> None:
        tier = tier_of(storage := Bucket(), Time())
        for step in range(90):
            await fill(tier, step, 1000)
        await storage.delete([f"r/{step}" for step in range(80)])
        await fill(tier, 100, 50_000)

    asyncio.run(work())


def test_what_others_write_shows_in_the_disk_s_free_space() -> None:
    async def work() -> None:
        tier = tier_of(storage := Disk(), Time())
        await fill(tier, 0, 1000)
        await storage.put("other/0", bytes(95_000))
        with pytest.raises(TierFullError, match="holds 96000"):
            await fill(tier, 1, 10_000)

    asyncio.run(work())


@pytest.mark.parametrize(("storage", "fresh_s"), [(Bucket(), FRESH_S), (Disk(), FRESH_LOCAL_S)], ids=["bucket", "disk"])
def test_an_old_listing_is_not_reckoned_on_from(storage: Bucket, fresh_s: float) -> None:
    async def work() -> None:
        tier = tier_of(storage, time := Time())
        await fill(tier, 0, 1000)
        time.seconds = fresh_s + 1
        await fill(tier, 1, 1000)
        assert storage.requests["list"] == 2

    asyncio.run(work())


def test_what_is_promised_while_the_tier_is_listed_counts_on() -> None:
    account = SpaceAccount(Time())
    mark = account.begin()
    account.promise(70)
    account.listed(20, None, mark)
    assert account.estimate(None) == 90
