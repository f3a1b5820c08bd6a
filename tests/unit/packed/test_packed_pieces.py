"""Pieces of packed files, given to whoever wants them (`storage.packed_pieces`)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from tierstore.storage.contract import MadeFrom
from tierstore.storage.packed_pieces import read_packed_pieces

DEADLINE_S = 60.0


class Zeros:
    """A storage of a packed file that is made of nothing."""

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = bytes(buffer.nbytes)

    async def made_from(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Sequence[MadeFrom]]:
        return [()] * len(ranges)


class Held:
    """A `Reading` that takes its time, as one does that copies into the memory of whoever loads."""

    path = "shard"
    ranges = ((0, 4096),)
    unit = 4096

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self.taken = 0

    def place(self, begin: int, end: int) -> memoryview | None:
        return None

    def take(self, begin: int, piece: memoryview, placed: bool) -> None:
        self.inside.set()
        assert self.go.wait(DEADLINE_S)
        self.taken += piece.nbytes

    def failed(self, begin: int, end: int, error: Exception) -> None:
        raise error


def test_who_cancels_a_read_gets_the_memory_back_when_nobody_writes_there_any_more() -> None:
    async def body() -> None:
        reading = Held()
        task = asyncio.ensure_future(read_packed_pieces(Zeros(), [reading]))
        try:
            assert await asyncio.to_thread(reading.inside.wait, DEADLINE_S)
            task.cancel()
            for _ in range(50):
                await asyncio.sleep(0)
            assert not task.done()
        finally:
            reading.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reading.taken == 4096

    asyncio.run(body())
