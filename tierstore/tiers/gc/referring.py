"""Whose files still refer to a checkpoint's shards on a tier: asked before these go (`tests/protocols/model_references.py`).

The order is what holds. First the checkpoint's log, up to a number upon which its end is then won; then each referrer's fate, which never
changes back; then whether anything of the referrer lies on the tier. In doubt it lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierstore.errors import NotFoundError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers.checkpoint import IncompleteAttempt
from tierstore.tiers.gc.housekeeping import Housekeeping, Situation
from tierstore.tiers.gc.orphans import condemn, why_it_stays
from tierstore.tiers.log_facts import fold
from tierstore.tiers.referrers import fold_references
from tierstore.tiers.together import together
from tierstore.tiers.unsaid_references import unsaid_referrers

__all__ = ["living_on", "living_referrers"]

_AT_ONCE = 16


async def living_referrers(
    h: Housekeeping, situation: Situation, attempt: Attempt, records: Sequence[Record], *, decide: bool = True
) -> dict[str, tuple[Attempt, ...]]:
    """Tier → who may still read a checkpoint's shards there, newest first; without tiers where nobody does.

    Args:
        h: Who collects.
        situation: What was seen before or after the records were read; what is known as living lives.
        attempt: The checkpoint.
        records: Its log: who is not in it may not refer to it, if its end is won upon its last number.
        decide: Win the fate of referrers of which nothing was ever heard and that are old enough; False: they live.

    Raises:
        StorageError: A tier can't be listed, or the authority failed.
        IntegrityError: A referrer's fate can't be read.
    """
    living: dict[str, tuple[Attempt, ...]] = {}
    referring = fold_references(records)
    if fold(records).may_have_been_lost:
        for tier, unsaid in (await unsaid_referrers(h.tiers, attempt)).items():
            referring[tier] = tuple(dict.fromkeys((*referring.get(tier, ()), *unsaid)))
    for tier, referrers in referring.items():
        if found := await living_on(h, situation, tier, referrers, decide=decide):
            living[tier] = found
    return living


async def living_on(
    h: Housekeeping, situation: Situation, tier: str, referrers: Iterable[Attempt], *, decide: bool = True
) -> tuple[Attempt, ...]:
    """Those of `referrers` that live, on one tier; as `living_referrers`. Where some are known to live the others are not asked after."""
    catalog = situation.catalog
    gone = {*catalog.swept, *(item.attempt for item in catalog.condemned)}
    open_ones = [referrer for referrer in referrers if referrer not in gone]
    heard_of = {info.attempt for info in catalog.checkpoints} | {item.attempt for item in catalog.incomplete}
    alive = [referrer for referrer in open_ones if referrer in heard_of]
    if not alive:
        alive = [referrer for referrer in open_ones if not (decide and await _ended(h, situation, referrer))]
    if alive or tier not in h.tiers.names:
        return tuple(alive)
    if tier in catalog.unreachable:
        return tuple(referrers)
    storage = h.tiers.get(tier).storage

    async def has_shards(referrer: Attempt) -> bool:
        listed = await storage.list(referrer.folder)
        return any(info.path.rpartition("/")[2].startswith("shard-") for info in listed)  # whatever form it has

    asked = list(referrers)
    there = await together(has_shards, asked, at_once=_AT_ONCE)
    return tuple(referrer for referrer, has in zip(asked, there, strict=True) if has)


async def _ended(h: Housekeeping, situation: Situation, referrer: Attempt) -> bool:
    """Whether an attempt that no tier shows anything of can never commit: its fate is won, as an orphan's is."""
    found = IncompleteAttempt(attempt=referrer)
    if h.policy is None or await why_it_stays(h, situation, found):
        return False
    try:
        return await condemn(h, found)
    except NotFoundError:
        return False
