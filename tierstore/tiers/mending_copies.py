"""Mending one checkpoint's copy on one tier: its shards, documents, manifest and copies of records, and what is recorded of it.

The manifest comes after all that it names, then the log's copies, and `replicated` last: a repair that is stopped leaves a copy that still
counts as damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tierstore.clock import Clock
from tierstore.errors import RefusedError, TierStoreError
from tierstore.format.index import Index
from tierstore.format.manifest import Manifest
from tierstore.format.record import Record
from tierstore.names import MANIFEST, Attempt
from tierstore.storage.contract import FileInfo, PackHints
from tierstore.tiers.catalog import CheckpointInfo
from tierstore.tiers.checkpoint import parse_file_name
from tierstore.tiers.copying import CopyContext, Proof
from tierstore.tiers.findings import Finding
from tierstore.tiers.log import append, files_told, taken_told
from tierstore.tiers.log_copies import copy_beside
from tierstore.tiers.log_facts import LogFacts, fold
from tierstore.tiers.mending import Mended, Unmended, mend_document, mend_shard
from tierstore.tiers.mending_logs import mend_log_copies
from tierstore.tiers.quantised import QuantisedReader, generation_of, known_scheme, look_at_shards, lossy_files, put_document
from tierstore.tiers.quarantine import quarantine
from tierstore.tiers.references import exact_where_referred
from tierstore.tiers.sources import sources_of
from tierstore.tiers.tier import Tier, Tiers
from tierstore.tiers.together import together
from tierstore.tiers.verify_files import Looking, Verifying, lossy_of, read_blocks
from tierstore.tiers.verify_references import refers_to
from tierstore.tiers.view import many_disks

__all__ = ["MENDABLE", "Repairing", "is_share", "left_alone", "mend_copy", "of_ranks"]

log = logging.getLogger(__name__)

_WRITTEN = ("V101", "V102", "V103", "V104", "V113", "V124")
_PROVED = ("V109", "V115", "V119")

MENDABLE = (*_WRITTEN, *_PROVED, "V114")
"""The codes of findings that a copy is mended for."""


@dataclass(slots=True, kw_only=True)
class Repairing:
    """One run of repair."""

    context: CopyContext
    work: Verifying
    dry_run: bool
    ttl_s: float
    warned: set[str] = field(default_factory=set)
    mended: list[Mended] = field(default_factory=list)
    unmended: list[Unmended] = field(default_factory=list)
    proved: list[tuple[Attempt, str]] = field(default_factory=list)
    skipped: list[tuple[Attempt, str]] = field(default_factory=list)

    @property
    def tiers(self) -> Tiers:
        return self.context.tiers

    def take(self, result: Mended | Unmended) -> bool:
        """Files a result; whether the file is good now."""
        if isinstance(result, Unmended):
            self.unmended.append(result)
            where = f"tier={result.tier} checkpoint={result.attempt.folder} file={result.file}"
            log.info("%s can't be mended: %s", where, result.reason)
            return False
        if result.nbytes_written:
            self.mended.append(result)
            log.info("tier=%s checkpoint=%s file=%s mended", result.tier, result.attempt.folder, result.file)
        return True


def is_share(info: CheckpointInfo, tier: Tier) -> bool:
    """Whether a node's tier holds the parts of its own ranks only."""
    return tier.scope == "node" and 0 < len(info.receipts.get(tier.name, ())) < info.world_size


def left_alone(facts: LogFacts, info: CheckpointInfo, clock: Clock) -> str:
    """Why a checkpoint is not repaired; empty where it is."""
    if not facts.committed or info.authority_lost:
        return "the authority has lost its log: run `tierstore recover` first"
    if facts.swept:
        return "it was deleted"
    if facts.expired is not None and facts.expired.not_before <= clock.now():
        return "it has expired, and its time has come; `tierstore undelete` takes it back"
    return ""


