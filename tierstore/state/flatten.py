"""A state as a tree of references and a list of tensors; `unflatten` is the way back.

`flatten` walks dicts, lists, tuples and what codecs know, takes the tensors out, names them by their places and leaves references. Types
come back as they were: `Parameter`, ``requires_grad``, sparse layouts, `OrderedDict` with a module's ``_metadata``, int keys.

Memory is stored once: tensors that are the same view of the same memory share one leaf and come back tied; a contiguous tensor that
lies within another contiguous one is stored as a part of it, and comes back as a view of it. Strided views (``.t()``, ``expand``,
channels_last) are stored row-major on their own; their values come back, their strides do not. Only what a view shows is stored,
never the rest of its storage.
"""

from __future__ import annotations

import fnmatch
import functools
import math
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tierstore.errors import UnsupportedTypeError
from tierstore.format.objects import ObjectCodecs, Opaque, TensorRef
from tierstore.state.bits import dtype_name
from tierstore.state.collecting import collector_paused
from tierstore.state.guard import check_storable, is_plain
from tierstore.state.paths import Place, Shown, assign_names, name_of, show
from tierstore.state.sharded import Chunk, Piece, Spread, chunk_of, is_spread
from tierstore.state.unflatten import COMPONENTS, MODULE_STATE, OMITTED, SPARSE, TENSOR, rebuilt, sparse_tensor

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
    omitted: Mapping[str, int] = field(default_factory=dict)
    """The names of tensors that were left out, and how many bytes each has as a whole."""
    _tree: Any = field(repr=False)

    def tree(self, names: Mapping[str, str] | None = None) -> Any:
        """The state with a reference in the place of each tensor; `names` has those that are stored under another name than their own."""
        with collector_paused():
            return _link(self._tree, names or {})


_VALUES = (set, frozenset, bytearray, complex, range, np.ndarray, Opaque)
"""Leaves beside plain scalars that `format.objects` stores (it looks into them, and refuses what it can't)."""


class _Slot:
    """A tensor met on the walk; becomes a reference when all names are known. The fields of its `sharded.Chunk` are its own.

    States have tens of thousands of tensors: as few objects as can be are made for each.
    """

    __slots__ = ("extra", "global_shape", "name", "pieces", "place", "same_as", "spread", "tensor", "view")

    def __init__(
        self,
        place: Place,
        extra: Mapping[str, Any],
        tensor: torch.Tensor,
        pieces: tuple[Piece, ...],
        global_shape: tuple[int, ...],
        spread: Spread | None,
    ) -> None:
        self.place = place
        self.extra = extra
        self.tensor = tensor
        self.pieces = pieces
        self.global_shape = global_shape
        self.spread = spread
        self.name = ""
        self.same_as: _Slot | None = None
        self.view: ViewOf | None = None


def flatten(state: Any, codecs: ObjectCodecs | None = None, omit: Sequence[str] = ()) -> FlatState:
    """Takes the tensors out of `state`, which is not changed; no tensor is copied but those with a lazy conjugate or negative bit.

    Args:
        state: Any nesting of dicts, lists and tuples of tensors and objects.
        codecs: Codecs for other types; what they encode may hold tensors.
        omit: Globs of dotted names of tensors to leave out; the tree says of each that it was there.

    Raises:
        UnsupportedTypeError: Something can't be stored; names its place and what to do.
    """
    with collector_paused():
        return _flattened(state, codecs or ObjectCodecs(), omit)


