"""Unchanged bytes once: which blocks of a file that is copied to a packed tier an earlier checkpoint has there already.

The newest checkpoint that is whole there is the base; its index says by digest what is the same. Where the base's own file takes a block
from a still earlier one, that one is referred to. Each checkpoint that is referred to says so in its log, by a record ``referenced``,
before the file is published: from then on its shards stay on the tier for as long as the file may be read (`gc.referring`). Where that
record is refused, or anything fails, the bytes are simply stored: a reference is never needed.

Of a quantised copy the blocks that are exact serve as well. Who writes a shard of it anew writes it exact once somebody refers to it
(`exact_where_referred`): what is configured to be quantised may have changed, and a block that was exact has to stay so. Whatever happens,
who reads a reference proves it by the digest of its own block.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from tierstore.clock import Clock
from tierstore.crashpoints import reach
from tierstore.errors import IntegrityError, NotFoundError, StorageError, TierStoreError
from tierstore.format.digest import BLOCK_NBYTES, block_digests, digest_of, file_digest
from tierstore.format.index import FileEntry, decode_index
from tierstore.format.manifest import decode_manifest
from tierstore.format.packed.types import packable
from tierstore.format.record import Record
from tierstore.names import MANIFEST, Attempt, attempt_of_log_path, log_root
from tierstore.storage.contract import PackedFacts, PackHints, Storage, Unchanged, WritesPacked
from tierstore.tiers.log import append, read_log
from tierstore.tiers.log_facts import LogFacts, fold
from tierstore.tiers.matching import BlockTable, Match, is_worth_it, match_blocks
from tierstore.tiers.referrers import attempt_of
from tierstore.tiers.tier import Tier, Tiers
from tierstore.tiers.view import staging

__all__ = ["MOST_REFERRERS", "References", "committed_attempts", "exact_where_referred", "record_reference"]

log = logging.getLogger(__name__)

_K = TypeVar("_K")
_V = TypeVar("_V")

MOST_REFERRERS = 200
"""So many checkpoints refer to one on a tier; the next one stores the bytes itself, and is the base of those after it."""

_MOST_TARGETS = 4
"""So many checkpoints one file refers to."""
_CANDIDATES = 8
_KEPT_TABLES = 4
_KEPT_NBYTES = 64 << 20
_KEPT_CHOICES = 256
_MAX_INDEX_NBYTES = 256 << 20


class References:
    """What a process knows of the bytes that lie on its tiers; one for all its copies."""

    def __init__(self) -> None:
        self._tables: OrderedDict[Attempt, tuple[BlockTable, bool]] = OrderedDict()
        self._copied: OrderedDict[tuple[str, str], list[Attempt]] = OrderedDict()
        self._bases: OrderedDict[tuple[str, Attempt], Attempt | None] = OrderedDict()
        self._answers: OrderedDict[tuple[str, Attempt, Attempt], bool] = OrderedDict()
        self._logs: OrderedDict[Attempt, Sequence[Record]] = OrderedDict()
        self._turns: dict[str, asyncio.Lock] = {}
        self.in_vain: set[tuple[str, str]] = set()
        """Runs, and tiers to which the last save straight there found nothing to take (`direct`)."""

    def learned(self, attempt: Attempt, files: Iterable[FileEntry], block_nbytes: int, *, whole: bool) -> None:
        """Takes the digests of a checkpoint that is being copied: the next one is compared with them. `whole`: of all its files."""
        known = self._tables.get(attempt)
        if known is not None and known[1]:
            return
        files = [file for file in files if packable(file.name)]
        if known is not None and not whole:
            files += [file for name, file in known[0].files.items() if name not in {f.name for f in files}]
        self._tables[attempt] = BlockTable(files, block_nbytes), whole
        self._tables.move_to_end(attempt)
        while len(self._tables) > 1 and (
            len(self._tables) > _KEPT_TABLES or sum(table.nbytes for table, _ in self._tables.values()) > _KEPT_NBYTES
        ):
            self._tables.popitem(last=False)

    async def unchanged(
        self, tiers: Tiers, attempt: Attempt, target: Tier, file: FileEntry, block_nbytes: int, *, clock: Clock, lossy: bool = False
    ) -> tuple[Unchanged, ...]:
        """The bytes of a file that the target has already, sorted; whoever they belong to has it in its log that they stay.

        Args:
            tiers: The store's tiers.
            attempt: Whose file is copied.
            target: Where to; nothing is unchanged on one that does not store unchanged bytes once, or before the authority.
            file: The file, with its digests.
            block_nbytes: What is hashed as one, in bytes.
            clock: Dates records.
            lossy: The file is to be quantised: then it takes whole blocks of a packed file only.
        """
        try:
            allowed = []
            for owner, pieces in await self._found(tiers, attempt, target, file, block_nbytes):
                async with self._turn(target):
                    may = await self._may_refer(tiers, owner, target, attempt, clock)
                allowed += pieces if may else []
            ordered = sorted(allowed, key=lambda piece: piece.begin)
            return tuple(_whole_blocks(ordered, file.nbytes) if lossy else ordered)
        except TierStoreError as error:
            log.info("tier=%s checkpoint=%s file=%s is stored whole: %s", target.name, attempt.folder, file.name, error.message)
            return ()

    async def unchanged_nbytes(self, tiers: Tiers, attempt: Attempt, target: Tier, file: FileEntry, block_nbytes: int) -> int:
        """How many bytes of a file the target probably need not store, for it has them; nobody's log is told. As `unchanged` otherwise."""
        try:
            found = await self._found(tiers, attempt, target, file, block_nbytes)
        except TierStoreError:
            return 0
        return sum(piece.end - piece.begin for _, pieces in found for piece in pieces)

    async def may_have(self, tiers: Tiers, attempt: Attempt, target: Tier, name: str, nbytes: int) -> bool:
        """Whether there is a checkpoint on the target that a file could take bytes from, whatever these are; nobody's log is told."""
        if not _refers(tiers, target, name, nbytes):
            return False
        try:
            async with self._turn(target):
                return await self._base(tiers, attempt, target) is not None
        except TierStoreError:
            return False

    def _turn(self, target: Tier) -> asyncio.Lock:
        return self._turns.setdefault(target.name, asyncio.Lock())

    async def _found(
        self, tiers: Tiers, attempt: Attempt, target: Tier, file: FileEntry, block_nbytes: int
    ) -> list[tuple[Attempt, list[Unchanged]]]:
        """Whose bytes on the target those of a file are, as far as it is worth it."""
        storage = target.storage
        if not (_refers(tiers, target, file.name, file.nbytes) and isinstance(storage, WritesPacked)):
            return []
        async with self._turn(target):  # the files of a checkpoint come together, and all want the same
            base = await self._base(tiers, attempt, target)
            if base is None:
                return []
            table = await self._table(tiers, base, target, file.name)
        if table.block_nbytes != block_nbytes:
            return []
        matches = await asyncio.to_thread(match_blocks, file, table)
        if not matches:
            return []
        found = _worth_it(await _resolved(storage, base, matches), file.nbytes)
        return [(owner, pieces) for owner, pieces in found if owner.run == attempt.run and owner.save_id < attempt.save_id]

    async def _base(self, tiers: Tiers, attempt: Attempt, target: Tier) -> Attempt | None:
        """The newest that is whole on the target, of those that were saved earlier: so references never go in circles."""
        key = target.name, attempt
        if key not in self._bases:
            own = self._copied.setdefault((attempt.run, target.name), [])
            earlier = sorted((a for a in own if a.save_id < attempt.save_id), key=lambda a: a.save_id, reverse=True)
            base = await self._first_usable(tiers, earlier, target)
            if base is None:
                listed = [
                    a
                    for a in await committed_attempts(tiers.authority.storage, attempt.run)
                    if a.save_id < attempt.save_id and a not in earlier
                ]
                base = await self._first_usable(tiers, listed[:_CANDIDATES], target)
            _keep(self._bases, key, base)
            own[:] = [*own, attempt][-_CANDIDATES:]
        return self._bases[key]

    async def _first_usable(self, tiers: Tiers, candidates: Iterable[Attempt], target: Tier) -> Attempt | None:
        for candidate in candidates:
            records = await read_log(tiers.authority.storage, candidate, known=self._logs.get(candidate, ()))
            _keep(self._logs, candidate, records)
            facts = fold(records)
            if not facts.hidden and not facts.refused_reference(target.name, tiers.authority.name):
                return candidate
        return None

    async def _table(self, tiers: Tiers, base: Attempt, target: Tier, name: str) -> BlockTable:
        """The base's digests: those that this process had when it copied it, else its index."""
        known = self._tables.get(base)
        if known is None or not (known[1] or name in known[0].files):
            files, block_nbytes = await _read_files(tiers, base, target, self._logs.get(base) or ())
            self.learned(base, files, block_nbytes, whole=True)
            known = self._tables[base]
        self._tables.move_to_end(base)
        return known[0]

    async def _may_refer(self, tiers: Tiers, owner: Attempt, target: Tier, attempt: Attempt, clock: Clock) -> bool:
        key = target.name, owner, attempt
        if key not in self._answers:
            known = self._logs.get(owner, ())
            records, why = await record_reference(tiers, owner, target, attempt, clock=clock, known=known, most=MOST_REFERRERS)
            if records:
                _keep(self._logs, owner, records)
            if why:
                log.info("tier=%s checkpoint=%s takes nothing from %s: %s", target.name, attempt.folder, owner.folder, why)
            _keep(self._answers, key, not why)
        return self._answers[key]


