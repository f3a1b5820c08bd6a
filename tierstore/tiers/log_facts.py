"""What an attempt's log says: its records, folded in order into one value (PROTOCOLS.md §2, §5, §6). Pure, and the only reading of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tierstore.clock import parse_utc
from tierstore.format.record import Record

__all__ = ["COMMITTED_AGAIN", "Expiry", "Hold", "LogFacts", "fold", "quantised_in", "quantised_text"]


COMMITTED_AGAIN = "manifest_was_there"
"""What a commit record says where there was a manifest before it: its committer died; or its log was lost, with what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """The decision that a checkpoint goes.

    `not_before`: until then it can be taken back and is not freed, by the clock of who decided. `reason` is for people; `plan` names the
    plan that it was part of.
    """

    at: datetime
    not_before: datetime
    reason: str = ""
    plan: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A named hold: while it lasts the checkpoint is neither deleted nor dropped from any tier. `until` None: until it is released."""

    name: str
    at: datetime
    reason: str = ""
    until: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """What the records say together. Unknown kinds and malformed facts say nothing.

    Attributes:
        fate: Record 000000: committed or condemned; None while it is open.
        metrics: By name; later ones replace earlier ones.
        tags: In the order in which they came.
        pins: Names of the pins.
        holds: The holds that were not released; whether one has run out is for who knows the time.
        expired: The decision that it goes, unless it was taken back.
        revived: When it was last taken back from being expired.
        swept: It is gone for everybody, by ``swept`` or ``reduced``: the point of no return.
        reduced: By ``reduced``: the tiers on which its shards stay, for others refer to them; None: it is not reduced, or swept since.
        referenced: Tier → folders of the checkpoints whose files there may take bytes from its shards, in the order of the records.
        replicated: Tier → the record that made its copy count; evicted copies are not here.
        evicting: Tiers whose copy is being removed.
        evicted: Tiers whose copy was removed on purpose.
        quarantined: (tier, file) whose bytes were found damaged, since the tier's copy was last recorded.
    """

    fate: Record | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    holds: tuple[Hold, ...] = ()
    expired: Expiry | None = None
    revived: datetime | None = None
    swept: bool = False
    reduced: frozenset[str] | None = None
    referenced: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    replicated: Mapping[str, Record] = field(default_factory=dict)
    evicting: frozenset[str] = frozenset()
    evicted: frozenset[str] = frozenset()
    quarantined: frozenset[tuple[str, str]] = frozenset()

    @property
    def quantised(self) -> Mapping[str, Mapping[str, Any]]:
        """Tier → what its record says of a copy that is not exact: such a copy counts nowhere, and is no source of another one."""
        return {tier: told for tier, record in self.replicated.items() if (told := quantised_in(record.data)) is not None}

    @property
    def committed(self) -> bool:
        return self.fate is not None and self.fate.kind == "committed"

    @property
    def condemned(self) -> bool:
        return self.fate is not None and self.fate.kind == "condemned"

    @property
    def may_have_been_lost(self) -> bool:
        """Whether there may have been an earlier log, which was lost: then who takes bytes from the checkpoint may not be said here."""
        return self.fate is not None and self.fate.data.get(COMMITTED_AGAIN) is True

    @property
    def hidden(self) -> bool:
        """Expired and not taken back, or swept: not offered, and copied nowhere."""
        return self.expired is not None or self.swept

    def refused_reference(self, tier: str, authority: str) -> str:
        """Why no file on the tier may begin to refer to its shards there; empty: it may.

        Its copy there must be whole, and must not have been let go; a reduced one's shards stay where the record says so. Of a quantised
        one, blocks that are exact there may be referred to.
        """
        if not self.committed:
            return "it is no checkpoint"
        if self.swept and (self.reduced is None or tier not in self.reduced):
            return "it was deleted"
        if tier in self.dropped:
            return "its copy there was dropped"
        if tier != authority and tier not in self.replicated:
            return "it has no whole copy there"
        return "its copy there was found damaged" if self.quarantined_on(tier) else ""

    @property
    def dropped(self) -> frozenset[str]:
        """The tiers that are not to have a copy again by themselves: it was, or is being, removed on purpose."""
        return self.evicting | self.evicted

    @property
    def world_size(self) -> int | None:
        """How many ranks saved together, as record 000000 says."""
        size = self.fate.data.get("world_size") if self.fate else None
        return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None

    def quarantined_on(self, tier: str) -> bool:
        """Whether some file of the tier's copy was found damaged."""
        return any(name == tier for name, _ in self.quarantined)


