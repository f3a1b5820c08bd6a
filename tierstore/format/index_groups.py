"""The routing index on disk: a head, then the tensors' rows in groups, then the block digests; see docs/design/format.md.

A reader takes the head alone (what the files are, each group's first name and SHA-256) and then only the groups of the tensors that it
wants. A group is a small index in itself: its columns lie one after the other, and their ``*_starts`` begin with 0.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np

from tierstore.errors import FormatError
from tierstore.format.columns import Array
from tierstore.format.digest import DIGEST_NBYTES, Buffer
from tierstore.format.index_check import check_rows
from tierstore.format.index_table import Bytes, Index, IndexColumns, Ints

__all__ = [
    "GROUP_NBYTES",
    "HEAD_LAYOUT",
    "Groups",
    "cut_names",
    "decode_group",
    "gather_groups",
    "group_names",
    "grouped_columns",
    "groups_from_columns",
]

GROUP_NBYTES = 64 << 10
"""How long a group is, in bytes, unless one tensor's rows are longer."""

HEAD_LAYOUT: Mapping[str, tuple[str, int]] = {
    "file_name_starts": ("I64", 0),
    "file_nbytes": ("I64", 0),
    "block_starts": ("I64", 0),
    "group_starts": ("I64", 6),
    "group_name_starts": ("I64", 0),
    "file_names": ("U8", 0),
    "group_names": ("U8", 0),
    "group_digests": ("U8", DIGEST_NBYTES),
}
"""The head's columns: safetensors dtype, and the row length of two-dimensional ones."""

_HINT = "the index is foreign or damaged: run `tierstore verify`"
_ROWS, _NAMES, _SHAPES, _EXTENTS, _BOXES, _BYTES = range(6)

