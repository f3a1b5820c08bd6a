"""What one tier shows of a run: a listing of its logs and of its folder, and the records that are read for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tierstore.errors import IntegrityError, NotFoundError, TierStoreError
from tierstore.format.record import Record
from tierstore.names import EVICTED, QUANTISED, Attempt, log_root
from tierstore.storage.contract import FileInfo, ReadsEach
from tierstore.tiers.log import lean, parse_record, record_seq, swept_in
from tierstore.tiers.record_cache import RecordCache
from tierstore.tiers.tier import Tier, Tiers, recheck
from tierstore.tiers.together import together

__all__ = ["Names", "TierListing", "list_tier", "read_records", "runs"]

log = logging.getLogger(__name__)

_MAX_DEPTH = 16
_BATCH = 128


@dataclass(slots=True, kw_only=True)
class TierListing:
    """One tier's listing: per attempt the files of its records by number, the ranks of its receipts, and the payload folders.

    `evicted`: attempts whose copy on this node was dropped on purpose. `quantised`: those beside whose copy lies what proves one that is
    not exact. `read`: the records that were read, or what is wrong with them.
    """

    tier: Tier
    root: str
    records: dict[Attempt, dict[int, FileInfo]] = field(default_factory=dict)
    receipts: dict[Attempt, list[int]] = field(default_factory=dict)
    folders: set[Attempt] = field(default_factory=set)
    evicted: set[Attempt] = field(default_factory=set)
    quantised: set[Attempt] = field(default_factory=set)
    foreign: list[str] = field(default_factory=list)
    read: dict[Attempt, dict[int, Record | IntegrityError]] = field(default_factory=dict)

    def attempts(self) -> set[Attempt]:
        return {*self.records, *self.receipts, *self.folders, *self.evicted}

    def knows(self, attempt: Attempt) -> bool:
        """Whether the listing shows the attempt's first record."""
        return 0 in self.records.get(attempt, ())

    def files(self) -> dict[str, FileInfo]:
        """The files of all records, by path."""
        return {info.path: info for numbers in self.records.values() for info in numbers.values()}

    def swept(self, attempt: Attempt) -> bool:
        """Whether a record that was read says that it is gone."""
        return swept_in(r for r in self.read.get(attempt, {}).values() if isinstance(r, Record)) is not None


class Names:
    """The attempts of one run by their folders' names, each parsed once, however many tiers and records show it."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._known: dict[str, Attempt | None] = {}

    def parse(self, name: str) -> Attempt | None:
        """The attempt, or None where the name is not of our grammar."""
        try:
            return self._known[name]
        except KeyError:
            found = self._known[name] = Attempt.parse(self.run, name)
            return found


async def list_tier(tier: Tier, run: str, names: Names, *, staging: bool) -> TierListing:
    """Lists a run's logs and its folder on a tier; `staging`: it is one before the authority, which has receipts and markers."""
    looks: list[Callable[[], Awaitable[Any]]] = [lambda: tier.storage.list(log_root(run)), lambda: tier.storage.children(run)]
    logs, level = await together(lambda look: look(), looks)
    listing = TierListing(tier=tier, root=log_root(run))
    await asyncio.to_thread(_file_logs, listing, names, logs, staging=staging)
    folders = {names.parse(folder.rpartition("/")[2]) for folder in level.folders}
    if any(0 in seqs and attempt not in folders for attempt, seqs in listing.records.items()):
        # Made between the two listings, or gone for good: a checkpoint must not seem to lie nowhere because its folder was listed first.
        level = await tier.storage.children(run)
    for folder in level.folders:
        name = folder.rpartition("/")[2]
        attempt = names.parse(name)
        if attempt is not None:
            listing.folders.add(attempt)
        elif name.startswith("step-"):
            listing.foreign.append(f"{run}/{name}")  # other folders may be runs below this one
    listing.foreign.extend(info.path for info in level.files)
    return listing


