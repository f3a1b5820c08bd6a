"""The part of the worker that lives on the event loop: it writes images, feeds the lanes, and tells tickets what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from tierstore.clock import Clock
from tierstore.config_retention import RetentionConfig
from tierstore.errors import RefusedError, SaveError, TierFullError, TierStoreError, without_frames
from tierstore.names import Attempt, shard_name
from tierstore.storage.tasks import end_all
from tierstore.tiers.catalog import RecordCache, scan
from tierstore.tiers.commit import condemned_error
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.direct import Refers
from tierstore.tiers.gc.collect import tend
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.jobs import PendingCopy, SaveJob, WorkerOptions
from tierstore.tiers.lanes import Entry, Lane
from tierstore.tiers.leases import LeaseWatch
from tierstore.tiers.leftovers import sweep_leftovers
from tierstore.tiers.locks import RunLock
from tierstore.tiers.log import decide_fate
from tierstore.tiers.persist import persist
from tierstore.tiers.progress import telling
from tierstore.tiers.promote import pending
from tierstore.tiers.resume_source import ResumeSource
from tierstore.tiers.retention import Reason
from tierstore.tiers.retry import Backoff, Verdict, judge
from tierstore.tiers.saves import Save, SaveQueue, closed_before_written, save_error
from tierstore.tiers.tending import Tending
from tierstore.tiers.tier import Tier, Tiers, ensure_tier, still_there
from tierstore.tiers.together import happens, only_ours_to_cancel
from tierstore.tiers.view import AttemptView, further, staging

__all__ = ["Engine"]


log = logging.getLogger(__name__)


@dataclass(slots=True)
class Engine:
    """The part of the worker that lives on the event loop."""

    tiers: Tiers
    run: str
    clock: Clock
    options: WorkerOptions
    queue: SaveQueue
    lock: RunLock
    context: CopyContext
    policy: RetentionConfig | None = None
    owner: bool = True
    """Whether retention on the tiers that all processes see is this process's to carry out."""
    source: ResumeSource = field(default_factory=ResumeSource)
    lanes: dict[str, Lane] = field(default_factory=dict)
    saves: dict[Attempt, Save] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    cache: RecordCache = field(default_factory=RecordCache)
    trouble: dict[str, str] = field(default_factory=dict)
    """Tier → the last error of writing an image there, while it lasts."""
    scanned: bool = False
    scan_error: TierStoreError | None = None
    """Why the last look for what other processes left failed; None if it did not."""
    tending: Tending = field(init=False)

    def __post_init__(self) -> None:
        housekeeping = Housekeeping(
            tiers=self.tiers,
            run=self.run,
            policy=self.policy,
            clock=self.clock,
            cache=self.cache,
            leases=LeaseWatch(self.clock),
            protected=self.protected,
            shared=self.owner,
            busy=self.queue.writing,
        )
        self.tending = Tending(housekeeping=housekeeping, tend=tend, lock=self.lock, every_s=self.options.housekeep_s)

    # ---- tasks

    async def main(self, started: Callable[[], None]) -> None:
        for tier in self.tiers:
            self.lanes[tier.name] = Lane(context=self.context, tier=tier, options=self.options, lock=self.lock, reports=self)
        tasks = [asyncio.ensure_future(lane.run()) for lane in self.lanes.values()]
        tasks += [asyncio.ensure_future(self.persist_all()), asyncio.ensure_future(self.rescan_when_idle())]
        stopping, tidying = asyncio.ensure_future(self.stop.wait()), asyncio.ensure_future(self.tending.run())
        started()
        try:
            await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            await end_all([tidying])
            ended = await end_all(tasks)
        for fault in ended:
            if isinstance(fault, Exception):
                self.died(fault)

    def died(self, fault: Exception) -> None:
        """A task ended by a fault in the program: nobody may go on waiting for it."""
        log.error("run=%s the background work ended unexpectedly", self.run, exc_info=fault)
        failure = SaveError(f"the background work ended unexpectedly: {type(fault).__name__}: {fault}", hint="report this fault")
        failure.__cause__ = fault
        for save in (*self.queue.waiting(), *self.saves.values()):
            save.ticket.fail(failure)
        self.queue.surface(failure)
        self.queue.close()

    async def persist_all(self) -> None:
        """Writes images, oldest first."""
        while True:
            await self.condemn_skipped()
            save = self.queue.take()
            if save is None:
                self.wake.clear()
                if self.queue.waiting() or self.queue.has_skipped:
                    continue  # it came in between
                await self.wake.wait()
                continue
            try:
                await self.persist_one(save)
            except asyncio.CancelledError:
                save.ticket.fail(closed_before_written())
                raise
            except Exception as error:  # boundary: a fault in the program fails this save, not the worker
                log.exception("checkpoint=%s unexpected failure", save.job.attempt.folder)
                failure = SaveError(f"unexpected {type(error).__name__} while saving: {error}", hint="report this fault")
                failure.__cause__ = error
                self.give_up(save, "writing its image", failure)
                await self.condemn(save.job.attempt, save.job.rank, save.job.world_size, failure)
            finally:
                self.queue.finish(save)
                self.tending.quiet()

    async def persist_one(self, save: Save) -> None:
        """Writes one image to the nearest tier that takes it; tries for as long as the process lives."""
        backoff = Backoff(base_s=self.options.retry_first_s, cap_s=self.options.retry_most_s)
        while not save.dropped:
            await self.condemn_skipped()
            refusals: dict[str, TierStoreError] = {}
            for tier in (*staging(self.tiers), self.tiers.authority):
                try:
                    await only_ours_to_cancel(self.persist_to(save, tier))
                except TierStoreError as error:
                    if judge(error) is Verdict.FAIL:
                        self.give_up(save, f"writing to tier {tier.name!r}", error)
                        await self.condemn(save.job.attempt, save.job.rank, save.job.world_size, error)
                        return
                    self.cannot_write(save, tier, error)
                    refusals[tier.name] = error
                else:
                    self.persisted(save, tier)
                    for name, refusal in refusals.items():
                        save.ticket.fail(refusal, levels=[name])  # it is past that tier: who waits for it would wait for ever
                    return
            save.refused = "; ".join(f"{name}: {e.message}" for name, e in refusals.items())
            save.reason = f"failed, tried again: no tier takes it ({save.refused})"
            self.queue.yield_turn(save)
            self.tending.quiet()
            await happens(self.wake, backoff.next_s())
            self.wake.clear()
            if not self.queue.resume_turn(save):
                return

    async def condemn_skipped(self) -> None:
        for job, error in self.queue.take_skipped():
            await self.condemn(job.attempt, job.rank, job.world_size, error)

    async def condemn(self, attempt: Attempt, rank: int, world_size: int, error: TierStoreError) -> None:
        """This rank's part will never come: the ranks that wait for it hear so at once, not when ``commit_timeout`` is over."""
        if world_size == 1:
            return
        reason = f"rank {rank} of {world_size} gave its part up: {type(error).__name__}: {error.message}"
        facts = {"reason": reason, "missing": [rank], "world_size": world_size}
        try:
            await only_ours_to_cancel(decide_fate(self.tiers.authority.storage, attempt, "condemned", facts, self.clock))
        except TierStoreError as failure:  # then the committer condemns it, when its patience is over
            log.warning("checkpoint=%s can't be condemned: %s", attempt.folder, failure.message)

    async def persist_to(self, save: Save, tier: Tier) -> None:
        job = save.job
        await ensure_tier(self.tiers, tier)
        await still_there(self.tiers, tier)
        save.reason = f"being written to {tier.name}" + (f", tried again: no tier took it ({save.refused})" if save.refused else "")
        with telling(self.context.progress, tier.name, job.attempt, shard_name(job.rank, job.world_size), job.shard) as told:
            await persist(
                tier,
                job.attempt,
                rank=job.rank,
                world_size=job.world_size,
                shard=told,
                tensors=job.tensors,
                objects=job.objects,
                facts=job.facts,
                clock=self.clock,
                authority=self.tiers.is_authority(tier),
                block_nbytes=self.options.block_nbytes,
                limit=self.context.limits.get(tier.name),
                refer=self.refers(job, tier),
            )

    def refers(self, job: SaveJob, tier: Tier) -> Refers | None:
        """How an image may refer to what its tier has; None where none does."""
        if not tier.unchanged_once:
            return None
        whole = job.world_size == 1
        return Refers(context=self.context, attempt=job.attempt, tier=tier, block_nbytes=self.options.block_nbytes, whole=whole)

    async def rescan_when_idle(self) -> None:
        """Looks for what other processes left: at the start, and every now and then while there is nothing else to do."""
        try:
            await only_ours_to_cancel(sweep_leftovers(self.tiers))
        except TierStoreError as error:
            log.warning("run=%s leftovers of dead processes can't be swept: %s", self.run, error.message)
        while True:
            if not self.scanned or all(lane.idle for lane in self.lanes.values()):
                await self.rescan()
            await asyncio.sleep(self.options.rescan_s if self.scanned else min(self.options.rescan_s, self.options.retry_most_s))

    async def rescan(self) -> None:
        try:
            catalog = await only_ours_to_cancel(scan(self.tiers, self.run, self.cache))
        except TierStoreError as error:
            if self.scan_error is None or self.scan_error.message != error.message:
                log.warning("run=%s can't look for pending work: %s", self.run, error.message)
            self.scan_error = error
            return
        # Without the authority the other tiers still tell of themselves, but not what is committed: that is no look at everything.
        self.scan_error = catalog.unreachable.get(self.tiers.authority.name)
        self.scanned = self.scan_error is None
        if self.scanned:
            self.tending.seen(catalog)
        for copy in pending(catalog, self.tiers):
            self.lanes[copy.tier].add(Entry(attempt=copy.attempt, own=copy.attempt in self.saves, nbytes=copy.nbytes))

    # ---- events of a save

    def persisted(self, save: Save, tier: Tier) -> None:
        job = save.job
        if self.trouble.pop(tier.name, None):
            log.warning("tier=%s takes saves again", tier.name)
        self.saves[job.attempt] = save
        save.ticket.reach("staged")
        if not self.tiers.is_authority(tier):
            save.ticket.reach(tier.name)
        # Every rank's worker can commit; rank 0 is the one to give up first on ranks that never report.
        patience = self.options.commit_timeout_s * (1 if job.rank == 0 else 2)
        for lane in self.lanes.values():
            lane.add(
                Entry(
                    attempt=job.attempt,
                    own=True,
                    nbytes=job.nbytes,
                    world_size=job.world_size,
                    give_up_at=self.clock.monotonic() + patience if self.tiers.is_authority(lane.tier) else None,
                )
            )

    def cannot_write(self, save: Save, tier: Tier, error: TierStoreError) -> None:
        without_frames(error)  # who keeps the ticket, or the error, is not to keep the image
        text = f"{type(error).__name__}: {error.message}"
        if tier.name not in self.trouble:
            log.warning("tier=%s checkpoint=%s can't take the save: %s", tier.name, save.job.attempt.folder, error.message)
        self.trouble[tier.name] = text
        self.full(error)
        key = f"{tier.name}:{type(error).__name__}"
        if key not in save.reported:
            save.reported += f" {key}"
            if judge(error) is Verdict.REPORT:  # first, as in `give_up`
                self.queue.surface(save_error(save, f"writing to tier {tier.name!r} (it is tried again)", error))
            save.ticket.report(tier.name, error)

    def full(self, error: TierStoreError) -> None:
        """A tier that is full may get room."""
        if isinstance(error, TierFullError):
            self.tending.nudge()

    def give_up(self, save: Save, where: str, error: TierStoreError) -> None:
        self.queue.surface(save_error(save, where, error))  # first: who waits for the ticket may ask for errors next
        save.ticket.fail(error)

    # ---- LaneReports

    def seen(self, attempt: Attempt, tier: Tier, view: AttemptView) -> None:
        if view.log.committed and self.tiers.is_authority(tier):
            self.feed_lanes(attempt)
        if view.log.committed and attempt not in self.lanes[tier.name].attempts:
            self.tending.nudge()
        save = self.saves.get(attempt)
        if save is None:
            return
        ticket, rank = save.ticket, save.job.rank
        save.hidden = save.hidden or view.log.hidden
        if view.log.condemned and view.log.fate is not None:
            self.give_up(save, "committing", condemned_error(view.log.fate, attempt))
            self.saves.pop(attempt, None)
            return
        for node in staging(self.tiers):
            if rank in view.ranks(node.name):
                ticket.reach(node.name)
        if view.log.committed:
            ticket.reach("committed", self.tiers.authority.name)
            for far in further(self.tiers):
                if far.name in view.log.replicated:
                    ticket.reach(far.name)
            if ticket.done(self.tiers.durable_at.name) and self.tiers.durable_at.name not in view.log.quantised:
                ticket.reach("durable")
        if not any(attempt in lane.attempts for lane in self.lanes.values()):
            self.saves.pop(attempt, None)  # nothing is left to do
            if save.hidden:  # nor will be, even if this lane looked before it expired: who still waits for a copy would wait for ever
                reason = "the checkpoint expired before it got there"
                ticket.fail(RefusedError(reason, hint="`tierstore show` prints its log", run=attempt.run, step=attempt.step))

    def feed_lanes(self, attempt: Attempt) -> None:
        """The commit is what the other lanes wait for: they look at once."""
        for lane in self.lanes.values():
            if not self.tiers.is_authority(lane.tier):
                lane.add(Entry(attempt=attempt, own=attempt in self.saves))
                lane.nudge(attempt)

    def retrying(self, attempt: Attempt, tier: Tier, error: TierStoreError, *, needs_help: bool) -> None:
        self.full(error)
        save = self.saves.get(attempt)
        if save is None:
            return
        if needs_help:  # first, as in `give_up`
            self.queue.surface(save_error(save, f"copying to tier {tier.name!r} (it is tried again)", error))
        save.ticket.report(tier.name, error)

    def failed(self, attempt: Attempt, tier: Tier, error: TierStoreError) -> None:
        save = self.saves.get(attempt)
        if save is None:
            log.error("tier=%s checkpoint=%s given up: %s", tier.name, attempt.folder, error.message)
            return
        levels = None if self.tiers.is_authority(tier) else [tier.name, *(["durable"] if tier.name == self.tiers.durable_at.name else [])]
        self.queue.surface(save_error(save, f"copying to tier {tier.name!r}", error))
        save.ticket.fail(error, levels=levels)
        if levels is None:
            self.saves.pop(attempt, None)
            for lane in self.lanes.values():  # what waits there for the commit would wait for ever, and `close` for that
                lane.disown(attempt)

    # ---- questions

    def protected(self) -> dict[Attempt, Reason]:
        """What must not go under this process's hands: what it saves and copies just now, and what it would go on from."""
        saving = [s.job.attempt for s in (*self.queue.waiting(), *self.saves.values()) if not s.ticket.done("committed")]
        found = dict.fromkeys(saving, Reason(kind="in-flight", text="it is being saved"))
        for lane in self.lanes.values():
            found |= dict.fromkeys(lane.working, Reason(kind="in-flight", text=f"it is being copied to {lane.tier.name}"))
        return found | self.source.protected()

    def pending(self) -> list[PendingCopy]:
        failing_s = self.queue.failing_s()
        found = [
            PendingCopy(attempt=s.job.attempt, tier=self.tiers.nearest.name, nbytes=s.job.nbytes, reason=s.reason, failing_s=failing_s)
            for s in self.queue.waiting()
        ]
        authority = self.lanes.get(self.tiers.authority.name)
        commits_failing_s = authority.failing_s if authority is not None else 0.0
        for lane in self.lanes.values():
            found += lane.pending(commits_failing_s)
        return found

    def kick(self) -> None:
        self.wake.set()
        for lane in self.lanes.values():
            lane.kick()
