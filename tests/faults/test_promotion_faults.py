"""Promotion meets every fault at every operation: the outcome is a result or a typed error, and the next pass finishes the work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tierstore.clock import SystemClock
from tierstore.errors import DeadlineError, TierStoreError
from tierstore.names import Attempt
from tierstore.storage.opening import open_storage
from tierstore.testing.faults import FaultKind, FaultPlan, FaultStorage, sweep
from tierstore.testing.flows import HookedStorage, LoopSession, folder_tiers, new_attempt, save_job
from tierstore.testing.servers import SeaweedServer
from tierstore.tiers.catalog import scan
from tierstore.tiers.jobs import WorkerOptions
from tierstore.tiers.log import read_log
from tierstore.tiers.persist import persist
from tierstore.tiers.promote import ReconcileReport, reconcile
from tierstore.tiers.repair import repair
from tierstore.tiers.tier import Scope, Tier, Tiers
from tierstore.tiers.verify import verify
from tierstore.tiers.worker import Worker

LAYOUT: dict[str, Scope] = {"nvme": "node", "pfs": "shared", "object": "shared"}
CLOCK = SystemClock()
FAST = WorkerOptions(poll_s=0.01, retry_first_s=0.01, retry_most_s=0.1, patience_s=0.5)


def faulty(root: Path, plan: FaultPlan) -> Tiers:
    tiers = folder_tiers(root, LAYOUT)
    for tier in tiers:
        assert isinstance(tier.storage, HookedStorage)
        tier.storage.inner = FaultStorage(tier.storage.inner, plan)
    return tiers


async def stage(tiers: Tiers, attempt: Attempt) -> None:
    job = save_job(attempt, seed=attempt.step, nbytes=100_000)
    await persist(
        tiers.nearest,
        attempt,
        rank=0,
        world_size=1,
        shard=job.shard,
        tensors=job.tensors,
        objects=job.objects,
        facts=job.facts,
        clock=CLOCK,
        authority=False,
    )


async def one_pass(tiers: Tiers, plan: FaultPlan) -> ReconcileReport | None:
    """A pass that meets the fault: a report, or a typed error (None). A hang or a cancellation ends the pass as a kill would."""
    work = asyncio.ensure_future(reconcile(tiers, "r", clock=CLOCK))
    if plan.kind == "hang":
        while not (work.done() or plan.fired):  # noqa: ASYNC110 - the plan is no coroutine's to signal
            await asyncio.sleep(0.001)
        if plan.fired:
            work.cancel()
    try:
        return await work
    except TierStoreError:
        return None
    except asyncio.CancelledError:
        assert plan.fired
        return None


async def fault_and_finish(root: Path, plan: FaultPlan) -> None:
    clean = folder_tiers(root, LAYOUT)
    await stage(clean, new_attempt("r", 1))
    report = await one_pass(faulty(root, plan), plan)
    for info in (await scan(clean, "r")).checkpoints:  # whatever happened: a checkpoint is whole, or is none
        assert info.usable
    if not plan.fired:
        assert report is not None
        assert report.ok
    again = await reconcile(clean, "r", clock=CLOCK)
    assert again.ok, (plan.fired, again)
    found = await verify(clean, "r", level="full")
    assert {f.code for f in found.findings} <= {"V115"}, plan.fired  # a bad read of a good file: `repair` proves it
    if found.findings:
        assert (await repair(clean, "r", clock=CLOCK)).exit_code == 0, plan.fired
        assert (await verify(clean, "r", level="full")).findings == (), plan.fired
    assert found.checkpoints == 3, plan.fired
    for tier in clean:
        await tier.storage.close()


@pytest.mark.parametrize("kind", ["error_before", "error_after", "short_read", "bit_flip", "no_space", "cancel", "hang"])
def test_any_fault_at_any_operation_leaves_work_that_the_next_pass_finishes(tmp_path: Path, kind: FaultKind, long_run: bool) -> None:
    for plan in sweep(kind, limit=300, step=1 if long_run else 7):
        asyncio.run(fault_and_finish(tmp_path / str(plan.nth), plan))


@pytest.fixture
def seaweed(clean_environment: None, tmp_path: Path) -> Iterator[SeaweedServer]:
    with SeaweedServer(tmp_path / "seaweed") as server:
        yield server


def with_bucket(root: Path, server: SeaweedServer) -> Tiers:
    near = folder_tiers(root, {"nvme": "node", "pfs": "shared"})
    bucket = server.make_bucket("tierstore-faults")
    storage = open_storage(f"s3://{bucket}/store", server.options())
    far = Tier(name="object", storage=storage, scope="shared")
    return replace(near, tiers=(*near.tiers, far), durable_at=far)


@pytest.mark.s3
@pytest.mark.timeout(900)
def test_a_bucket_that_dies_in_mid_upload_loses_nothing_and_stops_nothing(tmp_path: Path, seaweed: SeaweedServer) -> None:
    with LoopSession(with_bucket(tmp_path, seaweed)) as session:
        worker = Worker(session, "r", options=FAST)
        first = worker.submit(save_job(new_attempt("r", 1), nbytes=20_000_000))
        first.wait("durable", 200)
        seaweed.crash()
        tickets = [worker.submit(save_job(new_attempt("r", step), nbytes=20_000_000), timeout_s=200) for step in (2, 3)]
        for ticket in tickets:
            ticket.wait("committed", 200)
        with pytest.raises(DeadlineError, match="object"):
            tickets[-1].wait("durable", 0.5)
        seaweed.start()
        for ticket in tickets:
            ticket.wait("durable", 200)
        worker.close(200)
        report = session.run(verify(session.tiers, "r", level="full"))
        assert report.findings == ()
        assert report.checkpoints == 9


@pytest.mark.s3
def test_what_the_server_said_of_each_object_proves_it_later_without_a_download(tmp_path: Path, seaweed: SeaweedServer) -> None:
    attempt = new_attempt("r", 1)
    with LoopSession(with_bucket(tmp_path, seaweed)) as session:
        worker = Worker(session, "r", options=FAST)
        worker.submit(save_job(attempt, nbytes=20_000_000)).wait("durable", 200)
        worker.close(200)
        (info,) = session.run(scan(session.tiers, "r")).checkpoints
        assert set(info.replicated) == {"object"}
        (record,) = [r for r in session.run(read_log(session.tiers.authority.storage, attempt)) if r.kind == "replicated"]
        files = record.data["files"]
        assert {"manifest.json", "index.safetensors", "objects.json", "part-00000.safetensors"} < set(files)
        assert all(facts["checksum"] or facts["etag"] for facts in files.values())
        quick = session.run(verify(session.tiers, "r", only=["object"]))
        assert (quick.findings, quick.nbytes_read) == ((), 0)
        size = files["shard-00000-of-00001.safetensors"]["nbytes"]
        storage = session.tiers.get("object").storage
        session.run(storage.put(attempt.path("shard-00000-of-00001.safetensors"), b"\0" * size))
        changed = session.run(verify(session.tiers, "r", only=["object"]))
        assert [f.code for f in changed.findings] == ["V109"]
