"""However much is saved and copied at once, the process starts no more threads than `io.threads` says, and those as nice as `io.nice`."""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

import tierstore
from tierstore.storage._reading import THREADS_EACH
from tierstore.storage._threads import DaemonPool, lower_priority


def test_many_saves_and_copies_are_done_by_a_bounded_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    priorities: set[int] = set()
    before = set(threading.enumerate())  # those of other tests' stores

    def note(nice: int) -> None:
        lower_priority(nice)
        names.append(threading.current_thread().name.rstrip("0123456789").rstrip("-_"))
        priorities.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    monkeypatch.setattr("tierstore.storage._threads.lower_priority", note)
    monkeypatch.setattr("tierstore.storage.loop.lower_priority", note)
    scopes = {"node": "node", "shared": "shared", "far": "shared"}
    tiers = [{"name": name, "uri": str(tmp_path / name), "scope": scope} for name, scope in scopes.items()]
    with tierstore.open({"run": "r", "tiers": tiers, "durable_at": "far", "io": {"threads": 2, "nice": 1}}) as store:
        for ticket in [store.save(step, {"w": torch.full((3 << 18,), float(step)), "b": torch.ones(8)}) for step in range(6)]:
            ticket.wait("durable")
        pools = {thread.name.rstrip("0123456789").rstrip("-_") for thread in threading.enumerate() if thread not in before}
    started = Counter(names)
    bounds = {"tierstore-work": 2, "tierstore-posix": 2 * len(tiers), "tierstore-posix-read": THREADS_EACH * 2 * len(tiers)}
    assert started <= Counter(bounds), "more than io.threads for a pool"
    assert set(started) == set(bounds)
    assert priorities == {min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + 1, 19)}
    assert {name for name in pools if name.startswith("tierstore")} <= {"tierstore", "tierstore-loop", "tierstore-worker", *started}


def test_threads_work_where_their_priority_can_not_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, who: int, priority: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "setpriority", refuse)
    pool = DaemonPool(1, "tierstore-test", nice=1)
    try:
        assert pool.submit(lambda: "done").result(timeout=200) == "done"
    finally:
        pool.shutdown()


def test_a_thread_that_is_nicer_already_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(os, "getpriority", lambda which, who: 0 if who == os.getpid() else 12)
    monkeypatch.setattr(os, "setpriority", lambda which, who, priority: set_to.append(priority))
    thread = threading.Thread(target=lower_priority, args=(5,))
    thread.start()
    thread.join()
    assert set_to == []
