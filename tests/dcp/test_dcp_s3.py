"""Against a real S3 server: a slice costs a slice, replicas are fetched once per group, and no credentials or options get lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import IGNORED, quiet
from ranks_kit import run_ranks
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from tierstore.dcp import TierStorageReader, TierStorageWriter
from tierstore.testing.proxy import CuttingProxy
from tierstore.testing.servers import S3Server

pytestmark = pytest.mark.filterwarnings(IGNORED)

WHOLE = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(7))
"""16 MiB."""


def config(uri: str, options: dict[str, Any], run: str = "r") -> dict[str, Any]:
    return {"version": 1, "run": run, "tiers": [{"name": "object", "uri": uri, "options": options, "scope": "shared"}]}


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[CuttingProxy]:
    with CuttingProxy(s3_server.endpoint_url) as made:
        yield made


def load(rank: int, world_size: int, folder: Path, source: dict[str, Any], exchange: Any) -> Any:
    quiet()
    mesh = init_device_mesh("cpu", (2, 2))
    reader = TierStorageReader(source, exchange=exchange)
    into = {"w": distribute_tensor(torch.zeros_like(WHOLE), mesh, [Replicate(), Shard(0)]), "n": {"x": 0}}
    dcp.load(into, storage_reader=reader)
    reader.close()
    return [bool(torch.equal(into["w"].full_tensor(), WHOLE)), into["n"]["x"]]


def test_an_hsdp_load_fetches_each_byte_once(tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any], proxy: CuttingProxy) -> None:
    writer = TierStorageWriter(config(s3_bucket, s3_options))
    dcp.save({"w": WHOLE, "n": {"x": 4}}, storage_writer=writer, checkpoint_id="step-1", no_dist=True)
    dcp.save({"w": WHOLE, "n": {"x": 5}}, storage_writer=writer, checkpoint_id="tier:///other/step-1", no_dist=True)  # options are kept
    writer.close()
    through = config(s3_bucket, {**s3_options, "endpoint_url": proxy.endpoint_url})
    fetched = {}
    for exchange in ("off", "auto"):
        proxy.clear()
        assert run_ranks(4, load, tmp_path, source=through, exchange=exchange) == [[True, 4]] * 4
        fetched[exchange] = proxy.body_nbytes / WHOLE.nbytes
    assert fetched["auto"] < 1.1
    assert fetched["off"] > 1.9


def test_a_slice_costs_a_slice(s3_bucket: str, s3_options: dict[str, Any], proxy: CuttingProxy) -> None:
    """NEIGHBOURS 1.5: stock's reader moves 164 MiB for 1 MiB."""
    writer = TierStorageWriter(config(s3_bucket, s3_options))
    dcp.save({"w": WHOLE, "v": WHOLE + 1}, storage_writer=writer, checkpoint_id="step-1", no_dist=True)
    writer.close()

    class Rows(dcp.DefaultLoadPlanner):
        """Wants 256 rows (1 MiB) of one of the tensors."""

        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            [item] = plan.items
            plan.items[0] = type(item)(**{**vars(item), "storage_offsets": torch.Size((512, 0)), "lengths": torch.Size((256, 1024))})
            return plan

    reader = TierStorageReader(config(s3_bucket, {**s3_options, "endpoint_url": proxy.endpoint_url}))
    reader.read_metadata()
    proxy.clear()
    into = {"w": torch.zeros_like(WHOLE)}
    dcp.load(into, storage_reader=reader, planner=Rows(), no_dist=True)
    reader.close()
    assert torch.equal(into["w"][:256], WHOLE[512:768])
    assert proxy.body_nbytes < 3.2 * (1 << 20)  # whole blocks of 1 MiB: one more at the end, since tensors don't begin on block borders
