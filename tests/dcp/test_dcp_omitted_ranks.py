"""Two ranks leave out what can be made of something else, and fill it again in other layouts, through both doors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import IGNORED, causes, config, quiet
from ranks_kit import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import tierstore
from tierstore.dcp import TierStorageReader, TierStorageWriter

pytestmark = [pytest.mark.filterwarnings(IGNORED), pytest.mark.timeout(900)]

FILL = [{"match": r"master\.(.*)", "to": r"model.\1"}]


def state(world_size: int, axis: int | None, rank: int, scale: float = 1.0) -> dict[str, Any]:
    """Weights that are their masters, rounded, spread along an axis (None: on each rank); 13 and 5 divide by nothing."""
    torch.manual_seed(5)
    master = torch.randn(13, 5) * scale
    placement = Replicate() if axis is None else Shard(axis)
    mesh = init_device_mesh("cpu", (world_size,))
    spread = {name: distribute_tensor(value, mesh, [placement]) for name, value in (("w", master.bfloat16()), ("m", master))}
    plain = torch.arange(4.0) * scale
    return {
        "model": {"w": spread["w"], "b": plain.bfloat16()},
        "master": {"w": spread["m"], "b": plain},
        "seen": torch.tensor(float(rank)) * scale,
    }


def save(rank: int, world_size: int, folder: Path) -> Any:
    quiet()
    found: list[Any] = []
    writer = TierStorageWriter(config(folder), omit=["model.*"])
    metadata = dcp.async_save(state(world_size, 0, rank), storage_writer=writer, checkpoint_id=1).result()
    found.append(sorted(metadata.state_dict_metadata))
    writer.close()
    with tierstore.open(config(folder)) as store:
        store.save(2, state(world_size, 0, rank), omit=["model.*"]).wait("durable", 60)
    other = TierStorageWriter(config(folder), omit=["model.*"] if rank else ["model.w"])
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state(world_size, 0, rank), storage_writer=other, checkpoint_id=3)
    found.append([str(cause) for cause in causes(caught.value)])
    other.close()
    return found


def load(rank: int, world_size: int, folder: Path, axis: int | None) -> Any:
    quiet()
    wanted = state(world_size, axis, rank)
    for step in (1, 2):
        reader = TierStorageReader(config(folder), fill=FILL)
        into = state(world_size, axis, rank, scale=0.0)
        dcp.load(into, storage_reader=reader, checkpoint_id=step)
        reader.close()
        with tierstore.open(config(folder)) as store:
            ours = store.load(step, state(world_size, axis, rank, scale=0.0), options=tierstore.LoadOptions(fill=FILL))
        for found in (into, ours):
            assert torch.equal(found["model"]["w"].to_local(), wanted["model"]["w"].to_local())
            assert torch.equal(found["model"]["b"], wanted["model"]["b"])
            assert torch.equal(found["master"]["w"].to_local(), wanted["master"]["w"].to_local())
            assert found["seen"].item() == rank % 2
    return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(2, save, folder)


def test_ranks_store_none_of_what_they_leave_out_and_the_checkpoint_knows(saved: tuple[Path, Any]) -> None:
    folder, found = saved
    assert found[0][0] == ["master.b", "master.w", "seen"]
    with tierstore.open(config(folder), world_size=1) as store:
        for step in (1, 2):
            checkpoint = store.open_checkpoint(step)
            names = sorted(checkpoint)
            assert names[:3] == ["master.b", "master.w", "seen"]
            assert [name.rpartition("@")[0] for name in names[3:]] == ["seen"]  # the other rank's own
            assert checkpoint.replica.manifest.facts["omitted"] == {"patterns": ["model.*"], "tensors": 2, "nbytes": 13 * 5 * 2 + 4 * 2}


def test_ranks_that_leave_out_different_things_are_told_and_save_nothing(saved: tuple[Path, Any]) -> None:
    folder, found = saved
    assert any("this rank leaves ['model.*'] out of r@3, the coordinator ['model.w']" in text for text in found[0][1])
    with tierstore.open(config(folder), world_size=1) as store:
        assert [info.step for info in store.checkpoints()] == [1, 2]


@pytest.mark.parametrize(("world_size", "axis"), [(2, 0), (2, 1), (3, None)])
def test_each_rank_fills_its_own_slices_whatever_the_layout(saved: tuple[Path, Any], world_size: int, axis: int | None) -> None:
    assert run_ranks(world_size, load, saved[0], axis=axis) == [True] * world_size
