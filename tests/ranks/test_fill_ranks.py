"""Several ranks fill what a checkpoint lacks: each its own slices, from slices of what is stored, whatever the layouts on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_kit import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tierstore

FILL = [{"match": r"model\.(.*)", "to": r"master.\1"}]


def weights() -> torch.Tensor:
    return torch.arange(13.0 * 10).view(13, 10).div(7)


def spread(values: torch.Tensor, axis: int | None, world_size: int) -> DTensor:
    placement = Replicate() if axis is None else Shard(axis)
    return distribute_tensor(values, init_device_mesh("cpu", (world_size,)), [placement])


def state_of(axis: int | None, world_size: int, values: torch.Tensor) -> dict[str, Any]:
    return {"model": {"w": spread(values.bfloat16(), axis, world_size)}, "master": {"w": spread(values, axis, world_size)}, "step": 3}


def saves(rank: int, world_size: int, folder: Path) -> Any:
    with tierstore.open([str(folder / "node"), str(folder / "shared")], run="r") as store:
        store.save(1, state_of(0, world_size, weights()), omit=["master.*"]).wait("durable", 120)
        return list(store.open_checkpoint(1))


def loads(rank: int, world_size: int, folder: Path, axis: int | None) -> Any:
    with tierstore.open([str(folder / "node"), str(folder / "shared")], run="r") as store:
        into = state_of(axis, world_size, torch.zeros(13, 10))
        store.load(1, into, options=tierstore.LoadOptions(fill=FILL))
    master, wanted = into["master"]["w"], weights().bfloat16().float()
    return master.dtype == torch.float32 and torch.equal(master.full_tensor(), wanted)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert run_ranks(2, saves, folder) == [["model.w"]] * 2
    return folder


@pytest.mark.parametrize(("world_size", "axis"), [(2, 0), (3, 1), (2, None)])
def test_each_rank_fills_its_slices(saved: Path, world_size: int, axis: int | None) -> None:
    assert run_ranks(world_size, loads, saved, axis=axis) == [True] * world_size


def trains(rank: int, world_size: int, folder: Path, start: int) -> Any:
    """A sharded model whose optimizer's state is left out in part: the rest is loaded in place, shard by shard, and that is filled."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(distribute_tensor(torch.full((6, 4), 1.0 + start), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    config = {
        "version": 1,
        "run": "trained",
        "tiers": [{"name": "node", "uri": str(folder / "node"), "scope": "node"}, {"name": "shared", "uri": str(folder / "shared")}],
        "save": {"omit": ["*.exp_avg"]},
        "load": {"fill": [{"match": r"optimizer\.state\.(.*)\.exp_avg_sq", "to": r"optimizer.state.\1.exp_avg"}]},
    }
    with tierstore.Checkpointer(config, model=model, optimizer=optimizer, signals=False, progress=False) as checkpointer:
        assert checkpointer.resume() == start
        if start == 0:
            model.w.grad = model.w.detach() * 2
            optimizer.step()
            checkpointer.save(0).wait("durable", 120)
    moments = optimizer.state[model.w]
    return [moments[name].full_tensor().flatten()[0].item() for name in ("exp_avg", "exp_avg_sq")]


def test_a_sharded_optimizer_resumes_with_what_fills_its_missing_state(tmp_path: Path) -> None:
    first, second = run_ranks(2, trains, tmp_path, start=0)[0]
    assert first != second
    assert run_ranks(2, trains, tmp_path, start=1) == [[second, second]] * 2
