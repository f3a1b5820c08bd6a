"""Verify: does each tier hold what was promised? Findings with stable codes; nothing is deleted, moved or mended (PROTOCOLS.md §7).

Levels: ``quick`` reads logs, manifests and indexes, and compares sizes (and, where a `replicated` record keeps what the server
returned, the server's checksum or ETag, without a download). ``sample`` also reads one of n groups of blocks, and the small files.
``full`` reads every block.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tierstore.errors import IntegrityError, NotFoundError, StorageError, TierStoreError
from tierstore.format.digest import DIGEST_NBYTES, bad_blocks, block_digests, digest_of
from tierstore.format.index import FileEntry, Index, decode_index
from tierstore.format.manifest import FileRecord, Manifest, decode_manifest
from tierstore.names import MANIFEST, TMP, Attempt
from tierstore.storage.contract import FileInfo
from tierstore.storage.temporaries import owner_is_dead
from tierstore.tiers.budget import ByteBudget
from tierstore.tiers.catalog import Catalog, CheckpointInfo, scan
from tierstore.tiers.checkpoint import parse_file_name
from tierstore.tiers.copying import Proof
from tierstore.tiers.findings import Finding
from tierstore.tiers.log_facts import fold
from tierstore.tiers.progress import NO_PROGRESS, Progress
from tierstore.tiers.tier import Tier, Tiers
from tierstore.tiers.together import together
from tierstore.tiers.view import further

__all__ = ["Level", "VerifyReport", "verify"]

log = logging.getLogger(__name__)

Level = Literal["quick", "sample", "full"]

_READ_NBYTES = 8 << 20
_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was looked at, and what was found."""

    run: str
    level: Level
    findings: tuple[Finding, ...]
    checkpoints: int
    files: int
    nbytes_read: int
    """Payload bytes that were read and hashed."""

    @property
    def damage(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "damage")

    @property
    def exit_code(self) -> int:
        """6 where promised bytes are missing or wrong, else 0."""
        return IntegrityError.exit_code if self.damage else 0


@dataclass(slots=True, kw_only=True)
class _Verifying:
    """One run of verify."""

    tiers: Tiers
    level: Level
    subset: tuple[int, int]
    progress: Progress
    budget: ByteBudget
    findings: list[Finding] = field(default_factory=list)
    checkpoints: int = 0
    files: int = 0
    nbytes_read: int = 0

    def note(self, code: str, tier: str, file: str, detail: str, attempt: Attempt | None = None) -> None:
        finding = Finding(code=code, tier=tier, file=file, detail=detail, checkpoint=attempt.folder if attempt else "")
        log.info("code=%s tier=%s checkpoint=%s file=%s %s", code, tier, finding.checkpoint, file, detail)
        self.findings.append(finding)


async def verify(
    tiers: Tiers,
    run: str,
    *,
    level: Level = "quick",
    only: Sequence[str] | None = None,
    steps: Collection[int] | None = None,
    subset: tuple[int, int] = (1, 16),
    progress: Progress = NO_PROGRESS,
    budget_nbytes: int = 64 << 20,
) -> VerifyReport:
    """Checks the committed checkpoints of a run on every tier.

    Args:
        tiers: The store's tiers.
        run: The run.
        level: How deep.
        only: Names of the tiers to check; None: all.
        steps: The steps to check; None: all.
        subset: (k, n): with ``sample``, the k-th of n groups of blocks (1 ≤ k ≤ n). Which block is in which group is fixed by a
            hash, so n runs with k = 1 … n read everything once.
        progress: Told as payload bytes are read.
        budget_nbytes: Memory for reading.

    Raises:
        UsageError: No such tier.
        StorageError: No tier can be reached.
    """
    chosen = [tiers.get(name) for name in only] if only is not None else list(tiers)
    if not 1 <= subset[0] <= subset[1]:
        raise ValueError(f"subset {subset[0]}/{subset[1]} is not a k-th of n groups")
    work = _Verifying(tiers=tiers, level=level, subset=subset, progress=progress, budget=ByteBudget(budget_nbytes))
    catalog = await scan(tiers, run)
    _note_catalog(work, catalog, chosen, steps)
    for tier in chosen:
        if tier.name in catalog.unreachable:
            work.note("V111", tier.name, "", catalog.unreachable[tier.name].message)
            continue
        for name in await asyncio.to_thread(_leftovers, tier):
            work.note("V108", tier.name, name, "its process is gone")
        for info in reversed(catalog.checkpoints):
            if steps is None or info.attempt.step in steps:
                try:
                    await _verify_replica(work, info, tier)
                except StorageError as error:
                    work.note("V111", tier.name, "", error.message, info.attempt)
    return VerifyReport(
        run=run,
        level=level,
        findings=tuple(work.findings),
        checkpoints=work.checkpoints,
        files=work.files,
        nbytes_read=work.nbytes_read,
    )


