"""The byte budget and the retry rules that all copies share."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import pytest

from tierstore.errors import (
    AccessError,
    CondemnedError,
    DeadlineError,
    IntegrityError,
    LockedError,
    NotFoundError,
    OutcomeUnknownError,
    TemporaryError,
    TierFullError,
)
from tierstore.tiers.budget import ByteBudget
from tierstore.tiers.retry import Backoff, Verdict, judge

FOR_EVER_S = 1e6
"""For a budget that lets nobody through over it, however long this machine stands still."""


async def turns(condition: Callable[[], bool]) -> None:
    """Lets other tasks run until the condition holds."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        await asyncio.sleep(0.001)


async def waits(*asked: asyncio.Future[memoryview]) -> None:
    """Lets those who ask for bytes get as far as they can: all of them wait."""
    await asyncio.sleep(0)  # their tasks begin
    for _ in range(20):  # all that happens here happens on this loop: what could be granted is, within a few turns of it
        await asyncio.sleep(0)
    assert not any(one.done() for one in asked)


def test_a_buffer_counts_until_the_last_view_of_it_is_gone() -> None:
    async def run() -> None:
        budget = ByteBudget(100, patience_s=FOR_EVER_S)
        whole = await budget.take(60)
        part = whole[10:20]
        second = asyncio.ensure_future(budget.take(60))
        del whole
        await waits(second)  # a slice of it is still in use
        del part
        await turns(second.done)
        assert budget.in_flight == 60
        assert budget.peak == 60

    asyncio.run(run())


def test_requests_are_served_in_order_and_an_oversized_one_alone() -> None:
    async def run() -> None:
        budget = ByteBudget(100, patience_s=FOR_EVER_S)
        first = await budget.take(80)
        big = asyncio.ensure_future(budget.take(500))
        small = asyncio.ensure_future(budget.take(10))
        await waits(small)  # it would fit, but is not let past the one before it: that one would starve
        del first
        await turns(big.done)
        await waits(small)
        del big
        await turns(small.done)

    asyncio.run(run())


def test_a_cancelled_request_gives_its_turn_on() -> None:
    async def run() -> None:
        budget = ByteBudget(100, patience_s=FOR_EVER_S)
        held = await budget.take(60)
        big = asyncio.ensure_future(budget.take(90))
        small = asyncio.ensure_future(budget.take(30))
        await waits(big, small)
        big.cancel()
        await turns(small.done)
        del held, small, big
        await turns(lambda: budget.in_flight == 0)

    asyncio.run(run())


def test_a_storage_that_holds_everything_until_its_write_ends_does_not_deadlock() -> None:
    async def run() -> None:
        budget = ByteBudget(100, patience_s=0.02)
        held = [await budget.take(50) for _ in range(5)]
        assert len(held) == 5
        assert budget.in_flight == 250

    asyncio.run(run())


def test_memory_is_recycled_and_page_aligned() -> None:
    async def run() -> None:
        import numpy as np

        budget = ByteBudget(1 << 22)
        first = await budget.take(1 << 20)
        address = np.frombuffer(first, dtype=np.uint8).ctypes.data
        assert address % 4096 == 0
        del first
        await turns(lambda: budget.in_flight == 0)
        second = await budget.take(1 << 20)
        assert np.frombuffer(second, dtype=np.uint8).ctypes.data == address

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (LockedError("x"), Verdict.WAIT),
        (TemporaryError("x"), Verdict.RETRY),
        (DeadlineError("x"), Verdict.RETRY),
        (TierFullError("x"), Verdict.RETRY),
        (OutcomeUnknownError("x"), Verdict.RETRY),
        (AccessError("x"), Verdict.REPORT),
        (IntegrityError("x"), Verdict.FAIL),
        (NotFoundError("x"), Verdict.FAIL),
        (CondemnedError("x"), Verdict.FAIL),
        (ValueError("x"), Verdict.FAIL),
    ],
)
def test_each_error_gets_the_treatment_that_can_help(error: Exception, verdict: Verdict) -> None:
    assert judge(error) is verdict


def test_waits_grow_to_a_cap_and_differ_between_processes() -> None:
    one, two = (Backoff(base_s=1.0, cap_s=8.0, _random=random.Random(seed)) for seed in (1, 2))
    first, second = ([b.next_s() for _ in range(8)] for b in (one, two))
    assert first != second
    for waits in (first, second):
        for number, wait in enumerate(waits):
            assert 0.5 * min(8.0, 2.0**number) <= wait <= min(8.0, 2.0**number)
    one.reset()
    assert one.next_s() <= 1.0
