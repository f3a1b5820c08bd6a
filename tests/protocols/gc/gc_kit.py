"""A small store on folders, a clock that only the test moves, and a collector: what the tests of garbage collection share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tiers_kit import Hooked, SteppedClock, attempt_at, persist_rank, tiers_in

from tierstore.config_retention import GcConfig, KeepRule, ProtectConfig, RetentionConfig, TierRetention
from tierstore.names import Attempt
from tierstore.storage.contract import Storage
from tierstore.tiers.catalog import Catalog, RecordCache, scan
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.commit import commit
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.gc.reports import CollectReport, PruneReport
from tierstore.tiers.leases import LeaseWatch
from tierstore.tiers.promote import reconcile
from tierstore.tiers.retention import Reason

HOUR, DAY = 3600.0, 86400.0


def policy_of(*keep: Mapping[str, Any], tiers: Mapping[str, Mapping[str, Any]] | None = None, **more: Any) -> RetentionConfig:
    """Keeps the last one where nothing is said; fast, and free to delete most of what there is."""
    gc = {"max_delete_fraction": 1.0, "max_deletes_per_s": 10**6, **more.pop("gc", {})}
    return RetentionConfig(
        keep=tuple(KeepRule(**rule) for rule in keep or ({"last": 1},)),
        tiers={
            name: TierRetention(**{**rules, "keep": tuple(KeepRule(**r) for r in rules["keep"])} if "keep" in rules else rules)
            for name, rules in tiers.items()
        }
        if tiers
        else None,
        gc=GcConfig(**gc),
        protect=ProtectConfig(**{"min_age_s": HOUR, **more.pop("protect", {})}),
        **more,
    )


class World:
    """A store of three tiers (`node`, `shared`: the authority, `far`), or of those that are named, and who works on it."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: RetentionConfig | None = None,
        names: Sequence[str] = ("node", "shared", "far"),
        wrap: dict[str, Callable[[Storage], Storage]] | None = None,
        clock: SteppedClock | None = None,
    ) -> None:
        self.folder = folder
        self.clock = clock or SteppedClock()
        self.tiers = tiers_in(folder, names, wrap=wrap)
        self.policy: RetentionConfig | None = policy or policy_of()
        self.protected: dict[Attempt, Reason] = {}
        self.leases = LeaseWatch(self.clock)

    def h(self, **changes: Any) -> Housekeeping:
        """A collector with a cache of its own, as another process would have."""
        made = Housekeeping(
            tiers=self.tiers,
            run="run",
            policy=self.policy,
            clock=self.clock,
            cache=RecordCache(),
            leases=self.leases,
            protected=lambda: self.protected,
        )
        return replace(made, **changes)

    async def save(self, *steps: int, near: bool = False, copy: bool = True, **facts: Any) -> list[Attempt]:
        """Commits steps, a minute apart; through the node's tier where `near`, and onto all further tiers where `copy`."""
        made = []
        for step in steps:
            attempt = attempt_at(step, at=self.clock.now())
            await persist_rank(self.tiers, attempt, self.tiers.nearest if near else self.tiers.authority, **facts)
            if not near:
                await commit(self.tiers, attempt, deadline_s=0, clock=self.clock)
            self.clock.advance(60)
            made.append(attempt)
        if near or copy:
            report = await reconcile(self.tiers, "run", clock=self.clock)
            assert report.ok
        return made

    async def catalog(self) -> Catalog:
        return await scan(self.tiers, "run", RecordCache())

    async def info(self, attempt: Attempt) -> CheckpointInfo:
        return next(info for info in (await self.catalog()).checkpoints if info.attempt == attempt)

    async def steps(self, *, hidden: bool = True) -> list[int]:
        return [info.step for info in (await self.catalog()).checkpoints if hidden or not info.hidden]

    async def prune(self, **options: Any) -> PruneReport:
        return await prune(self.h(), **options)

    async def collect(self, **options: Any) -> CollectReport:
        return await collect(self.h(), **options)

    async def expire(self) -> PruneReport:
        """Prunes when everything is old enough, and lets the undelete window pass."""
        self.clock.advance(2 * HOUR)
        report = await self.prune()
        self.clock.advance(2 * DAY)
        return report

    def files(self, tier: str, attempt: Attempt) -> list[str]:
        """What lies in the attempt's folders on a tier, payload and log."""
        root = self.folder / tier
        places = (root / attempt.folder, root / attempt.log_folder)
        return sorted(str(path.relative_to(root / "run")) for place in places if place.is_dir() for path in place.rglob("*"))

    def left(self, attempt: Attempt, tiers: Collection[str] = ("node", "shared", "far")) -> dict[str, list[str]]:
        """What is left of an attempt, by tier, where there is anything."""
        return {tier: found for tier in tiers if (found := self.files(tier, attempt))}

    def calls(self, tier: str, operation: str) -> list[str]:
        """The paths that were asked for, on a tier that is wrapped in `Hooked`."""
        storage = self.tiers.get(tier).storage
        assert isinstance(storage, Hooked)
        return [path for what, path in storage.calls if what == operation]

    def audit(self, tier: str = "shared") -> str:
        folder = self.folder / tier / "run" / ".audit"
        return "".join(path.read_text() for path in sorted(folder.glob("*.jsonl"))) if folder.is_dir() else ""


def swept_log(attempt: Attempt, seq: int) -> dict[str, list[str]]:
    """What stays of a swept checkpoint: its first record and ``swept``, on the authority."""
    return {"shared": [f".log/{attempt.name}/000000.json", f".log/{attempt.name}/{seq:06d}.json"]}


def condemned_log(attempt: Attempt) -> dict[str, list[str]]:
    """What stays of a condemned attempt."""
    return {"shared": [f".log/{attempt.name}/000000.json"]}


def days(count: float) -> timedelta:
    return timedelta(days=count)


def run(coro: Any) -> Any:
    return asyncio.run(coro)
