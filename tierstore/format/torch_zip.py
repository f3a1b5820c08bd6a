"""What ``torch.save`` writes: a zip archive whose tensors lie uncompressed, so that their bytes can be read in place. Pure.

`find_directory` and `parse_directory` read the archive's directory, `parse_saved` the pickle in it, with tensors as `SavedTensor`:
which storage they lie in, from where, with which strides. Nothing is executed (`tierstore.format.pickle_reader`). Sources:
APPNOTE 6.3.10 §4.3 and §4.5.3 of the zip format; ``torch/_utils.py``, ``torch/serialization.py``.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tierstore.errors import FormatError
from tierstore.format.dtypes import DTYPES
from tierstore.format.header import MAX_NDIM
from tierstore.format.pickle_reader import Instance, Maker, full_name, read_pickle

__all__ = [
    "LOCAL_NBYTES",
    "TAIL_NBYTES",
    "Archive",
    "SavedSparse",
    "SavedTensor",
    "SavedValue",
    "ZipEntry",
    "find_directory",
    "local_nbytes",
    "parse_directory",
    "parse_saved",
]

TAIL_NBYTES = 64 << 10
"""How much of an archive's end to read first, bytes: the directory of some 500 tensors lies in it."""

LOCAL_NBYTES = 30
"""The fixed part of a member's own header, bytes."""

_MAX_DIRECTORY_NBYTES = 256 << 20
_MAX = (1 << 62) - 1
_HINT = "the file is truncated, damaged, or not made by torch.save"
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_MEMBER = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One member: where its own header begins in the archive, and how many bytes it has."""

    header: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An archive's members by name, without the folder that all of them share."""

    members: Mapping[str, ZipEntry]
    nbytes: int

    def member(self, name: str) -> ZipEntry:
        """The member called `name`.

        Raises:
            FormatError: There is none.
        """
        found = self.members.get(name)
        if found is None:
            raise FormatError(f"the archive has no member {name[:100]!r}", hint=_HINT)
        return found


def find_directory(tail: bytes, nbytes: int) -> tuple[int, int]:
    """Where the directory of an archive of `nbytes` bytes lies, and how long it is, from the archive's last bytes.

    Raises:
        FormatError: It is no zip archive, or its end claims what can't be.
    """
    base = nbytes - len(tail)
    at = tail.rfind(b"PK\x05\x06", max(0, len(tail) - 0xFFFF - _END.size))
    if at < 0 or at + _END.size > len(tail):
        raise FormatError("there is no zip archive's end", hint=_HINT)
    size, begin = _END.unpack_from(tail, at)[5:7]
    before = at - _LOCATOR64.size
    if before >= 0 and tail[before : before + 4] == b"PK\x06\x07":
        place = _LOCATOR64.unpack_from(tail, before)[2] - base
        if not 0 <= place <= before - _END64.size or tail[place : place + 4] != b"PK\x06\x06":
            raise FormatError("the zip archive's 64-bit end is not where it should be", hint=_HINT)
        size, begin = _END64.unpack_from(tail, place)[8:10]
    if size > _MAX_DIRECTORY_NBYTES or begin + size > base + at:
        raise FormatError(f"the zip archive's directory claims {size:,} bytes at {begin:,}, of {nbytes:,}", hint=_HINT)
    return begin, size


