"""The worker: saves flow through all tiers in the background, bounded, reported, and never lost."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tiers_kit import Gate, SteppedClock, was_set

from tierstore.clock import Clock
from tierstore.errors import (
    AccessError,
    ClosedError,
    CondemnedError,
    DeadlineError,
    IntegrityError,
    SaveError,
    StorageError,
    TemporaryError,
    TierFullError,
)
from tierstore.names import Attempt, part_name
from tierstore.testing.flows import HookedStorage, LoopSession, folder_tiers, new_attempt, save_job, shard_bytes
from tierstore.tiers.catalog import scan
from tierstore.tiers.engine import Engine
from tierstore.tiers.jobs import WorkerOptions
from tierstore.tiers.locks import RunLock, lock_path
from tierstore.tiers.log import append
from tierstore.tiers.tier import Scope, Tiers
from tierstore.tiers.worker import Worker

LAYOUT: dict[str, Scope] = {"memory": "node", "nvme": "node", "pfs": "shared", "object": "shared"}
SHORT: dict[str, Scope] = {"nvme": "node", "pfs": "shared", "object": "shared"}
FAST = WorkerOptions(poll_s=0.01, retry_first_s=0.01, retry_most_s=0.05, patience_s=0.5)


@contextmanager
def working(root: Path, layout: dict[str, Scope], options: WorkerOptions = FAST, **more: object) -> Iterator[tuple[Worker, LoopSession]]:
    with LoopSession(folder_tiers(root, layout, **more)) as session:  # type: ignore[arg-type]
        worker = Worker(session, "r", options=options)
        try:
            yield worker, session
        finally:
            let_through(session)
            try:
                worker.close(60)
            except SaveError:
                pass  # the test has looked at it


def let_through(session: LoopSession) -> None:
    """Nothing is held back or refused any more: else `close` waits for it, and the process's end for the thread that it holds."""
    for tier in session.tiers:
        assert isinstance(tier.storage, HookedStorage)
        if isinstance(tier.storage.hook, Gate):
            tier.storage.hook.let_through()
        tier.storage.hook = passing


async def passing(operation: str, path: str) -> None:
    """Lets everything through."""


def hook(session: LoopSession, name: str, gate: Gate) -> Gate:
    storage = session.tiers.get(name).storage
    assert isinstance(storage, HookedStorage)
    gate.before = storage.hook if isinstance(storage.hook, Gate) else None
    storage.hook = gate
    return gate


def eventually(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.005)


def latest(session: LoopSession) -> int | None:
    found = session.run(scan(session.tiers, "r")).latest()
    return found.attempt.step if found else None


def shard_on(root: Path, tier: str, attempt: Attempt, rank: int = 0, world_size: int = 1) -> bytes:
    return (root / tier / attempt.path(f"shard-{rank:05d}-of-{world_size:05d}.safetensors")).read_bytes()


def test_a_save_reaches_every_tier_and_each_replica_is_complete_in_itself(tmp_path: Path) -> None:
    with working(tmp_path, LAYOUT, durable_at="object") as (worker, _):
        ticket = worker.submit(save_job(new_attempt("r", 1)))
        ticket.wait("durable", 60)
        worker.drain(60)
        assert all(ticket.done(level) for level in ("staged", "committed", "durable", *LAYOUT))
        assert [e.level for e in ticket.events][:2] == ["staged", "memory"]
        for tier in LAYOUT:
            files = {p.name for p in (tmp_path / tier / ticket.attempt.folder).iterdir()}
            assert {"manifest.json", "index.safetensors", "objects.json", "part-00000.safetensors"} <= files
            assert (tmp_path / tier / ticket.attempt.record_path(0)).read_bytes()


def test_levels_come_in_order_and_only_after_the_fact(tmp_path: Path) -> None:
    """Case 15 and case 2: with the upload held back the save is staged and committed, and nothing more is claimed."""
    with working(tmp_path, SHORT, durable_at="object") as (worker, session):
        gate = hook(session, "object", Gate("write", "put"))
        ticket = worker.submit(save_job(new_attempt("r", 1)))
        ticket.wait("committed", 60)
        assert gate.reached.wait(60)
        assert not ticket.done("object")
        assert not ticket.done("durable")
        gate.open.set()
        ticket.wait("durable", 60)
        order = [e.level for e in ticket.events]
        assert order.index("staged") < order.index("committed") < order.index("object") < order.index("durable")


