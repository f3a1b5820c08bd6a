"""The Checkpointer with several ranks: a signal to one of them stops all after the same step; what they saved, another number resumes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks_kit import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tierstore.checkpointer import Checkpointer
from tierstore.checkpointer.stopping import Stopping
from tierstore.preemption import Preemption, Request
from tierstore.state.agreement import Agreement


def model_of(sharded: bool) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
    model.add_module("unused", torch.nn.Linear(3, 3))  # has no gradient, and so no state in the optimizer
    if sharded:
        for layer in model.children():
            if list(layer.parameters()):
                fully_shard(layer)
        return fully_shard(model)
    return model


def checkpointer(folder: Path, model: Any, optimizer: Any, **options: Any) -> Checkpointer:
    return Checkpointer([str(folder / "shared")], run="r", model=model, optimizer=optimizer, progress=False, **options)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def numbers(model: Any, optimizer: Any) -> list[float]:
    """Sums over weights and optimizer state, and what the random generator would draw next."""
    weights = [float(plain(p).double().sum()) for p in model.parameters()]
    moments = [float(plain(s["exp_avg"]).double().sum()) for p in model.parameters() if (s := optimizer.state.get(p))]
    return [*weights, *moments, float(torch.rand(1))]


def sharded(rank: int, world_size: int, folder: Path, total: int, every: int = 4) -> Any:
    model = model_of(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with checkpointer(folder, model, optimizer, every=every) as ckpt:
        trained = []
        for step in ckpt.steps(total):
            data = torch.randn(12, 6)
            model[2](model[1](model[0](data))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step)
            trained.append(step)
    return [trained, numbers(model, optimizer)]


def alone(folder: Path) -> tuple[int, list[float]]:
    """One process without a process group resumes what ranks saved."""
    model = model_of(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with checkpointer(folder, model, optimizer) as ckpt:
        start = ckpt.resume()
    return start, numbers(model, optimizer)


def test_fsdp2_resumes_in_place_on_as_many_ranks_and_on_one_and_back(tmp_path: Path) -> None:
    straight = run_ranks(2, sharded, tmp_path / "straight", total=9)
    first = run_ranks(2, sharded, tmp_path / "parts", total=6)
    start, found = alone(tmp_path / "parts")
    assert start == 6
    assert found == first[0][1]  # whole tensors in one process, those of rank 0's random numbers
    second = run_ranks(2, sharded, tmp_path / "parts", total=9)
    assert [trained for trained, _ in second] == [[6, 7, 8]] * 2
    assert [n for _, n in second] == [n for _, n in straight]


def replicated(rank: int, world_size: int, folder: Path, total: int, signal_rank: int, at: int, number: int, **options: Any) -> Any:
    """DDP, whose gradients tie the ranks together at each step; one of them gets a signal."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 6)))
    optimizer = torch.optim.AdamW(model.parameters())
    saved, last = [], -1
    with checkpointer(folder, model, optimizer, every=10**9, **options) as ckpt:
        for step in ckpt.steps(total):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == signal_rank and step == at:
                os.kill(os.getpid(), number)
            if ckpt.step(step):
                saved.append(step)
                if number == signal.SIGUSR1 and len(saved) == 1:
                    os.kill(os.getpid(), signal.SIGTERM)  # all of them at once, as from a launcher
            last = step
        return [saved, last, ckpt.stopped_by]


def test_sigterm_on_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    found = run_ranks(3, replicated, tmp_path, total=10**6, signal_rank=2, at=5, number=int(signal.SIGTERM), deadline=200.0)
    saved, last, by = found[0]
    assert found == [[saved, last, by]] * 3
    assert saved == [last]
    assert last >= 5
    assert by == "SIGTERM"


def test_sigusr1_on_one_rank_saves_on_all_and_the_next_signal_is_heard_too(tmp_path: Path) -> None:
    found = run_ranks(2, replicated, tmp_path, total=10**6, signal_rank=1, at=3, number=int(signal.SIGUSR1), deadline=200.0)
    saved, last, by = found[0]
    assert found == [[saved, last, by]] * 2
    assert len(saved) == 2
    assert (saved[-1], by) == (last, "SIGTERM")


def without_ties(rank: int, world_size: int, folder: Path) -> Any:
    """Nothing but the Checkpointer ties these ranks, one is far quicker, and one of them never comes to another step."""
    model = torch.nn.Linear(2, 2)
    with checkpointer(folder, model, None, every=10**9, deadline=3.0) as ckpt:
        for step in ckpt.steps(10**9):
            if rank == 1 and step == 10:
                os.kill(os.getpid(), signal.SIGTERM)
            if rank == 0 and step == 5:
                dist.barrier()  # as one that hangs; the other comes when it has given up
                return ["hung", ckpt.stopped_by]
            ckpt.step(step)
        dist.barrier()
        return [ckpt.stopped_by, len(ckpt.store.checkpoints())]