def _flattened(state: Any, codecs: ObjectCodecs, omit: Sequence[str]) -> FlatState:
    slots: list[_Slot] = []
    omitted: dict[str, int] = {}
    tensors = frozenset(kind for kind in _TENSORS if codecs.find(kind) is None)
    tree = _Walk(codecs, slots, tensors, _pattern(omit), omitted).walk(state, ())
    for slot, name in zip(slots, assign_names([s.place for s in slots]), strict=True):
        slot.name = name
    _share(slots)
    return FlatState(
        leaves=tuple(
            Leaf(name=s.name, dtype=_name_of(s.tensor.dtype), global_shape=s.global_shape, pieces=s.pieces, spread=s.spread)
            for s in slots
            if s.same_as is None and s.view is None
        ),
        aliases={s.name: s.same_as.name for s in slots if s.same_as is not None},
        views=tuple(s.view for s in slots if s.view is not None),
        ranks=max((len(s.spread.ranks) for s in slots if s.spread is not None), default=1) or 1,
        omitted=omitted,
        _tree=tree,
    )


def _pattern(globs: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(fnmatch.translate(glob) for glob in globs)) if globs else None


@dataclass(frozen=True, slots=True)
class _Walk:
    codecs: ObjectCodecs
    slots: list[_Slot]
    tensors: frozenset[type]
    """Kinds of tensors that no codec takes: they hold nothing that they could lie in."""
    omit: re.Pattern[str] | None
    omitted: dict[str, int]
    meshes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def walk(self, value: Any, place: Place, above: tuple[int, ...] = ()) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind in self.tensors and len(above) < MAX_DEPTH:
            stays = self.omit is None or not self.omit.match(name_of(place))
            if stays and is_plain(value) and not hasattr(value, "global_offsets"):
                return self.plain(value, place, kind is torch.nn.Parameter)
            return self.tensor(value, place)
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
        extra: Mapping[str, Any] = _EXTRA[value.requires_grad, isinstance(value, torch.nn.Parameter)]
        if self.omit is not None and self.omit.match(name := name_of(place)):
            return self.left_out(name, value, show(place), extra)
        if is_spread(value):
            chunk = chunk_of(value, show(place), self.meshes)
            for part in (chunk.tensor, *(p.tensor for p in chunk.pieces)):
                check_storable(part, f"the local part of {show(place)}")
                if part.layout is not torch.strided:
                    raise UnsupportedTypeError(f"the local part of {show(place)} is sparse", hint="store it as dense: .to_dense()")
            return self.slot(place, chunk, extra)
        check_storable(value, Shown(place))
        if value.layout is torch.strided:
            return self.alone(place, value, extra)
        return self.sparse(value.detach(), place, extra)

    def left_out(self, name: str, value: torch.Tensor, shown: str, extra: Mapping[str, Any]) -> Opaque:
        """What stands for a tensor that is not stored: enough to make one like it."""
        shape = chunk_of(value, shown, self.meshes).global_shape if is_spread(value) else tuple(value.shape)
        self.omitted[name] = math.prod(shape) * value.dtype.itemsize
        return Opaque(OMITTED, {"dtype": dtype_name(value.dtype), "shape": shape, **extra})

    def plain(self, value: torch.Tensor, place: Place, is_parameter: bool) -> _Slot:
        """`tensor` for what nearly all of them are, in few steps of torch's: each is half a microsecond."""
        needs_grad = value.requires_grad
        dense = value.detach() if needs_grad or is_parameter else value
        if dense.is_neg() or dense.is_conj():
            dense = _resolved(dense)
        shape = tuple(dense.shape)
        made = _Slot(place, _EXTRA[needs_grad, is_parameter], dense, (Piece(tensor=dense, offsets=_zeros(len(shape))),), shape, None)
        self.slots.append(made)
        return made

    def sparse(self, value: torch.Tensor, place: Place, extra: Mapping[str, Any]) -> Any:
        coo = value.layout is torch.sparse_coo
        found = {part: getattr(value, f"_{part}" if coo else part)() for part in COMPONENTS[value.layout]}
        coalesced = coo and value.is_coalesced()
        try:
            sparse_tensor(value.layout, list(found.values()), value.shape, coalesced=coalesced)
        except (RuntimeError, TypeError, ValueError) as error:  # torch checks them when it is asked to, and loads ask it
            raise UnsupportedTypeError(
                f"{show(place)} is a sparse tensor whose components contradict each other: {error}",
                hint="correct its indices; torch.sparse.check_sparse_tensor_invariants.enable() finds where such a tensor is made",
            ) from error
        parts = {part: self.alone((*place, part), tensor, _EXTRA[False, False]) for part, tensor in found.items()}
        facts: dict[str, Any] = {"layout": str(value.layout).removeprefix("torch."), "shape": tuple(value.shape), "parts": parts, **extra}
        if coo:
            facts["coalesced"] = coalesced
        return Opaque(SPARSE, facts)

    def alone(self, place: Place, tensor: torch.Tensor, extra: Mapping[str, Any]) -> _Slot:
        """A tensor that this process has for itself."""
        dense = _resolved(tensor)
        made = _Slot(place, extra, dense, (Piece(tensor=dense, offsets=(0,) * dense.ndim),), tuple(dense.shape), None)
        self.slots.append(made)
        return made

    def slot(self, place: Place, chunk: Chunk, extra: Mapping[str, Any]) -> _Slot:
        if chunk.tensor.is_conj() or chunk.tensor.is_neg():
            pieces = tuple(Piece(tensor=_resolved(p.tensor), offsets=p.offsets) for p in chunk.pieces)
        else:
            pieces = chunk.pieces
        made = _Slot(place, extra, _resolved(chunk.tensor), pieces, chunk.global_shape, chunk.spread)
        self.slots.append(made)
        return made


