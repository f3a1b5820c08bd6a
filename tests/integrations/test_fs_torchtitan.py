"""torchtitan's own CheckpointManager with ``folder = "tier://…"``: saves, resumes and purges; nothing of tierstore is imported by it.

`torchtitan.trainer` needs triton and a GPU, and is not imported: the manager is built as the trainer builds it, around a small model with
torchtitan's own containers of optimizers and schedulers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from fs_kit import file_system, two_tiers, unsynced_tiers
from torch.distributed.checkpoint.stateful import Stateful

from tierstore.fs.filesystem import TierFileSystem

pytest.importorskip("torchtitan", reason="the Makefile installs torchtitan without its dependencies")
pytest.importorskip("torchtitan.components.checkpointer", reason="torchtitan 0.3, which needs Python 3.11, is what is supported")

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

pytestmark = [
    # of torch and of how torchtitan uses it
    pytest.mark.filterwarnings("ignore:.*:FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate computed by the scheduler:UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    monkeypatch.setattr("os.sync", lambda: None)  # torch asks the whole host to sync where a file has no descriptor
    (tmp_path / "store.yaml").write_text(f"version: 1\ntiers: {two_tiers(tmp_path)}\n")
    with unsynced_tiers():
        yield two_tiers(tmp_path)
        fsspec.filesystem("tier", config=str(tmp_path / "store.yaml")).close()


class Numbers(Stateful):
    """What stands for the data loader and the trainer's own state."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": torch.tensor(self.number)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = int(state["number"])


class Trainer:
    """As much of torchtitan's trainer as its manager sees."""

    def __init__(self, folder: str, *, seed: int = 0, **config: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
        optimizer = default_adamw(lr=1e-2)
        optimizer.implementation = "for-loop"
        self.optimizers = optimizer.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=self.optimizers, training_steps=50)
        self.data, self.state = Numbers(), Numbers()
        settings: dict[str, Any] = {"enable": True, "folder": folder, "interval": 1, "last_save_model_only": False, "keep_latest_k": 2}
        self.manager = CheckpointManager(
            CheckpointManager.Config(**{**settings, **config}),
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.state},
            sd_adapter=None,
            base_folder="/outputs that the URI replaces",
        )

    def step(self) -> float:
        self.state.number += 1
        self.data.number += 7
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(self.data.number))
        self.optimizers.zero_grad()
        loss = (self.model(batch) - batch).square().mean()
        loss.backward()
        self.optimizers.step()
        self.schedulers.step()
        return loss.item()

    def train(self, until: int, *, saving: bool = True) -> list[float]:
        losses = []
        while self.state.number < until:
            losses.append(self.step())
            if saving:
                self.manager.save(self.state.number, last_step=False)
                self.manager.maybe_wait_for_staging()
        return losses

    def close(self) -> None:
        self.manager.maybe_wait_for_saving()
        self.manager.close()


def steps(fs: TierFileSystem, folder: str) -> list[str]:
    return sorted(path.rpartition("/")[2] for path in fs.ls(folder, detail=False))


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_saves_purges_and_resumes_bit_by_bit(tiers: list[Any], tmp_path: Path, mode: str) -> None:
    folder = f"tier://{tmp_path}/store.yaml/llama/checkpoint"
    trainer = Trainer(folder, async_mode=mode)
    assert trainer.manager.load() is False, "a fresh start"
    trainer.train(5)
    expected = trainer.train(8, saving=False)
    trainer.close()
    fs, path = fsspec.url_to_fs(folder)
    kept = steps(fs, path)
    # When it purges, an asynchronous save may not have begun its folder: then one more stays until the next save.
    assert kept in (["step-4", "step-5"], ["step-3", "step-4", "step-5"][0 if mode == "async" else 1 :]), "keep_latest_k"
    assert steps(fs, f"{path}/step-5") == [".metadata", "__0_0.distcp"]

    again = Trainer(folder, seed=1, async_mode=mode)
    assert again.manager.load() is True
    assert (again.state.number, again.data.number) == (5, 35)
    assert again.train(8, saving=False) == expected
    again.close()
    older = Trainer(folder, seed=2, async_mode=mode)
    assert older.manager.load(step=4) is True
    assert older.state.number == 4
    older.close()

    fs.close()
    with file_system(tiers[1]) as alone:
        assert steps(alone, path) == kept, "the far tier has them, and what was purged is gone there too"
        assert all(alone.cat_file(each) for each in alone.find(path))


def test_a_half_checkpoint_is_never_resumed_from_nor_is_a_damaged_copy_a_reason_not_to(tiers: list[Any], tmp_path: Path) -> None:
    folder = f"tier://{tmp_path}/store.yaml/run"
    trainer = Trainer(folder, keep_latest_k=0)
    trainer.train(2)
    trainer.close()
    fs, path = fsspec.url_to_fs(folder)
    fs.pipe_file(f"{path}/step-9/__0_0.distcp", b"a job that died in mid-save")
    fs.sync_tiers(60)
    damaged = next((tmp_path / "node" / ".files" / "run" / "step-2").glob("__0_0.distcp@/*.data"))
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-10] + bytes(10))
    again = Trainer(folder, seed=1, keep_latest_k=0)
    assert again.manager.load() is True
    assert again.state.number == 2
    again.close()
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.state_dict().values(), again.model.state_dict().values(), strict=True))
