"""Hydrate: before a load reads, files that it largely wants come onto a tier of this node, once for all processes of the node.

Each file has a lock on that tier while it is copied (`locks.FileLock`). Who has it copies, as promotion does: proved, and under its
name only when it is whole. The others wait as long as that one gets on, and then all read the near copy. A process that dies leaves its
lock free, and the next one copies; from one that hangs, or that failed, the others turn to the farther tiers. So hydrate never fails a
load: what can't be had near is read where it is.

Then what lies there is made to count (`bring.settle`), in the background: a copy like others, which the catalog shows and the tier's
policy drops. As a tier before the authority never counts for what a checkpoint's life depends on, neither does this one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tierstore.clock import Clock
from tierstore.errors import IntegrityError, RefusedError, TierStoreError, UsageError
from tierstore.format.manifest import Manifest
from tierstore.names import TMP, Attempt
from tierstore.storage.tasks import all_or_none, end_all
from tierstore.tiers.bring import BRING, check_wanted, is_settled, settle
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.copies import quarantining, sources_of
from tierstore.tiers.copying import CopyContext, copy_file
from tierstore.tiers.leased import Leases
from tierstore.tiers.leases import Lease
from tierstore.tiers.locks import FileLock
from tierstore.tiers.progress import NO_PROGRESS, Progress
from tierstore.tiers.reads import AnyWant
from tierstore.tiers.replica import Replica
from tierstore.tiers.space import SAVE_RESERVE_NBYTES
from tierstore.tiers.space_estimate import check_room_beside
from tierstore.tiers.tier import Tier, Tiers, ensure_tier, make_descriptor, wrong_store
from tierstore.tiers.tier import read_store_id as store_id_of
from tierstore.tiers.view import AttemptView, observe

__all__ = ["Hydration", "largely_wanted"]

log = logging.getLogger(__name__)

_POLL_S = 0.05


def largely_wanted(wants: Iterable[AnyWant], file_nbytes: Callable[[str], int]) -> list[str]:
    """The files of which at least half of the bytes are wanted, in the order of their first want; overlapping wants count once."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for want in wants:
        if want.nbytes:
            ranges.setdefault(want.file, []).append((want.offset, want.end))
    return [file for file, listed in ranges.items() if 2 * _covered(listed) >= file_nbytes(file)]


def _covered(ranges: list[tuple[int, int]]) -> int:
    nbytes = reached = 0
    for begin, end in sorted(ranges):
        nbytes += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return nbytes


