"""Reading the tiers' logs: one listing a tier, records once each, the authority's word before the replicas' copies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierstore.errors import IntegrityError, NotFoundError, StorageError, TierStoreError
from tierstore.format.record import Record
from tierstore.names import Attempt, attempt_of_log_path, log_root
from tierstore.tiers.checkpoint import CheckpointInfo, IncompleteAttempt, ReplicaState, parse_file_name
from tierstore.tiers.log import parse_record, record_seq
from tierstore.tiers.log_facts import LogFacts, fold
from tierstore.tiers.tier import Tier, Tiers, recheck
from tierstore.tiers.together import together

__all__ = ["RecordCache", "Scanned", "runs", "scan_attempts"]

log = logging.getLogger(__name__)

_MAX_DEPTH = 16


class RecordCache:
    """Records that were read before, by tier and path: they are write-once, so an entry is true for ever. Also what was warned of."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], Record] = {}
        self._warned: set[str] = set()

    def get(self, tier: str, path: str) -> Record | None:
        return self._records.get((tier, path))

    def put(self, tier: str, path: str, record: Record) -> None:
        self._records[tier, path] = record

    def first_time(self, warning: str) -> bool:
        """Whether this text was not warned of before: a catalog is read many times, and says things once."""
        if warning in self._warned:
            return False
        self._warned.add(warning)
        return True

    def __len__(self) -> int:
        return len(self._records)


@dataclass(slots=True, kw_only=True)
class Scanned:
    """What a scan found, before the attempts of one step are compared."""

    checkpoints: list[CheckpointInfo] = field(default_factory=list)
    incomplete: list[IncompleteAttempt] = field(default_factory=list)
    condemned: list[IncompleteAttempt] = field(default_factory=list)
    swept: list[Attempt] = field(default_factory=list)
    unreachable: dict[str, TierStoreError] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _View:
    """One tier's listing: per attempt the numbers of its records, the ranks of its receipts, and the payload folders."""

    tier: Tier
    records: dict[Attempt, dict[int, int]] = field(default_factory=dict)
    receipts: dict[Attempt, list[int]] = field(default_factory=dict)
    folders: set[Attempt] = field(default_factory=set)
    foreign: list[str] = field(default_factory=list)
    read: dict[Attempt, dict[int, Record | IntegrityError]] = field(default_factory=dict)

    def attempts(self) -> set[Attempt]:
        return {*self.records, *self.receipts, *self.folders}


async def scan_attempts(tiers: Tiers, run: str, cache: RecordCache) -> Scanned:
    """Reads every attempt of a run.

    Raises:
        StorageError: No tier can be reached.
    """
    scanned = Scanned()

    async def view_of(tier: Tier) -> _View | None:
        try:
            await recheck(tiers, tier)
            view = await _list_tier(tier, run)
            if tiers.is_authority(tier):
                await _read_records(view, view.records, cache)
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
            await _look_again(authority, run, cache)
        except TierStoreError as error:
            scanned.unreachable[authority.tier.name] = error
            _warn(scanned, cache, f"tier={authority.tier.name} can't be reached and is left out: {error.message}")
            views.remove(authority)
            authority = None

    # The authority decides about what it knows. For the rest, the copies beside the replicas are read.
    known = {a for a, read in authority.read.items() if isinstance(read.get(0), Record)} if authority else set()
    for view in views:
        if view is not authority:
            wanted = [a for a, seqs in view.records.items() if a not in known and 0 in seqs]
            try:
                await _read_records(view, wanted, cache)
            except (StorageError, NotFoundError) as error:
                scanned.unreachable[view.tier.name] = error
                _warn(scanned, cache, f"tier={view.tier.name} can't be reached and is left out: {error.message}")
    views = [view for view in views if view.tier.name not in scanned.unreachable]

    undecided: list[Attempt] = []
    for attempt in sorted({a for view in views for a in view.attempts()}):
        if not _decide(attempt, authority, views, scanned, cache):
            undecided.append(attempt)
    await _describe_undecided(undecided, views, scanned)
    for view in views:
        scanned.foreign.extend(f"{view.tier.name}:{path}" for path in view.foreign)
    return scanned


