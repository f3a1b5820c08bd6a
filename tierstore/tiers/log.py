"""The log of an attempt: write-once numbered records on the authority, appended by winning the next number (PROTOCOLS.md §2, §3).

Record ``000000`` is the attempt's fate, ``committed`` or ``condemned``, and the one who creates it decides (`models/model_gc.py`: the
arbiter). Every later decision is the next number; whoever loses it reads what happened and decides anew.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tierstore.clock import Clock, when_text
from tierstore.errors import ConflictError, IntegrityError, NotFoundError, RefusedError
from tierstore.format.record import Record, decode_record, encode_record
from tierstore.names import Attempt
from tierstore.storage.contract import FileInfo, Storage
from tierstore.tiers.together import together

__all__ = [
    "actor_name",
    "append",
    "decide_fate",
    "files_told",
    "gone_in",
    "lean",
    "new_nonce",
    "parse_record",
    "read_fate",
    "read_log",
    "read_record",
    "record_seq",
    "swept_in",
    "taken_told",
    "too_late",
]

MAX_RECORD_NBYTES = 8 << 20
FILES_OF_AT_MOST = 1024
_DEEDS = {
    "revived": "taking it back",
    "pinned": "the pin",
    "unpinned": "taking the pin off",
    "tagged": "the tag",
    "untagged": "taking the tag off",
    "held": "the hold",
    "released": "ending the hold",
    "expired": "letting it expire",
    "replicated": "the copy",
    "evicting": "dropping a copy",
    "quarantined": "noting the damage",
    "referenced": "a reference to its bytes",
}
"""What a decision is called where a person is told that it came too late."""

_AFTER_REDUCED = frozenset({"referenced", "reduced", "swept"})
"""What may still be decided about a checkpoint of which only shards stay, for others refer to them."""

_LEAF = re.compile(r"(\d{6})\.json")


def actor_name() -> str:
    """Who writes: host and process, for people that read a log."""
    return f"{platform.node() or 'unknown'}:{os.getpid()}"


def new_nonce() -> str:
    """128 random bits: equal bytes in storage mean that this very write made them."""
    return secrets.token_hex(16)


def record_seq(leaf: str) -> int | None:
    """The number in a record's file name, or None for any other name."""
    found = _LEAF.fullmatch(leaf)
    return int(found[1]) if found else None


async def read_record(storage: Storage, attempt: Attempt, seq: int) -> Record:
    """Reads one record.

    Raises:
        NotFoundError: There is none with that number.
        IntegrityError: It can't be parsed, or holds another number than its name; the message names its path.
    """
    path = attempt.record_path(seq)
    return parse_record(await storage.read(path), path, seq)


def parse_record(data: bytes, path: str, seq: int) -> Record:
    """Decodes a record's bytes and checks that they belong under `path`."""
    if len(data) > MAX_RECORD_NBYTES:
        raise IntegrityError(
            f"the log record {path} has {len(data)} bytes", hint="it is foreign or damaged: run `tierstore verify`", file=path
        )
    try:
        record = decode_record(data)
    except IntegrityError as error:
        raise type(error)(f"the log record {path}: {error.message}", hint=error.hint, file=path) from error
    if record.seq != seq:
        raise IntegrityError(f"the log record {path} says that it is number {record.seq}", hint="run `tierstore verify`", file=path)
    return record


async def read_fate(storage: Storage, attempt: Attempt) -> Record | None:
    """Record ``000000`` of an attempt, or None while its fate is open."""
    try:
        return await read_record(storage, attempt, 0)
    except NotFoundError:
        return None


