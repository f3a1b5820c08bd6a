"""Measurements: tables of rows, medians and spread, printed in 100 columns and written to a journal as they come.

The journal is a file of JSON lines, so that what was measured before a process died is not lost; `make bench` names it in
`TIERSTORE_BENCH_JOURNAL`, and builds the results out of it. Without it a benchmark only prints.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import statistics
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierstore.units import format_size

JOURNAL = "TIERSTORE_BENCH_JOURNAL"
COLUMNS = 100
_NAME = 46


@dataclass(slots=True, kw_only=True)
class Row:
    """What was measured of one way to do it.

    Attributes:
        values: In the table's unit, one for each turn that counted.
        turns: Which turns those were; empty where nobody said.
        kind: `ours`, `peer`, `limit` (what the machine or the client can do and no checkpoint does) or `` where it makes no difference.
    """

    name: str
    values: list[float] = field(default_factory=list)
    kind: str = ""
    note: str = ""
    turns: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def add(self, value: float, turn: int | None) -> None:
        self.values.append(value)
        if turn is not None:
            self.turns.append(turn)

    def by_turn(self) -> dict[int, float]:
        """The values by their turns; empty where not all of them have one."""
        return dict(zip(self.turns, self.values, strict=True)) if len(self.turns) == len(self.values) else {}


class Table:
    """Rows that measure the same on the same bytes, printed as medians and as ratios to one of them.

    Args:
        title: What is measured.
        nbytes: The bytes that are moved, for the speed; 0: none.
        base: The row that ratios are relative to; empty: none, where they would say nothing.
        key: Its name in the results; made from the title where left out.
        unit: Of the values: `s`, or what is counted.
    """

    def __init__(self, title: str, nbytes: int, base: str, *, key: str = "", unit: str = "s") -> None:
        self.title, self.nbytes, self.base, self.unit = title, nbytes, base, unit
        self.key = key or re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        self.rows: dict[str, Row] = {}
        self.failed: dict[str, str] = {}
        self._told = False

    def describe(self, name: str, *, kind: str = "", note: str = "") -> None:
        """Says what a row is; rows are printed in this order."""
        self.rows[name] = Row(name=name, kind=kind, note=note)
        self._tell({"row": name, "kind": kind, "note": note})

    def add(self, name: str, value: float, turn: int | None = None) -> None:
        """Adds what was measured of a row, in which turn: by that it is compared with what others took in the same one."""
        self.rows.setdefault(name, Row(name=name)).add(value, turn)
        self._tell({"add": name, "value": value, "turn": turn})

    def fail(self, name: str, reason: str) -> None:
        """Lists a row that can't be measured; what it had so far, also as ``name: milestone``, is not counted."""
        self._fail(name, reason)
        self._tell({"fail": name, "reason": reason})

    def _fail(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        self.rows = {row: kept for row, kept in self.rows.items() if row != name and not row.startswith(f"{name}: ")}

    def measured(self) -> list[Row]:
        return [row for row in self.rows.values() if row.values]

    def median(self, name: str) -> float:
        return self.rows[name].median

    def ratio(self, name: str) -> float | None:
        """A row relative to the base, by turns; None where either was not measured."""
        base, row = self.rows.get(self.base), self.rows.get(name)
        if base is None or row is None or not base.values or not row.values or not base.median:
            return None
        return ratio(row, base)

    def lines(self) -> list[str]:
        """The table, at most 100 columns wide."""
        turns = max((len(row.values) for row in self.rows.values()), default=0)
        size = f"{format_size(self.nbytes)}; " if self.nbytes else ""
        relative = f", relative to {self.base!r}" if self.base else ""
        lines = textwrap.wrap(f"{self.title} ({size}median of {turns}{relative})", COLUMNS)
        for row in self.measured():
            ratio = self.ratio(row.name)
            figures = f"{row.median:9.3f} {self.unit}"
            if self.unit == "s" and self.nbytes:
                figures += f" {self.nbytes / row.median / 1e9:6.2f} GB/s"
            figures += f"  x{ratio:6.2f}" if ratio is not None else "        -"
            figures += f"  ({min(row.values):.3f}..{max(row.values):.3f})"
            named = textwrap.wrap(row.name if len(row.values) == turns else f"{row.name} [{len(row.values)}]", _NAME)
            lines += [f"  {part}" for part in named[:-1]]
            lines.append(f"  {named[-1]:<{_NAME}} {figures}")
        for name, reason in self.failed.items():
            lines += textwrap.wrap(f"{name}: not measured: {reason}", COLUMNS, initial_indent="  ", subsequent_indent="      ")
        return lines

    def show(self) -> None:
        print("\n" + "\n".join(self.lines()), flush=True)

    def as_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "title": self.title,
            "nbytes": self.nbytes,
            "base": self.base,
            "unit": self.unit,
            "rows": [_row_as_json(row) for row in self.measured()],
            "failed": dict(self.failed),
        }

    @classmethod
    def of_json(cls, document: dict[str, Any]) -> Table:
        table = cls(document["title"], document["nbytes"], document["base"], key=document["key"], unit=document["unit"])
        table.rows = {row["name"]: Row(**row) for row in document["rows"]}
        table.failed = dict(document["failed"])
        return table

    def _tell(self, event: dict[str, Any]) -> None:
        if not self._told:
            head = {"title": self.title, "nbytes": self.nbytes, "base": self.base, "unit": self.unit}
            tell({"table": self.key, "head": head})
            self._told = True
        tell({"table": self.key, **event})


