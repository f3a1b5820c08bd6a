"""Which unchanged bytes a copy takes from earlier checkpoints on its tier, for people: by their logs and by its shards' footers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.errors import IntegrityError, NotFoundError
from tierstore.names import Attempt
from tierstore.storage.contract import WritesPacked
from tierstore.tiers.catalog import Catalog
from tierstore.tiers.referrers import attempt_of, fold_references
from tierstore.tiers.tier import Tier
from tierstore.tiers.together import together

__all__ = ["Taken", "owners_of", "taken_from"]

_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one checkpoint's shards on a tier take from another's there.

    `nbytes`: bytes of the raw files. `missing`: paths of the files that they are to come from and that are not there.
    """

    owner: Attempt
    nbytes: int
    missing: tuple[str, ...] = ()


def owners_of(catalog: Catalog, attempt: Attempt) -> dict[str, tuple[Attempt, ...]]:
    """Tier → whose logs say that the attempt's files there may take bytes from theirs; who is gone and left nothing is not asked."""
    found: dict[str, list[Attempt]] = {}
    logs = [(info.attempt, info.records) for info in catalog.checkpoints]
    logs += [(reduced.attempt, reduced.records) for reduced in catalog.reduced.values()]
    for owner, records in logs:
        for tier, referrers in fold_references(records).items():
            if attempt in referrers:
                found.setdefault(tier, []).append(owner)
    return {tier: tuple(owners) for tier, owners in found.items()}


async def taken_from(tier: Tier, attempt: Attempt) -> tuple[Taken, ...]:
    """What the attempt's shards on a tier take from other checkpoints there, most first; their footers are read, and no data.

    A shard that is not there takes nothing.

    Raises:
        IntegrityError: A footer is damaged.
        StorageError: The tier can't be read.
    """
    storage = tier.storage
    if not isinstance(storage, WritesPacked):
        return ()
    packed = [info for info in (await storage.children(attempt.folder)).files if info.stored_nbytes is not None]

    async def one(path: str, nbytes: int) -> dict[str, int]:
        try:
            facts = await storage.packed_facts(path)
            origins = await storage.origins(path, 0, nbytes) if facts is not None and facts.refers_to else ()
        except NotFoundError:
            return {}
        taken: dict[str, int] = {}
        for part in origins:
            taken[part.path] = taken.get(part.path, 0) + part.end - part.begin
        return taken

    found: dict[str, int] = {}
    for taken in await together(lambda info: one(info.path, info.nbytes), packed, at_once=_AT_ONCE):
        for path, nbytes in taken.items():
            found[path] = found.get(path, 0) + nbytes
    missing = await _missing(tier, sorted(found))
    owners: dict[Attempt, Taken] = {}
    for path, nbytes in found.items():
        owner = attempt_of(path.rpartition("/")[0])
        if owner is None:
            raise IntegrityError(
                f"a footer on tier {tier.name!r} names {path}, which is no shard", hint="run `tierstore verify`", file=path
            )
        known = owners.get(owner) or Taken(owner=owner, nbytes=0)
        gone = (*known.missing, path) if path in missing else known.missing
        owners[owner] = Taken(owner=owner, nbytes=known.nbytes + nbytes, missing=gone)
    return tuple(sorted(owners.values(), key=lambda one: (-one.nbytes, one.owner)))


async def _missing(tier: Tier, paths: Sequence[str]) -> frozenset[str]:
    async def is_there(path: str) -> bool:
        try:
            await tier.storage.stat(path)
        except NotFoundError:
            return False
        return True

    there = await together(is_there, paths, at_once=_AT_ONCE)
    return frozenset(path for path, found in zip(paths, there, strict=True) if not found)
