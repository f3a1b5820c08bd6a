"""The verb ``repair``: what verify finds damaged is written anew from the tiers that have it good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from tierstore.cli.check import chosen_steps, file_text, reading, subset_of
from tierstore.cli.options import Cli
from tierstore.errors import IntegrityError
from tierstore.names import Attempt
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.files.checking import mend_files, verify_files
from tierstore.tiers.findings import next_steps
from tierstore.tiers.leased import lease_ttl_s
from tierstore.tiers.repair import Mended, RepairReport, Unmended
from tierstore.tiers.repair import repair as work
from tierstore.tiers.session import Session
from tierstore.tiers.verify import Level
from tierstore.units import format_size, format_some

__all__ = ["repair"]

_SHOWN = 6


def repair(
    cli: Cli,
    refs: Annotated[list[str] | None, typer.Argument(metavar="[REF]...", help="Checkpoints of one run; without any, all of it.")] = None,
    level: Annotated[Level | None, typer.Option("--level", help="How deep to look for damage: as for verify. [default: full]")] = None,
    read_data_subset: Annotated[
        str | None, typer.Option("--read-data-subset", metavar="K/N|P%", help="Look at a share of the blocks only: as for verify.")
    ] = None,
) -> int:
    """Mend what is damaged, block by block, from the tiers that have it good; deletes nothing. --tier NAME mends one tier."""
    depth, subset = subset_of(level, read_data_subset, cli.clock, default="full")
    with Session.open(cli.load(), clock=cli.clock, create=not cli.options.dry_run) as session:
        run, steps = chosen_steps(session, refs or [])
        jobs = cli.options.jobs or session.config.io.threads
        with reading(cli, session, run, depth, steps) as progress:
            context = CopyContext.make(session.tiers, cli.clock, files_in_flight=jobs, max_bandwidth=cli.bwlimit, progress=progress)
            report = session.run(
                work(
                    session.tiers,
                    run,
                    clock=cli.clock,
                    context=context,
                    level=depth,
                    subset=subset,
                    steps=steps,
                    only=cli.only or None,
                    dry_run=cli.options.dry_run,
                    files_in_flight=jobs,
                    lease_ttl_s=lease_ttl_s(session.config, run),
                )
            )
        plain = _repair_files(cli, session, depth, subset) if steps is None else 0
    _tell(cli, report)
    return report.exit_code or plain


def _repair_files(cli: Cli, session: Session, level: Level, subset: tuple[int, int]) -> int:
    """The files of ``tier://`` that are no checkpoints; returns the exit code."""
    tiers, jobs = session.tiers, cli.options.jobs or session.config.io.threads
    found = session.run(verify_files(tiers, level=level, only=cli.only or None, subset=subset, files_in_flight=jobs))
    damage = [f for f in found.findings if f.severity == "damage"]
    errors: dict[tuple[str, str], str] = {}
    if not cli.options.dry_run:
        context = CopyContext.make(tiers, cli.clock, files_in_flight=jobs, max_bandwidth=cli.bwlimit)
        done = session.run(mend_files(tiers, context, damage))
        errors = {(one.path, one.tier): one.error.message for one in done if one.error is not None}
    for finding in damage:
        error = errors.get((finding.file, finding.tier), "")
        state = "would be mended" if cli.options.dry_run else "not mended" if error else "mended"
        value = {"tier": finding.tier, "file": finding.file, "state": state, "detail": error or finding.detail}
        cli.terminal.emit({"type": "repair", "run": None, "step": None, "save_id": None, **value})
        style = "bold red" if error else "green"
        cli.terminal.show(Text.assemble((f"{state:<10}", style), f" {finding.file} on {finding.tier}: {error or finding.detail}"))
    return IntegrityError.exit_code if errors else 0


