"""Collect frees what the logs let go, and continues what an earlier collection, or another collector, left half done (PROTOCOLS.md §6).

Nothing here remembers anything: each run looks at logs and listings and finds again what is to be done. So it can be killed at any
instant, and two that run at once do the same work twice at worst.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tierstore.clock import when_text
from tierstore.errors import RefusedError, TierStoreError
from tierstore.names import Attempt
from tierstore.tiers.bring import BRING
from tierstore.tiers.checkpoint import CheckpointInfo, Reduced
from tierstore.tiers.gc.brakes import check_ground, newest_of
from tierstore.tiers.gc.deleting import Emptying, Found, Remover, find
from tierstore.tiers.gc.evict import continue_eviction, decide_eviction, finish_eviction, preview_eviction, spared
from tierstore.tiers.gc.housekeeping import Housekeeping, Situation, as_due, look, plan_of
from tierstore.tiers.gc.log_round import LogRound, copy_logs
from tierstore.tiers.gc.orphans import condemn, confirm_condemned, orphan_job, why_it_stays
from tierstore.tiers.gc.prune import carry_out
from tierstore.tiers.gc.referring import living_referrers
from tierstore.tiers.gc.reports import CollectReport, Failed, Freed, Tended
from tierstore.tiers.gc.sweep import (
    Gone,
    decide_again,
    decide_sweep,
    held_by_readers,
    keep_log,
    names_to_record,
    none_to_go_back_to,
    read_gone,
    readers_of,
    sweep_job,
    to_trim,
)
from tierstore.tiers.gc.tally import Tally
from tierstore.tiers.leftovers import sweep_leftovers
from tierstore.tiers.log import gone_in, read_log
from tierstore.tiers.log_facts import fold
from tierstore.tiers.referrers import kept_text
from tierstore.tiers.retention import PlanEntry, Reason
from tierstore.tiers.tier import Tier
from tierstore.tiers.together import together
from tierstore.tiers.view import staging

__all__ = ["CollectReport", "Tended", "collect", "tend"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_AT_A_TIME = 32
"""Attempts that are decided, written down and deleted together: their files are in memory."""
_AT_ONCE = 8
_LOGS_IN_A_ROUND = 1000
"""Replicas whose copies of the log one round in the background brings up to date: the next round is for what became due meanwhile."""


async def collect(h: Housekeeping, *, now: bool = False, wait_s: float = 0.0, dry_run: bool = False) -> CollectReport:
    """Frees what is due: finishes what was begun, sweeps what expired, drops copies, condemns orphans, removes leftovers.

    Then the copies of the log beside the replicas are brought up to date, so that a lost authority takes no decision with it.

    Args:
        h: Who collects, and on which tiers.
        now: Do not wait until an undelete window has passed (what protects a checkpoint still does).
        wait_s: Seconds to wait for readers of what is due, or was just swept; what else can go goes first. What is still read then is
            left for the next run.
        dry_run: Only say what would go.

    Raises:
        RefusedError: The run is not in order (`brakes.check_ground`); nothing was changed.
        StorageError: No tier can be reached, or the authority's leases or audit files can't be listed; the next run continues.
    """
    end = h.clock.monotonic() + wait_s
    situation = await look(h)
    await check_ground(h, situation)
    report = await _collect(h, situation, now=now, wait_s=wait_s, dry_run=dry_run)
    while report.held and not dry_run and (left_s := end - h.clock.monotonic()) > 0:
        if await readers_of(h, report.held, left_s):
            break
        situation = await look(h)  # that took its time: everything is asked again
        await check_ground(h, situation)
        later = await _collect(h, situation, now=now, wait_s=max(0.0, end - h.clock.monotonic()))
        report = report.then(later)
    return report


async def tend(h: Housekeeping) -> Tended:
    """One round of housekeeping in the background: decides (where `h.shared` and there is a policy), then collects.

    Raises:
        RefusedError: The run is not in order (`brakes.check_ground`); nothing was changed.
        StorageError, IntegrityError: The authority failed; the next round continues.
    """
    situation = await look(h)
    await check_ground(h, situation)
    pruned, refused = None, ""
    if h.shared and h.policy is not None:
        try:
            pruned = await carry_out(h, situation)
        except RefusedError as error:  # too much at once: a person has to say that it is meant
            refused = error.message
        else:
            if pruned.expired or pruned.revived or pruned.passed_over:
                situation = await look(h)
                await check_ground(h, situation)
    return Tended(collected=await _collect(h, situation, most_logs=_LOGS_IN_A_ROUND), pruned=pruned, refused=refused)


async def _collect(
    h: Housekeeping,
    situation: Situation,
    *,
    now: bool = False,
    wait_s: float = 0.0,
    dry_run: bool = False,
    most_logs: int | None = None,
) -> CollectReport:
    work, held = _Collecting(h, situation, wait_s=wait_s, dry_run=dry_run), frozenset[Attempt]()
    await work.remove_dead_leases()
    await work.finish_swept()
    await work.finish_condemned()
    await work.finish_reduced()
    await work.finish_evictions()
    if h.policy is not None:
        seen = as_due(situation) if now else situation
        entries = (await asyncio.to_thread(plan_of, h, seen)).entries
        if h.shared:
            held = await asyncio.to_thread(held_by_readers, h, seen) - newest_of(seen.catalog)
            await work.sweep(entries)
        await work.drop(entries)
        await work.condemn_orphans()
        work.waiting += [(e.attempt, _why_waiting(e, h)) for e in entries if e.action in ("expired", "revive")]
    leftovers = await work.leftovers()
    logs = await work.copy_logs(most_logs)
    return CollectReport(
        freed=tuple(work.freed),
        waiting=tuple(work.waiting),
        failed=tuple(work.failed),
        held=held,
        leftovers=leftovers,
        foreign=tuple(work.foreign),
        log_copies=logs.records,
        log_copies_left=logs.left,
        unseen={tier: error.message for tier, error in situation.catalog.unreachable.items()},
        dry_run=dry_run,
    )


def _why_waiting(entry: PlanEntry, h: Housekeeping) -> str:
    if entry.action == "revive":
        return "expired, but the policy keeps it now: `tierstore prune` brings it back"
    until, end = "expired", entry.not_before
    if end is not None and (over_s := (h.clock.now() - end).total_seconds()) < h.gc.max_clock_skew_s:
        until = f"can be taken back until {when_text(end, h.clock.now())}" + (
            "" if over_s < 0 else ", and while clocks may differ (max_clock_skew)"
        )
    kept = [reason.text for reason in entry.reasons if reason.kind not in ("no-rule", "superseded")]
    return "; ".join([until, *kept])


class _Collecting:
    """One collection: what it did so far."""

    def __init__(self, h: Housekeeping, situation: Situation, *, wait_s: float, dry_run: bool) -> None:
        self._tally = Tally(h.tiers.authority.name)
        self.freed: list[Freed] = []
        self.waiting, self.failed, self._try = self._tally.waiting, self._tally.failed, self._tally.tried
        self.foreign: list[str] = []
        self._h = h
        self._seen = situation
        self._wait_s = wait_s
        self._dry_run = dry_run
        self._remover = Remover(h, situation.catalog.known)
        self._own = tuple(tier for tier in h.own if tier.name not in situation.catalog.unreachable)
        self._own_names = {tier.name for tier in self._own}
        self._nodes = {tier.name for tier in staging(h.tiers)}

    # ---- what was decided before

    async def remove_dead_leases(self) -> None:
        """Removes the leases of dead readers; one that can't be removed holds nothing up."""
        if self._dry_run or not self._h.shared:
            return
        try:
            await self._h.leases.remove_dead(self._h.tiers, self._h.run)
        except TierStoreError as error:
            self.failed.append(Failed(attempt=None, tier=self._h.tiers.authority.name, error=error))

    async def finish_swept(self) -> None:
        """Removes what is left of checkpoints that were swept: an interrupted sweep's rest, what a late writer put there, old records."""
        catalog = self._seen.catalog
        left = [attempt for attempt in catalog.swept if attempt not in catalog.reduced and self._left_on(attempt)]
        for some in _parts(left):
            found = await together(lambda a: self._try(a, "", read_gone(self._h, a)), some, at_once=_AT_ONCE)
            await self._empty_swept({a: gone for a, gone in zip(some, found, strict=True) if gone is not None})

    async def finish_reduced(self) -> None:
        """Looks again at those of which shards stay for others; when nobody refers to them any more they go, too."""
        found = [reduced for reduced in self._seen.catalog.reduced.values() if not reduced.authority_lost]
        decide = self._h.shared and not self._dry_run

        async def again(reduced: Reduced) -> Gone | None:
            return await self._try(reduced.attempt, "", decide_again(self._h, self._seen, reduced, decide=decide))

        for some in _parts([reduced for reduced in found if self._h.shared or self._left_on(reduced.attempt)]):
            ends = await together(again, some, at_once=_AT_ONCE)
            for reduced, gone in zip(some, ends, strict=True):
                self._note_kept(reduced, gone)
            await self._empty_swept({reduced.attempt: gone for reduced, gone in zip(some, ends, strict=True) if gone is not None})

    async def finish_condemned(self) -> None:
        """Removes what is left of condemned attempts."""
        left = [c.attempt for c in self._seen.catalog.condemned if self._left_on(c.attempt)]
        await self._empty_condemned([attempt for attempt in left if not self._is_protected(attempt)])

    async def finish_evictions(self) -> None:
        """Removes what is left on tiers that have dropped, or are dropping, their copy."""
        own = {tier.name: tier for tier in self._own}
        left = [
            (info.attempt, own[name])
            for info in self._seen.catalog.checkpoints
            for name in _unfinished(info)
            if name in own and not self._is_brought(info.attempt)
        ]
        for some in _parts(left):
            found = await together(lambda item: self._continued(*item), some, at_once=_AT_ONCE)
            await self._evict([job for job in found if job is not None])

    async def _continued(self, attempt: Attempt, tier: Tier) -> Emptying | None:
        """An eviction that may go on: by the log as it is now, or, on a node's tier, by its marker and the checks for a new one."""
        if tier.name in self._nodes:
            return await self._decide_drop(attempt, tier, "an eviction that was interrupted")
        records = await self._try(attempt, "", read_log(self._h.tiers.authority.storage, attempt))
        return await self._try(attempt, tier.name, continue_eviction(self._h, attempt, tier, records)) if records else None

    # ---- what is decided now

    async def sweep(self, plan: Sequence[PlanEntry]) -> None:
        """Sweeps what the plan, made anew from logs and policy as they are, lets go; nothing where there would be none to go back to."""
        newest = newest_of(self._seen.catalog)
        entries = [entry for entry in plan if entry.action == "sweep"]
        self.waiting += [(entry.attempt, "the newest checkpoint is never deleted") for entry in entries if entry.attempt in newest]
        infos = {info.attempt: info for info in self._seen.catalog.checkpoints}
        reasons = {entry.attempt: entry.reasons for entry in entries}
        due = [infos[entry.attempt] for entry in entries if entry.attempt not in newest]
        if due and (why := await none_to_go_back_to(self._h, plan, infos)):
            log.warning("run=%s nothing is swept: %s", self._h.run, why)
            self.waiting += [(info.attempt, why) for info in due]
            return
        for some in _parts(due):
            if self._dry_run:
                await self._preview_sweep(some)
                continue
            found = await together(lambda info: self._swept(info, reasons[info.attempt]), some, at_once=_AT_ONCE)
            for info, gone in zip(some, found, strict=True):
                self._note_kept(info, gone)
            await self._empty_swept({info.attempt: gone for info, gone in zip(some, found, strict=True) if gone is not None})

    async def _swept(self, info: CheckpointInfo, reasons: Sequence[Reason]) -> Gone | None:
        return await self._try(info.attempt, "", decide_sweep(self._h, self._seen, info, reasons))

    async def _preview_sweep(self, infos: Sequence[CheckpointInfo]) -> None:
        async def one(info: CheckpointInfo) -> list[Emptying] | None:
            named = await self._try(info.attempt, "", names_to_record(self._h, info))
            living = await self._try(info.attempt, "", living_referrers(self._h, self._seen, info.attempt, info.records, decide=False))
            if named is None or living is None:
                return None
            if living:
                self.waiting.append((info.attempt, f"would be deleted, but {kept_text(living)}"))
            return [
                Emptying(
                    attempt=info.attempt,
                    tier=tier,
                    kind="sweep",
                    why="",
                    named=frozenset(named),
                    keep_shards=tier.name in living,
                    keep_log=tier.name in living,
                )
                for tier in self._own
            ]

        found = await together(one, infos, at_once=_AT_ONCE)
        await self._remove([job for jobs in found if jobs is not None for job in jobs])

    async def drop(self, entries: Sequence[PlanEntry]) -> None:
        """Drops the copies that the plan lets go; of one checkpoint one after the other, each upon the copies that stand then."""
        own = {tier.name: tier for tier in self._own}
        wanted = [
            (entry.attempt, [(own[d.tier], d.reason.text) for d in entry.drops if not d.blocked and d.tier in own])
            for entry in entries
            if entry.action != "sweep"
        ]

        async def of_checkpoint(item: tuple[Attempt, list[tuple[Tier, str]]]) -> list[Emptying]:
            attempt, drops = item
            jobs = [await self._decide_drop(attempt, tier, reason) for tier, reason in drops]
            return [job for job in jobs if job is not None]

        for some in _parts([item for item in wanted if item[1]]):
            found = await together(of_checkpoint, some, at_once=_AT_ONCE)
            await self._evict([job for jobs in found for job in jobs])

    async def _decide_drop(self, attempt: Attempt, tier: Tier, reason: str) -> Emptying | None:
        decide = preview_eviction if self._dry_run else decide_eviction
        return await self._try(attempt, tier.name, decide(self._h, attempt, tier, reason))

    async def condemn_orphans(self) -> None:
        """Condemns what nobody finished, and removes it."""
        condemned: list[Attempt] = []
        for found in self._seen.catalog.incomplete:
            why = await self._try(found.attempt, "", why_it_stays(self._h, self._seen, found))
            if why:
                self.waiting.append((found.attempt, why))
            elif why is not None and (self._dry_run or await self._try(found.attempt, "", condemn(self._h, found))):
                condemned.append(found.attempt)
        await self._empty_condemned(condemned, everywhere=True)

    # ---- freeing

    async def _empty_swept(self, swept: Mapping[Attempt, Gone]) -> None:
        """Frees swept checkpoints that nobody reads, then trims the logs of those of which nothing is left on the shared tiers."""
        if not swept:
            return
        try:
            reading = await readers_of(self._h, swept, 0.0 if self._dry_run else self._wait_s)
        except TierStoreError as error:  # not known who reads them: nothing of them may go
            self.failed += [Failed(attempt=attempt, tier="", error=error) for attempt in swept]
            return
        for attempt, readers in reading.items():
            self.waiting.append((attempt, f"swept, but read by {', '.join(reader.holder for reader in readers)}"))
        free = {a: gone for a, gone in swept.items() if a not in reading and not self._is_protected(a)}
        jobs = [sweep_job(attempt, tier, gone) for attempt, gone in free.items() for tier in self._own]
        if not self._dry_run:
            said = await together(lambda job: self._says_so(job, free[job.attempt]), jobs, at_once=_AT_ONCE)
            jobs = [job for job, ok in zip(jobs, said, strict=True) if ok]
        done = await self._remove(jobs)
        if self._dry_run or not self._h.shared:
            return
        clean = {
            attempt
            for attempt in free
            if not free[attempt].keep and all((attempt, tier.name) in done for tier in self._h.own if tier.name not in self._nodes)
        }
        try:
            trims = await to_trim(self._h, {attempt: free[attempt] for attempt in clean})
            ends = await self._remover.remove(trims)
        except TierStoreError as error:
            self.failed.append(Failed(attempt=None, tier=self._h.tiers.authority.name, error=error))
            return
        self.failed += [
            Failed(attempt=one.job.attempt, tier=one.job.tier.name, error=end)
            for one, end in zip(trims, ends, strict=True)
            if end is not None
        ]

    def _note_kept(self, info: CheckpointInfo | Reduced, gone: Gone | None) -> None:
        if gone is not None and gone.keep and self._h.shared:
            self.waiting.append((info.attempt, f"deleted, but {kept_text(info.serves) or 'others refer to its bytes'}"))

    async def _says_so(self, job: Emptying, gone: Gone) -> bool | None:
        """Whether a tier may lose all but the shards of a checkpoint: what it keeps of the log tells why only they are there."""
        return True if not job.keep_log else await self._try(job.attempt, job.tier.name, keep_log(self._h, job.attempt, job.tier, gone))

    async def _empty_condemned(self, attempts: Sequence[Attempt], *, everywhere: bool = False) -> None:
        for some in _parts(attempts):
            if not (self._dry_run and everywhere):  # then nobody has condemned them yet
                some = await self._confirmed(some)
            await self._remove([orphan_job(attempt, tier) for attempt in some for tier in self._own])

    async def _confirmed(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        async def one(attempt: Attempt) -> bool | None:
            return await self._try(attempt, "", _true(confirm_condemned(self._h, attempt)))

        kept = await together(one, attempts, at_once=_AT_ONCE)
        return [attempt for attempt, ok in zip(attempts, kept, strict=True) if ok]

    async def _evict(self, jobs: Sequence[Emptying]) -> None:
        async def spare(job: Emptying) -> Emptying | None:
            return await self._try(job.attempt, job.tier.name, spared(self._h, self._seen, job, decide=not self._dry_run))

        asked = await together(spare, jobs, at_once=_AT_ONCE)
        jobs = [job for job in asked if job is not None]
        for job in jobs:
            if job.keep_shards:
                self.waiting.append((job.attempt, kept_text({job.tier.name: job.referrers})))
        done = await self._remove(jobs)
        if self._dry_run:
            return
        gone = [job for job in jobs if (job.attempt, job.tier.name) in done]
        await together(lambda job: self._try(job.attempt, job.tier.name, finish_eviction(self._h, job)), gone, at_once=_AT_ONCE)

    async def _remove(self, jobs: Sequence[Emptying]) -> set[tuple[Attempt, str]]:
        """Lists and deletes; returns (attempt, tier) of the jobs of which nothing that is ours to delete is left."""
        listed = await together(lambda job: self._try(job.attempt, job.tier.name, find(self._h, job)), jobs, at_once=_AT_ONCE)
        found = [one for one in listed if one is not None]
        self.foreign += [f"{one.job.tier.name}:{path}" for one in found for path in one.foreign]
        ends = [None] * len(found) if self._dry_run else await self._remover.remove(found)
        done: set[tuple[Attempt, str]] = set()
        for one, end in zip(found, ends, strict=True):
            if end is not None:
                self.failed.append(Failed(attempt=one.job.attempt, tier=one.job.tier.name, error=end))
                continue
            done.add((one.job.attempt, one.job.tier.name))
            if one.files:
                self._note_freed(one)
        return done

    def _note_freed(self, one: Found) -> None:
        job, nbytes = one.job, sum(info.taken_nbytes for info in one.files)
        kept_for = job.referrers if job.keep_shards else ()
        self.freed.append(
            Freed(attempt=job.attempt, tier=job.tier.name, kind=job.kind, files=len(one.files), nbytes=nbytes, kept_for=kept_for)
        )
        where = f"tier={job.tier.name} checkpoint={job.attempt.folder} kind={job.kind}"
        level = logging.DEBUG if self._dry_run else logging.INFO
        log.log(level, "%s files=%d nbytes=%d freed", where, len(one.files), nbytes)

    async def leftovers(self) -> dict[str, tuple[str, ...]]:
        """Removes what dead processes left on the tiers that are ours to work on; of an upload nothing tells whose run it is of."""
        grace_s = max(self._h.tiers.upload_grace_s, self._h.gc.multipart_grace_s)
        found = await sweep_leftovers(self._h.tiers, only=self._own_names, upload_grace_s=grace_s, dry_run=self._dry_run)
        return {name: tuple(paths) for name, paths in found.items()}

    # ---- the copies of the log

    async def copy_logs(self, most: int | None) -> LogRound:
        """Brings the copies beside the replicas up to date; `most`: of so many replicas. What came too late goes again."""
        done = await copy_logs(self._h, self._seen.catalog, self._own, self._tally, most=most, dry_run=self._dry_run)
        for attempt, tier in done.late:
            await self._take_back(attempt, tier)
        return done

    async def _take_back(self, attempt: Attempt, tier: Tier) -> None:
        """Removes what was copied beside a copy that somebody let go at that moment."""
        records = await self._try(attempt, "", read_log(self._h.tiers.authority.storage, attempt))
        if records and (record := gone_in(records)) is not None:
            await self._empty_swept({attempt: Gone(record=record, records=records, keep=fold(records).reduced or frozenset())})
        elif records and (job := await self._continued(attempt, tier)) is not None:
            await self._evict([job])

    # ---- helpers

    def _is_brought(self, attempt: Attempt) -> bool:
        """Whether somebody is copying it to a tier again: what lies there is no eviction's rest then."""
        lease = next((lease for lease in self._seen.leases.get(attempt, ()) if lease.kind == BRING), None)
        if lease is not None:
            self.waiting.append((attempt, f"{lease.holder} is copying it"))
        return lease is not None

    def _left_on(self, attempt: Attempt) -> bool:
        """Whether a tier that is ours to work on has something left of an attempt that is gone."""
        return any(name in self._own_names for name in self._seen.catalog.remains.get(attempt, ()))

    def _is_protected(self, attempt: Attempt) -> bool:
        """Whether this process uses an attempt that is gone; then it is left for later."""
        reason = self._h.protected().get(attempt)
        if reason is not None:
            self.waiting.append((attempt, reason.text))
        return reason is not None


def _unfinished(info: CheckpointInfo) -> list[str]:
    """The tiers from which a copy is not gone yet, or is, and nobody has recorded it."""
    shown = {name for name, state in info.replicas.items() if state == "evicting"}
    return sorted(shown | (fold(info.records).evicting if info.dropped else frozenset()))


async def _true(work: Coroutine[Any, Any, None]) -> bool:
    await work
    return True


def _parts(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for begin in range(0, len(items), _AT_A_TIME):
        yield items[begin : begin + _AT_A_TIME]
