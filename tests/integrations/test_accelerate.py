"""The Accelerate door, with its real `save_state` and `load_state`: round trip, kill and resume, several processes and fewer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration
from fork_kit import SERVER, FrameworkServer
from ranks_kit import run_ranks

import tierstore
import tierstore.integrations.accelerate as accelerate_door
from tierstore import crashpoints
from tierstore.crashpoints import CRASH_EXIT
from tierstore.errors import NotFoundError, StateMismatchError, UsageError
from tierstore.integrations.accelerate import load_state, save_state
from tierstore.testing.equality import assert_same_state

# deepspeed, where it is installed, is imported by accelerate when it prepares anything: once here instead of once a process.
_ACCELERATORS = FrameworkServer(["pytest", "torch", "tierstore.store", "deepspeed", "torch._dynamo", "tierstore.integrations.accelerate"])

STEPS = 6


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Accelerate keeps its state in the process; each Accelerator of a test is to be as a new process's."""
    forget()
    yield
    forget()


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class Job:
    """A training loop as Accelerate's guide has it: dropout, a shuffled loader, a scheduler, a registered object."""

    def __init__(self, width: int = 16, **settings: Any) -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.accelerator = Accelerator(cpu=True, **settings)
        model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1))
        head = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
        # With a generator of its own the order is that of a fresh process, and beginning an epoch draws nothing from the global one.
        order = torch.Generator().manual_seed(5)
        loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True, generator=order)  # type: ignore[arg-type]
        self.model, self.head, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, head, optimizer, scheduler, loader
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.step = 0

    def train(self, until: int, store: Any = None) -> None:
        """One step a batch, from the batch after the last one."""
        loader = self.accelerator.skip_first_batches(self.loader, self.step) if self.step else self.loader
        for batch in loader:
            if self.step == until:
                return
            self.step += 1
            loss = self.head(self.model(batch)).pow(2).mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counter.seen.append(self.step)
            torch.rand(self.accelerator.process_index)
            if store is not None and self.step % 2 == 0:
                save_state(self.accelerator, store, self.step, metrics={"loss": loss.item()}).wait("durable", 60)

    def state(self) -> dict[str, Any]:
        unwrap = self.accelerator.unwrap_model
        return {
            "model": {k: v.clone() for k, v in unwrap(self.model).state_dict().items()},
            "head": {k: v.clone() for k, v in unwrap(self.head).state_dict().items()},
            "optimizer": self.optimizer.state_dict()["state"],
            "lr": self.scheduler.get_last_lr(),
            "seen": self.counter.seen,
            "draws": [torch.rand(3), random.random(), float(np.random.rand())],
        }


def tiers_under(folder: Path) -> list[str]:
    return [str(folder / "node"), str(folder / "shared")]


def life(folder: str, crash_at: str) -> None:
    """A process that dies at a crash point."""
    crashpoints._AT, _, crashpoints._NTH = crash_at.partition(":")
    with tierstore.open(tiers_under(Path(folder)), run="r") as store:
        Job().train(STEPS, store)


@pytest.mark.parametrize("crash_at", ["persist.before-part:2", "commit.before-manifest:2"])
def test_a_job_killed_in_mid_save_goes_on_to_the_very_state_of_an_uninterrupted_one(tmp_path: Path, crash_at: str) -> None:
    process = SERVER.Process(target=life, args=(str(tmp_path), crash_at))
    _ACCELERATORS.start(process)
    process.join(250)
    assert process.exitcode == CRASH_EXIT
    whole = Job()
    whole.train(STEPS)
    expected = whole.state()
    forget()
    with tierstore.open(tiers_under(tmp_path), run="r") as store:
        job = Job()
        job.step = load_state(job.accelerator, store) or 0
        assert job.step in (2, 4), "what was staged whole may be committed by the next process; half of it never"
        assert job.step == 2 or crash_at != "persist.before-part:2"
        assert job.counter.seen == list(range(1, job.step + 1))
        job.train(STEPS, store)
        assert_same_state(job.state(), expected)


