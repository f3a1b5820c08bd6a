"""``plan``, ``prune`` and ``undelete``: what would go and why, deciding it, and taking it back. None of them frees anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Annotated

import typer
from rich.text import Text

from tierstore.cli.confirm import confirm
from tierstore.cli.find import chosen_runs, find_attempts, scan_run, the_run
from tierstore.cli.labels import decide
from tierstore.cli.options import Cli
from tierstore.cli.plan_table import plan_summary, plan_table, plan_values, plural, rows_left_out, sum_nbytes
from tierstore.cli.render import catalog_legend, catalog_summary, wrapped
from tierstore.clock import when_text
from tierstore.config import RetentionConfig, load_config
from tierstore.errors import NotFoundError, PartialError, RefusedError, TierStoreError, UsageError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers import decisions
from tierstore.tiers.catalog import CheckpointInfo
from tierstore.tiers.gc.brakes import check_ground, check_share
from tierstore.tiers.gc.housekeeping import Housekeeping, Situation, look, plan_of
from tierstore.tiers.gc.prune import PruneReport
from tierstore.tiers.gc.prune import prune as carry_out
from tierstore.tiers.pending import pending
from tierstore.tiers.retention import Plan
from tierstore.tiers.session import Session
from tierstore.units import format_size, format_some, parse_duration, parse_percent

__all__ = ["AllRuns", "PolicyFile", "housekeeping", "on_each_run", "plan", "policy_from", "prune", "tell_brakes", "undelete"]

AllRuns = Annotated[bool, typer.Option("--all-runs", help="All runs of the store, each by its own policy.")]
PolicyFile = Annotated[str | None, typer.Option("--policy", metavar="FILE", help="Another retention policy than the configuration's.")]


def plan(
    cli: Cli,
    policy: PolicyFile = None,
    at: Annotated[str | None, typer.Option("--at", metavar="TIME", help="As of another time: 2026-12-01T06:00Z, or +3d from now.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every row, also of a very long plan.")] = False,
    all_runs: AllRuns = False,
) -> int:
    """Show what retention would do to each checkpoint, and why. Changes nothing."""
    cli.refuse_names("a plan is about all tiers")
    with cli.session() as session:
        rules = policy_from(session, policy)
        now = _time(at, cli.clock.now()) if at else None

        def one(run: str) -> None:
            h = housekeeping(cli, session, run, rules)
            situation = _look(session, h, now)
            found = plan_of(h, situation)
            _emit_plan(cli, found)
            _show_plan(cli, session, situation, found, everything=everything)
            tell_brakes(cli, session, h, situation, found)

        return on_each_run(cli, chosen_runs(session, all_runs=all_runs), one)


def prune(
    cli: Cli,
    policy: PolicyFile = None,
    max_delete_fraction: Annotated[
        str | None, typer.Option("--max-delete-fraction", metavar="PERCENT", help="Let more go at once than the policy allows, e.g. 80%.")
    ] = None,
    all_runs: AllRuns = False,
) -> int:
    """Decide by the policy which checkpoints go. They are hidden now, can be taken back for a while, and `gc` frees them after it."""
    cli.refuse_names("it is decided about checkpoints, not about one tier's copies; `evict` drops a copy")
    fraction = parse_percent(max_delete_fraction) if max_delete_fraction else None
    with cli.session() as session:
        rules = policy_from(session, policy)
        runs = chosen_runs(session, all_runs=all_runs)
        gc = f"tierstore gc --policy {policy}" if policy else "tierstore gc"
        return on_each_run(cli, runs, lambda run: _prune_run(cli, session, housekeeping(cli, session, run, rules), fraction, gc))


def _prune_run(cli: Cli, session: Session, h: Housekeeping, fraction: float | None, gc: str) -> None:
    situation = _look(session, h, None)
    found = plan_of(h, situation)
    going = [e for e in found.entries if e.action == "expire"]
    returning = [e for e in found.entries if e.action == "revive"]
    if cli.options.dry_run or not cli.options.yes:
        _show_plan(cli, session, situation, found)
    would = session.run(carry_out(h, found, max_delete_fraction=fraction, dry_run=True))  # a brake speaks before anybody is asked
    if not (going or returning):
        cli.terminal.emit({"type": "prune", "run": h.run, "plan": found.id, "expired": 0, "revived": 0, "dry_run": cli.options.dry_run})
        cli.terminal.say(f"run {h.run}: nothing to decide")
        return
    if not cli.options.dry_run:
        words = [f"expire {plural(len(going), 'checkpoint')} of run {h.run} ({format_size(sum_nbytes(going))})"] if going else []
        words += [f"take {plural(len(returning), 'checkpoint')} back"] if returning else []
        confirm(cli, " and ".join(words))
        would = session.run(carry_out(h, found, max_delete_fraction=fraction))
    _tell_pruned(cli, found, would, gc)


def _tell_pruned(cli: Cli, found: Plan, report: PruneReport, gc: str) -> None:
    """What was decided; `gc` is the command that frees it: by the policy that let it go, for another one may keep it."""
    now, dry = cli.clock.now(), cli.options.dry_run
    entries = {entry.attempt: entry for entry in found.entries}
    may = "would be " if dry else ""
    ends: list[datetime] = []
    for attempt in report.expired:
        entry = entries[attempt]
        why = "; ".join(reason.text for reason in entry.reasons)
        ends += [entry.not_before] if entry.not_before else []
        until = f"; undelete until {when_text(entry.not_before, now)}" if entry.not_before else ""
        _tell_decided(cli, attempt, "expired", f"{may}expired: {why}{until}", dry, not_before=entry.not_before)
    for attempt in report.revived:
        why = "; ".join(reason.text for reason in entries[attempt].reasons)
        _tell_decided(cli, attempt, "revived", f"{may}taken back: {why}", dry)
    for attempt, reason in report.passed_over:
        _tell_decided(cli, attempt, "passed over", f"stays as it is: {reason}", dry)
    counts = {"expired": len(report.expired), "revived": len(report.revived), "passed_over": len(report.passed_over)}
    cli.terminal.emit({"type": "prune", "run": found.run, "plan": found.id, **counts, "dry_run": dry})
    if ends and not dry:
        back = f"`tierstore undelete --plan {found.id}` takes all of it back until {when_text(min(ends), now)}"
        cli.terminal.show(wrapped(f"{back}; `{gc}` frees it after that"))


def _tell_decided(cli: Cli, attempt: Attempt, kind: str, told: str, dry: bool, not_before: datetime | None = None) -> None:
    value = {"type": "decision", "run": attempt.run, "step": attempt.step, "save_id": attempt.save_id, "kind": kind, "told": told}
    cli.terminal.emit({**value, "not_before": not_before, "state": "planned" if dry else "done"})
    cli.terminal.show(f"{attempt.run}@{attempt.step} {told}")


def undelete(
    cli: Cli,
    refs: Annotated[
        list[str] | None, typer.Argument(metavar="[REF…]", help="Expired checkpoints, such as RUN@12000; several are fine.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All expired checkpoints of the run.")] = False,
    plan_id: Annotated[str | None, typer.Option("--plan", metavar="ID", help="Those that one prune expired; it printed the id.")] = None,
) -> int:
    """Take expired checkpoints back, as long as gc has not freed them."""
    cli.refuse_names("checkpoints are taken back, on all tiers")
    if bool(refs) + everything + bool(plan_id) != 1:
        raise UsageError("undelete takes REFs, or --all, or --plan ID: one of them", hint="`tierstore ls` marks those that are expired")
    with cli.session() as session:
        targets = _expired(session, refs or (), plan_id or "")
        if not targets:
            cli.terminal.say("nothing has expired")
            return 0
        back: list[Attempt] = []

        def take_back(attempt: Attempt) -> Record | None:
            record = session.run(decisions.undelete(session.tiers, attempt, clock=cli.clock))
            back.extend([attempt] if record else [])
            return record

        code = decide(cli, targets, "taken back", take_back)
        policy = session.config.retention_for(next(iter(targets)).run)
    if policy is not None and back:
        kept = when_text(cli.clock.now() + timedelta(seconds=policy.gc.undelete_window_s), cli.clock.now())
        cli.terminal.say(f"kept until {kept} whatever the rules say; `tierstore pin` keeps longer")
    return code


def _expired(session: Session, refs: Sequence[str], plan_id: str) -> dict[Attempt, CheckpointInfo | None]:
    if refs:
        return {one.attempt: one.info for one in find_attempts(session, refs)}
    catalog = scan_run(session, the_run(session))
    expired = {c.attempt: c.expired for c in catalog.checkpoints if c.expired is not None}
    chosen = {c.attempt: c for c in catalog.checkpoints if c.attempt in expired and expired[c.attempt].plan.startswith(plan_id)}
    if plan_id and not chosen:
        plans = sorted({one.plan for one in expired.values()})
        hint = f"what can be taken back was expired by {format_some(plans, 5)}" if plans else "nothing has expired, or gc has freed it"
        raise NotFoundError(f"run {catalog.run!r} has nothing left that plan {plan_id!r} expired", hint=hint, run=catalog.run)
    return dict(chosen)


def housekeeping(cli: Cli, session: Session, run: str, policy: RetentionConfig | None = None, *, local: bool = True) -> Housekeeping:
    """What the engine works with, for one run, as the command line does it: on the shared tiers, and with `local` on this node's."""
    return Housekeeping(
        tiers=session.tiers,
        run=run,
        policy=policy or session.config.retention_for(run),
        clock=cli.clock,
        cache=session.new_cache(),
        leases=session.new_watch(),
        local=local,
    )


