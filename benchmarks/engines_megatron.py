"""Megatron-Core's `dist_checkpointing` with the store against its own `torch_dist` format; run by `bench_engines`.

Its own code calls CUDA in two places even where nothing lies on a GPU; these calls are answered here, for both sides alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import megatron.core
import torch
from common import change, state_nbytes, training_state
from contest import DURABLE_TWICE, ONE_NOTE, TWO_NOTE, Contender, compete, one_tier, remove, two_tiers, until_durable
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from peers.base import nothing

from tierstore.integrations import megatron as door

STOCK = ("torch_dist", 1)


def measure(root: Path, nbytes: int, repeat: int) -> None:
    state = training_state(nbytes)
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        mock.patch.object(torch.cuda, "synchronize"),
        one_tier(root / "ours") as store,
        two_tiers(root / "ours-async") as store_async,
    ):
        contenders = [
            _stock(state, root / "stock"),
            _stock(state, root / "stock-async", AsyncCallsQueue()),
            _ours(state, root / "ours", store),
            _ours(state, root / "ours-async", store_async, AsyncCallsQueue()),
        ]
        compete(
            f"Megatron-Core {megatron.core.__version__} on the CPU", state_nbytes(state), contenders, lambda step: change(state), repeat
        )


def _stock(state: Any, root: Path, queue: AsyncCallsQueue | None = None) -> Contender:
    def save(step: int) -> None:
        folder = _folder(root, step)
        folder.mkdir(parents=True)
        request = dist_checkpointing.save(_sharded(state, step), str(folder), STOCK, async_sharded_save=queue is not None)
        if queue is not None:
            queue.schedule_async_request(request)

    return Contender(
        name="Megatron's torch_dist" if queue is None else "Megatron's torch_dist, async",
        note="syncs its files of tensors and .metadata; does not hash"
        + ("; copies nothing first on the CPU: its forked process sees the memory as it was" if queue is not None else ""),
        save=save,
        until={"written and synced": nothing if queue is None else lambda: queue.maybe_finalize_async_calls(blocking=True)},
        load=lambda step: dist_checkpointing.load(_sharded(state, None), str(_folder(root, step))),
        files=root,
        clean=lambda step: remove(_folder(root, step)),
    )


def _ours(state: Any, root: Path, store: Any, queue: AsyncCallsQueue | None = None) -> Contender:
    strategy = door.TierSaveShardedStrategy(store)
    name, note, tiers = ("tierstore, one tier", ONE_NOTE, 1) if queue is None else ("tierstore, async, two tiers", TWO_NOTE, 2)

    def save(step: int) -> None:
        request = door.save(_sharded(state, step), _folder(root, step).name, strategy, async_sharded_save=queue is not None)
        if queue is not None:
            queue.schedule_async_request(request)

    milestones = until_durable(lambda: strategy.ticket, tiers=tiers)
    if queue is not None:  # as Megatron learns of it: its process looks ten times a second
        milestones[DURABLE_TWICE] = lambda: queue.maybe_finalize_async_calls(blocking=True)
    return Contender(
        name=name,
        note=note,
        save=save,
        until=milestones,
        load=lambda step: door.load(_sharded(state, None), _folder(root, step).name, source=store),
        files=root,
    )


def _folder(root: Path, step: int) -> Path:
    return root / f"iter_{step:07d}"


def _sharded(state: dict[str, dict[str, torch.Tensor]], step: int | None) -> dict[str, Any]:
    """The state for Megatron, which changes what it is given; without a step: to be loaded into, and empty."""
    sharded: dict[str, Any] = {} if step is None else {"iteration": step}
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            sharded[f"{group}.{name}"] = ShardedTensor.from_rank_offsets(
                f"{group}.{name}", tensor if step is not None else torch.empty_like(tensor)
            )
    return sharded