def test_weights_and_optimizer_states_are_tensors_with_names_and_nothing_of_them_is_pickled(tmp_path: Path) -> None:
    with tierstore.open(tiers_under(tmp_path), run="r") as store:
        job = Job()
        job.train(2, store)
        with store.open_checkpoint(2) as checkpoint:
            names = set(checkpoint)
            assert {"model.0.weight", "model_1.weight", "optimizer.state.0.exp_avg", "files.scheduler.bin"} <= names
            assert {"files.custom_checkpoint_0.pkl", "files.random_states_0.pkl"} <= names
            assert not {"files.optimizer.bin", "files.model.safetensors", "safetensors.model.safetensors"} & names
            assert torch.equal(checkpoint["model.0.weight"][2:4], job.accelerator.unwrap_model(job.model)[0].weight[2:4])
        assert job.accelerator._optimizers == [job.optimizer], "the accelerator is as it was"
        info = store.latest()
        assert info is not None
        assert info.metrics.keys() == {"loss"}


def test_a_programs_own_hooks_are_called_as_before_and_keep_what_they_take(tmp_path: Path) -> None:
    """As diffusers does it: a hook saves one model itself, takes its weights away, and loads it again."""
    calls: list[str] = []

    def saving(models: list[Any], weights: list[Any], output_dir: str) -> None:
        assert len(models) == len(weights) == 2
        torch.save(weights.pop(), Path(output_dir) / "own.pt")
        calls.append("save")

    def loading(models: list[Any], input_dir: str) -> None:
        models.pop().load_state_dict(torch.load(Path(input_dir) / "own.pt"))
        calls.append("load")

    with tierstore.open(tiers_under(tmp_path), run="r") as store:
        for part in ("save", "load"):
            forget()
            job = Job()
            job.accelerator.register_save_state_pre_hook(saving)
            job.accelerator.register_load_state_pre_hook(loading)
            if part == "save":
                job.train(2, store)
                expected = job.state()
                assert "files.own.pt" in store.open_checkpoint(2)
                assert "model_1.weight" not in store.open_checkpoint(2)
            else:
                assert load_state(job.accelerator, store) == 2
                assert_same_state(job.state()["head"], expected["head"])
    assert calls == ["save", "load"]


