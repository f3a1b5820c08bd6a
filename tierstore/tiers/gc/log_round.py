"""One round of bringing the copies of the log up to date: which replicas, in what order, and what a tier that fails costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierstore.errors import StorageError
from tierstore.names import Attempt
from tierstore.tiers.catalog import Catalog
from tierstore.tiers.gc.catch_up import CaughtUp, catch_up
from tierstore.tiers.gc.housekeeping import Housekeeping, quiet
from tierstore.tiers.gc.tally import Tally
from tierstore.tiers.tier import Tier
from tierstore.tiers.together import together

__all__ = ["LogRound", "copy_logs"]

_AT_A_TIME = 32
_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRound:
    """How many records were copied (in a dry run: would be), how many replicas were left for the next round, and beside which copies
    records came too late, so that they have to go again."""

    records: int
    left: int
    late: tuple[tuple[Attempt, Tier], ...] = ()


async def copy_logs(
    h: Housekeeping, catalog: Catalog, own: Iterable[Tier], tally: Tally, *, most: int | None = None, dry_run: bool = False
) -> LogRound:
    """Brings the copies beside the replicas up to date, those of the newest checkpoints first.

    Args:
        h: Whose.
        catalog: Says which replicas are behind.
        own: The tiers to work on.
        tally: Takes what waits and what fails.
        most: Of so many replicas; None: of all.
        dry_run: Only count.
    """
    tiers = {tier.name: tier for tier in own}
    behind = [(attempt, tiers[name]) for attempt, names in sorted(catalog.behind.items(), reverse=True) for name in names if name in tiers]
    chosen = behind[:most]
    failing: set[str] = set()

    async def caught_up(replica: tuple[Attempt, Tier]) -> CaughtUp:
        """One replica's, unless its tier has failed already: that is said once, and the next collection tries again."""
        attempt, tier = replica
        if tier.name in failing:
            return CaughtUp()
        known = len(tally.failed)
        caught = await tally.tried(attempt, tier.name, catch_up(h, attempt, tier, dry_run=dry_run))
        if any(f.tier == tier.name and isinstance(f.error, StorageError) for f in tally.failed[known:]):
            failing.add(tier.name)
        return caught or CaughtUp()

    records, late = 0, []
    for begin in range(0, len(chosen), _AT_A_TIME):
        some = chosen[begin : begin + _AT_A_TIME]
        await quiet(h)
        found = await together(caught_up, some, at_once=_AT_ONCE)
        records += sum(caught.records for caught in found)
        late += [replica for replica, caught in zip(some, found, strict=True) if caught.late]
    return LogRound(records=records, left=len(behind) - len(chosen), late=tuple(late))
