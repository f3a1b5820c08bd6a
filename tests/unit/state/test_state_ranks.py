"""Objects of each rank when another number of ranks loads: whose tree, what comes from other trees, what a hook decides (CASES 67, 70)."""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from state_kit import ImageReader, run

from tierstore.errors import FormatError, StateMismatchError
from tierstore.format.objects import Opaque, TensorRef, decode_objects, encode_objects
from tierstore.format.objects_decode import decode_node
from tierstore.format.objects_document import load_tree
from tierstore.format.objects_union import ABSENT, Union, find_node
from tierstore.state.differences import LoadOptions
from tierstore.state.image import ImagePool
from tierstore.state.lazy import Checkpoint
from tierstore.state.load import load_state
from tierstore.state.rank_trees import RankTrees
from tierstore.state.rank_values import RankValues, keep_modulo, keep_rank_0, require_same
from tierstore.state.stage import stage
from tierstore.testing.equality import assert_same_state


def saved_by(states: Sequence[Any]) -> ImageReader:
    pool = ImagePool(None, max_nbytes=1 << 30)
    made = [stage(state, rank=rank, world_size=len(states), pool=pool) for rank, state in enumerate(states)]
    try:
        return ImageReader(made)
    finally:
        for one in made:
            one.release()
        pool.close()


def rng_of(rank: int) -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(rank).get_state(),
        "python": random.Random(rank).getstate(),
    }


def state_of(rank: int, **more: Any) -> dict[str, Any]:
    return {"schedule": {"lr": 0.5}, "step": 10, "rng": rng_of(rank), "sampler": {"epoch": 1, "at": 100 + rank}, **more}


def said_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What loading had to say, whatever else goes on in this process."""
    return [record for record in caplog.records if record.name.startswith("tierstore.state")]


FOUR = [state_of(rank) for rank in range(4)]


@pytest.mark.parametrize("given", [True, False])
def test_as_many_ranks_as_saved_get_their_own_values_and_nobody_is_asked(given: bool, caplog: pytest.LogCaptureFixture) -> None:
    def never(values: RankValues) -> Any:
        raise AssertionError(values.path)

    reader = saved_by(FOUR)
    for rank in range(4):
        into = state_of(99) if given else None
        loaded = load_state(reader, run, into=into, rank=rank, world_size=4, options=LoadOptions(ranks=never))
        assert_same_state(loaded, FOUR[rank])
    assert not said_in(caplog)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("given", [True, False])
def test_another_number_of_ranks_takes_over_modulo_with_one_warning_that_lists_the_places(
    given: bool, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    reader = saved_by(FOUR)
    with caplog.at_level(logging.WARNING):
        for rank in range(world_size):
            loaded = load_state(reader, run, into=state_of(99) if given else None, rank=rank, world_size=world_size)
            assert_same_state(loaded, FOUR[rank % 4])
    [record] = said_in(caplog)
    told = record.getMessage()
    assert "4 ranks saved" in told
    assert f"{world_size} load" in told
    assert "rng.python, rng.torch, sampler.at" in told
    assert "LoadOptions(ranks=...)" in told
    assert "schedule" not in told


def test_the_hook_decides_about_each_value_that_differs_and_about_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []

    def decide(values: RankValues) -> Any:
        asked.append(values.path)
        assert (values.rank, values.world_size, values.saved_world_size) == (1, 2, 4)
        if values.path == "rng.torch":
            return torch.Generator().manual_seed(1000 + values.rank).get_state()
        if values.path == "sampler.at":
            return min(values.values.values())
        return values.default

    reader = saved_by(FOUR)
    for into in (state_of(99), None):
        asked.clear()
        state = into["rng"]["torch"] if into else None
        loaded = load_state(reader, run, into=into, rank=1, world_size=2, options=LoadOptions(ranks=decide))
        assert sorted(asked) == ["rng.python", "rng.torch", "sampler.at"]
        assert loaded["sampler"] == {"epoch": 1, "at": 100}
        assert loaded["rng"]["python"] == FOUR[1]["rng"]["python"]
        assert torch.equal(loaded["rng"]["torch"], torch.Generator().manual_seed(1001).get_state())
        assert into is None or loaded["rng"]["torch"] is state
    assert not said_in(caplog)


def test_values_are_read_when_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = saved_by(FOUR)
    seen: dict[str, Any] = {}

    def decide(values: RankValues) -> Any:
        before = reader.nbytes_read
        seen[values.path] = list(values.values)
        assert reader.nbytes_read == before
        if values.path == "rng.torch":
            assert [torch.equal(values.values[r], FOUR[r]["rng"]["torch"]) for r in values.values] == [True] * 4
            assert reader.nbytes_read > before
            with pytest.raises(KeyError):
                values.values[4]
        return values.default

    load_state(reader, run, rank=0, world_size=1, options=LoadOptions(ranks=decide))
    assert seen == {path: [0, 1, 2, 3] for path in ("rng.python", "rng.torch", "sampler.at")}


def test_the_hooks_that_come_along(caplog: pytest.LogCaptureFixture) -> None:
    reader = saved_by(FOUR)
    assert_same_state(load_state(reader, run, rank=7, world_size=8, options=LoadOptions(ranks=keep_rank_0)), FOUR[0])
    assert_same_state(load_state(reader, run, rank=7, world_size=8, options=LoadOptions(ranks=keep_modulo)), FOUR[3])
    with pytest.raises(StateMismatchError, match="differs between the 4 ranks that saved it, and 8 ranks load it"):
        load_state(reader, run, rank=7, world_size=8, options=LoadOptions(ranks=require_same))
    alike = saved_by([{"step": 10, "w": 1.5}] * 4)
    assert load_state(alike, run, rank=7, world_size=8, options=LoadOptions(ranks=require_same)) == {"step": 10, "w": 1.5}
    assert not said_in(caplog)


def test_a_hook_s_tensor_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(StateMismatchError, match=r"rng\.torch is a tensor of shape .* is of shape \[3\]"):
        load_state(saved_by(FOUR), run, into=state_of(9), world_size=1, options=LoadOptions(ranks=lambda values: torch.zeros(3)))


def stage_of(*layers: int) -> dict[str, Any]:
    """A pipeline stage: a module's state of some layers, and what goes with them."""
    names = [f"layers.{n}.weight" for n in layers]
    model = OrderedDict((name, torch.full((2, 3), float(n))) for name, n in zip(names, layers, strict=True))
    model._metadata = OrderedDict((name.rpartition(".")[0], {"version": 1}) for name in names)  # type: ignore[attr-defined]
    return {"model": model, "optim": {n: {"exp_avg": torch.full((2, 3), n + 0.5), "step": n} for n in layers}, "step": 7}


