"""Recover: finish complete attempts that nobody committed, and rebuild a lost authority log from the replicas' copies.

Nothing is ever deleted. A log is rebuilt in the order of a commit: the payload is on the authority, proved, before its records are,
so that at no instant the authority claims what it has not. What was dropped from the authority on purpose stays dropped: its log comes
back, its payload does not. An authority that had lost its descriptor too gets it last (`opening.rejoin`): until then nobody can open
the store for writing and begin a second log.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from tierstore.clock import Clock
from tierstore.errors import ConflictError, IntegrityError, NotFoundError, StorageError, TierStoreError
from tierstore.format.record import Record, encode_record
from tierstore.names import Attempt, save_id_time
from tierstore.tiers.catalog import CheckpointInfo, scan
from tierstore.tiers.checkpoint import Reduced
from tierstore.tiers.copies import Copied, copy_payload, record_replica
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.locks import RunLock, lock_path
from tierstore.tiers.log import actor_name, new_nonce, parse_record
from tierstore.tiers.promote import ReconcileReport, pending, reconcile
from tierstore.tiers.quantised import told_by_document
from tierstore.tiers.recover_references import record_again
from tierstore.tiers.tier import Tier, Tiers, ensure_tier
from tierstore.tiers.view import AttemptView, further, observe, staging

__all__ = ["Rebuilt", "RecoverReport", "recover"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """One checkpoint whose log the authority had lost. `error` is empty where it was rebuilt (or, in a dry run, would be)."""

    attempt: Attempt
    sources: tuple[str, ...]
    records: int
    nbytes: int = 0
    """Of its files: what is copied where the authority lacks them; 0 where it had dropped them on purpose, or only quantised copies are
    left."""
    quantised: bool = False
    """Only quantised copies are left, on `sources`: the log alone is rebuilt."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverReport:
    """What was done, or with `dry_run` would be."""

    dry_run: bool
    rebuilt: tuple[Rebuilt, ...]
    committed: tuple[Attempt, ...]
    incomplete: tuple[tuple[Attempt, str], ...]
    """Attempts that can't be finished, and why."""

    @property
    def ok(self) -> bool:
        return not any(r.error for r in self.rebuilt)


async def recover(
    tiers: Tiers,
    run: str,
    *,
    clock: Clock,
    context: CopyContext | None = None,
    dry_run: bool = False,
    lock: RunLock | None = None,
    wait_s: float | None = 0.0,
) -> RecoverReport:
    """Rebuilds what the authority lost, then commits every attempt whose parts are all there.

    Args:
        tiers: The store's tiers; the authority must answer.
        run: The run.
        clock: Dates new records.
        context: Limits and progress.
        dry_run: Only say what would be done.
        lock: The run's lock, where the caller has one.
        wait_s: Seconds to wait for another process on this node; None: without end.

    Raises:
        LockedError: Another process works on this run.
        StorageError: The authority can't be reached.
    """
    context = context or CopyContext.make(tiers, clock)
    lock = lock or RunLock(lock_path(tiers, run), run)
    async with lock.hold(wait_s=wait_s):
        await ensure_tier(tiers, tiers.authority, create=not dry_run)
        await tiers.authority.storage.children(run)  # an authority that does not answer has not lost its log
        catalog = await scan(tiers, run)
        # By age: what others refer to has its log again before those have theirs.
        lost = sorted((c for c in catalog.checkpoints if c.authority_lost), key=lambda c: save_id_time(c.attempt.save_id))
        reduced = [r for r in catalog.reduced.values() if r.authority_lost]
        rebuilt = [await _rebuild_reduced(context, found, dry_run=dry_run) for found in reduced]
        rebuilt += [await _rebuild(context, info, dry_run=dry_run) for info in lost]
        if dry_run:
            wanted = [c for c in pending(catalog, tiers) if c.kind == "commit"]
            ready = {a.attempt for a in catalog.incomplete if a.missing == ()}
            report = ReconcileReport(
                done=tuple(c for c in wanted if c.attempt in ready),
                waiting=tuple((c, "parts are missing") for c in wanted if c.attempt not in ready),
            )
        else:
            report = await reconcile(tiers, run, clock=clock, context=context, commit_only=True, lock=lock)
    commits = [c for c in report.done if c.kind == "commit"]
    waiting = [(c.attempt, why) for c, why in report.waiting if c.kind == "commit"]
    failed = [(f.copy.attempt, f.error.message) for f in report.failed if f.copy.kind == "commit"]
    return RecoverReport(
        dry_run=dry_run,
        rebuilt=tuple(rebuilt),
        committed=tuple(c.attempt for c in commits),
        incomplete=(*waiting, *failed),
    )


