"""Verifying one copy of a checkpoint: its manifest, its files' sizes and the server's word on them, its documents, its blocks."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from tierstore.errors import AccessError, IntegrityError, NotFoundError, StorageError, TierStoreError
from tierstore.format.digest import DIGEST_NBYTES, bad_blocks, block_digests, digest_of
from tierstore.format.index import FileEntry, Index, decode_index
from tierstore.format.manifest import FileRecord, Manifest, decode_manifest
from tierstore.names import MANIFEST, QUANTISED, Attempt
from tierstore.storage.contract import FileInfo
from tierstore.storage.packed import PackedStorage
from tierstore.tiers.budget import ByteBudget
from tierstore.tiers.checkpoint import CheckpointInfo, parse_file_name
from tierstore.tiers.copying import Proof
from tierstore.tiers.findings import Finding
from tierstore.tiers.log import read_record
from tierstore.tiers.log_facts import LogFacts, fold
from tierstore.tiers.progress import NO_PROGRESS, Progress
from tierstore.tiers.quantised import QuantisedReader, look_at_shards, lossy_blocks, lossy_files
from tierstore.tiers.tier import Tier, Tiers
from tierstore.tiers.together import together
from tierstore.tiers.verify_references import look_at_sources
from tierstore.tiers.view import further
from tierstore.units import format_some

__all__ = ["Level", "Looking", "Verifying", "good_index", "good_manifest", "lossy_of", "read_blocks", "runs_of", "verify_copy"]

log = logging.getLogger(__name__)

Level = Literal["quick", "sample", "full"]

_READ_NBYTES = 8 << 20
_HEADS_AT_ONCE = 32
_MOST_NAMED = 5


@dataclass(slots=True, kw_only=True)
class Verifying:
    """One run of verify: its limits, and what was counted."""

    tiers: Tiers
    level: Level
    subset: tuple[int, int]
    progress: Progress
    budget: ByteBudget
    in_flight: asyncio.Semaphore
    """Files that are read at once."""
    checkpoints: int = 0
    files: int = 0
    nbytes_read: int = 0

    @staticmethod
    def make(
        tiers: Tiers, *, level: Level, subset: tuple[int, int], budget: ByteBudget, files_in_flight: int, progress: Progress | None = None
    ) -> Verifying:
        in_flight = asyncio.Semaphore(files_in_flight)
        return Verifying(tiers=tiers, level=level, subset=subset, progress=progress or NO_PROGRESS, budget=budget, in_flight=in_flight)


@dataclass(slots=True, kw_only=True)
class Looking:
    """One checkpoint on one tier, and what was found there. `info` None: the tier or the run as a whole."""

    work: Verifying
    tier: str
    info: CheckpointInfo | None = None
    findings: list[Finding] = field(default_factory=list)
    proved: set[str] = field(default_factory=set)
    """Files of which every byte was read, and is good."""

    def note(self, code: str, file: str, detail: str, *, attempt: Attempt | None = None, blocks: Sequence[int] = ()) -> None:
        about = attempt or (self.info.attempt if self.info else None)
        folder = about.folder if about else ""
        log.info("code=%s tier=%s checkpoint=%s file=%s %s", code, self.tier, folder, file, detail)
        self.findings.append(Finding(code=code, tier=self.tier, file=file, detail=detail, checkpoint=folder, blocks=tuple(blocks)))


async def verify_copy(looking: Looking, info: CheckpointInfo, tier: Tier) -> None:
    """Looks at one checkpoint on one tier; what the tier is not to have is no finding."""
    await _verify_copy(looking, info, tier)
    if tier.name in info.replicas:
        looking.work.progress(tier.name, info.attempt, "", info.nbytes, info.nbytes)


async def _verify_copy(looking: Looking, info: CheckpointInfo, tier: Tier) -> None:
    work, facts = looking.work, fold(info.records)
    held = info.replicas.get(tier.name)
    far = tier.name in [t.name for t in further(work.tiers)]
    if tier.name in info.dropped:
        if held is not None and not info.serves.get(tier.name):  # else its shards stay there for those who refer to them
            going = tier.name in facts.evicting
            looking.note("V117" if going else "V116", "", "its copy is being dropped" if going else "its copy was dropped")
        return
    if work.tiers.is_authority(tier):
        promised = not info.authority_lost
    else:
        promised = (far and tier.name in facts.replicated) or tier.name in info.receipts
    if held in (None, "partial") and not promised:
        if (far or (held and not info.authority_lost)) and not (info.hidden or info.superseded):
            looking.note("V112", "", "only some of its files are there" if held else "not copied yet")
        return
    work.checkpoints += 1
    there = {f.path.rpartition("/")[2]: f for f in (await tier.storage.children(info.attempt.folder)).files}
    if not there and info.damaged:
        return  # what follows the damage may say that it was dropped
    if not there:
        looking.note("V113", "", f"nothing of its {info.nbytes} bytes is there")
        return
    share = held == "receipt"
    manifest = await _manifest(looking, info, tier, there, share=share)
    if manifest is None:
        return
    expected = [f for f in manifest.files if _belongs(f, info, tier, share, there)]
    if isinstance(tier.storage, PackedStorage) and work.level != "quick":
        for name in there:
            tier.storage.forget(info.attempt.path(name))
    for name in sorted(set(there) - {f.name for f in manifest.files} - {MANIFEST}):
        looking.note("V106", name, f"{there[name].nbytes} bytes that the manifest does not name")
    sound = [f for f in expected if _present(looking, f, there)]
    shards = [there[f.name] for f in sound if f.kind == "shard"]
    sources = await look_at_sources(tier, info.attempt, shards)
    packed = [f.path.rpartition("/")[2] for f in shards if f.stored_nbytes is not None]
    damaged = (await look_at_shards(tier, info.attempt, packed)).damaged
    unreadable = {**sources.wrong, **{name: error.message for name, error in damaged.items()}}
    for name, paths in sources.missing.items():
        looking.note("V101", name, f"it takes bytes from {format_some(paths, _MOST_NAMED)}, and that is not there")
    sound = [f for f in sound if f.name not in sources.missing]
    work.files += len(expected)
    changed = await _changed_objects(looking, info, tier, sound, await _recorded_facts(looking, info, tier, facts))
    index = await _index(looking, info, tier, manifest, sound)
    reader = await _quantised(looking, info, tier, manifest.block_nbytes)
    if work.level != "quick":
        await _read_payload(looking, info, tier, manifest, sound, index, reader)
    for name, why in unreadable.items():  # a packed file that was cut short, say: its listing tells the raw one's length
        if not any(f.file == name for f in looking.findings):
            looking.note("V103", name, why)
    for name, detail in changed.items():
        bad = any(f.file == name and f.code in ("V101", "V103") for f in looking.findings)
        if not bad:  # a bad block says more than a changed checksum
            looking.note("V119" if name in looking.proved else "V109", name, detail)
    for name in sorted(file for where, file in info.quarantined if where == tier.name):
        if name in looking.proved:
            looking.note("V115", name, "found damaged earlier; every byte of it is good now")
        elif not any(f.file == name for f in looking.findings):
            looking.note("V115", name, "found damaged earlier")


async def _recorded_facts(looking: Looking, info: CheckpointInfo, tier: Tier, facts: LogFacts) -> Mapping[str, Any]:
    """File → what the tier's server said of it when the copy was recorded; the authority's own stand in the commit record.

    Read anew, for a catalog does not keep it; from a copy where the log's own record is lost or damaged, which is another finding.
    """
    tiers = looking.work.tiers
    record = facts.replicated.get(tier.name) or (facts.fate if tiers.is_authority(tier) else None)
    if record is None:
        return {}
    trouble: StorageError | None = None
    for source in (tiers.authority, *(other for other in tiers if not tiers.is_authority(other))):
        try:
            read = await read_record(source.storage, info.attempt, record.seq)
        except StorageError as error:
            trouble = trouble or error
        except (NotFoundError, IntegrityError) as error:
            log.debug("tier=%s checkpoint=%s %s", source.name, info.attempt.folder, error.message)
        else:
            if read.nonce == record.nonce:
                found = read.data.get("files")
                return found if isinstance(found, Mapping) else {}
    if trouble is not None:
        looking.note("V111", "", f"what its server said of its files can't be read: {trouble.message}")
    return {}


async def _manifest(looking: Looking, info: CheckpointInfo, tier: Tier, there: Mapping[str, FileInfo], *, share: bool) -> Manifest | None:
    """The manifest: the tier's own if it is good, else another tier's, so that the files can be checked all the same."""
    if not (share and MANIFEST not in there):  # a share has its manifest elsewhere until it is completed
        try:
            return await _read_manifest(info, tier)
        except (NotFoundError, IntegrityError) as error:
            looking.note("V104", MANIFEST, error.message)
    found = await good_manifest(looking.work.tiers, info, but=tier.name)
    return found[0] if found else None


async def _read_manifest(info: CheckpointInfo, tier: Tier) -> Manifest:
    data = await tier.storage.read(info.attempt.path(MANIFEST))
    if digest_of(data) != info.manifest_digest:
        raise IntegrityError("it is not the manifest that the commit record names")
    return decode_manifest(data)


async def good_manifest(tiers: Tiers, info: CheckpointInfo, *, but: str = "") -> tuple[Manifest, Tier] | None:
    """The manifest that the commit record names, from the nearest tier that has it (but `but`), and which that is; None: nowhere."""
    for tier in tiers:
        if tier.name != but:
            try:
                return await _read_manifest(info, tier), tier
            except TierStoreError as error:
                log.debug("tier=%s no manifest from here: %s", tier.name, error.message)
    return None


def _belongs(file: FileRecord, info: CheckpointInfo, tier: Tier, share: bool, there: Mapping[str, FileInfo]) -> bool:
    """Whether a tier should have a file: a node's share has the files of its own ranks, and what else happens to be there."""
    if not share:
        return True
    found = parse_file_name(file.name)
    return (found[1] in info.receipts.get(tier.name, ())) if found else file.name in there


