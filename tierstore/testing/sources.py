"""Sources that misbehave on purpose, and the bytes that the tests write."""

from __future__ import annotations

import asyncio

from tierstore.errors import IntegrityError

__all__ = ["FailingSource", "GatedSource", "GrowingSource", "PatternSource", "pattern"]

_PERIOD = 251 * 255  # coprime to every power of two: a shifted or repeated part never looks right


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """`nbytes` bytes in which every part of a file is told from every other; `seed` makes another file."""
    row = bytes((i * 167 + i // 251 + seed) % 256 for i in range(_PERIOD))
    return (row * (nbytes // _PERIOD + 1))[:nbytes]


class PatternSource:
    """An honest source over `data` that yields to the loop at each pull and notes what was pulled.

    The views that it hands out begin at an odd address where `aligned` is False, as a foreign buffer's may.
    """

    def __init__(self, data: bytes, *, aligned: bool = True) -> None:
        self._memory = memoryview(data if aligned else b"?" + data)[0 if aligned else 1 :]
        self.pulls: list[tuple[int, int]] = []
        self.in_flight = 0
        self.most_in_flight = 0

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        assert 0 <= offset < offset + nbytes <= self.nbytes, (offset, nbytes)
        self.pulls.append((offset, nbytes))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0)
        finally:
            self.in_flight -= 1
        return self._memory[offset : offset + nbytes]

    def covered(self) -> bool:
        """Every byte was pulled at least once."""
        end = 0
        for offset, nbytes in sorted(self.pulls):
            if offset > end:
                return False
            end = max(end, offset + nbytes)
        return end == self.nbytes


class FailingSource(PatternSource):
    """Fails in the pull that takes the byte at `at`: it raises, or hands out one byte too few if `short`."""

    def __init__(self, data: bytes, *, at: int, short: bool = False) -> None:
        super().__init__(data)
        self._at = at
        self._short = short

    async def read(self, offset: int, nbytes: int) -> memoryview:
        view = await super().read(offset, nbytes)
        if not offset <= self._at < offset + nbytes:
            return view
        if self._short:
            return view[:-1]
        raise IntegrityError(f"the source is damaged at byte {self._at}", offset=self._at)


class GrowingSource:
    """A `storage.contract.Growing` over `inner`, whose length nobody knows before its end was pulled.

    Args:
        inner: The bytes.
        bound: What it says it is at most, in bytes; None: ten more than it is.
    """

    def __init__(self, inner: PatternSource, *, bound: int | None = None) -> None:
        self.inner = inner
        self.nbytes = inner.nbytes + 10 if bound is None else bound
        self.length: int | None = None

    async def read(self, offset: int, nbytes: int) -> memoryview:
        there = max(0, min(nbytes, self.inner.nbytes - offset))
        if not there:
            self.length = self.inner.nbytes
            return memoryview(b"")
        view = await self.inner.read(offset, there)
        if offset + there == self.inner.nbytes and there < nbytes:
            self.length = self.inner.nbytes
        return view


class GatedSource(PatternSource):
    """Stops in the pull that takes the byte at `at`, says so in `reached`, and goes on when `gate` is set."""

    def __init__(self, data: bytes, *, at: int) -> None:
        super().__init__(data)
        self._at = at
        self.reached = asyncio.Event()
        self.gate = asyncio.Event()

    async def read(self, offset: int, nbytes: int) -> memoryview:
        view = await super().read(offset, nbytes)
        if offset <= self._at < offset + nbytes:
            self.reached.set()
            await self.gate.wait()
        return view
