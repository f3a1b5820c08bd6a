"""What people and policies say about a checkpoint after its commit: pins, tags, holds, late metrics, taking it back (PROTOCOLS.md §6).

Each decision is the next record of the checkpoint's log on the authority, won by number: two that race are in some order, and the later
one knows of the earlier one. A pin, a tag or a hold that comes after `expired` brings the checkpoint back; after `swept` nothing does. What
is so already is not said again. No clock decides a race: what has expired can be taken back until somebody wins a number with `swept`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from tierstore.clock import Clock, utc_text
from tierstore.errors import NotFoundError, UsageError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers.log import append
from tierstore.tiers.log_facts import LogFacts, fold
from tierstore.tiers.tier import Tiers

__all__ = ["hold", "pin", "release", "set_metrics", "tag", "undelete", "unpin", "untag"]

_MAX_LABEL = 200


async def pin(tiers: Tiers, attempt: Attempt, name: str = "pin", *, clock: Clock, reason: str = "") -> Record | None:
    """Pins a checkpoint under a name: it is never deleted while it has a pin. Brings it back if it has expired.

    Args:
        tiers: The store's tiers.
        attempt: The checkpoint.
        name: Several pins of different names are independent of each other.
        clock: Dates the record.
        reason: For people.

    Returns:
        The record, or None where it was pinned under that name already; so do all functions here.

    Raises:
        RefusedError: It was swept: too late. Says when, and by whom.
        NotFoundError: It never committed.
        IntegrityError: Its log can't be read, and so nothing can be decided about it.
        StorageError: The authority can't be written.
    """
    data = {"name": _label(name, "a pin"), **_reason(reason)}
    return await _say(tiers, attempt, "pinned", data, clock, lambda log: name not in log.pins or log.expired is not None)


async def unpin(tiers: Tiers, attempt: Attempt, name: str = "pin", *, clock: Clock) -> Record | None:
    """Takes one pin off; the checkpoint keeps its others. Raises as `pin`."""
    return await _say(tiers, attempt, "unpinned", {"name": _label(name, "a pin")}, clock, lambda log: name in log.pins)


async def tag(tiers: Tiers, attempt: Attempt, tags: Sequence[str], *, clock: Clock) -> Record | None:
    """Adds tags, which references and rules know. Brings the checkpoint back if it has expired. Raises as `pin`."""
    wanted = _labels(tags)
    return await _say(
        tiers, attempt, "tagged", {"tags": wanted}, clock, lambda log: not set(wanted) <= set(log.tags) or log.expired is not None
    )


async def untag(tiers: Tiers, attempt: Attempt, tags: Sequence[str], *, clock: Clock) -> Record | None:
    """Takes tags off, those that it has. Raises as `pin`."""
    wanted = _labels(tags)
    return await _say(tiers, attempt, "untagged", {"tags": wanted}, clock, lambda log: bool(set(wanted) & set(log.tags)))


async def hold(
    tiers: Tiers, attempt: Attempt, name: str, *, clock: Clock, reason: str = "", until: datetime | None = None
) -> Record | None:
    """Holds a checkpoint: while it lasts no tier drops its copy, and it is not deleted. Brings it back if it has expired.

    Args:
        tiers: The store's tiers.
        attempt: The checkpoint.
        name: A hold of the same name is replaced.
        clock: Dates the record.
        reason: For people.
        until: When it ends by itself, an aware time; None: when it is released.

    Raises:
        UsageError: `until` has passed, or says no time zone.
        RefusedError, NotFoundError, IntegrityError, StorageError: As `pin`.
    """
    if until is not None and until.tzinfo is None:
        raise UsageError(f"the hold {name!r} ends at {until}, in no time zone", hint="give an aware time, e.g. with tzinfo=timezone.utc")
    if until is not None and until <= clock.now():
        raise UsageError(f"the hold {name!r} would have ended at {utc_text(until)} already", hint="give a later time, or none")
    data = {"name": _label(name, "a hold"), **_reason(reason), **({"until": utc_text(until)} if until is not None else {})}

    def needed(log: LogFacts) -> bool:
        same = any((h.name, h.reason, h.until) == (name, reason, until) for h in log.holds)
        return not same or log.expired is not None

    return await _say(tiers, attempt, "held", data, clock, needed)


async def release(tiers: Tiers, attempt: Attempt, name: str, *, clock: Clock) -> Record | None:
    """Ends a hold before its time. Raises as `pin`."""
    return await _say(
        tiers, attempt, "released", {"name": _label(name, "a hold")}, clock, lambda log: any(h.name == name for h in log.holds)
    )


async def set_metrics(tiers: Tiers, attempt: Attempt, metrics: Mapping[str, float], *, clock: Clock) -> Record | None:
    """Adds metrics that came after the save, or corrects some; the others stay. An expired checkpoint stays expired.

    Raises:
        UsageError: A value is no number, or a name can't be shown.
        RefusedError, NotFoundError, IntegrityError, StorageError: As `pin`.
    """
    if not isinstance(metrics, Mapping) or not metrics:
        raise UsageError(f"metrics are a mapping of names to numbers, not {metrics!r}", hint="pass e.g. {'val/loss': 1.9}")
    numbers = {_label(name, "a metric"): _number(name, value) for name, value in metrics.items()}
    return await _say(
        tiers,
        attempt,
        "metrics",
        {"metrics": numbers},
        clock,
        lambda log: any(name not in log.metrics or not _same(log.metrics[name], value) for name, value in numbers.items()),
    )


async def undelete(tiers: Tiers, attempt: Attempt, *, clock: Clock) -> Record | None:
    """Takes an expired checkpoint back, also after its window, as long as nobody has swept it. Raises as `pin`."""
    return await _say(tiers, attempt, "revived", {}, clock, lambda log: log.expired is not None)


class _SoAlready(Exception):
    """Ends an append that would say nothing new."""


async def _say(
    tiers: Tiers, attempt: Attempt, kind: str, data: Mapping[str, Any], clock: Clock, needed: Callable[[LogFacts], bool]
) -> Record | None:
    """Appends a decision unless it is so already, by the log as it is when the number is won."""

    def allow(records: Sequence[Record]) -> bool:
        log = fold(records)
        if not log.committed:
            why = str(records[0].data.get("reason") or "no reason was given")
            raise NotFoundError(
                f"step {attempt.step} of run {attempt.run!r} is no checkpoint: save {attempt.save_id} was condemned ({why})",
                hint="`tierstore ls` lists the checkpoints that there are",
                run=attempt.run,
                step=attempt.step,
            )
        if not needed(log):
            raise _SoAlready
        return True

    try:
        return await append(tiers.authority.storage, attempt, kind, data, clock=clock, allow=allow)
    except _SoAlready:
        return None


def _reason(reason: str) -> dict[str, str]:
    return {"reason": reason} if reason else {}


def _label(name: object, what: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_LABEL or not name.isprintable():
        raise UsageError(f"{str(name)[:100]!r} can't name {what}", hint=f"use 1 to {_MAX_LABEL} printable characters")
    return name


def _labels(tags: Sequence[str]) -> list[str]:
    if isinstance(tags, str) or not tags:
        raise UsageError(f"tags are a list of names, not {tags!r}", hint="pass e.g. ['release/1']")
    return sorted({_label(name, "a tag") for name in tags})


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a tensor of several
        raise UsageError(f"metric {name!r} is {value!r}, not a number", hint="pass floats, e.g. {'val/loss': 1.9}") from error


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
