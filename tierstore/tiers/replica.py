"""One open checkpoint over all tiers that hold it: every byte from the nearest good copy, proved against its digest.

The chain of trust: commit record → manifest → index and objects → blocks (DESIGN.md §4). A copy that is missing, short or changed is
named in a warning and passed over; only where no tier has good bytes is there an error, and it lists each tier with its reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tierstore.errors import AccessError, IntegrityError, NotFoundError, StorageError, TemporaryError, TierStoreError
from tierstore.format.digest import DIGEST_NBYTES, bad_blocks, block_digests, digest_of, file_digest
from tierstore.format.index import FileEntry, Index, decode_index
from tierstore.format.manifest import FileRecord, Manifest, decode_manifest
from tierstore.format.objects import split_objects
from tierstore.names import INDEX, MANIFEST, OBJECTS, shard_name
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.reads import LOCAL_COST, REMOTE_COST, ReadCost, Span, Want, plan_spans
from tierstore.tiers.tier import Tier, Tiers

__all__ = ["BadCopy", "Replica", "Want", "open_replica"]

log = logging.getLogger(__name__)

BUDGET_NBYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCopy:
    """A copy that was passed over, and why; what a repair can begin with. `file` is empty where the tier did not answer."""

    tier: str
    file: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A tier to read from. `files` limits what it is expected to have (None: all); what it lacks beyond is no news."""

    tier: Tier
    files: frozenset[str] | None
    expected: bool


