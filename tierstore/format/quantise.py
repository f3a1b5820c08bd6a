"""Optimizer moments in 8 or 4 bits a number: logarithmic codes in groups along a row, exact zeros, steps that are never amplified.

Encoded, a run of float32 numbers (see `format.packed.types.Quantised`) is one place for each group (`format.quantise_log`, in 256ths of an
octave, ``uint16``); for second moments then one byte for each group, the distance of its levels; then the codes, a byte for each number or
a nibble (the earlier number's is the low one).

* First moment: the group's place is that of its largest magnitude; code 0 is zero, else a sign bit and a magnitude, whose levels go down
  from there by `Scheme.first_step`. A number goes to the level with the smallest relative error, and to zero where it is below all of them.
* Second moment: the group's place is that of its smallest positive number; code 0 is zero, code k the level k - 1 upwards. A number goes to
  the next level that is not smaller, so that ``m / (sqrt(v) + eps)`` is never larger than it was for the same m.

What was decoded is encoded to the same bytes again: the errors don't grow with generations, as long as nothing else changes the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import FormatError
from tierstore.format.digest import Buffer
from tierstore.format.packed.types import Quantised
from tierstore.format.quantise_errors import UpdateError, update_errors
from tierstore.format.quantise_groups import groups_of
from tierstore.format.quantise_log import LOWEST_PLACE, OCTAVE, PLACE_RATIO, numbers_at, places_of

__all__ = [
    "FIRST_TINY",
    "SCHEMES",
    "SECOND_TINY",
    "TOO_LARGE",
    "Scheme",
    "UpdateError",
    "decode_moment",
    "encode_moment",
    "encoded_nbytes",
    "update_errors",
]

Floats = npt.NDArray[np.float32]

TOO_LARGE = 2.0**124
"""Runs with numbers from here on (and infinities, NaN, negative second moments) are not quantised."""

FIRST_TINY = 2.0**-110
"""First moments of groups whose largest magnitude is smaller may be decoded as zeros."""

SECOND_TINY = 2.0**-126
"""Second moments that are smaller, but not zero, are decoded as this."""

_PLACE = 16
"""Scales are multiples of this many places: 256ths of an octave."""

_FEW = 1 << 16
"""Numbers that are worked on at a time: they, and what is made of them, stay in a core's cache."""

_LAST_PLACE = 255 * OCTAVE
_TOO_LARGE_BITS = np.uint32((127 + 124) << 23)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SMALLEST_NORMAL = np.uint32(0x00800000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A way of quantising.

    Attributes:
        bits: Of a code, 8 or 4.
        group: Numbers that have one scale.
        first_step: Distance of two levels of first moments, in 4096ths of an octave.
        second_unit: What the distance of two levels of second moments is counted in, in 4096ths of an octave.
        second_most: The largest distance, in units.
    """

    bits: int
    group: int
    first_step: int
    second_unit: int
    second_most: int

    @property
    def first_levels(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    @property
    def second_levels(self) -> int:
        return int(2**self.bits) - 1

    @property
    def first_error(self) -> float:
        """The largest relative error of a first moment that is not smaller than `first_floor` times its group's largest magnitude."""
        ratio = 2 ** (-self.first_step / OCTAVE)
        return (1 - ratio) / (1 + ratio) + 1e-3

    @property
    def first_floor(self) -> float:
        """The part of a group's largest magnitude below which a first moment's error is only bounded by this part itself."""
        return 2 ** (-(self.first_levels - 1) * self.first_step / OCTAVE)

    @property
    def second_floor(self) -> float:
        """The part of a group's largest second moment below which smaller ones are raised to about this part."""
        return 2 ** (-(self.second_levels - 1) * self.second_unit * self.second_most / OCTAVE)

    @property
    def second_error(self) -> float:
        """The most that ``sqrt(v)`` is raised by, as a part of it, where v is not smaller than `second_floor` times its group's largest."""
        return self.second_error_of(np.inf)

    def second_error_of(self, octaves: float) -> float:
        """The same in groups whose largest second moment is not more than ``2 ** octaves`` times the smallest positive one."""
        step = min(self.second_most, np.ceil(octaves * OCTAVE / self.second_unit / (self.second_levels - 1)) + 1) * self.second_unit
        return float((2 ** (max(step, _PLACE) / OCTAVE) * PLACE_RATIO) ** 0.5 - 1)


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "q8": Scheme(bits=8, group=128, first_step=390, second_unit=4, second_most=161),
        "q4": Scheme(bits=4, group=32, first_step=3413, second_unit=64, second_most=110),
    }
)


