"""What a save does while its caller waits: one pass over the bytes into memory that is there, and nothing else that is dear."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierstore
from tierstore.dcp.writer import TierStorageWriter
from tierstore.errors import TierFullError, UnsupportedTypeError, UsageError
from tierstore.state import copying, image_memory
from tierstore.state import stage_chunks as stage_chunks_module

MIB = 1 << 20


def state_of(nbytes: int, tensors: int = 40) -> dict[str, Any]:
    each = nbytes // tensors // 4
    weights = {f"layer.{i}.weight": torch.full((each,), float(i)) for i in range(tensors)}
    return {"model": weights, "optimizer": {"param_groups": [{"lr": 0.1}]}, "step": 7}


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tierstore.Store]:
    near = {"name": "near", "uri": str(tmp_path / "near"), "scope": "node", "durable": request.param == "disk"}
    far = {"name": "far", "uri": str(tmp_path / "far"), "scope": "shared"}
    with tierstore.open({"run": "r", "tiers": [near, far]}) as opened:
        yield opened


def by_caller(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: list[str]) -> None:
    """Notes calls that this thread makes."""
    real, me = getattr(owner, name), threading.get_ident()

    def noting(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == me:
            calls.append(name)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, noting)


def test_the_caller_neither_hashes_nor_syncs_nor_pickles_nor_makes_memory_or_threads(
    store: tierstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(2 * MIB)
    store.prepare(state)
    store.save(0, state).wait("durable", 200)
    calls: list[str] = []
    for owner, name in (
        (hashlib, "sha256"),
        (os, "fsync"),
        (os, "fdatasync"),
        (os, "open"),
        (os, "posix_fallocate"),
        (pickle, "dumps"),
        (image_memory.mmap, "mmap"),
        (threading.Thread, "start"),
        (gc, "collect"),
    ):
        by_caller(monkeypatch, owner, name, calls)
    ticket = store.save(1, state)
    monkeypatch.undo()
    assert calls == []
    ticket.wait("durable", 200)


def test_every_byte_is_moved_once(store: tierstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    real = copying._move
    monkeypatch.setattr(copying, "_move", lambda piece: (moved.extend(n for _, _, n in piece), real(piece)))
    state = state_of(40 * MIB)
    for step in range(2):
        moved.clear()
        store.save(step, state).wait("staged", 200)
        assert sum(moved) == sum(w.nbytes for w in state["model"].values())


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_save_takes_no_memory_beside_its_image(store: tierstore.Store) -> None:
    state = state_of(80 * MIB)
    store.prepare(state, images=3)
    store.save(0, state).wait("durable", 200)
    store.sync()

    def memory(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))

    def growth(step: int) -> int:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here (proc(5))
        before = memory("VmRSS")
        ticket = store.save(step, state)
        peak = memory("VmHWM")
        ticket.wait("durable", 200)
        store.sync()
        return peak - before

    assert min(growth(step) for step in (1, 2)) < 40 * MIB  # where memory is short, an image's own pages may have to come back once


def test_the_first_save_says_what_memory_cost_and_later_ones_do_not(store: tierstore.Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tierstore.store")
    tickets = []
    for step in range(3):
        tickets.append(store.save(step, state_of(8 * MIB)))
        tickets[-1].wait("durable", 200)
    first = tickets[0].stall
    assert first is not None
    assert first.allocate_s > 0
    assert first.total_s <= tickets[0].stall_s
    assert caplog.text.count("store.prepare(state)") == 1


def test_preparing_takes_all_of_it_out_of_the_first_save(store: tierstore.Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tierstore.store")
    state = state_of(8 * MIB)
    prepared = store.prepare(state)
    assert prepared.nbytes > 8 * MIB - 4 * 40
    assert prepared.seconds > 0
    assert store.prepare(state).images == 0
    ticket = store.save(0, state)
    assert ticket.stall is not None
    assert ticket.stall.allocate_s == 0
    assert "store.prepare(state)" not in caplog.text
    ticket.wait("durable", 200)
    assert store.prepare(state).images == 0
    assert torch.equal(store.load()["model"]["layer.3.weight"], state["model"]["layer.3.weight"])


def test_preparing_writes_nothing(store: tierstore.Store) -> None:
    store.prepare(state_of(MIB))
    assert store.checkpoints() == []
    assert store.status() is not None


def test_a_memory_tier_gets_an_image_more_than_it_keeps(tmp_path: Path) -> None:
    near = {"name": "near", "uri": str(tmp_path / "near"), "scope": "node", "durable": False}
    far = {"name": "far", "uri": str(tmp_path / "far"), "scope": "shared"}
    retention = {"keep": [{"last": 9}], "tiers": {"near": {"keep": [{"last": 3}]}}}
    with tierstore.open({"run": "r", "tiers": [near, far], "retention": retention}) as store:
        assert store.prepare(state_of(MIB)).images == 4
        assert store.prepare(state_of(MIB), images=5).images == 1


def test_no_more_images_are_made_than_the_memory_tier_may_hold_and_one(tmp_path: Path) -> None:
    near = {"name": "near", "uri": str(tmp_path / "near"), "scope": "node", "durable": False, "capacity": "10MiB"}
    far = {"name": "far", "uri": str(tmp_path / "far"), "scope": "shared"}
    retention = {"keep": [{"last": 50}], "tiers": {"near": {"keep": [{"last": 20}]}}}
    with tierstore.open({"run": "r", "tiers": [near, far], "retention": retention}) as store:
        prepared = store.prepare(state_of(4 * MIB))
        assert prepared.images == 10 * MIB // prepared.nbytes + 1 == 3


def test_what_can_not_be_prepared_says_so(store: tierstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="images=0"):
        store.prepare({}, images=0)
    with pytest.raises(UnsupportedTypeError, match="bad"):
        store.prepare({"bad": object()})

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image_memory.os, "posix_fallocate", full)
    monkeypatch.setattr(image_memory.Memory, "anonymous", full)
    with pytest.raises(TierFullError):
        store.prepare(state_of(MIB))
    monkeypatch.undo()
    store.save(0, state_of(MIB)).wait("durable", 200)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_through_the_same_threads_and_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[int] = []
    real = stage_chunks_module.plan_shard
    monkeypatch.setattr(stage_chunks_module, "plan_shard", lambda *a, **k: plans.append(1) or real(*a, **k))
    threads: set[str] = set()
    run: Callable[..., Any] = copying._move
    monkeypatch.setattr(copying, "_move", lambda piece: (threads.add(threading.current_thread().name), run(piece)))
    state = {f"w{i}": torch.full((5 * MIB // 4,), float(i)) for i in range(10)}
    with tierstore.open({"run": "r", "tiers": [str(tmp_path / "disk")]}) as store:
        for step in range(3):
            dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=TierStorageWriter(store=store), no_dist=True)
    assert len(plans) == 1
    assert len([name for name in threads if name.startswith("tierstore-copy")]) <= store._threads.count - 1
