"""Labels and holds: ``pin``, ``unpin``, ``tag``, ``untag``, ``hold``, ``release``, ``metrics``. Each is one record in a log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Annotated

import typer

from tierstore.cli.find import find_checkpoints
from tierstore.cli.options import Cli
from tierstore.clock import when_text
from tierstore.errors import NotFoundError, PartialError, TierStoreError, UsageError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers import decisions
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.tier import Tiers
from tierstore.units import format_some, parse_duration

__all__ = ["Refs", "decide", "hold", "metrics", "pin", "release", "tag", "unpin", "untag"]

Refs = Annotated[
    list[str],
    typer.Argument(metavar="REF…", help="RUN@12000, RUN@latest, RUN@best:METRIC, RUN@tag:TAG; the run may be left out; several are fine."),
]
_Ref = Annotated[str, typer.Argument(metavar="REF", help="RUN@12000, RUN@latest, RUN@best:METRIC, RUN@tag:TAG; the run may be left out.")]
_Tags = Annotated[list[str], typer.Argument(metavar="TAG…", help="Such as release/1.")]
_Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the log for people.")]


def pin(
    cli: Cli,
    refs: Refs,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What the pin is called; a checkpoint may have several.")] = "pin",
    reason: _Reason = "",
) -> int:
    """Pin checkpoints: they are never deleted, until the pin is taken off. An expired one comes back."""
    return _on_each(
        cli,
        refs,
        f"pinned {name!r}",
        lambda tiers, attempt: decisions.pin(tiers, attempt, name, clock=cli.clock, reason=reason),
    )


def unpin(
    cli: Cli,
    refs: Refs,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Which pin.")] = "pin",
) -> int:
    """Take a pin off. Nothing is deleted now: from here on the rules decide."""
    return _on_each(
        cli,
        refs,
        f"not pinned {name!r} any more",
        lambda tiers, attempt: decisions.unpin(tiers, attempt, name, clock=cli.clock),
        lambda info: _has(info, "pin", [name], info.pins),
    )


def tag(cli: Cli, ref: _Ref, tags: _Tags) -> int:
    """Tag a checkpoint: REF@tag:TAG names it then, and rules can keep it. An expired one comes back."""
    told = f"tagged {format_some(tags, 8)}"
    return _on_each(cli, [ref], told, lambda tiers, attempt: decisions.tag(tiers, attempt, tags, clock=cli.clock))


def untag(cli: Cli, ref: _Ref, tags: _Tags) -> int:
    """Take tags off a checkpoint. Nothing is deleted now: from here on the rules decide."""
    told = f"not tagged {format_some(tags, 8)} any more"
    return _on_each(
        cli,
        [ref],
        told,
        lambda tiers, attempt: decisions.untag(tiers, attempt, tags, clock=cli.clock),
        lambda info: _has(info, "tag", tags, info.tags),
    )


def hold(
    cli: Cli,
    refs: Refs,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What the hold is called: who needs it.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; shown where the hold keeps something.")],
    lasting: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="How long, such as 2h; without it: until it is released.")
    ] = None,
) -> int:
    """Hold checkpoints: while it lasts they are neither deleted nor dropped from any tier."""
    until = cli.clock.now() + timedelta(seconds=parse_duration(lasting)) if lasting else None
    told = f"held {name!r} until {when_text(until, cli.clock.now())}" if until else f"held {name!r} until it is released"
    return _on_each(
        cli,
        refs,
        told,
        lambda tiers, attempt: decisions.hold(tiers, attempt, name, reason=reason, until=until, clock=cli.clock),
    )


def release(
    cli: Cli,
    refs: Refs,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Which hold.")],
) -> int:
    """End a hold. Nothing is deleted now: from here on the rules decide."""
    return _on_each(
        cli,
        refs,
        f"not held {name!r} any more",
        lambda tiers, attempt: decisions.release(tiers, attempt, name, clock=cli.clock),
        lambda info: _has(info, "hold", [name], [hold.name for hold in info.holds]),
    )


def metrics(
    cli: Cli,
    ref: _Ref,
    values: Annotated[list[str], typer.Argument(metavar="NAME=VALUE…", help="Such as val/loss=1.83; nan and inf are numbers.")],
) -> int:
    """Add metrics that are known only now, such as an evaluation's; later values replace earlier ones."""
    found = dict(map(_metric, values))
    told = "has " + " ".join(f"{name}={value:g}" for name, value in found.items())
    return _on_each(cli, [ref], told, lambda tiers, attempt: decisions.set_metrics(tiers, attempt, found, clock=cli.clock))