def _unknown_copies(authority: _View, views: Sequence[_View]) -> bool:
    """Whether a replica has the commit record of a checkpoint that the authority's listing does not show."""
    return any(
        0 in seqs and 0 not in authority.records.get(attempt, {})
        for view in views
        if view is not authority
        for attempt, seqs in view.records.items()
    )


async def _look_again(authority: _View, run: str, cache: RecordCache) -> None:
    """Lists the authority once more: it may have committed after its first listing and before a replica's, which is no lost log."""
    again = await _list_tier(authority.tier, run)
    fresh = [attempt for attempt, seqs in again.records.items() if 0 not in authority.records.get(attempt, {}) and 0 in seqs]
    authority.folders |= again.folders
    authority.records.update({attempt: again.records[attempt] for attempt in fresh})
    await _read_records(authority, fresh, cache)


def _decide(attempt: Attempt, authority: _View | None, views: Sequence[_View], scanned: Scanned, cache: RecordCache) -> bool:
    """Files an attempt whose fate some log knows; False if none does."""
    sources = [authority] if authority and 0 in authority.records.get(attempt, {}) else []
    lost = not sources
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
        return True
    if facts.swept:
        scanned.swept.append(attempt)
        return True
    if lost:
        why = "the authority's log knows nothing of it" if authority else "the authority can't be reached"
        names = ", ".join(view.tier.name for view in sources)
        _warn(scanned, cache, f"{name}: {why}: read from the copies on {names}; `tierstore recover` rebuilds a lost log")
    replicas = _replicas(attempt, facts, authority, lost, views)
    scanned.checkpoints.append(_info(attempt, records, facts, replicas, _receipts(attempt, views), damaged=bool(damages), lost=lost))
    return True


def _info(
    attempt: Attempt,
    records: Sequence[Record],
    facts: LogFacts,
    replicas: Mapping[str, ReplicaState],
    receipts: Mapping[str, tuple[int, ...]],
    *,
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
        dropped=facts.dropped,
        quarantined=facts.quarantined,
        expired=facts.expired,
        revived=facts.revived,
        damaged=damaged,
        authority_lost=lost,
        records=tuple(records),
    )


def _opening(told: object) -> dict[str, int]:
    """Only a hint: what is wrong with it costs a request, for nothing counts before it is proved."""
    items = told.items() if isinstance(told, Mapping) else ()
    return {str(name): nbytes for name, nbytes in items if type(nbytes) is int and nbytes > 0}


def _merge(attempt: Attempt, views: Sequence[_View]) -> tuple[list[Record], list[str]]:
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


def _replicas(attempt: Attempt, facts: LogFacts, authority: _View | None, lost: bool, views: Sequence[_View]) -> dict[str, ReplicaState]:
    states: dict[str, ReplicaState] = {}
    for view in views:
        if attempt not in view.folders:
            continue
        name = view.tier.name
        copied = view.records.get(attempt, {}).get(0, 0) > 0 or (view is authority and not lost)
        if name in facts.dropped:
            states[name] = "evicting"
        elif facts.quarantined_on(name) and copied:
            states[name] = "quarantined"
        elif copied and not _is_share(attempt, facts, view):
            states[name] = "complete"
        elif attempt in view.receipts:
            states[name] = "receipt"
        else:
            states[name] = "partial"
    return states


def _is_share(attempt: Attempt, facts: LogFacts, view: _View) -> bool:
    """Whether a node's tier holds its own ranks' parts only, though the documents of the whole checkpoint lie beside them."""
    return view.tier.scope == "node" and 0 < len(view.receipts.get(attempt, [])) < (facts.world_size or 1)


def _receipts(attempt: Attempt, views: Sequence[_View]) -> dict[str, tuple[int, ...]]:
    return {view.tier.name: tuple(sorted(view.receipts[attempt])) for view in views if attempt in view.receipts}


async def _describe_undecided(attempts: Sequence[Attempt], views: Sequence[_View], scanned: Scanned) -> None:
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


