"""``push`` and ``pull``: chosen checkpoints onto chosen tiers, in the foreground; further ones, or nearer ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import typer
from rich.text import Text

from tierstore.cli.confirm import confirm
from tierstore.cli.find import find_checkpoints
from tierstore.cli.labels import Refs
from tierstore.cli.options import Cli
from tierstore.cli.plan_table import plural
from tierstore.cli.progress import copy_bars
from tierstore.cli.render import wrapped
from tierstore.cli.retain import housekeeping
from tierstore.errors import PartialError, TierStoreError, UsageError
from tierstore.tiers.bring import BRING, bring
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.gc.foresee import would_drop
from tierstore.tiers.gc.housekeeping import look
from tierstore.tiers.pending import Copy
from tierstore.tiers.quantised import quantising
from tierstore.tiers.replica import open_replica
from tierstore.tiers.session import Session
from tierstore.tiers.tier import Tier
from tierstore.units import format_size

__all__ = ["pull", "push"]

Kind = Literal["push", "pull"]

_Wait = Annotated[bool, typer.Option("--wait", help="Wait for another process that works on this node's tier.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """One checkpoint onto one tier. `dropped`: why that tier's own rules would drop it again at once; empty where they would not.
    `exact`: also where the tier quantises, in the place of a quantised copy."""

    info: CheckpointInfo
    tier: Tier
    dropped: str = ""
    exact: bool = False


def push(
    cli: Cli,
    refs: Refs,
    to: Annotated[
        list[str] | None, typer.Option("--to", metavar="TIER", help="The further tier; repeatable. [default: all that lack it]")
    ] = None,
    wait: _Wait = False,
    exact: Annotated[bool, typer.Option("--exact", help="Exact also where the tier quantises, and in place of a quantised copy.")] = False,
) -> int:
    """Copy checkpoints to further tiers now, whatever else is pending; also where a copy was dropped. Returns when they are there."""
    return _move(cli, "push", refs, to or [], wait, exact=exact)


def pull(
    cli: Cli,
    refs: Refs,
    to: Annotated[list[str] | None, typer.Option("--to", metavar="TIER", help="The nearer tier. [default: the nearest]")] = None,
    wait: _Wait = False,
) -> int:
    """Copy checkpoints back to a nearer tier, every byte proved, so that the next load is fast; also where a copy was dropped."""
    return _move(cli, "pull", refs, to or [], wait)


def _move(cli: Cli, kind: Kind, refs: Sequence[str], to: Sequence[str], wait: bool, *, exact: bool = False) -> int:
    cli.refuse_names(f"{kind} is told where to by --to NAME")
    with Session.open(cli.load(), clock=cli.clock, create=not cli.options.dry_run) as session:
        infos = find_checkpoints(session, refs)
        moves = [replace(move, exact=exact) for info in infos for move in _moves_of(cli, session, kind, info, to)]
        todo = []
        for move in _foreseen(cli, session, moves):
            if _is_there(move):
                _tell(cli, kind, move, "already", "it is there")
            else:
                todo.append(move)
        if cli.options.dry_run:
            for move in todo:
                _tell(cli, kind, move, "planned", move.dropped)
            return 0
        _ask(cli, kind, [move for move in todo if move.dropped])
        failures = _carry_out(cli, session, kind, todo, wait)
    if failures and len(failures) < len(todo):
        first = failures[0]
        raise PartialError(
            f"{len(todo) - len(failures)} of {len(todo)} copies were made; the first failure: {first.message}", hint=first.hint
        )
    if failures:
        raise failures[0]
    return 0


def _moves_of(cli: Cli, session: Session, kind: Kind, info: CheckpointInfo, to: Sequence[str]) -> Iterator[_Move]:
    """What is to be copied of one checkpoint.

    Raises:
        UsageError: A tier lies on the other side of where the checkpoint is.
        NotFoundError: No tier has that name.
    """
    names = session.tiers.names
    held = [names.index(name) for name in info.complete_on]
    if not to and kind == "pull":
        yield _Move(info=info, tier=session.tiers.nearest)
        return
    if not to:
        for tier in session.tiers.tiers[names.index(session.tiers.authority.name) + 1 :]:
            if tier.name in info.dropped:
                cli.terminal.say(f"{info.run}@{info.step} was dropped from {tier.name} on purpose: --to {tier.name} copies it there again")
            else:
                yield _Move(info=info, tier=tier)
        return
    for name in dict.fromkeys(to):
        tier = session.tiers.get(name)  # a wrong name is answered with the nearest one
        place = names.index(tier.name)
        if kind == "push" and held and place < min(held):
            raise UsageError(
                f"{info.run}@{info.step} can't be pushed to {tier.name}: only further tiers have it",
                hint=f"`tierstore pull … --to {tier.name}` copies it back",
            )
        if kind == "pull" and held and place > max(held):
            raise UsageError(
                f"{info.run}@{info.step} lies on nearer tiers than {tier.name} only", hint=f"`tierstore push … --to {tier.name}`"
            )
        yield _Move(info=info, tier=tier)


def _is_there(move: _Move) -> bool:
    """As far as a listing tells; `bring` looks again."""
    state = move.info.replicas.get(move.tier.name)
    return state == "complete" or (state == "quantised" and not move.exact)


def _foreseen(cli: Cli, session: Session, moves: Sequence[_Move]) -> list[_Move]:
    """Each move, with what the tier's own rules would do with the copy; each run is looked at once."""
    found: list[_Move] = []
    for run in dict.fromkeys(move.info.run for move in moves):
        h = housekeeping(cli, session, run)
        mine = [move for move in moves if move.info.run == run]
        if h.policy is None:
            found += mine
            continue
        situation = session.run(look(h))
        for move in mine:
            there = _is_there(move)
            why = "" if there else would_drop(h, situation, move.info.attempt, move.tier, scheme=_scheme(session, move))
            found.append(replace(move, dropped=why))
    return found


