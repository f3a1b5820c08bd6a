"""Reading the tiers' logs: one listing a tier, records once each, the authority's word before the replicas' copies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierstore.errors import IntegrityError, NotFoundError, StorageError, TierStoreError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers.checkpoint import CheckpointInfo, IncompleteAttempt, Reduced, ReplicaState, parse_file_name
from tierstore.tiers.listing import Names, TierListing, list_tier, read_records
from tierstore.tiers.log_facts import LogFacts, fold
from tierstore.tiers.record_cache import RecordCache
from tierstore.tiers.tier import Tier, Tiers, recheck
from tierstore.tiers.together import together
from tierstore.tiers.view import staging

__all__ = ["Scanned", "scan_attempts"]

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Scanned:
    """What a scan found, before the attempts of one step are compared."""

    checkpoints: list[CheckpointInfo] = field(default_factory=list)
    incomplete: list[IncompleteAttempt] = field(default_factory=list)
    condemned: list[IncompleteAttempt] = field(default_factory=list)
    swept: list[Attempt] = field(default_factory=list)
    reduced: dict[Attempt, Reduced] = field(default_factory=dict)
    remains: dict[Attempt, tuple[str, ...]] = field(default_factory=dict)
    behind: dict[Attempt, tuple[str, ...]] = field(default_factory=dict)
    known: int = 0
    unreachable: dict[str, TierStoreError] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


async def scan_attempts(tiers: Tiers, run: str, cache: RecordCache) -> Scanned:
    """Reads every attempt of a run.

    Raises:
        StorageError: No tier can be reached.
    """
    scanned = Scanned()
    nodes = {tier.name for tier in staging(tiers)}
    names = Names(run)

    async def view_of(tier: Tier) -> TierListing | None:
        try:
            await recheck(tiers, tier)
            view = await list_tier(tier, run, names, staging=tier.name in nodes)
            if tiers.is_authority(tier):
                await cache.load(tier.name, view.root, view.files())
                await read_records(view, view.records, cache)
                await cache.save(tier.name, view.root, view.files())
            return view
        except TierStoreError as error:
            scanned.unreachable[tier.name] = error
            return None

    found = await asyncio.gather(*(view_of(tier) for tier in tiers))
    views = [view for view in found if view is not None]
    for name, error in scanned.unreachable.items():
        _warn(scanned, cache, f"tier={name} can't be reached and is left out: {error.message}")
    if not views:
        raise next(iter(scanned.unreachable.values()))
    authority = next((view for view in views if tiers.is_authority(view.tier)), None)

    if authority is not None and _unknown_copies(authority, views):
        try:
            await _look_again(authority, run, names, cache)
        except TierStoreError as error:
            scanned.unreachable[authority.tier.name] = error
            _warn(scanned, cache, f"tier={authority.tier.name} can't be reached and is left out: {error.message}")
            views.remove(authority)
            authority = None

    # The authority decides about what it knows. For the rest, the copies beside the replicas are read.
    known = {a for a, read in authority.read.items() if isinstance(read.get(0), Record) or authority.swept(a)} if authority else set()
    scanned.known = sum(0 in seqs for seqs in authority.records.values()) if authority else 0
    for view in views:
        if view is not authority:
            wanted = [a for a, seqs in view.records.items() if a not in known and 0 in seqs]
            try:
                await read_records(view, wanted, cache)
            except (StorageError, NotFoundError) as error:
                scanned.unreachable[view.tier.name] = error
                _warn(scanned, cache, f"tier={view.tier.name} can't be reached and is left out: {error.message}")
    views = [view for view in views if view.tier.name not in scanned.unreachable]

    undecided = await asyncio.to_thread(_decide_all, authority, views, scanned, cache)  # many of them would hold up the event loop
    await _describe_undecided(undecided, views, scanned)
    for view in views:
        scanned.foreign.extend(f"{view.tier.name}:{path}" for path in view.foreign)
    return scanned


def _unknown_copies(authority: TierListing, views: Sequence[TierListing]) -> bool:
    """Whether a replica has the commit record of a checkpoint that the authority's listing does not show."""
    return any(
        0 in seqs and not authority.knows(attempt) for view in views if view is not authority for attempt, seqs in view.records.items()
    )


