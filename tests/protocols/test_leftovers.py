"""Leftovers of killed processes are removed by whoever works on the store next; nothing else ever is."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers_kit import run, tiers_in

import tierstore
from tierstore.clock import SystemClock
from tierstore.config import load_config
from tierstore.errors import AccessError
from tierstore.storage.contract import Storage
from tierstore.storage.temporaries import temporary_name, this_process
from tierstore.tiers.leftovers import UPLOAD_GRACE_S, sweep_leftovers
from tierstore.tiers.promote import reconcile
from tierstore.tiers.session import Session


def leave_temporaries(tier: Path) -> tuple[Path, Path]:
    """What a killed process left in `tier`, and what a living one is writing."""
    me = this_process()
    folder = tier / ".tmp"
    folder.mkdir(parents=True)
    dead = folder / f"write-{me.host}-{me.boot}-{me.namespace}-{me.pid}-{me.start + 1}-0123456789abcdef"  # its pid was used again
    alive = folder / temporary_name("write")
    for path in (dead, alive):
        path.write_bytes(b"half a shard")
    return dead, alive


class WithUploads:
    """A storage that has unfinished uploads."""

    def __init__(self, inner: Storage, error: Exception | None = None) -> None:
        self._inner = inner
        self.error = error
        self.asked: list[float] = []

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_temporaries"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    async def stale_uploads(self, older_than_s: float) -> list[str]:
        self.asked.append(older_than_s)
        return ["r/step-1/shard"]

    async def abort_stale_uploads(self, older_than_s: float) -> list[str]:
        self.asked.append(older_than_s)
        if self.error is not None:
            raise self.error
        return ["r/step-1/shard"]


def test_a_store_that_saves_sweeps_what_a_killed_process_left(tmp_path: Path) -> None:
    left = [leave_temporaries(tmp_path / tier) for tier in ("node", "shared")]
    with tierstore.open([str(tmp_path / "node"), str(tmp_path / "shared")], run="r") as store:
        store.save(1, {"w": torch.ones(3)})
        end = time.monotonic() + 120
        while any(dead.exists() for dead, _ in left):  # beside the save, which does not wait for it
            assert time.monotonic() < end, left
            time.sleep(0.005)
    for dead, alive in left:
        assert not dead.exists()
        assert alive.exists()


def test_sync_sweeps_what_a_killed_process_left(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    dead, alive = leave_temporaries(tmp_path / "shared")
    run(reconcile(tiers, "r", clock=SystemClock()))
    assert not dead.exists()
    assert alive.exists()


def test_unfinished_uploads_end_after_the_grace_and_a_tier_that_refuses_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made: list[WithUploads] = []

    def wrap(storage: Storage) -> Storage:
        made.append(WithUploads(storage, AccessError("may not list uploads") if made else None))
        return made[-1]

    tiers = tiers_in(tmp_path, wrap={"shared": wrap, "far": wrap})
    with caplog.at_level(logging.WARNING):
        assert run(sweep_leftovers(tiers)) == {"shared": ["r/step-1/shard"]}
    assert [m.asked for m in made] == [[UPLOAD_GRACE_S], [UPLOAD_GRACE_S]]
    assert "tier=far leftovers can't be swept: may not list uploads" in caplog.text


def test_a_dry_run_names_what_would_be_removed_and_removes_nothing(tmp_path: Path) -> None:
    def no_end(storage: Storage) -> Storage:
        return WithUploads(storage, AssertionError("it is ended"))

    tiers = tiers_in(tmp_path, wrap={"far": no_end})
    dead, alive = leave_temporaries(tmp_path / "shared")
    assert run(sweep_leftovers(tiers, dry_run=True)) == {"shared": [dead.name], "far": ["r/step-1/shard"]}
    assert dead.exists()
    assert alive.exists()


def test_the_stores_policy_says_how_long_an_upload_may_take(tmp_path: Path) -> None:
    made: list[WithUploads] = []

    def wrap(storage: Storage) -> Storage:
        made.append(WithUploads(storage))
        return made[-1]

    tiers = tiers_in(tmp_path, wrap={"shared": wrap, "far": wrap})
    run(sweep_leftovers(replace(tiers, upload_grace_s=3600.0)))
    assert [m.asked for m in made] == [[3600.0], [3600.0]]
    run(sweep_leftovers(tiers, only=["far"], upload_grace_s=60.0))
    assert [m.asked for m in made] == [[3600.0], [3600.0, 60.0]]
    config = {"version": 1, "tiers": [str(tmp_path / "pfs")], "retention": {"keep": [{"last": 1}], "gc": {"multipart_grace": "7d"}}}
    with Session.open(load_config(config, run="r")) as session:
        assert session.tiers.upload_grace_s == 7 * 86400.0
