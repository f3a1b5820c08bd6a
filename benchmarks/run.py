"""The one command of all benchmarks: runs the suites one after the other, judges the targets, writes JSON, plots and the page.

    make bench                                  all, 45 minutes at most on two cores: benchmarks/results/latest.json, docs/performance.md
    make bench ARGS=--short                     all at small sizes, some minutes: only .cache/bench/short.json
    make bench ARGS="--only save,load"          some: only .cache/bench/partial.json
    make bench ARGS="--only s3 --merge"         a suite again, put in its place in benchmarks/results/latest.json and on the page

A suite that fails, or does not end, is listed with the reason, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import load_average, machine, now
from measure import JOURNAL, Table, read_journal
from peers import installed
from suites import SUITES, Suite
from targets import judged, lines

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
CACHE = HERE.parent / ".cache" / "bench"
TOTAL_S, SHORT_S = 45 * 60, 5 * 60
_RESTARTS = 3
_SPARE, _SPARE_S = 0.05, 25.0
"""Of a planned suite's limit, what is left for the last measurement, for importing and for tidying up."""


@dataclass(slots=True, kw_only=True)
class Ran:
    """What came of a suite."""

    name: str
    command: str
    at: str
    load_average: float
    seconds: float = 0.0
    ended: str = "not run"
    tables: list[Table] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    output: str = ""
    revision: str = ""
    machine: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "at": self.at,
            "load_average": self.load_average,
            "seconds": round(self.seconds, 1),
            "ended": self.ended,
            "facts": self.facts,
            "tables": [table.as_json() for table in self.tables],
            "output": self.output.splitlines(),
            "revision": self.revision,
            "machine": self.machine,
        }


def run_suite(suite: Suite, arguments: Sequence[str], limit_s: float, *, program: Path | None = None) -> Ran:
    """Runs a suite in a process of its own; if one of its peers ends that process, again without the peer, with what time is left."""
    command = [sys.executable, str(program or HERE / suite.program), *arguments]
    ran = Ran(
        name=suite.name, command=" ".join(["python", f"benchmarks/{suite.program}", *arguments]), at=now(), load_average=load_average()
    )
    began = time.monotonic()
    without: dict[str, str] = {}
    CACHE.mkdir(parents=True, exist_ok=True)
    for attempt in range(_RESTARTS + 1):
        journal = CACHE / f"{suite.name}-{attempt}.journal"  # it stays there: to look at, should this process be ended
        journal.unlink(missing_ok=True)
        left = limit_s - (time.monotonic() - began)
        more = ["--without", json.dumps(without)] if without else []
        if suite.planned:
            more += ["--within", f"{max(0.0, left * (1 - _SPARE) - _SPARE_S):.0f}"]
        code, ran.output, said = _execute([*command, *more], journal, max(1.0, left))
        found = read_journal(journal)
        ran.tables, ran.facts = found.tables, found.facts
        ran.ended = "done" if code == 0 else f"not done after {limit_s:g} s" if code is None else f"exit code {code}: {said}"
        if code in (0, None) or not suite.contest or found.doing is None or found.doing in without:
            break
        without[found.doing] = f"its process ended ({signal.Signals(-code).name if code < 0 else f'exit code {code}: {said}'})"
    ran.seconds = time.monotonic() - began
    return ran


def _execute(command: list[str], journal: Path, limit_s: float) -> tuple[int | None, str, str]:
    """Runs a command and shows what it prints; None as exit code if it had to be ended. Returns what it printed, and its last error."""
    log = CACHE / f"{Path(command[1]).stem}.log"
    environment = {
        **os.environ,
        JOURNAL: str(journal),
        "PYTHONWARNINGS": "ignore",
        "TIERSTORE_PROGRESS": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    printed: list[str] = []
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True)
        assert process.stdout is not None
        reader = threading.Thread(target=_copy, args=(process.stdout, printed), daemon=True)
        reader.start()
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
            _sweep(process.pid, command)
        reader.join(30)
    said = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return code, "".join(printed), said[-1][:300] if said else "nothing was said"


