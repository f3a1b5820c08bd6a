"""What quantised optimizer states do to a training that is resumed from them.

A small transformer (that of `tierstore demo`: bf16 weights, fp32 master weights, AdamW, an embedding of byte pairs of which many never
occur) is trained to a checkpoint, then resumed from it several times over the same data: exactly, and with its moments through each scheme.
*Drift* is how far the parameters are from the exactly resumed ones, as a part of how far those have moved since the checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Table

from tierstore.cli import demo_model
from tierstore.cli.demo_model import Trainer, read_corpus
from tierstore.format.packed.types import Quantised
from tierstore.format.paddle_states import decode_o1_first, decode_o1_second, decode_o2_first, decode_o2_second
from tierstore.format.quantise import SCHEMES, UpdateError, decode_moment, encode_moment, update_errors

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from paddle_kit import encode_o1_first, encode_o1_second, encode_o2

EMBEDDING = "pairs.weight"
SIZES = {"LAYERS": 2, "PAIRS": 8192}
"""Smaller than the demo's: a training is repeated nine times."""

MIN_NUMEL = 4096
"""Smaller tensors stay as they are in our schemes, as `QuantiseRule` has it."""

Moments = tuple[Any, Any]
Scheme = Callable[[Any, Any], tuple[Moments, int]]
"""Both moments → what they become, and the bytes that both take."""


def ours(name: Any) -> Scheme:
    def through(m: Any, v: Any) -> tuple[Moments, int]:
        if m.size < MIN_NUMEL:
            return (m, v), 8 * m.size
        first = Quantised(scheme=name, kind="first", columns=m.shape[-1], first_column=0)
        second = replace(first, kind="second")
        data = [encode_moment(m.reshape(-1), first, v.reshape(-1) == 0), encode_moment(v.reshape(-1), second)]
        assert data[0] is not None
        assert data[1] is not None
        made = (decode_moment(data[0], m.size, first).reshape(m.shape), decode_moment(data[1], v.size, second).reshape(v.shape))
        return made, len(data[0]) + len(data[1])

    return through


def o1(m: Any, v: Any) -> tuple[Moments, int]:
    first, second = encode_o1_first(m), encode_o1_second(v)
    made = (decode_o1_first(*first).reshape(m.shape), decode_o1_second(*second).reshape(m.shape))
    return made, sum(one.nbytes for one in (*first, *second))


def o2(m: Any, v: Any) -> tuple[Moments, int]:
    if m.ndim < 2:
        return (m, v), 8 * m.size
    packed, scales, low, high = encode_o2(m, v)
    return (decode_o2_first(packed, scales), decode_o2_second(packed, low, high)), sum(one.nbytes for one in (packed, scales, low, high))


def bfloat16(m: Any, v: Any) -> tuple[Moments, int]:
    made = [torch.from_numpy(one).to(torch.bfloat16).float().numpy() for one in (m, v)]
    return (made[0], made[1]), 4 * m.size


def reset(m: Any, v: Any) -> tuple[Moments, int]:
    return (np.zeros_like(m), np.zeros_like(v)), 0


AGAIN = ", resumed four times"
WAYS: dict[str, tuple[Scheme, str, str]] = {
    "q8": (ours("q8"), "ours", "8 bits, groups of 128 along a row"),
    f"q8{AGAIN}": (ours("q8"), "ours", "quantised again at each quarter"),
    "q4": (ours("q4"), "ours", "4 bits, groups of 32 along a row"),
    f"q4{AGAIN}": (ours("q4"), "ours", "quantised again at each quarter"),
    "PaddleNLP O1": (o1, "peer", "8 bits, one scale for a column"),
    "PaddleNLP O2": (o2, "peer", "4 bits, groups of 32 rows"),
    "moments in bfloat16": (bfloat16, "limit", "rounded to the nearest"),
    "state reset": (reset, "peer", "no moments, as after a lost optimizer"),
}


