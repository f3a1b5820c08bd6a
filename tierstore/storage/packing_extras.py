"""Parts of a source that are looked at beside the one pass over it: samples, and what a block is compared with."""

from __future__ import annotations

import asyncio
import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tierstore.errors import IntegrityError
from tierstore.format.digest import BLOCK_NBYTES
from tierstore.storage.contract import InBlocks, InMemory, Source
from tierstore.storage.sources import bare_of
from tierstore.storage.tasks import end_all

__all__ = ["Extra", "Extras", "ReadsExtras", "Samples", "covering"]


_SAMPLES = 16
"""Places from which samples are kept, of 1 MiB in most cases."""


@dataclass(frozen=True, slots=True)
class Extra:
    """Bytes of the source from `begin` on."""

    begin: int
    data: memoryview

    @property
    def end(self) -> int:
        return self.begin + self.data.nbytes

    def part(self, begin: int, end: int) -> memoryview:
        return self.data[begin - self.begin : end - self.begin]


class ReadsExtras(Protocol):
    """Reads parts of a file, for whoever samples it."""

    async def read(self, begin: int, end: int) -> Extra:
        """The bytes ``[begin, end)``, which are few, and maybe some around them."""


class Extras:
    """Reads parts of a source again. What was read is copied out of the source's memory, which may be rationed: nobody waits for more of
    it while holding some.

    Args:
        source: The source.
        pull_nbytes: The longest pull, in bytes; whole MiB.
    """

    def __init__(self, source: Source, pull_nbytes: int) -> None:
        self._source = source
        self._pull = pull_nbytes
        self._bare = bare_of(source) if isinstance(source, InMemory) else None
        self.unit = math.lcm(BLOCK_NBYTES, source.block_nbytes if isinstance(source, InBlocks) else 1)
        """Ranges are widened to multiples of so many bytes."""
        self._samples: dict[tuple[int, int], asyncio.Task[Extra]] = {}

    def widened(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """What has to be read for `ranges`, each byte once."""
        found: list[tuple[int, int]] = []
        for begin, end in sorted((begin // self.unit * self.unit, -(-end // self.unit) * self.unit) for begin, end in ranges):
            end = min(end, self._source.nbytes)
            if found and begin <= found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], end)
            else:
                found.append((begin, end))
        return found

    async def sample(self, begin: int, end: int) -> Extra:
        """As `read`, of a few bytes: many samples lie side by side, so that what was read last is kept."""
        ((first, last),) = self.widened([(begin, end)])
        task = self._samples.pop((first, last), None)
        if task is None:
            task = asyncio.ensure_future(self.read(first, last))
        self._samples[first, last] = task  # before anything is waited for: `forget` ends it
        while len(self._samples) > _SAMPLES:
            await end_all([self._samples.pop(next(iter(self._samples)))])
        await asyncio.wait([task])
        return task.result()

    async def forget(self) -> None:
        """Lets go of samples."""
        samples, self._samples = list(self._samples.values()), {}
        await end_all(samples)

    async def read(self, begin: int, end: int, known: Iterable[Extra] = ()) -> Extra:
        """The bytes ``[begin, end)``, and some around them.

        Args:
            begin, end: In the file, in bytes.
            known: What was read before, from which is taken what it has.
        """
        ((first, last),) = self.widened([(begin, end)])
        if self._bare is not None:
            return Extra(first, self._bare(first, last - first))
        target = memoryview(mmap.mmap(-1, max(1, last - first)))[: last - first]
        at = first
        for one in known:
            if one.begin <= at < one.end:
                upto = min(one.end, last)
                target[: upto - first] = one.part(at, upto)
                at = upto
        while at < last:
            upto = min(last, at + max(self.unit, self._pull))
            data = await self._source.read(at, upto - at)
            if data.nbytes != upto - at:
                raise IntegrityError(
                    f"the source gave {data.nbytes} bytes at {at} where {upto - at} were asked for", hint="the source was cut short"
                )
            await asyncio.to_thread(_copy, target[at - first : upto - first], data)
            del data
            at = upto
        return Extra(first, target)


class Samples:
    """Few bytes of a source at a time, at many places: `ReadsExtras`."""

    def __init__(self, extras: Extras) -> None:
        self._extras = extras

    async def read(self, begin: int, end: int) -> Extra:
        return await self._extras.sample(begin, end)


def _copy(target: memoryview, data: memoryview) -> None:
    np.frombuffer(target, dtype=np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)


def covering(extras: Sequence[Extra], begin: int, end: int) -> memoryview | None:
    """The bytes ``[begin, end)`` where one of `extras` has them all."""
    for one in extras:
        if one.begin <= begin and end <= one.end:
            return one.part(begin, end)
    return None
