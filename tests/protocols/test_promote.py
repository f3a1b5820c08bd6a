"""Promotion: computed from what the tiers hold, continued by anyone from any state, and never with bad bytes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fork_kit import run_forked

from tierstore.clock import SystemClock
from tierstore.crashpoints import CRASH_EXIT
from tierstore.errors import IntegrityError, LockedError, TierFullError
from tierstore.names import Attempt
from tierstore.testing.flows import HookedStorage, folder_tiers, new_attempt, save_job
from tierstore.tiers.budget import ByteBudget
from tierstore.tiers.catalog import scan
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.locks import RunLock, lock_path
from tierstore.tiers.persist import persist
from tierstore.tiers.promote import pending, promote, reconcile
from tierstore.tiers.tier import Tiers
from tierstore.tiers.verify import verify
from tierstore.tiers.view import observe

LAYOUT = {"memory": "node", "nvme": "node", "pfs": "shared", "object": "shared"}
CLOCK = SystemClock()


async def stage(tiers: Tiers, attempt: Attempt, *, seed: int = 0, rank: int = 0, world_size: int = 1, nbytes: int = 300_000) -> None:
    job = save_job(attempt, seed=seed, rank=rank, world_size=world_size, nbytes=nbytes)
    await persist(
        tiers.nearest,
        attempt,
        rank=rank,
        world_size=world_size,
        shard=job.shard,
        tensors=job.tensors,
        objects=job.objects,
        facts=job.facts,
        clock=CLOCK,
        authority=tiers.is_authority(tiers.nearest),
    )


def hooked(tiers: Tiers, name: str) -> HookedStorage:
    storage = tiers.get(name).storage
    assert isinstance(storage, HookedStorage)
    return storage


def contents(root: Path, tier: str, attempt: Attempt) -> dict[str, bytes]:
    folder = root / tier / attempt.folder
    return {p.name: p.read_bytes() for p in folder.iterdir()} if folder.is_dir() else {}


def replicas(tiers: Tiers, run: str = "r") -> dict[int, set[str]]:
    catalog = asyncio.run(scan(tiers, run))
    return {c.attempt.step: set(c.complete_on) for c in catalog.checkpoints}


def test_a_staged_attempt_is_carried_committed_completed_and_promoted(tmp_path: Path) -> None:
    async def run() -> None:
        tiers = folder_tiers(tmp_path, LAYOUT)
        attempt = new_attempt("r", 3)
        await stage(tiers, attempt)
        kinds = {(c.tier, c.kind) for c in pending(await scan(tiers, "r"), tiers)}
        assert kinds == {("nvme", "complete"), ("pfs", "commit")}
        report = await reconcile(tiers, "r", clock=CLOCK)
        assert report.ok
        assert pending(await scan(tiers, "r"), tiers) == []
        assert len({tuple(sorted(contents(tmp_path, name, attempt).items())) for name in LAYOUT}) == 1
        assert (await reconcile(tiers, "r", clock=CLOCK)).done == ()

    asyncio.run(run())
    assert replicas(folder_tiers(tmp_path, LAYOUT)) == {3: set(LAYOUT)}


def test_the_newest_goes_first(tmp_path: Path) -> None:
    async def run() -> list[int]:
        tiers = folder_tiers(tmp_path, {"pfs": "shared", "object": "shared"})
        for step in (1, 2, 10, 9):
            await stage(tiers, new_attempt("r", step), seed=step)
            await reconcile(tiers, "r", clock=CLOCK, commit_only=True)
        order = [c.attempt.step for c in pending(await scan(tiers, "r"), tiers)]
        await reconcile(tiers, "r", clock=CLOCK)
        made = [path for op, path in hooked(tiers, "object").calls if op == "put" and path.endswith("000000.json")]
        assert [int(path.split("step-")[1][:10]) for path in made] == order
        return order

    assert asyncio.run(run()) == [10, 9, 2, 1]


def test_a_damaged_source_is_quarantined_and_another_tier_serves(tmp_path: Path) -> None:
    """Case 98: the bytes are proved while they are copied; bad ones reach no tier."""

    async def run() -> None:
        tiers = folder_tiers(tmp_path, {"nvme": "node", "pfs": "shared", "object": "shared"})
        attempt = new_attempt("r", 5)
        await stage(tiers, attempt)
        await reconcile(tiers, "r", clock=CLOCK, only=["nvme", "pfs"])
        good = contents(tmp_path, "pfs", attempt)
        shard = tmp_path / "nvme" / attempt.path("shard-00000-of-00001.safetensors")
        flip(shard, 200_000)
        await reconcile(tiers, "r", clock=CLOCK)
        assert contents(tmp_path, "object", attempt) == good
        view = await observe(tiers, attempt)
        assert view.log.quarantined == {("nvme", "shard-00000-of-00001.safetensors")}
        assert "object" in view.log.replicated

    asyncio.run(run())


@pytest.mark.parametrize("most", [0, 1])
def test_of_very_many_shards_the_record_of_a_copy_says_nothing(tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50,000 ranks it would be too large to be read again, and the whole log with it."""
    monkeypatch.setattr("tierstore.tiers.log.FILES_OF_AT_MOST", most)

    async def run() -> None:
        tiers = folder_tiers(tmp_path, {"pfs": "shared", "object": "shared"})
        attempt = new_attempt("r", 5)
        await stage(tiers, attempt)
        await reconcile(tiers, "r", clock=CLOCK)
        data = (await observe(tiers, attempt)).log.replicated["object"].data
        assert ("files" in data) == bool(most)
        assert (await verify(tiers, "r", level="full")).findings == ()

    asyncio.run(run())


