"""``gc`` and ``evict``: what frees bytes. Both say what goes, ask, and leave what is in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.text import Text

from tierstore.cli.confirm import confirm
from tierstore.cli.find import chosen_runs, find_checkpoints, scan_run
from tierstore.cli.labels import Refs
from tierstore.cli.options import Cli
from tierstore.cli.plan_table import plural
from tierstore.cli.render import plain_table, wrapped
from tierstore.cli.retain import AllRuns, PolicyFile, housekeeping, on_each_run, policy_from
from tierstore.cli.usage import told_sizes
from tierstore.config import RetentionConfig
from tierstore.errors import AccessError, LockedError, PartialError, TierStoreError, UsageError
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.evict import evict as drop_copy
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.gc.reports import CollectReport, Freed
from tierstore.tiers.locks import RunLock, lock_path
from tierstore.tiers.referrers import kept_text
from tierstore.tiers.session import Session
from tierstore.units import format_size, format_some

__all__ = ["evict", "gc"]

_MOST = 40
_WORDS = {"evict": "copy", "sweep": "checkpoint", "orphan": "leftovers"}


def gc(
    cli: Cli,
    policy: PolicyFile = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the readers whose leases hold something up.")] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Give up the undelete window: free also what could still be taken back. It can't be undone.")
    ] = False,
    all_runs: AllRuns = False,
) -> int:
    """Free what was decided to go: expired checkpoints, copies that a tier's rules drop, what broken saves left behind."""
    cli.refuse_names("gc works on all tiers; `evict REF --tier NAME` drops one copy")
    with cli.session() as session:
        rules = policy_from(session, policy)
        return on_each_run(cli, chosen_runs(session, all_runs=all_runs), lambda run: _gc_run(cli, session, run, rules, wait, now))


def _gc_run(cli: Cli, session: Session, run: str, rules: RetentionConfig | None, wait: bool, now: bool) -> None:
    lock = None if cli.options.dry_run else _local_lock(cli, session, run)
    try:
        h = housekeeping(cli, session, run, rules, local=cli.options.dry_run or lock is not None)
        if h.policy is None:
            cli.terminal.say(f"run {run} has no retention policy: what has expired is not freed; `tierstore gc --policy FILE` goes by one")
        if cli.options.dry_run or not cli.options.yes:
            would = session.run(collect(h, now=now, dry_run=True))
            if not (would.freed or would.waiting or would.failed):
                scan_run(session, run)  # a wrong run is answered with the nearest one
            if cli.options.dry_run:
                return _tell(cli, h, would)
            if would.freed or (wait and would.held):
                _show_freed(cli, would, "would go")
                going = [_sum_text(would.freed)] if would.freed else []
                if wait and would.held:
                    going.append(f"{plural(len(would.held), 'checkpoint')} when nobody reads them any more")
                window = ", giving up the window in which undelete would bring them back" if now else ""
                confirm(cli, f"free {', and '.join(going)} of run {run}{window}")
        if wait:
            cli.terminal.say(f"run {run}: if somebody reads what goes, this waits; Ctrl-C ends it, and the next gc goes on")
        report = session.run(collect(h, now=now, wait_s=float("inf") if wait else 0.0))
        if not (report.freed or report.waiting or report.failed):
            scan_run(session, run)
        _tell(cli, h, report, table=cli.options.yes)
    finally:
        if lock is not None:
            lock.release()


def _local_lock(cli: Cli, session: Session, run: str) -> RunLock | None:
    """The run's lock on this node, for its own tiers' sake; None where a process of this node has it, or the tier is not here."""
    path = lock_path(session.tiers, run)
    if path is None:
        return RunLock(None, run)
    if not path.parent.parent.is_dir():
        return None  # another node's: nothing is made here
    lock = RunLock(path, run)
    try:
        lock.acquire()
    except LockedError as error:
        cli.terminal.say(f"{error.message}: it makes room on this node's own tiers by itself; the others are worked on now")
        return None
    except AccessError as error:
        cli.terminal.say(f"this node's own tiers are left out: {error.message}", "yellow")
        return None
    return lock


