"""The verb ``status``: what each tier holds and lacks, once or again and again, and what retention is at, as far as the store tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from tierstore.cli.find import the_run
from tierstore.cli.options import Cli
from tierstore.cli.plan_table import plural
from tierstore.cli.render import age_text, plain_table, wrapped
from tierstore.cli.retain import housekeeping, tell_brakes
from tierstore.clock import when_text
from tierstore.errors import TierStoreError
from tierstore.format.record import Record
from tierstore.tiers.gc.housekeeping import Situation, look, plan_of
from tierstore.tiers.session import Session
from tierstore.tiers.status import Status, TierStatus, collect_status
from tierstore.units import format_duration, format_size

__all__ = ["status"]

_DECISIONS = {"expired": "let it expire", "revived": "took it back", "evicting": "dropped a copy", "evicted": "dropped a copy"}


def status(
    cli: Cli,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="With --watch: how often.")] = 2.0,
) -> int:
    """Show what each tier holds and lacks, how far it lags, the last errors, and what retention is at."""
    with cli.session() as session:
        for name in cli.only:
            session.tiers.get(name)
        run = the_run(session)
        if watch:
            _watch(cli, lambda: _look(cli, session, run), interval)
        found = _look(cli, session, run)
        for value in (_run_value(found), *map(_tier_value, found.tiers)):
            cli.terminal.emit(value)
        for part in _parts(found):
            cli.terminal.show(part)
        _tell_retention(cli, session, run)
    return 0


def _look(cli: Cli, session: Session, run: str) -> Status:
    found = session.run(collect_status(session.tiers, run, clock=cli.clock))
    return replace(found, tiers=tuple(t for t in found.tiers if not cli.only or t.name in cli.only))


# ---- again and again


def _watch(cli: Cli, look_again: Callable[[], Status], interval_s: float) -> None:
    """Never returns: Ctrl-C ends it. A look that fails is told, and the next one may work again."""
    if cli.terminal.as_json or not cli.terminal.out.is_terminal:
        told = ""
        while True:
            value, line = _tried(cli, look_again)
            cli.terminal.emit(value)
            if line != told:
                cli.terminal.show_line(f"{when_text(cli.clock.now(), cli.clock.now())}  {line}")
            told = line
            cli.terminal.out.file.flush()
            time.sleep(interval_s)
    with Live(console=cli.terminal.out, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while True:
            try:
                parts: Sequence[RenderableType] = _parts(look_again())
            except TierStoreError as error:
                parts = [Text.assemble(("error: ", "bold red"), error.message)]
            foot = Text(f"{when_text(cli.clock.now(), cli.clock.now())}, again every {interval_s:g}s; Ctrl-C ends", style="dim")
            live.update(Group(*parts, foot), refresh=True)
            time.sleep(interval_s)


def _tried(cli: Cli, look_again: Callable[[], Status]) -> tuple[dict[str, Any], str]:
    """One look, as an object for programs, and as a line without what changes by itself from look to look."""
    at = cli.clock.now()
    try:
        found = look_again()
    except TierStoreError as error:
        return {"type": "status", "at": at, "error": error.message, "kind": error.kind}, f"error: {error.message}"
    value = {**_run_value(found), "type": "status", "at": at, "error": "", "tiers": [_tier_value(tier) for tier in found.tiers]}
    tiers = [
        f"{t.name} {t.checkpoints if t.reachable else '?'}"
        + (f" lacks {t.pending} ({format_size(t.pending_nbytes)})" if t.pending else "")
        + (f" {_state(t).plain}" if t.error else "")
        for t in found.tiers
    ]
    newest = f", newest step {found.newest_step}" if found.newest_step is not None else ""
    incomplete = f", {found.incomplete} incomplete" if found.incomplete else ""
    return value, f"run {found.run}: {found.committed} committed{incomplete}{newest}; {'; '.join(tiers)}"


# ---- one look


def _run_value(found: Status) -> dict[str, Any]:
    counts = {"committed": found.committed, "incomplete": found.incomplete, "newest_step": found.newest_step}
    return {"type": "run", "run": found.run, **counts}


def _tier_value(tier: TierStatus) -> dict[str, Any]:
    return {
        "type": "tier",
        "tier": tier.name,
        "uri": tier.uri,
        "scope": tier.scope,
        "durable": tier.durable,
        "authority": tier.authority,
        "reachable": tier.reachable,
        "checkpoints": tier.checkpoints,
        "quantised": tier.quantised,
        "newest_step": tier.newest_step,
        "nbytes": tier.nbytes,
        "pending": tier.pending,
        "pending_nbytes": tier.pending_nbytes,
        "lag_s": tier.lag_s,
        "free_nbytes": tier.free_nbytes,
        "error": tier.error,
    }


def _parts(found: Status) -> list[RenderableType]:
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
            (f"{tier.checkpoints} ({tier.quantised} quantised)" if tier.quantised else str(tier.checkpoints)) if tier.reachable else "?",
            str(tier.newest_step) if tier.newest_step is not None else "-",
            format_size(tier.nbytes),
            f"{tier.pending} ({format_size(tier.pending_nbytes)})" if tier.pending else "0",
            format_duration(tier.lag_s) if tier.lag_s is not None else "-",
            format_size(tier.free_nbytes) if tier.free_nbytes is not None else "-",
            _state(tier),
        )
    errors = [Text.assemble((f"{t.name}: ", "bold red"), t.error) for t in found.tiers if t.error]
    return [heading, table, *errors]


def _state(tier: TierStatus) -> Text:
    words = [("ok", "green") if tier.reachable and not tier.error else ("failing", "bold red") if tier.reachable else ("down", "bold red")]
    words += [("decides", "")] if tier.authority else []
    words += [("not durable", "")] if not tier.durable else []
    text = Text()
    for word, style in words:
        text.append(", " if text else "").append(word, style=style)
    return text


# ---- what retention is at


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decided:
    """The youngest decision about what goes: about which step, and the record."""

    step: int
    record: Record


def _tell_retention(cli: Cli, session: Session, run: str) -> None:
    """What the logs tell of a trainer's housekeeping, and whether a brake holds it up. What it does just now only its own log tells."""
    h = housekeeping(cli, session, run)
    if h.policy is None:
        return
    situation = session.run(look(h))
    _tell_housekeeping(cli, run, situation)
    tell_brakes(cli, session, h, situation, plan_of(h, situation))


