"""Logarithms of float32 numbers in fixed point, and back: with integers and two small tables, so that every machine makes the same bits.

A *place* is a biased logarithm in 4096ths of an octave: the number ``2 ** (place / 4096 - 127)``. `numbers_at` makes that number, rounded
up to 14 bits of mantissa; `places_of` finds the lowest place whose number is not smaller than what it is given. So, for normal numbers,

* ``numbers_at(places_of(x)) >= x``, and less than ``x * PLACE_RATIO`` (`PLACE_RATIO` is 2**(1/4096) · (1 + 2**-14), 1.00023);
* ``places_of(numbers_at(place)) == place``, for in the table no two places have the same number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LOWEST_PLACE", "OCTAVE", "PLACE_RATIO", "numbers_at", "places_of"]

Bits = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int32]

OCTAVE = 1 << 12
"""Places in an octave."""

LOWEST_PLACE = OCTAVE
"""Of the smallest normal number, 2**-126."""

PLACE_RATIO = 2 ** (1 / OCTAVE) * (1 + 2**-14)
"""More than a number may be raised by being put at a place."""

_MANTISSA = np.ceil((np.exp2(np.arange(OCTAVE) / OCTAVE) - 1) * (1 << 14)).astype(np.uint32)
_PLACE = np.searchsorted(_MANTISSA, np.arange(1 << 14, dtype=np.uint32)).astype(np.int32)
_NUMBER = _MANTISSA << 9
for _table in (_MANTISSA, _PLACE, _NUMBER):
    _table.setflags(write=False)


def places_of(bits: Bits) -> Places:
    """The places of positive normal numbers, given as their bits; of others it says nothing that means something."""
    cut = (bits + np.uint32(511)) >> np.uint32(9)
    places: Any = np.take(_PLACE, cut & np.uint32(0x3FFF))
    cut >>= np.uint32(2)
    cut &= np.uint32(0xFFFFF000)
    places += cut.view(np.int32)
    return places  # type: ignore[no-any-return]


def numbers_at(places: Places) -> Bits:
    """The bits of the numbers at these places, which lie in ``[LOWEST_PLACE, 255 * OCTAVE)``."""
    bits: Any = np.take(_NUMBER, places & np.int32(OCTAVE - 1))
    bits |= (places.view(np.uint32) >> np.uint32(12)) << np.uint32(23)
    return bits  # type: ignore[no-any-return]
