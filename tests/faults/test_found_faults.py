"""Faults that were found by attacking the whole store; each test is named after its fault."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tierstore.clock import SystemClock
from tierstore.errors import UsageError


def tiers_of(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "node"), str(tmp_path / "shared")]


class SteppedClock(SystemClock):
    """The system's clock, off by `days`."""

    def __init__(self, days: float = 0.0) -> None:
        self.days = days

    def now(self) -> datetime:
        return datetime.now(timezone.utc) + timedelta(days=self.days)


def test_saves_after_the_clock_stepped_back_do_not_get_slower_and_slower_until_they_hang(tmp_path: Path) -> None:
    clock = SteppedClock()
    with tierstore.open(tiers_of(tmp_path), run="r", clock=clock) as store:
        store.save(0, {"i": 0})
        clock.days = -365.0
        for step in range(1, 60):  # each draw was repeated until it lay above the last: the expected number doubled with each save
            store.save(step, {"i": step})
        store.sync(200)
        assert [c.attempt.step for c in store.checkpoints()] == list(range(60))


def test_a_step_saved_again_by_a_process_whose_clock_is_behind_supersedes_the_older_one(tmp_path: Path) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        store.save(1, {"i": "old"}).wait("durable", 200)
    with tierstore.open(tiers_of(tmp_path), run="r", clock=SteppedClock(-3650.0)) as store:
        assert store.resume() is not None
        store.save(1, {"i": "new"}).wait("durable", 200)
        assert store.load(1) == {"i": "new"}


@pytest.mark.parametrize("metrics", [5, ["loss"], {"loss": 10**400}, {"loss": torch.ones(2)}, {"": 1.0}, {"a\x1b[2J": 1.0}], ids=repr)
def test_metrics_that_are_no_numbers_are_answered_with_a_usage_error(tmp_path: Path, metrics: Any) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store, pytest.raises(UsageError, match="metric"):
        store.save(1, {"w": torch.ones(1)}, metrics=metrics)


def test_one_flipped_bit_in_the_commit_record_does_not_lose_a_checkpoint_that_is_whole_on_every_tier(tmp_path: Path) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        store.save(1, {"w": torch.ones(8)}).wait("durable", 200)
    (record,) = (tmp_path / "shared").rglob("000000.json")
    data = record.read_bytes()
    at = data.index(b'"manifest": "sha256:') + 25
    digit = b"1" if data[at : at + 1] != b"1" else b"0"
    record.write_bytes(data[:at] + digit + data[at + 1 :])  # still a record that can be read, of another promise
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        assert torch.equal(store.load(1)["w"], torch.ones(8))


def test_escape_sequences_in_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        store.save(1, {"evil\x1b[2J\x9b": torch.ones(1)}).wait("durable", 200)
        with pytest.raises(UsageError, match="tags are"):
            store.save(2, {}, tags=["a\x1b[2J"])
    shown = tierstore_of(tmp_path, "tensors", "r@1")
    assert shown.returncode == 0
    assert b"evil" in shown.stdout
    assert b"\x1b" not in shown.stdout
    assert "\x9b" not in shown.stdout.decode()


def test_a_closed_standard_output_is_no_traceback(tmp_path: Path) -> None:
    with tierstore.open(tiers_of(tmp_path), run="r") as store:
        store.save(1, {"w": torch.ones(1)}).wait("durable", 200)
    shown = tierstore_of(tmp_path, "ls", preexec_fn=lambda: os.close(1))
    assert b"Traceback" not in shown.stderr
    assert shown.returncode == 0


def tierstore_of(tmp_path: Path, *words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    """The command line over the tiers of `tiers_of`."""
    tiers = [word for tier in tiers_of(tmp_path) for word in ("--tier", tier)]
    command = [sys.executable, "-m", "tierstore", *words, *tiers, "--run", "r"]
    return subprocess.run(command, capture_output=True, timeout=120, check=False, **more)
