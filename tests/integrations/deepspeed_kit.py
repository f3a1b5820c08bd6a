"""What DeepSpeed's tests run in their ranks: real engines on the CPU over gloo. DeepSpeed is imported in these processes only."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

STEPS = 3


def begin() -> Any:
    """DeepSpeed, ready in this rank."""
    warnings.simplefilter("ignore")  # DeepSpeed's own, and torch's about what DeepSpeed calls
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", DS_DISABLE_LOGS="1")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    # Its all-reduce through shared memory would be compiled here, for minutes; without it DeepSpeed takes gloo's.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


def engine_of(deepspeed: Any, stage: int) -> Any:
    """A small model with AdamW and a learning rate's schedule, alike on every call."""
    import torch

    torch.manual_seed(stage)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4), torch.nn.Linear(4, 1))
    model[0].bias.requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "steps_per_print": 1_000_000,
    }
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(engine: Any, steps: int = STEPS) -> list[float]:
    """Trains on batches that depend on the step and the rank alone; returns the losses, exactly."""
    import torch

    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(1000 * engine.global_steps + engine.global_rank)
        loss = engine(torch.randn(4, 8, generator=generator)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def store_config(folder: Path, run: str, **more: Any) -> dict[str, Any]:
    tiers = [{"name": "node", "uri": str(folder / f"node{os.environ['RANK']}"), "scope": "node"}, {"name": "shared", "uri": str(folder / "shared")}]
    return {"version": 1, "run": run, "tiers": tiers, **more}


def difference(a: Any, b: Any, place: str = "") -> str:
    """The first place at which two loaded files differ, types included; empty where they are equal bit by bit."""
    import torch

    if type(a) is not type(b):
        return f"{place}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
        return "" if alike else f"{place}: {a} and {b}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{place}: keys {list(a)} and {list(b)}"
        return next((found for key in a if (found := difference(a[key], b[key], f"{place}.{key}"))), "")
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{place}: lengths {len(a)} and {len(b)}"
        return next((found for n, (x, y) in enumerate(zip(a, b, strict=True)) if (found := difference(x, y, f"{place}.{n}"))), "")
    if hasattr(a, "__dict__") and not isinstance(a, type):
        return difference(vars(a), vars(b), place)
    return "" if a == b else f"{place}: {a!r} and {b!r}"
