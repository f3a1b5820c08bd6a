"""What torch's own door reads from a quantised copy, its later saves tell of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import IGNORED
from packed_tiers_kit import Place, adam_state

from tierstore.config import load_config
from tierstore.dcp import TierStorageReader, TierStorageWriter
from tierstore.dcp import stores as dcp_stores
from tierstore.tiers.catalog import scan

pytestmark = pytest.mark.filterwarnings(IGNORED)


def test_what_was_read_from_a_quantised_copy_is_not_quantised_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_stores._REGISTRY, "generation", 0)
    place = Place(tmp_path, monkeypatch)
    config = place.config(uri=str(tmp_path / "far"), codec="zstd", quantise="q8")
    state = adam_state(1)
    place.save(config, 1)
    place.lose_exact_shards()
    reader = TierStorageReader(load_config(config))
    into = {**adam_state(2)}
    dcp.load(into, storage_reader=reader, no_dist=True)
    reader.close()
    assert torch.equal(into["master"]["w"], state["master"]["w"])
    assert not torch.equal(into["optim"]["w"]["exp_avg"], state["optim"]["w"]["exp_avg"])
    writer = TierStorageWriter(load_config(config))
    dcp.save(into, storage_writer=writer, checkpoint_id="step-2", no_dist=True)
    writer.close()
    with place.session(config, create=False) as session:
        found = {info.step: info.replicas["far"] for info in session.run(scan(session.tiers, "r")).checkpoints}
    assert found == {1: "quantised", 2: "complete"}
