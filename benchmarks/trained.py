"""Real training states, for what depends on the values: the demo's model, and one of 17 million parameters, trained once and kept.

python benchmarks/trained.py [demo|large]       trains it, goes on where it was interrupted, and says what it has
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tierstore.cli import demo_model

CACHE = Path(__file__).parents[1] / ".cache" / "bench-states"
_KEPT_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A model and how long it is trained: bf16 weights, fp32 master weights, AdamW's moments, on the sources of Python's library."""

    steps: int
    sizes: dict[str, int]


KINDS = {
    "demo": Kind(steps=300, sizes={}),
    "large": Kind(steps=200, sizes={"WIDTH": 384, "HEADS": 6, "LAYERS": 6}),
}


def trained_state(name: str) -> dict[str, torch.Tensor]:
    """A trained state, from the cache or trained now: ``model.X`` in bf16, ``master.X``, ``exp_avg.X`` and ``exp_avg_sq.X`` in fp32."""
    path = CACHE / f"{name}-{KINDS[name].steps}.safetensors"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        _train(KINDS[name], path)
    return load_file(path)


def _train(kind: Kind, path: Path) -> None:
    kept = path.with_suffix(".resume")
    with _sizes(kind.sizes):
        threads = torch.get_num_threads()
        trainer = demo_model.Trainer(demo_model.read_corpus(), seed=0, total=kind.steps)
        torch.set_num_threads(threads)  # the demo's own training uses one
        if kept.exists():
            trainer.restore(torch.load(kept, weights_only=False))
        last = time.monotonic()
        while trainer.step < kind.steps:
            loss = trainer.train_step()
            if time.monotonic() - last > _KEPT_EVERY_S:
                last = time.monotonic()
                print(f"step {trainer.step} of {kind.steps}, {trainer.parameters():,} parameters: {loss:.2f} nats a byte", flush=True)
                torch.save(trainer.state(), kept.with_suffix(".new"))
                kept.with_suffix(".new").replace(kept)
        save_file(_tensors(trainer), path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        kept.unlink(missing_ok=True)


@contextmanager
def _sizes(sizes: dict[str, int]) -> Iterator[None]:
    before: dict[str, Any] = {name: getattr(demo_model, name) for name in sizes}
    for name, value in sizes.items():
        setattr(demo_model, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(demo_model, name, value)


def _tensors(trainer: demo_model.Trainer) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    for name, parameter in trainer.master.items():
        found[f"master.{name}"] = parameter.detach().clone()
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{moment}.{name}"] = trainer.optimizer.state[parameter][moment].clone()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(KINDS), help=", ".join(KINDS))
    for name in parser.parse_args().names:
        state = trained_state(name)
        print(f"{name}: {sum(t.numel() for t in state.values()) // 4:,} parameters, {sum(t.nbytes for t in state.values()) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
