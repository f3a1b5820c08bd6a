"""FSDP2 over tensor parallelism of one dimension, and other local parts that are many rectangles: saved, and loaded in other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_kit import run_ranks

import tierstore


def store_in(folder: Path) -> tierstore.Store:
    return tierstore.open([str(folder / "node"), str(folder / "shared")], run="r")


def trains_2d(rank: int, world_size: int, folder: Path, rows: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(5, rows), torch.nn.Linear(rows, 3))
    full = {name: torch.arange(float(p.numel())).view_as(p) + i * 1000 for i, (name, p) in enumerate(model.named_parameters())}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(full[name])
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    flat = init_device_mesh("cpu", (world_size,))
    # Rows 0, 3, 6 … of runs: what no redistribution makes, but a checkpoint may be asked for.
    runs = DTensor.from_local(
        strided_rows(full["0.weight"], world_size, rank), flat, [_StridedShard(0, split_factor=3)], run_check=False,
        shape=full["0.weight"].shape, stride=full["0.weight"].stride(),
    )  # fmt: skip
    state = {"model": model.state_dict(), "runs": runs}
    with store_in(folder) as store:
        store.save(1, state).wait("durable", 120)
        whole = store.load(1)
        for name, value in full.items():
            assert torch.equal(whole["model"][name], value), name
        assert torch.equal(whole["runs"], full["0.weight"])
        # The other way: into strided layouts, and into others.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        into = {"model": model.state_dict(), "runs": distribute_tensor(torch.zeros(rows, 5), flat, [Shard(0)])}
        store.load(1, into)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), full[name]), name
        assert torch.equal(into["runs"].full_tensor(), full["0.weight"])
        again = DTensor.from_local(
            torch.zeros_like(runs.to_local()), flat, [_StridedShard(0, split_factor=3)], run_check=False,
            shape=runs.shape, stride=runs.stride(),
        )  # fmt: skip
        store.load(1, {"model": {"0.weight": again}, "runs": None}, options=tierstore.LoadOptions(unexpected="ignore"))
        assert torch.equal(again.to_local(), runs.to_local())
        replica = distribute_tensor(torch.zeros(rows), flat, [Replicate()])
        store.load(1, {"model": {"0.bias": replica}, "runs": None}, options=tierstore.LoadOptions(unexpected="ignore"))
        assert torch.equal(replica.to_local(), full["0.bias"])
    return [str(p.placements) for p in model.parameters()]


def strided_rows(full: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    """The rank's piece of each third, as torch.chunk cuts them."""
    cut = [third.chunk(world_size) for third in full.chunk(3)]
    return torch.cat([pieces[rank] if rank < len(pieces) else full[:0] for pieces in cut])


@pytest.mark.parametrize(("world_size", "rows"), [(4, 14), (4, 17), (8, 9)])
def test_strided_shards_of_uneven_sizes_come_back_in_any_layout(world_size: int, rows: int, tmp_path: Path) -> None:
    found = run_ranks(world_size, trains_2d, tmp_path, rows=rows)
    assert found[0][0] == "(_StridedShard(dim=0, sf=2), Shard(dim=0))"


def holds_sums(rank: int, world_size: int, folder: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Partial

    value = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    with store_in(folder) as store:
        try:
            store.save(1, {"w": value} if rank == 1 else {"w": torch.ones(2)})
        except tierstore.TierStoreError as error:
            return [type(error).__name__, error.message]
        return None


def test_unreduced_values_are_refused_on_all_ranks(tmp_path: Path) -> None:
    (kind0, text0), (kind1, text1) = run_ranks(2, holds_sums, tmp_path)
    assert [kind0, kind1] == ["RankError", "UnsupportedTypeError"]
    assert text1 == "state['w'] is a DTensor with the placement P(sum): its values are not reduced yet"
    assert text0 == f"the save of step 1: rank 1 of 2 failed: UnsupportedTypeError: {text1}"