async def _look_again(authority: TierListing, run: str, names: Names, cache: RecordCache) -> None:
    """Lists the authority once more: it may have committed after its first listing and before a replica's, which is no lost log."""
    again = await list_tier(authority.tier, run, names, staging=False)
    fresh = [attempt for attempt, seqs in again.records.items() if 0 in seqs and not authority.knows(attempt)]
    authority.folders |= again.folders
    authority.records.update({attempt: again.records[attempt] for attempt in fresh})
    await read_records(authority, fresh, cache)


def _decide_all(authority: TierListing | None, views: Sequence[TierListing], scanned: Scanned, cache: RecordCache) -> list[Attempt]:
    """Files every attempt whose fate some log knows; returns the others."""
    attempts = sorted({a for view in views for a in view.attempts()}, key=lambda a: (a.step, a.save_id))
    return [attempt for attempt in attempts if not _decide(attempt, authority, views, scanned, cache)]


def _decide(attempt: Attempt, authority: TierListing | None, views: Sequence[TierListing], scanned: Scanned, cache: RecordCache) -> bool:
    """Files an attempt whose fate some log knows; False if none does."""
    sources = [authority] if authority and authority.knows(attempt) else []
    lost = not sources
    if authority and not lost and authority.swept(attempt):
        return _file_swept(attempt, authority, views, scanned)
    if lost:
        sources = [view for view in views if view.read.get(attempt)]
        if not sources:
            return False
    name = f"run={attempt.run} step={attempt.step} save_id={attempt.save_id}"
    records, damages = _merge(attempt, sources)
    if not records:  # number 0 itself can't be read: perhaps a copy beside a replica can
        others = [view for view in views if view not in sources and view.read.get(attempt)]
        records, _ = _merge(attempt, others)
    for text in damages:
        _warn(scanned, cache, f"{name}: {text}; what else is known of it is used")
    if not records:
        unreadable = "; ".join(damages)
        scanned.incomplete.append(IncompleteAttempt(attempt=attempt, receipts=_receipts(attempt, views), unreadable=unreadable))
        return True
    facts = fold(records)
    if facts.condemned:
        reason = str(records[0].data.get("reason") or "no reason was given")
        scanned.condemned.append(
            IncompleteAttempt(
                attempt=attempt,
                world_size=facts.world_size,
                receipts=_receipts(attempt, views),
                condemned=reason,
            )
        )
        _note_remains(attempt, authority, views, scanned)
        return True
    if facts.reduced is not None:
        scanned.reduced[attempt] = Reduced(
            attempt=attempt, keep=facts.reduced, records=tuple(records), authority_lost=lost, damaged=bool(damages)
        )
    if facts.swept:
        return _file_swept(attempt, authority, views, scanned)
    if lost:
        why = "the authority's log knows nothing of it" if authority else "the authority can't be reached"
        names = ", ".join(view.tier.name for view in sources)
        _warn(scanned, cache, f"{name}: {why}: read from the copies on {names}; `tierstore recover` rebuilds a lost log")
    dropped = facts.dropped | {view.tier.name for view in views if attempt in view.evicted}
    replicas = _replicas(attempt, facts, dropped, authority, lost, views)
    receipts = _receipts(attempt, views)
    home = authority.tier.name if authority else ""
    scanned.checkpoints.append(_info(attempt, records, facts, dropped, replicas, receipts, home=home, damaged=bool(damages), lost=lost))
    if not (lost or damages) and (behind := _behind(attempt, facts, dropped, len(records), authority, views)):
        scanned.behind[attempt] = behind
    return True


