"""Promotion as a reconciler without a journal: what has to be copied is computed from what the tiers hold (DESIGN.md §2.3).

`pending` is the computation, `reconcile` works it off in the foreground (`tierstore sync`, `resume`); the trainer's worker does the same
steps in the background. All of them are `advance` underneath, so each can take over from any other at any instant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.clock import Clock
from tierstore.errors import CondemnedError, TierStoreError
from tierstore.names import Attempt
from tierstore.tiers.advance import Outcome, advance
from tierstore.tiers.catalog import scan
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.leftovers import sweep_leftovers
from tierstore.tiers.locks import RunLock, lock_path
from tierstore.tiers.pending import Copy, CopyKind, pending
from tierstore.tiers.record_cache import RecordCache
from tierstore.tiers.tier import Tier, Tiers, ensure_tier
from tierstore.tiers.view import further

__all__ = ["Copy", "CopyKind", "Failure", "ReconcileReport", "pending", "promote", "reconcile"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A copy that failed this time, and why."""

    copy: Copy
    error: TierStoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileReport:
    """What one pass did."""

    done: tuple[Copy, ...] = ()
    waiting: tuple[tuple[Copy, str], ...] = ()
    """Copies that something else has to come first for, and what."""
    failed: tuple[Failure, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.failed


async def promote(tiers: Tiers, attempt: Attempt, target: Tier | str, *, clock: Clock, context: CopyContext | None = None) -> Outcome:
    """Brings one attempt onto one tier, now.

    Args:
        tiers: The store's tiers.
        attempt: What to copy; committed, unless `target` is the authority or before it.
        target: The tier, or its name.
        clock: Dates the records.
        context: Limits and progress; the defaults of `CopyContext.make` if None.

    Returns:
        Where it stands: ``done``, or what it is ``waiting`` for.

    Raises:
        StorageError: A tier failed; calling again continues.
        TierFullError: The target has no room; nothing was copied.
        IntegrityError: No good copy of a file is left on any tier; what is damaged was quarantined.
    """
    context = context or CopyContext.make(tiers, clock)
    tier = tiers.get(target) if isinstance(target, str) else target
    await ensure_tier(tiers, tier)
    return await advance(context, attempt, tier)


async def reconcile(
    tiers: Tiers,
    run: str,
    *,
    clock: Clock,
    context: CopyContext | None = None,
    only: Sequence[str] | None = None,
    commit_only: bool = False,
    lock: RunLock | None = None,
    wait_s: float | None = 0.0,
    cache: RecordCache | None = None,
) -> ReconcileReport:
    """Works off everything that is pending for a run, once, newest first: commits complete attempts, completes replicas, promotes.

    Further tiers are served at the same time; one that fails does not hold up the others, and its failure is in the report.

    Args:
        tiers: The store's tiers.
        run: The run.
        clock: Dates the records.
        context: Limits and progress.
        only: Names of the tiers to bring copies to; None: all.
        commit_only: Stop after the authority: what `resume` needs before it looks for the newest checkpoint.
        lock: The run's lock, where the caller has one.
        wait_s: Seconds to wait for another process that works on this node; None: without end.
        cache: Records that are known already: of 10,000 checkpoints each one that is not costs a request.

    Raises:
        LockedError: Another process is at it (``context["pid"]``).
        StorageError: The catalog can't be read.
    """
    context = context or CopyContext.make(tiers, clock)
    cache = cache if cache is not None else RecordCache()
    lock = lock or RunLock(lock_path(tiers, run), run)
    async with lock.hold(wait_s=wait_s):
        if not commit_only:
            await sweep_leftovers(tiers)
        before = await _work_off(context, run, cache, only, near=True)
        reports = [before] if commit_only else [before, await _work_off(context, run, cache, only, near=False)]
    return ReconcileReport(
        done=tuple(c for r in reports for c in r.done),
        waiting=tuple(w for r in reports for w in r.waiting),
        failed=tuple(f for r in reports for f in r.failed),
    )


async def _work_off(context: CopyContext, run: str, cache: RecordCache, only: Sequence[str] | None, *, near: bool) -> ReconcileReport:
    """One look at the catalog, then its copies: the authority and the tiers before it one after the other, all others at once."""
    tiers = context.tiers
    wanted = [c for c in pending(await scan(tiers, run, cache), tiers) if only is None or c.tier in only]
    far = {t.name for t in further(tiers)}
    if near:
        # Commits first: a replica can only be completed once its checkpoint is committed.
        chosen = sorted((c for c in wanted if c.tier not in far), key=lambda c: c.kind != "commit")
        return await _one_after_the_other(context, chosen)
    late = [c for c in wanted if c.tier not in far and c.kind == "complete"]
    groups = [late, *([c for c in wanted if c.tier == name] for name in far)]
    parts = await asyncio.gather(*(_one_after_the_other(context, group) for group in groups))
    return ReconcileReport(
        done=tuple(c for p in parts for c in p.done),
        waiting=tuple(w for p in parts for w in p.waiting),
        failed=tuple(f for p in parts for f in p.failed),
    )


async def _one_after_the_other(context: CopyContext, copies: Sequence[Copy]) -> ReconcileReport:
    done: list[Copy] = []
    waiting: list[tuple[Copy, str]] = []
    failed: list[Failure] = []
    for copy in copies:
        tier = context.tiers.get(copy.tier)
        try:
            await ensure_tier(context.tiers, tier)
            outcome = await advance(context, copy.attempt, tier)
        except CondemnedError as error:
            log.info("checkpoint=%s %s", copy.attempt.folder, error.message)
        except TierStoreError as error:
            log.warning("tier=%s checkpoint=%s not copied: %s", copy.tier, copy.attempt.folder, error.message)
            failed.append(Failure(copy=copy, error=error))
        else:
            if outcome.done:
                log.info("tier=%s checkpoint=%s %s done", copy.tier, copy.attempt.folder, copy.kind)
                done.append(copy)
                if copy.nbytes:
                    context.progress(copy.tier, copy.attempt, "", copy.nbytes, copy.nbytes)
            else:
                waiting.append((copy, outcome.waiting))
    return ReconcileReport(done=tuple(done), waiting=tuple(waiting), failed=tuple(failed))