def _refers(tiers: Tiers, target: Tier, name: str, nbytes: int) -> bool:
    """Whether files of that name refer to others on the tier; not on a node's: its name stands for many disks, and no log says what lies
    on them."""
    packs = target.unchanged_once and isinstance(target.storage, WritesPacked) and packable(name) and nbytes > 0
    return packs and target.name not in {tier.name for tier in staging(tiers)}


class _SoAlready(Exception):
    """Ends an append that would say nothing new."""


class _NotAllowed(Exception):
    """Ends an append that is refused."""


async def record_reference(
    tiers: Tiers,
    owner: Attempt,
    tier: Tier,
    by: Attempt,
    *,
    clock: Clock,
    known: Sequence[Record] = (),
    most: int | None = None,
) -> tuple[Sequence[Record], str]:
    """Writes into a checkpoint's log that another one's files on a tier take bytes from its own there, unless it says so already.

    Args:
        tiers: The store's tiers.
        owner: Whose bytes.
        tier: Where.
        by: Who takes them.
        clock: Dates the record.
        known: Records of the owner's log that were read before.
        most: So many may refer to it; None: any number, for the file is there already.

    Returns:
        The owner's log as it is then; and why it may not be referred to (empty: it may).

    Raises:
        StorageError: The log can't be read or written: nobody knows whether it says so.
        IntegrityError: It can't be read.
    """
    seen: Sequence[Record] = known

    def allow(records: Sequence[Record]) -> bool:
        nonlocal seen
        seen = records
        facts = fold(records)
        if why := facts.refused_reference(tier.name, tiers.authority.name):
            raise _NotAllowed(why)
        folders = facts.referenced.get(tier.name, ())
        if by.folder in folders:
            raise _SoAlready
        if most is not None and len(folders) >= most:
            raise _NotAllowed(f"{len(folders)} refer to it already")
        return True

    reach("reference.before-record")
    try:
        record = await append(
            tiers.authority.storage,
            owner,
            "referenced",
            {"tier": tier.name, "by": by.folder},
            clock=clock,
            allow=allow,
            known=known,
        )
    except _SoAlready:
        return seen, ""
    except (_NotAllowed, NotFoundError) as error:
        return seen, str(error) or "it has no log"
    except TierStoreError as error:
        if isinstance(error, (StorageError, IntegrityError)):
            raise
        return seen, error.message
    reach("reference.after-record")
    return (*seen, record), ""


