"""What ``show`` tells of unchanged bytes: which earlier checkpoints' a copy takes on its tier, and who takes its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from tierstore.cli.render import facts_table, plain_table
from tierstore.cli.terminal import Terminal
from tierstore.clock import when_text
from tierstore.errors import StorageError, TierStoreError
from tierstore.names import Attempt
from tierstore.tiers.catalog import Catalog, CheckpointInfo
from tierstore.tiers.checkpoint import Reduced
from tierstore.tiers.log import gone_in
from tierstore.tiers.reference_facts import Taken, owners_of, taken_from
from tierstore.tiers.referrers import kept_for, kept_text
from tierstore.tiers.session import Session
from tierstore.units import format_size, format_some

__all__ = ["Bytes", "look_at_bytes", "show_bytes", "show_reduced", "steps_text"]

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Of one checkpoint's shards on one tier.

    `takes`: what they take from others' there; None: it could not be looked up, and `error` says why. `serves`: those who may take bytes
    from these shards, as the log says, and live; the newest first.
    """

    takes: tuple[Taken, ...] | None = ()
    error: str = ""
    serves: tuple[Attempt, ...] = ()

    def value(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "takes": None
            if self.takes is None
            else [{**_attempt_value(one.owner), "nbytes": one.nbytes, "missing": list(one.missing)} for one in self.takes],
            "serves": [_attempt_value(one) for one in self.serves],
        }


def look_at_bytes(session: Session, catalog: Catalog, attempt: Attempt, serves: Mapping[str, tuple[Attempt, ...]]) -> dict[str, Bytes]:
    """Tier → what is known of unchanged bytes there. Footers are read only where somebody's log says that there may be references."""
    owners, found = owners_of(catalog, attempt), dict[str, Bytes]()
    for tier in session.tiers:
        given = serves.get(tier.name, ())
        if tier.name not in owners:
            found[tier.name] = Bytes(serves=given)
            continue
        try:
            found[tier.name] = Bytes(takes=session.run(taken_from(tier, attempt)), serves=given)
        except TierStoreError as error:
            found[tier.name] = Bytes(takes=None, error=error.message, serves=given)
    return found


def show_bytes(terminal: Terminal, catalog: Catalog, found: Mapping[str, Bytes]) -> None:
    """A table of the tiers on which bytes are taken from others, or by others; nothing where there are none."""
    table = plain_table("TIER", "UNCHANGED BYTES", ("SIZE", "right"), fold=("UNCHANGED BYTES",))
    rows = 0
    for tier, known in found.items():
        for one in known.takes or ():
            words = Text(f"taken from {_named(catalog, one.owner)}")
            if one.missing:
                words.append(f": {format_some(one.missing, 3)} is not there, run `tierstore verify`", style="bold red")
            table.add_row(tier, words, format_size(one.nbytes))
        if known.takes is None:
            table.add_row(tier, Text(f"taken from others, but not looked up: {known.error}", style="yellow"), "-")
        if known.serves:
            those = "that lives" if len(known.serves) == 1 else "one of these lives"
            table.add_row(tier, f"taken by {steps_text(known.serves)}: these shards stay here while {those}", "-")
        rows += len(known.takes or ()) + (known.takes is None) + bool(known.serves)
    if rows:
        terminal.show("", table)


def show_reduced(terminal: Terminal, session: Session, catalog: Catalog, reduced: Reduced) -> None:
    """A checkpoint that was deleted, but for shards that others take bytes from: what is left, where, and for whom."""
    attempt, now, end = reduced.attempt, session.clock.now(), gone_in(reduced.records)
    found = look_at_bytes(session, catalog, attempt, reduced.serves)
    sizes = session.run(_left_on(session, reduced))
    free = "its bytes are not needed any more: `tierstore gc` frees them"
    facts: list[tuple[str, str | Text]] = [
        ("checkpoint", f"{attempt.run}@{attempt.step}"),
        ("state", f"deleted{f' {when_text(end.at, now)}' if end else ''}, it can't be loaded or taken back; only shards are left"),
        ("folder", attempt.folder),
        ("kept", kept_text(reduced.serves) or free),
    ]
    terminal.show(facts_table(facts))
    table = plain_table("TIER", "STATE", ("STORED", "right"), fold=("STATE",))
    for tier in session.tiers.names:
        serves = reduced.serves.get(tier, ())
        kept = tier in reduced.keep
        words = f"shards, {kept_for(serves)}" if serves else "shards that nobody needs: `tierstore gc` frees them" if kept else "nothing"
        stored = sizes.get(tier)
        table.add_row(tier, Text(words, style="" if kept else "dim"), format_size(stored) if stored is not None else "-")
        terminal.emit(
            {"type": "replica", "tier": tier, "state": "reduced" if kept else None, "taken_nbytes": stored, **found[tier].value()}
        )
    terminal.show("", table)
    show_bytes(terminal, catalog, found)
    terminal.emit(
        {
            "type": "gone",
            **_attempt_value(attempt),
            "folder": attempt.folder,
            "state": "reduced",
            "swept_at": end.at if end else None,
            "kept": {tier: [one.step for one in serves] for tier, serves in reduced.serves.items()},
        }
    )


async def _left_on(session: Session, reduced: Reduced) -> dict[str, int]:
    """Tier → the bytes that the checkpoint's shards take up there; without tiers that can't be asked."""
    found = {}
    for tier in session.tiers:
        if tier.name in reduced.keep:
            try:
                files = (await tier.storage.children(reduced.attempt.folder)).files
            except StorageError:
                continue
            found[tier.name] = sum(info.taken_nbytes for info in files)
    return found


def steps_text(attempts: Sequence[Attempt]) -> str:
    """``step 4``, ``steps 4, 3 and 12 more``."""
    steps = sorted({one.step for one in attempts}, reverse=True)
    return f"step{'s' if len(steps) > 1 else ''} {format_some(steps, _MOST_NAMED)}"


def _named(catalog: Catalog, owner: Attempt) -> str:
    """A checkpoint whose bytes are taken, and what has become of it."""
    info: CheckpointInfo | None = next((c for c in catalog.checkpoints if c.attempt == owner), None)
    if info is None:
        return f"step {owner.step} (deleted; these bytes stay)"
    return f"step {owner.step}" + (" (expired)" if info.hidden else " (superseded)" if info.superseded else "")


def _attempt_value(attempt: Attempt) -> dict[str, Any]:
    return {"run": attempt.run, "step": attempt.step, "save_id": attempt.save_id}
