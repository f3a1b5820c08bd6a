"""What one of the demo's training processes is to do, and the command that does it. Free of torch, which the demo itself does not need."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

__all__ = ["TrainSpec", "train_command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """What one training process is to do."""

    config: str
    """The store's YAML file; empty: save with a synchronous ``torch.save`` instead."""
    scratch: str
    """Where ``torch.save`` writes."""
    until: int
    """The last step."""
    every: int
    """Save every so many steps, and after the last."""
    total: int
    """Steps of the learning rate's schedule."""
    seed: int
    digests: tuple[int, ...]
    """Report the SHA-256 of all weights and moments after these steps."""
    stands_at: int = 0
    """After the save of this step training stands still, for it is to be killed by then; 0: nowhere."""


def train_command(spec: TrainSpec) -> list[str]:
    """The command that trains by `spec`."""
    return [sys.executable, "-m", "tierstore.cli.demo_train", json.dumps(asdict(spec))]
