"""The routing index and part records: found in O(log n), merged by columns, complete or refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_mutations import damaged
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tierstore.errors import FormatError, IncompleteError, IntegrityError, NotFoundError, UsageError, VersionError
from tierstore.format.columns import encode_columns
from tierstore.format.digest import block_digests, file_digest
from tierstore.format.dtypes import DTYPES
from tierstore.format.index import (
    Extent,
    FileEntry,
    Index,
    TensorEntry,
    build_index,
    check_coverage,
    decode_index,
    encode_index,
    merge_indexes,
)
from tierstore.format.index_codec import index_columns, index_metadata
from tierstore.format.index_table import IndexColumns
from tierstore.format.part import Part, decode_part, encode_part

BLOCK = 64
SAVE_ID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
Box = tuple[tuple[int, ...], tuple[int, ...]]


def a_file(name: str = "f", nbytes: int = 1 << 12) -> FileEntry:
    return FileEntry(name=name, nbytes=nbytes, block_digests=block_digests(bytes(nbytes), BLOCK))


def a_tensor(
    name: str, shape: tuple[int, ...], boxes: Sequence[Box], *, dtype: str = "uint8", files: Sequence[str] = ("f",)
) -> TensorEntry:
    extents = []
    for number, (offsets, sizes) in enumerate(boxes):
        nbytes = math.prod(sizes) * DTYPES[dtype].itemsize
        extents.append(Extent(file=files[number % len(files)], begin=0, end=nbytes, offsets=offsets, sizes=sizes))
    return TensorEntry(name=name, dtype=dtype, shape=shape, extents=tuple(extents))


def whole(name: str, shape: tuple[int, ...], dtype: str = "uint8", file: str = "f") -> TensorEntry:
    return a_tensor(name, shape, [((0,) * len(shape), shape)], dtype=dtype, files=[file])


def an_index() -> Index:
    tensors = [
        whole("scalar", (), "float64"),
        whole("weight", (4, 6), "bfloat16"),
        whole("wörld", (2,), "complex128"),
        whole("", (1,)),
        a_tensor("split", (8, 3), [((0, 0), (3, 3)), ((3, 0), (5, 3))], files=["f", "g"]),
        a_tensor("empty", (0, 3), []),
        whole("tied", (4, 6), "bfloat16"),
    ]
    return build_index(tensors, [a_file("f"), a_file("g", 100), a_file("nothing", 0)], BLOCK)


def test_an_index_reads_back_what_was_built(tmp_path: Path) -> None:
    index = an_index()
    data = encode_index(index, {"step": 5, "run": "r"})
    read, metadata = decode_index(data)
    assert metadata == {"step": 5, "run": "r"}
    assert list(read) == list(index)
    assert read.files() == index.files() == (a_file("f"), a_file("g", 100), a_file("nothing", 0))
    assert read.block_nbytes == BLOCK
    assert read.nbytes == (1 << 12) + 100
    assert len(read) == 7
    assert read.names() == sorted(read.names(), key=str.encode)
    assert "split" in read
    assert "spli" not in read
    assert "\ud800" not in read
    assert 3 not in read
    assert read.extent_count == 7
    assert encode_index(read, {"step": 5, "run": "r"}) == data
    (tmp_path / "index.safetensors").write_bytes(data)
    with safe_open(tmp_path / "index.safetensors", framework="np") as file:
        assert "tierstore:groups" in file.keys()  # noqa: SIM118 - a safe_open is no mapping


def test_a_tensor_is_found_with_its_extents_and_as_a_table() -> None:
    index = an_index()
    entry = index.find("split")
    assert entry.shape == index.shape("split") == (8, 3)
    assert entry.dtype == index.dtype("split") == "uint8"
    assert entry.extents[1] == Extent(file="g", begin=0, end=15, offsets=(3, 0), sizes=(5, 3))
    table = index.table("split")
    assert table.sizes.tolist() == [[3, 3], [5, 3]]
    assert [index.file_names[i] for i in table.files] == ["f", "g"]
    assert index.find("scalar").extents[0].sizes == ()
    assert index.table("scalar").offsets.shape == (1, 0)
    assert index.find("tied").extents == index.find("weight").extents


@given(pick=st.data())
def test_of_a_tensor_only_the_extents_that_meet_a_box_are_given(pick: st.DataObject) -> None:
    boxes = [((i, j), (2, 3)) for i in (0, 2, 4) for j in (0, 3)]
    index = build_index([a_tensor("t", (6, 6), boxes), whole("scalar", ())], [a_file()], BLOCK)
    begin, end = sorted(pick.draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))
    left, right = sorted(pick.draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))
    found = index.find("t", (range(begin, end), range(left, right)))
    meeting = [
        extent
        for extent, ((i, j), _) in zip(index.find("t").extents, boxes, strict=True)
        if set(range(i, i + 2)) & set(range(begin, end)) and set(range(j, j + 3)) & set(range(left, right))
    ]
    assert list(found.extents) == meeting
    assert (found.name, found.dtype, found.shape) == ("t", "uint8", (6, 6))
    assert index.find("t", (range(0, 6, 5), range(1, 2))).extents == index.find("t", (range(6), range(1, 2))).extents
    assert index.find("t", (range(6), range(6))) == index.find("t")
    assert index.find("t", (range(6),)) == index.find("t")
    assert index.find("scalar", ()) == index.find("scalar")


def test_a_file_digest_is_over_its_block_digests() -> None:
    file = an_index().file("g")
    assert file.digest == file_digest(block_digests(bytes(100), BLOCK))


def test_a_missing_tensor_or_file_suggests_the_nearest_names() -> None:
    index = an_index()
    with pytest.raises(NotFoundError, match=r"(?s)'wieght'.*'weight'"):
        index.find("wieght")
    with pytest.raises(NotFoundError, match="'h'"):
        index.file("h")
    with pytest.raises(NotFoundError, match="none at all"):
        build_index([], [], BLOCK).find("x")


def test_suggestions_stay_near_in_a_large_index() -> None:
    index = build_index([a_tensor(f"layer.{i:06d}.weight", (0,), []) for i in range(20_000)], [], BLOCK)
    with pytest.raises(NotFoundError, match=r"'layer\.012345\.weight'"):
        index.find("layer.012345.wieght")


def test_an_empty_index_is_an_index() -> None:
    read, metadata = decode_index(encode_index(build_index([], [], BLOCK)))
    assert (list(read), read.files(), metadata) == ([], (), {})
    check_coverage(read)
    assert len(merge_indexes([])) == 0


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([whole("a", (2,)), whole("a", (2,))], "twice"),
        ([whole("a", (2,), file="other")], "not listed"),
        ([whole("a\ud800", (2,))], "Unicode"),
        ([TensorEntry(name="a", dtype="int4", shape=(), extents=())], "no dtype"),
        ([TensorEntry(name="a", dtype="int8", shape=(1 << 70,), extents=())], "64 bits"),
        ([TensorEntry(name="a", dtype="int8", shape=(2,), extents=whole("a", ()).extents)], "number of axes"),
    ],
)
def test_entries_that_can_not_be_are_refused(tensors: list[TensorEntry], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build_index(tensors, [a_file()], BLOCK)


def with_columns(**changes: Any) -> bytes:
    index = an_index()
    columns = dataclasses.replace(index.columns, **changes)
    return plain(Index(columns=columns, block_nbytes=index.block_nbytes))


def plain(index: Index, metadata: dict[str, Any] | None = None) -> bytes:
    """An index as it was written before it had a head and groups: a column a tensor."""
    return encode_columns(index_columns(index), index_metadata(index, "tierstore.index", metadata or {}))


def changed(name: str, row: int, value: int) -> dict[str, Any]:
    column = getattr(an_index().columns, name).copy()
    column.flat[row] = value
    return {name: column}


COLUMNS = an_index().columns

BAD_COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "name starts not from 0": (changed("name_starts", 0, 1), "name_starts"),
    "name starts going back": (changed("name_starts", 3, 1), "name_starts"),
    "name starts beyond": (changed("name_starts", -1, 1000), "name_starts"),
    "shape starts negative": (changed("shape_starts", 1, -5), "shape_starts"),
    "extent starts going back": (changed("extent_starts", 2, 1 << 40), "extent_starts"),
    "box starts off by one": (changed("box_starts", 2, 0), "places don't fit|box_starts"),
    "no rows": ({"name_starts": np.zeros(0, np.int64)}, "name_starts"),
    "dtype code": (changed("dtype_codes", 0, 9), "not in the table"),
    "dtype itemsize": ({"dtypes": tuple((n, s + 1) for n, s in COLUMNS.dtypes)}, "no dtype"),
    "dtype name": ({"dtypes": (("Ünknown", 1), *COLUMNS.dtypes[1:])}, "no dtype"),
    "dtype twice": ({"dtypes": COLUMNS.dtypes + COLUMNS.dtypes[:1]}, "twice"),
    "negative shape": (changed("shapes", 0, -1), "absurd shape"),
    "absurd shape": (changed("shapes", 0, 1 << 62), "absurd"),
    "absurd volume": ({"shapes": np.full_like(COLUMNS.shapes, 1 << 40)}, "absurd size"),
    "file number": (changed("files", 0, 3), "not listed"),
    "begin negative": (changed("begins", 0, -1), "outside its file"),
    "end beyond file": (changed("ends", 0, 1 << 13), "outside its file"),
    "end before begin": (changed("begins", 0, 1 << 11), "byte range"),
    "length": (changed("ends", 0, 2), "byte range"),
    "offset negative": (changed("offsets", 0, -1), "outside its tensor"),
    "offset beyond": (changed("offsets", 0, 1), "outside its tensor"),
    "offset overflow": (changed("offsets", 0, (1 << 63) - 1), "outside its tensor"),
    "size beyond": (changed("sizes", 0, 2), "outside its tensor"),
    "size negative": (changed("sizes", 0, -(1 << 62)), "outside its tensor"),
    "fewer ends": ({"ends": COLUMNS.ends[:-1]}, "'ends' has 6 rows"),
    "fewer sizes": ({"sizes": COLUMNS.sizes[:-1]}, "differ in length"),
    "file size negative": (changed("file_nbytes", 0, -1), "absurd size"),
    "file size without blocks": (changed("file_nbytes", 1, 1000), "number of blocks"),
    "fewer file sizes": ({"file_nbytes": COLUMNS.file_nbytes[:-1]}, "file_nbytes"),
    "fewer digests": ({"digests": COLUMNS.digests[:-1]}, "block_starts"),
    "file leaves its folder": ({"file_names": ("../f", "g", "h")}, "unsafe file name"),
    "file absolute": ({"file_names": ("/f", "g", "h")}, "unsafe file name"),
    "file control": ({"file_names": ("f\n", "g", "h")}, "unsafe file name"),
    "file dots": ({"file_names": ("..", "g", "h")}, "unsafe file name"),
    "file twice": ({"file_names": ("f", "g", "f")}, "twice"),
}


@pytest.mark.parametrize("case", sorted(BAD_COLUMNS))
def test_an_inconsistent_index_is_refused_with_the_problem_named(case: str) -> None:
    changes, says = BAD_COLUMNS[case]
    with pytest.raises(FormatError, match=says):
        decode_index(with_columns(**changes))


def test_a_name_cut_inside_a_character_is_refused() -> None:
    blob = COLUMNS.names.tobytes()
    starts = COLUMNS.name_starts.copy()
    row = int(np.searchsorted(starts, blob.index("ö".encode()), side="right"))
    starts[row - 1] = blob.index("ö".encode()) + 1
    with pytest.raises(FormatError, match="inside a character"):
        decode_index(with_columns(name_starts=starts))


def test_names_out_of_order_are_found_out_before_a_tensor_is_declared_missing() -> None:
    names = COLUMNS.names.copy()
    names[0] = ord("z")
    index, _ = decode_index(with_columns(names=names))
    with pytest.raises(FormatError, match="out of order"):
        index.find("nope")
    with pytest.raises(FormatError, match="out of order"):
        check_coverage(index)
    with pytest.raises(FormatError, match="out of order"):
        index.names()


def test_a_dtype_of_a_newer_minor_version_is_listed_though_unknown() -> None:
    code = COLUMNS.dtypes.index(("uint8", 1))
    dtypes = tuple(("float9_new", 1) if i == code else entry for i, entry in enumerate(COLUMNS.dtypes))
    index, _ = decode_index(with_columns(dtypes=dtypes))
    assert index.find("split").dtype == "float9_new"


def test_a_newer_major_version_is_refused_by_name_and_a_newer_minor_one_read() -> None:
    data = encode_index(an_index())
    with pytest.raises(VersionError, match=r"2\.0"):
        decode_index(data.replace(b'format_version\\":\\"1.0', b'format_version\\":\\"2.0'))
    assert len(decode_index(data.replace(b'format_version\\":\\"1.0', b'format_version\\":\\"1.7'))[0]) == 7
    with pytest.raises(FormatError, match="something else"):
        decode_index(data.replace(b"tierstore.index", b"tierstore.indey"))


# Coverage


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((), [((), ())]),
        ((0, 3), []),
        ((0, 3), [((0, 0), (0, 3))]),
        ((4,), [((2,), (2,)), ((0,), (2,))]),
        ((4,), [((0,), (4,)), ((4,), (0,)), ((0,), (0,))]),
        ((4, 4), [((0, 0), (4, 2)), ((0, 2), (4, 2))]),
        ((4, 6), [((i, j), (2, 3)) for i in (0, 2) for j in (0, 3)]),
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]),  # a pinwheel: no cut
        ((4, 4), [((0, 0), (4, 1)), ((0, 1), (2, 3)), ((2, 1), (2, 2)), ((2, 3), (2, 1))]),
    ],
)
def test_an_exact_cover_is_accepted(shape: tuple[int, ...], boxes: list[Box]) -> None:
    for order in itertools.islice(itertools.permutations(boxes), 24):
        check_coverage(build_index([a_tensor("t", shape, order)], [a_file()], BLOCK))


@pytest.mark.parametrize(
    ("shape", "boxes", "says"),
    [
        ((), [], "no file holds"),
        ((4,), [], r"\(4,\) elements at \(0,\)"),
        ((4,), [((0,), (3,))], r"\(1,\) elements at \(3,\)"),
        ((6,), [((0,), (2,)), ((4,), (2,))], r"\(2,\) elements at \(2,\)"),
        ((4, 4), [((0, 0), (4, 2)), ((2, 2), (2, 2))], r"\(2, 2\) elements at \(0, 2\)"),
        ((), [((), ()), ((), ())], "overlaps"),
        ((4,), [((0,), (4,)), ((0,), (4,))], "overlaps"),
        ((4,), [((0,), (3,)), ((2,), (2,))], "overlaps"),
        ((4,), [((0,), (2,)), ((0,), (2,))], "overlaps"),
        ((4, 4), [((0, 0), (3, 3)), ((1, 1), (3, 3))], "overlaps"),
        ((4, 4), [((0, 0), (2, 4)), ((0, 0), (2, 4))], "overlaps"),
        ((1, 4), [((0, 0), (1, 3)), ((0, 1), (1, 1))], "overlaps"),
    ],
)
def test_a_hole_or_an_overlap_is_named(shape: tuple[int, ...], boxes: list[Box], says: str) -> None:
    for order in itertools.permutations(boxes):
        index = build_index(
            [whole("a", (3,)), a_tensor("t", shape, order, files=["f", "g"]), whole("z", ())], [a_file(), a_file("g")], BLOCK
        )
        with pytest.raises(IncompleteError, match=says) as caught:
            check_coverage(index)
        assert "'t'" in str(caught.value)
        if says == "overlaps":
            assert set(caught.value.context["files"]) <= {"f", "g"}


def test_sums_that_wrap_around_do_not_pass_for_a_cover() -> None:
    # Four chunks of 2**60 elements each claim 2**62 elements of a tensor that has 2**60.
    n = 1 << 60
    columns = build_index([a_tensor("t", (4,), [((0,), (4,))] * 4)], [a_file()], BLOCK).columns
    big = dataclasses.replace(
        columns,
        shapes=np.array([n], np.int64),
        sizes=np.full(4, n, np.int64),
        ends=np.full(4, n, np.int64),
        file_nbytes=np.array([n], np.int64),
        block_starts=np.array([0, 1], np.int64),
        digests=np.zeros((1, 32), np.uint8),
    )
    with pytest.raises(IncompleteError, match="overlaps"):
        check_coverage(Index(columns=big, block_nbytes=BLOCK))


@st.composite
def a_tiling(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A box cut at random, recursively; not always along axes that go through."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        number = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[number]
        axis = draw(st.integers(0, len(shape) - 1))
        if sizes[axis] < 2:
            continue
        cut = draw(st.integers(1, sizes[axis] - 1))
        low, high = list(sizes), list(sizes)
        low[axis], high[axis] = cut, sizes[axis] - cut
        at = list(offsets)
        at[axis] += cut
        boxes[number : number + 1] = [(offsets, tuple(low)), (tuple(at), tuple(high))]
    return shape, draw(st.permutations(boxes))


@given(tiling=a_tiling(), pick=st.data())
def test_coverage_agrees_with_counting_elements(tiling: tuple[tuple[int, ...], list[Box]], pick: st.DataObject) -> None:
    shape, boxes = tiling
    if pick.draw(st.booleans()):
        number = pick.draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[number]
        axis = pick.draw(st.integers(0, len(shape) - 1))
        move = list(offsets)
        move[axis] = pick.draw(st.integers(0, shape[axis] - sizes[axis]))
        boxes = [*boxes[:number], (tuple(move), sizes), *boxes[number + 1 :]]
    count = np.zeros(shape, int)
    for offsets, sizes in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    index = build_index([a_tensor("t", shape, boxes), whole("u", (2, 2))], [a_file()], BLOCK)
    if (count == 1).all():
        check_coverage(index)
        return
    with pytest.raises(IncompleteError) as caught:
        check_coverage(index)
    if "offsets" in caught.value.context:
        hole = tuple(slice(o, o + n) for o, n in zip(caught.value.context["offsets"], caught.value.context["sizes"], strict=True))
        assert (count[hole] == 0).all()
        assert count[hole].size
    else:
        assert (count > 1).any()


# Merging


def rank_index(
    rank: int, *, dtype: str = "uint8", shape: tuple[int, ...] = (4, 3), extra: Sequence[TensorEntry] = (), file: str = ""
) -> Index:
    name = file or f"shard-{rank}"
    box = ((rank, 0), (1, 3))
    return build_index([a_tensor("t", shape, [box], dtype=dtype, files=[name]), *extra], [a_file(name)], BLOCK)


def test_merging_unites_files_and_extents_in_the_order_of_the_ranks() -> None:
    extra = [whole("only.2", (5,), "float16", "shard-2"), a_tensor("no.extents", (0, 2), [])]
    merged = merge_indexes([rank_index(0), rank_index(1), rank_index(2, extra=extra), rank_index(3)])
    check_coverage(merged)
    assert merged.names() == ["no.extents", "only.2", "t"]
    assert [e.file for e in merged.find("t").extents] == [f"shard-{r}" for r in range(4)]
    assert [e.offsets for e in merged.find("t").extents] == [(r, 0) for r in range(4)]
    assert merged.find("only.2") == extra[0]
    assert merged.file("shard-3") == a_file("shard-3")
    assert decode_index(encode_index(merged))[0].find("t") == merged.find("t")


def test_merging_one_index_changes_nothing() -> None:
    index = an_index()
    assert encode_index(merge_indexes([index])) == encode_index(index)


def test_ranks_that_disagree_are_named_with_the_tensor() -> None:
    with pytest.raises(IncompleteError, match=r"'t': rank 0 says uint8 \(4, 3\), rank 2 says int8 \(4, 3\)"):
        merge_indexes([rank_index(0), rank_index(1), rank_index(2, dtype="int8")])
    with pytest.raises(IncompleteError, match=r"'t': a says uint8 \(4, 3\), b says uint8 \(5, 3\)"):
        merge_indexes([rank_index(0), rank_index(1, shape=(5, 3))], labels=["a", "b"])
    three = build_index([a_tensor("t", (4, 3, 1), [((0, 0, 0), (4, 3, 1))])], [a_file()], BLOCK)
    with pytest.raises(IncompleteError, match=r"uint8 \(4, 3\), rank 1 says uint8 \(4, 3, 1\)"):
        merge_indexes([rank_index(0), three])


def test_a_file_that_two_ranks_list_is_refused() -> None:
    with pytest.raises(IncompleteError, match="rank 1 and rank 2 both list the file 'shard-1'"):
        merge_indexes([rank_index(0), rank_index(1), rank_index(2, file="shard-1")])


def test_different_block_sizes_do_not_merge() -> None:
    other = build_index([], [], BLOCK * 2)
    with pytest.raises(UsageError, match="block sizes"):
        merge_indexes([rank_index(0), other])


def test_missing_and_doubled_ranks_are_found_by_coverage() -> None:
    with pytest.raises(IncompleteError, match=r"\(1, 3\) elements at \(2, 0\)"):
        check_coverage(merge_indexes([rank_index(0), rank_index(1), rank_index(3)]))
    with pytest.raises(IncompleteError, match="overlaps"):
        check_coverage(merge_indexes([*(rank_index(r) for r in range(4)), rank_index(2, file="again")]))


def test_two_thousand_ranks_with_two_hundred_tensors_merge_and_cover() -> None:
    ranks, tensors = 2000, 200
    digest = bytes(32)
    parts = []
    for rank in range(ranks):
        name = f"shard-{rank:05d}"
        entries = [
            TensorEntry(
                name=f"layers.{i}",
                dtype="bfloat16",
                shape=(ranks, 8),
                extents=(Extent(file=name, begin=16 * i, end=16 * i + 16, offsets=(rank, 0), sizes=(1, 8)),),
            )
            for i in range(tensors)
        ]
        parts.append(build_index(entries, [FileEntry(name=name, nbytes=16 * tensors, block_digests=digest)]))
    merged = merge_indexes(parts)
    check_coverage(merged)
    assert merged.extent_count == ranks * tensors
    assert len(merged.find("layers.7").extents) == ranks


# Part records


def a_part() -> Part:
    return Part(
        run="team/llama",
        step=12,
        save_id=SAVE_ID,
        rank=1,
        world_size=4,
        index=an_index(),
        objects=b'{"format":"x"}',
        facts={"metrics": {"loss": math.nan, "best": math.inf}, "tags": ["a"], "final": False},
    )


def test_a_part_record_reads_back(tmp_path: Path) -> None:
    part = a_part()
    data = encode_part(part)
    read = decode_part(data)
    assert list(read.index) == list(part.index)
    assert read.index.files() == part.index.files()
    assert (read.run, read.step, read.save_id, read.rank, read.world_size, read.objects) == ("team/llama", 12, SAVE_ID, 1, 4, part.objects)
    assert math.isnan(read.facts["metrics"]["loss"])
    assert read.facts["metrics"]["best"] == math.inf
    (tmp_path / "p.safetensors").write_bytes(data)
    with safe_open(tmp_path / "p.safetensors", framework="pt") as file:
        assert bytes(file.get_tensor("tierstore:objects").numpy()) == part.objects


def test_an_index_is_no_part_record_and_the_other_way_round() -> None:
    with pytest.raises(FormatError, match="something else"):
        decode_index(encode_part(a_part()))
    with pytest.raises(FormatError, match="'objects' is missing"):
        decode_part(plain(an_index()))
    with pytest.raises(FormatError, match="'names' is missing"):
        decode_part(encode_index(an_index()))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rank": 4}, "'rank'"),
        ({"run": "../x"}, "'run'"),
        ({"save_id": "nope"}, "'save_id'"),
        ({"step": -1}, "'step'"),
        ({"world_size": 0}, "'world_size'"),
    ],
)
def test_a_part_record_with_absurd_fields_is_refused(change: dict[str, Any], says: str) -> None:
    own = {"run": "r", "step": 1, "save_id": SAVE_ID, "rank": 0, "world_size": 1, "facts": {}} | change
    index = an_index()
    columns = {**index_columns(index), "objects": np.zeros(0, np.uint8)}
    with pytest.raises(FormatError, match=says):
        decode_part(encode_columns(columns, index_metadata(index, "tierstore.part", own)))


def test_a_part_record_that_can_not_be_is_not_written() -> None:
    with pytest.raises(UsageError, match="rank 4 of 4"):
        encode_part(dataclasses.replace(a_part(), rank=4))
    with pytest.raises(UsageError, match=r"facts.metrics: a set"):
        encode_part(dataclasses.replace(a_part(), facts={"metrics": {1}}))


# Damage

INDEX_FILE = encode_index(an_index())
PART_FILE = encode_part(a_part())
HEADER = 4096


def use(index: Index) -> None:
    """What a reader does; on a damaged index each step may raise an IntegrityError, and nothing else."""
    list(index)
    for name in index.names():
        index.table(name)
    index.files()
    check_coverage(index)
    merge_indexes([index])
    encode_index(index)


@given(data=damaged(INDEX_FILE, head=2600) | damaged(INDEX_FILE))
def test_a_damaged_index_is_answered_with_an_integrity_error_only(data: bytes) -> None:
    try:
        use(decode_index(data)[0])
    except IntegrityError:
        pass


@given(data=damaged(PART_FILE, head=2600) | damaged(PART_FILE))
def test_a_damaged_part_record_is_answered_with_an_integrity_error_only(data: bytes) -> None:
    try:
        part = decode_part(data)
        use(part.index)
        encode_part(part)
    except IntegrityError:
        pass


@given(pick=st.data())
def test_any_numbers_in_any_column_are_answered_with_an_integrity_error_only(pick: st.DataObject) -> None:
    fields = [f.name for f in dataclasses.fields(IndexColumns) if f.name not in ("dtypes", "file_names", "digests")]
    changes: dict[str, Any] = {}
    for name in pick.draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3, unique=True)):
        column = getattr(COLUMNS, name).copy()
        info = np.iinfo(column.dtype)
        numbers = st.integers(int(info.min), int(info.max)) | st.integers(max(-3, int(info.min)), 40)
        for _ in range(pick.draw(st.integers(1, 3))):
            if column.size:
                column[pick.draw(st.integers(0, column.size - 1))] = pick.draw(numbers)
        if pick.draw(st.integers(0, 9)) == 0:
            column = column[: pick.draw(st.integers(0, column.size))]
        changes[name] = column
    try:
        use(decode_index(with_columns(**changes))[0])
    except IntegrityError:
        pass
