"""Persist and commit: one record makes a checkpoint exist, any process may take over, nothing is condemned in silence (PROTOCOLS.md §4)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiers_kit import (
    BLOCK,
    Hooked,
    LeapingClock,
    SteppedClock,
    attempt_at,
    flip,
    part_path,
    path_of,
    persist_rank,
    run,
    save,
    shard_of,
    tiers_in,
)

from tierstore.errors import (
    CondemnedError,
    ConflictError,
    IncompleteError,
    IntegrityError,
    NotFoundError,
    OutcomeUnknownError,
    TierFullError,
    UsageError,
)
from tierstore.format.digest import block_digests, digest_of
from tierstore.format.manifest import decode_manifest
from tierstore.format.receipt import decode_receipt
from tierstore.format.record import Record
from tierstore.names import INDEX, MANIFEST, OBJECTS, part_name, shard_name
from tierstore.storage.contract import Listing, Storage
from tierstore.storage.posix import PosixStorage
from tierstore.storage.sources import BytesSource
from tierstore.tiers.catalog import scan
from tierstore.tiers.commit import commit
from tierstore.tiers.log import decide_fate, read_fate, read_log
from tierstore.tiers.persist import HashingSource
from tierstore.tiers.space import check_space
from tierstore.tiers.tier import Tiers

CLOCK = SteppedClock()


def test_eight_racers_commit_one_attempt_once_and_all_succeed(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)

    async def race() -> list[Record]:
        for rank in range(3):
            await persist_rank(tiers, attempt, tiers.authority, rank=rank, world_size=3)
        return await asyncio.gather(*(commit(tiers_in(tmp_path), attempt, deadline_s=0, clock=CLOCK) for _ in range(8)))

    fates = run(race())
    assert len({f.nonce for f in fates}) == 1
    assert [r.kind for r in run(read_log(tiers.authority.storage, attempt))] == ["committed"]
    manifest = path_of(tiers, "shared", attempt, MANIFEST).read_bytes()
    assert digest_of(manifest) == fates[0].data["manifest"]
    assert sorted(p.name for p in path_of(tiers, "shared", attempt, MANIFEST).parent.iterdir()) == sorted(
        [MANIFEST, INDEX, OBJECTS, *(part_name(r) for r in range(3)), *(shard_name(r, 3) for r in range(3))]
    )


def test_what_a_committer_writes_is_a_function_of_the_parts_alone(tmp_path: Path) -> None:
    attempt = attempt_at(5)
    for name, clock in (("a", SteppedClock()), ("b", LeapingClock())):
        tiers = tiers_in(tmp_path / name)
        for rank in (1, 0):
            run(persist_rank(tiers, attempt, tiers.authority, rank=rank, world_size=2, metrics={"loss": float("nan")}, tags=["x"]))
        run(commit(tiers, attempt, deadline_s=0, clock=clock))
    for file in (MANIFEST, INDEX, OBJECTS):
        assert (tmp_path / "a/shared" / attempt.path(file)).read_bytes() == (tmp_path / "b/shared" / attempt.path(file)).read_bytes()


def test_a_committer_that_takes_over_after_each_file_finishes_the_work(tmp_path: Path) -> None:
    """A crash before each of the committer's writes, then another committer: the result is the same checkpoint."""
    reference = tiers_in(tmp_path / "reference")
    attempt = run(save(reference, 5, world_size=2))
    wanted = path_of(reference, "shared", attempt, MANIFEST).read_bytes()
    for number in range(4):
        folder = tmp_path / f"dies-{number}"
        tiers = tiers_in(folder)
        for rank in range(2):
            run(persist_rank(tiers, attempt, tiers.authority, rank=rank, world_size=2))
        dying = tiers_in(folder, wrap={"shared": _dies_at_create(number)})
        with pytest.raises(KeyboardInterrupt):
            run(commit(dying, attempt, deadline_s=0, clock=CLOCK))
        assert run(scan(tiers, "run")).latest() is None
        run(commit(tiers, attempt, deadline_s=0, clock=CLOCK))
        assert path_of(tiers, "shared", attempt, MANIFEST).read_bytes() == wanted


def _dies_at_create(number: int) -> Callable[[Storage], Storage]:
    left = [number]

    async def die(operation: str, path: str) -> None:
        if operation == "create":
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1

    return lambda storage: Hooked(storage, die)


