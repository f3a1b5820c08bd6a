"""Several ranks: sharded models and optimizers in every layout, each rank's own values, and ranks that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_kit import IGNORED, causes, config, quiet
from ranks_kit import die, run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tierstore
from tierstore.dcp import TierStorageReader, TierStorageWriter

pytestmark = [pytest.mark.filterwarnings(IGNORED), pytest.mark.timeout(900)]


class Model(torch.nn.Module):
    """7 and 13 divide by nothing: shards are uneven, and empty on some of four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 14)
        self.down = torch.nn.Linear(14, 4)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x))) * self.scale.sum()
        return out


def trainer(layout: str, world_size: int, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicas", "shards")))
    elif layout == "fsdp+tp":
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for number in range(steps):
        loss = model(torch.full((2, 4), 0.5 + number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def save_layout(rank: int, world_size: int, folder: Path, layout: str) -> Any:
    quiet()
    model, optimizer = trainer(layout, world_size, seed=3)
    train(model, optimizer, 2)
    weights, optim = get_state_dict(model, optimizer)
    writer = TierStorageWriter(config(folder, run=layout.replace("+", "-")))
    dcp.save({"model": weights, "optim": optim}, storage_writer=writer, checkpoint_id=2)
    writer.close()
    return train(model, optimizer, 2)


def load_layout(rank: int, world_size: int, folder: Path, layout: str, sources: list[str]) -> Any:
    quiet()
    found = {}
    for source in sources:
        model, optimizer = trainer(layout, world_size, seed=99)
        weights, optim = get_state_dict(model, optimizer)
        into = {"model": weights, "optim": optim}
        reader = TierStorageReader(config(folder, run=source.replace("+", "-")))
        dcp.load(into, storage_reader=reader)
        reader.close()
        set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optim"])
        found[source] = train(model, optimizer, 2)
    return found


def test_training_goes_on_in_another_layout_and_number_of_ranks_as_if_nothing_had_happened(tmp_path: Path) -> None:
    layouts = [("fsdp", 4), ("fsdp+tp", 4), ("hsdp", 4), ("ddp", 2)]
    truth = run_ranks(1, save_layout, tmp_path, layout="plain")[0]
    for layout, world_size in layouts:
        assert run_ranks(world_size, save_layout, tmp_path, layout=layout)[0] == pytest.approx(truth, rel=1e-4)
    sources = ["plain", *(layout for layout, _ in layouts)]
    for layout, world_size in [("fsdp", 2), ("fsdp+tp", 4), ("plain", 1)]:
        for found in run_ranks(world_size, load_layout, tmp_path, layout=layout, sources=sources):
            for source in sources:
                assert found[source] == pytest.approx(truth, rel=1e-4), (layout, source)


def save_placements(rank: int, world_size: int, folder: Path) -> Any:
    quiet()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    writer = TierStorageWriter(config(folder))
    dcp.save(placements(mesh), storage_writer=writer, checkpoint_id=1)
    writer.close()
    return None


SHAPES = {"even": (8, 4), "uneven": (7, 5), "short": (1, 3), "none": (0, 4)}


def placements(mesh: DeviceMesh, value: float = 1.0) -> dict[str, Any]:
    state: dict[str, Any] = {}
    both = [[Shard(0), Shard(1)], [Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)]]
    for name, shape in SHAPES.items():
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape) * value
        for how in both:
            state[f"{name}.{how[0]}.{how[1]}"] = distribute_tensor(whole, mesh, how)
    sub = mesh["b"]
    if dist.get_rank() < 2:  # one row of the mesh alone
        state["sub"] = distribute_tensor(torch.arange(6.0) * value, sub, [Shard(0)])
    return state


def load_placements(rank: int, world_size: int, folder: Path) -> Any:
    quiet()
    mesh = init_device_mesh("cpu", (world_size,))
    reader = TierStorageReader(config(folder))
    keys = list(reader.read_metadata().state_dict_metadata)
    wrong = []
    for key in keys:
        shape = SHAPES.get(key.split(".")[0], (6,))
        for how in (Shard(0), Replicate(), Shard(len(shape) - 1)):
            into = {key: distribute_tensor(torch.full(shape, -1.0), mesh, [how])}
            dcp.load(into, storage_reader=reader)
            full = into[key].full_tensor()
            if not torch.equal(full, torch.arange(float(full.numel())).view(shape)):
                wrong.append(f"{key} as {how}: {full.tolist()}")
    reader.close()
    return [len(keys), wrong]


def test_every_placement_uneven_and_empty_loads_as_every_other(tmp_path: Path) -> None:
    run_ranks(4, save_placements, tmp_path)
    for world_size in (2, 1):
        for count, wrong in run_ranks(world_size, load_placements, tmp_path):
            assert count == 21
            assert wrong == []
    with tierstore.open(config(tmp_path)) as store:
        loaded = store.load(1)
        for key, tensor in loaded.items():
            assert tensor.flatten().tolist() == list(range(tensor.numel())), key


def save_own(rank: int, world_size: int, folder: Path) -> Any:
    quiet()
    torch.manual_seed(rank)
    writer = TierStorageWriter(config(folder))
    state = {
        "rng": torch.get_rng_state(),
        "same": torch.arange(5.0),
        "loader": {"position": 100 + rank, "order": [rank, rank + 1]},
        "buffers": {"count": torch.tensor(rank)},
        "pair": (torch.tensor([rank]), "x"),
    }
    if rank == 2:
        state["stage"] = {"w": torch.ones(2), "name": "only rank 2"}
    dcp.save(state, storage_writer=writer, checkpoint_id=1)
    writer.close()
    return float(torch.rand(1))


def load_own(rank: int, world_size: int, folder: Path) -> Any:
    quiet()
    reader = TierStorageReader(config(folder))
    into: dict[str, Any] = {
        "rng": torch.get_rng_state(),
        "same": torch.zeros(5),
        "loader": {"position": 0, "order": []},
        "buffers": {"count": torch.tensor(-1)},
        "pair": None,
        "stage": {"w": torch.zeros(2), "name": ""},
    }
    dcp.load(into, storage_reader=reader)
    reader.close()
    torch.set_rng_state(into["rng"])
    with tierstore.open(config(folder)) as store:
        own = tierstore.state.load.load_state(store.open_checkpoint(1).replica, store._session.run, rank=rank)
    return [
        float(torch.rand(1)),
        into["same"].tolist(),
        into["loader"],
        int(into["buffers"]["count"]),
        int(into["pair"][0]),
        into["stage"]["name"],
        int(own["buffers"]["count"]),
        own["loader"]["position"],
    ]


def test_each_rank_gets_its_own_random_state_loader_and_buffers_back(tmp_path: Path) -> None:
    """NEIGHBOURS 1.6: stock DCP keeps one rank's of them, silently."""
    rolls = run_ranks(4, save_own, tmp_path)
    assert len(set(rolls)) == 4
    same = [0, 1, 2, 3, 4]
    for rank, found in enumerate(run_ranks(4, load_own, tmp_path)):
        loader = {"position": 100 + rank, "order": [rank, rank + 1]}
        assert found == [rolls[rank], same, loader, rank, rank, "only rank 2", rank, 100 + rank]
    for rank, found in enumerate(run_ranks(2, load_own, tmp_path)):
        assert found[2]["position"] == 100 + rank
    with tierstore.open(config(tmp_path)) as store:
        stored = list(store.open_checkpoint(1))
    assert "same" in stored
    assert not any(name.startswith("same@") for name in stored)  # equal on all ranks: stored once
    assert sum(name.startswith("rng") for name in stored) == 4


def one_fails(rank: int, world_size: int, folder: Path) -> Any:
    quiet()
    writer = TierStorageWriter(config(folder))
    bad = object() if rank == 1 else 5
    told = ""
    try:
        dcp.save({"w": torch.arange(4.0) + rank, "v": bad}, storage_writer=writer, checkpoint_id=1)
    except CheckpointException as error:
        told = " | ".join(str(cause) for cause in causes(error))
    dcp.save({"w": torch.arange(4.0)}, storage_writer=writer, checkpoint_id=2)
    writer.close()
    return told


def test_one_rank_that_fails_fails_the_save_on_all_and_the_next_save_works(tmp_path: Path) -> None:
    """E19: nobody waits, nothing of it ever looks like a checkpoint, and the attempt is condemned for the collector."""
    for told in run_ranks(3, one_fails, tmp_path):
        assert "state['v'] is a builtins.object" in told
    fates = [path.read_text() for path in (tmp_path / "shared" / "r" / ".log").glob("step-*/000000.json")]
    assert sorted('"condemned"' in fate for fate in fates) == [False, True]
    with tierstore.open(config(tmp_path)) as store:
        assert [info.step for info in store.checkpoints()] == [2]


def one_dies(rank: int, world_size: int, folder: Path) -> Any:
    quiet()
    writer = TierStorageWriter(config(folder, save={"agreement_timeout": "2s"}))

    class Dying(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            if rank == 1:
                die()
            return super().finish_plan(new_plan)

    try:
        dcp.save({"w": torch.arange(4.0)}, storage_writer=writer, checkpoint_id=1, planner=Dying())
    except BaseException as error:  # noqa: BLE001 - whichever of the two notices first
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_rank_that_dies_after_planning_leaves_no_checkpoint_and_no_hang(tmp_path: Path) -> None:
    told = run_ranks(2, one_dies, tmp_path, may_die={1: -9})
    assert told[0] != "saved"
    with tierstore.open(config(tmp_path)) as store:
        assert store.checkpoints() == []


def other_steps(rank: int, world_size: int, folder: Path) -> Any:
    quiet()
    writer = TierStorageWriter(config(folder))
    try:
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, checkpoint_id=rank)
    except CheckpointException as error:
        return str(error)
    return "saved"


def test_ranks_that_mean_different_steps_are_told_so(tmp_path: Path) -> None:
    for told in run_ranks(2, other_steps, tmp_path):
        assert "this rank saves r@1, the coordinator r@0" in told


def other_places(rank: int, world_size: int, folder: Path) -> Any:
    quiet()
    shared = [{"name": "shared", "uri": str(folder / f"shared-{rank}"), "scope": "shared"}]
    writer = TierStorageWriter({"version": 1, "run": "r", "tiers": shared, "save": {"agreement_timeout": "60s"}})
    try:
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, checkpoint_id=1)
    except CheckpointException as error:
        return str(error)
    return "saved"


