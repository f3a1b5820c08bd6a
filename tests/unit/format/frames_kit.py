"""What the tests of packed files share: pieces of all kinds, and blocks of bytes that look like training state, or like nothing."""

from __future__ import annotations

import numpy as np

from tierstore.format.packed.frame import FrameEncoder, decode_frame
from tierstore.format.packed.types import Piece

BLOCK = 1 << 20


def normal(nbytes: int, itemsize: int, seed: int = 0) -> bytes:
    """Numbers as weights have them, in floating point of 2 (bfloat16), 4 or 8 bytes."""
    values = np.random.default_rng(seed).standard_normal(nbytes // itemsize) * 0.02
    if itemsize == 2:
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype(f"<f{itemsize}").tobytes()


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def one_piece(nbytes: int, itemsize: int, *, rotated: bool) -> list[Piece]:
    return [Piece(begin=0, end=nbytes, itemsize=itemsize, rotated=rotated)]


def packed(data: bytes, itemsize: int, *, rotated: bool, level: int = 0) -> bytes:
    """The frame of a block of one piece, proved to give back the same bytes, wherever in memory they are put."""
    frame = FrameEncoder("zstd", level).encode(data, one_piece(len(data), itemsize, rotated=rotated))
    for shift in (0, 1):
        room = bytearray(len(data) + shift)
        assert decode_frame(frame, memoryview(room)[shift:]) is False
        assert room[shift:] == data
    return frame
