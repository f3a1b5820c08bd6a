"""Tables and facts that fit the terminal: columns give way between words, then whole columns go below their row; nothing is cut.

rich shortens what does not fit, or breaks it in mid-word. An id or a number that is cut is worse than a longer table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.style import Style
from rich.text import Text

__all__ = ["Facts", "FitTable", "break_lines"]

_GAP = 2
_INDENT = 4
_MOST_KEY = 24
"""A name of a fact that is longer does not push the others' values to the right."""

Cell = str | Text


def break_lines(text: Text, width: int, *, fold: bool = False) -> list[Text]:
    """`text` as lines of at most `width` columns, broken between words.

    Args:
        text: What is broken; its own line ends stay.
        width: Columns.
        fold: Break also a word that is wider than that; else it stays whole, so that it can be copied.
    """
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        for piece in line.divide(_breaks(line.plain, width, fold)):
            piece.rstrip()
            lines.append(piece)
    return lines


def _breaks(line: str, width: int, fold: bool) -> list[int]:
    found, begin = [], 0
    for word in re.finditer(r"\S+", line):
        if word.start() > begin and cell_len(line[begin : word.end()]) > width:
            begin = word.start()
            found.append(begin)
        while fold and cell_len(line[begin : word.end()]) > width:
            begin += max(1, width)
            found.append(begin)
    return found


def _widest(text: Text) -> int:
    return max((cell_len(line) for line in text.plain.split("\n")), default=0)


def _widest_word(text: Text) -> int:
    return max((cell_len(word) for word in text.plain.split()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    heading: str
    right: bool
    wraps: bool


class FitTable:
    """A table without lines. The columns that wrap give way, between words; where that is not enough, the last of them go below the row.

    Args:
        columns: Headings; or (heading, ``left`` or ``right``).
        wraps: Headings of the columns that may wrap, or go below.
    """

    def __init__(self, columns: Sequence[str | tuple[str, str]], wraps: Sequence[str] = ()) -> None:
        parts = [column if isinstance(column, tuple) else (column, "left") for column in columns]
        self._columns = [_Column(heading=name, right=side == "right", wraps=name in wraps) for name, side in parts]
        self._rows: list[tuple[list[Text], str]] = []

    @property
    def row_count(self) -> int:
        return len(self._rows)

    def add_row(self, *cells: Cell, style: str = "") -> None:
        """Adds a row; cells that are missing are empty."""
        given = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        self._rows.append((given + [Text("")] * (len(self._columns) - len(given)), style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        above, beside, below, widths = self._laid_out(options.max_width)
        right = [self._columns[n].right for n in beside]
        indent = " " * _INDENT if above else ""
        for n in above:
            yield Text(self._columns[n].heading, style="bold")
        for line in _joined([Text(self._columns[n].heading, style="bold") for n in beside], right, widths, ""):
            yield Text(indent) + line
        for cells, style in self._rows:
            for n in above:
                yield from break_lines(cells[n], options.max_width, fold=True)
            for line in _joined([cells[n] for n in beside], right, widths, style):
                yield Text(indent) + line
            for n in below:
                if cells[n].plain:
                    yield from self._below(self._columns[n], cells[n], options.max_width)

    def _laid_out(self, width: int) -> tuple[list[int], list[int], list[int], list[int]]:
        """Which columns stand above the others (the first, if it is too wide), which beside each other, which below; and the widths."""
        above: list[int] = []
        below: list[int] = []
        beside = list(range(len(self._columns)))
        natural, least = {}, {}
        for n, column in enumerate(self._columns):
            texts = [cells[n] for cells, _ in self._rows]
            natural[n] = max([cell_len(column.heading), *map(_widest, texts)])
            least[n] = max([cell_len(column.heading), *map(_widest_word, texts)]) if column.wraps else natural[n]
        while sum(least[n] for n in beside) + _GAP * (len(beside) - 1) > width:
            giving = [n for n in beside if self._columns[n].wraps]
            if not giving:
                break  # numbers and short words only: the terminal wraps what is too long
            worst = max(giving, key=lambda n: (least[n], n))
            beside.remove(worst)
            if worst:
                below = sorted([*below, worst])
            else:
                above, width = [0], width - _INDENT
        widths = {n: least[n] for n in beside}
        left = width - sum(widths.values()) - _GAP * (len(beside) - 1)
        for n in sorted(beside, key=lambda n: natural[n] - widths[n]):  # what lacks least first: it becomes whole
            rest = [m for m in beside if natural[m] > widths[m]]
            more = min(natural[n] - widths[n], left // max(1, len(rest)))
            if more > 0:
                widths[n] += more
                left -= more
        return above, beside, below, [widths[n] for n in beside]

    def _below(self, column: _Column, cell: Text, width: int) -> Iterator[Text]:
        name = Text(f"{' ' * _INDENT}{column.heading.lower()}: ", style="dim")
        pieces = break_lines(Text(" ").join(cell.split("\n")), width - _INDENT - 2, fold=True)
        if len(pieces) == 1 and cell_len(name.plain) + cell_len(pieces[0].plain) <= width:
            yield name + pieces[0]
            return
        first, *_ = break_lines(cell, width - cell_len(name.plain), fold=False) or [Text("")]
        if cell_len(name.plain) + cell_len(first.plain) <= width:
            rest = break_lines(Text(" ").join(cell.split("\n")), width - cell_len(name.plain), fold=True)
            for number, piece in enumerate(rest):
                yield (name if number == 0 else Text(" " * cell_len(name.plain))) + piece
            return
        yield Text(name.plain.rstrip(), style="dim")
        for piece in pieces:
            yield Text(" " * (_INDENT + 2)) + piece


def _joined(cells: Sequence[Text], right: Sequence[bool], widths: Sequence[int], style: str) -> Iterator[Text]:
    """The lines of one row."""
    columns = [break_lines(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for number in range(max(map(len, columns), default=0)):
        line = Text(style=Style.parse(style) if style else "")
        for column, is_right, width in zip(columns, right, widths, strict=True):
            piece = column[number] if number < len(column) else Text("")
            space = Text(" " * max(0, width - cell_len(piece.plain)))
            line = line + (space + piece if is_right else piece + space) + Text(" " * _GAP)
        line.rstrip()
        yield line


class Facts:
    """Names and values, one a line; a value that does not fit beside its name stands below it."""

    def __init__(self, facts: Iterable[tuple[str, Cell]]) -> None:
        self._facts = [(name, value if isinstance(value, Text) else Text(value)) for name, value in facts]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = options.max_width
        keys = max((cell_len(name) for name, _ in self._facts if cell_len(name) <= _MOST_KEY), default=0)
        for name, value in self._facts:
            place = max(keys, cell_len(name)) + _GAP
            label = Text(name.ljust(place - _GAP), style="bold") + Text(" " * _GAP)
            if _widest_word(value) <= width - place and (place == keys + _GAP or _widest(value) <= width - place):
                for number, piece in enumerate(break_lines(value, width - place) or [Text("")]):
                    yield (label if number == 0 else Text(" " * place)) + piece
                continue
            yield Text(name, style="bold")
            for piece in break_lines(value, width - 2, fold=True):
                yield Text("  ") + piece
