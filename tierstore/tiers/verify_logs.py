"""Verifying what the logs say and whether their copies would do: lost, unreadable and missing records, and what was left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from tierstore.errors import AccessError, IntegrityError, NotFoundError, StorageError
from tierstore.format.record import Record
from tierstore.names import TMP, Attempt, attempt_of_log_path, log_root
from tierstore.storage.temporaries import owner_is_dead
from tierstore.tiers.catalog import Catalog
from tierstore.tiers.checkpoint import CheckpointInfo, Reduced
from tierstore.tiers.leftovers import bare
from tierstore.tiers.log import lean, read_record, record_seq
from tierstore.tiers.log_facts import fold
from tierstore.tiers.tier import Tier, Tiers
from tierstore.tiers.together import together
from tierstore.tiers.verify_files import Looking
from tierstore.tiers.view import further

__all__ = ["look_at_authority", "look_at_exactness", "look_at_log_copies", "look_at_tier", "numbers_of"]

log = logging.getLogger(__name__)

_INEXACT = frozenset({"quantised", "partial", "evicting"})
"""What is never all of a checkpoint, bit by bit."""

Wanted = Callable[[Attempt], bool]


@runtime_checkable
class _HasUploads(Protocol):
    async def stale_uploads(self, older_than_s: float) -> list[str]: ...


async def look_at_authority(looking: Looking, tiers: Tiers, catalog: Catalog, wanted: Wanted) -> None:
    """What the authority's logs say: which checkpoints they have lost, which records can't be read, which attempts are open."""
    authority = tiers.authority
    reached = authority.name not in catalog.unreachable
    for found in catalog.incomplete:
        if not wanted(found.attempt):
            continue
        if found.unreadable:
            looking.note("V105", found.attempt.record_path(0), found.unreadable, attempt=found.attempt)
        else:
            missing = f"; ranks {', '.join(map(str, found.missing))} missing" if found.missing else ""
            looking.note("V107", "", f"no commit record{missing}", attempt=found.attempt)
    if not reached:
        return
    for info in catalog.checkpoints:
        if wanted(info.attempt) and info.authority_lost:
            gone = "" if authority.name in info.replicas else f"; nothing of its files is left on {authority.name}"
            detail = f"known from the copies on {', '.join(n for n in info.replicas if n != authority.name)} alone{gone}"
            looking.note("V110", info.attempt.log_folder, detail, attempt=info.attempt)
    known: list[CheckpointInfo | Reduced] = [*catalog.checkpoints, *catalog.reduced.values()]
    damaged = [c for c in known if c.damaged and not c.authority_lost and wanted(c.attempt)]
    if damaged:
        numbers = await numbers_of(authority, catalog.run)
        for item in damaged:
            await _unreadable_records(looking, authority, item, numbers.get(item.attempt, set()))


def look_at_exactness(looking: Looking, catalog: Catalog, wanted: Wanted) -> None:
    """Checkpoints of which this tier has a quantised copy, and no tier that was reached anything that is exact."""
    for info in catalog.checkpoints:
        if wanted(info.attempt) and info.replicas.get(looking.tier) == "quantised" and set(info.replicas.values()) <= _INEXACT:
            down = f" that was reached (not reached: {', '.join(catalog.unreachable)})" if catalog.unreachable else ""
            scheme = (info.quantised_on(looking.tier) or {}).get("scheme")
            what = f"quantised ({scheme})" if scheme else "quantised"
            detail = f"an exact copy is on no tier{down}; this one is {what}, and loads with a warning"
            looking.note("V125", "", detail, attempt=info.attempt)


async def _unreadable_records(looking: Looking, authority: Tier, info: CheckpointInfo | Reduced, numbers: set[int]) -> None:
    for seq in range(max(numbers, default=-1) + 1):
        path = info.attempt.record_path(seq)
        try:
            await read_record(authority.storage, info.attempt, seq)
        except NotFoundError:
            looking.note("V105", path, "it is missing before later ones", attempt=info.attempt)
        except IntegrityError as error:
            looking.note("V105", path, _plainly(error, path), attempt=info.attempt)


def _plainly(error: IntegrityError, path: str) -> str:
    """What is wrong with a record, where its name stands beside."""
    return error.message.removeprefix(f"the log record {path}").lstrip(": ")


async def look_at_tier(looking: Looking, tier: Tier, catalog: Catalog, wanted: Wanted) -> None:
    """What is on a tier that belongs to no checkpoint: foreign names, temporaries, unfinished uploads, what a deletion left."""
    for path in catalog.foreign:
        where, _, name = path.partition(":")
        if where == tier.name:
            looking.note("V106", name, "not of tierstore's grammar")
    for name in await asyncio.to_thread(_temporaries, tier):
        looking.note("V108", name, "its process is gone")
    storage = bare(tier)
    if isinstance(storage, _HasUploads):
        try:
            for path in await storage.stale_uploads(looking.work.tiers.upload_grace_s):
                looking.note("V118", path, "begun longer ago than a living writer needs, and never finished")
        except AccessError as error:  # a reader's credentials need not be allowed to list uploads
            log.debug("tier=%s uploads can't be listed: %s", tier.name, error.message)
    swept = set(catalog.swept)
    for attempt, names in catalog.remains.items():
        if tier.name in names and wanted(attempt):
            looking.note("V116", "", f"left of a {'deleted' if attempt in swept else 'condemned'} attempt", attempt=attempt)


def _temporaries(tier: Tier) -> list[str]:
    """Temporaries on a local tier whose process is provably gone."""
    folder = tier.storage.local_path(TMP)
    if folder is None or not folder.is_dir():
        return []
    return sorted(f"{TMP}/{path.name}" for path in folder.iterdir() if owner_is_dead(path.name))


async def numbers_of(tier: Tier, run: str) -> dict[Attempt, set[int]]:
    """The numbers of the records that a tier's listing shows, by attempt."""
    numbers: dict[Attempt, set[int]] = {}
    for info in await tier.storage.list(log_root(run)):
        split = attempt_of_log_path(info.path)
        if split is not None and (seq := record_seq(split[1])) is not None:
            numbers.setdefault(split[0], set()).add(seq)
    return numbers


