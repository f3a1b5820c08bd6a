"""Shards: where each tensor lies in the ``.safetensors`` file that one rank writes, and what its header says."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tierstore.errors import FormatError, UsageError
from tierstore.format.digest import BLOCK_NBYTES
from tierstore.format.document import FORMAT_VERSION, check_version, load_json, plain_json
from tierstore.format.dtypes import DTYPES, SAFETENSORS_NAMES, dtype_named, stored_as
from tierstore.format.header import (
    MAX_HEADER_NBYTES,
    MAX_NDIM,
    HeaderTensor,
    ShardHeader,
    encode_header,
    header_nbytes,
    parse_header,
)
from tierstore.format.index_table import Extent, TensorEntry

__all__ = [
    "DATA_ALIGNMENT",
    "ChunkSpec",
    "HeaderTensor",
    "Placement",
    "ShardHeader",
    "ShardPlan",
    "header_nbytes",
    "parse_header",
    "plan_shard",
    "shard_entries",
    "tensor_entries",
]

DATA_ALIGNMENT = 4096
"""The data section begins at a multiple of this many bytes: a page, so that a mapped image can be copied into directly."""

BLOCK_ALIGNED_FROM_NBYTES = 64 * BLOCK_NBYTES
"""From this much data on, the data section begins with a block and the tensors that fill whole blocks lie first: their slices, which
mostly begin and end with a block too, are then read and proved without a byte around them. The longer header costs 1.6 % at most."""

SMALL_NBYTES = 64 << 10
"""Tensors up to this size lie together within their item size: one block serves many of them."""

_KEY = "tierstore"
_MAX_DIM = (1 << 62) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec:
    """A rectangular chunk of a tensor that a rank writes.

    Attributes:
        name: The tensor's name in the state.
        dtype: Its true dtype, a name of `DTYPES`.
        shape: The chunk's shape.
        global_shape: The whole tensor's shape.
        offsets: Where the chunk begins in the whole tensor, per axis.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (DTYPES.get(self.dtype) or dtype_named(self.dtype)).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a chunk lies.

    Attributes:
        spec: The chunk.
        begin: Its first byte in the file, absolute.
        end: One past its last byte.
        key: Its name in the header: the tensor's, but for a second chunk of the same tensor in one shard.
    """

    spec: ChunkSpec
    begin: int
    end: int
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The layout of a shard.

    Attributes:
        header: The file's first bytes, up to the data section.
        placements: In the order in which they lie in the file.
        nbytes: The length of the whole file, in bytes.
        aliases: Further names of stored tensors: alias to stored name.
    """

    header: bytes
    placements: tuple[Placement, ...]
    nbytes: int
    aliases: Mapping[str, str] = field(default_factory=dict)


