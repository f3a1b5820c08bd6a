"""Recover: what is complete gets finished, what the authority lost is rebuilt from replicas, and nothing is deleted."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tierstore.clock import SystemClock
from tierstore.errors import StorageError, TemporaryError
from tierstore.names import Attempt
from tierstore.testing.flows import HookedStorage, LoopSession, folder_tiers, new_attempt, save_job
from tierstore.tiers.catalog import Catalog, scan
from tierstore.tiers.jobs import WorkerOptions
from tierstore.tiers.log import append
from tierstore.tiers.persist import persist
from tierstore.tiers.recover import RecoverReport, recover
from tierstore.tiers.tier import Scope
from tierstore.tiers.verify import verify
from tierstore.tiers.worker import Worker

LAYOUT: dict[str, Scope] = {"nvme": "node", "pfs": "shared", "object": "shared"}
FAST = WorkerOptions(poll_s=0.01, retry_first_s=0.01, retry_most_s=0.05, patience_s=0.5)


def stored(root: Path, steps: tuple[int, ...] = (1, 2)) -> list[Attempt]:
    attempts = [new_attempt("r", step) for step in steps]
    with LoopSession(folder_tiers(root, LAYOUT)) as session:
        worker = Worker(session, "r", options=FAST)
        for attempt in attempts:
            worker.submit(save_job(attempt, seed=attempt.step))
        worker.close(200)
    return attempts


def files(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and ".tmp" not in p.parts}


def run(root: Path, *, dry_run: bool = False) -> RecoverReport:
    return asyncio.run(recover(folder_tiers(root, LAYOUT), "r", clock=SystemClock(), dry_run=dry_run))


def catalog(root: Path) -> Catalog:
    return asyncio.run(scan(folder_tiers(root, LAYOUT), "r"))


def test_a_healthy_store_is_left_alone(tmp_path: Path) -> None:
    stored(tmp_path)
    before = files(tmp_path)
    report = run(tmp_path)
    assert (report.rebuilt, report.committed, report.incomplete) == ((), (), ())
    assert files(tmp_path) == before


def test_a_lost_log_is_rebuilt_record_by_record(tmp_path: Path) -> None:
    attempts = stored(tmp_path)
    record = (tmp_path / "pfs" / attempts[0].record_path(0)).read_bytes()
    shutil.rmtree(tmp_path / "pfs" / "r" / ".log")
    assert all(c.authority_lost for c in catalog(tmp_path).checkpoints)
    before = files(tmp_path)
    dry = run(tmp_path, dry_run=True)
    assert [r.attempt for r in dry.rebuilt] == attempts
    assert files(tmp_path) == before
    report = run(tmp_path)
    assert report.ok
    assert [r.error for r in report.rebuilt] == ["", ""]
    assert (tmp_path / "pfs" / attempts[0].record_path(0)).read_bytes() == record
    after = catalog(tmp_path).checkpoints
    assert [c.authority_lost for c in after] == [False, False]
    assert all("object" in c.replicated for c in after)
    assert asyncio.run(verify(folder_tiers(tmp_path, LAYOUT), "r", level="full")).findings == ()
    assert before <= files(tmp_path)


@pytest.mark.parametrize("left", [["nvme"], ["object"], ["nvme", "object"]])
def test_a_wiped_authority_is_rebuilt_from_any_one_tier(tmp_path: Path, left: list[str]) -> None:
    attempts = stored(tmp_path)
    names = ("manifest.json", "shard-00000-of-00001.safetensors")
    wanted = {name: (tmp_path / "pfs" / attempts[1].path(name)).read_bytes() for name in names}
    for tier in LAYOUT:
        if tier not in left:
            shutil.rmtree(tmp_path / tier)
    report = run(tmp_path)
    assert report.ok
    for name, data in wanted.items():
        assert (tmp_path / "pfs" / attempts[1].path(name)).read_bytes() == data
    found = catalog(tmp_path)
    assert [(c.attempt, c.authority_lost) for c in found.checkpoints] == [(a, False) for a in attempts]
    assert all("pfs" in c.complete_on for c in found.checkpoints)


def test_later_decisions_come_back_with_the_log_as_far_as_replicas_have_them(tmp_path: Path) -> None:
    async def pin() -> None:
        tiers = folder_tiers(tmp_path, {"nvme": "node", "pfs": "shared"})
        await append(tiers.authority.storage, attempt, "pinned", {"name": "paper"}, clock=SystemClock())

    attempt = new_attempt("r", 1)
    with LoopSession(folder_tiers(tmp_path, {"nvme": "node", "pfs": "shared"})) as session:
        worker = Worker(session, "r", options=FAST)
        worker.submit(save_job(attempt))
        worker.close(200)
    asyncio.run(pin())
    with LoopSession(folder_tiers(tmp_path, LAYOUT)) as session:
        worker = Worker(session, "r", options=FAST)
        worker.drain(200)  # the bucket's copy of the log is made after the pin
        worker.close(200)
    shutil.rmtree(tmp_path / "pfs")
    assert run(tmp_path).ok
    assert catalog(tmp_path).checkpoints[0].pins == ("paper",)


def test_damage_in_the_only_replica_rebuilds_nothing(tmp_path: Path) -> None:
    """The authority never claims what it does not have."""
    (attempt,) = stored(tmp_path, (1,))
    for tier in ("pfs", "nvme"):
        shutil.rmtree(tmp_path / tier)
    shard = tmp_path / "object" / attempt.path("shard-00000-of-00001.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    report = run(tmp_path)
    assert not report.ok
    assert "shard-00000" in report.rebuilt[0].error
    assert not (tmp_path / "pfs" / attempt.record_path(0)).exists()
    assert shard.read_bytes() == data


def test_a_complete_attempt_of_a_dead_process_is_committed_and_an_incomplete_one_is_not(tmp_path: Path) -> None:
    tiers = folder_tiers(tmp_path, LAYOUT)
    complete, lacking = new_attempt("r", 1), new_attempt("r", 2)

    async def stage(attempt: Attempt, rank: int) -> None:
        job = save_job(attempt, rank=rank, world_size=2)
        await persist(
            tiers.nearest,
            attempt,
            rank=rank,
            world_size=2,
            shard=job.shard,
            tensors=job.tensors,
            objects=job.objects,
            facts=job.facts,
            clock=SystemClock(),
            authority=False,
        )

    async def all_parts() -> None:
        for rank in (0, 1):
            await stage(complete, rank)
        await stage(lacking, 0)

    asyncio.run(all_parts())
    dry = run(tmp_path, dry_run=True)
    assert dry.committed == (complete,)
    assert [c.attempt for c in catalog(tmp_path).checkpoints] == []
    report = run(tmp_path)
    assert report.committed == (complete,)
    assert [a for a, _ in report.incomplete] == [lacking]
    assert "ranks 1" in report.incomplete[0][1]
    assert [c.attempt for c in catalog(tmp_path).checkpoints] == [complete]


def test_an_authority_that_does_not_answer_has_not_lost_its_log(tmp_path: Path) -> None:
    stored(tmp_path, (1,))
    tiers = folder_tiers(tmp_path, LAYOUT)
    storage = tiers.authority.storage
    assert isinstance(storage, HookedStorage)

    async def down(operation: str, path: str) -> None:
        raise TemporaryError("connection refused")

    storage.hook = down
    with pytest.raises(StorageError, match="connection refused"):
        asyncio.run(recover(tiers, "r", clock=SystemClock()))
