"""What the benchmarks share: a realistic training state, timing, medians and ratios, and counted access to a real S3 server."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tierstore
from tierstore.units import format_size, parse_size


def training_state(nbytes: int, *, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """A mixed-precision AdamW state of about `nbytes`: bf16 weights, fp32 master, m and v (14 bytes a parameter), about 225 tensors.

    A third of the parameters are the embedding's, as in a small language model; the rest is 13 layers of four matrices.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = nbytes // 14
    layers = 13
    width = max(64, int((parameters * 2 / 3 / (layers * 12)) ** 0.5) // 8 * 8)
    shapes = {"embedding": (max(64, parameters // 3 // width // 64 * 64), width)}
    for layer in range(layers):
        for index, shape in enumerate([(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]):
            shapes[f"layers.{layer}.w{index}"] = shape
    state: dict[str, dict[str, torch.Tensor]] = {"weights": {}, "master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, shape in shapes.items():
        master = torch.randn(shape, generator=generator) * 0.02
        state["master"][name] = master
        state["weights"][name] = master.to(torch.bfloat16)
        state["exp_avg"][name] = torch.randn(shape, generator=generator) * 1e-3
        state["exp_avg_sq"][name] = torch.rand(shape, generator=generator) * 1e-6
    for layer in range(layers):
        state["weights"][f"layers.{layer}.norm"] = torch.ones(width, dtype=torch.bfloat16)
    return state


def state_nbytes(state: dict[str, dict[str, torch.Tensor]]) -> int:
    return sum(t.nbytes for group in state.values() for t in group.values())


def change(state: dict[str, dict[str, torch.Tensor]]) -> None:
    """Changes every tensor in place, as a training step does, so that no peer can reuse what it stored before."""
    with torch.no_grad():
        for group in state.values():
            for tensor in group.values():
                tensor.mul_(1.0009765625)


def timed(work: Callable[..., object], *args: Any, **kwargs: Any) -> float:
    """Seconds that ``work(*args, **kwargs)`` takes."""
    gc.collect()
    began = time.perf_counter()
    work(*args, **kwargs)
    return time.perf_counter() - began


def save_until(store: tierstore.Store, step: int, state: Any, level: str) -> tierstore.Ticket:
    """Saves and waits for a level."""
    ticket = store.save(step, state)
    ticket.wait(level, timeout=1200)
    return ticket


class Table:
    """Measurements by name, printed as medians and as ratios to one of them."""

    def __init__(self, title: str, nbytes: int, base: str) -> None:
        self.title, self.nbytes, self.base = title, nbytes, base
        self.seconds: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def show(self) -> None:
        base = self.median(self.base)
        print(f"\n{self.title} ({format_size(self.nbytes)}; median of {len(self.seconds[self.base])}, time relative to {self.base!r})")
        for name in self.seconds:
            median = self.median(name)
            spread = f"{min(self.seconds[name]):.3f}..{max(self.seconds[name]):.3f}"
            print(f"  {name:<58}{median:9.3f} s  {self.nbytes / median / 1e9:7.2f} GB/s  x{median / base:7.2f}   ({spread})")


def arguments(
    description: str, *, nbytes: str = "1GiB", repeat: int = 5, parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """What all benchmarks take; `parser` has what one takes beside that."""
    parser = parser or argparse.ArgumentParser(description=description)
    parser.add_argument("--nbytes", type=parse_size, default=parse_size(nbytes), help=f"size of the state, with a unit (default {nbytes})")
    parser.add_argument("--repeat", type=int, default=repeat, help=f"repetitions of each measurement (default {repeat})")
    parser.add_argument("--directory", type=Path, default=None, help="where files are made (default: a fresh folder in ./.cache/bench)")
    return parser.parse_args()


@contextlib.contextmanager
def scratch(directory: Path | None) -> Iterator[Path]:
    root = directory or Path(".cache/bench")
    root.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(dir=root))
    try:
        yield path.resolve()
    finally:
        shutil.rmtree(path, ignore_errors=True)


def settle() -> None:
    """Lets the disk write out what earlier measurements left dirty, so that they do not pay for each other."""
    os.sync()
    time.sleep(0.2)
