"""Verify and repair of files: what each tier holds against the entries; what is damaged is written anew from a tier that has it good."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tierstore.errors import IntegrityError, NotFoundError, StorageError, TierStoreError
from tierstore.format.digest import DIGEST_NBYTES, bad_blocks, block_digests
from tierstore.tiers.budget import ByteBudget
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.files.entry import FileEntry, FileVersion, decode_entry
from tierstore.tiers.files.looking import Held, Key, Looker, OnTier, group
from tierstore.tiers.files.places import Mark, place_of
from tierstore.tiers.files.placing import FilePut, place_data, place_entry
from tierstore.tiers.files.reading import AnyTierSource, Reader, data_path, entry_path
from tierstore.tiers.files.reconcile import look_at_files
from tierstore.tiers.findings import Finding
from tierstore.tiers.tier import Tier, Tiers, ensure_tier
from tierstore.tiers.together import together

__all__ = ["PlainMending", "PlainReport", "mend_files", "verify_files"]

log = logging.getLogger(__name__)

Level = Literal["quick", "sample", "full"]

_PIECE_NBYTES = 8 << 20
_LACKS, _WRONG, _ENTRY, _PENDING = "V120", "V121", "V122", "V123"


@dataclass(slots=True, kw_only=True)
class PlainReport:
    """What was looked at, and what was found. `files` counts copies; `nbytes_read` is what was read and hashed, in bytes."""

    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    nbytes_read: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMending:
    """What became of one damaged copy; `error` where it could not be mended."""

    path: str
    tier: str
    error: TierStoreError | None = None


async def verify_files(
    tiers: Tiers,
    *,
    level: Level = "quick",
    only: Collection[str] | None = None,
    subset: tuple[int, int] = (1, 16),
    files_in_flight: int = 4,
) -> PlainReport:
    """Checks the newest version of every file on every tier that holds it. Nothing is written.

    Args:
        tiers: The store's tiers.
        level: ``quick``: entries and lengths, from listings; ``sample``: also the entries and bytes of one of n groups of files; ``full``:
            of all.
        only: Names of the tiers to check; None: all.
        subset: (k, n): with ``sample``, the k-th of n groups. Which file is in which is fixed by a hash of its path.
        files_in_flight: Files that are read at once.

    Raises:
        StorageError: No tier answers.
    """
    picture = await look_at_files(tiers)
    report = PlainReport()
    budget = ByteBudget(64 << 20)
    work: list[tuple[Tier, FileVersion, Held]] = []
    for key in sorted({key for held in picture.held.values() for key in held}):
        newest = max((m for held in picture.held.values() if key in held and (m := held[key].newest) is not None), default=None)
        if newest is None:
            continue
        for tier in tiers:
            if tier.name not in picture.held or (only is not None and tier.name not in only):
                continue
            held = (picture.held[tier.name].get(key) or OnTier()).marks.get(newest, Held())
            gone = any(h[key].marks[newest].gone for h in picture.held.values() if key in h and newest in h[key].marks)
            if not held.published and not gone and tier in picture.keeping:
                _note(report, _PENDING, tier, key[0], f"its newest version ({newest.version}) is not here yet")
            if held.entry is not None:
                work.append((tier, _version(key, newest, held.entry), held))

    async def one(item: tuple[Tier, FileVersion, Held]) -> None:
        tier, version, held = item
        deep = level == "full" or (level == "sample" and _group(version.path, subset[1]) == subset[0])
        try:
            found = await _check(report, budget, tier, version, held, deep=deep)
        except (StorageError, NotFoundError) as error:
            log.warning("tier=%s file=%r can't be checked: %s", tier.name, version.path, error.message)
            return
        if found is not None and await _still_there(tier, version):
            report.findings.append(found)

    await together(one, work, at_once=files_in_flight)
    report.findings.sort(key=lambda f: (f.code, f.tier, f.file))
    return report


async def mend_files(tiers: Tiers, context: CopyContext, findings: Sequence[Finding]) -> list[PlainMending]:
    """Writes anew what `verify_files` found damaged, from tiers that have it good, proved on the way."""
    looker = Looker(tiers)
    reader = Reader(tiers, looker)
    done = []
    for finding in findings:
        if finding.code not in (_LACKS, _WRONG, _ENTRY):
            continue
        tier, error = tiers.get(finding.tier), None
        try:
            await _mend(context, reader, looker, tier, finding.file)
        except TierStoreError as failure:
            log.warning("tier=%s file=%r can't be mended: %s", tier.name, finding.file, failure.message)
            error = failure
        done.append(PlainMending(path=finding.file, tier=tier.name, error=error))
    return done


async def _mend(context: CopyContext, reader: Reader, looker: Looker, tier: Tier, path: str) -> None:
    for is_folder in (False, True):
        version = (await looker.state(path, is_folder=is_folder, everywhere=True)).live
        if version is None:
            continue
        entry = await reader.entry(version)
        await ensure_tier(context.tiers, tier)
        put = FilePut.of_entry(path, Mark(version=version.version, save_id=version.save_id), entry, is_folder=is_folder)
        if not await _is_good(tier, version, entry):
            await place_data(tier, put, AnyTierSource(reader, version, context.budget), context.limits)
        await place_entry(tier, put)


async def _is_good(tier: Tier, version: FileVersion, entry: FileEntry) -> bool:
    try:
        return not [bad async for _, bad in _bad_blocks(tier, version, entry, ByteBudget(_PIECE_NBYTES)) if bad]
    except (NotFoundError, IntegrityError):
        return False


async def _check(report: PlainReport, budget: ByteBudget, tier: Tier, version: FileVersion, held: Held, *, deep: bool) -> Finding | None:
    report.files += 1
    if not held.whole:
        what = "its bytes are not there" if held.data is None else f"{held.data} bytes are there, not {held.entry}"
        return _finding(_LACKS, tier, version.path, what)
    if not deep:
        return None
    try:
        entry = decode_entry(await tier.storage.read(entry_path(version)), version.path, version.nbytes)
    except IntegrityError as error:
        return _finding(_ENTRY, tier, version.path, error.message)
    if version.is_folder:
        return None
    bad: list[int] = []
    try:
        async for nbytes, blocks in _bad_blocks(tier, version, entry, budget):
            report.nbytes_read += nbytes
            bad += blocks
    except (IntegrityError, NotFoundError) as error:
        return _finding(_LACKS, tier, version.path, error.message)
    if not bad:
        return None
    return _finding(_WRONG, tier, version.path, f"{len(bad)} of its blocks do not match their SHA-256", tuple(bad))


async def _bad_blocks(tier: Tier, version: FileVersion, entry: FileEntry, budget: ByteBudget) -> AsyncIterator[tuple[int, list[int]]]:
    """Reads all of a copy, piece by piece: the bytes read, and the numbers of the bad blocks among them."""
    block = entry.block_nbytes
    piece = max(block, _PIECE_NBYTES // block * block)
    for begin in range(0, entry.nbytes, piece):
        buffer = await budget.take(min(piece, entry.nbytes - begin))
        await tier.storage.read_into(data_path(version), begin, buffer)
        found = await asyncio.to_thread(block_digests, buffer, block)
        first = begin // block
        promised = entry.blocks[first * DIGEST_NBYTES : first * DIGEST_NBYTES + len(found)]
        yield buffer.nbytes, [first + number for number in bad_blocks(found, promised)]


async def _still_there(tier: Tier, version: FileVersion) -> bool:
    """Whether the version is still the newest here: one that was replaced or removed while it was read is no damage."""
    key = (version.path, version.is_folder)
    try:
        on_tier = group(await tier.storage.list(place_of(version.path, is_folder=version.is_folder))).get(key)
    except (StorageError, NotFoundError):
        return True
    return on_tier is not None and on_tier.newest == Mark(version=version.version, save_id=version.save_id)


def _version(key: Key, mark: Mark, nbytes: int) -> FileVersion:
    return FileVersion(path=key[0], version=mark.version, save_id=mark.save_id, nbytes=nbytes, is_folder=key[1], tiers=())


def _group(path: str, groups: int) -> int:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % groups + 1


def _finding(code: str, tier: Tier, path: str, detail: str, blocks: tuple[int, ...] = ()) -> Finding:
    return Finding(code=code, tier=tier.name, file=path, detail=detail, blocks=blocks)


def _note(report: PlainReport, code: str, tier: Tier, path: str, detail: str) -> None:
    report.findings.append(_finding(code, tier, path, detail))
