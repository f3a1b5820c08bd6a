"""Signals: noted when they come, answered at the next step, within a deadline; what the process did before is put back."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loop_kit import Loop, Process

import tierstore
from tierstore.errors import UsageError
from tierstore.preemption import Preemption
from tierstore.storage.posix import PosixStorage
from tierstore.testing.flows import HookedStorage
from tierstore.testing.proxy import CuttingProxy, Rule
from tierstore.testing.servers import S3Server
from tierstore.tiers import opening, worker

ENDLESS = 10**9


def train(say: Any, tiers: list[Any], total: int, every: Any = 10**9, deadline: Any = 250.0, **options: Any) -> None:
    """A user's program: it knows nothing of signals but `steps`. Where a test is not about the deadline there is time for everything."""
    loop = Loop()
    with loop.checkpointer({"version": 1, "run": "job", "tiers": tiers}, every=every, deadline=deadline, **options) as ckpt:
        for step in ckpt.steps(total):
            loss = loop.train()
            saved = ckpt.step(step, {"loss": loss})
            say({"step": step, "saved": saved})
        say({"stopped_by": ckpt.stopped_by})
    say({"digest": loop.digest()})


def tiers_of(folder: Path) -> list[Any]:
    return [str(folder / "node"), str(folder / "shared")]


def steps_in(folder: Path) -> list[int]:
    with tierstore.open(tiers_of(folder), run="job") as store:
        return [c.step for c in store.checkpoints()]


def uninterrupted(folder: Path, total: int) -> str:
    """The digest of `total` steps without any signal, in a process such as the others."""
    with Process(train, folder, tiers=tiers_of(folder), total=total) as process:
        said = list(process.told())
        assert process.end() == 0
    return str(said[-1]["digest"])


def until(process: Process, step: int) -> Iterator[Any]:
    """Reads on; asserts that the process comes to `step`, and returns what it says after it."""
    told = process.told()
    assert any(said.get("step") == step for said in told), process.errors.read_text()
    return told


def test_sigterm_saves_the_step_and_the_next_start_goes_on_bit_equal(tmp_path: Path) -> None:
    with Process(train, tmp_path, tiers=tiers_of(tmp_path), total=ENDLESS) as process:
        told = until(process, 20)
        process.signal(signal.SIGTERM)
        said = list(told)
        assert process.end() == 0
    assert said[-2] == {"stopped_by": "SIGTERM"}
    assert said[-3]["saved"]
    assert not any(s.get("saved") for s in said[:-3])
    last = said[-3]["step"]
    assert steps_in(tmp_path) == [last]
    with tierstore.open(tiers_of(tmp_path), run="job") as store:
        (info,) = store.checkpoints()
        assert (info.tags, info.final) == (("preempted",), False)
        assert store.status().tiers[1].pending == 0  # all was brought to its end
    errors = process.errors.read_text()
    assert f"SIGTERM: step {last} is saved, and training stops" in errors

    with Process(train, tmp_path, tiers=tiers_of(tmp_path), total=last + 6) as process:
        said = list(process.told())
        assert process.end() == 0
    assert [s["step"] for s in said if "step" in s] == list(range(last + 1, last + 6))
    assert said[-1]["digest"] == uninterrupted(tmp_path / "straight", last + 6)


def test_sigkill_costs_the_steps_since_the_last_save(tmp_path: Path) -> None:
    with Process(train, tmp_path, tiers=tiers_of(tmp_path), total=ENDLESS, every=7) as process:
        until(process, 40)
        end = time.monotonic() + 200
        while not list(tmp_path.glob("shared/job/.log/*/000000.json")):  # training is much faster than the first save
            assert time.monotonic() < end, process.errors.read_text()
            time.sleep(0.01)
        process.signal(signal.SIGKILL)
        assert process.end() == -signal.SIGKILL
    with Process(train, tmp_path, tiers=tiers_of(tmp_path), total=ENDLESS, every=7) as process:
        first = next(process.told())["step"]
        process.signal(signal.SIGTERM)
        last = [s for s in process.told() if "step" in s][-1]["step"]
        assert process.end() == 0
    assert first % 7 == 1
    with Process(train, tmp_path, tiers=tiers_of(tmp_path), total=last + 2, every=7) as process:
        assert list(process.told())[-1]["digest"] == uninterrupted(tmp_path / "straight", last + 2)


