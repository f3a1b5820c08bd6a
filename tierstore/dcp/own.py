"""One rank's share of a DCP save: its tree of references and objects, and the chunks that it stores.

The planner has flattened the state (keys joined by dots, a mapping back to paths) and dealt the tensors out to the ranks. The tree is built
from that mapping, so that `Store.load` gives the nested state back. Objects are taken as they are and encoded by the typed codecs;
nothing is pickled. Every rank keeps all of its own objects, and those of its plain tensors that differ from the copy that is stored.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from tierstore.errors import UnsupportedTypeError, UsageError
from tierstore.format.objects import ObjectCodecs, Opaque, TensorRef, encode_objects
from tierstore.format.shard import ChunkSpec
from tierstore.state.bits import dtype_name, torch_dtype
from tierstore.state.differences import selected
from tierstore.state.fingerprint import fingerprints
from tierstore.state.flatten import FlatState, Leaf, flatten
from tierstore.state.ownership import by_rank
from tierstore.state.paths import assign_names, name_of
from tierstore.state.sharded import Piece, chunk_of, is_dtensor, is_spread
from tierstore.state.stage_chunks import PlannedChunk
from tierstore.state.unflatten import OMITTED, TENSOR, rebuilt

__all__ = ["OwnShare", "OwnState", "own_state"]

_PLANNED = "tierstore.dcp.planned"


@dataclass(frozen=True, slots=True)
class _Planned:
    """Stands in the nested state for a tensor that the planner has planned."""

    fqn: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnShare:
    """What a rank stores: its encoded tree, its chunks, and further names of tensors among them; and how long what it leaves out is."""

    objects: bytes
    chunks: tuple[PlannedChunk, ...]
    aliases: Mapping[str, str]
    omitted: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """This rank's state as its planner sees it. `values` has what can be looked at before a chunk is resolved.

    Attributes:
        names: The stored name of each planned tensor, by its key in the flat state.
        omit: The globs of what is left out.
        omitted: Key → what the tree says of a planned tensor that is left out.
        values: Key → object or tensor; tensors of a planner that shows none are missing.
        paths: Key → path in the nested state.
        items: What this rank writes.
        local: This rank's own items by key, duplicates included, as far as they are known.
        resolve: Gives an item's tensor.
        ties: Key → the first key whose tensor is the same memory.
    """

    names: Mapping[str, str]
    omit: tuple[str, ...]
    omitted: Mapping[str, Mapping[str, Any]]
    values: Mapping[str, Any] = field(repr=False)
    paths: Mapping[str, tuple[Any, ...]]
    items: tuple[WriteItem, ...]
    local: Mapping[str, WriteItem]
    resolve: Callable[[WriteItem], torch.Tensor] = field(repr=False)
    ties: Mapping[str, str]

    def fingerprints(self) -> dict[str, tuple[bytes, bool]]:
        """Of every plain tensor: 16 bytes that stand for its dtype, shape and values, and whether this rank writes it."""
        written = {item.index.fqn for item in self.items}
        plain = {fqn: value for fqn, value in self.values.items() if fqn not in self.omitted and _is_plain(value) and value.numel()}
        dense = [value.detach().resolve_conj().resolve_neg() for value in plain.values()]
        return {
            fqn: (xxhash.xxh3_128_digest(f"{value.dtype}{tuple(value.shape)}".encode() + found), fqn in written)
            for (fqn, value), found in zip(plain.items(), fingerprints(dense), strict=True)
        }

    def share(self, *, rank: int, differing: frozenset[str], codecs: ObjectCodecs) -> OwnShare:
        """Makes this rank's tree and chunks.

        Args:
            rank: This rank.
            differing: Keys of plain tensors that another rank writes with other values.
            codecs: Codecs of the objects.

        Raises:
            UnsupportedTypeError: An object can't be stored; names its place.
            UsageError: A tensor within an object has the name of a planned one.
        """
        own = {fqn: f"{self.names[fqn]}@rank{rank}" for fqn in differing}
        codecs = codecs.copy()
        codecs.register(_Planned, _PLANNED, lambda planned: planned.fqn, lambda fqn: _Planned(fqn))
        flat = flatten(self._nested(), codecs, self.omit)
        inner = by_rank(flat, rank)  # tensors within objects belong to their rank, as the objects do
        chunks, aliases = self._planned_chunks()
        chunks += [self._whole(fqn, name) for fqn, name in sorted(own.items()) if self.ties.get(fqn, fqn) not in own.keys() - {fqn}]
        taken = {*self.names.values(), *own.values()}
        for leaf in flat.leaves:
            name = inner.names.get(leaf.name, leaf.name)
            if name in taken:
                raise UsageError(
                    f"a tensor within an object would be stored as {name!r}, as another tensor of the state is",
                    hint="rename one of the two keys",
                )
            chunks += [_piece(name, leaf, piece) for piece in leaf.pieces if leaf.name in inner.written]
        _refuse_views(flat)
        tree = _linked(flat.tree(inner.names), lambda fqn: self._reference(fqn, own))
        renamed = {inner.names.get(alias, alias): inner.names.get(name, name) for alias, name in flat.aliases.items()}
        left_out = {name_of(self.paths[fqn]): _nbytes(facts) for fqn, facts in self.omitted.items()}
        return OwnShare(
            objects=encode_objects(tree, codecs),
            chunks=tuple(chunks),
            aliases={**aliases, **renamed},
            omitted={**left_out, **flat.omitted},
        )

    # ---- inside

    def _planned_chunks(self) -> tuple[list[PlannedChunk], dict[str, str]]:
        """The chunks of this rank's items; of tensors that are the same memory one is stored, and the others are further names of it."""
        tensors = [item for item in self.items if item.type is not WriteItemType.BYTE_IO]
        places = {(item.index.fqn, item.index.offset) for item in tensors}
        counts: dict[str, int] = {}
        for item in tensors:
            counts[item.index.fqn] = counts.get(item.index.fqn, 0) + 1
        chunks: list[PlannedChunk] = []
        aliases: dict[str, str] = {}
        for item in tensors:
            fqn, spec = item.index.fqn, _spec(item, self.names[item.index.fqn])
            if 0 in spec.shape and 0 not in spec.global_shape:
                continue  # an empty share of a tensor that others hold
            first = self.ties.get(fqn, fqn)
            if first != fqn and (first, item.index.offset) in places and counts[first] == counts[fqn] == 1:
                aliases[spec.name] = self.names[first]
                continue
            chunks.append(PlannedChunk(spec=spec, get=partial(self.resolve, item)))
        return chunks, aliases

    def _whole(self, fqn: str, name: str) -> PlannedChunk:
        value = self.values[fqn]
        shape = tuple(value.shape)
        spec = ChunkSpec(name=name, dtype=dtype_name(value.dtype), shape=shape, global_shape=shape, offsets=(0,) * len(shape))
        return PlannedChunk(spec=spec, get=partial(self.resolve, self.local[fqn]) if fqn in self.local else partial(_itself, value))

    def _nested(self) -> Any:
        root: dict[str, Any] = {}
        for fqn, path in self.paths.items():
            value = self.values.get(fqn)
            here: Any = root
            for key, below in pairwise(path):
                here = _step(here, key, [] if type(below) is int else {})
            _place(here, path[-1], _Planned(fqn) if fqn in self.names or fqn in self.omitted else value)
        return root

    def _reference(self, fqn: str, own: Mapping[str, str]) -> Any:
        if fqn in self.omitted:
            return Opaque(OMITTED, dict(self.omitted[fqn]))
        first = self.ties.get(fqn, fqn)
        reference = TensorRef(own.get(first) or own.get(fqn) or self.names[first])
        extra = _flags(self.values.get(fqn))
        return Opaque(TENSOR, {"ref": reference, **extra}) if extra else reference


