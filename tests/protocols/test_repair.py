"""Repair: exactly the promised bytes come back, block by block, from whichever tier has them; what is good nowhere is named."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import multiprocessing
import os
import random
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from tiers_kit import BLOCK, Hooked, SteppedClock, attempt_at, copy_to, flip, path_of, persist_rank, save, shard_of, tiers_in

from tierstore import crashpoints
from tierstore.clock import utc_text
from tierstore.crashpoints import CRASH_EXIT
from tierstore.errors import TemporaryError, TierStoreError
from tierstore.names import INDEX, MANIFEST, OBJECTS, Attempt, part_name, shard_name
from tierstore.testing.faults import FaultKind, FaultPlan, FaultStorage
from tierstore.tiers.catalog import scan
from tierstore.tiers.commit import commit
from tierstore.tiers.gc.standing import copies_standing
from tierstore.tiers.log import append, read_log
from tierstore.tiers.log_facts import fold
from tierstore.tiers.promote import promote, reconcile
from tierstore.tiers.repair import RepairReport, repair
from tierstore.tiers.tier import Tiers
from tierstore.tiers.verify import verify
from tierstore.tiers.view import many_disks

SHARD = shard_name(0, 1)
NAMES = ("node", "shared", "far")
ROWS = 64 * BLOCK // 5000 - 1
"""Rows of the kit's tensor, so that the shard has a little less than 64 blocks."""


async def stored(root: Path, *steps: int, rows: int = 6) -> tuple[Tiers, list[Attempt]]:
    """A store with checkpoints on the authority and the tier after it."""
    tiers = tiers_in(root, NAMES)
    attempts = []
    for step in steps:
        attempt = attempt_at(step)
        attempts.append(await save_rows(tiers, attempt, rows))
    await reconcile(tiers, "run", clock=SteppedClock())
    return tiers, attempts


async def save_rows(tiers: Tiers, attempt: Attempt, rows: int) -> Attempt:
    await persist_rank(tiers, attempt, tiers.authority, shard=shard_of(0, 1, rows=rows))
    await commit(tiers, attempt, deadline_s=0, clock=SteppedClock())
    return attempt


def mend(tiers: Tiers, **options: object) -> RepairReport:
    return asyncio.run(repair(tiers, "run", clock=SteppedClock(), **options))  # type: ignore[arg-type]


def codes(tiers: Tiers, level: str = "full") -> list[tuple[str, str, str]]:
    return [(f.code, f.tier, f.file) for f in asyncio.run(verify(tiers, "run", level=level)).findings]  # type: ignore[arg-type]


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and ".tmp" not in p.parts}


def times(root: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(root)): (p.stat().st_ino, p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file()}


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - BLOCK)


def test_a_sound_store_is_left_alone(tmp_path: Path) -> None:
    tiers, _ = asyncio.run(stored(tmp_path, 1))
    before = times(tmp_path)
    report = mend(tiers)
    assert (report.mended, report.unmended, report.proved, report.exit_code) == ((), (), (), 0)
    assert times(tmp_path) == before


@pytest.mark.parametrize("tier", ["shared", "far"])
@pytest.mark.parametrize("harm", [Path.unlink, truncate, flip])
def test_every_file_comes_back_to_the_last_byte(tmp_path: Path, tier: str, harm: Callable[[Path], None]) -> None:
    tiers, (attempt,) = asyncio.run(stored(tmp_path, 1))
    before = contents(tmp_path)
    for file in (SHARD, part_name(0), OBJECTS, INDEX, MANIFEST):
        if harm is truncate and path_of(tiers, tier, attempt, file).stat().st_size <= BLOCK:
            continue
        harm(path_of(tiers, tier, attempt, file))
        would = mend(tiers, dry_run=True)
        assert [(m.tier, m.file) for m in would.mended] == [(tier, file)]
        assert contents(tmp_path) != before
        report = mend(tiers)
        assert [(m.tier, m.file) for m in report.mended] == [(tier, file)]
        assert (report.unmended, report.exit_code) == ((), 0)
        assert contents(tmp_path) == before
    assert codes(tiers) == []


