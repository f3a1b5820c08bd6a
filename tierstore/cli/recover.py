"""The verb ``recover``: finish complete attempts, and rebuild a log that the authority has lost."""

from __future__ import annotations

from typing import Annotated

import typer

from tierstore.cli.find import the_run
from tierstore.cli.options import Cli
from tierstore.errors import PartialError
from tierstore.names import Attempt
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.recover import RecoverReport
from tierstore.tiers.recover import recover as work
from tierstore.tiers.session import Session

__all__ = ["recover"]


def recover(
    cli: Cli,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for another process that works on this node's tier.")] = False,
) -> int:
    """Commit complete attempts that nobody finished, and rebuild a lost log from the replicas; deletes nothing."""
    with Session.open(cli.load(), clock=cli.clock, create=not cli.options.dry_run) as session:
        run = the_run(session)
        context = CopyContext.make(
            session.tiers, cli.clock, files_in_flight=cli.options.jobs or session.config.io.threads, max_bandwidth=cli.bwlimit
        )
        wait_s = None if wait else 0.0
        report = session.run(work(session.tiers, run, clock=cli.clock, context=context, dry_run=cli.options.dry_run, wait_s=wait_s))
    for done in report.rebuilt:
        sources = ", ".join(done.sources)
        _tell(
            cli, done.attempt, "failed" if done.error else _done(report, "rebuilt"), done.error or f"from {sources}, {done.records} records"
        )
    for attempt in report.committed:
        _tell(cli, attempt, _done(report, "committed"), "all its parts are there")
    for attempt, reason in report.incomplete:
        _tell(cli, attempt, "incomplete", reason)
    if not (report.rebuilt or report.committed or report.incomplete):
        cli.terminal.say("nothing to recover")
    if not report.ok:
        failed = [r for r in report.rebuilt if r.error]
        first = failed[0]
        raise PartialError(
            f"{len(failed)} of {len(report.rebuilt)} lost checkpoints were not rebuilt; first step {first.attempt.step}: {first.error}",
            hint="bring the tiers that hold copies back, and run `tierstore recover` again",
        )
    return 0


def _done(report: RecoverReport, word: str) -> str:
    return f"would be {word}" if report.dry_run else word


def _tell(cli: Cli, attempt: Attempt, state: str, detail: str) -> None:
    cli.terminal.emit(
        {"type": "recover", "run": attempt.run, "step": attempt.step, "save_id": attempt.save_id, "state": state, "detail": detail}
    )
    cli.terminal.show(f"{attempt.run}@{attempt.step} {state}: {detail}")