@contextlib.contextmanager
def sized(sizes: dict[str, int]) -> Iterator[None]:
    """The demo's model in other sizes."""
    before = {name: getattr(demo_model, name) for name in sizes}
    try:
        for name, value in sizes.items():
            setattr(demo_model, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(demo_model, name, value)


class Resumed:
    """A training that goes on from a checkpoint.

    Attributes:
        nbytes: Of both moments as they were stored, all tensors together.
        errors: Of the first steps: of the embedding, and of all else.
    """

    def __init__(self, trainer: Trainer, state: dict[str, Any], scheme: Scheme | None, *, forget: bool = False) -> None:
        self.trainer = trainer
        self.nbytes = 0
        self.errors = {True: UpdateError(), False: UpdateError()}
        trainer.restore(copy.deepcopy(state))
        if scheme is not None:
            self.quantise(scheme, forget=forget)

    def quantise(self, scheme: Scheme, *, forget: bool = False) -> None:
        """Puts all moments through a scheme; `forget`: the steps so far are not counted either."""
        self.nbytes = 0
        for name, parameter in self.trainer.master.items():
            moments = self.trainer.optimizer.state[parameter]
            m, v = (moments[key].numpy().copy() for key in ("exp_avg", "exp_avg_sq"))
            (m_hat, v_hat), taken = scheme(m, v)
            self.nbytes += taken
            rows = name == EMBEDDING
            self.errors[rows] = self.errors[rows].merged(update_errors(m, v, m_hat, v_hat))
            moments["exp_avg"].copy_(torch.from_numpy(m_hat))
            moments["exp_avg_sq"].copy_(torch.from_numpy(v_hat))
            if forget:
                moments["step"].zero_()

    def go_on(self, steps: int, scheme: Scheme | None = None, times: int = 1) -> list[float]:
        """Trains; `times` - 1 times, evenly, through `scheme` again. Returns the losses."""
        losses = []
        for step in range(steps):
            if scheme is not None and step and step % max(1, steps // times) == 0:
                self.quantise(scheme)
            losses.append(self.trainer.train_step())
        return losses

    def parameters(self) -> dict[str, Any]:
        return {name: p.detach().numpy().copy() for name, p in self.trainer.master.items()}


def distance(a: dict[str, Any], b: dict[str, Any], names: list[str]) -> float:
    return float(np.sqrt(sum(float(((a[name] - b[name]).astype(np.float64) ** 2).sum()) for name in names)))


def tables() -> dict[str, Table]:
    made = {
        "drift": Table("Drift of all parameters", 0, "q8", key="quantise.drift", unit=""),
        "rows": Table("Drift of the embedding with rows that never occur", 0, "q8", key="quantise.rows", unit=""),
        "others": Table("Drift of all other parameters", 0, "q8", key="quantise.others", unit=""),
        "loss": Table("Loss against the exact resume, mean size of the difference", 0, "q8", key="quantise.loss", unit="mnat"),
        "bias": Table("Loss against the exact resume, mean difference over the last third", 0, "q8", key="quantise.bias", unit="mnat"),
        "steps": Table("Error of the first step of all else, of its length", 0, "q8", key="quantise.steps", unit=""),
        "row-steps": Table("Error of the first step of the embedding, of its length", 0, "q8", key="quantise.row-steps", unit=""),
        "bytes": Table("Bytes a parameter for both moments (8 exactly)", 0, "q8", key="quantise.bytes", unit="B"),
    }
    for key, table in made.items():
        for name, (_, kind, note) in WAYS.items():
            if AGAIN not in name or key in ("drift", "rows", "others", "loss", "bias"):
                table.describe(name, kind=kind, note=note)
    return made


def run(corpus: torch.Tensor, seed: int, before: int, after: int, made: dict[str, Table]) -> None:
    """One seed: trains to the checkpoint, and resumes in every way."""
    trainer = Trainer(corpus, seed=seed, total=before + after)
    for _ in range(before):
        trainer.train_step()
    state = copy.deepcopy(trainer.state())
    count = trainer.parameters()
    dead = np.mean([not row.any() for row in trainer.optimizer.state[trainer.master[EMBEDDING]]["exp_avg_sq"].numpy()])
    start = {name: p.numpy().copy() for name, p in state["master"].items()}
    exact = Resumed(trainer, state, None)
    losses = exact.go_on(after)
    end = exact.parameters()
    print(f"seed {seed}: {count:,} parameters, loss {losses[0]:.3f} at the checkpoint, {np.mean(losses[-10:]):.3f} at the end;", end=" ")
    print(f"{dead:.0%} of the embedding's rows never occurred")
    others = [name for name in end if name != EMBEDDING]
    for name, (scheme, _, _) in WAYS.items():
        resumed = Resumed(trainer, state, scheme, forget=name == "state reset")
        nbytes, errors = resumed.nbytes, dict(resumed.errors)
        again = AGAIN in name
        differences = np.array(resumed.go_on(after, scheme if again else None, 4)) - np.array(losses)
        found = resumed.parameters()
        for key, names in (("drift", [*end]), ("rows", [EMBEDDING]), ("others", others)):
            made[key].add(name, distance(found, end, names) / distance(end, start, names))
        made["loss"].add(name, float(np.abs(differences).mean() * 1e3))
        made["bias"].add(name, float(differences[-(after // 3) :].mean() * 1e3))
        if not again:
            made["steps"].add(name, errors[False].mean)
            made["row-steps"].add(name, errors[True].mean)
            made["bytes"].add(name, nbytes / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a few steps, for tests")
    parser.add_argument("--before", type=int, default=80, help="steps until the checkpoint (default 80)")
    parser.add_argument("--after", type=int, default=48, help="steps after it (default 48)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings (default 3)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    before, after, seeds = (6, 4, 1) if args.short else (args.before, args.after, args.seeds)
    corpus = read_corpus()
    print(", ".join(f"{name}: groups of {s.group}, {s.bits} bits" for name, s in SCHEMES.items()))
    made = tables()
    with sized(SIZES):
        for seed in range(seeds):
            run(corpus, seed, before, after, made)
    for table in made.values():
        table.show()


if __name__ == "__main__":
    main()
