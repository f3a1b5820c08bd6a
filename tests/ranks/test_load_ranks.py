"""4 ranks save; 1, 2, 4 and 8 load, in other layouts: tensors whole or sharded, and what each rank had for itself (CASES 67, 70)."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_kit import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tierstore
from tierstore.errors import TierStoreError
from tierstore.state.rank_values import RankValues

ROWS, COLUMNS = 13, 10
PLACEMENTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicated": [Replicate()],
    "grid": [Shard(0), Shard(1)],
    "mixed": [Replicate(), Shard(0)],
}


def store_of(folder: Path) -> tierstore.Store:
    return tierstore.open([str(folder / "node"), str(folder / "shared")], run="r")


def truth() -> torch.Tensor:
    return torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)


def tensor_as(layout: str, world_size: int, values: torch.Tensor) -> torch.Tensor:
    if layout == "plain":
        return values.clone()
    if layout in ("grid", "mixed"):
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("a", "b"))
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    return distribute_tensor(values, mesh, PLACEMENTS[layout])


def state_in(layout: str, rank: int, world_size: int, *, blank: bool = False) -> dict[str, Any]:
    values = torch.full((ROWS, COLUMNS), -1.0) if blank else truth()
    seed = 1000 if blank else rank
    return {
        "w": tensor_as(layout, world_size, values),
        "bias": torch.zeros(3) if blank else torch.tensor([1.0, 2.0, 3.0]),
        "step": 0 if blank else 10,
        "groups": [{"lr": 0.0 if blank else 0.5, "params": ["w"]}],
        "rng": {"torch": torch.Generator().manual_seed(seed).get_state(), "python": random.Random(seed).getstate()},
        "sampler": {"epoch": 0 if blank else 1, "at": 0 if blank else 100 + rank},
    }


def saves(rank: int, world_size: int, folder: Path, layout: str) -> Any:
    with store_of(folder) as store:
        store.save(1, state_in(layout, rank, world_size)).wait("durable", 60)
    return None


def loads(rank: int, world_size: int, folder: Path, layout: str, saved_by: int) -> Any:
    """What is wrong of what this rank has loaded."""
    into = state_in(layout, rank, world_size, blank=True)
    before = into["w"]
    with store_of(folder) as store:
        loaded = store.load(1, into)
    whole = loaded["w"].full_tensor() if isinstance(loaded["w"], DTensor) else loaded["w"]
    theirs = state_in("plain", rank % saved_by, world_size)
    checks = {
        "in place": loaded["w"] is before,
        "w": torch.equal(whole, truth()),
        "bias": torch.equal(loaded["bias"], theirs["bias"]),
        "values": all(loaded[key] == theirs[key] for key in ("step", "groups", "sampler")),
        "rng": torch.equal(loaded["rng"]["torch"], theirs["rng"]["torch"]) and loaded["rng"]["python"] == theirs["rng"]["python"],
    }
    return [name for name, right in checks.items() if not right]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One store for each layout that 4 ranks saved in."""
    folders = {layout: tmp_path_factory.mktemp(layout) for layout in ("rows", "grid", "plain")}
    for layout, folder in folders.items():
        run_ranks(4, saves, folder, layout=layout)
    return folders


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("source", "layout"), [("rows", "columns"), ("rows", "plain"), ("grid", "mixed"), ("plain", "grid")])
def test_any_layout_loads_in_any_other(saved: dict[str, Path], source: str, layout: str, world_size: int) -> None:
    assert run_ranks(world_size, loads, saved[source], layout=layout, saved_by=4) == [[]] * world_size


