"""Copies of the log's records beside a replica: for reading only, and what `recover` rebuilds a lost log from (PROTOCOLS.md §2)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from tierstore.errors import IntegrityError, NotFoundError, StorageError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers.log import parse_record
from tierstore.tiers.tier import Tier

__all__ = ["copy_beside", "copy_records"]

log = logging.getLogger(__name__)


async def copy_records(authority: Tier, target: Tier, attempt: Attempt, records: Iterable[Record], *, dry_run: bool = False) -> int:
    """Copies records of the authority's log, byte by byte, each proved by its own digest; returns how many bytes they have.

    In order, so that no copy ever lacks a record before a later one; the commit record last: it makes the replica readable by itself.

    Args:
        authority: Where they are read.
        target: Where they are written.
        attempt: Whose log.
        records: Which; what is there already is written anew.
        dry_run: Only read and prove them.

    Raises:
        IntegrityError: A record came garbled, or as another one; nothing of it was written.
        NotFoundError: A record is gone: the log was trimmed meanwhile.
        StorageError: A tier failed.
    """
    nbytes = 0
    for record in sorted(records, key=lambda r: (r.seq == 0, r.seq)):
        path = attempt.record_path(record.seq)
        data = await authority.storage.read(path)
        if parse_record(data, path, record.seq).nonce != record.nonce:  # a record never changes
            raise IntegrityError(f"{path} is not what it was a moment ago", hint="run `tierstore verify`", file=path)
        nbytes += len(data)
        if not dry_run:
            await target.storage.put(path, data)
    return nbytes


async def copy_beside(authority: Tier, target: Tier, attempt: Attempt, records: Sequence[Record]) -> None:
    """Copies a record that proves a copy beside it, the last of these, and what was written before it meanwhile, say by a copy to another
    tier; where that fails, a collection does it later."""
    try:
        await copy_records(authority, target, attempt, records)
    except (StorageError, NotFoundError, IntegrityError) as error:
        log.info(
            "tier=%s checkpoint=%s record=%d is not beside its copy yet: %s", target.name, attempt.folder, records[-1].seq, error.message
        )
