"""Stretches and pieces: they cover a file whatever its header says, and no block has very many of them."""

from __future__ import annotations

import json

import pytest
from frames_kit import BLOCK, normal
from hypothesis import given
from hypothesis import strategies as st

from tierstore.format.dtypes import DTYPES
from tierstore.format.header import HeaderTensor, ShardHeader, encode_header, parse_header
from tierstore.format.packed.frame import FrameEncoder, decode_frame
from tierstore.format.packed.layout import SMALL_NBYTES, gaps, holes_of, pieces_of, plain_stretches, stretches_of
from tierstore.format.packed.types import Run, Stretch
from tierstore.format.shard import ChunkSpec, plan_shard

ITEMSIZES = {"BF16": 2, "F32": 4, "F64": 8, "I64": 8, "U8": 1, "BOOL": 1, "C64": 8, "F8_E8M0": 1}


def foreign_header(tensors: list[tuple[str, int]], shift: int = 0) -> tuple[ShardHeader, int]:
    """A header as others write them: `tensors` are (dtype, numbers), the data begins at an odd byte if `shift` is odd."""
    rows = [(f"t{n}", dtype, (numbers,), numbers * ITEMSIZES[dtype]) for n, (dtype, numbers) in enumerate(tensors)]
    raw = encode_header(rows, {}, 8) + b""
    raw = (len(raw) - 8 + shift).to_bytes(8, "little") + raw[8:] + b" " * shift
    nbytes = len(raw) + sum(row[3] for row in rows)
    return parse_header(raw, nbytes), nbytes


def check_cover(stretches: tuple[Stretch, ...], nbytes: int) -> None:
    at = 0
    for stretch in stretches:
        assert stretch.begin == at < stretch.end
        at = stretch.end
    assert at == nbytes


def most_pieces(stretches: tuple[Stretch, ...], nbytes: int) -> int:
    return max(len(pieces_of(stretches, begin, min(begin + BLOCK, nbytes))) for begin in range(0, nbytes, BLOCK))


@given(
    st.lists(st.tuples(st.sampled_from(sorted(ITEMSIZES)), st.integers(0, 300) | st.integers(0, 30_000)), max_size=40),
    st.integers(0, 7),
)
def test_stretches_cover_every_file_and_pieces_every_block(tensors: list[tuple[str, int]], shift: int) -> None:
    header, nbytes = foreign_header(tensors, shift)
    stretches = stretches_of(header, nbytes)
    check_cover(stretches, nbytes)
    by_key = {stretch.name: stretch for stretch in stretches if stretch.name}
    for key, tensor in header.tensors.items():
        if tensor.end - tensor.begin >= SMALL_NBYTES and tensor.dtype != "F8_E8M0":
            assert (by_key[key].begin, by_key[key].end, by_key[key].shape) == (tensor.begin, tensor.end, tensor.shape)
    block = 40_000
    for begin in range(0, nbytes, block):
        end = min(nbytes, begin + block)
        holes = [(begin + 11, begin + 12), (begin + 700, begin + 30_001)]
        at = 0
        for piece, stretch in pieces_of(stretches, begin, end, holes):
            assert at <= piece.begin < piece.end <= end - begin
            assert all(begin + piece.end <= first or last <= begin + piece.begin for first, last in holes)
            assert stretch.begin <= begin + piece.begin < begin + piece.end <= stretch.end
            if piece.itemsize > 1:
                assert (piece.itemsize, piece.rotated) == (stretch.itemsize, stretch.rotated)
                assert (begin + piece.begin - stretch.begin) % piece.itemsize == (piece.end - piece.begin) % piece.itemsize == 0
            at = piece.end
        whole = pieces_of(stretches, begin, end)
        assert sum(piece.end - piece.begin for piece, _ in whole) == end - begin