def _leftovers(tier: Tier) -> list[str]:
    """Temporaries on a local tier whose process is provably gone."""
    folder = tier.storage.local_path(TMP)
    if folder is None or not folder.is_dir():
        return []
    return sorted(f"{TMP}/{path.name}" for path in folder.iterdir() if owner_is_dead(path.name))


def _note_catalog(work: _Verifying, catalog: Catalog, chosen: Sequence[Tier], steps: Collection[int] | None) -> None:
    authority = work.tiers.authority.name
    names = {t.name for t in chosen}
    for found in catalog.incomplete:
        if steps is None or found.attempt.step in steps:
            missing = f"; ranks {', '.join(map(str, found.missing))} missing" if found.missing else ""
            work.note("V107", authority, "", f"no commit record{missing}", found.attempt)
    for info in catalog.checkpoints:
        if steps is not None and info.attempt.step not in steps:
            continue
        if info.damaged:
            work.note("V105", authority, info.attempt.log_folder, "a record of its log can't be read or is missing", info.attempt)
        if info.authority_lost and authority not in catalog.unreachable:
            work.note("V110", authority, info.attempt.log_folder, f"known from the copies on {', '.join(info.replicas)}", info.attempt)
    for path in catalog.foreign:
        tier, _, name = path.partition(":")
        if tier in names:
            work.note("V106", tier, name, "not of tierstore's grammar")


async def _verify_replica(work: _Verifying, info: CheckpointInfo, tier: Tier) -> None:
    """One checkpoint on one tier."""
    state = fold(info.records)
    held = info.replicas.get(tier.name)
    far = tier.name in [t.name for t in further(work.tiers)]
    promised = work.tiers.is_authority(tier) if not far else tier.name in state.replicated
    if tier.name in state.dropped or (held is None and not promised):
        if far and tier.name not in state.dropped and not (info.hidden or info.superseded):
            work.note("V112", tier.name, "", "not copied yet", info.attempt)
        return
    if held == "partial" and not promised:
        if not (info.hidden or info.superseded):
            work.note("V112", tier.name, "", "only some of its files are there", info.attempt)
        return
    work.checkpoints += 1
    listing = await tier.storage.children(info.attempt.folder)
    there = {f.path.rpartition("/")[2]: f for f in listing.files}
    manifest = await _manifest(work, info, tier, there, share=held == "receipt")
    if manifest is None:
        return
    expected = [f for f in manifest.files if _belongs(f, info, tier, held == "receipt", there)]
    known = {f.name for f in manifest.files} | {MANIFEST}
    for name in sorted(set(there) - known):
        work.note("V106", tier.name, name, f"{there[name].nbytes} bytes that the manifest does not name", info.attempt)
    sound = [f for f in expected if _present(work, info, tier, f, there)]
    work.files += len(expected)
    await _compare_server_facts(work, info, tier, sound, state.replicated.get(tier.name))
    index = await _index(work, info, tier, manifest, sound)
    if work.level != "quick":
        await _read_payload(work, info, tier, manifest, sound, index)


