"""What users of other checkpoint storage ran into around background work (CASES.md), over the public API."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from store_kit import open_over, unsynced

import tierstore
from tierstore.errors import AccessError, DeadlineError, TierStoreError
from tierstore.storage.contract import Storage
from tierstore.testing.equality import assert_same_state
from tierstore.testing.flows import HookedStorage

RULES = {"poll_s": 0.005, "retry_first_s": 0.005, "retry_most_s": 0.05}


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "step": step}


def hooked(hooks: dict[str, Callable[[str, str], Awaitable[None]]]) -> Callable[[str], Storage]:
    """Storages with a hook for the tiers that are named."""

    def make(uri: str) -> Storage:
        storage = HookedStorage(unsynced(uri))
        if (hook := hooks.get(Path(uri).name)) is not None:
            storage.hook = hook
        return storage

    return make


class Gate:
    """Writes of a checkpoint's files wait until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    async def __call__(self, operation: str, path: str) -> None:
        if operation in ("write", "put", "create") and "/step-" in path:
            while not self.open.is_set():  # noqa: ASYNC110 - opened by another thread
                await asyncio.sleep(0.002)


def test_no_call_ever_syncs_the_whole_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # case 4
    def refuse() -> None:
        raise AssertionError("os.sync was called")

    monkeypatch.setattr(os, "sync", refuse)
    with tierstore.open({"version": 1, "run": "r", "tiers": [{"name": "disk", "uri": str(tmp_path / "disk")}]}) as store:
        store.save(1, state_of(1)).wait("durable", timeout=200)


def test_latest_stays_where_it_is_until_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # cases 2 and 15
    gate = Gate()
    gate.open.set()
    with open_over(monkeypatch, hooked({"shared": gate}), tmp_path, rules=RULES) as store:
        store.save(1, state_of(1)).wait("durable", timeout=200)
        gate.open.clear()
        ticket = store.save(2, state_of(2))
        ticket.wait("staged", timeout=200)
        latest = store.latest()
        assert latest is not None
        assert latest.attempt.step == 1
        assert not ticket.done("committed")
        assert_same_state(store.load(), state_of(1))
        gate.open.set()
        ticket.wait("durable", timeout=200)
        assert_same_state(store.load(), state_of(2))
        order = [event.level for event in ticket.events if event.error is None]
        assert [level for level in order if level in ("staged", "committed", "durable")] == ["staged", "committed", "durable"]


def test_an_upload_that_fails_is_named_at_close_with_its_step_and_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # case 16
    async def refuse(operation: str, path: str) -> None:
        if operation in ("write", "put", "create") and "/step-" in path:
            raise AccessError("403 Forbidden")

    store = open_over(monkeypatch, hooked({"far": refuse}), tmp_path, rules={**RULES, "patience_s": 0.2})
    store.save(7, state_of(7)).wait("committed", timeout=200)
    with pytest.raises(TierStoreError, match=r"(?s)7.*far|far.*7"):
        store.close()


def test_a_callback_can_open_what_it_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # case 50
    seen: list[bool] = []
    with open_over(monkeypatch, unsynced, tmp_path, rules=RULES) as store:
        ticket = store.save(1, state_of(1))
        ticket.on("far", lambda event: seen.append((tmp_path / "far" / event.attempt.path("manifest.json")).is_file()))
        ticket.wait("far", timeout=200)
        store.sync(timeout=200)
    assert seen == [True]


def test_a_stalled_shared_tier_stops_no_training_and_the_backlog_is_told(  # cases 42 and 51
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    with open_over(monkeypatch, hooked({"shared": gate}), tmp_path, rules=RULES) as store:
        try:
            tickets = [store.save(step, state_of(step)) for step in range(1, 9)]
            for ticket in tickets:
                ticket.wait("staged", timeout=200)  # the node tier takes them all, and their memory is free again
            assert {c.attempt.step for c in store.status().worker.pending if c.tier == "shared"} == set(range(1, 9))
            with pytest.raises(DeadlineError, match="committed"):
                tickets[0].wait("committed", timeout=0.05)
            with pytest.raises(DeadlineError, match="shared"):
                store.sync(timeout=0.05)
        finally:
            gate.open.set()  # or leaving the store would wait for it
        store.sync(timeout=200)
        assert [info.attempt.step for info in store.checkpoints()] == list(range(1, 9))


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_thirty_saves_take_no_more_memory_than_ten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # case 38
    state = {"w": torch.zeros(1 << 20)}  # 4 MiB: fifteen that stayed would be 60
    with open_over(monkeypatch, unsynced, tmp_path, rules=RULES, io={"max_inflight": "16MiB"}) as store:

        def growth(steps: range) -> int:
            before = resident_nbytes()
            for step in steps:
                store.save(step, state)
                assert store._worker._queue.in_flight_nbytes <= 16 << 20
            store.sync(timeout=200)
            return resident_nbytes() - before

        growth(range(10))
        # Threads' arenas and the allocator's rest come and go by some MiB; what stays of each save is there both times.
        assert min(growth(range(10, 25)), growth(range(25, 40))) < 24 << 20
