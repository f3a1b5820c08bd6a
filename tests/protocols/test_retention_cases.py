"""What users of other checkpoint storage ran into with retention and deletion (CASES.md, by its numbers): the real store and collector.

Saving is the store's; deciding and freeing are a collector's of another process, whose clock is half a day later.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from retention_kit import HOUR_S, NAMES, Truth, client_tiers, files_of_storages, garbage, housekeeping, persist_small, policy_of, save_small
from stepping_kit import tiers_over
from store_kit import has_error, open_over, unsynced
from tiers_kit import Hooked, SteppedClock, attempt_at, flip, path_of, was_set

import tierstore
from tierstore.config_retention import RetentionConfig
from tierstore.errors import IntegrityError, SaveError, TierStoreError
from tierstore.names import Attempt, shard_name
from tierstore.storage.contract import Storage
from tierstore.storage.posix import PosixStorage
from tierstore.storage.s3 import S3Storage
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.catalog import Catalog, scan
from tierstore.tiers.decisions import pin
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.gc.reports import CollectReport
from tierstore.tiers.promote import promote
from tierstore.tiers.retention import Reason
from tierstore.tiers.tier import Tiers

RULES = {"poll_s": 0.005, "retry_first_s": 0.005, "retry_most_s": 0.05, "patience_s": 0.3}


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.arange(64) * step, "step": step}


def open_at(root: Path, patch: pytest.MonkeyPatch, make: Callable[[str], Storage] = unsynced, **config: Any) -> tierstore.Store:
    return open_over(patch, make, root, rules=RULES, run="run", **config)


def save_all(root: Path, patch: pytest.MonkeyPatch, *steps: int, metrics: Mapping[int, float] | None = None) -> None:
    """One process that saves these steps onto every tier, and ends."""
    with open_at(root, patch) as store:
        for step in steps:
            loss = (metrics or {}).get(step)
            store.save(step, state_of(step), metrics=None if loss is None else {"loss": loss}).wait("durable", timeout=200)
        store.sync(timeout=200)


def folders(root: Path) -> dict[str, Storage]:
    return {name: PosixStorage(root / name, durable=False) for name in NAMES}


def half_a_day_later() -> SteppedClock:
    clock = SteppedClock()
    clock.wall = datetime.now(timezone.utc) + timedelta(hours=12)
    return clock


async def tidy(tiers: Tiers, policy: RetentionConfig, *, protected: Mapping[Attempt, Reason] | None = None) -> CollectReport:
    keeper = housekeeping(tiers, policy, half_a_day_later(), protected=protected)
    await prune(keeper)
    report = await collect(keeper, now=True)
    assert not report.failed, report.failed
    return report


def keep_house(root: Path, policy: RetentionConfig) -> CollectReport:
    """Another process decides by the policy and frees at once."""
    return asyncio.run(tidy(client_tiers(folders(root)), policy))


def steps_in(root: Path) -> set[int]:
    """The steps that are committed and not swept, hidden ones too."""
    return {attempt.step for attempt in truth_of(root).existing()}


def truth_of(root: Path) -> Truth:
    return Truth(asyncio.run(files_of_storages(folders(root))))


def catalog_of(root: Path) -> Catalog:
    return asyncio.run(scan(client_tiers(folders(root)), "run"))


def load_from(root: Path, patch: pytest.MonkeyPatch, step: int) -> None:
    with open_at(root, patch) as store:
        assert_same_state(store.load(step), state_of(step))


LAST_1 = policy_of({"last": 1}, min_age_s=1.0, orphan_grace_s=1000 * HOUR_S)


# ---- Retention, GC, rotation


def test_22_a_limit_of_one_never_empties_the_run_and_keeps_best_and_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, monkeypatch, 1, 2, 3, metrics={1: 2.0, 2: 0.5, 3: 1.0})
    keep_house(tmp_path, policy_of({"last": 1}, {"best": {"metric": "loss", "mode": "min", "count": 1}}, min_age_s=1.0))
    assert steps_in(tmp_path) == {2, 3}
    for _ in range(3):
        keep_house(tmp_path, LAST_1)
    assert steps_in(tmp_path) == {3}
    load_from(tmp_path, monkeypatch, 3)


def test_23_file_times_in_reverse_order_choose_no_victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, monkeypatch, 9, 10, 11)
    for path in tmp_path.rglob("*"):
        step = next((int(part[5:15]) for part in path.parts if part.startswith("step-")), 0)
        os.utime(path, (2_000_000_000 - step * 1000,) * 2)
    keep_house(tmp_path, policy_of({"last": 2}, min_age_s=1.0))
    assert steps_in(tmp_path) == {10, 11}


def test_24_several_collectors_of_the_same_folders_do_no_harm_and_meet_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, monkeypatch, *range(1, 6))

    async def all_at_once() -> None:
        await asyncio.gather(*(tidy(client_tiers(folders(tmp_path)), LAST_1) for _ in range(4)))

    asyncio.run(all_at_once())
    keep_house(tmp_path, LAST_1)
    assert steps_in(tmp_path) == {5}
    assert not garbage(truth_of(tmp_path))


def test_25_steps_are_numbers_and_a_folder_that_only_looks_alike_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, monkeypatch, *range(8, 13))
    notes = [tmp_path / "shared" / "run" / name / "manifest.json" for name in ("my-step-3-notes", "step-3", "step-0000000008-mine")]
    for note in notes:
        note.parent.mkdir()
        note.write_text("not a checkpoint's")
    keep_house(tmp_path, policy_of({"last": 2}, min_age_s=1.0))
    assert steps_in(tmp_path) == {11, 12}
    assert all(note.read_text() == "not a checkpoint's" for note in notes)


def test_26_a_save_that_fails_costs_no_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, monkeypatch, 1)

    async def full(operation: str, path: str) -> None:
        if operation in ("write", "put", "create") and "step-0000000002" in path:
            raise IntegrityError("injected: the bytes are not what was promised")

    store = open_at(tmp_path, monkeypatch, lambda uri: Hooked(unsynced(uri), full))
    store.save(2, state_of(2))
    with pytest.raises(SaveError):
        store.close(60)
    keep_house(tmp_path, LAST_1)
    load_from(tmp_path, monkeypatch, 1)


def test_28_29_what_is_still_being_written_does_not_push_out_the_only_durable_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, monkeypatch, 10)
    held, go_on = threading.Event(), threading.Event()

    async def blocked(operation: str, path: str) -> None:
        if path.endswith("000000.json") and operation == "create":
            held.set()
            await was_set(go_on)

    with open_at(tmp_path, monkeypatch, lambda uri: Hooked(unsynced(uri), blocked)) as store:
        tickets = [store.save(step, state_of(step)) for step in (20, 30)]
        assert held.wait(60)
        keep_house(tmp_path, LAST_1)
        assert steps_in(tmp_path) == {10}
        go_on.set()
        for ticket in tickets:
            ticket.wait("durable", timeout=200)
    keep_house(tmp_path, LAST_1)
    assert steps_in(tmp_path) == {30}


def test_30_a_pin_lasts_over_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, monkeypatch, 100)
    asyncio.run(pin(client_tiers(folders(tmp_path)), catalog_of(tmp_path).checkpoints[0].attempt, clock=half_a_day_later()))
    save_all(tmp_path, monkeypatch, 200, 300)
    keep_house(tmp_path, LAST_1)
    assert steps_in(tmp_path) == {100, 300}


def test_31_a_save_commits_while_a_deletion_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also google/orbax#2156, AI-Hypercomputer/maxtext#3488."""
    deleting, go_on = threading.Event(), threading.Event()

    async def slow(operation: str, path: str) -> None:
        if operation == "delete" and "/step-" in path and ".leases" not in path:
            deleting.set()
            await was_set(go_on)

    soon = {"undelete_window": "1ms", "max_clock_skew": "1ms", "max_delete_fraction": "100%"}
    retention = {"keep": [{"last": 1}], "protect": {"min_age": "1ms"}, "gc": soon}
    with open_at(tmp_path, monkeypatch, lambda uri: Hooked(unsynced(uri), slow), retention=retention) as store:
        try:
            step = 0
            while not deleting.is_set() and step < 200:
                step += 1
                store.save(step, state_of(step)).wait("durable", timeout=200)
            assert deleting.wait(60), "housekeeping never came to a deletion"
            store.save(step + 1, state_of(step + 1)).wait("durable", timeout=200)
            assert not go_on.is_set()
        finally:
            go_on.set()
    load_from(tmp_path, monkeypatch, step + 1)


