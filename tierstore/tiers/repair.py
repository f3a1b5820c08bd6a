"""Repair: what verify finds damaged is written anew from the tiers that have it good, block by block (PROTOCOLS.md §7).

First the authority's log, for everything else is decided by it; then each damaged copy: its shards, its documents, its manifest, its
copies of the records. Nothing is deleted, nothing is written in place, and what is published was proved against the manifest while it
was written, so that a repair can be stopped at any instant and run again. When a copy is whole again, `replicated` is recorded anew:
its quarantine ends. What stays damaged is recorded as `quarantined`: it counts as no copy from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from tierstore.clock import Clock
from tierstore.errors import IntegrityError, NotFoundError, PartialError, TierStoreError
from tierstore.format.index import Index, decode_index
from tierstore.names import INDEX, OBJECTS, Attempt
from tierstore.tiers.catalog import CheckpointInfo, RecordCache, scan
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.findings import Finding
from tierstore.tiers.leases import hold_lease
from tierstore.tiers.log import read_log
from tierstore.tiers.log_facts import fold
from tierstore.tiers.mending import Mended, Unmended
from tierstore.tiers.mending_copies import MENDABLE, Repairing, is_share, left_alone, mend_copy, of_ranks
from tierstore.tiers.mending_documents import remade_documents
from tierstore.tiers.mending_logs import mend_record
from tierstore.tiers.progress import Progress
from tierstore.tiers.referrers import fold_references
from tierstore.tiers.tier import Tier, Tiers, ensure_tier
from tierstore.tiers.verify import LEASE_TTL_S, Level, VerifyReport, log_findings, verify
from tierstore.tiers.verify_files import Verifying, good_index, good_manifest

__all__ = ["Mended", "RepairReport", "Unmended", "repair"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What was done, or with `dry_run` would be.

    `proved` are the copies that were recorded anew as good: (attempt, tier). `skipped` are attempts that were left alone, and why.
    """

    run: str
    level: Level
    dry_run: bool
    verified: VerifyReport
    mended: tuple[Mended, ...] = ()
    unmended: tuple[Unmended, ...] = ()
    proved: tuple[tuple[Attempt, str], ...] = ()
    skipped: tuple[tuple[Attempt, str], ...] = ()

    @property
    def lost_logs(self) -> tuple[Finding, ...]:
        """Checkpoints that the authority knows nothing of: `recover` is for them."""
        return tuple(f for f in self.verified.findings if f.code == "V110")

    @property
    def exit_code(self) -> int:
        """0: nothing is left to mend; 3: some of it is; 6 (or a storage's own): nothing could be mended."""
        codes = {u.exit_code for u in self.unmended} | {IntegrityError.exit_code for _ in self.lost_logs}
        if not codes:
            return 0
        if self.mended:
            return PartialError.exit_code
        return IntegrityError.exit_code if IntegrityError.exit_code in codes else min(codes)


async def repair(
    tiers: Tiers,
    run: str,
    *,
    clock: Clock,
    context: CopyContext | None = None,
    level: Level = "full",
    subset: tuple[int, int] = (1, 16),
    steps: Collection[int] | None = None,
    only: Sequence[str] | None = None,
    dry_run: bool = False,
    files_in_flight: int = 4,
    progress: Progress | None = None,
    lease_ttl_s: float = LEASE_TTL_S,
) -> RepairReport:
    """Verifies a run, and mends what some tier has good.

    Checkpoints that were deleted, or whose time has come, are left alone; so are copies that were dropped on purpose.

    Args:
        tiers: The store's tiers; the authority must answer.
        run: The run.
        clock: Dates new records.
        context: Limits and progress of what is written.
        level: How deep to look for damage; files that were found damaged earlier are always read as a whole.
        subset: With ``sample``: which of n groups of blocks to look at.
        steps: The steps to repair; None: all.
        only: Names of the tiers to mend; all tiers are read from. None: all.
        dry_run: Only say what would be done: what is bad is looked for on the other tiers, nothing is written.
        files_in_flight: Files that are read at once while verifying.
        progress: Told as verify reads; None: the context's.
        lease_ttl_s: How long a lease outlives its last beat, in seconds.

    Raises:
        UsageError: No such tier.
        StorageError: The authority can't be reached.
    """
    context = context or CopyContext.make(tiers, clock)
    names = set(only) if only is not None else set(tiers.names)
    for name in names:
        tiers.get(name)
    await ensure_tier(tiers, tiers.authority, create=not dry_run)
    await tiers.authority.storage.children(run)  # an authority that does not answer can't decide anything
    work = Verifying.make(tiers, level=level, subset=subset, budget=context.budget, files_in_flight=files_in_flight, progress=progress)
    repairing = Repairing(context=context, work=work, dry_run=dry_run, ttl_s=lease_ttl_s)
    if tiers.authority.name in names:
        for finding in await log_findings(tiers, run, steps=steps):
            if finding.code == "V105":
                repairing.take(await mend_record(tiers, finding.file, dry_run=dry_run))
    report = await verify(
        tiers,
        run,
        level=level,
        only=only,
        steps=steps,
        subset=subset,
        files_in_flight=files_in_flight,
        progress=progress or context.progress,
        clock=clock,
        lease_ttl_s=lease_ttl_s,
        leases=not dry_run,
    )
    cache = RecordCache()
    infos = {info.attempt: info for info in (await scan(tiers, run, cache)).checkpoints}
    damaged: dict[Attempt, dict[str, list[Finding]]] = {}
    for finding in report.findings:
        attempt = finding.attempt
        if attempt in infos and finding.tier in names and finding.code in MENDABLE:
            damaged.setdefault(attempt, {}).setdefault(finding.tier, []).append(finding)
    for attempt in _in_turn(damaged, infos):
        await _repair_checkpoint(repairing, infos[attempt], damaged[attempt])
    return RepairReport(
        run=run,
        level=level,
        dry_run=dry_run,
        verified=report,
        mended=tuple(repairing.mended),
        unmended=tuple(repairing.unmended),
        proved=tuple(repairing.proved),
        skipped=tuple(repairing.skipped),
    )


