"""Pictures: what tells whether two saves at one step say the same, so that ``last.ckpt`` beside ``epoch=3.ckpt`` costs a pointer only.

Small parts of a checkpoint (callbacks' states, counters) are kept whole. Of large ones the objects are kept, and a mark for each tensor:
which memory it is, how often torch has changed it (its version counter), and some of its elements, for what changes a tensor behind the
counter (``param.data.copy_``, as weight averaging does). Tensors that are copies of others have marks of their own: then the marks
can't tell, and the caller compares with what is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tierstore.format.objects import ObjectCodecs, TensorRef, decode_objects, encode_objects
from tierstore.integrations.lightning_parts.pointers import Pointer, Unit
from tierstore.names import Attempt
from tierstore.state.bits import as_bits, dtype_name, torch_dtype

__all__ = ["Picture", "Pictures", "Relation", "apply_pointer", "compare", "pictures_of", "pointer_for", "same_tensors", "units_of"]

Relation = Literal["same", "more", "unknown", "differs"]
Pictures = Mapping[Unit, "Picture"]

_SMALL_NBYTES = 64 << 10
"""Parts with at most so many bytes of tensors may ride in a pointer."""
_SAMPLE = 256
"""So many elements of a tensor are compared, evenly spread; of running statistics, which torch changes without counting, most often all."""
_SPLIT = "callbacks"
_TENSOR = "torch.Tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One tensor as it was: equal marks mean the same memory, unchanged."""

    storage: StorageWeakRef
    layout: tuple[Any, ...]
    sample: bytes

    def matches(self, other: Mark) -> bool:
        """Storages are compared by address; the weak reference keeps an address from being used again."""
        return (self.storage.cdata, self.layout, self.sample) == (other.storage.cdata, other.layout, other.sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One part: all of it where it is small, else its objects and its tensors' marks (None: a tensor that can't be marked)."""

    small: bytes | None
    objects: bytes = b""
    marks: tuple[Mark | None, ...] = ()


def units_of(checkpoint: Mapping[str, Any]) -> Iterator[tuple[Unit, Any]]:
    """A checkpoint's parts: its keys, and each callback's state for itself."""
    for key, value in checkpoint.items():
        if key == _SPLIT and type(value) is dict and value and all(isinstance(k, str) for k in value):
            yield from (((key, name), part) for name, part in value.items())
        else:
            yield (key,), value


def pictures_of(checkpoint: Mapping[str, Any], codecs: ObjectCodecs) -> Pictures:
    """Pictures of all parts.

    Raises:
        UnsupportedTypeError: A value can't be stored; names its path.
    """
    whole = _with_tensors(codecs)
    return {unit: _picture(unit, value, codecs, whole) for unit, value in units_of(checkpoint)}


def compare(first: Pictures, second: Pictures) -> Relation:
    """What the second save says beside the first one at its step.

    Returns:
        ``same``: a pointer can say it; ``more``: it also has large parts that the first lacks; ``differs``: a large part has changed;
        ``unknown``: tensors were copied, and may be the same.
    """
    found: Relation = "same"
    for unit, new in second.items():
        old = first.get(unit)
        if old is None:
            found = "more" if new.small is None and found == "same" else found
        elif new.small is None or old.small is None:
            if new.objects != old.objects or len(new.marks) != len(old.marks) or (new.small is None) != (old.small is None):
                return "differs"
            if not all(a is not None and b is not None and a.matches(b) for a, b in zip(new.marks, old.marks, strict=True)):
                found = "unknown"
    return found


def same_tensors(stored: Any, value: Any) -> bool:
    """Whether all tensors of two parts have the same bits; their objects are known to be the same."""
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    _strip(value, ours)
    _strip(stored, theirs)
    return len(ours) == len(theirs) and all(_same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


def pointer_for(attempt: Attempt, base: Pictures, seen: Pictures) -> Pointer:
    """The pointer of a path that stands for `seen`, where `base` is what was saved; see `compare`."""
    inline = tuple((unit, picture.small) for unit, picture in seen.items() if picture.small is not None and _lacks(base, unit, picture))
    units = None if list(base) == list(seen) else tuple(seen)
    return Pointer(run=attempt.run, step=attempt.step, save_id=attempt.save_id, units=units, inline=inline)


def apply_pointer(pointer: Pointer, state: Mapping[str, Any], codecs: ObjectCodecs) -> dict[str, Any]:
    """The checkpoint that a path stands for, of the one that was saved."""
    if pointer.units is None and not pointer.inline:
        return dict(state)
    parts: dict[Unit, Any] = dict(units_of(state))
    whole = _with_tensors(codecs)
    for unit, document in pointer.inline:
        parts[unit] = _dig(decode_objects(document, whole), unit)
    made: dict[str, Any] = {}
    for unit in pointer.units or tuple(parts):
        if unit not in parts:
            continue  # a superseding save has not got it
        place = made
        for key in unit[:-1]:
            place = place.setdefault(key, {})
        place[unit[-1]] = parts[unit]
    return made


def _lacks(base: Pictures, unit: Unit, picture: Picture) -> bool:
    return unit not in base or base[unit].small != picture.small


def _dig(tree: Any, unit: Unit) -> Any:
    for key in unit:
        tree = tree[key]
    return tree


def _picture(unit: Unit, value: Any, codecs: ObjectCodecs, whole: ObjectCodecs) -> Picture:
    tensors: list[torch.Tensor] = []
    bare = value
    stripped = _strip(value, tensors)
    for key in reversed(unit):  # a refusal names the place in the checkpoint
        stripped, bare = {key: stripped}, {key: bare}
    if all(_is_plain(tensor) for tensor in tensors) and sum(tensor.nbytes for tensor in tensors) <= _SMALL_NBYTES:
        return Picture(small=encode_objects(_strip_with(bare, lambda tensor: tensor.detach().as_subclass(torch.Tensor)), whole))
    return Picture(small=None, objects=encode_objects(stripped, codecs), marks=tuple(_mark(tensor) for tensor in tensors))


def _with_tensors(codecs: ObjectCodecs) -> ObjectCodecs:
    whole = codecs.copy()
    if whole.find(torch.Tensor) is None:
        whole.register(torch.Tensor, _TENSOR, _encode_tensor, _decode_tensor)
    return whole


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    flat = as_bits(tensor).cpu().reshape(-1).contiguous().view(torch.uint8)
    return {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data": flat.numpy().tobytes()}


def _decode_tensor(value: Mapping[str, Any]) -> torch.Tensor:
    shape = tuple(value["shape"])
    if not value["data"]:
        return torch.empty(shape, dtype=torch_dtype(value["dtype"]))
    return torch.frombuffer(bytearray(value["data"]), dtype=torch.uint8).view(torch_dtype(value["dtype"])).reshape(shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized


def _strip(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with references in the place of its tensors, which are collected."""

    def take(tensor: torch.Tensor) -> TensorRef:
        tensors.append(tensor)
        return TensorRef(str(len(tensors) - 1))

    return _strip_with(value, take)