def test_one_bad_block_of_sixty_four_fetches_one_block(tmp_path: Path) -> None:
    tiers, (attempt,) = asyncio.run(stored(tmp_path, 1, rows=ROWS))
    path = path_of(tiers, "far", attempt, SHARD)
    whole = path.read_bytes()
    assert 60 < len(whole) // BLOCK <= 64
    flip(path, 17 * BLOCK + 5)
    asked: list[tuple[int, int]] = []
    inner = tiers.get("shared").storage
    read_into = inner.read_into

    async def counted(name: str, offset: int, buffer: memoryview) -> None:
        if name.endswith(SHARD):
            asked.append((offset, len(buffer)))
        await read_into(name, offset, buffer)

    inner.read_into = counted  # type: ignore[method-assign]
    report = mend(tiers, only=["far"])
    assert asked == [(17 * BLOCK, BLOCK)]
    (mended,) = report.mended
    assert (mended.blocks, mended.sources, mended.nbytes_fetched) == ((17,), ("shared",), BLOCK)
    assert path.read_bytes() == whole


def test_two_tiers_damaged_in_different_blocks_mend_each_other(tmp_path: Path) -> None:
    tiers, (attempt,) = asyncio.run(stored(tmp_path, 1, rows=ROWS))
    before = contents(tmp_path)
    flip(path_of(tiers, "shared", attempt, SHARD), 3 * BLOCK)
    flip(path_of(tiers, "far", attempt, SHARD), 9 * BLOCK)
    report = mend(tiers)
    assert {(m.tier, m.blocks, m.sources) for m in report.mended} == {("shared", (3,), ("far",)), ("far", (9,), ("shared",))}
    assert contents(tmp_path) == before


def test_a_file_is_written_anew_and_never_in_place(tmp_path: Path) -> None:
    """A reader that has the damaged file open goes on reading the same bytes."""
    tiers, (attempt,) = asyncio.run(stored(tmp_path, 1))
    path = path_of(tiers, "far", attempt, SHARD)
    flip(path)
    damaged = path.read_bytes()
    with path.open("rb") as before:
        mend(tiers)
        assert before.read() == damaged
    assert path.read_bytes() != damaged


def test_what_is_good_nowhere_is_named_with_its_tensors_and_the_rest_is_mended(tmp_path: Path) -> None:
    tiers, (first, second) = asyncio.run(stored(tmp_path, 1, 2, rows=ROWS))
    for tier in ("shared", "far"):
        flip(path_of(tiers, tier, first, SHARD), 20 * BLOCK)
    flip(path_of(tiers, "far", first, SHARD), 30 * BLOCK)
    flip(path_of(tiers, "far", second, SHARD), 30 * BLOCK)
    before = {tier: path_of(tiers, tier, first, SHARD).read_bytes() for tier in ("shared", "far")}
    for dry in (True, False):
        report = mend(tiers, dry_run=dry)
        assert [(m.attempt, m.tier) for m in report.mended] == [(second, "far")]
        assert [(u.attempt, u.tier, u.file, u.blocks, u.tensors) for u in report.unmended] == [
            (first, "shared", SHARD, (20,), ("w",)),
            (first, "far", SHARD, (20,), ("w",)),
        ]
        assert report.exit_code == 3
    assert {tier: path_of(tiers, tier, first, SHARD).read_bytes() for tier in before} == before
    assert mend(tiers).exit_code == 6


@pytest.mark.parametrize("world_size", [1, 3])
def test_index_and_objects_that_no_tier_has_are_made_anew_from_the_parts(tmp_path: Path, world_size: int) -> None:
    """Also the shards can be mended then, for their digests are in that index."""

    async def prepare() -> tuple[Tiers, Attempt]:
        tiers = tiers_in(tmp_path, NAMES)
        attempt = await save(tiers, 1, world_size=world_size)
        await reconcile(tiers, "run", clock=SteppedClock())
        return tiers, attempt

    tiers, attempt = asyncio.run(prepare())
    before = contents(tmp_path)
    for tier in ("shared", "far"):
        flip(path_of(tiers, tier, attempt, INDEX))
        path_of(tiers, tier, attempt, OBJECTS).unlink()
    flip(path_of(tiers, "far", attempt, shard_name(0, world_size)))
    assert mend(tiers, dry_run=True).exit_code == 0
    report = mend(tiers)
    assert report.exit_code == 0
    assert {m.sources for m in report.mended if m.file == INDEX} >= {("the part records",)}
    assert contents(tmp_path) == before
    assert codes(tiers) == []


def test_a_copy_that_is_gone_is_made_again_with_its_log(tmp_path: Path) -> None:
    tiers, (attempt,) = asyncio.run(stored(tmp_path, 1))
    before = contents(tmp_path)
    shutil.rmtree(tmp_path / "far" / "run")
    assert [c for c, _, _ in codes(tiers, "quick")] == ["V113"]
    assert mend(tiers, level="quick").exit_code == 0
    after = contents(tmp_path)
    assert {k for k in before if k.endswith("000001.json")} == {f"shared/{attempt.record_path(1)}"}
    assert {k: v for k, v in after.items() if k in before} == before
    assert codes(tiers) == []


