"""Foreign checkpoints opened where they lie: every writer's every value comes back bit by bit, and slices cost what they are long."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adopt_kit import INDEX, any_dtype, assert_bits, blank_like, every_dtype, hugging_face, quietly, save_dcp
from ranks_kit import run_ranks
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat

import tierstore
from tierstore.errors import FormatError, IncompleteError, NotFoundError, StateMismatchError, UnsupportedTypeError, UsageError
from tierstore.testing.equality import assert_same_state

AWKWARD: dict[str, torch.Tensor] = {
    "zero_d": torch.tensor(3.25),
    "empty": torch.zeros(0, 3),
    "one": torch.arange(7),
    "matrix": torch.arange(600.0).view(20, 30),
}


def test_a_hugging_face_folder_of_one_file(tmp_path: Path) -> None:
    wanted = {**AWKWARD, **every_dtype(safetensors=True)}
    with tierstore.open_foreign(hugging_face(tmp_path / "hf", [wanted])) as checkpoint:
        assert_bits(checkpoint.state(), wanted)
        assert "not verified" in repr(checkpoint)
        assert checkpoint["t.float4_e2m1fn_x2"].shape == (3, 4)
        assert torch.equal(checkpoint["matrix"][3:5, 7], wanted["matrix"][3:5, 7])
        into = {name: torch.zeros_like(tensor) for name, tensor in AWKWARD.items()}
        assert checkpoint.load(into=into, names=list(AWKWARD)) is into
        assert_bits(into, AWKWARD)


def test_a_hugging_face_folder_of_several_files_and_by_its_index(tmp_path: Path) -> None:
    parts = [{"model.a": torch.randn(5, 4), "model.b": torch.ones(3)}, {"model.c": torch.randn(2, 2)}]
    folder = hugging_face(tmp_path / "hf", parts)
    save_file({"model.a": torch.zeros(1)}, folder / "consolidated.safetensors")  # not in the index: not ours
    for place in (folder, folder / INDEX, str(folder) + "/", f"file://{folder}"):
        with tierstore.open_foreign(place) as checkpoint:
            assert_bits(checkpoint.load(), {**parts[0], **parts[1]})
    nested = {"model": {"a": torch.zeros(5, 4), "b": torch.zeros(3), "c": torch.zeros(2, 2)}}
    with tierstore.open_foreign(folder) as checkpoint:
        checkpoint.load(into=nested)  # flat names fill any nesting
    assert_bits(nested["model"], {"a": parts[0]["model.a"], "b": parts[0]["model.b"], "c": parts[1]["model.c"]})


def test_the_links_of_hugging_face_s_cache_are_followed(tmp_path: Path) -> None:
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    hugging_face(blobs, [AWKWARD])
    snapshot.mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    for place in (snapshot, snapshot / "model.safetensors"):
        with tierstore.open_foreign(place) as checkpoint:
            assert_bits(checkpoint.state(), AWKWARD)


@pytest.mark.parametrize(
    "writer",
    [{}, {"thread_count": 3}, {"single_file_per_rank": False}, {"serialization_format": SerializationFormat.SAFETENSORS}],
    ids=["plain", "threads", "a file each", "safetensors"],
)
def test_a_dcp_directory_in_each_of_its_shapes(tmp_path: Path, writer: dict[str, Any]) -> None:
    plain = "serialization_format" in writer
    tensors = {**AWKWARD, **every_dtype(safetensors=plain)}
    if plain:
        tensors = {n: t for n, t in tensors.items() if "e8m0" not in n and "float4" not in n}  # no names of torch's in safetensors
    else:
        tensors["strided"] = torch.arange(35.0).view(5, 7).t()
        tensors["channels_last"] = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    state = {"model": dict(tensors), "optim": {"groups": [{"lr": 0.5, "w": torch.ones(2)}], "step": 7, "note": "x"}}
    if plain:
        state = {"model": state["model"]}  # an object before it makes the whole file unreadable (NEIGHBOURS E2)
    folder = save_dcp(state, tmp_path / "dcp", **writer)
    with tierstore.open_foreign(folder) as checkpoint:
        loaded = checkpoint.state()
        assert_bits(loaded["model"], tensors)
        if not plain:
            assert loaded["optim"]["step"] == 7
            assert loaded["optim"]["groups"][0]["lr"] == 0.5
            assert torch.equal(checkpoint["model.strided"][2:4, 1:3], tensors["strided"][2:4, 1:3])
        into = {"model": {n: blank_like(t) for n, t in tensors.items()}}
        checkpoint.load(into=into, names=["model.*"])
        assert_bits(into["model"], tensors)


def _save_sharded(rank: int, world_size: int, folder: Path, *, rows: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(rows * 6.0).view(rows, 6)
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "same": distribute_tensor(whole, mesh, [Replicate()]),
        "plain": torch.arange(4),
    }
    quietly(dcp.save, {"model": state}, checkpoint_id=str(folder / "dcp"))
    quietly(dcp.save, state, storage_writer=HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True))


def _load_rows(rank: int, world_size: int, folder: Path, *, rows: int) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(rows * 6.0).view(rows, 6)
    facts = []
    for name, state in (("dcp", {"model": {}}), ("hf", {})):
        inner: dict[str, Any] = state["model"] if name == "dcp" else state
        inner["rows"] = distribute_tensor(torch.zeros(rows, 6), mesh, [Shard(1)])
        inner["columns"] = distribute_tensor(torch.zeros(rows, 6), mesh, [Shard(0)])
        with tierstore.open_foreign(folder / name) as checkpoint:
            checkpoint.load(into=state, names=["*rows", "*columns"])
        facts += [torch.equal(inner[n].full_tensor(), whole) for n in ("rows", "columns")]
    return facts


def test_what_four_ranks_wrote_with_stock_dcp_fills_the_dtensors_of_three(tmp_path: Path) -> None:
    run_ranks(4, _save_sharded, tmp_path, rows=10)
    whole = torch.arange(60.0).view(10, 6)
    wanted = {"rows": whole, "columns": whole, "same": whole, "plain": torch.arange(4)}
    with tierstore.open_foreign(tmp_path / "dcp") as checkpoint:
        assert_bits(checkpoint.state()["model"], wanted)
        assert len(checkpoint.replica.index.find("model.rows").extents) == 4
    with tierstore.open_foreign(tmp_path / "hf", shapes=wanted) as checkpoint:
        assert_bits(checkpoint.state(), wanted)
    assert run_ranks(3, _load_rows, tmp_path, rows=10) == [[True] * 4] * 3


def test_lost_and_stale_shards_of_the_hugging_face_writer_are_refused_by_name(tmp_path: Path) -> None:
    """NEIGHBOURS E11 and E21: stock DCP loads all of these, with wrong or uninitialised rows."""
    run_ranks(4, _save_sharded, tmp_path / "four", rows=12)
    run_ranks(2, _save_sharded, tmp_path / "two", rows=12)
    run_ranks(2, _save_sharded, tmp_path / "small", rows=6)
    shards = sorted((tmp_path / "four" / "hf").iterdir())
    wanted = {"rows": torch.zeros(12, 6), "columns": torch.zeros(12, 6), "same": torch.zeros(12, 6), "plain": torch.zeros(4)}

    def lacking(number: int) -> Path:
        folder = tmp_path / f"lacks-{number}"
        shutil.copytree(tmp_path / "four" / "hf", folder)
        (folder / shards[number].name).unlink()
        return folder

    for number in (0, 1, 2):  # a middle shard, or the first one
        with pytest.raises(IncompleteError, match=re.escape(shards[number].name)):
            tierstore.open_foreign(lacking(number))
    with pytest.raises(IncompleteError, match=r"should have the shape|no file holds"):
        tierstore.open_foreign(lacking(3), shapes=wanted)

    mixed = tmp_path / "mixed"  # 4 ranks, then 2 into the same folder: the shards of ranks 2 and 3 are stale
    shutil.copytree(tmp_path / "four" / "hf", mixed)
    shutil.copytree(tmp_path / "two" / "hf", mixed, dirs_exist_ok=True)
    with pytest.raises(IncompleteError, match=r"tensor 'columns'.* overlaps the chunk in 'shard-0000"):
        tierstore.open_foreign(mixed)

    shrunk = tmp_path / "shrunk"  # stale rows behind the end of a smaller tensor: no overlap tells, the shapes do
    shutil.copytree(tmp_path / "four" / "hf", shrunk)
    shutil.copytree(tmp_path / "small" / "hf", shrunk, dirs_exist_ok=True)
    with pytest.raises(IncompleteError):
        tierstore.open_foreign(shrunk, shapes={name: t[:6] if name != "plain" else t for name, t in wanted.items()})


def test_a_torch_save_file_keeps_its_tree_its_ties_and_its_strides(tmp_path: Path) -> None:
    weight = torch.randn(8, 4)
    state: dict[str, Any] = {
        "model": {"emb": weight, "head": weight, "t": torch.arange(6.0).view(2, 3).t(), **AWKWARD, **every_dtype(safetensors=False)},
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "m": torch.ones(2)}},
            "param_groups": [{"lr": 0.1, "params": [0], "betas": (0.9, 0.99)}],
        },
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "bytes": b"\x00\xff",
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "view": weight[2:4],
        "expanded": torch.ones(1).expand(5),
    }
    torch.save(state, tmp_path / "state.pt")
    with tierstore.open_foreign(tmp_path / "state.pt") as checkpoint:
        loaded = checkpoint.state()
        assert_same_state(loaded, state)
        assert loaded["model"]["emb"] is loaded["model"]["head"]
        assert torch.equal(checkpoint["model.t"][1:, :1], state["model"]["t"][1:, :1])
        assert torch.equal(checkpoint["view"][1], weight[3])


def test_a_module_s_state_dict_saved_by_torch(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    with tierstore.open_foreign(tmp_path) as checkpoint:
        assert_same_state(checkpoint.state(), module.state_dict())


def test_several_bin_files_by_their_index(tmp_path: Path) -> None:
    parts = [{"a": torch.ones(2)}, {"b": torch.zeros(3)}]
    for number, part in enumerate(parts, 1):
        torch.save(part, tmp_path / f"pytorch_model-{number}.bin")
    weight_map = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with tierstore.open_foreign(tmp_path) as checkpoint:
        assert_bits(checkpoint.state(), {**parts[0], **parts[1]})


def test_tierstore_s_own_shards_are_plain_safetensors_too(tmp_path: Path) -> None:
    wanted = {**AWKWARD, **every_dtype(safetensors=False)}
    with tierstore.open([tmp_path / "tier"], run="r") as store:
        store.save(1, wanted).wait("durable", 200)
    (shard,) = tmp_path.rglob("shard-*.safetensors")
    for place in (shard, shard.parent):
        if place == shard.parent:
            for other in ("index.safetensors", "part-00000.safetensors"):
                (shard.parent / other).rename(shard.parent / f"{other}.kept")
        with tierstore.open_foreign(place) as checkpoint:
            assert_bits(checkpoint.state(), wanted)


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_a_slice_reads_only_its_rows(tmp_path: Path, kind: str) -> None:
    big = torch.arange(4 << 20, dtype=torch.int32).view(4096, 1024)  # 16 MiB
    if kind == "safetensors":
        place = hugging_face(tmp_path / "c", [{"big": big}])
    elif kind == "torch":
        place = tmp_path / "c.pt"
        torch.save({"big": big}, place)
    else:
        place = save_dcp({"big": big}, tmp_path / "c")
    with tierstore.open_foreign(place) as checkpoint:
        reader: Any = checkpoint.replica
        assert torch.equal(checkpoint["big"][1000:1256], big[1000:1256])
        assert (reader.requests, reader.bytes_fetched) == (1, 1 << 20)
        assert torch.equal(checkpoint["big"][:, 5], big[:, 5])


def test_a_transposed_tensor_beyond_the_budget_is_put_in_order_slab_by_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.state.foreign.reader.BUDGET_NBYTES", 1000)
    monkeypatch.setattr("tierstore.state.foreign.reader._SLAB_NBYTES", 4000)
    tensors = {
        "t": torch.randn(40, 50).t(),
        "channels_last": torch.randn(3, 4, 5, 6).contiguous(memory_format=torch.channels_last),
        "every_other": torch.arange(400.0).view(20, 20)[::2, 1::3],
        "expanded": torch.randn(7, 1, 5).expand(7, 30, 5),
    }
    torch.save(tensors, tmp_path / "c.pt")
    with tierstore.open_foreign(tmp_path / "c.pt") as checkpoint:
        assert_bits(checkpoint.state(), tensors)
        assert torch.equal(checkpoint["t"][7:30, 3:9], tensors["t"][7:30, 3:9])


def test_strictness_is_that_of_any_load(tmp_path: Path) -> None:
    with tierstore.open_foreign(hugging_face(tmp_path / "hf", [{"a": torch.ones(2)}])) as checkpoint:
        with pytest.raises(StateMismatchError):
            checkpoint.load(into={"a": torch.zeros(3)})
        with pytest.raises(NotFoundError, match="nearest are 'a'"):
            checkpoint["aa"]
        checkpoint.close()
    checkpoint.close()  # twice is once


def test_objects_of_foreign_classes_are_refused_by_place_or_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import argparse

    state = {"a": torch.ones(2), "args": argparse.Namespace(x=1), "list": [1, argparse.Namespace()]}
    torch.save(state, tmp_path / "s.pt")
    folder = save_dcp({"m": {"a": torch.ones(2)}, "args": argparse.Namespace(x=1), "n": 3}, tmp_path / "dcp")
    with pytest.raises(UnsupportedTypeError, match=r"state\['args'\] is a argparse.Namespace.*state\['list'\]"):
        tierstore.open_foreign(tmp_path / "s.pt")
    with tierstore.open_foreign(tmp_path / "s.pt", skip_objects=True) as checkpoint:
        loaded = checkpoint.state()
        assert set(loaded) == {"a", "list"}
        assert loaded["list"] == [1, None]
    with tierstore.open_foreign(folder) as checkpoint:
        assert torch.equal(checkpoint["m.a"].full(), torch.ones(2))  # the tensors don't need the objects
        with pytest.raises(UnsupportedTypeError, match=r"argparse\.Namespace"):
            checkpoint.state()
    with tierstore.open_foreign(folder, skip_objects=True) as checkpoint:
        assert set(checkpoint.state()) == {"m", "n"}
    assert "left out" in caplog.text


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_tensors_of_a_torch_save_file_are_read_by_their_components(tmp_path: Path) -> None:
    dense = torch.tensor([[0.0, 2, 0, 0], [1, 0, 0, 3]])
    twice = torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 4))
    state = {
        "coo": dense.to_sparse(),
        "uncoalesced": twice,
        "list": [dense.to_sparse_csr(), dense.to_sparse_bsc((2, 2))],
        "parameter": torch.nn.Parameter(dense.to_sparse()),
        "none": torch.zeros(2, 4).to_sparse(),
    }
    torch.save(state, tmp_path / "s.pt")
    with tierstore.open_foreign(tmp_path / "s.pt") as checkpoint:
        assert {"coo.indices", "coo.values", "list.0.crow_indices"} <= set(checkpoint)
        assert_same_state(checkpoint.state(), state)
    with tierstore.open([str(tmp_path / "tier")], run="r") as store:
        store.adopt(tmp_path / "s.pt", step=1).wait("durable", 200)
        assert_same_state(store.load(1), state)


def test_what_is_there_is_told_where_it_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no files"):
        tierstore.open_foreign(tmp_path / "nothing")
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "inner" / "notes.txt").write_text("x")
    with pytest.raises(NotFoundError, match="it has the folders inner") as caught:
        tierstore.open_foreign(tmp_path / "outer")
    assert str(tmp_path / "outer" / "inner") in str(caught.value.hint)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match="no checkpoint that is known"):
        tierstore.open_foreign(tmp_path)
    with pytest.raises(UsageError, match="format is"):
        tierstore.open_foreign(tmp_path, format="tar")  # type: ignore[arg-type]
    torch.save({"a": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match="no zip archive"):
        tierstore.open_foreign(tmp_path / "old.pt")
    torch.save({"a": torch.ones(1)}, tmp_path / "new.pt")
    with pytest.raises(UsageError, match=r"new\.pt, old\.pt"):
        tierstore.open_foreign(tmp_path)


def test_a_dtype_that_torch_has_not_is_refused_by_name(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(FormatError, match="'x' has dtype F6_E2M3"):
        tierstore.open_foreign(tmp_path / "m.safetensors")
    assert any_dtype("bfloat16").dtype is torch.bfloat16


def test_each_kind_is_read_from_a_remote_file_system_too(tmp_path: Path) -> None:
    import fsspec

    state = {"model": {"w": torch.arange(600.0).view(20, 30), "t": torch.arange(6.0).view(2, 3).t()}, "step": 4}
    save_dcp(state, tmp_path / "dcp")
    hugging_face(tmp_path / "hf", [{"a": torch.ones(3)}, {"b": torch.zeros(2)}])
    torch.save(state, tmp_path / "s.pt")
    memory = fsspec.filesystem("memory")
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        memory.pipe_file(f"/foreign/{path.relative_to(tmp_path)}", path.read_bytes())
    try:
        for place in ("memory://foreign/dcp", "memory://foreign/s.pt"):
            with tierstore.open_foreign(place) as checkpoint:
                loaded = checkpoint.state()
                assert_bits(loaded["model"], state["model"])
                assert loaded["step"] == 4
                assert torch.equal(checkpoint["model.w"][3:5, 7:9], state["model"]["w"][3:5, 7:9])
        for place in ("memory://foreign/hf", f"memory://foreign/hf/{INDEX}"):
            with tierstore.open_foreign(place) as checkpoint:
                assert_bits(checkpoint.state(), {"a": torch.ones(3), "b": torch.zeros(2)})
    finally:
        memory.rm("/foreign", recursive=True)


def test_a_folder_may_have_a_file_s_name_and_a_file_none(tmp_path: Path) -> None:
    with tierstore.open_foreign(hugging_face(tmp_path / "run.pt", [AWKWARD])) as checkpoint:
        assert_bits(checkpoint.state(), AWKWARD)
    torch.save({"a": torch.ones(2)}, tmp_path / "checkpoint")
    with tierstore.open_foreign(tmp_path / "checkpoint") as checkpoint:
        assert_bits(checkpoint.state(), {"a": torch.ones(2)})
    save_file({"a": torch.ones(2)}, tmp_path / "weights")
    with tierstore.open_foreign(tmp_path / "weights") as checkpoint:
        assert_bits(checkpoint.state(), {"a": torch.ones(2)})