def parse_directory(data: bytes, nbytes: int) -> Archive:
    """Reads an archive's directory.

    Args:
        data: The directory.
        nbytes: The archive's length, bytes.

    Raises:
        FormatError: Malformed, a member lies outside the archive, is compressed or encrypted, or it is no archive of torch.save.
    """
    found: dict[str, ZipEntry] = {}
    at = 0
    while at + _MEMBER.size <= len(data):
        fields = _MEMBER.unpack_from(data, at)
        flags, method, packed, size = fields[3], fields[4], fields[8], fields[9]
        name_nbytes, extra_nbytes, comment_nbytes, header = fields[10], fields[11], fields[12], fields[16]
        name_at = at + _MEMBER.size
        extra = data[name_at + name_nbytes : name_at + name_nbytes + extra_nbytes]
        name = data[name_at : name_at + name_nbytes].decode("utf-8", "replace")
        at = name_at + name_nbytes + extra_nbytes + comment_nbytes
        if fields[0] != b"PK\x01\x02" or at > len(data):
            raise FormatError("the zip archive's directory is malformed", hint=_HINT)
        size, packed, header = _wide(extra, size, packed, header)
        if method != 0 or packed != size or flags & 1:
            raise FormatError(
                f"member {name[:100]!r} is compressed or encrypted: its bytes can't be read in place",
                hint="load it with torch and save it again with torch.save",
            )
        if header + LOCAL_NBYTES + name_nbytes + size > nbytes:
            raise FormatError(f"member {name[:100]!r} claims {size:,} bytes at {header:,}, of {nbytes:,}", hint=_HINT)
        if name in found:
            raise FormatError(f"member {name[:100]!r} stands there twice", hint=_HINT)
        found[name] = ZipEntry(header, size)
    folders = [name.removesuffix("data.pkl") for name in found if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(folders) != 1:
        raise FormatError("the zip archive is none of torch.save: it has no data.pkl", hint="name the checkpoint's own file")
    members = {name.removeprefix(folders[0]): entry for name, entry in found.items() if name.startswith(folders[0])}
    return Archive(members=members, nbytes=nbytes)


def _wide(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """The 64-bit values that replace those that did not fit 32 bits (APPNOTE §4.5.3)."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            numbers = iter(
                struct.unpack_from(f"<{length // 8}Q", extra[: at + 4 + length], at + 4) if at + 4 + length <= len(extra) else ()
            )
            size, packed, header = (next(numbers, -1) if value == 0xFFFFFFFF else value for value in (size, packed, header))
            break
        at += 4 + length
    if min(size, packed, header) < 0 or max(size, header) > _MAX:
        raise FormatError("the zip archive's directory has a malformed 64-bit size", hint=_HINT)
    return size, packed, header


def local_nbytes(data: bytes) -> int:
    """How long a member's own header is: its data begin after it. `data` are its first `LOCAL_NBYTES` bytes.

    Raises:
        FormatError: There is no such header.
    """
    if len(data) < LOCAL_NBYTES or data[:4] != b"PK\x03\x04":
        raise FormatError("a member of the zip archive has no header of its own", hint=_HINT)
    name_nbytes, extra_nbytes = _LOCAL.unpack_from(data)[9:11]
    return LOCAL_NBYTES + int(name_nbytes) + int(extra_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor of the pickle: `shape` and `strides` (in elements) over the archive's member ``data/<storage>``, from element `offset`."""

    storage: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False

    @property
    def span(self) -> int:
        """Elements from its first to its last one, in its storage."""
        return 0 if 0 in self.shape else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSparse:
    """A sparse tensor of the pickle: `layout` is ``sparse_coo`` or its like, `parts` are its components as torch orders them."""

    layout: str
    parts: tuple[SavedTensor, ...]
    shape: tuple[int, ...]
    coalesced: bool = False
    requires_grad: bool = False
    parameter: bool = False


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A small value of torch's: `kind` is ``dtype``, ``device``, ``Size`` or ``layout``."""

    kind: str
    value: Any


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str | None


def parse_saved(data: bytes, what: str) -> Any:
    """Reads the ``data.pkl`` of an archive.

    Returns:
        What was saved: containers and plain values as they are, `SavedTensor`, `SavedSparse`, `SavedValue`; an object of any other class
        is an inert `Instance` that has its name.

    Raises:
        FormatError: Malformed.
    """
    return read_pickle(data, what, find=_find, persistent=_storage)


def _find(module: str, name: str) -> Any:
    full = f"{module}.{name}"
    made = _MAKERS.get(full)
    if made is not None:
        return Maker(full, made)
    if module == "torch" and name in _STORAGES:
        return _Storage("", _STORAGES[name])
    if full in ("torch.storage.UntypedStorage", "torch.UntypedStorage"):
        return _Storage("", None)
    if module == "torch" and name in DTYPES:
        return SavedValue("dtype", name)
    shown = full_name(module, name)
    return Maker(shown, lambda *args: Instance(shown, args))


def _storage(value: Any) -> _Storage:
    if type(value) is not tuple or len(value) != 5 or value[0] != "storage" or not isinstance(value[1], _Storage):
        raise FormatError("a persistent id that is no storage", hint=_HINT)
    if type(value[2]) is not str:
        raise FormatError("a storage without a key", hint=_HINT)
    return _Storage(value[2], value[1].dtype)


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any = False, hooks: Any = None, metadata: Any = None
) -> Any:
    if metadata:
        return Instance("torch.Tensor with a lazy conjugate or negative bit")
    dtype = storage.dtype if isinstance(storage, _Storage) else None
    return _checked(storage, dtype, offset, shape, strides, requires_grad)


def _tensor_of(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Any:
    if metadata:
        return Instance("torch.Tensor with a lazy conjugate or negative bit")
    known = dtype.value if isinstance(dtype, SavedValue) and dtype.kind == "dtype" else None
    return _checked(storage, known, offset, shape, strides, requires_grad)


def _checked(storage: Any, dtype: str | None, offset: Any, shape: Any, strides: Any, requires_grad: Any) -> SavedTensor:
    shape = shape.value if isinstance(shape, SavedValue) else shape
    numbers = (offset, *shape, *strides) if type(shape) is tuple and type(strides) is tuple else (-1,)
    if not isinstance(storage, _Storage) or dtype is None or not all(type(n) is int and 0 <= n <= _MAX for n in numbers):
        raise FormatError("a malformed tensor", hint=_HINT)
    if len(shape) != len(strides) or len(shape) > MAX_NDIM:
        raise FormatError(f"a tensor of shape {str(shape)[:60]} with strides {str(strides)[:60]}", hint=_HINT)
    return SavedTensor(storage=storage.key, dtype=dtype, offset=offset, shape=shape, strides=strides, requires_grad=requires_grad is True)


def _sparse(layout: Any, data: Any) -> SavedSparse:
    known = layout.value.removeprefix("torch.") if isinstance(layout, SavedValue) and layout.kind == "layout" else ""
    values = list(data) if type(data) is tuple else []
    coalesced = values.pop() is True if known == "sparse_coo" and len(values) == 4 else False
    shape: Any = values.pop() if values else None
    shape = shape.value if isinstance(shape, SavedValue) else shape
    good = type(shape) is tuple and len(shape) <= MAX_NDIM and all(type(n) is int and 0 <= n <= _MAX for n in shape)
    if len(values) != _SPARSE.get(known) or not all(isinstance(part, SavedTensor) for part in values) or not good:
        raise FormatError(f"a malformed sparse tensor of the layout {known[:40]!r}", hint=_HINT)
    return SavedSparse(layout=known, parts=tuple(values), shape=shape, coalesced=coalesced)


def _parameter(tensor: Any, requires_grad: Any = True, hooks: Any = None, *more: Any) -> Any:
    if isinstance(tensor, SavedSparse):
        return replace(tensor, requires_grad=requires_grad is True, parameter=True)
    if not isinstance(tensor, SavedTensor):
        return tensor
    return SavedTensor(
        storage=tensor.storage,
        dtype=tensor.dtype,
        offset=tensor.offset,
        shape=tensor.shape,
        strides=tensor.strides,
        requires_grad=requires_grad is True,
        parameter=True,
    )


def _bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":  # how pickle's protocol 2 writes bytes
        raise FormatError(f"bytes encoded as {encoding[:40]!r}", hint=_HINT)
    return text.encode("latin1")


_SPARSE = {"sparse_coo": 2, "sparse_csr": 3, "sparse_csc": 3, "sparse_bsr": 3, "sparse_bsc": 3}
"""Layouts of sparse tensors, and how many components each has."""

_MAKERS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _bytes,
    "builtins.bytes": lambda: b"",  # how protocol 2 writes empty ones
    "__builtin__.bytes": lambda: b"",
    "builtins.bytearray": lambda *args: bytearray(*(a for a in args if isinstance(a, bytes))),
    "__builtin__.bytearray": lambda *args: bytearray(*(a for a in args if isinstance(a, bytes))),
    "builtins.complex": lambda real, imag: complex(float(real), float(imag)),
    "__builtin__.complex": lambda real, imag: complex(float(real), float(imag)),
    "builtins.set": lambda items=(): _set(set, items),
    "__builtin__.set": lambda items=(): _set(set, items),
    "builtins.frozenset": lambda items=(): _set(frozenset, items),
    "__builtin__.frozenset": lambda items=(): _set(frozenset, items),
    "collections.OrderedDict": lambda: OrderedDict(),
    "torch.Size": lambda sizes=(): SavedValue("Size", tuple(sizes)),
    "torch.device": lambda kind, index=None: SavedValue("device", str(kind) if index is None else f"{kind}:{int(index)}"),
    "torch.serialization._get_layout": lambda text: SavedValue("layout", str(text)),
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_parameter": _parameter,
}


def _set(kind: Callable[[Any], Any], items: Any) -> Any:
    if type(items) is not list or not all(type(item) in (str, int, float, bool, bytes, type(None)) for item in items):
        raise FormatError("a set of what can't be told apart without running code", hint=_HINT)
    return kind(items)
