"""A collector to be killed: takes every path of deletion once, on folders that its parent has filled.

The harness forks it from a server that has imported the library, and tells it where to die.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path

from retention_kit import NAMES, RUN, client_tiers, housekeeping, policy_of, save_id_at
from stepping_kit import START
from tiers_kit import SteppedClock

from tierstore import crashpoints
from tierstore.names import Attempt
from tierstore.storage.posix import PosixStorage
from tierstore.tiers.catalog import scan
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.evict import evict
from tierstore.tiers.gc.prune import prune
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


def tiers_on(root: Path) -> Tiers:
    return client_tiers({name: PosixStorage(root / name, durable=False) for name in NAMES})


async def tidy(root: Path) -> None:
    """Decides, frees, evicts by hand; no path of deletion is left out."""
    tiers = tiers_on(root)
    keeper = housekeeping(tiers, POLICY, later())
    await prune(keeper)
    await collect(keeper, now=True)
    info = next((c for c in (await scan(tiers, RUN)).checkpoints if c.attempt == KEPT), None)
    if info is not None and "far" not in info.dropped:
        await evict(keeper, info, "far", reason="by hand")


def main(root: str, environment: Mapping[str, str], errors: str) -> None:
    """The process."""
    fd = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 2)
    os.environ.update(environment)
    importlib.reload(crashpoints)  # it was imported before the environment named a point; `reach` sees what is read now
    asyncio.run(tidy(Path(root)))