def quantised_in(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a ``replicated`` record's facts say of a quantised copy; None: the copy is exact."""
    told = data.get("quantised")
    return told if isinstance(told, Mapping) else None


def quantised_text(told: Mapping[str, Any]) -> str:
    """What is known of a quantised copy, for people: ``q8 (steps off by 2 % on average, by 1.3 of their RMS at worst)``."""
    mean, worst = (
        value if isinstance(value, (int, float)) and value == value else None for value in map(told.get, ("mean_error", "max_error"))
    )
    errors = [f"by {mean * 100:.2g} % on average"] if mean is not None else []
    errors += [f"by {worst:.2g} of their RMS at worst"] if worst is not None else []
    scheme = str(told.get("scheme") or "quantised")
    if not errors and {"mean_error", "max_error"} & set(told):
        return f"{scheme} (how far steps are off was not measured)"
    return f"{scheme} (steps off {', '.join(errors)})" if errors else scheme


def fold(records: Sequence[Record]) -> LogFacts:
    """Reads an attempt's records, in the order of their numbers; empty: its fate is open."""
    fate = records[0] if records and records[0].seq == 0 else None
    metrics = _numbers(fate.data.get("metrics")) if fate else {}
    tags = dict.fromkeys(_texts(fate.data.get("tags"))) if fate else {}
    pins: dict[str, None] = {}
    holds: dict[str, Hold] = {}
    expired: Expiry | None = None
    revived: datetime | None = None
    replicated: dict[str, Record] = {}
    words: dict[str, str] = {}
    reduced: frozenset[str] | None = None
    referenced: dict[str, dict[str, None]] = {}
    quarantined: set[tuple[str, str]] = set()
    swept = False
    for record in records:
        data, tier, name = record.data, str(record.data.get("tier", "")), str(record.data.get("name", "pin"))
        if record.kind in ("pinned", "tagged", "held", "revived"):
            revived = record.at if expired else revived
            expired = None  # each of them brings an expired checkpoint back by winning the next number
        if record.kind == "metrics":
            metrics.update(_numbers(data.get("metrics")))
        elif record.kind == "tagged":
            tags.update(dict.fromkeys(_texts(data.get("tags"))))
        elif record.kind == "untagged":
            for tag in _texts(data.get("tags")):
                tags.pop(tag, None)
        elif record.kind == "pinned":
            pins[name] = None
        elif record.kind == "unpinned":
            pins.pop(name, None)
        elif record.kind == "held":
            holds[name] = Hold(name=name, at=record.at, reason=str(data.get("reason", "")), until=_time(data.get("until")))
        elif record.kind == "released":
            holds.pop(name, None)
        elif record.kind == "expired":
            not_before = _time(data.get("not_before")) or record.at
            expired = Expiry(at=record.at, not_before=not_before, reason=str(data.get("reason", "")), plan=str(data.get("plan", "")))
        elif record.kind == "replicated":
            replicated[tier] = record
            words[tier] = record.kind
            quarantined = {(t, f) for t, f in quarantined if t != tier}
        elif record.kind in ("evicting", "evicted"):
            replicated.pop(tier, None)
            words[tier] = record.kind
        elif record.kind == "quarantined":
            quarantined.add((tier, str(data.get("file", ""))))
        elif record.kind == "referenced":
            referenced.setdefault(tier, {})[str(data.get("by", ""))] = None
        elif record.kind == "reduced":
            kept = frozenset(_texts(data.get("keep")))
            reduced = kept if reduced is None else reduced & kept  # what was let go once does not come back
        elif record.kind == "swept":
            swept = True
    return LogFacts(
        fate=fate,
        metrics=metrics,
        tags=tuple(tags),
        pins=tuple(pins),
        holds=tuple(holds.values()),
        expired=expired,
        revived=revived,
        swept=swept or reduced is not None,
        reduced=None if swept else reduced,
        referenced={tier: tuple(folders) for tier, folders in referenced.items()},
        replicated=replicated,
        evicting=frozenset(t for t, word in words.items() if word == "evicting"),
        evicted=frozenset(t for t, word in words.items() if word == "evicted"),
        quarantined=frozenset(quarantined),
    )


def _numbers(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    return {str(k): float(v) for k, v in value.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _texts(value: object) -> Iterable[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, (list, tuple)) else ()


def _time(value: object) -> datetime | None:
    try:
        return parse_utc(value) if isinstance(value, str) else None
    except ValueError:
        return None
