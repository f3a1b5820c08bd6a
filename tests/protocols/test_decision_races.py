"""A decision against a collector, in every order of their operations, each with a clock of its own (PROTOCOLS.md §6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest
from stepping_kit import MemoryStorage, interleavings
from tiers_kit import SteppedClock, attempt_at

from tierstore.clock import utc_text
from tierstore.errors import ConflictError, RefusedError, TierStoreError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.storage.contract import Storage
from tierstore.tiers import decisions
from tierstore.tiers.log import append, decide_fate, read_log, record_seq
from tierstore.tiers.log_facts import LogFacts, fold
from tierstore.tiers.tier import Tier, Tiers

DAY_S = 86400.0
ATTEMPT = attempt_at(7)


def clock_at(days: float) -> SteppedClock:
    clock = SteppedClock()
    clock.advance(days * DAY_S)
    return clock


def tiers_on(storage: Storage) -> Tiers:
    tier = Tier(name="only", storage=storage, scope="shared")
    return Tiers(tiers=(tier,), authority=tier, durable_at=tier, store_id="kit")


async def expire(storage: Storage, attempt: Attempt, clock: SteppedClock) -> Record | None:
    """What prune does with a checkpoint that no rule keeps: decides upon what it has read."""
    records = await read_log(storage, attempt)
    log = fold(records)
    if log.hidden or log.pins or log.holds or log.tags:
        return None
    data = {"not_before": utc_text(clock.now()), "reason": "no rule", "plan": "p"}
    try:
        return await append(storage, attempt, "expired", data, clock=clock, after=records[-1].seq)
    except (ConflictError, RefusedError):
        return None


async def sweep(storage: Storage, attempt: Attempt, clock: SteppedClock) -> Record | None:
    """What gc does with one that has expired: decides upon what it has read, and then trims the log."""
    records = await read_log(storage, attempt)
    if fold(records).expired is None or fold(records).swept:
        return None
    try:
        swept = await append(storage, attempt, "swept", {"files": 1}, clock=clock, after=records[-1].seq)
    except (ConflictError, RefusedError):
        return None
    await storage.delete([attempt.record_path(seq) for seq in range(1, swept.seq)])
    return swept


async def collect(storage: Storage) -> bool:
    """A collector whose clock is ten days ahead: whatever anybody's window says, it has passed."""
    clock = clock_at(10)
    await expire(storage, ATTEMPT, clock)
    return await sweep(storage, ATTEMPT, clock) is not None


def committed(*kinds: str) -> dict[str, bytes]:
    async def made() -> dict[str, bytes]:
        storage = MemoryStorage("memory:")
        await decide_fate(storage, ATTEMPT, "committed", {}, clock_at(0))
        for kind in kinds:
            await append(storage, ATTEMPT, kind, {"not_before": utc_text(clock_at(0).now())}, clock=clock_at(0))
        return storage.files

    return asyncio.run(made())


Decision = Callable[[Tiers], Coroutine[Any, Any, Record | None]]
DECISIONS: dict[str, tuple[Decision, Callable[[LogFacts], bool]]] = {
    "pin": (lambda tiers: decisions.pin(tiers, ATTEMPT, clock=clock_at(-3)), lambda log: log.pins == ("pin",)),
    "tag": (lambda tiers: decisions.tag(tiers, ATTEMPT, ["kept"], clock=clock_at(3)), lambda log: log.tags == ("kept",)),
    "hold": (
        lambda tiers: decisions.hold(tiers, ATTEMPT, "audit", until=clock_at(30).now(), clock=clock_at(-3)),
        lambda log: [h.name for h in log.holds] == ["audit"],
    ),
}


def log_of(storage: Storage) -> LogFacts:
    return fold(asyncio.run(read_log(storage, ATTEMPT)))


