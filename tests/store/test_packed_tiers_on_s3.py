"""A whole store whose last tier is a real bucket that packs and quantises: names, checksums and sizes as that server tells them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packed_tiers_kit import adam_state

import tierstore
from tierstore.config import load_config
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.catalog import scan
from tierstore.tiers.session import Session
from tierstore.tiers.verify import verify

pytestmark = pytest.mark.s3


def test_exact_and_quantised_copies_in_a_bucket_are_verified_and_read_back(
    tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any]
) -> None:
    near = [{"name": name, "uri": str(tmp_path / name), "scope": scope} for name, scope in (("node", "node"), ("shared", "shared"))]
    far = {"name": "far", "uri": s3_bucket, "options": s3_options, "codec": "zstd", "quantise": "q8"}
    config = {"version": 1, "run": "r", "tiers": [*near, far]}
    with tierstore.open(config) as store:
        store.save(1, adam_state(1)).wait("far", timeout=200)
        store.save(2, adam_state(2), quantise="exact").wait("far", timeout=200)
    with Session.open(load_config(config)) as session:
        assert session.run(verify(session.tiers, "r", level="full")).findings == ()
        found = {info.step: info for info in session.run(scan(session.tiers, "r")).checkpoints}
        assert {step: info.replicas["far"] for step, info in found.items()} == {1: "quantised", 2: "complete"}
        assert found[1].taken_on("far") < found[2].taken_on("far") < found[2].nbytes
    for path in [p for name in ("node", "shared") for p in (tmp_path / name).rglob("shard-*")]:
        path.unlink()
    with tierstore.open(config) as store:
        assert_same_state(store.load(2), adam_state(2))
        lossy = store.load(1)
    assert torch.equal(lossy["master"]["w"], adam_state(1)["master"]["w"])
    assert not torch.equal(lossy["optim"]["w"]["exp_avg"], adam_state(1)["optim"]["w"]["exp_avg"])