def test_one_process_gets_whole_tensors_of_a_sharded_checkpoint(saved: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    for source in ("rows", "grid"):
        caplog.clear()
        with store_of(saved[source]) as store, caplog.at_level(logging.WARNING):
            fresh = store.load()
            into = {**state_in("plain", 0, 1, blank=True)}
            store.load(1, into)
        for loaded in (fresh, into):
            assert torch.equal(loaded["w"], truth())
            assert loaded["sampler"] == {"epoch": 1, "at": 100}
        assert len([r for r in caplog.records if "4 ranks saved values that differ" in r.getMessage()]) == 2


def resumes_random_states(rank: int, world_size: int, folder: Path) -> Any:
    """RNG and sampler as a trainer would: generators of its own for new ranks, the sampler's position where all had been."""

    def decide(values: RankValues) -> Any:
        if values.path == "rng.torch":
            if values.rank < values.saved_world_size:
                return values.values[values.rank]
            return torch.Generator().manual_seed(values.rank).get_state()
        if values.path == "sampler.at":
            return max(values.values.values())
        return values.default

    with store_of(folder) as store:
        resumed = store.resume(state_in("rows", rank, world_size, blank=True), options=tierstore.LoadOptions(ranks=decide))
    assert resumed is not None
    state = resumed.state
    generator = torch.Generator()
    generator.set_state(state["rng"]["torch"])
    return [int(torch.randint(1 << 30, (), generator=generator)), state["sampler"]["at"]]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_random_states_and_samplers_of_4_ranks_go_on_with_2_4_and_8(saved: dict[str, Path], world_size: int) -> None:
    found = run_ranks(world_size, resumes_random_states, saved["rows"])
    want = [int(torch.randint(1 << 30, (), generator=torch.Generator().manual_seed(rank))) for rank in range(world_size)]
    assert [one[0] for one in found] == want, "each rank has a stream of its own, saved ranks their own again"
    assert [one[1] for one in found] == ([100, 101, 102, 103] if world_size == 4 else [103] * world_size)


# ---- stages of a pipeline move between ranks; strict all the same


def stage(layers: list[int], *, blank: bool = False) -> dict[str, Any]:
    return {
        "model": {f"layers.{n}": torch.full((3,), -1.0 if blank else float(n)) for n in layers},
        "optim": {f"layers.{n}": {"step": -1 if blank else n} for n in layers},
    }


def saves_stages(rank: int, world_size: int, folder: Path) -> Any:
    with store_of(folder) as store:
        store.save(1, stage([2 * rank, 2 * rank + 1])).wait("durable", 60)
    return None


def loads_stages(rank: int, world_size: int, folder: Path, layers: list[list[int]], rename: dict[str, str]) -> Any:
    """The layers that this rank has after loading; or what went wrong."""
    into = stage(layers[rank], blank=True)
    into["model"] = {rename.get(name, name): tensor for name, tensor in into["model"].items()}
    with store_of(folder) as store:
        try:
            loaded = store.load(1, into)
        except TierStoreError as error:
            untouched = all(bool((t == -1).all()) for t in into["model"].values())
            return [type(error).__name__, untouched, error.message]
    return [[int(t[0]) for t in loaded["model"].values()], [one["step"] for one in loaded["optim"].values()]]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 layers on 4 ranks."""
    folder = tmp_path_factory.mktemp("stages")
    run_ranks(4, saves_stages, folder)
    return folder


@pytest.mark.parametrize("layers", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0], [1, 2, 3], [4, 5, 6], [7]], [[7, 6, 5, 4, 3, 2, 1, 0]]])
def test_stages_move_to_other_ranks_and_nothing_is_unexpected(stages: Path, layers: list[list[int]]) -> None:
    assert run_ranks(len(layers), loads_stages, stages, layers=layers, rename={}) == [[numbers, numbers] for numbers in layers]


@pytest.mark.parametrize("layers", [[[0, 1, 2, 3], [4, 5, 6]], [[0], [1, 2, 3], [4, 5, 6], []]])
def test_what_no_rank_asks_for_is_an_error_on_all_of_them_and_changes_nothing(stages: Path, layers: list[list[int]]) -> None:
    for kind, untouched, message in run_ranks(len(layers), loads_stages, stages, layers=layers, rename={}):
        assert (kind, untouched) == ("StateMismatchError", True)
        assert "differ in 2 places" in message
        assert "unexpected model.layers.7: no rank asks for it" in message
        assert "unexpected optim.layers.7.step" in message


def test_a_misspelt_key_on_one_rank_is_an_error_on_all_of_them(stages: Path) -> None:
    found = run_ranks(2, loads_stages, stages, layers=[[0, 1, 2, 3], [4, 5, 6, 7]], rename={"layers.5": "leyers.5"})
    assert [one[:2] for one in found] == [["RankError", True], ["StateMismatchError", True]]
    assert "missing    model.leyers.5" in found[1][2]
    assert "nearest stored: model.layers.5" in found[1][2]
    assert "rank 1 of 2 failed: StateMismatchError" in found[0][2]


def failing_hook(rank: int, world_size: int, folder: Path) -> Any:
    def decide(values: RankValues) -> Any:
        if values.rank == 1:
            raise ValueError("no rule for this")
        return values.default

    with store_of(folder) as store:
        try:
            store.load(1, state_in("rows", rank, world_size, blank=True), options=tierstore.LoadOptions(ranks=decide))
        except (TierStoreError, ValueError) as error:
            return [type(error).__name__, str(error)]
    return None


def test_a_hook_that_fails_on_one_rank_is_heard_of_on_all(saved: dict[str, Path]) -> None:
    first, second = run_ranks(2, failing_hook, saved["rows"])
    assert second == ["ValueError", "no rule for this"]
    assert first[0] == "RankError"
    assert "rank 1 of 2 failed: ValueError: no rule for this" in first[1]