def on_each_run(cli: Cli, runs: Sequence[str], work: Callable[[str], None]) -> int:
    """Works on each run; one that is refused or fails does not stop the others.

    Raises:
        PartialError: Some failed.
        TierStoreError: The only one failed, or all did: the first failure.
    """
    failures: list[TierStoreError] = []
    for run in runs:
        try:
            work(run)
        except TierStoreError as error:
            failures.append(error)
            if len(runs) > 1:
                cli.terminal.complain(error)
    if failures and len(failures) < len(runs):
        first = failures[0]
        raise PartialError(f"{len(failures)} of {len(runs)} runs failed, the first: {first.message}", hint=first.hint)
    if failures:
        raise failures[0]
    return 0


def _look(session: Session, h: Housekeeping, at: datetime | None) -> Situation:
    """Everything that a plan is made from; a wrong run is answered with the nearest one."""
    situation = session.run(look(h))
    if not (situation.catalog.checkpoints or situation.catalog.incomplete or situation.catalog.swept):
        scan_run(session, h.run)
    return situation if at is None else replace(situation, at=at)


def policy_from(session: Session, file: str | None) -> RetentionConfig | None:
    return load_config(session.config, retention=file).retention if file else None


def _time(text: str, now: datetime) -> datetime:
    if text.startswith("+"):
        return now + timedelta(seconds=parse_duration(text[1:]))
    try:
        found = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
    except ValueError as error:
        raise UsageError(f"--at {text!r} is no time", hint="write e.g. 2026-12-01T06:00Z, or +3d from now") from error
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def _emit_plan(cli: Cli, found: Plan) -> None:
    if cli.terminal.as_json:
        for value in plan_values(found):
            cli.terminal.emit(value)


