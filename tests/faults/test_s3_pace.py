"""Transfers to S3 in flight: bounded in number and memory over all files, halved when the server asks to slow down, within the limit."""

from __future__ import annotations

import asyncio
import logging

import pytest
from clock_kit import ManualClock
from s3_kit import FakeS3, fake_storage, refusal_of

from tierstore.errors import TemporaryError, UsageError
from tierstore.storage.bandwidth import Bandwidth
from tierstore.storage.s3_pace import Slots
from tierstore.testing.sources import PatternSource, pattern

KIB = 1 << 10
PART = 64 * KIB


class Held(PatternSource):
    """Counts the bytes that are pulled and not yet sent, over all sources."""

    out = 0
    peak = 0

    async def read(self, offset: int, nbytes: int) -> memoryview:
        Held.out += nbytes
        Held.peak = max(Held.peak, Held.out)
        return await super().read(offset, nbytes)


# The controller, alone


def test_the_limit_is_halved_once_a_round_trip_and_grows_by_one_for_each_limits_worth_of_successes() -> None:
    async def body() -> None:
        slots = Slots(16)
        begun = [await slots.acquire() for _ in range(16)]
        for generation in begun:
            slots.slow_down(generation)  # all of them met the same congestion
        assert (slots.limit, slots.slowdowns) == (8, 1)
        for _ in begun:
            slots.release()
        slots.slow_down(await slots.acquire())
        assert (slots.limit, slots.slowdowns) == (4, 2)
        slots.succeeded()
        assert slots.limit == 4  # one was in flight: that says nothing of four
        slots.in_flight = 16
        grown = []
        for _ in range(4 + 5 + 6):
            slots.succeeded()
            grown.append(slots.limit)
        assert grown == [4] * 3 + [5] * 5 + [6] * 6 + [7]
        for _ in range(1000):
            slots.succeeded()
        assert slots.limit == 16
        for _ in range(20):
            slots.slow_down(slots.generation)
        assert slots.limit == 1  # never none

    asyncio.run(body())


def test_slots_are_given_in_the_order_of_asking_and_a_cancelled_wait_gives_its_turn_on() -> None:
    async def body() -> None:
        slots, order = Slots(1), []

        async def one(number: int) -> None:
            async with slots:
                order.append(number)
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(one(number)) for number in range(6)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [0, 1, 3, 4, 5]
        assert (slots.in_flight, slots.peak) == (0, 1)

    asyncio.run(body())


def test_a_wait_that_is_cancelled_in_the_instant_in_which_a_slot_is_given_back_stays_cancelled() -> None:
    async def main() -> None:
        slots = Slots(1)
        await slots.acquire()
        first, second = asyncio.ensure_future(slots.acquire()), asyncio.ensure_future(slots.acquire())
        await asyncio.sleep(0)
        first.cancel()
        slots.release()
        with pytest.raises(asyncio.CancelledError):
            await first
        await second
        assert slots.in_flight == 1

    asyncio.run(main())


def test_no_slots_at_all_are_refused() -> None:
    with pytest.raises(UsageError, match="move nothing"):
        Slots(0)


# In the storage


def test_a_server_that_refuses_above_four_in_flight_gets_all_and_ever_fewer_refusals(
    monkeypatch: pytest.MonkeyPatch, quick_retries: None, caplog: pytest.LogCaptureFixture
) -> None:
    server = FakeS3(most_in_flight=4)
    storage = fake_storage(monkeypatch, server, part_nbytes=PART, concurrency=16, attempts=8)
    data = pattern(150 * PART)

    async def body() -> None:
        await storage.write("file", PatternSource(data))
        slots = storage._requests.client().transfers
        assert 2 <= slots.limit <= 8
        assert slots.slowdowns >= 2

    with caplog.at_level(logging.INFO):
        asyncio.run(body())
    assert server.objects["tier/file"]["data"] == data
    refused = server.counts["upload_part"] - 150
    assert refused <= 12 + 0.25 * 150, refused  # 12 of the first 16; then what probing costs
    assert "event=slow-down storage=s3://bucket/tier transfers=8 before=16" in caplog.text