def body(rank: int, world_size: int, folder: Path, *, until: int, itself: bool = False) -> Any:
    if itself:  # as under FSDP, which Accelerate has for GPUs only: it writes models and optimizers by itself
        accelerate_door._WRITES_ITSELF = (DistributedType.MULTI_CPU,)
    with_store = Job()
    with tierstore.open(tiers_under(folder), run="r") as store:
        found = load_state(with_store.accelerator, store)
        with_store.step = found or 0
        with_store.train(until, store)
    state = with_store.state()
    shown = {"model": {k: v.tolist() for k, v in state["model"].items()}, "draws": [state["draws"][0].tolist(), *state["draws"][1:]]}
    return {"found": found, "seen": state["seen"], **shown}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two processes come to that are not interrupted."""
    return run_ranks(2, body, tmp_path_factory.mktemp("whole"), until=4, server=_ACCELERATORS)


def test_files_that_accelerate_writes_for_all_processes_come_back_to_each_of_them(tmp_path: Path, whole: list[Any]) -> None:
    run_ranks(2, body, tmp_path, until=2, itself=True, server=_ACCELERATORS)
    second = run_ranks(2, body, tmp_path, until=4, itself=True, server=_ACCELERATORS)
    assert [r["found"] for r in second] == [2, 2]
    for before, after in zip(whole, second, strict=True):
        assert before["model"] == after["model"]
        assert before["draws"] == after["draws"]
    with tierstore.open(tiers_under(tmp_path), run="r") as store:
        names = set(store.open_checkpoint(4))
        assert {"files.optimizer.bin", "files.random_states_1.pkl"} <= names
        assert "optimizer.state.0.exp_avg" not in names
        with pytest.raises(UsageError, match="saved with FSDP"):
            load_state(Job().accelerator, store)


def test_two_processes_go_on_each_with_its_own_random_state_and_one_process_can_load_what_two_saved(
    tmp_path: Path, whole: list[Any]
) -> None:
    first = run_ranks(2, body, tmp_path / "parts", until=2, server=_ACCELERATORS)
    second = run_ranks(2, body, tmp_path / "parts", until=4, server=_ACCELERATORS)
    assert [r["found"] for r in first + second] == [None, None, 2, 2]
    for before, after in zip(whole, second, strict=True):
        assert before["model"] == after["model"]
        assert before["draws"] == after["draws"]
    assert second[0]["draws"] != second[1]["draws"]
    with tierstore.open(tiers_under(tmp_path / "parts"), run="r") as store:
        names = set(store.open_checkpoint(4))
        assert {"files.random_states_0.pkl", "files.random_states_1.pkl", "model.0.weight"} <= names, "no prefix of the wrapper"
        assert not any("@rank" in name and name.startswith(("model", "optimizer")) for name in names), "stored once"
        job = Job()
        assert load_state(job.accelerator, store) == 4
        assert {k: v.tolist() for k, v in job.state()["model"].items()} == second[0]["model"]


def test_automatic_names_and_a_limit_remove_nothing_and_the_newest_is_the_highest_step(tmp_path: Path) -> None:
    """acc#1163: sorted as text, checkpoint_10 went before checkpoint_9; and old folders were deleted before the new one was there."""
    project = ProjectConfiguration(project_dir=str(tmp_path / "p"), automatic_checkpoint_naming=True, total_limit=1)
    job = Job(project_config=project)
    job.accelerator.save_state()
    with tierstore.open(tiers_under(tmp_path), run="r") as store:
        for step in (9, 10):
            save_state(job.accelerator, store, step).wait("durable", 60)
        assert [path.name for path in (tmp_path / "p" / "checkpoints").iterdir()] == ["checkpoint_0"]
        assert load_state(job.accelerator, store) == 10
        assert load_state(job.accelerator, store, 9) == 9
        assert project.automatic_checkpoint_naming


def test_the_temporary_folder_is_gone_also_after_an_error(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    job = Job()

    def broken(models: list[Any], weights: list[Any], output_dir: str) -> None:
        raise RuntimeError("a hook of the program's own")

    with tierstore.open(tiers_under(tmp_path), run="r") as store:
        save_state(job.accelerator, store, 1, scratch=scratch).wait("durable", 60)
        handle = job.accelerator.register_save_state_pre_hook(broken)
        with pytest.raises(RuntimeError, match="of the program's own"):
            save_state(job.accelerator, store, 2, scratch=scratch)
        handle.remove()
        assert load_state(job.accelerator, store, scratch=scratch) == 1
    assert list(scratch.iterdir()) == []
    assert job.accelerator._optimizers == [job.optimizer]
    assert not job.accelerator._save_model_state_pre_hook


def test_what_does_not_fit_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    with tierstore.open(tiers_under(tmp_path), run="r") as store:
        small = Job()
        assert load_state(small.accelerator, store) is None
        with pytest.raises(NotFoundError):
            load_state(small.accelerator, store, 5)
        save_state(small.accelerator, store, 1).wait("durable", 60)
        forget()
        large = Job(width=32)
        before = large.state()["model"]
        with pytest.raises(StateMismatchError, match=r"model\.0\.weight"):
            load_state(large.accelerator, store)
        assert_same_state(large.state()["model"], before)
        store.save(2, {"w": torch.zeros(3)}).wait("durable", 60)
        with pytest.raises(UsageError, match="not saved from a folder"):
            load_state(large.accelerator, store)
        with pytest.raises(UsageError, match=r"not saved by tierstore\.integrations\.accelerate"):
            load_state(large.accelerator, store, 2)
    with tierstore.open(tiers_under(tmp_path), run="r", rank=1, world_size=2) as store:
        with pytest.raises(UsageError, match="rank 1 of 2, the Accelerator is process 0 of 1"):
            save_state(large.accelerator, store, 3)
