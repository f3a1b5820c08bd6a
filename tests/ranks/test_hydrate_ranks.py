"""Ranks of one node that load together from a real S3 server: with hydrate each file leaves the server once, and then never again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hydrate_kit import config_of, patiently, shards, state_of
from ranks_kit import run_ranks

import tierstore
from tierstore.testing.proxy import CuttingProxy
from tierstore.testing.servers import S3Server

pytestmark = pytest.mark.s3


def body(rank: int, world_size: int, folder: Path, *, tiers: list[dict[str, Any]]) -> bool:
    patiently(pytest.MonkeyPatch())
    config = {**config_of(folder), "tiers": tiers, "io": {"block_size": "64KiB"}, "save": {"agreement_timeout": "60s"}}
    into = {name: torch.zeros_like(value) for name, value in state_of(1).items()}
    with tierstore.open(config, rank=rank, world_size=world_size) as store:
        store.load(1, into=into)
    return all(torch.equal(into[name], value) for name, value in state_of(1).items())


def test_ranks_of_a_node_fetch_what_all_of_them_want_once(tmp_path: Path, s3_server: S3Server, s3_bucket: str, s3_options: Any) -> None:
    node = {"name": "node", "uri": str(tmp_path / "node"), "scope": "node"}
    with CuttingProxy(s3_server.endpoint_url) as proxy:
        far = {"name": "far", "uri": s3_bucket, "scope": "shared", "options": {**s3_options, "endpoint_url": proxy.endpoint_url}}
        with tierstore.open({**config_of(tmp_path, hydrate="off"), "tiers": [node, far]}) as store:
            store.save(1, state_of(1))
        shutil.rmtree(tmp_path / "node")
        nbytes = sum(value.nbytes for value in state_of(1).values())
        fetched = []
        for ranks in (3, 2):
            proxy.clear()
            assert run_ranks(ranks, body, tmp_path, tiers=[node, far]) == [True] * ranks
            fetched.append(proxy.body_nbytes / nbytes)
        assert shards(tmp_path, "node")
    assert 1.0 < fetched[0] < 1.1  # with manifest, index and log, which each rank reads
    assert fetched[1] < 0.1