def test_32_the_disk_stays_bounded_over_many_saves_on_every_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = dict.fromkeys(NAMES, 0)
    for begin in range(1, 21, 5):
        save_all(tmp_path, monkeypatch, *range(begin, begin + 5))
        keep_house(tmp_path, policy_of({"last": 2}, min_age_s=1.0))
        for name in NAMES:
            payload = list((tmp_path / name / "run").rglob("*.safetensors"))
            most[name] = max(most[name], sum(p.stat().st_size for p in payload))
            assert len({p.parent for p in payload}) == 2
    assert len(set(most.values())) == 1, f"some tier grew: {most}"


def test_33_a_full_tier_refuses_the_save_before_anything_old_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_all(tmp_path, monkeypatch, 1)
    before = truth_of(tmp_path)

    class Full(Hooked):
        async def free_nbytes(self) -> int | None:
            return 0

    async def nothing(operation: str, path: str) -> None: ...

    store = open_at(tmp_path, monkeypatch, lambda uri: Full(unsynced(uri), nothing))
    has_error(store.save(2, state_of(2)), times=2)  # then it is in memory only, and why neither tier took it is known
    with pytest.raises(TierStoreError, match="0 bytes free"):
        store.close(0.5)
    after = truth_of(tmp_path)
    for name in NAMES:
        assert before.files[name].items() <= after.files[name].items()
    load_from(tmp_path, monkeypatch, 1)


