"""One rank's share of a save, made durable on one tier: the shard, then its part record, then (off the authority) a receipt.

PROTOCOLS.md §4, steps 2 and 3. Blocks are hashed while they are written, or before it where that says which of them need not be
(`tiers/direct.py`). Only the part record makes a shard count.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierstore.clock import Clock
from tierstore.crashpoints import reach
from tierstore.errors import ConflictError, IntegrityError, NotFoundError, TierFullError, UsageError
from tierstore.format.digest import BLOCK_NBYTES, DIGEST_NBYTES, block_count, block_digests, digest_of
from tierstore.format.index import FileEntry, TensorEntry, build_index
from tierstore.format.part import Part, encode_part
from tierstore.format.receipt import Receipt, decode_receipt, encode_receipt
from tierstore.names import TMP, Attempt, part_name, shard_name
from tierstore.storage.bandwidth import Bandwidth
from tierstore.storage.contract import FileInfo, InMemory, PackHints, Source, Storage, WritesPacked
from tierstore.storage.sources import LocalSource, StorageSource, ThrottledSource, bare_of, work_of
from tierstore.tiers.direct import Bare, Refers
from tierstore.tiers.space import SAVE_RESERVE_NBYTES
from tierstore.tiers.space_estimate import check_room_to_save
from tierstore.tiers.tier import Tier

__all__ = ["HashingSource", "persist"]

log = logging.getLogger(__name__)

_HASHES_AHEAD = 8


class HashingSource:
    """A `Source` that hashes its blocks while a storage writes them, each block once.

    A source in memory is hashed in the storage's threads (`storage.contract.WorksBeside`); any other in threads of its own beside the
    write (the contract keeps a view valid and constant until the write has ended). A storage may pull a range again for a retry: the
    bytes that it gets then are compared with those of the first time, for a source that changes in between would leave a shard that is
    neither the old nor the new. `finish` waits for all hashing.

    Args:
        source: The bytes.
        block_nbytes: The block size in bytes; pulls begin at and span whole blocks, but for the last one.
    """

    view: Callable[[int, int], memoryview]
    bare: Callable[[int, int], memoryview]
    work: Callable[[int, int], None]
    """`storage.contract.WorksBeside`, whose work is hashing; there only if `source` is in memory."""

    def __init__(self, source: Source, block_nbytes: int = BLOCK_NBYTES) -> None:
        self._source = source
        self.block_nbytes = block_nbytes
        self._digests: list[bytes | None] = [None] * block_count(source.nbytes, block_nbytes)
        self._hashing: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_HASHES_AHEAD)
        self._error: IntegrityError | None = None
        self._changed = threading.Condition()
        self._looking = 0
        if isinstance(source, InMemory):
            self._inner_bare, self._inner_work = bare_of(source), work_of(source)
            self.view, self.bare, self.work = self._view, self._bare, self._work

    @property
    def nbytes(self) -> int:
        return self._source.nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        """Exactly `nbytes` bytes at `offset`, whose hashing has begun.

        Raises:
            IntegrityError: An earlier pull differed from what was pulled before.
            UsageError: The pull is not a whole number of blocks.
        """
        self._check(offset, nbytes)
        view = await self._source.read(offset, nbytes)
        _check_length(view, offset, nbytes)
        await self._slots.acquire()
        task = asyncio.ensure_future(asyncio.to_thread(self._hash, offset, view))
        self._hashing.add(task)
        task.add_done_callback(self._hashed)
        return view

    def _view(self, offset: int, nbytes: int) -> memoryview:
        view = self._bare(offset, nbytes)
        self._work(offset, nbytes)
        return view

    def _bare(self, offset: int, nbytes: int) -> memoryview:
        self._check(offset, nbytes)
        view = self._inner_bare(offset, nbytes)
        _check_length(view, offset, nbytes)
        return view

    def _work(self, offset: int, nbytes: int) -> None:
        with self._changed:
            self._looking += 1
        try:
            self._hash(offset, self._bare(offset, nbytes))
            if self._error is not None:
                raise self._error
        finally:
            with self._changed:
                self._looking -= 1
                self._changed.notify_all()
        self._inner_work(offset, nbytes)

    async def finish(self) -> bytes:
        """The digests of all blocks, concatenated, once the write has ended.

        Raises:
            IntegrityError: Some block was never pulled, or was pulled twice with different bytes.
        """
        await self.settle()
        if self._error is not None:
            raise self._error
        done = [d for d in self._digests if d is not None]
        if len(done) != len(self._digests):
            first = self._digests.index(None)
            raise IntegrityError(
                f"block {first} of {len(self._digests)} was never written", hint="this is a fault of the storage; report it"
            )
        return b"".join(done)

    async def settle(self) -> None:
        """Waits until no thread hashes the source's memory any more. Called when the write has ended; the source is not kept after it."""
        while self._hashing:
            await asyncio.wait(self._hashing)
        if self._looking:
            await asyncio.to_thread(self._wait)
        for name in ("view", "bare", "work"):  # they refer to us: without them the image is let go of at once, not by the collector
            self.__dict__.pop(name, None)

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._looking == 0)

    def _check(self, offset: int, nbytes: int) -> None:
        end = offset + nbytes
        if offset % self.block_nbytes or (end % self.block_nbytes and end != self.nbytes) or not 0 <= offset <= end <= self.nbytes:
            raise UsageError(
                f"bytes {offset} to {end} of {self.nbytes} are not whole blocks of {self.block_nbytes} bytes",
                hint="the storage's capabilities.part_nbytes must be a multiple of the block size",
            )
        if self._error is not None:
            raise self._error

    def _hash(self, offset: int, view: memoryview) -> None:
        digests = block_digests(view, self.block_nbytes)
        first = offset // self.block_nbytes
        with self._changed:
            for number in range(len(digests) // DIGEST_NBYTES):
                digest = digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]
                before = self._digests[first + number]
                if before is None:
                    self._digests[first + number] = digest
                elif before != digest and self._error is None:
                    self._error = IntegrityError(
                        f"block {first + number} changed while it was written",
                        hint="the staged image was modified during the save; nothing was committed",
                    )

    def _hashed(self, task: asyncio.Task[None]) -> None:
        self._hashing.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None and self._error is None:
            self._error = IntegrityError(f"hashing failed: {error}")
            self._error.__cause__ = error


