"""What a run takes up: bytes by attempt, tier and kind of file, from the tiers' listings and nothing else. For people."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierstore.errors import NotFoundError, StorageError, TierStoreError, reason_of
from tierstore.names import INDEX, MANIFEST, OBJECTS, Attempt, attempt_of_log_path
from tierstore.tiers.checkpoint import parse_file_name
from tierstore.tiers.files.places import ROOT
from tierstore.tiers.tier import Tier, Tiers, recheck

__all__ = ["KINDS", "RunUsage", "StoreUsage", "measure_run", "measure_stores", "total_nbytes"]

KINDS = ("shard", "part", "objects", "index", "manifest", "log", "leases", "audit", "other")
"""Kinds of files, in the order in which they are shown. ``other``: not of our grammar, so never deleted by us."""

_DOCUMENTS: Mapping[str, str] = {INDEX: "index", MANIFEST: "manifest", OBJECTS: "objects"}
_FOLDERS: Mapping[str, str] = {".leases": "leases", ".audit": "audit"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUsage:
    """Bytes of one run.

    `nbytes` counts them by (attempt, tier, kind); the attempt is None for what belongs to none: audit files, and files that are not
    ours. `unreachable` maps a tier's name to why it could not be asked.
    """

    run: str
    nbytes: Mapping[tuple[Attempt | None, str, str], int]
    unreachable: Mapping[str, TierStoreError] = field(default_factory=dict)

    def by_attempt(self) -> dict[Attempt | None, dict[str, int]]:
        """Attempt → tier → bytes, all kinds together."""
        found: dict[Attempt | None, dict[str, int]] = {}
        for (attempt, tier, _), nbytes in self.nbytes.items():
            row = found.setdefault(attempt, {})
            row[tier] = row.get(tier, 0) + nbytes
        return found

    def by_kind(self, attempt: Attempt | None = None, *, everything: bool = True) -> dict[str, dict[str, int]]:
        """Kind → tier → bytes, of all files or of one attempt's."""
        found: dict[str, dict[str, int]] = {}
        for (of, tier, kind), nbytes in self.nbytes.items():
            if everything or of == attempt:
                row = found.setdefault(kind, {})
                row[tier] = row.get(tier, 0) + nbytes
        return {kind: found[kind] for kind in KINDS if kind in found}

    def payload(self, attempt: Attempt) -> dict[str, int]:
        """Tier → bytes that go when the attempt goes: everything but its log, of which 200 bytes stay."""
        found: dict[str, int] = {}
        for (of, tier, kind), nbytes in self.nbytes.items():
            if of == attempt and kind != "log":
                found[tier] = found.get(tier, 0) + nbytes
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """How full one tier is, in bytes.

    `nbytes`: what the whole store, all its runs, holds there in `files` files; None where the tier could not be asked, and `error` says
    why. `plain_nbytes`: those of them that are in files of ``tier://`` that are no checkpoints.
    `total_nbytes` and `free_nbytes` are its storage's, whoever uses it; None where that has no meaning (a bucket).
    """

    tier: str
    nbytes: int | None
    files: int = 0
    plain_nbytes: int = 0
    total_nbytes: int | None = None
    free_nbytes: int | None = None
    error: str = ""


async def measure_run(tiers: Tiers, run: str) -> RunUsage:
    """Lists a run on every tier; runs below it (``a/b`` below ``a``) are not counted.

    Raises:
        StorageError: No tier can be reached.
    """
    counted: Counter[tuple[Attempt | None, str, str]] = Counter()
    unreachable: dict[str, TierStoreError] = {}

    async def one(tier: Tier) -> None:
        try:
            await recheck(tiers, tier)
            listed = await tier.storage.list(run)
        except (StorageError, NotFoundError) as error:
            unreachable[tier.name] = error
            return
        for info in listed:
            found = _belongs(run, info.path)
            if found is not None:
                attempt, kind = found
                counted[attempt, tier.name, kind] += info.taken_nbytes

    await asyncio.gather(*(one(tier) for tier in tiers))
    if len(unreachable) == len(tiers):
        raise next(iter(unreachable.values()))
    return RunUsage(run=run, nbytes=counted, unreachable=unreachable)


async def measure_stores(tiers: Tiers, only: Sequence[str] = ()) -> dict[str, StoreUsage]:
    """Lists every tier (or those in `only`) from its root: tier → how full it is."""

    async def one(tier: Tier) -> StoreUsage:
        try:
            await recheck(tiers, tier)
            listed = await tier.storage.list()
            free = await tier.storage.free_nbytes()
        except (StorageError, NotFoundError) as error:
            return StoreUsage(tier=tier.name, nbytes=None, error=reason_of(error))
        return StoreUsage(
            tier=tier.name,
            nbytes=sum(info.taken_nbytes for info in listed),
            files=len(listed),
            plain_nbytes=sum(info.taken_nbytes for info in listed if info.path.startswith(f"{ROOT}/")),
            total_nbytes=await total_nbytes(tier),
            free_nbytes=free,
        )

    return {usage.tier: usage for usage in await asyncio.gather(*(one(tier) for tier in tiers if not only or tier.name in only))}


async def total_nbytes(tier: Tier) -> int | None:
    """The size of the file system that a local tier lies on, in bytes; None for a remote one, or where it can't be told."""
    if not tier.storage.capabilities.local:
        return None
    try:
        return (await asyncio.to_thread(shutil.disk_usage, tier.uri)).total
    except OSError:
        return None  # it is not there yet, or not to be asked; only a column of a table is empty then


def _belongs(run: str, path: str) -> tuple[Attempt | None, str] | None:
    """Whose file it is and of which kind; None for a file of a run below this one."""
    inside = path[len(run) + 1 :]
    first, slash, rest = inside.partition("/")
    if attempt := Attempt.parse(run, first):
        found = parse_file_name(rest)
        return attempt, found[0] if found else _DOCUMENTS.get(rest, "other")
    if first == ".log":
        split = attempt_of_log_path(path)
        return (split[0], "log") if split and split[0].run == run else (None, "other")
    if first in _FOLDERS:
        return Attempt.parse(run, rest.partition("/")[0]) if first == ".leases" else None, _FOLDERS[first]
    if not slash or first.startswith((".", "step-")):
        return None, "other"
    return None
