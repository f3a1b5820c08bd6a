"""Every reader of the public API holds a lease while it reads, and what training goes on from stays until it is not needed any more."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from store_kit import NAMES, tiers_of, unsynced
from tiers_kit import SteppedClock
from typer.testing import CliRunner

import tierstore
from tierstore.cli.main import app
from tierstore.config_models import StoreConfig
from tierstore.dcp.reader import TierStorageReader
from tierstore.errors import IntegrityError, NotFoundError
from tierstore.names import Attempt
from tierstore.state.export.exporting import ExportOptions
from tierstore.storage.contract import Storage
from tierstore.testing.flows import HookedStorage
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.jobs import WorkerOptions, worker_options
from tierstore.tiers.leased import Leases
from tierstore.tiers.leases import Lease
from tierstore.tiers.log import append
from tierstore.tiers.retention import Reason

STATE = {"w": torch.arange(4000, dtype=torch.float32), "n": 3}
KEEP_ONE = {
    "keep": [{"last": 1}],
    "protect": {"min_age": "1m"},
    "gc": {"undelete_window": "10m", "max_clock_skew": "1s", "max_delete_fraction": "100%"},
}


class Hook:
    """Holds back what `matches`, until it is opened."""

    def __init__(self) -> None:
        self.matches: Callable[[str, str], bool] = lambda operation, path: False
        self.reached = threading.Event()
        self.open = threading.Event()

    async def __call__(self, operation: str, path: str) -> None:
        if self.matches(operation, path) and not self.open.is_set():
            self.reached.set()
            await asyncio.to_thread(self.open.wait, 120)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Hook]]:
    """A hook for each tier of every store that the test opens; and a worker that looks for what retention has to do all the time.

    A store that ends waits until its leases are removed, however slow the machine is.
    """
    found = {name: Hook() for name in NAMES}

    def make(uri: str, *_args: Any, **_settings: Any) -> Storage:
        return HookedStorage(unsynced(uri), hook=found[Path(uri).name])

    def options(config: StoreConfig) -> WorkerOptions:
        return replace(worker_options(config), housekeep_s=0.05, retry_most_s=0.05)

    monkeypatch.setattr("tierstore.tiers.opening.open_storage", make)
    monkeypatch.setattr("tierstore.tiers.worker.worker_options", options)
    monkeypatch.setattr("tierstore.tiers.leased._RELEASE_S", 200.0)
    yield found
    for hook in found.values():
        hook.open.set()


def opened(root: Path, *, clock: SteppedClock | None = None, **config: Any) -> tierstore.Store:
    return tierstore.open({"version": 1, "run": "r", "tiers": tiers_of(root), "durable_at": "far", **config}, clock=clock)


@contextmanager
def saved(root: Path, *steps: int, **config: Any) -> Iterator[tierstore.Store]:
    with opened(root, **config) as store:
        for step in steps or (1,):
            store.save(step, STATE).wait("durable", 200)
        store.sync(200)
        yield store


def leases(root: Path) -> list[Path]:
    found = os.walk(root / "shared" / "r" / ".leases")  # passes over a folder that goes just now
    return sorted(Path(folder) / name for folder, _, names in found for name in names if name.endswith(".json"))


def eventually(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.01)


def sweep_behind_its_back(store: tierstore.Store, root: Path, info: CheckpointInfo) -> None:
    """What a collector does that did not see the lease: its observer had called the holder dead."""
    session = store._session
    facts: dict[str, Any] = {"files": []}
    session.run(append(session.tiers.authority.storage, info.attempt, "swept", facts, clock=SteppedClock(), actor="collector:7"))
    for name in NAMES:
        for path in (root / name / info.attempt.folder).glob("*"):
            path.unlink()


# ---- load


def test_a_load_waits_neither_for_its_lease_nor_for_the_look_at_the_log(tmp_path: Path, hooks: dict[str, Hook]) -> None:
    with saved(tmp_path) as store:
        info = store.latest()
        assert info is not None
        hooks["shared"].matches = lambda operation, path: ".leases" in path or info.attempt.log_folder in path
        assert torch.equal(store.load()["w"], STATE["w"])
        assert hooks["shared"].reached.wait(200)
        hooks["shared"].open.set()
        eventually(lambda: leases(tmp_path) == [], "it is ended")


def test_a_load_that_fails_says_that_the_checkpoint_was_deleted_and_not_that_it_is_damaged(tmp_path: Path, hooks: dict[str, Hook]) -> None:
    with saved(tmp_path) as store:
        info = store.latest()
        assert info is not None
        sweep_behind_its_back(store, tmp_path, info)
        hooks["shared"].matches = lambda operation, path: info.attempt.log_folder in path  # the look at the log
        outcome: list[tierstore.errors.TierStoreError] = []

        def load() -> None:
            try:
                store._load(lambda: info, None, None, "loading")
            except tierstore.errors.TierStoreError as error:
                outcome.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        assert hooks["shared"].reached.wait(200)
        assert outcome == [], "nothing is said before the log was asked"
        hooks["shared"].open.set()
        thread.join(200)
        (error,) = outcome
        assert isinstance(error, NotFoundError)
        assert "step 1 of run 'r' was deleted by collector:7" in error.message


def test_every_load_ends_its_lease_also_one_that_fails(tmp_path: Path, hooks: dict[str, Hook], taken: list[Lease]) -> None:
    with saved(tmp_path) as store:
        store.load()
        with pytest.raises(tierstore.errors.StateMismatchError):
            store.load(into={"other": torch.zeros(3)})
        assert len(taken) == 2
        eventually(lambda: leases(tmp_path) == [] and not any(lease.alive for lease in taken), "both are ended")


# ---- an open checkpoint


@pytest.mark.parametrize("end", ["close", "the last reference", "the store"])
def test_an_open_checkpoint_is_held_for_as_long_as_it_or_one_of_its_tensors_is_in_use(
    tmp_path: Path, hooks: dict[str, Hook], end: str
) -> None:
    with saved(tmp_path) as store:
        checkpoint = store.open_checkpoint()
        eventually(lambda: len(leases(tmp_path)) == 1, "it is held")
        tensor = checkpoint["w"]
        if end == "close":
            checkpoint.close()
        elif end == "the last reference":
            del checkpoint
            gc.collect()
            assert len(leases(tmp_path)) == 1
            assert torch.equal(tensor[:10], STATE["w"][:10])
            del tensor
            gc.collect()
        else:
            store.close()
            assert leases(tmp_path) == [], "closing waits for it"
        eventually(lambda: leases(tmp_path) == [], "it is ended")


def test_a_collector_waits_for_an_open_checkpoint_however_long_nobody_reads(
    tmp_path: Path, hooks: dict[str, Hook], taken: list[Lease]
) -> None:
    clock = SteppedClock()
    with saved(tmp_path, clock=clock, retention=KEEP_ONE) as store:
        checkpoint = store.open_checkpoint(1)
        (lease,) = taken
        eventually(lambda: lease.alive, "it is held")
        for step in (2, 3):
            store.save(step, STATE).wait("durable", 200)
        for _ in range(6):  # twice as long as an undelete window, or as a lease without a beat
            clock.advance(200)
            store._session.run(lease.beat())  # as it does by itself every 150 seconds, of a real clock
            for _ in range(2):  # the first one may have begun before
                before = _last_round(store)
                clock.advance(1)
                eventually(lambda before=before: _last_round(store) > before, "a round of housekeeping")  # type: ignore[misc]
        assert _steps(tmp_path) == [1, 3], "what nobody reads went meanwhile"
        assert torch.equal(checkpoint["w"][100:200], STATE["w"][100:200])
        checkpoint.close()
        eventually(lambda: bool(clock.advance(3600)) or _steps(tmp_path) == [3], "then it goes")


def _last_round(store: tierstore.Store) -> float:
    found = store.status().housekeeping
    return 0.0 if found is None or found.last_run is None else found.last_run.timestamp()


def _steps(root: Path, tier: str = "shared") -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (root / tier / "r").glob("step-*"))


def test_what_was_deleted_while_nobody_held_it_is_named_by_the_next_read(tmp_path: Path, hooks: dict[str, Hook]) -> None:
    with saved(tmp_path) as store:
        checkpoint = store.open_checkpoint()
        info = checkpoint.replica.info  # type: ignore[attr-defined]
        sweep_behind_its_back(store, tmp_path, info)
        with pytest.raises(NotFoundError, match=r"step 1 of run 'r' was deleted by collector:7"):
            checkpoint["w"].full()


def test_damage_is_still_damage(tmp_path: Path, hooks: dict[str, Hook]) -> None:
    with saved(tmp_path) as store:
        checkpoint = store.open_checkpoint()
        for shard in tmp_path.glob("*/r/step-*/shard-*"):
            shard.unlink()
        with pytest.raises(IntegrityError, match="no tier has a good copy"):
            checkpoint["w"].full()


# ---- what training goes on from


def test_the_checkpoint_that_a_run_resumed_from_stays_until_a_newer_one_is_durable(tmp_path: Path, hooks: dict[str, Hook]) -> None:
    """PL#21813: a new run deleted the checkpoint that it had resumed from, and then failed before its own was safe."""
    clock = SteppedClock()
    with saved(tmp_path, 1, 2, clock=clock):
        pass
    with opened(tmp_path, clock=clock, retention=KEEP_ONE) as store:
        resumed = store.resume()
        assert resumed is not None
        assert resumed.step == 2
        source = resumed.checkpoint.attempt
        far = hooks["far"]
        far.matches = lambda operation, path: operation == "write" and f"step-{3:010d}" in path
        ticket = store.save(3, STATE)
        ticket.wait("committed", 200)
        assert far.reached.wait(200)
        engine = store._worker._engine
        assert engine is not None

        async def protected() -> Mapping[Attempt, Reason]:
            return engine.protected()

        assert store._session.run(protected())[source].kind == "resumed-from"
        eventually(lambda: bool(clock.advance(3600)) or _steps(tmp_path) == [2, 3], "what no rule keeps goes; the source stays")
        assert not ticket.done("durable")
        far.open.set()
        ticket.wait("durable", 200)
        eventually(lambda: source not in store._session.run(protected()), "it is no source any more")
        eventually(lambda: bool(clock.advance(3600)) or _steps(tmp_path) == [3], "then it goes too")


