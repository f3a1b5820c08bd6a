"""Planned reads carried out: within the budget of memory, flowing, and without a writer left behind after an error."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from dataclasses import replace

import pytest

from tierstore.errors import TemporaryError
from tierstore.tiers.costs import REMOTE_COST
from tierstore.tiers.fetching import fetch
from tierstore.tiers.reads import AnyWant, Handover, ReadCost, Span, Want, plan_spans

MIB = 1 << 20
COST = ReadCost(gap_nbytes=0, span_nbytes=2 * MIB, concurrency=8)


def planned(wants: list[AnyWant], cost: ReadCost = COST) -> list[Span]:
    return plan_spans(wants, file_nbytes=lambda _: 1 << 40, align=4096, cost=cost)


async def answer(span: Span, view: memoryview) -> None:
    await asyncio.sleep(0)
    view[:] = bytes([span.begin // 4096 % 251]) * view.nbytes


@pytest.mark.parametrize("piece", [2 * MIB, 3 * MIB + 12_345])
@pytest.mark.parametrize("budget", [64 * MIB, 128 * MIB])
def test_scratch_stays_within_the_budget_however_much_is_loaded(budget: int, piece: int) -> None:
    """1 GiB of gathered pieces, most of them across two requests; the memory is the interpreter's own count of it."""
    taken: list[int] = []
    count = (1 << 30) // piece
    wants: list[AnyWant] = [Handover("f", at * piece, piece, lambda memory: taken.append(memory.nbytes), "t") for at in range(count)]
    spans = planned(wants, REMOTE_COST)

    async def read(span: Span, view: memoryview) -> None:
        await asyncio.sleep(0)

    tracemalloc.start()
    try:
        asyncio.run(fetch(spans, read, concurrency=16, budget_nbytes=budget))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken == [piece] * count
    assert peak <= budget + MIB


def test_what_lies_within_one_want_is_read_in_place_and_needs_no_scratch() -> None:
    buffer = bytearray(64 * MIB)
    spans = planned([Want("f", 0, memoryview(buffer))])
    tracemalloc.start()
    try:
        asyncio.run(fetch(spans, answer, concurrency=8, budget_nbytes=0))
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()
    assert all(buffer[span.begin] == span.begin // 4096 % 251 for span in spans)


def test_pieces_are_taken_while_others_are_still_being_read() -> None:
    """No waiting for the slowest: what has arrived is scattered, and its memory used again."""
    taken: list[int] = []
    first = Handover("f", 0, MIB, lambda memory: taken.append(0))
    rest = [Handover("f", at * 4 * MIB, MIB, lambda memory: taken.append(1)) for at in range(1, 20)]

    async def body() -> None:
        gate = asyncio.Event()

        async def read(span: Span, view: memoryview) -> None:
            if span.begin == 0:
                await gate.wait()
            elif len(taken) >= 15:
                gate.set()

        await asyncio.wait_for(fetch(planned([first, *rest]), read, concurrency=2, budget_nbytes=2 * MIB), 120)

    asyncio.run(body())
    assert sorted(taken) == [0] + [1] * 19


def test_one_span_at_a_time_is_read_even_where_the_budget_is_too_small() -> None:
    taken: list[int] = []
    at_once = [0, 0]
    wants: list[AnyWant] = [Handover("f", at * 4 * MIB, MIB, lambda memory: taken.append(memory.nbytes)) for at in range(6)]

    async def read(span: Span, view: memoryview) -> None:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0)
        at_once[0] -= 1

    asyncio.run(fetch(planned(wants), read, concurrency=8, budget_nbytes=1))
    assert taken == [MIB] * 6
    assert at_once[1] == 1


def test_never_more_at_once_than_allowed() -> None:
    now, most = 0, 0
    full = asyncio.Event()

    async def read(span: Span, view: memoryview) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 5:
            full.set()
        await asyncio.wait_for(full.wait(), 120)  # those of the first round wait for each other
        await asyncio.sleep(0)
        now -= 1

    buffer = memoryview(bytearray(1000))
    asyncio.run(fetch(planned([Want("f", at * MIB, buffer) for at in range(50)]), read, concurrency=5, budget_nbytes=64 * MIB))
    assert most == 5


@pytest.mark.parametrize("where", ["read", "take"])
def test_the_first_error_ends_it_and_nobody_writes_afterwards(where: str) -> None:
    """Neither a read under way nor a thread that is scattering: the caller gets its memory back."""
    writing = threading.Event()
    go_on = threading.Event()
    ended = threading.Event()

    def slow(memory: memoryview) -> None:
        writing.set()
        go_on.wait(120)
        ended.set()

    def bad(memory: memoryview) -> None:
        raise TemporaryError("the device is gone")

    wants: list[AnyWant] = [
        Handover("f", 0, 2 * MIB, slow),
        Handover("f", 8 * MIB, 2 * MIB, bad),
        Want("f", 16 * MIB, memoryview(bytearray(9))),
    ]

    async def read(span: Span, view: memoryview) -> None:
        if span.begin:
            await asyncio.to_thread(writing.wait, 120)
            asyncio.get_running_loop().call_later(0.05, go_on.set)
            if where == "read":
                raise TemporaryError("the device is gone")

    async def body() -> None:
        with pytest.raises(TemporaryError, match="device is gone"):
            await fetch(planned(wants, REMOTE_COST), read, concurrency=3, budget_nbytes=64 * MIB)
        assert ended.is_set()

    asyncio.run(body())


def test_nothing_wanted_reads_nothing() -> None:
    async def read(span: Span, view: memoryview) -> None:
        raise AssertionError

    asyncio.run(fetch([], read, concurrency=3))


def test_who_is_cancelled_twice_waits_for_the_thread_that_is_at_its_memory() -> None:
    begun, go_on, through = threading.Event(), threading.Event(), threading.Event()

    def receive(memory: memoryview) -> None:
        begun.set()
        assert go_on.wait(120)
        through.set()

    spans = planned([Handover("f", 0, 2 * MIB, receive, "t")], replace(COST, span_nbytes=8 * MIB))

    async def cancel_twice() -> None:
        task = asyncio.ensure_future(fetch(spans, answer, concurrency=1, budget_nbytes=4 * MIB))
        assert await asyncio.to_thread(begun.wait, 120)
        for _ in range(2):
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert through.is_set()

    asyncio.run(cancel_twice())
