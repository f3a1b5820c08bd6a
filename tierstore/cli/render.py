"""Catalogs and checkpoints as tables that fit 80 columns, and as plain values for ``--json``. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.text import Text

from tierstore.cli.layout import Facts, FitTable
from tierstore.names import Attempt, save_id_time
from tierstore.tiers.catalog import Catalog
from tierstore.tiers.checkpoint import CheckpointInfo, IncompleteAttempt, ReplicaState
from tierstore.tiers.log_facts import quantised_text
from tierstore.tiers.pending import Copy
from tierstore.units import format_duration, format_size

__all__ = [
    "TIER_MARKS",
    "age_text",
    "catalog_legend",
    "catalog_rows",
    "catalog_summary",
    "catalog_table",
    "checkpoint_value",
    "facts_table",
    "incomplete_value",
    "plain_table",
    "tiers_text",
    "wrapped",
]

TIER_MARKS: Mapping[ReplicaState | str, tuple[str, str, str]] = {
    "complete": ("", "green", ""),
    "receipt": ("+", "cyan", "this node's part"),
    "partial": ("~", "yellow", "not complete yet"),
    "pending": ("~", "yellow", "not complete yet"),
    "evicting": ("-", "yellow", "being evicted"),
    "quarantined": ("!", "bold red", "found damaged"),
    "quantised": ("≈", "magenta", "quantised, not exact"),
}
"""How a tier's name is marked in a table: prefix, style, and what the prefix means."""


def wrapped(text: str | Text) -> Text:
    """A sentence; `Terminal.show` breaks it between words."""
    return text if isinstance(text, Text) else Text(text)


def plain_table(*columns: str | tuple[str, str], fold: Sequence[str] = ()) -> FitTable:
    """A table without lines. A column is its heading, or (heading, ``left`` or ``right``); those in `fold` wrap, or go below their row."""
    return FitTable(columns, fold)


def facts_table(facts: Iterable[tuple[str, str | Text]]) -> Facts:
    """Names and values, one a line."""
    return Facts(facts)


