"""What ``torch.save`` stored, as a tree of ours: tensors by name, plain values as they are, anything else refused by its place."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tierstore.errors import FormatError, UnsupportedTypeError
from tierstore.format.dtypes import DTYPES
from tierstore.format.index import Extent, TensorEntry
from tierstore.format.objects import Opaque, TensorRef
from tierstore.format.pickle_reader import Instance
from tierstore.format.torch_zip import TAIL_NBYTES, Archive, SavedSparse, SavedTensor, SavedValue, parse_saved
from tierstore.state.bits import torch_dtype
from tierstore.state.foreign.files import ForeignFiles
from tierstore.state.foreign.places import MemberPlace, Wherever, Window, check_tensor, layout_of, member_bytes, open_archive
from tierstore.state.paths import Place as TreePlace
from tierstore.state.paths import assign_names, show
from tierstore.state.unflatten import COMPONENTS, MODULE_STATE, SPARSE, TENSOR, rebuilt

__all__ = ["SavedState", "plain_values", "read_saved", "refuse"]

log = logging.getLogger(__name__)

_MAX_DEPTH = 90
_SKIP = object()


@dataclass(slots=True)
class SavedState:
    """A file of ``torch.save``: its tree with references, its tensors, where their bytes are, and what can't be stored."""

    tree: Any = None
    entries: list[TensorEntry] = field(default_factory=list)
    places: dict[str, Wherever] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Length of each file that `places` stands for, in bytes."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Place in the state, and the class of what is there."""


async def read_saved(files: ForeignFiles, name: str) -> SavedState:
    """Reads the directory and the pickle of a ``torch.save`` file; of its tensors nothing.

    Raises:
        FormatError: It is none, or is damaged.
    """
    nbytes = await files.nbytes(name)
    window = Window(files=files, file=name, begin=0, nbytes=nbytes)
    if nbytes < 4 or await window.read(0, 4) != b"PK\x03\x04":
        raise FormatError(
            f"{name} in {files.uri} is no zip archive: torch.save's old format, or no checkpoint",
            hint="torch.save(torch.load(path, weights_only=True), new_path) with a current torch makes one that can be read in place",
            file=name,
        )
    archive = await open_archive(window, TAIL_NBYTES)
    if "byteorder" in archive.members and await member_bytes(window, archive.members["byteorder"]) != b"little":
        raise FormatError(f"{name} has big-endian numbers", hint="load it with torch and save it again on this machine", file=name)
    saved = await asyncio.to_thread(parse_saved, await member_bytes(window, archive.member("data.pkl")), name)
    return await asyncio.to_thread(_state, saved, archive, name)


def _state(saved: Any, archive: Archive, file: str) -> SavedState:
    state = SavedState()
    slots: list[_Slot] = []
    tree = _Walk(slots, state.refused).walk(saved, ())
    places = [slot.place for slot in slots]
    seen: dict[SavedTensor, tuple[str, int]] = {}
    for slot, name in zip(slots, assign_names(places), strict=True):
        plain = _bare(slot.tensor)
        slot.name, number = seen.setdefault(plain, (name, len(seen)))
        state.entries.append(_entry(state, plain, archive, file, name, number))
    state.tree = _linked(None if tree is _SKIP else tree)
    return state


def _bare(tensor: SavedTensor) -> SavedTensor:
    return SavedTensor(storage=tensor.storage, dtype=tensor.dtype, offset=tensor.offset, shape=tensor.shape, strides=tensor.strides)


def _entry(state: SavedState, tensor: SavedTensor, archive: Archive, file: str, name: str, number: int) -> TensorEntry:
    entry = check_tensor(tensor, archive, file, name)
    itemsize = DTYPES[tensor.dtype].itemsize
    begin, nbytes = tensor.offset * itemsize, itemsize
    for size in tensor.shape:
        nbytes *= size
    layout = layout_of(tensor)
    if layout is None:
        stored = f"{file}@data/{tensor.storage}"
        state.places[stored], state.sizes[stored] = MemberPlace(file=file, file_nbytes=archive.nbytes, entry=entry), entry.nbytes
        begin = min(begin, entry.nbytes)  # of a tensor without elements nothing says where it is
    else:
        stored = f"{file}@strided/{number}"
        place = MemberPlace(file=file, file_nbytes=archive.nbytes, entry=entry, offset=begin, layout=layout)
        state.places[stored], state.sizes[stored], begin = place, nbytes, 0
    extent = Extent(file=stored, begin=begin, end=begin + nbytes, offsets=(0,) * len(tensor.shape), sizes=tensor.shape)
    return TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, extents=(extent,))


class _Slot:
    """A tensor met on the walk; becomes a reference when all names are known."""

    __slots__ = ("name", "place", "tensor")

    def __init__(self, place: TreePlace, tensor: SavedTensor) -> None:
        self.place = place
        self.tensor = tensor
        self.name = ""


