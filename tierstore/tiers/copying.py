"""Copying one file from tier to tier: proved while it is read, bounded in memory and bandwidth, from whichever source is good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tierstore.clock import Clock
from tierstore.crashpoints import reach
from tierstore.errors import IntegrityError, NotFoundError, StorageError, TierStoreError
from tierstore.format.digest import DIGEST_NBYTES, bad_blocks, block_digests, digest_of, file_digest
from tierstore.format.index import FileEntry
from tierstore.names import Attempt
from tierstore.storage.bandwidth import Bandwidth
from tierstore.storage.contract import FileInfo, PacesWrites, PackHints, ReadsProved, Source, Storage, WritesOn, WritesPacked
from tierstore.storage.sources import ThrottledSource
from tierstore.tiers.budget import ByteBudget
from tierstore.tiers.progress import NO_PROGRESS, Progress
from tierstore.tiers.read_order import file_order
from tierstore.tiers.references import References
from tierstore.tiers.tier import Tier, Tiers

__all__ = ["CopyContext", "OnDamage", "Proof", "VerifiedSource", "copy_document", "copy_file", "read_document"]

log = logging.getLogger(__name__)

_SMALL_PER_FILE = 4
_EXACT = PackHints(exact=True)
OnDamage = Callable[[Tier, str, str], Awaitable[None]]
"""Told of a damaged source: the tier, the file's name, what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a small file's bytes are proved against."""

    digest: str
    block_nbytes: int | None = None
    """Bytes per block where the digest is taken over blocks (files of a manifest); None: plain SHA-256 (manifest, part record)."""

    def digest_of(self, data: bytes) -> str:
        return digest_of(data) if self.block_nbytes is None else file_digest(block_digests(data, self.block_nbytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyContext:
    """What all copies of a process share: the tiers, the clock, and the limits."""

    tiers: Tiers
    clock: Clock
    budget: ByteBudget
    files: asyncio.Semaphore
    """How many files are in flight at once."""
    small_files: asyncio.Semaphore
    """The same of files that go to a remote storage in one piece: what they take is round trips, of which it bears many."""
    files_in_flight: int = 4
    """The same as a number, for whoever lets each tier have so many."""
    limits: Mapping[str, Bandwidth] = field(default_factory=dict)
    """Tier name → the limiter that all writes to it share, where its storage does not keep it itself."""
    progress: Progress = NO_PROGRESS
    references: References = field(default_factory=References)
    """What is known of bytes that lie on the tiers already."""

    @staticmethod
    def make(
        tiers: Tiers,
        clock: Clock,
        *,
        budget_nbytes: int = 256 << 20,
        files_in_flight: int = 4,
        max_bandwidth: int | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> CopyContext:
        """A context with limiters for the tiers that have a bandwidth limit.

        Args:
            tiers: The store's tiers.
            clock: For deadlines and records.
            budget_nbytes: Bytes in flight over all copies.
            files_in_flight: Files in flight over all copies.
            max_bandwidth: Bytes per second for every tier beyond the nearest (the command line's ``--bwlimit``); a tier's own limit
                counts if it is lower.
            progress: Told as bytes arrive.
        """
        limits: dict[str, Bandwidth] = {}
        for number, tier in enumerate(tiers.tiers):
            rates = [r for r in (tier.max_bandwidth, max_bandwidth if number else None) if r is not None]
            limit = Bandwidth(min(rates), clock) if rates else None
            if isinstance(tier.storage, PacesWrites):
                tier.storage.pace_writes(limit)  # it knows what it sends, and what it sends again
            elif limit is not None:
                limits[tier.name] = limit
        return CopyContext(
            tiers=tiers,
            clock=clock,
            budget=ByteBudget(budget_nbytes),
            files=asyncio.Semaphore(files_in_flight),
            small_files=asyncio.Semaphore(_SMALL_PER_FILE * files_in_flight if files_in_flight > 1 else 1),
            files_in_flight=files_in_flight,
            limits=limits,
            progress=progress,
        )


class VerifiedSource:
    """A file of one tier as a `Source`: every block is proved against its SHA-256 before the target gets it.

    `failure` keeps why reading failed, so that the caller can tell a bad source from a bad target.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        file: FileEntry,
        block_nbytes: int,
        budget: ByteBudget,
        taken: Callable[[int], None],
        order: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._storage = storage
        self._path = path
        self._file = file
        self._block = block_nbytes
        self._budget = budget
        self._taken = taken
        self.order = order
        """`contract.InOrder`."""
        self.failure: TierStoreError | None = None

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        """Reads whole blocks around the range, proves them, returns the range.

        Raises:
            IntegrityError: A block is not what its digest promises, or the file is too short.
        """
        begin = offset // self._block * self._block
        end = min(-(-(offset + nbytes) // self._block) * self._block, self.nbytes)
        buffer = await self._budget.take(end - begin)
        try:
            if isinstance(self._storage, ReadsProved):
                await self._storage.read_proved(self._path, begin, buffer, self._prove, unit=self._block)
            else:
                await self._storage.read_into(self._path, begin, buffer)
                await asyncio.to_thread(self._prove, begin, buffer)
        except TierStoreError as error:
            self.failure = error
            raise
        self._taken(nbytes)
        return buffer[offset - begin : offset - begin + nbytes]

    def _prove(self, at: int, piece: memoryview) -> None:
        first = at // self._block
        found = block_digests(piece, self._block)
        promised = self._file.block_digests[first * DIGEST_NBYTES : first * DIGEST_NBYTES + len(found)]
        bad = bad_blocks(found, promised)
        if not bad:
            return
        begin = (first + bad[0]) * self._block
        end = min(begin + self._block, self.nbytes)
        raise IntegrityError(
            f"{self._path} in {self._storage.uri} is damaged: bytes {begin} to {end} do not match their SHA-256",
            hint="run `tierstore verify --level full`; docs/guides/recovery.md shows how to put a good copy back",
            file=self._path,
        )


def _limited(context: CopyContext, tier: Tier, source: VerifiedSource) -> VerifiedSource | ThrottledSource:
    """The source under the tier's bandwidth limit, if it has one."""
    limit = context.limits.get(tier.name)
    return source if limit is None else ThrottledSource(source, limit)


async def copy_file(
    context: CopyContext,
    attempt: Attempt,
    target: Tier,
    sources: Sequence[Tier],
    file: FileEntry,
    block_nbytes: int,
    on_damage: OnDamage,
    *,
    absent: bool = False,
    hints: PackHints = _EXACT,
    refer: bool = False,
) -> FileInfo:
    """Copies `file` to `target` from the first of `sources` whose bytes are good.

    What an interrupted copy left at the target is gone on with, where the storage can (`WritesOn`).

    A file whose destination has the right size is left as it is. That is enough: the path carries the attempt's save id, every
    writer of that path proves the bytes against the same digests, and a storage's `write` publishes all of the bytes or none
    (`tierstore.storage.contract`), so no other content of that size can have been published; decay afterwards is `verify`'s to
    find. A later HEAD proves the object unchanged by what the server returned, which the ``replicated`` record keeps.

    `absent`: a listing has just shown that the target has no such file, so that it need not be asked. Were it wrong, the same bytes
    would be written once more. `hints`: for a target that packs its shards. `refer`: bytes that the target has of an earlier checkpoint
    may be referred to; else the file is written whole.

    Raises:
        IntegrityError: No source has good bytes; names each.
        StorageError: The target failed, or no source could be reached.
    """
    path = attempt.path(file.name)
    there = None if absent else await _stat(target.storage, path)
    if there is not None and there.nbytes == file.nbytes:
        context.progress(target.name, attempt, file.name, file.nbytes, file.nbytes)
        return there
    if refer:
        unchanged = await context.references.unchanged(
            context.tiers, attempt, target, file, block_nbytes, clock=context.clock, lossy=not hints.exact
        )
        hints = replace(hints, unchanged=unchanged) if unchanged else hints
    failures: list[tuple[Tier, TierStoreError]] = []
    for tier in sources:
        taken = _Counter(context, target, attempt, file)
        async with _turn(context, target, file.nbytes):
            order = await file_order(tier.storage, path, file.nbytes, block_nbytes)
            verified = VerifiedSource(tier.storage, path, file, block_nbytes, context.budget, taken.add, order)
            reach("promote.before-file")
            try:
                info = await _write(target.storage, path, _limited(context, target, verified), hints)
            except TierStoreError:
                if verified.failure is None:
                    raise  # the target's own failure
                failures.append((tier, verified.failure))
                await _report(tier, attempt, file.name, verified.failure, on_damage)
                continue
            reach("promote.after-file")
        taken.complete()
        return info
    raise _no_source(attempt, target, file.name, failures)


def _turn(context: CopyContext, target: Tier, nbytes: int) -> asyncio.Semaphore:
    can = target.storage.capabilities
    return context.small_files if not can.local and nbytes <= can.part_nbytes else context.files


async def _write(storage: Storage, path: str, source: Source, hints: PackHints) -> FileInfo:
    if isinstance(storage, WritesPacked):
        return await storage.write_packed(path, source, hints)
    return await (storage.write_on(path, source) if isinstance(storage, WritesOn) else storage.write(path, source))


async def copy_document(
    context: CopyContext,
    attempt: Attempt,
    target: Tier,
    sources: Sequence[Tier],
    name: str,
    proof: Proof,
    on_damage: OnDamage,
) -> FileInfo:
    """Copies a small file that is proved as a whole (part records, objects, index, manifest); as `copy_file` otherwise.

    Its own size is not compared beforehand: a few kilobytes are written again rather than trusted.
    """
    data = await read_document(attempt, sources, name, proof, on_damage, wanted_by=target)
    async with _turn(context, target, len(data)):
        reach("promote.before-file")
        info = await target.storage.put(attempt.path(name), data)
        reach("promote.after-file")
    context.progress(target.name, attempt, name, len(data), len(data))
    return info


async def read_document(
    attempt: Attempt, sources: Sequence[Tier], name: str, proof: Proof, on_damage: OnDamage, *, wanted_by: Tier | None = None
) -> bytes:
    """The bytes of a small file from the first source whose copy matches `proof`.

    Raises:
        IntegrityError: No source has good bytes; names each.
        StorageError: No source could be reached.
    """
    failures: list[tuple[Tier, TierStoreError]] = []
    path = attempt.path(name)
    for tier in sources:
        try:
            data = await tier.storage.read(path)
            found = await asyncio.to_thread(proof.digest_of, data)
            if found == proof.digest:
                return data
            raise IntegrityError(f"{path} in {tier.storage.uri} has digest {found}, not {proof.digest}", file=path)
        except TierStoreError as error:
            failures.append((tier, error))
            await _report(tier, attempt, name, error, on_damage)
    raise _no_source(attempt, wanted_by, name, failures)


class _Counter:
    """Turns bytes taken into progress events; pulls that are repeated on a retry do not count beyond the file."""

    def __init__(self, context: CopyContext, target: Tier, attempt: Attempt, file: FileEntry) -> None:
        self._context, self._target, self._attempt, self._file = context, target, attempt, file
        self._done = 0

    def add(self, nbytes: int) -> None:
        self._done = min(self._done + nbytes, max(0, self._file.nbytes - 1))  # complete only when the storage says so
        self._context.progress(self._target.name, self._attempt, self._file.name, self._done, self._file.nbytes)

    def complete(self) -> None:
        self._context.progress(self._target.name, self._attempt, self._file.name, self._file.nbytes, self._file.nbytes)


async def _stat(storage: Storage, path: str) -> FileInfo | None:
    try:
        return await storage.stat(path)
    except NotFoundError:
        return None


async def _report(tier: Tier, attempt: Attempt, name: str, error: TierStoreError, on_damage: OnDamage) -> None:
    """Damage is recorded; a missing file or a tier that does not answer only sends us to the next source."""
    log.warning("tier=%s checkpoint=%s file=%s unusable as a source: %s", tier.name, attempt.folder, name, error.message)
    if isinstance(error, IntegrityError):
        await on_damage(tier, name, error.message)


def _no_source(attempt: Attempt, target: Tier | None, name: str, failures: Sequence[tuple[Tier, TierStoreError]]) -> TierStoreError:
    """The error for a file that no source could give: damage only if no source might still come back with good bytes."""
    listed = "; ".join(f"{tier.name}: {error.message}" for tier, error in failures) or "no tier holds it"
    where = f" for tier {target.name!r}" if target else ""
    message = f"no good copy of {attempt.path(name)}{where} ({listed})"
    context = {"run": attempt.run, "step": attempt.step, "file": name, "tier": target.name if target else None}
    for _, error in failures:
        if isinstance(error, StorageError):
            kind = type(error)
            return kind(message, hint=error.hint or "the other sources are damaged: bring this tier back", **context)
    return IntegrityError(
        message,
        hint="run `tierstore verify --level full` to see every tier's copy; docs/guides/recovery.md shows how to put one back",
        **context,
    )