def own_state(planner: SavePlanner, plan: SavePlan, local: Sequence[WriteItem] | None, omit: tuple[str, ...] = ()) -> OwnState:
    """What this rank's planner has to save.

    Args:
        planner: The planner, set up.
        plan: What this rank writes, duplicates taken out, and what is left out.
        local: This rank's items before that; None: not known (the plan came from the planner's cache).
        omit: Globs of dotted names of tensors that are left out; `plan` has none of them.

    Raises:
        UnsupportedTypeError: The planner gives bytes of its own instead of an object.
    """
    values, tensors = _seen(planner, plan.items, local)
    mapping = getattr(planner, "mappings", None) or plan.planner_data
    mapping = mapping if isinstance(mapping, Mapping) else {}
    # Sorted by nothing: the state's own order is kept, for dicts come back in it.
    paths = {fqn: tuple(mapping.get(fqn) or (fqn,)) for fqn in dict.fromkeys([*values, *tensors])}
    every = {item.index.fqn: item for item in local or ()}
    shown = {**getattr(planner, "state_dict", {}), **values}
    left_out = [fqn for fqn in paths if omit and fqn in tensors and selected(name_of(paths[fqn]), omit)]
    omitted = {fqn: _facts_of(fqn, shown.get(fqn), every.get(fqn)) for fqn in left_out}
    named = [fqn for fqn in paths if fqn in tensors and fqn not in omitted]
    names = dict(zip(named, assign_names([paths[fqn] for fqn in named]), strict=True))
    return OwnState(
        names=names,
        omit=omit,
        omitted=omitted,
        values=values,
        paths=paths,
        items=tuple(plan.items),
        local=every,
        resolve=lambda item: _tensor(planner.resolve_data(item), item),
        ties=_ties({fqn: values[fqn] for fqn in named if fqn in values}) if _shows_values(planner) else {},
    )


