"""A collector that dies at any named point of any deletion loses nothing, and the next one finishes what it began (PROTOCOLS.md §9.1)."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import gc_child
import pytest
from collection_kit import KEPT, NEWEST, ORPHAN, build, finish
from fork_kit import end_of
from gc_child import tiers_on
from retention_kit import (
    NAMES,
    Truth,
    check_alone,
    check_step,
    files_of_storages,
    garbage,
    load_whole,
)

from tierstore.crashpoints import CRASH_EXIT, CRASH_POINTS
from tierstore.storage.posix import PosixStorage

GC_POINTS = [
    p for p in CRASH_POINTS if p.partition(".")[0] in ("expire", "evict", "sweep", "orphan", "delete") and not p.endswith("-reduced")
]
"""Those of what others refer to: test_reference_crash_points.py."""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("filled")
    asyncio.run(build(tiers_on(root)))
    return root


def truth_of(root: Path) -> Truth:
    return Truth(asyncio.run(files_of_storages({name: PosixStorage(root / name, durable=False) for name in NAMES})))


def check_after(root: Path, before: Truth) -> None:
    died = truth_of(root)
    storages = {name: PosixStorage(root / name, durable=False) for name in NAMES}
    check_step(before, died)
    asyncio.run(check_alone(storages, died))
    asyncio.run(finish(tiers_on(root)))
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
        status = end_of(gc_child.main, str(root), {"TIERSTORE_CRASH_AT": f"{point}:{nth}"}, str(tmp_path / "errors"))
        assert status in (0, CRASH_EXIT), (tmp_path / "errors").read_text()
        passed += status == CRASH_EXIT
        check_after(root, before)
    assert passed, f"{point} was never passed"


def test_every_point_of_the_deletions_is_reached(filled: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(filled, root)
    status = end_of(gc_child.main, str(root), {"TIERSTORE_CRASH_LOG": str(tmp_path / "passed")}, str(tmp_path / "errors"))
    assert status == 0, (tmp_path / "errors").read_text()
    passed = set((tmp_path / "passed").read_text().split())
    assert GC_POINTS
    assert set(GC_POINTS) <= passed
