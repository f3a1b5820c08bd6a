"""A retention plan as the table of the design, 80 columns wide, and as plain values for ``--json``. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.text import Text

from tierstore.cli.layout import FitTable
from tierstore.cli.render import age_text, tiers_text
from tierstore.clock import when_text
from tierstore.names import Attempt, save_id_time
from tierstore.tiers.retention import Plan, PlanEntry, PlanIncomplete
from tierstore.units import format_size

__all__ = ["plan_summary", "plan_table", "plan_values", "plural", "rows_left_out", "sum_nbytes", "verdict", "why"]

MOST_ROWS = 200
"""So many rows are shown; of more, those that change, and the newest and oldest of the others."""

_ENDS = 10

_STYLES: Mapping[str, str] = {"keep": "green", "expire": "bold red", "expired": "dim", "sweep": "red", "revive": "cyan"}
_TIERS_WIDTH = 18


def plural(count: int, noun: str) -> str:
    """``1 copy``, ``3 checkpoints``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("y") else f"{count:,} {noun}s"


def plan_table(plan: Plan, pending: Mapping[Attempt, Sequence[str]], now: datetime, *, everything: bool = False) -> FitTable:
    """The plan's table, newest first.

    Args:
        plan: The plan.
        pending: The tiers that a checkpoint is still to be copied to.
        now: For ages.
        everything: All rows, however many.
    """
    heads = (("STEP", "right"), ("AGE", "right"), ("SIZE", "right"), "TIERS", "ACTION", "WHY")
    table = FitTable(heads, wraps=("TIERS", "WHY"))
    for row in _rows(plan, pending, now, everything):
        table.add_row(*row)
    return table


def _rows(plan: Plan, pending: Mapping[Attempt, Sequence[str]], now: datetime, everything: bool) -> Iterator[tuple[str | Text, ...]]:
    found: list[PlanEntry | PlanIncomplete] = sorted((*plan.entries, *plan.incomplete), key=lambda e: e.attempt, reverse=True)
    for one in found if everything else _chosen(found):
        yield _incomplete_row(one, now) if isinstance(one, PlanIncomplete) else _entry_row(one, pending.get(one.attempt, ()), now)


def _chosen(found: Sequence[PlanEntry | PlanIncomplete]) -> Sequence[PlanEntry | PlanIncomplete]:
    """Of a long plan the newest, the oldest, and of those that something becomes of the first."""
    if len(found) <= MOST_ROWS:
        return found
    changes = [n for n, one in enumerate(found) if isinstance(one, PlanIncomplete) or one.action != "keep" or one.drops]
    ends = {*range(_ENDS), *range(len(found) - _ENDS, len(found))}
    return [found[n] for n in sorted({*ends, *changes[: MOST_ROWS - 2 * _ENDS]})]


def rows_left_out(plan: Plan) -> int:
    """How many rows `plan_table` does not show unless it is asked for everything."""
    found: list[PlanEntry | PlanIncomplete] = sorted((*plan.entries, *plan.incomplete), key=lambda e: e.attempt, reverse=True)
    return len(found) - len(_chosen(found))


def _entry_row(entry: PlanEntry, due: Sequence[str], now: datetime) -> tuple[str | Text, ...]:
    states = {**entry.replicas, **{name: "pending" for name in due if name not in entry.replicas}}
    going = [drop.tier for drop in entry.drops if not drop.blocked]
    action = Text(entry.action, style=_STYLES[entry.action])
    if going and entry.action == "keep":
        action = Text("\n".join(f"evict:{tier}" for tier in going), style="yellow")
    return (
        str(entry.attempt.step),
        age_text(entry.committed_at, now),
        format_size(entry.nbytes),
        tiers_text(states, _TIERS_WIDTH),
        action,
        why(entry, now),
    )