def test_what_moved_to_another_rank_comes_from_the_tree_of_the_rank_that_had_it() -> None:
    four = saved_by([stage_of(0, 1), stage_of(2, 3), stage_of(4, 5), stage_of(6, 7)])
    for world_size, stages in (
        (1, [tuple(range(8))]),
        (2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (4, [(0,), (1, 2), (3, 4, 5), (6, 7)]),
        (8, range(8)),
    ):
        for rank, layers in enumerate(stages):
            want = stage_of(*(layers if isinstance(layers, tuple) else (layers,)))
            into = stage_of(*(layers if isinstance(layers, tuple) else (layers,)))
            for tensor in [*into["model"].values(), *(s["exp_avg"] for s in into["optim"].values())]:
                tensor.zero_()
            for state in into["optim"].values():
                state["step"] = -1
            options = LoadOptions(allow_unexpected=("model.*", "optim.*"))  # the ranks that would ask for them are not here
            assert_same_state(load_state(four, run, into=into, rank=rank, world_size=world_size, options=options), want)


def test_one_process_gets_all_ranks_entries_and_module_metadata() -> None:
    four = saved_by([stage_of(0, 1), stage_of(2, 3), stage_of(4, 5), stage_of(6, 7)])
    want = stage_of(*range(8))
    loaded = load_state(four, run, world_size=1)
    assert_same_state(loaded, want)
    assert loaded["model"]._metadata == want["model"]._metadata
    opened = Checkpoint(four, run, world_size=1)
    assert_same_state(opened.state(), want)
    assert list(opened.objects["optim"]) == list(range(8))


def test_a_key_that_no_rank_stored_is_missing_and_one_that_nobody_asks_for_is_unexpected() -> None:
    two = saved_by([stage_of(0), stage_of(1)])
    into = stage_of(0, 1)
    into["model"]["layers.1.wieght"] = into["model"].pop("layers.1.weight")
    with pytest.raises(StateMismatchError, match=r"nearest stored: model\.layers\.1\.weight") as caught:
        load_state(two, run, into=into, world_size=1)
    assert caught.value.context["missing"] == ("model.layers.1.wieght",)
    assert caught.value.context["unexpected"] == ("model.layers.1.weight",)
    with pytest.raises(StateMismatchError, match=r"missing +model\.layers\.2\.weight"):
        load_state(two, run, into=stage_of(2), rank=1, world_size=2)


def test_a_tensor_of_one_rank_s_own_is_loaded_where_its_place_is_asked_for() -> None:
    reader = saved_by([{"w": torch.zeros(2)}, {"w": torch.ones(2), "own": torch.full((3,), 5.0)}])
    into = {"w": torch.empty(2), "own": torch.empty(3)}
    load_state(reader, run, into=into, rank=0, world_size=2)
    assert_same_state(into, {"w": torch.zeros(2), "own": torch.full((3,), 5.0)})


# ---- the union itself


def union_of(*trees: Any) -> tuple[Any, set[Any]]:
    union = Union(load_tree(encode_objects(trees[0])), see_through="torch.state_dict", tensor="torch.Tensor")
    for tree in trees[1:]:
        union.add(load_tree(encode_objects(tree)))
    return decode_node(union.tree), union.differing


@pytest.mark.parametrize(
    ("first", "second", "united", "differing"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}, set()),
        ({"a": 1}, {"a": 2}, {"a": 1}, {("a",)}),
        ({"a": {0: 1}}, {"a": {"0": 2, 1: 3}}, {"a": {0: 1, "0": 2, 1: 3}}, set()),
        ({"a": 1}, {"$b": 2, (1, 2): 3}, {"a": 1, "$b": 2, (1, 2): 3}, set()),
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, {"a": [1, 2]}, {("a",)}),
        ({"a": [{"lr": 1}]}, {"a": [{"lr": 2}, {"lr": 3}]}, {"a": [{"lr": 1}, {"lr": 3}]}, {("a", 0, "lr")}),
        ({"a": (1, {"b": 1})}, {"a": (1, {"c": 1})}, {"a": (1, {"b": 1, "c": 1})}, set()),
        ({"a": TensorRef("x")}, {"a": TensorRef("x@rank1")}, {"a": TensorRef("x")}, {("a",)}),
        (
            {"a": Opaque("torch.Tensor", {"ref": TensorRef("x"), "parameter": True})},
            {"a": TensorRef("x")},
            {"a": Opaque("torch.Tensor", {"ref": TensorRef("x"), "parameter": True})},
            set(),
        ),
        ({"a": {"b": 1}}, {"a": 5}, {"a": {"b": 1}}, {("a",)}),
        (OrderedDict(a=1), {"b": 2}, OrderedDict(a=1, b=2), set()),
        ({"a": float("nan")}, {"a": float("nan")}, None, set()),
        (
            {"m": Opaque("torch.state_dict", [OrderedDict(w=TensorRef("w")), OrderedDict()])},
            {"m": {"v": TensorRef("v")}},
            {"m": Opaque("torch.state_dict", [OrderedDict(w=TensorRef("w"), v=TensorRef("v")), OrderedDict()])},
            set(),
        ),
    ],
)
def test_trees_are_united_key_by_key_and_values_that_differ_are_named(first: Any, second: Any, united: Any, differing: set[Any]) -> None:
    found, places = union_of(first, second)
    assert places == differing
    if united is not None:
        assert found == united
    for place in places:
        for tree in (first, second):
            node = find_node(load_tree(encode_objects(tree)), place, see_through="torch.state_dict")
            value = tree
            for key in place:
                value = value[key]
            assert decode_node(node) == value


