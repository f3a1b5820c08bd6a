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
from tierstore.storage._threads import lower_priority


def test_many_saves_and_copies_are_done_by_a_bounded_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Counter[str]()
    priorities: set[int] = set()

    def note(nice: int) -> None:
        lower_priority(nice)
        started[threading.current_thread().name.rstrip("0123456789").rstrip("-_")] += 1
        priorities.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    monkeypatch.setattr("tierstore.storage._threads.lower_priority", note)
    monkeypatch.setattr("tierstore.storage.loop.lower_priority", note)
    scopes = {"node": "node", "shared": "shared", "far": "shared"}
    tiers = [{"name": name, "uri": str(tmp_path / name), "scope": scope} for name, scope in scopes.items()]
    with tierstore.open({"run": "r", "tiers": tiers, "durable_at": "far", "io": {"threads": 2, "nice": 1}}) as store:
        for ticket in [store.save(step, {"w": torch.full((3 << 18,), float(step)), "b": torch.ones(8)}) for step in range(6)]:
            ticket.wait("durable")
        pools = {thread.name.rstrip("0123456789").rstrip("-_") for thread in threading.enumerate()}
    bounds = {"tierstore-work": 2, "tierstore-posix": 2 * len(tiers), "tierstore-posix-read": THREADS_EACH * 2 * len(tiers)}
    assert started <= Counter(bounds), "more than io.threads for a pool"
    assert set(started) == set(bounds)
    assert priorities == {min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + 1, 19)}
    assert {name for name in pools if name.startswith("tierstore")} <= {"tierstore", "tierstore-loop", "tierstore-worker", *started}