@pytest.mark.s3
def test_34_uploads_of_dead_processes_are_aborted_and_nobody_elses(
    s3_bucket: str, s3_options: dict[str, Any], s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort = S3Storage.abort_stale_uploads

    async def two_days_later(self: S3Storage, older_than_s: float) -> list[str]:
        return await abort(self, older_than_s - 2 * 86400)

    monkeypatch.setattr(S3Storage, "abort_stale_uploads", two_days_later)
    bucket, _, prefix = s3_bucket.removeprefix("s3://").partition("/")
    client = s3_server._client()
    for key in (f"{prefix}/run/step-0000000001-01M8KJTAF80000000000000000/{shard_name(0, 1)}", f"{prefix}-another/file"):
        client.create_multipart_upload(Bucket=bucket, Key=key)

    def uploads(of: str) -> list[str]:
        listed = client.list_multipart_uploads(Bucket=bucket, Prefix=of).get("Uploads", [])
        return [upload["Key"] for upload in listed if upload["Key"].startswith(of)]

    async def act() -> Mapping[str, Any]:
        storages: dict[str, Storage] = {"far": S3Storage(s3_bucket, s3_options)}
        try:
            keeper = housekeeping(tiers_over(storages, nodes=0), policy_of({"last": 1}), half_a_day_later())
            return (await collect(keeper)).leftovers
        finally:
            await storages["far"].close()

    assert len(uploads(f"{prefix}/")) == 1
    assert asyncio.run(act())["far"]
    assert uploads(f"{prefix}/") == []
    assert len(uploads(f"{prefix}-another/")) == 1


# ---- GC races


def test_a_save_that_lost_a_rank_does_not_count_as_the_one_to_keep(tmp_path: Path) -> None:
    """PrimeIntellect-ai/prime-rl#1251, NVIDIA-NeMo/Megatron-Bridge#5184: keep 1 must leave a full checkpoint."""

    async def act() -> None:
        tiers = client_tiers(folders(tmp_path))
        await save_small(tiers, attempt_at(1))
        await persist_small(tiers, attempt_at(2), 0, world_size=2)
        await tidy(tiers, LAST_1)

    asyncio.run(act())
    assert steps_in(tmp_path) == {1}


def test_what_this_process_has_in_flight_is_not_deleted_under_it(tmp_path: Path) -> None:
    """camunda/camunda#10159, modelscope/ms-swift#9963: a backup in progress, a folder that is not finished."""

    async def act() -> tuple[CollectReport, CollectReport]:
        tiers = client_tiers(folders(tmp_path))
        for step in (1, 2):
            await save_small(tiers, attempt_at(step))
        await persist_small(tiers, attempt_at(3), 0, world_size=2)
        busy = {attempt_at(step).step for step in (1, 3)}
        catalog = await scan(tiers, "run")
        attempts = [*(c.attempt for c in catalog.checkpoints), *(c.attempt for c in catalog.incomplete)]
        protected = {a: Reason(kind="in-flight", text="being copied") for a in attempts if a.step in busy}
        soon = policy_of({"last": 1}, min_age_s=1.0, orphan_grace_s=60.0)
        held = await tidy(tiers, soon, protected=protected)
        return held, await tidy(tiers, soon)

    held, free = asyncio.run(act())
    assert held.freed == ()
    assert {freed.attempt.step for freed in free.freed} == {1, 3}


def test_what_somebody_else_deleted_already_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """google/orbax#605, PrimeIntellect-ai/prime-rl#1716: missing is done."""
    save_all(tmp_path, monkeypatch, 1, 2)
    gone = next((tmp_path / "shared" / "run").glob("step-0000000001-*"))
    asyncio.run(prune(housekeeping(client_tiers(folders(tmp_path)), LAST_1, half_a_day_later())))
    shutil.rmtree(gone)
    keep_house(tmp_path, LAST_1)
    assert steps_in(tmp_path) == {2}
    assert not garbage(truth_of(tmp_path))


def test_checkpoints_of_earlier_processes_are_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """microsoft/FASTER#651: what is kept is derived from the store, not from what this process remembers."""
    for begin in (1, 3, 5):
        save_all(tmp_path, monkeypatch, begin, begin + 1)
        keep_house(tmp_path, policy_of({"last": 2}, min_age_s=1.0))
    assert steps_in(tmp_path) == {5, 6}


# ---- incomplete and wrong latest, as far as deletion goes


def test_after_a_rewind_the_new_low_steps_are_not_pushed_out_by_the_old_high_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface/transformers#28862: a folder used again."""
    save_all(tmp_path, monkeypatch, 90, 100)
    save_all(tmp_path, monkeypatch, 10)
    keep_house(tmp_path, LAST_1)
    assert steps_in(tmp_path) == {10, 100}


def test_what_a_process_resumed_from_stays_while_it_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning-AI/pytorch-lightning#21813."""
    monkeypatch.setattr("tierstore.tiers.leased._RELEASE_S", 200.0)  # a lease that was left behind would hold it, too
    save_all(tmp_path, monkeypatch, 1)
    with open_at(tmp_path, monkeypatch) as store:
        resumed = store.resume()
        assert resumed is not None
        end = time.monotonic() + 60
        while not list((tmp_path / "shared" / "run" / ".leases").rglob("*.json")):  # nobody waits for it, so it may come later
            assert time.monotonic() < end, "no lease on what was resumed from"
            time.sleep(0.005)
        save_all(tmp_path, monkeypatch, 2)
        keep_house(tmp_path, LAST_1)
        assert 1 in steps_in(tmp_path)
        assert_same_state(store.load(1), state_of(1))
    keep_house(tmp_path, LAST_1)
    assert steps_in(tmp_path) == {2}


def test_a_checkpoint_whose_records_were_lost_is_never_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """google/orbax#394: a copy without its marker."""
    save_all(tmp_path, monkeypatch, 1, 2)
    copied = tmp_path / "shared" / "run" / attempt_at(7).name
    shutil.copytree(next((tmp_path / "shared" / "run").glob("step-0000000001-*")), copied)
    before = {p.name: p.read_bytes() for p in copied.iterdir()}
    report = keep_house(tmp_path, policy_of({"last": 1}, min_age_s=1.0, orphan_grace_s=60.0))
    assert {p.name: p.read_bytes() for p in copied.iterdir()} == before
    assert any(attempt.step == 7 for attempt, _ in report.waiting)
    shutil.rmtree(tmp_path / "shared" / "run" / ".log")
    with pytest.raises(TierStoreError, match="lost the logs"):
        keep_house(tmp_path, LAST_1)
    load_from(tmp_path, monkeypatch, 2)


def test_a_newest_that_was_found_damaged_keeps_the_newest_good_one(tmp_path: Path) -> None:
    """marin-community/marin#5386: damage in the latest, and sparse retention."""

    async def act() -> None:
        tiers = client_tiers(folders(tmp_path))
        for step in (1, 2, 3):
            await save_small(tiers, attempt_at(step))
        newest = (await scan(tiers, "run")).checkpoints[-1].attempt
        flip(path_of(tiers, "shared", newest, shard_name(0, 1)))
        with pytest.raises(IntegrityError):
            await promote(tiers, newest, "far", clock=SteppedClock())
        await tidy(tiers, LAST_1)

    asyncio.run(act())
    assert steps_in(tmp_path) == {2, 3}
    assert {c.step for c in catalog_of(tmp_path).checkpoints if not c.hidden} == {2, 3}


@pytest.mark.parametrize("skew_s", [-20 * 60.0, 20 * 60.0])
def test_a_skewed_clock_deletes_nothing_young(tmp_path: Path, skew_s: float) -> None:
    """aws/aws-cli#1065, s3fs-fuse/s3fs-fuse#1042: twenty minutes either way."""

    async def act() -> None:
        tiers = client_tiers(folders(tmp_path))
        for step in (1, 2, 3):
            await save_small(tiers, attempt_at(step))
        clock = SteppedClock()
        clock.advance(skew_s + 60.0)
        keeper = housekeeping(tiers, policy_of({"last": 1}, min_age_s=HOUR_S), clock)
        await prune(keeper)
        await collect(keeper, now=True)

    asyncio.run(act())
    assert steps_in(tmp_path) == {1, 2, 3}