def test_damage_everywhere_copies_nothing_and_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        tiers = folder_tiers(tmp_path, {"pfs": "shared", "object": "shared"})
        attempt = new_attempt("r", 5)
        await stage(tiers, attempt)
        await reconcile(tiers, "r", clock=CLOCK, commit_only=True)
        flip(tmp_path / "pfs" / attempt.path("shard-00000-of-00001.safetensors"), 200_000)
        with pytest.raises(IntegrityError, match=r"no good copy of .*shard-00000.*pfs"):
            await promote(tiers, attempt, "object", clock=CLOCK)
        assert not any(name.startswith("shard") for name in contents(tmp_path, "object", attempt))
        assert "manifest.json" not in contents(tmp_path, "object", attempt)

    asyncio.run(run())


def test_a_full_target_refuses_before_the_first_byte(tmp_path: Path) -> None:
    async def run() -> None:
        tiers = folder_tiers(tmp_path, {"pfs": "shared", "object": "shared"})
        attempt = new_attempt("r", 5)
        await stage(tiers, attempt)
        await reconcile(tiers, "r", clock=CLOCK, commit_only=True)
        hooked(tiers, "object").free = 1000
        with pytest.raises(TierFullError, match="1000 bytes free"):
            await promote(tiers, attempt, "object", clock=CLOCK)
        assert contents(tmp_path, "object", attempt) == {}
        hooked(tiers, "object").free = None
        assert (await promote(tiers, attempt, "object", clock=CLOCK)).done

    asyncio.run(run())


def test_cancelling_a_copy_leaves_nothing_and_the_next_one_finishes(tmp_path: Path) -> None:
    async def run() -> None:
        tiers = folder_tiers(tmp_path, {"pfs": "shared", "object": "shared"})
        attempt = new_attempt("r", 5)
        await stage(tiers, attempt, nbytes=12_000_000)
        await reconcile(tiers, "r", clock=CLOCK, commit_only=True)
        reading = asyncio.Event()

        async def stall(operation: str, path: str) -> None:
            if operation == "read_into":
                reading.set()
                await asyncio.Event().wait()

        hooked(tiers, "pfs").hook = stall
        task = asyncio.ensure_future(promote(tiers, attempt, "object", clock=CLOCK))
        await asyncio.wait_for(reading.wait(), 120)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not any(name.startswith("shard") for name in contents(tmp_path, "object", attempt))
        leftovers = tmp_path / "object" / ".tmp"
        assert not leftovers.exists() or not list(leftovers.iterdir())
        hooked(tiers, "pfs").hook = folder_tiers(tmp_path, {"x": "shared"}).nearest.storage.hook  # type: ignore[attr-defined]
        assert (await promote(tiers, attempt, "object", clock=CLOCK)).done

    asyncio.run(run())


