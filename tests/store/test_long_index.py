"""A checkpoint whose index is too long to be read as a whole loads, is looked at and listed like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierstore
from tierstore.errors import NotFoundError
from tierstore.format.index import PagedIndex
from tierstore.testing.equality import assert_same_state


@pytest.fixture(autouse=True)
def every_index_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.tiers.index_pages.WHOLE_NBYTES", 0)


def state_of(value: float) -> dict[str, object]:
    layers = {f"layers.{i:03d}.weight": torch.full((3, 4), value + i) for i in range(300)}
    return {"model": layers, "optim": {"step": int(value), "m": [torch.full((4,), value), torch.zeros(())]}}


def test_a_long_index_loads_fresh_in_place_by_names_and_by_slices(tmp_path: Path) -> None:
    with tierstore.open([str(tmp_path / "tier")], run="r") as store:
        store.save(1, state_of(1.0)).wait("durable", 200)
        assert_same_state(store.load(1), state_of(1.0))
        into = state_of(0.0)
        weight = into["model"]["layers.007.weight"]  # type: ignore[index]
        store.load(1, into=into)
        assert_same_state(into, state_of(1.0))
        assert into["model"]["layers.007.weight"] is weight  # type: ignore[index]
        checkpoint = store.open_checkpoint(1)
        assert isinstance(checkpoint.replica.index, PagedIndex)
        assert torch.equal(checkpoint["model.layers.250.weight"][1:2], torch.full((1, 4), 251.0))
        assert "model.layers.300.weight" not in checkpoint
        assert len(checkpoint) == len(list(checkpoint)) == 302
        assert_same_state(checkpoint.state(), state_of(1.0))
        with pytest.raises(NotFoundError, match=r"nearest are .model\.layers\."):
            checkpoint["model.layers.xyz.weight"]
        resumed = store.resume()
        assert resumed is not None
        assert_same_state(resumed.state, state_of(1.0))