def _has(info: CheckpointInfo, kind: str, wanted: Sequence[str], there: Sequence[str]) -> None:
    """A mistyped name must not read as done; where there is none at all, it is done indeed.

    Raises:
        NotFoundError: It has others, and not these.
    """
    missing = [name for name in wanted if name not in there]
    if missing and there:
        raise NotFoundError(
            f"{info.run}@{info.step} has no {kind} {format_some(missing, 8)}",
            hint=f"its {kind}s are {format_some(there, 8)}",
            run=info.run,
            step=info.step,
        )


def _metric(text: str) -> tuple[str, float]:
    name, equals, value = text.rpartition("=")
    try:
        return (name, float(value)) if name and equals else _no_metric(text)
    except ValueError:
        return _no_metric(text)


def _no_metric(text: str) -> tuple[str, float]:
    raise UsageError(f"{text!r} is no NAME=VALUE", hint="write e.g. val/loss=1.83")


def _on_each(
    cli: Cli,
    refs: Sequence[str],
    told: str,
    act: Callable[[Tiers, Attempt], Awaitable[Record | None]],
    check: Callable[[CheckpointInfo], None] = lambda info: None,
) -> int:
    cli.refuse_names("decisions are about all tiers")
    with cli.session() as session:
        infos = {info.attempt: info for info in find_checkpoints(session, refs)}
        for info in infos.values():
            check(info)

        async def one(attempt: Attempt) -> Record | None:
            return await act(session.tiers, attempt)

        return decide(cli, infos, told, lambda attempt: session.run(one(attempt)))


def decide(cli: Cli, targets: Mapping[Attempt, CheckpointInfo | None], told: str, act: Callable[[Attempt], Record | None]) -> int:
    """Appends one decision about each checkpoint and tells it; with ``-n`` only tells.

    Args:
        cli: The command line.
        targets: The checkpoints; None: the catalog has it no more, and the log will say why.
        told: What each is afterwards: ``pinned 'pin'``.
        act: Appends the record; the old one, or None, where it was so already.

    Raises:
        PartialError: It worked for some and failed for others.
        TierStoreError: It failed for all: the first failure.
    """
    failures: list[TierStoreError] = []
    for attempt, info in targets.items():
        name = f"{attempt.run}@{attempt.step}"
        value = {"type": "decision", "run": attempt.run, "step": attempt.step, "save_id": attempt.save_id, "told": told}
        if cli.options.dry_run:
            cli.terminal.emit({**value, "state": "planned"})
            cli.terminal.show(f"{name} would be: {told}")
            continue
        try:
            record = act(attempt)
        except TierStoreError as error:
            failures.append(error)
            if len(targets) > 1:
                cli.terminal.complain(error)
            continue
        cli.terminal.emit({**value, "state": "done" if record else "already", "seq": record.seq if record else None})
        returns = record is not None and record.kind in ("pinned", "tagged", "held") and info is not None and info.hidden
        back = ", and taken back: it was expired" if returns else ""
        cli.terminal.show(f"{name} {told}{back}" if record else f"{name} {told}: it was so already")
    if failures and len(failures) < len(targets):
        done = len(targets) - len(failures)
        raise PartialError(
            f"{told}: {done} of {len(targets)} checkpoints; {len(failures)} failed, the first: {failures[0].message}",
            hint=failures[0].hint or "run the command again: what is done stays done",
        )
    if failures:
        raise failures[0]
    return 0