def test_bytes_in_flight_are_bounded_over_all_copies(tmp_path: Path) -> None:
    """Case 38: many files, a small budget: memory stays within it."""

    async def run() -> None:
        tiers = folder_tiers(tmp_path, {"pfs": "shared", "object": "shared"})
        attempt = new_attempt("r", 5)
        for rank in range(4):
            await stage(tiers, attempt, rank=rank, world_size=4, nbytes=20_000_000, seed=1)
        budget = ByteBudget(17 << 20, patience_s=1e6)  # nobody is let through over it, however long this machine stands still
        context = replace(CopyContext.make(tiers, CLOCK, files_in_flight=4), budget=budget)
        report = await reconcile(tiers, "r", clock=CLOCK, context=context)
        assert report.ok
        assert 0 < budget.peak <= 17 << 20
        end = CLOCK.monotonic() + 120
        while budget.in_flight:  # a thread may still let go of what it has written
            assert CLOCK.monotonic() < end
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert replicas(folder_tiers(tmp_path, {"pfs": "shared", "object": "shared"})) == {5: {"pfs", "object"}}


def test_a_tier_s_bandwidth_limit_is_applied_to_what_is_written_there(tmp_path: Path) -> None:
    async def run() -> None:
        tiers = folder_tiers(tmp_path, {"pfs": "shared", "object": "shared"})
        attempt = new_attempt("r", 5)
        await stage(tiers, attempt, nbytes=2_000_000)
        await reconcile(tiers, "r", clock=CLOCK, commit_only=True)
        context = CopyContext.make(tiers, CLOCK, max_bandwidth=50_000_000)
        assert set(context.limits) == {"object"}
        taken: list[int] = []
        limiter = context.limits["object"]
        original = limiter.take

        async def take(nbytes: int) -> None:
            taken.append(nbytes)
            await original(nbytes)

        limiter.take = take  # type: ignore[method-assign]
        assert (await promote(tiers, attempt, "object", clock=CLOCK, context=context)).done
        assert sum(taken) >= 2_000_000

    asyncio.run(run())


def test_two_reconcilers_at_once_do_no_harm(tmp_path: Path) -> None:
    async def run() -> None:
        for tier in LAYOUT:
            (tmp_path / tier).mkdir()
        mine, yours = folder_tiers(tmp_path, LAYOUT), folder_tiers(tmp_path, LAYOUT)
        attempts = [new_attempt("r", step) for step in (1, 2)]
        for attempt in attempts:
            await stage(mine, attempt, seed=attempt.step)
        free = [RunLock(None, "r"), RunLock(None, "r")]  # two nodes: neither sees the other's lock
        reports = await asyncio.gather(reconcile(mine, "r", clock=CLOCK, lock=free[0]), reconcile(yours, "r", clock=CLOCK, lock=free[1]))
        assert all(r.ok for r in reports)
        for attempt in attempts:
            assert len({tuple(sorted(contents(tmp_path, name, attempt).items())) for name in LAYOUT}) == 1
            view = await observe(mine, attempt)
            assert [r.kind for r in view.records] == ["committed", "replicated"]

    asyncio.run(run())


