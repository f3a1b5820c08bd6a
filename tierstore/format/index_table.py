"""The routing index in memory: tensor name → extents (file, byte range, place in the whole tensor), and each file's block digests.

A columnar table that opens in milliseconds at millions of extents: nothing is turned into Python objects but what is asked for. Tensors are
sorted by the UTF-8 bytes of their names and found by bisection. Two tensors with the same extents are one stored tensor (tied).
"""

from __future__ import annotations

import bisect
import difflib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np

from tierstore.errors import FormatError, NotFoundError
from tierstore.format.index_rows import Rows, worth_making
from tierstore.format.index_types import Bytes, Extent, ExtentTable, FileEntry, IndexColumns, Ints, RoutingIndex, TensorEntry

__all__ = ["Bytes", "Extent", "ExtentTable", "FileEntry", "Index", "IndexColumns", "Ints", "RoutingIndex", "TensorEntry"]


class Index:
    """The routing index, immutable. Make one with `build_index`, `merge_indexes` or `decode_index`."""

    __slots__ = ("_asked", "_blob", "_file_numbers", "_ordered", "_rows", "block_nbytes", "columns")

    def __init__(self, *, columns: IndexColumns, block_nbytes: int) -> None:
        self.columns = columns
        self.block_nbytes = block_nbytes
        self._blob = columns.names.data
        self._file_numbers: dict[str, int] = {}  # made when a file is asked for: groups of a large index have thousands of files each
        self._ordered = False
        self._asked = 0
        self._rows: Rows | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all files that the index names."""
        return sum(self.columns.file_nbytes.tolist())

    @property
    def extent_count(self) -> int:
        """How many extents all tensors have together; a tied tensor's count once per name."""
        return len(self.columns.begins)

    @property
    def file_names(self) -> tuple[str, ...]:
        return self.columns.file_names

    def __len__(self) -> int:
        return len(self.columns.dtype_codes)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.row_of(name) is not None

    def __iter__(self) -> Iterator[TensorEntry]:
        """Every tensor, sorted by name. Makes Python objects of all extents: for tools, not for planning."""
        return (self.entry(row) for row in range(len(self)))

    def detached(self, shared: dict[bytes, Any] | None = None) -> Index:
        """The same index, in memory of its own: the file that its columns were views of can go.

        Args:
            shared: Columns of other indexes by what they hold; an equal one is taken from there, and new ones are put there. Most
                columns of thousands of ranks' indexes are the same.
        """
        shared = {} if shared is None else shared
        columns: dict[str, Any] = {field.name: getattr(self.columns, field.name) for field in fields(self.columns)}
        copied = {name: _own(column, shared) for name, column in columns.items() if isinstance(column, np.ndarray)}
        return Index(columns=IndexColumns(**{**columns, **copied}), block_nbytes=self.block_nbytes)

    def names(self) -> list[str]:
        """All names, sorted by their UTF-8 bytes."""
        self.check_order()
        return [self.raw_name(row).decode("utf-8") for row in range(len(self))]

    def find(self, name: str, box: Sequence[range] | None = None) -> TensorEntry:
        """The tensor called `name`, in O(log n), and in O(1) where very many are asked for.

        Args:
            name: The name.
            box: A range of each axis: only extents with elements between its ends are made into objects, for a tensor may have
                thousands and a rank need a few. None, or another number of axes than the tensor has: all.

        Raises:
            NotFoundError: There is none; the nearest names are suggested.
        """
        return self.entry(self._found(name), box)

    def table(self, name: str) -> ExtentTable:
        """The extents of the tensor called `name` as arrays (views, nothing is copied).

        Raises:
            NotFoundError: There is none; the nearest names are suggested.
        """
        return self._table(self._found(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of the tensor called `name`, without making its extents."""
        return self._shape(self._found(name))

    def dtype(self, name: str) -> str:
        """The dtype's name of the tensor called `name`, without making its extents."""
        return self.columns.dtypes[int(self.columns.dtype_codes[self._found(name)])][0]

    def files(self) -> tuple[FileEntry, ...]:
        """All files, in the order of their numbers."""
        return tuple(self._file(number) for number in range(len(self.file_names)))

    def file(self, name: str) -> FileEntry:
        """The file called `name`.

        Raises:
            NotFoundError: The index names no such file.
        """
        return self._file(self._file_number(name))

    def file_nbytes(self, name: str) -> int:
        """The length of the file called `name`, in bytes.

        Raises:
            NotFoundError: The index names no such file.
        """
        return int(self.columns.file_nbytes[self._file_number(name)])

    def prepare(self, names: Iterable[str]) -> None:
        """Nothing: all rows are here."""

    def raw_name(self, row: int) -> bytes:
        starts = self.columns.name_starts
        return bytes(self._blob[starts[row] : starts[row + 1]])

    def check_order(self) -> None:
        """Proves once that the names are sorted and unique, which bisection relies on.

        Not done on opening: it costs as much as all the rest together at a million tensors. A name that is found is right in any case.

        Raises:
            FormatError: They are not.
        """
        if self._ordered:
            return
        blob, starts = bytes(self._blob), self.columns.name_starts.tolist()
        names = [blob[begin:end] for begin, end in pairwise(starts)]
        for before, after in pairwise(names):
            if before >= after:
                raise FormatError(
                    f"index: the tensor names {before[:200]!r} and {after[:200]!r} are out of order",
                    hint="the index is foreign or damaged: run `tierstore verify`",
                )
        self._ordered = True

    def row_of(self, name: str) -> int | None:
        """The number of the tensor called `name`; None: there is none."""
        try:
            wanted = name.encode("utf-8")
        except UnicodeEncodeError:
            return None
        rows = self._rows or self._make_rows()
        if rows is not None:
            return rows.numbers.get(wanted)
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.raw_name(middle) < wanted:
                low = middle + 1
            else:
                high = middle
        if low < len(self) and self.raw_name(low) == wanted:
            return low
        self.check_order()
        return None

    def _make_rows(self) -> Rows | None:
        """Lists of all rows, once it has turned out that very many are asked for."""
        self._asked += 1
        if worth_making(self._asked, len(self), self.extent_count):
            try:
                self._rows = Rows(self.columns)
                self._ordered = True
            except ValueError:  # a foreign index: bisection goes on, and says so where a name is not found
                self._asked = -len(self)
        return self._rows

    def _found(self, name: str) -> int:
        row = self.row_of(name)
        if row is None:
            raise NotFoundError(f"the checkpoint has no tensor {name!r}", hint=_nearest(name, self.names()), tensor=name)
        return row

    def _shape(self, row: int) -> tuple[int, ...]:
        columns = self.columns
        return tuple(columns.shapes[columns.shape_starts[row] : columns.shape_starts[row + 1]].tolist())

    def _table(self, row: int) -> ExtentTable:
        c = self.columns
        span = slice(int(c.extent_starts[row]), int(c.extent_starts[row + 1]))
        box = slice(int(c.box_starts[row]), int(c.box_starts[row + 1]))
        ndim = int(c.shape_starts[row + 1] - c.shape_starts[row])
        rows = (span.stop - span.start, ndim)
        return ExtentTable(
            files=c.files[span],
            begins=c.begins[span],
            ends=c.ends[span],
            offsets=c.offsets[box].reshape(rows),
            sizes=c.sizes[box].reshape(rows),
        )

    def entry(self, row: int, box: Sequence[range] | None = None) -> TensorEntry:
        """The tensor of a row, see `row_of`; `box` as `find` has it."""
        if self._rows is not None:
            return self._entry_from(self._rows, row, box)
        table, names = self._table(row), self.file_names
        if box is not None and len(box) == table.offsets.shape[1]:
            table = _meeting(table, box)
        extents = zip(
            table.files.tolist(), table.begins.tolist(), table.ends.tolist(), table.offsets.tolist(), table.sizes.tolist(), strict=True
        )
        return TensorEntry(
            name=self.raw_name(row).decode("utf-8"),
            dtype=self.columns.dtypes[int(self.columns.dtype_codes[row])][0],
            shape=self._shape(row),
            extents=tuple(
                Extent(file=names[file], begin=begin, end=end, offsets=tuple(offsets), sizes=tuple(sizes))
                for file, begin, end, offsets, sizes in extents
            ),
        )

    def _entry_from(self, rows: Rows, row: int, box: Sequence[range] | None) -> TensorEntry:
        names = self.columns.file_names
        code, shape = rows.tensor(row)
        extents = rows.extents(row)
        if box is not None and len(box) == len(shape):
            ends = [_span(axis) for axis in box]
            extents = [e for e in extents if all(max(b, o) < min(f, o + n) for (b, f), o, n in zip(ends, e[3], e[4], strict=True))]
        return TensorEntry(
            name=rows.names[row].decode("utf-8"),
            dtype=self.columns.dtypes[code][0],
            shape=shape,
            extents=tuple(Extent(file=names[file], begin=b, end=e, offsets=at, sizes=sizes) for file, b, e, at, sizes in extents),
        )

    def _file_number(self, name: str) -> int:
        if not self._file_numbers:
            self._file_numbers = {each: number for number, each in enumerate(self.file_names)}
        number = self._file_numbers.get(name)
        if number is None:
            raise NotFoundError(f"the index names no file {name!r}", hint=_nearest(name, self.file_names), file=name)
        return number

    def _file(self, number: int) -> FileEntry:
        c = self.columns
        digests = c.digests[c.block_starts[number] : c.block_starts[number + 1]]
        return FileEntry(name=c.file_names[number], nbytes=int(c.file_nbytes[number]), block_digests=digests.tobytes())


def _own(column: Any, shared: dict[bytes, Any]) -> Any:
    key = hashlib.sha256(f"{column.dtype.str}{column.shape}".encode() + column.tobytes()).digest()
    found = shared.get(key)
    if found is None:
        found = np.array(column)
        found.flags.writeable = False
        found = shared.setdefault(key, found)
    return found


def _meeting(table: ExtentTable, box: Sequence[range]) -> ExtentTable:
    """The extents that have elements between the ends of `box`."""
    begins, ends = np.array([_span(axis) for axis in box], dtype=np.int64).reshape(-1, 2).T
    low, high = np.maximum(table.offsets, begins), np.minimum(table.offsets + table.sizes, ends)
    (kept,) = np.nonzero((low < high).all(axis=1))
    return ExtentTable(
        files=table.files[kept],
        begins=table.begins[kept],
        ends=table.ends[kept],
        offsets=table.offsets[kept],
        sizes=table.sizes[kept],
    )


def _span(axis: range) -> tuple[int, int]:
    """The smallest range without steps that holds `axis`, which has as many as a tensor has rows: they are not walked through."""
    if not axis:
        return 0, 0
    return min(axis[0], axis[-1]), max(axis[0], axis[-1]) + 1


def _nearest(name: str, names: Sequence[str]) -> str:
    if not names:
        return "there are none at all"
    # difflib takes milliseconds per thousand names: the neighbours in sorted order and a sample keep a typo in a large checkpoint cheap.
    near = bisect.bisect_left(names, name)
    candidates = {*names[max(0, near - 1000) : near + 1000], *names[:: max(1, len(names) // 1000)]}
    close = difflib.get_close_matches(name, sorted(candidates), n=3)
    return f"nearest are {', '.join(map(repr, close))}" if close else f"there are {len(names):,}, e.g. {names[0]!r}"
