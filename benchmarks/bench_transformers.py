"""What a save costs with Transformers and Accelerate: their own save alone, and with the store; stall and total, ratios of medians.

python benchmarks/bench_transformers.py [--nbytes 200MB] [--repeat 5]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import tierstore
from tierstore.integrations.accelerate import load_state, save_state
from tierstore.integrations.transformers import TierCheckpointCallback, resume_from_checkpoint
from tierstore.units import format_size, parse_size


def model_of(nbytes: int) -> GPT2LMHeadModel:
    """Weights of about `nbytes` in float32: twelve blocks of 12 n² parameters."""
    width = max(64, int((nbytes / 4 / 144) ** 0.5) // 64 * 64)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=1024, n_positions=64, n_embd=width, n_layer=12, n_head=width // 64, bos_token_id=0, eos_token_id=0)
    )


def median(work: Callable[[int], float], repeat: int) -> float:
    """Of `repeat` runs after one that warms up."""
    work(0)
    return statistics.median(work(number) for number in range(1, repeat + 1))


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def with_transformers(root: Path, nbytes: int, repeat: int) -> None:
    args = TrainingArguments(
        str(root / "out"), use_cpu=True, report_to=[], disable_tqdm=True, save_total_limit=1, dataloader_pin_memory=False
    )
    with tierstore.open([str(root / "node"), str(root / "shared")], run="r", retention={"keep": [{"last": 1}]}) as store:
        callback = TierCheckpointCallback(store)
        trainer = Trainer(model_of(nbytes), args, train_dataset=[{"input_ids": torch.zeros(8, dtype=torch.long)}] * 4)
        trainer.create_optimizer_and_scheduler(100)
        _step(trainer.model, trainer.optimizer)
        callback.on_train_begin(args, trainer.state, trainer.control)

        def own(number: int) -> float:
            trainer.state.global_step = 2 * number + 1
            return timed(lambda: trainer._save_checkpoint(trainer.model, None))

        totals: list[float] = []

        def tiers(number: int) -> float:
            """What `on_save` adds to it; and until the copy on the shared tier is durable."""
            begin = time.perf_counter()
            stall = timed(lambda: callback.on_save(args, trainer.state, trainer.control))
            callback.tickets[trainer.state.global_step].wait("durable")
            totals.append(time.perf_counter() - begin)
            return stall

        local: list[float] = []
        stalls: list[float] = []
        for number in range(repeat + 1):
            local.append(own(number))
            stalls.append(tiers(number))
        size = sum(p.stat().st_size for p in Path(_last(root / "out")).iterdir())
        a, b, c = (statistics.median(values[1:]) for values in (local, stalls, totals))
        print(f"Trainer, {format_size(size)} a checkpoint")
        print(f"  own save to the local disk                  {a * 1e3:8.0f} ms")
        print(f"  on_save with TierCheckpointCallback         {b * 1e3:8.0f} ms   {b / a:5.2f} of the own save, on top of it")
        print(f"  until durable on the shared tier            {c * 1e3:8.0f} ms   {c / a:5.2f}")

        def restore(number: int) -> float:
            return timed(lambda: resume_from_checkpoint(store, root / f"back-{number}"))

        d = median(restore, min(repeat, 3))
        e = timed(lambda: shutil.copytree(_last(root / "out"), root / "copied"))
        print(f"  resume_from_checkpoint into an empty folder {d * 1e3:8.0f} ms   {d / e:5.2f} of a plain copy of the folder, unproved")


def _last(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def _step(model: Any, optimizer: Any) -> None:
    model(input_ids=torch.zeros(1, 8, dtype=torch.long), labels=torch.zeros(1, 8, dtype=torch.long)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def with_accelerate(root: Path, nbytes: int, repeat: int) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model = model_of(nbytes)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    _step(model, optimizer)

    def own(number: int) -> float:
        shutil.rmtree(root / "state", ignore_errors=True)
        return timed(lambda: accelerator.save_state(str(root / "state")))

    with tierstore.open([str(root / "node-a"), str(root / "shared-a")], run="r", retention={"keep": [{"last": 1}]}) as store:
        totals: list[float] = []

        def tiers(number: int) -> float:
            begin = time.perf_counter()
            ticket = save_state(accelerator, store, number)
            stall = time.perf_counter() - begin
            ticket.wait("durable")
            totals.append(time.perf_counter() - begin)
            return stall

        local: list[float] = []
        stalls: list[float] = []
        for number in range(repeat + 1):
            local.append(own(number))
            stalls.append(tiers(number))
        a, b, c = (statistics.median(values[1:]) for values in (local, stalls, totals))
        size = sum(p.stat().st_size for p in (root / "state").iterdir())
        print(f"Accelerate, {format_size(size)} a checkpoint")
        print(f"  accelerator.save_state to the local disk    {a * 1e3:8.0f} ms")
        print(f"  save_state into the store                   {b * 1e3:8.0f} ms   {b / a:5.2f} of it, instead of it")
        print(f"  until durable on the shared tier            {c * 1e3:8.0f} ms   {c / a:5.2f}")
        d = median(lambda number: timed(lambda: accelerator.load_state(str(root / "state"))), min(repeat, 3))
        e = median(lambda number: timed(lambda: load_state(accelerator, store)), min(repeat, 3))
        print(f"  accelerator.load_state from the local disk  {d * 1e3:8.0f} ms, unproved")
        print(f"  load_state from the store                   {e * 1e3:8.0f} ms   {e / d:5.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--nbytes", type=parse_size, default=200_000_000, help="size of the weights; with AdamW's state it is three times that"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None)
    given = parser.parse_args()
    base = given.directory or Path(".cache") / "bench"
    base.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", category=UserWarning)
    for measure in (with_transformers, with_accelerate):
        with tempfile.TemporaryDirectory(dir=base) as root, open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet):
            measure(Path(root), given.nbytes, given.repeat)


if __name__ == "__main__":
    main()
