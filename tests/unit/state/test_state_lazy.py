"""Slices: the same values as torch's own indexing, and not many more bytes than they have (CASES 66, loading 2, 4)."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from state_kit import ImageReader, run, staged

from tierstore.errors import IncompleteError, NotFoundError, UsageError
from tierstore.format.index import Extent, TensorEntry
from tierstore.format.objects import Opaque, TensorRef
from tierstore.state.boxes import Read, intersect, reads_of
from tierstore.state.lazy import Checkpoint
from tierstore.state.reading import Fill, deliver, fill_all, reads_for
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.reads import Want

KIB = 1024


def indices(size: int) -> st.SearchStrategy[Any]:
    bound = st.none() | st.integers(-size - 2, size + 2)
    cut = st.builds(slice, bound, bound, st.none() | st.integers(1, 4))
    return cut | st.integers(-size, size - 1) if size else cut


@st.composite
def indexed(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[Any, ...]]:
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    key: list[Any] = [draw(indices(size)) for size in shape[: draw(st.integers(0, len(shape)))]]
    if draw(st.booleans()):
        key.append(Ellipsis)
    for _ in range(draw(st.integers(0, 2))):
        key.insert(draw(st.integers(0, len(key))), None)
    dtype = draw(st.sampled_from([torch.float32, torch.uint8, torch.complex128]))
    return torch.arange(math.prod(shape)).to(dtype).view(shape), tuple(key)


@hypothesis.given(indexed(), st.sampled_from([16, 64, 1 << 20]), st.sampled_from([32, 100, 16 << 20]))
def test_a_lazy_index_gives_what_torch_gives(case: tuple[torch.Tensor, Any], block: int, span: int) -> None:
    tensor, key = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tierstore.state.boxes.SPAN_NBYTES", span)
        got = Checkpoint(staged({"t": tensor}, block_nbytes=block), run)["t"][key]
    assert_same_state(got, tensor[key].contiguous())
    assert got.untyped_storage().nbytes() == got.nbytes


def split(tensor: torch.Tensor, cuts: list[list[int]]) -> ImageReader:
    """`tensor` stored as the grid of chunks that `cuts` (inner borders per dimension) make, each by a rank of its own."""
    grids = [list(zip([0, *c], [*c, n], strict=True)) for c, n in zip(cuts, tensor.shape, strict=True)]
    chunks = [[]] if grids else [()]
    for grid in grids:
        chunks = [[*before, span] for before in chunks for span in grid]
    extents, data = [], b""
    for chunk in chunks:
        part = tensor[tuple(slice(a, b) for a, b in chunk)].contiguous()
        raw = part.numpy().tobytes()
        extents.append(
            Extent(
                file="shard-00000-of-00001.safetensors",
                begin=len(data),
                end=len(data) + len(raw),
                offsets=tuple(a for a, _ in chunk),
                sizes=tuple(part.shape),
            )
        )
        data += raw
    reader = staged({"t": tensor})
    reader.files = {"shard-00000-of-00001.safetensors": data}
    entry = TensorEntry(name="t", dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), extents=tuple(extents))
    reader.entry = entry  # type: ignore[attr-defined]
    return reader


@hypothesis.given(st.data())
def test_a_sharded_tensor_is_put_together_from_any_grid_of_chunks(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    cuts = [sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else [] for n in shape]
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    reader = split(tensor, cuts)
    entry: TensorEntry = reader.entry  # type: ignore[attr-defined]
    box = tuple(range(*data.draw(indices(n).filter(lambda k: isinstance(k, slice))).indices(n)) for n in shape)
    box = tuple(r if len(r) else range(0) for r in box)
    target = torch.full(tuple(len(r) for r in box), -1.0)
    fill_all(reader, run, [Fill(entry=entry, box=box, target=target)])
    want = tensor
    for dim, r in enumerate(box):
        want = want.index_select(dim, torch.tensor(list(r), dtype=torch.int64))
    assert torch.equal(target, want)


def test_row_chunks_go_straight_into_the_destination() -> None:
    tensor = torch.randn(64, 32)
    reader = split(tensor, [[10, 20, 50], []])
    target = torch.empty(64, 32)
    entry: TensorEntry = reader.entry  # type: ignore[attr-defined]
    fill_all(reader, run, [Fill(entry=entry, box=(range(64), range(32)), target=target)])
    assert torch.equal(target, tensor)
    assert [type(want) for want in reader.wants] == [Want] * 4
    assert reader.calls == 1


def test_a_hole_between_chunks_is_an_error_and_never_old_memory() -> None:
    reader = split(torch.ones(9, 2), [[3, 6], []])
    whole: TensorEntry = reader.entry  # type: ignore[attr-defined]
    holed = TensorEntry(name="t", dtype="float32", shape=(9, 2), extents=(whole.extents[0], whole.extents[2]))
    with pytest.raises(IncompleteError, match="12 of the 18 elements"):
        fill_all(reader, run, [Fill(entry=holed, box=(range(9), range(2)), target=torch.empty(9, 2))])
    rows = torch.empty(2, 2)
    fill_all(reader, run, [Fill(entry=holed, box=(range(7, 9), range(2)), target=rows)])  # what is there can be had
    assert torch.equal(rows, torch.ones(2, 2))


def test_rows_fetch_exactly_their_bytes() -> None:
    tensor = torch.randn(1000, 256)
    reader = staged({"t": tensor})
    assert torch.equal(Checkpoint(reader, run)["t"][128:256], tensor[128:256])
    assert reader.nbytes_read == 128 * 1024
    assert len(reader.wants) == 1


def test_opening_and_looking_reads_nothing() -> None:
    reader = staged({"a": {"t": torch.randn(10, 2)}, "n": 3})
    checkpoint = Checkpoint(reader, run)
    lazy = checkpoint["a.t"]
    assert (lazy.name, lazy.shape, lazy.dtype, lazy.nbytes, lazy.ndim, len(lazy)) == ("a.t", torch.Size([10, 2]), torch.float32, 80, 2, 10)
    assert (list(checkpoint), len(checkpoint), "a.t" in checkpoint, "x" in checkpoint) == (["a.t"], 1, True, False)
    assert checkpoint.get("x") is None
    assert [name for name, _ in checkpoint.items()] == ["a.t"]
    assert "shape=[10, 2]" in repr(lazy)
    assert reader.wants == []


def test_narrow_columns_read_one_span_and_far_columns_skip_the_gaps() -> None:
    tensor = torch.arange(64 * 4096, dtype=torch.float32).view(64, 4096)
    near = staged({"t": tensor}, block_nbytes=64 * KIB)
    assert torch.equal(Checkpoint(near, run)["t"][:, 5:9], tensor[:, 5:9])
    assert len(near.wants) == 1
    far = staged({"t": tensor}, block_nbytes=4 * KIB)
    assert torch.equal(Checkpoint(far, run)["t"][:, 5:9], tensor[:, 5:9])
    assert len(far.wants) == 64
    assert far.nbytes_read == 64 * 16
    steps = staged({"t": tensor}, block_nbytes=4 * KIB)
    assert torch.equal(Checkpoint(steps, run)["t"][::8], tensor[::8])
    assert steps.nbytes_read == 8 * 16 * KIB


def test_wide_columns_go_straight_into_the_destination() -> None:
    tensor = torch.arange(8 * 4096, dtype=torch.float32).view(8, 4096)
    reader = staged({"t": tensor}, block_nbytes=4 * KIB)
    assert torch.equal(Checkpoint(reader, run)["t"][:, :3072], tensor[:, :3072])
    assert reader.nbytes_read == 8 * 12 * KIB


@pytest.mark.parametrize("shape", [(3, 100_000), (100_000, 3), (5, 4, 3000)])
def test_no_read_into_scratch_is_longer_than_a_span(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.state.boxes.SPAN_NBYTES", 10_000)
    target = torch.empty(shape[::-1]).permute(*reversed(range(len(shape))))
    inside = tuple(range(n) for n in shape)
    reads = list(
        reads_of(file="f", begin=0, sizes=shape, dtype=torch.float32, inside=inside, target=target, direct=True, block_nbytes=1 << 20)
    )
    assert max(r.nbytes for r in reads) <= 10_000
    assert sum(r.nbytes for r in reads) == 4 * math.prod(shape)
    assert all(isinstance(r, Read) and r.strides is not None for r in reads)


def test_a_box_that_misses_a_chunk_meets_nothing() -> None:
    assert intersect((range(0, 10, 5),), (6,), (4,)) is None
    assert intersect((range(3, 30, 5),), (6,), (10,)) == ((range(2, 8, 5),), (slice(1, 3),))
    assert intersect((), (), ()) == ((), ())


def test_bad_indices_are_answered() -> None:
    lazy = Checkpoint(staged({"t": torch.ones(4, 3), "s": torch.tensor(1)}), run)["t"]
    for key in (4, -5, (0, 3), (0, 0, 0), (Ellipsis, Ellipsis)):
        with pytest.raises(IndexError):
            lazy[key]
    for bad in (slice(None, None, -1), [0, 1], torch.tensor([True] * 4), True, "x", 1.0):
        with pytest.raises((UsageError, ValueError)):
            lazy[bad]
    assert [row.tolist() for row in lazy] == [[1.0, 1.0, 1.0]] * 4
    with pytest.raises(TypeError):
        len(Checkpoint(staged({"s": torch.tensor(1)}), run)["s"])


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(NotFoundError, match=r"model\.layers\.0\.weight"):
        Checkpoint(staged({"model": {"layers.0.weight": torch.ones(1)}}), run)["model.layer.0.weight"]


def test_a_checkpoint_is_indexed_by_names_alone() -> None:
    checkpoint: Any = Checkpoint(staged({"t": torch.ones(2)}), run)
    with pytest.raises(UsageError, match="names, not 0"):
        checkpoint[0]
    assert 0 not in checkpoint


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_objects_are_the_state_without_its_values() -> None:
    net = torch.nn.Linear(2, 2)
    state = {"model": net.state_dict(), "p": net.weight, "step": 3, "dtype": torch.float16, "t": (1, [torch.ones(1)])}
    state["s"] = torch.eye(2).to_sparse()
    reader = staged(state)
    checkpoint = Checkpoint(reader, run)
    objects = checkpoint.objects
    assert (objects["step"], objects["dtype"], objects["t"]) == (3, torch.float16, (1, [TensorRef("t.1.0")]))
    assert objects["p"] == TensorRef("model.weight")
    assert list(objects["model"]) == ["weight", "bias"]
    assert isinstance(objects["s"], Opaque)
    assert reader.wants == []
    assert_same_state(checkpoint.state(), state)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_reads_for_names_pieces_of_files_and_deliver_puts_them_in_place(shift: int, target_dtype: torch.dtype) -> None:
    """What an exchange between ranks stands on: whoever got the bytes, wherever they lie in memory."""
    tensor = torch.randn(40, 64)
    reader = split(tensor, [[13], [20, 40]])
    entry: TensorEntry = reader.entry  # type: ignore[attr-defined]
    target = torch.zeros(30, 25, dtype=target_dtype)
    data = reader.files["shard-00000-of-00001.safetensors"]
    for read in reads_for(Fill(entry=entry, box=(range(5, 35), range(10, 60, 2)), target=target), 4 * KIB):
        moved = b"x" * shift + data[read.offset : read.offset + read.nbytes]
        deliver(read, memoryview(moved)[shift:])
    assert torch.equal(target, tensor[5:35, 10:60:2].to(target_dtype))