def encoded_nbytes(count: int, q: Quantised) -> int:
    """How many bytes a run of `count` numbers becomes: it depends on nothing else.

    Raises:
        ValueError: There is no such run, or scheme.
    """
    scheme = _scheme(q)
    groups = groups_of(count, q.columns, q.first_column, scheme.group).count
    return groups * (2 if q.kind == "first" else 3) + (count if scheme.bits == 8 else (count + 1) // 2)


def encode_moment(values: Floats, q: Quantised, zero: npt.NDArray[np.bool_] | None = None) -> bytes | None:
    """Quantises a run.

    Args:
        values: float32, one-dimensional.
        q: How, and where in its rows the run begins.
        zero: Where numbers become zero whatever they are: for a first moment where the second one is zero, for ``m / (0 + eps)`` would be a
            step of its own if m were anything.

    Returns:
        The bytes; None where it can't be quantised and is to be kept exactly: a number is NaN, infinite or not smaller than `TOO_LARGE`, or
        a second moment is negative.

    Raises:
        ValueError: There is no such run, or scheme.
    """
    scheme = _scheme(q)
    groups = groups_of(values.size, q.columns, q.first_column, scheme.group)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    if zero is not None:
        bits = np.where(zero, np.uint32(0), bits)
    padded = groups.pad(bits)
    heads: list[npt.NDArray[Any]] = []
    codes: list[npt.NDArray[np.uint8]] = []
    steps: list[npt.NDArray[Any]] = []
    for begin in range(0, groups.count, _FEW // scheme.group):
        part = padded[begin : begin + _FEW // scheme.group]
        encoded = _encode_first(part, scheme) if q.kind == "first" else _encode_second(part, scheme)
        if encoded is None:
            return None
        heads.append(encoded[0])
        steps.append(encoded[1])
        codes.append(encoded[2])
    if not heads:
        return b""
    flat = groups.unpad(np.concatenate(codes))
    if scheme.bits == 4:
        flat = _to_nibbles(flat)
    return b"".join([*(head.astype("<u2").tobytes() for head in heads), *(step.tobytes() for step in steps), flat.tobytes()])


def decode_moment(data: Buffer, count: int, q: Quantised) -> Floats:
    """Makes numbers of an encoded run again.

    Args:
        data: The bytes; they may be anybody's.
        count: Numbers in the run.
        q: As it was encoded.

    Raises:
        FormatError: They are not `encoded_nbytes` bytes, or a scale is none that is written.
        ValueError: There is no such run, or scheme.
    """
    scheme = _scheme(q)
    groups = groups_of(count, q.columns, q.first_column, scheme.group)
    raw = np.frombuffer(data, dtype=np.uint8)
    if raw.size != encoded_nbytes(count, q):
        raise FormatError(
            f"{raw.size:,} bytes of a quantised moment, where {count:,} numbers in {q.scheme} have {encoded_nbytes(count, q):,}",
            hint="the file is foreign or damaged: run `tierstore verify`",
        )
    if not count:
        return np.empty(0, dtype=np.float32)
    heads = raw[: 2 * groups.count].view("<u2").astype(np.int32) * np.int32(_PLACE)
    rest = raw[2 * groups.count :]
    steps = None
    if q.kind == "second":
        steps, rest = rest[: groups.count].astype(np.int32) * np.int32(scheme.second_unit), rest[groups.count :]
    _check(heads, steps, scheme)
    codes = groups.pad(rest if scheme.bits == 8 else _from_nibbles(rest, count))
    numbers = np.empty(codes.shape, dtype=np.uint32)
    for begin in range(0, groups.count, _FEW // scheme.group):
        part = slice(begin, begin + _FEW // scheme.group)
        if steps is None:
            _decode_first(codes[part], heads[part], scheme, numbers[part])
        else:
            _decode_second(codes[part], heads[part], steps[part], numbers[part])
    return groups.unpad(numbers).view(np.float32)


def _scheme(q: Quantised) -> Scheme:
    if q.scheme not in SCHEMES or q.kind not in ("first", "second"):
        raise ValueError(f"no scheme {q.scheme!r} for {q.kind!r} moments")
    return SCHEMES[q.scheme]


_Encoded = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.uint8]]


def _encode_first(bits: npt.NDArray[np.uint32], scheme: Scheme) -> _Encoded | None:
    magnitude = bits & _MAGNITUDE
    largest = magnitude.max(axis=1)
    if largest.max() >= _TOO_LARGE_BITS:
        return None
    levels, step = scheme.first_levels, scheme.first_step
    head = -(-places_of(largest) // _PLACE)
    head[head * _PLACE < LOWEST_PLACE + levels * step] = 0  # its levels would not all be normal numbers
    below = (head * np.int32(_PLACE))[:, None] - places_of(magnitude)
    ratio = 2 ** (-step / OCTAVE)
    middle = round(-np.log2((1 + ratio) / 2) * OCTAVE)
    code = np.int32(levels) - (below + np.int32(step - middle)) // np.int32(step)
    np.maximum(code, 0, out=code)
    code |= (bits >> np.uint32(31)).view(np.int32) * np.int32(levels + 1)
    codes = code.astype(np.uint8)
    codes[(magnitude < _SMALLEST_NORMAL) | (codes == levels + 1)] = 0
    codes[head == 0] = 0
    return head, np.empty(0, dtype=np.uint8), codes


def _encode_second(bits: npt.NDArray[np.uint32], scheme: Scheme) -> _Encoded | None:
    largest = bits.max(axis=1)
    if largest.max() >= _TOO_LARGE_BITS:
        bits = np.where(bits == np.uint32(0x80000000), np.uint32(0), bits)  # -0
        largest = bits.max(axis=1)
        if largest.max() >= _TOO_LARGE_BITS:
            return None
    smallest = (bits - np.uint32(1)).min(axis=1) + np.uint32(1)  # zero becomes the largest number there is
    most, unit = np.int32(scheme.second_levels - 1), np.int32(scheme.second_unit)
    top = places_of(np.maximum(largest, _SMALLEST_NORMAL))
    low = -(-np.maximum(places_of(np.maximum(smallest, _SMALLEST_NORMAL)), top - most * unit * np.int32(scheme.second_most)) // _PLACE)
    base = low * np.int32(_PLACE)
    step = np.maximum(-(-(top - base) // (most * unit)), 1)
    nothing = largest == 0
    low[nothing] = 0
    step[nothing] = 0
    above = (places_of(np.maximum(bits, _SMALLEST_NORMAL)) - base[:, None]).astype(np.float32)
    above /= np.maximum(step * unit, 1).astype(np.float32)[:, None]
    np.ceil(above, out=above)
    above += np.float32(1)
    np.maximum(above, np.float32(1), out=above)
    codes = above.astype(np.uint8)
    codes *= bits != 0
    return low, step.astype(np.uint8), codes


def _decode_first(codes: npt.NDArray[np.uint8], heads: npt.NDArray[np.int32], scheme: Scheme, out: npt.NDArray[np.uint32]) -> None:
    levels = scheme.first_levels
    magnitude = codes & np.uint8(levels)
    places = magnitude.astype(np.int32)
    places *= np.int32(scheme.first_step)
    places += (heads - np.int32(levels * scheme.first_step))[:, None]
    bits = numbers_at(places)
    bits |= (codes >> np.uint8(scheme.bits - 1)).astype(np.uint32) << np.uint32(31)
    np.multiply(bits, (magnitude != 0) & (heads != 0)[:, None], out=out)


def _decode_second(
    codes: npt.NDArray[np.uint8], heads: npt.NDArray[np.int32], steps: npt.NDArray[np.int32], out: npt.NDArray[np.uint32]
) -> None:
    places = codes.astype(np.int32)
    places *= steps[:, None]
    places += (heads - steps)[:, None]
    np.multiply(numbers_at(places), (codes != 0) & (heads != 0)[:, None], out=out)


def _check(heads: npt.NDArray[np.int32], steps: npt.NDArray[np.int32] | None, scheme: Scheme) -> None:
    """Proves that all levels of all groups are numbers.

    Raises:
        FormatError: They are not.
    """
    if steps is None:
        low, high = heads - np.int32((scheme.first_levels - 1) * scheme.first_step), heads
    else:
        low, high = heads, heads + steps * np.int32(scheme.second_levels - 1)
    wrong = ((low < LOWEST_PLACE) | (high >= _LAST_PLACE)) & (heads != 0)
    if wrong.any():
        raise FormatError(
            f"a quantised moment has the scale {int(heads[wrong][0])} in group {int(np.flatnonzero(wrong)[0])}, which none can have",
            hint="the file is foreign or damaged: run `tierstore verify`",
        )


def _to_nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    packed = np.zeros((codes.size + 1) // 2, dtype=np.uint8)
    packed[: codes.size // 2] = codes[1::2]
    packed <<= np.uint8(4)
    packed |= codes[::2]
    return packed


def _from_nibbles(packed: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.uint8]:
    codes = np.empty(2 * packed.size, dtype=np.uint8)
    np.bitwise_and(packed, np.uint8(15), out=codes[::2])
    np.right_shift(packed, np.uint8(4), out=codes[1::2])
    return codes[:count]
