"""The ``.metadata`` of torch.distributed.checkpoint: read by name with a restricted reader; no class of torch is imported, nothing runs.

DCP writes a pickle of its own dataclasses. The table below names each class and function that such a pickle may mention, exactly, with
a stand-in for it; any other name is refused (`tierstore.format.pickle_reader`). Source of the layout:
``torch/distributed/checkpoint/{metadata,filesystem}.py``, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from tierstore.errors import FormatError, IncompleteError
from tierstore.format.dtypes import DTYPES
from tierstore.format.header import MAX_NDIM
from tierstore.format.pickle_reader import MAX_OPS, Instance, Maker, full_name, read_pickle
from tierstore.names import check_relative

__all__ = ["MAX_METADATA_NBYTES", "DcpChunk", "DcpItem", "DcpMetadata", "DcpTensor", "parse_dcp_metadata"]

MAX_METADATA_NBYTES = 1 << 30
"""A longer ``.metadata`` is refused, bytes; 768,000 chunks take 103 MiB."""

_MAX = (1 << 62) - 1
_HINT = "the file is foreign or damaged; nothing of it was executed"


@dataclass(frozen=True, slots=True)
class DcpItem:
    """Where one item lies: `nbytes` bytes from `offset` of `file`. `transforms` names what it was compressed with, if anything."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A stored rectangle of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: DcpItem


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpTensor:
    """A tensor: dtype as a name of `DTYPES`, whole shape, chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """What ``.metadata`` says.

    Attributes:
        tensors: By fully qualified name.
        objects: What is not a tensor: where the ``torch.save`` stream of each lies.
        paths: Name → keys from the state's root, where the planner kept them (it flattens states by default).
    """

    tensors: Mapping[str, DcpTensor]
    objects: Mapping[str, DcpItem]
    paths: Mapping[str, tuple[str | int, ...]]


_DCP = "torch.distributed.checkpoint."
_CLASSES = frozenset(
    {
        (_DCP + "metadata", "Metadata"),
        (_DCP + "metadata", "TensorStorageMetadata"),
        (_DCP + "metadata", "BytesStorageMetadata"),
        (_DCP + "metadata", "ChunkStorageMetadata"),
        (_DCP + "metadata", "TensorProperties"),
        (_DCP + "metadata", "MetadataIndex"),
        (_DCP + "metadata", "StorageMeta"),
        (_DCP + "metadata", "_MEM_FORMAT_ENCODING"),
        (_DCP + "filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
    }
)


def _find(module: str, name: str) -> Any:
    if (module, name) in _CLASSES:
        return Maker(name, lambda *args: Instance(name, args))
    if (module, name) == ("torch", "Size"):
        return Maker(name, lambda sizes=(): tuple(sizes))
    if module == "torch" and name in DTYPES:
        return Instance("dtype", (name,))
    if (module, name) == ("collections", "OrderedDict"):
        return Maker(name, dict)
    raise FormatError(
        f".metadata names {full_name(module, name)}, which is no part of DCP's metadata: refused, nothing was executed",
        hint="a stock DCP checkpoint has no such name: don't open this one with torch either, it may run code",
        name=full_name(module, name),
    )


def parse_dcp_metadata(data: bytes, *, max_ops: int = MAX_OPS) -> DcpMetadata:
    """Reads a ``.metadata`` file.

    Args:
        data: Its bytes.
        max_ops: How many opcodes its pickle may have.

    Raises:
        FormatError: Too long, malformed, or it names anything beside DCP's own classes.
        IncompleteError: It lists a chunk, or an object, for which it knows no file.
    """
    if len(data) > MAX_METADATA_NBYTES:
        raise FormatError(f".metadata has {len(data):,} bytes; {MAX_METADATA_NBYTES:,} are allowed", hint=_HINT)
    body = _fields(read_pickle(data, ".metadata", find=_find, max_ops=max_ops), "Metadata")
    listed, stored = body.get("state_dict_metadata"), body.get("storage_data")
    if type(listed) is not dict or type(stored) is not dict:
        raise FormatError(".metadata has no tables of tensors and files", hint=_HINT)
    items = _items(stored)
    tensors: dict[str, DcpTensor] = {}
    objects: dict[str, DcpItem] = {}
    for name, value in listed.items():
        if type(name) is not str:
            raise FormatError(f".metadata: {str(name)[:60]!r} names a tensor", hint=_HINT)
        if isinstance(value, Instance) and value.name == "BytesStorageMetadata":
            found = items.get((name, None))
            if found is None:
                raise _no_file(name, "object")
            objects[name] = found
        else:
            tensors[name] = _tensor(name, value, items)
    return DcpMetadata(tensors=tensors, objects=objects, paths=_paths(body.get("planner_data"), listed))


def _fields(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Instance) or value.name != name or type(value.state) is not dict:
        raise FormatError(f".metadata: there should be a {name}", hint=_HINT)
    return value.state


def _no_file(name: str, what: str) -> IncompleteError:
    return IncompleteError(
        f"{what} {name!r} is listed in .metadata, but no file of it is: a rank's write failed when this was saved",
        hint="this checkpoint is not whole (stock DCP can lose a writer's error): use an older one",
        tensor=name,
    )


def _items(stored: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], DcpItem]:
    found: dict[tuple[str, tuple[int, ...] | None], DcpItem] = {}
    known: dict[str, str] = {}
    for key, value in stored.items():
        index, info = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        name, offset = index.get("fqn"), index.get("offset")
        file, begin, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
        if type(name) is not str or type(file) is not str or not (_is_size(begin) and _is_size(nbytes)):
            raise FormatError(f".metadata: a malformed place of {str(name)[:200]!r}", hint=_HINT)
        path = known.get(file) or known.setdefault(file, check_relative(file))
        transforms = info.get("transform_descriptors") or ()
        found[name, None if offset is None else _sizes(offset, name)] = DcpItem(path, begin, nbytes, tuple(map(str, transforms)))
    return found


def _tensor(name: str, value: Any, items: Mapping[tuple[str, tuple[int, ...] | None], DcpItem]) -> DcpTensor:
    fields = _fields(value, "TensorStorageMetadata")
    properties, listed = fields.get("properties"), fields.get("chunks")
    state = properties.state if isinstance(properties, Instance) and properties.name == "TensorProperties" else None
    kind = state[0] if type(state) is tuple and state else state.get("dtype") if type(state) is dict else None
    if not isinstance(kind, Instance) or kind.name != "dtype" or type(listed) is not list:
        raise FormatError(f".metadata: tensor {name[:200]!r} has no dtype that can be stored, or no chunks", hint=_HINT)
    shape = _sizes(fields.get("size"), name)
    chunks = []
    for each in listed:
        box = _fields(each, "ChunkStorageMetadata")
        offsets, sizes = _sizes(box.get("offsets"), name), _sizes(box.get("sizes"), name)
        if not len(offsets) == len(sizes) == len(shape) or any(o + n > g for o, n, g in zip(offsets, sizes, shape, strict=True)):
            raise FormatError(f".metadata: tensor {name[:200]!r}: a chunk {sizes} at {offsets} of the shape {shape}", hint=_HINT)
        item = items.get((name, offsets)) or (items.get((name, None)) if len(listed) == 1 else None)
        if item is None:
            raise _no_file(name, "tensor")
        chunks.append(DcpChunk(offsets, sizes, item))
    return DcpTensor(dtype=kind.args[0], shape=shape, chunks=tuple(chunks))


def _paths(planned: Any, listed: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]]:
    """The planner's word on where each name belongs; empty unless it is one for every name, so that a tree can be made of it."""
    if type(planned) is not dict:
        return {}
    if any(type(path) is not tuple or not path or any(type(k) not in (str, int) for k in path) for path in planned.values()):
        return {}
    return dict(planned) if planned.keys() >= listed.keys() else {}


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX


def _sizes(value: Any, name: str) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > MAX_NDIM or not all(map(_is_size, value)):
        raise FormatError(f".metadata: {name[:200]!r}: {str(value)[:60]} are no sizes", hint=_HINT)
    return value
