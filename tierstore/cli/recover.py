"""The verb ``recover``: finish complete attempts, and rebuild a log that the authority has lost."""

from __future__ import annotations

from typing import Annotated

import typer

from tierstore.cli.find import chosen_runs
from tierstore.cli.options import Cli
from tierstore.cli.progress import tier_bars
from tierstore.errors import PartialError
from tierstore.names import Attempt
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.opening import rejoin
from tierstore.tiers.recover import RecoverReport
from tierstore.tiers.recover import recover as work
from tierstore.tiers.session import Session
from tierstore.tiers.tier import read_store_id
from tierstore.units import format_size

__all__ = ["recover"]


def recover(
    cli: Cli,
    all_runs: Annotated[bool, typer.Option("--all-runs", help="All runs of the store, not only the configuration's.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for another process that works on this node's tier.")] = False,
) -> int:
    """Commit complete attempts that nobody finished, and rebuild a lost log from the replicas; deletes nothing.

    Where the authority is empty, all runs are rebuilt, and then it belongs to the store again.
    """
    dry_run = cli.options.dry_run
    with Session.open(cli.load(), clock=cli.clock, create=not dry_run, lost="recover") as session:
        empty = session.run(read_store_id(session.tiers.authority)) is None
        reports = {run: _recover_run(cli, session, run, wait) for run in chosen_runs(session, all_runs=all_runs or empty)}
        if empty and not dry_run:
            session.run(rejoin(session.tiers))
            cli.terminal.say(f"tier {session.tiers.authority.name!r} belongs to the store {session.tiers.store_id} again")
    if not any(r.rebuilt or r.committed or r.incomplete for r in reports.values()):
        cli.terminal.say("nothing to recover")
    rebuilt = [r for report in reports.values() for r in report.rebuilt]
    failed = [r for r in rebuilt if r.error]
    if len(rebuilt) > len(failed) and not dry_run:
        lost = "decisions that the copies had not got yet (pins, holds, tags) are lost with the log"
        cli.terminal.say(f"{lost}: see `tierstore plan`, and pin again what must stay, before a training or a prune goes by the rules")
    if failed:
        first = failed[0]
        raise PartialError(
            f"{len(failed)} of {len(rebuilt)} lost checkpoints were not rebuilt; first "
            f"{first.attempt.run}@{first.attempt.step}: {first.error}",
            hint="bring the tiers that hold copies back, and run `tierstore recover` again",
        )
    return 0


def _recover_run(cli: Cli, session: Session, run: str, wait: bool) -> RecoverReport:
    dry_run = cli.options.dry_run
    with tier_bars(cli.terminal, {}) as progress:
        context = CopyContext.make(
            session.tiers,
            cli.clock,
            files_in_flight=cli.options.jobs or session.config.io.threads,
            max_bandwidth=cli.bwlimit,
            progress=progress,
        )
        report = session.run(work(session.tiers, run, clock=cli.clock, context=context, dry_run=dry_run, wait_s=None if wait else 0.0))
    for done in report.rebuilt:
        detail = f"from {', '.join(done.sources)}, {done.records} record{'s' if done.records != 1 else ''}, "
        none = (
            "no files: what is left is quantised, and can be loaded from there"
            if done.quantised
            else "no files: it was dropped there on purpose"
        )
        detail += format_size(done.nbytes) if done.nbytes else none
        _tell(cli, done.attempt, "failed" if done.error else _done(report, "rebuilt"), done.error or detail)
    for attempt in report.committed:
        _tell(cli, attempt, _done(report, "committed"), "all its parts are there")
    for attempt, reason in report.incomplete:
        _tell(cli, attempt, "incomplete", reason)
    return report


def _done(report: RecoverReport, word: str) -> str:
    return f"would be {word}" if report.dry_run else word


def _tell(cli: Cli, attempt: Attempt, state: str, detail: str) -> None:
    cli.terminal.emit(
        {"type": "recover", "run": attempt.run, "step": attempt.step, "save_id": attempt.save_id, "state": state, "detail": detail}
    )
    cli.terminal.show(f"{attempt.run}@{attempt.step} {state}: {detail}")