@pytest.mark.parametrize("name", DECISIONS)
@pytest.mark.parametrize("before", [(), ("expired",)], ids=["live", "expired"])
def test_what_was_acknowledged_is_never_swept_and_what_was_swept_is_never_acknowledged(name: str, before: tuple[str, ...]) -> None:
    """Also by a client that slept, with its number in mind, while the checkpoint was expired, swept and its log trimmed."""
    decide, says_so = DECISIONS[name]
    outcomes = set()
    for storage, (decided, swept) in interleavings(
        committed(*before), (lambda s: decide(tiers_on(s)), "list create"), (collect, "create delete")
    ):
        log = log_of(storage)
        if isinstance(decided, RefusedError):
            assert (swept, log.swept) == (True, True), decided
            assert "comes too late: step 7" in decided.message
            assert "was deleted at 9 Dec 2026 12:00Z by " in decided.message
        else:
            assert isinstance(decided, Record), decided
            assert (swept, log.swept, log.hidden, says_so(log)) == (False, False, False, True)
        outcomes.add((swept, type(decided).__name__))
    assert outcomes == {(True, "RefusedError"), (False, "Record")}


def test_an_undelete_against_a_sweep_has_one_winner() -> None:
    outcomes = set()
    for storage, (decided, swept) in interleavings(
        committed("expired"),
        (lambda s: decisions.undelete(tiers_on(s), ATTEMPT, clock=clock_at(-3)), "list create"),
        (lambda s: sweep(s, ATTEMPT, clock_at(10)), "list create delete"),
    ):
        log = log_of(storage)
        assert isinstance(decided, RefusedError) == log.swept == isinstance(swept, Record)
        assert isinstance(decided, Record) == (not log.hidden)
        outcomes.add(log.swept)
    assert outcomes == {True, False}


def test_of_two_that_say_the_same_one_record_is_made() -> None:
    pins = [lambda s, days=days: decisions.pin(tiers_on(s), ATTEMPT, clock=clock_at(days)) for days in (-3, 3)]
    for storage, results in interleavings(committed(), *((pin, "list create") for pin in pins)):
        made = [r for r in results if r is not None]
        assert [type(r) for r in made] == [Record]
        assert len(storage.files) == 2


def test_a_pin_and_an_unpin_are_in_some_order_and_the_last_word_counts() -> None:
    ends = set()
    for storage, (pinned, unpinned) in interleavings(
        committed(),
        (lambda s: decisions.pin(tiers_on(s), ATTEMPT, "mine", clock=clock_at(3)), "list create"),
        (lambda s: decisions.unpin(tiers_on(s), ATTEMPT, "mine", clock=clock_at(-3)), "list create"),
    ):
        assert isinstance(pinned, Record)
        assert log_of(storage).pins == (() if isinstance(unpinned, Record) else ("mine",))
        ends.add(unpinned is None)
    assert ends == {True, False}


def test_nobody_reads_a_hole_while_a_log_is_trimmed() -> None:
    """A reader beside expire, sweep and a trim record by record: it sees the log before or after, never damage."""

    async def sweep_slowly(storage: Storage) -> None:
        clock = clock_at(10)
        await expire(storage, ATTEMPT, clock)
        await append(storage, ATTEMPT, "swept", {}, clock=clock)
        for info in (await storage.list(ATTEMPT.log_folder))[1:-1]:
            await storage.delete([info.path])

    seen = set()
    reader = (lambda s: read_log(s, ATTEMPT), "list read")
    for _, (records, nothing) in interleavings(committed("metrics"), reader, (sweep_slowly, "create delete")):
        assert nothing is None, nothing
        assert not isinstance(records, TierStoreError), records
        seen.add(tuple(r.seq for r in records))
    assert {(0, 1), (0, 3), (0, 1, 2, 3)} <= seen
    assert all(numbers[0] == 0 for numbers in seen)


def test_the_clock_of_who_decides_only_dates_the_record() -> None:
    """Expired with a window that has passed for everybody: as long as nobody sweeps it, it comes back."""
    storage = MemoryStorage("memory:", committed("expired"))
    record = asyncio.run(decisions.undelete(tiers_on(storage), ATTEMPT, clock=clock_at(400)))
    assert record is not None
    assert record.at - clock_at(0).now() == timedelta(days=400)
    assert not log_of(storage).hidden
    assert [record_seq(path.rpartition("/")[2]) for path in sorted(storage.files)] == [0, 1, 2]
