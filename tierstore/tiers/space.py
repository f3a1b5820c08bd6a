"""Room on a tier: what is written has to fit before it is begun, into the storage and into the capacity that the tier was given.

What a tier with a capacity holds, only a listing of all of it tells. It is listed where that matters: near the limit, and now and then.
"""

from __future__ import annotations

from tierstore.errors import TierFullError
from tierstore.tiers.space_account import Promise
from tierstore.tiers.tier import Tier

__all__ = ["COPY_RESERVE_NBYTES", "SAVE_RESERVE_NBYTES", "check_space", "room_on", "used_on"]

SAVE_RESERVE_NBYTES = 64 << 20
"""Free space that a save leaves on a tier, in bytes: room for logs, and for the file system itself."""

COPY_RESERVE_NBYTES = 1 << 20
"""Free space that a copy leaves, in bytes: directory entries, records."""


_NEAR = 16
"""Within one part of so many of the capacity nothing is reckoned: each check lists the tier."""


async def used_on(tier: Tier) -> int:
    """Bytes that lie on a tier, by a listing, from which later checks reckon on.

    Raises:
        StorageError: The tier does not answer.
    """
    mark = tier.account.begin()
    free = await tier.storage.free_nbytes()
    used = sum(f.taken_nbytes for f in await tier.storage.list())
    tier.account.listed(used, free, mark)
    return used


async def room_on(tier: Tier) -> int | None:
    """How many bytes still fit, in the storage and in the tier's capacity; None where nothing tells. Lists a tier with a capacity.

    Raises:
        StorageError: The tier does not answer.
    """
    free = await tier.storage.free_nbytes()
    if tier.capacity is None:
        return free
    left = max(0, tier.capacity - await used_on(tier))
    return left if free is None else min(left, free)


async def check_space(tier: Tier, nbytes: int, *, reserve_nbytes: int = COPY_RESERVE_NBYTES, raw_nbytes: int | None = None) -> Promise:
    """Refuses to begin what can't fit.

    Args:
        tier: Where it is to be written.
        nbytes: So much, or what it probably comes to.
        reserve_nbytes: Free space to leave.
        raw_nbytes: What it is before it is packed, where `nbytes` is an estimate; for the error.

    Returns:
        What the tier's account was told, for who learns how much it really was.

    Raises:
        TierFullError: Says how many bytes are wanted and how many there are. Nothing was written.
    """
    free = await tier.storage.free_nbytes()
    packed = "" if raw_nbytes is None else f" (about that, packed; {raw_nbytes} before)"
    if free is not None and nbytes + reserve_nbytes > free:
        raise TierFullError(
            f"tier {tier.name!r} has {free} bytes free; {nbytes} are wanted{packed}, and {reserve_nbytes} stay in reserve",
            hint=f"free space on {tier.storage.uri}, or let retention keep fewer checkpoints there; it is tried again by itself",
            tier=tier.name,
            wanted=nbytes,
            free=free,
        )
    if tier.capacity is not None:
        used = tier.account.estimate(free)
        if used is None or used + nbytes > tier.capacity - tier.capacity // _NEAR:
            used = await used_on(tier)
        if used + nbytes > tier.capacity:
            raise TierFullError(
                f"tier {tier.name!r} holds {used} of its {tier.capacity} bytes of capacity, {nbytes} more are wanted{packed}",
                hint="raise the tier's capacity, or let retention keep fewer checkpoints there; it is tried again by itself",
                tier=tier.name,
                wanted=nbytes,
                free=tier.capacity - used,
            )
    return tier.account.promise(nbytes)
