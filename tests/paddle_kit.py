"""PaddleNLP's encoders of stages O1 and O2, for tests and benchmarks only: tierstore never writes these formats.

After the formulas of ``paddlenlp/quantization/checkpoint_quantization_utils.py``; the casts of NaN that are undefined there are zeros here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any


def ratio_of(v: Array) -> Array:
    return (np.float32(1) / (np.sqrt(v) + np.float32(1e-8))).astype(np.float32)


def encode_o1_first(m: Array) -> tuple[Array, Array]:
    """Codes and scales: of columns, or of the whole where there is one axis."""
    scales = np.abs(m).max(axis=_others(m))
    scales = np.where(scales == 0, np.float32(1e-8), scales).astype(np.float32)
    return np.clip(np.round(m / scales * 127), -128, 127).astype(np.int8), scales


def encode_o1_second(v: Array) -> tuple[Array, Array, Array]:
    """Codes, smallest and largest ratio."""
    ratio = ratio_of(v)
    low, high = (np.where(edge == 0, np.float32(1e-8), edge) for edge in (ratio.min(axis=_others(v)), ratio.max(axis=_others(v))))
    with np.errstate(invalid="ignore", divide="ignore"):
        codes = np.nan_to_num(np.clip(np.round((ratio - low) / (high - low) * 255), 0, 255)).astype(np.uint8)
    return codes, low.astype(np.float32), high.astype(np.float32)


def encode_o2(m: Array, v: Array) -> tuple[Array, Array, Array, Array]:
    """Packed codes ``[R, C]``, scales, smallest and largest ratio ``[R / 32, C]``."""
    groups, ratio = m.reshape(-1, 32, m.shape[1]), ratio_of(v).reshape(-1, 32, m.shape[1])
    scales, low, high = np.abs(groups).max(axis=1), ratio.min(axis=1), ratio.max(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        first = np.nan_to_num(np.clip(np.round(groups / scales[:, None] * 7), -8, 7)).astype(np.int8)
        second = np.nan_to_num(np.clip(np.round((ratio - low[:, None]) / (high - low)[:, None] * 15), 0, 15)).astype(np.int8)
    return ((first << 4) | (second & 15)).astype(np.int8).reshape(m.shape), scales, low, high


def _others(tensor: Array) -> Any:
    return tuple(axis for axis in range(tensor.ndim) if axis != 1)