def _facts_of(fqn: str, value: Any, item: WriteItem | None) -> dict[str, Any]:
    """What a tree says of a tensor that is left out: enough to make one like it."""
    if item is not None and item.tensor_data is not None:
        return {"dtype": dtype_name(item.tensor_data.properties.dtype), "shape": tuple(item.tensor_data.size), **_flags(value)}
    spread = is_spread(value) and not is_dtensor(value)  # a DTensor tells its size on ranks outside of its mesh, too
    shape = chunk_of(value, repr(fqn)).global_shape if spread else tuple(value.size())
    return {"dtype": dtype_name(value.dtype), "shape": shape, **_flags(value)}


def _nbytes(facts: Mapping[str, Any]) -> int:
    count: int = math.prod(facts["shape"])
    return count * torch_dtype(facts["dtype"]).itemsize


def _flags(value: Any) -> dict[str, Any]:
    """What a reference says of a tensor beside its name."""
    needs_grad = isinstance(value, torch.Tensor) and value.requires_grad
    return {**({"requires_grad": True} if needs_grad else {}), **({"parameter": True} if isinstance(value, torch.nn.Parameter) else {})}


def _seen(planner: SavePlanner, items: Sequence[WriteItem], local: Sequence[WriteItem] | None) -> tuple[dict[str, Any], set[str]]:
    """Objects and tensors by key, as far as the planner shows them, and which keys are tensors."""
    every = {item.index.fqn: item for item in (*(local or ()), *items)}
    tensors = {fqn for fqn, item in every.items() if item.type is not WriteItemType.BYTE_IO}
    state = getattr(planner, "state_dict", None) if isinstance(planner, DefaultSavePlanner) else None
    if state is None:
        return {fqn: _object(planner, item) for fqn, item in every.items() if fqn not in tensors}, tensors
    values: dict[str, Any] = {}
    for fqn, value in state.items():
        if isinstance(value, torch.Tensor):
            if is_spread(value) and fqn in every and every[fqn].type is WriteItemType.TENSOR:
                raise UsageError(
                    f"{fqn!r} tells which part of a tensor it is, but the planner took it for all of one",
                    hint="save with tierstore.dcp.save, or planner=tierstore.dcp.TierSavePlanner(); or with torch 2.14",
                )
            if local is None or fqn in every or is_dtensor(value):  # one outside of this rank's mesh has no item here
                values[fqn] = value
                tensors.add(fqn)
        elif _is_sharded(value):
            tensors.add(fqn)
        elif local is None or fqn in every:
            values[fqn] = value if _shows_values(planner) else _object(planner, every.get(fqn) or _bytes_item(fqn))
    return values, tensors


def _shows_values(planner: SavePlanner) -> bool:
    """Whether what the planner's state holds is what it saves: nobody has overridden what it makes of a value."""
    if not isinstance(planner, DefaultSavePlanner):
        return False
    kind, stock = type(planner), DefaultSavePlanner
    overridden = any(getattr(kind, name) is not getattr(stock, name) for name in ("resolve_data", "lookup_object", "transform_object"))
    return not overridden or getattr(kind, "saves_values_as_they_are", False) is True


