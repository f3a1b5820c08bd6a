"""Bytes that leave a real S3 server when several ranks load together: each is fetched once, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_kit import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tierstore
from tierstore.testing.proxy import CuttingProxy
from tierstore.testing.servers import S3Server

MANY = 2**20
"""Elements of the largest tensor."""


def truth() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "large": torch.randn(1024, MANY // 1024, generator=generator),
        "odd": torch.randn(331, 777, generator=generator).to(torch.bfloat16),
        "wide": torch.randn(5, 120_000, generator=generator),
        "small": torch.randn(9, generator=generator),
    }


NBYTES = sum(t.nbytes for t in truth().values())

PLACEMENTS = {
    "ddp": [Replicate(), Replicate()],
    "hsdp": [Replicate(), Shard(0)],
    "columns": [Shard(1), Shard(1)],
    "fsdp-tp": [Shard(0), Shard(1)],
}


def config(tiers: list[dict[str, Any]]) -> dict[str, Any]:
    return {"version": 1, "run": "r", "tiers": tiers, "io": {"block_size": "64KiB"}, "save": {"agreement_timeout": "60s"}}


def tier(uri: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"name": "object", "uri": uri, "options": options, "scope": "shared"}


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[CuttingProxy]:
    with CuttingProxy(s3_server.endpoint_url) as made:
        yield made


def target(kind: str, value: torch.Tensor) -> Any:
    placements = [Shard(0) if p == Shard(1) and value.dim() < 2 else p for p in PLACEMENTS[kind]]
    return distribute_tensor(torch.zeros_like(value), init_device_mesh("cpu", (2, 2)), placements)


def loads(rank: int, world_size: int, folder: Path, tiers: list[dict[str, Any]], kind: str, exchange: str) -> Any:
    with tierstore.open(config(tiers), rank=rank, world_size=world_size) as store:
        into = {name: target(kind, value) for name, value in truth().items()}
        store.load("latest", into=into, options=tierstore.LoadOptions(exchange=exchange))  # type: ignore[arg-type]
    for name, value in truth().items():
        made = into[name]
        assert isinstance(made, DTensor)
        assert torch.equal(made.full_tensor(), value), name
    return True


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_each_byte_leaves_the_bucket_once_for_all_ranks(
    tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any], proxy: CuttingProxy, kind: str, long_run: bool
) -> None:
    if kind in ("ddp", "hsdp") and not long_run:
        pytest.skip("through a server with --long only; test_exchange.py proves the plan")
    with tierstore.open(config([tier(s3_bucket, s3_options)])) as store:
        store.save(1, truth()).wait("durable")
    through = [tier(s3_bucket, {**s3_options, "endpoint_url": proxy.endpoint_url})]
    fetched = {}
    for exchange in ("off", "auto"):
        proxy.clear()
        assert all(run_ranks(4, loads, tmp_path, tiers=through, kind=kind, exchange=exchange))
        fetched[exchange] = proxy.body_nbytes / NBYTES
    assert fetched["auto"] < 1.1  # with manifest, index and log, which each rank reads
    assert fetched["off"] > {"ddp": 3.9, "hsdp": 1.9, "columns": 3.0, "fsdp-tp": 1.2}[kind]


def loads_with_node_tiers(rank: int, world_size: int, folder: Path, uri: str, options: dict[str, Any]) -> Any:
    tiers = [{"name": "node", "uri": str(folder / f"node-{rank}"), "scope": "node"}, tier(uri, options)]
    with tierstore.open(config(tiers), rank=rank, world_size=world_size) as store:
        into = {name: torch.zeros_like(value) for name, value in truth().items()}
        store.load(1, into=into)
    return all(torch.equal(into[name], value) for name, value in truth().items())


def test_a_node_that_lost_its_files_gets_them_from_another_node_and_the_bucket_is_left_alone(
    tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any], proxy: CuttingProxy
) -> None:
    node = {"name": "node", "uri": str(tmp_path / "node-0"), "scope": "node"}
    with tierstore.open(config([node, tier(s3_bucket, s3_options)])) as store:
        store.save(1, truth()).wait("durable")
    proxy.clear()
    options = {**s3_options, "endpoint_url": proxy.endpoint_url}
    assert run_ranks(3, loads_with_node_tiers, tmp_path, uri=s3_bucket, options=options) == [True] * 3
    assert proxy.body_nbytes < 0.1 * NBYTES


def test_a_damaged_block_on_a_node_is_passed_over_for_the_bucket(
    tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any], proxy: CuttingProxy
) -> None:
    node = {"name": "node", "uri": str(tmp_path / "node-0"), "scope": "node"}
    with tierstore.open(config([node, tier(s3_bucket, s3_options)])) as store:
        store.save(1, truth()).wait("durable")
    (shard,) = (tmp_path / "node-0").glob("r/step-*/shard-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    proxy.clear()
    options = {**s3_options, "endpoint_url": proxy.endpoint_url}
    assert run_ranks(3, loads_with_node_tiers, tmp_path, uri=s3_bucket, options=options) == [True] * 3
    assert 0 < proxy.body_nbytes < 0.2 * NBYTES