def _strip_with(value: Any, put: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return put(value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _strip_with(part, put)) for key, part in value.items())
    if type(value) in (list, tuple):
        return type(value)(_strip_with(part, put) for part in value)
    return value


def _mark(tensor: torch.Tensor) -> Mark | None:
    """None for what has no one memory of its own (sparse, quantised, wrapped)."""
    own = getattr(tensor, "_local_tensor", tensor)  # of a DTensor what lies here
    if not isinstance(own, torch.Tensor) or not _is_plain(own) or own.device.type == "meta" or own.is_inference():
        return None
    own = own.detach()
    layout = (own._version, own.storage_offset(), tuple(own.shape), own.stride(), own.dtype, own.device)
    storage = StorageWeakRef(own.untyped_storage())  # type: ignore[no-untyped-call]
    return Mark(storage=storage, layout=layout, sample=_sample(own))


def _sample(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    some = as_bits(tensor)
    while some.dim() > 1 and not some.is_contiguous():
        some = some.select(0, 0)
    flat = some.reshape(-1)
    step = max(1, flat.numel() // _SAMPLE)
    return bytes(flat[::step][:_SAMPLE].contiguous().cpu().view(torch.uint8).numpy().tobytes())


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not (_is_plain(one) and _is_plain(other)) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(as_bits(one).cpu(), as_bits(other).cpu())