def _tell(cli: Cli, report: RepairReport) -> None:
    word = "would be mended" if report.dry_run else "mended"
    for mended in report.mended:
        facts = {name: getattr(mended, name) for name in ("blocks", "sources", "nbytes_fetched", "nbytes_written")}
        _line(cli, mended.attempt, mended.tier, mended.file, word, "green", _how(mended), **facts)
    for attempt, tier in report.proved:
        _line(cli, attempt, tier, "", "proved", "green", "recorded anew as a good copy")
    _tell_unmended(cli, report.unmended)
    for finding in report.verified.findings:
        if finding.code == "V125" and finding.attempt is not None:  # no tier could mend it
            _line(cli, finding.attempt, finding.tier, "", "left alone", "yellow", finding.detail)
    for attempt, why in report.skipped:
        _line(cli, attempt, "", "", "left alone", "yellow", why)
    follow = next_steps(report.lost_logs)
    cli.terminal.emit(
        {
            "type": "report",
            "run": report.run,
            "level": report.level,
            "dry_run": report.dry_run,
            "mended": len(report.mended),
            "unmended": len(report.unmended),
            "skipped": len(report.skipped),
            "lost_logs": len(report.lost_logs),
            "nbytes_fetched": sum(m.nbytes_fetched for m in report.mended),
            "nbytes_written": sum(m.nbytes_written for m in report.mended),
            "nbytes_read": report.verified.nbytes_read,
            "next": [command for command, _ in follow],
        }
    )
    fetched = format_size(sum(m.nbytes_fetched for m in report.mended))
    count = len(report.mended)
    told = f"{count} file{'s' if count > 1 else ''} {word}, {fetched} from other tiers" if count else "nothing to mend"
    bad = len(report.unmended)
    failed = f"; {bad} can't be mended" if bad else ""
    cli.terminal.show(Text(f"run {report.run}, {report.level}: {told}{failed}", style="bold red" if report.exit_code else "green"))
    for command, why in follow:
        cli.terminal.show(Text.assemble(("next: ", "cyan"), f"{command}  {why}"))
    if bad and not report.dry_run:
        remedy = "bring back every tier that holds a copy, and repair again; else load another step"
        if left := sorted({tier for lost in report.unmended for tier in lost.quantised}):
            remedy += (
                f", or the quantised copy on {', '.join(left)} (it loads, with a warning), and save what was loaded as a new checkpoint"
            )
        cli.terminal.show(Text.assemble(("next: ", "cyan"), remedy))


def _tell_unmended(cli: Cli, unmended: Sequence[Unmended]) -> None:
    """Blocks that are good nowhere are one line, though each tier's copy lacks them."""
    together: dict[tuple[Attempt, str, tuple[int, ...]], list[Unmended]] = {}
    for lost in unmended:
        detail = _why(lost) if lost.blocks else lost.reason
        _emit(cli, lost.attempt, lost.tier, lost.file, "not mended", detail, blocks=lost.blocks, tensors=lost.tensors)
        together.setdefault((lost.attempt, lost.file, lost.blocks), []).append(lost)
    for group in together.values():
        if group[0].blocks:
            _show(cli, group[0].attempt, ", ".join(lost.tier for lost in group), group[0].file, "not mended", "bold red", _why(group[0]))
        else:
            for lost in group:
                _show(cli, lost.attempt, lost.tier, lost.file, "not mended", "bold red", lost.reason)


def _line(cli: Cli, attempt: Attempt, tier: str, file: str, state: str, style: str, detail: str, **more: object) -> None:
    _emit(cli, attempt, tier, file, state, detail, **more)
    _show(cli, attempt, tier, file, state, style, detail)


def _emit(cli: Cli, attempt: Attempt, tier: str, file: str, state: str, detail: str, **more: object) -> None:
    value = {"run": attempt.run, "step": attempt.step, "save_id": attempt.save_id, "tier": tier, "file": file}
    cli.terminal.emit({"type": "repair", **value, "state": state, "detail": detail, **more})


def _show(cli: Cli, attempt: Attempt, tier: str, file: str, state: str, style: str, detail: str) -> None:
    place = " ".join(part for part in (tier, file_text(file)) if part)
    cli.terminal.show(Text.assemble((f"{state:<10}", style), f" {attempt.run}@{attempt.step} {place}{': ' if place else ''}{detail}"))


def _how(mended: Mended) -> str:
    blocks = f"block{'s' if len(mended.blocks) > 1 else ''} {format_some(mended.blocks, _SHOWN)} " if mended.blocks else ""
    return f"{blocks}from {', '.join(mended.sources) or 'its own bytes'}"


def _why(lost: Unmended) -> str:
    numbers = f"block{'s' if len(lost.blocks) > 1 else ''} {format_some(lost.blocks, _SHOWN)}"
    tensors = f", with bytes of {format_some(lost.tensors, _SHOWN)}" if lost.tensors else ""
    return f"{numbers} {'are' if len(lost.blocks) > 1 else 'is'} good on no tier{tensors} ({lost.reason})"
