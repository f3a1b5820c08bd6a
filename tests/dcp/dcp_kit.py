"""What the tests of the DCP door share: a configuration on folders, a file of it, and states to save."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint.api import CheckpointException

IGNORED = "ignore:torch.distributed is (disabled|unavailable):UserWarning"
"""Torch says so whenever one process saves alone, which these tests do on purpose."""


def config(folder: Path, **more: Any) -> dict[str, Any]:
    """Two tiers: a node's and the authority."""
    tiers = [{"name": "node", "uri": str(folder / "node"), "scope": "node"}, {"name": "shared", "uri": str(folder / "shared")}]
    return {"version": 1, "run": "r", "tiers": tiers, **more}


def config_file(folder: Path, **more: Any) -> Path:
    path = folder / "store.yaml"
    path.write_text(yaml.safe_dump(config(folder, **more)))
    return path


def state() -> dict[str, Any]:
    """A trainer's state in small: nested, tied, with objects of many kinds."""
    torch.manual_seed(7)
    weight = torch.randn(6, 4)
    return {
        "model": {"embed.weight": weight, "head.weight": weight, "norm": torch.ones(4, dtype=torch.bfloat16)},
        "optim": {
            "state": {"embed.weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(6, 4)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": ["embed.weight"]}],
        },
        "pair": (torch.arange(3), "label"),
        "progress": {"step": 7, "epoch": 1.5, "seen": {1, 2}, "name": "run", "nothing": None},
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
    }


def blank(value: Any) -> Any:
    """The same structure with other values: what a load has to overwrite."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 0)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return None


def causes(error: CheckpointException) -> list[BaseException]:
    """Every rank's own error."""
    return [failure[0] for failure in error.failures.values()]


def quiet() -> None:
    """In a process of its own, where pytest's filters don't reach."""
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
