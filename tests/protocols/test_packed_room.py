"""Room on packed tiers: what would fit packed is not refused because it would not fit as it is, and the disk has the last word."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_tiers_kit import Place, adam_state
from packing_kit import training_shard
from store_kit import has_error

import tierstore
from tierstore.errors import DeadlineError, TierFullError, TierStoreError
from tierstore.storage._syscalls import OsSyscalls
from tierstore.storage.contract import PackHints
from tierstore.storage.packed import PackedStorage
from tierstore.storage.packing_rules import Packing
from tierstore.storage.posix import PosixStorage
from tierstore.storage.sources import BytesSource
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.catalog import scan
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.promote import promote
from tierstore.tiers.repair import repair
from tierstore.tiers.space_account import SpaceAccount

MIB = 1 << 20


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path, monkeypatch)


def lora_state(step: int) -> dict[str, Any]:
    """A frozen base of 6 MiB, and an adapter that differs from step to step."""
    base = torch.randn(6 * MIB // 4, generator=torch.Generator().manual_seed(1))
    return {"base": base, "adapter": torch.randn(2000, generator=torch.Generator().manual_seed(step))}


def leave(place: Place, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """The bucket has so many bytes free."""

    async def free_nbytes() -> int | None:
        return nbytes

    monkeypatch.setattr(place.bucket, "free_nbytes", free_nbytes)


def why_not(store: tierstore.Store, step: int, state: Any) -> TierStoreError:
    """Why a step does not reach the tier now; it is left for later."""
    ticket = store.save(step, state)
    with pytest.raises(TierStoreError) as caught:
        has_error(ticket).wait("far", timeout=0.05)
    return caught.value


def test_bytes_that_the_tier_has_already_need_no_room(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    config = place.config(codec="zstd", unchanged_once=True)
    place.save(config, 1)
    with place.open(config) as store:
        store.save(2, lora_state(2)).wait("far", timeout=200)
        leave(place, monkeypatch, 3 * MIB)
        store.save(3, lora_state(3)).wait("far", timeout=200)
    with place.open(config) as store:
        assert store.checkpoints()[-1].complete_on == ("node", "shared", "far")


@pytest.mark.parametrize("quantise", [None, "q8"])
def test_what_the_newest_copy_took_says_what_the_next_one_will(place: Place, monkeypatch: pytest.MonkeyPatch, quantise: str | None) -> None:
    config = place.config(codec="zstd", unchanged_once=False, **({} if quantise is None else {"quantise": quantise}))
    place.save(config, 1)
    with place.session(config) as session:
        info = session.run(scan(session.tiers, "r")).find(1)
        assert info is not None
        taken, raw = info.taken_on("far"), info.nbytes
    assert taken is not None
    assert taken < 0.8 * raw
    leave(place, monkeypatch, int(MIB + 1.15 * taken))
    place.save(config, 2)
    leave(place, monkeypatch, int(MIB + 0.9 * taken))
    store = place.open(config)
    try:
        assert f" are wanted (about that, packed; {raw // 1000}" in str(why_not(store, 3, adam_state(3)))
        leave(place, monkeypatch, 100 * MIB)
    finally:
        store.close(60)


def test_the_first_copy_is_asked_room_for_as_it_is(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    config = place.config(codec="zstd")
    with place.open(config):
        pass
    leave(place, monkeypatch, 3 * MIB)
    store = place.open(config)
    try:
        assert "TierFullError" in str(why_not(store, 1, adam_state(1)))
        assert place.names("shard-") == []
        leave(place, monkeypatch, 100 * MIB)
    finally:
        store.close(60)


def test_a_save_straight_to_a_packed_tier_is_estimated_by_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"version": 1, "run": "r", "tiers": [{"name": "a", "uri": str(tmp_path / "a"), "scope": "shared", "codec": "zstd"}]}
    free = [1 << 40]

    async def free_nbytes(self: PosixStorage) -> int | None:
        return free[0]

    monkeypatch.setattr(PosixStorage, "free_nbytes", free_nbytes)
    with tierstore.open(config) as store:
        store.save(1, adam_state(1)).wait("committed", timeout=200)
        raw = store.checkpoints()[0].nbytes
        free[0] = 64 * MIB + raw - raw // 20
        store.save(2, adam_state(2)).wait("committed", timeout=200)
        free[0] = 64 * MIB + raw // 4
        ticket = store.save(3, adam_state(3))
        with pytest.raises(DeadlineError, match=r"TierFullError.* are wanted \(about that, packed; \d+ before\)"):
            has_error(ticket).wait("committed", timeout=0.05)
        free[0] = 1 << 40


def test_a_tier_with_a_capacity_is_told_what_a_copy_really_took(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.tiers.space_account.FRESH_S", 1e6)  # else a copy that takes a minute finds the listing too old
    config = place.config(codec="zstd", unchanged_once=False, capacity="100MiB")
    with place.open({**config, "tiers": config["tiers"][:2]}) as store:
        store.save(1, adam_state(1)).wait("committed", timeout=200)
    with place.session(config) as session:
        info = session.run(scan(session.tiers, "r")).find(1)
        assert info is not None
        far = session.tiers.get("far")
        far.account.listed(0, None, far.account.begin())
        context = CopyContext.make(session.tiers, session.clock)
        session.run(promote(session.tiers, info.attempt, "far", clock=session.clock, context=context))
        reckoned = far.account.estimate(None)
        assert reckoned is not None
        assert reckoned < 0.8 * info.nbytes
        assert reckoned > 0.8 * sum(len(place.bucket._files[name]) for name in place.names("shard-"))


def test_a_promise_is_not_corrected_where_the_tier_was_listed_meanwhile() -> None:
    account = SpaceAccount(lambda: 0.0)
    account.listed(1000, None, account.begin())
    promise = account.promise(500)
    assert account.estimate(None) == 1500
    account.written(promise, 200)
    assert account.estimate(None) == 1200
    listed_since = account.promise(500)
    account.listed(1700, None, account.begin())
    account.written(listed_since, 200)
    assert account.estimate(None) == 1700


def leave_on_disk(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[int]:
    """The disk under `folder` has as many bytes free as the list says; others have plenty."""
    free = [1 << 40]

    async def free_nbytes(self: PosixStorage) -> int | None:
        return free[0] if self.uri == str(folder) else 1 << 40

    monkeypatch.setattr(PosixStorage, "free_nbytes", free_nbytes)
    return free


def test_repair_mends_a_shard_on_a_packed_tier_that_only_has_room_for_it_packed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    config = place.config(codec="zstd")
    place.save(config, 1)
    (name,) = place.names("shard-")
    good = place.bucket._files[name]
    place.flip(name, 100)
    damaged = place.bucket._files[name]
    with place.session(config) as session:
        leave(place, monkeypatch, MIB + len(good) // 2)
        report = session.run(repair(session.tiers, "r", clock=session.clock))
        assert "are wanted (about that, packed; " in report.unmended[0].reason
        assert place.bucket._files[name] == damaged
        leave(place, monkeypatch, MIB + int(1.15 * len(good)))
        report = session.run(repair(session.tiers, "r", clock=session.clock))
        assert [mended.file for mended in report.mended] == ["shard-00000-of-00001.safetensors"]
    assert place.bucket._files[name] == good


def test_a_checkpoint_is_adopted_onto_a_packed_tier_that_only_has_room_for_it_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(adam_state(7), tmp_path / "foreign.pt")
    free = leave_on_disk(monkeypatch, tmp_path / "a")
    config = {"version": 1, "run": "r", "tiers": [{"name": "a", "uri": str(tmp_path / "a"), "scope": "shared", "codec": "zstd"}]}
    with tierstore.open(config) as store:
        store.save(1, adam_state(1)).wait("committed", timeout=200)
        raw = store.checkpoints()[0].nbytes
        free[0] = 64 * MIB + raw // 4
        with pytest.raises(TierFullError, match=r"are wanted \(about that, packed; "):
            store.adopt(tmp_path / "foreign.pt", step=7)
        free[0] = 64 * MIB + raw - raw // 20
        store.adopt(tmp_path / "foreign.pt", step=7).wait("committed", timeout=200)
        assert_same_state(store.load(7), adam_state(7))


def node_without_step_2(place: Place) -> tuple[dict[str, Any], int]:
    """A node whose tier packs, and has the first of two checkpoints; the raw length of one."""
    config = place.config()
    config = {**config, "tiers": [{**config["tiers"][0], "codec": "zstd"}, config["tiers"][1]]}
    with place.open(config) as store:
        for step in (1, 2):
            store.save(step, adam_state(step)).wait("committed", timeout=200)
        raw = store.checkpoints()[0].nbytes
    for folder in (place.root / "node" / "r").glob("step-0000000002-*"):
        shutil.rmtree(folder)
    return {**config, "load": {"hydrate": "node"}}, raw


def hydrated(place: Place) -> list[Path]:
    return [path for path in (place.root / "node").rglob("*") if "step-0000000002" in str(path) and path.name.startswith("shard-")]


def test_hydrate_brings_a_shard_onto_a_packed_tier_that_only_has_room_for_it_packed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    config, raw = node_without_step_2(place)
    free = leave_on_disk(monkeypatch, place.root / "node")
    for room, files in ((raw // 4, 0), (raw - raw // 20, 1)):
        free[0] = 64 * MIB + room
        with place.open(config) as store:
            assert_same_state(store.load(2), adam_state(2))
        assert len(hydrated(place)) == files


def test_a_node_that_is_full_after_all_keeps_nothing_of_what_is_hydrated_and_the_load_reads_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = node_without_step_2(place)
    real, full = OsSyscalls.pwrite, []

    def pwrite(self: OsSyscalls, fd: int, data: Any, offset: int) -> int:
        if len(data) >= 1 << 16 and os.readlink(f"/proc/self/fd/{fd}").startswith(str(place.root / "node")) and offset:
            full.append(offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, fd, data[: 1 << 16] if len(data) > 1 << 16 else data, offset)

    monkeypatch.setattr(OsSyscalls, "pwrite", pwrite)
    before = {path for path in (place.root / "node").rglob("*") if path.is_file()}
    with place.open(config) as store:
        assert_same_state(store.load(2), adam_state(2))
    assert full
    assert {path for path in (place.root / "node").rglob("*") if path.is_file() and "step-0000000002" in str(path)} <= before
    assert hydrated(place) == []
    assert [path for path in (place.root / "node" / ".tmp").iterdir() if "write" in path.name] == []


class Full(OsSyscalls):
    """A disk on which the third piece of a file finds no room, once."""

    def __init__(self) -> None:
        self._calls = itertools.count(1)  # no call is lost, or counted twice, by threads that come at once

    def pwrite(self, *args: Any) -> int:
        if next(self._calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwrite(*args)


def test_a_disk_that_is_full_in_the_middle_of_a_packed_file_keeps_nothing_of_it(tmp_path: Path) -> None:
    data = training_shard(layers=3, rows=2000)

    async def body() -> None:
        storage = PackedStorage(PosixStorage(tmp_path, durable=False, syscalls=Full()), Packing(codec="zstd"))
        path = "r/step-1/shard-00000-of-00001.safetensors"
        with pytest.raises(TierFullError):
            await storage.write_packed(path, BytesSource(data), PackHints())
        left = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != ".packed"]
        assert left == []
        info = await storage.write_packed(path, BytesSource(data), PackHints())
        assert info.taken_nbytes < len(data)
        same = await storage.read(path) == data
        assert same
        await storage.close()

    asyncio.run(body())
