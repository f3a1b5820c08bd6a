"""Frames: every block comes back bit for bit, what can be small is small, and damaged frames are refused."""

from __future__ import annotations

import struct
import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from format_mutations import damaged
from frames_kit import BLOCK, noise, normal, one_piece, packed
from hypothesis import example, given
from hypothesis import strategies as st

from tierstore.errors import FormatError
from tierstore.format.packed.frame import FrameEncoder, decode_frame, is_lossy
from tierstore.format.packed.types import Piece, Quantised


def _bytes_of(kind: str, size: int, itemsize: int, seed: int) -> bytes:
    if kind == "noise":
        return noise(size, seed=seed)
    if kind == "normal":
        return normal(size + 8, max(2, itemsize), seed=seed)[:size]
    if kind == "ramp":
        return np.arange(size // 8 + 1).astype("<i8").tobytes()[:size]
    return bytes(size)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[bytes, list[Piece], list[tuple[int, int]]]:
    """A block of any bytes, cut into pieces of any kind; the holes are what no piece covers."""
    data = bytearray()
    pieces, holes = [], []
    for _ in range(draw(st.integers(0, 6))):
        itemsize = draw(st.sampled_from((1, 2, 4, 8)))
        size = draw(st.integers(1, 300) | st.sampled_from((1 << 12, 20_000, 140_000)))
        kind = draw(st.sampled_from(("noise", "normal", "zeros", "ramp", "hole")))
        begin = len(data)
        data += _bytes_of(kind, size, itemsize, seed=begin)
        if kind == "hole":
            holes.append((begin, len(data)))
        else:
            pieces.append(Piece(begin=begin, end=len(data), itemsize=itemsize, rotated=draw(st.booleans())))
    return bytes(data), pieces, holes


@given(blocks(), st.sampled_from((("zstd", 0), ("zstd", 1), ("zstd", 9), ("raw", 0))))
def test_every_block_comes_back_bit_for_bit_and_holes_stay_as_they_were(
    block: tuple[bytes, list[Piece], list[tuple[int, int]]], codec: tuple[str, int]
) -> None:
    data, pieces, holes = block
    frame = FrameEncoder(*codec).encode(data, pieces)  # type: ignore[arg-type]
    target = bytearray(b"\xa5" * len(data))
    assert decode_frame(frame, memoryview(target), holes) is False
    expected = bytearray(data)
    for begin, end in holes:
        expected[begin:end] = b"\xa5" * (end - begin)
    assert target == expected
    assert frame == FrameEncoder(*codec).encode(data, pieces)  # type: ignore[arg-type]  # the same bytes each time
    assert len(frame) <= len(data) + 24 * len(pieces) + 24
    assert not is_lossy(frame)


def test_every_bit_pattern_of_16_bits_comes_back_as_bfloat16_and_within_wider_numbers() -> None:
    words = np.arange(1 << 16, dtype="<u2")
    packed(words.tobytes(), 2, rotated=True)
    packed((words.astype("<u4") << 16 | 1).astype("<u4").tobytes(), 4, rotated=True)
    packed((words.astype("<u8") << np.uint64(48) | np.uint64(3)).tobytes(), 8, rotated=True)
    for itemsize in (2, 4, 8):
        packed(words.tobytes() * 4, itemsize, rotated=False)


@pytest.mark.parametrize(
    ("itemsize", "most"),
    [(2, 0.67), (4, 0.84), (8, 0.895)],  # the entropy of a normal distribution's exponents is 2.6 bits
)
def test_floating_point_is_as_small_as_its_exponents_allow(itemsize: int, most: float) -> None:
    assert len(packed(normal(BLOCK, itemsize), itemsize, rotated=True)) < most * BLOCK


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_what_has_no_content_takes_next_to_nothing(itemsize: int) -> None:
    assert len(packed(bytes(BLOCK), itemsize, rotated=itemsize > 1)) < 500
    ramp = np.arange(BLOCK // itemsize).astype(f"<u{itemsize}").tobytes()
    assert len(packed(ramp, itemsize, rotated=False)) < 0.02 * BLOCK


def test_the_sign_is_not_in_the_exponents_plane() -> None:
    signed = normal(BLOCK, 4)
    # As they lie, the sign takes the place of the exponent's lowest bit, which is no noise.
    assert len(packed(signed, 4, rotated=True)) < len(packed(signed, 4, rotated=False)) * 0.997


def test_noise_is_stored_as_it_is() -> None:
    for itemsize in (1, 2, 4, 8):
        assert len(packed(noise(BLOCK), itemsize, rotated=itemsize > 1)) == BLOCK + 16


def test_text_is_compressed_as_text() -> None:
    text = b"".join(
        b'"layers.%d.weight":{"dtype":"BF16","shape":[4096,%d],"data_offsets":[%d]},' % (i, i * 7 % 512, i << 13) for i in range(900)
    )
    assert len(packed(text, 1, rotated=False)) < 0.25 * len(text)


def test_numbers_that_were_bfloat16_before_cost_no_more_as_float32() -> None:
    short = normal(BLOCK // 2, 2)
    long = (np.frombuffer(short, "<u2").astype("<u4") << 16).tobytes()
    assert len(packed(long, 4, rotated=True)) < 1.01 * len(packed(short, 2, rotated=True))


def test_one_encoder_serves_many_threads() -> None:
    encoder = FrameEncoder()
    data = [normal(1 << 17, 4, seed=n) for n in range(4)]
    alone = [encoder.encode(block, one_piece(1 << 17, 4, rotated=True)) for block in data]
    found: dict[int, list[bytes]] = {}

    def work(number: int) -> None:
        found[number] = [encoder.encode(block, one_piece(1 << 17, 4, rotated=True)) for block in data * 3]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(frames == alone * 3 for frames in found.values())
    assert len(found) == 4


def test_there_are_no_other_codecs_and_levels() -> None:
    for codec, level in (("lz4", 0), ("zstd", 20), ("zstd", -1)):
        with pytest.raises(ValueError, match="no codec"):
            FrameEncoder(codec, level)  # type: ignore[arg-type]


MOMENT = Quantised(scheme="q8", kind="first", columns=4096, first_column=128)


def test_a_quantised_piece_is_marked_as_lossy_and_comes_back_nearly() -> None:
    data = normal(BLOCK, 4)
    half = BLOCK // 2
    pieces = [
        Piece(begin=0, end=half, itemsize=4, rotated=True),
        Piece(begin=half, end=BLOCK, itemsize=4, rotated=True, quantised=MOMENT),
    ]
    zeros = np.zeros(half // 4, bool)
    zeros[:100] = True
    frame = FrameEncoder().encode(data, pieces, {1: zeros})
    target = bytearray(BLOCK)
    assert decode_frame(frame, memoryview(target)) is True
    assert is_lossy(frame)
    assert target[:half] == data[:half]
    was, now = np.frombuffer(data, "<f4")[half // 4 :], np.frombuffer(target, "<f4")[half // 4 :]
    assert not now[:100].any()
    assert np.linalg.norm(was[100:] - now[100:]) < 0.05 * np.linalg.norm(was)
    assert len(frame) < 0.84 * half + 0.27 * half
    assert frame == FrameEncoder().encode(data, pieces, {1: zeros})


def test_a_moment_that_cannot_be_quantised_is_stored_exactly() -> None:
    values = np.frombuffer(normal(1 << 16, 4), "<f4").copy()
    values[77] = np.nan
    frame = FrameEncoder().encode(values.tobytes(), [Piece(begin=0, end=1 << 16, itemsize=4, rotated=True, quantised=MOMENT)])
    target = bytearray(1 << 16)
    assert decode_frame(frame, memoryview(target)) is False
    assert not is_lossy(frame)
    assert target == values.tobytes()


def seed_frame() -> bytes:
    data = normal(4096, 4) + bytes(512) + noise(300) + normal(4096, 4)
    pieces = [
        Piece(begin=0, end=4096, itemsize=4, rotated=True),
        Piece(begin=4096, end=4608, itemsize=8, rotated=False),
        Piece(begin=4608, end=4908, itemsize=1, rotated=False),
        Piece(begin=4908, end=4908 + 4096, itemsize=4, rotated=True, quantised=MOMENT),
    ]
    return FrameEncoder().encode(data, pieces)


SEED = seed_frame()
SEED_NBYTES = 4908 + 4096


@given(damaged(SEED) | damaged(SEED, head=80) | st.binary(max_size=200))
@example(b"")
def test_a_damaged_frame_is_refused_or_gives_other_bytes_but_nothing_else(frame: bytes) -> None:
    guard = bytearray(b"\x5a" * (SEED_NBYTES + 64))
    try:
        decode_frame(frame, memoryview(guard)[32:-32])
    except FormatError:
        pass
    assert guard[:32] == guard[-32:] == b"\x5a" * 32
    try:
        is_lossy(frame)
    except FormatError:
        pass


def test_a_frame_that_is_cut_anywhere_or_too_long_is_refused() -> None:
    for end in range(0, len(SEED), 7):
        with pytest.raises(FormatError):
            decode_frame(SEED[:end], memoryview(bytearray(SEED_NBYTES)))
    for frame, nbytes in ((SEED + b"\0", SEED_NBYTES), (SEED, SEED_NBYTES - 1), (SEED, SEED_NBYTES + 1)):
        with pytest.raises(FormatError):
            decode_frame(frame, memoryview(bytearray(nbytes)))


def hostile(plane: bytes, nbytes: int) -> bytes:
    return struct.pack("<BBHI", 0, 1, 1, nbytes) + struct.pack("<BBHI", 1, 1, 0, len(plane)) + plane


def test_a_plane_that_would_be_larger_than_it_may_be_is_refused_without_being_made() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    small = zstandard.ZstdCompressor().compress(bytes(1000))
    skippable = struct.pack("<II", 0x184D2A50, 1000) + bytes(1000)
    # A frame with a window of 2 GiB, of 1,000 bytes by its own account.
    wide = struct.pack("<IBBH", 0xFD2FB528, 0x40, 0xA8, 1000 - 256) + b"\x01\x00\x00"
    tracemalloc.start()
    for plane in (bomb, unsized, small + small, small[:-1], small + b"x", skippable, wide, b"", b"\x28\xb5\x2f\xfd"):
        with pytest.raises(FormatError):
            decode_frame(hostile(plane, 1000), memoryview(bytearray(1000)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    with pytest.raises(FormatError):
        decode_frame(hostile(small, 1001), memoryview(bytearray(1001)))
    assert decode_frame(hostile(small, 1000), memoryview(bytearray(1000))) is False


@pytest.mark.parametrize(
    "widths",
    [(1, 2, 1), (4,), (2, 2), (1, 1, 1), (3, 1), (0, 4), (1, 1, 1, 1, 0)],
)
def test_planes_that_are_none_are_refused(widths: tuple[int, ...]) -> None:
    heads = b"".join(struct.pack("<BBHI", 0, width, 0, width) for width in widths)
    frame = struct.pack("<BBHI", 1, 4, len(widths), 4) + heads + bytes(sum(widths))
    with pytest.raises(FormatError):
        decode_frame(frame, memoryview(bytearray(4)))


def test_holes_out_of_order_are_a_mistake_of_the_caller() -> None:
    for holes in ([(5, 3)], [(4, 8), (6, 9)], [(0, 2000)]):
        with pytest.raises(ValueError, match="hole"):
            decode_frame(b"", memoryview(bytearray(1000)), holes)