def test_a_rank_that_hangs_is_not_waited_for_past_the_deadline(tmp_path: Path) -> None:
    found = run_ranks(2, without_ties, tmp_path)
    assert found == [["hung", ""], ["SIGTERM", 0]]
    (errors,) = tmp_path.glob("ranks-*/1.error")
    # Which of them, depends on who looks first when the deadline is over, and on whether rank 0's thread has said a word by then.
    assert re.search(
        r"step \d+ is not saved: the save did not begin in time"
        r"|step \d+ is not saved: DeadlineError: .* rank 0 of 2 did not answer in the time that was left"
        r"|not all ranks came to a step within 3 s, so step \d+ is not saved",
        errors.read_text(),
    )


def in_a_due_save(rank: int, world_size: int, folder: Path) -> Any:
    """Rank 0 is told to stop while it waits in a save for a rank that does not come."""
    patch, comes = pytest.MonkeyPatch(), Agreement._comes

    def told_while_it_waits(ranks: Agreement, key: str, end: float) -> bool:
        patch.undo()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return comes(ranks, key, end)

    model = torch.nn.Linear(2, 2)
    with checkpointer(folder, model, None, every=4, deadline=3.0) as ckpt:
        for step in ckpt.steps(10**9):
            if rank == 1 and step == 8:
                dist.barrier()
                return ["hung", ckpt.stopped_by]
            if rank == 0 and step == 8:
                patch.setattr(Agreement, "_comes", told_while_it_waits)
            if ckpt.step(step) and step == 4:
                ckpt.store.sync(200)  # that one is to be there, however slow the machine is
        dist.barrier()
        return [ckpt.stopped_by, [c.step for c in ckpt.store.checkpoints()]]


def test_a_signal_during_a_due_save_that_waits_for_a_rank_is_answered_within_the_deadline(tmp_path: Path) -> None:
    """It waited for ``save.agreement_timeout`` (10 minutes), whatever ``deadline=`` said."""
    assert run_ranks(2, in_a_due_save, tmp_path) == [["SIGTERM", [4]], ["hung", ""]]
    (errors,) = tmp_path.glob("ranks-*/0.error")
    assert "the deadline of 3 s is over" in errors.read_text()


def test_a_rank_of_which_nothing_is_heard_is_not_waited_for_past_the_deadline() -> None:
    signals = Preemption()
    signals.install()
    stopping = Stopping(signals, dist.HashStore(), rank=1, world_size=2, deadline_s=0.3)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 60
        while (answer := stopping.arrive()) is None:
            assert time.monotonic() < end
        assert (answer.alone, answer.request.name, answer.rank) == (True, "SIGTERM", 1)
    finally:
        stopping.close()
        signals.restore()


class Asked:
    """A process that was asked for a save."""

    def __init__(self) -> None:
        self.requested: Request | None = Request(name="SIGUSR1", stop=False, at_s=time.monotonic())

    def saved(self) -> None:
        self.requested = None


class Looked:
    """A place where ranks write to each other that says when somebody looks for what is asked in the second round."""

    def __init__(self) -> None:
        self.store, self.again = dist.HashStore(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        if keys == ["1/asked"]:
            self.again.set()
        return bool(self.store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_what_is_answered_at_a_step_is_not_asked_for_again_before_that_step_is_saved() -> None:
    """The thread could see the next round before the loop had said that the save was taken: one signal, two saves."""
    signals, place = Asked(), Looked()
    stopping = Stopping(signals, place, rank=0, world_size=1, deadline_s=200.0)  # type: ignore[arg-type]
    try:
        end = time.monotonic() + 60
        while (answer := stopping.arrive()) is None:
            assert time.monotonic() < end
        assert (answer.alone, answer.request.name) == (False, "SIGUSR1")
        assert place.again.wait(60)
        assert not place.check(["1/asked"])
    finally:
        stopping.close()


def forgets(rank: int, world_size: int, folder: Path) -> Any:
    model = torch.nn.Linear(2, 2)
    with checkpointer(folder, model, None, every=1) as ckpt:
        try:
            ckpt.step(1)
        except Exception as error:  # noqa: BLE001 - told to the test
            return type(error).__name__
    return "saved"


def test_all_ranks_are_refused_where_resume_was_forgotten(tmp_path: Path) -> None:
    assert run_ranks(2, forgets, tmp_path) == ["saved"] * 2
    assert run_ranks(2, forgets, tmp_path) == ["RefusedError"] * 2
