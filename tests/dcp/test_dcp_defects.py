"""The defects of stock DCP that were reproduced (NEIGHBOURS.md 1.11), each with the right behaviour through this door."""

from __future__ import annotations

import contextlib
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import IGNORED, causes, config, quiet, state
from ranks_kit import run_ranks
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import tierstore
import tierstore.dcp
from tierstore.dcp import TierStorageReader, TierStorageWriter
from tierstore.errors import IntegrityError, SaveError, TierStoreError
from tierstore.state.bits import as_bits
from tierstore.testing.equality import assert_same_state

pytestmark = pytest.mark.filterwarnings(IGNORED)


def one_tier(folder: Path, **save: Any) -> dict[str, Any]:
    return {"version": 1, "run": "r", "tiers": [{"name": "shared", "uri": str(folder / "shared")}], "save": save}


def saved(writer: TierStorageWriter, state_dict: dict[str, Any], step: int, **options: Any) -> None:
    tierstore.dcp.save(state_dict, storage_writer=writer, checkpoint_id=step, no_dist=True, **options)


def shards(folder: Path, tier: str = "shared") -> list[Path]:
    return sorted((folder / tier / "r").glob("step-*/shard-*.safetensors"))


def test_e1_an_error_of_the_storage_fails_the_save(tmp_path: Path) -> None:
    """E1: stock swallows an OSError of a writing thread; the save succeeds, and the load does not."""
    writer = TierStorageWriter(one_tier(tmp_path, patience="0.2s"))
    saved(writer, {"a": torch.ones(3)}, 1)
    run = tmp_path / "shared" / "r"
    run.rename(tmp_path / "aside")
    run.write_text("where the run's folder was")
    with pytest.raises(CheckpointException) as caught:
        saved(writer, {"a": torch.zeros(3)}, 2)
    [error] = causes(caught.value)
    assert isinstance(error, TierStoreError)
    assert "step 2" in str(error)
    run.unlink()
    try:
        (tmp_path / "aside").rename(run)
    except OSError:  # the image that was refused is tried again all the time: its folder came first
        shutil.copytree(tmp_path / "aside", run, dirs_exist_ok=True)
    saved(writer, {"a": torch.full((3,), 3.0)}, 3)
    with tierstore.open(one_tier(tmp_path)) as store:
        assert {info.step for info in store.checkpoints()} >= {1, 3}
        assert store.load(1)["a"].tolist() == [1, 1, 1]
        assert store.load(3)["a"].tolist() == [3, 3, 3]
    with contextlib.suppress(SaveError):  # the refused image may have been given up when its tier came back: then close tells
        writer.close()


def test_e2_values_that_are_no_tensors_leave_readable_safetensors(tmp_path: Path) -> None:
    """E2: stock's Hugging Face writer makes files that nothing reads."""
    writer = TierStorageWriter(config(tmp_path))
    saved(writer, {**state(), "text": "x" * 10_000}, 1)
    [shard] = shards(tmp_path)
    with safe_open(shard, "pt") as file:
        assert file.get_tensor("scalar").item() == 2.5  # and E3: a 0-d tensor is not 0
    writer.close()


def in_shards(whole: torch.Tensor, count: int, first: int = 0) -> torch.Tensor:
    """The rows of `whole` from `first` on, as a tensor that tells them as `count` shards."""
    rows = (whole.shape[0] - first) // count
    local: Any = whole[first:].clone()
    local.global_shape = tuple(whole.shape)
    local.global_offsets = tuple((first + n * rows, *(0,) * (whole.ndim - 1)) for n in range(count))
    local.local_offsets = tuple((n * rows, *(0,) * (whole.ndim - 1)) for n in range(count))
    local.local_sizes = ((rows, *whole.shape[1:]),) * count
    made: torch.Tensor = local
    return made


def test_e7_the_metadata_grows_with_the_tensors_and_not_with_their_chunks(tmp_path: Path) -> None:
    """E7: 3,000 tensors of 64 chunks are 26 MiB and seconds on every rank."""
    writer = TierStorageWriter(config(tmp_path))
    sizes = {}
    for count in (1, 64):
        saved(writer, {f"t{n}": in_shards(torch.arange(128.0).view(64, 2) + n, count) for n in range(20)}, count)
        reader = TierStorageReader(config(tmp_path))
        reader.reset(f"step-{count}")
        metadata = reader.read_metadata()
        assert all(len(entry.chunks) == 1 for entry in metadata.state_dict_metadata.values())
        sizes[count] = len(pickle.dumps(metadata.state_dict_metadata))
        into = {"t7": torch.zeros(64, 2)}
        dcp.load(into, storage_reader=reader, no_dist=True, checkpoint_id=f"step-{count}")
        assert torch.equal(into["t7"], torch.arange(128.0).view(64, 2) + 7)
        reader.close()
    assert sizes[64] == sizes[1]
    writer.close()