def test_what_is_not_there_is_absent() -> None:
    tree = load_tree(encode_objects({"a": [1, {"b": 2}], 3: 4}))
    for place in [("b",), ("a", 2), ("a", -1), ("a", 1, "c"), ("a", 0, 0), ("3",), ("a", "0")]:
        assert find_node(tree, place, see_through="torch.state_dict") is ABSENT
    assert find_node(tree, (3,), see_through="torch.state_dict") == 4


def test_malformed_trees_are_a_typed_error() -> None:
    bad: list[Any] = [{"$dict": [1]}, {"$dict": [[{"$array": 1}, 2]]}, {"$torch.state_dict": 5}, {"$torch.state_dict": [1]}]
    for tree in bad:
        union = Union(
            {"$dict": [["k", 1]]} if "$dict" in tree else {"$torch.state_dict": [{}, {}]}, see_through="torch.state_dict", tensor="t"
        )
        with pytest.raises(FormatError):
            union.add(tree)


def test_every_tree_is_read_and_compared_once_and_own_trees_alone() -> None:
    count, tensors = 16, 40

    def tree(rank: int) -> Any:
        names = [f"model.layers.{i}.weight" for i in range(tensors)]
        slots = {n: {s: TensorRef(f"optim.{n}.{s}") for s in ("exp_avg", "exp_avg_sq")} for n in names}
        return {"model": {n: TensorRef(n) for n in names}, "optim": slots, "rng": TensorRef(f"rng@rank{rank}"), "at": rank}

    class Documents:
        def __init__(self) -> None:
            self.data = [encode_objects(tree(rank)) for rank in range(count)]
            self.calls = 0

        async def objects(self, rank: int) -> bytes:
            self.calls += 1
            return self.data[rank]

        async def object_ranks(self) -> dict[int, int]:
            return {rank: rank for rank in range(count)}

    reader: Any = Documents()
    trees = RankTrees(reader, run, rank=0, world_size=1)
    united, differing = trees.tree()
    assert differing == {("rng",), ("at",)}
    assert len(united["optim"]) == tensors
    assert reader.calls == count
    assert decode_objects(reader.data[0]) == united
    own = RankTrees(reader, run, rank=5, world_size=count)
    assert own.tree()[0]["at"] == 5
    assert reader.calls == count + 1, "a rank that has a tree of its own reads that one"