def _scheme(session: Session, move: _Move) -> str:
    """How the copy would be quantised; empty: not at all. Where the manifest can't be read the configuration is all that is known."""
    if move.tier.quantise is None or move.exact:
        return ""
    try:
        facts = session.run(open_replica(session.tiers, move.info, run=session.run)).manifest.facts
    except TierStoreError:
        facts = {}
    return quantising(move.tier, facts).scheme


def _ask(cli: Cli, kind: Kind, moves: Sequence[_Move]) -> None:
    """A copy that the next collection drops again is made only where somebody says that it is meant."""
    if not moves:
        return
    for move in moves:
        told = f"{move.tier.name} would drop {move.info.run}@{move.info.step} again with the next gc: {move.dropped}"
        cli.terminal.say(f"{told}; `tierstore hold` keeps it there", "yellow")
    names = ", ".join(dict.fromkeys(move.tier.name for move in moves))
    confirm(cli, f"{kind} {plural(len(moves), 'checkpoint')} to {names} all the same")


def _carry_out(cli: Cli, session: Session, kind: Kind, moves: Sequence[_Move], wait: bool) -> list[TierStoreError]:
    copies = [Copy(attempt=m.info.attempt, tier=m.tier.name, kind="promote", nbytes=m.info.nbytes) for m in moves]
    failures: list[TierStoreError] = []
    ends: list[tuple[_Move, str, str]] = []
    with copy_bars(cli.terminal, copies) as progress:
        context = CopyContext.make(
            session.tiers,
            cli.clock,
            files_in_flight=cli.options.jobs or session.config.io.threads,
            max_bandwidth=cli.bwlimit,
            progress=progress,
        )
        for move in moves:
            lease = session.leases.hold(move.info, kind=BRING)
            try:
                wait_s = None if wait else 0.0
                done = session.run(bring(context, move.info.attempt, move.tier, lease=lease, wait_s=wait_s, exact=move.exact))
            except TierStoreError as error:  # the other copies are made all the same
                failures.append(error)
                ends.append((move, "failed", error.message))
            else:
                ends.append((move, "done" if done else "already", ""))
                progress(move.tier.name, move.info.attempt, "", move.info.nbytes, move.info.nbytes)
    for move, state, reason in ends:
        _tell(cli, kind, move, state, reason)
    return failures


def _tell(cli: Cli, kind: Kind, move: _Move, state: str, reason: str) -> None:
    info = move.info
    value = {"type": "copy", "run": info.run, "step": info.step, "save_id": info.attempt.save_id, "tier": move.tier.name, "kind": kind}
    cli.terminal.emit({**value, "nbytes": info.nbytes, "state": state, "reason": reason})
    style = {"done": "green", "failed": "bold red"}.get(state, "")
    because = f": {reason}" if reason else ""
    told = f"{info.run}@{info.step} {kind} to {move.tier.name}, {format_size(info.nbytes)}{because}"
    cli.terminal.show(wrapped(Text.assemble((f"{state:<8}", style), told)))