class Failing(tierstore.dcp.TierSavePlanner):
    """Fails when half of the tensors are written."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "b":
            raise OSError(5, "the device fell off the bus")
        return super().resolve_data(write_item)


def test_e8_a_save_that_fails_half_way_publishes_nothing_and_leaves_the_old_one(tmp_path: Path) -> None:
    """E8: stock publishes a truncated object. E8b: while it overwrites, neither the old nor the new checkpoint can be loaded."""
    writer = TierStorageWriter(config(tmp_path))
    old = {"a": torch.ones(1000), "b": torch.ones(1000)}
    saved(writer, old, 1)
    with pytest.raises(CheckpointException, match="fell off the bus"):
        saved(writer, {"a": torch.zeros(1000), "b": torch.zeros(1000)}, 1, planner=Failing())
    with tierstore.open(config(tmp_path)) as store:
        assert_same_state(store.load(1), old)
    assert len(shards(tmp_path)) == 1
    saved(writer, {"a": torch.zeros(1000)}, 1)
    with tierstore.open(config(tmp_path)) as store:
        assert_same_state(store.load(1), {"a": torch.zeros(1000)})
    writer.close()


def save_again(rank: int, world_size: int, folder: Path, value: float) -> Any:
    quiet()
    mesh = init_device_mesh("cpu", (world_size,))
    writer = TierStorageWriter(config(folder))
    dcp.save({"w": distribute_tensor(torch.full((12, 2), value), mesh, [Shard(0)])}, storage_writer=writer, checkpoint_id=1)
    writer.close()
    return None


def test_e11_a_step_saved_again_by_fewer_ranks_mixes_nothing(tmp_path: Path) -> None:
    """E11: stock's Hugging Face reader takes the old ranks' rows, without an error."""
    run_ranks(4, save_again, tmp_path, value=1.0)
    run_ranks(2, save_again, tmp_path, value=2.0)
    into = {"w": torch.zeros(12, 2)}
    reader = TierStorageReader(config(tmp_path))
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert into["w"].unique().tolist() == [2.0]
    reader.close()


def test_e21_a_lost_shard_in_the_middle_is_named_and_no_row_comes_uninitialised(tmp_path: Path) -> None:
    """E21: stock loads it with whatever was in memory."""
    run_ranks(3, save_again, tmp_path, value=1.0)
    for tier in ("node", "shared"):
        for shard in shards(tmp_path, tier):
            if "00001-of" in shard.name:
                shard.unlink()
    reader = TierStorageReader(config(tmp_path))
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(12, 2)}, storage_reader=reader, no_dist=True)
    [error] = causes(caught.value)
    assert isinstance(error, IntegrityError)
    assert "shard-00001-of-00003" in str(error)
    rows = {"w": in_shards(torch.zeros(12, 2)[:4], 1)}
    rows["w"].global_shape = (12, 2)  # type: ignore[attr-defined]
    tierstore.dcp.load(rows, storage_reader=reader, no_dist=True)  # what the other ranks wrote is there
    assert rows["w"].unique().tolist() == [1.0]
    reader.close()


DTYPES = [
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint16,
    torch.int64,
    torch.float16,
    torch.uint8,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_e12_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """E12: stock's safetensors path has no float4, float8_e8m0fnu and complex128."""
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * 4 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(6, 4)
    writer = TierStorageWriter(config(tmp_path))
    saved(writer, {"t": tensor}, 1)
    into = {"t": torch.zeros_like(raw).view(dtype).view(6, 4)}
    reader = TierStorageReader(config(tmp_path))
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert torch.equal(as_bits(into["t"]), as_bits(tensor))
    reader.close()
    writer.close()


