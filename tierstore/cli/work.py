"""The verbs that work: ``sync`` and ``status``."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from tierstore.cli.find import the_run
from tierstore.cli.options import Cli
from tierstore.cli.progress import copy_bars
from tierstore.cli.render import plain_table
from tierstore.cli.retain import housekeeping, tell_brakes
from tierstore.errors import PartialError
from tierstore.tiers.catalog import runs, scan
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.gc.housekeeping import look, plan_of
from tierstore.tiers.promote import Copy, ReconcileReport, pending, reconcile
from tierstore.tiers.session import Session
from tierstore.tiers.status import Status, TierStatus, collect_status
from tierstore.units import format_duration, format_size

__all__ = ["status", "sync"]


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


def status(
    cli: Cli,
    watch: Annotated[float, typer.Option("--watch", metavar="SECONDS", min=0, help="Look again every so many seconds.")] = 0,
) -> int:
    """Show what each tier holds and lacks, how far it lags, and the last errors."""
    with cli.session() as session:
        for name in cli.only:
            session.tiers.get(name)
        run = the_run(session)
        found = _look(cli, session, run)
        if not watch:
            _emit(cli, found)
            cli.terminal.show(_render(found))
            _tell_retention(cli, session, run)
            return 0
        if cli.terminal.as_json or not cli.terminal.out.is_terminal:
            while True:
                _emit(cli, found)
                cli.terminal.show(_render(found))
                cli.terminal.out.file.flush()
                time.sleep(watch)
                found = _look(cli, session, run)
        with Live(_render(found), console=cli.terminal.out, auto_refresh=False) as live:
            while True:
                live.update(_render(found), refresh=True)
                time.sleep(watch)
                found = _look(cli, session, run)


def _tell_retention(cli: Cli, session: Session, run: str) -> None:
    """Whether a brake keeps the policy from being carried out: a trainer's worker tells only its own log."""
    h = housekeeping(cli, session, run)
    if h.policy is not None:
        situation = session.run(look(h))
        tell_brakes(cli, session, h, situation, plan_of(h, situation))


def _look(cli: Cli, session: Session, run: str) -> Status:
    found = session.run(collect_status(session.tiers, run, clock=cli.clock))
    return replace(found, tiers=tuple(t for t in found.tiers if not cli.only or t.name in cli.only))


def _emit(cli: Cli, found: Status) -> None:
    cli.terminal.emit(
        {"type": "run", "run": found.run, "committed": found.committed, "incomplete": found.incomplete, "newest_step": found.newest_step}
    )
    for tier in found.tiers:
        cli.terminal.emit(
            {
                "type": "tier",
                "tier": tier.name,
                "uri": tier.uri,
                "scope": tier.scope,
                "durable": tier.durable,
                "authority": tier.authority,
                "reachable": tier.reachable,
                "checkpoints": tier.checkpoints,
                "newest_step": tier.newest_step,
                "nbytes": tier.nbytes,
                "pending": tier.pending,
                "pending_nbytes": tier.pending_nbytes,
                "lag_s": tier.lag_s,
                "free_nbytes": tier.free_nbytes,
                "error": tier.error,
            }
        )


def _render(found: Status) -> Group:
    newest = f", newest step {found.newest_step}" if found.newest_step is not None else ""
    incomplete = f", {found.incomplete} incomplete" if found.incomplete else ""
    heading = Text.assemble("run ", (found.run, "bold"), f"   {found.committed} committed{incomplete}{newest}")
    table = plain_table(
        "TIER",
        ("HOLDS", "right"),
        ("NEWEST", "right"),
        ("SIZE", "right"),
        ("PENDING", "right"),
        ("LAG", "right"),
        ("FREE", "right"),
        "STATE",
        fold=("STATE",),
    )
    for tier in found.tiers:
        table.add_row(
            tier.name,
            str(tier.checkpoints) if tier.reachable else "?",
            str(tier.newest_step) if tier.newest_step is not None else "-",
            format_size(tier.nbytes),
            f"{tier.pending} ({format_size(tier.pending_nbytes)})" if tier.pending else "0",
            format_duration(tier.lag_s) if tier.lag_s is not None else "-",
            format_size(tier.free_nbytes) if tier.free_nbytes is not None else "-",
            _state(tier),
        )
    errors = [Text.assemble((f"{t.name}: ", "bold red"), t.error) for t in found.tiers if t.error]
    return Group(heading, table, *errors)


def _state(tier: TierStatus) -> Text:
    words = [("ok", "green") if tier.reachable and not tier.error else ("failing", "bold red") if tier.reachable else ("down", "bold red")]
    words += [("decides", "")] if tier.authority else []
    words += [("not durable", "")] if not tier.durable else []
    text = Text()
    for word, style in words:
        text.append(", " if text else "").append(word, style=style)
    return text