async def _manifest(work: _Verifying, info: CheckpointInfo, tier: Tier, there: Mapping[str, FileInfo], *, share: bool) -> Manifest | None:
    """The manifest: the tier's own if it is good, else another tier's, so that the files can be checked all the same."""
    if not (share and MANIFEST not in there):  # a share has its manifest elsewhere until it is completed
        try:
            data = await tier.storage.read(info.attempt.path(MANIFEST))
            if digest_of(data) != info.manifest_digest:
                raise IntegrityError("it is not the manifest that the commit record names")
            return decode_manifest(data)
        except (NotFoundError, IntegrityError) as error:
            work.note("V104", tier.name, MANIFEST, error.message, info.attempt)
    for other in work.tiers:
        if other.name != tier.name:
            try:
                data = await other.storage.read(info.attempt.path(MANIFEST))
                if digest_of(data) == info.manifest_digest:
                    return decode_manifest(data)
            except TierStoreError as error:
                log.debug("tier=%s no manifest from here: %s", other.name, error.message)
    return None


def _belongs(file: FileRecord, info: CheckpointInfo, tier: Tier, share: bool, there: Mapping[str, FileInfo]) -> bool:
    """Whether a tier should have a file: a node's share has the files of its own ranks, and what else happens to be there."""
    if not share:
        return True
    found = parse_file_name(file.name)
    return (found[1] in info.receipts.get(tier.name, ())) if found else file.name in there


def _present(work: _Verifying, info: CheckpointInfo, tier: Tier, file: FileRecord, there: Mapping[str, FileInfo]) -> bool:
    found = there.get(file.name)
    if found is None:
        work.note("V101", tier.name, file.name, f"{file.nbytes} bytes are missing", info.attempt)
    elif found.nbytes != file.nbytes:
        work.note("V102", tier.name, file.name, f"{found.nbytes} bytes instead of {file.nbytes}", info.attempt)
    return found is not None and found.nbytes == file.nbytes


async def _compare_server_facts(work: _Verifying, info: CheckpointInfo, tier: Tier, files: Sequence[FileRecord], replicated: Any) -> None:
    """Compares the server's word of today with that of the day of the copy, by HEAD; says nothing where nothing was recorded."""
    recorded = replicated.data.get("files") if replicated is not None else None
    if not isinstance(recorded, Mapping):
        return

    async def head(file: FileRecord) -> None:
        before = recorded.get(file.name)
        if not isinstance(before, Mapping) or not (before.get("checksum") or before.get("etag")):
            return
        try:
            now = await tier.storage.stat(info.attempt.path(file.name))
        except NotFoundError as error:  # removed since the listing
            work.note("V101", tier.name, file.name, error.message, info.attempt)
            return
        for what, new in (("checksum", now.checksum), ("etag", now.etag)):
            old = before.get(what)
            if old and new:
                if old != new:
                    work.note("V109", tier.name, file.name, f"{what} {new} instead of {old}", info.attempt)
                return  # the stronger fact decides: an ETag may change when a bucket is copied as a whole

    await together(head, files, at_once=_AT_ONCE)


async def _index(work: _Verifying, info: CheckpointInfo, tier: Tier, manifest: Manifest, sound: Sequence[FileRecord]) -> Index | None:
    """The index, proved against the manifest; another tier's where this one's is bad or not there."""
    record = next((f for f in manifest.files if f.kind == "index"), None)
    if record is None:
        return None
    proof = Proof(digest=record.digest, block_nbytes=manifest.block_nbytes)
    order = [tier, *(t for t in work.tiers if t.name != tier.name)] if record in sound else [t for t in work.tiers if t.name != tier.name]
    for source in order:
        try:
            data = await source.storage.read(info.attempt.path(record.name))
            if await asyncio.to_thread(proof.digest_of, data) == record.digest:
                index, _ = await asyncio.to_thread(decode_index, data)
                return index
            if source is tier:
                work.note("V103", tier.name, record.name, "the index is not the one that the manifest promises", info.attempt)
        except (NotFoundError, IntegrityError) as error:
            if source is tier:
                work.note("V103", tier.name, record.name, error.message, info.attempt)
        except StorageError as error:
            if source is tier:
                raise
            log.debug("tier=%s no index from here: %s", source.name, error.message)
    return None


