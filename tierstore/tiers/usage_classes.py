"""What a checkpoint's bytes are: weights, fp32 masters, moments and other tensors, told apart by names and content. No values are kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from tierstore.format.index import RoutingIndex, TensorEntry
from tierstore.format.packed.layout import numbers_of
from tierstore.format.packed.types import Stretch
from tierstore.storage.packing_moments import base_name

__all__ = ["CLASSES", "ByteClass", "Range", "TensorClass", "candidates", "classify", "pattern_of", "stretch_of"]

TensorClass = Literal["weights_16", "weights_other", "master", "first_moment", "second_moment", "other"]
CLASSES: Mapping[TensorClass, str] = {
    "weights_16": "weights, 16 bits",
    "weights_other": "weights, other",
    "master": "float32 master",
    "first_moment": "first moments",
    "second_moment": "second moments",
    "other": "other tensors",
}
"""What tensors are told apart as, and what these are called, in the order in which they are shown."""

_FIRST = ("*exp_avg", "*momentum_buffer")
_SECOND = ("*exp_avg_sq", "*max_exp_avg_sq")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Where a chunk of a tensor lies: bytes of a shard. `stretch` says what they are."""

    file: str
    stretch: Stretch

    @property
    def nbytes(self) -> int:
        return self.stretch.end - self.stretch.begin


@dataclass(slots=True, kw_only=True)
class ByteClass:
    """The tensors of one class, each byte counted once.

    Attributes:
        name: Which.
        tensors: How many, without further names of tied ones.
        tied_nbytes: Bytes that further names of the same tensors would take if they were not stored once.
        tied: How many such names.
    """

    name: TensorClass
    tensors: int = 0
    ranges: list[Range] = field(default_factory=list)
    tied: int = 0
    tied_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.ranges)


def pattern_of(name: str) -> str:
    """A name with its numbers taken out: what the layers of a model have in common."""
    return _NUMBER.sub("#", base_name(name))


def classify(index: RoutingIndex, masters: frozenset[str] = frozenset()) -> dict[TensorClass, ByteClass]:
    """The index's tensors by class.

    Args:
        index: The routing index.
        masters: Patterns (`pattern_of`) of float32 tensors that are the masters of 16-bit ones.
    """
    found = {name: ByteClass(name=name) for name in CLASSES}
    seen: set[tuple[str, int, int]] = set()
    for entry in index:
        into = found[_class_of(entry, masters)]
        fresh = [e for e in entry.extents if (e.file, e.begin, e.end) not in seen]
        if entry.extents and not fresh:
            into.tied += 1
            into.tied_nbytes += sum(e.end - e.begin for e in entry.extents)
            continue
        into.tensors += 1
        for extent in fresh:
            seen.add((extent.file, extent.begin, extent.end))
            into.ranges.append(Range(file=extent.file, stretch=stretch_of(entry, extent.begin, extent.end, extent.sizes)))
    return found


def stretch_of(entry: TensorEntry, begin: int, end: int, sizes: Sequence[int]) -> Stretch:
    """A chunk as packing sees it."""
    itemsize, rotated = numbers_of(entry.dtype)
    return Stretch(
        begin=begin,
        end=end,
        itemsize=itemsize,
        rotated=rotated,
        name=entry.name,
        dtype=entry.dtype,
        shape=tuple(sizes),
    )


def candidates(classes: Mapping[TensorClass, ByteClass], per_pattern: int) -> dict[str, list[Stretch]]:
    """Files, each with 16-bit tensors of which some are looked at for a master, and all float32 ones that could be it.

    Args:
        classes: From `classify`, without masters.
        per_pattern: How many tensors of each pattern of names are looked at.
    """
    by_pattern: dict[str, list[Range]] = {}
    for one in classes["weights_16"].ranges:
        by_pattern.setdefault(pattern_of(one.stretch.name), []).append(one)
    files: dict[str, list[Stretch]] = {}
    for ranges in by_pattern.values():
        for one in _spread(ranges, per_pattern):
            files.setdefault(one.file, []).append(one.stretch)
    shapes = {name: {s.shape for s in stretches} for name, stretches in files.items()}
    for one in classes["weights_other"].ranges:
        if one.stretch.dtype == "float32" and one.stretch.shape in shapes.get(one.file, ()):
            files[one.file].append(one.stretch)
    return {name: [s for s in stretches if math.prod(s.shape)] for name, stretches in files.items()}


def _spread(ranges: Sequence[Range], count: int) -> Iterable[Range]:
    if len(ranges) <= count:
        return ranges
    return [ranges[(len(ranges) - 1) * at // max(1, count - 1)] for at in range(count)]


def _class_of(entry: TensorEntry, masters: frozenset[str]) -> TensorClass:
    name, dtype = base_name(entry.name), entry.dtype
    if _any(name, _SECOND):
        return "second_moment"
    if _any(name, _FIRST):
        return "first_moment"
    if dtype in ("bfloat16", "float16"):
        return "weights_16"
    if dtype == "float32" and pattern_of(name) in masters:
        return "master"
    return "weights_other" if dtype.startswith("float") and math.prod(entry.shape) > 1 else "other"


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