async def look_at_log_copies(looking: Looking, tiers: Tiers, info: CheckpointInfo, tier: Tier, numbers: Mapping[Attempt, set[int]]) -> None:
    """Compares a replica's copies of the records with the authority's. Later ones that it lacks are nothing: a collection copies them."""
    held = info.replicas.get(tier.name)
    recorded = tier.name in fold(info.records).replicated and tier.name in [t.name for t in further(tiers)]
    if tiers.is_authority(tier) or info.authority_lost or tier.name in info.dropped:
        return
    if held not in ("complete", "quarantined") and not recorded:
        return
    there = numbers.get(info.attempt, set())
    if 0 not in there and held is not None:
        looking.note("V114", info.attempt.record_path(0), "its copy of the commit record is missing")
    known = {record.seq: record for record in info.records}

    async def compare(seq: int) -> None:
        path = info.attempt.record_path(seq)
        try:
            copy = await read_record(tier.storage, info.attempt, seq)
        except NotFoundError:
            return  # trimmed since the listing
        except IntegrityError as error:
            looking.note("V114", path, _plainly(error, path))
            return
        if seq in known and lean(copy) != known[seq]:
            looking.note("V114", path, "it differs from the authority's record")
        elif seq not in known and not info.damaged and await _lacks(tiers.authority, info.attempt, copy):
            looking.note("V105", path, f"tier {tier.name!r} has a copy of it, the authority has not")

    await together(compare, sorted(there))


async def _lacks(authority: Tier, attempt: Attempt, copy: Record) -> bool:
    """Whether the authority really has no record with the copy's number: it may have been appended since the catalog was read."""
    try:
        await read_record(authority.storage, attempt, copy.seq)
    except NotFoundError:
        return True
    except (IntegrityError, StorageError) as error:
        log.debug("checkpoint=%s record=%d %s", attempt.folder, copy.seq, error.message)
    return False
