"""The log of the only tier is lost, with what it said of who takes bytes from whom: nothing that others need goes all the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from folder_kit import files_below
from test_unchanged_once_direct import KEEP, config, findings, keeper, session_of, stored
from test_unchanged_once_direct import save as save_steps
from tiers_kit import SteppedClock

import tierstore
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.catalog import scan
from tierstore.tiers.commit import commit
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.log_facts import fold
from tierstore.tiers.promote import reconcile
from tierstore.tiers.recover import recover
from tierstore.tiers.session import Session

DAY_S = 86400.0


def small_state(step: int, base: int = 0) -> dict[str, Any]:
    """Frozen weights of 3 MiB, and an adapter."""
    frozen = torch.randn(3, 1 << 19, generator=torch.Generator().manual_seed(base)).bfloat16()
    return {"frozen": frozen, "adapter": torch.full((1000,), step / 7), "step": step}


def save(folder: Path, clock: SteppedClock, *steps: int, base: int = 0) -> None:
    save_steps(folder, clock, *steps, codec="raw", state=lambda step: small_state(step, base))


def let_go(session: Session, clock: SteppedClock) -> str:
    """Prunes and collects until nothing goes any more; what waits, and why."""
    text = ""
    for _ in range(2):
        session.run(prune(keeper(session, clock)))
        clock.advance(7200)
        report = session.run(collect(keeper(session, clock), now=True))
        assert not report.failed, report.failed
        text = " ".join(why for _, why in report.waiting)
    return text


def check_loads(folder: Path, clock: SteppedClock, *steps: int) -> None:
    with tierstore.open(config(folder, codec="raw"), clock=clock) as store:
        assert [info.step for info in store.checkpoints()] == list(steps)
        for step in steps:
            assert_same_state(store.load(step), small_state(step))


@pytest.mark.parametrize("by", ["recover", "sync", "commit"])
def test_a_base_whose_log_was_lost_keeps_its_bytes_for_those_that_take_them(by: str, tmp_path: Path) -> None:
    clock = SteppedClock()
    save(tmp_path, clock, 1, 2, 3)
    whole = stored(tmp_path, 1)
    shutil.rmtree(tmp_path / "pfs" / "r" / ".log")
    with session_of(tmp_path, clock, codec="raw", retention=KEEP) as session:
        if by == "commit":  # and whoever did it died at once
            for found in session.run(scan(session.tiers, "r")).incomplete:
                session.run(commit(session.tiers, found.attempt, deadline_s=0.0, clock=clock))
        else:
            session.run((recover if by == "recover" else reconcile)(session.tiers, "r", clock=clock))
        base = next(info for info in session.run(scan(session.tiers, "r")).checkpoints if info.step == 1)
        assert fold(base.records).may_have_been_lost
        assert len(fold(base.records).referenced.get("pfs", ())) == (0 if by == "commit" else 2)
        let_go(session, clock)
    assert (stored(tmp_path, 1), stored(tmp_path, 2)) == (whole, 0)
    assert not findings(tmp_path, clock)
    check_loads(tmp_path, clock, 3)


def test_shards_that_stayed_of_a_deleted_base_are_no_orphans_when_the_log_is_lost(tmp_path: Path) -> None:
    clock = SteppedClock()
    save(tmp_path, clock, 1, 2, 3)
    whole = stored(tmp_path, 1)
    with session_of(tmp_path, clock, codec="raw", retention=KEEP) as session:
        let_go(session, clock)
    shutil.rmtree(tmp_path / "pfs" / "r" / ".log")
    shutil.rmtree(tmp_path / "pfs" / "r" / ".audit")  # as whoever collects is told to, who says that the logs are gone for good
    for path in files_below(tmp_path / "pfs"):  # whatever day it is where this runs
        os.utime(path, (clock.now().timestamp(),) * 2)
    clock.advance(2 * DAY_S)
    with session_of(tmp_path, clock, codec="raw", retention=KEEP) as session:
        session.run(recover(session.tiers, "r", clock=clock))
        assert "its log was lost; its bytes on pfs are kept for step 3" in let_go(session, clock)
    assert stored(tmp_path, 1) == whole
    check_loads(tmp_path, clock, 3)
    save(tmp_path, clock, 4, base=7)
    with session_of(tmp_path, clock, codec="raw", retention=KEEP) as session:
        let_go(session, clock)
        clock.advance(DAY_S)
        let_go(session, clock)
    assert (stored(tmp_path, 1), stored(tmp_path, 3)) == (0, 0)
    assert not findings(tmp_path, clock)


def test_a_commit_says_that_a_manifest_was_there_only_where_one_was(tmp_path: Path) -> None:
    clock = SteppedClock()
    save(tmp_path, clock, 1)
    with session_of(tmp_path, clock, codec="raw") as session:
        [info] = session.run(scan(session.tiers, "r")).checkpoints
        assert not fold(info.records).may_have_been_lost
