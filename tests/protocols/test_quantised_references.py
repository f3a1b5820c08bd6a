"""Quantised copies whose exact blocks others take: a frozen base is stored once on an archive, and what was exact stays exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packed_tiers_kit import Place

from tierstore.storage.contract import PackedFacts, Unchanged
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.catalog import scan
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.log import read_log
from tierstore.tiers.log_facts import fold
from tierstore.tiers.references import _exact, _whole_blocks
from tierstore.tiers.repair import repair
from tierstore.tiers.session import Session
from tierstore.tiers.verify import verify

MIB = 1 << 20


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def state_of(step: int) -> dict[str, Any]:
    """A frozen base of 6 MiB, and an adapter with its moments, which change."""
    numbers = torch.Generator().manual_seed(step)
    base = torch.randn(6 * MIB // 4, generator=torch.Generator().manual_seed(99))
    moments = {
        "exp_avg": torch.randn(256, 384, generator=numbers) * 1e-4,
        "exp_avg_sq": (torch.randn(256, 384, generator=numbers) * 1e-4).square(),
    }
    return {"base": base, "optim": {"w": moments}}


def stored(place: Place, step: int) -> int:
    return sum(len(place.bucket._files[name]) for name in place.names(f"r/step-{step:010d}-") if "/shard-" in name)


def save(place: Place, config: dict[str, Any], *steps: int) -> None:
    with place.open(config) as store:
        for step in steps:
            store.save(step, state_of(step)).wait("far", timeout=200)


def facts_of(session: Session, step: int) -> Any:
    info = session.run(scan(session.tiers, "r")).find(step)
    assert info is not None
    return fold(session.run(read_log(session.tiers.authority.storage, info.attempt)))


def test_an_archive_that_quantises_stores_a_frozen_base_once(place: Place) -> None:
    config = place.config(codec="zstd", quantise="q8", unchanged_once=True)
    save(place, config, 1, 2)
    save(place, config, 3)
    assert stored(place, 1) > 5 * MIB
    assert stored(place, 2) < 2 * MIB
    assert stored(place, 3) < 2 * MIB
    with place.session(config) as session:
        assert [set(facts_of(session, step).quantised) for step in (1, 2, 3)] == [{"far"}] * 3
        assert len(facts_of(session, 1).referenced["far"]) == 2
        assert session.run(verify(session.tiers, "r", level="full")).findings == ()
    place.lose_exact_shards()
    with place.open(config) as store:
        for step in (1, 2, 3):
            assert torch.equal(store.load(step)["base"], state_of(step)["base"])


def test_an_exact_copy_takes_the_exact_blocks_of_a_quantised_one(place: Place) -> None:
    config = place.config(codec="zstd", quantise="q8", unchanged_once=True)
    save(place, config, 1)
    with place.open(config) as store:
        store.save(2, state_of(2), quantise="exact").wait("far", timeout=200)
    assert stored(place, 2) < 2 * MIB
    place.lose_exact_shards()
    with place.open(config) as store:
        assert_same_state(store.load(2), state_of(2))


def test_what_others_refer_to_is_repaired_exact_whatever_is_configured_by_then(place: Place) -> None:
    config = place.config(codec="zstd", quantise={"scheme": "q8", "include": ["*exp_avg"]}, unchanged_once=True)
    save(place, config, 1, 2)
    [first] = [name for name in place.names("step-0000000001-") if "/shard-" in name]
    place.flip(first, 3 * MIB)
    wider = place.config(codec="zstd", quantise={"scheme": "q8", "include": ["*base", "*exp_avg"]}, unchanged_once=True)
    with place.session(wider) as session:
        context = CopyContext.make(session.tiers, session.clock)
        report = session.run(repair(session.tiers, "r", context=context, clock=session.clock, level="full"))
        assert report.mended
        assert facts_of(session, 1).quantised == {}
        assert session.run(verify(session.tiers, "r", level="full")).findings == ()
    place.lose_exact_shards()
    with place.open(wider) as store:
        assert torch.equal(store.load(2)["base"], state_of(2)["base"])


def test_only_what_lies_in_exact_blocks_is_taken() -> None:
    facts = PackedFacts(digest="", stored_nbytes=0, lossy=frozenset({2, 3}), refers_to=(), quantised={})
    piece = Unchanged(begin=8 * MIB, end=14 * MIB, path="a/shard", source=MIB // 2)
    assert [(one.begin, one.end, one.source) for one in _exact(piece, facts)] == [
        (8 * MIB, 8 * MIB + 3 * MIB // 2, MIB // 2),
        (8 * MIB + 7 * MIB // 2, 14 * MIB, 4 * MIB),
    ]
    assert list(_exact(piece, None)) == [piece]


def test_what_is_quantised_takes_whole_packed_blocks_only() -> None:
    half = MIB // 2
    pieces = [Unchanged(begin=b * half, end=e * half, path=p, source=b * half) for b, e, p in ((1, 3, "a"), (3, 5, "b"), (7, 9, "a"))]
    assert [(one.begin // half, one.end // half, one.path) for one in _whole_blocks(pieces, 9 * half)] == [
        (2, 3, "a"),
        (3, 4, "b"),
        (8, 9, "a"),
    ]
