"""The worker keeps house: retention is carried out beside saving, never in its way, and whatever happens in it, saves go on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from folder_kit import files_below
from tiers_kit import Gate, SteppedClock

from tierstore.config_models import StoreConfig
from tierstore.errors import RefusedError, StorageError, TierFullError
from tierstore.names import Attempt, new_save_id
from tierstore.testing.flows import HookedStorage, LoopSession, folder_tiers, save_job
from tierstore.tiers.catalog import scan
from tierstore.tiers.decisions import pin
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.gc.reports import CollectReport, Tended
from tierstore.tiers.jobs import WorkerOptions
from tierstore.tiers.locks import RunLock, lock_path
from tierstore.tiers.log import append, read_log
from tierstore.tiers.status import Status
from tierstore.tiers.ticket import Ticket
from tierstore.tiers.tier import Scope, Tiers
from tierstore.tiers.worker import Worker

LAYOUT: dict[str, Scope] = {"memory": "node", "pfs": "shared", "object": "shared"}
FAST = WorkerOptions(poll_s=0.01, retry_first_s=0.01, retry_most_s=0.05, patience_s=0.5, housekeep_s=0.05)
HOUR_S = 3600.0
POLICY: dict[str, Any] = {
    "keep": [{"last": 2}],
    "protect": {"min_age": "1m"},
    "gc": {"undelete_window": "10m", "max_clock_skew": "1s", "max_deletes_per_s": 1_000_000, "max_delete_fraction": "100%"},
}


def policy_with(**tiers: dict[str, Any]) -> dict[str, Any]:
    return {**POLICY, "tiers": tiers}


@dataclass
class Run:
    """One process of a run: its worker, its session, and a clock that its saves move on by an hour each."""

    root: Path
    session: LoopSession
    worker: Worker
    clock: SteppedClock

    def save(self, step: int, *, level: str = "committed", **more: Any) -> Ticket:
        self.clock.advance(HOUR_S)
        attempt = Attempt(run="r", step=step, save_id=new_save_id(self.clock.now()))
        ticket = self.worker.submit(save_job(attempt, seed=step, nbytes=20_000, clock=self.clock, **more))
        ticket.wait(level, 60)
        return ticket

    def steps_on(self, tier: str) -> list[int]:
        """The steps that have a folder there, whole or not."""
        found = [Attempt.parse("r", folder.name) for folder in (self.root / tier / "r").glob("step-*")]
        return sorted(attempt.step for attempt in found if attempt is not None)

    def kinds(self, attempt: Attempt) -> list[str]:
        return [r.kind for r in self.session.run(read_log(self.session.tiers.authority.storage, attempt))]

    def status(self) -> Status:
        return self.worker.status()

    def trouble(self) -> str:
        found = self.status().housekeeping
        return "" if found is None else found.trouble

    def gate(self, tier: str, gate: Gate) -> Gate:
        storage = self.session.tiers.get(tier).storage
        assert isinstance(storage, HookedStorage)
        storage.hook = gate
        return gate

    def calls(self, tier: str) -> list[tuple[str, str]]:
        storage = self.session.tiers.get(tier).storage
        assert isinstance(storage, HookedStorage)
        return storage.calls


@contextmanager
def running(
    root: Path,
    policy: dict[str, Any] | None,
    *,
    options: WorkerOptions = FAST,
    layout: dict[str, Scope] | None = None,
    rank: int = 0,
    clock: SteppedClock | None = None,
    change: Callable[[Tiers], Tiers] = lambda tiers: tiers,
) -> Iterator[Run]:
    tiers = change(folder_tiers(root, layout or LAYOUT))
    named = [{"name": t.name, "uri": t.storage.uri, "scope": t.scope} for t in tiers]
    config = StoreConfig.model_validate({"run": "r", "tiers": named, **({"retention": policy} if policy else {})})
    clock = clock or SteppedClock()
    with LoopSession(tiers, clock=clock, config=config) as session:
        worker = Worker(session, "r", rank=rank, options=options)
        try:
            yield Run(root=root, session=session, worker=worker, clock=clock)
        finally:
            for tier in tiers:
                assert isinstance(tier.storage, HookedStorage)
                if isinstance(tier.storage.hook, Gate):
                    tier.storage.hook.open.set()
            worker.close(60)


def eventually(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.01)


# ---- what stays and what goes


def test_after_ten_saves_each_tier_holds_what_its_rules_keep(tmp_path: Path) -> None:
    """Case 32: the limit holds on every tier, and the disk does not fill."""
    with running(tmp_path, policy_with(memory={"keep": [{"last": 1}]}, object={"keep": [{"last": 1}]})) as run:
        for step in range(1, 11):
            run.save(step, level="object")
        eventually(lambda: run.clock.advance(HOUR_S) or run.steps_on("pfs") == [9, 10], "the authority keeps the last two")
        eventually(lambda: run.steps_on("memory") == [10], "the node's tier keeps the last one")
        eventually(lambda: run.steps_on("object") == [10], "the bucket keeps the last one")
        assert [c.attempt.step for c in run.session.run(scan(run.session.tiers, "r")).checkpoints] == [9, 10]

        def told() -> bool:
            """A round counts what it did when it is through: after the folders are gone."""
            found = run.status().housekeeping
            return found is not None and found.freed_nbytes > 8 * 20_000 and found.last_run is not None and found.trouble == ""

        eventually(lambda: getattr(run.status().housekeeping, "expired", 0) == 8, "what was decided is counted")
        eventually(told, "what was freed is counted, and there is no trouble")
        assert getattr(run.status().housekeeping, "expired", 0) == 8


def test_a_commit_or_a_copy_is_enough_to_look_and_nobody_waits_for_the_clock(tmp_path: Path) -> None:
    with running(tmp_path, policy_with(memory={"keep": [{"last": 1}]}), options=replace(FAST, housekeep_s=HOUR_S)) as run:
        for step in (1, 2, 3):
            run.save(step, level="object")
        eventually(lambda: run.steps_on("memory") == [3], "the node's tier was looked at after the commits")
        assert run.steps_on("pfs") == [1, 2, 3]


def test_a_nodes_tier_drops_its_copies_by_a_marker_and_nothing_of_it_is_in_the_log(tmp_path: Path) -> None:
    """The tier's name stands for many disks: what one node drops says nothing about the others."""
    with running(tmp_path, policy_with(memory={"keep": [{"last": 1}]})) as run:
        tickets = [run.save(step, level="object") for step in (1, 2)]
        eventually(lambda: run.steps_on("memory") == [2], "the older copy is dropped")
        first = tickets[0].attempt
        assert (tmp_path / "memory" / first.log_folder / "evicted.json").exists()
        assert not {"evicting", "evicted"} & set(run.kinds(first))
        assert run.steps_on("pfs") == run.steps_on("object") == [1, 2]
        run.worker.drain(60)
        assert run.steps_on("memory") == [2], "it is not copied back"