def test_the_authoritys_own_payload_comes_back(tmp_path: Path) -> None:
    tiers, (attempt,) = asyncio.run(stored(tmp_path, 1))
    before = contents(tmp_path)
    shutil.rmtree(tmp_path / "shared" / attempt.folder)
    assert mend(tiers).exit_code == 0
    assert contents(tmp_path) == before


@pytest.mark.parametrize("harm", [flip, Path.unlink])
@pytest.mark.parametrize("seq", [0, 1, 2])
def test_a_damaged_record_is_put_back_byte_by_byte(tmp_path: Path, harm: Callable[[Path], None], seq: int) -> None:
    """Of every record that some replica has a copy of; also the last one, which a restored backup may lack."""

    async def prepare() -> tuple[Tiers, Attempt]:
        tiers, (attempt,) = await stored(tmp_path, 1)
        await append(tiers.authority.storage, attempt, "pinned", {"name": "paper"}, clock=SteppedClock())
        await copy_to(tiers, attempt, "far")
        return tiers, attempt

    tiers, attempt = asyncio.run(prepare())
    before = contents(tmp_path)
    harm(tmp_path / "shared" / attempt.record_path(seq))
    if (harm, seq) == (Path.unlink, 0):
        assert {c for c, _, _ in codes(tiers, "quick")} == {"V110"}  # no commit record: the log is lost, and `recover` is for that
        assert mend(tiers).exit_code == 6
        return
    assert ("V105", "shared", attempt.record_path(seq)) in [(c, "shared", f) for c, _, f in codes(tiers, "quick")]
    assert mend(tiers, dry_run=True).mended
    report = mend(tiers)
    assert [(m.tier, m.file) for m in report.mended] == [("shared", attempt.record_path(seq))]
    assert contents(tmp_path) == before


def test_copies_that_contradict_each_other_decide_nothing(tmp_path: Path) -> None:
    async def prepare() -> tuple[Tiers, Attempt]:
        tiers, (attempt,) = await stored(tmp_path, 1)
        await copy_to(tiers, attempt, "node")
        await append(tiers.get("node").storage, attempt, "pinned", {"name": "other"}, clock=SteppedClock())
        await append(tiers.get("far").storage, attempt, "pinned", {"name": "x"}, clock=SteppedClock())
        await append(tiers.get("far").storage, attempt, "pinned", {"name": "y"}, clock=SteppedClock())
        return tiers, attempt

    tiers, attempt = asyncio.run(prepare())
    record = tmp_path / "shared" / attempt.record_path(1)
    flip(record, 0)
    damaged = record.read_bytes()
    report = mend(tiers)
    assert "contradict" in report.unmended[0].reason
    assert record.read_bytes() == damaged


