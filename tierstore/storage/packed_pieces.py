"""Pieces of packed files, each given to its `Reading` when what it is made from was read just before."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from tierstore.errors import TierStoreError
from tierstore.storage.contract import MakesBytes, Reading
from tierstore.storage.reading_order import Part, Range, reading_order
from tierstore.storage.tasks import all_or_none, in_thread_to_the_end

__all__ = ["read_packed_pieces"]

_TAKEN_NBYTES = 8 << 20
_READINGS = 3


class _Packed(MakesBytes, Protocol):
    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None: ...


async def read_packed_pieces(storage: _Packed, readings: Sequence[Reading]) -> None:
    """Reads all of `readings`, whose files are packed, from `storage`, and hands over what was read, or tells what failed."""
    turns = asyncio.Semaphore(_READINGS)
    await all_or_none([_read(storage, reading, part, turns) for reading, part in await _in_order(storage, readings)])


async def _in_order(storage: _Packed, readings: Sequence[Reading]) -> list[tuple[Reading, Part]]:
    listed: list[Reading] = []
    ranges: list[Range] = []
    for reading in readings:
        step = max(1, _TAKEN_NBYTES // reading.unit) * reading.unit
        pieces = [(at, min(at + step, end)) for begin, end in reading.ranges for at in range(begin, end, step)]
        try:
            made = await storage.made_from(reading.path, pieces)
        except TierStoreError:
            made = [()] * len(pieces)  # who reads it says so
        listed += [reading] * len(pieces)
        ranges += [Range(path=reading.path, begin=begin, end=end, made=m) for (begin, end), m in zip(pieces, made, strict=True)]
    align = math.lcm(*(reading.unit for reading in readings))
    return [(listed[part.number], part) for part in reading_order(ranges, align)]


async def _read(storage: _Packed, reading: Reading, part: Part, turns: asyncio.Semaphore) -> None:
    async with turns:
        place = reading.place(part.begin, part.end)
        memory = memoryview(bytearray(part.end - part.begin)) if place is None else place
        try:
            await storage.read_into(reading.path, part.begin, memory)
        except (TierStoreError, OSError) as error:
            reading.failed(part.begin, part.end, error)
            return
        await in_thread_to_the_end(partial(reading.take, part.begin, memory, place is not None))