async def _read_payload(
    work: _Verifying, info: CheckpointInfo, tier: Tier, manifest: Manifest, sound: Sequence[FileRecord], index: Index | None
) -> None:
    async def one(file: FileRecord) -> None:
        if file.kind == "shard":
            if index is not None:
                await _read_blocks(work, info.attempt, tier, index.file(file.name), manifest.block_nbytes)
        elif file.kind != "index":
            await _read_document(work, info.attempt, tier, file, manifest.block_nbytes)

    await together(one, sound, at_once=_AT_ONCE)


async def _read_document(work: _Verifying, attempt: Attempt, tier: Tier, file: FileRecord, block_nbytes: int) -> None:
    proof = Proof(digest=file.digest, block_nbytes=block_nbytes)
    try:
        data = await tier.storage.read(attempt.path(file.name))
    except (NotFoundError, IntegrityError) as error:
        work.note("V101", tier.name, file.name, error.message, attempt)
        return
    work.nbytes_read += len(data)
    if await asyncio.to_thread(proof.digest_of, data) != file.digest:
        work.note("V103", tier.name, file.name, "its bytes are not those that the manifest promises", attempt)


async def _read_blocks(work: _Verifying, attempt: Attempt, tier: Tier, file: FileEntry, block_nbytes: int) -> None:
    """Reads the wanted blocks of a shard in runs, and names each bad one."""
    done = 0
    for first, last in _runs(work, file, block_nbytes):
        begin, end = first * block_nbytes, min(last * block_nbytes, file.nbytes)
        buffer = await work.budget.take(end - begin)
        try:
            await tier.storage.read_into(attempt.path(file.name), begin, buffer)
        except (NotFoundError, IntegrityError) as error:
            work.note("V103", tier.name, file.name, f"bytes {begin} to {end}: {error.message}", attempt)
            continue
        found = await asyncio.to_thread(block_digests, buffer, block_nbytes)
        for bad in bad_blocks(found, file.block_digests[first * DIGEST_NBYTES : last * DIGEST_NBYTES]):
            number = first + bad
            span = f"{number * block_nbytes} to {min((number + 1) * block_nbytes, file.nbytes)}"
            work.note("V103", tier.name, file.name, f"block {number} (bytes {span}) does not match its SHA-256", attempt)
        work.nbytes_read += end - begin
        done = end
        work.progress(tier.name, attempt, file.name, min(done, file.nbytes - 1), file.nbytes)
    work.progress(tier.name, attempt, file.name, file.nbytes, file.nbytes)


def _runs(work: _Verifying, file: FileEntry, block_nbytes: int) -> Iterator[tuple[int, int]]:
    """Half-open runs of neighbouring wanted blocks, each of `_READ_NBYTES` at most."""
    most = max(1, _READ_NBYTES // block_nbytes)
    start: int | None = None
    count = len(file.block_digests) // DIGEST_NBYTES
    for number in range(count + 1):
        wanted = number < count and _wanted(work, file.name, number)
        if start is not None and (not wanted or number - start >= most):
            yield start, number
            start = None
        if wanted and start is None:
            start = number


def _wanted(work: _Verifying, name: str, number: int) -> bool:
    if work.level == "full":
        return True
    k, n = work.subset
    return int.from_bytes(hashlib.sha256(f"{name}:{number}".encode()).digest()[:8], "big") % n == k - 1