def _check_length(view: memoryview, offset: int, nbytes: int) -> None:
    if len(view) != nbytes:
        raise IntegrityError(f"the source gave {len(view)} bytes at {offset}, not {nbytes}")


async def persist(
    tier: Tier,
    attempt: Attempt,
    *,
    rank: int,
    world_size: int,
    shard: Source,
    tensors: Sequence[TensorEntry],
    objects: bytes,
    facts: Mapping[str, Any],
    clock: Clock,
    authority: bool,
    block_nbytes: int = BLOCK_NBYTES,
    reserve_nbytes: int = SAVE_RESERVE_NBYTES,
    limit: Bandwidth | None = None,
    refer: Refers | None = None,
) -> Part:
    """Makes one rank's part of an attempt durable on `tier`.

    May be called again after a failure: the same attempt and rank leave the same bytes.

    Args:
        tier: Where to; the nearest tier in the ordinary case.
        attempt: The attempt at saving a step.
        rank: This process's rank.
        world_size: How many ranks save together.
        shard: The shard's bytes.
        tensors: The shard's tensors, with their extents in the file ``shard_name(rank, world_size)``.
        objects: What is not a tensor, encoded.
        facts: Facts of this rank; rank 0's hold all that a committer needs (metrics, tags, final, created_at).
        clock: Times the write, for the log.
        authority: Whether `tier` is the authority, which needs no receipt.
        block_nbytes: The block size, in bytes.
        reserve_nbytes: Free space to leave, in bytes.
        limit: The tier's bandwidth limit, for bytes that are copied; what a folder takes in by a link passes at once.
        refer: Takes bytes that did not change from earlier checkpoints on the tier; None: the shard is written whole.

    Returns:
        The part record that was written.

    Raises:
        TierFullError: There is no room; nothing was written.
        IntegrityError: The image changed while it was written, or the storage lost bytes; no part record was written.
        ConflictError: Another process wrote a different part for the same attempt and rank.
    """
    name, began = shard_name(rank, world_size), clock.monotonic()

    reach("persist.before-shard")
    written = await _taken_in(tier.storage, attempt.path(name), shard)
    try:
        nbytes = shard.nbytes if written is None else 0
        promise = await check_room_to_save(attempt, tier, nbytes, besides=len(objects), home=authority, reserve_nbytes=reserve_nbytes)
    except TierFullError:
        if written is not None:
            await tier.storage.delete([attempt.path(name)])
        raise
    own = written is None or (isinstance(shard, LocalSource) and shard.memory)
    copied = shard if limit is None or written is not None else ThrottledSource(shard, limit)
    taking = refer if written is None and refer is not None and await refer.expected(name, shard) else None
    pulled = Bare(shard, shard.nbytes) if taking is not None and isinstance(shard, InMemory) else copied
    source = HashingSource(pulled if own else StorageSource(tier.storage, attempt.path(name), shard.nbytes), block_nbytes)
    try:
        if taking is not None:
            await _pull(source, tier.storage.capabilities.part_nbytes)
            written = await _write_referring(tier.storage, attempt.path(name), copied, name, await source.finish(), taking)
        elif written is None:
            written = await tier.storage.write(attempt.path(name), source)
        else:
            await _pull(source, tier.storage.capabilities.part_nbytes)
        digests = await source.finish()
    finally:
        await source.settle()  # the image is recycled after this: no thread may look at it any more
    if written.nbytes != shard.nbytes:
        raise IntegrityError(
            f"{attempt.path(name)} on tier {tier.name!r} has {written.nbytes} bytes after the write, not {shard.nbytes}",
            hint="the storage lost bytes: probe it with `tierstore doctor --probe`",
            tier=tier.name,
            file=name,
        )
    tier.account.written(promise, (written.taken_nbytes if nbytes else 0) + len(objects))
    reach("persist.after-shard")

    files = [FileEntry(name=name, nbytes=shard.nbytes, block_digests=digests)]
    if refer is not None:
        await refer.learned(files[0])
    part = Part(
        run=attempt.run,
        step=attempt.step,
        save_id=attempt.save_id,
        rank=rank,
        world_size=world_size,
        index=build_index(tensors, files, block_nbytes),
        objects=objects,
        facts=dict(facts),
    )
    data = await asyncio.to_thread(encode_part, part)
    reach("persist.before-part")
    await tier.storage.put(attempt.path(part_name(rank)), data)
    reach("persist.after-part")
    if not authority:
        reach("persist.before-receipt")
        await _leave_receipt(tier.storage, attempt, rank=rank, world_size=world_size, digest=digest_of(data))
        reach("persist.after-receipt")
    took_s = clock.monotonic() - began
    log.debug("tier=%s checkpoint=%s rank=%d nbytes=%d took_s=%.3f persisted", tier.name, attempt.folder, rank, shard.nbytes, took_s)
    return part