class Hydration:
    """What one process brings onto its node's tiers for loads. Its coroutines run on the event loop.

    Args:
        tiers: The store's tiers.
        clock: Of patience, and of the copies.
        leases: Makes the leases under which something is copied.
        stall_s: How long another process's copy may make no progress before this one reads from afar, in seconds.
        files_in_flight: How many files are copied at once.
        progress: Told as bytes arrive, also those that another process copies while this one waits for them.
    """

    def __init__(
        self, tiers: Tiers, clock: Clock, leases: Leases, *, stall_s: float, files_in_flight: int, progress: Progress = NO_PROGRESS
    ) -> None:
        self.tiers = tiers
        self.leases = leases
        self.stall_s = stall_s
        self.context = CopyContext.make(
            tiers, clock, budget_nbytes=tiers.scratch_nbytes, files_in_flight=files_in_flight, progress=progress
        )
        self.slots = asyncio.Semaphore(files_in_flight)
        self._warned: set[tuple[str, type]] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self._locks: weakref.WeakSet[FileLock] = weakref.WeakSet()
        _forget_in_children(self)

    def onto(self, tier: Tier) -> Onto:
        """What brings the files of one load onto `tier`: for `Replica.hydrating`.

        Raises:
            UsageError: It is no place for that; `config_models.why_not_hydrated` says why.
        """
        if tier.storage.local_path(TMP) is None:
            raise UsageError(f"nothing can be hydrated onto tier {tier.name!r}: it is no path", hint="name a tier that is a local folder")
        return Onto(self, tier)

    async def settled(self, timeout_s: float) -> None:
        """Waits until what was brought counts, but no longer than `timeout_s` seconds; it goes on in the background."""
        if self._settling:
            await asyncio.wait(set(self._settling), timeout=timeout_s)

    async def close(self, timeout_s: float) -> None:
        """As `settled`; then gives up what takes longer. What lies on a tier by then counts after the next load that wants it."""
        await self.settled(timeout_s)
        await end_all(list(self._settling))

    # ---- for `Onto`

    def lock(self, tier: Tier, attempt: Attempt, name: str) -> FileLock:
        """The lock of one file of one attempt, on the tier that it is copied to."""
        path = lock_path(tier, attempt, name)
        lock = FileLock(path)
        self._locks.add(lock)
        return lock

    def forget_locks(self) -> None:
        for lock in list(self._locks):
            lock.forget()

    def warn(self, tier: Tier, info: CheckpointInfo, error: TierStoreError) -> None:
        """Says why something is read from afar; once for each kind of reason."""
        key = (tier.name, type(error))
        level = logging.INFO if key in self._warned else logging.WARNING
        self._warned.add(key)
        log.log(level, "tier=%s run=%s step=%d is not hydrated, and read from afar: %s", tier.name, info.run, info.step, error.message)

    def settle_later(self, tier: Tier, info: CheckpointInfo, manifest: Manifest, lease: Lease | None) -> None:
        """Makes what lies on the tier count, in the background; `lease` ends with it."""
        task = asyncio.ensure_future(self._settle(tier, info, manifest, lease))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, tier: Tier, info: CheckpointInfo, manifest: Manifest, lease: Lease | None) -> None:
        shards = {file.name: file.nbytes for file in manifest.files if file.kind == "shard"}
        try:
            if await is_settled(tier, info.attempt, shards):
                return
            if lease is None:
                lease = self.leases.hold(info, kind=BRING)
                lease.begin()
            await lease.settled()
            if await settle(self.context, info.attempt, tier, manifest, wait_s=None):
                log.info("tier=%s checkpoint=%s what was hydrated counts now", tier.name, info.attempt.folder)
        except TierStoreError as error:
            log.warning("tier=%s checkpoint=%s what was hydrated does not count yet: %s", tier.name, info.attempt.folder, error.message)
        except Exception:  # boundary: a fault in the program must not end what the load is for
            log.exception("tier=%s checkpoint=%s what was hydrated does not count", tier.name, info.attempt.folder)
        finally:
            if lease is not None:
                lease.let_go()


def lock_path(tier: Tier, attempt: Attempt, name: str) -> Path:
    """Where the lock of a file lies while it is brought onto a tier."""
    digest = hashlib.sha256(f"{attempt.run}\n{attempt.folder}\n{name}".encode()).hexdigest()[:24]
    path = tier.storage.local_path(f"{TMP}/hydrate-{digest}.lock")
    assert path is not None
    return path


class Onto:
    """One load's hydrate; made by `Hydration.onto`. What it has tried for a file it does not try again."""

    def __init__(self, hydration: Hydration, tier: Tier) -> None:
        self.tier = tier
        self._hydration = hydration
        self._tried: set[str] = set()

    async def ahead(self, replica: Replica, wants: Iterable[AnyWant]) -> None:
        """Before `wants` are read: brings the files that they are at least half of nearer, where no tier of this node has them.

        Raises:
            CancelledError: And nothing else.
        """
        near, _ = replica.near_files()
        wanted = await asyncio.to_thread(largely_wanted, wants, replica.index.file_nbytes)  # there may be very many
        names = [name for name in wanted if name not in self._tried and name not in near]
        if not names:
            return
        self._tried.update(names)
        work = _Copying(self._hydration, self.tier, replica, {name: replica.index.file_nbytes(name) for name in names})
        landed: frozenset[str] = frozenset()
        try:
            landed = await work.run()
        except TierStoreError as error:
            self._hydration.warn(self.tier, replica.info, error)
        except Exception:  # boundary: a fault in the program must not end the load
            log.exception("tier=%s checkpoint=%s is not hydrated", self.tier.name, replica.info.attempt.folder)
        finally:
            if landed:
                replica.comes_nearer(self.tier, landed)
            if landed and work.responsible:
                self._hydration.settle_later(self.tier, replica.info, replica.manifest, work.lease)
            elif work.lease is not None:
                work.lease.let_go()


