"""Staging: a copy that later changes can't reach, in one pass, planned once, released on every failure (CASES 36, 40)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from state_kit import ImageReader, run

from tierstore.errors import UnsupportedTypeError, UsageError
from tierstore.state import layout as layout_module
from tierstore.state import stage as stage_module
from tierstore.state.copying import Move, copy_all
from tierstore.state.image import ImagePool
from tierstore.state.load import load_state
from tierstore.state.stage import StagedState, stage
from tierstore.testing.equality import assert_same_state


@pytest.fixture
def pool() -> ImagePool:
    return ImagePool(None, max_nbytes=1 << 30)


def data_of(staged: StagedState) -> bytes:
    return bytes(run(staged.source.read(0, staged.nbytes)))


def test_changing_the_state_afterwards_changes_nothing(pool: ImagePool) -> None:
    model = torch.nn.Linear(300, 300)
    state = {"model": model.state_dict(), "t": torch.arange(9.0).view(3, 3).t(), "extra": {"lr": [0.1]}}
    before = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "t": state["t"].clone(), "extra": {"lr": [0.1]}}
    staged = stage(state, pool=pool)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    state["t"].zero_()
    state["extra"]["lr"][0] = 0.5
    loaded = load_state(ImageReader([staged]), run)
    assert_same_state({**loaded, "model": dict(loaded["model"])}, before)


def test_the_image_is_a_plain_safetensors_file(pool: ImagePool, tmp_path: Path) -> None:
    state = {
        "a": torch.randn(5, 3),
        "b": {"c": torch.arange(4), "e": torch.empty(0, 2)},
        "h": torch.randn(7).bfloat16(),
        "z": torch.tensor(True),
    }
    staged = stage(state, pool=pool)
    path = tmp_path / "shard.safetensors"
    path.write_bytes(data_of(staged))
    want = {"a": state["a"], "b.c": state["b"]["c"], "b.e": state["b"]["e"], "h": state["h"], "z": state["z"]}
    with safetensors.safe_open(str(path), framework="pt") as opened:
        assert set(opened.keys()) == set(want)
        assert_same_state({name: opened.get_tensor(name) for name in want}, want)


def test_saving_the_same_state_twice_gives_the_same_bytes_in_the_same_memory(pool: ImagePool) -> None:
    state = {"w": torch.randn(100, 100), "step": torch.tensor(3)}
    first = stage(state, pool=pool)
    data = data_of(first)
    first.release()
    held = pool.nbytes
    second = stage(state, pool=pool)
    assert data_of(second) == data
    assert pool.nbytes == held


def test_the_layout_is_planned_once_per_structure(pool: ImagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    real = layout_module.plan_shard
    monkeypatch.setattr(layout_module, "plan_shard", lambda *a, **k: plans.append(1) or real(*a, **k))
    state: dict[str, Any] = {"w": torch.randn(10), "n": 1}
    for step in range(5):
        state["n"] = step
        state["w"] = torch.full((10,), float(step))
        staged = stage(state, pool=pool)
        assert_same_state(load_state(ImageReader([staged]), run), state)
        staged.release()
    assert len(plans) == 1
    for changed in ({"w": torch.randn(11)}, {"w": torch.randn(10).double()}, {"v": torch.randn(10)}, {"w": state["w"], "v": state["w"]}):
        staged = stage(changed, pool=pool)
        assert_same_state(load_state(ImageReader([staged]), run), changed)
        staged.release()
    assert len(plans) == 5


def test_old_bytes_of_a_recycled_image_never_show(pool: ImagePool) -> None:
    big = stage({"w": torch.full((1000,), 7.0)}, pool=pool)
    nbytes = big.nbytes
    big.release()
    small = stage({"w": torch.zeros(10)}, pool=pool)
    assert small.nbytes == small.source.nbytes < nbytes
    assert_same_state(load_state(ImageReader([small]), run), {"w": torch.zeros(10)})


def test_two_saves_in_flight_have_memory_of_their_own(pool: ImagePool) -> None:
    weight = torch.zeros(1000)
    first = stage({"w": weight}, pool=pool)
    weight.fill_(5.0)
    second = stage({"w": weight}, pool=pool)
    for staged, value in ((first, 0.0), (second, 5.0)):
        assert_same_state(load_state(ImageReader([staged]), run), {"w": torch.full((1000,), value)})


def test_the_image_is_released_when_copying_fails(pool: ImagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(stage_module, "copy_all", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        stage({"w": torch.ones(10)}, pool=pool)
    monkeypatch.undo()
    assert not pool._busy


def test_a_refused_object_takes_no_memory(pool: ImagePool) -> None:
    with pytest.raises(UnsupportedTypeError):
        stage({"w": torch.ones(10), "s": {object()}}, pool=pool)
    assert pool.nbytes == 0


def test_release_twice_is_one_release(pool: ImagePool) -> None:
    first = stage({"w": torch.ones(10)}, pool=pool)
    first.release()
    second = stage({"w": torch.zeros(10)}, pool=pool)
    first.release()
    third = stage({"w": torch.ones(10)}, pool=pool)
    assert_same_state(load_state(ImageReader([second]), run), {"w": torch.zeros(10)})
    third.release()


def test_the_source_gives_read_only_views_and_refuses_what_is_outside(pool: ImagePool) -> None:
    staged = stage({"w": torch.ones(10)}, pool=pool)
    view = run(staged.source.read(8, 100))
    assert view.readonly
    assert view.nbytes == 100
    with pytest.raises(UsageError):
        run(staged.source.read(staged.nbytes - 1, 2))


def test_times_say_where_the_stall_went(pool: ImagePool) -> None:
    seconds = stage({"w": torch.ones(10)}, pool=pool).seconds
    assert min(seconds.plan_s, seconds.wait_s, seconds.copy_s) > 0


def test_ranks_write_files_and_names_of_their_own(pool: ImagePool) -> None:
    parts = [stage({"w": torch.full((3,), float(rank)), "rank": rank}, rank=rank, world_size=3, pool=pool) for rank in range(3)]
    reader = ImageReader(parts)
    assert set(reader.files) == {f"shard-0000{rank}-of-00003.safetensors" for rank in range(3)}
    assert reader.index.names() == ["w", "w@rank1", "w@rank2"]
    for rank in range(3):
        assert_same_state(load_state(reader, run, rank=rank), {"w": torch.full((3,), float(rank)), "rank": rank})
        into = {"w": torch.empty(3), "rank": None}
        load_state(reader, run, rank=rank, into=into)
        assert_same_state(into, {"w": torch.full((3,), float(rank)), "rank": rank})


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_large_tensors_are_copied_in_pieces_by_any_number_of_threads(threads: int) -> None:
    sizes = [0, 1, 5_000_001, 40 << 20, 16 << 20, 3]
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    tensors += [torch.randn(300, 200).t(), torch.randn(1, 5).expand(1000, 5)]
    moves, at = [], 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.itemsize
        moves.append(Move(tensor=tensor, begin=at, nbytes=nbytes))
        at += -(-nbytes // 64) * 64
    image = bytearray(at)
    copy_all(moves, memoryview(image), threads=threads)
    for move, tensor in zip(moves, tensors, strict=True):
        got = torch.frombuffer(image, dtype=tensor.dtype, count=tensor.numel(), offset=move.begin) if tensor.numel() else torch.empty(0)
        assert torch.equal(got.view(tensor.shape), tensor.to(got.dtype))


def test_the_header_names_aliases_and_true_dtypes(pool: ImagePool) -> None:
    weight = torch.ones(4)
    data = data_of(stage({"a": weight, "b": weight, "c": torch.ones(2, dtype=torch.complex128)}, pool=pool))
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    own = json.loads(header["__metadata__"]["tierstore"])
    assert own["aliases"] == {"b": "a"}
    assert own["dtypes"] == {"c": "complex128"}
    assert header["c"]["dtype"] == "U8"


def test_a_callers_default_device_and_dtype_do_not_matter(pool: ImagePool) -> None:
    state = {"w": torch.ones(3), "t": torch.ones(2, 3).t(), "s": torch.eye(2).to_sparse()}
    with torch.device("meta"):
        staged = stage(state, pool=pool)
        loaded = load_state(ImageReader([staged]), run)
        into = load_state(ImageReader([staged]), run, into=dict(state))
    assert_same_state(loaded, {**state, "t": state["t"].contiguous()})
    assert_same_state(into, state)


def test_twenty_saves_take_the_memory_of_one(pool: ImagePool) -> None:
    state = {str(i): torch.full((1 << 20,), float(i)) for i in range(8)}  # 32 MiB

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * 4096

    for _ in range(2):
        stage(state, pool=pool).release()
    before = resident()
    for _ in range(20):
        stage(state, pool=pool).release()
    assert resident() - before < 16 << 20
