"""Where a checkpoint's bytes are, and what each way of storing them smaller would save: measured on a sample of the checkpoint itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from tierstore.format.digest import block_count
from tierstore.format.packed.frame import FrameEncoder
from tierstore.format.packed.rounding import is_rounding
from tierstore.format.packed.types import Piece, Quantised, Stretch
from tierstore.storage.packing_extras import Extra
from tierstore.storage.packing_masters import Master, find_masters
from tierstore.storage.packing_moments import is_quantised
from tierstore.storage.packing_rules import QuantiseRule
from tierstore.tiers.matching import BlockTable, is_worth_it, match_blocks
from tierstore.tiers.reads import Want
from tierstore.tiers.replica import Replica
from tierstore.tiers.usage_classes import ByteClass, TensorClass, candidates, classify, pattern_of

__all__ = ["LOSSLESS", "OPTIONS", "Explained", "Measured", "Storing", "explain_usage", "stored_nbytes"]

_SPOT = 1 << 20
"""Bytes that are encoded at a time: a block, as packed files have them."""
_AT_ONCE = 16
_FEW_SPOTS, _MOST_SPOTS = 16, 256
"""At least so many places of a class are looked at, if it has as many tensors; and at most so many tensors one by one."""
_LEAST = 4 << 20
"""Of each class at least so much is looked at, if it has as much."""
_PER_PATTERN = 3

Scheme = Literal["q8", "q4"]
_SCHEMES: tuple[Scheme, ...] = ("q8", "q4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Storing:
    """A way of storing shards, as a tier's configuration says it."""

    zstd: bool = False
    master_once: bool = False
    unchanged_once: bool = False
    quantise: Scheme | None = None

    def __str__(self) -> str:
        words = [
            "codec: zstd" if self.zstd else "",
            "master_once" if self.master_once else "",
            "unchanged_once" if self.unchanged_once else "",
            f"quantise: {self.quantise}" if self.quantise else "",
        ]
        return " + ".join(filter(None, words)) or "as it is"


