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
    report = ReconcileReport(
        done=tuple(c for r in reports for c in r.done),
        waiting=tuple(w for r in reports for w in r.waiting),
        failed=tuple(f for r in reports for f in r.failed),
    )
    return _conclude(cli, report)


def _sync_run(cli: Cli, session: Session, run: str, wait: bool) -> ReconcileReport:
    tiers = session.tiers
    copies = [c for c in pending(session.run(scan(tiers, run, session.new_cache())), tiers) if not cli.only or c.tier in cli.only]
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
        report = session.run(reconcile(tiers, run, clock=cli.clock, context=context, only=cli.only or None, wait_s=None if wait else 0.0))
    for copy in report.done:
        _tell(cli, copy, "done", "")
    for copy, reason in report.waiting:
        _tell(cli, copy, "waiting", reason)
    for failure in report.failed:
        _tell(cli, failure.copy, "failed", failure.error.message)
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


def _conclude(cli: Cli, report: ReconcileReport) -> int:
    if not (report.done or report.waiting or report.failed):
        if not cli.options.dry_run:
            cli.terminal.say("nothing was pending")
        return 0
    if not report.failed:
        return 0
    first = report.failed[0].error
    if report.done:
        raise PartialError(
            f"{len(report.done)} copies were made, {len(report.failed)} failed; the first: {first.message}",
            hint=first.hint or "run `tierstore sync` again: it goes on where it stopped",
        )
    raise first