def test_latest_moves_only_with_the_commit(tmp_path: Path) -> None:
    """Case 2: `latest` does not advance while the authority has not the commit record."""
    with working(tmp_path, SHORT) as (worker, session):
        worker.submit(save_job(new_attempt("r", 1))).wait("committed", 60)
        attempt = new_attempt("r", 2)
        gate = hook(session, "pfs", Gate("create", matching=attempt.log_folder))  # step 1 may still write that it was copied
        ticket = worker.submit(save_job(attempt))
        assert gate.reached.wait(60)
        assert latest(session) == 1
        gate.open.set()
        ticket.wait("committed", 60)
        assert latest(session) == 2


def test_overlapping_saves_stay_exact(tmp_path: Path) -> None:
    """Case 37 and case 20: each save has its own attempt; nothing of one gets into another, not even of the same step."""
    with working(tmp_path, LAYOUT) as (worker, _):
        attempts = [new_attempt("r", step) for step in (1, 2, 2, 3)]
        tickets = [worker.submit(save_job(a, seed=n)) for n, a in enumerate(attempts)]
        worker.drain(60)
        for seed, ticket in enumerate(tickets):
            ticket.wait("committed", 0)
            data, _ = shard_bytes(0, 1, seed=seed, nbytes=300_000)
            for tier in ("memory", "pfs", "nvme"):
                assert shard_on(tmp_path, tier, ticket.attempt) == data


def test_the_image_is_released_once_it_is_on_the_nearest_tier(tmp_path: Path) -> None:
    with working(tmp_path, SHORT) as (worker, session):
        hook(session, "pfs", Gate("write", "put", "create"))
        released: list[int] = []
        job = save_job(new_attempt("r", 1), release=lambda: released.append(1))
        image = weakref.ref(job.shard)
        ticket = worker.submit(job)
        del job
        ticket.wait("staged", 60)
        eventually(lambda: released == [1], "the image was released")
        eventually(lambda: gc.collect() >= 0 and image() is None, "nothing holds the image any more")
        assert not ticket.done("committed")


def test_close_ends_what_hangs_and_tells_what_was_only_in_memory(tmp_path: Path) -> None:
    with LoopSession(folder_tiers(tmp_path, SHORT)) as session:
        worker = Worker(session, "r", options=FAST)
        gate = hook(session, "nvme", Gate("write"))
        released: list[int] = []
        ticket = worker.submit(save_job(new_attempt("r", 1), release=lambda: released.append(1)))
        assert gate.reached.wait(60)
        gate.open.clear()
        with pytest.raises(DeadlineError, match="steps 1 are in memory only"):
            worker.close(0.05)
        assert released == [1]
        with pytest.raises(SaveError, match="closed before"):
            ticket.wait("staged", 0)
        gate.open.set()


def test_block_makes_the_next_save_wait_for_memory(tmp_path: Path) -> None:
    """Case 38: bytes in memory are bounded, by waiting."""
    size = save_job(new_attempt("r", 1)).nbytes
    with working(tmp_path, SHORT, replace(FAST, max_inflight=2 * size)) as (worker, session):
        gate = hook(session, "nvme", Gate("write"))
        for step in (1, 2):
            worker.submit(save_job(new_attempt("r", step)))
        assert gate.reached.wait(60)
        with pytest.raises(DeadlineError, match="steps 1, 2 are still in memory"):
            worker.submit(save_job(new_attempt("r", 3)), timeout_s=0.05)
        gate.open.set()
        ticket = worker.submit(save_job(new_attempt("r", 3)), timeout_s=60)
        ticket.wait("committed", 60)
        assert worker._queue.peak_nbytes <= 2 * size


