"""The bytes that one rank wants, in order of files and offsets: which of them an exchange brings, and where they go when they arrive."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tierstore.state.exchange.plan import Ints, Unit
from tierstore.tiers.reads import AnyWant, Handover, Want

__all__ = ["Sorted"]


class Sorted:
    """Wants, sorted. `share` divides them into what is read alone and what `deliver` will bring.

    Args:
        wants: None of them empty.
        file_names: The files, by number.

    Attributes:
        files, offsets, sizes: Of the wants, sorted by file number and offset: numbers, bytes, bytes.
    """

    def __init__(self, wants: Sequence[AnyWant], file_names: Sequence[str]) -> None:
        numbers = {name: number for number, name in enumerate(file_names)}
        self._names = file_names
        files = np.array([numbers[w.file] for w in wants], dtype=np.int64)
        offsets = np.array([w.offset for w in wants], dtype=np.int64)
        order = np.lexsort((offsets, files))
        self._wants = [wants[i] for i in order.tolist()]
        self.files: Ints = files[order]
        self.offsets: Ints = offsets[order]
        self.sizes: Ints = np.array([w.nbytes for w in self._wants], dtype=np.int64)
        # One number line for all files, with room between them.
        self._stride = int((self.offsets + self.sizes).max()) + 1 if len(wants) else 1
        self._begins: Ints = self.files * self._stride + self.offsets
        self._ends: Ints = self._begins + self.sizes
        self._furthest: Ints = np.maximum.accumulate(self._ends)
        self._open: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        """Handovers of which the exchange brings a part: bytes that are still to come, and the ranges that it does not bring."""
        self._ready: list[tuple[int, list[tuple[int, int]]]] = []

    def share(self, units: Iterable[Unit], block_nbytes: int) -> list[AnyWant]:
        """Learns which blocks `deliver` will bring, each once; returns what is to be read otherwise."""
        begins, ends = self._shared(units, block_nbytes)
        alone: list[AnyWant] = []
        first = np.searchsorted(ends, self._begins, side="right").tolist()
        last = np.searchsorted(begins, self._ends, side="left").tolist()
        for number, (low, high) in enumerate(zip(first, last, strict=True)):
            want = self._wants[number]
            if low >= high:
                alone.append(want)
                continue
            base = int(self.files[number]) * self._stride
            brought = [(max(int(begins[i]) - base, want.offset), min(int(ends[i]) - base, want.end)) for i in range(low, high)]
            gaps = _gaps(want.offset, want.end, brought)
            if isinstance(want, Want):
                alone += [Want(want.file, begin, want.buffer[begin - want.offset : end - want.offset], want.group) for begin, end in gaps]
            elif gaps:
                self._open[number] = (sum(end - begin for begin, end in brought), gaps)
        return alone

    def deliver(self, file: int, offset: int, data: memoryview) -> None:
        """Brings the bytes of a file from `offset` on to all wants that they belong to; they are not kept."""
        begin = file * self._stride + offset
        end = min(
            begin + data.nbytes, (file + 1) * self._stride
        )  # a block may reach beyond the last want: not into the next file's stretch
        low = int(np.searchsorted(self._furthest, begin, side="right"))
        high = int(np.searchsorted(self._begins, end, side="left"))
        for number in range(low, high):
            first, last = max(begin, int(self._begins[number])), min(end, int(self._ends[number]))
            if first >= last:
                continue
            self._wants[number].receive(first - file * self._stride, data[first - begin : last - begin])
            if number in self._open:
                missing, gaps = self._open[number]
                self._open[number] = (missing - (last - first), gaps)
                if missing == last - first:
                    del self._open[number]
                    self._ready.append((number, gaps))

    def remainders(self) -> list[AnyWant]:
        """The rest of those that were brought in part, once all that is brought of them is there; each is returned once."""
        made: list[AnyWant] = []
        for number, gaps in self._ready:
            want = self._wants[number]
            made += [Handover(want.file, b, e - b, functools.partial(want.receive, b), want.group) for b, e in gaps]
        self._ready.clear()
        return made

    def _shared(self, units: Iterable[Unit], block_nbytes: int) -> tuple[Ints, Ints]:
        """The units on the number line, those that touch merged."""
        listed = np.array([(u.file, u.first, u.last) for u in units], dtype=np.int64).reshape(-1, 3)
        listed = listed[np.lexsort((listed[:, 1], listed[:, 0]))]
        base = listed[:, 0] * self._stride
        # Past the last want of a file nothing is wanted: a unit must not reach into the next file's stretch.
        begins = base + np.minimum(listed[:, 1] * block_nbytes, self._stride)
        ends = base + np.minimum(listed[:, 2] * block_nbytes, self._stride)
        if not len(begins):
            return begins, ends
        apart = _apart(begins, ends)
        return begins[np.concatenate([[True], apart])], ends[np.concatenate([apart, [True]])]


def _apart(begins: Ints, ends: Ints) -> npt.NDArray[np.bool_]:
    return np.asarray(begins[1:] != ends[:-1])


def _gaps(begin: int, end: int, brought: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found = []
    for first, last in brought:
        if begin < first:
            found.append((begin, first))
        begin = last
    if begin < end:
        found.append((begin, end))
    return found