def _present(looking: Looking, file: FileRecord, there: Mapping[str, FileInfo]) -> bool:
    found = there.get(file.name)
    if found is None:
        looking.note("V101", file.name, f"{file.nbytes} bytes are missing")
    elif found.nbytes != file.nbytes:
        looking.note("V102", file.name, f"{found.nbytes} bytes instead of {file.nbytes}")
    return found is not None and found.nbytes == file.nbytes


async def _changed_objects(
    looking: Looking, info: CheckpointInfo, tier: Tier, files: Sequence[FileRecord], recorded: Mapping[str, Any]
) -> dict[str, str]:
    """Compares the server's word of today with that of the day of the copy, by HEAD; nothing where nothing was recorded."""
    changed: dict[str, str] = {}

    async def head(file: FileRecord) -> None:
        before = recorded.get(file.name)
        if not isinstance(before, Mapping) or not (before.get("checksum") or before.get("etag")):
            return
        try:
            now = await tier.storage.stat(info.attempt.path(file.name))
        except NotFoundError as error:  # removed since the listing
            looking.note("V101", file.name, error.message)
            return
        for what, new in (("checksum", now.checksum), ("etag", now.etag)):
            old = before.get(what)
            if old and new:
                if old != new:
                    changed[file.name] = f"{what} {new} instead of {old}"
                return  # the stronger fact decides: an ETag may change when a bucket is copied as a whole

    await together(head, files, at_once=_HEADS_AT_ONCE)
    return changed


