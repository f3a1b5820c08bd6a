"""A collector that dies at any named point of any deletion loses nothing, and the next one finishes what it began (PROTOCOLS.md §9.1)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path

import gc_child
import pytest
from fork_kit import SERVER
from gc_child import KEPT, NEWEST, ORPHAN, POLICY, VICTIM, later, tiers_on
from retention_kit import (
    NAMES,
    RUN,
    Truth,
    check_alone,
    check_step,
    files_of_storages,
    garbage,
    housekeeping,
    load_whole,
    persist_small,
    save_small,
)
from tiers_kit import SteppedClock

from tierstore.crashpoints import CRASH_EXIT, CRASH_POINTS
from tierstore.storage.posix import PosixStorage
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.promote import promote, reconcile

GC_POINTS = [
    p for p in CRASH_POINTS if p.partition(".")[0] in ("expire", "evict", "sweep", "orphan", "delete") and not p.endswith("-reduced")
]
"""Those of what others refer to: test_reference_crash_points.py."""


async def build(root: Path) -> None:
    """Two checkpoints that stay, one that goes, on every tier; and an attempt that lost a rank."""
    tiers = tiers_on(root)
    for attempt in (VICTIM, KEPT, NEWEST):
        await save_small(tiers, attempt, tier="node")
    await reconcile(tiers, RUN, clock=SteppedClock())
    for attempt in (VICTIM, KEPT, NEWEST):
        await promote(tiers, attempt, "far", clock=SteppedClock())
    await persist_small(tiers, ORPHAN, 0, world_size=2)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("filled")
    asyncio.run(build(root))
    return root


def truth_of(root: Path) -> Truth:
    return Truth(asyncio.run(files_of_storages({name: PosixStorage(root / name, durable=False) for name in NAMES})))


def run_child(root: Path, env: Mapping[str, str], errors: Path) -> int | None:
    child = SERVER.Process(target=gc_child.main, args=(str(root), dict(env), str(errors)))
    child.start()
    child.join(200)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode


async def finish(root: Path) -> None:
    """What the next process does, by itself: nothing new is decided."""
    tiers = tiers_on(root)
    for _ in range(2):
        report = await collect(housekeeping(tiers, POLICY, later()), now=True)
        assert not report.failed, report.failed


def check_after(root: Path, before: Truth) -> None:
    died = truth_of(root)
    storages = {name: PosixStorage(root / name, durable=False) for name in NAMES}
    check_step(before, died)
    asyncio.run(check_alone(storages, died))
    asyncio.run(finish(root))
    done = truth_of(root)
    check_step(died, done)
    asyncio.run(check_alone(storages, done))
    assert not garbage(done), garbage(done)
    assert done.facts()[ORPHAN].condemned
    assert {KEPT, NEWEST} <= done.existing().keys()
    assert not any(facts.evicting for facts in done.facts().values()), "an eviction was not finished"
    for attempt in done.existing():
        asyncio.run(load_whole(tiers_on(root), attempt))


@pytest.mark.parametrize("point", GC_POINTS)
def test_a_crash_at_any_point_of_a_deletion_loses_nothing_and_is_finished(point: str, filled: Path, tmp_path: Path, long_run: bool) -> None:
    before = truth_of(filled)
    passed = 0
    for nth in range(1, 20) if long_run else (1,):
        root = tmp_path / str(nth)
        shutil.copytree(filled, root)
        status = run_child(root, {"TIERSTORE_CRASH_AT": f"{point}:{nth}"}, tmp_path / "errors")
        assert status in (0, CRASH_EXIT), (tmp_path / "errors").read_text()
        passed += status == CRASH_EXIT
        check_after(root, before)
    assert passed, f"{point} was never passed"


def test_every_point_of_the_deletions_is_reached(filled: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(filled, root)
    assert run_child(root, {"TIERSTORE_CRASH_LOG": str(tmp_path / "passed")}, tmp_path / "errors") == 0, (tmp_path / "errors").read_text()
    passed = set((tmp_path / "passed").read_text().split())
    assert GC_POINTS
    assert set(GC_POINTS) <= passed