def test_sigusr1_saves_and_training_goes_on(tmp_path: Path) -> None:
    with Process(train, tmp_path, tiers=tiers_of(tmp_path), total=ENDLESS) as process:
        told = until(process, 5)
        saved = []
        for _ in range(2):
            process.signal(signal.SIGUSR1)
            saved.append(next(s["step"] for s in told if s["saved"]))
        assert next(told)["step"] == saved[1] + 1  # it goes on
        process.signal(signal.SIGTERM)
        saved.append([s for s in told if "step" in s][-1]["step"])
        assert process.end() == 0
    assert steps_in(tmp_path) == saved
    assert f"SIGUSR1 on rank 0: step {saved[0]} is saved, and training goes on" in process.errors.read_text()


def test_sigusr1_can_stop_training(tmp_path: Path) -> None:
    with Process(train, tmp_path, tiers=tiers_of(tmp_path), total=ENDLESS, on_warning="stop") as process:
        told = until(process, 5)
        process.signal(signal.SIGUSR1)
        said = list(told)
        assert process.end() == 0
    assert said[-2] == {"stopped_by": "SIGUSR1"}
    assert steps_in(tmp_path) == [said[-3]["step"]]


@pytest.mark.parametrize("policy", ["finish", "abandon"])
def test_without_a_save_of_its_own_sigterm_keeps_what_was_saved(tmp_path: Path, policy: str) -> None:
    with Process(train, tmp_path, tiers=tiers_of(tmp_path), total=ENDLESS, every=1000, on_preempt=policy) as process:
        told = until(process, 1000)
        process.signal(signal.SIGTERM)
        said = list(told)
        assert process.end() == 0
    assert not any(s.get("saved") for s in said if s.get("step", 0) % 1000)
    kept = steps_in(tmp_path)
    assert all(step % 1000 == 0 for step in kept)
    if policy == "finish":
        assert 1000 in kept
    assert f"without a save (on_preempt='{policy}')" in process.errors.read_text()


def train_until_it_is_late(say: Any, tiers: list[Any]) -> None:
    """As `train`; as soon as the last save is committed, the deadline has passed."""
    loop = Loop()
    with loop.checkpointer({"version": 1, "run": "job", "tiers": tiers}, every=10**9, deadline="50s") as ckpt:
        save = ckpt.store.save
        much_later = SimpleNamespace(monotonic=lambda: time.monotonic() + 50.0)

        def save_and_wait(*args: Any, **more: Any) -> Any:
            ticket = save(*args, **more)
            ticket.on("committed", lambda _: setattr(worker, "time", much_later))
            return ticket

        ckpt.store.save = save_and_wait  # type: ignore[method-assign]
        for step in ckpt.steps(ENDLESS):
            loop.train()
            say({"step": step, "saved": ckpt.step(step)})
        say({"stopped_by": ckpt.stopped_by})


def test_a_tier_that_hangs_does_not_hold_the_process_past_the_deadline(tmp_path: Path, s3_server: S3Server, s3_bucket: str) -> None:
    with CuttingProxy(s3_server.endpoint_url) as proxy:
        proxy.add(Rule(method="PUT", path="shard-", action="stall", times=ENDLESS))
        far = {"name": "far", "uri": s3_bucket, "options": {**s3_server.options(), "endpoint_url": proxy.endpoint_url}}
        tiers = [*tiers_of(tmp_path), far]
        with Process(train_until_it_is_late, tmp_path, tiers=tiers) as process:
            told = until(process, 3)
            process.signal(signal.SIGTERM)
            said = list(told)  # a request may stall for ever
            assert process.end() == 0
    last = said[-2]["step"]
    assert said[-2:] == [{"step": last, "saved": True}, {"stopped_by": "SIGTERM"}]
    assert steps_in(tmp_path) == [last]
    errors = process.errors.read_text()
    told = rf"the deadline of 50 s is over: run 'job': not done in the time that was left: (.*; )?far: steps {last}"
    assert re.search(told, errors), errors  # a busy machine may have left more
    assert "tierstore sync" in errors


def keep_hanging(say: Any, tiers: list[Any]) -> None:
    """The last save is under way while the loop is over, and the far tier hangs."""
    loop = Loop()
    with loop.checkpointer({"version": 1, "run": "job", "tiers": tiers}, every=10**9, deadline=1.0) as ckpt:
        for step in ckpt.steps(3):
            loop.train()
            ckpt.step(step)
        ckpt._tickets[-1].wait("committed", 200)
        say({"draining": True})
    say({"closed": True})