async def _rebuild(context: CopyContext, info: CheckpointInfo, *, dry_run: bool) -> Rebuilt:
    """Brings one checkpoint back to the authority: payload first, then its records by number, then a record for each replica."""
    tiers = context.tiers
    nodes = {t.name for t in staging(tiers)}
    dropped = tiers.authority.name in info.dropped
    lossy = tuple(t.name for t in tiers if info.quantised_on(t.name) is not None and info.replicas.get(t.name) == "quantised")
    holding = [t for t in tiers if info.replicas.get(t.name) == "complete" or (t.name in nodes and t.name in info.receipts)]
    sources = tuple(t.name for t in holding)
    left = bool(lossy) and not sources  # what is not exact is never taken for the authority's copy
    nbytes = 0 if dropped or left else info.nbytes
    done = Rebuilt(attempt=info.attempt, sources=sources or lossy, records=len(info.records), nbytes=nbytes, quantised=left)
    if dry_run:
        return done
    try:
        view = await _as_the_copies_tell(tiers, info)
        raw = [await _raw_record(tiers, info.attempt, record) for record in info.records]
        if left:
            await _record_loss(context, info)
        elif not dropped:
            await copy_payload(context, view, tiers.authority)
        elif not info.usable:
            return replace(done, error="the authority had dropped its copy, and no tier that was reached has a complete one")
        if why := await record_again(context, info, view):
            return replace(done, error=why)  # known from its copies, it is read on, and nothing is collected
        for record, data in reversed(list(zip(info.records, raw, strict=True))):  # the commit record last: until then it is still lost
            await tiers.authority.storage.create(info.attempt.record_path(record.seq), data)
        for tier in further(tiers):
            missing = tier.name not in info.replicated and tier.name not in info.dropped
            if info.replicas.get(tier.name) == "complete" and missing:
                await _record_again(context, view, tier)
            if tier.name in lossy and missing:
                told = await told_by_document(tier, info.attempt)
                await record_replica(context, view, tier, Copied(files={}, quantised=told))
    except ConflictError as error:  # somebody decides about this attempt right now: their log stands
        return replace(done, error=f"its log has come back meanwhile: {error.message}")
    except TierStoreError as error:
        log.warning("checkpoint=%s can't be rebuilt: %s", info.attempt.folder, error.message)
        return replace(done, error=error.message)
    if left:
        log.warning(
            "checkpoint=%s only its log is rebuilt: the one copy left, on %s, is quantised, and no authority's",
            info.attempt.folder,
            lossy[0],
        )
    else:
        log.warning("checkpoint=%s rebuilt from %s", info.attempt.folder, ", ".join(done.sources))
    return done


async def _rebuild_reduced(context: CopyContext, found: Reduced, *, dry_run: bool) -> Rebuilt:
    """The log of a checkpoint that was deleted but for shards that others refer to: its records, and nothing else."""
    authority = context.tiers.authority.storage
    done = Rebuilt(attempt=found.attempt, sources=tuple(sorted(found.keep)), records=len(found.records))
    if dry_run:
        return done
    try:
        raw = [await _raw_record(context.tiers, found.attempt, record) for record in found.records]
        for record, data in reversed(list(zip(found.records, raw, strict=True))):
            await authority.create(found.attempt.record_path(record.seq), data)
    except TierStoreError as error:
        log.warning("checkpoint=%s its log can't be rebuilt: %s", found.attempt.folder, error.message)
        return replace(done, error=error.message)
    return done


async def _record_loss(context: CopyContext, info: CheckpointInfo) -> None:
    """Where only quantised copies are left: the authority has none, and is not to have one. The record comes before the log counts."""
    authority, seq = context.tiers.authority, len(info.records)
    if authority.name in info.dropped:
        return
    data = {"tier": authority.name, "reason": "lost; the copies that are left are quantised"}
    record = Record(seq=seq, kind="evicted", at=context.clock.now(), nonce=new_nonce(), actor=actor_name(), data=data)
    path = info.attempt.record_path(seq)
    try:
        await authority.storage.create(path, encode_record(record))
    except ConflictError:
        earlier = parse_record(await authority.storage.read(path), path, seq)  # an earlier try's
        if earlier.kind != "evicted" or earlier.data.get("tier") != authority.name:
            raise


async def _as_the_copies_tell(tiers: Tiers, info: CheckpointInfo) -> AttemptView:
    """The attempt with the replicas' copies of the log in place of the authority's, and every complete replica as a source."""
    view = await observe(tiers, info.attempt, world_size=info.world_size, records=info.records)
    found = {t.name: info.records[0] for t in further(tiers) if info.replicas.get(t.name) == "complete"}
    return replace(view, log=replace(view.log, replicated={**view.log.replicated, **found}))


async def _raw_record(tiers: Tiers, attempt: Attempt, record: Record) -> bytes:
    """The record's bytes as some tier keeps them: records are copied, never written anew."""
    path = attempt.record_path(record.seq)
    for tier in tiers:
        try:
            data = await tier.storage.read(path)
            if parse_record(data, path, record.seq).nonce == record.nonce:
                return data
        except (NotFoundError, StorageError, IntegrityError) as error:
            log.debug("tier=%s no record %s from here: %s", tier.name, path, error.message)
    raise IntegrityError(f"no tier gives {path} any more", hint="bring the tiers that hold copies of this checkpoint back")


async def _record_again(context: CopyContext, view: AttemptView, tier: Tier) -> None:
    """A replica's own `replicated` record was lost with the log: its files are compared again, and recorded anew."""
    copied = await copy_payload(context, view, tier)
    await record_replica(context, view, tier, copied)
