"""A store to keep house in: two checkpoints that stay, one that goes, an attempt that lost a rank; and one housekeeping of it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from retention_kit import RUN, housekeeping, persist_small, policy_of, save_id_at, save_small
from stepping_kit import START
from tiers_kit import SteppedClock

from tierstore.errors import TierStoreError
from tierstore.names import Attempt
from tierstore.tiers.catalog import scan
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.evict import evict
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.promote import promote, reconcile
from tierstore.tiers.tier import Tiers

POLICY = policy_of(
    {"last": 2}, min_age_s=1.0, undelete_window_s=1.0, orphan_grace_s=60.0, max_clock_skew_s=1.0, tiers={"node": {"keep": [{"last": 1}]}}
)
VICTIM, KEPT, NEWEST, ORPHAN = (
    Attempt(run=RUN, step=step, save_id=save_id_at(START + timedelta(seconds=step), 0)) for step in (1, 7, 9, 5)
)


def later() -> SteppedClock:
    """Thirty hours from now: the files' real times are past every grace."""
    clock = SteppedClock()
    clock.wall = datetime.now(timezone.utc) + timedelta(hours=30)
    return clock


async def build(tiers: Tiers) -> None:
    for attempt in (VICTIM, KEPT, NEWEST):
        await save_small(tiers, attempt, tier="node")
    await reconcile(tiers, RUN, clock=SteppedClock())
    for attempt in (VICTIM, KEPT, NEWEST):
        await promote(tiers, attempt, "far", clock=SteppedClock())
    await persist_small(tiers, ORPHAN, 0, world_size=2)


async def tidy(tiers: Tiers) -> list[TierStoreError]:
    """Decides, frees, and evicts by hand, so that no path of deletion is left out; returns what it was told."""
    told: list[TierStoreError] = []
    keeper = housekeeping(tiers, POLICY, later())
    try:
        await prune(keeper)
        told += [failed.error for failed in (await collect(keeper, now=True)).failed]
        info = next((c for c in (await scan(tiers, RUN)).checkpoints if c.attempt == KEPT), None)
        if info is not None and "far" not in info.dropped:
            await evict(keeper, info, "far", reason="by hand")
    except TierStoreError as error:
        told.append(error)
    return told


async def finish(tiers: Tiers) -> None:
    """What the next process does, by itself: nothing new is decided."""
    keeper = housekeeping(tiers, POLICY, later())
    for _ in range(2):
        report = await collect(keeper, now=True)
        assert not report.failed, report.failed