def plan_shard(
    specs: Sequence[ChunkSpec],
    *,
    aliases: Mapping[str, str] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> ShardPlan:
    """Plans a shard's layout; deterministic in its arguments up to the order of `specs`.

    Tensors that fill whole blocks come first; the others are sorted by item size, largest first, so that each begins at a multiple of
    its item size without gaps (which safetensors forbids); within an item size the small ones come first and together; then by name
    and offsets.

    Args:
        specs: The chunks.
        aliases: Further names of tensors in `specs` (tied weights): alias to stored name.
        facts: JSON values for the header's ``tierstore`` key.

    Raises:
        UsageError: A chunk lies outside its tensor, names collide, or the header would be too long.
    """
    aliases = dict(aliases or {})
    for spec in specs:
        _check_spec(spec)
    ordered = sorted(specs, key=_order)
    names = _check_chunks(specs)
    for alias, name in aliases.items():
        if name not in names or alias in names:
            raise UsageError(f"alias {alias!r} of {name!r} collides or names no tensor of this shard", hint="each name is stored once")
    keys = _keys(ordered, names | aliases.keys())
    sizes = [spec.nbytes for spec in ordered]
    rows = [(key, *stored_as(DTYPES[spec.dtype], spec.shape), size) for key, spec, size in zip(keys, ordered, sizes, strict=True)]
    metadata = _metadata(keys, ordered, aliases, facts or {})
    header = encode_header(rows, metadata, BLOCK_NBYTES if sum(sizes) >= BLOCK_ALIGNED_FROM_NBYTES else DATA_ALIGNMENT)
    placements = []
    at = len(header)
    for key, spec, size in zip(keys, ordered, sizes, strict=True):
        placements.append(Placement(spec=spec, begin=at, end=at + size, key=key))
        at += size
    return ShardPlan(header=header, placements=tuple(placements), nbytes=at, aliases=MappingProxyType(aliases))


def _check_chunks(specs: Sequence[ChunkSpec]) -> set[str]:
    known: dict[str, ChunkSpec] = {}
    places = set()
    for spec in specs:
        first = known.setdefault(spec.name, spec)
        if (first.dtype, first.global_shape) != (spec.dtype, spec.global_shape) or (spec.name, spec.offsets) in places:
            raise UsageError(f"tensor {spec.name!r}: two chunks have the same place, or another dtype or global shape")
        places.add((spec.name, spec.offsets))
    return set(known)


def _order(spec: ChunkSpec) -> tuple[int, int, bool, bytes, tuple[int, ...]]:
    nbytes = spec.nbytes
    name = spec.name.encode("utf-8", "surrogatepass")
    if nbytes and nbytes % BLOCK_NBYTES == 0:
        return 0, 0, False, name, spec.offsets
    return 1, -DTYPES[spec.dtype].itemsize, nbytes > SMALL_NBYTES, name, spec.offsets


def _check_spec(spec: ChunkSpec) -> None:
    if spec.dtype not in DTYPES:
        dtype_named(spec.dtype)
        raise UsageError(f"tensor {spec.name!r}: write the dtype without its prefix, not {spec.dtype!r}")
    shape, whole, offsets = spec.shape, spec.global_shape, spec.offsets
    if not len(shape) == len(offsets) == len(whole) < MAX_NDIM:
        raise UsageError(f"tensor {spec.name!r}: shape {shape}, offsets {offsets} and global shape {whole} don't fit")
    for size, offset, limit in zip(shape, offsets, whole, strict=True):
        if size < 0 or offset < 0 or not offset + size <= limit <= _MAX_DIM:
            raise UsageError(f"tensor {spec.name!r}: a chunk {shape} at {offsets} lies outside the shape {whole}")


def _keys(ordered: Sequence[ChunkSpec], names: set[str]) -> list[str]:
    # A second chunk of the same tensor in one shard needs a key of its own; the first one keeps the tensor's name.
    taken: set[str] = set()
    keys = []
    for spec in ordered:
        key = spec.name
        while key in taken or (key != spec.name and key in names):
            key = f"{key}@{','.join(map(str, spec.offsets))}"
        taken.add(key)
        keys.append(key)
    return keys


def _metadata(keys: Sequence[str], ordered: Sequence[ChunkSpec], aliases: Mapping[str, str], facts: Mapping[str, Any]) -> dict[str, str]:
    own: dict[str, Any] = {"format_version": FORMAT_VERSION, "facts": plain_json(facts, "facts")}
    pairs = list(zip(keys, ordered, strict=True))
    own["dtypes"] = {key: spec.dtype for key, spec in pairs if DTYPES[spec.dtype].safetensors is None}
    own["shapes"] = {key: list(spec.global_shape) for key, spec in pairs if spec.shape != spec.global_shape}
    own["offsets"] = {key: list(spec.offsets) for key, spec in pairs if any(spec.offsets)}
    own["names"] = {key: spec.name for key, spec in pairs if key != spec.name}
    own["aliases"] = dict(aliases)
    # DCP's reader takes the offsets from DCP_SHARDING_INFO, which must then name every key with one offset per stored axis.
    saved = {key: {"saved_offsets": [*spec.offsets, *([] if DTYPES[spec.dtype].safetensors else [0])]} for key, spec in pairs}
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps(saved, separators=(",", ":")),
        _KEY: json.dumps(own, separators=(",", ":"), allow_nan=False),
    }


def tensor_entries(plan: ShardPlan, file: str) -> tuple[TensorEntry, ...]:
    """What the routing index says of a planned shard that is stored as `file`: one entry per name, aliases included."""
    found: dict[str, list[Placement]] = {}
    for placement in plan.placements:
        found.setdefault(placement.spec.name, []).append(placement)
    names = [(name, name) for name in found] + list(plan.aliases.items())
    return tuple(
        TensorEntry(
            name=shown,
            dtype=found[name][0].spec.dtype,
            shape=found[name][0].spec.global_shape,
            extents=tuple(Extent(file=file, begin=p.begin, end=p.end, offsets=p.spec.offsets, sizes=p.spec.shape) for p in found[name]),
        )
        for shown, name in names
    )