def _bytes_item(fqn: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)


def _object(planner: SavePlanner, item: WriteItem) -> Any:
    """The object that a planner of the caller's own makes of an item: it pickled it a moment ago, in this process."""
    made = planner.resolve_data(item)
    if isinstance(made, torch.Tensor):
        return made
    raw = made.getvalue()
    if not zipfile.is_zipfile(io.BytesIO(raw)):
        raise UnsupportedTypeError(
            f"{item.index.fqn!r}: the planner {type(planner).__name__} gives bytes that torch.save did not write",
            hint="let resolve_data give torch.save's bytes for objects, or return a tensor",
            path=item.index.fqn,
        )
    return torch.load(io.BytesIO(raw), weights_only=False)


def _tensor(made: Any, item: WriteItem) -> torch.Tensor:
    if not isinstance(made, torch.Tensor):
        raise UnsupportedTypeError(
            f"{item.index.fqn!r}: the planner gives a {type(made).__name__} for a tensor", hint="let resolve_data return the tensor"
        )
    return made


def _is_sharded(value: Any) -> bool:
    return any(c.__name__ == "ShardedTensor" for c in type(value).__mro__)


def _is_plain(value: Any) -> bool:
    """Whether it is an ordinary dense tensor of this rank alone."""
    ordinary = type(value) in (torch.Tensor, torch.nn.Parameter) and not is_spread(value)
    return ordinary and value.layout is torch.strided and not (value.is_meta or value.is_quantized or value.is_nested)


def _ties(tensors: Mapping[str, Any]) -> dict[str, str]:
    seen: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for fqn, value in tensors.items():
        local = value.to_local() if is_dtensor(value) else value
        if not _is_plain(local) or local.numel() == 0:
            continue
        where = (str(value.placements), tuple(value.shape)) if is_dtensor(value) else ()
        memory = (local.device, local.untyped_storage().data_ptr(), local.storage_offset())
        key = (*memory, tuple(local.shape), local.stride(), local.dtype, where)
        first = seen.setdefault(key, fqn)
        if first != fqn:
            ties[fqn] = first
    return ties


def _spec(item: WriteItem, name: str) -> ChunkSpec:
    data = item.tensor_data
    if data is None or data.chunk is None:
        raise UsageError(f"the plan has no place for {item.index.fqn!r}", hint="a WriteItem of a tensor needs tensor_data with its chunk")
    return ChunkSpec(
        name=name,
        dtype=dtype_name(data.properties.dtype),
        shape=tuple(data.chunk.sizes),
        global_shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
    )


def _piece(name: str, leaf: Leaf, piece: Piece) -> PlannedChunk:
    shape = tuple(piece.tensor.shape)
    spec = ChunkSpec(name=name, dtype=leaf.dtype, shape=shape, global_shape=leaf.global_shape, offsets=piece.offsets)
    return PlannedChunk(spec=spec, get=partial(_itself, piece.tensor))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _refuse_views(flat: FlatState) -> None:
    for view in flat.views:
        raise UnsupportedTypeError(
            f"{view.name!r} is a tensor within an object, and a view of {view.base!r}, another one",
            hint="clone it before saving",
            path=view.name,
        )


def _linked(node: Any, reference: Callable[[str], Any]) -> Any:
    if isinstance(node, Opaque) and node.tag == _PLANNED:
        return reference(node.value)
    return rebuilt(node, lambda inner: _linked(inner, reference))


def _step(here: Any, key: Any, below: Any) -> Any:
    if isinstance(here, list):
        found = here[key] if key < len(here) else None
    else:
        found = here.get(key)
    if found is None:
        _place(here, key, below)
        found = below
    if not isinstance(found, dict | list):
        raise UsageError(
            f"the planner's mapping puts a value and a container at the same place ({key!r})", hint="rename one of the two keys"
        )
    return found


def _place(here: Any, key: Any, value: Any) -> None:
    if isinstance(here, list):
        here.extend([None] * (key + 1 - len(here)))
    here[key] = value
