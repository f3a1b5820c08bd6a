"""What whole checkpoints take up on a tier by each option and each combination, in bytes a parameter: measured, nothing is added up.

The state is that of `trained.py`: AdamW with bf16 weights, fp32 master weights and both moments, 14 bytes a parameter. It is saved to a
tier on the disk, once whole, once without its weights and once without its masters (`omit`, PaddleNLP's `remove_master_weight`), and copied
to a tier of each kind; all files of each copy count, documents included. A second table leaves out the embedding, of whose rows many never
occurred: their moments are zeros, which flatters every codec. The third is a run that trains adapters beside a frozen model. PaddleNLP's
rows are its formulas' arrays alone, without the files that would hold them.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_packed import named
from bench_quantise import Scheme, o1, o2
from common import scratch
from measure import Table, fact
from trained import KINDS, trained_state

import tierstore
from tierstore.config import load_config
from tierstore.names import Attempt
from tierstore.tiers.catalog import scan
from tierstore.tiers.promote import promote
from tierstore.tiers.session import Session

RAW = "as it is"
WEIGHTS, MASTERS = "omit weights", "omit masters"
_OMIT: Mapping[str, tuple[str, ...]] = {"": (), WEIGHTS: ("model.*",), MASTERS: ("master.*",)}
_LOSES = {MASTERS: "the masters, but for their rounding to 16 bits", "q8": "precision of the moments", "q4": "precision of the moments"}
_PADDLE: Mapping[str, tuple[Scheme, int]] = {
    "PaddleNLP O1": (o1, 6),
    "PaddleNLP O1, remove_master_weight": (o1, 2),
    "PaddleNLP O2": (o2, 6),
    "PaddleNLP O2, remove_master_weight": (o2, 2),
}
"""How it stores the moments, and the bytes a parameter beside them."""

_EMBEDDING = "pairs.weight"
_RUN, _RANK = "state", 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Options of a tier, and what the save leaves out."""

    options: Mapping[str, Any] = field(default_factory=dict)
    omit: str = ""

    @property
    def name(self) -> str:
        told = [self.omit, f"quantise: {self.scheme}" if self.scheme else "", "codec: zstd" if self.options.get("codec") else ""]
        told += ["master_once" if self.options.get("master_once") else ""]
        return ", ".join(word for word in told if word) or RAW

    @property
    def scheme(self) -> str:
        return str(self.options.get("quantise", ""))

    @property
    def note(self) -> str:
        """What it loses."""
        lost = [_LOSES[word] for word in (self.omit, self.scheme) if word in _LOSES]
        return f"loses {' and '.join(lost)}" if lost else ""


def ways() -> Iterator[Way]:
    """All of them, without loss first."""
    for scheme in ("", "q8", "q4"):
        quantise = {"quantise": scheme} if scheme else {}
        for omit in _OMIT:
            for codec in ({}, {"codec": "zstd"}):
                for once in (False, True) if not omit else (False,):  # without one of the two there is no pair
                    yield Way(options={**codec, "master_once": once, "unchanged_once": False, **quantise}, omit=omit)


