"""What several ranks saved is exported as one: sharded tensors whole, every rank's own parts, however they lie in the shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from export_kit import assert_tensors, hf_tensors
from ranks_kit import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tierstore
from tierstore.state.export.exporting import ExportOptions

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {"rows": torch.rand(301, 40), "columns": torch.rand(64, 1000), "both": torch.rand(33, 35), "replicated": torch.rand(7, 7)}


def save(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    places = {
        "rows": (Shard(0), Shard(0)),
        "columns": (Replicate(), Shard(1)),
        "both": (Shard(0), Shard(1)),
        "replicated": (Replicate(), Replicate()),
    }
    model = {name: distribute_tensor(value, mesh, places[name]) for name, value in whole().items()}
    stage = {f"stage.{rank}": torch.full((5, 5), float(rank))}  # as in a pipeline, each rank has layers of its own
    with tierstore.open([str(folder / "tier")], run="r", rank=rank, world_size=world_size) as store:
        store.save(1, {"model": {**model, **stage}, "step": 1}).wait("committed", 200)


def test_a_checkpoint_of_four_ranks_is_exported_whole(tmp_path: Path) -> None:
    run_ranks(4, save, tmp_path)
    wanted = {**whole(), **{f"stage.{rank}": torch.full((5, 5), float(rank)) for rank in range(4)}}
    with tierstore.open([str(tmp_path / "tier")], run="r") as store:
        checkpoint = store.open_checkpoint(1)
        checkpoint.export(tmp_path / "hf", ExportOptions(strip="model.", budget="32MiB"))
        assert_tensors(hf_tensors(tmp_path / "hf"), wanted)
        checkpoint.export(tmp_path / "dcp", ExportOptions(format="dcp", budget="32MiB"))
        into: dict[str, Any] = {"model": {name: torch.zeros_like(value) for name, value in wanted.items()}, "step": 0}
        dcp.load(into, checkpoint_id=tmp_path / "dcp")
        assert_tensors(into["model"], wanted)
        assert into["step"] == 1
        checkpoint.export(tmp_path / "all.pt", ExportOptions(format="torch"))
        assert_tensors(torch.load(tmp_path / "all.pt", weights_only=True)["model"], wanted)
        turned = checkpoint.renamed([{"match": "both", "transpose": True}], strip="model.")
        assert torch.equal(turned["both"][3:30:2, 5:], wanted["both"].T[3:30:2, 5:])


def load_renamed(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    truth = torch.cat([whole()["rows"], whole()["rows"][:, :40]])
    into = {"twice": distribute_tensor(torch.zeros_like(truth), mesh, [Shard(0)])}
    with tierstore.open([str(folder / "tier")], run="r", rank=rank, world_size=world_size) as store:
        rules = {"rules": [{"match": ["rows", "rows2"], "to": "twice", "fuse": {"axis": 0}}], "others": "drop"}
        checkpoint = store.open_checkpoint(2)
        checkpoint.renamed(rules).load(into)
    assert torch.equal(into["twice"].full_tensor(), truth)


def test_each_rank_loads_its_rows_of_a_renamed_tensor(tmp_path: Path) -> None:
    rows = whole()["rows"]
    with tierstore.open([str(tmp_path / "tier")], run="r") as store:
        store.save(2, {"rows": rows, "rows2": rows.clone()}).wait("committed", 200)
    run_ranks(2, load_renamed, tmp_path)
