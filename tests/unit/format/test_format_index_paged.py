"""An index that is read by its head and by groups of rows answers as one that is in memory, or refuses what was damaged."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from format_mutations import damaged
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import FormatError, IntegrityError, NotFoundError, VersionError
from tierstore.format.columns import encode_columns
from tierstore.format.digest import block_digests
from tierstore.format.header import parse_header
from tierstore.format.index import (
    Extent,
    FileEntry,
    Index,
    IndexHead,
    PagedIndex,
    RoutingIndex,
    TensorEntry,
    build_index,
    decode_head,
    decode_index,
    encode_index,
    head_nbytes,
)
from tierstore.format.index_codec import index_columns, index_metadata
from tierstore.format.index_groups import decode_group

BLOCK = 64
FILES = [FileEntry(name=n, nbytes=size, block_digests=block_digests(bytes(size), BLOCK)) for n, size in (("f", 4096), ("g", 100), ("h", 0))]


def tensors(names: Sequence[str], *, extents: int = 2) -> list[TensorEntry]:
    return [
        TensorEntry(
            name=name,
            dtype="uint8" if number % 3 else "bfloat16",
            shape=(extents, 3),
            extents=tuple(
                Extent(file="fg"[e % 2], begin=number % 50, end=number % 50 + (3 if number % 3 else 6), offsets=(e, 0), sizes=(1, 3))
                for e in range(extents)
            ),
        )
        for number, name in enumerate(names)
    ]


def an_index(count: int = 40) -> Index:
    names = [f"layer.{i:03d}.weight" for i in range(count)]
    scalar = TensorEntry(name="scalar", dtype="float64", shape=(), extents=(Extent(file="f", begin=8, end=16, offsets=(), sizes=()),))
    empty = TensorEntry(name="émpty", dtype="uint8", shape=(0, 3), extents=())
    return build_index([*tensors(names), scalar, empty], FILES, BLOCK)


class Counted:
    """Reads groups and digests out of an encoded index, and notes what was asked for."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.head: IndexHead = decode_head(data[: head_nbytes(data)], len(data))
        self.asked: list[list[int]] = []

    def fetch(self, numbers: Sequence[int]) -> list[bytes]:
        self.asked.append(list(numbers))
        return [self.data[slice(*self.head.groups.extent(number))] for number in numbers]

    def digests(self, number: int) -> bytes:
        return self.data[slice(*self.head.digests_extent(number))]

    def open(self, **options: Any) -> PagedIndex:
        return PagedIndex(self.head, self.fetch, self.digests, **options)


def same(one: RoutingIndex, two: RoutingIndex) -> None:
    assert one.names() == two.names()
    assert list(one) == list(two)
    assert (len(one), one.extent_count, one.nbytes, one.block_nbytes) == (len(two), two.extent_count, two.nbytes, two.block_nbytes)
    assert one.file_names == two.file_names
    assert one.files() == two.files()
    for name in two.names():
        assert name in one
        assert one.find(name) == two.find(name)
        assert (one.shape(name), one.dtype(name)) == (two.shape(name), two.dtype(name))
        assert np.array_equal(one.table(name).offsets, two.table(name).offsets)
        assert one.table(name).files.tolist() == two.table(name).files.tolist()
    for file in two.file_names:
        assert one.file(file) == two.file(file)
        assert one.file_nbytes(file) == two.file(file).nbytes


@pytest.mark.parametrize("group_nbytes", [1, 300, 1000, 1 << 20])
def test_a_paged_index_answers_as_the_whole_one(group_nbytes: int) -> None:
    index = an_index()
    data = encode_index(index, {"step": 3}, group_nbytes=group_nbytes)
    whole, metadata = decode_index(data)
    same(whole, index)
    assert metadata == {"step": 3}
    source = Counted(data)
    assert source.head.metadata == {"step": 3}
    assert (len(source.head.groups) == 1) == (group_nbytes == 1 << 20)
    same(source.open(), index)


