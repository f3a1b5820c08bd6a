"""What the catalog knows of one attempt: a committed checkpoint with its replicas, or an attempt that is not (yet) one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from tierstore.format.record import Record
from tierstore.names import Attempt
from tierstore.tiers.log_facts import Expiry, Hold, quantised_in

__all__ = ["CheckpointInfo", "IncompleteAttempt", "Reduced", "ReplicaState", "parse_file_name"]

ReplicaState = Literal["complete", "receipt", "partial", "evicting", "quarantined", "quantised"]
"""What a tier holds of a checkpoint.

- ``complete``: all of it, with a copy of the commit record; a source for loads and promotion.
- ``receipt``: a node tier holds its own ranks' parts; their shards can be read, the manifest comes from elsewhere.
- ``partial``: some files; a copy under way, or one that was given up. Not a source.
- ``evicting``: being removed. A load's very last resort.
- ``quarantined``: found damaged. The last resort.
- ``quantised``: all of it, but some tensors with a loss. Counts nowhere, and is read where no other copy gives the bytes.
"""

_SHARD = re.compile(r"shard-(\d{5,8})-of-(\d{5,8})\.safetensors")
_PART = re.compile(r"part-(\d{5,8})\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed checkpoint.

    `opening`: how many bytes a reader asks for first, by file, so that it need not wait for the manifest to ask for them. `nbytes` counts
    all its files, in bytes; `replicas` maps a tier's name to what it holds (absent: nothing, or the tier was not reached), nearest first;
    `receipts` maps a node tier's name to the ranks whose parts lie there; `replicated` maps a tier's name to the facts that its
    ``replicated`` record gives, but for those of single files; `taken` what its copy takes up there, in bytes, where that is not `nbytes`
    and a record says so; `dropped` are the tiers whose copy was, or is being, removed on purpose,
    and `quarantined` the (tier, file) that were found damaged. `expired`: the decision that it goes, while it is not swept; `revived`:
    when it was last taken back. `superseded`: a later attempt at the same step committed. `damaged`: a record of its log can't be read.
    `authority_lost`: known from replicas' copies of the log only. `records`: its log, `lean`. `serves`: tier → the checkpoints whose
    files there take bytes from its shards, as far as they live: these shards stay there for as long, whatever becomes of it.
    """

    attempt: Attempt
    committed_at: datetime
    manifest_digest: str
    manifest_nbytes: int | None = None
    opening: Mapping[str, int] = field(default_factory=dict)
    nbytes: int = 0
    world_size: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    holds: tuple[Hold, ...] = ()
    final: bool = False
    replicas: Mapping[str, ReplicaState] = field(default_factory=dict)
    receipts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    replicated: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    taken: Mapping[str, int] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    quarantined: frozenset[tuple[str, str]] = frozenset()
    expired: Expiry | None = None
    revived: datetime | None = None
    superseded: bool = False
    damaged: bool = False
    authority_lost: bool = False
    records: tuple[Record, ...] = ()
    serves: Mapping[str, tuple[Attempt, ...]] = field(default_factory=dict)

    @property
    def run(self) -> str:
        return self.attempt.run

    @property
    def step(self) -> int:
        return self.attempt.step

    @property
    def hidden(self) -> bool:
        """Expired: not offered as the latest or best any more, but it can be read, and taken back."""
        return self.expired is not None

    @property
    def complete_on(self) -> tuple[str, ...]:
        """The names of the tiers with a complete copy, nearest first."""
        return tuple(name for name, state in self.replicas.items() if state == "complete")

    @property
    def usable(self) -> bool:
        """Whether some tier that was reached has a complete copy."""
        return "complete" in self.replicas.values()

    @property
    def loadable(self) -> bool:
        """Whether it is offered for loading: also where the only whole copies were found damaged. Other tiers may have what is bad in
        them, and if not, that is said: nobody is given an older step without a word."""
        return self.usable or not {"quarantined", "quantised"}.isdisjoint(self.replicas.values())

    def quantised_on(self, tier: str) -> Mapping[str, Any] | None:
        """What is known of a tier's quantised copy (empty: nothing more than that it is one); None: it is none, or none is there."""
        told = quantised_in(self.replicated.get(tier, {}))
        return told if told is not None else {} if self.replicas.get(tier) == "quantised" else None

    def taken_on(self, tier: str) -> int:
        """What the tier's copy takes up there, in bytes, as its record says; `nbytes` where none does."""
        return self.taken.get(tier, self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class IncompleteAttempt:
    """An attempt without a commit record that counts: under way, left behind, or condemned.

    `parts` and `receipts` map a tier's name to the ranks found there. `condemned` is the reason, empty while the fate is open.
    `unreadable` says what is wrong with its commit record, where it has one that no tier has a readable copy of: its fate is not open.
    """

    attempt: Attempt
    world_size: int | None = None
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    receipts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    condemned: str = ""
    unreadable: str = ""

    @property
    def missing(self) -> tuple[int, ...] | None:
        """The ranks of which no part was seen on any tier; None where nothing tells how many ranks there are."""
        if self.world_size is None:
            return None
        seen = {rank for ranks in (*self.parts.values(), *self.receipts.values()) for rank in ranks}
        return tuple(rank for rank in range(self.world_size) if rank not in seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """A checkpoint that was deleted, but for shards that others refer to.

    `keep`: the tiers on which they stay. `serves`: tier → the checkpoints that live and refer to them. `records`: its log, `lean`.
    `authority_lost`: known from copies of the log only. `damaged`: a record of its log can't be read.
    """

    attempt: Attempt
    keep: frozenset[str]
    serves: Mapping[str, tuple[Attempt, ...]] = field(default_factory=dict)
    records: tuple[Record, ...] = ()
    authority_lost: bool = False
    damaged: bool = False


def parse_file_name(name: str) -> tuple[str, int, int | None] | None:
    """``("shard", rank, world size)`` or ``("part", rank, None)`` from a file's name; None for any other."""
    if found := _SHARD.fullmatch(name):
        return "shard", int(found[1]), int(found[2])
    if found := _PART.fullmatch(name):
        return "part", int(found[1]), None
    return None
