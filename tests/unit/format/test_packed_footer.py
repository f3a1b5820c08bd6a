"""The footer: what was written is read, one request of the end is enough, and what makes no sense is refused before memory is taken."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from format_mutations import damaged
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import FormatError, IntegrityError, UsageError
from tierstore.format.digest import digest_of
from tierstore.format.packed.footer import MAX_FOOTER_NBYTES, TRAILER_NBYTES, decode_footer, encode_footer, footer_digest, footer_nbytes
from tierstore.format.packed.types import Footer, Run

BLOCK = 4096
PATHS = ("", "run/step-0000000001-01ARZ3NDEKTSV4RRFFQ69G5FAV/shard-00000-of-00001.safetensors", "run/other")


def same(a: Footer, b: Footer) -> bool:
    return all(
        np.array_equal(a.frame_ends, b.frame_ends) if field.name == "frame_ends" else getattr(a, field.name) == getattr(b, field.name)
        for field in fields(Footer)
    )


@st.composite
def footers(draw: st.DrawFn) -> Footer:
    nbytes = draw(st.integers(0, 40 * BLOCK))
    blocks = -(-nbytes // BLOCK)
    runs, at = [], 0
    for _ in range(draw(st.integers(0, 5))):
        begin = at + draw(st.integers(0, 3000))
        end = begin + draw(st.integers(1, 6000))
        if end > nbytes:
            break
        runs.append(Run(begin=begin, end=end, kind="copy", file=draw(st.integers(1, 2)), source=draw(st.integers(0, 1 << 59))))
        at = end
    if runs and runs[-1].end + 10 < nbytes and nbytes > 5000:
        kind = draw(st.sampled_from(("bfloat16", "float16")))
        runs.append(Run(begin=nbytes - 4, end=nbytes, kind=kind, file=0, source=draw(st.integers(0, nbytes - 12))))  # also of copies
    lossy = draw(st.sets(st.integers(0, blocks - 1), max_size=4)) if blocks else set()
    lossy -= {block for run in runs for block in range(run.begin // BLOCK, -(-run.end // BLOCK))}  # these have no runs
    return Footer(
        nbytes=nbytes,
        block_nbytes=BLOCK,
        frame_ends=np.cumsum(np.array(draw(st.lists(st.integers(0, 5000), min_size=blocks, max_size=blocks)), np.int64)),
        files=PATHS,
        runs=tuple(runs),
        lossy={block: bytes([block]) * 32 for block in sorted(lossy)},
        quantised={"exp_avg.x": {"scheme": "q8", "mean_error": 0.01}} if lossy else {},
    )


def test_a_block_that_is_not_exact_takes_nothing_from_elsewhere() -> None:
    def footer(begin: int) -> Footer:
        run = Run(begin=begin, end=begin + 8, kind="bfloat16", file=0, source=0)
        return Footer(nbytes=3 * BLOCK, block_nbytes=BLOCK, frame_ends=np.array([9, 10, 11]), runs=(run,), lossy={1: bytes(32)})

    for begin in (BLOCK - 8, 2 * BLOCK):
        encode_footer(footer(begin))
    for begin in (BLOCK - 4, BLOCK, BLOCK + 100, 2 * BLOCK - 2):
        with pytest.raises(UsageError, match="a run in a block that is not exact"):
            encode_footer(footer(begin))


@given(footers(), st.binary(max_size=50))
def test_a_footer_is_read_as_it_was_written_whatever_stands_before_it(footer: Footer, before: bytes) -> None:
    data = encode_footer(footer)
    stored = (int(footer.frame_ends[-1]) if len(footer.frame_ends) else 0) + len(data)
    assert footer_nbytes(data[-TRAILER_NBYTES:], stored) == len(data)
    assert same(decode_footer(before + data, stored), footer)
    assert data == encode_footer(footer)
    assert footer_digest(data) == digest_of(data)


def test_the_footer_of_a_shard_of_16_gib_lies_within_64_kib() -> None:
    blocks = 16 << 10
    footer = Footer(nbytes=blocks << 20, block_nbytes=1 << 20, frame_ends=np.arange(1, blocks + 1, dtype=np.int64) * 700_000)
    assert len(encode_footer(footer)) < (64 << 10) + 512


FRAMES = 1234 * 8
SEED = Footer(
    nbytes=7 * BLOCK + 5,
    block_nbytes=BLOCK,
    frame_ends=np.arange(1, 9, dtype=np.int64) * 1234,
    files=PATHS,
    runs=(Run(begin=0, end=100, kind="copy", file=1, source=7), Run(begin=4096, end=8192, kind="bfloat16", file=0, source=8192)),
    lossy={3: b"\x01" * 32},
    quantised={"m": {"scheme": "q4"}},
)
DATA = encode_footer(SEED)


def sealed(data: bytes) -> bytes:
    """The same with the checksum that fits, so that what it says is looked at."""
    table, document, _, magic = struct.unpack("<QII8s", data[-24:])
    return data[:-24] + struct.pack("<QII8s", table, document, zlib.crc32(data[:-24]), magic)


@given(damaged(DATA) | st.binary(max_size=300), st.booleans())
def test_a_damaged_footer_is_refused(data: bytes, seal: bool) -> None:
    if seal and len(data) > 24:
        data = sealed(data)
    for stored in (FRAMES + len(DATA), FRAMES + len(data), len(data)):
        try:
            footer = decode_footer(data, stored)
        except IntegrityError:
            continue
        assert seal or same(footer, SEED)


def test_every_flipped_bit_is_noticed() -> None:
    for at in range(len(DATA)):
        broken = bytearray(DATA)
        broken[at] ^= 1 << at % 8
        with pytest.raises(FormatError):
            decode_footer(broken, FRAMES + len(DATA))


def test_a_file_that_is_no_packed_file_is_refused() -> None:
    for tail, stored in ((b"", 0), (b"x" * 23, 23), (b"x" * 24, 1000), (DATA, len(DATA) - 1), (DATA[:-1], 9999)):
        with pytest.raises(FormatError):
            footer_nbytes(tail, stored)
    huge = struct.pack("<QII8s", MAX_FOOTER_NBYTES, 100, 0, DATA[-8:])
    with pytest.raises(FormatError, match="claims"):
        footer_nbytes(huge, 1 << 50)
    with pytest.raises(FormatError, match="only"):
        decode_footer(DATA[-100:], FRAMES + len(DATA))


def test_counts_are_compared_with_lengths_before_memory_is_taken() -> None:
    tracemalloc.start()
    for name, value in ((b'"blocks": 8', b'"blocks": %d' % (1 << 40)), (b'"runs": 2', b'"runs": 900'), (b'"lossy": 1', b'"lossy": -1')):
        broken = DATA[:-24].replace(name, value)
        assert broken != DATA[:-24]
        grown = len(broken) + 24 - len(DATA)
        table, document, _, magic = struct.unpack("<QII8s", DATA[-24:])
        data = broken + struct.pack("<QII8s", table, document + grown, zlib.crc32(broken), magic)
        with pytest.raises(FormatError):
            decode_footer(data, FRAMES + len(data))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def run(**changes: Any) -> dict[str, Any]:
    return {"runs": (Run(**{"begin": 0, "end": 100, "kind": "copy", "file": 1, "source": 7, **changes}),)}


def rounded_rounding(source: int) -> dict[str, Any]:
    """A run of numbers of which the first or the last is in another one."""
    return {"runs": (Run(begin=0, end=100, kind="float16", file=0, source=source), SEED.runs[1])}


def test_what_is_rounded_may_lie_beside_another_rounding() -> None:
    for source in (4096 - 200, 8192):
        encode_footer(replace(SEED, **rounded_rounding(source=source)))


@pytest.mark.parametrize(
    "changes",
    [
        run(begin=100),
        run(begin=-1),
        run(end=SEED.nbytes + 1),
        run(file=3),
        run(source=-1),
        run(source=1 << 60),
        run(file=0, source=5000),
        run(kind="bfloat16", source=5000),
        run(kind="bfloat16", file=0, source=SEED.nbytes - 199),
        run(kind="bfloat16", file=0, end=101, source=5000),
        run(kind="float16", file=0, begin=200, end=300, source=250),
        run(kind="float16", file=0, begin=200, end=300, source=101),
        rounded_rounding(source=4096 - 198),
        rounded_rounding(source=8190),
        {"runs": (SEED.runs[1], SEED.runs[0])},
        {"files": ("", "../secret")},
        {"files": ("", "/etc/passwd")},
        {"files": ("x",)},
        {"files": ()},
        {"files": ("", "a", "a")},
        {"files": ("", 5)},
        {"nbytes": 9 * BLOCK},
        {"nbytes": -1},
        {"block_nbytes": 0},
        {"lossy": {8: b"\x01" * 32}},
        {"lossy": {1: b"\x01" * 31}},
        {"frame_ends": np.array([5, 4, 6, 7, 8, 9, 10, 11])},
        {"frame_ends": np.arange(1, 9) << 40},
    ],
)
def test_what_makes_no_sense_is_never_written(changes: dict[str, Any]) -> None:
    footer = replace(SEED, **changes)
    with pytest.raises(UsageError, match="contradicts"):
        encode_footer(footer)