class _Copying:
    """The files of one load that are to come onto the tier.

    Attributes:
        lease: Under which they are copied, once something is; who uses this ends it.
        responsible: This process copied some, or found some that nobody may have made count.
    """

    def __init__(self, hydration: Hydration, tier: Tier, replica: Replica, sizes: Mapping[str, int]) -> None:
        self.lease: Lease | None = None
        self.responsible = False
        self._hydration = hydration
        self._tier = tier
        self._replica = replica
        self._info = replica.info
        self._sizes = sizes
        self._missing: set[str] = set()
        self._own: set[str] = set()
        """Files whose lock this process has, or had."""
        self._stopped = False
        """Something is wrong with the tier, or with what lies behind it: no further copy is begun."""
        self._preparing = asyncio.Lock()
        self._view: AttemptView | None = None

    async def run(self) -> frozenset[str]:
        """Returns the files that lie on the tier, whole.

        Raises:
            TierStoreError: Why none can be brought there.
        """
        if self._info.authority_lost:
            raise RefusedError("the authority has lost its log", hint="`tierstore recover` rebuilds it")
        await ensure_tier(self._hydration.tiers, self._tier)
        there = await self._there()
        landed = {name for name, nbytes in self._sizes.items() if there.get(name) == nbytes}
        self.responsible = bool(landed)
        self._tidy(landed)
        self._missing = self._sizes.keys() - landed
        missing = [name for name in self._sizes if name in self._missing]
        found = await all_or_none([self._one(name) for name in missing])
        return frozenset(landed) | {name for name, ok in zip(missing, found, strict=True) if ok}

    def _tidy(self, landed: Iterable[str]) -> None:
        """Removes the locks of processes that died between putting a file in its place and going on."""
        for name in landed:
            lock = self._hydration.lock(self._tier, self._info.attempt, name)
            if lock.path.exists() and lock.take():
                lock.release()

    async def _there(self) -> dict[str, int]:
        listing = await self._tier.storage.children(self._info.attempt.folder)
        return {info.path.rpartition("/")[2]: info.nbytes for info in listing.files}

    async def _one(self, name: str) -> bool:
        """Whether the file lies on the tier, brought there by this process or by another one."""
        lock = self._hydration.lock(self._tier, self._info.attempt, name)
        try:
            async with self._hydration.slots:
                if lock.take():
                    return await self._lead(lock, name)
            return await self._follow(lock, name)
        except TierStoreError as error:
            self._give_up(error)
            return False
        finally:
            lock.release()

    async def _follow(self, lock: FileLock, name: str) -> bool:
        """Waits for the process that copies the file, as long as it gets on."""
        clock, folder = self._hydration.context.clock, self._info.attempt.folder
        holder, told, since = lock.told.split(" ")[0], lock.told, clock.monotonic()
        log.info("tier=%s checkpoint=%s file=%s waits for process %s, which hydrates it", self._tier.name, folder, name, holder)
        while not lock.take():
            if lock.told != told:
                told, since = lock.told, clock.monotonic()
                self._hydration.context.progress(self._tier.name, self._info.attempt, name, _done(told), self._sizes[name])
            elif clock.monotonic() - since >= self._hydration.stall_s:
                log.info(
                    "tier=%s checkpoint=%s file=%s is read from afar: process %s has not got on with it for %g s",
                    self._tier.name,
                    folder,
                    name,
                    holder,
                    self._hydration.stall_s,
                )
                self._tell_end(name, None)
                return False
            await asyncio.sleep(_POLL_S)
        there = (await self._there()).get(name) == self._sizes[name]
        self._tell_end(name, self._sizes[name] if there else None)
        if there:
            return True
        if lock.told:  # its file was left behind: who is done, or fails, takes it away
            log.info("tier=%s checkpoint=%s file=%s process %s died: this one copies it", self._tier.name, folder, name, holder)
            async with self._hydration.slots:
                return await self._lead(lock, name)
        log.info("tier=%s checkpoint=%s file=%s is read from afar: process %s gave it up", self._tier.name, folder, name, holder)
        return False

    async def _lead(self, lock: FileLock, name: str) -> bool:
        """Copies the file; its lock is this process's."""
        nbytes, attempt, clock = self._sizes[name], self._info.attempt, self._hydration.context.clock
        self._own.add(name)

        def tell(tier: str, attempt: Attempt, file: str, nbytes_done: int, nbytes: int) -> None:
            lock.tell(str(nbytes_done))
            self._hydration.context.progress(tier, attempt, file, nbytes_done, nbytes)

        began = clock.monotonic()
        try:
            if (await self._there()).get(name) == nbytes:
                self.responsible = True
                return True
            if self._stopped:
                return False
            view = await self._prepared()
            promise = await check_room_beside(attempt, self._tier, nbytes, reserve_nbytes=SAVE_RESERVE_NBYTES)
            entry = await self._replica.file_entry(name)
            context = replace(self._hydration.context, progress=tell)
            sources = sources_of(context, view, self._tier, name)
            block_nbytes = self._replica.manifest.block_nbytes
            log.info("tier=%s checkpoint=%s file=%s nbytes=%d is hydrated", self._tier.name, attempt.folder, name, nbytes)
            written = await copy_file(context, attempt, self._tier, sources, entry, block_nbytes, quarantining(context, view))
            self._tier.account.written(promise, written.taken_nbytes)
        except TierStoreError as error:
            self._tell_end(name, None)
            self._give_up(error)
            return False
        self.responsible = True
        seconds = clock.monotonic() - began
        log.info("tier=%s checkpoint=%s file=%s nbytes=%d seconds=%.3f hydrated", self._tier.name, attempt.folder, name, nbytes, seconds)
        return True

    async def _prepared(self) -> AttemptView:
        """Before the first copy: the tier is the store's, a lease keeps collectors off, and the checkpoint is one that may come here."""
        async with self._preparing:
            if self._view is None:
                tiers, attempt = self._hydration.tiers, self._info.attempt
                tiers.check_writable()
                await _join(tiers, self._tier)
                if self.lease is None:
                    self.lease = self._hydration.leases.hold(self._info, kind=BRING)
                    self.lease.begin()
                await self.lease.settled()
                view = await observe(tiers, attempt)
                check_wanted(view, self._tier)
                # What others are at has its room already: their files are there, or on their way and as large as they will be.
                locks = {name: lock_path(self._tier, attempt, name) for name in self._missing}
                wanted = [name for name in self._missing if name in self._own or not locks[name].exists()]
                nbytes = sum(self._sizes[name] for name in wanted)
                promise = await check_room_beside(attempt, self._tier, nbytes, reserve_nbytes=SAVE_RESERVE_NBYTES)
                self._tier.account.written(promise, 0)  # each file asks again
                self._view = view
            return self._view

    def _give_up(self, error: TierStoreError) -> None:
        if not isinstance(error, IntegrityError):  # else it is about that file alone
            self._stopped = True
        self._hydration.warn(self._tier, self._info, error)

    def _tell_end(self, name: str, nbytes: int | None) -> None:
        """For bars and status: it is there, or (None) no longer on its way."""
        self._hydration.context.progress(self._tier.name, self._info.attempt, name, nbytes or 0, nbytes or 0)


async def _join(tiers: Tiers, tier: Tier) -> None:
    """Makes the tier part of the store, where it is not yet: a reader's session makes no descriptors.

    Raises:
        ConfigError: It belongs to another store.
        StorageError: It can't be written.
    """
    found = await store_id_of(tier) or await make_descriptor(tier, tiers.store_id)
    if found != tiers.store_id:
        raise wrong_store(tier, found, tiers.store_id)


def _done(told: str) -> int:
    """How many bytes a holder has copied, by what it tells."""
    words = told.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def _forget_in_children(hydration: Hydration) -> None:
    reference = weakref.ref(hydration)

    def forget() -> None:
        alive = reference()
        if alive is not None:
            alive.forget_locks()

    os.register_at_fork(after_in_child=forget)
