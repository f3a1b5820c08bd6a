"""The verb ``sync``: everything pending is worked off, in the foreground."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from tierstore.cli.options import Cli
from tierstore.cli.progress import copy_bars
from tierstore.errors import PartialError
from tierstore.tiers.catalog import runs, scan
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.files.syncing import FilesReport, sync_files
from tierstore.tiers.promote import Copy, ReconcileReport, pending, reconcile
from tierstore.tiers.session import Session
from tierstore.units import format_size

__all__ = ["sync"]


def sync(
    cli: Cli,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for another process that works on this node's tier.")] = False,
) -> int:
    """Work off everything pending: commit complete attempts, copy checkpoints to the tiers that lack them."""
    with Session.open(cli.load(), clock=cli.clock, create=not cli.options.dry_run) as session:
        for name in cli.only:
            session.tiers.get(name)  # a wrong name is answered with the nearest one
        named = session.config.run
        chosen = [named] if named else session.run(runs(session.tiers))
        reports = [_sync_run(cli, session, run, wait) for run in chosen]
        files = _sync_files(cli, session)
    report = ReconcileReport(
        done=tuple(c for r in reports for c in r.done),
        waiting=tuple(w for r in reports for w in r.waiting),
        failed=tuple(f for r in reports for f in r.failed),
    )
    return _conclude(cli, report, files)


def _sync_run(cli: Cli, session: Session, run: str, wait: bool) -> ReconcileReport:
    tiers = session.tiers
    cache = session.new_cache()
    copies = [c for c in pending(session.run(scan(tiers, run, cache)), tiers) if not cli.only or c.tier in cli.only]
    if cli.options.dry_run:
        for copy in copies:
            _tell(cli, copy, "pending", "")
        return ReconcileReport()
    with copy_bars(cli.terminal, copies) as progress:
        context = CopyContext.make(
            tiers,
            cli.clock,
            files_in_flight=cli.options.jobs or session.config.io.threads,
            max_bandwidth=cli.bwlimit,
            progress=progress,
        )
        wait_s = None if wait else 0.0
        work = reconcile(tiers, run, clock=cli.clock, context=context, only=cli.only or None, wait_s=wait_s, cache=cache)
        report = session.run(work)
    for copy in report.done:
        _tell(cli, copy, "done", "")
    for copy, reason in report.waiting:
        _tell(cli, copy, "waiting", reason)
    for failure in report.failed:
        _tell(cli, failure.copy, "failed", failure.error.message)
    return report


def _sync_files(cli: Cli, session: Session) -> FilesReport:
    """The files of ``tier://`` that are no checkpoints."""
    context = CopyContext.make(
        session.tiers, cli.clock, files_in_flight=cli.options.jobs or session.config.io.threads, max_bandwidth=cli.bwlimit
    )
    report = session.run(sync_files(session, context=context, only=cli.only or None, dry_run=cli.options.dry_run))
    left = {(one.path, one.tier): one.reason for one in report.left}
    failed = {(path, tier): error.message for path, tier, error in report.failed}
    for one in report.lacking:
        for tier in one.targets:
            at = (one.path, tier.name)
            state = "pending" if cli.options.dry_run else "failed" if at in failed else "waiting" if at in left else "done"
            reason = failed.get(at) or left.get(at) or ""
            cli.terminal.emit({"type": "file", "path": one.path, "tier": tier.name, "nbytes": one.nbytes, "state": state, "reason": reason})
            action = f"remove from {tier.name}" if one.gone else f"copy to {tier.name}, {format_size(one.nbytes)}"
            style = {"done": "green", "waiting": "yellow", "failed": "bold red"}.get(state, "")
            because = f": {reason}" if reason else ""
            cli.terminal.show(Text.assemble((f"{state:<8}", style), f"{one.path} {action}{because}"))
    return report


def _tell(cli: Cli, copy: Copy, state: str, reason: str) -> None:
    value: dict[str, Any] = {
        "type": "copy",
        "run": copy.attempt.run,
        "step": copy.attempt.step,
        "save_id": copy.attempt.save_id,
        "tier": copy.tier,
        "kind": copy.kind,
        "nbytes": copy.nbytes,
        "state": state,
        "reason": reason,
    }
    cli.terminal.emit(value)
    action = {"commit": "commit on", "complete": "complete on", "promote": "copy to"}[copy.kind]
    size = f", {format_size(copy.nbytes)}" if copy.nbytes else ""
    style = {"done": "green", "waiting": "yellow", "failed": "bold red"}.get(state, "")
    because = f": {reason}" if reason else ""
    cli.terminal.show(Text.assemble((f"{state:<8}", style), f"{copy.attempt.run}@{copy.attempt.step} {action} {copy.tier}{size}{because}"))


def _conclude(cli: Cli, report: ReconcileReport, files: FilesReport) -> int:
    counts = {"done": len(report.done), "waiting": len(report.waiting), "failed": len(report.failed)}
    cli.terminal.emit({"type": "sync", **counts, "dry_run": cli.options.dry_run})
    if not (report.done or report.waiting or report.failed or files.lacking):
        if not cli.options.dry_run:
            cli.terminal.say("nothing was pending")
        return 0
    failures = [*(failure.error for failure in report.failed), *(error for _, _, error in files.failed)]
    if not failures:
        return 0
    first = failures[0]
    if report.done or len(files.lacking) > len(files.failed):
        made = len(report.done) + len(files.lacking) - len(files.failed)
        raise PartialError(
            f"{made} copies were made, {len(failures)} failed; the first: {first.message}",
            hint=first.hint or "run `tierstore sync` again: it goes on where it stopped",
        )
    raise first