def test_skip_oldest_gives_up_the_oldest_save_that_is_not_being_written(tmp_path: Path) -> None:
    size = save_job(new_attempt("r", 1)).nbytes
    with working(tmp_path, SHORT, replace(FAST, max_inflight=2 * size, backlog="skip_oldest")) as (worker, session):
        gate = hook(session, "nvme", Gate("write"))
        released: list[int] = []
        first = worker.submit(save_job(new_attempt("r", 1)))
        assert gate.reached.wait(60)  # step 1 is being written: it stays
        second = worker.submit(save_job(new_attempt("r", 2), release=lambda: released.append(2)))
        third = worker.submit(save_job(new_attempt("r", 3)), timeout_s=60)
        assert released == [2]
        with pytest.raises(SaveError, match=r"step 2 .*skipped"):
            second.wait("committed", 0)
        gate.open.set()
        first.wait("committed", 60)
        third.wait("committed", 60)
        worker.drain(60)  # a skip is the rule at work, not an error to raise
        assert latest(session) == 3


def test_a_save_larger_than_the_bound_is_let_in_alone(tmp_path: Path) -> None:
    with working(tmp_path, SHORT, replace(FAST, max_inflight=1000)) as (worker, _):
        for step in (1, 2):
            worker.submit(save_job(new_attempt("r", step)), timeout_s=60)
        worker.drain(60)


def test_with_skip_oldest_a_slow_tier_takes_the_newest_first_and_the_others_later(tmp_path: Path) -> None:
    options = replace(FAST, backlog="skip_oldest", max_waiting=1)
    with working(tmp_path, SHORT, options) as (worker, session):
        gate = hook(session, "object", Gate("write"))
        tickets = [worker.submit(save_job(new_attempt("r", step))) for step in (1, 2, 3, 4)]
        order: list[int] = []
        for ticket in tickets:
            ticket.on("object", lambda event: order.append(event.attempt.step))
        for ticket in tickets:
            ticket.wait("committed", 60)
        eventually(lambda: len([p for p in worker.pending() if p.tier == "object"]) == 4, "four wait for the bucket")
        assert gate.reached.wait(60)
        eventually(lambda: sum("put off" in p.reason for p in worker.pending()) == 2, "all but the newest are put off")
        (under_way,) = [p.attempt.step for p in worker.pending() if p.tier == "object" and p.reason == "being copied"]
        gate.open.set()
        worker.drain(60)
        assert all(t.done("object") for t in tickets)  # put off, not lost
        assert order == [under_way, *sorted({1, 2, 3, 4} - {under_way}, reverse=True)]