def test_a_small_memory_tier_never_fills_up(tmp_path: Path) -> None:
    """tmpfs is host memory: what is safe further away leaves it as soon as room is needed, whatever its age."""

    def small(tiers: Tiers) -> Tiers:
        memory = replace(tiers.nearest, capacity=90_000, durable=False)
        return replace(tiers, tiers=(memory, *tiers.tiers[1:]))

    policy = policy_with(memory={"evict": {"high_watermark": "60%", "low_watermark": "40%"}})
    with running(tmp_path, policy, options=replace(FAST, housekeep_s=HOUR_S), change=small) as run:
        for step in range(1, 9):
            ticket = run.save(step, level="object")
            assert ticket.done("memory")
            eventually(lambda: _nbytes_below(tmp_path / "memory") < 55_000, "there is room for the next")


def _nbytes_below(folder: Path) -> int:
    total = 0
    for path in files_below(folder, "*.safetensors"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue  # it goes just now
    return total


# ---- never in the way of saves


def test_saves_go_on_without_a_stall_while_a_deletion_hangs(tmp_path: Path) -> None:
    """Case 31: a deletion that takes for ever held training up, until the process group gave up."""
    with running(tmp_path, policy_with(memory={"keep": [{"last": 1}]})) as run:
        pfs, memory = (run.gate(tier, Gate("delete", matching="/step-")) for tier in ("pfs", "memory"))
        step = 0
        while not (memory.reached.is_set() and pfs.reached.is_set()):
            step += 1
            assert step < 200
            run.save(step, level="object")
            if memory.reached.is_set():
                memory.open.set()
        before = step
        for step in range(before + 1, before + 6):
            assert run.save(step, level="object").stall_s >= 0
        assert not pfs.open.is_set()
        run.worker.drain(60)


def test_close_and_drain_wait_for_no_deletion_and_the_next_process_goes_on_with_it(tmp_path: Path) -> None:
    clock = SteppedClock()
    with running(tmp_path, POLICY, clock=clock) as run:
        gate = run.gate("pfs", Gate("delete", matching="/step-"))
        step = 0
        while not gate.reached.is_set():
            step += 1
            assert step < 200
            run.save(step, level="object")
        run.worker.drain(60)
        run.worker.close(60)
        assert not gate.open.is_set()
        left = run.steps_on("pfs")
        assert len(left) > 2
        gate.open.set()
    with running(tmp_path, POLICY, clock=clock) as run:
        run.save(step + 1)
        eventually(lambda: run.clock.advance(HOUR_S) or run.steps_on("pfs") == [step, step + 1], "the next process goes on with it")


def test_no_round_begins_while_an_image_is_being_written_but_one_that_no_tier_takes_does_not_keep_it_up(tmp_path: Path) -> None:
    """Deletions yield to saves; but a disk that is full is what housekeeping is for."""
    with running(tmp_path, POLICY, options=replace(FAST, housekeep_s=HOUR_S)) as run:
        rounds: list[int] = []

        async def counted(h: Housekeeping) -> Tended:
            if not h.local:  # a round's first half: of one that began before the image, the second may come at any time
                rounds.append(1)
            return Tended(collected=CollectReport())

        run.save(1, level="object")
        engine = run.worker._engine
        assert engine is not None
        eventually(lambda: run.status().housekeeping is not None, "it began")
        engine.tending.tend = counted
        gates = [run.gate(tier, Gate("write", matching="/step-")) for tier in ("memory", "pfs")]
        ticket = run.worker.submit(save_job(Attempt(run="r", step=2, save_id=new_save_id(run.clock.now() + timedelta(hours=1)))))
        assert gates[0].reached.wait(60)
        rounds.clear()
        run.worker._call(lambda engine: engine.tending.nudge())
        assert run.session.run(asyncio.sleep(0, "turn")) == "turn"
        assert engine.queue.writing()
        assert rounds == []
        for gate in gates:
            gate.error = lambda: TierFullError("no room")
            waiting, gate.open = gate.open, threading.Event()  # before the other one opens: nobody slips through in between
            waiting.set()
        eventually(lambda: rounds != [], "a full disk is no save being written")
        for gate in gates:
            gate.open.set()
        ticket.wait("committed", 60)


# ---- what goes wrong in it


def test_a_refusal_is_said_once_and_shown_and_saves_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = SteppedClock()
    with running(tmp_path, None, clock=clock) as run:
        record = tmp_path / "pfs" / run.save(1, level="object").attempt.record_path(1)
    whole = record.read_bytes()
    record.write_bytes(b"garbled")
    with running(tmp_path, POLICY, clock=clock) as run:
        run.save(2, level="object")
        eventually(lambda: "the logs of step 1 can't be read" in run.trouble(), "it is shown")
        for step in (3, 4, 5):
            run.save(step, level="object")
        run.worker.raise_errors()
        assert len([r for r in caplog.records if "housekeeping: RefusedError" in r.message]) == 1
        record.write_bytes(whole)
        eventually(lambda: run.trouble() == "", "mended")
        assert "housekeeping works again" in caplog.text
        eventually(lambda: run.clock.advance(HOUR_S) or run.steps_on("pfs") == [4, 5], "it goes on")


@pytest.mark.parametrize("fault", [ValueError("a fault of ours"), RefusedError("not now"), StorageError("disk on fire")])
def test_whatever_is_raised_in_it_the_worker_works_on(tmp_path: Path, fault: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path, POLICY) as run:
        run.save(1)
        engine = run.worker._engine
        assert engine is not None

        async def faulty(h: Housekeeping) -> Tended:
            raise fault

        real, engine.tending.tend = engine.tending.tend, faulty
        eventually(lambda: type(fault).__name__ in run.trouble(), "it is shown")
        for step in range(2, 6):
            run.save(step, level="object")
        run.worker.raise_errors()
        engine.tending.tend = real
        eventually(lambda: run.clock.advance(HOUR_S) or run.steps_on("pfs") == [4, 5], "it goes on when it can")


def test_a_tier_that_can_not_be_deleted_from_keeps_no_other_from_it(tmp_path: Path) -> None:
    with running(tmp_path, policy_with(memory={"keep": [{"last": 1}]})) as run:
        gate = run.gate("pfs", Gate("delete", matching="/step-", error=lambda: StorageError("read-only file system")))
        for step in range(1, 6):
            run.save(step, level="object")
        eventually(
            lambda: run.clock.advance(HOUR_S) or (gate.reached.is_set() and run.steps_on("memory") == [5]), "the node's tier is free"
        )
        eventually(lambda: "read-only file system" in run.trouble(), "the other is shown")
        gate.open.set()
        eventually(lambda: run.clock.advance(HOUR_S) or (run.steps_on("pfs") == [4, 5] and run.trouble() == ""), "it goes on when it can")


# ---- who does what


def test_another_rank_tidies_its_node_and_decides_nothing(tmp_path: Path) -> None:
    clock = SteppedClock()
    policy = policy_with(memory={"keep": [{"last": 1}]})
    with running(tmp_path, policy, rank=1, clock=clock) as run:
        tickets = [run.save(step, level="object") for step in range(1, 6)]
        eventually(lambda: run.steps_on("memory") == [5], "its node's tier")
        clock.advance(HOUR_S)
        assert run.steps_on("pfs") == [1, 2, 3, 4, 5]
        assert all("expired" not in run.kinds(t.attempt) for t in tickets)


def test_two_processes_of_one_run_share_the_work_and_do_no_harm(tmp_path: Path) -> None:
    """The owner frees the shared tiers, each node's process its own; both see what the other saved."""
    clock = SteppedClock()
    policy = policy_with(memory={"keep": [{"last": 1}]})
    (tmp_path / "b").mkdir()
    for tier in ("pfs", "object"):
        (tmp_path / tier).mkdir()
        (tmp_path / "b" / tier).symlink_to(tmp_path / tier)
    with running(tmp_path, policy, clock=clock) as owner, running(tmp_path / "b", policy, rank=1, clock=clock) as other:
        for step in range(1, 7):
            (owner if step % 2 else other).save(step, level="object")
        eventually(lambda: clock.advance(HOUR_S) or owner.steps_on("pfs") == owner.steps_on("object") == [5, 6], "the shared tiers")
        eventually(lambda: set(owner.steps_on("memory")) <= {5, 6} and other.steps_on("memory") == [6], "each node's own tier")
        eventually(lambda: owner.trouble() == other.trouble() == "", "no trouble stays")
        found = other.status().housekeeping
        assert found is not None
        assert found.expired == 0


def test_a_node_whose_lock_another_process_has_is_left_to_that_one(tmp_path: Path) -> None:
    clock = SteppedClock()
    with running(tmp_path, None, clock=clock) as run:
        for step in (1, 2):
            run.save(step, level="object")
    with running(tmp_path, policy_with(memory={"keep": [{"last": 1}]}), clock=clock) as run:
        lock = RunLock(lock_path(run.session.tiers, "r"), "r")
        lock.acquire()
        ticket = run.save(3, level="staged")
        began = clock.now()

        def gone_round() -> bool:
            found = run.status().housekeeping
            return found is not None and found.last_run is not None and found.last_run > began

        eventually(lambda: bool(clock.advance(1)) or gone_round(), "a round of what is not the node's")
        assert run.steps_on("memory") == [1, 2, 3]
        lock.release()
        ticket.wait("object", 60)
        eventually(lambda: run.steps_on("memory") == [3], "its turn")


# ---- without a policy


def test_without_a_policy_nothing_goes_and_the_copies_of_the_logs_catch_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: a round does so many, and the next one follows at once."""
    monkeypatch.setattr("tierstore.tiers.gc.collect._LOGS_IN_A_ROUND", 1)
    with running(tmp_path, None) as run:
        attempts = [run.save(step, level="object").attempt for step in range(1, 5)]
        run.session.run(pin(run.session.tiers, attempts[0], clock=run.clock))
        run.worker.drain(60)  # it looks at the tiers

        def logs(tier: str) -> list[set[str]]:
            return [{path.name for path in (tmp_path / tier / attempt.log_folder).glob("0*.json")} for attempt in attempts]

        eventually(lambda: logs("memory") == logs("object") == logs("pfs"), "what was decided lies beside every replica")
        assert run.steps_on("pfs") == [1, 2, 3, 4]
        assert not [call for tier in LAYOUT for call in run.calls(tier) if call[0] == "delete"]


def test_without_a_policy_what_was_decided_before_is_finished(tmp_path: Path) -> None:
    """A collector was killed behind ``swept``: whoever comes next frees what it left."""
    clock = SteppedClock()
    with running(tmp_path, None, clock=clock) as run:
        first = run.save(1, level="object")
        run.save(2, level="object")
        facts = {"files": []}
        run.session.run(append(run.session.tiers.authority.storage, first.attempt, "swept", facts, clock=clock))
    with running(tmp_path, None, clock=clock) as run:
        run.save(3)
        eventually(lambda: run.steps_on("pfs") == [2, 3] and run.steps_on("object") == [2, 3] and run.steps_on("memory") == [2, 3], "freed")
