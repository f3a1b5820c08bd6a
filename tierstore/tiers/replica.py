"""One open checkpoint over all tiers that hold it: every byte from the nearest good copy, proved against its digest.

The chain of trust: commit record → manifest → index and objects → blocks (DESIGN.md §4). A copy that is missing, short or changed is
named in a warning and passed over; only where no tier has good bytes is there an error, and it lists each tier with its reason.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

from tierstore.errors import IntegrityError, NotFoundError, StorageError, TemporaryError
from tierstore.format.digest import DIGEST_NBYTES, bad_blocks, block_digests
from tierstore.format.index import FileEntry, RoutingIndex
from tierstore.format.manifest import Manifest
from tierstore.storage.contract import ReadsPieces, ReadsProved
from tierstore.storage.tasks import all_or_none
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.documents import Documents, Run
from tierstore.tiers.fetching import BUDGET_NBYTES, Read, fetch
from tierstore.tiers.leases import Lease
from tierstore.tiers.log_facts import quantised_text
from tierstore.tiers.nearby import NearRead
from tierstore.tiers.passed_over import BadCopy, OnDamage, PassedOver, damaged_block
from tierstore.tiers.placed import read_placed
from tierstore.tiers.quantised import Lossy, QuantisedReader, generation_of
from tierstore.tiers.read_order import in_order
from tierstore.tiers.reads import AnyWant, ReadCost, Span, Want, plan_spans, spread_spans
from tierstore.tiers.sources import Source, sources_of
from tierstore.tiers.tier import Tier, Tiers

__all__ = ["BadCopy", "Replica", "Want", "open_replica"]

log = logging.getLogger(__name__)

_LOOKS = 3
"""So often a file is read that is written anew meanwhile."""


class BringsNearer(Protocol):
    """What copies files onto a tier of this node before they are read from afar (`hydrate.Onto`)."""

    async def ahead(self, replica: Replica, wants: Sequence[AnyWant]) -> None:
        """Does so for the files that `wants` are a large part of; fails no load."""


class Replica:
    """One checkpoint, opened. Made by `open_replica`; methods run on the process's event loop.

    Attributes:
        info: The catalog's entry.
        lease: What keeps a collector from freeing it while it is read; None: nothing does.
        on_lossy: Told the generation of what is read from a quantised copy, once for each tier; None: nobody is.
        hydrating: Asked before each read to bring whole files nearer; None: nothing is.
        bytes_fetched: Bytes read, by tier.
        requests: Reads sent to storages, by tier.
        lossy_from: The tiers whose quantised copies gave some of the bytes that were read: these are not exactly what was saved.
    """

    def __init__(
        self,
        info: CheckpointInfo,
        sources: Sequence[Source],
        *,
        budget_nbytes: int = BUDGET_NBYTES,
        run: Run | None = None,
        lease: Lease | None = None,
        on_damage: OnDamage | None = None,
    ) -> None:
        self.info = info
        self.lease = lease
        self.hydrating: BringsNearer | None = None
        self.on_lossy: Callable[[int], None] | None = None
        self._finish = None if lease is None else weakref.finalize(self, lease.let_go)
        if self._finish is not None:
            self._finish.atexit = False
        self.bytes_fetched: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.lossy_from: set[str] = set()
        self._quantised: dict[str, QuantisedReader] = {}
        self._passed = PassedOver(info, sources, lease, on_damage)
        self._documents = Documents(info, self._passed, run=run, requests=self.requests, bytes_fetched=self.bytes_fetched)
        self._sources = tuple(sources)
        self._budget_nbytes = budget_nbytes

    @property
    def manifest(self) -> Manifest:
        """The manifest, proved against the commit record."""
        return self._documents.manifest

    @property
    def index(self) -> RoutingIndex:
        """The routing index, proved against the manifest.

        A long one reads its rows when they are asked for, and waits for them: it is for the caller's threads, not for the event loop.
        """
        return self._documents.index

    @property
    def bad_copies(self) -> Sequence[BadCopy]:
        """What was passed over so far."""
        return self._passed.bad_copies

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers that it is read from, in that order."""
        return tuple(source.tier.name for source in self._sources)

    @property
    def identity(self) -> str:
        """Names this checkpoint so that no other one has this name: run, folder, and the manifest's digest."""
        return f"{self.info.run}/{self.info.attempt.folder} ({self.info.manifest_digest})"

    def near_files(self) -> tuple[frozenset[str], frozenset[str]]:
        """The files that this node's own tiers should have, and those that lie on local file systems (shared ones too)."""
        on_node: set[str] = set()
        local: set[str] = set()
        for source in self._sources:
            if (source.files is None and not source.expected) or source.quantised is not None:
                continue  # there may be something, nobody promised it
            files = self.index.file_names if source.files is None else source.files
            if source.tier.scope == "node":
                on_node.update(files)
            if source.tier.storage.capabilities.local:
                local.update(files)
        return frozenset(on_node), frozenset(local)

    def let_go(self) -> None:
        """Ends its lease, from any thread; it can be read on, as long as it is there. So does the end of the last reference to it."""
        if self._finish is not None:
            self._finish()

    def take_lease(self) -> Lease | None:
        """Its lease, which is the caller's to end from now on."""
        if self._finish is not None:
            self._finish.detach()
        return self.lease

    async def objects(self, rank: int = 0) -> bytes:
        """The encoded objects of one rank.

        Raises:
            IntegrityError: No tier has a good copy of objects.json.
            NotFoundError: The checkpoint has nothing of that rank.
        """
        return await asyncio.to_thread((await self._documents.objects()).split, rank)

    async def encoded_tree(self, rank: int) -> Any:
        """What `objects` gives, parsed; it shares parts with other ranks' trees, and is not to be changed. Raises as `objects`."""
        return await asyncio.to_thread((await self._documents.objects()).tree, rank)

    async def object_ranks(self) -> dict[int, int]:
        """Which tree each saved rank has, by number: ranks with the same number have the same objects.

        Raises:
            IntegrityError: No tier has a good copy of objects.json.
        """
        return dict((await self._documents.objects()).ranks)

    async def document(self, name: str) -> bytes:
        """A small file (manifest, index, objects, a part record) as a whole, proved.

        Raises:
            IntegrityError: No tier has a good copy of it.
            NotFoundError: The manifest names no such file.
        """
        return await self._documents.bytes_of(name)

    async def read(self, wants: Sequence[AnyWant], *, verify: bool = True) -> None:
        """Fills the buffers of all `wants` from the nearest good copies; what is to be handed over is, before this returns.

        Whole blocks are read and each is proved against its SHA-256 before its bytes count. Where a span lies within one want it is
        read straight into that buffer, else into scratch memory, of which there is `budget_nbytes` at most. After an error buffers
        hold anything: use none of them.

        Args:
            wants: Byte ranges of the checkpoint's shards, in any order.
            verify: False skips the proof, and reads exactly the wanted bytes.

        Raises:
            IntegrityError: Some bytes are good on no tier; lists each tier and its reason. Or a want lies outside its file.
            NotFoundError: The index names no such file.
            TemporaryError: Some bytes could not be had because tiers do not answer.
        """
        if self.lease is not None:
            self.lease.begin()  # in a forked child it holds one of its own
        await self.hydrate(wants)
        slots = {source.tier.name: asyncio.Semaphore(_cost_of(source.tier).concurrency) for source in self._sources}
        if not verify:
            spans = plan_spans(wants, file_nbytes=self.index.file_nbytes, align=1, cost=self._cost())
            spans = await in_order(spans, self._passed, self.info.attempt, self.index.block_nbytes)
            await self._fetch(spans, slots, verify=False)
            return
        await self._documents.load_entries(want.file for want in wants if want.nbytes)
        near, far = self._by_storage(wants)
        block_nbytes = self.index.block_nbytes
        works = [self._read_near(source, wanted, slots) for source, wanted in near]
        if far:
            spans = plan_spans(far, file_nbytes=self.index.file_nbytes, align=block_nbytes, cost=self._cost())
            spans = spread_spans(spans, align=block_nbytes, cost=self._cost())
            works.append(self._fetch(await in_order(spans, self._passed, self.info.attempt, block_nbytes), slots))
        await all_or_none(works)

    async def hydrate(self, wants: Sequence[AnyWant]) -> None:
        """Brings files nearer of which `wants` are a large part, where this load is to (`hydrating`); `read` begins with it."""
        if self.hydrating is not None:
            await self.hydrating.ahead(self, wants)

    def comes_nearer(self, tier: Tier, files: frozenset[str]) -> None:
        """These files lie on `tier` as well by now, and are read there first."""
        source = Source(tier=tier, files=files, expected=False)
        self._sources = (source, *self._sources)
        self._passed.add(source)

    async def file_entry(self, name: str) -> FileEntry:
        """A file with the digests of its blocks, read if need be; raises as `document`."""
        return await self._documents.entry(name)

    # ---- inside

    def _by_storage(self, wants: Sequence[AnyWant]) -> tuple[list[tuple[Source, list[AnyWant]]], list[AnyWant]]:
        """The wants by the copy that they are read from first, where its storage proves what it reads; and all others."""
        near: dict[str, tuple[Source, list[AnyWant]]] = {}
        far: list[AnyWant] = []
        lists: dict[str, list[AnyWant]] = {}
        for want in wants:
            found = lists.get(want.file)
            if found is None:
                first = next(iter(self._passed.order(want.file)), None)
                if first is not None and first.quantised is None and isinstance(first.tier.storage, ReadsPieces):
                    found = near.setdefault(first.tier.name, (first, []))[1]
                else:
                    found = far
                lists[want.file] = found
            found.append(want)
        return list(near.values()), far

    async def _read_near(self, source: Source, wants: Sequence[AnyWant], slots: dict[str, asyncio.Semaphore]) -> None:
        """Reads from a storage that has its pieces proved while it reads; what is not good there, from the next tiers."""
        near = NearRead(self.info, source, self._passed, wants, self.index)
        try:
            await near.read(self._documents.entry)
        finally:
            self.requests[source.tier.name] += near.requests
            self.bytes_fetched[source.tier.name] += near.nbytes
        if near.left:
            await self._fetch(near.left, slots, tried=near.tried)

    async def _fetch(
        self,
        spans: Sequence[Span],
        slots: dict[str, asyncio.Semaphore],
        *,
        verify: bool = True,
        tried: Collection[tuple[str, str]] = (),
    ) -> None:
        """Reads spans by asking storages for them; `tried` names tiers and files whose copies were not good for these."""
        await fetch(
            spans,
            lambda span, view: self._fill(span, view, verify, slots, tried),
            concurrency=max(_cost_of(source.tier).concurrency for source in self._sources),
            budget_nbytes=self._budget_nbytes,
            place=(lambda span: self._place(span, slots, tried)) if verify else None,
        )

    async def _place(
        self, span: Span, slots: dict[str, asyncio.Semaphore], tried: Collection[tuple[str, str]]
    ) -> tuple[Sequence[Span], Read]:
        """Brings the span from the first copy straight to its wants, where that is possible; what is left is to be read as `_fill` does."""
        source = next((one for one in self._passed.order(span.file) if (one.tier.name, span.file) not in tried), None)
        left: Sequence[Span] = (span,)
        if source is not None:
            name = source.tier.name
            async with slots[name]:
                placed = await read_placed(span, source, self.info, self._passed, self._documents.entry, self.index.block_nbytes)
            if placed is not None:
                self.requests[name] += 1
                self.bytes_fetched[name] += placed.nbytes
                left, tried = placed.left, {*tried, (name, span.file)}
        return left, lambda one, view: self._fill(one, view, True, slots, tried)

    async def _fill(
        self, span: Span, view: memoryview, verify: bool, slots: dict[str, asyncio.Semaphore], tried: Collection[tuple[str, str]]
    ) -> None:
        """Fills `view` with the span's bytes, each block from the first tier where it is good."""
        pending = [(span.begin, span.end)]
        for source in self._passed.order(span.file):
            tier = source.tier
            if (tier.name, span.file) in tried:
                continue
            left: list[tuple[int, int]] = []
            for begin, end in pending:
                part = view[begin - span.begin : end - span.begin]
                try:
                    async with slots[tier.name]:
                        found, lossy = await self._read_far(source, span.file, begin, part, verify)
                    self._passed.answers(tier)
                except (StorageError, NotFoundError, IntegrityError) as error:
                    self._passed.note(source, span.file, error, partial(tier.storage.read, self.info.attempt.path(span.file), end - 1, 1))
                    left.append((begin, end))
                    continue
                if lossy:
                    self._tell_lossy(source, span.file, begin, end, lossy)
                if verify:
                    found = found or await asyncio.to_thread(block_digests, part, self.index.block_nbytes)
                    left.extend(self._bad_blocks(source, await self._documents.entry(span.file), begin, part.nbytes, found, lossy))
            pending = left
            if not pending:
                return
        raise await self._passed.no_copy(span.file, f"bytes {pending[0][0]} to {pending[-1][1]} of ")

    async def _read_far(self, source: Source, file: str, begin: int, part: memoryview, verify: bool) -> tuple[bytes, frozenset[int]]:
        """Reads; returns what `_read_hashed` does, and the blocks that are not exact, which a footer that was proved here tells.

        A quantised copy may be written anew while it is read: then it is read once more, for nothing would prove what was read.
        """
        tier, looks = source.tier, _LOOKS
        lossy = await self._lossy(source, file)
        while looks:
            self.requests[tier.name] += 1
            began = tier.speed.now()
            found = await self._read_hashed(tier, self.info.attempt.path(file), begin, part, verify)
            tier.speed.note(part.nbytes, tier.speed.now() - began)
            self.bytes_fetched[tier.name] += part.nbytes
            before, lossy, looks = lossy, await self._lossy(source, file), looks - 1
            if lossy == before:
                return found, lossy.blocks
        raise TemporaryError(
            f"{self.info.attempt.path(file)} on tier {tier.name!r} was written anew each time it was read",
            hint="somebody replaces the quantised copy there: load again when that is through",
            tier=tier.name,
            file=file,
        )

    async def _read_hashed(self, tier: Tier, path: str, begin: int, part: memoryview, verify: bool) -> bytes:
        """Reads; returns the digests of the blocks where the storage's own threads have them hashed while they are warm, else nothing."""
        size, storage = self.index.block_nbytes, tier.storage
        if not verify or storage.capabilities.local or not isinstance(storage, ReadsProved):
            await storage.read_into(path, begin, part)
            return b""
        found = bytearray(-(-part.nbytes // size) * DIGEST_NBYTES)

        def hash_piece(at: int, piece: memoryview) -> None:
            digests = block_digests(piece, size)
            first = (at - begin) // size * DIGEST_NBYTES
            found[first : first + len(digests)] = digests

        await storage.read_proved(path, begin, part, hash_piece, unit=size)
        return bytes(found)

    async def _lossy(self, source: Source, file: str) -> Lossy:
        """What a quantised copy does not have exactly: the storage proves it, by a footer that is proved here."""
        if source.quantised is None:
            return Lossy()
        reader = self._quantised.get(source.tier.name)
        if reader is None:
            reader = QuantisedReader(source.tier, self.info.attempt, source.quantised, self.index.block_nbytes)
            reader = self._quantised.setdefault(source.tier.name, reader)
        return await reader.look(file)

    def _tell_lossy(self, source: Source, file: str, begin: int, end: int, lossy: frozenset[int]) -> None:
        """Says once for each tier, aloud, that some of what is read is not what was saved."""
        name, size = source.tier.name, self.index.block_nbytes
        if name in self.lossy_from or lossy.isdisjoint(range(begin // size, -(-end // size))):
            return
        self.lossy_from.add(name)
        if self.on_lossy is not None:
            self.on_lossy(generation_of(self.manifest.facts) + 1)
        log.warning(
            "run=%s step=%d is NOT read exactly: its optimizer's moments come from the quantised copy on tier %s, %s; "
            "no exact copy gives them (%s)",
            self.info.run,
            self.info.step,
            name,
            quantised_text(self._quantised[name].told),
            self._passed.reasons(file) or "no other tier that was reached has one",
        )

    def _bad_blocks(
        self, source: Source, entry: FileEntry, begin: int, nbytes: int, found: bytes, lossy: frozenset[int] = frozenset()
    ) -> list[tuple[int, int]]:
        """The ranges of the `nbytes` read at `begin` whose blocks, of the digests `found`, are not what the index promises; `lossy` ones
        can't be."""
        size = self.index.block_nbytes
        first = begin // size
        promised = entry.block_digests[first * DIGEST_NBYTES : first * DIGEST_NBYTES + len(found)]
        bad: list[tuple[int, int]] = []
        for number in bad_blocks(found, promised):
            if first + number in lossy:
                continue
            b, e = begin + number * size, min(begin + (number + 1) * size, begin + nbytes)
            if bad and bad[-1][1] == b:
                bad[-1] = (bad[-1][0], e)
            else:
                bad.append((b, e))
        if not bad:
            return []
        self._passed.note(source, entry.name, damaged_block(bad[0][0] // size))
        return bad

    def _cost(self) -> ReadCost:
        return _cost_of(self._sources[0].tier)


async def open_replica(
    tiers: Tiers,
    info: CheckpointInfo,
    *,
    budget_nbytes: int | None = None,
    run: Run | None = None,
    objects: bool = False,
    lease: Lease | None = None,
    on_damage: OnDamage | None = None,
) -> Replica:
    """Opens a checkpoint: reads manifest and index from the nearest tier that has good copies of them.

    Args:
        tiers: The store's tiers.
        info: The catalog's entry; it says which tiers hold what.
        budget_nbytes: Scratch memory that one `read` may use, in bytes; None: what the store's configuration says.
        run: Runs a coroutine on this event loop, from a thread that asks `Replica.index`: a long index is then read by its head, and by
            the rows that are asked for. None: as a whole.
        objects: The objects are wanted as well, and read at the same time.
        lease: A hold on it, which the reads that fail ask what became of it (`Leases.open` does both).
        on_damage: Told what is damaged in copies that are recorded as whole.

    Raises:
        IntegrityError: No tier has a good manifest or index; lists each tier and its reason.
        VersionError: A newer major version of tierstore wrote it.
        TemporaryError: No tier that should have them answers.
    """
    sources = sources_of(tiers, info)
    if not info.manifest_digest or not sources:
        error = IntegrityError(
            f"step {info.step} of run {info.run!r} can't be opened: "
            + ("no tier that was reached holds it" if info.manifest_digest else "its commit record names no manifest"),
            hint="see `tierstore show` for where its copies should be",
            run=info.run,
            step=info.step,
        )
        raise error if lease is None else await lease.explain(error)
    budget = tiers.scratch_nbytes if budget_nbytes is None else budget_nbytes
    replica = Replica(info, sources, budget_nbytes=budget, run=run, lease=lease, on_damage=on_damage)
    await replica._documents.open(sources[0], objects=objects)
    return replica


def _cost_of(tier: Tier) -> ReadCost:
    return tier.speed.cost(local=tier.storage.capabilities.local)
