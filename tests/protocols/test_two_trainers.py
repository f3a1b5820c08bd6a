"""Two trainers of one run on one node: the one whose commits wait for the other says so, and whom it waits for."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tiers_kit import SteppedClock

from tierstore.testing.flows import LoopSession, folder_tiers, new_attempt, save_job
from tierstore.tiers.jobs import WorkerOptions
from tierstore.tiers.locks import RunLock, lock_path
from tierstore.tiers.worker import Worker

FAST = WorkerOptions(poll_s=0.005, retry_first_s=0.01, retry_most_s=0.05, patience_s=0.5)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and r.name == "tierstore.tiers.lanes"]


def waited_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.005)


@contextmanager
def trainer(root: Path, clock: SteppedClock, rank: int = 0) -> Iterator[Worker]:
    layout = {"node": "node", "shared": "shared", "far": "shared"}
    with LoopSession(folder_tiers(root, layout), clock=clock) as session:  # type: ignore[arg-type]
        worker = Worker(session, "r", rank=rank, options=FAST)
        yield worker
        worker.close(60)


@contextmanager
def another_process(root: Path) -> Iterator[None]:
    """It works on the run's copies on this node."""
    lock = RunLock(lock_path(folder_tiers(root, {"node": "node", "shared": "shared"}), "r"), "r")
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def test_a_trainer_whose_commit_waits_for_another_process_names_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = SteppedClock()
    with trainer(tmp_path, clock) as worker:
        with another_process(tmp_path):
            ticket = worker.submit(save_job(new_attempt("r", 1)))
            # On the authority: by its own first look the ten seconds count, not by another tier's.
            waited_for(lambda: any(p.tier == "shared" and "another process" in p.reason for p in worker.pending()), "the worker looks on")
            assert not warnings(caplog), "a moment is no news"
            clock.advance(11.0)
            waited_for(lambda: bool(warnings(caplog)), "it is said")
            assert not ticket.done("committed")
        ticket.wait("committed", 60)
    said, goes_on = warnings(caplog)
    assert f"is not committed yet: process {os.getpid()} works on copies of run 'r' on this node, and has for 11 s" in said
    assert "goes on: the other process let this node's tiers go" in goes_on


def test_ranks_of_one_job_wait_for_each_other_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, attempt = SteppedClock(), new_attempt("r", 1)
    with ExitStack() as stack:
        workers = [stack.enter_context(trainer(tmp_path, clock, rank)) for rank in (0, 1)]
        with another_process(tmp_path):
            tickets = [worker.submit(save_job(attempt, rank=rank, world_size=2)) for rank, worker in enumerate(workers)]
            for number in range(3):
                for worker in workers:
                    worker.pending()
                waited_for(lambda: all(any("another process" in p.reason for p in w.pending()) for w in workers), f"they look on, {number}")
                clock.advance(11.0)
        for ticket in tickets:
            ticket.wait("committed", 60)
    assert not warnings(caplog)
