"""Blocks that several readers want at about the same time are decoded once, and whoever gives up takes nothing from the others."""

from __future__ import annotations

import asyncio

import pytest
from packing_kit import run

from tierstore.storage.unpacking_cache import Blocks, Flights, Key

KEY: Key = ("file", "", 0)


class Loading:
    """Decodes one block when it may; knows whether it was given up."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.given_up = False

    async def load(self) -> Blocks:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up = True
            raise
        return {0: memoryview(b"block")}


@pytest.mark.parametrize("joins_first", [False, True])
def test_a_reader_that_joins_as_the_only_other_one_is_cancelled_gets_its_blocks(joins_first: bool) -> None:
    async def body() -> None:
        flights, loading = Flights(), Loading()
        first = asyncio.ensure_future(flights.wait(flights.begin([KEY], loading.load)))
        await asyncio.sleep(0)
        flight = flights.of(KEY)
        assert flight is not None
        if joins_first:
            second = asyncio.ensure_future(flights.wait(flight))
            first.cancel()
        else:
            first.cancel()
            second = asyncio.ensure_future(flights.wait(flight))
        await asyncio.wait([first])
        loading.gate.set()
        assert await second == {0: b"block"}
        assert first.cancelled()
        assert not loading.given_up

    run(body)


def test_what_nobody_waits_for_any_more_is_given_up() -> None:
    async def body() -> None:
        flights, loading = Flights(), Loading()
        task = flights.begin([KEY], loading.load)
        readers = [asyncio.ensure_future(flights.wait(task)) for _ in range(2)]
        await asyncio.sleep(0)
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        assert loading.given_up
        assert flights.of(KEY) is None

    run(body)
