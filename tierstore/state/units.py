"""What ranks tell each other of their tensors: units, who holds them, and the table that all of them agree on.

A *unit* is a stored tensor with all that shares its memory (further names, views); a *group* is the ranks that hold one value of it
between them: the ranks of a DTensor's mesh, or a single rank for a plain tensor. A rank's *table* of units has the same bytes for ranks in
the same situation, so that of thousands of ranks a few send theirs; `merge` (on rank 0) makes the *agreed table* of them, from which
every rank computes who writes what (`state.ownership`). All of this is pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from tierstore.errors import UsageError
from tierstore.format.dtypes import DTYPES
from tierstore.state.collecting import collector_paused
from tierstore.state.flatten import FlatState, Leaf
from tierstore.units import format_some

__all__ = ["Group", "Unit", "merge", "signature_of", "table_of", "units_of"]

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A stored tensor of this rank with all that shares its memory."""

    leaf: Leaf
    names: tuple[str, ...]
    """The leaf's, then those of aliases and views."""
    form: str
    """What ranks must have in common to hold the same unit: dtype, shape, layout, and how the names lie in the memory."""
    nbytes: int
    """Of the part that one rank holds; of uneven parts their mean, so that all ranks reckon with the same number."""


def units_of(flat: FlatState) -> list[Unit]:
    """The units of a state, in the order of its leaves."""
    others: dict[str, list[tuple[str, str]]] = {}  # leaf → further names, each with how it lies in the leaf's memory
    views = {view.name: view for view in flat.views}
    for view in flat.views:
        others.setdefault(view.base, []).append((view.name, f"{view.offset} {view.dtype} {view.shape}"))
    for alias, name in flat.aliases.items():
        base = views[name].base if name in views else name
        others.setdefault(base, []).append((alias, f"={name}"))
    with collector_paused():
        return [_unit(leaf, sorted(others.get(leaf.name, ()))) for leaf in flat.leaves]


def _unit(leaf: Leaf, others: Sequence[tuple[str, str]]) -> Unit:
    layout = leaf.spread.layout if leaf.spread is not None else ""
    nbytes = math.prod(leaf.global_shape) * DTYPES[leaf.dtype].itemsize
    return Unit(
        leaf=leaf,
        names=(leaf.name, *(name for name, _ in others)),
        form="|".join([leaf.dtype, str(leaf.global_shape), layout, *(how for _, how in others)]),
        nbytes=-(-nbytes // leaf.spread.parts) if leaf.spread is not None else nbytes,
    )


def table_of(units: Sequence[Unit], members: Sequence[int]) -> bytes:
    """This rank's units, for `merge`.

    Args:
        units: From `units_of`.
        members: The global ranks of those that save together, in the order of their ranks in the save.

    Raises:
        UsageError: A tensor is spread over a process that does not save with the others.
    """
    place = {rank: number for number, rank in enumerate(members)}
    meshes: dict[tuple[Any, ...], tuple[int, Leaf]] = {}
    rows = []
    for unit in units:
        spread = unit.leaf.spread
        if spread is None:
            holder: Any = -1
        elif not spread.ranks:
            holder = str([(p.offsets, tuple(p.tensor.shape)) for p in unit.leaf.pieces])
        else:  # tensors of one mesh share the tuple of its ranks, which may be long
            holder, _ = meshes.setdefault((id(spread.ranks), spread.shape, spread.sharded), (len(meshes), unit.leaf))
        rows.append([unit.names, unit.form, unit.nbytes, holder])
    told = []
    for _, leaf in meshes.values():
        spread = leaf.spread
        assert spread is not None
        strange = [rank for rank in spread.ranks if rank not in place]
        if strange:
            raise UsageError(
                f"tensor {leaf.name!r} is spread over rank {strange[0]} too, which is not among the {len(members)} that save together",
                hint="open the store with a process group that has all ranks of the state's meshes",
            )
        told.append([[place[rank] for rank in spread.ranks], spread.sets()])
    return _encoded({"meshes": told, "rows": rows})


def _encoded(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("utf-8", "surrogatepass")


def signature_of(table: bytes) -> bytes:
    """16 bytes that stand for a table."""
    return xxhash.xxh3_128_digest(table)


@dataclass(slots=True)
class _Holders:
    """Which ranks hold units of one name and form."""

    nbytes: int
    groups: dict[Group, tuple[int, ...]] = field(default_factory=dict)
    """Each group with the numbers of its ranks' parts."""
    came: set[int] = field(default_factory=set)
    pieces: dict[int, str] = field(default_factory=dict)
    """Of ranks that do not tell who else holds the tensor: what they have of it."""


def merge(tables: Mapping[int, bytes], speakers: Sequence[int]) -> bytes:
    """The agreed table: which units there are, and who holds them.

    Args:
        tables: Tables by the rank that sent it.
        speakers: For each rank the one whose table is also its own.

    Raises:
        UsageError: A tensor is spread over ranks whose state does not have it.
    """
    followers: dict[int, list[int]] = {}
    for rank, speaker in enumerate(speakers):
        followers.setdefault(speaker, []).append(rank)
    found: dict[tuple[tuple[str, ...], str], _Holders] = {}
    for speaker, ranks in followers.items():
        body = json.loads(tables[speaker].decode("utf-8", "surrogatepass"))
        for names, form, nbytes, holder in body["rows"]:
            held = found.setdefault((tuple(names), form), _Holders(nbytes))
            if isinstance(holder, str):
                held.pieces.update(dict.fromkeys(ranks, holder))
            elif holder < 0:
                held.groups.update({(rank,): (0,) for rank in ranks})
            else:
                group, sets = body["meshes"][holder]
                inside = set(group)
                if not inside.isdisjoint(ranks):
                    held.groups[tuple(group)] = tuple(sets)
                    held.came.update(rank for rank in ranks if rank in inside)
    patterns: dict[str, int] = {}
    items: list[list[Any]] = []
    only_outside: set[str] = set()
    for (names, form), held in found.items():
        if held.pieces:
            numbers = {piece: n for n, piece in enumerate(sorted(set(held.pieces.values())))}
            held.groups[tuple(sorted(held.pieces))] = tuple(numbers[held.pieces[rank]] for rank in sorted(held.pieces))
            held.came.update(held.pieces)
        _check_all_came(names[0], held)
        if not held.groups:
            only_outside.add(names[0])
            continue  # only ranks outside its mesh have it: they refer to what others write
        ordered = sorted(held.groups.items(), key=lambda g: min(g[0]))
        pattern = json.dumps([[group for group, _ in ordered], ordered[0][1]])
        items.append([names, form, held.nbytes, patterns.setdefault(pattern, len(patterns))])
    written = {item[0][0] for item in items}
    if lost := sorted(only_outside - written):
        raise UsageError(
            f"tensor {lost[0]!r} is in the state of ranks outside of its mesh only: nobody has its values",
            hint="the ranks of a tensor's mesh save their parts of it under the same name",
        )
    return _encoded({"patterns": [json.loads(p) for p in patterns], "items": items})


def _check_all_came(name: str, held: _Holders) -> None:
    silent = sorted(rank for group in held.groups if len(group) > 1 for rank in group if rank not in held.came)
    if silent:
        shown = format_some(silent, 16)
        raise UsageError(
            f"tensor {name!r} is spread over ranks that do not have it in their state, or have it in another form: {shown}",
            hint="every rank of a mesh saves its part of a tensor, in the same layout, tied to the same other tensors",
        )