class Replica:
    """One checkpoint, opened. Made by `open_replica`; methods run on the process's event loop.

    Attributes:
        info: The catalog's entry.
        manifest: The manifest, proved against the commit record.
        index: The routing index, proved against the manifest.
        bytes_fetched: Bytes read, by tier.
        requests: Reads sent to storages, by tier.
        bad_copies: What was passed over so far.
    """

    def __init__(self, info: CheckpointInfo, sources: Sequence[_Source], *, budget_nbytes: int = BUDGET_NBYTES) -> None:
        self.info = info
        self.bytes_fetched: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.bad_copies: list[BadCopy] = []
        self.manifest: Manifest
        self.index: Index
        self._sources = tuple(sources)
        self._budget_nbytes = budget_nbytes
        self._reasons: dict[tuple[str, str], TierStoreError] = {}
        self._absent: set[tuple[str, str]] = set()
        self._down: dict[str, TierStoreError] = {}
        self._objects: bytes | None = None
        self._manifest_document = b""
        self._entries: dict[str, FileEntry] = {}

    @property
    def tiers(self) -> tuple[str, ...]:
        """The names of the tiers that it is read from, in that order."""
        return tuple(source.tier.name for source in self._sources)

    async def objects(self, rank: int = 0) -> bytes:
        """The encoded objects of one rank.

        Raises:
            IntegrityError: No tier has a good copy of objects.json.
            NotFoundError: The checkpoint has nothing of that rank.
        """
        if self._objects is None:
            self._objects = await self._document(self._record(OBJECTS))
        return await asyncio.to_thread(split_objects, self._objects, rank)

    async def document(self, name: str) -> bytes:
        """A small file (manifest, index, objects, a part record) as a whole, proved.

        Raises:
            IntegrityError: No tier has a good copy of it.
            NotFoundError: The manifest names no such file.
        """
        if name == MANIFEST:
            return self._manifest_document
        if name not in (f.name for f in self.manifest.files):
            raise NotFoundError(
                f"the checkpoint in {self.info.attempt.folder} has no file {name!r}", hint="see `tierstore show`", file=name
            )
        return await self._document(self._record(name))

    async def read(self, wants: Sequence[Want], *, verify: bool = True) -> None:
        """Fills the buffers of all `wants` from the nearest good copies.

        Whole blocks are read and each is proved against its SHA-256 before its bytes count. Where a span lies within one want it is
        read straight into that buffer, else into scratch memory. After an error buffers hold anything: use none of them.

        Args:
            wants: Byte ranges of the checkpoint's shards, in any order.
            verify: False skips the proof, and reads exactly the wanted bytes.

        Raises:
            IntegrityError: Some bytes are good on no tier; lists each tier and its reason. Or a want lies outside its file.
            NotFoundError: The index names no such file.
            TemporaryError: Some bytes could not be had because tiers do not answer.
        """
        cost = self._cost()
        align = self.index.block_nbytes if verify else 1
        spans = plan_spans(wants, file_nbytes=lambda name: self._entry(name).nbytes, align=align, cost=cost)
        if not spans:
            return
        longest = max(span.nbytes for span in spans)
        widest = max(_cost_of(source.tier).concurrency for source in self._sources)
        workers = max(1, min(widest, len(spans), self._budget_nbytes // longest))
        slots = {s.tier.name: asyncio.Semaphore(_cost_of(s.tier).concurrency) for s in self._sources}
        queue = iter(spans)
        tasks = [asyncio.ensure_future(self._work(queue, longest, verify, slots)) for _ in range(workers)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # nobody writes into the buffers after this

    # ---- inside

    async def _work(self, queue: Iterator[Span], longest: int, verify: bool, slots: dict[str, asyncio.Semaphore]) -> None:
        scratch: memoryview | None = None
        for span in queue:
            view = span.direct()
            if view is not None:
                await self._fill(span, view, verify, slots)
                continue
            if scratch is None:
                scratch = memoryview(bytearray(longest))
            await self._fill(span, scratch[: span.nbytes], verify, slots)
            if span.nbytes > 1 << 20:
                await asyncio.to_thread(span.scatter, scratch)
            else:
                span.scatter(scratch)

    async def _fill(self, span: Span, view: memoryview, verify: bool, slots: dict[str, asyncio.Semaphore]) -> None:
        """Fills `view` with the span's bytes, each block from the first tier where it is good."""
        entry = self._entry(span.file)
        pending = [(span.begin, span.end)]
        for source in self._order(span.file):
            tier = source.tier
            left: list[tuple[int, int]] = []
            for begin, end in pending:
                part = view[begin - span.begin : end - span.begin]
                try:
                    async with slots[tier.name]:
                        self.requests[tier.name] += 1
                        await tier.storage.read_into(self.info.attempt.path(span.file), begin, part)
                    self.bytes_fetched[tier.name] += end - begin
                    self._down.pop(tier.name, None)
                except (StorageError, NotFoundError, IntegrityError) as error:
                    self._pass_over(source, span.file, error)
                    left.append((begin, end))
                    continue
                if verify:
                    left.extend(await self._bad_blocks(source, entry, begin, part))
            pending = left
            if not pending:
                return
        raise self._no_copy(span.file, f"bytes {pending[0][0]} to {pending[-1][1]} of ")

    async def _bad_blocks(self, source: _Source, entry: FileEntry, begin: int, part: memoryview) -> list[tuple[int, int]]:
        """The ranges of `part`, read at `begin`, whose blocks are not what the index promises."""
        size = self.index.block_nbytes
        found = await asyncio.to_thread(block_digests, part, size)
        first = begin // size
        promised = entry.block_digests[first * DIGEST_NBYTES : first * DIGEST_NBYTES + len(found)]
        bad: list[tuple[int, int]] = []
        for number in bad_blocks(found, promised):
            b, e = begin + number * size, min(begin + (number + 1) * size, begin + part.nbytes)
            if bad and bad[-1][1] == b:
                bad[-1] = (bad[-1][0], e)
            else:
                bad.append((b, e))
        if not bad:
            return []
        reason = f"block {bad[0][0] // size} is damaged: its SHA-256 is not the one in the index"
        self._pass_over(source, entry.name, IntegrityError(reason))
        return bad

    def _order(self, file: str) -> list[_Source]:
        """Where to look for a file: nearest first, tiers that did not answer last, not where it is known to be absent."""
        able = [s for s in self._sources if (s.files is None or file in s.files) and (s.tier.name, file) not in self._absent]
        return sorted(able, key=lambda s: s.tier.name in self._down)

    def _pass_over(self, source: _Source, file: str, error: TierStoreError) -> None:
        """Notes why a copy was not used; the first time for a tier and file it is said aloud."""
        tier = source.tier
        if isinstance(error, (NotFoundError, AccessError)):
            self._absent.add((tier.name, file))
        elif isinstance(error, StorageError):
            self._down[tier.name] = error
        if (tier.name, file) in self._reasons:
            return
        self._reasons[tier.name, file] = error
        if isinstance(error, NotFoundError) and not source.expected:
            return  # nobody promised that this tier has it
        self.bad_copies.append(BadCopy(tier=tier.name, file=file, reason=error.message))
        log.warning(
            "run=%s step=%d tier=%s file=%s is passed over for the next tier: %s",
            self.info.run,
            self.info.step,
            tier.name,
            self.info.attempt.path(file),
            error.message,
        )

    def _no_copy(self, file: str, what: str = "") -> TierStoreError:
        found = [(s.tier, self._reasons[s.tier.name, file]) for s in self._sources if (s.tier.name, file) in self._reasons]
        listed = "; ".join(f"{tier.name}: {type(error).__name__}: {error.message}" for tier, error in found) or "no tier should hold it"
        message = f"no tier has a good copy of {what}{file} of step {self.info.step} of run {self.info.run!r}: {listed}"
        facts = {"run": self.info.run, "step": self.info.step, "file": file, "tiers": {tier.name: e.message for tier, e in found}}
        if found and all(isinstance(error, StorageError) for _, error in found):
            return TemporaryError(
                message, hint="bring one of these tiers back, or try again later; nothing is known to be damaged", **facts
            )
        return IntegrityError(
            message,
            hint="load an older step, or `resume(fallback=True)`; `tierstore verify --level full` shows all that is damaged",
            **facts,
        )

    async def _document(self, file: FileRecord) -> bytes:
        """A small file as a whole, proved against the manifest."""
        block_nbytes = self.manifest.block_nbytes

        def prove(data: bytes) -> None:
            if file_digest(block_digests(data, block_nbytes)) != file.digest:
                raise IntegrityError("its SHA-256 is not the one in the manifest")

        return await self._proved(file.name, file.nbytes, prove)

    async def _proved(self, name: str, nbytes: int | None, prove: Callable[[bytes], None]) -> bytes:
        for source in self._order(name):
            try:
                self.requests[source.tier.name] += 1
                data = await source.tier.storage.read(self.info.attempt.path(name), 0, nbytes)
                self.bytes_fetched[source.tier.name] += len(data)
                await asyncio.to_thread(prove, data)
            except (StorageError, NotFoundError, IntegrityError) as error:
                self._pass_over(source, name, error)
                continue
            return data
        raise self._no_copy(name)

    async def _open(self) -> None:
        info = self.info

        def prove_manifest(data: bytes) -> None:
            if digest_of(data) != info.manifest_digest:
                raise IntegrityError("its SHA-256 is not the one in the commit record")

        document = await self._proved(MANIFEST, info.manifest_nbytes, prove_manifest)
        self._manifest_document = document
        self.manifest = await asyncio.to_thread(decode_manifest, document)
        claimed = (self.manifest.run, self.manifest.step, self.manifest.save_id)
        if claimed != (info.attempt.run, info.attempt.step, info.attempt.save_id):
            raise IntegrityError(
                f"the manifest in {info.attempt.folder} is that of {claimed[0]}@{claimed[1]}, save id {claimed[2]}",
                hint="run `tierstore verify`",
                run=info.run,
                step=info.step,
            )
        self.index, _ = await asyncio.to_thread(decode_index, await self._document(self._record(INDEX)))
        self._check_index()

    def _check_index(self) -> None:
        """Index and manifest name the same shards with the same sizes and digests."""
        promised = {f.name: f for f in self.manifest.files if f.kind == "shard"}
        for entry in self.index.files():
            record = promised.pop(entry.name, None)
            if record is None or record.nbytes != entry.nbytes or record.digest != entry.digest:
                raise IntegrityError(f"index and manifest of {self.info.attempt.folder} disagree about {entry.name}", file=entry.name)
        if promised or self.index.block_nbytes != self.manifest.block_nbytes:
            raise IntegrityError(f"index and manifest of {self.info.attempt.folder} disagree about their files or block size")

    def _record(self, name: str) -> FileRecord:
        record = next((f for f in self.manifest.files if f.name == name), None)
        if record is None:
            raise IntegrityError(f"the manifest in {self.info.attempt.folder} does not name {name}", file=name)
        return record

    def _entry(self, name: str) -> FileEntry:
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = self.index.file(name)
        return entry

    def _cost(self) -> ReadCost:
        return _cost_of(self._sources[0].tier)


async def open_replica(tiers: Tiers, info: CheckpointInfo, *, budget_nbytes: int = BUDGET_NBYTES) -> Replica:
    """Opens a checkpoint: reads manifest and index from the nearest tier that has good copies of them.

    Args:
        tiers: The store's tiers.
        info: The catalog's entry; it says which tiers hold what.
        budget_nbytes: Scratch memory that reads may use, in bytes.

    Raises:
        IntegrityError: No tier has a good manifest or index; lists each tier and its reason.
        VersionError: A newer major version of tierstore wrote it.
        TemporaryError: No tier that should have them answers.
    """
    sources = _sources(tiers, info)
    if not info.manifest_digest or not sources:
        raise IntegrityError(
            f"step {info.step} of run {info.run!r} can't be opened: "
            + ("no tier that was reached holds it" if info.manifest_digest else "its commit record names no manifest"),
            hint="see `tierstore show` for where its copies should be",
            run=info.run,
            step=info.step,
        )
    replica = Replica(info, sources, budget_nbytes=budget_nbytes)
    await replica._open()
    return replica


def _sources(tiers: Tiers, info: CheckpointInfo) -> list[_Source]:
    """Nearest first: complete copies and what node tiers hold of them. Then, as every byte is proved anyway, whatever else there is."""
    near: list[_Source] = []
    rest: list[_Source] = []
    for tier in tiers:
        state = info.replicas.get(tier.name)
        if state == "complete":
            near.append(_Source(tier=tier, files=None, expected=True))
        elif state == "receipt":
            own = {shard_name(rank, info.world_size) for rank in info.receipts.get(tier.name, ())}
            near.append(_Source(tier=tier, files=frozenset({*own, MANIFEST, INDEX, OBJECTS}), expected=False))
        elif state is not None:
            rest.append(_Source(tier=tier, files=None, expected=False))
    return [*near, *rest]


def _cost_of(tier: Tier) -> ReadCost:
    return LOCAL_COST if tier.storage.capabilities.local else REMOTE_COST