def age_text(at: datetime, now: datetime) -> str:
    """How long ago, with one unit: ``45s``, ``5m``, ``3h``, ``12d``; a time in the future says so."""
    seconds = (now - at).total_seconds()
    if seconds < -1:
        return f"in {age_text(now, at)}"
    for unit in (86400, 3600, 60):
        if seconds >= unit:
            return format_duration(seconds // unit * unit)
    return f"{max(0, round(seconds))}s" if seconds < 59.5 else "1m"


def catalog_table(catalog: Catalog, pending: Sequence[Copy], now: datetime) -> FitTable:
    """Checkpoints × tiers, newest first, with the attempts that are no checkpoints (yet)."""
    table = plain_table(
        ("STEP", "right"), ("AGE", "right"), ("SIZE", "right"), "TIERS", "METRICS", "NOTE", fold=("TIERS", "METRICS", "NOTE")
    )
    for row in catalog_rows(catalog, pending, now):
        table.add_row(*row)
    return table


def catalog_rows(catalog: Catalog, pending: Sequence[Copy], now: datetime) -> list[tuple[str | Text, ...]]:
    """The rows of `catalog_table`."""
    latest = catalog.offered()
    rows: list[tuple[Attempt, tuple[str | Text, ...]]] = []
    for info in catalog.checkpoints:
        due = [c.tier for c in pending if c.attempt == info.attempt]
        row = (
            str(info.step),
            age_text(info.committed_at, now),
            format_size(info.nbytes),
            tiers_text({**info.replicas, **{name: "pending" for name in due if name not in info.replicas}}),
            _metrics_text(info.metrics),
            _note(info, is_latest=latest is not None and info.attempt == latest.attempt),
        )
        rows.append((info.attempt, row))
    for attempt in (*catalog.incomplete, *catalog.condemned):
        at = age_text(save_id_time(attempt.attempt.save_id), now)
        seen = Text(" ".join(dict.fromkeys((*attempt.receipts, *attempt.parts))))
        rows.append(
            (
                attempt.attempt,
                (
                    str(attempt.attempt.step),
                    at,
                    "-",
                    seen,
                    "",
                    Text(_incomplete_note(attempt), style="bold red" if attempt.unreadable else "dim"),
                ),
            )
        )
    return [row for _, row in sorted(rows, key=lambda r: r[0], reverse=True)]


def catalog_summary(catalog: Catalog) -> Text:
    """``run sft-7   12 committed, 1 incomplete, 1 expired``."""
    counts = {
        "committed": sum(not (c.superseded or c.hidden) for c in catalog.checkpoints),
        "superseded": sum(c.superseded for c in catalog.checkpoints),
        "expired": sum(c.hidden and not c.superseded for c in catalog.checkpoints),
        "incomplete": len(catalog.incomplete),
        "condemned": len(catalog.condemned),
        "deleted but for bytes that others take": sum(bool(one.serves) for one in catalog.reduced.values()),
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "committed")
    return Text.assemble(("run ", ""), (catalog.run, "bold"), f"   {told}")


def catalog_legend(catalog: Catalog, pending: Sequence[Copy]) -> Text | None:
    """What the marks mean, for those that occur; None where there are none."""
    replicas = {info.attempt: info.replicas for info in catalog.checkpoints}  # rows of attempts that did not commit have no marks
    states = {state for row in replicas.values() for state in row.values()}
    awaited = any(c.attempt in replicas and c.tier not in replicas[c.attempt] for c in pending)
    used: dict[str, str] = {}
    for state in [*states, *(["pending"] if awaited else [])]:
        mark, _, meaning = TIER_MARKS[state]
        if mark:
            used[mark] = meaning
    return Text(", ".join(f"{mark}tier: {meaning}" for mark, meaning in sorted(used.items())), style="dim") if used else None


def checkpoint_value(info: CheckpointInfo, pending: Sequence[Copy] = ()) -> dict[str, Any]:
    """A committed checkpoint for ``--json``."""
    return {
        "type": "checkpoint",
        "run": info.run,
        "step": info.step,
        "save_id": info.attempt.save_id,
        "folder": info.attempt.folder,
        "state": "expired" if info.hidden else "superseded" if info.superseded else "damaged" if info.damaged else "committed",
        "committed_at": info.committed_at,
        "nbytes": info.nbytes,
        "world_size": info.world_size,
        "tiers": dict(info.replicas),
        "taken_nbytes": {tier: info.taken_on(tier) for tier, state in info.replicas.items() if state in ("complete", "quantised")},
        "quantised": {tier: dict(told) for tier in info.replicas if (told := info.quantised_on(tier)) is not None},
        "serves": {tier: [one.step for one in referrers] for tier, referrers in info.serves.items()},
        "pending": [c.tier for c in pending if c.attempt == info.attempt],
        "metrics": dict(info.metrics),
        "tags": list(info.tags),
        "pins": list(info.pins),
        "holds": [{"name": h.name, "reason": h.reason, "at": h.at, "until": h.until} for h in info.holds],
        "not_before": info.expired.not_before if info.expired else None,
        "final": info.final,
        "authority_lost": info.authority_lost,
        "manifest_digest": info.manifest_digest,
    }


def incomplete_value(found: IncompleteAttempt) -> dict[str, Any]:
    """An attempt that is no checkpoint, for ``--json``."""
    return {
        "type": "attempt",
        "run": found.attempt.run,
        "step": found.attempt.step,
        "save_id": found.attempt.save_id,
        "folder": found.attempt.folder,
        "state": "condemned" if found.condemned else "incomplete",
        "reason": found.condemned,
        "unreadable": found.unreadable,
        "world_size": found.world_size,
        "missing_ranks": found.missing,
        "parts": {tier: list(ranks) for tier, ranks in found.parts.items()},
        "receipts": {tier: list(ranks) for tier, ranks in found.receipts.items()},
    }


def tiers_text(states: Mapping[str, str], width: int = 0) -> Text:
    """The tiers with their marks, separated by blanks; `width` above 0: a new line before it gets wider, where a name allows it."""
    text, line = Text(), 0
    for name, state in states.items():
        mark, style, _ = TIER_MARKS[state]
        word = f"{mark}{name}"
        wraps = bool(width and line and line + 1 + len(word) > width)
        text.append("\n" if wraps else " " if text else "").append(word, style=style)
        line = len(word) if wraps or not line else line + 1 + len(word)
    return text or Text("none", style="bold red")


def _metrics_text(metrics: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in sorted(metrics.items()))


def _note(info: CheckpointInfo, *, is_latest: bool) -> Text:
    words: list[tuple[str, str]] = []
    if info.damaged:
        words.append(("log unreadable", "bold red"))
    if not info.usable and not info.damaged:
        words.append(("no exact copy" if "quantised" in info.replicas.values() else "no complete copy", "bold red"))
    for name, state in info.replicas.items():
        if state == "quantised" and (told := info.quantised_on(name)):
            words.append((f"{name} {quantised_text(told)}", "magenta"))
    if info.authority_lost:
        words.append(("log lost", "yellow"))
    if info.hidden:
        words.append(("expired", "dim"))
    if info.superseded:
        words.append(("superseded", "dim"))
    if is_latest:
        words.append(("latest", "bold"))
    if info.final:
        words.append(("final", ""))
    words += [(f"tag:{tag}", "") for tag in info.tags]
    words += [(f"pin:{pin}", "") for pin in info.pins]
    words += [(f"hold:{hold.name}", "") for hold in info.holds]
    text = Text()
    for word, style in words:
        text.append(", " if text else "").append(word, style=style)
    return text


def _incomplete_note(found: IncompleteAttempt) -> str:
    if found.unreadable:
        return "its commit record can't be read"
    if found.condemned:
        return f"condemned: {found.condemned}"
    missing = found.missing
    if missing is None:
        return "incomplete"
    if not missing:
        return "not committed yet, all parts are there"
    return f"incomplete, {'rank' if len(missing) == 1 else 'ranks'} {' '.join(map(str, missing[:8]))} missing"