def why(entry: PlanEntry, now: datetime) -> str:
    """The reasons for what becomes of one checkpoint, the deciding ones: what leaves a tier, else what keeps or ends it."""
    words = []
    going = [drop for drop in entry.drops if not drop.blocked]
    if not (going and entry.action == "keep"):
        words = [reason.text for reason in entry.reasons]
    for drop in going if entry.stays else ():
        words += [drop.reason.text, f"{plural(len(drop.copies), 'verified durable copy')} elsewhere"]
    if going and not entry.stays:
        words.append(f"leaves {' and '.join(drop.tier for drop in going)} with the next gc")
    words += [f"{drop.reason.text}, but it stays on {drop.tier}: {drop.blocked}" for drop in entry.drops if drop.blocked and entry.stays]
    return "; ".join(dict.fromkeys([*words, *_timing(entry, now)]))


def verdict(entry: PlanEntry, now: datetime) -> str:
    """All reasons for what becomes of the checkpoint itself, whatever becomes of single copies."""
    return "; ".join([*(reason.text for reason in entry.reasons), *_timing(entry, now)])


def _timing(entry: PlanEntry, now: datetime) -> list[str]:
    if entry.action == "sweep":
        return ["the next gc frees it"]
    if entry.not_before is None:
        return []
    until = when_text(entry.not_before, now)
    return [f"undelete until {until}" if entry.action == "expire" else f"freed from {until}, undelete until then"]


def _incomplete_row(item: PlanIncomplete, now: datetime) -> tuple[str | Text, ...]:
    words = [item.note] if item.note else [_missing(item.missing)]
    if item.orphan_at is not None:
        passed = item.orphan_at <= now
        words.append("an orphan: gc removes it" if passed else f"orphan in {age_text(now, item.orphan_at)}")
    age = age_text(save_id_time(item.attempt.save_id), now)
    return str(item.attempt.step), age, "-", "", "", Text(f"({'; '.join(words)})", style="dim")


def _missing(missing: tuple[int, ...] | None) -> str:
    if missing is None:
        return "incomplete"
    if not missing:
        return "incomplete, all parts are there"
    return f"incomplete, {'rank' if len(missing) == 1 else 'ranks'} {' '.join(map(str, missing[:8]))} missing"


def sum_nbytes(entries: Sequence[PlanEntry]) -> int:
    """Bytes that all complete copies of `entries` take up, quantised ones included, on all tiers together."""
    return sum(
        entry.taken.get(tier, entry.nbytes)
        for entry in entries
        for tier, state in entry.replicas.items()
        if state in ("complete", "quantised")
    )


def plan_summary(plan: Plan) -> str:
    """One line: how many go, come back and stay, with their bytes on all tiers."""
    by_action = {action: [e for e in plan.entries if e.action == action] for action in _STYLES}
    words = []
    if by_action["expire"]:
        words.append(f"{plural(len(by_action['expire']), 'checkpoint')} would expire ({format_size(sum_nbytes(by_action['expire']))})")
    if by_action["revive"]:
        words.append(f"{len(by_action['revive']):,} would come back")
    if by_action["sweep"]:
        words.append(f"{len(by_action['sweep']):,} due to be freed ({format_size(sum_nbytes(by_action['sweep']))})")
    if by_action["expired"]:
        words.append(f"{len(by_action['expired']):,} expired ({format_size(sum_nbytes(by_action['expired']))})")
    drops = [drop for entry in plan.entries for drop in entry.drops if not drop.blocked]
    for tier in dict.fromkeys(drop.tier for drop in drops):
        of_tier = [drop for drop in drops if drop.tier == tier]
        nbytes = sum(drop.nbytes for drop in of_tier)
        words.append(f"{plural(len(of_tier), 'copy')} would leave {tier} ({format_size(nbytes)})")
    words.append(f"{'' if words else 'nothing goes: '}{len(by_action['keep']):,} kept")
    return ", ".join(words)


def plan_values(plan: Plan) -> Iterator[dict[str, Any]]:
    """The plan for ``--json``: each entry, each incomplete attempt, then the plan itself."""
    body = json.loads(plan.to_json())
    for entry in body.pop("entries"):
        yield {"type": "plan_entry", "run": plan.run, **entry}
    for item in body.pop("incomplete"):
        yield {"type": "plan_incomplete", "run": plan.run, **item}
    version = body.pop("plan")
    yield {"type": "plan", "plan_version": version, **body}
