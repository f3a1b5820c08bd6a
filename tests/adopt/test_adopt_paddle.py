"""Folders of PaddleNLP's Unified Checkpoint, made after its own formulas: opened where they lie, and taken into a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paddle_kit import encode_o1_first, encode_o1_second, encode_o2
from safetensors.torch import save_file

import tierstore
from tierstore.errors import FormatError, IncompleteError, UsageError
from tierstore.state.foreign import reader as foreign_reader

Tensors = dict[str, torch.Tensor]

WEIGHTS: Tensors = {"llama.embed.weight": torch.randn(64, 12), "llama.norm.weight": torch.rand(12)}
COUNTS = torch.arange(12, dtype=torch.int8)
"""An int8 tensor among the optimizer's that is no moment."""


def moments(seed: int = 0) -> Tensors:
    generator = np.random.default_rng(seed)
    made = {}
    for name, weight in WEIGHTS.items():
        m = generator.normal(0, 1e-3, weight.shape).astype(np.float32)
        made[f"{name}/moment1_0"] = torch.from_numpy(m)
        made[f"{name}/moment2_0"] = torch.from_numpy(np.abs(m) * np.float32(1e-3) + np.float32(1e-8))
        made[f"{name}/beta1_pow_acc_0"] = torch.tensor([0.9**7])
    return made


