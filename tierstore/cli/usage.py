"""``du`` and ``df``: what takes the room, by checkpoint, tier and kind of file; and how full the tiers are. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from tierstore.cli.find import find_attempts, find_checkpoints, scan_run
from tierstore.cli.options import Cli
from tierstore.cli.render import age_text, plain_table, wrapped
from tierstore.clock import when_text
from tierstore.errors import UsageError
from tierstore.names import Attempt, save_id_time
from tierstore.tiers.catalog import Catalog, runs
from tierstore.tiers.referrers import kept_for
from tierstore.tiers.session import Session
from tierstore.tiers.usage import RunUsage, measure_run
from tierstore.units import format_size, parse_size

__all__ = ["du", "told_sizes"]

_MOST_COLUMNS = 5
"""So many tiers have a column each; more are listed in one."""

_LEFT = {"incomplete": "not committed", "condemned": "condemned: leftovers", "swept": "freed: leftovers"}


def du(
    cli: Cli,
    refs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REF…]", help="Checkpoints; without one all of the run; without a run, and with several, the runs."),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Of one checkpoint (by default the latest): what its bytes are, and what compression would save."),
    ] = False,
    sample: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With --explain: about how much of it is read and tried out. [default: 64MiB]")
    ] = None,
) -> int:
    """Show what takes the room: bytes of each checkpoint on each tier, by kind of file, and what will be freed."""
    cli.refuse_names("du shows all tiers")
    if sample is not None and not explain:
        raise UsageError("--sample says how much --explain reads", hint="add --explain")
    if explain:
        from tierstore.cli.usage_explain import explain_checkpoint  # it encodes a sample, and needs numpy for that

        if refs and len(refs) > 1:
            raise UsageError("du --explain is about one checkpoint", hint="give one reference")
        return explain_checkpoint(cli, refs[0] if refs else "latest", parse_size(sample or "64MiB"))
    with cli.session() as session:
        if refs:
            return _of_checkpoints(cli, session, refs)
        named = session.config.run
        found = [named] if named else session.run(runs(session.tiers))
        if len(found) != 1:
            return _of_runs(cli, session, found)
        catalog = scan_run(session, found[0])
        usage = session.run(measure_run(session.tiers, found[0]))
        names = session.tiers.names
    _tell_run(cli, catalog, usage, names)
    return 0


def told_sizes(nbytes: Mapping[str, int]) -> str:
    """``812GiB on nvme, 812GiB on pfs``; ``nothing`` where there is none."""
    return ", ".join(f"{format_size(n)} on {tier}" for tier, n in nbytes.items() if n) or "nothing"


def _of_checkpoints(cli: Cli, session: Session, refs: Sequence[str]) -> int:
    """Some checkpoints: one table of kinds of files for each; also of those that were deleted and whose shards stay for others."""
    found = find_attempts(session, refs)
    if any(one.info is None and not _kept(one.catalog, one.attempt) for one in found):
        find_checkpoints(session, refs)  # raises: nothing is left of one of them
    usages = {run: session.run(measure_run(session.tiers, run)) for run in dict.fromkeys(one.attempt.run for one in found)}
    for one in found:
        attempt = one.attempt
        state = "committed" if one.info is not None else _kept(one.catalog, attempt)
        kinds = usages[attempt.run].by_kind(attempt, everything=False)
        cli.terminal.emit(_value(attempt, state, kinds))
        rows: list[tuple[tuple[str, ...], Mapping[str, int]]] = [((kind,), row) for kind, row in kinds.items()]
        told = "" if one.info is not None else f"   {state}"
        cli.terminal.show(Text.assemble((f"{attempt.run}@{attempt.step}", "bold"), told))
        _show(cli, session.tiers.names, ("KIND",), rows)
    _tell_unreachable(cli, usages.values())
    return 0


def _of_runs(cli: Cli, session: Session, found: Sequence[str]) -> int:
    """All runs, the largest first."""
    usages = [session.run(measure_run(session.tiers, run)) for run in found]
    sums = {usage.run: _sum(usage.by_kind().values()) for usage in usages}
    ordered = sorted(usages, key=lambda usage: -sum(sums[usage.run].values()))
    for usage in ordered:
        row = sums[usage.run]
        cli.terminal.emit({"type": "run_usage", "run": usage.run, "tiers": row, "nbytes": sum(row.values())})
    _show(cli, session.tiers.names, ("RUN",), [((usage.run,), sums[usage.run]) for usage in ordered])
    _tell_unreachable(cli, usages)
    return 0


def _tell_run(cli: Cli, catalog: Catalog, usage: RunUsage, tiers: Sequence[str]) -> None:
    states = _states(catalog)
    attempts = usage.by_attempt()
    now = cli.clock.now()
    known = {info.attempt: info.committed_at for info in catalog.checkpoints}
    rows: list[tuple[tuple[str, ...], Mapping[str, int]]] = []
    for attempt in sorted((a for a in attempts if a is not None), reverse=True):
        state = states.get(attempt, "unknown")
        if state == "swept" and not usage.payload(attempt):
            continue  # its fate and its end stay in the log, 200 bytes
        if kept := _kept(catalog, attempt):
            state = kept
        cli.terminal.emit(_value(attempt, state, usage.by_kind(attempt, everything=False)))
        at = age_text(known.get(attempt, save_id_time(attempt.save_id)), now)
        rows.append(((str(attempt.step), at, "" if state == "committed" else _LEFT.get(state, state)), attempts[attempt]))
    if None in attempts:
        rows.append((("-", "-", "audit and other"), attempts[None]))
    kinds = usage.by_kind()
    names = [name for name in tiers if name not in usage.unreachable]
    cli.terminal.show(Text.assemble("run ", (catalog.run, "bold")))
    _show(cli, names, (">STEP", ">AGE", "STATE"), rows)
    cli.terminal.show("")
    _show(cli, names, ("KIND",), [((kind,), row) for kind, row in kinds.items()], total=False)
    _tell_what_goes(cli, catalog, usage, _sum(kinds.values()))
    _tell_unreachable(cli, [usage])


def _tell_what_goes(cli: Cli, catalog: Catalog, usage: RunUsage, total: Mapping[str, int]) -> None:
    """What the next collections give back."""
    expired = [info for info in catalog.checkpoints if info.expired is not None]
    leftovers = [a for a in (*(c.attempt for c in catalog.condemned), *catalog.swept) if usage.payload(a) and not _kept(catalog, a)]
    freed = _sum(usage.payload(info.attempt) for info in expired)
    left = _sum(map(usage.payload, leftovers))
    cli.terminal.emit(
        {
            "type": "total",
            "run": catalog.run,
            "tiers": dict(total),
            "nbytes": sum(total.values()),
            "expired": len(expired),
            "expired_tiers": freed,
            "leftovers": len(leftovers),
            "leftover_tiers": left,
            "unreachable": sorted(usage.unreachable),
        }
    )
    if expired:
        first = min(info.expired.not_before for info in expired if info.expired is not None)
        when = "now" if first <= cli.clock.now() else f"from {when_text(first, cli.clock.now())}"
        back = "`tierstore undelete` takes them back"
        cli.terminal.show(wrapped(f"{len(expired)} expired: `tierstore gc` frees {told_sizes(freed)}, {when}; {back}"))
    if leftovers:
        cli.terminal.show(wrapped(f"leftovers of {len(leftovers)} that are no checkpoints: `tierstore gc` frees {told_sizes(left)}"))


def _kept(catalog: Catalog, attempt: Attempt) -> str:
    """Whom the bytes of a deleted checkpoint serve that stay, for people; empty: nobody."""
    reduced = catalog.reduced.get(attempt)
    return f"deleted, {kept_for(a for found in reduced.serves.values() for a in found)}" if reduced is not None and reduced.serves else ""


def _states(catalog: Catalog) -> dict[Attempt, str]:
    states = {
        info.attempt: "expired" if info.hidden else "superseded" if info.superseded else "damaged log" if info.damaged else "committed"
        for info in catalog.checkpoints
    }
    states |= {a.attempt: "incomplete" for a in catalog.incomplete}
    states |= {a.attempt: "condemned" for a in catalog.condemned}
    return states | dict.fromkeys(catalog.swept, "swept")


def _value(attempt: Attempt, state: str, kinds: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    tiers = _sum(kinds.values())
    return {
        "type": "usage",
        "run": attempt.run,
        "step": attempt.step,
        "save_id": attempt.save_id,
        "state": state,
        "tiers": tiers,
        "kinds": {kind: dict(row) for kind, row in kinds.items()},
        "nbytes": sum(tiers.values()),
    }


def _sum(rows: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in rows:
        for tier, nbytes in row.items():
            total[tier] = total.get(tier, 0) + nbytes
    return total


def _show(
    cli: Cli, names: Sequence[str], heads: Sequence[str], rows: Sequence[tuple[tuple[str, ...], Mapping[str, int]]], *, total: bool = True
) -> None:
    """A table of sizes: `heads` first (``>`` in front: to the right), then a column a tier, or one for all where there are many."""
    columns = [(head[1:], "right") if head.startswith(">") else (head, "left") for head in heads]
    fits = len(names) <= _MOST_COLUMNS and all(len(name) <= 9 for name in names)
    per_tier = [(name.upper(), "right") for name in names] if fits else [("TIERS", "left")]
    table = plain_table(*columns, *per_tier, ("SUM", "right"), fold=("TIERS", "RUN", "STATE"))

    def cells(row: Mapping[str, int]) -> list[str]:
        if not fits:
            return [told_sizes({name: row[name] for name in names if name in row})]
        return [format_size(row[name]) if name in row else "-" for name in names]

    for head, row in rows:
        table.add_row(*head, *cells(row), format_size(sum(row.values())))
    if total and len(rows) > 1:
        summed = _sum(row for _, row in rows)
        table.add_row("all", *[""] * (len(heads) - 1), *cells(summed), format_size(sum(summed.values())), style="bold")
    cli.terminal.show(table)


def _tell_unreachable(cli: Cli, usages: Iterable[RunUsage]) -> None:
    for name, error in {name: error for usage in usages for name, error in usage.unreachable.items()}.items():
        cli.terminal.show(Text.assemble((f"{name} is not counted: ", "bold red"), error.message))
