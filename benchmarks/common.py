"""What the benchmarks share: a realistic training state, arguments, a folder to work in."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peers import installed

import tierstore
from tierstore.units import parse_size


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


def flattened(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The same tensors under one name each, as DCP and safetensors take them."""
    return {f"{group}.{name}": tensor for group, tensors in state.items() for name, tensor in tensors.items()}


def change(state: dict[str, dict[str, torch.Tensor]]) -> None:
    """Changes every tensor in place, as a training step does, so that no peer can reuse what it stored before."""
    with torch.no_grad():
        for group in state.values():
            for tensor in group.values():
                tensor.mul_(1.0009765625)


def save_until(store: tierstore.Store, step: int, state: Any, level: str) -> tierstore.Ticket:
    """Saves and waits for a level."""
    ticket = store.save(step, state)
    ticket.wait(level, timeout=1200)
    return ticket


def arguments(
    description: str, *, nbytes: str = "1GiB", repeat: int = 5, parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """What all benchmarks take; `parser` has what one takes beside that."""
    parser = parser or argparse.ArgumentParser(description=description)
    parser.add_argument("--nbytes", type=parse_size, default=parse_size(nbytes), help=f"size of the state, with a unit (default {nbytes})")
    parser.add_argument("--repeat", type=int, default=repeat, help=f"repetitions of each measurement (default {repeat})")
    parser.add_argument("--directory", type=Path, default=None, help="where files are made (default: a fresh folder in ./.cache/bench)")
    return parser.parse_args()


def contest_arguments(description: str, *, nbytes: str, repeat: int, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """`arguments` of a suite that can be told whom to leave out, with reasons: `make bench` does after a peer ended the process.

    Returns:
        The arguments, with `until`: when the time is over, by the monotonic clock; None: never.
    """
    parser = parser or argparse.ArgumentParser(description=description)
    parser.add_argument("--without", type=json.loads, default={}, metavar="JSON", help="names of peers that are left out: {name: reason}")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="turns are planned for that time (default: all that --repeat says)")
    installed.use()
    args = arguments("", nbytes=nbytes, repeat=repeat, parser=parser)
    args.until = None if args.within is None else time.monotonic() + args.within
    return args


@contextlib.contextmanager
def scratch(directory: Path | None) -> Iterator[Path]:
    root = directory or Path(".cache/bench")
    root.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=f"tierstore-bench-{os.getpid()}-", dir=root))
    try:
        yield path.resolve()
    finally:
        shutil.rmtree(path, ignore_errors=True)