@given(
    names=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), unique=True, max_size=30),
    extents=st.integers(1, 5),
    group_nbytes=st.integers(1, 900),
)
def test_any_names_in_any_grouping_are_found(names: list[str], extents: int, group_nbytes: int) -> None:
    index = build_index(tensors(names, extents=extents), FILES, BLOCK)
    data = encode_index(index, group_nbytes=group_nbytes)
    same(decode_index(data)[0], index)
    same(Counted(data).open(), index)


def test_one_tensor_costs_one_group_and_the_second_of_that_group_nothing() -> None:
    source = Counted(encode_index(an_index(), group_nbytes=800))
    index = source.open()
    index.find("layer.020.weight")
    index.shape("layer.020.weight")
    assert len(source.asked) == 1
    assert len(source.asked[0]) == 1
    assert len(source.head.groups) > 5
    with pytest.raises(NotFoundError):
        index.find("a")  # before all names: nothing to read
    assert len(source.asked) == 1


def test_what_is_announced_is_fetched_together_and_what_is_kept_is_bounded() -> None:
    index = an_index(200)
    source = Counted(encode_index(index, group_nbytes=800))
    paged = source.open()
    paged.prepare(index.names())
    assert source.asked == []
    for name in index.names():
        assert paged.find(name) == index.find(name)
    assert source.asked == [list(range(len(source.head.groups)))]

    source.asked.clear()
    limit = 8000
    small = source.open(cache_nbytes=limit)
    small.prepare(index.names())
    for name in index.names():
        assert small.find(name) == index.find(name)
    assert sorted(n for asked in source.asked for n in asked) == list(range(len(source.head.groups))), "each group is fetched once"
    assert len(source.asked) <= 2 + sum(map(source.head.groups.nbytes, range(len(source.head.groups)))) // (limit // 2 - 1000)
    assert sum(map(source.head.groups.nbytes, small._groups)) <= limit


def test_a_missing_tensor_or_file_suggests_the_nearest_names() -> None:
    index = Counted(encode_index(an_index(), group_nbytes=800)).open()
    with pytest.raises(NotFoundError, match=r"(?s)'layer\.020\.wieght'.*'layer\.020\.weight'"):
        index.find("layer.020.wieght")
    with pytest.raises(NotFoundError, match="'x'"):
        index.file("x")
    assert "layer.020" not in index
    assert "\ud800" not in index
    assert 3 not in index
    nothing = Counted(encode_index(build_index([], [], BLOCK))).open()
    assert (len(nothing), list(nothing), nothing.names()) == (0, [], [])
    with pytest.raises(NotFoundError, match="none at all"):
        nothing.find("x")


def test_an_index_of_before_the_groups_has_no_head() -> None:
    index = an_index()
    data = encode_columns(index_columns(index), index_metadata(index, "tierstore.index", {}))
    assert head_nbytes(data) is None
    same(decode_index(data)[0], index)


def test_the_digests_in_the_head_are_those_of_the_groups() -> None:
    data = encode_index(an_index(), group_nbytes=800)
    groups = Counted(data).head.groups
    for number in range(len(groups)):
        begin, end = groups.extent(number)
        assert begin % 8 == 0
        assert groups.digest(number) == "sha256:" + hashlib.sha256(data[begin:end]).hexdigest()


# What may be wrong in a head whose digest is right, or in one that nobody proved


def head_with(change: Any) -> bytes:
    """The file with one of the head's columns changed in place."""
    data = bytearray(DATA)
    for name, at, value in change:
        header = COLUMN_AT[name]
        data[header + 8 * at : header + 8 * at + 8] = int(value).to_bytes(8, "little", signed=True)
    return bytes(data)


DATA = encode_index(an_index(), group_nbytes=800)


def _columns() -> dict[str, int]:
    return {name.removeprefix("tierstore:"): place.begin for name, place in parse_header(DATA, len(DATA)).tensors.items()}


