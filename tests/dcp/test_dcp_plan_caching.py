"""Planners that cache plans: the second save sends no plans, and is a checkpoint of its own all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import IGNORED, config, quiet, state
from ranks_kit import run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import tierstore
from tierstore.dcp import TierStorageWriter
from tierstore.testing.equality import assert_same_state

pytestmark = pytest.mark.filterwarnings(IGNORED)

CACHES = ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan", "_cached_metadata")


@pytest.fixture(autouse=True)
def _no_caches() -> Iterator[None]:
    """Torch keeps them by the planner's class, for the life of the process."""
    for name in CACHES:
        getattr(SavePlanner, name).clear()
    yield
    for name in CACHES:
        getattr(SavePlanner, name).clear()


def saving(writer: Any, state_dict: dict[str, Any], step: int, planner: Any = None) -> None:
    planner = planner or dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state_dict, storage_writer=writer, checkpoint_id=step, planner=planner, no_dist=True)


@pytest.mark.parametrize("fresh", [False, True], ids=["one writer", "a new writer each time"])
def test_each_save_of_an_unchanged_plan_is_a_checkpoint_with_its_own_values(tmp_path: Path, fresh: bool) -> None:
    writer = TierStorageWriter(config(tmp_path))
    states = []
    for step in (1, 2, 3):
        states.append({**state(), "progress": {"step": step}, "w": torch.full((3,), float(step))})
        saving(TierStorageWriter(config(tmp_path)) if fresh else writer, states[-1], step)
    with tierstore.open(config(tmp_path)) as store:
        for step in (1, 2, 3):
            assert_same_state(store.load(step), states[step - 1])
    writer.close()


def test_a_changed_plan_a_changed_dtype_and_another_planner_in_between_are_followed(tmp_path: Path) -> None:
    class Other(dcp.DefaultSavePlanner):
        pass

    writer = TierStorageWriter(config(tmp_path))
    states = [
        {"a": torch.ones(3)},
        {"a": torch.ones(3), "b": {"c": 1}},
        {"x": torch.zeros(2)},
        {"a": torch.full((3,), 2.0), "b": {"c": 2}},
        {"a": torch.full((3,), 3, dtype=torch.int64), "b": {"c": 3}},
    ]
    for step, each in enumerate(states):
        saving(writer, each, step, Other(enable_plan_caching=True) if "x" in each else None)
    with tierstore.open(config(tmp_path)) as store:
        for step, each in enumerate(states):
            assert_same_state(store.load(step), each)
    writer.close()


def test_a_stock_writer_after_ours_does_not_lose_the_items(tmp_path: Path) -> None:
    """Our plan without items must not stay in torch's cache, where the next writer would find it and save nothing."""
    writer = TierStorageWriter(config(tmp_path))
    for step in (1, 2):
        saving(writer, {"a": torch.ones(3)}, step)
    [plan] = [plan for key, plan in SavePlanner._cached_final_save_plan.items() if not key.startswith("tierstore:")]
    assert [item.index.fqn for item in plan.items] == ["a"]
    writer.close()


def test_a_cache_that_another_writer_filled_is_refused(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), planner=planner, no_dist=True)
    writer = TierStorageWriter(config(tmp_path))
    with pytest.raises(CheckpointException, match="never wrote it with a TierStorageWriter"):
        saving(writer, {"a": torch.ones(3)}, 1)
    writer.close()


def ranks_save_twice(rank: int, world_size: int, folder: Path) -> Any:
    quiet()
    mesh = init_device_mesh("cpu", (world_size,))
    writer = TierStorageWriter(config(folder))
    for step in (1, 2, 3):
        whole = torch.arange(10.0) + step
        sharded = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "plain": torch.full((4,), float(step)), "rank": {"id": (rank, step)}}
        if step == 3 and rank == 1:
            sharded["only"] = torch.ones(1)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(sharded, storage_writer=writer, checkpoint_id=step, planner=planner)
    writer.close()
    return None


def test_ranks_that_send_no_plans_still_learn_the_save_id(tmp_path: Path) -> None:
    run_ranks(2, ranks_save_twice, tmp_path)
    with tierstore.open(config(tmp_path)) as store:
        for step in (1, 2, 3):
            loaded = store.load(step)
            assert loaded["w"].tolist() == (torch.arange(10.0) + step).tolist()
            assert loaded["plain"].tolist() == [step] * 4
            assert loaded["rank"]["id"] == (0, step)
        assert "only" in store.open_checkpoint(3)