def tell_brakes(cli: Cli, session: Session, h: Housekeeping, situation: Situation, found: Plan) -> None:
    """Whether `prune` would refuse to carry the plan out, and why."""
    try:
        session.run(check_ground(h, situation))
        doomed = [e.attempt for e in found.entries if e.action == "expire"]
        session.run(check_share(h, situation.catalog, found, doomed, None))
    except RefusedError as error:
        cli.terminal.emit({"type": "brake", "run": h.run, "message": error.message, "hint": error.hint})
        cli.terminal.show(wrapped(Text.assemble(("refused: ", "bold red"), f"`tierstore prune` would not do it: {error.message}")))
        cli.terminal.show(wrapped(Text.assemble(("hint: ", "cyan"), error.hint)))


def _show_plan(cli: Cli, session: Session, situation: Situation, found: Plan, *, everything: bool = False) -> None:
    catalog, copies = situation.catalog, pending(situation.catalog, session.tiers)
    due: dict[Attempt, list[str]] = {}
    for copy in copies:
        due.setdefault(copy.attempt, []).append(copy.tier)
    cli.terminal.show(catalog_summary(catalog))
    if found.entries or found.incomplete:
        cli.terminal.show(plan_table(found, due, situation.at, everything=everything))
    if not everything and (left_out := rows_left_out(found)):
        cli.terminal.show(Text(f"… {left_out:,} rows are not shown: `tierstore plan --all` has them", style="dim"))
    legend = catalog_legend(catalog, copies)
    if legend is not None:
        cli.terminal.show(legend)
    for warning in found.warnings:
        cli.terminal.show(wrapped(Text.assemble(("warning: ", "yellow"), warning)))
    cli.terminal.show(wrapped(Text(plan_summary(found), style="bold")))
