"""Loads from packed tiers fetch what is stored once: a weight is made right after its master was read, wherever both lie in the shard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_tiers_kit import Place

import tierstore
from tierstore.storage.unpacking_cache import Decoded
from tierstore.testing.bucket import Bucket
from tierstore.testing.equality import assert_same_state

MIB = 1 << 20
CACHE_NBYTES, MORE_NBYTES = 8 * MIB, 16 * MIB


class Counted(Bucket):
    """Counts the bytes of shards that are read."""

    fetched = 0

    def _part(self, path: str, offset: int, nbytes: int | None) -> bytes:
        data = super()._part(path, offset, nbytes)
        if "shard-" in path:
            self.fetched += len(data)
        return data


def weights_and_masters(tensors: int) -> dict[str, Any]:
    """bf16 weights of 4.3 MiB, and their fp32 masters; nothing of them can be compressed."""
    numbers = torch.Generator().manual_seed(0)
    master = {
        f"{n}": torch.randint(-(2**31), 2**31 - 1, (1100, 2050), generator=numbers, dtype=torch.int32).view(torch.float32).nan_to_num_()
        for n in range(tensors)
    }
    return {"model": {name: tensor.bfloat16() for name, tensor in master.items()}, "master": master}


FAR: dict[str, Any] = {"version": 1, "run": "r", "tiers": [{"name": "far", "uri": "s3://bucket/far", "codec": "raw", "master_once": True}]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[Place, dict[str, Any]]]:
    """A checkpoint in a bucket, saved once; few decoded blocks are kept by who reads it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packed_tiers_kit.Bucket", Counted)
        patch.setattr(Decoded.__init__, "__defaults__", (CACHE_NBYTES, MORE_NBYTES))
        place = Place(tmp_path_factory.mktemp("packed"), patch)
        state = weights_and_masters(16 if request.config.getoption("--long") else 6)
        with place.open(FAR) as store:
            store.save(1, state).wait("far", timeout=200)
        yield place, state


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
def test_weights_and_masters_are_fetched_once_whatever_lies_between_them(saved: tuple[Place, dict[str, Any]], in_place: bool) -> None:
    place, state = saved
    stored = sum(len(place.bucket._files[name]) for name in place.names("shard-"))
    assert stored < 0.7 * sum(tensor.nbytes for group in state.values() for tensor in group.values())
    into = {group: {name: torch.empty_like(tensor) for name, tensor in some.items()} for group, some in state.items()}
    with place.open(FAR) as store:
        place.bucket.fetched = 0
        found = store.load(into=into if in_place else None)
        fetched = place.bucket.fetched
    assert_same_state(found, state)
    assert fetched <= 1.05 * stored


def test_what_is_hydrated_is_fetched_once(saved: tuple[Place, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoded.__init__, "__defaults__", (24 * MIB, 16 * MIB))  # all masters take more
    place, state = saved
    stored = sum(len(place.bucket._files[name]) for name in place.names("shard-"))
    node = {"name": "node", "uri": str(tmp_path / "node"), "scope": "node"}
    with place.open({**FAR, "tiers": [node, *FAR["tiers"]], "load": {"hydrate": "node"}}) as store:
        place.bucket.fetched = 0
        found = store.load()
        fetched = place.bucket.fetched
    (shard,) = (tmp_path / "node").glob("r/*/shard-*")
    assert shard.stat().st_size > 1.4 * stored
    assert_same_state(found, state)
    assert fetched <= 1.02 * stored


def test_weights_alone_fetch_their_masters_once(saved: tuple[Place, dict[str, Any]]) -> None:
    place, state = saved
    with place.open(FAR) as store:
        place.bucket.fetched = 0
        into = {"model": {name: torch.empty_like(tensor) for name, tensor in state["model"].items()}}
        found = store.load(into=into, options=tierstore.LoadOptions(unexpected="ignore"))
        fetched = place.bucket.fetched
    assert_same_state(found, {"model": state["model"]})
    assert fetched <= 1.05 * sum(tensor.nbytes for tensor in state["master"].values())
