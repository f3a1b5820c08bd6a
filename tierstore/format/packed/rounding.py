"""Rounding float32 numbers to 16 bits, to the nearest, ties to even: what runs of the kinds `bfloat16` and `float16` are made by.

Rounding to bfloat16 is integer arithmetic on the bits, NaN not told from other numbers, so that it gives the same bytes on every machine.
Rounding to float16 is the processor's or numpy's own, which agree on all numbers but the payloads of NaN: a run never has one.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["is_rounding", "round_into"]

_FEW = 1 << 15
"""Numbers that are worked on at a time: they, and what is made of them, stay in a core's cache."""

_Words = npt.NDArray[np.uint16]


def round_into(source: memoryview, target: memoryview, kind: Literal["bfloat16", "float16"]) -> None:
    """Rounds the float32 numbers in `source` (contiguous bytes, at any address) into `target`, which has half as many bytes.

    Raises:
        ValueError: The lengths don't fit.
    """
    values, out = _numbers(source, target)
    for begin in range(0, values.size, _FEW):
        piece = slice(begin, begin + _FEW)
        out[piece] = _rounded(values[piece], kind)


def is_rounding(source: memoryview, target: memoryview, kind: Literal["bfloat16", "float16"]) -> bool:
    """Whether `target` is, bit for bit and on every machine, what `round_into` makes of `source`."""
    values, words = _numbers(source, target)
    for begin in range(0, values.size, _FEW):
        piece = slice(begin, begin + _FEW)
        there = words[piece]
        if not np.array_equal(_rounded(values[piece], kind), there):
            return False
        if kind == "float16" and bool(((there & np.uint16(0x7FFF)) > np.uint16(0x7C00)).any()):
            return False
    return True


def _numbers(source: memoryview, target: memoryview) -> tuple[npt.NDArray[np.uint32], _Words]:
    if source.nbytes != 2 * target.nbytes or target.nbytes % 2:
        raise ValueError(f"{source.nbytes} bytes of float32 numbers don't round to {target.nbytes} bytes")
    return np.frombuffer(source, dtype="<u4"), np.frombuffer(target, dtype="<u2")


def _rounded(bits: npt.NDArray[np.uint32], kind: Literal["bfloat16", "float16"]) -> _Words:
    if kind == "float16":
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            return np.asarray(bits.view(np.float32).astype(np.float16).view(np.uint16))
    last = bits >> np.uint32(16)
    last &= np.uint32(1)
    last += np.uint32(0x7FFF)
    last += bits  # modulo 2**32
    last >>= np.uint32(16)
    halves: _Words = last.astype(np.uint16)
    return halves
