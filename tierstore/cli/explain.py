"""``explain``: every rule's word on one checkpoint, what protects it, its copies, its log in words; also of one that is gone."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from tierstore.cli.find import Found, find_attempts
from tierstore.cli.options import Cli
from tierstore.cli.plan_table import plural, verdict
from tierstore.cli.render import TIER_MARKS, age_text, checkpoint_value, facts_table, plain_table
from tierstore.cli.retain import housekeeping
from tierstore.clock import parse_utc, when_text
from tierstore.errors import StorageError
from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers.catalog import Catalog, CheckpointInfo
from tierstore.tiers.gc.audit import audit_root
from tierstore.tiers.gc.housekeeping import Situation, look, plan_of
from tierstore.tiers.log import gone_in, read_log
from tierstore.tiers.referrers import attempt_of, dropped_text, kept_text
from tierstore.tiers.retention import PlanEntry, counted_copies
from tierstore.tiers.retention.explain import Word
from tierstore.tiers.retention.explain import explain as every_word
from tierstore.tiers.session import Session
from tierstore.tiers.together import together
from tierstore.units import format_size

__all__ = ["explain", "record_words"]

log = logging.getLogger(__name__)


def explain(
    cli: Cli,
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="RUN@12000, RUN@latest, RUN@best:METRIC, RUN@tag:TAG; also a step that is gone.")
    ] = "latest",
) -> int:
    """Say why a checkpoint stays or goes: every rule's word, its protections, each tier's copy, its log; or when and why it went."""
    cli.refuse_names("explain is about all tiers")
    with cli.session() as session:
        found = find_attempts(session, [ref])[0]
        if found.info is None:
            _tell_gone(cli, session, found)
            return 0
        h = housekeeping(cli, session, found.attempt.run)
        situation = session.run(look(h))
        info = next((c for c in situation.catalog.checkpoints if c.attempt == found.attempt), found.info)
        entry: PlanEntry | None = None
        words: Sequence[Word] = ()
        if h.policy is not None:
            plan = plan_of(h, situation)
            entry = plan.entry(info.attempt)
            words = every_word(plan, info.attempt)
    _tell_facts(cli, info, entry)
    _tell_words(cli, words, entry)
    _tell_tiers(cli, info, entry, situation)
    _tell_log(cli, info.records)
    _tell_others(cli, info, situation.catalog)
    return 0


def _tell_facts(cli: Cli, info: CheckpointInfo, entry: PlanEntry | None) -> None:
    now = cli.clock.now()
    value = checkpoint_value(info)
    cli.terminal.emit({**value, "action": entry.action if entry else None})
    facts: list[tuple[str, str | Text]] = [
        ("checkpoint", f"{info.run}@{info.step}, {format_size(info.nbytes)}, {age_text(info.committed_at, now)} old"),
        ("state", value["state"]),
        ("folder", info.attempt.folder),
    ]
    if entry is None:
        facts.append(("verdict", "keep: there is no retention policy, so nothing is ever deleted"))
    else:
        facts.append(("verdict", Text.assemble((entry.action, "bold"), f": {verdict(entry, now)}")))
    cli.terminal.show(facts_table(facts))


def _tell_words(cli: Cli, words: Sequence[Word], entry: PlanEntry | None) -> None:
    if entry is None:
        return
    table = plain_table("RULE", "FOR", "KEEPS", "SAYS", fold=("RULE", "SAYS"))
    for word in words:
        cli.terminal.emit({"type": "word", "rule": word.rule, "tier": word.tier, "matched": word.matched, "text": word.text})
        style = "green" if word.matched else "dim"
        cells = (word.rule, word.tier or "all", "yes" if word.matched else "no", word.text)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    for reason in entry.reasons:
        cli.terminal.emit({"type": "reason", "kind": reason.kind, "text": reason.text})
    cli.terminal.show("", table)


def _tell_tiers(cli: Cli, info: CheckpointInfo, entry: PlanEntry | None, situation: Situation) -> None:
    counted = counted_copies(info, situation.tiers)
    drops = {drop.tier: drop for drop in entry.drops} if entry else {}
    table = plain_table("TIER", "COPY", "COUNTS", "AND NEXT", fold=("COPY", "AND NEXT"))
    for tier in situation.tiers:
        state = info.replicas.get(tier.name)
        words = "nothing" if state is None else TIER_MARKS[state][2] or state
        if tier.name in info.dropped:
            words = dropped_text(info.serves, tier.name) or ("dropped on purpose" if state is None else words)
        if not tier.reachable:
            words = "not reached"
        drop = drops.get(tier.name)
        following = ""
        if drop is not None:
            following = f"stays: {drop.blocked} ({drop.reason.text})" if drop.blocked else f"leaves with the next gc: {drop.reason.text}"
        table.add_row(tier.name, words, "yes" if tier.name in counted else "no", following)
        cli.terminal.emit({"type": "copy", "tier": tier.name, "state": state, "counted": tier.name in counted, "next": following})
    cli.terminal.show("", table)
    readers = situation.leases.get(info.attempt, ())
    for lease in readers:
        cli.terminal.show(f"being read by {lease.holder} ({lease.kind})")
        cli.terminal.emit({"type": "lease", "holder": lease.holder, "kind": lease.kind, "ttl_s": lease.ttl_s})


def _tell_log(cli: Cli, records: Sequence[Record]) -> None:
    now = cli.clock.now()
    table = plain_table(("LOG", "right"), "AT", "WHAT", "BY", fold=("WHAT", "BY"))
    for record in records:
        table.add_row(str(record.seq), when_text(record.at, now), record_words(record, now), record.actor)
        value = {"type": "record", "seq": record.seq, "kind": record.kind, "at": record.at, "actor": record.actor}
        cli.terminal.emit({**value, "words": record_words(record, now), "data": dict(record.data)})
    cli.terminal.show("", table)


def _tell_others(cli: Cli, info: CheckpointInfo, catalog: Catalog) -> None:
    """Other attempts at the same step: a later one took their place, or they went."""
    others = [(c.attempt, "superseded" if c.superseded else "expired" if c.hidden else "committed") for c in catalog.checkpoints]
    others += [(attempt, "gone: freed for good") for attempt in catalog.swept]
    others += [(one.attempt, f"condemned: {one.condemned}") for one in catalog.condemned]
    for attempt, state in others:
        if attempt.step == info.step and attempt != info.attempt:
            cli.terminal.emit({"type": "other_attempt", "step": attempt.step, "save_id": attempt.save_id, "state": state})
            cli.terminal.show(f"another attempt at this step, {attempt.name}: {state}")


def record_words(record: Record, now: datetime | None = None) -> str:
    """One record of a log, in words."""
    data = record.data
    tier, name, reason = data.get("tier", "?"), data.get("name", "?"), data.get("reason")
    because = f": {reason}" if reason else ""
    words: Mapping[str, str] = {
        "committed": "committed",
        "condemned": f"condemned{because}",
        "replicated": f"copied to {tier}",
        "pinned": f"pinned '{name}'{because}",
        "unpinned": f"pin '{name}' taken off",
        "tagged": f"tagged {_list(data.get('tags'))}",
        "untagged": f"tags taken off: {_list(data.get('tags'))}",
        "metrics": f"metrics: {_pairs(data.get('metrics'))}",
        "held": f"held '{name}' {_until(data.get('until'), now)}{because}",
        "released": f"hold '{name}' ended",
        "expired": f"expired{because}; not freed before {_minute(data.get('not_before'), now)}",
        "revived": f"taken back{because}",
        "evicting": f"is dropped from {tier}{because}",
        "evicted": f"dropped from {tier}",
        "quarantined": f"{data.get('file', 'a file')} on {tier} found damaged",
        "referenced": f"{_step_of(data.get('by'))} takes bytes from it on {tier}",
        "reduced": f"freed for good, but for its bytes on {_list(data.get('keep'))}, which others take{because}",
        "swept": f"freed for good{because}",
    }
    return words.get(record.kind, f"{record.kind} {json.dumps(dict(record.data), ensure_ascii=False)}")


def _step_of(folder: Any) -> str:
    found = attempt_of(str(folder))
    return f"step {found.step}" if found is not None else str(folder)


def _list(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else "?"


def _pairs(value: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else "?"


def _until(value: Any, now: datetime | None) -> str:
    return f"until {_minute(value, now)}" if value else "until it is released"


def _minute(value: Any, now: datetime | None) -> str:
    try:
        return when_text(parse_utc(str(value)), now) if value else "?"
    except ValueError:
        return str(value)


def _tell_gone(cli: Cli, session: Session, found: Found) -> None:
    """Swept when, by whom, by which rule; and what the audit log says of its files."""
    attempt = found.attempt
    records = session.run(read_log(session.tiers.authority.storage, attempt))
    swept = gone_in(records)
    audit = session.run(_audit_of(session, attempt))
    facts: list[tuple[str, str | Text]] = [("checkpoint", f"{attempt.run}@{attempt.step}"), ("folder", attempt.folder)]
    if swept is not None:
        facts += [
            ("state", f"gone: freed for good {when_text(swept.at, cli.clock.now())}, it can't be taken back"),
            ("by", swept.actor),
            ("rule", str(swept.data.get("reason") or "no reason was given")),
        ]
    left = found.catalog.remains.get(attempt, ())
    reduced = found.catalog.reduced.get(attempt)
    if reduced is not None:
        kept = (
            kept_text(reduced.serves)
            or f"its bytes on {', '.join(sorted(reduced.keep))} are not needed any more: `tierstore gc` frees them"
        )
        facts.append(("kept", kept))
    if left:
        facts.append(("left", f"files on {', '.join(left)}; `tierstore gc` removes them"))
    cli.terminal.emit(
        {
            "type": "gone",
            "run": attempt.run,
            "step": attempt.step,
            "save_id": attempt.save_id,
            "swept_at": swept.at if swept else None,
            "actor": swept.actor if swept else None,
            "reason": swept.data.get("reason") if swept else None,
            "remains": list(left),
            "kept": {tier: [a.step for a in referrers] for tier, referrers in reduced.serves.items()} if reduced is not None else {},
        }
    )
    cli.terminal.show(facts_table(facts))
    if audit:
        table = plain_table("TIER", ("FILES", "right"), ("SIZE", "right"), "DELETED", "BY", "WHY", fold=("BY", "WHY"))
        now = cli.clock.now()
        counts: Counter[tuple[str, str, str, str]] = Counter()
        nbytes: Counter[tuple[str, str, str, str]] = Counter()
        for line in audit:
            cli.terminal.emit({"type": "audit", **line})
            key = (str(line.get("tier")), _minute(line.get("at"), now), str(line.get("actor")), str(line.get("why")))
            counts[key] += 1
            nbytes[key] += int(line.get("nbytes") or 0)
        for key, count in counts.items():
            table.add_row(key[0], str(count), format_size(nbytes[key]), key[1], key[2], key[3])
        cli.terminal.show("", table)
        cli.terminal.show(Text(f"{plural(len(audit), 'line')} of the audit log, {audit_root(attempt.run)}", style="dim"))
    _tell_log(cli, records)


async def _audit_of(session: Session, attempt: Attempt) -> list[dict[str, Any]]:
    """The audit log's lines about one attempt, from every tier that can be read, in order of time."""
    lines: list[dict[str, Any]] = []
    for tier in session.tiers:
        try:
            listed = await tier.storage.list(audit_root(attempt.run))
            for data in await together(tier.storage.read, [info.path for info in listed]):
                lines += _lines_about(attempt, data)
        except StorageError as error:  # it hides its own audit log only
            log.warning("tier=%s its audit log can't be read: %s", tier.name, error.message)
    order = {name: number for number, name in enumerate(session.tiers.names)}
    return sorted(lines, key=lambda line: (str(line.get("at")), order.get(str(line.get("tier")), len(order)), str(line.get("why"))))


def _lines_about(attempt: Attempt, data: bytes) -> Iterator[dict[str, Any]]:
    for text in data.decode("utf-8", "replace").splitlines():
        if attempt.name in text:
            try:
                line = json.loads(text)
            except ValueError:
                continue  # foreign, or cut short: what it says can't be known
            if isinstance(line, dict):
                yield line
