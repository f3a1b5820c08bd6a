"""Tiers: a storage with a name, a scope and limits, and the ordered list of them that makes a store."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tierstore.errors import TierStoreError, UsageError
from tierstore.storage.contract import Storage

__all__ = ["Scope", "Tier", "Tiers"]

Scope = Literal["node", "shared"]
"""``node``: each node sees only its own files there; ``shared``: all nodes see the same files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One place that keeps checkpoints. `capacity` is in bytes, `max_bandwidth` in bytes per second; None: no limit."""

    name: str
    storage: Storage
    scope: Scope
    durable: bool = True
    capacity: int | None = None
    max_bandwidth: int | None = None

    @property
    def uri(self) -> str:
        return self.storage.uri

    def __str__(self) -> str:
        return f"{self.name} ({self.storage.uri})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The tiers of a store, nearest first.

    `unreachable` names the tiers that did not answer when the store was opened, with the reason. Their descriptor has not been
    checked yet: `ensure_tier` does so before anything is written there, and takes them off the list.
    """

    tiers: tuple[Tier, ...]
    authority: Tier
    durable_at: Tier
    store_id: str
    unreachable: dict[str, TierStoreError] = field(default_factory=dict)

    @property
    def nearest(self) -> Tier:
        return self.tiers[0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.tiers)

    def get(self, name: str) -> Tier:
        """The tier called `name`; UsageError with the nearest name otherwise."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        near = difflib.get_close_matches(name, self.names, n=1)
        raise UsageError(
            f"there is no tier {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"the tiers are {', '.join(self.names)}",
            tier=name,
        )

    def is_authority(self, tier: Tier) -> bool:
        return tier.name == self.authority.name

    def after(self, tier: Tier) -> tuple[Tier, ...]:
        """The tiers farther than `tier`, nearest first."""
        return self.tiers[self.tiers.index(tier) + 1 :]

    def __iter__(self) -> Iterator[Tier]:
        return iter(self.tiers)

    def __len__(self) -> int:
        return len(self.tiers)