def test_a_partial_folder_is_never_the_latest(tmp_path: Path) -> None:
    """CASES 1, 2: a kill between shard and manifest of step 2."""
    tiers = tiers_in(tmp_path)
    first = run(save(tiers, 1))
    second = attempt_at(2)
    run(persist_rank(tiers, second, tiers.authority, rank=0, world_size=2))
    path_of(tiers, "shared", second, MANIFEST).write_bytes(path_of(tiers, "shared", first, MANIFEST).read_bytes())
    catalog = run(scan(tiers, "run"))
    latest = catalog.latest()
    assert latest is not None
    assert latest.attempt == first
    assert [(a.attempt, a.missing) for a in catalog.incomplete] == [(second, (1,))]


def test_past_the_deadline_the_attempt_is_condemned_and_the_missing_ranks_are_named(tmp_path: Path) -> None:
    """CASES 20, 44: the survivors get an error that names who is missing, not a hang; a late rank can't revive the attempt."""
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    for rank in (0, 2):
        run(persist_rank(tiers, attempt, tiers.authority, rank=rank, world_size=4))
    with pytest.raises(CondemnedError, match="ranks 1, 3 of 4") as caught:
        run(commit(tiers, attempt, deadline_s=5, clock=LeapingClock()))
    assert caught.value.context["missing"] == [1, 3]
    for rank in (1, 3):
        run(persist_rank(tiers, attempt, tiers.authority, rank=rank, world_size=4))
    with pytest.raises(CondemnedError, match="ranks 1, 3 of 4"):
        run(commit(tiers, attempt, deadline_s=5, clock=CLOCK))
    catalog = run(scan(tiers, "run"))
    assert catalog.latest() is None
    assert [c.attempt for c in catalog.condemned] == [attempt]


def test_an_attempt_without_any_part_is_condemned_too(tmp_path: Path) -> None:
    with pytest.raises(CondemnedError, match="no rank's part is there"):
        run(commit(tiers_in(tmp_path), attempt_at(5), deadline_s=0, clock=CLOCK))


def test_a_look_that_must_not_condemn_leaves_the_fate_open(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    run(persist_rank(tiers, attempt, tiers.authority, rank=0, world_size=2))
    with pytest.raises(IncompleteError, match="rank 1 of 2"):
        run(commit(tiers, attempt, deadline_s=0, clock=CLOCK, condemn=False))
    run(persist_rank(tiers, attempt, tiers.authority, rank=1, world_size=2))
    assert run(commit(tiers, attempt, deadline_s=0, clock=CLOCK)).kind == "committed"


def test_the_committer_waits_for_ranks_that_come_later(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)

    async def work() -> Record:
        await persist_rank(tiers, attempt, tiers.authority, rank=1, world_size=2)
        waiting = asyncio.ensure_future(commit(tiers, attempt, deadline_s=60, clock=CLOCK))
        await persist_rank(tiers, attempt, tiers.authority, rank=0, world_size=2)
        return await waiting

    assert run(work()).kind == "committed"


def test_files_that_a_shared_file_system_shows_late_are_waited_for(tmp_path: Path) -> None:
    """CASES 11: what ranks report decides, not what is listed; a name hidden for some look-ups delays the commit only."""
    hidden = {"left": 3}

    async def hook(operation: str, path: str) -> None:
        if operation in ("stat", "read") and path.endswith(shard_name(1, 2)) and hidden["left"] > 0:
            hidden["left"] -= 1
            raise NotFoundError(path)

    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    for rank in range(2):
        run(persist_rank(tiers, attempt, tiers.authority, rank=rank, world_size=2))
    late = tiers_in(tmp_path, wrap={"shared": lambda s: Hooked(s, hook)})
    assert run(commit(late, attempt, deadline_s=60, clock=CLOCK)).kind == "committed"
    assert hidden["left"] == 0


def test_parts_that_are_not_listed_are_asked_for_by_name(tmp_path: Path) -> None:
    class Blind(PosixStorage):
        async def children(self, folder: str = "") -> Listing:
            return Listing(files=(), folders=())

    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    for rank in range(2):
        run(persist_rank(tiers, attempt, tiers.authority, rank=rank, world_size=2))
    blind = tiers_in(tmp_path, wrap={"shared": lambda s: Blind(tmp_path / "shared", durable=False)})
    assert run(commit(blind, attempt, deadline_s=0, clock=CLOCK)).kind == "committed"


@pytest.mark.parametrize("what", ["missing", "short", "empty"])
def test_a_reported_shard_that_is_not_there_whole_never_commits(tmp_path: Path, what: str) -> None:
    """CASES 3: sizes are checked before the commit; the error names the file."""
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    run(persist_rank(tiers, attempt, tiers.authority))
    shard = path_of(tiers, "shared", attempt, shard_name(0, 1))
    if what == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1] if what == "short" else b"")
    with pytest.raises(CondemnedError, match="shard-00000-of-00001"):
        run(commit(tiers, attempt, deadline_s=0, clock=CLOCK))


