"""How far an optimizer's steps are off where its moments are not exactly what they were."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["UpdateError", "update_errors"]

_FEW = 1 << 16
_MODERATE = 1e20


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateError:
    """How far the steps ``u = m / (sqrt(v) + eps)`` are off; sums, so that those of parts add up (`merged`).

    Attributes:
        count: Numbers.
        squares: Sum of the squares of the exact steps.
        error_squares: Sum of the squares of the differences.
        product: Sum of the products of exact and decoded steps.
        decoded_squares: Sum of the squares of the decoded steps.
        largest_error: The largest difference.
        amplification: The largest ``|decoded| / |exact|`` of the steps that are at least a thousandth of the largest one in the part
            that was measured at once; 0 where there is none.
    """

    count: int = 0
    squares: float = 0.0
    error_squares: float = 0.0
    product: float = 0.0
    decoded_squares: float = 0.0
    largest_error: float = 0.0
    amplification: float = 0.0

    @property
    def mean(self) -> float:
        """Length of the difference over length of the exact steps: ``|decoded - exact| / |exact|``, as vectors."""
        if not self.squares:
            return math.inf if self.error_squares else 0.0
        return math.sqrt(self.error_squares / self.squares)

    @property
    def max(self) -> float:
        """The largest difference of one step, in root mean squares of the exact steps."""
        if not self.squares:
            return math.inf if self.largest_error else 0.0
        return self.largest_error / math.sqrt(self.squares / self.count)

    @property
    def cosine(self) -> float:
        """Of the angle between exact and decoded steps."""
        length = math.sqrt(self.squares * self.decoded_squares)
        return self.product / length if length else float(self.squares == self.decoded_squares)

    def merged(self, other: UpdateError) -> UpdateError:
        """Of both parts together."""
        return UpdateError(
            count=self.count + other.count,
            squares=self.squares + other.squares,
            error_squares=self.error_squares + other.error_squares,
            product=self.product + other.product,
            decoded_squares=self.decoded_squares + other.decoded_squares,
            largest_error=max(self.largest_error, other.largest_error),
            amplification=max(self.amplification, other.amplification),
        )


def update_errors(
    m: npt.NDArray[Any], v: npt.NDArray[Any], m_hat: npt.NDArray[Any], v_hat: npt.NDArray[Any], eps: float = 1e-8
) -> UpdateError:
    """Measures steps: of the exact moments `m`, `v` against the decoded `m_hat`, `v_hat`.

    Where v is zero there is no exact step (an optimizer that never saw a gradient makes none), so that it counts as zero.

    Args:
        m, v, m_hat, v_hat: Of one size, finite, in any shape.
        eps: The optimizer's.
    """
    flat = [np.asarray(one).reshape(-1) for one in (m, v, m_hat, v_hat)]
    parts = [_part(*(one[at : at + _FEW] for one in flat), eps=eps) for at in range(0, flat[0].size, _FEW)]
    return reduce(UpdateError.merged, parts, UpdateError())


def _part(m: npt.NDArray[Any], v: npt.NDArray[Any], m_hat: npt.NDArray[Any], v_hat: npt.NDArray[Any], *, eps: float) -> UpdateError:
    # Steps in float32 are exact enough to tell how far they are off, and four times as fast; beyond this they would overflow.
    moderate = all(one.dtype == np.float32 and np.abs(one).max() < _MODERATE for one in (m, m_hat))
    kind = np.dtype(np.float32 if moderate else np.float64)
    exact = np.divide(m, np.sqrt(v, dtype=kind) + kind.type(eps), dtype=kind)
    exact *= v > 0
    decoded = np.divide(m_hat, np.sqrt(v_hat, dtype=kind) + kind.type(eps), dtype=kind)
    error = np.abs(decoded - exact)
    size = np.abs(exact)
    large = size > 1e-3 * size.max()
    ratios = np.divide(np.abs(decoded), size, out=np.zeros_like(size), where=large)
    return UpdateError(
        count=exact.size,
        squares=_product(exact, exact),
        error_squares=_product(error, error),
        product=_product(exact, decoded),
        decoded_squares=_product(decoded, decoded),
        largest_error=float(error.max()),
        amplification=float(ratios.max()),
    )


def _product(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """Of two vectors, in float64. (`@` gives it to BLAS, whose threads wait for each other for a hundred times as long as it takes.)"""
    return float(np.einsum("i,i->", one, other, dtype=np.float64))