def test_a_resume_keeps_its_lease_until_a_save_that_began_after_it_is_durable(tmp_path: Path, hooks: dict[str, Hook]) -> None:
    with saved(tmp_path) as store:
        hooks["far"].matches = lambda operation, path: operation == "write" and f"step-{2:010d}" in path
        before = store.save(2, STATE)  # it is on its way when the run resumes, and says nothing of what comes after that
        before.wait("committed", 200)
        store.resume()
        eventually(lambda: len(leases(tmp_path)) == 1, "held")
        hooks["far"].open.set()
        before.wait("durable", 200)
        store.status()  # what the callbacks of that had to do is done
        assert len(leases(tmp_path)) == 1
        store.save(3, STATE).wait("durable", 200)
        eventually(lambda: leases(tmp_path) == [], "let go")


def test_another_resume_lets_the_first_source_go_and_a_failed_one_holds_nothing(tmp_path: Path, hooks: dict[str, Hook]) -> None:
    with saved(tmp_path) as store:
        with pytest.raises(tierstore.errors.StateMismatchError):
            store.resume(into={"other": torch.zeros(3)})
        eventually(lambda: leases(tmp_path) == [], "nothing is held for a resume that failed")
        store.resume()
        eventually(lambda: len(leases(tmp_path)) == 1, "held")
        (first,) = leases(tmp_path)
        store.resume()
        eventually(lambda: len(leases(tmp_path)) == 1 and leases(tmp_path) != [first], "the second one is held, the first is let go")
    assert leases(tmp_path) == []