def exact_where_referred(facts: LogFacts, tier: str, hints: PackHints) -> PackHints:
    """How a checkpoint's shards are written on a tier, where `hints` says how else: exact, if others take bytes from them there."""
    return replace(hints, exact=True, scheme=None) if facts.referenced.get(tier) else hints


async def committed_attempts(storage: Storage, run: str) -> list[Attempt]:
    """The attempts with a fate by a listing of the authority's storage, the latest save first."""
    found = set()
    for info in await storage.list(log_root(run)):
        split = attempt_of_log_path(info.path)
        if split is not None and split[1] == "000000.json" and split[0].run == run:
            found.add(split[0])
    return sorted(found, key=lambda a: a.save_id, reverse=True)


async def _read_files(tiers: Tiers, base: Attempt, target: Tier, records: Sequence[Record]) -> tuple[Sequence[FileEntry], int]:
    """The files of the base by its index, proved, from the authority or from the target itself."""
    records = records or await read_log(tiers.authority.storage, base)
    fate = fold(records).fate
    promised = str(fate.data.get("manifest", "")) if fate is not None else ""
    trouble: TierStoreError | None = None
    for tier in dict.fromkeys((tiers.authority.name, target.name)):
        storage = tiers.get(tier).storage
        try:
            data = await storage.read(base.path(MANIFEST))
            if digest_of(data) != promised:
                raise IntegrityError(f"{base.path(MANIFEST)} is not what was committed", hint="run `tierstore verify`", tier=tier)
            manifest = decode_manifest(data)
            record = next((file for file in manifest.files if file.kind == "index"), None)
            if record is None or record.nbytes > _MAX_INDEX_NBYTES:
                return (), manifest.block_nbytes
            data = await storage.read(base.path(record.name))
            found = await asyncio.to_thread(block_digests, data, manifest.block_nbytes)
            if file_digest(found) != record.digest:
                raise IntegrityError(f"{base.path(record.name)} is not what was committed", hint="run `tierstore verify`", tier=tier)
            index, _ = await asyncio.to_thread(decode_index, data)
            return [index.file(file.name) for file in manifest.files if file.kind == "shard"], manifest.block_nbytes
        except (StorageError, NotFoundError, IntegrityError) as error:
            trouble = error
    assert trouble is not None
    raise trouble