def test_ranks_that_opened_different_stores_are_told_so(tmp_path: Path) -> None:
    for told in run_ranks(2, other_places, tmp_path):
        assert "this rank has opened another store than the coordinator: the store's id is" in told


def without_collectives(rank: int, world_size: int, folder: Path) -> Any:
    quiet()
    writer = TierStorageWriter(config(folder))
    try:
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, checkpoint_id=1, use_collectives=False)
    except BaseException as error:  # noqa: BLE001 - torch raises it unwrapped here
        return str(error)
    return "saved"


def test_ranks_that_do_not_talk_are_refused(tmp_path: Path) -> None:
    for told in run_ranks(2, without_collectives, tmp_path):
        assert "use_collectives=False" in told


def in_a_group(rank: int, world_size: int, folder: Path) -> Any:
    quiet()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, number = groups[rank % 2], rank % 2
    writer = TierStorageWriter(config(folder, run=f"half-{number}"))
    state = {"w": torch.full((4,), float(number)), "own": torch.tensor(rank), "id": {"rank": rank}}
    dcp.save(state, storage_writer=writer, checkpoint_id=1, process_group=mine)
    writer.close()
    reader = TierStorageReader(config(folder, run=f"half-{number}"))
    into = {"w": torch.zeros(4), "own": torch.tensor(-1), "id": {"rank": -1}}
    dcp.load(into, storage_reader=reader, process_group=mine)
    reader.close()
    return [into["w"].tolist(), int(into["own"]), into["id"]["rank"]]


def test_groups_save_checkpoints_of_their_own(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(4, in_a_group, tmp_path)):
        assert found == [[rank % 2] * 4, rank, rank]