def test_a_block_never_has_many_pieces_whatever_the_file() -> None:
    alternating = [("BF16" if n % 2 else "F32", 8) for n in range(8_000)]
    header, nbytes = foreign_header(alternating, 3)
    assert most_pieces(stretches_of(header, nbytes), nbytes) < 70
    nasty = [(kind, SMALL_NBYTES // 8 - 1) for kind in ("F32", "F64", "I64") for _ in range(60)]
    nasty = [nasty[n * 37 % len(nasty)] for n in range(len(nasty))] + [("U8", 1), ("F64", SMALL_NBYTES // 8)] * 100
    header, nbytes = foreign_header(nasty)
    assert most_pieces(stretches_of(header, nbytes), nbytes) < 200


def test_a_shard_of_ours_is_cut_by_its_dtypes() -> None:
    specs = [ChunkSpec(name=name, dtype=name, shape=(99, 4096), global_shape=(99, 4096), offsets=(0, 0)) for name in sorted(DTYPES)]
    specs += [ChunkSpec(name=f"small.{n}", dtype="float32", shape=(10,), global_shape=(10,), offsets=(0,)) for n in range(1000)]
    plan = plan_shard(specs)
    stretches = stretches_of(parse_header(plan.header, plan.nbytes), plan.nbytes)
    check_cover(stretches, plan.nbytes)
    found = {stretch.name: stretch for stretch in stretches if stretch.name}
    assert set(found) == set(DTYPES)
    for name, stretch in found.items():
        assert (stretch.dtype, stretch.shape) == (name, (99, 4096))
        assert stretch.rotated == name.startswith(("float16", "float32", "float64", "bfloat16", "complex"))
        assert stretch.itemsize == {"complex32": 2, "complex64": 4, "complex128": 8}.get(name, DTYPES[name].itemsize)
    assert [s.end - s.begin for s in stretches if not s.name and s.itemsize == 4] == [40_000]


def test_metadata_that_lies_about_dtypes_changes_nothing_but_the_ratio() -> None:
    metadatas = [
        "{",
        "[]",
        json.dumps({"dtypes": 5}),
        json.dumps({"dtypes": {"t": "nonsense"}}),
        json.dumps({"dtypes": {"t": "complex128"}}),
    ]
    for text in [*metadatas, json.dumps({"dtypes": {"t": ["x"]}})]:
        tensor = HeaderTensor(dtype="U8", shape=(50_000, 3), begin=100, end=150_100)
        header = ShardHeader(tensors={"t": tensor}, metadata={"tierstore": text}, data_start=100)
        stretches = stretches_of(header, 150_100)
        check_cover(stretches, 150_100)
        assert stretches[-1].itemsize == 1


def test_a_header_that_does_not_cover_its_file_makes_it_plain_bytes() -> None:
    header = ShardHeader(tensors={}, metadata={}, data_start=10)
    assert stretches_of(header, 4000) == plain_stretches(4000)
    assert plain_stretches(0) == ()


@pytest.mark.parametrize("shift", range(4))
def test_blocks_that_cut_numbers_come_back_and_are_compressed_all_the_same(shift: int) -> None:
    data = normal(400_000, 4)
    stretches = (Stretch(begin=0, end=shift, itemsize=1, rotated=False), Stretch(begin=shift, end=400_000, itemsize=4, rotated=True))
    raw = bytes(shift) + data[: 400_000 - shift]
    block, total = 100_001, 0
    for begin in range(0, len(raw), block):
        part = raw[begin : begin + block]
        frame = FrameEncoder().encode(part, [piece for piece, _ in pieces_of(stretches[shift == 0 :], begin, begin + len(part))])
        target = bytearray(len(part))
        decode_frame(frame, memoryview(target))
        assert target == part
        total += len(frame)
    assert total < 0.84 * len(raw)


def test_what_runs_cover_is_joined_and_cut_at_the_edges() -> None:
    runs = [Run(begin=begin, end=end, kind="copy", file=1, source=0) for begin, end in [(0, 4), (10, 20), (20, 25), (30, 40), (50, 60)]]
    assert holes_of(runs, 12, 35) == [(12, 25), (30, 35)]
    assert list(gaps(12, 40, holes_of(runs, 12, 35))) == [(25, 30), (35, 40)]
    assert list(gaps(12, 20, holes_of(runs, 0, 60))) == []
