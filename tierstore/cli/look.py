"""The verbs that look into a checkpoint: ``show``, ``tensors``, ``cat``. None of them writes anything but a lease, and none needs torch."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Annotated

import typer
from rich.text import Text

from tierstore.cli.find import find_attempts, find_checkpoint
from tierstore.cli.options import Cli
from tierstore.cli.render import (
    TIER_MARKS,
    age_text,
    checkpoint_value,
    facts_table,
    plain_table,
)
from tierstore.cli.unchanged import Bytes, look_at_bytes, show_bytes, show_reduced
from tierstore.clock import parse_utc, when_text
from tierstore.errors import NotFoundError, TierStoreError, UsageError
from tierstore.format.companions import Companion, companions_in
from tierstore.format.index import TensorEntry
from tierstore.format.manifest import Manifest
from tierstore.format.record import Record
from tierstore.names import MANIFEST
from tierstore.tiers.catalog import CheckpointInfo
from tierstore.tiers.log_facts import Hold, quantised_text
from tierstore.tiers.pending import pending
from tierstore.tiers.quantised import generation_of, quantising
from tierstore.tiers.referrers import dropped_text
from tierstore.tiers.replica import Replica, Want, open_replica
from tierstore.tiers.session import Session
from tierstore.units import format_size

__all__ = ["cat", "show", "tensors"]

_READ_NBYTES = 32 << 20

Ref = Annotated[str, typer.Argument(metavar="REF", help="RUN@12000, RUN@latest, RUN@best:METRIC, RUN@tag:TAG; the run may be left out.")]


def show(cli: Cli, ref: Ref = "latest") -> int:
    """Show one checkpoint: its facts, files, replicas and log; also one that was deleted, where others still take bytes from it."""
    cli.refuse_names("show is about all tiers")
    with cli.session() as session:
        found = find_attempts(session, [ref])[0]
        catalog, info = found.catalog, found.info
        if info is None:
            reduced = [one for attempt, one in catalog.reduced.items() if attempt.step == found.attempt.step]
            if not reduced:
                find_checkpoint(session, ref)  # raises: nothing is left of it
            for one in reduced:
                show_reduced(cli.terminal, session, catalog, one)
                _show_log(cli, one.records)
            return 0
        tiers = session.tiers
        copies = pending(catalog, tiers)
        try:
            replica, failure = session.run(open_replica(session.tiers, info, run=session.run)), None
        except TierStoreError as error:  # the log can be shown all the same; the error is raised after that
            replica, failure = None, error
        unchanged = look_at_bytes(session, catalog, info.attempt, info.serves)
    manifest = replica.manifest if replica else None
    _show_facts(cli, info, manifest)
    if manifest is not None:
        _show_files(cli, manifest)
    due = [c.tier for c in copies if c.attempt == info.attempt]
    why = {tier.name: quantising(tier, manifest.facts).why_exact if manifest else "" for tier in tiers}
    _show_replicas(cli, info, [(tier.name, tier.uri) for tier in session.config.tiers], due, why, unchanged)
    show_bytes(cli.terminal, catalog, unchanged)
    _show_log(cli, info.records)
    cli.terminal.emit(
        {
            **checkpoint_value(info, copies),
            "created_at": manifest.created_at if manifest else None,
            "omitted": manifest.facts.get("omitted") if manifest else None,
        }
    )
    if failure is not None:
        raise failure
    return 0


def _show_facts(cli: Cli, info: CheckpointInfo, manifest: Manifest | None) -> None:
    state, now = checkpoint_value(info)["state"], cli.clock.now()
    facts = [
        ("checkpoint", f"{info.run}@{info.step}"),
        ("state", state + (", its log is lost: known from replicas' copies" if info.authority_lost else "")),
        ("committed", f"{when_text(info.committed_at, now)}, {age_text(info.committed_at, now)} ago"),
        ("folder", info.attempt.folder),
        ("size", f"{format_size(info.nbytes)} by {info.world_size} {'rank' if info.world_size == 1 else 'ranks'}"),
    ]
    if manifest is not None:
        facts.append(("tensors", f"{manifest.tensors} in {manifest.extents} extents, blocks of {format_size(manifest.block_nbytes)}"))
        writer = manifest.facts.get("writer", manifest.facts)
        if isinstance(writer, dict) and writer:
            facts.append(("written by", ", ".join(f"{k} {v}" for k, v in sorted(writer.items()) if isinstance(v, (str, int, float)))))
        if isinstance(left := manifest.facts.get("omitted"), dict):
            facts.append(("left out", _left_out(left, info.world_size)))
    if manifest is not None and (generation := generation_of(manifest.facts)):
        facts.append(("goes back to", f"{'a' if generation == 1 else generation} quantised {'copy' if generation == 1 else 'copies'}"))
    facts += [(f"metric {name}", f"{value:.6g}") for name, value in sorted(info.metrics.items())]
    facts += [(kind, ", ".join(values)) for kind, values in (("tags", info.tags), ("pins", info.pins)) if values]
    facts += [(f"hold {one.name}", _until(one, now)) for one in info.holds]
    if info.expired is not None:
        facts.append(("expired", f"{info.expired.reason or 'no reason was given'}; freed from {when_text(info.expired.not_before, now)}"))
    if info.final:
        facts.append(("final", "yes"))
    cli.terminal.show(facts_table(facts))


def _left_out(told: Mapping[str, object], world_size: int) -> str:
    """What a saver left out of a checkpoint on purpose; of several ranks the first one tells."""
    count, nbytes, patterns = told.get("tensors"), told.get("nbytes"), told.get("patterns")
    of = " of rank 0" if world_size > 1 else ""
    size = f", {format_size(nbytes)}" if isinstance(nbytes, int) else ""
    named = ", ".join(map(str, patterns)) if isinstance(patterns, list) else ""
    return f"{count} {'tensor' if count == 1 else 'tensors'}{of}{size}, on purpose (omit: {named})"


def _until(one: Hold, now: datetime) -> str:
    end = f"until {when_text(one.until, now)}" if one.until else "until it is released"
    return f"{end}: {one.reason}" if one.reason else end


def _show_files(cli: Cli, manifest: Manifest) -> None:
    table = plain_table("FILE", "KIND", ("SIZE", "right"), "DIGEST", fold=("FILE",))
    for file in manifest.files:
        table.add_row(file.name, file.kind, format_size(file.nbytes), file.digest[:19] + "…")
        cli.terminal.emit({"type": "file", "name": file.name, "kind": file.kind, "nbytes": file.nbytes, "digest": file.digest})
    for one in companions_in(manifest.facts).values():
        table.add_row(one.name, "adopted", format_size(one.nbytes), f"in {one.file}")
        cli.terminal.emit({"type": "adopted_file", "name": one.name, "nbytes": one.nbytes, "file": one.file})
    cli.terminal.show("", table)


def _show_replicas(
    cli: Cli,
    info: CheckpointInfo,
    tiers: Sequence[tuple[str, str]],
    due: Sequence[str],
    why_exact: Mapping[str, str],
    unchanged: Mapping[str, Bytes],
) -> None:
    """`tiers`: name and URI; `why_exact`: why a tier that quantises has, or gets, an exact copy; `unchanged`: shared bytes."""
    table = plain_table("TIER", "STATE", ("STORED", "right"), "WHERE", fold=("STATE", "WHERE"))
    for name, uri in tiers:
        state = info.replicas.get(name, "pending" if name in due else "")
        words = {"": "nothing", "pending": "nothing yet, to be copied", "complete": "complete"}.get(state)
        style = TIER_MARKS[state][1] if state else "dim"
        if state == "receipt":
            words = (
                f"parts of {'rank' if len(info.receipts.get(name, ())) == 1 else 'ranks'} {' '.join(map(str, info.receipts.get(name, ())))}"
            )
        quantised = info.quantised_on(name)
        if quantised is not None and state == "quantised":
            words = f"quantised {quantised_text(quantised)}" if quantised else "quantised"
        if state == "complete" and (why := why_exact.get(name)):
            words = f"complete, exact: {why}"
        if name in info.dropped:
            words = dropped_text(info.serves, name) or words
        taken = info.taken_on(name) if state in ("complete", "quantised") else None
        told = format_size(taken) if taken is not None else "-"
        table.add_row(name, Text(words or f"{state}: {TIER_MARKS[state][2]}", style=style), told, uri)
        cli.terminal.emit(
            {
                "type": "replica",
                "tier": name,
                "state": state or None,
                "uri": uri,
                "taken_nbytes": taken,
                "quantised": dict(quantised) if quantised is not None else None,
                **unchanged[name].value(),
            }
        )
    cli.terminal.show("", table)


def _show_log(cli: Cli, records: Sequence[Record]) -> None:
    now = cli.clock.now()
    table = plain_table(("LOG", "right"), "KIND", "AT", "BY", "FACTS", fold=("BY", "FACTS"))
    for record in records:
        facts = " ".join(f"{k}={_brief(v, now)}" for k, v in sorted(record.data.items()) if not isinstance(v, (dict, list)))
        table.add_row(str(record.seq), record.kind, when_text(record.at, now), record.actor, facts)
        cli.terminal.emit(
            {"type": "record", "seq": record.seq, "kind": record.kind, "at": record.at, "actor": record.actor, "data": dict(record.data)}
        )
    cli.terminal.show("", table)


def tensors(
    cli: Cli,
    ref: Ref = "latest",
    pattern: Annotated[str, typer.Argument(metavar="[PATTERN]", help="Names like 'model.*.weight'; * matches any text.")] = "*",
) -> int:
    """List a checkpoint's tensors: name, dtype, shape, bytes, shard."""
    cli.refuse_names("tensors reads the nearest good copy")
    with cli.session() as session:
        index = _open(session, ref).index
        names = [name for name in index.names() if fnmatchcase(name, pattern)]
        if not names:
            if not any(c in pattern for c in "*?["):
                index.find(pattern)  # raises with the nearest names
            raise NotFoundError(f"no tensor of {ref} matches {pattern!r}", hint="`tierstore tensors REF` lists all; quote patterns")
        index.prepare(names)
        entries = list(map(index.find, names))
    table = plain_table("TENSOR", "DTYPE", "SHAPE", ("SIZE", "right"), "SHARD", fold=("TENSOR", "SHARD"))
    first: dict[object, str] = {}
    nbytes = 0
    for entry in entries:
        stored = sum(e.end - e.begin for e in entry.extents)
        tied = first.setdefault(entry.extents, entry.name) if stored else entry.name
        nbytes += stored if tied == entry.name else 0
        shards = sorted({e.file for e in entry.extents})
        told = _shard_numbers(entry) if tied == entry.name else f"is {tied}"
        table.add_row(entry.name, entry.dtype, "×".join(map(str, entry.shape)) or "scalar", format_size(stored), told)
        cli.terminal.emit(
            {
                "type": "tensor",
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": entry.shape,
                "nbytes": stored,
                "files": shards,
                "tied_to": None if tied == entry.name else tied,
            }
        )
    of = f" of {len(index)}" if len(names) != len(index) else ""
    cli.terminal.show(table, Text(f"{len(names)}{of} tensors, {format_size(nbytes)}", style="dim"))
    return 0