def test_a_dead_bucket_stops_neither_training_nor_commits_and_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Promise 6: reported once, retried for as long as the process lives, resumed when it is back."""
    with working(tmp_path, SHORT) as (worker, session):
        down = Gate("write", "put", "children", "stat", error=lambda: TemporaryError("connection refused by object"))
        hook(session, "object", down)
        tickets = [worker.submit(save_job(new_attempt("r", step))) for step in (1, 2, 3)]
        for ticket in tickets:
            ticket.wait("committed", 60)
        worker.raise_errors()  # a tier that is down is no reason to stop training
        eventually(lambda: any("connection refused" in str(e) for e in tickets[-1].errors), "the ticket has the error")
        with pytest.raises(DeadlineError, match="connection refused"):
            tickets[-1].wait("object", 0.05)
        with pytest.raises(DeadlineError, match=r"object: steps 1, 2, 3 .*connection refused") as missed:
            worker.drain()  # without a deadline: until the patience with the failing tier is over
        assert {p.tier for p in missed.value.context["pending"]} == {"object"}
        warned = [r for r in caplog.records if r.levelname == "WARNING" and "will be tried again" in r.message]
        assert len(warned) == 1
        state = {t.name: t for t in worker.status().tiers}
        assert "connection refused" in state["object"].last_error
        assert state["object"].pending == 3
        assert state["object"].pending_nbytes > 900_000
        assert state["object"].lag_s is not None
        assert state["pfs"].checkpoints == 3
        down.open.set()
        worker.drain(60)
        assert all(t.done("object") for t in tickets)


def test_a_full_bucket_parks_the_copy_and_resumes_when_there_is_room(tmp_path: Path) -> None:
    with working(tmp_path, SHORT) as (worker, session):
        storage = session.tiers.get("object").storage
        assert isinstance(storage, HookedStorage)
        storage.free = 1000
        ticket = worker.submit(save_job(new_attempt("r", 1)))
        ticket.wait("committed", 60)
        eventually(lambda: any(isinstance(e, TierFullError) for e in ticket.errors), "the ticket says that the tier is full")
        worker.raise_errors()
        assert not (tmp_path / "object" / ticket.attempt.folder).exists()
        storage.free = None
        ticket.wait("object", 60)


def test_a_full_nearest_tier_is_passed_over(tmp_path: Path) -> None:
    """Nothing is lost, and training goes on: the next tier takes the image."""
    with working(tmp_path, LAYOUT) as (worker, session):
        storage = session.tiers.get("memory").storage
        assert isinstance(storage, HookedStorage)
        storage.free = 1000
        ticket = worker.submit(save_job(new_attempt("r", 1)))
        ticket.wait("object", 60)
        assert isinstance(ticket.errors[0], TierFullError)
        assert ticket.done("staged")
        assert not ticket.done("memory")
        assert not (tmp_path / "memory" / ticket.attempt.folder).exists()


def test_when_no_tier_takes_a_save_it_stays_in_memory_and_is_tried_again(tmp_path: Path) -> None:
    with working(tmp_path, SHORT) as (worker, session):
        gates = [hook(session, n, Gate("write", error=lambda: TemporaryError("down"))) for n in ("nvme", "pfs")]
        ticket = worker.submit(save_job(new_attempt("r", 1)))
        eventually(lambda: len(ticket.errors) >= 2, "both tiers' failures are on the ticket")
        with pytest.raises(DeadlineError, match="steps 1 are in memory only"):
            worker.drain(0.05)
        for gate in gates:
            gate.open.set()
        ticket.wait("object", 60)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_failed_save_surfaces_as_the_policy_says(tmp_path: Path, on_error: str, caplog: pytest.LogCaptureFixture) -> None:
    """Cases 14, 16 and 48: raised once at the next call, or logged; always on the ticket."""
    with working(tmp_path, SHORT, replace(FAST, on_error=on_error)) as (worker, session):  # type: ignore[arg-type]
        damaged = Gate("write", error=lambda: SaveError("the image changed under us"))
        hook(session, "nvme", damaged)
        ticket = worker.submit(save_job(new_attempt("r", 1)))
        with pytest.raises(SaveError, match=r"step 1 .*the image changed"):
            ticket.wait("committed", 60)
        eventually(lambda: "the image changed" in caplog.text, "it was logged")
        damaged.open.set()
        if on_error == "raise":
            with pytest.raises(SaveError, match=r"step 1 .*'nvme' failed") as raised:
                worker.raise_errors()
            assert isinstance(raised.value.__cause__, SaveError)
        worker.submit(save_job(new_attempt("r", 2))).wait("committed", 60)  # each error is raised once
        worker.drain(60)
        assert latest(session) == 2


@pytest.mark.parametrize("at_close", [False, True])
def test_of_two_failures_the_one_that_was_told_hides_no_other(tmp_path: Path, at_close: bool) -> None:
    """Who waits for its own save gets the failure there, now or later; that of another save is still raised."""
    with LoopSession(folder_tiers(tmp_path, SHORT)) as session:
        worker = Worker(session, "r", options=FAST)
        hook(session, "nvme", Gate("write", error=lambda: SaveError("broken")))
        first, second, third = (worker.submit(save_job(new_attempt("r", step))) for step in (1, 2, 3))
        worker.told(first.attempt)
        for ticket in (first, second, third):
            with pytest.raises(SaveError, match="broken"):
                ticket.wait("committed", 120)
        worker.told(third.attempt)
        with pytest.raises(SaveError, match=r"step 2 .*nvme"):
            worker.close(120) if at_close else worker.raise_errors()
        worker.close(120)


def test_close_waits_for_no_commit_that_was_given_up(tmp_path: Path) -> None:
    """The copies to further tiers waited for it for ever, and `close` without a deadline for them."""
    with LoopSession(folder_tiers(tmp_path, SHORT)) as session:
        worker = Worker(session, "r", options=FAST)
        hook(session, "nvme", Gate("read_into", error=lambda: IntegrityError("its only copy is damaged"), matching="/shard-"))
        ticket = worker.submit(save_job(new_attempt("r", 1)))
        with pytest.raises(SaveError, match="its only copy is damaged"):
            ticket.wait("committed", 120)
        with pytest.raises(SaveError, match=r"step 1 .*copying to tier 'pfs' failed"):
            worker.close()


def test_an_error_that_nobody_saw_is_raised_at_close(tmp_path: Path) -> None:
    """Case 16: `close` names the step and the tier."""
    with LoopSession(folder_tiers(tmp_path, SHORT)) as session:
        worker = Worker(session, "r", options=FAST)
        hook(session, "nvme", Gate("write", error=lambda: SaveError("broken")))
        ticket = worker.submit(save_job(new_attempt("r", 9)))
        eventually(lambda: ticket.failure is not None, "the save failed")
        with pytest.raises(SaveError, match=r"step 9 .*nvme"):
            worker.close(60)
        worker.close()  # idempotent
        with pytest.raises(ClosedError):
            worker.submit(save_job(new_attempt("r", 10)))


def test_a_denied_bucket_is_raised_once_and_tried_on(tmp_path: Path) -> None:
    """What needs a person is said at once, and nothing is given up: credentials may be renewed while training runs."""
    options = replace(FAST, retry_most_s=0.05)
    with working(tmp_path, SHORT, options) as (worker, session):
        denied = hook(session, "object", Gate("write", "put", error=lambda: AccessError("403 from object")))
        ticket = worker.submit(save_job(new_attempt("r", 1)))
        eventually(lambda: any(isinstance(e, AccessError) for e in ticket.errors), "the ticket has the error")
        with pytest.raises(SaveError, match=r"'object' .*403"):
            worker.raise_errors()
        worker.raise_errors()
        denied.open.set()
        ticket.wait("object", 60)


def test_a_stalled_authority_keeps_training_free_and_the_backlog_reported(tmp_path: Path) -> None:
    """Cases 42 and 51: a shared tier that hangs stalls neither `submit` nor the node tier; the deadline names it."""
    with working(tmp_path, LAYOUT) as (worker, session):
        stalled = hook(session, "pfs", Gate("write", "create", "put"))
        tickets = [worker.submit(save_job(new_attempt("r", step)), timeout_s=60) for step in (1, 2, 3)]
        for ticket in tickets:
            ticket.wait("nvme", 60)
        assert stalled.reached.wait(60)
        with pytest.raises(DeadlineError, match=r"pfs: steps 1, 2, 3"):
            worker.drain(0.05)
        assert sum(p.nbytes for p in worker.pending() if p.tier == "pfs") > 900_000
        stalled.open.set()
        worker.drain(60)
        assert all(t.done("object") for t in tickets)


def test_what_close_left_behind_is_resumed_by_the_next_process(tmp_path: Path) -> None:
    with LoopSession(folder_tiers(tmp_path, SHORT)) as session:
        worker = Worker(session, "r", options=FAST)
        hook(session, "pfs", Gate("write"))
        worker.submit(save_job(new_attempt("r", 4), seed=4)).wait("staged", 60)
        with pytest.raises(DeadlineError, match="pfs: steps 4"):
            worker.close(0.05)
        let_through(session)
    with working(tmp_path, SHORT) as (worker, session):
        report = worker.adopt()  # as `resume` does: committed before anyone asks for the newest
        assert report is not None
        assert latest(session) == 4
        worker.drain(60)
        found = session.run(scan(session.tiers, "r")).checkpoints[0]
        assert found.complete_on == ("nvme", "pfs", "object")


def ranks(
    root: Path, layout: dict[str, Scope], world_size: int, options: WorkerOptions = FAST, *, clock: Clock | None = None
) -> list[tuple[Worker, LoopSession]]:
    sessions = [LoopSession(folder_tiers(root, layout), clock=clock) for _ in range(world_size)]
    return [(Worker(s, "r", rank=n, options=options), s) for n, s in enumerate(sessions)]


def finish(workers: list[tuple[Worker, LoopSession]]) -> None:
    for worker, session in workers:
        try:
            worker.close(60)
        except SaveError:
            pass  # the test has looked at it
        session.close()


def test_ranks_on_one_node_commit_without_a_collective(tmp_path: Path) -> None:
    """Two processes share the node's tiers and its lock: whoever has it carries both parts, and both tickets tell."""
    workers = ranks(tmp_path, LAYOUT, 2)
    try:
        attempt = new_attempt("r", 1)
        tickets = [w.submit(save_job(attempt, rank=n, world_size=2)) for n, (w, _) in enumerate(workers)]
        for ticket in tickets:
            for level in ("staged", "memory", "nvme", "committed", "object"):
                ticket.wait(level, 60)
        for worker, _ in workers:
            worker.drain(60)  # the documents beside the parts on this node come after the commit, at leisure
        info = workers[0][1].run(scan(workers[0][1].tiers, "r")).checkpoints[0]
        assert info.world_size == 2
        assert info.complete_on == tuple(LAYOUT)
    finally:
        finish(workers)