COLUMN_AT = _columns()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ([("group_starts", 0, 1)], "does not cut"),
        ([("group_starts", 6, 0)], "another length"),
        ([("group_starts", 6, -5)], "does not cut"),
        ([("group_starts", 9, 1 << 61)], "does not cut"),
        ([("group_starts", 11, 8)], "another length"),
        ([("group_name_starts", 1, 1 << 40)], "does not cut the names"),
        ([("group_name_starts", 2, 16)], "out of order"),
        ([("file_nbytes", 0, 1 << 30)], "number of blocks"),
        ([("block_starts", 1, 1 << 50)], "block_starts"),
        ([("file_name_starts", 1, 0)], "unsafe|empty|twice"),
    ],
)
def test_a_head_that_contradicts_itself_is_refused(change: Any, says: str) -> None:
    data = head_with(change)
    for read in (lambda: decode_head(data[: head_nbytes(data)], len(data)), lambda: decode_index(data)):
        with pytest.raises(FormatError, match=says):
            read()


def test_a_head_that_is_cut_off_is_refused() -> None:
    end = head_nbytes(DATA)
    assert end is not None
    for cut in (0, 7, 8, 4000, 4096, end - 200):
        with pytest.raises(FormatError):
            decode_head(DATA[:cut], len(DATA))
    with pytest.raises(FormatError):
        decode_head(DATA[:end], len(DATA) - 32)


def test_a_newer_major_version_is_refused_by_name() -> None:
    newer = DATA.replace(b'format_version\\":\\"1.0', b'format_version\\":\\"2.0')
    with pytest.raises(VersionError, match=r"2\.0"):
        decode_head(newer[: head_nbytes(newer)], len(newer))


def test_a_group_of_another_length_or_name_is_refused() -> None:
    head = Counted(DATA).head
    begin, end = head.groups.extent(1)
    group = DATA[begin:end]
    with pytest.raises(FormatError, match="bytes, not"):
        decode_group(head.groups, 1, group + bytes(8), files=head.files, block_nbytes=BLOCK)
    with pytest.raises(FormatError, match="another name"):
        decode_group(head.groups, 1, group.replace(b"layer", b"layex"), files=head.files, block_nbytes=BLOCK)
    swapped = dataclasses.replace(head.groups, first_names=head.groups.first_names[1:] + head.groups.first_names[:1])
    with pytest.raises(FormatError, match="another name"):
        decode_group(swapped, 1, group, files=head.files, block_nbytes=BLOCK)


def use(source: Counted) -> None:
    index = source.open()
    index.prepare(["layer.007.weight", "scalar"])
    for name in ("layer.007.weight", "scalar", "nothing"):
        if name in index:
            index.find(name)
            index.table(name)
    list(index)
    index.names()
    index.files()


@given(data=damaged(DATA, head=head_nbytes(DATA)) | damaged(DATA))
def test_a_damaged_paged_index_is_answered_with_an_integrity_error_only(data: bytes) -> None:
    try:
        use(Counted(data))
    except IntegrityError:
        pass


@given(pick=st.data())
def test_any_numbers_in_the_head_are_answered_with_an_integrity_error_only(pick: st.DataObject) -> None:
    columns = {"group_starts": 6 * 3, "group_name_starts": 4, "file_nbytes": 3, "block_starts": 4, "file_name_starts": 4}
    names = st.sampled_from(sorted(columns))
    numbers = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 5000)
    change = [
        (name, pick.draw(st.integers(0, columns[name] - 1)), pick.draw(numbers))
        for name in pick.draw(st.lists(names, min_size=1, max_size=3))
    ]
    try:
        use(Counted(head_with(change)))
    except IntegrityError:
        pass
    try:
        decode_index(head_with(change))
    except IntegrityError:
        pass


@given(pick=st.data())
def test_a_group_of_any_bytes_is_answered_with_an_integrity_error_only(pick: st.DataObject) -> None:
    head = Counted(DATA).head
    number = pick.draw(st.integers(0, len(head.groups) - 1))
    group = bytearray(DATA[slice(*head.groups.extent(number))])
    for _ in range(pick.draw(st.integers(1, 4))):
        at = pick.draw(st.integers(0, len(group) // 8 - 1))
        value = pick.draw(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 5000))
        group[8 * at : 8 * at + 8] = value.to_bytes(8, "little", signed=True)
    try:
        index = decode_group(head.groups, number, bytes(group), files=head.files, block_nbytes=BLOCK)
        list(index)
        index.names()
    except IntegrityError:
        pass
