"""Whether the files that a copy's shards take unchanged bytes from are there: what is missing is named, and no data is read."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.errors import IntegrityError, NotFoundError
from tierstore.names import Attempt
from tierstore.storage.contract import FileInfo, WritesPacked
from tierstore.tiers.tier import Tier
from tierstore.tiers.together import together

__all__ = ["missing_sources", "refers_to"]

_AT_ONCE = 32


async def refers_to(tier: Tier, attempt: Attempt, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The paths that shards on a tier take bytes from, by shard; one that is not there, or whose footer is damaged, is left out.

    Raises:
        StorageError: The tier can't be read.
    """
    storage = tier.storage
    if not isinstance(storage, WritesPacked):
        return {}

    async def one(name: str) -> tuple[str, ...]:
        try:
            facts = await storage.packed_facts(attempt.path(name))
        except (NotFoundError, IntegrityError):
            return ()
        return facts.refers_to if facts is not None else ()

    found = await together(one, names, at_once=_AT_ONCE)
    return {name: paths for name, paths in zip(names, found, strict=True) if paths}


async def missing_sources(tier: Tier, attempt: Attempt, files: Sequence[FileInfo]) -> dict[str, tuple[str, ...]]:
    """Those of a copy's files, by name, that take bytes from files that are not on the tier any more, and which those are.

    Args:
        tier: Where the copy lies.
        attempt: Whose it is.
        files: Its shards, as the tier lists them.

    Raises:
        StorageError: The tier can't be read.
    """
    packed = [info.path.rpartition("/")[2] for info in files if info.stored_nbytes is not None]
    referring = await refers_to(tier, attempt, packed)
    sources = sorted({path for paths in referring.values() for path in paths})

    async def is_there(path: str) -> bool:
        try:
            await tier.storage.stat(path)
        except NotFoundError:
            return False
        return True

    there = dict(zip(sources, await together(is_there, sources, at_once=_AT_ONCE), strict=True))
    missing = {name: tuple(path for path in paths if not there[path]) for name, paths in referring.items()}
    return {name: paths for name, paths in missing.items() if paths}