def _tell(cli: Cli, h: Housekeeping, report: CollectReport, *, table: bool = True) -> None:
    for freed in report.freed:
        attempt = freed.attempt
        value = {"type": "freed", "run": attempt.run, "step": attempt.step, "save_id": attempt.save_id, "tier": freed.tier}
        state = "planned" if report.dry_run else "done"
        cli.terminal.emit({**value, "kind": freed.kind, "files": freed.files, "nbytes": freed.nbytes, "state": state})
    for attempt, why in report.waiting:
        cli.terminal.emit({"type": "waiting", "run": attempt.run, "step": attempt.step, "save_id": attempt.save_id, "why": why})
    for failed in report.failed:
        step = failed.attempt.step if failed.attempt else None
        cli.terminal.emit({"type": "failed", "run": h.run, "step": step, "tier": failed.tier, "error": failed.error.message})
    cli.terminal.emit(
        {
            "type": "gc",
            "run": h.run,
            "files": report.files,
            "nbytes": report.nbytes,
            "leftovers": {tier: list(names) for tier, names in report.leftovers.items()},
            "foreign": list(report.foreign),
            "log_copies": report.log_copies,
            "unseen": dict(report.unseen),
            "dry_run": report.dry_run,
        }
    )
    _show_freed(cli, report, "would go" if report.dry_run else "freed", table=table)
    _show_rest(cli, h, report)
    if not (report.freed or report.waiting or report.failed):
        cli.terminal.say(f"run {h.run}: nothing to free{' on the tiers that were reached' if report.unseen else ''}")
    if report.failed:
        _raise_failed(report)


def _show_freed(cli: Cli, report: CollectReport, word: str, *, table: bool = True) -> None:
    """What went, or would; `table`: with a row for each copy, else only the sum."""
    if not report.freed:
        return
    if table:
        rows = plain_table(("STEP", "right"), "WHAT", "TIER", ("FILES", "right"), ("SIZE", "right"))
        for freed in report.freed[:_MOST]:
            rows.add_row(str(freed.attempt.step), _WORDS[freed.kind], freed.tier, str(freed.files), format_size(freed.nbytes))
        cli.terminal.show(rows)
    if table and len(report.freed) > _MOST:
        cli.terminal.show(Text(f"… {len(report.freed) - _MOST:,} more", style="dim"))
    cli.terminal.show(wrapped(Text(f"{word}: {_sum_text(report.freed)}", style="bold")))


def _show_rest(cli: Cli, h: Housekeeping, report: CollectReport) -> None:
    """What was not freed, and what else was found."""
    for attempt, why in report.waiting[:_MOST]:
        cli.terminal.show(wrapped(Text.assemble(("waits  ", "yellow"), f"{attempt.run}@{attempt.step}: {why}")))
    if len(report.waiting) > _MOST:
        cli.terminal.show(Text(f"… {len(report.waiting) - _MOST:,} more wait; --json has them", style="dim"))
    word = "would be removed" if report.dry_run else "removed"
    for tier, names in report.leftovers.items():
        cli.terminal.show(f"{plural(len(names), 'temporary')} or unfinished uploads of dead processes {word} on {tier}")
    for tier, why in report.unseen.items():
        told = f"{tier}: {why}; what is to go there is freed by a later gc"
        cli.terminal.show(wrapped(Text.assemble(("not seen  ", "bold red"), told)))
    if report.foreign:
        cli.terminal.show(Text.assemble(("left alone, not ours: ", "yellow"), format_some(report.foreign, 8)))


def _raise_failed(report: CollectReport) -> None:
    first = report.failed[0].error
    if not report.freed:
        raise first
    raise PartialError(
        f"{_sum_text(report.freed)} freed; {len(report.failed)} failed, the first: {first.message}",
        hint=first.hint or "run `tierstore gc` again: it goes on where it stopped",
    )


