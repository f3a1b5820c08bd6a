"""Tiers that keep their shards as packed files, under a whole store: everything above the storage sees raw checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_tiers_kit import COLUMNS, ROWS, Place, adam_state
from tiers_kit import SteppedClock

from tierstore.errors import TemporaryError
from tierstore.storage.contract import Listing
from tierstore.storage.packed import PACKED_MARKER, PackedStorage
from tierstore.testing.bucket import Bucket
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.catalog import scan
from tierstore.tiers.promote import promote
from tierstore.tiers.repair import repair
from tierstore.tiers.space import used_on
from tierstore.tiers.usage import measure_run, measure_stores
from tierstore.tiers.verify import verify


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


LAYOUTS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "behind two folders": lambda place: place.config(codec="zstd"),
    "a folder behind two": lambda place: place.config(uri=str(place.root / "far"), codec="zstd", master_once=True),
    "a bucket alone": lambda place: {"version": 1, "run": "r", "tiers": [{"name": "far", "uri": "s3://bucket/far", "codec": "zstd"}]},
    "folders that pack": lambda place: {
        "version": 1,
        "run": "r",
        "tiers": [
            {"name": "node", "uri": str(place.root / "node"), "codec": "zstd"},
            {"name": "far", "uri": str(place.root / "shared"), "codec": {"name": "zstd", "level": 3}},
        ],
    },
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_what_is_saved_comes_back_bit_by_bit_and_takes_less(place: Place, layout: str) -> None:
    config = LAYOUTS[layout](place)
    place.save(config, 1)
    for name in ("node", "shared"):
        for path in (place.root / name).rglob("shard-*") if "two" in layout else ():
            path.unlink()
    with place.open(config) as store:
        resumed = store.resume()
        assert resumed is not None
        assert_same_state(resumed.state, adam_state(1))
        info = resumed.checkpoint
        assert info.taken_on("far") < 0.9 * info.nbytes
        with store.open_checkpoint() as checkpoint:
            wanted = adam_state(1)
            assert torch.equal(checkpoint["model.w"][100:200], wanted["model"]["w"][100:200])
            assert torch.equal(checkpoint["optim.w.exp_avg"][5:9, 3:77], wanted["optim"]["w"]["exp_avg"][5:9, 3:77])
            assert torch.equal(checkpoint["master.w"][ROWS - 1, COLUMNS - 1 :], wanted["master"]["w"][ROWS - 1, COLUMNS - 1 :])


def test_packed_files_are_read_after_the_options_are_gone_and_plain_ones_after_they_came(place: Place) -> None:
    place.save(place.config(), 1)
    place.save(place.config(codec="zstd"), 2)
    place.save(place.config(), 3)
    packed, shards = place.names(".packed"), place.names("shard-")
    assert PACKED_MARKER in packed
    assert len(packed) == 2
    assert len(shards) == 3
    place.lose_exact_shards()
    for config in (place.config(), place.config(codec="raw", master_once=True)):
        with place.open(config) as store:
            for step in (1, 2, 3):
                assert_same_state(store.load(step), adam_state(step))


def test_a_tier_that_never_packed_is_not_wrapped(place: Place) -> None:
    place.save(place.config(), 1)
    with place.session(place.config(), create=False) as session:
        assert not any(isinstance(tier.storage, PackedStorage) for tier in session.tiers)
    place.save(place.config(codec="zstd"), 2)
    with place.session(place.config(), create=False) as session:
        assert [tier.name for tier in session.tiers if isinstance(tier.storage, PackedStorage)] == ["far"]


def test_a_tier_that_was_down_when_it_was_opened_is_read_whatever_it_keeps(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.save(place.config(codec="zstd"), 1)
    place.lose_exact_shards()
    children, down = Bucket.children, [True]

    async def ask(self: Bucket, folder: str = "") -> Listing:
        if down[0]:
            raise TemporaryError("the endpoint is down")
        return await children(self, folder)

    monkeypatch.setattr(Bucket, "children", ask)
    monkeypatch.setattr("tierstore.tiers.tier._ASK_AGAIN_S", 0.0)
    with place.open(place.config()) as store:
        down[0] = False
        assert_same_state(store.load(), adam_state(1))


def test_opening_asks_a_packed_tier_no_more_than_a_plain_one(place: Place) -> None:
    config = place.config(codec="zstd")
    place.save(config, 1)
    asked = []
    for one in (place.config(), config):
        before = place.bucket.total
        place.session(one, create=False).close()
        asked.append(place.bucket.total - before)
    assert asked[0] == asked[1]


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("point", ["promote.after-file", "promote.before-manifest", "promote.before-record", "promote.before-replicated"])
def test_a_promotion_that_is_killed_is_finished_by_the_next_one(place: Place, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    config = place.config(codec="zstd")
    with place.open({**config, "tiers": config["tiers"][:2]}) as store:
        store.save(1, adam_state(1)).wait("committed", timeout=200)

    def reach(name: str) -> None:
        if name == point:
            raise Killed

    with place.session(config) as session:
        info = session.run(scan(session.tiers, "r")).checkpoints[0]
        with monkeypatch.context() as patch:
            for module in ("copies", "copying"):
                patch.setattr(f"tierstore.tiers.{module}.reach", reach)
            with pytest.raises(Killed):
                session.run(promote(session.tiers, info.attempt, "far", clock=session.clock))
        assert session.run(scan(session.tiers, "r")).checkpoints[0].replicated == {}
        assert session.run(promote(session.tiers, info.attempt, "far", clock=session.clock)).done
    place.lose_exact_shards()
    with place.open(config) as store:
        assert_same_state(store.load(), adam_state(1))


def test_damage_in_a_packed_file_is_found_and_mended_from_a_plain_copy(place: Place) -> None:
    config = place.config(codec="zstd")
    place.save(config, 1)
    name = place.names("shard-")[0]
    with place.session(config) as session:
        assert session.run(verify(session.tiers, "r", level="full")).damage == ()
        good = place.bucket._files[name]
        place.flip(name, len(good) // 3)
        damage = session.run(verify(session.tiers, "r", level="full", only=["far"])).damage
        assert {f.code for f in damage} <= {"V103", "V109"}
        assert any(f.code == "V103" and f.blocks for f in damage)
        report = session.run(repair(session.tiers, "r", clock=session.clock))
        assert report.exit_code == 0
        assert place.bucket._files[name] == good
        assert session.run(verify(session.tiers, "r", level="full")).damage == ()


def test_a_plain_copy_is_mended_from_a_packed_one(place: Place) -> None:
    config = place.config(codec="zstd")
    place.save(config, 1)
    shard = next((place.root / "shared").rglob("shard-*"))
    good = shard.read_bytes()
    shard.write_bytes(good[:2_000_000] + bytes(4096) + good[2_004_096:])
    for path in (place.root / "node").rglob("shard-*"):
        path.unlink()
    with place.session(config) as session:
        report = session.run(repair(session.tiers, "r", clock=session.clock, only=["shared"]))
        assert [m.sources for m in report.mended] == [("far",)]
    assert shard.read_bytes() == good


def test_what_expires_is_freed_with_its_packed_files(place: Place) -> None:
    clock, config = SteppedClock(), place.config(codec="zstd")
    with place.open(config, clock) as store:
        for step in (1, 2):
            store.save(step, adam_state(step)).wait("far", timeout=200)
            clock.advance(7200)
    freed = {f.tier: f.nbytes for f in place.free(config, clock)}
    assert freed["far"] < 0.9 * freed["shared"]
    assert [name for name in place.names("shard-") if "step-0000000001" in name] == []
    assert len(place.names(".packed")) == 2


def test_what_a_tier_holds_is_what_is_taken_up_there(place: Place) -> None:
    config = place.config(codec="zstd")
    place.save(config, 1)
    stored = sum(len(data) for data in place.bucket._files.values())
    with place.session(config, create=False) as session:
        run = session.run(measure_run(session.tiers, "r"))
        by_tier = next(iter(run.by_attempt().values()))
        assert by_tier["far"] < 0.9 * by_tier["shared"]
        assert session.run(measure_stores(session.tiers))["far"].nbytes == stored
        assert session.run(used_on(session.tiers.get("far"))) == stored
        info = session.run(scan(session.tiers, "r")).checkpoints[0]
        files = sum(len(place.bucket._files[name]) for name in place.names(info.attempt.folder))
        assert info.taken_on("far") == files
        assert info.taken_on("shared") == info.nbytes


def test_a_capacity_is_filled_by_what_is_taken_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third checkpoint would not fit if the first two counted as they are outside."""
    config = place.config(codec="zstd")
    place.save(config, 1)
    with place.session(config, create=False) as session:
        raw = session.run(scan(session.tiers, "r")).checkpoints[0].nbytes
    place.save(place.config(codec="zstd", capacity=f"{int(2.9 * raw)}B"), 2, 3)
    with place.session(config, create=False) as session:
        assert all(c.replicas["far"] == "complete" for c in session.run(scan(session.tiers, "r")).checkpoints)