def _in_turn(damaged: Collection[Attempt], infos: Mapping[Attempt, CheckpointInfo]) -> list[Attempt]:
    """Those that others take bytes from, the earliest first: with them these may be good again. Then all others, the latest first."""
    bases = sorted((attempt for attempt in damaged if fold_references(infos[attempt].records)), key=lambda attempt: attempt.save_id)
    return bases + sorted(set(damaged) - set(bases), reverse=True)


async def _repair_checkpoint(repairing: Repairing, info: CheckpointInfo, damaged: Mapping[str, Sequence[Finding]]) -> None:
    """One checkpoint under a lease: every copy that is damaged, nearest first, each of the others as a source."""
    attempt, tiers = info.attempt, repairing.tiers
    try:
        async with AsyncExitStack() as stack:
            if not repairing.dry_run:
                lease = hold_lease(
                    tiers, attempt, ttl_s=repairing.ttl_s, clock=repairing.context.clock, kind="repair", warned=repairing.warned
                )
                await stack.enter_async_context(lease)
            records = await read_log(tiers.authority.storage, attempt)
            facts = fold(records)
            why = left_alone(facts, info, repairing.context.clock)
            if why:
                repairing.skipped.append((attempt, why))
                return
            known = await good_manifest(tiers, info)
            manifest = known[0] if known else None
            index = await good_index(tiers, info, manifest) if manifest else None
            made: dict[str, bytes] = {}
            if manifest is not None and _documents_are_damaged(damaged, index):
                made = await remade_documents(attempt, manifest, tiers.tiers)
            if index is None and INDEX in made:
                index, _ = decode_index(made[INDEX])
                damaged = {name: [*found, *_unseen(info, index, tiers.get(name), found)] for name, found in damaged.items()}
            for tier in tiers:
                if tier.name in damaged and tier.name not in facts.dropped:
                    await mend_copy(repairing, info, tier, records, manifest, index, made, damaged[tier.name])
    except NotFoundError as error:  # deleted meanwhile
        repairing.skipped.append((attempt, error.message))
    except TierStoreError as error:
        for name in damaged:
            repairing.take(Unmended(attempt=attempt, tier=name, file="", reason=error.message, exit_code=error.exit_code))


def _documents_are_damaged(damaged: Mapping[str, Sequence[Finding]], index: Index | None) -> bool:
    """Whether it is worth making index and objects from the parts: no tier has the index, or more than one lacks good objects."""
    return index is None or sum(any(f.file == OBJECTS for f in findings) for findings in damaged.values()) > 1


def _unseen(info: CheckpointInfo, index: Index, tier: Tier, findings: Sequence[Finding]) -> list[Finding]:
    """The shards on a tier that verify could not look at without an index: they are read now."""
    named = {f.file for f in findings}
    if any(f.code == "V113" for f in findings):
        return []
    return [
        Finding(code="V109", tier=tier.name, file=name, detail="not looked at without an index", checkpoint=info.attempt.folder)
        for name in index.file_names
        if name not in named and (not is_share(info, tier) or of_ranks(name, info, tier))
    ]