async def mend_copy(
    repairing: Repairing,
    info: CheckpointInfo,
    tier: Tier,
    records: Sequence[Record],
    manifest: Manifest | None,
    index: Index | None,
    made: Mapping[str, bytes],
    findings: Sequence[Finding],
) -> None:
    """Everything of one checkpoint on one tier; the manifest after all that it names, then the log's copies, then the record."""
    attempt, context, dry_run = info.attempt, repairing.context, repairing.dry_run
    sources = [s for s in sources_of(repairing.tiers, info) if s.tier.name != tier.name]
    others, exact = [s.tier for s in sources], [s.tier for s in sources if s.quantised is None]
    told = info.quantised_on(tier.name)
    hints = PackHints(exact=True) if told is None else PackHints(scheme=known_scheme(told))
    hints = exact_where_referred(fold(records), tier.name, hints)
    unproved = any(f.code == "V124" for f in findings)
    wanted = {f.file: f for f in findings if f.file and f.code in (*_WRITTEN, *_PROVED)}
    whole, share = any(f.code == "V113" for f in findings), is_share(info, tier)
    results: list[Mended | Unmended] = []
    if manifest is None:
        if wanted or whole:
            results.append(Unmended(attempt=attempt, tier=tier.name, file=MANIFEST, reason="no tier has the manifest of this checkpoint"))
    else:
        shards = [f.name for f in manifest.files if f.kind == "shard"]
        lossy = (await look_at_shards(tier, attempt, shards)).lossy if told is not None else {}
        anew = set(lossy) if unproved else set()  # nothing else proves them
        chosen = [
            f for f in manifest.files if f.name in wanted or f.name in anew or (whole and (not share or of_ranks(f.name, info, tier)))
        ]
        reader = None if told is None else QuantisedReader(tier, attempt, told, manifest.block_nbytes)

        async def shard(name: str) -> Mended | Unmended:
            if index is None:
                return Unmended(attempt=attempt, tier=tier.name, file=name, reason="no tier has the index that has its blocks' digests")
            about = [f for f in findings if f.file == name]
            bad = {b for f in about for b in f.blocks}
            entry = index.file(name)
            hopeful = about and all(f.code in _PROVED for f in about)
            if name not in anew and (hopeful or await _may_be_good_again(repairing, attempt, tier, name)):
                looking = Looking(work=repairing.work, tier=tier.name, info=info)
                async with repairing.work.in_flight:
                    lossy = await lossy_of(looking, attempt, reader, name, index.block_nbytes)
                    await read_blocks(looking, attempt, tier, entry, index.block_nbytes, whole=True, lossy=lossy)
                bad = {b for f in looking.findings for b in f.blocks}
                if name in looking.proved and not looking.findings:
                    return Mended(attempt=attempt, tier=tier.name, file=name)
            if told is not None and not exact:
                reason = "this copy is quantised, and no tier has an exact one that it could be made anew from"
                return Unmended(attempt=attempt, tier=tier.name, file=name, reason=reason)
            own = told is None
            result = await mend_shard(context, attempt, tier, exact, entry, index, bad=bad, dry_run=dry_run, hints=hints, own=own)
            left = [s.tier.name for s in sources if s.quantised is not None]
            return result if isinstance(result, Mended) else _only_quantised(result, left)

        async def document(name: str, proof: Proof) -> Mended | Unmended:
            return await mend_document(context, attempt, tier, others, name, proof, made=made.get(name), dry_run=dry_run)

        results += await together(shard, [f.name for f in chosen if f.kind == "shard"])
        for kind in ("part", "objects", "index"):
            for file in (f for f in chosen if f.kind == kind):
                results.append(await document(file.name, Proof(digest=file.digest, block_nbytes=manifest.block_nbytes)))
        if MANIFEST in wanted or (whole and not share):
            results.append(await document(MANIFEST, Proof(digest=info.manifest_digest)))
    taken = [repairing.take(result) for result in results]
    good = all(taken)
    if not dry_run:
        damaged = {f.file: f.detail for f in findings if f.code == "V103"}
        stays = {r.file: damaged[r.file] for r in results if isinstance(r, Unmended) and r.file in damaged}
        await _quarantine(repairing, info, tier, stays)
    if good and (any(f.code == "V114" for f in findings) or (whole and not share and not repairing.tiers.is_authority(tier))):
        good = repairing.take(await mend_log_copies(repairing.tiers, attempt, tier, records, dry_run=dry_run))
    if good and not dry_run and manifest is not None:
        try:
            await _record(repairing, info, tier, records, manifest, results, unproved=unproved)
        except TierStoreError as error:
            repairing.take(Unmended(attempt=attempt, tier=tier.name, file="", reason=error.message, exit_code=error.exit_code))


async def _may_be_good_again(repairing: Repairing, attempt: Attempt, tier: Tier, name: str) -> bool:
    """Whether a shard takes bytes from one that was written anew since it was found damaged."""
    written = {(mended.tier, mended.attempt.path(mended.file)) for mended in repairing.mended}
    if repairing.dry_run or not written:
        return False
    sources = (await refers_to(tier, attempt, [name])).get(name, ())
    return any((tier.name, path) in written for path in sources)


