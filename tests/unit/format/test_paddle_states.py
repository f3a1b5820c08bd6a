"""PaddleNLP's quantised states: the golden vectors of its formulas, what is undefined there, and what is no state."""

from __future__ import annotations

import numpy as np
import pytest
from paddle_kit import encode_o1_first, encode_o1_second, encode_o2

from tierstore.errors import FormatError
from tierstore.format.paddle_states import decode_o1_first, decode_o1_second, decode_o2_first, decode_o2_second


def test_o1_first_moments_are_the_golden_ones() -> None:
    scales = np.array([0.1, 0.4], dtype=np.float32)
    decoded = decode_o1_first(np.array([[127, -64], [64, 127]], dtype=np.int8), scales)
    assert np.allclose(decoded, [[0.1, -0.2015748], [0.0503937, 0.4]], rtol=1e-6)
    codes, found = encode_o1_first(np.array([[0.1, -0.2], [0.05, 0.4]], dtype=np.float32))
    assert codes.tolist() == [[127, -64], [64, 127]]
    assert np.array_equal(found, scales)


def test_o1_second_moments_are_the_golden_ones() -> None:
    low, high = np.array([99.9999, 49.999977], dtype=np.float32), np.array([999.98993, 9999.001], dtype=np.float32)
    decoded = decode_o1_second(np.array([[0, 0], [255, 255]], dtype=np.uint8), low, high)
    assert np.allclose(decoded, [[1e-4, 4e-4], [1e-6, 1e-8]], rtol=1e-4)
    codes, *scales = encode_o1_second(np.array([[1e-4, 4e-4], [1e-6, 1e-8]], dtype=np.float32))
    assert codes.tolist() == [[0, 0], [255, 255]]
    assert np.allclose(scales, [low, high], rtol=1e-6)


GOLDEN = [159, 231, 52, 147, 226, 50, 145, 225, 49, 145, 224, 48, 144, 224, 48, 144]
GOLDEN += [239, 55, 148, 227, 50, 146, 225, 49, 145, 225, 48, 144, 224, 48, 144, 224]


def test_o2_is_the_golden_one() -> None:
    at = np.arange(32)
    m = (((5 * at % 15) - 7) / 70).astype(np.float32).reshape(32, 1)
    v = ((1 + at % 16) ** 2 * 1e-6).astype(np.float32).reshape(32, 1)
    packed, scales, low, high = encode_o2(m, v)
    assert packed.astype(np.uint8).reshape(-1).tolist() == GOLDEN
    assert (scales[0, 0], low[0, 0], high[0, 0]) == pytest.approx((0.1, 62.49996, 999.9899), rel=1e-6)
    golden = np.array(GOLDEN, dtype=np.uint8).view(np.int8).reshape(32, 1)
    first = decode_o2_first(golden, scales).reshape(-1)
    assert np.allclose(first, np.array([-7, -2, 3] * 11)[:32] / 7 * 0.1, rtol=1e-6)
    second = decode_o2_second(golden, low, high).reshape(-1)
    codes = np.array([15, 7, 4, 3, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0] * 2)
    assert np.allclose(second, (1 / (codes / 15 * (high[0, 0] - low[0, 0]) + low[0, 0]) - 1e-8) ** 2, rtol=1e-5)


def test_a_zero_in_a_column_takes_the_resolution_of_all_the_others_in_o1() -> None:
    codes, low, high = encode_o1_second(np.array([[1e-4], [1e-6], [1e-8], [0]], dtype=np.float32))
    assert np.allclose(np.sqrt(decode_o1_second(codes, low, high)).reshape(-1), [0.01, 0.01, 0.01, 0], atol=1e-9)


@pytest.mark.parametrize("code", [0, 77, -8])
def test_equal_numbers_come_back_whatever_the_undefined_code_is(code: int) -> None:
    edge = np.full(3, 500, dtype=np.float32)
    codes = np.full((4, 3), code)
    wanted = np.float32((1 / 500 - 1e-8) ** 2)
    assert np.allclose(decode_o1_second(codes.astype(np.uint8), edge, edge), wanted, rtol=1e-5)
    packed = np.full((32, 3), code, dtype=np.int8)
    assert np.allclose(decode_o2_second(packed, edge[None], edge[None]), wanted, rtol=1e-5)
    assert not decode_o2_first(packed, np.zeros((1, 3), dtype=np.float32)).any()  # a group of zeros


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_make_no_numbers_are_an_error(bad: float) -> None:
    scales, good = np.full(2, bad, dtype=np.float32), np.ones(2, dtype=np.float32)
    codes = np.ones((32, 2), dtype=np.int8)
    with pytest.raises(FormatError, match="first moment"):
        decode_o1_first(codes, scales)
    with pytest.raises(FormatError, match="first moment"):
        decode_o2_first(codes, scales[None])
    with pytest.raises(FormatError, match="second moment"):
        decode_o1_second(codes.view(np.uint8), good, scales)
    with pytest.raises(FormatError, match="second moment"):
        decode_o2_second(codes, good[None], scales[None])
    with pytest.raises(FormatError, match="second moment"):
        decode_o1_second(np.zeros((1, 2), dtype=np.uint8), good * 0, good)  # 1 / 0
