"""Mending one file: it is written anew, never in place, from its own good blocks and good blocks of other tiers, each proved on its way.

The bytes that are published are exactly those that the manifest promised: a file of which one block is good nowhere is left as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from tierstore.errors import IntegrityError, NotFoundError, TierStoreError
from tierstore.format.digest import DIGEST_NBYTES, bad_blocks, block_digests
from tierstore.format.index import FileEntry, Index
from tierstore.names import Attempt
from tierstore.storage.contract import FileInfo, PackHints, Source, WritesPacked
from tierstore.storage.sources import ThrottledSource
from tierstore.tiers.budget import ByteBudget
from tierstore.tiers.copying import CopyContext, Proof
from tierstore.tiers.read_order import file_order
from tierstore.tiers.space_estimate import check_room
from tierstore.tiers.tier import Tier
from tierstore.tiers.verify_files import runs_of

__all__ = ["Mended", "MendingSource", "Unmended", "mend_document", "mend_shard", "tensors_in"]

log = logging.getLogger(__name__)

_AT_ONCE_NBYTES = 8 << 20
_EXACT = PackHints(exact=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """A file that is as promised again; in a dry run: that could be.

    `blocks` of a shard came from other tiers, `sources` names these, `nbytes_fetched` is how much came from them; `nbytes_written` is
    the whole file. `info`: what the storage says of it now. Nothing fetched and nothing written: it was good already.
    """

    attempt: Attempt
    tier: str
    file: str
    blocks: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    nbytes_fetched: int = 0
    nbytes_written: int = 0
    info: FileInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmended:
    """A file that could not be mended, and why. `blocks` are good on no tier, `tensors` lie in them; it was left as it is.

    `quantised`: tiers with a quantised copy, from which nothing is mended, where no exact one has these blocks.
    """

    attempt: Attempt
    tier: str
    file: str
    reason: str
    blocks: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    quantised: tuple[str, ...] = ()
    exit_code: int = IntegrityError.exit_code


@dataclass(slots=True, kw_only=True)
class MendingSource:
    """A shard as it was promised, as a `Source`: read from its own tier, and block by block from others where that is not good."""

    path: str
    file: FileEntry
    block_nbytes: int
    budget: ByteBudget
    own: Tier
    own_nbytes: int
    """How long the file is now on its own tier; 0 where it is missing."""
    bad: Collection[int]
    """Blocks that are known to be bad there: they are not asked for."""
    others: Sequence[Tier]
    fetched: dict[int, str] = field(default_factory=dict)
    """Block → the other tier that it came from."""
    lost: dict[int, str] = field(default_factory=dict)
    """Block → why no tier had it good."""
    order: Sequence[tuple[int, int]] = ()
    """`contract.InOrder`."""

    @property
    def nbytes(self) -> int:
        return self.file.nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        """The range, of which every block around it is proved.

        Raises:
            IntegrityError: A block is good nowhere; `lost` has it.
        """
        first, last = offset // self.block_nbytes, -(-(offset + nbytes) // self.block_nbytes)
        begin = first * self.block_nbytes
        buffer = await self.budget.take(min(last * self.block_nbytes, self.nbytes) - begin)
        why: dict[int, list[str]] = {}
        mine = [b for b in range(first, last) if b not in self.bad and self._end(b) <= self.own_nbytes]
        missing = sorted({*range(first, last)} - set(mine)) + await self._fill(self.own, mine, buffer, begin, why)
        for tier in self.others:
            wanted, missing = sorted(missing), []
            if wanted:
                missing = await self._fill(tier, wanted, buffer, begin, why)
                self.fetched.update({b: tier.name for b in wanted if b not in missing})
        if missing:
            reasons = {b: "; ".join(why.get(b, [])) or "no other tier holds it" for b in missing}
            self.lost.update(reasons)
            raise IntegrityError(f"block {min(missing)} of {self.path} is good on no tier: {reasons[min(missing)]}", file=self.path)
        return buffer[offset - begin : offset - begin + nbytes]

    def _end(self, block: int) -> int:
        return min((block + 1) * self.block_nbytes, self.nbytes)

    async def _fill(self, tier: Tier, blocks: Sequence[int], buffer: memoryview, base: int, why: dict[int, list[str]]) -> list[int]:
        """Reads and proves `blocks` from one tier, neighbours in one request; returns those that it has not good."""
        failed: list[int] = []
        for first, last in runs_of(blocks, max(1, _AT_ONCE_NBYTES // self.block_nbytes)):
            begin, end = first * self.block_nbytes, self._end(last - 1)
            try:
                part = buffer[begin - base : end - base]
                await tier.storage.read_into(self.path, begin, part)
            except TierStoreError as error:
                if last - first > 1 and not isinstance(error, NotFoundError):  # some of them may be readable
                    for block in range(first, last):
                        failed += await self._fill(tier, [block], buffer, base, why)
                    continue
                log.debug("tier=%s %s blocks %d to %d: %s", tier.name, self.path, first, last - 1, error.message)
                for block in range(first, last):
                    why.setdefault(block, []).append(f"{tier.name}: {error.message}")
                failed += range(first, last)
                continue
            found = await asyncio.to_thread(block_digests, part, self.block_nbytes)
            for bad in bad_blocks(found, self.file.block_digests[first * DIGEST_NBYTES : last * DIGEST_NBYTES]):
                why.setdefault(first + bad, []).append(f"{tier.name}: it does not match its SHA-256")
                failed.append(first + bad)
        return failed


async def mend_shard(
    context: CopyContext,
    attempt: Attempt,
    tier: Tier,
    others: Sequence[Tier],
    file: FileEntry,
    index: Index,
    *,
    bad: Collection[int],
    dry_run: bool,
    hints: PackHints = _EXACT,
    own: bool = True,
) -> Mended | Unmended:
    """Writes a shard anew on `tier`.

    Args:
        context: Limits and progress.
        attempt: Whose shard.
        tier: Where it is damaged.
        others: Tiers that may have good blocks, nearest first.
        file: The shard, with its blocks' digests.
        index: For the names of the tensors that are lost.
        bad: Blocks that are known to be bad there; the others are proved while they are read.
        dry_run: Only find out whether it can be done: what is bad is read from the other tiers, nothing is written.
        hints: For a tier that packs its shards.
        own: False: nothing is taken from `tier` itself, for its copy is not exact.
    """
    path, block_nbytes = attempt.path(file.name), index.block_nbytes
    own_nbytes = await _nbytes(tier, path) if own else 0
    source = MendingSource(
        path=path,
        file=file,
        block_nbytes=block_nbytes,
        budget=context.budget,
        own=tier,
        own_nbytes=min(own_nbytes, file.nbytes),
        bad=frozenset(bad),
        others=[t for t in others if await _nbytes(t, path)],
    )
    count = -(-file.nbytes // block_nbytes)
    suspect = sorted(bad) if own_nbytes == file.nbytes and bad else list(range(count))
    written: FileInfo | None = None
    try:
        if dry_run:
            await _survey(source, suspect)
        else:
            # It replaces what is there: only the disk needs room for both.
            await check_room(context, attempt, replace(tier, capacity=None), [file], block_nbytes, lossy=not hints.exact)
            source.order = await _order(source)
            limit = context.limits.get(tier.name)
            throttled: Source = source if limit is None else ThrottledSource(source, limit)
            async with context.files:
                written = await _write(tier, path, throttled, hints)
            context.progress(tier.name, attempt, file.name, file.nbytes, file.nbytes)
    except TierStoreError as error:
        if not source.lost:  # the tier's own failure
            return Unmended(attempt=attempt, tier=tier.name, file=file.name, reason=error.message, exit_code=error.exit_code)
        if not dry_run:
            await _survey(source, [b for b in suspect if b not in source.lost and b not in source.fetched])
    if source.lost:
        lost = tuple(sorted(source.lost))
        return Unmended(
            attempt=attempt,
            tier=tier.name,
            file=file.name,
            reason=source.lost[lost[0]],
            blocks=lost,
            tensors=tensors_in(index, file.name, lost),
        )
    fetched = tuple(sorted(source.fetched))
    return Mended(
        attempt=attempt,
        tier=tier.name,
        file=file.name,
        blocks=fetched,
        sources=tuple(dict.fromkeys(source.fetched[b] for b in fetched)),
        nbytes_fetched=sum(min(block_nbytes, file.nbytes - b * block_nbytes) for b in fetched),
        nbytes_written=file.nbytes,
        info=written,
    )


async def _order(source: MendingSource) -> Sequence[tuple[int, int]]:
    """In which order the first tier that is read costs least."""
    first = next(iter(source.others), None) if not source.own_nbytes or source.bad else source.own
    return () if first is None else await file_order(first.storage, source.path, source.nbytes, source.block_nbytes)


async def _write(tier: Tier, path: str, source: Source, hints: PackHints) -> FileInfo:
    storage = tier.storage
    return await (storage.write_packed(path, source, hints) if isinstance(storage, WritesPacked) else storage.write(path, source))


async def _survey(source: MendingSource, blocks: Sequence[int]) -> None:
    """Finds for each block whether some tier has it good; `source.lost` has those that none has."""
    for first, last in runs_of(blocks, max(1, _AT_ONCE_NBYTES // source.block_nbytes)):
        begin, end = first * source.block_nbytes, min(last * source.block_nbytes, source.nbytes)
        try:
            await source.read(begin, end - begin)
        except IntegrityError as error:
            log.debug("%s", error.message)


async def mend_document(
    context: CopyContext,
    attempt: Attempt,
    tier: Tier,
    others: Sequence[Tier],
    name: str,
    proof: Proof,
    *,
    made: bytes | None = None,
    dry_run: bool,
) -> Mended | Unmended:
    """Writes a small file anew on `tier`, from the first of `others` whose copy is good, else from `made`; nothing if it is good there."""
    reasons: list[str] = []
    for source in (tier, *others):
        try:
            data = await source.storage.read(attempt.path(name))
            if await asyncio.to_thread(proof.digest_of, data) == proof.digest:
                break
            reasons.append(f"{source.name}: its bytes are not those promised")
        except TierStoreError as error:
            reasons.append(f"{source.name}: {error.message}")
    else:
        if made is None or proof.digest_of(made) != proof.digest:
            return Unmended(attempt=attempt, tier=tier.name, file=name, reason="; ".join(reasons))
        data, source = made, None
    mended = Mended(attempt=attempt, tier=tier.name, file=name)
    if source is tier:
        return mended
    info = None
    if not dry_run:
        try:
            async with context.files:
                info = await tier.storage.put(attempt.path(name), data)
        except TierStoreError as error:
            return Unmended(attempt=attempt, tier=tier.name, file=name, reason=error.message, exit_code=error.exit_code)
    return Mended(
        attempt=attempt,
        tier=tier.name,
        file=name,
        sources=(source.name if source else "the part records",),
        nbytes_fetched=len(data),
        nbytes_written=len(data),
        info=info,
    )


def tensors_in(index: Index, file: str, blocks: Collection[int]) -> tuple[str, ...]:
    """The names of the tensors of which some bytes lie in these blocks of a file, sorted."""
    size, wanted = index.block_nbytes, frozenset(blocks)

    def meets(begin: int, end: int) -> bool:
        return end > begin and any(b in wanted for b in range(begin // size, -(-end // size)))

    return tuple(sorted(t.name for t in index if any(e.file == file and meets(e.begin, e.end) for e in t.extents)))


async def _nbytes(tier: Tier, path: str) -> int:
    """How long a file is; 0 where it is missing, or the tier does not say."""
    try:
        return (await tier.storage.stat(path)).nbytes
    except TierStoreError as error:
        log.debug("tier=%s %s", tier.name, error.message)
        return 0