def _only_quantised(lost: Unmended, lossy: Sequence[str]) -> Unmended:
    """The same, naming the tiers with quantised copies where no exact one is good: nothing is mended from them, but they can be loaded."""
    if not (lost.blocks and lossy):
        return lost
    return replace(lost, reason=f"{lost.reason}; only a quantised copy is left, on {', '.join(lossy)}", quantised=tuple(lossy))


async def _quarantine(repairing: Repairing, info: CheckpointInfo, tier: Tier, damaged: Mapping[str, str]) -> None:
    """Records what stays damaged, so that no tier drops a good copy because this one seems to stand."""
    try:
        await quarantine(repairing.tiers, info.attempt, tier, damaged, world_size=info.world_size, clock=repairing.context.clock)
    except TierStoreError as error:
        log.warning("checkpoint=%s tier=%s damage not recorded: %s", info.attempt.folder, tier.name, error.message)


def of_ranks(name: str, info: CheckpointInfo, tier: Tier) -> bool:
    found = parse_file_name(name)
    return found is not None and found[1] in info.receipts.get(tier.name, ())


async def _record(
    repairing: Repairing,
    info: CheckpointInfo,
    tier: Tier,
    records: Sequence[Record],
    manifest: Manifest,
    results: Sequence[Mended | Unmended],
    *,
    unproved: bool,
) -> None:
    """Records the copy as good, with what the server says of each file now: only where the log says anything else."""
    facts, attempt = fold(records), info.attempt
    quantised = info.quantised_on(tier.name)
    written = {r.file for r in results if isinstance(r, Mended) and r.nbytes_written}
    changed = (bool(results) and not tier.storage.capabilities.local) or (quantised is not None and (unproved or bool(written)))
    if not (facts.quarantined_on(tier.name) or changed) or many_disks(repairing.tiers, tier, info.world_size):
        return
    known = {r.file: r.info for r in results if isinstance(r, Mended) and r.info is not None}

    async def said(name: str) -> tuple[str, FileInfo]:
        return name, known.get(name) or await tier.storage.stat(attempt.path(name))

    files = dict(await together(said, sorted([*(f.name for f in manifest.files), MANIFEST])))
    if quantised is not None:
        quantised = await _proof_of(info, tier, manifest, quantised, written, unproved=unproved)

    before = records

    def still(now: Sequence[Record]) -> bool:
        nonlocal before
        before = now
        state = fold(now)
        since = any(r.kind in ("evicting", "evicted", "quarantined") and r.data.get("tier") == tier.name for r in now[len(records) :])
        return not (since or left_alone(state, info, repairing.context.clock))

    data = {
        "tier": tier.name,
        **files_told(files),
        **taken_told(files),
        "repaired": sorted(written),
        **({} if quantised is None else {"quantised": quantised}),
    }
    try:
        storage = repairing.tiers.authority.storage
        record = await append(storage, attempt, "replicated", data, clock=repairing.context.clock, allow=still)
    except RefusedError:
        log.info("tier=%s checkpoint=%s was decided about while it was repaired", tier.name, attempt.folder)
        return
    if quantised is not None:
        await copy_beside(repairing.tiers.authority, tier, attempt, [*before[len(records) :], record])
    repairing.proved.append((attempt, tier.name))


async def _proof_of(
    info: CheckpointInfo, tier: Tier, manifest: Manifest, told: Mapping[str, Any], written: Collection[str], *, unproved: bool
) -> Mapping[str, Any] | None:
    """What proves a quantised copy of which some shards were written anew; None: all of it is exact by now.

    Raises:
        IntegrityError: A shard that was not written anew is not proved by what proved the copy so far.
        StorageError: The tier failed.
    """
    lossy = await lossy_files(tier, info.attempt, [f.name for f in manifest.files if f.kind == "shard"])
    if not lossy:
        await tier.storage.delete([info.attempt.quantised_path])
        return None
    if not (unproved or written) and "digest" in told:
        return told
    reader = QuantisedReader(tier, info.attempt, told, manifest.block_nbytes)
    for name in lossy:
        if name not in written:
            await reader.lossy(name)
    generation = told.get("generation") if type(told.get("generation")) is int else generation_of(manifest.facts) + 1
    return await put_document(tier, info.attempt, lossy, scheme=str(told.get("scheme", "")), generation=int(generation or 1))
