"""The bandwidth limit holds, on a clock that only moves when somebody sleeps."""

from __future__ import annotations

import asyncio

import pytest
from clock_kit import ManualClock

from tierstore.errors import UsageError
from tierstore.storage.bandwidth import Bandwidth
from tierstore.storage.sources import BytesSource, CountingSource, ThrottledSource

MIB = 1 << 20


@pytest.mark.parametrize("rate", [10 * MIB, 3 * MIB, 100 * MIB])
@pytest.mark.parametrize("nbytes", [8 * MIB, 64 * 1024])
@pytest.mark.parametrize("tasks", [1, 5])
def test_the_long_run_rate_is_within_five_percent(rate: int, nbytes: int, tasks: int) -> None:
    clock = ManualClock()
    limiter = Bandwidth(rate, clock, sleep=clock.sleep)
    seconds = 60 if nbytes > MIB else 6  # of the small ones many pass in that time too
    pulls = seconds * rate // nbytes // tasks

    async def pull() -> None:
        for _ in range(pulls):
            await limiter.take(nbytes)

    async def main() -> None:
        await clock.drive([asyncio.ensure_future(pull()) for _ in range(tasks)])

    asyncio.run(main())
    assert pulls * tasks * nbytes / (clock.at - 100.0) == pytest.approx(rate, rel=0.05)


def test_a_pause_saves_up_one_burst_and_no_more() -> None:
    clock = ManualClock()
    limiter = Bandwidth(1000, clock, burst_s=0.5, sleep=clock.sleep)

    async def main() -> None:
        await limiter.take(500)
        clock.at += 3600
        task = asyncio.ensure_future(limiter.take(1500))
        await clock.drive([task])

    asyncio.run(main())
    assert clock.at == pytest.approx(100 + 3600 + 1.0)


def test_a_cancelled_wait_gives_its_bytes_back() -> None:
    clock = ManualClock()
    limiter = Bandwidth(1000, clock, burst_s=0.0, sleep=clock.sleep)

    async def main() -> None:
        waiting = asyncio.ensure_future(limiter.take(10_000_000))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        clock._sleepers.clear()
        await clock.drive([asyncio.ensure_future(limiter.take(1000))])

    asyncio.run(main())
    assert clock.at == pytest.approx(101.0)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="lets nothing pass"):
        Bandwidth(0, ManualClock())


def test_a_throttled_counted_source_gives_the_same_bytes() -> None:
    clock = ManualClock()
    counted: list[int] = []
    limiter = Bandwidth(1000, clock, burst_s=0.0, sleep=clock.sleep)
    source = CountingSource(ThrottledSource(BytesSource(b"0123456789" * 100), limiter), counted.append)
    got: list[bytes] = []

    async def pull() -> None:
        for offset in (500, 0):
            got.append(bytes(await source.read(offset, 500)))

    async def main() -> None:
        await clock.drive([asyncio.ensure_future(pull())])

    asyncio.run(main())
    assert source.nbytes == 1000
    assert got == [b"0123456789" * 50] * 2
    assert counted == [500, 500]
    assert clock.at == pytest.approx(101.0)