def _tell_housekeeping(cli: Cli, run: str, situation: Situation) -> None:
    now, infos = cli.clock.now(), situation.catalog.checkpoints
    decided = [_Decided(step=i.step, record=r) for i in infos for r in i.records if r.kind in _DECISIONS]
    last = max(decided, key=lambda one: one.record.at, default=None)
    expired = [info.expired for info in infos if info.expired is not None]
    going = [
        (info.step, name) for info in infos for name, state in info.replicas.items() if state == "evicting" and name not in info.serves
    ]
    kept = sum(bool(reduced.serves) for reduced in situation.catalog.reduced.values())
    readers = [(attempt.step, lease) for attempt, leases in situation.leases.items() for lease in leases]
    first = min((one.not_before for one in expired), default=None)
    cli.terminal.emit(
        {
            "type": "housekeeping",
            "run": run,
            "last_at": last.record.at if last else None,
            "last_kind": last.record.kind if last else None,
            "last_step": last.step if last else None,
            "last_actor": last.record.actor if last else None,
            "expired": len(expired),
            "freed_from": first,
            "kept_for_others": kept,
            "dropping": [{"step": step, "tier": name} for step, name in going],
            "readers": [{"step": step, "holder": lease.holder, "kind": lease.kind} for step, lease in readers],
        }
    )
    words = []
    if last is not None:
        words.append(f"{last.record.actor} {_DECISIONS[last.record.kind]} (step {last.step}) {age_text(last.record.at, now)} ago")
    if first is not None:
        words.append(f"{len(expired)} expired, freed from {when_text(first, now) if first > now else 'now'}")
    if going:
        words.append(f"{plural(len(going), 'copy')} being dropped")
    if kept:
        words.append(f"bytes of {plural(kept, 'deleted checkpoint')} are kept for others")
    words += [f"step {step} is used by {lease.holder} ({lease.kind})" for step, lease in readers]
    if words:
        cli.terminal.show(wrapped(Text.assemble(("retention: ", "bold"), "; ".join(words))))