def _sweep(pid: int, command: list[str]) -> None:
    """Removes what a process left that could not end by itself: gigabytes on the disk and in memory."""
    places = [Path("/dev/shm"), CACHE]
    if "--directory" in command:
        places.append(Path(command[command.index("--directory") + 1]))
    for left in [path for place in places for path in place.glob(f"tierstore-bench-{pid}-*")]:
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _copy(source: Any, into: list[str]) -> None:
    with source:
        for line in source:
            into.append(line)
            print(line, end="", flush=True)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the process and all that it started in its session: servers, ranks, a peer's processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="suites, with commas: " + ",".join(suite.name for suite in SUITES))
    parser.add_argument("--short", action="store_true", help="small sizes, some minutes")
    parser.add_argument("--nbytes", help="another size, for all suites that have one")
    parser.add_argument("--repeat", help="another number of repetitions")
    parser.add_argument("--directory", type=Path, help="where files are made: on the disk that is to be measured (default ./.cache/bench)")
    parser.add_argument("--merge", action="store_true", help="with --only: into benchmarks/results/latest.json")
    parser.add_argument("--output", type=Path, help="where the results are written")
    parser.add_argument("--limit", type=float, help=f"seconds for all; later suites are not run (default {TOTAL_S}, --short {SHORT_S})")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended first
    names = [name for name in args.only.split(",") if name]
    if unknown := set(names) - {suite.name for suite in SUITES}:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    chosen = [suite for suite in SUITES if not names or suite.name in names]
    quotable = not args.short and not args.nbytes and not args.repeat and (not names or args.merge)
    output = args.output or (LATEST if quotable else CACHE / ("short.json" if args.short else "partial.json"))
    output.parent.mkdir(parents=True, exist_ok=True)
    limit_s = args.limit or (SHORT_S if args.short else TOTAL_S)
    installed.use()
    directory = args.directory or CACHE
    directory.mkdir(parents=True, exist_ok=True)
    revision, here = _revision(), machine(directory)
    document = _begin(output if args.merge else None, [suite.name for suite in chosen], bool(args.short), revision, here)
    began = time.monotonic()
    for suite in chosen:
        left = limit_s - (time.monotonic() - began)
        print(f"\n==== {suite.name}", flush=True)
        if left < 10 or not (HERE / suite.program).exists():
            ran = Ran(name=suite.name, command=suite.program, at=now(), load_average=load_average())
            ran.ended = "not run: the time was over" if left < 10 else "not run: there is no such program"
        else:
            share_s = suite.limit_s if args.short else share_of(suite, chosen, limit_s)
            ran = run_suite(suite, _arguments(suite, args), min(share_s, left))
        if ran.ended != "done":
            print(f"{suite.name}: {ran.ended}", flush=True)
            _show_partial(ran)
        ran.revision, ran.machine = revision, here
        document["suites"][suite.name] = ran.as_json()
        _write(document, output)
    print(f"\n==== targets ({time.monotonic() - began:.0f} s in all; load average before each suite: {_loads(document)})\n")
    print("\n".join(lines(judged(tables_of(document)))))
    print(f"\nwritten: {_shown(output)}")
    if output == LATEST:
        _publish()
    return 0 if all(document["suites"][suite.name]["ended"] == "done" for suite in chosen) else 1


def tables_of(document: dict[str, Any]) -> list[Table]:
    """All tables of the results."""
    return [Table.of_json(table) for suite in document["suites"].values() for table in suite["tables"]]


def share_of(suite: Suite, chosen: Sequence[Suite], limit_s: float) -> float:
    """What a suite may take of the time for all of those chosen: planned ones make do with less where the limits come to more than that."""
    scale = min(1.0, limit_s / sum(one.limit_s for one in chosen))
    return suite.limit_s * scale if suite.planned else suite.limit_s


def _begin(merged: Path | None, chosen: Sequence[str], short: bool, revision: str, here: dict[str, Any]) -> dict[str, Any]:
    """What results begin with; suites that others are merged into keep when, of what and on which machine they were measured.

    The head is this run's where it measures at least as many suites as were measured before and are kept.
    """
    head = {"version": 1, "at": now(), "revision": revision, "short": short, "machine": here, "suites": {}, "targets": []}
    if merged is None or not merged.exists():
        return head
    found: dict[str, Any] = json.loads(merged.read_text(encoding="utf-8"))
    if len(chosen) < len(set(found["suites"]) - set(chosen)):
        return found
    for suite in found["suites"].values():
        suite["revision"] = suite.get("revision") or found["revision"]
        suite["machine"] = suite.get("machine") or found["machine"]
    return {**head, "suites": found["suites"]}


def _revision() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()


def _write(document: dict[str, Any], output: Path) -> None:
    document["targets"] = [verdict.as_json() for verdict in judged(tables_of(document))]
    order = [suite.name for suite in SUITES]
    document["suites"] = dict(sorted(document["suites"].items(), key=lambda item: order.index(item[0])))
    temporary = output.with_suffix(".tmp")
    temporary.write_text(as_text(document), encoding="utf-8")
    temporary.replace(output)


def as_text(document: dict[str, Any]) -> str:
    """The results as JSON, a row of a table on a line: short, and a diff shows what changed."""
    return re.sub(r"\n {7,}|\n {6}(?=[\]}])", "", json.dumps(document, indent=1, ensure_ascii=False)) + "\n"


def _arguments(suite: Suite, args: argparse.Namespace) -> list[str]:
    given = list(suite.short if args.short else suite.full)
    for option, value in (("--nbytes", args.nbytes), ("--repeat", args.repeat), ("--directory", args.directory)):
        if value and option in suite.takes:
            given += [option, str(value)]  # the later one counts
    return given


def _show_partial(ran: Ran) -> None:
    """The tables of a suite that could not print them itself."""
    for table in ran.tables:
        table.show()


def _loads(document: dict[str, Any]) -> str:
    return ", ".join(f"{name} {suite['load_average']}" for name, suite in document["suites"].items())


def _shown(path: Path) -> str:
    return os.path.relpath(path)


def _publish() -> None:
    """Pictures and page, by programs of their own: what is missing for them must not cost the figures."""
    for program in ("plots.py", "page.py"):
        subprocess.run([sys.executable, str(HERE / program)], check=False)


if __name__ == "__main__":
    sys.exit(main())