def quantised(plain: Tensors, stage: str) -> Tensors:
    made = dict(plain)
    for name in WEIGHTS:
        first, second = f"{name}/moment1_0", f"{name}/moment2_0"
        m, v = plain[first].numpy(), plain[second].numpy()
        if stage == "O1":
            made[first], made[first + "@scales"] = map(_tensor, encode_o1_first(m))
            made[second], made[second + "@min_scales"], made[second + "@max_scales"] = map(_tensor, encode_o1_second(v))
        elif stage == "O2" and m.ndim == 2:
            packed = [_tensor(one) for one in encode_o2(m, v)]
            made[second], made[first + "@scales"], made[second + "@min_scales"], made[second + "@max_scales"] = packed
            del made[first]
    return made


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def write_part(folder: Path, stem: str, parts: list[Tensors], names: list[str], **more: Any) -> None:
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "np"})
        own = {key.split("@")[0] for key in part}
        weight_map.update({name: file for name in names if name in own or name.replace("moment1_0", "moment2_0") in own})
    assert set(weight_map) == set(names)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map, **more}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def unified(folder: Path, stage: str, optimizer: Tensors | None = None, **more: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    half = {name: weight.to(torch.bfloat16) for name, weight in WEIGHTS.items()}
    write_part(folder, "model", [half], list(WEIGHTS))
    write_part(folder, "master_weights", [WEIGHTS], list(WEIGHTS))
    plain = moments() | {"counts": COUNTS}
    found = quantised(plain, stage) if optimizer is None else optimizer
    halves = [
        {k: v for k, v in found.items() if k.startswith(name) or k == other} for name, other in zip(WEIGHTS, ("counts", ""), strict=True)
    ]
    if stage != "O0":
        more = {"ckpt_quant_stage": stage, **more}
    write_part(folder, "optimizer", halves, list(plain), master_weights=True, quant_ckpt_resume_times=0, **more)
    return folder


def wanted(stage: str) -> Tensors:
    """What the formulas give for each name, calculated in float64 here."""
    made = moments() | {"counts": COUNTS}
    for name in WEIGHTS:
        first, second = f"{name}/moment1_0", f"{name}/moment2_0"
        m, v = made[first].double().numpy(), made[second].double().numpy()
        r = 1 / (np.sqrt(v) + 1e-8)
        if stage == "O1":
            s, low, high = np.abs(m).max(0), r.min(0), r.max(0)
            if m.ndim == 1:
                s, low, high = np.abs(m).max(), r.min(), r.max()
            made[first] = torch.from_numpy(np.round(m / s * 127) / 127 * s)
            made[second] = torch.from_numpy((1 / (np.round((r - low) / (high - low) * 255) / 255 * (high - low) + low) - 1e-8) ** 2)
        elif stage == "O2" and m.ndim == 2:
            s, low, high = (
                np.repeat(x, 32, 0) for x in (np.abs(m).reshape(2, 32, 12).max(1), r.reshape(2, 32, 12).min(1), r.reshape(2, 32, 12).max(1))
            )
            made[first] = torch.from_numpy(np.round(m / s * 7) / 7 * s)
            made[second] = torch.from_numpy((1 / (np.round((r - low) / (high - low) * 15) / 15 * (high - low) + low) - 1e-8) ** 2)
    return made


def assert_state(state: Any, stage: str) -> None:
    assert set(state) == {"model", "master_weights", "optimizer"}
    for name, weight in WEIGHTS.items():
        assert torch.equal(state["master_weights"][name], weight)
        assert torch.equal(state["model"][name], weight.to(torch.bfloat16))
    expected = wanted(stage)
    assert set(state["optimizer"]) == set(expected)
    for name, tensor in expected.items():
        found = state["optimizer"][name]
        assert found.shape == tensor.shape, name
        if "moment" in name:
            assert found.dtype == torch.float32
            assert torch.allclose(found.double(), tensor.double(), rtol=1e-4, atol=1e-12), name
        else:
            assert torch.equal(found, tensor), name


@pytest.mark.parametrize("stage", ["O0", "O1", "O2"])
def test_a_unified_checkpoint_is_opened_with_its_moments_as_numbers(tmp_path: Path, stage: str) -> None:
    folder = unified(tmp_path / "paddle", stage)
    with tierstore.open_foreign(folder) as checkpoint:
        assert "paddle in" in repr(checkpoint)
        state = checkpoint.state()
        assert_state(state, stage)
        name = "optimizer.llama.embed.weight/moment2_0"
        assert torch.equal(checkpoint[name][33:35, 2:7], state["optimizer"]["llama.embed.weight/moment2_0"][33:35, 2:7])


@pytest.mark.parametrize("stage", ["O1", "O2"])
def test_a_moment_larger_than_the_budget_is_calculated_from_the_rows_that_are_wanted(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unified(tmp_path / "paddle", stage)
    with tierstore.open_foreign(folder) as checkpoint:
        whole = checkpoint.state()["optimizer"]["llama.embed.weight/moment1_0"]
    monkeypatch.setattr(foreign_reader, "BUDGET_NBYTES", 0)
    monkeypatch.setattr(foreign_reader, "_SLAB_NBYTES", 5 * 48)  # five rows at a time
    with tierstore.open_foreign(folder) as checkpoint:
        lazy = checkpoint["optimizer.llama.embed.weight/moment1_0"]
        assert torch.equal(lazy.full(), whole)
        assert torch.equal(lazy[30:35, 1:4], whole[30:35, 1:4])


@pytest.mark.parametrize("stage", ["O0", "O1", "O2"])
def test_a_unified_checkpoint_is_taken_into_a_store(tmp_path: Path, stage: str) -> None:
    folder = unified(tmp_path / "paddle", stage)
    with tierstore.open([str(tmp_path / "tier")], run="llama") as store:
        store.adopt(folder, step=3).wait("durable")
        assert_state(store.load(3), stage)
    shards = list((tmp_path / "tier").rglob("shard-*.safetensors"))
    originals = {path.read_bytes() for path in folder.glob("*.safetensors")}
    as_they_are = [path for path in shards if path.read_bytes() in originals]
    assert len(as_they_are) == (4 if stage == "O0" else 0)  # nothing to calculate: the files become shards as they are


def test_the_weights_alone_can_be_asked_for(tmp_path: Path) -> None:
    with tierstore.open_foreign(unified(tmp_path / "paddle", "O1"), format="safetensors") as checkpoint:
        assert set(checkpoint.state()) == set(WEIGHTS)


def test_scales_in_a_checkpoint_that_says_it_is_not_quantised_are_refused(tmp_path: Path) -> None:
    folder = unified(tmp_path / "paddle", "O0", quantised(moments() | {"counts": COUNTS}, "O1"))
    with pytest.raises(FormatError, match=r"says that no state is quantised .* is a scale"):
        tierstore.open_foreign(folder)


@pytest.mark.parametrize("stage", ["O3", 1, None])
def test_an_unknown_stage_is_refused(tmp_path: Path, stage: Any) -> None:
    with pytest.raises(FormatError, match="ckpt_quant_stage is"):
        tierstore.open_foreign(unified(tmp_path / "paddle", "O1", ckpt_quant_stage=stage))


@pytest.mark.parametrize(
    ("stage", "lost"),
    [("O1", "moment1_0@scales"), ("O1", "moment2_0@min_scales"), ("O2", "moment1_0@scales"), ("O2", "moment2_0@max_scales")],
)
def test_a_moment_without_its_scales_is_incomplete(tmp_path: Path, stage: str, lost: str) -> None:
    optimizer = quantised(moments() | {"counts": COUNTS}, stage)
    del optimizer[f"llama.embed.weight/{lost}"]
    with pytest.raises(IncompleteError, match=f"llama.embed.weight/moment.*{lost}"):
        tierstore.open_foreign(unified(tmp_path / "paddle", stage, optimizer))


@pytest.mark.parametrize("stage", ["O1", "O2"])
def test_scales_of_another_size_are_refused(tmp_path: Path, stage: str) -> None:
    optimizer = quantised(moments() | {"counts": COUNTS}, stage)
    optimizer["llama.embed.weight/moment1_0@scales"] = torch.ones(7)
    with pytest.raises(FormatError, match=r"are F32 \[7\], where 12|are F32 \[7\], where 24"):
        tierstore.open_foreign(unified(tmp_path / "paddle", stage, optimizer))


def test_groups_that_rows_do_not_fill_are_refused(tmp_path: Path) -> None:
    optimizer = quantised(moments() | {"counts": COUNTS}, "O2")
    optimizer["llama.embed.weight/moment2_0"] = torch.zeros(63, 12, dtype=torch.int8)
    with pytest.raises(FormatError, match="no groups of 32 rows"):
        tierstore.open_foreign(unified(tmp_path / "paddle", "O2", optimizer))


@pytest.mark.parametrize("stage", ["O1", "O2"])
def test_scales_that_are_no_numbers_are_an_error_when_they_are_read(tmp_path: Path, stage: str) -> None:
    optimizer = quantised(moments() | {"counts": COUNTS}, stage)
    optimizer["llama.embed.weight/moment2_0@max_scales"] = torch.full_like(
        optimizer["llama.embed.weight/moment2_0@max_scales"], float("nan")
    )
    with (
        tierstore.open_foreign(unified(tmp_path / "paddle", stage, optimizer)) as checkpoint,
        pytest.raises(FormatError, match=r"llama\.embed\.weight/moment2_0.*no finite numbers"),
    ):
        checkpoint.state()


def test_a_tensor_that_the_index_names_and_no_file_has_is_missed(tmp_path: Path) -> None:
    folder = unified(tmp_path / "paddle", "O2")
    path = folder / "optimizer.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["llama.gone/moment1_0"] = "optimizer-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(IncompleteError, match=r"llama\.gone/moment1_0"):
        tierstore.open_foreign(folder)


def test_a_moment_in_another_file_than_the_index_says_is_of_another_save(tmp_path: Path) -> None:
    folder = unified(tmp_path / "paddle", "O1")
    path = folder / "optimizer.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["llama.embed.weight/moment1_0"] = "optimizer-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(IncompleteError, match=r"but 'optimizer-00001"):
        tierstore.open_foreign(folder)


def test_an_optimizer_that_was_not_merged_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = unified(tmp_path / "paddle", "O0")
    (folder / "optimizer.safetensors.index.json").write_text('{"quant_ckpt_resume_times": 0, "optim_shard_num": 1}')
    with pytest.raises(UsageError, match="ignore_merge_optimizer"):
        tierstore.open_foreign(folder)