def test_a_damaged_part_record_does_not_count(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    run(persist_rank(tiers, attempt, tiers.authority))
    part = part_path(tiers, "shared", attempt, 0)
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(IncompleteError, match="part-00000"):
        run(commit(tiers, attempt, deadline_s=0, clock=CLOCK, condemn=False, world_size=1))


def test_a_part_of_another_attempt_is_not_taken(tmp_path: Path) -> None:
    """CASES 20: results of another save are dropped, even in the right place."""
    tiers = tiers_in(tmp_path)
    mine, other = attempt_at(5), attempt_at(6)
    run(persist_rank(tiers, other, tiers.authority, rank=0, world_size=2))
    run(persist_rank(tiers, mine, tiers.authority, rank=1, world_size=2))
    part_path(tiers, "shared", mine, 0).write_bytes(part_path(tiers, "shared", other, 0).read_bytes())
    with pytest.raises(CondemnedError, match="is the part of rank 0 of run@6"):
        run(commit(tiers, mine, deadline_s=0, clock=CLOCK))


def test_parts_that_overlap_condemn_the_attempt_and_name_the_tensor(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    for rank in range(2):
        shard = shard_of(0, 2)  # both ranks believe that they hold the first rows
        if rank:
            moved = [
                replace(t, extents=tuple(replace(e, file=shard_name(1, 2)) for e in t.extents)) for t in shard.tensors if t.name == "w"
            ]
            shard = replace(shard, tensors=moved)
        run(persist_rank(tiers, attempt, tiers.authority, rank=rank, world_size=2, shard=shard))
    with pytest.raises(CondemnedError, match=r"do not make a whole.*'w'"):
        run(commit(tiers, attempt, deadline_s=60, clock=CLOCK))


@pytest.mark.parametrize("rank", [1, 2])
def test_a_hole_in_the_middle_or_at_the_end_of_a_tensor_never_commits(tmp_path: Path, rank: int) -> None:
    """CASES 58: the whole shape is stored, so a missing chunk can't shrink the tensor."""
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    for each in range(3):
        shard = shard_of(each, 3)
        if each == rank:
            shard = replace(shard, tensors=[t for t in shard.tensors if t.name != "w"])
        run(persist_rank(tiers, attempt, tiers.authority, rank=each, world_size=3, shard=shard))
    with pytest.raises(IncompleteError, match=r"'w' of shape \(18, 5000\)"):
        run(commit(tiers, attempt, deadline_s=0, clock=CLOCK, condemn=False))
    with pytest.raises(CondemnedError, match="'w'"):
        run(commit(tiers, attempt, deadline_s=60, clock=CLOCK))


def test_two_attempts_at_one_step_share_no_byte_and_the_later_one_wins(tmp_path: Path) -> None:
    """CASES 8, 9: saving a step again is well defined, and a crash in the second attempt leaves the first whole."""
    tiers = tiers_in(tmp_path)
    first = run(save(tiers, 5, seed=1))
    before = {p: p.read_bytes() for p in (tmp_path / "shared" / first.folder).iterdir()}
    second = attempt_at(5, at=CLOCK.now())
    assert second > first
    run(persist_rank(tiers, second, tiers.authority, seed=2))
    found = run(scan(tiers, "run")).latest()
    assert found is not None
    assert found.attempt == first
    run(commit(tiers, second, deadline_s=0, clock=CLOCK))
    catalog = run(scan(tiers, "run"))
    assert [(c.attempt, c.superseded) for c in catalog.checkpoints] == [(first, True), (second, False)]
    found = catalog.find(5)
    assert found is not None
    assert found.attempt == second
    assert {p: p.read_bytes() for p in (tmp_path / "shared" / first.folder).iterdir()} == before


def test_a_zombie_writer_touches_its_own_attempt_only(tmp_path: Path) -> None:
    """A writer that wakes up after its attempt was condemned and the step saved again changes nothing of what is committed."""
    tiers = tiers_in(tmp_path)
    zombie = attempt_at(5)
    with pytest.raises(CondemnedError):
        run(commit(tiers, zombie, deadline_s=0, clock=CLOCK))
    good = run(save(tiers, 5, attempt=attempt_at(5, at=CLOCK.now())))
    before = {p: p.read_bytes() for p in (tmp_path / "shared").rglob("*") if p.is_file() and good.name in str(p)}
    run(persist_rank(tiers, zombie, tiers.authority, seed=9))
    with pytest.raises(CondemnedError):
        run(commit(tiers, zombie, deadline_s=60, clock=CLOCK))
    assert {p: p.read_bytes() for p in (tmp_path / "shared").rglob("*") if p.is_file() and good.name in str(p)} == before
    latest = run(scan(tiers, "run")).latest()
    assert latest is not None
    assert latest.attempt == good


def test_a_commit_whose_answer_was_lost_is_reported_as_unknown_and_then_found(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    run(persist_rank(tiers, attempt, tiers.authority))

    class Lossy(PosixStorage):
        async def create(self, path: str, data: bytes) -> None:
            await super().create(path, data)
            if path == attempt.record_path(0):
                raise OutcomeUnknownError("the answer was lost")

    lossy = tiers_in(tmp_path, wrap={"shared": lambda s: Lossy(tmp_path / "shared", durable=False)})
    with pytest.raises(OutcomeUnknownError):
        run(commit(lossy, attempt, deadline_s=0, clock=CLOCK))
    assert run(commit(tiers, attempt, deadline_s=0, clock=CLOCK)).kind == "committed"


def test_garbage_under_a_committers_name_is_replaced_before_the_commit(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    run(persist_rank(tiers, attempt, tiers.authority))
    for file in (MANIFEST, INDEX, OBJECTS):
        path_of(tiers, "shared", attempt, file).write_bytes(b"torn")
    fate = run(commit(tiers, attempt, deadline_s=0, clock=CLOCK))
    assert digest_of(path_of(tiers, "shared", attempt, MANIFEST).read_bytes()) == fate.data["manifest"]


@pytest.mark.parametrize("decided", [True, False])
def test_a_slow_racer_never_overwrites_what_another_version_wrote(tmp_path: Path, decided: bool) -> None:
    """A committer of another version writes the same content in other bytes, and has or has not committed: its bytes stay."""
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    run(persist_rank(tiers, attempt, tiers.authority))
    others: list[tuple[Record | None, bytes]] = []

    async def other_version(operation: str, path: str) -> None:
        if operation == "create" and path.endswith(MANIFEST) and not others:
            reference = tiers_in(tmp_path / "reference")
            await save(reference, 5, attempt=attempt)
            document = json.loads(path_of(reference, "shared", attempt, MANIFEST).read_bytes())
            theirs = json.dumps({**document, "format_version": "1.7", "more": 1}).encode()
            (tmp_path / "shared" / path).write_bytes(theirs)
            data = {"manifest": digest_of(theirs), "world_size": 1}
            others.append((await decide_fate(tiers.authority.storage, attempt, "committed", data, CLOCK) if decided else None, theirs))

    hooked = tiers_in(tmp_path, wrap={"shared": lambda s: Hooked(s, other_version)})
    fate = run(commit(hooked, attempt, deadline_s=0, clock=CLOCK))
    record, theirs = others[0]
    assert fate.data["manifest"] == digest_of(theirs)
    assert path_of(tiers, "shared", attempt, MANIFEST).read_bytes() == theirs
    assert record is None or record == fate


def test_the_commit_record_tells_a_catalog_all_it_needs(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5, metrics={"val/loss": 1.5}, tags=["best"], final=True))
    info = run(scan(tiers, "run")).latest()
    assert info is not None
    manifest = decode_manifest(path_of(tiers, "shared", attempt, MANIFEST).read_bytes())
    assert (info.metrics, info.tags, info.final, info.world_size) == ({"val/loss": 1.5}, ("best",), True, 1)
    assert (info.nbytes, manifest.metrics, manifest.store_id) == (manifest.nbytes, {"val/loss": 1.5}, "kit")


# persist


def test_off_the_authority_a_receipt_names_the_part(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    for _ in range(2):  # again after a failure: the same bytes
        run(persist_rank(tiers, attempt, tiers.nearest, rank=1, world_size=2))
    receipt = decode_receipt((tmp_path / "node" / attempt.receipt_path(1)).read_bytes())
    assert receipt.part_digest == digest_of(part_path(tiers, "node", attempt, 1).read_bytes())
    assert (receipt.rank, receipt.world_size) == (1, 2)
    assert not (tmp_path / "shared").exists()


def test_two_processes_that_save_as_one_rank_are_told_so(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    run(persist_rank(tiers, attempt, tiers.nearest, seed=1))
    with pytest.raises(ConflictError, match="two processes save as the same rank"):
        run(persist_rank(tiers, attempt, tiers.nearest, seed=2))


@pytest.mark.parametrize("operation", ["write", "put", "create"])
def test_a_failing_persist_leaves_no_receipt(tmp_path: Path, operation: str) -> None:
    """CASES 13, 14: a failure at any point of a rank's part means that the part does not count."""

    async def hook(name: str, path: str) -> None:
        if name == operation:
            raise TierFullError("no space left")

    tiers = tiers_in(tmp_path, wrap={"node": lambda s: Hooked(s, hook)})
    attempt = attempt_at(5)
    with pytest.raises(TierFullError):
        run(persist_rank(tiers, attempt, tiers.nearest))
    assert not (tmp_path / "node" / attempt.receipt_path(0)).exists()


def test_a_tier_without_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """CASES 33."""

    class Small(PosixStorage):
        async def free_nbytes(self) -> int | None:
            return 10_000

    def small(_: Storage) -> Storage:
        return Small(tmp_path / "node", durable=False)

    tiers = tiers_in(tmp_path, wrap={"node": small})
    attempt = attempt_at(5)
    with pytest.raises(TierFullError, match=r"'node'.*10000 bytes free") as caught:
        run(persist_rank(tiers, attempt, tiers.nearest))
    assert caught.value.context["free"] == 10_000
    assert caught.value.hint
    assert not (tmp_path / "node").exists()
    run(check_space(tiers.nearest, 5_000, reserve_nbytes=5_000))


def test_each_block_is_hashed_once_although_ranges_are_pulled_again() -> None:
    data = bytes(range(256)) * 100

    async def work() -> bytes:
        source = HashingSource(BytesSource(data), BLOCK)
        await source.read(0, 2 * BLOCK)
        await source.read(0, 2 * BLOCK)
        await source.read(2 * BLOCK, len(data) - 2 * BLOCK)
        return await source.finish()

    assert run(work()) == block_digests(data, BLOCK)


def test_an_image_that_changes_while_it_is_written_is_caught() -> None:
    """A re-pulled range must have the same bytes: else the shard is a mixture."""
    data = bytearray(3 * BLOCK)

    async def work() -> None:
        source = HashingSource(BytesSource(data), BLOCK)
        await source.read(0, 3 * BLOCK)
        await source.settle()
        data[BLOCK + 5] ^= 1
        await source.read(BLOCK, BLOCK)
        with pytest.raises(IntegrityError, match="block 1 changed"):
            await source.finish()

    run(work())


def test_a_block_that_was_never_written_is_caught() -> None:
    async def work() -> None:
        source = HashingSource(BytesSource(bytes(3 * BLOCK)), BLOCK)
        await source.read(0, BLOCK)
        await source.read(2 * BLOCK, BLOCK)
        with pytest.raises(IntegrityError, match="block 1 of 3 was never written"):
            await source.finish()

    run(work())


@pytest.mark.parametrize(("offset", "nbytes"), [(1, BLOCK), (0, BLOCK + 1), (BLOCK, 3 * BLOCK), (-BLOCK, BLOCK)])
def test_pulls_that_are_not_whole_blocks_are_refused(offset: int, nbytes: int) -> None:
    source = HashingSource(BytesSource(bytes(3 * BLOCK)), BLOCK)
    with pytest.raises(UsageError, match="whole blocks"):
        run(source.read(offset, nbytes))


def test_an_empty_shard_has_no_blocks(tmp_path: Path) -> None:
    assert run(HashingSource(BytesSource(b""), BLOCK).finish()) == b""


def test_a_damaged_fate_is_an_error_not_an_open_fate(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5))
    record = tmp_path / "shared" / attempt.record_path(0)
    flip(record, 0)
    with pytest.raises(IntegrityError, match=r"000000\.json"):
        run(read_fate(tiers.authority.storage, attempt))
    with pytest.raises(IntegrityError, match=r"000000\.json"):
        run(commit(tiers, attempt, deadline_s=0, clock=CLOCK))


def test_saved_values_come_back(tmp_path: Path) -> None:
    tiers: Tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5, world_size=2))
    whole = np.concatenate([np.frombuffer(shard_of(r, 2).data, np.uint8) for r in range(2)])
    stored = np.concatenate([np.frombuffer(path_of(tiers, "shared", attempt, shard_name(r, 2)).read_bytes(), np.uint8) for r in range(2)])
    assert np.array_equal(whole, stored)