async def read_log(storage: Storage, attempt: Attempt, *, known: Sequence[Record] = ()) -> tuple[Record, ...]:
    """All records of an attempt, in order; empty if its fate is open.

    The listing only says where to begin: the end is found by asking for the next number until there is none, for some shared file
    systems list late (PROTOCOLS.md §1). Of a swept checkpoint what was not trimmed yet: at least ``000000`` and, last, ``swept``.

    Args:
        storage: The authority's storage.
        attempt: Whose log.
        known: Records of it that were read before: those that are still listed are not read again, as a record never changes.

    Raises:
        IntegrityError: A record is missing in the middle, or can't be parsed.
    """
    missing = -1
    for _ in range(2):  # a record that goes between the listing and its reading is being trimmed, and then the next listing shows `swept`
        numbers = await _listed(storage, attempt)
        found = await _read_listed(storage, attempt, numbers, {record.seq: record for record in known if record.seq in numbers})
        if swept_in(found.values()) is not None:
            return tuple(found[seq] for seq in sorted(found))
        missing = next((seq for seq in range(max(numbers, default=-1) + 1) if seq not in found), -1)
        if missing < 0:
            return await _read_on(storage, attempt, [found[seq] for seq in sorted(found)])
    raise IntegrityError(
        f"the log {attempt.log_folder} on {storage.uri} has records up to {max(numbers)}, but one before it is missing: {missing:06d}.json",
        hint="run `tierstore verify`; `tierstore recover` rebuilds a log from the replicas",
        run=attempt.run,
        step=attempt.step,
    )


async def _listed(storage: Storage, attempt: Attempt) -> set[int]:
    listed = await storage.list(attempt.log_folder)
    return {seq for info in listed if (seq := record_seq(info.path.rpartition("/")[2])) is not None}


async def _read_listed(storage: Storage, attempt: Attempt, numbers: set[int], found: dict[int, Record]) -> dict[int, Record]:
    """The records up to the last one listed, as far as they are there; only the listed ones where that one ends the log. `found`: what
    is known of them."""

    async def one(seq: int) -> None:
        try:
            found[seq] = await read_record(storage, attempt, seq)
        except NotFoundError:
            return

    last = max(numbers, default=-1)
    if len(numbers) <= last:  # trimmed, or listed late
        if last not in found:
            await one(last)
        if swept_in(found.values()) is None:
            numbers = set(range(last + 1))
    await together(one, sorted(numbers - found.keys()))
    return found


async def _read_on(storage: Storage, attempt: Attempt, records: list[Record]) -> tuple[Record, ...]:
    while True:
        try:
            records.append(await read_record(storage, attempt, len(records)))
        except NotFoundError:
            return tuple(records)


def files_told(seen: Mapping[str, FileInfo]) -> dict[str, Any]:
    """What a record says of a copy's files by name: the server's word, so that a later HEAD proves them unchanged.

    Of more than `FILES_OF_AT_MOST` shards it says nothing: it has to stay small enough to be read, and everybody reads it.
    """
    if not seen or sum(name.startswith("shard-") for name in seen) > FILES_OF_AT_MOST:
        return {}
    return {"files": {name: {"nbytes": info.nbytes, "etag": info.etag, "checksum": info.checksum} for name, info in sorted(seen.items())}}


def taken_told(seen: Mapping[str, FileInfo], *, besides: int = 0) -> dict[str, int]:
    """What a record says of the bytes that a copy takes up, where these are not its files' lengths; `besides`: bytes of other files."""
    taken = sum(info.taken_nbytes for info in seen.values())
    return {} if taken == sum(info.nbytes for info in seen.values()) else {"taken_nbytes": taken + besides}


def lean(record: Record) -> Record:
    """A record without what it says of each single file of a copy: that is read again where it is wanted (`read_record`).

    With thousands of files in each of many checkpoints, a catalog would be mostly that.
    """
    if record.kind not in ("committed", "replicated") or "files" not in record.data:
        return record
    return replace(record, data={key: value for key, value in record.data.items() if key != "files"})


def swept_in(records: Iterable[Record]) -> Record | None:
    """The record that says that the checkpoint is gone, if there is one: nothing follows it, and those before it may be gone."""
    return next((record for record in records if record.kind == "swept"), None)


def gone_in(records: Iterable[Record]) -> Record | None:
    """The record that says that the checkpoint is gone for everybody: ``swept``, else the last ``reduced``; None: it is not gone."""
    ends = [record for record in records if record.kind in ("reduced", "swept")]
    return swept_in(ends) or (ends[-1] if ends else None)


def too_late(attempt: Attempt, kind: str, swept: Record) -> RefusedError:
    """The error for a decision about a checkpoint that was swept."""
    deed = _DEEDS.get(kind, kind)
    return RefusedError(
        f"{deed} comes too late: step {attempt.step} of run {attempt.run!r} was deleted at {when_text(swept.at)} by {swept.actor}",
        hint="it can't be brought back; pin or hold a checkpoint before it expires, or undelete it while it is only expired",
        run=attempt.run,
        step=attempt.step,
    )