def _file_logs(listing: TierListing, names: Names, logs: Iterable[FileInfo], *, staging: bool) -> None:
    root = len(listing.root) + 1
    for info in logs:
        name, _, leaf = info.path[root:].partition("/")
        attempt = names.parse(name)
        if attempt is None:
            listing.foreign.append(info.path)
        elif (seq := record_seq(leaf)) is not None:
            listing.records.setdefault(attempt, {})[seq] = info
        elif leaf.startswith("receipt-") and leaf.removeprefix("receipt-").removesuffix(".json").isdigit() and leaf.endswith(".json"):
            if info.nbytes:
                listing.receipts.setdefault(attempt, []).append(int(leaf[8:-5]))
        elif leaf == EVICTED and staging:
            listing.evicted.add(attempt)
        elif leaf == QUANTISED:
            listing.quantised.add(attempt)
        else:
            listing.foreign.append(info.path)


async def read_records(listing: TierListing, attempts: Iterable[Attempt], cache: RecordCache) -> None:
    """Reads the records of attempts that the listing shows, into `listing.read`; one that can't be parsed is kept as its error.

    Of a log with a gap the last record is read first: where it says `swept` the log was trimmed, and that is all there is to know.
    A record that is gone by now, or listed late, is looked for in another listing of that log.
    """
    wanted = list(attempts)
    gaps = [a for a in wanted if len(listing.records[a]) <= max(listing.records[a])]
    await _read(listing, [(a, max(listing.records[a])) for a in gaps], cache)
    trimmed = {a for a in gaps if listing.swept(a)}
    await _read(listing, [(a, seq) for a in wanted if a not in trimmed for seq in listing.records[a]], cache)
    for attempt in [a for a in wanted if _has_hole(listing.read.get(a, {})) and not listing.swept(a)]:
        for info in await listing.tier.storage.list(attempt.log_folder):
            if (seq := record_seq(info.path.rpartition("/")[2])) is not None:
                listing.records[attempt][seq] = info
        await _read(listing, [(attempt, seq) for seq in listing.records[attempt]], cache)


def _has_hole(read: Mapping[int, object]) -> bool:
    return bool(read) and len(read) <= max(read)


async def _read(listing: TierListing, wanted: Iterable[tuple[Attempt, int]], cache: RecordCache) -> None:
    missing: list[tuple[Attempt, int, FileInfo]] = []
    for attempt, seq in wanted:
        info = listing.records[attempt][seq]
        known = cache.get(listing.tier.name, listing.root, info)
        if known is not None:
            listing.read.setdefault(attempt, {})[seq] = known
        else:
            missing.append((attempt, seq, info))

    async def one(item: tuple[Attempt, int, FileInfo]) -> None:
        attempt, seq, info = item
        record: Record | IntegrityError
        try:
            record = await _read_record(listing.tier, info.path, seq)
        except IntegrityError as error:
            record = error
        except NotFoundError:
            return  # removed between the listing and this read
        else:
            cache.put(listing.tier.name, listing.root, info, record)
        listing.read.setdefault(attempt, {})[seq] = record

    storage = listing.tier.storage
    each = storage.read_each if isinstance(storage, ReadsEach) else None

    async def batch(items: list[tuple[Attempt, int, FileInfo]]) -> None:
        assert each is not None
        found = await each([info.path for _, _, info in items])
        records = await asyncio.to_thread(_parse_each, [(data, info.path, seq) for data, (_, seq, info) in zip(found, items, strict=True)])
        again = []
        for (attempt, seq, info), record in zip(items, records, strict=True):
            if record is None:
                again.append((attempt, seq, info))
            else:
                cache.put(listing.tier.name, listing.root, info, record)
                listing.read.setdefault(attempt, {})[seq] = record
        for item in again:
            await one(item)

    if each is not None:
        await together(batch, [missing[at : at + _BATCH] for at in range(0, len(missing), _BATCH)], at_once=2)
    else:
        await together(one, missing)


def _parse_each(read: Iterable[tuple[bytes | Exception, str, int]]) -> list[Record | None]:
    """The records, lean, and None for what could not be read or parsed: that is looked at one by one."""
    records: list[Record | None] = []
    for data, path, seq in read:
        try:
            records.append(lean(parse_record(data, path, seq)) if isinstance(data, bytes) else None)
        except IntegrityError:
            records.append(None)
    return records


async def _read_record(tier: Tier, path: str, seq: int) -> Record:
    """One record, lean; read a second time where it came garbled, for a bad read is not a bad record, and much hangs on it."""
    try:
        return lean(parse_record(await tier.storage.read(path), path, seq))
    except IntegrityError as error:
        log.debug("tier=%s %s is read again: %s", tier.name, path, error.message)
        return lean(parse_record(await tier.storage.read(path), path, seq))


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
