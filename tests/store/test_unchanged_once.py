"""A fine-tuning of adapters: on a packed tier each checkpoint costs what changed, and loads from there alone when its base was deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from lora_kit import lora_state
from packed_tiers_kit import Place
from tiers_kit import SteppedClock

from tierstore.errors import NotFoundError
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.verify import verify

KEEP = {"keep": [{"last": 1}], "gc": {"undelete_window": "1h"}}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def stored(place: Place, step: int) -> int:
    """Bytes that the shards of a step take up in the bucket."""
    return sum(len(data) for name, data in place.bucket._files.items() if f"step-{step:010d}-" in name and "/shard-" in name)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_each_checkpoint_costs_its_adapters_and_outlives_its_base(place: Place, codec: str) -> None:
    clock = SteppedClock()
    config = place.config(codec=codec, unchanged_once=True)
    with place.open(config, clock) as store:  # without a policy: nothing goes meanwhile
        for step in (1, 2, 3):
            store.save(step, lora_state(step)).wait("far", timeout=200)
            clock.advance(7200)
        whole, second, third = stored(place, 1), stored(place, 2), stored(place, 3)
        assert whole > 6 << 20
        assert max(second, third) < 2 << 20  # the adapters, the block that they share with the last frozen weights, the first one's header
    config = place.config(codec=codec, unchanged_once=True, more={"retention": KEEP})
    with place.open(config, clock) as store:
        store.retention.prune()
        clock.advance(7200)
        for _ in range(2):  # the store's own housekeeping may have decided the same a moment before
            report = store.retention.collect()
            assert not report.failed
        assert "kept for step" in " ".join(text for _, text in report.waiting)
        with pytest.raises(NotFoundError, match="it was deleted"):
            store.load(1)
    assert (stored(place, 1), stored(place, 2)) == (whole, 0)
    with place.session(config, clock, create=False) as session:
        assert not session.run(verify(session.tiers, "r", level="full", clock=clock)).findings
    place.lose_exact_shards()
    with place.open(config, clock) as store:
        assert_same_state(store.load(3), lora_state(3))
    place.lose_near()
    with place.open(config, clock) as store:
        assert [info.step for info in store.checkpoints()] == [3]
        assert_same_state(store.load(3), lora_state(3))


def test_everything_goes_with_the_last_that_refers_to_it(place: Place) -> None:
    clock = SteppedClock()
    with place.open(place.config(codec="zstd"), clock) as store:
        for step, base in ((1, 0), (2, 0), (3, 7)):
            store.save(step, lora_state(step, base=base)).wait("far", timeout=200)
            clock.advance(7200)
    assert stored(place, 2) < 2 << 20
    with place.open(place.config(codec="zstd", more={"retention": KEEP}), clock) as store:
        store.retention.prune()
        clock.advance(7200)
        for _ in range(3):
            assert not store.retention.collect().failed
        assert not [name for name in place.bucket._files if "step-0000000001-" in name or "step-0000000002-" in name]
        assert_same_state(store.load(3), lora_state(3, base=7))


def test_a_process_that_knows_nothing_yet_reads_two_footers_for_a_checkpoint(place: Place) -> None:
    clock = SteppedClock()
    config = place.config(codec="raw", unchanged_once=True)
    read = []
    for step in (1, 2, 3):
        with place.open(config, clock) as store:
            before = place.bucket.requests["read"] if place.buckets else 0
            store.save(step, lora_state(step)).wait("far", timeout=200)
            read.append(place.bucket.requests["read"] - before)
        clock.advance(60)
    assert read == [0, 1, 2]  # that of the checkpoint before, and of the one that this one takes its bytes from
    assert stored(place, 3) < 2 << 20