def _file_swept(attempt: Attempt, authority: TierListing | None, views: Sequence[TierListing], scanned: Scanned) -> bool:
    scanned.swept.append(attempt)
    _note_remains(attempt, authority, views, scanned)
    return True


def _note_remains(attempt: Attempt, authority: TierListing | None, views: Sequence[TierListing], scanned: Scanned) -> None:
    """Notes which tiers still have something of an attempt that is gone: payload, log copies, or records that are to be trimmed."""
    left = []
    reduced = scanned.reduced.get(attempt)
    for view in views:
        numbers = view.records.get(attempt, {}).keys()
        if reduced is not None and (view.tier.name in reduced.keep or view is authority):
            if attempt in view.folders and view.tier.name not in reduced.keep:
                left.append(view.tier.name)
            continue  # its shards stay there, or its log does, which goes on
        kept = {0, max(numbers)} if view is authority and view.swept(attempt) else {0} if view is authority else set()
        beside = attempt in view.receipts or attempt in view.evicted or attempt in view.quantised
        if attempt in view.folders or beside or numbers - kept:
            left.append(view.tier.name)
    if left:
        scanned.remains[attempt] = tuple(left)


def _info(
    attempt: Attempt,
    records: Sequence[Record],
    facts: LogFacts,
    dropped: frozenset[str],
    replicas: Mapping[str, ReplicaState],
    receipts: Mapping[str, tuple[int, ...]],
    *,
    home: str,
    damaged: bool,
    lost: bool,
) -> CheckpointInfo:
    data = records[0].data

    def count(key: str) -> int | None:
        value = data.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    return CheckpointInfo(
        attempt=attempt,
        committed_at=records[0].at,
        manifest_digest=str(data.get("manifest", "")),
        manifest_nbytes=count("manifest_nbytes"),
        opening=_opening(data.get("opening")),
        nbytes=count("nbytes") or 0,
        world_size=facts.world_size or 1,
        metrics=facts.metrics,
        tags=facts.tags,
        pins=facts.pins,
        holds=facts.holds,
        final=data.get("final") is True,
        replicas=replicas,
        receipts=receipts,
        replicated={tier: record.data for tier, record in facts.replicated.items()},
        taken=_taken({home: records[0], **facts.replicated}),
        dropped=dropped,
        quarantined=facts.quarantined,
        expired=facts.expired,
        revived=facts.revived,
        damaged=damaged,
        authority_lost=lost,
        records=tuple(records),
    )


def _taken(records: Mapping[str, Record]) -> dict[str, int]:
    """What copies take up, by tier, as their records say."""
    told = {tier: record.data.get("taken_nbytes") for tier, record in records.items()}
    return {tier: nbytes for tier, nbytes in told.items() if type(nbytes) is int and nbytes >= 0}


def _opening(told: object) -> dict[str, int]:
    """Only a hint: what is wrong with it costs a request, for nothing counts before it is proved."""
    items = told.items() if isinstance(told, Mapping) else ()
    return {str(name): nbytes for name, nbytes in items if type(nbytes) is int and nbytes > 0}


def _merge(attempt: Attempt, views: Sequence[TierListing]) -> tuple[list[Record], list[str]]:
    """The records from number 0 up to the first that is missing or unreadable, the nearest source first; and what is wrong."""
    damages: list[str] = []
    best: dict[int, Record] = {}
    last = -1
    for view in views:
        for seq, record in view.read.get(attempt, {}).items():
            last = max(last, seq)
            if isinstance(record, IntegrityError):
                damages.append(f"tier={view.tier.name}: {record.message}")
            elif seq in best and best[seq].nonce != record.nonce:
                damages.append(f"tier={view.tier.name}: {attempt.record_path(seq)} differs from the copy on a nearer tier")
            else:
                best.setdefault(seq, record)
    records: list[Record] = []
    while len(records) in best:
        records.append(best[len(records)])
    if not damages and len(records) <= last:
        damages.append(f"{attempt.record_path(len(records))} is missing before number {last}")
    return records, damages


