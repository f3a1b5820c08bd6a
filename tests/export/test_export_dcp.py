"""``--format dcp`` and ``--format torch``: read back by stock torch, nested, in other layouts, with `weights_only`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from export_kit import assert_tensors, hf_tensors, numbers, saved
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from tierstore.errors import RefusedError, UnsupportedTypeError, UsageError
from tierstore.state.export.exporting import ExportOptions
from tierstore.testing.equality import assert_same_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


def options(**given: Any) -> ExportOptions:
    return ExportOptions(**{"budget": "32MiB", "format": "dcp", **given})


def state() -> dict[str, Any]:
    shared = numbers(50, 8)
    return {
        "model": {
            "embed": shared,
            "head": shared,
            "scalar": torch.tensor(2.5),
            "int": numbers(3, 2, dtype=torch.int64),
            "bool": torch.tensor([True, False]),
            "empty": torch.zeros(0, 4),
            "transposed": numbers(6, 4).T,
            "bf16": numbers(9, dtype=torch.bfloat16),
            "fp8": numbers(5).to(torch.float8_e4m3fn),
            "complex": numbers(4).to(torch.complex128),
            "large": torch.rand(1, 700, 9000),
        },
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": numbers(50, 8)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}],
        },
        "pair": (numbers(3), "text"),
        "list": [numbers(2), {"a": numbers(1)}],
        "step": 12,
    }


def emptied(node: Any) -> Any:
    """The same structure without any of its values."""
    if isinstance(node, torch.Tensor):
        return torch.zeros(node.shape, dtype=node.dtype)
    if isinstance(node, dict):
        return {key: emptied(item) for key, item in node.items()}
    if isinstance(node, list):
        return [emptied(item) for item in node]
    return None


def test_stock_dcp_loads_the_whole_nested_state(tmp_path: Path) -> None:
    with saved(tmp_path, state()) as checkpoint:
        truth = checkpoint.state()
        done = checkpoint.export(tmp_path / "dcp", options(max_shard_size="10MB"))
    assert len([f for f in done.files if f.name.endswith(".distcp")]) == 3
    assert done.files[-1].name == ".metadata"
    assert done.tied == {"model.head": "model.embed"}
    assert done.left_out == ()
    into = emptied(truth)
    dcp.load(into, checkpoint_id=tmp_path / "dcp")
    assert_same_state(into, truth)
    metadata = FileSystemReader(tmp_path / "dcp").read_metadata()
    large = metadata.state_dict_metadata["model.large"]
    assert isinstance(large, TensorStorageMetadata)
    assert len(large.chunks) > 10  # cut along its second axis: the first has one index
    assert isinstance(metadata.state_dict_metadata["pair"], BytesStorageMetadata)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "state.pt")
    again = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same_state(again["model"], truth["model"])
    assert again["step"] == 12


def test_tied_data_is_stored_once(tmp_path: Path) -> None:
    """E14: stock DCP stores it twice."""
    shared = torch.rand(1024, 1024)
    with saved(tmp_path, {"a": shared, "b": shared}) as checkpoint:
        done = checkpoint.export(tmp_path / "dcp", options())
    assert done.nbytes < 1.1 * shared.nbytes
    into = {"a": torch.zeros(1024, 1024), "b": torch.zeros(1024, 1024)}
    dcp.load(into, checkpoint_id=tmp_path / "dcp")
    assert_same_state(into, {"a": shared, "b": shared.clone()})


def test_a_choice_loses_its_prefix_in_the_nested_state_too(tmp_path: Path) -> None:
    with saved(tmp_path, state()) as checkpoint:
        truth = checkpoint.state()
        checkpoint.export(tmp_path / "dcp", options(strip="optim.", exclude=("*.exp_avg",)))
        rules = [{"match": "(embed)", "to": r"x.\1", "transpose": True}]
        checkpoint.export(tmp_path / "renamed", options(strip="model.", exclude=("*.large",), rules=rules, dtype="bfloat16"))
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "state.pt")
    assert_same_state(
        torch.load(tmp_path / "state.pt"), {"state": {"0": {"step": torch.tensor(3.0)}}, "param_groups": truth["optim"]["param_groups"]}
    )
    into = {
        "x.embed": torch.zeros(8, 50, dtype=torch.bfloat16),
        "head": torch.zeros(50, 8, dtype=torch.bfloat16),
        "int": torch.zeros(3, 2, dtype=torch.int64),
    }
    dcp.load(into, checkpoint_id=tmp_path / "renamed")
    model = truth["model"]
    assert_tensors(into, {"x.embed": model["embed"].T.bfloat16().contiguous(), "head": model["head"].bfloat16(), "int": model["int"]})


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_are_written_by_their_components_which_is_told_and_whole_by_torch_save(tmp_path: Path) -> None:
    dense = numbers(3, 3)
    with saved(tmp_path, {"m": {"s": dense.to_sparse_csr(), "w": dense}, "t": (dense.to_sparse(), 1)}) as checkpoint:
        done = checkpoint.export(tmp_path / "dcp", options())
        assert done.components["m.s"] == ("m.s.crow_indices", "m.s.col_indices", "m.s.values")
        assert not done.left_out
        hf = checkpoint.export(tmp_path / "hf", options(format="hf", strip="m."))
        assert list(hf.components) == ["m.s"]
        whole = checkpoint.export(tmp_path / "state.pt", options(format="torch", dtype="bfloat16"))
        assert not whole.components
    into = {"m": {"s": {"col_indices": torch.zeros(8, dtype=torch.int64), "values": torch.zeros(8)}, "w": torch.zeros(3, 3)}}
    dcp.load(into, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(into["m"]["s"]["values"], dense.to_sparse_csr().values())
    assert set(hf_tensors(tmp_path / "hf")) == {"s.crow_indices", "s.col_indices", "s.values", "w"}
    again = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(again["m"]["s"].to_dense(), dense.bfloat16())
    assert again["m"]["s"].layout is torch.sparse_csr
    assert again["t"][0].layout is torch.sparse_coo


def test_what_dcp_has_no_place_for_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with saved(tmp_path / "clash", {"a.b": 1, "a": {"b": 2}}) as checkpoint:
        with pytest.raises(UsageError, match="two places of the state get the same name"):
            checkpoint.export(tmp_path / "dcp", options())
    with saved(tmp_path / "list", [numbers(3)]) as checkpoint:
        with pytest.raises(UsageError, match="the state is no dict"):
            checkpoint.export(tmp_path / "dcp", options())
    assert not (tmp_path / "dcp").exists()


class Stop(Exception):
    """What interrupts."""


def test_an_export_is_replaced_as_a_whole_and_an_interrupted_one_has_no_metadata(tmp_path: Path) -> None:
    with saved(tmp_path, {f"w{i}": torch.rand(600, 512) for i in range(4)}) as checkpoint:
        checkpoint.export(tmp_path / "dcp", options(max_shard_size="1MiB"))
        with pytest.raises(RefusedError, match="is not empty"):
            checkpoint.export(tmp_path / "dcp", options())

        def stop(done: int, total: int) -> None:
            if done > 2 << 20:
                raise Stop

        with pytest.raises(Stop):
            checkpoint.export(tmp_path / "dcp", options(overwrite=True, max_shard_size="1MiB"), progress=stop)
        assert not (tmp_path / "dcp" / ".metadata").exists()
        checkpoint.export(tmp_path / "dcp", options(overwrite=True, max_shard_size="20MiB"))
    assert sorted(f.name for f in (tmp_path / "dcp").iterdir()) == [".metadata", "__0_0.distcp"]


class TestTorchSave:
    def test_the_whole_state_is_one_file_that_weights_only_reads(self, tmp_path: Path) -> None:
        value = state()
        value["model"]["p"] = torch.nn.Parameter(numbers(3))
        value["model"]["s"] = numbers(3, 3).to_sparse()
        with saved(tmp_path, value) as checkpoint:
            truth = checkpoint.state()
            done = checkpoint.export(tmp_path / "out" / "state.pt", options(format="torch"))
        assert [(f.name, f.nbytes) for f in done.files] == [("state.pt", (tmp_path / "out" / "state.pt").stat().st_size)]
        assert [f.name for f in (tmp_path / "out").iterdir()] == ["state.pt"]
        again = torch.load(tmp_path / "out" / "state.pt", weights_only=True)
        assert_same_state(again, truth)
        assert again["model"]["embed"] is again["model"]["head"]

    def test_chosen_tensors_are_a_flat_dict(self, tmp_path: Path) -> None:
        with saved(tmp_path, state()) as checkpoint:
            truth = checkpoint.state()["optim"]
            rules = [{"match": r"state\.0\.(.*)", "to": r"\1"}]
            checkpoint.export(tmp_path / "o.pt", options(format="torch", strip="optim.", rules=rules, dtype="bfloat16"))
        wanted = {name: value.bfloat16() for name, value in truth["state"][0].items()}
        assert_tensors(torch.load(tmp_path / "o.pt", weights_only=True), wanted)

    def test_a_dtype_alone_casts_the_floats_within_the_state(self, tmp_path: Path) -> None:
        base = numbers(8)
        with saved(tmp_path, {"a": {"w": base, "part": base[2:5], "n": numbers(3, dtype=torch.int64)}, "step": 3}) as checkpoint:
            checkpoint.export(tmp_path / "s.pt", options(format="torch", dtype="float16"))
        wanted = {"a": {"w": base.half(), "part": base[2:5].half(), "n": numbers(3, dtype=torch.int64)}, "step": 3}
        assert_same_state(torch.load(tmp_path / "s.pt", weights_only=True), wanted)

    def test_what_weights_only_would_refuse_is_named_and_nothing_is_written(self, tmp_path: Path) -> None:
        with saved(tmp_path, {"w": numbers(3), "rng": np.arange(3), "r": range(3)}) as checkpoint:
            with pytest.raises(UnsupportedTypeError, match=r"weights_only=False: .*numpy"):
                checkpoint.export(tmp_path / "s.pt", options(format="torch"))
            assert not (tmp_path / "s.pt").exists()
            checkpoint.export(tmp_path / "s.pt", options(format="torch", include=("*",)))
            with pytest.raises(RefusedError, match=r"s\.pt exists already"):
                checkpoint.export(tmp_path / "s.pt", options(format="torch", include=("*",)))
            checkpoint.export(tmp_path / "s.pt", options(format="torch", include=("*",), overwrite=True))
            with pytest.raises(UsageError, match="is a directory"):
                checkpoint.export(f"{tmp_path}/", options(format="torch"))
        assert_tensors(torch.load(io.BytesIO((tmp_path / "s.pt").read_bytes()), weights_only=True), {"w": numbers(3)})
