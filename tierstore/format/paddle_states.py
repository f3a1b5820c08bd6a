"""Decodes the quantised optimizer states of PaddleNLP's Unified Checkpoint, stages ``O1`` (8 bits) and ``O2`` (4 bits). None is written.

Both keep the first moment m with symmetric linear codes, and instead of the second one the ratio ``r = 1 / (sqrt(v) + 1e-8)`` with linear
codes between its smallest and its largest value: ``O1`` for each column (1-D tensors: for the whole tensor), ``O2`` for 32 rows of a
column. Formulas: ``paddlenlp/quantization/checkpoint_quantization_utils.py``, ``unified_checkpoint_quantization.py``, all in float32.

What is undefined there is harmless here: where all numbers of a column or group are equal (or a group of m is zero), their encoder casts
NaN to an integer; the code is then multiplied by a distance of zero, whatever it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import FormatError

__all__ = ["O2_ROWS", "decode_o1_first", "decode_o1_second", "decode_o2_first", "decode_o2_second"]

Floats = npt.NDArray[np.float32]

O2_ROWS = 32
"""Rows that have one scale in a column."""

_EPS = np.float32(1e-8)


def decode_o1_first(codes: npt.NDArray[np.int8], scales: Floats) -> Floats:
    """First moments of `codes` ``[R, C]``; `scales` ``[C]``.

    Raises:
        FormatError: The result is not finite: a scale is not.
    """
    with np.errstate(all="ignore"):
        return _finite(codes.astype(np.float32) / np.float32(127) * scales, "first")


def decode_o1_second(codes: npt.NDArray[np.uint8], low: Floats, high: Floats) -> Floats:
    """Second moments of `codes` ``[R, C]``; `low` and `high` ``[C]`` are of the ratio.

    Raises:
        FormatError: The result is not finite: a scale is not, or a ratio is zero.
    """
    return _second(codes.astype(np.float32) / np.float32(255), low, high)


def decode_o2_first(packed: npt.NDArray[np.int8], scales: Floats) -> Floats:
    """First moments of `packed` ``[R, C]``, R a multiple of `O2_ROWS`; `scales` ``[R / O2_ROWS, C]``.

    Raises:
        FormatError: The result is not finite: a scale is not.
    """
    with np.errstate(all="ignore"):
        return _finite((packed >> np.int8(4)).astype(np.float32) * _spread(scales) / np.float32(7), "first")


def decode_o2_second(packed: npt.NDArray[np.int8], low: Floats, high: Floats) -> Floats:
    """Second moments of `packed`, as `decode_o2_first`; `low` and `high` ``[R / O2_ROWS, C]`` are of the ratio.

    Raises:
        FormatError: The result is not finite: a scale is not, or a ratio is zero.
    """
    codes = (packed & np.int8(15)).astype(np.float32)
    return _second(codes / np.float32(15), _spread(low), _spread(high))


def _spread(scales: Floats) -> Floats:
    return np.repeat(scales, O2_ROWS, axis=0)


def _second(part: Floats, low: Floats, high: Floats) -> Floats:
    _finite(low, "second")
    _finite(high, "second")
    with np.errstate(all="ignore"):
        return _finite(np.square(np.float32(1) / (part * (high - low) + low) - _EPS), "second")


def _finite(moment: Any, which: str) -> Floats:
    if not np.isfinite(moment).all():
        raise FormatError(
            f"a quantised {which} moment of PaddleNLP has scales that make no finite numbers",
            hint="its training had diverged when it was saved, or the file is damaged: take an earlier checkpoint",
        )
    return moment  # type: ignore[no-any-return]
