"""Which 16-bit tensors of a shard look like the rounding of which float32 tensor: found by samples of their numbers, not by names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tierstore.format.packed.rounding import round_into
from tierstore.format.packed.types import Stretch
from tierstore.storage.packing_extras import ReadsExtras
from tierstore.storage.tasks import all_or_none

__all__ = ["Master", "find_masters"]

_SAMPLE = 256
"""Numbers in the middle of a tensor that are looked at."""
_DIFFERENT = 8
"""A sample with fewer different numbers (zeros, ones) tells nothing; such a tensor is compressed to next to nothing anyway."""
_AT_ONCE = 4

_Kind = Literal["bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """A float32 tensor that a 16-bit one may be the rounding of."""

    stretch: Stretch
    kind: _Kind


async def find_masters(stretches: Sequence[Stretch], extras: ReadsExtras, without: Iterable[str]) -> Mapping[str, Master]:
    """The masters of 16-bit tensors, by name; what is found is a guess that is proved block by block.

    Args:
        stretches: Of the file.
        extras: Reads samples.
        without: Names of tensors that are not stored exactly, or need no master.
    """
    skipped = frozenset(without)
    sources: dict[tuple[int, ...], list[Stretch]] = {}
    for stretch in stretches:
        if stretch.name and stretch.dtype == "float32" and stretch.name not in skipped and stretch.end - stretch.begin >= 8:
            sources.setdefault(stretch.shape, []).append(stretch)
    targets = [
        s
        for s in stretches
        if s.name and s.dtype in ("bfloat16", "float16") and s.shape in sources and s.name not in skipped and s.begin % 2 == 0
    ]
    pools = {shape: _Pool(found, extras) for shape, found in sources.items()}
    masters: dict[str, Master] = {}
    for begin in range(0, len(targets), _AT_ONCE):
        some = targets[begin : begin + _AT_ONCE]
        for target, sample in zip(some, await all_or_none([_sample(extras, one, 2) for one in some]), strict=True):
            kind: _Kind = "bfloat16" if target.dtype == "bfloat16" else "float16"
            if len(np.unique(np.frombuffer(sample, dtype="<u2"))) < min(_DIFFERENT, len(sample) // 2):
                continue
            found = await pools[target.shape].of(target, kind, sample)
            if found is not None:
                masters[target.name] = Master(stretch=found, kind=kind)
    return masters


async def _sample(extras: ReadsExtras, stretch: Stretch, itemsize: int) -> bytes:
    numel = (stretch.end - stretch.begin) // itemsize
    first = max(0, numel // 2 - _SAMPLE // 2)
    last = min(numel, first + _SAMPLE)
    begin, end = stretch.begin + first * itemsize, stretch.begin + last * itemsize
    return bytes((await extras.read(begin, end)).part(begin, end))


class _Pool:
    """The float32 tensors of one shape; each is sampled at most once, those first whose names end like the wanted one's."""

    def __init__(self, stretches: Sequence[Stretch], extras: ReadsExtras) -> None:
        self._extras = extras
        self._left = dict.fromkeys(range(len(stretches)))
        self._stretches = stretches
        self._by_ending: dict[str, list[int]] = {}
        for number, stretch in enumerate(stretches):
            for ending in _endings(stretch.name):
                self._by_ending.setdefault(ending, []).append(number)
        self._known: dict[tuple[_Kind, bytes], Stretch] = {}

    async def of(self, target: Stretch, kind: _Kind, sample: bytes) -> Stretch | None:
        for number in self._likely_first(target.name):
            if (kind, sample) in self._known:
                break
            await self._look(number)
        return self._known.get((kind, sample))

    def _likely_first(self, name: str) -> Iterator[int]:
        for ending in _endings(name) if self._left else ():  # where all were looked at, thousands of names need not be gone through
            numbers = [number for number in self._by_ending.get(ending, ()) if number in self._left]
            # The master among moments of the same ending has an ordinary name: moments' names are known.
            yield from sorted(numbers, key=lambda number: ("exp_avg" in self._stretches[number].name, number))
        yield from list(self._left)

    async def _look(self, number: int) -> None:
        if number not in self._left:
            return
        del self._left[number]
        stretch = self._stretches[number]
        numbers = await _sample(self._extras, stretch, 4)
        for kind in _KINDS:
            rounded = bytearray(len(numbers) // 2)
            round_into(memoryview(numbers), memoryview(rounded), kind)
            self._known.setdefault((kind, bytes(rounded)), stretch)


_KINDS: tuple[_Kind, ...] = ("bfloat16", "float16")


def _endings(name: str) -> list[str]:
    """The name's ends at its dots, longest first."""
    parts = name.split(".")
    return [".".join(parts[at:]) for at in range(len(parts))]
