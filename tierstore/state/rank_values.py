"""Values that each saved rank had for itself (random states, positions of data loaders): what they become for other ranks.

Where as many ranks load as saved, each gets its own back and nobody is asked. Otherwise a hook decides for every such value,
`LoadOptions.ranks`; without one, rank r of M gets the value of saved rank r modulo N, and a warning lists the places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.errors import StateMismatchError

__all__ = ["LazyValues", "RankValues", "keep_modulo", "keep_rank_0", "require_same"]


class LazyValues(Mapping[int, Any]):
    """A mapping whose values are made when they are asked for, once each.

    Args:
        keys: The saved ranks that have the value, ascending.
        make: Makes the value of one.
    """

    def __init__(self, keys: Sequence[int], make: Callable[[int], Any]) -> None:
        self._keys = tuple(keys)
        self._make = make
        self._made: dict[int, Any] = {}

    def __getitem__(self, rank: int) -> Any:
        if rank not in self._made:
            if rank not in self._keys:
                raise KeyError(rank)
            self._made[rank] = self._make(rank)
        return self._made[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankValues:
    """One place of the state where the saved ranks differ, as `LoadOptions.ranks` is asked about it."""

    path: str
    """The place's dotted name, e.g. ``rng.torch``."""
    values: Mapping[int, Any]
    """Saved rank → its value, for those that have one; a tensor is read when its value is looked at."""
    rank: int
    """Who loads."""
    world_size: int
    """How many load."""
    saved_world_size: int
    """How many saved."""

    @property
    def default(self) -> Any:
        """The value of saved rank ``rank % saved_world_size``, or of the lowest one that has any."""
        own = self.rank % self.saved_world_size
        return self.values[own if own in self.values else min(self.values)]


def keep_modulo(values: RankValues) -> Any:
    """For `LoadOptions.ranks`: rank r takes over from saved rank r modulo N. What happens without a hook, but without the warning."""
    return values.default


def keep_rank_0(values: RankValues) -> Any:
    """For `LoadOptions.ranks`: every rank gets the lowest saved rank's value."""
    return values.values[min(values.values)]


def require_same(values: RankValues) -> Any:
    """For `LoadOptions.ranks`: values that differ are an error.

    Raises:
        StateMismatchError: Always: the hook is asked only where they differ.
    """
    raise StateMismatchError(
        f"{values.path} differs between the {values.saved_world_size} ranks that saved it, and {values.world_size} ranks load it",
        hint="decide what they get: LoadOptions(ranks=...), e.g. tierstore.keep_modulo, or a function of RankValues",
        unexpected=(values.path,),
    )
