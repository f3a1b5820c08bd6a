"""A small language model with tied embeddings and awkward sizes, in every parallel layout that gloo ranks on CPUs can run."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as dsd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LAYOUTS = {"alone": 1, "ddp": 2, "fsdp": 8, "uneven": 3, "2d": 4, "2d-wide": 8, "hsdp": 4}
"""Layout → how many ranks it runs on here."""

VOCABULARY, WIDTH, HIDDEN = 17, 10, 14


class Model(nn.Module):
    """No size is a multiple of 3 or 8, the embedding is tied, and 8 ranks leave some shards empty."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(tokens)
        hidden = hidden + self.down(torch.relu(self.up(self.norm(hidden)))) * self.scale
        logits: torch.Tensor = self.head(hidden)
        return logits


@dataclass
class Trainer:
    """A model in one layout with its AdamW. All ranks see the same data, so that every layout computes the same training."""

    layout: str
    world_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model: Any = parallel(Model(), self.layout, self.world_size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def train(self, steps: int = 1) -> float:
        """Trains; returns the last step's loss before its update."""
        tokens = torch.arange(2 * VOCABULARY).reshape(2, VOCABULARY) * 5 % VOCABULARY
        for _ in range(steps):
            loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """Model and optimizer by full names, as this rank has them."""
        model, optimizer = dsd.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        dsd.set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def whole_state(self) -> dict[str, Any]:
        """The unsharded truth; whole on rank 0 only."""
        options = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = dsd.get_state_dict(self.model, self.optimizer, options=options)
        return copy.deepcopy({"model": model, "optim": optimizer})  # of an unsharded model they are the live tensors


def parallel(model: nn.Module, layout: str, world_size: int) -> Any:
    if layout == "alone":
        return model
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout in ("fsdp", "uneven"):
        mesh = init_device_mesh("cpu", (world_size,))
        fully_shard(model.down, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if layout == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")))
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])
