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

__all__ = ["Array", "items_of", "join_planes", "plane_of", "rotate_top"]

Array = npt.NDArray[Any]

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


def join_planes(planes: Sequence[Array], target: memoryview, itemsize: int, *, rotated: bool) -> None:
    """Fills `target` with the numbers that `planes` (lowest first, as `items_of` types them) are of.

    If `rotated`, the last two are one byte wide.
    """
    if len(planes) == 1:
        target[:] = planes[0].view(np.uint8).data
        return
    if rotated:
        low, high = planes[-2].astype(np.uint16), planes[-1].astype(np.uint16)
        top = low >> np.uint16(1)
        low <<= np.uint16(15)
        top |= low
        high <<= np.uint16(7)
        top |= high
        planes = [*planes[:-2], top]
    at = 0
    for plane in planes:
        place = items_of(target, plane.itemsize)
        place[at // plane.itemsize :: itemsize // plane.itemsize] = plane
        at += plane.itemsize
