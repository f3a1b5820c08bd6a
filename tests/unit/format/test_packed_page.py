"""docs/design/format.md, "Packed files": its reader, taken from the page, reads what tierstore packs; old files stay readable."""

from __future__ import annotations

import ast
import base64
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frames_kit import noise, normal
from packing_kit import SHARD, run, training_shard

from tierstore.format.digest import digest_of
from tierstore.format.header import parse_header
from tierstore.format.packed.footer import decode_footer, encode_footer, footer_nbytes
from tierstore.format.packed.frame import FrameEncoder, decode_frame
from tierstore.format.packed.layout import pieces_of, stretches_of
from tierstore.format.packed.types import Footer, Run, packed_name
from tierstore.format.shard import ChunkSpec, plan_shard
from tierstore.storage.contract import PackHints, Unchanged
from tierstore.storage.packed import PackedStorage, Packing, QuantiseRule
from tierstore.storage.sources import BytesSource
from tierstore.testing.bucket import Bucket

PAGE = Path(__file__).parents[3] / "docs" / "design" / "format.md"
GOLDEN = Path(__file__).with_name("packed_golden.txt")
BLOCK = 100_003  # cuts numbers


def page_source() -> str:
    (source,) = re.findall(r"```python\n((?:(?!```).)*?def unpack.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return str(source)


def page_reader() -> Callable[[bytes], bytes]:
    scope: dict[str, Any] = {}
    exec(compile(page_source(), str(PAGE), "exec"), scope)
    return scope["unpack"]  # type: ignore[no-any-return]


def pack(raw: bytes, runs: Sequence[Run] = (), block: int = BLOCK, *, files: tuple[str, ...] = ("",), level: int = 0) -> bytes:
    """A packed file in the simplest way there is."""
    stretches = stretches_of(parse_header(raw, len(raw)), len(raw))
    encoder = FrameEncoder("zstd", level)
    frames = []
    holes = [(one.begin, one.end) for one in runs]
    for begin in range(0, len(raw), block):
        end = min(begin + block, len(raw))
        frames.append(encoder.encode(raw[begin:end], [piece for piece, _ in pieces_of(stretches, begin, end, holes)]))
    ends = np.cumsum([len(frame) for frame in frames], dtype=np.int64)
    footer = Footer(nbytes=len(raw), block_nbytes=block, frame_ends=ends, files=files, runs=tuple(runs))
    return b"".join([*frames, encode_footer(footer)])


def stored_by_a_tier(raw: bytes, packing: Packing, hints: PackHints | None = None) -> bytes:
    """The packed file that a tier keeps of a shard."""

    async def body() -> bytes:
        bucket = Bucket()
        storage = PackedStorage(bucket, packing)
        try:
            await storage.write_packed(SHARD, BytesSource(raw), hints or PackHints())
        finally:
            await storage.close()
        return await bucket.read(packed_name(SHARD, len(raw)))

    return run(body)


def shard() -> tuple[bytes, list[Run]]:
    """A shard with most dtypes and an odd length, and its runs: weights that the master gives."""
    rows = {"bfloat16": 40, "float16": 40, "float32": 40, "float64": 3, "int64": 30, "bool": 50, "complex64": 9, "float8_e4m3fn": 40}
    specs = [ChunkSpec(name=f"x.{d}", dtype=d, shape=(n, 1000), global_shape=(n, 1000), offsets=(0, 0)) for d, n in rows.items()]
    specs.append(ChunkSpec(name="odd", dtype="uint8", shape=(77,), global_shape=(77,), offsets=(0,)))
    plan = plan_shard(specs)
    master = np.frombuffer(normal(160_000, 4), "<f4").copy()
    master[:5] = [1e-41, -0.0, np.inf, 65519.0, 0.1]
    bits = master.view("<u4")
    values = {
        "x.float32": master.tobytes(),
        "x.bfloat16": ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes(),
        "x.float16": master.astype("<f2").tobytes(),
        "x.float64": normal(24_000, 8),
        "x.int64": np.arange(30_000).astype("<i8").tobytes(),
        "x.bool": bytes(n % 7 == 0 for n in range(50_000)),
        "x.complex64": normal(72_000, 4, seed=1),
        "x.float8_e4m3fn": noise(40_000),
        "odd": noise(77, seed=2),
    }
    raw = plan.header + b"".join(values[p.key] for p in plan.placements)
    at = {p.key: p.begin for p in plan.placements}
    runs = [
        Run(begin=at["x.bfloat16"], end=at["x.bfloat16"] + 80_000, kind="bfloat16", file=0, source=at["x.float32"]),
        Run(begin=at["x.float16"], end=at["x.float16"] + 80_000, kind="float16", file=0, source=at["x.float32"]),
    ]
    return raw, sorted(runs, key=lambda one: one.begin)


def test_the_reader_of_the_page_has_thirty_lines_and_needs_numpy_and_zstandard_alone() -> None:
    lines = [line for line in page_source().splitlines() if line.strip()]
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 140
    assert not any(";" in line for line in lines)
    tree = ast.parse(page_source())
    assert {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names} == {
        "json",
        "struct",
        "numpy",
        "zstandard",
    }
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("packing", [Packing(master_once=True), Packing(codec="raw", master_once=True), Packing(level=3)])
def test_the_reader_of_the_page_reads_what_a_packed_tier_stores(kind: str, packing: Packing) -> None:
    raw = training_shard(rows=700, columns=501, kind=kind)  # more than one block, and an odd tail
    data = stored_by_a_tier(raw, packing)
    runs = decode_footer(data[-footer_nbytes(data, len(data)) :], len(data)).runs
    assert [one.kind for one in runs] == [kind] * (2 if packing.master_once else 0)
    assert page_reader()(data) == raw


def test_the_reader_of_the_page_refuses_what_a_tier_stores_quantised_or_took_from_another_file() -> None:
    raw = training_shard(rows=30)
    quantised = stored_by_a_tier(raw, Packing(quantise=QuantiseRule(scheme="q8")), PackHints(scheme="q8"))
    with pytest.raises(AssertionError, match=r"quantised: .*exp_avg_sq"):
        page_reader()(quantised)
    unchanged = (Unchanged(begin=1000, end=3000, path="r/base/shard-00000-of-00001.safetensors", source=1000),)
    with pytest.raises(AssertionError, match=r"takes bytes from .*r/base/shard"):
        page_reader()(stored_by_a_tier(raw, Packing(), PackHints(unchanged=unchanged)))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("level", [0, 3])
def test_the_reader_of_the_page_reads_packed_files_with_runs_and_without(level: int) -> None:
    raw, runs = shard()
    unpack = page_reader()
    without, with_runs = pack(raw, level=level), pack(raw, runs, level=level)
    assert unpack(without) == raw
    assert unpack(with_runs) == raw
    assert len(with_runs) < len(without) < 0.85 * len(raw)
    assert unpack(pack(raw, block=1 << 20)) == raw


def test_the_reader_of_the_page_says_what_it_does_not_read() -> None:
    raw, _ = shard()
    unpack = page_reader()
    with pytest.raises(AssertionError, match="takes bytes from"):
        unpack(pack(raw, [Run(begin=5, end=9, kind="copy", file=1, source=0)], files=("", "other")))
    with pytest.raises(AssertionError, match="no packed file"):
        unpack(raw)


def test_a_packed_file_of_the_first_version_is_read_as_ever() -> None:
    # 3,000 float32 numbers, 2,500 int64, the bfloat16 of the first 1,000 float32 (a run), 10 bytes; blocks of 8,192 bytes.
    data = base64.b64decode(GOLDEN.read_text("ascii"))
    raw = page_reader()(data)
    assert digest_of(raw) == "sha256:c07fc9033fa6b9f984996594961a0cbdb7489d71b34c549a8e2a4144e3d91358"
    footer = decode_footer(data, len(data))
    (one,) = footer.runs
    assert (footer.nbytes, footer.block_nbytes, one.kind, one.end - one.begin) == (len(raw), 8192, "bfloat16", 2000)
    begin = 0
    for block, end in enumerate(footer.frame_ends.tolist()):
        at = block * footer.block_nbytes
        target = bytearray(raw[at : at + footer.block_nbytes])
        hole = (min(max(one.begin - at, 0), len(target)), min(max(one.end - at, 0), len(target)))
        expected = bytes(target)
        target[: hole[0]] = bytes(hole[0])
        target[hole[1] :] = bytes(len(target) - hole[1])
        assert decode_frame(data[begin:end], memoryview(target), [hole]) is False
        assert target == expected
        begin = end
