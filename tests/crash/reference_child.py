"""A process to be killed that copies a checkpoint over another one's bytes, and frees that one; its parent has filled the folders."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from collection_kit import later
from fork_kit import set_out
from retention_kit import NAMES, RUN, client_tiers, housekeeping, policy_of, save_id_at
from stepping_kit import START

from tierstore.names import Attempt
from tierstore.storage.packed import PackedStorage, Packing
from tierstore.storage.posix import PosixStorage
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.promote import promote
from tierstore.tiers.tier import Tiers

POLICY = policy_of({"last": 1}, min_age_s=1.0, undelete_window_s=1.0, orphan_grace_s=60.0, max_clock_skew_s=1.0)
BASE, REFERRER, OTHER = (Attempt(run=RUN, step=step, save_id=save_id_at(START + timedelta(seconds=step), 0)) for step in (1, 7, 9))


def tiers_on(root: Path) -> Tiers:
    """The further tier is packed, and stores unchanged bytes once."""
    plain = client_tiers({name: PosixStorage(root / name, durable=False) for name in NAMES})
    far = plain.get("far")
    packed = replace(far, storage=PackedStorage(far.storage, Packing(codec="raw", threads=1)), unchanged_once=True)
    made = [packed if tier.name == "far" else tier for tier in plain]
    return replace(plain, tiers=tuple(made))


async def work(root: Path) -> None:
    tiers = tiers_on(root)
    await promote(tiers, REFERRER, "far", clock=later())
    keeper = housekeeping(tiers, POLICY, later())
    await prune(keeper)
    await collect(keeper, now=True)


def main(root: str, environment: Mapping[str, str], errors: str) -> None:
    """The process."""
    set_out(environment, errors)
    asyncio.run(work(Path(root)))
