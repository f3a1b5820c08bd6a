"""What a collector works with: whose checkpoints, by which policy, on which tiers; and one look at all of it before anything is decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from tierstore.clock import Clock
from tierstore.config_retention import GcConfig, RetentionConfig
from tierstore.errors import NotFoundError, RefusedError, StorageError
from tierstore.names import Attempt
from tierstore.tiers.catalog import Catalog, RecordCache, scan
from tierstore.tiers.leases import LeaseSeen, LeaseWatch
from tierstore.tiers.retention import Plan, Reason, TierFacts, evaluate, tier_facts
from tierstore.tiers.space import used_on
from tierstore.tiers.tier import Tier, Tiers
from tierstore.tiers.together import together
from tierstore.tiers.usage import total_nbytes
from tierstore.tiers.view import further, staging

__all__ = ["Housekeeping", "Situation", "as_due", "look", "plan_of", "quiet"]

_BUSY_POLL_S = 0.05


def _nobody() -> Mapping[Attempt, Reason]:
    return {}


def _idle() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Housekeeping:
    """One run and those who keep it tidy. Keep it, or at least its `leases`: an observer of leases believes only what it saw itself.

    Attributes:
        tiers: The store's tiers.
        run: The run.
        policy: What `StoreConfig.retention_for` says; None: nothing new is decided, what was decided before is finished.
        clock: Dates records and says what is due.
        cache: Records that were read before.
        leases: The observer of the readers' leases.
        protected: What this process knows to be in use (the resume source, what is being saved), and why.
        shared: Works on the authority and the tiers after it; one process of the run does.
        local: Works on this node's tiers before the authority; one process of the node does.
        busy: Whether a save is being written: no deletion begins then.
    """

    tiers: Tiers
    run: str
    policy: RetentionConfig | None
    clock: Clock
    cache: RecordCache
    leases: LeaseWatch
    protected: Callable[[], Mapping[Attempt, Reason]] = field(default=_nobody, repr=False)
    shared: bool = True
    local: bool = True
    busy: Callable[[], bool] = field(default=_idle, repr=False)

    @property
    def gc(self) -> GcConfig:
        """How carefully things go; the defaults where there is no policy."""
        return self.policy.gc if self.policy is not None else GcConfig()

    @property
    def required(self) -> RetentionConfig:
        """The policy.

        Raises:
            RefusedError: There is none: without one nothing is ever deleted.
        """
        if self.policy is None:
            raise RefusedError(
                f"run {self.run!r} has no retention policy, and without one nothing is deleted",
                hint="write what is kept, e.g. `retention: {keep: [{last: 5}]}`",
                run=self.run,
            )
        return self.policy

    @property
    def own(self) -> tuple[Tier, ...]:
        """The tiers that are this one's to work on, nearest first."""
        near = staging(self.tiers) if self.local else ()
        return (*near, *((self.tiers.authority, *further(self.tiers)) if self.shared else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A run at one moment: the catalog, who reads what, what the tiers say of their space, what the process protects.

    `at` is when looking began: nothing seems older than it was then.
    """

    catalog: Catalog
    leases: Mapping[Attempt, tuple[LeaseSeen, ...]]
    tiers: tuple[TierFacts, ...]
    at: datetime
    protected: Mapping[Attempt, Reason] = field(default_factory=dict)

    @property
    def in_use(self) -> Mapping[Attempt, Reason]:
        """What is not to go for somebody uses it: what the process protects; and what is read under a lease, which says more."""
        leased = {attempt: Reason(kind="leased", text=f"read by {seen[0].holder}") for attempt, seen in self.leases.items() if seen}
        return {**self.protected, **leased}


async def look(h: Housekeeping) -> Situation:
    """Reads everything that a plan is made from.

    Raises:
        StorageError: No tier can be reached, or the authority answers but its leases can't be listed.
    """
    at, protected = h.clock.now(), dict(h.protected())
    catalog = await scan(h.tiers, h.run, h.cache)
    reached = h.tiers.authority.name not in catalog.unreachable
    leases = await h.leases.living(h.tiers, h.run) if reached else {}
    facts = await together(lambda fact: _measured(h, fact, catalog), tier_facts(h.tiers))
    return Situation(catalog=catalog, leases=leases, tiers=tuple(facts), at=at, protected=protected)


async def quiet(h: Housekeeping) -> None:
    """Waits until no save is being written."""
    while h.busy():  # noqa: ASYNC110 - nobody signals that a save has ended
        await asyncio.sleep(_BUSY_POLL_S)


def plan_of(h: Housekeeping, situation: Situation) -> Plan:
    """The plan for what was seen, as of then. Reads nothing.

    Raises:
        RefusedError: There is no policy.
    """
    return evaluate(
        situation.catalog.checkpoints,
        h.required,
        situation.at,
        tiers=situation.tiers,
        protected=situation.in_use,
        incomplete=situation.catalog.incomplete,
        run=h.run,
    )


def as_due(situation: Situation) -> Situation:
    """The same with every undelete window over; what protects a checkpoint protects it still."""
    long_ago = datetime(1970, 1, 1, tzinfo=timezone.utc)
    checkpoints = tuple(
        replace(info, expired=replace(info.expired, not_before=long_ago)) if info.expired is not None else info
        for info in situation.catalog.checkpoints
    )
    return replace(situation, catalog=replace(situation.catalog, checkpoints=checkpoints))


async def _measured(h: Housekeeping, fact: TierFacts, catalog: Catalog) -> TierFacts:
    """What a tier says of its space; asked only where the policy goes by it, for what a tier holds costs a listing of it all."""
    if fact.name in catalog.unreachable:
        return replace(fact, reachable=False)
    policy = (h.policy.tiers or {}).get(fact.name) if h.policy is not None else None
    if policy is None or policy.evict is None:
        return replace(fact, reachable=True)
    tier = h.tiers.get(fact.name)
    try:
        free = await tier.storage.free_nbytes()
        used = await used_on(tier) if tier.capacity is not None else None
    except (StorageError, NotFoundError):
        return replace(fact, reachable=False)
    return replace(fact, reachable=True, free_nbytes=free, total_nbytes=await total_nbytes(tier), used_nbytes=used)
