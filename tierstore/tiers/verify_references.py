"""Whether the files that a copy's shards take unchanged bytes from are there, and can be what they are to be; no data is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierstore.errors import IntegrityError, NotFoundError
from tierstore.format.packed.types import packable
from tierstore.names import Attempt
from tierstore.storage.contract import FileInfo, WritesPacked
from tierstore.tiers.referrers import attempt_of
from tierstore.tiers.tier import Tier
from tierstore.tiers.together import together

__all__ = ["Sources", "look_at_sources", "refers_to"]

_AT_ONCE = 32
_MOST_OWNERS = 64
"""A footer that names shards of more checkpoints was never written by us (`references`: four), and is not followed."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What is wrong with what a copy's shards take bytes from, by shard.

    `missing`: the paths that are not there. `wrong`: what their footers say that no footer of ours can, for people.
    """

    missing: Mapping[str, tuple[str, ...]]
    wrong: Mapping[str, str]


async def look_at_sources(tier: Tier, attempt: Attempt, files: Sequence[FileInfo]) -> Sources:
    """Whether the sources of a copy's shards are there, long enough, and shards of checkpoints that were saved earlier: nothing else is
    ever referred to, which is why references never go in circles.

    Args:
        tier: Where the copy lies.
        attempt: Whose it is.
        files: Its shards, as the tier lists them.

    Raises:
        StorageError: The tier can't be read.
    """
    nbytes = {info.path.rpartition("/")[2]: info.nbytes for info in files if info.stored_nbytes is not None}
    referring = await refers_to(tier, attempt, list(nbytes))
    wrong = {name: why for name, paths in referring.items() if (why := _wrong_name(attempt, paths))}
    sound = {name: paths for name, paths in referring.items() if name not in wrong}
    folders = sorted({path.rpartition("/")[0] for paths in sound.values() for path in paths})
    there: dict[str, int] = {}

    async def list_one(folder: str) -> None:
        try:
            there.update((info.path, info.nbytes) for info in (await tier.storage.children(folder)).files)
        except NotFoundError:
            return

    await together(list_one, folders, at_once=_AT_ONCE)
    found = {name: tuple(path for path in paths if path not in there) for name, paths in sound.items()}
    missing = {name: paths for name, paths in found.items() if paths}
    for name in sound.keys() - missing.keys():
        if why := await _too_short(tier, attempt.path(name), nbytes[name], there):
            wrong[name] = why
    return Sources(missing=missing, wrong=wrong)


def _wrong_name(attempt: Attempt, paths: Sequence[str]) -> str:
    """What is wrong with the names of a footer's sources; empty: nothing."""
    for path in paths:
        folder, _, name = path.rpartition("/")
        owner = attempt_of(folder)
        if owner is None or not packable(name):
            return f"its footer takes bytes from {path}, which is no shard"
        if owner.run != attempt.run or owner.save_id >= attempt.save_id:
            return f"its footer takes bytes from {path}, which was not saved before it"
    owners = {path.rpartition("/")[0] for path in paths}
    return (
        f"its footer takes bytes from {len(owners):,} checkpoints: tierstore writes none of more than four"
        if len(owners) > _MOST_OWNERS
        else ""
    )


async def _too_short(tier: Tier, path: str, nbytes: int, there: Mapping[str, int]) -> str:
    """Which source ends before what is taken from it; empty: none does."""
    storage = tier.storage
    assert isinstance(storage, WritesPacked)  # else nothing refers to anything
    try:
        origins = await storage.origins(path, 0, nbytes)
    except (NotFoundError, IntegrityError):
        return ""  # gone or damaged since: another finding
    for part in origins:
        end = part.source + part.end - part.begin
        if end > there.get(part.path, end):
            return f"its footer takes bytes up to {end:,} of {part.path}, which has {there[part.path]:,}"
    return ""
