"""A state as a tree of references and a list of tensors; `unflatten` is the way back.

`flatten` walks dicts, lists, tuples and what codecs know, takes the tensors out, names them by their places and leaves references. Types
come back as they were: `Parameter`, ``requires_grad``, sparse layouts, `OrderedDict` with a module's ``_metadata``, int keys.

Memory is stored once: tensors that are the same view of the same memory share one leaf and come back tied; a contiguous tensor that
lies within another contiguous one is stored as a part of it, and comes back as a view of it. Strided views (``.t()``, ``expand``,
channels_last) are stored row-major on their own; their values come back, their strides do not. Only what a view shows is stored,
never the rest of its storage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tierstore.errors import UnsupportedTypeError
from tierstore.format.objects import ObjectCodecs, Opaque, TensorRef
from tierstore.state.bits import dtype_name
from tierstore.state.guard import check_storable
from tierstore.state.paths import Place, assign_names, show
from tierstore.state.sharded import Chunk, Piece, Spread, chunk_of, is_spread
from tierstore.state.unflatten import COMPONENTS, MODULE_STATE, SPARSE, TENSOR, rebuilt

__all__ = ["FlatState", "Leaf", "ViewOf", "flatten"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One stored tensor: `pieces` are this rank's chunks of it, dense, detached, conjugate and negative bits resolved."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    spread: Spread | None = None
    """Over which processes it is spread; None: this rank has all of it for itself, and other ranks may have one of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOf:
    """A tensor that lies within the leaf `base`, `offset` bytes from its beginning."""

    name: str
    base: str
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """What `flatten` found: the tensors to store, further names of them, views within them, and the tree that refers to all of these."""

    leaves: tuple[Leaf, ...]
    aliases: Mapping[str, str]
    views: tuple[ViewOf, ...]
    ranks: int
    """The largest number of processes that one of the tensors is spread over."""
    _tree: Any = field(repr=False)

    def tree(self, names: Mapping[str, str] | None = None) -> Any:
        """The state with a reference in the place of each tensor; `names` has those that are stored under another name than their own."""
        return _link(self._tree, names or {})


_VALUES = (set, frozenset, bytearray, complex, range, np.ndarray, Opaque)
"""Leaves beside plain scalars that `format.objects` stores (it looks into them, and refuses what it can't)."""


class _Slot:
    """A tensor met on the walk; becomes a reference when all names are known."""

    __slots__ = ("chunk", "extra", "name", "place", "same_as", "view")

    def __init__(self, place: Place, chunk: Chunk, extra: dict[str, Any]) -> None:
        self.place = place
        self.chunk = chunk
        self.extra = extra
        self.name = ""
        self.same_as: _Slot | None = None
        self.view: ViewOf | None = None


def flatten(state: Any, codecs: ObjectCodecs | None = None) -> FlatState:
    """Takes the tensors out of `state`, which is not changed; no tensor is copied but those with a lazy conjugate or negative bit.

    Args:
        state: Any nesting of dicts, lists and tuples of tensors and objects.
        codecs: Codecs for other types; what they encode may hold tensors.

    Raises:
        UnsupportedTypeError: Something can't be stored; names its place and what to do.
    """
    slots: list[_Slot] = []
    tree = _Walk(codecs or ObjectCodecs(), slots).walk(state, ())
    for slot, name in zip(slots, assign_names([s.place for s in slots]), strict=True):
        slot.name = name
    _share(slots)
    return FlatState(
        leaves=tuple(
            Leaf(
                name=s.name,
                dtype=dtype_name(s.chunk.tensor.dtype),
                global_shape=s.chunk.global_shape,
                pieces=s.chunk.pieces,
                spread=s.chunk.spread,
            )
            for s in slots
            if s.same_as is None and s.view is None
        ),
        aliases={s.name: s.same_as.name for s in slots if s.same_as is not None},
        views=tuple(s.view for s in slots if s.view is not None),
        ranks=max((s.chunk.ranks for s in slots), default=1),
        _tree=tree,
    )