def test_a_door_that_loads_by_itself_holds_what_it_goes_on_from_like_resume(tmp_path: Path) -> None:
    with saved(tmp_path, 1, 2) as store:
        found = store.find_resumable()
        assert found is not None
        assert found == store.latest()
        eventually(lambda: len(leases(tmp_path)) == 1, "held")
        store.save(3, STATE).wait("durable", 200)
        eventually(lambda: leases(tmp_path) == [], "let go")


# ---- the other doors


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Lease]:
    """The leases that readers take."""
    found: list[Lease] = []
    hold = Leases.hold

    def held(self: Leases, info: CheckpointInfo, **more: Any) -> Lease:
        found.append(hold(self, info, **more))
        return found[-1]

    monkeypatch.setattr(Leases, "hold", held)
    return found


def test_export_holds_one_and_ends_it(tmp_path: Path, hooks: dict[str, Hook], taken: list[Lease]) -> None:
    with saved(tmp_path) as store:
        store.export("latest", tmp_path / "out", ExportOptions())
        eventually(lambda: leases(tmp_path) == [], "ended")
    assert len(taken) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_dcp_load_holds_one_for_as_long_as_it_reads(tmp_path: Path, hooks: dict[str, Hook], taken: list[Lease]) -> None:
    with saved(tmp_path):
        pass
    reader = TierStorageReader({"run": "r", "tiers": tiers_of(tmp_path)})
    into = {"w": torch.zeros(4000)}
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert torch.equal(into["w"], STATE["w"])
    assert len(taken) == 1
    eventually(lambda: leases(tmp_path) == [], "the reader lives on, its lease does not")
    reader.close()


@pytest.mark.parametrize("verb", [["cat", "r@1", "objects.json"], ["export", "r@1", "OUT"]])
def test_the_command_line_holds_one_while_it_reads(
    tmp_path: Path, hooks: dict[str, Hook], taken: list[Lease], verb: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with saved(tmp_path):
        pass
    monkeypatch.chdir(tmp_path)
    given = [word for name in NAMES for word in ("--tier", str(tmp_path / name))]
    result = CliRunner().invoke(app, [*verb, *given])
    assert result.exit_code == 0, result.output
    assert [lease.attempt.step for lease in taken] == [1]
    assert leases(tmp_path) == []


def test_looking_at_a_checkpoint_writes_nothing(tmp_path: Path, hooks: dict[str, Hook], taken: list[Lease]) -> None:
    with saved(tmp_path):
        pass
    given = [word for name in NAMES for word in ("--tier", str(tmp_path / name))]
    for verb in ("show", "tensors"):
        assert CliRunner().invoke(app, [verb, "r@1", *given]).exit_code == 0
    assert taken == []
