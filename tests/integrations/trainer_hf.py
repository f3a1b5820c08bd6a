"""A real Trainer on a tiny GPT-2 with dropout, for the tests of the Transformers door: in the test's process, or in one to be killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import tierstore
from tierstore import crashpoints
from tierstore.integrations.transformers import TierCheckpointCallback, resume_from_checkpoint

STEPS = 6
EVERY = 2
RUN = "tiny"


def model_of(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (count, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer_of(output_dir: Path, callbacks: Sequence[TrainerCallback], **settings: Any) -> Trainer:
    given: dict[str, Any] = {
        "output_dir": str(output_dir),
        "max_steps": STEPS,
        "save_steps": EVERY,
        "logging_steps": EVERY,
        "eval_strategy": "steps",
        "eval_steps": EVERY,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "dataloader_pin_memory": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 7,
        **settings,
    }
    args = TrainingArguments(**given)
    return Trainer(model=model_of(), args=args, train_dataset=rows(10, 1), eval_dataset=rows(4, 2), callbacks=list(callbacks))


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.accelerator.unwrap_model(trainer.model).state_dict().items()}


def tiers_under(folder: Path) -> list[str]:
    return [str(folder / "node"), str(folder / "shared")]


class Stop(TrainerCallback):  # type: ignore[misc]
    """Ends training after a step, as if the job's time were over."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.global_step >= self._step or control.should_training_stop


class Draw(TrainerCallback):  # type: ignore[misc]
    """Draws `count` random numbers a step: so the random states of ranks differ, which the Trainer seeds alike."""

    def __init__(self, count: int) -> None:
        self._count = count

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        torch.rand(self._count)


class Wait(TrainerCallback):  # type: ignore[misc]
    """Goes on when what was saved is `level`."""

    def __init__(self, tiers: TierCheckpointCallback, level: str) -> None:
        self._tiers = tiers
        self._level = level

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._tiers.tickets[state.global_step].wait(self._level, 60)


def train(folder: Path, output_dir: Path, result: Path | None = None, wait: bool = False, **settings: Any) -> None:
    """One life of a job, as the guide says: resume from the store, train on, keep the final weights."""
    trainer = trainer_of(output_dir, [], **settings)
    with tierstore.open(tiers_under(folder), run=RUN) as store:
        trainer.add_callback(TierCheckpointCallback(store))
        if wait:
            trainer.add_callback(Wait(trainer.callback_handler.callbacks[-1], "committed"))
        trainer.train(resume_from_checkpoint=resume_from_checkpoint(store, output_dir))
    if result is not None:
        torch.save(weights(trainer), result)


def life(folder: str, output_dir: str, kill_at: str, crash_at: str) -> None:
    """The body of a process: a SIGKILL as soon as the Trainer has written the file `kill_at` (a path's end), or death at a crash point."""
    if kill_at:
        save = torch.save

        def saving(value: Any, file: Any, *others: Any, **options: Any) -> None:
            save(value, file, *others, **options)
            if str(file).endswith(kill_at):
                os.kill(os.getpid(), signal.SIGKILL)

        torch.save = saving
    if crash_at:  # read from the environment when it is imported, which was before this process began
        crashpoints._AT, _, crashpoints._NTH = crash_at.partition(":")
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the Trainer prints its logs
    train(Path(folder), Path(output_dir), wait=True)
