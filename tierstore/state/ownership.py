"""Who writes what: every tensor that several ranks hold is written once, and each rank computes by itself who does it.

Groups of ranks that hold a unit of one name (`state.units`) hold the same value or not; only the bytes can tell (`Agreed.digests`,
`fingerprint`). Values that are the same are stored once; one that differs from that of the lowest rank is stored beside it as
``name@rank<n>``, n being the lowest rank that has it. Never silently one rank's value for all. All of this is pure; `state.ranks` has
the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from tierstore.errors import UsageError
from tierstore.state.flatten import FlatState, Leaf
from tierstore.state.units import Group, Unit, units_of

__all__ = ["Agreed", "Ownership", "by_rank"]

BUCKETS = 64
"""Fingerprints of tensors with the same holders are compared in so many heaps first: in the usual case about 1 KiB for each rank."""

_DIGEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """What a rank writes, and under which names its tensors are stored."""

    names: Mapping[str, str]
    """Own name → stored name, where they differ."""
    written: frozenset[str]
    """Own names of the leaves that this rank writes."""


def by_rank(flat: FlatState, rank: int) -> Ownership:
    """Ownership without asking anybody: a plain tensor belongs to its rank, of equal parts the first of the mesh writes its own."""
    names = {name: f"{name}@rank{rank}" for u in units_of(flat) if u.leaf.spread is None for name in u.names} if rank else {}
    written = [leaf.name for leaf in flat.leaves if leaf.spread is None or _is_first(leaf, rank)]
    return Ownership(names=names, written=frozenset(written))


def _is_first(leaf: Leaf, rank: int) -> bool:
    spread = leaf.spread
    if spread is None or not spread.ranks:
        return True
    if rank not in spread.ranks:
        return False
    sets = spread.sets()
    place = spread.ranks.index(rank)
    return sets.index(sets[place]) == place


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Holders that many units have in common."""

    groups: tuple[Group, ...]
    """The one with the lowest rank first."""
    sets: tuple[int, ...]
    """The number of the part that each place of a group holds; the same for all groups."""
    members: Any
    """Array: for each part the ranks that hold it; short rows repeat their first rank."""
    places: Mapping[int, tuple[int, int]]
    """Rank → its group's number, and its place there."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]], sets: Sequence[int]) -> _Pattern:
        parts: dict[int, list[int]] = {}
        for group in groups:
            for rank, part in zip(group, sets, strict=True):
                parts.setdefault(part, []).append(rank)
        numbers = {part: number for number, part in enumerate(sorted(parts))}
        width = max(len(ranks) for ranks in parts.values())
        rows = [ranks + ranks[:1] * (width - len(ranks)) for _, ranks in sorted(parts.items())]
        places = {rank: (number, place) for number, group in enumerate(groups) for place, rank in enumerate(group)}
        return cls(tuple(tuple(g) for g in groups), tuple(numbers[s] for s in sets), np.array(rows, dtype=np.int64), places)


@dataclass(frozen=True, slots=True)
class _Item:
    names: tuple[str, ...]
    form: str
    nbytes: int
    pattern: int
    bare: bool
    """Its first group has the lowest rank of all that hold one of its names, and so keeps them as they are."""


class Agreed:
    """Who holds and who writes what, as one rank sees it; all ranks compute the same from the same table.

    Args:
        table: From `merge`.
        rank: This rank, among those that save together.
        world_size: How many save together.
    """

    def __init__(self, table: bytes, *, rank: int, world_size: int) -> None:
        body = json.loads(table.decode("utf-8", "surrogatepass"))
        self.rank = rank
        self._patterns = [_Pattern.of(*p) for p in body["patterns"]]
        lowest: dict[str, int] = {}
        for names, _, _, pattern in body["items"]:
            first = min(self._patterns[pattern].groups[0])
            for name in names:
                lowest[name] = min(first, lowest.get(name, first))
        self._names = frozenset(lowest)
        self._items = []
        for names, form, nbytes, pattern in body["items"]:
            first = min(self._patterns[pattern].groups[0])
            bare = all(lowest[name] == first for name in names)
            self._items.append(_Item(tuple(names), form, nbytes, pattern, bare))
        self._writers = self._assign(world_size)
        self._buckets = self._fill_buckets()
        self._by_name: dict[str, list[int]] = {}
        for number, item in enumerate(self._items):
            self._by_name.setdefault(item.names[0], []).append(number)

    @property
    def compares(self) -> bool:
        """Whether anything is held by several groups, so that its bytes are to be compared."""
        return bool(self._buckets)

    def _assign(self, world_size: int) -> list[Any]:
        """For each item and part the rank that writes it: the largest first, each by the least loaded of the ranks that hold it."""
        load = np.zeros(world_size, dtype=np.int64)
        writers: list[Any] = [None] * len(self._items)
        for number in sorted(range(len(self._items)), key=lambda n: (-self._items[n].nbytes, self._items[n].names)):
            item = self._items[number]
            members = self._patterns[item.pattern].members
            chosen = members[np.arange(len(members)), np.argmin(load[members], axis=1)]
            load[chosen] += item.nbytes
            writers[number] = chosen
        return writers

    # ---- comparing values

    def _fill_buckets(self) -> dict[tuple[int, int], list[int]]:
        """Items that several groups hold, by holders and a number that depends on the name; in the order in which all ranks tell them."""
        buckets: dict[tuple[int, int], list[int]] = {}
        for number, item in enumerate(self._items):
            if len(self._patterns[item.pattern].groups) > 1:
                name = item.names[0].encode("utf-8", "surrogatepass")
                buckets.setdefault((item.pattern, xxhash.xxh32_intdigest(name) % BUCKETS), []).append(number)
        return dict(sorted(buckets.items()))

    def _held_buckets(self, rank: int) -> list[tuple[int, int]]:
        return [bucket for bucket in self._buckets if rank in self._patterns[bucket[0]].places]

    def compared(self, units: Sequence[Unit]) -> dict[int, Unit]:
        """This rank's units whose fingerprints are asked for, by the numbers of their items."""
        mine = {self._number(unit): unit for unit in units if unit.leaf.pieces or not unit.leaf.spread}
        return {number: mine[number] for bucket in self._held_buckets(self.rank) for number in self._buckets[bucket] if number in mine}

    def digests(self, prints: Mapping[int, bytes]) -> bytes:
        """One digest of each bucket that this rank has a part in, from the fingerprints of `compared` units."""
        absent = b"\0" * _DIGEST  # an empty part
        return b"".join(
            xxhash.xxh3_128_digest(b"".join(prints.get(n, absent) for n in self._buckets[bucket]))
            for bucket in self._held_buckets(self.rank)
        )

    def differing(self, values: Sequence[bytes]) -> list[tuple[int, int]]:
        """On rank 0: the buckets whose `digests` are not the same on all ranks that hold the same part."""
        told = self._told(values, lambda bucket: _DIGEST, list(self._buckets))
        return [bucket for bucket in self._buckets if not self._same(bucket[0], {r: d[bucket] for r, d in told.items() if bucket in d})]

    def details(self, prints: Mapping[int, bytes], buckets: Sequence[tuple[int, int]]) -> bytes:
        """The single fingerprints in `buckets`, as far as this rank has a part in them."""
        asked = set(buckets)
        absent = b"\0" * _DIGEST
        return b"".join(prints.get(n, absent) for bucket in self._held_buckets(self.rank) if bucket in asked for n in self._buckets[bucket])

    def apart(self, values: Sequence[bytes], buckets: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
        """On rank 0, from all ranks' `details`: items that differ → for each group the number of the first group with its value."""
        told = self._told(values, lambda bucket: _DIGEST * len(self._buckets[bucket]), buckets)
        found: dict[int, list[int]] = {}
        for bucket in buckets:
            pattern = self._patterns[bucket[0]]
            for place, number in enumerate(self._buckets[bucket]):
                firsts: dict[tuple[bytes, ...], int] = {}
                classes = []
                for count, group in enumerate(pattern.groups):
                    parts: dict[int, bytes] = {}
                    for rank, part in zip(group, pattern.sets, strict=True):
                        parts.setdefault(part, told[rank][bucket][place * _DIGEST : (place + 1) * _DIGEST])
                    classes.append(firsts.setdefault(tuple(parts[p] for p in sorted(parts)), count))
                if any(classes):
                    found[number] = classes
        return found

    def _told(
        self, values: Sequence[bytes], size: Callable[[tuple[int, int]], int], buckets: Sequence[tuple[int, int]]
    ) -> dict[int, dict[tuple[int, int], bytes]]:
        asked = set(buckets)
        told: dict[int, dict[tuple[int, int], bytes]] = {}
        for rank, value in enumerate(values):
            at = 0
            told[rank] = {}
            for bucket in self._held_buckets(rank):
                if bucket in asked:
                    told[rank][bucket] = value[at : at + size(bucket)]
                    at += size(bucket)
        return told

    def _same(self, pattern: int, digests: Mapping[int, bytes]) -> bool:
        rows = self._patterns[pattern].members.tolist()
        return all(len({digests[rank] for rank in row}) == 1 for row in rows)

    # ---- the result

    def ownership(self, units: Sequence[Unit], apart: Mapping[int, Sequence[int]], members: Sequence[int]) -> Ownership:
        """What this rank writes, and its names.

        Args:
            units: This rank's.
            apart: From `apart` on rank 0; empty where all values are the same.
            members: As for `table_of`.

        Raises:
            UsageError: A name that a rank's own value needs is a tensor's own name already.
        """
        self._check_names(apart)
        names: dict[str, str] = {}
        written = []
        for unit in units:
            number = self._number(unit)
            item, pattern = self._items[number], self._patterns[self._items[number].pattern]
            group = self._group(unit, pattern, members)
            first = apart[number][group] if number in apart else 0
            suffix = self._suffix(item, first)
            if suffix:
                names.update({name: name + suffix for name in unit.names})
            if self.rank not in pattern.places:
                continue
            part = pattern.sets[pattern.places[self.rank][1]]
            if number in apart:
                writes = group == first and pattern.groups[group][pattern.sets.index(part)] == self.rank
            else:
                writes = int(self._writers[number][part]) == self.rank
            if writes:
                written.append(unit.leaf.name)
        return Ownership(names=names, written=frozenset(written))

    def _number(self, unit: Unit) -> int:
        numbers = self._by_name.get(unit.names[0], [])
        for number in numbers:
            if self._items[number].names == unit.names and self._items[number].form == unit.form:
                return number
        return numbers[0]  # this rank is outside of its mesh, where it is not seen what shares its memory

    def _group(self, unit: Unit, pattern: _Pattern, members: Sequence[int]) -> int:
        if self.rank in pattern.places:
            return pattern.places[self.rank][0]
        if unit.leaf.spread is None:
            raise AssertionError(f"{unit.names[0]} is not in the agreed table")
        ranks = {members.index(rank) for rank in unit.leaf.spread.ranks}
        return next((number for number, group in enumerate(pattern.groups) if ranks == set(group)), 0)

    def _suffix(self, item: _Item, group: int) -> str:
        if item.bare and group == 0:
            return ""
        return f"@rank{min(self._patterns[item.pattern].groups[group])}"

    def _check_names(self, apart: Mapping[int, Sequence[int]]) -> None:
        for number, item in enumerate(self._items):
            for group in sorted(set(apart.get(number, (0,)))):
                suffix = self._suffix(item, group)
                taken = [name for name in item.names if suffix and name + suffix in self._names]
                if taken:
                    raise UsageError(
                        f"tensor {taken[0]!r} differs between ranks, and the name for one rank's value, {taken[0] + suffix!r}, "
                        "is another tensor's own",
                        hint="rename that tensor: names that end in @rank<n> are for values that differ",
                    )