async def append(
    storage: Storage,
    attempt: Attempt,
    kind: str,
    data: Mapping[str, Any],
    *,
    clock: Clock,
    after: int | None = None,
    allow: Callable[[Sequence[Record]], bool] | None = None,
    actor: str | None = None,
    known: Sequence[Record] = (),
) -> Record:
    """Appends a decision by winning the next number; after a lost race it reads again and decides again.

    Nothing follows `swept`, and `reduced` only what is about the shards that stay. As the records before `swept` are trimmed, a number
    that was free for somebody who has slept since then can be won once more: so the log is listed again after the win, and a record
    beside `swept` counts for nothing.

    Args:
        storage: The authority's storage.
        attempt: Whose log.
        kind: One of the kinds of PROTOCOLS.md §2, other than the two fates.
        data: The decision's facts, JSON.
        clock: Dates the record.
        after: The number of the last record that the decision was made upon; if the log has grown since, it is not made.
        allow: The decision's precondition, asked of all records before each try.
        actor: Who decides; host and process by default.
        known: As for `read_log`.

    Raises:
        NotFoundError: The attempt has no fate yet: there is nothing to decide about.
        ConflictError: The log has grown past `after`.
        RefusedError: The checkpoint was swept, or `allow` said no.
        OutcomeUnknownError: The answer was lost and the record can't be read back.
    """
    nonce = new_nonce()
    while True:
        records = await read_log(storage, attempt, known=known)
        if not records:
            raise NotFoundError(
                f"{attempt.log_folder} on {storage.uri} has no commit record",
                hint="only a committed checkpoint can be decided about; `tierstore recover` rebuilds a lost log",
                run=attempt.run,
                step=attempt.step,
            )
        gone = gone_in(records)
        if gone is not None and (gone.kind == "swept" or kind not in _AFTER_REDUCED):
            raise too_late(attempt, kind, gone)
        if after is not None and records[-1].seq != after:
            raise ConflictError(
                f"the log {attempt.log_folder} has grown from {after} to {records[-1].seq} since it was read",
                hint="read it again and decide again",
                run=attempt.run,
                step=attempt.step,
            )
        if allow is not None and not allow(records):
            raise RefusedError(
                f"{kind!r} no longer holds for step {attempt.step} of run {attempt.run!r}: its log ends with {records[-1].kind!r}",
                hint="`tierstore show` prints the checkpoint's log",
                run=attempt.run,
                step=attempt.step,
            )
        record = Record(seq=len(records), kind=kind, at=clock.now(), nonce=nonce, actor=actor or actor_name(), data=dict(data))
        try:
            await storage.create(attempt.record_path(record.seq), encode_record(record))
        except ConflictError:
            continue  # someone else won this number: see what they decided
        last = max(await _listed(storage, attempt), default=record.seq)
        if last > record.seq and (swept := await _swept_at(storage, attempt, last)) is not None:
            raise too_late(attempt, kind, swept)
        return record


async def _swept_at(storage: Storage, attempt: Attempt, seq: int) -> Record | None:
    try:
        return swept_in([await read_record(storage, attempt, seq)])
    except NotFoundError:
        return None


async def decide_fate(
    storage: Storage, attempt: Attempt, kind: str, data: Mapping[str, Any], clock: Clock, *, actor: str | None = None
) -> Record:
    """Creates ``000000``: the commit point, with one winner among any number of racers (PROTOCOLS.md §4.5).

    Args:
        storage: The authority's storage.
        attempt: Whose fate.
        kind: ``committed`` or ``condemned``.
        data: The facts: the manifest's digest, or the reason.
        clock: Dates the record.
        actor: Who decides; host and process by default.

    Returns:
        The record that decides: ours, or the one of whoever was first. The caller looks at its kind.

    Raises:
        IntegrityError: There is a record that can't be parsed.
        OutcomeUnknownError: The answer was lost and the record can't be read back.
    """
    path = attempt.record_path(0)
    record = Record(seq=0, kind=kind, at=clock.now(), nonce=new_nonce(), actor=actor or actor_name(), data=dict(data))
    try:
        await storage.create(path, encode_record(record))
    except ConflictError as lost:
        existing = lost.context.get("existing")
        return parse_record(bytes(existing) if existing is not None else await storage.read(path), path, 0)
    return record