@dataclass(frozen=True, slots=True)
class _Walk:
    codecs: ObjectCodecs
    slots: list[_Slot]
    meshes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def walk(self, value: Any, place: Place, above: tuple[int, ...] = ()) -> Any:
        kind = type(value)
        if kind in (str, int, float, bool, type(None), bytes):
            return value
        if id(value) in above:
            raise UnsupportedTypeError(f"{show(place)} is the same object as one it lies in: the state is a cycle", hint="remove the cycle")
        inner = (*above, id(value))
        if len(inner) > MAX_DEPTH:
            raise UnsupportedTypeError(f"{show(place)} is nested deeper than {MAX_DEPTH} levels", hint="flatten the state")
        codec = self.codecs.find(kind)
        if codec is not None:
            return Opaque(codec.tag, self.walk(codec.encode(value), place, inner))
        if isinstance(value, torch.Tensor):
            return self.tensor(value, place)
        if kind is dict:
            return {key: self.walk(item, (*place, key), inner) for key, item in value.items()}
        if kind is OrderedDict:
            items = OrderedDict((key, self.walk(item, (*place, key), inner)) for key, item in value.items())
            metadata = getattr(value, "_metadata", None)
            return items if metadata is None else Opaque(MODULE_STATE, [items, self.walk(metadata, (*place, "_metadata"), inner)])
        if kind is list:
            return [self.walk(item, (*place, i), inner) for i, item in enumerate(value)]
        if kind is tuple:
            return tuple(self.walk(item, (*place, i), inner) for i, item in enumerate(value))
        if isinstance(value, dict | list | tuple):
            remedy = "._asdict()" if hasattr(value, "_fields") else "dict(...) or list(...)"
            raise UnsupportedTypeError(
                f"{show(place)} is a {kind.__module__}.{kind.__qualname__}, which would come back as another type",
                hint=f"convert it with {remedy}, or register a codec for it: codecs.register({kind.__name__}, tag, encode, decode)",
                path=show(place),
            )
        if kind not in _VALUES and not isinstance(value, np.generic | np.dtype):
            raise UnsupportedTypeError(
                f"{show(place)} is a {kind.__module__}.{kind.__qualname__}, which can't be stored without pickle",
                hint=f"remove or convert it, or register a codec for it: codecs.register({kind.__name__}, tag, encode, decode)",
                path=show(place),
            )
        return value

    def tensor(self, value: torch.Tensor, place: Place) -> Any:
        shown = show(place)
        extra: dict[str, Any] = {}
        if value.requires_grad:
            extra["requires_grad"] = True
        if isinstance(value, torch.nn.Parameter):
            extra["parameter"] = True
        if is_spread(value):
            chunk = chunk_of(value, shown, self.meshes)
            for part in (chunk.tensor, *(p.tensor for p in chunk.pieces)):
                check_storable(part, f"the local part of {shown}")
                if part.layout is not torch.strided:
                    raise UnsupportedTypeError(f"the local part of {shown} is sparse", hint="store it as dense: .to_dense()")
            return self.slot(place, _resolved_chunk(chunk), extra)
        check_storable(value, shown)
        if value.layout is torch.strided:
            dense = _resolved(value)
            return self.slot(place, _alone(dense), extra)
        return self.sparse(value.detach(), place, extra)

    def sparse(self, value: torch.Tensor, place: Place, extra: dict[str, Any]) -> Any:
        coo = value.layout is torch.sparse_coo
        parts = {
            part: self.slot((*place, part), _alone(_resolved(getattr(value, f"_{part}" if coo else part)())), {})
            for part in COMPONENTS[value.layout]
        }
        facts: dict[str, Any] = {"layout": str(value.layout).removeprefix("torch."), "shape": tuple(value.shape), "parts": parts, **extra}
        if coo:
            facts["coalesced"] = value.is_coalesced()
        return Opaque(SPARSE, facts)

    def slot(self, place: Place, chunk: Chunk, extra: dict[str, Any]) -> _Slot:
        made = _Slot(place, chunk, extra)
        self.slots.append(made)
        return made


def _alone(tensor: torch.Tensor) -> Chunk:
    return Chunk(tensor=tensor, pieces=(Piece(tensor=tensor, offsets=(0,) * tensor.ndim),), global_shape=tuple(tensor.shape))


def _resolved_chunk(chunk: Chunk) -> Chunk:
    if not (chunk.tensor.is_conj() or chunk.tensor.is_neg()):
        return replace(chunk, tensor=chunk.tensor.detach())
    return replace(chunk, pieces=tuple(replace(p, tensor=_resolved(p.tensor)) for p in chunk.pieces), tensor=_resolved(chunk.tensor))


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg()


MAX_DEPTH = 90
"""Nesting beyond this is refused: documents are bounded at 100 levels (format/document.py)."""


def _share(slots: list[_Slot]) -> None:
    """Finds tensors that show the same memory: equal views become one leaf, contained ones views of it."""
    seen: dict[Any, _Slot] = {}
    by_storage: dict[Any, list[tuple[int, int, int, _Slot]]] = {}
    for order, slot in enumerate(slots):
        chunk, tensor = slot.chunk, slot.chunk.tensor
        if tensor.numel() == 0 and chunk.spread is None:
            continue
        # Empty memory has no address. A tied tensor whose part here is empty must be found tied as on the ranks where it is not.
        address = tensor.untyped_storage().data_ptr() or tensor.untyped_storage()._cdata
        storage = (tensor.device, address)
        offsets = tuple(p.offsets for p in chunk.pieces)
        key = (*storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, chunk.global_shape, offsets)
        first = seen.setdefault(key, slot)
        if first is not slot:
            slot.same_as = first
        elif chunk.spread is None and tensor.is_contiguous():
            begin = int(tensor.storage_offset()) * tensor.itemsize
            by_storage.setdefault(storage, []).append((begin, -(begin + int(tensor.nbytes)), order, slot))
    for sharing in by_storage.values():
        if len(sharing) < 2:
            continue
        base: tuple[int, int, _Slot] | None = None
        for begin, minus_end, _, slot in sorted(sharing, key=lambda s: s[:3]):
            tensor = slot.chunk.tensor
            if base is not None and -minus_end <= base[1] and (begin - base[0]) % tensor.itemsize == 0:
                slot.view = ViewOf(
                    name=slot.name, base=base[2].name, offset=begin - base[0], dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape)
                )
            elif base is None or -minus_end > base[1]:
                base = (begin, -minus_end, slot)


def _link(node: Any, names: Mapping[str, str]) -> Any:
    """Replaces slots by references."""
    if isinstance(node, _Slot):
        target = node.same_as or node
        extra = dict(node.extra)
        if target.view is not None:
            view = target.view
            extra["view"] = [names.get(view.base, view.base), view.offset, view.dtype, view.shape]
        reference = TensorRef(names.get(target.name, target.name))
        return Opaque(TENSOR, {"ref": reference, **extra}) if extra else reference
    return rebuilt(node, lambda item: _link(item, names))