@pytest.mark.parametrize("harm", [flip, Path.unlink])
def test_a_replicas_copy_of_the_log_comes_from_the_authority(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    tiers, (attempt,) = asyncio.run(stored(tmp_path, 1))
    record = tmp_path / "far" / attempt.record_path(0)
    good = record.read_bytes()
    harm(record)
    assert codes(tiers, "quick") == [("V114", "far", attempt.record_path(0))]
    assert mend(tiers).exit_code == 0
    assert record.read_bytes() == good
    assert codes(tiers) == []


@pytest.mark.parametrize("damaged", [False, True])
def test_a_repaired_copy_leaves_its_quarantine(tmp_path: Path, damaged: bool) -> None:
    """Also where the file turns out to be good: a bad cable, not a bad disk."""

    async def prepare() -> tuple[Tiers, Attempt]:
        tiers, (attempt,) = await stored(tmp_path, 1)
        await append(tiers.authority.storage, attempt, "quarantined", {"tier": "far", "file": SHARD, "detail": ""}, clock=SteppedClock())
        if damaged:
            flip(path_of(tiers, "far", attempt, SHARD))
        return tiers, attempt

    tiers, attempt = asyncio.run(prepare())
    assert codes(tiers, "quick") == [("V115", "far", SHARD)]
    assert mend(tiers, level="quick", dry_run=True).exit_code == 0
    report = mend(tiers, level="quick")
    assert report.proved == ((attempt, "far"),)
    assert len(report.mended) == int(damaged)
    facts = fold(asyncio.run(read_log(tiers.authority.storage, attempt)))
    assert not facts.quarantined
    assert set(facts.replicated["far"].data["files"]) == {SHARD, part_name(0), OBJECTS, INDEX, MANIFEST}
    assert codes(tiers) == []


def test_a_copy_that_stays_damaged_stays_in_quarantine(tmp_path: Path) -> None:
    async def prepare() -> tuple[Tiers, Attempt]:
        tiers, (attempt,) = await stored(tmp_path, 1)
        await append(tiers.authority.storage, attempt, "quarantined", {"tier": "far", "file": SHARD, "detail": ""}, clock=SteppedClock())
        for tier in ("shared", "far"):
            flip(path_of(tiers, tier, attempt, SHARD))
        flip(path_of(tiers, "far", attempt, OBJECTS))
        return tiers, attempt

    tiers, attempt = asyncio.run(prepare())
    assert mend(tiers).exit_code == 3
    assert fold(asyncio.run(read_log(tiers.authority.storage, attempt))).quarantined == {("far", SHARD), ("shared", SHARD)}


def test_what_a_repair_found_damaged_and_could_not_mend_counts_as_no_copy_any_more(tmp_path: Path) -> None:
    """Else the next eviction drops the good copy because of one that only has the right size."""
    tiers, (attempt,) = asyncio.run(stored(tmp_path, 1))
    damaged, good = path_of(tiers, "shared", attempt, SHARD), path_of(tiers, "far", attempt, SHARD)
    whole = good.read_bytes()
    for path in (damaged, good):
        flip(path)  # the same block: nothing can be mended
    assert mend(tiers, dry_run=True).exit_code == 6

    def state() -> tuple[set[tuple[str, str]], tuple[str, ...]]:
        facts = fold(asyncio.run(read_log(tiers.authority.storage, attempt)))
        return set(facts.quarantined), asyncio.run(copies_standing(tiers, attempt, facts, without="far")).standing

    assert state() == (set(), ("shared",))
    assert mend(tiers, only=["shared"]).exit_code == 6
    assert state() == ({("shared", SHARD)}, ())
    good.write_bytes(whole)
    assert mend(tiers).exit_code == 0
    assert state() == (set(), ("shared",))


def test_a_store_on_one_node_records_damage_and_its_repair_also_of_many_ranks(tmp_path: Path) -> None:
    """A node's tier before the authority is another disk on each node. The authority is one, also where it lies on a node."""
    names = ("node", "shared", "far", "cold")
    made = tiers_in(tmp_path, names)
    on_node = {name: replace(made.get(name), scope="node") for name in names}
    tiers = Tiers(tiers=tuple(on_node.values()), authority=on_node["shared"], durable_at=on_node["shared"], store_id="kit")
    shard = shard_name(1, 2)

    def quarantined() -> set[tuple[str, str]]:
        return set(fold(asyncio.run(read_log(tiers.authority.storage, attempt))).quarantined)

    attempt = asyncio.run(save(tiers, 1, world_size=2))
    assert asyncio.run(promote(tiers, attempt, "far", clock=SteppedClock())).done
    flip(path_of(tiers, "shared", attempt, shard))
    assert asyncio.run(promote(tiers, attempt, "cold", clock=SteppedClock())).done
    assert quarantined() == {("shared", shard)}
    assert mend(tiers).proved == ((attempt, "shared"),)
    assert quarantined() == set()
    assert [name for name in names if many_disks(tiers, tiers.get(name), 2)] == ["node"]


def test_what_was_deleted_expired_or_dropped_is_left_alone(tmp_path: Path) -> None:
    async def prepare() -> tuple[Tiers, list[Attempt]]:
        tiers, attempts = await stored(tmp_path, 1, 2, 3, 4)
        storage, clock = tiers.authority.storage, SteppedClock()
        due, later = utc_text(clock.now() - timedelta(hours=1)), utc_text(clock.now() + timedelta(hours=1))
        await append(storage, attempts[0], "expired", {"not_before": due}, clock=clock)
        await append(storage, attempts[1], "expired", {"not_before": later}, clock=clock)
        await append(storage, attempts[2], "evicting", {"tier": "far"}, clock=clock)
        await append(storage, attempts[2], "evicted", {"tier": "far"}, clock=clock)
        await append(storage, attempts[3], "swept", {}, clock=clock)
        return tiers, attempts

    tiers, attempts = asyncio.run(prepare())
    for attempt in attempts:
        path_of(tiers, "far", attempt, SHARD).unlink()
    report = mend(tiers)
    assert [m.attempt for m in report.mended] == [attempts[1]]
    assert [a for a, _ in report.skipped] == [attempts[0]]
    assert "undelete" in report.skipped[0][1]
    assert [path_of(tiers, "far", a, SHARD).exists() for a in attempts] == [False, True, False, False]
    assert report.exit_code == 0


def test_a_lost_log_is_for_recover(tmp_path: Path) -> None:
    tiers, (attempt,) = asyncio.run(stored(tmp_path, 1))
    shutil.rmtree(tmp_path / "shared" / "run")
    path_of(tiers, "far", attempt, OBJECTS).unlink()
    report = mend(tiers)
    assert report.exit_code == 6
    assert "recover" in report.skipped[0][1]
    assert not (tmp_path / "shared" / "run").exists() or not list((tmp_path / "shared" / "run").rglob("*.safetensors"))


def test_only_the_tier_that_is_named_is_mended_and_all_are_read(tmp_path: Path) -> None:
    tiers, (attempt,) = asyncio.run(stored(tmp_path, 1, rows=ROWS))
    flip(path_of(tiers, "shared", attempt, SHARD), 3 * BLOCK)
    flip(path_of(tiers, "far", attempt, SHARD), 9 * BLOCK)
    assert {m.tier for m in mend(tiers, only=["far"]).mended} == {"far"}
    assert codes(tiers) == [("V103", "shared", SHARD)]


def test_a_source_that_is_down_is_no_reason_to_give_up(tmp_path: Path) -> None:
    """The block comes from the next tier; where none is left the file stays as it is, and a later repair mends it."""

    async def down(operation: str, path: str) -> None:
        if operation == "read_into":
            raise TemporaryError("connection refused")

    tiers, (attempt,) = asyncio.run(stored(tmp_path, 1))
    flip(path_of(tiers, "shared", attempt, SHARD))
    damaged = path_of(tiers, "shared", attempt, SHARD).read_bytes()
    broken = tiers_in(tmp_path, NAMES, wrap={"far": lambda storage: Hooked(storage, down)})
    report = mend(broken, only=["shared"])
    assert (report.exit_code, len(report.unmended)) == (6, 1)
    assert "connection refused" in report.unmended[0].reason
    assert path_of(tiers, "shared", attempt, SHARD).read_bytes() == damaged
    assert mend(tiers).exit_code == 0


def test_a_checkpoint_that_is_being_repaired_has_a_lease(tmp_path: Path) -> None:
    tiers, (attempt,) = asyncio.run(stored(tmp_path, 1))
    flip(path_of(tiers, "far", attempt, SHARD))
    seen: list[int] = []

    async def look(operation: str, path: str) -> None:
        if operation == "write":
            seen.append(len(list((tmp_path / "shared" / "run" / ".leases").rglob("*.json"))))

    mend(tiers_in(tmp_path, NAMES, wrap={"far": lambda storage: Hooked(storage, look)}))
    assert seen == [1]
    assert not list((tmp_path / "shared" / "run" / ".leases").rglob("*.json"))


def faulty(root: Path, plan: FaultPlan) -> Tiers:
    return tiers_in(root, NAMES, wrap=dict.fromkeys(NAMES, lambda storage: FaultStorage(storage, plan)))


def plans(kind: FaultKind, folder: Path, long_run: bool) -> Iterator[FaultPlan]:
    """One for every operation of the repair of ``folder/store``; without ``--long`` for a few of them, the same in each run."""
    counting = FaultPlan(kind, 1_000_000)
    shutil.copytree(folder / "store", folder / "count")
    mend(faulty(folder / "count", counting))
    everything = range(1, counting.count + 1)
    for nth in everything if long_run else random.Random(kind).sample(everything, 2):
        yield FaultPlan(kind, nth)


KINDS: tuple[FaultKind, ...] = ("error_before", "error_after", "short_read", "bit_flip", "no_space", "cancel")


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_fails_in_a_repair_the_next_one_finishes_it(tmp_path: Path, kind: FaultKind, long_run: bool) -> None:
    """The n-th operation of any tier fails: what is published is as promised or as it was, and the next repair ends well."""
    tiers, (attempt,) = asyncio.run(stored(tmp_path / "store", 1))

    async def more() -> None:
        await append(tiers.authority.storage, attempt, "quarantined", {"tier": "far", "file": SHARD, "detail": ""}, clock=SteppedClock())
        await copy_to(tiers, attempt, "far")

    asyncio.run(more())
    good = contents(tmp_path / "store")
    flip(path_of(tiers, "shared", attempt, SHARD), 2 * BLOCK)
    flip(path_of(tiers, "far", attempt, SHARD), 5 * BLOCK)
    path_of(tiers, "far", attempt, OBJECTS).unlink()
    flip(path_of(tiers, "far", attempt, MANIFEST))
    flip(tmp_path / "store" / "shared" / attempt.record_path(1), 0)
    harmed = contents(tmp_path / "store")
    for plan in plans(kind, tmp_path, long_run):
        root = tmp_path / str(plan.nth)
        shutil.copytree(tmp_path / "store", root)

        with contextlib.suppress(TierStoreError, asyncio.CancelledError):
            mend(faulty(root, plan))
        for name, data in contents(root).items():
            assert data in (good.get(name, data), harmed.get(name, data)), (plan.fired, name)
        clean = tiers_in(root, NAMES)
        assert mend(clean).exit_code == 0, plan.fired
        assert {k: v for k, v in contents(root).items() if k in good} == good, plan.fired
        assert codes(clean) == [], plan.fired
        assert not asyncio.run(scan(clean, "run")).checkpoints[0].quarantined, plan.fired
        shutil.rmtree(root)


def test_repaired_twice_at_once_is_repaired_once(tmp_path: Path) -> None:
    async def both() -> None:
        tiers, (attempt,) = await stored(tmp_path, 1)
        good = path_of(tiers, "far", attempt, SHARD).read_bytes()
        flip(path_of(tiers, "far", attempt, SHARD))
        work: list[Awaitable[RepairReport]] = [repair(tiers_in(tmp_path, NAMES), "run", clock=SteppedClock()) for _ in range(2)]
        reports = await asyncio.gather(*work)
        assert [r.exit_code for r in reports] == [0, 0]
        assert path_of(tiers, "far", attempt, SHARD).read_bytes() == good

    asyncio.run(both())


def test_the_kit_saves_what_it_says(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path, NAMES)
    asyncio.run(save(tiers, 1))
    assert codes(tiers) == [("V112", "far", "")]


@pytest.mark.parametrize(("point", "few"), [("posix.before-rename", (2, 4)), ("posix.create-before-link", (1,))])
def test_a_process_that_dies_in_a_repair_leaves_nothing_half_done(tmp_path: Path, point: str, few: tuple[int, ...], long_run: bool) -> None:
    """Killed at its n-th write (``--long``: every n): each file is as it was or as promised; the next repair makes the rest whole."""

    async def prepare() -> Attempt:
        tiers, (attempt,) = await stored(tmp_path / "store", 1)
        await append(tiers.authority.storage, attempt, "quarantined", {"tier": "far", "file": SHARD, "detail": ""}, clock=SteppedClock())
        return attempt

    attempt = asyncio.run(prepare())
    good = contents(tmp_path / "store")
    tiers = tiers_in(tmp_path / "store", NAMES)
    flip(path_of(tiers, "shared", attempt, SHARD), 2 * BLOCK)
    flip(path_of(tiers, "far", attempt, SHARD), 5 * BLOCK)
    flip(path_of(tiers, "far", attempt, MANIFEST))
    harmed = contents(tmp_path / "store")
    child = multiprocessing.get_context("forkserver")
    for nth in itertools.count(1) if long_run else few:
        root = tmp_path / str(nth)
        shutil.copytree(tmp_path / "store", root)
        process = child.Process(target=die_repairing, args=(root, f"{point}:{nth}"))
        process.start()
        process.join(200)
        if long_run and process.exitcode == 0 and nth > max(few):
            return
        assert process.exitcode == CRASH_EXIT
        for name, data in contents(root).items():
            assert data in (good.get(name, data), harmed.get(name, data)), (point, nth, name)
        clean = tiers_in(root, NAMES)
        assert mend(clean).exit_code == 0
        assert {k: v for k, v in contents(root).items() if k in good} == good, (point, nth)
        assert {c for c, _, _ in codes(clean)} <= {"V108"}, (point, nth)  # its temporary file


def die_repairing(root: Path, where: str) -> None:
    os.environ["TIERSTORE_CRASH_AT"] = where
    importlib.reload(crashpoints)
    for module in [m for name, m in sys.modules.items() if name.startswith("tierstore.") and hasattr(m, "reach")]:
        module.reach = crashpoints.reach  # type: ignore[attr-defined]
    mend(tiers_in(root, NAMES))
    os._exit(0)
