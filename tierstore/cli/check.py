"""``verify``: what is on the tiers against what was promised."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.progress import DownloadColumn, SpinnerColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from tierstore.cli.find import find_checkpoint, scan_run, the_run
from tierstore.cli.options import Cli
from tierstore.cli.render import plain_table
from tierstore.cli.terminal import Terminal
from tierstore.errors import UsageError
from tierstore.names import Attempt
from tierstore.tiers.findings import Finding
from tierstore.tiers.progress import NO_PROGRESS, Progress
from tierstore.tiers.verify import Level, VerifyReport
from tierstore.tiers.verify import verify as verify_tiers
from tierstore.units import format_size

__all__ = ["verify"]

_STYLES = {"damage": "bold red", "warning": "yellow", "note": "dim"}


def verify(
    cli: Cli,
    ref: Annotated[str | None, typer.Argument(metavar="[REF]", help="One checkpoint; without one, all of the run.")] = None,
    level: Annotated[Level, typer.Option("--level", help="How deep: logs and sizes; a share of the blocks; every byte.")] = "quick",
    read_data_subset: Annotated[
        str | None,
        typer.Option("--read-data-subset", metavar="K/N", help="The K-th of N groups of blocks, with level sample. [default: 1/16]"),
    ] = None,
) -> int:
    """Check what the tiers hold against its digests; changes nothing. --tier NAME checks one tier."""
    if read_data_subset and level == "full":
        raise UsageError("--read-data-subset and --level full contradict each other", hint="full reads everything: leave the subset out")
    depth: Level = "sample" if read_data_subset else level
    subset = _subset(read_data_subset) if read_data_subset else (1, 16)
    with cli.session() as session:
        steps: tuple[int, ...] | None = None
        if ref is not None:
            _, info = find_checkpoint(session, ref)
            run, steps = info.run, (info.step,)
        else:
            run = the_run(session)
            scan_run(session, run)
        with _reading(cli.terminal) as progress:
            report = session.run(
                verify_tiers(session.tiers, run, level=depth, only=cli.only or None, steps=steps, subset=subset, progress=progress)
            )
    _tell(cli, report)
    return report.exit_code


def _subset(text: str) -> tuple[int, int]:
    first, slash, second = text.partition("/")
    if not (slash and first.isascii() and first.isdigit() and second.isascii() and second.isdigit() and 1 <= int(first) <= int(second)):
        raise UsageError(f"--read-data-subset {text!r} is not the K-th of N groups", hint="write e.g. 1/7, then 2/7 … 7/7 on other days")
    return int(first), int(second)


def _tell(cli: Cli, report: VerifyReport) -> None:
    for finding in report.findings:
        cli.terminal.emit(
            {
                "type": "finding",
                "code": finding.code,
                "name": finding.kind.name,
                "severity": finding.severity,
                "tier": finding.tier,
                "checkpoint": finding.checkpoint,
                "file": finding.file,
                "detail": finding.detail,
                "hint": finding.hint,
            }
        )
    counts = {name: sum(f.severity == name for f in report.findings) for name in _STYLES}
    cli.terminal.emit(
        {
            "type": "report",
            "run": report.run,
            "level": report.level,
            "replicas": report.checkpoints,
            "files": report.files,
            "nbytes_read": report.nbytes_read,
            **counts,
        }
    )
    if report.findings:
        table = plain_table("CODE", "TIER", "WHAT", fold=("WHAT",))
        order = list(_STYLES)
        for finding in sorted(report.findings, key=lambda f: order.index(f.severity)):
            table.add_row(Text(finding.code, style=_STYLES[finding.severity]), finding.tier, _what(finding))
        cli.terminal.show(table)
        for hint in dict.fromkeys(f.hint for f in report.findings if f.severity == "damage"):
            cli.terminal.show(Text.assemble(("hint: ", "cyan"), hint))
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    cli.terminal.show(
        Text(
            f"run {report.run}, {report.level}: {report.checkpoints} replicas, {report.files} files, "
            f"{format_size(report.nbytes_read)} of data read: {told or 'all is as promised'}",
            style="bold red" if report.damage else "green",
        )
    )


def _what(finding: Finding) -> str:
    name = finding.checkpoint.rpartition("/")[2]
    step = int(name.split("-")[1]) if name.startswith("step-") else None
    where = " ".join(part for part in (f"step {step}" if step is not None else "", finding.file) if part)
    return f"{finding.kind.name}: {where}{': ' if where else ''}{finding.detail}"


@contextmanager
def _reading(terminal: Terminal) -> Iterator[Progress]:
    """How much was read, and how fast, on stderr."""
    if not terminal.progress:
        yield NO_PROGRESS
        return
    columns = (SpinnerColumn(), TextColumn("reading"), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with RichProgress(*columns, console=terminal.err, transient=True) as bars:
        task = bars.add_task("reading", total=None)
        read: dict[tuple[str, Attempt, str], int] = {}
        lock = threading.Lock()

        def progress(tier: str, attempt: Attempt, file: str, nbytes_done: int, nbytes: int) -> None:
            with lock:
                read[tier, attempt, file] = nbytes_done
                total = sum(read.values())
            bars.update(task, completed=total)

        yield progress