async def _list_tier(tier: Tier, run: str) -> _View:
    looks: list[Callable[[], Awaitable[Any]]] = [lambda: tier.storage.list(log_root(run)), lambda: tier.storage.children(run)]
    records, level = await together(lambda look: look(), looks)
    view = _View(tier=tier)
    for info in records:
        split = attempt_of_log_path(info.path)
        attempt, leaf = split if split is not None else (None, "")
        if attempt is None or attempt.run != run:
            view.foreign.append(info.path)
        elif (seq := record_seq(leaf)) is not None:
            view.records.setdefault(attempt, {})[seq] = info.nbytes
        elif leaf.startswith("receipt-") and leaf.removeprefix("receipt-").removesuffix(".json").isdigit() and leaf.endswith(".json"):
            if info.nbytes:
                view.receipts.setdefault(attempt, []).append(int(leaf[8:-5]))
        else:
            view.foreign.append(info.path)
    folders = {Attempt.parse(run, folder.rpartition("/")[2]) for folder in level.folders}
    if any(0 in seqs and attempt not in folders for attempt, seqs in view.records.items()):
        # Made between the two listings, or gone for good: a checkpoint must not seem to lie nowhere because its folder was listed first.
        level = await tier.storage.children(run)
    for folder in level.folders:
        name = folder.rpartition("/")[2]
        attempt = Attempt.parse(run, name)
        if attempt is not None:
            view.folders.add(attempt)
        elif name.startswith("step-"):
            view.foreign.append(f"{run}/{name}")  # other folders may be runs below this one
    view.foreign.extend(info.path for info in level.files)
    return view


async def _read_records(view: _View, attempts: Iterable[Attempt], cache: RecordCache) -> None:
    """Reads the records of attempts that the listing shows, into `view.read`; one that can't be parsed is kept as its error."""
    wanted = [(attempt, seq) for attempt in attempts for seq in view.records[attempt]]

    async def one(item: tuple[Attempt, int]) -> None:
        attempt, seq = item
        path = attempt.record_path(seq)
        record: Record | IntegrityError | None = cache.get(view.tier.name, path)
        if record is None:
            try:
                record = await _read_record(view.tier, path, seq)
            except IntegrityError as error:
                record = error
            except NotFoundError:
                return  # removed between the listing and this read
            else:
                cache.put(view.tier.name, path, record)
        view.read.setdefault(attempt, {})[seq] = record

    await together(one, wanted)


async def _read_record(tier: Tier, path: str, seq: int) -> Record:
    """One record; read a second time where it came garbled, for a bad read is not a bad record, and much hangs on it."""
    try:
        return parse_record(await tier.storage.read(path), path, seq)
    except IntegrityError as error:
        log.debug("tier=%s %s is read again: %s", tier.name, path, error.message)
        return parse_record(await tier.storage.read(path), path, seq)


async def runs(tiers: Tiers) -> list[str]:
    """The names of all runs that some tier has a log of, sorted.

    Raises:
        StorageError: No tier can be reached.
    """
    failures: list[TierStoreError] = []

    async def of_tier(tier: Tier) -> set[str]:
        try:
            await recheck(tiers, tier)
            return await _runs_below(tier, "", 0)
        except TierStoreError as error:
            failures.append(error)
            return set()

    found = await asyncio.gather(*(of_tier(tier) for tier in tiers))
    if len(failures) == len(tiers):
        raise failures[0]
    return sorted(set().union(*found))


async def _runs_below(tier: Tier, folder: str, depth: int) -> set[str]:
    names = [name.rpartition("/")[2] for name in (await tier.storage.children(folder)).folders]
    found = {folder} if folder and ".log" in names else set()
    if depth < _MAX_DEPTH:
        below = [n for n in names if not n.startswith(".") and Attempt.parse("", n) is None]
        for more in await together(lambda n: _runs_below(tier, f"{folder}/{n}" if folder else n, depth + 1), below):
            found |= more
    return found


def _warn(scanned: Scanned, cache: RecordCache, text: str) -> None:
    scanned.warnings.append(text)
    if cache.first_time(text):
        log.warning("%s", text)
