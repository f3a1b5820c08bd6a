"""Log records: one file per decision about a checkpoint, numbered, write-once (PROTOCOLS.md §2)."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tierstore.clock import utc_text
from tierstore.errors import UsageError
from tierstore.format.document import FORMAT_VERSION, check_version, decode_document, encode_document
from tierstore.format.fields import Fields

__all__ = ["FIRST_KINDS", "KINDS", "Record", "decode_record", "encode_record"]

FIRST_KINDS = frozenset({"committed", "condemned"})
"""What record 0 may say; no later record says it."""

KINDS = FIRST_KINDS | {
    "evicted",
    "evicting",
    "expired",
    "held",
    "metrics",
    "pinned",
    "quarantined",
    "reduced",
    "referenced",
    "released",
    "replicated",
    "revived",
    "swept",
    "tagged",
    "unpinned",
    "untagged",
}

_KIND = re.compile(r"[a-z][a-z-]{0,39}")
_NONCE = re.compile(r"[0-9a-f]{32}")
_MAX_SEQ = 999_999
_MAX_NBYTES = 16 << 20
_DOCUMENT = "tierstore.record"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One decision.

    Attributes:
        seq: Its number in the checkpoint's log; 0 is the commit or the condemnation.
        kind: One of `KINDS`.
        at: When it was written, by the writer's clock; steers policy, never safety.
        nonce: 128 random bits in hexadecimal: tells a lost acknowledgement of our own write from another's record.
        actor: Who wrote it, e.g. ``host:pid``.
        data: JSON values that depend on the kind.
    """

    seq: int
    kind: str
    at: datetime
    nonce: str
    actor: str
    data: Mapping[str, Any] = field(default_factory=dict)


def encode_record(record: Record) -> bytes:
    """Writes a record as a document.

    Raises:
        UsageError: A field is out of its range; a malformed record is never written.
    """
    problem = (
        f"kind {record.kind!r} is unknown"
        if record.kind not in KINDS
        else f"number {record.seq} is out of range"
        if not 0 <= record.seq <= _MAX_SEQ
        else f"{record.kind!r} can't be number {record.seq}"
        if (record.seq == 0) != (record.kind in FIRST_KINDS)
        else "the nonce is not 32 hexadecimal digits"
        if not _NONCE.fullmatch(record.nonce)
        else ""
    )
    if problem:
        raise UsageError(f"log record: {problem}", hint=f"kinds are {', '.join(sorted(KINDS))}; record 0 is committed or condemned")
    return encode_document(
        _DOCUMENT,
        {
            "seq": record.seq,
            "kind": record.kind,
            "at": utc_text(record.at),
            "nonce": record.nonce,
            "actor": record.actor,
            "data": record.data,
        },
        sealed=True,
    )


def decode_record(data: bytes) -> Record:
    """Reads a record. A kind that this version does not know is accepted from a newer minor version only.

    Raises:
        FormatError: Malformed, foreign or oversized.
        VersionError: Written by a newer major version.
    """
    fields = Fields(what=_DOCUMENT, body=decode_document(data, _DOCUMENT, max_nbytes=_MAX_NBYTES))
    seq = fields.integer("seq", high=_MAX_SEQ)
    kind = fields.text("kind", pattern=_KIND)
    newer = check_version(fields.get("format_version"), _DOCUMENT) > check_version(FORMAT_VERSION, _DOCUMENT)
    if kind not in KINDS and not newer:
        raise fields.error("kind", f"has the unknown value {kind!r}")
    if (seq == 0) != (kind in FIRST_KINDS):
        raise fields.error("kind", f"can't be {kind!r} in record {seq}")
    return Record(
        seq=seq,
        kind=sys.intern(kind),
        at=fields.at("at"),
        nonce=fields.text("nonce", pattern=_NONCE),
        actor=sys.intern(fields.text("actor")),
        data=fields.mapping("data"),
    )
