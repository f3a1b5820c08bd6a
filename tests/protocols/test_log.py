"""The log: numbered write-once records, one winner for each number (PROTOCOLS.md §2, §3)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiers_kit import SteppedClock, attempt_at, run, tiers_in

from tierstore.errors import ConflictError, IntegrityError, NotFoundError, RefusedError
from tierstore.format.record import Record
from tierstore.storage.posix import PosixStorage
from tierstore.tiers.log import append, decide_fate, read_fate, read_log

CLOCK = SteppedClock()


def test_eight_racers_for_one_fate_get_the_same_single_record(tmp_path: Path) -> None:
    attempt = attempt_at(7)

    async def race() -> list[Record]:
        storages = [PosixStorage(tmp_path / "shared", durable=False) for _ in range(8)]
        kinds = ["committed", "condemned"] * 4
        return await asyncio.gather(
            *(decide_fate(s, attempt, k, {"by": n}, CLOCK) for n, (s, k) in enumerate(zip(storages, kinds, strict=True)))
        )

    fates = run(race())
    assert len({(f.nonce, f.kind, f.data["by"]) for f in fates}) == 1
    assert run(read_log(PosixStorage(tmp_path / "shared"), attempt)) == (fates[0],)


def test_a_condemned_attempt_can_never_be_committed(tmp_path: Path) -> None:
    storage, attempt = PosixStorage(tmp_path), attempt_at(1)
    run(decide_fate(storage, attempt, "condemned", {"reason": "late"}, CLOCK))
    assert run(decide_fate(storage, attempt, "committed", {"manifest": "x"}, CLOCK)).kind == "condemned"
    fate = run(read_fate(storage, attempt))
    assert fate is not None
    assert fate.kind == "condemned"


def test_concurrent_appends_each_get_a_number_of_their_own(tmp_path: Path) -> None:
    storage, attempt = PosixStorage(tmp_path, durable=False), attempt_at(1)

    async def work() -> tuple[Record, ...]:
        await decide_fate(storage, attempt, "committed", {}, CLOCK)
        await asyncio.gather(*(append(storage, attempt, "pinned", {"name": str(n)}, clock=CLOCK) for n in range(8)))
        return await read_log(storage, attempt)

    records = run(work())
    assert [r.seq for r in records] == list(range(9))
    assert {r.data["name"] for r in records[1:]} == {str(n) for n in range(8)}


def test_a_decision_made_upon_an_old_log_is_not_made(tmp_path: Path) -> None:
    storage, attempt = PosixStorage(tmp_path, durable=False), attempt_at(1)

    async def work() -> None:
        await decide_fate(storage, attempt, "committed", {}, CLOCK)
        await append(storage, attempt, "expired", {}, clock=CLOCK, after=0)
        with pytest.raises(ConflictError, match="grown from 0 to 1"):
            await append(storage, attempt, "swept", {}, clock=CLOCK, after=0)
        await append(storage, attempt, "swept", {}, clock=CLOCK, after=1)

    run(work())
    assert [r.kind for r in run(read_log(storage, attempt))] == ["committed", "expired", "swept"]


def test_two_evictors_with_the_same_precondition_never_both_win(tmp_path: Path) -> None:
    """`model_gc.py`: two independent "the other tier has it" checks lose the last copy; the log's precondition does not."""
    storage, attempt = PosixStorage(tmp_path, durable=False), attempt_at(1)

    def other_copy_left(me: str) -> object:
        def allow(records: Sequence[Record]) -> bool:
            gone = {r.data["tier"] for r in records if r.kind == "evicting"}
            return bool({"a", "b"} - gone - {me})

        return allow

    async def evict(me: str) -> bool:
        try:
            await append(storage, attempt, "evicting", {"tier": me}, clock=CLOCK, allow=other_copy_left(me))  # type: ignore[arg-type]
        except RefusedError:
            return False
        return True

    async def work() -> list[bool]:
        await decide_fate(storage, attempt, "committed", {}, CLOCK)
        return await asyncio.gather(evict("a"), evict("b"))

    assert sorted(run(work())) == [False, True]


def test_nothing_is_appended_to_an_attempt_without_a_fate(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no commit record"):
        run(append(PosixStorage(tmp_path), attempt_at(1), "pinned", {}, clock=CLOCK))


def test_a_hole_or_a_damaged_record_in_a_log_is_an_error_that_names_it(tmp_path: Path) -> None:
    storage, attempt = PosixStorage(tmp_path, durable=False), attempt_at(1)

    async def work() -> None:
        await decide_fate(storage, attempt, "committed", {}, CLOCK)
        await append(storage, attempt, "pinned", {}, clock=CLOCK)
        await append(storage, attempt, "unpinned", {}, clock=CLOCK)

    run(work())
    record = tmp_path / attempt.record_path(1)
    whole = record.read_bytes()
    record.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IntegrityError, match=r"000001\.json"):
        run(read_log(storage, attempt))
    record.unlink()
    with pytest.raises(IntegrityError, match="one before it is missing"):
        run(read_log(storage, attempt))


def test_a_record_that_a_listing_does_not_show_yet_is_found_all_the_same(tmp_path: Path) -> None:
    """NFS and Lustre list late: appends must not collide with a record that exists."""
    tiers = tiers_in(tmp_path, ["only"])
    storage, attempt = tiers.authority.storage, attempt_at(1)

    class Late(PosixStorage):
        async def list(self, folder: str = "") -> list:  # type: ignore[type-arg]
            return (await super().list(folder))[:1]

    async def work() -> tuple[Record, ...]:
        await decide_fate(storage, attempt, "committed", {}, CLOCK)
        await append(storage, attempt, "pinned", {"name": "a"}, clock=CLOCK)
        late = Late(tmp_path / "only", durable=False)
        await append(late, attempt, "pinned", {"name": "b"}, clock=CLOCK)
        return await read_log(late, attempt)

    assert [r.data.get("name") for r in run(work())] == [None, "a", "b"]
