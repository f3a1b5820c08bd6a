"""Which saved rank's tree a rank loads, and what it takes from the other ranks' trees.

Rank r of M loads the tree of rank r where M ranks saved. Otherwise its base is the tree of rank r modulo N, and the trees are united:
dict entries that the base lacks come from the others, in the order of the ranks; where trees differ the base's value is taken, or
what `LoadOptions.ranks` makes of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from tierstore.format.objects_decode import decode_node
from tierstore.format.objects_document import load_tree
from tierstore.format.objects_union import ABSENT, Union, find_node
from tierstore.state.paths import Place
from tierstore.state.reading import Reader, Run
from tierstore.state.unflatten import MODULE_STATE, TENSOR, check_tree

__all__ = ["RankTrees"]


class RankTrees:
    """The trees of an open checkpoint, as rank `rank` of `world_size` sees them; each is read when it is needed.

    Args:
        reader: The checkpoint.
        run: Runs a coroutine on its event loop.
        rank: Who loads.
        world_size: How many load together; None: as many as saved.

    Attributes:
        saved: The ranks that saved, ascending.
        base: The saved rank whose tree this rank begins with.
        changed: Another number of ranks saved than load.
    """

    def __init__(self, reader: Reader, run: Run, *, rank: int, world_size: int | None) -> None:
        self._reader = reader
        self._run = run
        self._numbers = run(reader.object_ranks())
        self.saved = sorted(self._numbers)
        self.changed = (world_size is not None and world_size != len(self.saved)) or rank not in self._numbers
        self.base = self.saved[rank % len(self.saved)] if self.changed else rank

    @property
    def alike(self) -> bool:
        """All ranks have the same tree."""
        return len(set(self._numbers.values())) == 1

    def tree(self) -> tuple[Any, frozenset[Place]]:
        """What this rank loads, decoded, and the places of values that differ and that its number does not decide."""
        return self.united() if self.changed and not self.alike else (self.own(), frozenset())

    def own(self) -> Any:
        """The base's tree, decoded, with references for its tensors and tags as they are."""
        return check_tree(decode_node(self._encoded(self.base)))

    def united(self, base: int | None = None) -> tuple[Any, frozenset[Place]]:
        """All ranks' trees as one, decoded, and the places of values that differ.

        Args:
            base: The saved rank whose values come first; None: this rank's base.
        """
        base = self.base if base is None else base
        union = Union(self._encoded(base), see_through=MODULE_STATE, tensor=TENSOR)
        for rank in self._distinct():
            if self._numbers[rank] != self._numbers[base]:
                union.add(self._encoded(rank))
        return check_tree(decode_node(union.tree)), frozenset(union.differing)

    def values(self, places: frozenset[Place]) -> dict[Place, dict[int, Any]]:
        """For each place the saved ranks that have it, with their nodes, decoded."""
        found: dict[int, dict[Place, Any]] = {}
        for rank in self._distinct():
            tree = self._encoded(rank)
            nodes = {place: find_node(tree, place, see_through=MODULE_STATE) for place in places}
            found[self._numbers[rank]] = {p: check_tree(decode_node(n)) for p, n in nodes.items() if n is not ABSENT}
        return {
            place: {rank: found[number][place] for rank, number in sorted(self._numbers.items()) if place in found[number]}
            for place in places
        }

    def _distinct(self) -> Iterator[int]:
        """The lowest rank of each tree."""
        seen: set[int] = set()
        for rank in self.saved:
            if self._numbers[rank] not in seen:
                seen.add(self._numbers[rank])
                yield rank

    def _encoded(self, rank: int) -> Any:
        if isinstance(self._reader, _TreeReader):
            return self._run(self._reader.encoded_tree(rank))
        return load_tree(self._run(self._reader.objects(rank)))


@runtime_checkable
class _TreeReader(Protocol):
    """A reader that has the trees parsed already: thousands are then compared without being written and parsed once more."""

    async def encoded_tree(self, rank: int) -> Any:
        """One rank's encoded tree, not to be changed."""
