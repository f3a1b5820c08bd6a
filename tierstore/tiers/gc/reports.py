"""What a collector says that it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tierstore.errors import PartialError, TierStoreError
from tierstore.names import Attempt
from tierstore.tiers.retention import Plan

__all__ = ["CollectReport", "Failed", "Freed", "FreedKind", "PruneReport", "Tended"]

FreedKind = Literal["evict", "sweep", "orphan"]
"""``evict``: one tier's copy of a checkpoint that stays; ``sweep``: a deleted checkpoint; ``orphan``: what a condemned attempt left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """What was removed from one tier (in a dry run: would be): how many files, and how many bytes they had.

    `kept_for`: the checkpoints that refer to its shards there, which stay for as long as one of those lives.
    """

    attempt: Attempt
    tier: str
    kind: FreedKind
    files: int
    nbytes: int
    kept_for: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """What could not be done this time; the next run tries again. `attempt` None: a whole tier; `tier` empty: the log."""

    attempt: Attempt | None
    tier: str
    error: TierStoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What was decided (in a dry run: would be). `passed_over` are those that the plan named and that stayed as they were, and why."""

    plan: Plan
    expired: tuple[Attempt, ...] = ()
    revived: tuple[Attempt, ...] = ()
    passed_over: tuple[tuple[Attempt, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectReport:
    """What one collection did.

    Attributes:
        freed: What was removed, by attempt and tier.
        waiting: What is not freed yet, and why: an undelete window, a lease, an attempt that is not old enough.
        failed: What a fault kept from being done.
        held: Of those that wait: what is due, and would go if nobody read it.
        leftovers: Temporaries and unfinished uploads of dead processes that were removed (in a dry run: would be), by tier.
        foreign: Files that lie in folders which should be empty, and are not ours to delete: ``tier:path``.
        log_copies: How many records were copied beside replicas that lacked them (in a dry run: would be).
        log_copies_left: How many replicas were left for the next round, as one round does only so many.
        unseen: Tiers that could not be reached, and why: what is to go there is left for the next run, and is in none of these numbers.
        dry_run: Nothing was done.
    """

    freed: tuple[Freed, ...] = ()
    waiting: tuple[tuple[Attempt, str], ...] = ()
    failed: tuple[Failed, ...] = ()
    held: frozenset[Attempt] = frozenset()
    leftovers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    log_copies: int = 0
    log_copies_left: int = 0
    unseen: Mapping[str, str] = field(default_factory=dict)
    dry_run: bool = False

    @property
    def nbytes(self) -> int:
        """How many bytes were freed."""
        return sum(freed.nbytes for freed in self.freed)

    @property
    def files(self) -> int:
        """How many files were removed."""
        return sum(freed.files for freed in self.freed)

    def then(self, later: CollectReport) -> CollectReport:
        """Both as one: what either did, and what was left after the later one."""
        tiers = sorted({*self.leftovers, *later.leftovers})
        return replace(
            later,
            freed=(*self.freed, *later.freed),
            leftovers={tier: (*self.leftovers.get(tier, ()), *later.leftovers.get(tier, ())) for tier in tiers},
            log_copies=self.log_copies + later.log_copies,
        )

    @property
    def exit_code(self) -> int:
        """3 where something failed, else 0."""
        return PartialError.exit_code if self.failed else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tended:
    """What one round of housekeeping did. `pruned` None: nothing is to be decided here; `refused`: why a brake kept it from deciding."""

    collected: CollectReport
    pruned: PruneReport | None = None
    refused: str = ""