async def _taken_in(storage: Storage, path: str, shard: Source) -> FileInfo | None:
    """What a folder on the same file system says of a local file that it took in without copying it; None where it must be copied."""
    clone = getattr(storage, "clone", None)
    if not isinstance(shard, LocalSource) or clone is None:
        return None
    if shard.memory and shard.origin.parent != storage.local_path(TMP):
        return None  # another tier's memory is no place for what is to be here
    try:
        taken: FileInfo | None = await clone(path, shard.origin, hard=shard.hard)
    except NotFoundError:
        if not shard.memory:
            raise
        return None  # somebody removed the image's name, the whole folder maybe: its bytes are in memory all the same
    return taken


async def _write_referring(storage: Storage, path: str, shard: Source, name: str, digests: bytes, refer: Refers) -> FileInfo:
    """Writes a shard whose digests are known, but for what the storage has of it already."""
    unchanged = await refer.unchanged(FileEntry(name=name, nbytes=shard.nbytes, block_digests=digests))
    if unchanged and isinstance(storage, WritesPacked):
        return await storage.write_packed(path, shard, PackHints(exact=True, unchanged=unchanged))
    return await storage.write(path, shard)


async def _pull(source: Source, part_nbytes: int) -> None:
    """Reads all of a source, as a storage that writes it would."""
    for offset in range(0, source.nbytes, part_nbytes):
        await source.read(offset, min(part_nbytes, source.nbytes - offset))


async def _leave_receipt(storage: Storage, attempt: Attempt, *, rank: int, world_size: int, digest: str) -> None:
    """Creates the receipt, if absent: "this rank's part of this attempt is complete and synced here"."""
    path = attempt.receipt_path(rank)
    try:
        await storage.create(path, encode_receipt(Receipt(rank=rank, world_size=world_size, part_digest=digest)))
    except ConflictError as error:
        existing = error.context.get("existing")
        other = decode_receipt(bytes(existing) if existing is not None else await storage.read(path))
        if other.part_digest != digest or other.world_size != world_size:
            raise ConflictError(
                f"{path} on {storage.uri} names another part of rank {rank}: two processes save as the same rank of one attempt",
                hint="give each process its own rank, and each save its own save id",
                run=attempt.run,
                step=attempt.step,
                rank=rank,
            ) from error
