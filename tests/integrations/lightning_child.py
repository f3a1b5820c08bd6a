"""What the Lightning tests run in processes of their own, which can be killed or be ranks; also the model that they all train."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from tierstore.integrations.lightning import TierCheckpointIO, TierModelParallelStrategy

BATCHES = 6


class Tiny(pl.LightningModule):
    """A small net; what it learns at a step depends on the step alone, for Lightning begins an epoch's data anew when it resumes."""

    def __init__(self, width: int = 8, lr: float = 0.01, layers: tuple[str, ...] = ("a", "b"), extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.global_step)
        return self.net(torch.randn(16, 4, generator=generator)).pow(2).mean() + batch[0].sum() * 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.net(batch[0].repeat(2, 1)).pow(2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Sharded(Tiny):
    """The same, for FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if self.trainer.world_size > 1:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Told(Callback):
    """Tells of each step, through a pipe; at `last` it stands still, so that it is not through with training before it is killed."""

    def __init__(self, pipe: Any, last: int | None) -> None:
        self.pipe = pipe
        self.last = last

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.pipe.send(trainer.global_step)
        if trainer.global_step == self.last:
            threading.Event().wait(500)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.linspace(-1, 1, 4 * BATCHES).reshape(BATCHES, 4)), batch_size=1)


def trainer_of(root: Path, **options: Any) -> pl.Trainer:
    plain = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**{**plain, "default_root_dir": str(root), "num_sanity_val_steps": 0, **options})


def plain(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """For a pipe: torch would send a tensor's place in memory, which is gone with the process."""
    return {name: value.numpy() for name, value in state.items()}


def whole_state(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """Parameters, buffers and the optimizer's state, whole."""
    found = {name: value.detach().clone() for name, value in trainer.lightning_module.state_dict().items()}
    for number, saved in trainer.optimizers[0].state_dict()["state"].items():
        found.update({f"{number}.{name}": value.clone() for name, value in saved.items()})
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def fit_to_the_end(root: str, pipe: Any, steps: int, every: int, killed_at: int | None) -> None:
    """A training script: resumes from last where there is one, and tells its state at the end."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the tests' own filters hold in the test's process
    folder = Path(root)
    checkpoint = ModelCheckpoint(dirpath=folder / "ckpt", save_last=True, every_n_train_steps=every)
    io = TierCheckpointIO([str(folder / "near"), str(folder / "far")], run="killed")
    trainer = trainer_of(folder, plugins=[io], callbacks=[checkpoint, Told(pipe, killed_at)], max_steps=steps, limit_val_batches=0)
    torch.manual_seed(3)
    trainer.fit(Tiny(), data(), ckpt_path="last")
    pipe.send(plain(whole_state(trainer)))


def fit_and_leave(root: str) -> None:
    """A script whose plugin is not told of the end: `AsyncCheckpointIO` does not pass it on."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(root)
    io = AsyncCheckpointIO(TierCheckpointIO([str(folder / "near"), str(folder / "far")], run="r"))
    trainer = trainer_of(
        folder, plugins=[io], callbacks=[ModelCheckpoint(folder / "ckpt", filename="x")], max_epochs=1, limit_val_batches=0
    )
    trainer.fit(Tiny(), data())


def be_rank(rank: int, port: int, root: str, plan: dict[str, Any], pipe: Any) -> None:
    """One of two ranks of a training script that torchrun began."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    folder = Path(root)
    strategy: Any = "ddp" if plan["strategy"] == "ddp" else TierModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    checkpoint = ModelCheckpoint(dirpath=folder / "ckpt", save_last=True, every_n_train_steps=3)
    io = TierCheckpointIO([str(folder / "near"), str(folder / "far")], run="ranks")
    trainer = trainer_of(folder, plugins=[io], strategy=strategy, devices=2, callbacks=[checkpoint], max_steps=plan["steps"])
    torch.manual_seed(3)
    model = Tiny() if plan["strategy"] == "ddp" else Sharded()
    trainer.fit(model, data(), ckpt_path="last")
    state = whole_state(trainer)
    if rank == 0:
        pipe.send(plain(state))


def fit_with_the_other_package(root: str, pipe: Any) -> None:
    """A script that imports `pytorch_lightning`: resumes, and tells the names of its pointers."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import pytorch_lightning
    from pytorch_lightning.demos.boring_classes import BoringModel

    from tierstore.integrations import pytorch_lightning as door

    folder = Path(root)
    for steps in (2, 4):
        io = door.TierCheckpointIO([str(folder / "near"), str(folder / "far")], run="other")
        checkpoint = door.TierModelCheckpoint(folder / "ckpt", filename="{step}", save_last=True, every_n_train_steps=2)
        plain = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pytorch_lightning.Trainer(**plain, plugins=[io], callbacks=[checkpoint], max_steps=steps, default_root_dir=root)
        trainer.fit(BoringModel(), ckpt_path="last")
        assert trainer.global_step == steps
    pipe.send(sorted(os.listdir(folder / "ckpt")))