def ratio(row: Row, base: Row) -> float:
    """The median of what each turn says, of the turns that both had: the machine changes from turn to turn, less within one.

    Of two in the middle it is the geometric mean: so the inverse ratio is the inverse. Where they had no turn together it is the ratio of
    the medians.
    """
    mine, theirs = row.by_turn(), base.by_turn()
    both = sorted(mine[turn] / theirs[turn] for turn in mine if theirs.get(turn))
    if not both or both[0] <= 0:
        return row.median / base.median
    return math.sqrt(both[len(both) // 2] * both[(len(both) - 1) // 2])


def tell(event: dict[str, Any]) -> None:
    """Appends a line to the journal, if there is one."""
    path = os.environ.get(JOURNAL)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


def _row_as_json(row: Row) -> dict[str, Any]:
    document = {"name": row.name, "kind": row.kind, "note": row.note, "values": [round(value, 6) for value in row.values]}
    return {**document, "turns": row.turns} if row.turns else document


def fact(name: str, value: object) -> None:
    """Something beside the tables, printed and kept: what a server was, whether memory was fresh."""
    print(f"{name}: {value}", flush=True)
    tell({"fact": name, "value": value})


@dataclass(slots=True, kw_only=True)
class Journal:
    """What a journal says. `doing` is what was being measured at its end."""

    tables: list[Table]
    facts: dict[str, Any]
    doing: str | None


def read_journal(path: Path) -> Journal:
    """Reads what a process wrote; a last line that was cut by its death is left out."""
    tables: dict[str, Table] = {}
    facts: dict[str, Any] = {}
    doing: str | None = None
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if "fact" in event:
            facts[event["fact"]] = event["value"]
        elif "doing" in event:
            doing = event["doing"]
        elif "head" in event:
            head = event["head"]
            tables.setdefault(event["table"], Table(head["title"], head["nbytes"], head["base"], key=event["table"], unit=head["unit"]))
        elif "row" in event:
            tables[event["table"]].rows.setdefault(event["row"], Row(name=event["row"], kind=event["kind"], note=event["note"]))
        elif "add" in event:
            tables[event["table"]].rows.setdefault(event["add"], Row(name=event["add"])).add(event["value"], event.get("turn"))
        elif "fail" in event:
            tables[event["table"]]._fail(event["fail"], event["reason"])
    return Journal(tables=list(tables.values()), facts=facts, doing=doing)


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:300]}" if said else type(error).__name__


def timed(work: Callable[..., object], *args: Any, **kwargs: Any) -> float:
    """Seconds that ``work(*args, **kwargs)`` takes."""
    gc.collect()
    began = time.perf_counter()
    work(*args, **kwargs)
    return time.perf_counter() - began
