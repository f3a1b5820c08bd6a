"""Byte planes: the bytes of the same place in all numbers of a piece, put together, the sign bit moved out of the exponent's byte.

The numbers are taken as little-endian integers, and their planes are given from the lowest byte to the highest. A plane is 1, 2, 4 or 8
bytes wide. Where numbers are *rotated*, the topmost 16 bits of each are rotated to the left by one: the top byte then holds the exponent
(of bfloat16 and float32 all of it), the one below the top of the mantissa and the sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.format.digest import Buffer

__all__ = ["SCRATCH_NBYTES", "Array", "items_of", "join_planes", "plane_of", "rotate_top"]

Array = npt.NDArray[Any]

SCRATCH_NBYTES = 128 << 10
"""What joining planes needs, in bytes: with as much of the numbers, and of the planes, it stays in a core's own cache."""

_TYPES: Mapping[int, np.dtype[Any]] = MappingProxyType({1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")})


def items_of(data: Buffer, width: int) -> Array:
    """The same memory as little-endian unsigned integers of `width` bytes (1, 2, 4 or 8); its length is a multiple of that."""
    found: Array = np.frombuffer(data, _TYPES[width])
    return found


def plane_of(items: Array, place: int, width: int) -> Array:
    """The `width` bytes of each number from byte `place` on (a multiple of `width`), as an array of its own."""
    if width == items.itemsize:
        return items
    if place == 0:
        return items.astype(_TYPES[width])
    plane = np.empty(len(items), _TYPES[width])
    # Shifting and narrowing a buffer at a time is faster than copying with strides.
    np.right_shift(items, items.dtype.type(8 * place), out=plane, casting="unsafe")
    return plane


def rotate_top(items: Array) -> tuple[Array, Array]:
    """The two topmost planes of rotated numbers of 2, 4 or 8 bytes: the lower one and the top one, a byte each."""
    top = plane_of(items, items.itemsize - 2, 2)
    high = np.empty(len(items), np.uint8)
    np.right_shift(top, np.uint16(7), out=high, casting="unsafe")
    rotated = top << np.uint16(1)
    rotated |= top >> np.uint16(15)
    return rotated.astype(np.uint8), high


def join_planes(planes: Sequence[Array], target: memoryview, itemsize: int, *, rotated: bool, scratch: Array | None = None) -> None:
    """Fills `target` with the numbers that `planes` (lowest first, as `items_of` types them) are of.

    Some at a time, so that they, and what is made of them, stay in a core's cache.

    Args:
        planes: If `rotated`, the last two are one byte wide.
        target: Writable bytes.
        itemsize: Of the numbers, in bytes.
        rotated: As of `rotate_top`.
        scratch: `SCRATCH_NBYTES` of memory, as bytes, that nobody else uses meanwhile; None: it is made.
    """
    if len(planes) == 1:
        target[:] = planes[0].view(np.uint8).data
        return
    numbers = items_of(target, itemsize)
    room = (np.empty(SCRATCH_NBYTES, np.uint8) if scratch is None else scratch).view(numbers.dtype.newbyteorder("="))
    for begin in range(0, numbers.size, room.size):
        some = slice(begin, begin + room.size)
        made = numbers[some]
        _join([plane[some] for plane in planes], made, room[: made.size], rotated=rotated)


def _join(planes: Sequence[Array], made: Array, more: Array, *, rotated: bool) -> None:
    number = made.dtype.type
    lower = planes[:-2] if rotated else planes
    place = 0
    for plane in lower:
        if place:
            more[:] = plane
            np.left_shift(more, number(8 * place), out=more)
            np.bitwise_or(made, more, out=made)
        else:
            made[:] = plane
        place += plane.itemsize
    if not rotated:
        return
    low, high = planes[-2:]
    more[:] = low
    if place:
        # The sign to the top, and the rest to the right by one, in one multiplication.
        np.multiply(more, number((1 << (8 * place + 15)) + (1 << (8 * place - 1))), out=more)
        np.bitwise_and(more, number(0xFFFF << (8 * place)), out=more)
        np.bitwise_or(made, more, out=made)
    else:
        np.right_shift(more, number(1), out=made)
        np.left_shift(more, number(15), out=more)
        np.bitwise_or(made, more, out=made)
    more[:] = high
    np.left_shift(more, number(8 * place + 7), out=more)
    np.bitwise_or(made, more, out=made)