@dataclass(frozen=True, slots=True)
class _Walk:
    """From what a pickle holds to what a tree may hold. `slots` takes the tensors; None: tensors are refused like foreign classes."""

    slots: list[_Slot] | None
    refused: list[tuple[str, str]]

    def walk(self, value: Any, place: TreePlace) -> Any:
        if len(place) > _MAX_DEPTH:
            raise FormatError(f"{show(place)[:200]} is nested deeper than {_MAX_DEPTH} levels", hint="it is damaged, or contains itself")
        if isinstance(value, SavedTensor):
            if self.slots is None:
                return self.refuse(place, "torch.Tensor")
            self.slots.append(slot := _Slot(place, value))
            return slot
        if isinstance(value, SavedSparse):
            return self.sparse(value, place)
        if isinstance(value, SavedValue):
            return self.small(value, place)
        if isinstance(value, Instance):
            return self.refuse(place, value.name)
        kind = type(value)
        if kind is dict or kind is OrderedDict:
            items = [(self.key(k, place), self.walk(v, (*place, k))) for k, v in value.items()]
            made = kind((k, v) for k, v in items if v is not _SKIP and k is not _SKIP)
            metadata = getattr(value, "_metadata", None)
            return made if metadata is None else Opaque(MODULE_STATE, [made, self.walk(metadata, (*place, "_metadata"))])
        if kind is list or kind is tuple:
            parts = [self.walk(item, (*place, i)) for i, item in enumerate(value)]
            return kind(None if part is _SKIP else part for part in parts)  # the others keep their positions
        if kind in (str, int, float, bool, bytes, bytearray, complex, set, frozenset, type(None)):
            return value
        return self.refuse(place, f"{kind.__module__}.{kind.__qualname__}")

    def sparse(self, value: SavedSparse, place: TreePlace) -> Any:
        if self.slots is None:
            return self.refuse(place, "torch.Tensor")
        names = COMPONENTS[getattr(torch, value.layout)]
        parts = {name: self.walk(part, (*place, name)) for name, part in zip(names, value.parts, strict=True)}
        facts: dict[str, Any] = {"layout": value.layout, "shape": value.shape, "parts": parts}
        if value.layout == "sparse_coo":
            facts["coalesced"] = value.coalesced
        flags = {"requires_grad": value.requires_grad, "parameter": value.parameter}
        return Opaque(SPARSE, {**facts, **{flag: True for flag, on in flags.items() if on}})

    def key(self, key: Any, place: TreePlace) -> Any:
        return self.refuse(place, f"{key.name} as a key") if isinstance(key, Instance) else key

    def small(self, value: SavedValue, place: TreePlace) -> Any:
        try:
            if value.kind == "dtype":
                return torch_dtype(value.value)
            if value.kind == "Size":
                return torch.Size(value.value)
            if value.kind == "device":
                return torch.device(value.value)
        except (RuntimeError, TypeError, ValueError) as error:
            raise FormatError(f"{show(place)} is no {value.kind}: {str(value.value)[:60]!r}", hint="the file is damaged") from error
        return self.refuse(place, f"torch.{value.kind}")

    def refuse(self, place: TreePlace, what: str) -> Any:
        self.refused.append((show(place), what))
        return _SKIP


def _linked(node: Any) -> Any:
    if isinstance(node, _Slot):
        reference = TensorRef(node.name)
        extra: dict[str, Any] = {"requires_grad": True} if node.tensor.requires_grad else {}
        if node.tensor.parameter:
            extra["parameter"] = True
        return Opaque(TENSOR, {"ref": reference, **extra}) if extra else reference
    if isinstance(node, Opaque):
        return Opaque(node.tag, _linked(node.value))
    if isinstance(node, dict | list | tuple) and type(node) is not torch.Size:
        return rebuilt(node, _linked)
    return node


def plain_values(data: bytes, archive_name: str, root: TreePlace, refused: list[tuple[str, str]]) -> Any:
    """A pickle that holds no tensors, as values of ours; what can't be stored is None, and noted in `refused`."""
    made = _Walk(None, refused).walk(parse_saved(data, archive_name), root)
    return None if made is _SKIP else _linked(made)


def refuse(refused: Sequence[tuple[str, str]], uri: str, *, skip: bool) -> None:
    """Refuses what can't be stored, or says that it is left out.

    Raises:
        UnsupportedTypeError: There is something, and `skip` is off.
    """
    if not refused:
        return
    listed = "; ".join(f"{place} is a {what}" for place, what in refused[:5]) + ("" if len(refused) <= 5 else f"; {len(refused) - 5} more")
    if skip:
        log.warning("%s: left out, as objects of foreign classes are never made: %s", uri, listed)
        return
    raise UnsupportedTypeError(
        f"{uri} holds objects that can't be read without running foreign code: {listed}",
        hint="skip_objects=True (--skip-objects) leaves them out; nothing of them was executed",
        path=refused[0][0],
    )