def test_the_commit_record_of_a_packed_authority_says_what_is_taken_up(place: Place) -> None:
    config = LAYOUTS["a bucket alone"](place)
    place.save(config, 1)
    with place.session(config, create=False) as session:
        info = session.run(scan(session.tiers, "r")).checkpoints[0]
    stored = sum(len(place.bucket._files[name]) for name in place.names(info.attempt.folder) if not name.endswith("manifest.json"))
    assert info.taken_on("far") == stored


def test_a_catalog_reads_no_packed_file(place: Place) -> None:
    config = place.config(codec="zstd")
    place.save(config, 1)

    async def refuse(path: str, *args: Any, **more: Any) -> bytes:
        assert not path.endswith(".packed") or path == PACKED_MARKER, path
        return await read(path, *args, **more)

    with place.session(config, create=False) as session:
        read = place.bucket.read
        place.bucket.read = refuse  # type: ignore[method-assign]
        assert session.run(scan(session.tiers, "r")).checkpoints[0].replicas["far"] == "complete"
        place.bucket.read = read  # type: ignore[method-assign]


def test_bytes_that_other_ranks_saved_are_read_from_a_packed_tier(place: Place) -> None:
    """Another layout: each reader wants rows that end within blocks."""
    config = place.config(codec="zstd")
    place.save(config, 1)
    place.lose_exact_shards()
    with place.open(config) as store, store.open_checkpoint() as checkpoint:
        parts = [checkpoint["master.w"][begin : begin + 171] for begin in range(0, ROWS, 171)]
        columns = [checkpoint["optim.w.exp_avg_sq"][:, begin : begin + 96] for begin in range(0, COLUMNS, 96)]
    wanted = adam_state(1)
    assert torch.equal(torch.cat(parts), wanted["master"]["w"])
    assert torch.equal(torch.cat(columns, dim=1), wanted["optim"]["w"]["exp_avg_sq"])