@functools.cache
def _zeros(ndim: int) -> tuple[int, ...]:
    return (0,) * ndim


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return dtype_name(dtype)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg()


_SCALARS = frozenset({str, int, float, bool, type(None), bytes})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_EXTRA: Mapping[tuple[bool, bool], Mapping[str, Any]] = {
    (needs, is_one): {**({"requires_grad": True} if needs else {}), **({"parameter": True} if is_one else {})}
    for needs in (False, True)
    for is_one in (False, True)
}
"""What a reference says of its tensor, by ``requires_grad`` and whether it is a Parameter."""

MAX_DEPTH = 90
"""Nesting beyond this is refused: documents are bounded at 100 levels (format/document.py)."""


def _share(slots: list[_Slot]) -> None:
    """Finds tensors that show the same memory: equal views become one leaf, contained ones views of it."""
    by_storage: dict[Any, list[_Slot]] = {}
    for slot in slots:
        tensor = slot.tensor
        if tensor.numel() == 0 and slot.spread is None:
            continue
        address = tensor.data_ptr()
        if address:
            if offset := tensor.storage_offset():
                address -= int(offset) * tensor.itemsize
        else:
            # Empty memory has no address. A tied tensor whose part here is empty must be found tied as on the ranks where it is not.
            address = tensor.untyped_storage().data_ptr() or tensor.untyped_storage()._cdata
        by_storage.setdefault(address if tensor.is_cpu else (tensor.device, address), []).append(slot)
    for sharing in by_storage.values():
        if len(sharing) > 1:  # of tens of thousands nearly all have their storage for themselves
            _share_storage(sharing)


def _share_storage(slots: list[_Slot]) -> None:
    """`_share` for the tensors of one storage."""
    seen: dict[Any, _Slot] = {}
    lying: list[tuple[int, int, int, _Slot]] = []
    for order, slot in enumerate(slots):
        tensor = slot.tensor
        offsets = tuple(p.offsets for p in slot.pieces)
        key = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, slot.global_shape, offsets)
        first = seen.setdefault(key, slot)
        if first is not slot:
            slot.same_as = first
        elif slot.spread is None and tensor.is_contiguous():
            begin = int(tensor.storage_offset()) * tensor.itemsize
            lying.append((begin, -(begin + int(tensor.nbytes)), order, slot))
    base: tuple[int, int, _Slot] | None = None
    for begin, minus_end, _, slot in sorted(lying, key=lambda s: s[:3]):
        tensor = slot.tensor
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
