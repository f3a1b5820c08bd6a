"""Fills the marked sections of docs/performance.md from the results.

    python benchmarks/page.py                 writes the page from benchmarks/results/latest.json
    python benchmarks/page.py --check         writes nothing, exits with 1 where the page is not what it would write

A section begins with ``<!-- bench: WHAT -->`` and ends with ``<!-- /bench -->``. WHAT is `machine`, `targets`, `peers` (who was not
measured, and why), `table KEY`, `picture NAME`, or `output SUITE` (what a suite printed).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from measure import Row, Table
from plots import PICTURES
from run import LATEST, tables_of

from tierstore.units import format_size

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
_SECTION = re.compile(r"(?P<head><!-- bench: (?P<what>[\w .-]+) -->\n)(?P<body>.*?)(?P<end><!-- /bench -->)", re.DOTALL)
_LONG = 40
"""Lines; longer outputs are folded."""

_NOISE = re.compile(r"\[(WARNING|INFO)\]|Traceback| - INFO - ")


def filled(page: str, document: dict[str, Any]) -> str:
    """The page with all of its sections written anew."""
    return _SECTION.sub(lambda m: f"{m['head']}{section(m['what'], document)}\n{m['end']}", page)


def section(what: str, document: dict[str, Any]) -> str:
    """One section, without its marks.

    Raises:
        ValueError: There is no such section.
    """
    kind, _, name = what.partition(" ")
    if kind == "machine":
        return _machine(document)
    if kind == "targets":
        return _targets(document["targets"])
    if kind == "peers":
        return _peers(tables_of(document))
    if kind == "output":
        return _output(name, document["suites"].get(name))
    if kind == "picture":
        title = next(picture.title for picture in PICTURES if picture.name == name)
        if not (PAGE.parent / "images" / f"bench-{name}.png").exists():
            return "Not drawn: it was not measured in this run."
        return f"[![{title}](images/bench-{name}.png)](images/bench-{name}.svg)"
    if kind == "table":
        table = next((table for table in tables_of(document) if table.key == name), None)
        return "Not measured in this run." if table is None or not table.measured() else _table(table)
    raise ValueError(f"{what!r} is no section of the page")


def _table(table: Table) -> str:
    """A row for each contender; without a speed, a ratio or a spread where there is none."""
    speed = table.unit == "s" and table.nbytes > 0
    several = any(len(row.values) > 1 for row in table.measured())
    median = ", ".join(word for word in ("median" if several else "", table.unit) if word)
    more = [*(["GB/s"] if speed else []), *(["relative"] if table.base else []), *(["fastest to slowest", "turns"] if several else [])]
    head = ["", median, *more, ""]
    told = ", ".join(word for word in (format_size(table.nbytes) if table.nbytes else "", _relative(table)) if word)
    lines = [f"{table.title} ({told})" if told else table.title, "", _line(head), _line(["---"] * len(head))]
    return "\n".join([*lines, *(_line(_cells(table, row, speed=speed, several=several)) for row in table.measured())])


def _relative(table: Table) -> str:
    return f"relative to {table.base}" if table.base else ""


def _cells(table: Table, row: Row, *, speed: bool, several: bool) -> list[str]:
    ratio = table.ratio(row.name)
    name = f"**{row.name}**" if row.kind == "ours" else f"*{row.name}*" if row.kind == "limit" else row.name
    cells = [name, _number(row.median)]
    if speed:
        cells.append(f"{table.nbytes / row.median / 1e9:.2f}")
    if table.base:
        cells.append("-" if ratio is None else f"{ratio:.2f}")
    if several:
        cells += [f"{_number(min(row.values))} to {_number(max(row.values))}", str(len(row.values))]
    return [*cells, row.note]


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.0f}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _targets(verdicts: list[dict[str, Any]]) -> str:
    lines = [_line(["what", "target", "measured", "", "against"]), _line(["---"] * 5)]
    for verdict in verdicts:
        word = {True: "met", False: "**missed**", None: "not measured" if verdict["measured"] == "-" else ""}[verdict["met"]]
        lines.append(_line([verdict["what"], verdict["target"], verdict["measured"], word, verdict["against"]]))
    return "\n".join(lines)


def _machine(document: dict[str, Any]) -> str:
    machine = document["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    rows = [
        ("run", f"{document['at']}, revision {document['revision'] or 'unknown'}{', at small sizes' if document['short'] else ''}"),
        ("processor", f"{machine['cores']} cores: {machine['processor']}"),
        ("memory", machine["memory"]),
        ("disk", machine["disk"]),
        ("kernel", machine["kernel"]),
        ("software", f"Python {machine['python']}; {packages}"),
        ("GPU", machine["gpu"]),
        ("load before each suite", ", ".join(f"{name} {suite['load_average']}" for name, suite in document["suites"].items())),
        ("not done", ", ".join(f"{n}: {s['ended']}" for n, s in document["suites"].items() if s["ended"] != "done") or "nothing"),
    ]
    others = [
        (f"{name}: run", f"{suite['at']}, revision {suite['revision'] or 'unknown'}, {_differences(suite.get('machine') or {}, machine)}")
        for name, suite in document["suites"].items()
        if suite.get("revision", document["revision"]) != document["revision"]
    ]
    rows += others
    facts = [(name, value) for suite in document["suites"].values() for name, value in suite["facts"].items()]
    return "\n".join([_line(["", ""]), _line(["---", "---"]), *(_line([name, str(value)]) for name, value in [*rows, *facts])])


def _differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    """What is another machine's, of the facts that one line can tell."""
    told = [
        f"{key}: {there[key]}" for key in ("processor", "cores", "memory", "disk", "kernel") if key in there and there[key] != here[key]
    ]
    return "; ".join(told) or "on this machine"


def _peers(tables: Iterable[Table]) -> str:
    """Who was not measured, once each, with the reason of the first table; of whom others have figures, where they lack."""
    every = list(tables)
    measured = {row.name for table in every for row in table.measured()}
    reasons: dict[str, str] = {}
    for table in every:
        for name, reason in table.failed.items():
            reasons.setdefault(f"{name}: {table.title}" if name in measured else name, reason)
    if not reasons:
        return "All peers were measured."
    return "\n".join([_line(["not measured", "reason"]), _line(["---", "---"]), *(_line([n, f"`{r}`"]) for n, r in reasons.items())])


def _output(name: str, suite: dict[str, Any] | None) -> str:
    """What a suite printed; folded where it is long."""
    if suite is None:
        return f'Not run on the machine of this page: `make bench ARGS="--only {name} --merge"` does it.'
    lines = [line for line in suite["output"] if not _NOISE.search(line)]
    text = "\n".join(["```text", *lines, "```"]).replace("```text\n\n", "```text\n")
    if len(lines) <= _LONG:
        return text
    return f"<details><summary>What the suite {name} printed, {len(lines)} lines</summary>\n\n{text}\n\n</details>"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 where the page is out of date")
    parser.add_argument("results", type=Path, nargs="?", default=LATEST)
    args = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    written = filled(page, json.loads(args.results.read_text(encoding="utf-8")))
    if args.check:
        return int(written != page)
    PAGE.write_text(written, encoding="utf-8")
    print("page: docs/performance.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
