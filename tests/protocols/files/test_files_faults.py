"""The n-th operation of publishing, moving and removing fails, in every way: a result or a typed error; the next process finishes."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from files_kit import FAST, bytes_of, content, opened, store, stored, write

from tierstore.config import load_config
from tierstore.errors import TierStoreError
from tierstore.storage.posix import PosixStorage
from tierstore.testing.faults import FaultKind, FaultPlan, FaultStorage, sweep
from tierstore.tiers.files.files import Files
from tierstore.tiers.files.syncing import sync_files
from tierstore.tiers.session import Session

STEP: dict[FaultKind, int] = {"error_before": 11, "error_after": 9, "no_space": 5, "bit_flip": 5, "short_read": 5, "cancel": 19, "hang": 29}
"""Each how-manieth operation fails in a short run; the long one takes all."""
OLD, NEW = bytes_of(1, 9000), bytes_of(2, 17_000)


def tried(session: Session, work: Any, plan: FaultPlan) -> bool:
    """Whether it was done; it fails with an error of ours, or in the one way that the plan asks for, and never without one."""
    running = session.submit(work)
    try:
        for _ in range(240):  # what hangs is given up, but not what is only slow on a busy machine
            done, _ = concurrent.futures.wait({running}, timeout=0.5)
            if done or plan.fired:
                break
        concurrent.futures.wait({running}, timeout=0.5 if plan.kind == "hang" else 150)
        if not running.done():
            running.cancel()
            assert plan.fired
            return False
        running.result()
    except TierStoreError:
        assert plan.fired
        return False
    except concurrent.futures.CancelledError:
        assert plan.fired
        assert plan.kind == "cancel"
        return False
    return True


def act(session: Session, files: Files, plan: FaultPlan) -> tuple[dict[str, set[bytes | None]], list[str]]:
    """Replaces, creates and removes; returns what may be seen afterwards."""

    def spooled(path: str, data: bytes) -> Any:
        spool = files.spool()
        spool.write(data)
        return files.publish(path, spool)

    seen: dict[str, set[bytes | None]] = {}
    seen["f"] = {NEW} if tried(session, spooled("f", NEW), plan) else {OLD, NEW}
    seen["only"] = {OLD} if tried(session, files.put("only", OLD, exclusive=True), plan) else {OLD, None}
    seen["going"] = {None} if tried(session, files.remove(["going"]), plan) else {OLD, None}
    seen["copy"] = {OLD} if tried(session, files.copy("kept", "copy"), plan) else {OLD, None}
    tried(session, files.sync(120), plan)
    return seen, []


def prepare(root: Path) -> None:
    with opened(store(root)) as (session, files):
        for path in ("f", "going", "kept"):
            write(session, files, path, OLD)


def faulty(root: Path, plan: FaultPlan) -> dict[str, set[bytes | None]]:
    quiet = FaultPlan(plan.kind, 1, operations=())  # opening a store has its own tests
    storages: list[FaultStorage] = []

    def opener(tier: Any, config: Any) -> FaultStorage:
        storages.append(FaultStorage(PosixStorage(Path(tier.uri), durable=False), quiet))
        return storages[-1]

    with Session.open(load_config(store(root)), opener=opener) as session:
        files = Files(session, options=FAST)
        for storage in storages:
            storage.plan = plan
        try:
            return act(session, files, plan)[0]
        finally:
            for storage in storages:
                storage.plan = quiet
            with suppress(TierStoreError):
                session.run(files.close(0.0))


@pytest.mark.parametrize("kind", list(STEP))
def test_every_fault_ends_in_a_result_or_a_typed_error_and_the_next_process_finishes(
    tmp_path: Path, kind: FaultKind, long_run: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for plan in sweep(kind, step=1 if long_run else STEP[kind]):
        root = tmp_path / f"{kind}-{plan.nth}"
        prepare(root)
        possible = faulty(root, plan)

        def agrees(reader: Callable[[str], bytes | None], possible: dict[str, set[bytes | None]] = possible, at: str = plan.fired) -> None:
            for path, allowed in possible.items():
                assert reader(path) in allowed, f"{path} after {at}"
            assert reader("kept") == OLD

        with opened(store(root), drain=None) as (session, files):
            agrees(lambda path: content(session, files, path))
        with Session.open(load_config(store(root))) as session:
            report = session.run(sync_files(session), 60)
        assert not report.failed, plan.fired
        assert not report.left, plan.fired
        for tiers in (["shared"], ["far"], ["node", "shared", "far"]):
            with opened(store(root, tiers=tiers), drain=None) as (session, files):
                agrees(lambda path: content(session, files, path))
        assert sorted(stored(root / "far", ".json")) == sorted(stored(root / "shared", ".json"))
