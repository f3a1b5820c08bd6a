"""The suites run through at a few MiB, and peers that can't run are listed with the reason."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import bench_load
import bench_persist
import bench_save
import memory
import pytest
from measure import Table
from peers import files, installed, limits, ours
from peers.base import Peer
from saving import Sessions


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole machine's dirty pages and caches are not this test's."""
    monkeypatch.setattr(memory.os, "sync", lambda: None)
    monkeypatch.setattr(
        memory, "time", SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic, perf_counter=time.perf_counter)
    )
    monkeypatch.setattr(bench_save, "fresh_memory", lambda: "")


def test_the_suite_save_measures_stall_durable_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_save, "PEERS", [ours.PEERS[0], *(p for p in files.SAVERS if p.name == "torch.save")])
    stall, total, extra = bench_save.run(2 << 20, 1, tmp_path, {})
    assert set(stall.rows) == {bench_save.MEMCPY, ours.OURS, "torch.save"}
    assert all(len(row.values) == 1 for table in (stall, total, extra) for row in table.rows.values())
    assert not stall.failed
    assert total.median(ours.OURS) >= stall.median(ours.OURS)


def test_the_suite_persist_measures_with_warm_and_with_fresh_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench_persist, "PEERS", [ours.PEERS[0], *(p for p in files.SAVERS if p.name in ("torch.save", "safetensors save_file"))]
    )
    monkeypatch.setattr(bench_persist, "FRESH", (ours.OURS, "torch.save"))
    monkeypatch.setattr(bench_persist, "fresh_memory", lambda: "")
    warm, hashed, fresh, fresh_hashed = bench_persist.run(2 << 20, 1, tmp_path, {"safetensors save_file": "left out"})
    for table in (warm, fresh):
        assert {row.name: row.turns for row in table.measured()} == {ours.OURS: [0], "torch.save": [0], bench_persist.ALONE: [0]}
    assert {row.name for row in hashed.measured()} == {row.name for row in fresh_hashed.measured()} == {ours.OURS, "torch.save"}
    assert (warm.failed, fresh.failed) == ({"safetensors save_file": "left out"}, {})


def test_the_suite_load_measures_cold_and_warm_and_checks_what_was_loaded(tmp_path: Path, long_run: bool) -> None:
    if not long_run:
        pytest.skip("of the suite load, what a loader of wrong values makes of it runs always; all loaders run with --long")
    peers = [
        limits.PEERS[1],
        *ours.LOADERS,
        *(p for p in files.LOADERS if p.name in ("torch.load", "safetensors load_file, touched")),
    ]
    cold, warm = bench_load.run(2 << 20, 1, tmp_path, {}, peers)
    assert {*cold.failed, *warm.failed} <= {limits.PEERS[1].name}, f"only O_DIRECT may be lacking: {cold.failed}"
    assert all(len(row.values) == 1 for row in cold.rows.values())
    assert {row.name for row in warm.measured()} == {p.name for p in peers if p.kind != "limit"}


def test_a_loader_of_wrong_values_is_listed(tmp_path: Path) -> None:
    lies = Peer(name="lies", note="", open=lambda folder: files.OneFile(folder, files.save_file, lambda path, into: into))
    cold, _ = bench_load.run(1 << 20, 1, tmp_path, {}, [lies])
    assert "not what was saved" in cold.failed["lies"]


def test_a_peer_that_is_not_there_is_listed_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Peer(name="missing", note="", open=ours.Ours, needs=("no_such_module_here",))
    deadly = Peer(name="deadly", note="", open=ours.Ours)
    table = Table("T", 0, "missing")
    sessions = Sessions([missing, deadly], tmp_path, [table], {"deadly": "its process ended (SIGSEGV)"})
    assert not sessions.peers
    assert "No module named 'no_such_module_here'" in table.failed["missing"]
    assert table.failed["deadly"] == "its process ended (SIGSEGV)"
    monkeypatch.setattr(installed, "FOLDER", tmp_path)
    (tmp_path / "installed.json").write_text('{"no_such_module_here": "ERROR: no matching distribution"}')
    assert missing.unavailable() == "pip install: ERROR: no matching distribution"


@pytest.mark.skipif(sys.platform != "linux", reason="mincore is asked as Linux has it")
def test_residency_is_what_the_page_cache_holds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    whole = (path.read_bytes() and memory.resident_nbytes([path]) == 1 << 20 for _ in range(1000))
    assert any(whole), "a page that the kernel has just taken away comes back with the next look"
