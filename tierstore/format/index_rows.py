"""Rows of an index as Python lists, for those who ask for most of them: a hash instead of a bisection, and no array is touched per tensor.

A single question is answered from the columns in microseconds without anything being made. Who loads a state asks tens of thousands, and
there each of the dozens of small array operations a tensor would cost more than the whole answer does from lists.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tierstore.format.index_types import IndexColumns

__all__ = ["Rows", "worth_making"]

_MOST_EXTENTS = 4
"""Extents a tensor, on average: of tensors in many pieces a rank wants few, and those are chosen in the columns."""


def worth_making(asked: int, rows: int, extents: int) -> bool:
    """Whether rows that were asked for `asked` times will pay for lists of all: bisecting an eighth of them cost about as much."""
    return asked * 8 > rows and extents <= _MOST_EXTENTS * rows


class Rows:
    """All rows of an index: `names` as bytes, `numbers` by them, and the columns' values of each.

    Raises:
        ValueError: The names are not sorted and unique: bisection may find others than a hash does.
    """

    __slots__ = (
        "_begins",
        "_box_starts",
        "_codes",
        "_ends",
        "_extent_starts",
        "_files",
        "_offsets",
        "_shape_starts",
        "_shapes",
        "_sizes",
        "names",
        "numbers",
    )

    def __init__(self, columns: IndexColumns) -> None:
        blob = bytes(columns.names.data)
        names = [blob[begin:end] for begin, end in pairwise(columns.name_starts.tolist())]
        if any(before >= after for before, after in pairwise(names)):
            raise ValueError("the names are out of order")
        self.names = names
        self.numbers = dict(zip(names, range(len(names)), strict=True))
        self._codes: list[int] = columns.dtype_codes.tolist()
        self._shapes: list[int] = columns.shapes.tolist()
        self._shape_starts: list[int] = columns.shape_starts.tolist()
        self._extent_starts: list[int] = columns.extent_starts.tolist()
        self._box_starts: list[int] = columns.box_starts.tolist()
        self._files: list[int] = columns.files.tolist()
        self._begins: list[int] = columns.begins.tolist()
        self._ends: list[int] = columns.ends.tolist()
        self._offsets: list[int] = columns.offsets.tolist()
        self._sizes: list[int] = columns.sizes.tolist()

    def tensor(self, row: int) -> tuple[int, tuple[int, ...]]:
        """The number of its dtype, and its shape."""
        return self._codes[row], tuple(self._shapes[self._shape_starts[row] : self._shape_starts[row + 1]])

    def extents(self, row: int) -> list[tuple[int, int, int, tuple[int, ...], tuple[int, ...]]]:
        """Of each extent: the number of its file, begin and end in bytes, offsets and sizes."""
        first, end = self._extent_starts[row], self._extent_starts[row + 1]
        ndim = self._shape_starts[row + 1] - self._shape_starts[row]
        at = self._box_starts[row]
        found: list[Any] = []
        for number in range(first, end):
            found.append(
                (
                    self._files[number],
                    self._begins[number],
                    self._ends[number],
                    tuple(self._offsets[at : at + ndim]),
                    tuple(self._sizes[at : at + ndim]),
                )
            )
            at += ndim
        return found
