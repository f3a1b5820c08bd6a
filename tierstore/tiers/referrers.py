"""Who refers to whom: the checkpoints whose files on a tier take bytes from an earlier one's shards there, and which of them live. Pure.

A referrer lives until it can be read nowhere any more (swept, reduced, condemned: its fate, which never changes back) and none of its
shards is left on the tier. That its copy there was dropped is not enough: it may be brought back, and a writer who slept through all of it
may still publish a file that refers (`tests/protocols/model_references.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers.log_facts import fold

__all__ = ["Known", "attempt_of", "dropped_text", "fold_references", "kept_for", "kept_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a catalog knows of the referrers' fates.

    Attributes:
        gone: Those that can be read nowhere any more.
        remains: Of those: the tiers that have something of them.
        keep: Of those: the tiers on which shards stay, for others refer to them in turn.
    """

    gone: frozenset[Attempt]
    remains: Mapping[Attempt, Collection[str]] = field(default_factory=dict)
    keep: Mapping[Attempt, Collection[str]] = field(default_factory=dict)

    def lives(self, referrer: Attempt, tier: str) -> bool:
        """Whether it may read, or somebody may read it, from the tier, as far as is known."""
        return referrer not in self.gone or tier in self.remains.get(referrer, ()) or tier in self.keep.get(referrer, ())

    def serving(self, referring: Mapping[str, Sequence[Attempt]], tiers: Collection[str] | None = None) -> dict[str, tuple[Attempt, ...]]:
        """Tier → the referrers that live, the newest first; without tiers of which none does, or which are not in `tiers`."""
        living = {
            tier: tuple(referrer for referrer in referrers if self.lives(referrer, tier))
            for tier, referrers in referring.items()
            if tiers is None or tier in tiers
        }
        return {tier: referrers for tier, referrers in living.items() if referrers}


def fold_references(records: Sequence[Record]) -> dict[str, tuple[Attempt, ...]]:
    """Tier → who may refer to the checkpoint's shards there by its log, the newest first; most logs say nothing of it."""
    if not any(record.kind == "referenced" for record in records):
        return {}
    found = {
        tier: tuple(sorted(filter(None, map(attempt_of, folders)), key=lambda a: a.save_id, reverse=True))
        for tier, folders in fold(records).referenced.items()
    }
    return {tier: referrers for tier, referrers in found.items() if referrers}


def attempt_of(folder: str) -> Attempt | None:
    """The attempt whose folder it is; None: it is none's."""
    run, _, name = folder.rpartition("/")
    return Attempt.parse(run, name)


def kept_for(referrers: Iterable[Attempt]) -> str:
    """For people, e.g. ``kept for step 12``: whom bytes serve that stay."""
    steps = sorted({referrer.step for referrer in referrers}, reverse=True)
    named = ", ".join(map(str, steps[:3])) + (f" and {len(steps) - 3} more" if len(steps) > 3 else "")
    return f"kept for step{'s' if len(steps) > 1 else ''} {named}"


def dropped_text(serves: Mapping[str, Sequence[Attempt]], tier: str) -> str:
    """For people, of a copy that a tier has dropped; empty: nothing of it stays for others."""
    return f"dropped; its bytes are {kept_for(serves[tier])}" if tier in serves else ""


def kept_text(serves: Mapping[str, Sequence[Attempt]]) -> str:
    """For people: which of a checkpoint's bytes stay, and for whom; empty: none do."""
    if not serves:
        return ""
    return f"its bytes on {', '.join(sorted(serves))} are {kept_for(r for referrers in serves.values() for r in referrers)}"