LOSSLESS = Storing(zstd=True, master_once=True, unchanged_once=True)
OPTIONS: tuple[Storing, ...] = (
    Storing(zstd=True),
    Storing(master_once=True),
    Storing(unchanged_once=True),
    Storing(zstd=True, master_once=True),
    LOSSLESS,
    Storing(quantise="q8"),
    Storing(quantise="q4"),
    Storing(zstd=True, master_once=True, quantise="q8"),  # quantised copies neither refer to others, nor are referred to
    Storing(zstd=True, master_once=True, quantise="q4"),
)
"""What is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One class of tensors.

    Attributes:
        name: Which.
        tensors: How many.
        nbytes: Their bytes, raw, each once.
        unchanged_nbytes: Of those, what lies in blocks that the checkpoint before has too.
        rounded_share: For 16-bit weights: the part that is the rounding of a master in the same shard.
        sampled_nbytes: How much was looked at.
        ratios: (Compressed, scheme) → encoded bytes per raw byte.
        changed_ratios: The same of what is not unchanged: rows that were never trained, say, are both unchanged and easily compressed.
        tied: Further names of the same tensors, and the bytes that they would take.
    """

    name: TensorClass
    tensors: int
    nbytes: int
    unchanged_nbytes: int = 0
    rounded_share: float = 0.0
    sampled_nbytes: int = 0
    ratios: Mapping[tuple[bool, Scheme | None], float] = field(default_factory=dict)
    changed_ratios: Mapping[tuple[bool, Scheme | None], float] = field(default_factory=dict)
    tied: int = 0
    tied_nbytes: int = 0

    def stored(self, how: Storing) -> int:
        """What the class takes up where shards are stored in that way, in bytes."""
        left = self.nbytes - self.unchanged_nbytes if how.unchanged_once else self.nbytes
        ratios = self.changed_ratios if how.unchanged_once else self.ratios
        return round(left * (1 - self.rounded_share * how.master_once) * ratios.get((how.zstd, how.quantise), 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Where a checkpoint's bytes are.

    Attributes:
        classes: The tensors' classes that it has.
        shard_nbytes: All its shards, raw, headers included.
        sampled_nbytes: How much was read.
        pairs: How many 16-bit tensors were looked at for a master, and how many have one.
        before: The step of the checkpoint that it was compared with; None: there is none.
    """

    classes: tuple[Measured, ...]
    shard_nbytes: int
    sampled_nbytes: int
    pairs: tuple[int, int] = (0, 0)
    before: int | None = None

    @property
    def unchanged_nbytes(self) -> int:
        return sum(one.unchanged_nbytes for one in self.classes)

    @property
    def rounded_nbytes(self) -> int:
        """Weights that are their master, rounded."""
        return round(sum(one.nbytes * one.rounded_share for one in self.classes))

    @property
    def tensor_nbytes(self) -> int:
        return sum(one.nbytes for one in self.classes)

    def stored(self, how: Storing) -> int:
        """What all shards take up where they are stored in that way, in bytes."""
        return self.shard_nbytes - self.tensor_nbytes + sum(one.stored(how) for one in self.classes)


def stored_nbytes(explained: Explained, how: Storing, shard_nbytes: int) -> dict[TensorClass, int]:
    """How a tier's bytes divide among the classes, where its shards take up `shard_nbytes` in all and are stored in the way `how`."""
    if shard_nbytes == explained.shard_nbytes:
        return {one.name: one.nbytes for one in explained.classes}
    whole = explained.stored(how)
    return {one.name: round(one.stored(how) * shard_nbytes / whole) if whole else 0 for one in explained.classes}


async def explain_usage(replica: Replica, *, sample_nbytes: int, before: Replica | None = None) -> Explained:
    """Looks at a checkpoint: at its index, its digests and a sample of its values, read from the nearest tier.

    Args:
        replica: The checkpoint, open.
        sample_nbytes: About how much may be read, in bytes; nothing is proved, for nothing of it is kept.
        before: The checkpoint before it, open: what is unchanged since then is told by digests.

    Raises:
        StorageError, IntegrityError: It can't be read.
    """
    plain = classify(replica.index)
    masters = {
        (file, name): master
        for file, stretches in candidates(plain, _PER_PATTERN).items()
        for name, master in (await find_masters(stretches, cast(Any, _Samples(replica, file)), ())).items()
    }
    looked = {
        (file, s.name): s
        for file, stretches in candidates(plain, _PER_PATTERN).items()
        for s in stretches
        if s.dtype in ("bfloat16", "float16")
    }
    patterns = frozenset(pattern_of(master.stretch.name) for master in masters.values())
    classes = classify(replica.index, patterns)
    equal = {} if before is None else await _unchanged(replica, before)
    share = await _rounded_share(replica, looked, masters, sample_nbytes // 4)
    read = sum(stretch.end - stretch.begin for _, stretch in share.looked_at)
    total = sum(one.nbytes for one in classes.values())
    measured: list[Measured] = []
    for one in classes.values():
        if not one.ranges and not one.tied:
            continue
        part = min(one.nbytes, max(_LEAST, (sample_nbytes * 3 // 4) * one.nbytes // max(1, total)))
        spots = list(_spots(one, part))
        fresh = [spot for spot in spots if 2 * _shared(spot.file, spot.begin, spot.end, equal, replica.index.block_nbytes) <= spot.nbytes]
        ratios, changed = await _ratios(replica, one, spots, frozenset(fresh))
        nbytes = sum(spot.nbytes for spot in spots)
        read += nbytes
        measured.append(
            Measured(
                name=one.name,
                tensors=one.tensors,
                nbytes=one.nbytes,
                unchanged_nbytes=_within(one, equal, replica.index.block_nbytes),
                rounded_share=share.of(one) if one.name == "weights_16" else 0.0,
                sampled_nbytes=nbytes,
                ratios=ratios,
                changed_ratios=changed,
                tied=one.tied,
                tied_nbytes=one.tied_nbytes,
            )
        )
    return Explained(
        classes=tuple(measured),
        shard_nbytes=replica.index.nbytes,
        sampled_nbytes=read,
        pairs=(len(looked), len(masters)),
        before=None if before is None else before.info.step,
    )


class _Samples:
    """Reads small parts of one shard as they are, where `Extras` reads whole blocks of a source that is passed over anyway."""

    def __init__(self, replica: Replica, file: str) -> None:
        self._replica = replica
        self._file = file

    async def read(self, begin: int, end: int) -> Extra:
        [data] = await _read(self._replica, [(self._file, begin, end)])
        return Extra(begin, data)


async def _read(replica: Replica, ranges: Sequence[tuple[str, int, int]]) -> list[memoryview]:
    buffers = [memoryview(bytearray(end - begin)) for _, begin, end in ranges]
    wants = [Want(file, begin, buffer) for (file, begin, _), buffer in zip(ranges, buffers, strict=True) if buffer.nbytes]
    await replica.read(wants, verify=False)
    return buffers


# ---- weights that are their master, rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rounded:
    """The part of each pattern of names that is the rounding of its master."""

    shares: Mapping[str, float]
    looked_at: tuple[tuple[str, Stretch], ...]

    def of(self, weights: ByteClass) -> float:
        whole = sum(one.nbytes for one in weights.ranges)
        found = sum(one.nbytes * self.shares.get(pattern_of(one.stretch.name), 0.0) for one in weights.ranges)
        return found / whole if whole else 0.0


async def _rounded_share(
    replica: Replica, looked: Mapping[tuple[str, str], Stretch], masters: Mapping[tuple[str, str], Master], budget: int
) -> _Rounded:
    """What was found by a few numbers is looked at more closely: whole blocks are compared, bit by bit."""
    equal: dict[str, int] = {}
    seen: dict[str, int] = {}
    spots: list[tuple[str, Stretch]] = []
    each = max(2, min(_SPOT // 4, budget // max(1, 3 * len(masters)))) // 2 * 2
    for (file, name), target in looked.items():
        pattern, nbytes = pattern_of(name), target.end - target.begin
        seen[pattern] = seen.get(pattern, 0) + nbytes
        master = masters.get((file, name))
        if master is None:
            continue
        length = min(each, nbytes)
        at = (nbytes - length) // 2 // 2 * 2
        source = master.stretch.begin + 2 * at
        ranges = [(file, target.begin + at, target.begin + at + length), (file, source, source + 2 * length)]
        words, numbers = await _read(replica, ranges)
        spots += [(file, Stretch(begin=begin, end=end, itemsize=1, rotated=False)) for _, begin, end in ranges]
        if is_rounding(numbers, words, master.kind):
            equal[pattern] = equal.get(pattern, 0) + nbytes
    return _Rounded(shares={pattern: equal.get(pattern, 0) / nbytes for pattern, nbytes in seen.items()}, looked_at=tuple(spots))


# ---- what is as in the checkpoint before


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """Which blocks of a shard an earlier checkpoint has too: bools, one a block; and how many of those stand before each."""

    blocks: np.ndarray[Any, Any]
    before: np.ndarray[Any, Any]


async def _unchanged(replica: Replica, before: Replica) -> dict[str, _Shared]:
    """By shard, what it shares with an earlier checkpoint, where that is worth a reference."""
    if replica.index.block_nbytes != before.index.block_nbytes:
        return {}
    table = BlockTable([await before.file_entry(name) for name in before.index.file_names], before.index.block_nbytes)
    found: dict[str, _Shared] = {}
    for name in replica.index.file_names:
        entry = await replica.file_entry(name)
        matches = await asyncio.to_thread(match_blocks, entry, table)
        if is_worth_it(sum(match.end - match.begin for match in matches), entry.nbytes):
            blocks = np.zeros(block_count(entry.nbytes, table.block_nbytes), dtype=bool)
            for match in matches:
                blocks[match.begin // table.block_nbytes : -(-match.end // table.block_nbytes)] = True
            found[name] = _Shared(blocks=blocks, before=np.concatenate([[0], np.cumsum(blocks)]))
    return found


def _within(one: ByteClass, equal: Mapping[str, _Shared], block_nbytes: int) -> int:
    """Bytes of a class that lie in blocks that are equal to earlier ones."""
    return sum(_shared(span.file, span.stretch.begin, span.stretch.end, equal, block_nbytes) for span in one.ranges)


def _shared(file: str, begin: int, end: int, equal: Mapping[str, _Shared], block_nbytes: int) -> int:
    found = equal.get(file)
    if found is None or begin >= end:
        return 0
    first, last = begin // block_nbytes, (end - 1) // block_nbytes
    total = int(found.before[last + 1] - found.before[first]) * block_nbytes
    total -= (begin - first * block_nbytes) * int(found.blocks[first])
    return total - ((last + 1) * block_nbytes - end) * int(found.blocks[last])


# ---- what encoding makes of a sample


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spot:
    """Bytes of one tensor that are encoded as a block would be."""

    file: str
    begin: int
    end: int
    stretch: Stretch

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def _spots(one: ByteClass, nbytes: int) -> Iterator[_Spot]:
    """About `nbytes` of a class, in blocks: all of it where that is enough, else spread evenly over its bytes."""
    total = one.nbytes
    if not total:
        return
    if total <= nbytes and len(one.ranges) <= _MOST_SPOTS:
        for span in one.ranges:
            for begin in range(span.stretch.begin, span.stretch.end, _SPOT):
                yield _Spot(file=span.file, begin=begin, end=min(span.stretch.end, begin + _SPOT), stretch=span.stretch)
        return
    count = max(math.ceil(nbytes / _SPOT), min(len(one.ranges), _FEW_SPOTS))
    ends = np.cumsum([span.nbytes for span in one.ranges])
    for number in range(count):
        place = total * number // count
        at = int(np.searchsorted(ends, place, side="right"))
        span = one.ranges[at]
        stretch = span.stretch
        inside = (place - (int(ends[at]) - span.nbytes)) // stretch.itemsize * stretch.itemsize
        begin = stretch.begin + min(inside, max(0, span.nbytes - _SPOT) // stretch.itemsize * stretch.itemsize)
        yield _Spot(file=span.file, begin=begin, end=min(stretch.end, begin + _SPOT), stretch=stretch)


_Ratios = dict[tuple[bool, Scheme | None], float]


async def _ratios(replica: Replica, one: ByteClass, spots: Sequence[_Spot], changed: frozenset[_Spot]) -> tuple[_Ratios, _Ratios]:
    """(Compressed, scheme) → encoded bytes per raw byte, of all of the class's spots, and of those in `changed` (if any)."""
    schemes = (None, *_SCHEMES) if one.name in ("first_moment", "second_moment") else (None,)
    ways = [(zstd, scheme) for zstd in (False, True) for scheme in schemes]
    encoders = {zstd: FrameEncoder("zstd" if zstd else "raw") for zstd in (False, True)}
    made: dict[_Spot, dict[tuple[bool, Scheme | None], int]] = {}

    def encode(spot: _Spot, data: memoryview) -> None:
        made[spot] = {}
        for zstd, scheme in ways:
            how = _quantised(one, spot, scheme)
            piece = Piece(begin=0, end=data.nbytes, itemsize=spot.stretch.itemsize, rotated=spot.stretch.rotated, quantised=how)
            made[spot][zstd, scheme] = len(encoders[zstd].encode(data, [piece]))

    for begin in range(0, len(spots), _AT_ONCE):
        some = spots[begin : begin + _AT_ONCE]
        for spot, data in zip(some, await _read(replica, [(s.file, s.begin, s.end) for s in some]), strict=True):
            await asyncio.to_thread(encode, spot, data)

    def summed(chosen: Collection[_Spot]) -> _Ratios:
        raw = sum(spot.nbytes for spot in chosen)
        found: _Ratios = {way: min(1.0, sum(made[spot][way] for spot in chosen) / max(1, raw)) for way in ways}
        found[False, None] = 1.0  # frames' heads are some bytes a block
        for scheme in _SCHEMES:  # what is not quantised is as it is without
            for zstd in (False, True):
                found.setdefault((zstd, scheme), found[zstd, None])
        return found

    return summed(made), summed([spot for spot in made if spot in changed] or made)


def _quantised(one: ByteClass, spot: _Spot, scheme: Scheme | None) -> Quantised | None:
    stretch = spot.stretch
    if scheme is None or not is_quantised(stretch, QuantiseRule(scheme=scheme)):
        return None
    columns = stretch.shape[-1]
    return Quantised(
        scheme=scheme,
        kind="second" if one.name == "second_moment" else "first",
        columns=columns,
        first_column=(spot.begin - stretch.begin) // 4 % columns,
    )