def _replicas(
    attempt: Attempt, facts: LogFacts, dropped: frozenset[str], authority: TierListing | None, lost: bool, views: Sequence[TierListing]
) -> dict[str, ReplicaState]:
    states: dict[str, ReplicaState] = {}
    for view in views:
        name = view.tier.name
        log_left = view is not authority and (attempt in view.records or attempt in view.receipts or attempt in view.quantised)
        if attempt not in view.folders and not (name in dropped and log_left):  # copies of the log that a late copier left go too
            continue
        first = view.records.get(attempt, {}).get(0)
        copied = (first is not None and first.nbytes > 0) or (view is authority and not lost)
        if name in dropped:
            states[name] = "evicting"
        elif facts.quarantined_on(name) and copied:
            states[name] = "quarantined"
        elif copied and not _is_share(attempt, facts, view):
            states[name] = "quantised" if _is_quantised(attempt, facts, view) else "complete"
        elif attempt in view.receipts:
            states[name] = "receipt"
        else:
            states[name] = "partial"
    return states


def _is_quantised(attempt: Attempt, facts: LogFacts, view: TierListing) -> bool:
    """Whether the tier's copy is not exact: as its record says; where that was lost with the log, what lies beside the copy says so."""
    name = view.tier.name
    return name in facts.quantised or (attempt in view.quantised and name not in facts.replicated)


def _behind(
    attempt: Attempt, facts: LogFacts, dropped: frozenset[str], count: int, authority: TierListing | None, views: Sequence[TierListing]
) -> tuple[str, ...]:
    """The tiers beside whose copy not all of the log's records lie, without those whose copy is not complete yet."""
    names = []
    for view in views:
        if view is authority or view.tier.name in dropped or attempt not in view.folders:
            continue
        there = {seq for seq, info in view.records.get(attempt, {}).items() if info.nbytes}
        if (0 in there or view.tier.name in facts.replicated) and not there.issuperset(range(count)):
            names.append(view.tier.name)
    return tuple(names)


def _is_share(attempt: Attempt, facts: LogFacts, view: TierListing) -> bool:
    """Whether a node's tier holds its own ranks' parts only, though the documents of the whole checkpoint lie beside them."""
    return view.tier.scope == "node" and 0 < len(view.receipts.get(attempt, [])) < (facts.world_size or 1)


def _receipts(attempt: Attempt, views: Sequence[TierListing]) -> dict[str, tuple[int, ...]]:
    return {view.tier.name: tuple(sorted(view.receipts[attempt])) for view in views if attempt in view.receipts}


async def _describe_undecided(attempts: Sequence[Attempt], views: Sequence[TierListing], scanned: Scanned) -> None:
    """Attempts without a fate: which ranks' parts are where, from the names in their folders."""

    async def describe(attempt: Attempt) -> IncompleteAttempt:
        world_size: int | None = None
        parts: dict[str, tuple[int, ...]] = {}
        for view in views:
            if attempt not in view.folders:
                continue
            try:
                listing = await view.tier.storage.children(attempt.folder)
            except (StorageError, NotFoundError) as error:
                scanned.unreachable.setdefault(view.tier.name, error)
                continue
            names = [parse_file_name(info.path.rpartition("/")[2]) for info in listing.files]
            ranks = sorted(rank for found in names if found and found[0] == "part" for rank in [found[1]])
            if ranks:
                parts[view.tier.name] = tuple(ranks)
            world_size = next((found[2] for found in names if found and found[2] is not None), world_size)
        return IncompleteAttempt(attempt=attempt, world_size=world_size, parts=parts, receipts=_receipts(attempt, views))

    scanned.incomplete.extend(await together(describe, attempts))


def _warn(scanned: Scanned, cache: RecordCache, text: str) -> None:
    scanned.warnings.append(text)
    if cache.first_time(text):
        log.warning("%s", text)