def run(model: str, directory: Path | None) -> list[Table]:
    state = {named(key): tensor for key, tensor in trained_state(model).items()}
    dense = {name: tensor for name, tensor in state.items() if _EMBEDDING not in name}
    parameters, dense_parameters = (sum(t.numel() for t in one.values()) // 4 for one in (state, dense))
    fact("sizes: state", f"AdamW, {parameters:,} parameters after {KINDS[model].steps} steps; {dense_parameters:,} without the embedding")
    whole = Table("Whole checkpoint, bytes a parameter", 0, RAW, key="sizes.whole", unit="B")
    without = Table("The same without the embedding, bytes a parameter", 0, RAW, key="sizes.dense", unit="B")
    adapters = Table("Second checkpoint of a run that trains adapters", 0, RAW, key="sizes.adapters", unit="MiB")
    with scratch(directory) as root:
        for table, tensors, count in ((whole, state, parameters), (without, dense, dense_parameters)):
            measure(table, tensors, count, root / table.key)
            paddle(table, tensors, count)
        second_checkpoint(adapters, {name: t for name, t in state.items() if name.startswith("model.")}, root / adapters.key)
    return [whole, without, adapters]


def measure(table: Table, state: Mapping[str, torch.Tensor], parameters: int, root: Path) -> None:
    """Saves the state with each kind of `omit`, and copies it to a tier of each kind."""
    those = list(ways())
    for way in those:
        table.describe(way.name, kind="ours", note=way.note)
    near = {"name": "disk", "uri": str(root / "disk"), "scope": "shared"}
    with tierstore.open({"version": 1, "run": _RUN, "tiers": [near]}, rank=0, world_size=1) as store:
        for step, patterns in enumerate(_OMIT.values()):
            store.save(step, dict(state), omit=list(patterns)).wait("committed", timeout=600)
    for step, omit in enumerate(_OMIT):
        mine = {f"kind{n}": way for n, way in enumerate(those) if way.omit == omit}
        tiers = [{"name": tier, "uri": str(root / tier), "scope": "shared", **way.options} for tier, way in mine.items()]
        with Session.open(load_config({"version": 1, "run": _RUN, "tiers": [near, *tiers]})) as session:
            info = session.run(scan(session.tiers, _RUN)).find(step)
            assert info is not None
            for tier, way in mine.items():
                table.add(way.name, copied(session, info.attempt, root, tier) / parameters)


def paddle(table: Table, state: Mapping[str, torch.Tensor], parameters: int) -> None:
    """What PaddleNLP's schemes make of the same state; rows that its groups of 32 do not divide stay as they are."""
    pairs = [(t, state[f"{name}_sq"]) for name, t in state.items() if name.endswith("exp_avg")]
    for name, (scheme, exact) in _PADDLE.items():
        table.describe(name, kind="peer", note="loses precision of the moments" + (", and the masters" if exact == 2 else ""))
        taken = 0
        for m, v in pairs:
            fits = scheme is o1 or (m.ndim == 2 and m.shape[0] % 32 == 0)
            taken += scheme(m.numpy(), v.numpy())[1] if fits else 8 * m.numel()
        table.add(name, exact + taken / parameters)


def copied(session: Session, attempt: Attempt, root: Path, tier: str) -> int:
    """Copies a checkpoint to a tier, and counts the bytes of all of its files there."""
    done = session.run(promote(session.tiers, attempt, tier, clock=session.clock))
    if not done.done:
        raise ValueError(f"it was not promoted: {done}")
    return sum(path.stat().st_size for path in (root / tier).rglob(f"step-{attempt.step:010d}-*/**/*") if path.is_file())


def second_checkpoint(table: Table, base: Mapping[str, torch.Tensor], root: Path) -> None:
    """Adapters of rank 8 for each matrix, in fp32 with their moments, beside a model in bf16 that does not change."""
    options: dict[str, dict[str, Any]] = {
        RAW: {},
        "unchanged_once": {"unchanged_once": True},
        "codec: zstd": {"codec": "zstd", "unchanged_once": False},
        "codec: zstd, unchanged_once": {"codec": "zstd", "unchanged_once": True},
    }
    for name in options:
        table.describe(name, kind="ours")
    near = {"name": "disk", "uri": str(root / "disk"), "scope": "shared"}
    tiers = [{"name": f"kind{n}", "uri": str(root / f"kind{n}"), "scope": "shared", **one} for n, one in enumerate(options.values())]
    generator = torch.Generator().manual_seed(0)
    shapes = {f"{name}.{ab}": shape for name, t in base.items() if t.ndim == 2 for ab, shape in _adapter(t.shape).items()}
    nbytes = 12 * sum(rows * columns for rows, columns in shapes.values())
    fact("sizes: adapters", f"{nbytes / 2**20:.1f} MiB with their moments beside {sum(t.nbytes for t in base.values()) / 2**20:.1f} MiB")
    with tierstore.open({"version": 1, "run": _RUN, "tiers": [near]}, rank=0, world_size=1) as store:
        for step in (1, 2):
            made = {f"{name}.{key}": torch.randn(shape, generator=generator) for name, shape in shapes.items() for key in ("w", "m", "v")}
            store.save(step, {"base": dict(base), "adapters": made}).wait("committed", timeout=600)
    with Session.open(load_config({"version": 1, "run": _RUN, "tiers": [near, *tiers]})) as session:
        for step in (1, 2):
            for number, name in enumerate(options):
                info = session.run(scan(session.tiers, _RUN)).find(step)
                assert info is not None
                taken = copied(session, info.attempt, root, f"kind{number}")
                if step == 2:
                    table.add(name, taken / 2**20)


def _adapter(shape: torch.Size) -> dict[str, tuple[int, int]]:
    return {"a": (_RANK, shape[1]), "b": (shape[0], _RANK)}


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=list(KINDS), default="large", help="whose state (default large); trained first, once")
    parser.add_argument("--directory", type=Path, default=None, help="where files are made (default: a fresh folder in ./.cache/bench)")
    args = parser.parse_args()
    for table in run(args.model, args.directory):
        table.show()


if __name__ == "__main__":
    main()
