"""A fine-tuning of adapters with one packed tier: each save straight to it costs what changed, and loads when its base was deleted."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from lora_kit import lora_state
from tiers_kit import SteppedClock

import tierstore
from tierstore.config import load_config
from tierstore.errors import CondemnedError, NotFoundError
from tierstore.format import digest
from tierstore.format.digest import BLOCK_NBYTES
from tierstore.names import Attempt, new_save_id
from tierstore.state.facts import facts_of
from tierstore.state.image import ImagePool
from tierstore.state.stage import stage
from tierstore.testing.equality import assert_same_state
from tierstore.tiers import persist as persist_module
from tierstore.tiers.catalog import scan
from tierstore.tiers.commit import commit
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.direct import Refers
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.lease_watch import LeaseWatch
from tierstore.tiers.log_facts import fold
from tierstore.tiers.persist import persist
from tierstore.tiers.record_cache import RecordCache
from tierstore.tiers.session import Session
from tierstore.tiers.verify import verify

KEEP = {"keep": [{"last": 1}], "protect": {"min_age": "1s"}, "gc": {"undelete_window": "1h", "orphan_grace": "10h"}}


def config(folder: Path, *, codec: str = "zstd", **more: Any) -> dict[str, Any]:
    tier = {"name": "pfs", "uri": str(folder / "pfs"), "scope": "shared", "codec": codec, "unchanged_once": True}
    return {"version": 1, "run": "r", "tiers": [tier], **more}


def save(folder: Path, clock: SteppedClock, *steps: int, state: Any = lora_state, **how: Any) -> None:
    with tierstore.open(config(folder, **how), clock=clock) as store:
        for step in steps:
            store.save(step, state(step)).wait("committed", timeout=200)
            clock.advance(7200)


def stored(folder: Path, step: int) -> int:
    """Bytes that the shards of a step take up."""
    return sum(path.stat().st_size for path in (folder / "pfs").rglob("shard-*") if f"step-{step:010d}-" in str(path))


def session_of(folder: Path, clock: SteppedClock, **more: Any) -> Session:
    return Session.open(load_config(config(folder, **more)), clock=clock, create=False)


def keeper(session: Session, clock: SteppedClock) -> Housekeeping:
    policy = session.config.retention_for("r")
    return Housekeeping(tiers=session.tiers, run="r", policy=policy, clock=clock, cache=RecordCache(), leases=LeaseWatch(clock))


def findings(folder: Path, clock: SteppedClock) -> Any:
    """All but that an attempt has not committed."""
    with session_of(folder, clock) as session:
        found = session.run(verify(session.tiers, "r", level="full", clock=clock)).findings
    return [finding for finding in found if finding.code != "V107"]


def test_each_save_costs_its_adapters_and_outlives_its_base(tmp_path: Path) -> None:
    clock, codec = SteppedClock(), "raw"
    save(tmp_path, clock, 1, 2, codec=codec)
    save(tmp_path, clock, 3, codec=codec)  # by a process that knows nothing yet
    whole, second, third = (stored(tmp_path, step) for step in (1, 2, 3))
    assert max(second, third) < whole // 10
    with session_of(tmp_path, clock, codec=codec, retention=KEEP) as session:
        session.run(prune(keeper(session, clock)))
        clock.advance(7200)
        for _ in range(2):
            report = session.run(collect(keeper(session, clock), now=True))
            assert not report.failed
        assert "kept for step" in " ".join(text for _, text in report.waiting)
    assert (stored(tmp_path, 1), stored(tmp_path, 2), stored(tmp_path, 3)) == (whole, 0, third)
    assert not findings(tmp_path, clock)
    with tierstore.open(config(tmp_path, codec=codec), clock=clock) as store:
        assert [info.step for info in store.checkpoints()] == [3]
        with pytest.raises(NotFoundError, match="it was deleted"):
            store.load(1)
        assert_same_state(store.load(3), lora_state(3))


def test_what_changed_in_all_of_it_refers_to_nothing_and_each_block_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, hashed = SteppedClock(), list[int]()
    real = digest.block_digests

    def counting(data: Any, block_nbytes: int) -> bytes:
        hashed.append(len(data))  # several threads do
        return real(data, block_nbytes)

    monkeypatch.setattr(persist_module, "block_digests", counting)
    for step, state in ((1, lora_state), (2, lora_state), (3, lambda step: lora_state(step, base=5))):
        hashed.clear()
        save(tmp_path, clock, step, state=state)
        with tierstore.open(config(tmp_path), clock=clock) as store:
            [shard] = [file for file in store.open_checkpoint(step).replica.manifest.files if file.kind == "shard"]
        assert sum(hashed) == shard.nbytes
    assert stored(tmp_path, 3) > 6 << 20
    with session_of(tmp_path, clock) as session:
        logs = {info.step: fold(info.records) for info in session.run(scan(session.tiers, "r")).checkpoints}
    assert {step: len(facts.referenced.get("pfs", ())) for step, facts in logs.items()} == {1: 1, 2: 0, 3: 0}


class Killed(BaseException):
    """The process ends here."""


def die_saving(session: Session, clock: SteppedClock, point: str, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """A process saves step 2 straight to the tier, and dies at a point of it."""

    def reach(name: str) -> None:
        if name == point:
            raise Killed

    attempt = Attempt(run="r", step=2, save_id=new_save_id(clock.now()))
    context, tier = CopyContext.make(session.tiers, clock), session.tiers.authority
    refers = Refers(context=context, attempt=attempt, tier=tier, block_nbytes=BLOCK_NBYTES, whole=True)
    pool = ImagePool(None, max_nbytes=1 << 30)
    staged = stage(lora_state(2), pool=pool)
    with monkeypatch.context() as patch:
        for module in ("persist", "references"):
            patch.setattr(f"tierstore.tiers.{module}.reach", reach)
        with pytest.raises(Killed):
            session.run(
                persist(
                    tier,
                    attempt,
                    rank=0,
                    world_size=1,
                    shard=staged.source,
                    tensors=staged.tensors,
                    objects=staged.objects,
                    facts=facts_of(None, None, False, clock),
                    clock=clock,
                    authority=True,
                    refer=refers,
                )
            )
    staged.release()
    pool.close()
    return attempt


def freed(session: Session, clock: SteppedClock, *, after_s: float) -> None:
    session.run(prune(keeper(session, clock)))
    clock.advance(after_s)
    for _ in range(3):
        assert not session.run(collect(keeper(session, clock), now=True)).failed


@pytest.mark.parametrize("point", ["reference.after-record", "persist.after-shard"])
def test_a_save_that_dies_leaves_nothing_that_dangles_and_holds_its_base_no_longer_than_an_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    clock = SteppedClock()
    clock.wall = datetime.now(timezone.utc) + timedelta(hours=30)  # the files' real times are past every grace
    save(tmp_path, clock, 1)
    with session_of(tmp_path, clock, retention=KEEP) as session:
        two = die_saving(session, clock, point, monkeypatch)
        assert (0 < stored(tmp_path, 2) < 2 << 20) is (point == "persist.after-shard")
        save(tmp_path, clock, 3, state=lambda step: lora_state(step, base=7))
        freed(session, clock, after_s=7200)
        assert stored(tmp_path, 1) > 6 << 20  # step 2 may still commit, for all that anybody knows
        assert not findings(tmp_path, clock)
        freed(session, clock, after_s=40 * 3600)
        assert (stored(tmp_path, 1), stored(tmp_path, 2)) == (0, 0)
        assert session.run(scan(session.tiers, "r")).incomplete == ()
        with pytest.raises(CondemnedError):  # a writer that comes back after all can't commit it
            session.run(commit(session.tiers, two, deadline_s=0.0, clock=clock, world_size=1, condemn=True))


def test_a_save_that_is_tried_again_after_its_process_died_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteppedClock()
    save(tmp_path, clock, 1)
    with session_of(tmp_path, clock) as session:
        die_saving(session, clock, "persist.after-shard", monkeypatch)
    save(tmp_path, clock, 2, 3)
    with tierstore.open(config(tmp_path), clock=clock) as store:
        assert [info.step for info in store.checkpoints()] == [1, 2, 3]
        for step in (2, 3):
            assert_same_state(store.load(step), lora_state(step))
    assert not findings(tmp_path, clock)