async def _index(looking: Looking, info: CheckpointInfo, tier: Tier, manifest: Manifest, sound: Sequence[FileRecord]) -> Index | None:
    """The index, proved against the manifest; another tier's where this one's is bad or not there."""
    record = next((f for f in manifest.files if f.kind == "index"), None)
    if record is None:
        return None
    if record in sound:
        try:
            index = await _read_index(info, tier, record, manifest.block_nbytes)
            looking.proved.add(record.name)
            return index
        except (NotFoundError, IntegrityError) as error:
            looking.note("V103", record.name, error.message)
    return await good_index(looking.work.tiers, info, manifest, but=tier.name)


async def _read_index(info: CheckpointInfo, tier: Tier, record: FileRecord, block_nbytes: int) -> Index:
    data = await tier.storage.read(info.attempt.path(record.name))
    if await asyncio.to_thread(Proof(digest=record.digest, block_nbytes=block_nbytes).digest_of, data) != record.digest:
        raise IntegrityError("the index is not the one that the manifest promises")
    return (await asyncio.to_thread(decode_index, data))[0]


async def good_index(tiers: Tiers, info: CheckpointInfo, manifest: Manifest, *, but: str = "") -> Index | None:
    """The index that the manifest promises, from the nearest tier that has it (but `but`); None: from nowhere."""
    for tier in tiers:
        for record in manifest.files:
            if record.kind == "index" and tier.name != but:
                try:
                    return await _read_index(info, tier, record, manifest.block_nbytes)
                except TierStoreError as error:
                    log.debug("tier=%s no index from here: %s", tier.name, error.message)
    return None


async def _quantised(looking: Looking, info: CheckpointInfo, tier: Tier, block_nbytes: int) -> QuantisedReader | None:
    """What proves a copy that is not exact; None: it is exact."""
    told = info.quantised_on(tier.name)
    if told is None:
        return None
    reader = QuantisedReader(tier, info.attempt, told, block_nbytes)
    try:
        await reader.document()
    except IntegrityError as error:
        looking.note("V124", QUANTISED, error.message)
    return reader


