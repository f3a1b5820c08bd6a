"""A process that dies while a checkpoint begins to refer to another one, or while that one is deleted under it, lets nothing dangle."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import reference_child
from collection_kit import later
from fork_kit import end_of
from packed_kit import save_lora
from reference_child import BASE, OTHER, POLICY, REFERRER, tiers_on, work
from retention_kit import RUN, housekeeping, info_of, load_whole

from tierstore.crashpoints import CRASH_EXIT, CRASH_POINTS
from tierstore.names import shard_name
from tierstore.tiers.catalog import CheckpointInfo, scan
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.promote import promote

POINTS = [p for p in CRASH_POINTS if p.startswith("reference.") or p.endswith("-reduced")]
BESIDE = ("promote.after-file", "delete.after-record", "delete.after-manifest", "delete.after-payload")
"""Points of every copy and deletion at which something else is half done here."""


async def build(root: Path) -> None:
    tiers = tiers_on(root)
    for attempt in (BASE, REFERRER):
        await save_lora(tiers, attempt)
    await promote(tiers, BASE, "far", clock=later())


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("filled")
    asyncio.run(build(root))
    return root


async def finish(root: Path) -> None:
    """The next processes: the copy is made, and refers; its base goes but for its bytes; and when the copy goes, everything does."""
    await work(root)
    tiers = tiers_on(root)
    catalog = await scan(tiers, RUN)
    assert [info.attempt for info in catalog.checkpoints] == [REFERRER]
    (left,) = (root / "far" / BASE.folder).iterdir()
    assert left.name.startswith(shard_name(0, 1))
    await load_whole(tiers, REFERRER, info=await only_far(root))
    await save_lora(tiers, OTHER, seed=5)
    await prune(housekeeping(tiers, POLICY, later()))
    for _ in range(2):
        report = await collect(housekeeping(tiers, POLICY, later()), now=True)
        assert not report.failed, report.failed
    rest = [path for path in (root / "far").rglob("*") if BASE.name in str(path) or REFERRER.name in str(path)]
    assert not rest, rest


async def only_far(root: Path) -> CheckpointInfo:
    """The referrer, as if no other tier had it."""
    return replace(await info_of(tiers_on(root), REFERRER), replicas={"far": "complete"})


@pytest.mark.parametrize("point", [*POINTS, *BESIDE])
def test_whoever_dies_at_any_point_the_referrer_is_whole_and_in_the_end_all_goes(point: str, filled: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(filled, root)
    status = end_of(reference_child.main, str(root), {"TIERSTORE_CRASH_AT": point}, str(tmp_path / "errors"))
    assert status == CRASH_EXIT, (tmp_path / "errors").read_text()

    async def look() -> None:
        info = await info_of(tiers_on(root), REFERRER)
        if "far" in info.replicated:
            await load_whole(tiers_on(root), REFERRER, info=await only_far(root))

    asyncio.run(look())
    asyncio.run(finish(root))


def test_every_point_of_references_is_reached(filled: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(filled, root)
    status = end_of(reference_child.main, str(root), {"TIERSTORE_CRASH_LOG": str(tmp_path / "passed")}, str(tmp_path / "errors"))
    assert status == 0, (tmp_path / "errors").read_text()
    passed = set((tmp_path / "passed").read_text().split())
    assert len(POINTS) == 4
    assert {*POINTS, *BESIDE} <= passed
