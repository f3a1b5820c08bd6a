"""Runs of rounding make what `Tensor.to` makes, bit for bit."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch

from tierstore.format.packed.rounding import is_rounding, round_into

LOW_HALVES = (0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def words_of(bits: np.ndarray[Any, Any], dtype: torch.dtype) -> np.ndarray[Any, Any]:
    words: np.ndarray[Any, Any] = torch.from_numpy(bits.view(np.float32)).to(dtype).view(torch.int16).numpy().view(np.uint16)
    return words


@pytest.mark.parametrize(("kind", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_every_upper_half_with_many_lower_ones_is_rounded_as_torch_does(kind: Literal["bfloat16", "float16"], dtype: torch.dtype) -> None:
    for low in LOW_HALVES:
        bits = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) | np.uint32(low)
        numbers = bits[~np.isnan(bits.view(np.float32))]
        made = bytearray(2 * numbers.size)
        round_into(numbers.data.cast("B"), memoryview(made), kind)
        expected = words_of(numbers, dtype)
        assert bytes(made) == expected.tobytes(), hex(low)
        assert is_rounding(numbers.data.cast("B"), memoryview(expected.tobytes()), kind)
        for at in (0, numbers.size // 2, numbers.size - 1):
            other = expected.copy()
            other[at] ^= 1
            assert not is_rounding(numbers.data.cast("B"), memoryview(other.tobytes()), kind)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_not_a_number_is_no_rounding_that_machines_might_disagree_about(kind: Literal["bfloat16", "float16"]) -> None:
    numbers = np.array([1.0, np.nan], dtype=np.float32)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float16
    if kind == "float16":
        assert not is_rounding(numbers.data.cast("B"), memoryview(words_of(numbers.view(np.uint32), dtype).tobytes()), kind)
    made = bytearray(4)
    round_into(numbers.data.cast("B"), memoryview(made), kind)  # bfloat16: integers, the same everywhere
    assert is_rounding(numbers.data.cast("B"), memoryview(made), kind) == (kind == "bfloat16")


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="don't round"):
        round_into(memoryview(bytes(8)), memoryview(bytearray(2)), "bfloat16")