async def lossy_of(looking: Looking, attempt: Attempt, reader: QuantisedReader | None, name: str, block_nbytes: int) -> frozenset[int]:
    """The blocks of a shard that its digests can't prove. What does not prove them is a finding; they are left to their own footer then."""
    if reader is None:
        return frozenset()
    try:
        return await reader.lossy(name)
    except IntegrityError as error:
        if not any(f.code == "V124" for f in looking.findings):
            looking.note("V103", name, error.message)
    try:
        found = await lossy_files(reader.tier, attempt, [name])
    except IntegrityError as error:
        looking.note("V103", name, error.message)
        return frozenset()
    return lossy_blocks(found[name], block_nbytes) if name in found else frozenset()


async def _read_payload(
    looking: Looking,
    info: CheckpointInfo,
    tier: Tier,
    manifest: Manifest,
    sound: Sequence[FileRecord],
    index: Index | None,
    reader: QuantisedReader | None,
) -> None:
    async def one(file: FileRecord) -> None:
        async with looking.work.in_flight:
            if file.kind != "shard":
                await _read_document(looking, info.attempt, tier, file, manifest.block_nbytes)
            elif index is not None:
                lossy = await lossy_of(looking, info.attempt, reader, file.name, manifest.block_nbytes)
                await read_blocks(looking, info.attempt, tier, index.file(file.name), manifest.block_nbytes, lossy=lossy)

    await together(one, [f for f in sound if f.kind != "index"], at_once=_HEADS_AT_ONCE)


async def _read_document(looking: Looking, attempt: Attempt, tier: Tier, file: FileRecord, block_nbytes: int) -> None:
    proof = Proof(digest=file.digest, block_nbytes=block_nbytes)
    try:
        data = await tier.storage.read(attempt.path(file.name))
    except (NotFoundError, IntegrityError) as error:
        looking.note("V101", file.name, error.message)
        return
    looking.work.nbytes_read += len(data)
    if await asyncio.to_thread(proof.digest_of, data) != file.digest:
        looking.note("V103", file.name, "its bytes are not those that the manifest promises")
    else:
        looking.proved.add(file.name)


async def read_blocks(
    looking: Looking,
    attempt: Attempt,
    tier: Tier,
    file: FileEntry,
    block_nbytes: int,
    *,
    whole: bool = False,
    lossy: frozenset[int] = frozenset(),
) -> None:
    """Reads the wanted blocks of a shard (`whole`: all of them), and names the bad ones, neighbours together; `lossy` ones have no digest
    that they could match, and are proved by the storage."""
    work, bad, unread = looking.work, [], False
    whole = whole or work.level == "full"
    for first, last in runs_of(_wanted(work, file, whole=whole), max(1, _READ_NBYTES // block_nbytes)):
        begin, end = first * block_nbytes, min(last * block_nbytes, file.nbytes)
        buffer = await work.budget.take(end - begin)
        try:
            await tier.storage.read_into(attempt.path(file.name), begin, buffer)
        except (NotFoundError, IntegrityError) as error:
            looking.note("V103", file.name, f"bytes {begin} to {end}: {error.message}", blocks=range(first, last))
            unread = True
            continue
        except StorageError as error:
            if error.retryable or isinstance(error, AccessError):
                raise  # it says nothing of the bytes
            looking.note("V103", file.name, f"bytes {begin} to {end} can't be read: {error.message}", blocks=range(first, last))
            unread = True
            continue
        found = await asyncio.to_thread(block_digests, buffer, block_nbytes)
        differ = bad_blocks(found, file.block_digests[first * DIGEST_NBYTES : last * DIGEST_NBYTES])
        bad += [first + number for number in differ if first + number not in lossy]
        work.nbytes_read += end - begin
        work.progress(tier.name, attempt, file.name, min(end, file.nbytes - 1), file.nbytes)
    for first, last in runs_of(bad, len(bad) or 1):
        span = f"bytes {first * block_nbytes} to {min(last * block_nbytes, file.nbytes)}"
        one = last == first + 1
        text = f"block {first} ({span}) does not match its" if one else f"blocks {first} to {last - 1} ({span}) do not match their"
        looking.note("V103", file.name, f"{text} SHA-256", blocks=range(first, last))
    if whole and not (bad or unread):
        looking.proved.add(file.name)
    work.progress(tier.name, attempt, file.name, file.nbytes, file.nbytes)


def runs_of(numbers: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Ascending numbers as half-open runs of neighbours, of `most` numbers at most each."""
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        for start in range(0, len(members), most):
            yield members[start], members[min(start + most, len(members)) - 1] + 1


def _wanted(work: Verifying, file: FileEntry, *, whole: bool) -> Sequence[int]:
    count = len(file.block_digests) // DIGEST_NBYTES
    k, n = work.subset
    return range(count) if whole else [b for b in range(count) if _group(file.name, b) % n == k - 1]


def _group(name: str, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{name}:{number}".encode()).digest()[:8], "big")
