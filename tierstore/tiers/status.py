"""Where a run stands: what each tier holds, lacks and lags, what is under way, and the last errors. Plain data for `status`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierstore.clock import Clock
from tierstore.errors import TierStoreError
from tierstore.tiers.catalog import Catalog, CheckpointInfo, RecordCache, scan
from tierstore.tiers.jobs import PendingCopy
from tierstore.tiers.progress import Transfer
from tierstore.tiers.promote import pending
from tierstore.tiers.space import room_on
from tierstore.tiers.tending import HousekeepingStatus
from tierstore.tiers.tier import Tier, Tiers

__all__ = ["Status", "TierStatus", "WorkerView", "collect_status"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatus:
    """One tier. Sizes in bytes, times in seconds."""

    name: str
    uri: str
    scope: str
    durable: bool
    authority: bool
    reachable: bool
    checkpoints: int
    """How many complete copies it holds, quantised ones included."""
    newest_step: int | None
    """The newest step of which it holds a complete copy."""
    nbytes: int
    """What these copies take up there, as their records say."""
    pending: int
    """How many copies it lacks."""
    pending_nbytes: int
    lag_s: float | None
    """The age of the newest committed checkpoint that it lacks; None if it lacks none."""
    free_nbytes: int | None
    error: str = ""
    """Why it can't be reached, or why copies to it fail just now."""
    quantised: int = 0
    """How many of its copies are not exact."""
    last_error: str = ""
    """The last failure that the worker of this process saw, also when it has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What the worker of this process is at; empty where there is none (`tierstore status` from a shell)."""

    pending: tuple[PendingCopy, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    in_memory_nbytes: int = 0
    """Bytes of images that are on no tier yet."""
    housekeeping: HousekeepingStatus | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    last_errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One run."""

    run: str
    committed: int
    incomplete: int
    newest_step: int | None
    tiers: tuple[TierStatus, ...]
    worker: WorkerView
    warnings: tuple[str, ...] = ()
    housekeeping: HousekeepingStatus | None = None
    """What retention did in the worker of this process; None where there is none."""


async def collect_status(
    tiers: Tiers, run: str, *, clock: Clock, worker: WorkerView | None = None, cache: RecordCache | None = None
) -> Status:
    """Looks at all tiers.

    Raises:
        StorageError: No tier that could know can be reached.
    """
    catalog = await scan(tiers, run, cache)
    worker = worker or WorkerView()
    offered = [c for c in catalog.checkpoints if not (c.hidden or c.superseded)]
    return Status(
        run=run,
        committed=len(offered),
        incomplete=len(catalog.incomplete),
        newest_step=offered[-1].attempt.step if offered else None,
        tiers=tuple([await _tier_status(tier, tiers, catalog, offered, clock, worker) for tier in tiers]),
        worker=worker,
        warnings=catalog.warnings,
        housekeeping=worker.housekeeping,
    )


async def _tier_status(
    tier: Tier, tiers: Tiers, catalog: Catalog, offered: list[CheckpointInfo], clock: Clock, worker: WorkerView
) -> TierStatus:
    unreachable: TierStoreError | None = catalog.unreachable.get(tier.name) or tiers.unreachable.get(tier.name)
    held = [c for c in offered if c.replicas.get(tier.name) in ("complete", "quantised")]
    lacking = [copy for copy in pending(catalog, tiers) if copy.tier == tier.name]
    committed = {c.attempt: c.committed_at for c in offered}
    newest = next((committed[copy.attempt] for copy in lacking if copy.attempt in committed), None)
    free: int | None = None
    if unreachable is None:
        try:
            free = await room_on(tier)
        except TierStoreError as error:
            unreachable = error
    return TierStatus(
        name=tier.name,
        uri=tier.storage.uri,
        scope=tier.scope,
        durable=tier.durable,
        authority=tiers.is_authority(tier),
        reachable=unreachable is None,
        checkpoints=len(held),
        newest_step=held[-1].attempt.step if held else None,
        nbytes=sum(c.taken_on(tier.name) for c in held),
        quantised=sum(c.replicas.get(tier.name) == "quantised" for c in held),
        pending=len(lacking),
        pending_nbytes=sum(copy.nbytes for copy in lacking),
        lag_s=None if newest is None else max(0.0, (clock.now() - newest).total_seconds()),
        free_nbytes=free,
        error=f"{type(unreachable).__name__}: {unreachable.message}" if unreachable else worker.errors.get(tier.name, ""),
        last_error=worker.last_errors.get(tier.name, ""),
    )