def test_a_node_s_tier_is_worked_on_by_one_process_at_a_time(tmp_path: Path) -> None:
    tiers = folder_tiers(tmp_path, LAYOUT)
    path = lock_path(tiers, "r")
    assert path is not None
    assert path.is_relative_to(tmp_path / "memory" / ".tmp")
    code = (
        "import sys; from pathlib import Path; from tierstore.tiers.locks import RunLock\n"
        f"RunLock(Path({str(path)!r}), 'r').acquire(); print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin
    assert child.stdout
    try:
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(LockedError) as error:
            asyncio.run(reconcile(tiers, "r", clock=CLOCK))
        assert error.value.context["pid"] == child.pid
        assert error.value.exit_code == 8
        child.kill()  # however it dies, the lock is free
        child.wait(60)
        assert asyncio.run(reconcile(tiers, "r", clock=CLOCK, wait_s=60)).ok
    finally:
        child.kill()
        child.wait(60)
        child.stdin.close()
        child.stdout.close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "lock", "r")
    lock.acquire()
    (ready, tell), (wait, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # it lives on until the parent lets it go
        os.write(tell, b".")
        os.close(end)
        os.read(wait, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        os.close(lock._fd)  # as the death of this process would: nobody says that the lock is free
        lock._fd = -1
        other = os.open(tmp_path / "lock", os.O_RDWR)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
    finally:
        for fd in (ready, tell, wait, end):
            os.close(fd)
        os.waitpid(child, 0)


def test_without_a_node_tier_there_is_no_lock(tmp_path: Path) -> None:
    assert lock_path(folder_tiers(tmp_path, {"pfs": "shared", "object": "shared"}), "r") is None


def test_an_evicted_replica_and_a_superseded_checkpoint_are_not_promoted(tmp_path: Path) -> None:
    async def run() -> None:
        from tierstore.tiers.log import append

        tiers = folder_tiers(tmp_path, {"pfs": "shared", "object": "shared"})
        first = new_attempt("r", 5)
        await stage(tiers, first)
        await reconcile(tiers, "r", clock=CLOCK)
        await append(tiers.authority.storage, first, "evicting", {"tier": "object"}, clock=CLOCK)
        await append(tiers.authority.storage, first, "evicted", {"tier": "object"}, clock=CLOCK)
        assert pending(await scan(tiers, "r"), tiers) == []
        assert (await promote(tiers, first, "object", clock=CLOCK)).done
        second = new_attempt("r", 6)
        await stage(tiers, second)
        await reconcile(tiers, "r", clock=CLOCK, commit_only=True)
        third = new_attempt("r", 6)
        await stage(tiers, third)
        await reconcile(tiers, "r", clock=CLOCK, commit_only=True)
        assert [c.attempt for c in pending(await scan(tiers, "r"), tiers)] == [max(second, third)]

    asyncio.run(run())


def flip(path: Path, offset: int) -> None:
    """Flips one bit in place, as a decaying disk would."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


_SAVE = """
import sys
from pathlib import Path
from tierstore.testing.flows import LoopSession, folder_tiers, new_attempt, save_job
from tierstore.tiers.worker import Worker
tiers = folder_tiers(Path(sys.argv[1]), {"memory": "node", "nvme": "node", "pfs": "shared", "object": "shared"})
with LoopSession(tiers) as session:
    worker = Worker(session, "r")
    ticket = worker.submit(save_job(new_attempt("r", 7), seed=7))
    ticket.wait("staged", 100)
    print("staged", flush=True)
    worker.close(100)
"""

POINTS = [
    "persist.before-shard",
    "persist.after-shard",
    "persist.before-part",
    "persist.after-part",
    "persist.before-receipt",
    "persist.after-receipt",
    "commit.before-objects",
    "commit.before-index",
    "commit.before-manifest",
    "commit.before-record",
    "commit.after-record",
    *(f"{point}:{nth}" for point in ("promote.before-file", "promote.after-file") for nth in (1, 2, 5, 8, 12)),
    *(f"{point}:{nth}" for point in ("promote.before-manifest", "promote.before-record", "promote.after-record") for nth in (1, 2, 3)),
    "promote.before-replicated",
    "promote.after-replicated",
]


@pytest.mark.parametrize("point", POINTS)
def test_another_process_takes_over_from_every_instant(tmp_path: Path, point: str) -> None:
    """Case 52: a copy that was finished but not recorded, or any other half-done state, is continued by whoever comes next."""
    ran = run_forked(_SAVE, str(tmp_path), env={"TIERSTORE_CRASH_AT": point}, timeout_s=200)
    assert ran.returncode == CRASH_EXIT, ran.stderr
    tiers = folder_tiers(tmp_path, LAYOUT)
    before = asyncio.run(scan(tiers, "r"))
    assert all(c.usable for c in before.checkpoints)
    report = asyncio.run(reconcile(folder_tiers(tmp_path, LAYOUT), "r", clock=CLOCK, wait_s=60))
    assert report.ok
    after = replicas(folder_tiers(tmp_path, LAYOUT))
    receipt_written = "staged" in ran.stdout or not point.startswith("persist.") or point == "persist.after-receipt"
    assert after == ({7: set(LAYOUT)} if receipt_written else {})
    catalog = asyncio.run(scan(folder_tiers(tmp_path, LAYOUT), "r"))
    if catalog.checkpoints:
        attempt = catalog.checkpoints[0].attempt
        assert len({tuple(sorted(contents(tmp_path, name, attempt).items())) for name in LAYOUT}) == 1