def test_sigterm_ends_a_close_that_waits_for_a_tier(tmp_path: Path, s3_server: S3Server, s3_bucket: str) -> None:
    with CuttingProxy(s3_server.endpoint_url) as proxy:
        rule = proxy.add(Rule(method="PUT", path="shard-", action="stall", times=ENDLESS))
        far = {"name": "far", "uri": s3_bucket, "options": {**s3_server.options(), "endpoint_url": proxy.endpoint_url}}
        with Process(keep_hanging, tmp_path, tiers=[*tiers_of(tmp_path), far]) as process:
            told = process.told()
            assert next(told) == {"draining": True}
            assert rule.reached.wait(200)
            process.signal(signal.SIGTERM)
            assert list(told) == [{"closed": True}]
            assert process.end() == 0
    errors = process.errors.read_text()
    assert "far: steps 2" in errors
    assert "Traceback" not in errors  # the store is closed already for all but its own drain


def train_full(say: Any, tiers: list[Any]) -> None:
    """No tier takes anything, and memory holds one save."""

    async def hang(operation: str, path: str) -> None:
        if operation == "write" and "/step-" in path:
            await asyncio.Event().wait()

    opening.open_storage = lambda uri, *a, **k: HookedStorage(PosixStorage(Path(uri)), hook=hang)  # type: ignore[attr-defined]
    loop = Loop(width=400)  # about 2.6 MB with the optimizer's state and the average
    config = {"version": 1, "run": "job", "tiers": tiers, "io": {"max_inflight": "3MiB"}}
    with loop.checkpointer(config, every=1, deadline=1.0) as ckpt:
        for step in ckpt.steps(ENDLESS):
            loop.train()
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            say({"step": step, "saved": ckpt.step(step)})
    say({"end": True})


def test_a_save_that_waits_for_memory_is_given_up_in_time(tmp_path: Path) -> None:
    with Process(train_full, tmp_path, tiers=tiers_of(tmp_path)) as process:
        said = list(process.told())
        assert process.end() == 0
    assert said == [
        {"step": 0, "saved": False},
        {"step": 1, "saved": True},
        {"step": 2, "saved": False},
        {"end": True},
    ]
    errors = process.errors.read_text()
    assert "step 2 is not saved: the save did not begin in time" in errors
    assert "steps 1 are in memory only" in errors


def test_a_second_sigterm_ends_the_process_as_it_would_have(tmp_path: Path) -> None:
    with Process(stubborn, tmp_path, tiers=tiers_of(tmp_path)) as process:
        assert next(process.told()) == {"noted": True}
        process.signal(signal.SIGTERM)
        assert process.end() == -signal.SIGTERM


def stubborn(say: Any, tiers: list[Any]) -> None:
    """A loop that never asks."""
    with Loop().checkpointer({"version": 1, "run": "job", "tiers": tiers}):
        os.kill(os.getpid(), signal.SIGTERM)
        say({"noted": True})
        threading.Event().wait()


# ---- Preemption by itself


@pytest.fixture
def untouched() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("untouched")
def test_handlers_that_were_there_are_called_and_put_back() -> None:
    heard: list[int] = []

    def own(number: int, frame: Any) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, own)
    try:
        signals = Preemption()
        assert signals.install()
        assert signals.requested is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.requested is not None
        assert (signals.requested.name, signals.requested.stop) == ("SIGUSR1", False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.requested.name, signals.requested.stop) == ("SIGTERM", True)
        assert heard == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)  # the second goes where it would go
        assert heard == [signal.SIGTERM] * 2
        signals.restore()
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("untouched")
def test_a_handler_that_was_set_meanwhile_stays() -> None:
    signals = Preemption()
    signals.install()
    before, later = signal.SIG_DFL, signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signals.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert later == signals._note
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("untouched")
def test_ctrl_c_can_be_noted_once() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in a shell's background
    signals = Preemption(stop=("SIGINT",), save=())
    signals.install()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.requested is not None
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signals.restore()
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("untouched")
def test_outside_of_the_main_thread_signals_stay_as_they_are_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(Preemption().install()), name="side")
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread.join()
    assert found == [False]
    assert "signals can be handled in the main thread only, and this is 'side'" in caplog.text


def with_children(say: Any) -> None:
    signals = Preemption()
    signals.install()
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, b"!")
        threading.Event().wait(200)
        os._exit(0)
    os.read(ready, 1)  # a signal before Python has finished its fork is forgotten by Python itself
    os.kill(child, signal.SIGTERM)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    say(signals.requested is None)


def test_a_forked_child_dies_of_a_signal_as_it_always_did(tmp_path: Path) -> None:
    """A worker of a data loader that only noted SIGTERM would never end."""
    with Process(with_children, tmp_path) as process:
        assert list(process.told()) == [-signal.SIGTERM, True]


def test_signals_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="there is no signal 'SIGFOO'"):
        Preemption(stop=("SIGFOO",))
    with pytest.raises(UsageError, match="SIGKILL can't be handled"):
        Preemption(stop=("SIGKILL",))
