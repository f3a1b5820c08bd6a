"""The groups of numbers that have one scale: along a row, at multiples of the group's length; the last one of a row may be short.

A run may begin and end anywhere, and then has part of a group at its ends. Rows that are shorter than a group share groups, which are
counted from the run's begin. All work is done on an array of whole groups, padded with zeros where a group is short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Groups", "groups_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """How a run lies in its groups.

    Attributes:
        group: Numbers in a group.
        count: Groups that the run has part in.
        head: Numbers of the first row, or all of them where rows don't matter; they begin `skip` numbers after a group's begin.
        rows: Whole rows that follow, of `columns` numbers in `row_groups` groups.
        tail: Numbers of the last row.
    """

    group: int
    count: int
    skip: int
    head: int
    rows: int
    tail: int
    columns: int
    row_groups: int

    @property
    def padded(self) -> bool:
        """Whether the groups are not all full."""
        return self.count * self.group != self.head + self.rows * self.columns + self.tail

    def pad(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The run as an array ``[count, group]``, zeros where nothing is; without a copy where all groups are full."""
        if not self.padded:
            return values.reshape(self.count, self.group)
        made = np.zeros(self.count * self.group, dtype=values.dtype)
        self._each(made, values, out=False)
        return made.reshape(self.count, self.group)

    def unpad(self, made: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The reverse of `pad`."""
        flat = made.reshape(-1)
        if not self.padded:
            return flat
        values = np.empty(self.head + self.rows * self.columns + self.tail, dtype=made.dtype)
        self._each(flat, values, out=True)
        return values

    def _each(self, made: npt.NDArray[Any], values: npt.NDArray[Any], *, out: bool) -> None:
        def copy(there: npt.NDArray[Any], here: npt.NDArray[Any]) -> None:
            if out:
                here[...] = there
            else:
                there[...] = here

        copy(made[self.skip : self.skip + self.head], values[: self.head])
        width, body = self.row_groups * self.group, self.rows * self.columns
        begin = -(-(self.skip + self.head) // self.group) * self.group
        if self.rows:
            whole = made[begin : begin + self.rows * width].reshape(self.rows, width)[:, : self.columns]
            copy(whole, values[self.head : self.head + body].reshape(self.rows, self.columns))
        if self.tail:
            copy(made[begin + self.rows * width :][: self.tail], values[self.head + body :])


def groups_of(count: int, columns: int, first_column: int, group: int) -> Groups:
    """The groups of a run of `count` numbers that begins at `first_column` of a row of `columns` numbers.

    Raises:
        ValueError: There is no such run.
    """
    if count < 0 or columns < 1 or not 0 <= first_column < columns:
        raise ValueError(f"a run of {count} numbers from column {first_column} of {columns}")
    skip, head, rows, tail, row_groups = 0, count, 0, 0, 0
    if columns >= group:
        skip = first_column % group
        if columns % group:
            head = min(count, columns - first_column)
            rows, tail = divmod(count - head, columns)
            row_groups = -(-columns // group)
    total = -(-(skip + head) // group) + rows * row_groups + -(-tail // group) if count else 0
    return Groups(group=group, count=total, skip=skip, head=head, rows=rows, tail=tail, columns=columns, row_groups=row_groups)
