"""The copies of the log beside the replicas catch up with what was decided since they were made (PROTOCOLS.md §2).

A pin that stands in the authority's log alone is lost with it: the log that `recover` rebuilds from the copies would not know of it, and
retention could delete what was pinned. Nothing is decided or deleted here, so that it needs no policy.

It races with a sweep or an eviction of the same copy. The log is read before the first record is written, and once more after the last
one; what was written too late goes again by the decision that let the copy go, now or, after a crash, in the next collection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierstore.errors import NotFoundError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.storage.contract import FileInfo
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.gc.standing import copies_standing
from tierstore.tiers.log import read_log, record_seq
from tierstore.tiers.log_copies import copy_records
from tierstore.tiers.log_facts import LogFacts, fold
from tierstore.tiers.tier import Tier, ensure_tier
from tierstore.tiers.view import staging

__all__ = ["CaughtUp", "catch_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtUp:
    """How many records were copied (in a dry run: would be); `late`: the copy was let go meanwhile, and they have to go again."""

    records: int = 0
    late: bool = False


async def catch_up(h: Housekeeping, attempt: Attempt, tier: Tier, *, dry_run: bool = False) -> CaughtUp:
    """Copies the records that a replica lacks, unless its copy, or the checkpoint, was let go.

    Raises:
        IntegrityError: The log can't be read.
        StorageError: A tier failed; what was copied is in order, and the next call continues.
    """
    authority = h.tiers.authority
    records = await read_log(authority.storage, attempt)
    listed = await tier.storage.list(attempt.log_folder)
    missing = _missing(attempt, records, listed)
    if not missing or _let_go(fold(records), attempt, tier, listed):
        return CaughtUp()
    if missing[0].seq == 0 and not await _stands_without_record(h, attempt, tier, fold(records)):
        return CaughtUp()
    if dry_run:
        return CaughtUp(records=len(missing))
    await ensure_tier(h.tiers, tier)
    try:
        await copy_records(authority, tier, attempt, missing)
    except NotFoundError:  # trimmed meanwhile
        return CaughtUp(late=True)
    after = fold(await read_log(authority.storage, attempt))
    return CaughtUp(records=len(missing), late=_let_go(after, attempt, tier, await tier.storage.list(attempt.log_folder)))


def _missing(attempt: Attempt, records: Sequence[Record], listed: Iterable[FileInfo]) -> list[Record]:
    there = {record_seq(info.path.removeprefix(f"{attempt.log_folder}/")) for info in listed if info.nbytes}
    return [record for record in records if record.seq not in there]


def _let_go(facts: LogFacts, attempt: Attempt, tier: Tier, listed: Iterable[FileInfo]) -> bool:
    """Whether nothing of the checkpoint is to be on the tier: by the log, or on a node's tier by its marker."""
    return not facts.committed or facts.swept or tier.name in facts.dropped or any(i.path == attempt.evicted_path for i in listed)


async def _stands_without_record(h: Housekeeping, attempt: Attempt, tier: Tier, facts: LogFacts) -> bool:
    """Whether a copy may have its commit record back, which makes it readable by itself: recorded, and looked at, not believed.

    On a node's tier whoever completes it writes the commit record, after the documents.
    """
    if tier.name in {node.name for node in staging(h.tiers)}:
        return False
    return tier.name in (await copies_standing(h.tiers, attempt, facts, without="")).standing