def test_ranks_on_two_nodes_commit_and_each_node_holds_its_part(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    sessions = []
    for node in range(2):
        local = folder_tiers(tmp_path / f"node{node}", {"nvme": "node"}).tiers
        far = folder_tiers(shared, {"pfs": "shared", "object": "shared"})
        sessions.append(LoopSession(Tiers(tiers=(*local, *far.tiers), authority=far.authority, durable_at=far.authority, store_id="s")))
    workers = [(Worker(s, "r", rank=n, options=FAST), s) for n, s in enumerate(sessions)]
    try:
        attempt = new_attempt("r", 1)
        tickets = [w.submit(save_job(attempt, rank=n, world_size=2)) for n, (w, _) in enumerate(workers)]
        for ticket in tickets:
            ticket.wait("object", 60)
        for worker, _ in workers:
            worker.drain(60)
        for node in range(2):
            names = {p.name for p in (tmp_path / f"node{node}" / "nvme" / attempt.folder).iterdir() if p.name.startswith("shard")}
            assert names == {f"shard-{node:05d}-of-00002.safetensors"}
    finally:
        finish(workers)


def test_a_rank_that_never_reports_condemns_the_attempt_by_name(tmp_path: Path) -> None:
    """Cases 43 and 44: no hang; every rank that did report gets the same error."""
    clock = SteppedClock()
    workers = ranks(tmp_path, SHORT, 3, replace(FAST, commit_timeout_s=30.0), clock=clock)
    try:
        attempt = new_attempt("r", 1)
        tickets = [w.submit(save_job(attempt, rank=n, world_size=3)) for n, (w, _) in enumerate(workers[:2])]
        parts = [tmp_path / "pfs" / attempt.path(part_name(rank)) for rank in range(2)]
        eventually(lambda: all(part.exists() for part in parts), "the two have reported")
        # Again and again: a rank whose part another one's worker has carried may not have begun to count yet.
        eventually(lambda: clock.advance(100) or all(ticket.failure is not None for ticket in tickets), "both hear of it")
        for ticket in tickets:
            with pytest.raises(SaveError, match="rank 2") as error:
                ticket.wait("committed", 60)
            assert isinstance(error.value.__cause__, CondemnedError)
            assert error.value.__cause__.context["missing"] == [2]
        assert latest(workers[0][1]) is None
    finally:
        finish(workers)


def test_a_foreign_lock_does_not_keep_a_save_from_being_staged(tmp_path: Path) -> None:
    """`tierstore sync` in another process: the trainer stages, looks on, and goes on when the lock is free."""
    with working(tmp_path, SHORT) as (worker, session):
        path = lock_path(session.tiers, "r")
        other = RunLock(path, "r")
        other.acquire()
        ticket = worker.submit(save_job(new_attempt("r", 1)))
        ticket.wait("staged", 60)
        eventually(lambda: any("another process" in p.reason for p in worker.pending()), "the worker looks on")
        assert not ticket.done("committed")
        assert ticket.errors == ()
        other.release()
        ticket.wait("object", 60)


def test_a_forked_child_gets_a_clear_refusal(tmp_path: Path) -> None:
    with working(tmp_path, SHORT) as (worker, _):
        worker.submit(save_job(new_attempt("r", 1))).wait("committed", 60)
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork with threads: that is what is tested
            child = os.fork()
        if child == 0:
            try:
                worker.submit(save_job(new_attempt("r", 2)))
            except ClosedError as error:
                os.write(write, error.hint.encode())
            finally:
                os._exit(0)
        os.close(write)
        assert b"each forked process" in os.read(read, 1000)
        os.close(read)
        os.waitpid(child, 0)


def test_progress_tells_each_file_up_to_its_end(tmp_path: Path) -> None:
    seen: dict[tuple[str, str], list[tuple[int, int]]] = {}

    def note(tier: str, attempt: Attempt, file: str, nbytes_done: int, nbytes: int) -> None:
        seen.setdefault((tier, file), []).append((nbytes_done, nbytes))

    with LoopSession(folder_tiers(tmp_path, SHORT)) as session:
        worker = Worker(session, "r", options=FAST, progress=note)
        worker.submit(save_job(new_attempt("r", 1), nbytes=20_000_000))
        worker.close(60)
    for tier in ("pfs", "object"):
        events = seen[tier, "shard-00000-of-00001.safetensors"]
        assert len(events) > 2
        assert events[-1][0] == events[-1][1]
        assert [e[0] for e in events] == sorted(e[0] for e in events)


def test_a_fault_in_the_program_fails_one_save_and_not_the_worker(tmp_path: Path) -> None:
    with working(tmp_path, SHORT) as (worker, session):
        job = save_job(new_attempt("r", 1))
        ticket = worker.submit(replace(job, facts={"created_at": object()}))
        with pytest.raises(SaveError):
            ticket.wait("committed", 60)
        with pytest.raises(SaveError):
            worker.raise_errors()
        worker.submit(save_job(new_attempt("r", 2))).wait("committed", 60)
        assert latest(session) == 2


def test_close_gives_up_on_an_image_that_no_tier_takes(tmp_path: Path) -> None:
    """Without a deadline it used to wait for ever: only copies, not images, counted as failing."""
    with working(tmp_path, SHORT, replace(FAST, patience_s=0.1)) as (worker, session):
        for name in ("nvme", "pfs"):
            hook(session, name, Gate("write", error=lambda: TemporaryError("down")))
        for step in (1, 2):
            worker.submit(save_job(new_attempt("r", step)))
        with pytest.raises(DeadlineError, match="steps 1, 2 are in memory only"):
            worker.close()


def test_close_gives_up_on_a_full_authority_while_every_other_tier_is_well(tmp_path: Path) -> None:
    """It used to wait for ever: what waits on the other tiers for the commit was not counted as failing."""
    with working(tmp_path, SHORT, replace(FAST, patience_s=0.1)) as (worker, session):
        hook(session, "pfs", Gate("write", error=lambda: TierFullError("full")))
        ticket = worker.submit(save_job(new_attempt("r", 1)))
        ticket.wait("staged", 60)
        with pytest.raises(DeadlineError, match="pfs: steps 1"):
            worker.close()


def test_a_blocked_save_is_answered_when_no_tier_takes_the_ones_before(tmp_path: Path) -> None:
    job = save_job(new_attempt("r", 1))
    with working(tmp_path, SHORT, replace(FAST, patience_s=0.1, max_inflight=job.nbytes)) as (worker, session):
        for name in ("nvme", "pfs"):
            hook(session, name, Gate("write", error=lambda: TemporaryError("the disk is gone")))
        worker.submit(job)
        with pytest.raises(DeadlineError, match=r"no tier has taken step 1 for 0\.1 s.*the disk is gone"):
            worker.submit(save_job(new_attempt("r", 2)))


def test_a_save_that_is_tried_again_still_tells_why_no_tier_took_it(tmp_path: Path) -> None:
    """While the next try was under way the reason was only "being written to pfs": what to mend was told by luck."""
    job = save_job(new_attempt("r", 1))
    with working(tmp_path, SHORT, replace(FAST, patience_s=0.1, max_inflight=job.nbytes)) as (worker, session):
        hook(session, "nvme", Gate("write", error=lambda: TemporaryError("no disk")))
        refusing = hook(session, "pfs", Gate("write", error=lambda: TemporaryError("the share is gone")))
        worker.submit(job)
        assert refusing.reached.wait(60)
        holding = hook(session, "pfs", Gate("write"))
        assert holding.reached.wait(60)  # the second try is under way
        with pytest.raises(DeadlineError, match=r"being written to pfs.*nvme: no disk; pfs: the share is gone"):
            worker.submit(save_job(new_attempt("r", 2)))
        holding.open.set()
        hook(session, "nvme", Gate())


def test_skip_oldest_skips_an_image_that_is_refused_while_the_next_save_waits(tmp_path: Path) -> None:
    """The rule was asked once, while the image was being written, and never again: training stood still."""
    job = save_job(new_attempt("r", 1))
    writing, refuse = threading.Event(), threading.Event()

    async def refused(operation: str, path: str) -> None:
        if operation == "write":
            writing.set()
            await was_set(refuse)
            raise TemporaryError("down")

    with working(tmp_path, SHORT, replace(FAST, backlog="skip_oldest", max_inflight=job.nbytes)) as (worker, session):
        for name in ("nvme", "pfs"):
            storage = session.tiers.get(name).storage
            assert isinstance(storage, HookedStorage)
            storage.hook = refused
        first = worker.submit(job)
        assert writing.wait(60)
        caller = threading.Thread(target=worker.submit, args=(save_job(new_attempt("r", 2)),))
        caller.start()
        refuse.set()
        caller.join(60)
        assert not caller.is_alive()
        with pytest.raises(SaveError, match="skipped"):
            first.wait("committed", 60)


def test_drain_does_not_say_done_when_the_authority_can_not_be_looked_at(tmp_path: Path) -> None:
    with working(tmp_path, SHORT) as (worker, session):
        hook(session, "pfs", Gate("list", "children", "read", error=lambda: TemporaryError("the share is away")))
        with pytest.raises(TemporaryError, match="the share is away"):
            worker.drain()
        assert isinstance(session.tiers.get("pfs").storage, HookedStorage)
        session.tiers.get("pfs").storage.hook = passing  # type: ignore[attr-defined]
        worker.drain()


def test_drain_within_no_time_does_not_say_done_before_it_looked(tmp_path: Path) -> None:
    with working(tmp_path, SHORT) as (worker, session):
        gate = hook(session, "pfs", Gate("list"))
        with pytest.raises(DeadlineError, match="looking for what other processes left"):
            worker.drain(0.05)
        gate.open.set()
        worker.drain(60)


def test_when_the_background_work_dies_close_says_so_instead_of_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    die = threading.Event()

    async def dies(engine: Engine) -> None:
        await was_set(die)
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(Engine, "rescan_when_idle", dies)
    with working(tmp_path, SHORT, replace(FAST, patience_s=600.0)) as (worker, session):  # the end is what it hears of, not its patience's
        hook(session, "pfs", Gate("write", error=lambda: TemporaryError("down")))
        worker.submit(save_job(new_attempt("r", 1))).wait("staged", 60)
        die.set()
        with pytest.raises(SaveError, match="ended unexpectedly"):
            worker.close()


def test_a_ticket_ends_when_the_worker_is_closed_before_its_copies_are_done(tmp_path: Path) -> None:
    """Who waited for it without a timeout waited for ever."""
    with working(tmp_path, SHORT) as (worker, session):
        hook(session, "object", Gate("write", error=lambda: TemporaryError("down")))
        ticket = worker.submit(save_job(new_attempt("r", 1)))
        ticket.wait("committed", 60)
        with pytest.raises(DeadlineError):
            worker.close(0.05)
        with pytest.raises(SaveError, match="closed before this save was everywhere"):
            ticket.wait("object", 60)
        assert ticket.done("committed")


def test_a_ticket_ends_when_its_checkpoint_expires_on_the_way(tmp_path: Path) -> None:
    with working(tmp_path, SHORT) as (worker, session):
        down = hook(session, "object", Gate("write", error=lambda: TemporaryError("down")))
        ticket = worker.submit(save_job(new_attempt("r", 1)))
        ticket.wait("committed", 60)
        storage = session.tiers.get("pfs").storage
        session.run(append(storage, ticket.attempt, "expired", {"rule": "test"}, clock=session.clock))
        with pytest.raises(SaveError, match="expired"):
            ticket.wait("object", 60)
        down.open.set()


def test_storage_errors_are_what_callers_can_catch() -> None:
    assert issubclass(TierFullError, StorageError)