# What a group consists of, in this order: column, item type, and how many items it has: (of which count, and how many more).
_COLUMNS: tuple[tuple[str, str, int, int], ...] = (
    ("name_starts", "<i8", _ROWS, 1),
    ("shape_starts", "<i8", _ROWS, 1),
    ("extent_starts", "<i8", _ROWS, 1),
    ("box_starts", "<i8", _ROWS, 1),
    ("shapes", "<i8", _SHAPES, 0),
    ("begins", "<i8", _EXTENTS, 0),
    ("ends", "<i8", _EXTENTS, 0),
    ("offsets", "<i8", _BOXES, 0),
    ("sizes", "<i8", _BOXES, 0),
    ("files", "<u4", _EXTENTS, 0),
    ("dtype_codes", "<u2", _ROWS, 0),
    ("names", "|u1", _NAMES, 0),
)
_STARTS = {"name_starts": _NAMES, "shape_starts": _SHAPES, "extent_starts": _EXTENTS, "box_starts": _BOXES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Where the groups are, and what is in them; g groups.

    Attributes:
        starts: (g + 1, 6): each group's first row, byte of the names, number of the shapes, extent, number of the boxes, and byte of the
            column ``groups``; the last row holds the totals.
        first_names: Each group's first tensor name, sorted.
        digests: SHA-256 of each group's bytes, (g, 32).
        begin: The first group's byte in the file.
    """

    starts: Ints
    first_names: tuple[bytes, ...]
    digests: Bytes
    begin: int = 0

    def __len__(self) -> int:
        return len(self.first_names)

    def number_of(self, name: bytes) -> int | None:
        """The only group that may hold the tensor called `name`."""
        number = bisect.bisect_right(self.first_names, name) - 1
        return number if number >= 0 else None

    def extent(self, number: int) -> tuple[int, int]:
        """A group's bytes in the file, half-open."""
        return self.begin + int(self.starts[number, _BYTES]), self.begin + int(self.starts[number + 1, _BYTES])

    def nbytes(self, number: int) -> int:
        begin, end = self.extent(number)
        return end - begin

    def digest(self, number: int) -> str:
        """What a group's bytes hash to, ``sha256:<hex>``."""
        return f"sha256:{self.digests[number].tobytes().hex()}"

    @property
    def rows(self) -> int:
        return int(self.starts[-1, _ROWS])

    @property
    def extents(self) -> int:
        return int(self.starts[-1, _EXTENTS])


def grouped_columns(index: Index, group_nbytes: int = GROUP_NBYTES) -> tuple[dict[str, Array], dict[str, Array]]:
    """The head's columns but those of the files, and the column ``groups``."""
    c = index.columns
    totals = np.stack([np.arange(len(index) + 1), c.name_starts, c.shape_starts, c.extent_starts, c.box_starts], axis=1)
    counts = np.diff(totals, axis=0)
    weights = sum(np.dtype(kind).itemsize * counts[:, which] for _, kind, which, _ in _COLUMNS) + 32 * np.ones(len(index), np.int64)
    before = np.cumsum(weights) - weights
    first = np.flatnonzero(np.diff(before // group_nbytes, prepend=-1))
    edges = np.append(first, len(index))
    starts = np.zeros((len(edges), 6), np.int64)
    starts[:, :5] = totals[edges]
    starts[1:, _BYTES] = np.cumsum(_group_lengths(np.diff(starts, axis=0)))
    groups: Bytes = np.zeros(int(starts[-1, _BYTES]), np.uint8)
    digests = bytearray()
    for number in range(len(first)):
        group = groups[starts[number, _BYTES] : starts[number + 1, _BYTES]]
        _encode_group(c, starts[number], starts[number + 1], group)
        digests += hashlib.sha256(group.data).digest()
    names = [index.raw_name(row) for row in first.tolist()]
    head: dict[str, Array] = {
        "group_starts": starts,
        "group_names": np.frombuffer(b"".join(names), np.uint8),
        "group_name_starts": np.cumsum([0, *map(len, names)], dtype=np.int64),
        "group_digests": np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_NBYTES),
    }
    return head, {"groups": groups}


def _group_lengths(counts: Ints) -> Ints:
    """How many bytes groups have, from how much of everything is in them (a row each)."""
    lengths: Ints = np.zeros(len(counts), np.int64)
    for _, kind, which, more in _COLUMNS:
        lengths += np.dtype(kind).itemsize * (counts[:, which] + more)
    return -(-lengths // 8) * 8


def _encode_group(c: IndexColumns, low: Ints, high: Ints, group: Bytes) -> None:
    """Writes the rows from `low` to `high` into `group`, which is all zeros."""
    at = 0
    for name, kind, which, more in _COLUMNS:
        part = getattr(c, name)[int(low[which]) : int(high[which]) + more]
        place = group[at : at + len(part) * np.dtype(kind).itemsize].view(kind)
        place[:] = part - low[_STARTS[name]] if name in _STARTS else part
        at += place.nbytes


def groups_from_columns(columns: Mapping[str, Array], begin: int, nbytes: int) -> Groups:
    """Checks the head's columns on the groups, and makes them.

    Args:
        columns: The head's columns.
        begin: The column ``groups``' byte in the file.
        nbytes: Its length.

    Raises:
        FormatError: They contradict each other or that length.
    """
    starts = cast(Ints, columns["group_starts"])
    names = cut_names(columns["group_names"], cast(Ints, columns["group_name_starts"]), "group_name_starts")
    digests = cast(Bytes, columns["group_digests"])
    if not len(starts) == len(names) + 1 == len(digests) + 1:
        raise FormatError("index: the columns 'group_starts', 'group_names' and 'group_digests' differ in length", hint=_HINT)
    counts = np.diff(starts, axis=0)
    # Bounded first: the sums below can't wrap around then, and nothing absurd is allocated.
    absurd = bool((starts < 0).any()) or bool((starts > nbytes).any())
    if absurd or bool(starts[0].any()) or bool((counts < 0).any()) or starts[-1, _BYTES] != nbytes:
        raise FormatError(f"index: the column 'group_starts' does not cut {nbytes} bytes of groups", hint=_HINT)
    if bool((counts[:, _ROWS] == 0).any()) or bool((_group_lengths(counts) != counts[:, _BYTES]).any()):
        raise FormatError("index: the column 'group_starts' gives a group another length than its rows have", hint=_HINT)
    if any(one >= two for one, two in pairwise(names)):
        raise FormatError("index: the groups' first names are out of order", hint=_HINT)
    return Groups(starts=starts, first_names=names, digests=digests, begin=begin)


def group_names(groups: Groups) -> list[str]:
    """The first names as text, for suggestions; what is no UTF-8 is left out."""
    return [text for name in groups.first_names if "�" not in (text := name.decode("utf-8", "replace"))]


def cut_names(blob: Array, starts: Ints, what: str) -> tuple[bytes, ...]:
    """Names, concatenated in a column, cut at `starts`.

    Raises:
        FormatError: `starts` does not cut them.
    """
    if not len(starts) or starts[0] != 0 or starts[-1] != len(blob) or bool((starts[1:] < starts[:-1]).any()):
        raise FormatError(f"index: the column {what!r} does not cut the names", hint=_HINT)
    data, cuts = blob.tobytes(), starts.tolist()
    return tuple(data[low:high] for low, high in pairwise(cuts))


def _cut_group(groups: Groups, number: int, data: memoryview) -> dict[str, Any]:
    """A group's columns, as views of `data`."""
    counts = np.diff(groups.starts[number : number + 2], axis=0)[0].tolist()
    columns: dict[str, Any] = {}
    at = 0
    for name, kind, which, more in _COLUMNS:
        dtype = np.dtype(kind)
        count = counts[which] + more
        columns[name] = np.frombuffer(data, dtype, count, at)
        at += count * dtype.itemsize
    for name, which in _STARTS.items():
        starts = columns[name]
        if starts[0] != 0 or starts[-1] != counts[which]:
            raise FormatError(f"index: group {number}: the column {name!r} does not cut its {counts[which]} values", hint=_HINT)
    return columns


def decode_group(groups: Groups, number: int, data: Buffer, *, files: IndexColumns, block_nbytes: int) -> Index:
    """Reads one group as an index of its own; its columns are views of `data`.

    Args:
        groups: Where the groups are.
        number: Which it is.
        data: Its bytes.
        files: The columns of the files and dtypes, checked; those of tensors are ignored.
        block_nbytes: Bytes per block of the files' digests.

    Raises:
        FormatError: It is inconsistent, or begins with another name than the head says.
    """
    view = memoryview(data).cast("B").toreadonly()
    if view.nbytes != groups.nbytes(number):
        raise FormatError(f"index: group {number} has {view.nbytes} bytes, not {groups.nbytes(number)}", hint=_HINT)
    columns = IndexColumns(
        **_cut_group(groups, number, view),
        file_nbytes=files.file_nbytes,
        block_starts=files.block_starts,
        digests=files.digests,
        dtypes=files.dtypes,
        file_names=files.file_names,
    )
    check_rows(columns)
    index = Index(columns=columns, block_nbytes=block_nbytes)
    if index.raw_name(0) != groups.first_names[number]:
        raise FormatError(f"index: group {number} begins with another name than the head says", hint=_HINT)
    return index


def gather_groups(groups: Groups, data: memoryview) -> dict[str, Any]:
    """All groups' columns, put together.

    Args:
        groups: Where they are.
        data: The column ``groups``.

    Raises:
        FormatError: A group's own columns don't fit together.
    """
    pieces: dict[str, list[Any]] = {name: [] for name, *_ in _COLUMNS}
    for number in range(len(groups)):
        begin, end = (int(n) for n in groups.starts[number : number + 2, _BYTES])
        cut = _cut_group(groups, number, data[begin:end])
        if cut["names"][: int(cut["name_starts"][1])].tobytes() != groups.first_names[number]:
            raise FormatError(f"index: group {number} begins with another name than the head says", hint=_HINT)
        for name, column in cut.items():
            pieces[name].append(column[:-1] + groups.starts[number, _STARTS[name]] if name in _STARTS else column)
    for name, which in _STARTS.items():
        pieces[name].append(groups.starts[-1:, which])
    return {name: np.concatenate([np.zeros(0, kind), *pieces[name]]) for name, kind, *_ in _COLUMNS}
