"""Who takes bytes from a checkpoint whose log no longer says so: it was lost with all its copies, and what is there was committed anew.

By the shards' footers, on every tier; no data is read. It costs a read a shard, so it is done only where a log may have been lost
(`LogFacts.may_have_been_lost`), before bytes go that others may need.
"""

from __future__ import annotations

from tierstore.names import Attempt
from tierstore.storage.contract import WritesPacked
from tierstore.tiers.checkpoint import parse_file_name
from tierstore.tiers.tier import Tier, Tiers
from tierstore.tiers.together import together
from tierstore.tiers.verify_references import refers_to

__all__ = ["unsaid_on", "unsaid_referrers"]

_AT_ONCE = 8


async def unsaid_referrers(tiers: Tiers, attempt: Attempt) -> dict[str, tuple[Attempt, ...]]:
    """Tier → the attempts whose shards there take bytes from this one's, the newest first; without tiers where none do.

    Raises:
        StorageError: A tier can't be read: nobody knows.
    """
    found = {tier.name: await unsaid_on(tier, attempt) for tier in tiers}
    return {name: referrers for name, referrers in found.items() if referrers}


async def unsaid_on(tier: Tier, attempt: Attempt) -> tuple[Attempt, ...]:
    """As `unsaid_referrers`, on one tier."""
    storage = tier.storage
    if not isinstance(storage, WritesPacked) or not await _shards_of(tier, attempt):
        return ()
    folders = [Attempt.parse(attempt.run, folder.rpartition("/")[2]) for folder in (await storage.children(attempt.run)).folders]
    later = sorted((a for a in folders if a is not None and a.save_id > attempt.save_id), key=lambda a: a.save_id, reverse=True)

    async def takes(other: Attempt) -> bool:
        paths = await refers_to(tier, other, await _shards_of(tier, other))
        return any(path.startswith(f"{attempt.folder}/") for some in paths.values() for path in some)

    taking = await together(takes, later, at_once=_AT_ONCE)
    return tuple(other for other, yes in zip(later, taking, strict=True) if yes)


async def _shards_of(tier: Tier, attempt: Attempt) -> list[str]:
    names = [info.path.rpartition("/")[2] for info in (await tier.storage.children(attempt.folder)).files]
    return [name for name in names if (parsed := parse_file_name(name)) is not None and parsed[0] == "shard"]