def test_e13_tied_and_strided_tensors_are_saved_once_and_right(tmp_path: Path) -> None:
    """E13, E14: stock's Hugging Face writer refuses them, and DCP stores tied data twice."""
    big = torch.randn(1000, 100)
    strided = {"t": big[:50].t(), "every": big[::100], "expanded": torch.ones(1).expand(7), "last": big[:64].view(1, 4, 4, 400)}
    strided["last"] = strided["last"].contiguous(memory_format=torch.channels_last)
    tied = {"a": big, "b": big, "c": torch.nn.Parameter(big)}
    writer = TierStorageWriter(config(tmp_path))
    saved(writer, {**tied, **strided}, 1)
    [shard] = shards(tmp_path)
    assert shard.stat().st_size < 1.5 * big.nbytes
    into = {key: torch.zeros(value.shape) for key, value in {**tied, **strided}.items()}
    reader = TierStorageReader(config(tmp_path))
    dcp.load(into, storage_reader=reader, no_dist=True)
    for key, value in {**tied, **strided}.items():
        assert torch.equal(into[key], value), key
    with tierstore.open(config(tmp_path)) as store:
        loaded = store.load()
        assert loaded["a"] is loaded["b"]
        assert loaded["c"].data_ptr() == loaded["a"].data_ptr()
        assert isinstance(loaded["c"], torch.nn.Parameter)
    reader.close()
    writer.close()


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_e22_a_flipped_bit_is_found_and_another_tier_helps(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """E22: stock loads the flipped bit silently."""
    writer = TierStorageWriter(config(tmp_path))
    saved(writer, {"a": torch.arange(100_000.0)}, 1)
    writer.close()

    def hurt(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data if damage == "flip" else data[:-5])

    hurt(shards(tmp_path, "node")[0])
    into = {"a": torch.zeros(100_000)}
    reader = TierStorageReader(config(tmp_path))
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert torch.equal(into["a"], torch.arange(100_000.0))
    assert "passed over" in caplog.text
    hurt(shards(tmp_path, "shared")[0])
    with pytest.raises(CheckpointException) as caught:
        dcp.load(into, storage_reader=reader, no_dist=True, checkpoint_id="step-1")
    [error] = causes(caught.value)
    assert isinstance(error, IntegrityError)
    assert "shard-00000" in str(error)
    reader.close()


def test_e23_chunks_that_do_not_cover_their_tensor_are_refused_when_they_are_saved(tmp_path: Path) -> None:
    """E23: stock loads what there is, and leaves the rest as it was."""
    writer = TierStorageWriter(config(tmp_path))
    with pytest.raises(CheckpointException) as caught:
        saved(writer, {"half": in_shards(torch.arange(20.0).view(10, 2), 1, first=5)}, 1)
    assert "half" in str(causes(caught.value)[0])
    saved(writer, {"whole": torch.ones(2)}, 2)
    with tierstore.open(config(tmp_path)) as store:
        assert [info.step for info in store.checkpoints()] == [2]
    writer.close()


def test_a_planner_that_takes_a_shard_for_a_whole_tensor_is_refused(tmp_path: Path) -> None:
    """Torch's own before 2.14: of several ranks' shards it would keep one, as if it were all."""
    if hasattr(torch.distributed.checkpoint, "CheckpointableTensor"):
        return  # this torch knows them itself
    writer = TierStorageWriter(config(tmp_path))
    with pytest.raises(CheckpointException, match="TierSavePlanner"):
        dcp.save({"w": in_shards(torch.ones(4, 2), 2)}, storage_writer=writer, checkpoint_id=1, no_dist=True)
    writer.close()


def test_a_tensor_that_tells_its_shards_is_saved_and_loaded_by_them(tmp_path: Path) -> None:
    """CheckpointableTensor of torch 2.14, by its attributes: padding, several shards, and merged leading dimensions."""
    whole = torch.arange(48.0).view(4, 3, 4)
    padded: Any = torch.full((6, 3, 4), -1.0)
    padded[1:3], padded[3:5] = whole[2:4], whole[0:2]
    padded.global_shape, padded.local_sizes = (4, 3, 4), ((2, 3, 4), (2, 3, 4))
    padded.global_offsets, padded.local_offsets = ((2, 0, 0), (0, 0, 0)), ((1, 0, 0), (3, 0, 0))
    merged: Any = whole.view(12, 4).clone()
    merged.global_shape, merged.local_sizes = (4, 3, 4), ((4, 3, 4),)
    merged.global_offsets, merged.local_offsets = ((0, 0, 0),), ((0, 0),)
    writer = TierStorageWriter(config(tmp_path))
    saved(writer, {"padded": padded, "merged": merged, "plain": torch.ones(2)}, 1)
    with tierstore.open(config(tmp_path)) as store:
        loaded = store.load()
    assert torch.equal(loaded["padded"], whole)
    assert torch.equal(loaded["merged"], whole)
    kept = padded.clone()
    padded.fill_(-1.0)
    merged.fill_(-2.0)
    into = {"padded": merged, "merged": padded, "plain": torch.zeros(2)}
    reader = TierStorageReader(config(tmp_path))
    tierstore.dcp.load(into, storage_reader=reader, no_dist=True)
    assert torch.equal(padded, kept)
    assert torch.equal(merged.view(4, 3, 4), whole)
    wrong = torch.zeros(2)
    wrong.global_shape, wrong.local_sizes = (3,), ((2,),)  # type: ignore[attr-defined]
    wrong.global_offsets, wrong.local_offsets = ((0,),), ((0,),)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointException, match="Size mismatch"):
        tierstore.dcp.load({"plain": wrong}, storage_reader=reader, no_dist=True)
    reader.close()
    writer.close()
