"""A Hugging Face directory: read back by safetensors and transformers themselves, in every shape that stock writers get wrong."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_kit import assert_tensors, hf_tensors, numbers, saved, stored
from safetensors import safe_open
from safetensors.torch import load_file

from tierstore.errors import IntegrityError, NotFoundError, RefusedError, UnsupportedTypeError, UsageError
from tierstore.state.export.exporting import Exported, ExportOptions

MIB = 1 << 20


def options(**given: Any) -> ExportOptions:
    return ExportOptions(**{"budget": "32MiB", **given})


def test_a_model_out_of_a_training_state_is_chosen_by_name_and_prefix(tmp_path: Path) -> None:
    model = {"w": numbers(5, 3), "layers.0.b": numbers(4)}
    state = {"model": model, "optim": {"exp_avg": numbers(5, 3)}, "step": 7}
    with saved(tmp_path, state) as checkpoint:
        with pytest.raises(UsageError, match=r"several parts with tensors: model\.\* \(2\), optim\.\* \(1\)"):
            checkpoint.export(tmp_path / "hf")
        done = checkpoint.export(tmp_path / "hf", options(strip="model."))
        assert_tensors(load_file(tmp_path / "hf" / "model.safetensors"), model)
        assert [file.name for file in done.files] == ["model.safetensors"]
        assert done.left_out == ("optim.exp_avg",)
        assert done.nbytes == (tmp_path / "hf" / "model.safetensors").stat().st_size
        checkpoint.export(tmp_path / "all", options(include=("*",), exclude=("optim.*",)))
        assert set(load_file(tmp_path / "all" / "model.safetensors")) == {"model.w", "model.layers.0.b"}
        with pytest.raises(NotFoundError, match=r"nothing that is stored matches 'modle\.\*'"):
            checkpoint.export(tmp_path / "no", options(strip="modle."))


def test_everything_that_stock_writers_and_consolidation_get_wrong_comes_out_right(tmp_path: Path) -> None:
    """E3: 0-d tensors became 0, int64 and bool a TypeError. E12: dtypes. E13: non-contiguous a ValueError."""
    state = {
        "scalar": torch.tensor(3.25),
        "integer scalar": torch.tensor(-(2**40)),
        "int64": numbers(3, 4, dtype=torch.int64) - 5,
        "bool": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
        "transposed": numbers(4, 5).T,
        "expanded": numbers(1, 6).expand(3, 6),
        "channels last": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "strided": numbers(10, 10)[::2, 1::3],
        "bfloat16": numbers(7, dtype=torch.bfloat16),
        "float8_e4m3fn": numbers(7).to(torch.float8_e4m3fn),
        "float8_e5m2": numbers(7).to(torch.float8_e5m2),
        "complex64": torch.complex(numbers(3), numbers(3, start=9)),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "größe ✓": numbers(2),
    }
    with saved(tmp_path, state) as checkpoint:
        checkpoint.export(tmp_path / "hf", options(max_shard_size="1MiB"))
    assert_tensors(hf_tensors(tmp_path / "hf"), {name: value.contiguous() for name, value in state.items()})


def test_values_that_are_no_tensors_do_not_make_an_unreadable_file(tmp_path: Path) -> None:
    """E2: the stock writer makes a file whose header is too large."""
    with saved(tmp_path, {"w": numbers(3), "step": 7, "config": {"a": [1, 2]}, "note": "x" * 1000}) as checkpoint:
        checkpoint.export(tmp_path / "hf", options())
    assert_tensors(load_file(tmp_path / "hf" / "model.safetensors"), {"w": numbers(3)})


def test_dtypes_that_readers_of_safetensors_raise_on_go_as_their_bytes_and_are_told(tmp_path: Path, caplog: Any) -> None:
    """E12: F4 and F8_E8M0 are a KeyError in stock readers; complex128 is no dtype of safetensors at all."""
    raw = torch.arange(12, dtype=torch.uint8)
    state = {
        "scale": raw.view(torch.float8_e8m0fnu).view(3, 4),
        "blocks": raw.view(torch.float4_e2m1fn_x2),
        "c": numbers(2).to(torch.complex128),
    }
    with saved(tmp_path, state) as checkpoint:
        with pytest.raises(UnsupportedTypeError, match="tensor 'c' is complex128"):
            checkpoint.export(tmp_path / "hf", options())
        assert not (tmp_path / "hf").exists()
        with caplog.at_level(logging.WARNING, "tierstore"):
            checkpoint.export(tmp_path / "hf", options(exclude=("c",)))
    assert "2 tensors go as U8" in caplog.text
    assert_tensors(load_file(tmp_path / "hf" / "model.safetensors"), {"scale": raw.view(3, 4), "blocks": raw})


def test_tied_tensors_are_written_once_under_the_first_name_or_under_each(tmp_path: Path) -> None:
    """E13: the stock writer raises RuntimeError."""
    shared = numbers(6, 4)
    state = {"model": {"embed.weight": shared, "head.weight": shared, "alike": shared.clone()}}
    with saved(tmp_path, state) as checkpoint:
        done = checkpoint.export(tmp_path / "once", options(strip="model."))
        assert done.tied == {"head.weight": "embed.weight"}
        assert_tensors(load_file(tmp_path / "once" / "model.safetensors"), {"embed.weight": shared, "alike": shared})
        checkpoint.export(tmp_path / "copy", options(strip="model.", tied="copy"))
        found = load_file(tmp_path / "copy" / "model.safetensors")
        assert_tensors(found, {"embed.weight": shared, "head.weight": shared.clone(), "alike": shared.clone()})
        rules = [{"match": "(.*)", "to": r"x.\1"}]
        assert checkpoint.export(tmp_path / "named", options(strip="model.", rules=rules)).tied == {"x.head.weight": "x.embed.weight"}


def test_floats_are_cast_and_nothing_else(tmp_path: Path, caplog: Any) -> None:
    state = {
        "w": torch.randn(300, 77),
        "double": torch.randn(3, dtype=torch.float64),
        "ids": numbers(5, dtype=torch.int64),
        "mask": torch.ones(3).bool(),
    }
    state |= {"fp8": numbers(4).to(torch.float8_e4m3fn), "half": torch.tensor([1e-7, 2.0]).half(), "large": torch.tensor([1e5, -1e5, 1.0])}
    with saved(tmp_path, state) as checkpoint:
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            name = str(dtype).removeprefix("torch.")
            checkpoint.export(tmp_path / name, options(dtype=name))
            wanted = {k: v.to(dtype) if k in ("w", "double", "half", "large") else v for k, v in state.items()}
            assert_tensors(load_file(tmp_path / name / "model.safetensors"), wanted)
        with caplog.at_level(logging.WARNING, "tierstore"):
            checkpoint.export(tmp_path / "float16", options(dtype="float16"))
        assert "tensor=large 2 values are infinite in float16" in caplog.text
        with pytest.raises(UsageError, match="dtype='int8'"):
            options(dtype="int8")


def test_files_are_bounded_and_named_and_indexed_as_transformers_does(tmp_path: Path) -> None:
    state = {f"layer.{i}": torch.rand(256, 256 * (1 + i % 3)) for i in range(9)} | {"large": torch.rand(1024, 1024), "tiny": torch.rand(3)}
    with saved(tmp_path, state) as checkpoint:
        done = checkpoint.export(tmp_path / "hf", options(max_shard_size="1MiB"))
    folder = tmp_path / "hf"
    files = sorted(folder.glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert done.files[-1].name == "model.safetensors.index.json"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {
        "total_size": sum(t.nbytes for t in state.values()),
        "total_parameters": sum(t.numel() for t in state.values()),
    }
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            held = sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118 - no mapping
            assert held <= MIB or list(opened.keys()) == ["large"]
            assert all(index["weight_map"][name] == file.name for name in opened.keys())  # noqa: SIM118
    assert_tensors(hf_tensors(folder), state)


def test_layers_stay_in_the_model_s_order(tmp_path: Path) -> None:
    state = {f"layers.{i}.w": torch.rand(512, 512) for i in range(11)}
    with saved(tmp_path, state) as checkpoint:
        checkpoint.export(tmp_path / "hf", options(max_shard_size="2MiB"))
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    places = [index["weight_map"][f"layers.{i}.w"] for i in range(11)]
    assert places == sorted(places)


def test_a_target_with_files_is_refused_and_replaced_only_where_it_is_an_export(tmp_path: Path) -> None:
    """E11: saved anew into the same directory, stock readers mix old and new files."""
    folder = tmp_path / "hf"
    big = {f"w{i}": torch.rand(512, 512) for i in range(4)}
    with saved(tmp_path / "one", big) as checkpoint:
        checkpoint.export(folder, options(max_shard_size="1MiB"))
        (folder / "README.md").write_text("mine")
        with pytest.raises(RefusedError, match="is not empty: it has 6 files"):
            checkpoint.export(folder, options())
    with saved(tmp_path / "two", {"v": numbers(3)}) as checkpoint:
        checkpoint.export(folder, options(overwrite=True))
    assert sorted(f.name for f in folder.iterdir()) == ["README.md", "model.safetensors"]
    assert_tensors(hf_tensors(folder), {"v": numbers(3)})
    with saved(tmp_path / "three", big) as checkpoint:
        checkpoint.export(folder, options(overwrite=True, max_shard_size="2MiB"))
    assert sorted(f.name for f in folder.glob("*.safetensors")) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert_tensors(hf_tensors(folder), big)


class Stop(Exception):
    """What interrupts."""


def interrupted_at(file: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done > file * MIB:
            raise Stop

    return progress


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_interrupted_export_leaves_nothing_that_looks_whole(tmp_path: Path, at: int) -> None:
    state = {f"w{i}": torch.rand(512, 512) for i in range(4)}
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text("{}")
    with saved(tmp_path, state) as checkpoint:
        with pytest.raises(Stop):
            checkpoint.export(tmp_path / "hf", options(max_shard_size="1MiB", config_from=str(config)), progress=interrupted_at(at))
        assert list((tmp_path / "hf").iterdir()) == []
        checkpoint.export(tmp_path / "hf", options(max_shard_size="1MiB"))  # and so it may be tried again
        with pytest.raises(Stop):
            checkpoint.export(tmp_path / "hf", options(max_shard_size="2MiB", overwrite=True), progress=interrupted_at(at))
        assert not (tmp_path / "hf" / "model.safetensors.index.json").exists()


def test_what_comes_with_a_model_goes_along_and_weights_do_not(tmp_path: Path) -> None:
    config = tmp_path / "config"
    (config / "sub").mkdir(parents=True)
    (config / ".git").mkdir()
    texts = {
        "config.json": json.dumps(
            {"dtype": "float32", "text_config": {"torch_dtype": "float32", "hidden": 3}, "quantization_config": {"dtype": "x"}}
        )
    }
    texts |= {"tokenizer.json": "{}", "sub/vocab.txt": "a b", "modeling.py": "x = 1"}
    for name, text in {
        **texts,
        "model.safetensors": "no",
        "pytorch_model.bin": "no",
        "model.safetensors.index.json": "no",
        ".git/x": "no",
    }.items():
        (config / name).write_text(text)
    with saved(tmp_path, {"w": numbers(3)}) as checkpoint:
        checkpoint.export(tmp_path / "hf", options(config_from=str(config)))
        found = {str(f.relative_to(tmp_path / "hf")): f.read_bytes() for f in (tmp_path / "hf").rglob("*") if f.is_file()}
        assert found.pop("model.safetensors")
        assert found == {name: text.encode() for name, text in texts.items()}
        checkpoint.export(tmp_path / "cast", options(config_from=str(config), dtype="bfloat16"))
        body = json.loads((tmp_path / "cast" / "config.json").read_text())
        assert body == {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16", "hidden": 3}, "quantization_config": {"dtype": "x"}}
        with pytest.raises(NotFoundError, match="has no configuration files"):
            checkpoint.export(tmp_path / "none", options(config_from=str(tmp_path / "absent")))
        assert not (tmp_path / "none").exists()


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(tmp_path: Path) -> None:
    state = {f"w{i}": torch.rand(512, 512) for i in range(3)}
    with saved(tmp_path, state) as checkpoint:
        planned = checkpoint.export(tmp_path / "hf", options(max_shard_size="1MiB"), dry_run=True)
        assert not (tmp_path / "hf").exists()
        done = checkpoint.export(tmp_path / "hf", options(max_shard_size="1MiB"))
    assert isinstance(planned, Exported)
    assert planned.files == done.files[:-1]
    assert (planned.tensors, planned.left_out) == (done.tensors, done.left_out)


def test_rules_are_applied_on_the_way_and_large_tensors_go_in_pieces(tmp_path: Path) -> None:
    qkv = torch.rand(3 * 1024, 3000)  # 36 MB: more than a window of the smallest budget, and no whole number of them
    with saved(tmp_path, {"model": {"attn.qkv": qkv, "proj": torch.rand(2000, 1500)}}) as checkpoint:
        rules = [
            {"match": r"(.*)\.qkv", "to": [r"\1.q", r"\1.k", r"\1.v"], "split": {"heads": 8}},
            {"match": "proj", "to": "out.weight", "transpose": True},
        ]
        checkpoint.export(tmp_path / "hf", options(strip="model.", rules=rules, dtype="bfloat16", max_shard_size="10MB"))
        proj = checkpoint["model.proj"].full()
    found = hf_tensors(tmp_path / "hf")
    for i, name in enumerate(("q", "k", "v")):
        assert torch.equal(found[f"attn.{name}"], qkv.view(8, 3, 128, 3000)[:, i].reshape(1024, 3000).bfloat16())
    assert torch.equal(found["out.weight"], proj.T.bfloat16())


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with saved(tmp_path, {f"w{i}": torch.rand(512, 512) for i in range(3)}) as checkpoint:
        done = checkpoint.export(tmp_path / "hf", options(max_shard_size="1MiB"), progress=lambda a, b: told.append((a, b)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == sum(f.nbytes for f in done.files[:-1])


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    with stored(tmp_path, {f"w{i}": torch.rand(512, 512) for i in range(4)}) as store:
        (shard,) = (tmp_path / "tier").rglob("shard-*.safetensors")
        with shard.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            old = file.read(1)
            file.seek(-100, os.SEEK_END)
            file.write(bytes([old[0] ^ 1]))
        with pytest.raises(IntegrityError, match="no tier has a good copy"):
            store.export(1, tmp_path / "hf", options(max_shard_size="1MiB"))
    assert list((tmp_path / "hf").iterdir()) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_stock_dcp_s_hugging_face_reader_reads_it_too(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    state = {"a": torch.rand(700, 512), "b": numbers(3, 4, dtype=torch.int64), "c": torch.rand(600, 512)}
    with saved(tmp_path, state) as checkpoint:
        checkpoint.export(tmp_path / "hf", options(max_shard_size="1MiB"))
    into = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(into, storage_reader=HuggingFaceStorageReader(str(tmp_path / "hf")))
    assert_tensors(into, state)
