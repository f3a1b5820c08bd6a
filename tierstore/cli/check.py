"""``verify``: what is on the tiers against what was promised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import typer
from rich.text import Text

from tierstore.cli.find import metric_modes, scan_run, the_run
from tierstore.cli.options import Cli
from tierstore.cli.progress import tier_bars
from tierstore.cli.render import plain_table
from tierstore.clock import Clock
from tierstore.errors import NotFoundError, UsageError
from tierstore.names import Reference, parse_reference
from tierstore.tiers.files.checking import verify_files
from tierstore.tiers.findings import Finding, grouped, next_steps
from tierstore.tiers.leased import lease_ttl_s
from tierstore.tiers.progress import NO_PROGRESS, Progress
from tierstore.tiers.session import Session
from tierstore.tiers.verify import Level, VerifyReport
from tierstore.tiers.verify import verify as verify_tiers
from tierstore.units import format_size, format_some, parse_percent

__all__ = ["chosen_steps", "file_text", "reading", "subset_of", "verify"]

_STYLES = {"damage": "bold red", "warning": "yellow", "note": "dim"}
_STEPS_SHOWN = 6


def verify(
    cli: Cli,
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF]...", help="Checkpoints of one run; without any, all of it.")] = None,
    level: Annotated[
        Level | None, typer.Option("--level", help="How deep: logs and sizes; a share of the blocks; every byte. [default: quick]")
    ] = None,
    read_data_subset: Annotated[
        str | None,
        typer.Option(
            "--read-data-subset",
            metavar="K/N|P%",
            help="Level sample: the K-th of N groups of blocks, or a share of P%, each day another. [default: 1/16]",
        ),
    ] = None,
) -> int:
    """Check what the tiers hold against its digests; notes damage in the log (-n: does not). --tier NAME checks one tier."""
    depth, subset = subset_of(level, read_data_subset, cli.clock, default="quick")
    with cli.session() as session:
        run, steps = chosen_steps(session, refs or [])
        with reading(cli, session, run, depth, steps) as progress:
            report = session.run(
                verify_tiers(
                    session.tiers,
                    run,
                    level=depth,
                    only=cli.only or None,
                    steps=steps,
                    subset=subset,
                    progress=progress,
                    files_in_flight=cli.options.jobs or session.config.io.threads,
                    clock=cli.clock,
                    lease_ttl_s=lease_ttl_s(session.config, run),
                    note_damage=not cli.options.dry_run,
                )
            )
        if steps is None:  # else checkpoints are meant, and not the files beside them
            jobs = cli.options.jobs or session.config.io.threads
            plain = session.run(verify_files(session.tiers, level=depth, only=cli.only or None, subset=subset, files_in_flight=jobs))
            report = replace(
                report,
                findings=(*report.findings, *plain.findings),
                files=report.files + plain.files,
                nbytes_read=report.nbytes_read + plain.nbytes_read,
            )
    _tell(cli, report, subset)
    return report.exit_code


def chosen_steps(session: Session, refs: list[str]) -> tuple[str, tuple[int, ...] | None]:
    """The run that is meant, and its steps that `refs` name; None: all of them.

    A step whose commit record can't be read is found too: that is what verify and repair are for.

    Raises:
        UsageError: The references name several runs.
        NotFoundError: There is no such run or step.
    """
    named = [parse_reference(text) for text in refs]
    runs = {the_run(session, parsed.run) for parsed in named} or {the_run(session)}
    if len(runs) > 1:
        raise UsageError(f"the references name several runs: {', '.join(sorted(runs))}", hint="give those of one run at a time")
    run = runs.pop()
    catalog = scan_run(session, run)
    if not named:
        return run, None
    unreadable = {a.attempt.step for a in catalog.incomplete if a.unreadable}
    steps = []
    for parsed in named:
        try:
            wanted = Reference(run=run, selector=parsed.selector, step=parsed.step, argument=parsed.argument)
            steps.append(catalog.resolve(wanted, modes=metric_modes(session.config, run)).step)
        except NotFoundError:
            if parsed.step not in unreadable:
                raise
            steps.append(parsed.step)
    return run, tuple(dict.fromkeys(steps))


def subset_of(level: Level | None, text: str | None, clock: Clock, *, default: Level) -> tuple[Level, tuple[int, int]]:
    """How deep, and which of the groups of blocks: as the two options say together.

    A share takes turns: which group it is depends on the day, so that as many days as there are groups read everything.

    Raises:
        UsageError: They contradict each other, or the subset can't be read.
    """
    if text is None:
        return level or default, (1, 16)
    if level not in (None, "sample"):
        raise UsageError(
            f"--read-data-subset and --level {level} contradict each other", hint="a subset of the blocks is what --level sample reads"
        )
    if text.endswith("%"):
        try:
            share = parse_percent(text)
        except ValueError as error:
            raise _bad_subset(text) from error
        groups = max(1, int(1 / share + 1e-9)) if share > 0 else 0
        if not groups:
            raise _bad_subset(text)
        return "sample", (clock.now().toordinal() % groups + 1, groups)
    first, slash, second = text.partition("/")
    if not (slash and all(n.isascii() and n.isdigit() for n in (first, second)) and 1 <= int(first) <= int(second)):
        raise _bad_subset(text)
    return "sample", (int(first), int(second))


def _bad_subset(text: str) -> UsageError:
    return UsageError(
        f"--read-data-subset {text!r} is neither the K-th of N groups nor a share",
        hint="write e.g. 1/7, then 2/7 … 7/7 on other days; or 5%, which takes turns by itself",
    )


def _tell(cli: Cli, report: VerifyReport, subset: tuple[int, int]) -> None:
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
                "blocks": list(finding.blocks),
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
            "subset": list(subset) if report.level == "sample" else None,
            "next": [command for command, _ in next_steps(report.findings)],
            **counts,
        }
    )
    if report.findings:
        table = plain_table("CODE", "TIER", "WHAT", fold=("WHAT",))
        for finding, steps in grouped(report.findings):
            table.add_row(Text(finding.code, style=_STYLES[finding.severity]), finding.tier, _what(finding, steps))
        cli.terminal.show(table)
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    depth = f"sample {subset[0]}/{subset[1]}" if report.level == "sample" else report.level
    cli.terminal.show(
        Text(
            f"run {report.run}, {depth}: {report.checkpoints} replicas, {report.files} files, "
            f"{format_size(report.nbytes_read)} of data read: {told or 'all is as promised'}",
            style="bold red" if report.damage else "yellow" if counts["warning"] else "green",
        )
    )
    for command, why in next_steps(report.findings):
        cli.terminal.show(Text.assemble(("next: ", "cyan"), f"{command}  {why}"))


def _what(finding: Finding, steps: tuple[int, ...]) -> str:
    where = f"step{'s' if len(steps) > 1 else ''} {format_some(steps, _STEPS_SHOWN)}" if steps else ""
    place = " ".join(part for part in (where, "" if len(steps) > 1 and "/.log/" in finding.file else file_text(finding.file)) if part)
    return f"{finding.kind.name}: {place}{': ' if place else ''}{finding.detail}"


def file_text(file: str) -> str:
    """A file as a line names it: a record of the log by its number."""
    record = file.partition("/.log/")[2]
    leaf = record.partition("/")[2].removesuffix(".json")
    return file if not record else f"log record {leaf}" if leaf else "log"


@contextmanager
def reading(cli: Cli, session: Session, run: str, level: Level, steps: tuple[int, ...] | None) -> Iterator[Progress]:
    """Bars of what is read from each tier; none for the level that reads no data.

    The totals are what the catalog says, so that there is a time left from the start on.
    """
    if level == "quick" or not cli.terminal.progress:
        yield NO_PROGRESS
        return
    totals: dict[str, int] = {}
    for info in scan_run(session, run).checkpoints:
        for name in info.replicas if steps is None or info.step in steps else ():
            if not cli.only or name in cli.only:
                totals[name] = totals.get(name, 0) + info.nbytes
    with tier_bars(cli.terminal, totals) as progress:
        yield progress