def _sum_text(freed: Sequence[Freed]) -> str:
    """``3 checkpoints, 2 copies: 72MiB in 12 files (24MiB on nvme, 48MiB on pfs)``."""
    swept, orphans = ({one.attempt for one in freed if one.kind == kind} for kind in ("sweep", "orphan"))
    copies = sum(one.kind == "evict" for one in freed)
    counts = ((len(swept), "checkpoint"), (copies, "copy"), (len(orphans), "broken save"))
    what = ", ".join(plural(count, noun) for count, noun in counts if count)
    by_tier: dict[str, int] = {}
    for one in freed:
        by_tier[one.tier] = by_tier.get(one.tier, 0) + one.nbytes
    nbytes = format_size(sum(one.nbytes for one in freed))
    return f"{what}: {nbytes} in {plural(sum(one.files for one in freed), 'file')} ({told_sizes(by_tier)})"


def evict(
    cli: Cli,
    refs: Refs,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the log for people.")] = "by hand",
) -> int:
    """Drop checkpoints from one tier (--tier NAME) while others keep them. Never the last copy."""
    if len(cli.only) != 1:
        raise UsageError("evict drops a copy from one tier: which?", hint="say --tier NAME, e.g. tierstore evict @latest --tier nvme")
    with cli.session() as session:
        tier = session.tiers.get(cli.only[0])
        infos = find_checkpoints(session, refs)
        works = {run: housekeeping(cli, session, run) for run in dict.fromkeys(info.run for info in infos)}
        failures: list[TierStoreError] = []
        would: dict[int, Freed] = {}
        for number, info in enumerate(infos):
            with _kept(cli, failures, len(infos)):
                would[number] = session.run(drop_copy(works[info.run], info, tier, reason=reason, dry_run=True))
        going = [infos[number] for number in would]
        if going and not cli.options.dry_run:
            confirm(cli, f"drop {plural(len(going), 'copy')} from {tier.name} ({format_size(sum(f.nbytes for f in would.values()))})")
        for number, found in would.items():
            info = infos[number]
            with _kept(cli, failures, len(infos)):
                freed = found if cli.options.dry_run else session.run(drop_copy(works[info.run], info, tier, reason=reason))
                _tell_evicted(cli, info, freed)
    if failures and len(failures) < len(infos):
        raise PartialError(
            f"{len(infos) - len(failures)} of {len(infos)} copies were dropped from {tier.name}; the first failure: {failures[0].message}",
            hint=failures[0].hint,
        )
    if failures:
        raise failures[0]
    return 0


@contextmanager
def _kept(cli: Cli, failures: list[TierStoreError], count: int) -> Iterator[None]:
    """Keeps an error for the end, and tells it at once where there are others to go on with."""
    try:
        yield
    except TierStoreError as error:
        failures.append(error)
        if count > 1:
            cli.terminal.complain(error)


def _tell_evicted(cli: Cli, info: CheckpointInfo, freed: Freed) -> None:
    dry = cli.options.dry_run
    value = {"type": "freed", "run": info.run, "step": info.step, "save_id": info.attempt.save_id, "tier": freed.tier, "kind": freed.kind}
    kept = [attempt.step for attempt in freed.kept_for]
    cli.terminal.emit({**value, "files": freed.files, "nbytes": freed.nbytes, "state": "planned" if dry else "done", "kept_for": kept})
    size = f"{plural(freed.files, 'file')}, {format_size(freed.nbytes)}"
    cli.terminal.show(f"{info.run}@{info.step} {'would be dropped' if dry else 'dropped'} from {freed.tier}: {size}")
    if freed.kept_for:
        cli.terminal.show(
            wrapped(f"{kept_text({freed.tier: freed.kept_for})}: they take bytes from it, and gc frees these when none does any more")
        )
