"""Shards: read by safetensors and by stock DCP; headers from outside are bounded and checked in full."""

from __future__ import annotations

import json
import math
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from format_mutations import damaged
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader

from tierstore.errors import FormatError, IntegrityError, UsageError
from tierstore.format.digest import block_digests
from tierstore.format.dtypes import DTYPES, dtype_named, stored_as
from tierstore.format.header import MAX_HEADER_NBYTES
from tierstore.format.index import FileEntry, build_index, check_coverage, encode_index, merge_indexes
from tierstore.format.objects import encode_objects
from tierstore.format.part import Part, encode_part
from tierstore.format.shard import (
    DATA_ALIGNMENT,
    ChunkSpec,
    ShardPlan,
    header_nbytes,
    parse_header,
    plan_shard,
    shard_entries,
    tensor_entries,
)

SAVE_ID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


def chunk(
    name: str, dtype: str, shape: tuple[int, ...], whole: tuple[int, ...] | None = None, at: tuple[int, ...] | None = None
) -> ChunkSpec:
    return ChunkSpec(name=name, dtype=dtype, shape=shape, global_shape=whole or shape, offsets=at or (0,) * len(shape))


def random_bits(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern, NaNs included (for bool: 0 and 1)."""
    kind = getattr(torch, dtype)
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, (*shape, kind.itemsize), dtype=np.uint8)
    if not bits.size:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
            return torch.empty(shape, dtype=kind)
    return torch.from_numpy(bits).view(kind).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def image(plan: ShardPlan, tensors: dict[str, torch.Tensor]) -> bytes:
    return plan.header + b"".join(raw(tensors[p.key]) for p in plan.placements)


def file_of(header: Any, data: bytes = b"", pad: int = 0) -> bytes:
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + b" " * pad
    return struct.pack("<Q", len(text)) + text + data


def test_every_dtype_of_torch_has_an_entry_or_no_layout_of_its_own() -> None:
    found = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    shells = {name for name in found if name.startswith(("q", "bits")) or name in {f"{u}int{n}" for u in ("", "u") for n in range(1, 8)}}
    assert found - shells == set(DTYPES)
    for name, dtype in DTYPES.items():
        assert getattr(torch, name).itemsize == dtype.itemsize
        if dtype.numpy is not None:
            assert np.dtype(dtype.numpy).itemsize == dtype.itemsize
    with pytest.raises(UsageError, match="int4"):
        dtype_named("int4")


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_safetensors_reads_back_every_dtype_and_shape_bit_equal(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    value = random_bits(dtype, shape, 1)
    plan = plan_shard([chunk("x", dtype, shape)])
    data = image(plan, {"x": value})
    path = tmp_path / "shard.safetensors"
    path.write_bytes(data)
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["x"]
        read = file.get_tensor("x")
    stored, stored_shape = stored_as(DTYPES[dtype], shape)
    assert tuple(read.shape) == stored_shape
    assert raw(read) == raw(value)
    if DTYPES[dtype].safetensors:
        assert read.dtype is getattr(torch, dtype)
    header = parse_header(data, len(data))
    assert header.tensors["x"].dtype == stored
    (entry,) = shard_entries(header, "shard.safetensors")
    assert (entry.dtype, entry.shape) == (dtype, shape)


def test_a_shard_without_tensors_is_readable(tmp_path: Path) -> None:
    plan = plan_shard([], facts={"rank": 3})
    path = tmp_path / "empty.safetensors"
    path.write_bytes(plan.header)
    assert plan.nbytes == len(plan.header)
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == []
        assert json.loads(file.metadata()["tierstore"])["facts"] == {"rank": 3}
    assert parse_header(plan.header, plan.nbytes).tensors == {}


def test_data_begins_on_a_page_and_every_tensor_at_a_multiple_of_its_item_size() -> None:
    specs = [chunk(f"{dtype}.{i}", dtype, (2 * i + 1,)) for dtype in DTYPES for i in range(5)]
    plan = plan_shard(specs)
    assert len(plan.header) % DATA_ALIGNMENT == 0
    at = len(plan.header)
    for placement in plan.placements:
        assert placement.begin == at
        assert placement.begin % DTYPES[placement.spec.dtype].itemsize == 0
        at = placement.end
    assert at == plan.nbytes
    assert {p.spec for p in plan.placements} == set(specs)


def test_in_a_large_shard_the_tensors_that_fill_blocks_begin_with_one() -> None:
    mib = 1 << 20
    whole = [chunk("c", "bfloat16", (32, mib)), chunk("a", "float32", (mib,))]
    odd = [chunk("b", "float64", (3,)), chunk("d", "int64", (mib + 1,)), chunk("empty", "float32", (0, 4))]
    plan = plan_shard([*odd, *whole])
    assert len(plan.header) % mib == 0
    begins = {p.spec.name: p.begin for p in plan.placements}
    assert begins["a"] % mib == begins["c"] % mib == 0
    assert all(p.begin % DTYPES[p.spec.dtype].itemsize == 0 for p in plan.placements)
    assert len(plan_shard([*odd, whole[1]]).header) < mib, "a small shard has a small header"


def test_small_tensors_of_one_item_size_lie_together() -> None:
    specs = [chunk(f"layer.{i}.{kind}", "float32", (n,)) for i in range(20) for kind, n in (("weight", 1 << 16), ("bias", 64))]
    names = [p.spec.name for p in plan_shard(specs).placements]
    assert [name.endswith("bias") for name in names] == [True] * 20 + [False] * 20


def test_the_plan_does_not_depend_on_the_order_of_the_chunks() -> None:
    specs = [chunk(name, "float32", (3,)) for name in "abc"]
    assert plan_shard(specs) == plan_shard(specs[::-1])


def test_two_chunks_of_one_tensor_and_aliases_survive_in_the_header() -> None:
    specs = [
        chunk("w", "bfloat16", (2, 4), (8, 4), (2, 0)),
        chunk("w", "bfloat16", (2, 4), (8, 4), (6, 0)),
        chunk("w@6,0", "float8_e8m0fnu", (3,)),
    ]
    plan = plan_shard(specs, aliases={"tied": "w"})
    data = plan.header + bytes(plan.nbytes - len(plan.header))
    entries = {entry.name: entry for entry in tensor_entries(plan, "s.safetensors")}
    assert {entry.name: entry for entry in shard_entries(parse_header(data, len(data)), "s.safetensors")} == entries
    assert set(entries) == {"w", "w@6,0", "tied"}
    assert [extent.offsets for extent in entries["w"].extents] == [(2, 0), (6, 0)]
    assert entries["tied"].extents == entries["w"].extents


@pytest.mark.parametrize(
    ("specs", "aliases", "says"),
    [
        ([chunk("x", "float32", (2,)), chunk("x", "float32", (2,))], {}, "same place"),
        ([chunk("x", "float32", (2,), (4,)), chunk("x", "float64", (2,), (4,), (2,))], {}, "another dtype"),
        ([chunk("x", "quint8", (2,))], {}, "no dtype"),
        ([chunk("x", "torch.float32", (2,))], {}, "without its prefix"),
        ([chunk("x", "float32", (3,), (4,), (2,))], {}, "outside the shape"),
        ([chunk("x", "float32", (-1,))], {}, "outside the shape"),
        ([ChunkSpec(name="x", dtype="float32", shape=(1, 1), global_shape=(1,), offsets=(0,))], {}, "don't fit"),
        ([chunk("x", "float32", (2,))], {"y": "z"}, "names no tensor"),
        ([chunk("x", "float32", (2,))], {"x": "x"}, "collides"),
        ([chunk("__metadata__", "float32", (2,))], {}, "reserved"),
        ([chunk("a\ud800", "float32", (2,))], {}, "Unicode"),
    ],
)
def test_a_plan_that_can_not_be_is_refused(specs: list[ChunkSpec], aliases: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan_shard(specs, aliases=aliases)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_FILES = {
    "empty": (b"", "at least 8 bytes"),
    "short": (b"\1\2\3", "at least 8 bytes"),
    "absurd length": (b"\xff" * 8 + b"{}", "are allowed"),
    "length over 100 MB": (struct.pack("<Q", MAX_HEADER_NBYTES + 1) + b"{}", "are allowed"),
    "length beyond the file": (struct.pack("<Q", 100) + b"{}", "the file has"),
    "no length": (struct.pack("<Q", 0), "'{}' has 2"),
    "leading space": (file_of(b" {}"), "begin with"),
    "a list": (file_of(b"[]"), "begin with"),
    "not JSON": (file_of(b"{]"), "not JSON"),
    "not UTF-8": (file_of(b'{"\xff":1}'), "not UTF-8"),
    "duplicate": (file_of(b'{"a":1,"a":2}'), "twice"),
    "lone surrogate": (file_of(b'{"\\udc00":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "lone surrogates"),
    "NaN": (file_of(b'{"a":NaN}'), "no JSON"),
    "huge number": (file_of(b'{"a":' + b"9" * 5000 + b"}"), "5000 digits"),
    "infinite number": (file_of(b'{"a":1e999}'), "no finite"),
    "deep": (file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "too deep"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "text to text"),
    "metadata list": (file_of({"__metadata__": []}), "text to text"),
    "entry without dtype": (file_of({"a": {"shape": [], "data_offsets": [0, 0]}}), "no dtype"),
    "entry with more": (file_of({"a": entry() | {"more": 1}}, bytes(8)), "more than these"),
    "unknown dtype": (file_of({"a": entry("F31")}, bytes(8)), "unknown dtype"),
    "dtype list": (file_of({"a": entry(["F32"])}, bytes(8)), "unknown dtype"),  # type: ignore[arg-type]
    "negative shape": (file_of({"a": entry(shape=[-2])}, bytes(8)), "absurd shape"),
    "float shape": (file_of({"a": entry(shape=[2.0])}, bytes(8)), "absurd shape"),
    "bool shape": (file_of({"a": entry(shape=[True, 2])}, bytes(8)), "absurd shape"),
    "65 axes": (file_of({"a": entry(shape=[1] * 64 + [2])}, bytes(8)), "absurd shape"),
    "overflowing shape": (file_of({"a": entry(shape=[1 << 61, 8])}, bytes(8)), "can't have"),
    "absurd dim": (file_of({"a": entry(shape=[1 << 64, 0], offsets=[0, 0])}), "absurd shape"),
    "three offsets": (file_of({"a": entry(offsets=[0, 4, 8])}, bytes(8)), "malformed data_offsets"),
    "reversed offsets": (file_of({"a": entry(offsets=[8, 0])}, bytes(8)), "outside"),
    "negative offset": (file_of({"a": entry(offsets=[-8, 0])}, bytes(8)), "outside"),
    "beyond the file": (file_of({"a": entry(offsets=[0, 8])}, bytes(7)), "outside"),
    "wrong length": (file_of({"a": entry(shape=[3])}, bytes(8)), "can't have"),
    "overlap": (file_of({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)), "overlap"),
    "same place": (file_of({"a": entry(), "b": entry()}, bytes(8)), "overlap"),
    "hole": (file_of({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)), "hole"),
    "hole at the start": (file_of({"a": entry(offsets=[4, 12])}, bytes(12)), "hole"),
    "bytes left over": (file_of({"a": entry()}, bytes(9)), "end at byte"),
    "half a byte": (file_of({"a": entry("F4", [3], [0, 2])}, bytes(2)), "can't have"),
}


@pytest.mark.parametrize("case", sorted(BAD_FILES))
def test_a_malformed_header_is_refused_with_the_problem_named(case: str, tmp_path: Path) -> None:
    data, says = BAD_FILES[case]
    with pytest.raises(FormatError, match=says):
        parse_header(data, len(data))


@pytest.mark.parametrize(
    "case", sorted(set(BAD_FILES) - {"bool shape", "65 axes", "absurd dim", "huge number", "infinite number", "leading space"})
)
def test_what_is_refused_is_refused_by_safetensors_too(case: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(BAD_FILES[case][0])
    if case in ("entry with more", "duplicate"):  # which safetensors overlooks; "duplicate" has malformed entries as well
        return
    with pytest.raises(Exception):  # noqa: B017, PT011 - its own error type, or OSError for an empty file
        safe_open(path, framework="pt").__enter__()


def test_a_header_is_measured_from_eight_bytes() -> None:
    plan = plan_shard([chunk("x", "float32", (3,))])
    assert header_nbytes(plan.header[:8], plan.nbytes) == len(plan.header)
    with pytest.raises(FormatError, match="only 100 were given"):
        parse_header(plan.header[:100], plan.nbytes)


@st.composite
def a_plan(draw: st.DrawFn) -> tuple[list[ChunkSpec], dict[str, str]]:
    names = draw(st.lists(st.text(min_size=1, max_size=8).filter(lambda n: n.isprintable()), unique=True, max_size=8))
    specs = []
    for name in names:
        whole = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        at = tuple(draw(st.integers(0, n)) for n in whole)
        shape = tuple(draw(st.integers(0, n - o)) for n, o in zip(whole, at, strict=True))
        specs.append(ChunkSpec(name=name, dtype=draw(st.sampled_from(sorted(DTYPES))), shape=shape, global_shape=whole, offsets=at))
    aliases = {f"{name}.tied": name for name in names[:2] if f"{name}.tied" not in names}
    return specs, aliases


@given(plan=a_plan())
def test_what_a_header_says_is_what_was_planned(plan: tuple[list[ChunkSpec], dict[str, str]]) -> None:
    made = plan_shard(plan[0], aliases=plan[1])
    data = made.header + bytes(made.nbytes - len(made.header))
    header = parse_header(data, len(data))
    assert {p.key: (p.begin, p.end) for p in made.placements} == {key: (t.begin, t.end) for key, t in header.tensors.items()}
    by_name = sorted(shard_entries(header, "f"), key=lambda e: e.name)
    assert by_name == sorted(tensor_entries(made, "f"), key=lambda e: e.name)
    assert made.nbytes - len(made.header) == sum(math.prod(s.shape) * DTYPES[s.dtype].itemsize for s in plan[0])


SEED = plan_shard(
    [chunk("w", "bfloat16", (2, 4), (8, 4), (2, 0)), chunk("c", "complex128", (2,)), chunk("s", "int64", ())], aliases={"t": "w"}
)
SEED_FILE = SEED.header + bytes(SEED.nbytes - len(SEED.header))


@given(body=damaged(SEED_FILE, head=len(SEED.header.rstrip(b" "))))
def test_a_damaged_header_is_answered_with_an_integrity_error_only(body: bytes) -> None:
    try:
        shard_entries(parse_header(body, len(body)), "f")
    except IntegrityError:
        pass


@given(head=st.binary(max_size=200), claims=st.integers(0, 1 << 40))
def test_any_bytes_are_answered(head: bytes, claims: int) -> None:
    for data in (head, struct.pack("<Q", len(head)) + head, struct.pack("<Q", claims) + b"{" + head):
        with pytest.raises(FormatError):
            parse_header(data, max(len(data), claims) + 1)


def save_like_a_store(folder: Path, tensors: dict[str, torch.Tensor], world_size: int) -> None:
    """Every file of a checkpoint's folder, as two ranks leave them: sharded along axis 0, scalars on rank 0."""
    parts = []
    for rank in range(world_size):
        specs, local = [], {}
        for name, tensor in tensors.items():
            if tensor.ndim == 0 or tensor.shape[0] == 0:
                if rank == 0:
                    specs.append(chunk(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
                    local[name] = tensor
                continue
            rows = torch.tensor_split(torch.arange(tensor.shape[0]), world_size)[rank]
            if len(rows):
                local[name] = tensor[rows[0] : rows[-1] + 1]
                at = (int(rows[0]), *[0] * (tensor.ndim - 1))
                specs.append(chunk(name, str(tensor.dtype).removeprefix("torch."), tuple(local[name].shape), tuple(tensor.shape), at))
        plan = plan_shard(specs)
        name = f"shard-{rank:05d}-of-{world_size:05d}.safetensors"
        data = image(plan, local)
        (folder / name).write_bytes(data)
        index = build_index(tensor_entries(plan, name), [FileEntry(name=name, nbytes=len(data), block_digests=block_digests(data))])
        objects = encode_objects({"step": 7})
        part = Part(run="r", step=7, save_id=SAVE_ID, rank=rank, world_size=world_size, index=index, objects=objects)
        (folder / f"part-{rank:05d}.safetensors").write_bytes(encode_part(part))
        parts.append(index)
    index = merge_indexes(parts)
    check_coverage(index)
    (folder / "index.safetensors").write_bytes(encode_index(index))
    (folder / "objects.json").write_bytes(b"{}")
    (folder / "manifest.json").write_bytes(b"{}")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("thread_count", [1, 2])
def test_stock_dcp_loads_a_sharded_checkpoint_beside_part_records_and_index(tmp_path: Path, thread_count: int) -> None:
    dtypes = ["float32", "bfloat16", "float16", "float64", "int64", "bool", "uint8", "float8_e4m3fn", "float8_e5m2", "complex64"]
    tensors = {f"layer.{dtype}": random_bits(dtype, (5, 4), 2) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "vector": torch.arange(7)}
    save_like_a_store(tmp_path, tensors, world_size=2)
    state = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path), thread_count=thread_count), no_dist=True)
    for name, tensor in tensors.items():
        assert raw(state[name]) == raw(tensor), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_dcp_reads_dtypes_without_a_name_as_their_bytes(tmp_path: Path) -> None:
    tensors = {"c": random_bits("complex128", (6, 2), 3), "scale": random_bits("float8_e8m0fnu", (6,), 4)}
    save_like_a_store(tmp_path, tensors, world_size=2)
    state = {"c": torch.zeros(6, 2, 16, dtype=torch.uint8), "scale": torch.zeros(6, 1, dtype=torch.uint8)}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for name, tensor in tensors.items():
        assert raw(state[name]) == raw(tensor), name
