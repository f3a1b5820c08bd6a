"""Room for what is packed: asked for as it is, and where it does not fit so, for what it probably comes to. All who write shards ask here.

What the run's newest copy on the tier took, or else what lies there of it, says how far shards are packed there, and the digests say which
bytes need not be stored again.
It is an estimate: whether the disk is full is said by the write, which then leaves nothing and is tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from tierstore.errors import TierFullError, TierStoreError
from tierstore.format.index import FileEntry
from tierstore.format.packed.types import packable
from tierstore.names import Attempt
from tierstore.storage.contract import Storage, WritesPacked
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.log import read_log
from tierstore.tiers.log_facts import fold, quantised_in
from tierstore.tiers.references import committed_attempts
from tierstore.tiers.space import COPY_RESERVE_NBYTES, check_space
from tierstore.tiers.space_account import Promise
from tierstore.tiers.tier import Tier

__all__ = ["check_room", "check_room_beside", "check_room_to_save"]

log = logging.getLogger(__name__)

_MARGIN = 0.1
"""So much more than the newest copy took is asked for."""
_LEAST = 0.01
"""So much of the raw bytes a packed file takes up at least: tables, the part that is never packed."""
_LOOKED_AT = 8
"""So many of the newest checkpoints are looked at for one that has a copy of the same kind on the tier."""


async def check_room(
    context: CopyContext,
    attempt: Attempt,
    target: Tier,
    shards: Sequence[FileEntry],
    block_nbytes: int,
    *,
    besides: int = 0,
    lossy: bool = False,
    refer: bool = False,
) -> Promise:
    """Refuses to begin a copy that can't fit.

    Args:
        context: Of the copies.
        attempt: What is copied.
        target: Where to.
        shards: The shards that are to be written.
        block_nbytes: The block size of their digests.
        besides: Bytes of other files, which are never packed.
        lossy: The copy is to be quantised.
        refer: Bytes that the target has already may be referred to.

    Returns:
        What the tier's account was told.

    Raises:
        TierFullError: It does not fit, by the estimate neither. Nothing was written.
    """
    raw = sum(file.nbytes for file in shards)

    async def packed() -> int:
        same = 0
        for file in shards if refer else ():
            same += await context.references.unchanged_nbytes(context.tiers, attempt, target, file, block_nbytes)
        home = context.tiers.is_authority(target)
        share = await _share_taken(context.tiers.authority.storage, attempt.run, target, home=home, lossy=lossy)
        if share is None and target.quantise is None:
            share = await _share_there(attempt.run, target)
        return _estimate(raw, same, share)

    return await _asked(target, attempt, raw, besides, COPY_RESERVE_NBYTES, packed)


async def check_room_beside(attempt: Attempt, tier: Tier, nbytes: int, *, besides: int = 0, reserve_nbytes: int) -> Promise:
    """The same where no log tells of the tier's copies: on a node's.

    Args:
        attempt: What is written.
        tier: Where to.
        nbytes: Length of the shards.
        besides: Bytes of other files.
        reserve_nbytes: Free space to leave.

    Raises:
        TierFullError: It does not fit, by the estimate neither. Nothing was written.
    """

    async def packed() -> int:
        return _estimate(nbytes, 0, await _share_there(attempt.run, tier))

    return await _asked(tier, attempt, nbytes, besides, reserve_nbytes, packed)


async def check_room_to_save(attempt: Attempt, tier: Tier, nbytes: int, *, besides: int, home: bool, reserve_nbytes: int) -> Promise:
    """The same before a save straight to a tier: nothing is known of its bytes.

    Args:
        attempt: What is saved.
        tier: Where to.
        nbytes: The shard's length.
        besides: Bytes of other files.
        home: Whether the tier is the authority; else no log says how far shards are packed on it.
        reserve_nbytes: Free space to leave.

    Raises:
        TierFullError: It does not fit, by the estimate neither. Nothing was written.
    """
    if not home:
        return await check_room_beside(attempt, tier, nbytes, besides=besides, reserve_nbytes=reserve_nbytes)

    async def packed() -> int:
        return _estimate(nbytes, 0, await _share_taken(tier.storage, attempt.run, tier, home=True, lossy=False))

    return await _asked(tier, attempt, nbytes, besides, reserve_nbytes, packed)


async def _asked(
    tier: Tier, attempt: Attempt, raw: int, besides: int, reserve_nbytes: int, packed: Callable[[], Awaitable[int]]
) -> Promise:
    """Asks for room for `raw` bytes of shards and `besides`; where there is none, and the tier packs, for what `packed` says instead."""
    try:
        return await check_space(tier, raw + besides, reserve_nbytes=reserve_nbytes)
    except TierFullError:
        if not isinstance(tier.storage, WritesPacked):
            raise
        nbytes = await packed()
        if nbytes >= raw:
            raise
    log.info("tier=%s checkpoint=%s does not fit as it is; packed it takes about %d bytes", tier.name, attempt.folder, nbytes + besides)
    return await check_space(tier, nbytes + besides, reserve_nbytes=reserve_nbytes, raw_nbytes=raw + besides)


def _estimate(raw: int, same: int, share: float | None) -> int:
    """What shards of `raw` bytes probably take up, of which `same` bytes are there already; never more than what is known to be enough."""
    most = raw - same
    by_history = most if share is None else int(raw * share * (1 + _MARGIN))
    return max(min(most, by_history), int(raw * _LEAST))


async def _share_taken(storage: Storage, run: str, tier: Tier, *, home: bool, lossy: bool) -> float | None:
    """What the run's newest copy on a tier took of its raw bytes; None: there is none, or nothing tells."""
    try:
        for attempt in (await committed_attempts(storage, run))[:_LOOKED_AT]:
            facts = fold(await read_log(storage, attempt))
            record = facts.fate if home else facts.replicated.get(tier.name)
            if record is None or not (facts.committed and facts.fate) or (quantised_in(record.data) is not None) != lossy:
                continue
            raw, taken = facts.fate.data.get("nbytes"), record.data.get("taken_nbytes")
            if type(raw) is int and raw > 0:
                return min(1.0, taken / raw) if type(taken) is int and taken >= 0 else 1.0
    except TierStoreError as error:
        log.info("tier=%s run=%s what its copies took is not known: %s", tier.name, run, error.message)
    return None


async def _share_there(run: str, tier: Tier) -> float | None:
    """What the run's newest shards that lie on a tier take of their raw bytes; None: there are none, or nothing tells."""
    try:
        folders = [Attempt.parse(run, folder.rpartition("/")[2]) for folder in (await tier.storage.children(run)).folders]
        newest = sorted((attempt for attempt in folders if attempt is not None), key=lambda attempt: attempt.save_id, reverse=True)
        for attempt in newest[:_LOOKED_AT]:
            files = (await tier.storage.children(attempt.folder)).files
            shards = [info for info in files if info.nbytes and packable(info.path.rpartition("/")[2])]
            if shards:
                return min(1.0, sum(info.taken_nbytes for info in shards) / sum(info.nbytes for info in shards))
    except TierStoreError as error:
        log.info("tier=%s run=%s what its shards take is not known: %s", tier.name, run, error.message)
    return None