def test_only_the_part_that_failed_is_sent_again(monkeypatch: pytest.MonkeyPatch, quick_retries: None) -> None:
    server = FakeS3()
    storage = fake_storage(monkeypatch, server, part_nbytes=PART, concurrency=4)
    server.failures = [("upload_part", refusal_of("InternalError", 500)), ("upload_part", ConnectionResetError("cut"))]
    asyncio.run(storage.write("file", PatternSource(pattern(20 * PART))))
    assert server.counts["upload_part"] == 22
    assert server.counts["create_multipart_upload"] == 1


def test_one_huge_file_and_many_small_ones_share_the_slots_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeS3()
    storage = fake_storage(monkeypatch, server, part_nbytes=PART, concurrency=8)
    Held.out = Held.peak = 0
    ended: list[str] = []
    call = server.call

    async def counting(method: str, **arguments: object) -> dict[str, object]:
        answer = await call(method, **arguments)
        body = arguments.get("Body")
        Held.out -= len(body) if body is not None else 0  # type: ignore[arg-type]
        return answer

    server.call = counting  # type: ignore[method-assign]

    async def write(name: str, nbytes: int) -> None:
        await storage.write(name, Held(pattern(nbytes)))
        ended.append(name)

    async def body() -> None:
        await asyncio.gather(write("huge", 100 * PART), *(write(f"small-{n}", 3 * KIB) for n in range(60)))

    asyncio.run(body())
    assert server.peak == 8  # the link is full, never overfull
    assert Held.peak <= 10 * PART  # eight on the wire, two read ahead: whatever the number of files
    assert ended[-1] == "huge"  # the small ones did not wait for it
    assert server.counts["upload_part"] == 100


# The limit


@pytest.mark.parametrize("rate", [1 << 20, 3 << 20])
@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("failing", [0, 40])
def test_the_limit_holds_within_five_percent_with_what_is_sent_again_counted(
    monkeypatch: pytest.MonkeyPatch, quick_retries: None, rate: int, concurrency: int, failing: int
) -> None:
    server, clock = FakeS3(), ManualClock()
    storage = fake_storage(monkeypatch, server, part_nbytes=PART, concurrency=concurrency, attempts=20)
    storage.pace_writes(Bandwidth(rate, clock, sleep=clock.sleep))
    parts = 16 * rate // (1 << 20) * 5  # five seconds' worth
    server.failures = [("upload_part", refusal_of("InternalError", 500)) for _ in range(failing)]

    async def body() -> None:
        writing = asyncio.ensure_future(storage.write("file", PatternSource(pattern(parts * PART))))
        while not writing.done():
            for _ in range(40):
                await asyncio.sleep(0)
            pending = storage._requests.client().transfers.in_flight
            if not pending:
                clock.wake_next()
            await asyncio.sleep(0)
        writing.result()

    asyncio.run(body())
    assert server.sent_nbytes == (parts + failing) * PART
    assert server.sent_nbytes / (clock.at - 100.0) == pytest.approx(rate, rel=0.05)


def test_what_is_not_sent_again_costs_nothing_of_the_limit(monkeypatch: pytest.MonkeyPatch, quick_retries: None) -> None:
    server, clock = FakeS3(), ManualClock()
    storage = fake_storage(monkeypatch, server, part_nbytes=PART, concurrency=2, attempts=2)
    data = pattern(10 * PART)

    async def body() -> None:
        server.failures = [("complete_multipart_upload", refusal_of("InternalError", 500)) for _ in range(9)]
        with pytest.raises(TemporaryError):
            await storage.write_on("file", PatternSource(data))
        server.failures = []
        storage.pace_writes(Bandwidth(1, clock, sleep=clock.sleep))  # a byte a second: whoever sent a part would never end
        await storage.write_on("file", PatternSource(data))

    asyncio.run(body())
    assert server.objects["tier/file"]["data"] == data