def cat(
    cli: Cli,
    ref: Ref,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="manifest.json, objects.json, index.safetensors, a shard, an adopted config.json …")
    ],
) -> int:
    """Write one file of a checkpoint to stdout, every byte proved against its digest."""
    cli.refuse_names("cat reads the nearest good copy")
    if cli.terminal.as_json and not file.endswith(".json"):
        raise UsageError(f"{file} is binary, and --json prints text", hint="leave --json out")
    if not file.endswith(".json") and sys.stdout.isatty():
        raise UsageError(f"{file} is binary, and stdout is a terminal", hint=f"write it into a file: tierstore cat {ref} {file} > {file}")
    with cli.session() as session:
        _, info = find_checkpoint(session, ref)
        replica = session.open_replica(info)  # it may take long: under a lease
        carried = companions_in(replica.manifest.facts)
        names = [MANIFEST, *carried, *(f.name for f in replica.manifest.files)]
        if file not in names:
            near = difflib.get_close_matches(file, names, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"its files are {', '.join(names[:6])}"
            raise NotFoundError(f"{replica.info.run}@{replica.info.step} has no file {file!r}", hint=hint, file=file)
        own = file in (MANIFEST, *(f.name for f in replica.manifest.files))
        pieces = _file_bytes(session, replica, file) if own else [_carried_bytes(session, replica, carried[file])]
        if cli.terminal.as_json:
            text = b"".join(pieces).decode("utf-8", "replace")
            cli.terminal.emit({"type": "content", "run": replica.info.run, "step": replica.info.step, "name": file, "text": text})
            return 0
        out = sys.stdout.buffer
        for data in pieces:
            out.write(data)
        out.flush()
    return 0


def _open(session: Session, ref: str) -> Replica:
    _, info = find_checkpoint(session, ref)
    return session.run(open_replica(session.tiers, info, run=session.run))


def _file_bytes(session: Session, replica: Replica, name: str) -> Iterator[bytes | memoryview]:
    """The file's proved bytes, in pieces."""
    record = next((f for f in replica.manifest.files if f.name == name), None)
    if record is None or record.kind != "shard":
        yield session.run(replica.document(name))
        return
    buffer = memoryview(bytearray(min(_READ_NBYTES, record.nbytes)))
    for begin in range(0, record.nbytes, _READ_NBYTES):
        piece = buffer[: min(_READ_NBYTES, record.nbytes - begin)]
        session.run(replica.read([Want(name, begin, piece)]))
        yield piece


def _carried_bytes(session: Session, replica: Replica, one: Companion) -> bytes:
    """An adopted file, as it came."""
    from tierstore.state.passthrough import read_companion  # torch: only this file lies where tensors do

    return read_companion(replica, session.run, one)


def _shard_numbers(entry: TensorEntry) -> str:
    """``0``, or ``0 1 2 7`` for a tensor in several shards; a file that is not one of ours by its name."""
    names = sorted({e.file for e in entry.extents})
    told = [str(int(n.split("-")[1])) if n.startswith("shard-") and n.split("-")[1].isdigit() else n for n in names]
    return " ".join(told) if len(told) <= 6 else f"{told[0]} … {told[-1]}"


def _brief(value: object, now: datetime) -> str:
    """A fact of a record: digests by their beginning, times as everywhere, all else as it is."""
    if not isinstance(value, str):
        return json.dumps(value)
    if value.startswith("sha256:"):
        return f"{value[:19]}…"
    try:
        return when_text(parse_utc(value), now)
    except ValueError:
        return value
