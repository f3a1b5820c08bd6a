"""Mending logs: a record of the authority is put back byte by byte from a copy, and a replica's copies from the authority."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from tierstore.errors import ConflictError, IntegrityError, NotFoundError, StorageError, TierStoreError
from tierstore.format.record import Record
from tierstore.names import Attempt, attempt_of_log_path
from tierstore.tiers.log import parse_record, read_log, record_seq, swept_in
from tierstore.tiers.log_copies import copy_records
from tierstore.tiers.mending import Mended, Unmended
from tierstore.tiers.tier import Tier, Tiers

__all__ = ["mend_log_copies", "mend_record"]

log = logging.getLogger(__name__)


async def mend_record(tiers: Tiers, path: str, *, dry_run: bool) -> Mended | Unmended:
    """Puts back a record that the authority has lost, or that can't be read there, with exactly the bytes of the replicas' copies.

    A record carries its own digest, so that a copy that can be read is the record. Copies that contradict each other decide nothing.
    """
    split = attempt_of_log_path(path)
    seq = record_seq(split[1]) if split else None
    if split is None or seq is None:
        raise ValueError(f"{path} is no record's path")
    attempt, authority = split[0], tiers.authority
    unmended = Unmended(attempt=attempt, tier=authority.name, file=path, reason="no tier has a good copy of it")
    found: dict[str, tuple[Record, bytes]] = {}
    there = await _read(authority, path, seq)
    if isinstance(there, StorageError):
        return replace(unmended, reason=there.message, exit_code=there.exit_code)
    if isinstance(there, tuple) or await _is_swept(authority, attempt):
        return Mended(attempt=attempt, tier=authority.name, file=path)
    for tier in tiers:
        if tier.name != authority.name:
            copy = await _read(tier, path, seq)
            if isinstance(copy, tuple):
                found[tier.name] = copy
    if not found:
        return unmended
    record, data = next(iter(found.values()))
    if any(other != record for other, _ in found.values()):
        return replace(unmended, reason=f"the copies on {', '.join(found)} contradict each other")
    try:
        if dry_run:
            pass
        elif isinstance(there, NotFoundError):
            await authority.storage.create(path, data)
        else:
            await authority.storage.put(path, data)
    except ConflictError:
        log.info("%s was written by another process first", path)
    except TierStoreError as error:
        return replace(unmended, reason=error.message, exit_code=error.exit_code)
    return Mended(attempt=attempt, tier=authority.name, file=path, sources=tuple(found), nbytes_fetched=len(data), nbytes_written=len(data))


async def _is_swept(authority: Tier, attempt: Attempt) -> bool:
    """Whether the checkpoint was deleted meanwhile: its log was trimmed then, and lacks nothing."""
    try:
        return swept_in(await read_log(authority.storage, attempt)) is not None
    except IntegrityError:  # that is why we are here
        return False


async def _read(tier: Tier, path: str, seq: int) -> tuple[Record, bytes] | TierStoreError:
    try:
        data = await tier.storage.read(path)
        return parse_record(data, path, seq), data
    except (NotFoundError, IntegrityError) as error:
        return error
    except TierStoreError as error:
        log.debug("tier=%s no copy of %s from here: %s", tier.name, path, error.message)
        return error


async def mend_log_copies(tiers: Tiers, attempt: Attempt, tier: Tier, records: Sequence[Record], *, dry_run: bool) -> Mended | Unmended:
    """Copies the authority's records to a replica again, in place of what is there."""
    try:
        nbytes = await copy_records(tiers.authority, tier, attempt, records, dry_run=dry_run)
    except TierStoreError as error:
        return Unmended(attempt=attempt, tier=tier.name, file=attempt.log_folder, reason=error.message, exit_code=error.exit_code)
    return Mended(
        attempt=attempt,
        tier=tier.name,
        file=attempt.log_folder,
        sources=(tiers.authority.name,),
        nbytes_fetched=nbytes,
        nbytes_written=nbytes,
    )