async def _resolved(storage: WritesPacked, base: Attempt, matches: Sequence[Match]) -> dict[Attempt, list[Unchanged]]:
    """Where the matched bytes really lie: in the base's files, or where those take them from; by checkpoint.

    Of a file with blocks that are not exact only the others are taken, and nothing is taken from one that is not there.
    """
    known: dict[str, PackedFacts | None] = {}

    async def facts_of(path: str) -> PackedFacts | None:
        if path not in known:
            known[path] = await storage.packed_facts(path)
        return known[path]

    found: dict[Attempt, list[Unchanged]] = {}
    for name in dict.fromkeys(match.name for match in matches):
        path = base.path(name)
        own = [match for match in matches if match.name == name]
        begin, end = min(m.source for m in own), max(m.source + m.end - m.begin for m in own)
        try:
            await facts_of(path)
            origins = sorted(await storage.origins(path, begin, end), key=lambda origin: origin.begin)
        except NotFoundError:
            continue
        for piece in (piece for match in own for piece in _split(match, path, origins)):
            owner = attempt_of(piece.path.rpartition("/")[0])
            if owner is None:
                continue
            try:
                facts = await facts_of(piece.path)
            except NotFoundError:
                continue
            found.setdefault(owner, []).extend(_exact(piece, facts))
    return found


def _exact(piece: Unchanged, facts: PackedFacts | None) -> Iterator[Unchanged]:
    """What of it lies in blocks of its source that are exact."""
    if facts is None or not facts.lossy:
        yield piece
        return
    size, shift, at = facts.block_nbytes, piece.begin - piece.source, piece.source
    stop = piece.source + piece.end - piece.begin
    for number in sorted(n for n in facts.lossy if n * size < stop and (n + 1) * size > piece.source):
        if number * size > at:
            yield Unchanged(begin=at + shift, end=number * size + shift, path=piece.path, source=at)
        at = max(at, (number + 1) * size)
    if at < stop:
        yield Unchanged(begin=at + shift, end=stop + shift, path=piece.path, source=at)


def _whole_blocks(pieces: Sequence[Unchanged], nbytes: int) -> Iterator[Unchanged]:
    """What of the sorted pieces of a file of `nbytes` bytes fills whole blocks of a packed file, together.

    Those are proved by their digests. Were the rest of a block quantised, nothing would prove what it takes from others.
    """
    at = 0
    while at < len(pieces):
        last = at
        while last + 1 < len(pieces) and pieces[last + 1].begin == pieces[last].end:
            last += 1
        begin = -(-pieces[at].begin // BLOCK_NBYTES) * BLOCK_NBYTES
        end = pieces[last].end if pieces[last].end == nbytes else pieces[last].end // BLOCK_NBYTES * BLOCK_NBYTES
        for piece in pieces[at : last + 1]:
            low, high = max(piece.begin, begin), min(piece.end, end)
            if low < high:
                yield replace(piece, begin=low, end=high, source=piece.source + low - piece.begin)
        at = last + 1


def _split(match: Match, path: str, origins: Sequence[Unchanged]) -> Iterator[Unchanged]:
    """A match, cut where the base's file itself takes bytes from elsewhere: those are taken from there, too."""
    shift = match.begin - match.source
    at, stop = match.source, match.source + match.end - match.begin
    number = bisect.bisect_right(origins, at, key=lambda origin: origin.end)
    while at < stop:
        origin = origins[number] if number < len(origins) else None
        if origin is None or origin.begin >= stop:
            yield Unchanged(begin=at + shift, end=stop + shift, path=path, source=at)
            return
        if origin.begin > at:
            yield Unchanged(begin=at + shift, end=origin.begin + shift, path=path, source=at)
            at = origin.begin
        end = min(stop, origin.end)
        yield Unchanged(begin=at + shift, end=end + shift, path=origin.path, source=origin.source + at - origin.begin)
        at, number = end, number + 1


def _worth_it(found: Mapping[Attempt, list[Unchanged]], nbytes: int) -> list[tuple[Attempt, list[Unchanged]]]:
    """Those that give most, if it is enough: each keeps its owner's shards from going, and costs a record."""
    given = {owner: sum(piece.end - piece.begin for piece in pieces) for owner, pieces in found.items()}
    ordered = sorted(given, key=lambda owner: -given[owner])
    return [(owner, found[owner]) for owner in ordered[:_MOST_TARGETS] if is_worth_it(given[owner], nbytes)]


def _keep(cache: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    """Into a cache that stays small."""
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > _KEPT_CHOICES:
        cache.popitem(last=False)