def shard_entries(header: ShardHeader, file: str) -> tuple[TensorEntry, ...]:
    """What a shard says of itself, read back from its header: the index of a lost or foreign checkpoint can be rebuilt from this.

    A file without our metadata key is read as whole tensors.

    Raises:
        FormatError: The metadata contradicts the header, or a tensor has a dtype that no torch dtype stores.
        VersionError: Written by a newer major version.
    """
    own = _own_metadata(header)
    found: dict[str, tuple[str, tuple[int, ...], list[Extent]]] = {}
    for key, tensor in header.tensors.items():
        dtype, shape = _true_dtype(key, tensor, own["dtypes"])
        offsets = _dims(own["offsets"].get(key, [0] * len(shape)), key)
        whole = _dims(own["shapes"].get(key, list(shape)), key)
        name = own["names"].get(key, key)
        if not isinstance(name, str) or len(offsets) != len(shape) or len(whole) != len(shape):
            raise FormatError(f"tensor {key[:200]!r}: the shard's metadata contradicts its shape {shape}", hint="run `tierstore verify`")
        if any(o + n > g for o, n, g in zip(offsets, shape, whole, strict=True)):
            raise FormatError(f"tensor {key[:200]!r}: the chunk lies outside its tensor's shape {whole}", hint="run `tierstore verify`")
        extent = Extent(file=file, begin=tensor.begin, end=tensor.end, offsets=offsets, sizes=shape)
        known_dtype, known_shape, extents = found.setdefault(name, (dtype, whole, []))
        if (known_dtype, known_shape) != (dtype, whole):
            raise FormatError(f"tensor {name[:200]!r}: two chunks disagree about its dtype or shape", hint="run `tierstore verify`")
        extents.append(extent)
    entries = {name: TensorEntry(name=name, dtype=d, shape=s, extents=tuple(extents)) for name, (d, s, extents) in found.items()}
    for alias, name in own["aliases"].items():
        if not isinstance(name, str) or name not in entries or alias in entries:
            raise FormatError(f"alias {alias[:200]!r} collides or names no tensor of the shard", hint="run `tierstore verify`")
        known = entries[name]
        entries[alias] = TensorEntry(name=alias, dtype=known.dtype, shape=known.shape, extents=known.extents)
    return tuple(entries.values())


def _own_metadata(header: ShardHeader) -> dict[str, dict[str, Any]]:
    tables = ("dtypes", "shapes", "offsets", "names", "aliases")
    text = header.metadata.get(_KEY)
    if text is None:
        return {table: {} for table in tables}
    body = load_json(text.encode("utf-8", "surrogatepass"), "shard metadata", max_nbytes=MAX_HEADER_NBYTES)
    if not isinstance(body, dict):
        raise FormatError("the shard's own metadata is no JSON object", hint="run `tierstore verify`")
    check_version(body.get("format_version"), "shard metadata")
    found = {table: body.get(table, {}) for table in tables}
    if bad := [table for table, value in found.items() if not isinstance(value, dict)]:
        raise FormatError(f"the shard's own metadata has malformed tables: {', '.join(bad)}", hint="run `tierstore verify`")
    return found


def _true_dtype(key: str, tensor: HeaderTensor, dtypes: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    if key in dtypes:
        dtype = DTYPES.get(dtypes[key]) if isinstance(dtypes[key], str) else None
        if dtype is None or tensor.dtype != "U8" or tensor.shape[-1:] != (dtype.itemsize,):
            raise FormatError(f"tensor {key[:200]!r} can't be raw bytes of dtype {str(dtypes[key])[:40]!r}", hint="run `tierstore verify`")
        return dtype.name, tensor.shape[:-1]
    known = SAFETENSORS_NAMES.get(tensor.dtype)
    if known is None:
        raise FormatError(f"tensor {key[:200]!r} has dtype {tensor.dtype}, which no torch dtype stores", hint="convert the file first")
    return known.name, tensor.shape


def _dims(value: object, key: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_NDIM or not all(type(n) is int and 0 <= n <= _MAX_DIM for n in value):
        raise FormatError(f"tensor {key[:200]!r}: {str(value)[:100]} are no sizes", hint="run `tierstore verify`")
    return tuple(value)
