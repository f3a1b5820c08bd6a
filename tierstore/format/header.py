"""The safetensors header: parsed from outside bytes, bounded and total; and written, padded for alignment."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.errors import FormatError, UsageError
from tierstore.format.document import load_json
from tierstore.format.dtypes import SAFETENSORS_BITS

__all__ = ["MAX_HEADER_NBYTES", "MAX_NDIM", "HeaderTensor", "ShardHeader", "encode_header", "header_nbytes", "parse_header"]

MAX_HEADER_NBYTES = 100_000_000
"""safetensors refuses longer headers (``MAX_HEADER_SIZE`` in its source)."""

MAX_NDIM = 64
"""torch and numpy have no tensors of more axes."""

_MAX_DIM = (1 << 62) - 1
_LENGTH = struct.Struct("<Q")
_HINT = "the file is truncated, damaged or no safetensors file: run `tierstore verify`"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderTensor:
    """A tensor as a safetensors header describes it.

    Attributes:
        dtype: safetensors' name, e.g. ``BF16``.
        shape: As stored (raw dtypes have one more trailing axis).
        begin: First byte in the file (absolute, not relative to the data section).
        end: One past its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """A parsed header.

    Attributes:
        tensors: By key, in the order of the header.
        metadata: The header's ``__metadata__`` (text to text).
        data_start: Where the data section begins, in bytes from the file's beginning.
    """

    tensors: Mapping[str, HeaderTensor]
    metadata: Mapping[str, str]
    data_start: int


def header_nbytes(first8: bytes, file_nbytes: int) -> int:
    """How many bytes of a file its header takes, the 8 length bytes included, from the file's first 8 bytes.

    Raises:
        FormatError: The file can't be a safetensors file of `file_nbytes` bytes.
    """
    if len(first8) < 8 or file_nbytes < 8:
        raise FormatError(
            f"a safetensors file has at least 8 bytes; this one has {min(len(first8) or file_nbytes, file_nbytes)}", hint=_HINT
        )
    length: int = _LENGTH.unpack_from(first8)[0]
    if length > MAX_HEADER_NBYTES:
        raise FormatError(f"the header claims {length:,} bytes; {MAX_HEADER_NBYTES:,} are allowed", hint=_HINT)
    if length + 8 > file_nbytes:
        raise FormatError(f"the header claims {length:,} bytes; the file has {file_nbytes:,}", hint=_HINT)
    if length < 2:
        raise FormatError(f"the header claims {length} bytes; '{{}}' has 2", hint=_HINT)
    return length + 8


def parse_header(prefix: bytes | bytearray | memoryview, file_nbytes: int) -> ShardHeader:
    """Parses the header of a safetensors file and checks every claim it makes.

    Args:
        prefix: The file's first bytes, at least the whole header; more does no harm.
        file_nbytes: The length of the whole file, in bytes.

    Raises:
        FormatError: Anything that safetensors itself would refuse, and everything absurd; names the problem and the tensor.
    """
    data_start = header_nbytes(bytes(prefix[:8]), file_nbytes)
    if len(prefix) < data_start:
        raise FormatError(f"the header has {data_start:,} bytes, but only {len(prefix):,} were given", hint=_HINT)
    raw = bytes(prefix[8:data_start])
    if not raw.startswith(b"{"):
        raise FormatError("the header does not begin with '{'", hint=_HINT)
    body = load_json(raw, "safetensors header", max_nbytes=MAX_HEADER_NBYTES)
    if not isinstance(body, dict):
        raise FormatError("the header is no JSON object", hint=_HINT)
    metadata = body.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError("the header's __metadata__ does not map text to text", hint=_HINT)
    tensors = {key: _tensor(key, entry, data_start, file_nbytes) for key, entry in body.items()}
    _check_cover(tensors, data_start, file_nbytes)
    return ShardHeader(tensors=tensors, metadata=metadata, data_start=data_start)


def _tensor(key: str, entry: Any, data_start: int, file_nbytes: int) -> HeaderTensor:
    name = key[:200]
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"tensor {name!r} has no dtype, shape and data_offsets, or more than these", hint=_HINT)
    bits = SAFETENSORS_BITS.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if bits is None:
        raise FormatError(f"tensor {name!r} has the unknown dtype {str(entry['dtype'])[:40]!r}", hint=_HINT)
    shape = entry["shape"]
    if not isinstance(shape, list) or len(shape) > MAX_NDIM or not all(type(n) is int and 0 <= n <= _MAX_DIM for n in shape):
        raise FormatError(f"tensor {name!r} has an absurd shape {str(shape)[:100]}", hint=_HINT)
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise FormatError(f"tensor {name!r} has malformed data_offsets {str(offsets)[:100]}", hint=_HINT)
    begin, end = data_start + offsets[0], data_start + offsets[1]
    if not data_start <= begin <= end <= file_nbytes:
        raise FormatError(
            f"tensor {name!r} lies at data offsets {offsets[0]} to {offsets[1]}, outside the {file_nbytes - data_start:,} bytes of data",
            hint=_HINT,
        )
    total_bits = bits
    for n in shape:  # Python's integers don't overflow
        total_bits *= n
    if total_bits != 8 * (end - begin):
        raise FormatError(
            f"tensor {name!r} of dtype {entry['dtype']} and shape {shape} can't have {end - begin:,} bytes",
            hint=_HINT,
        )
    return HeaderTensor(dtype=entry["dtype"], shape=tuple(shape), begin=begin, end=end)


def _check_cover(tensors: Mapping[str, HeaderTensor], data_start: int, file_nbytes: int) -> None:
    # safetensors' own rule: sorted by place, each tensor begins where the one before it ends, and the last one ends the file.
    at, before = data_start, ""
    for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != at:
            kind = "overlap" if tensor.begin < at else "leave a hole between them"
            raise FormatError(f"tensors {before[:200]!r} and {key[:200]!r} {kind} at byte {min(at, tensor.begin)}", hint=_HINT)
        at, before = tensor.end, key
    if at != file_nbytes:
        raise FormatError(f"the tensors end at byte {at:,}, but the file has {file_nbytes:,} bytes", hint=_HINT)


def encode_header(tensors: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str], alignment: int) -> bytes:
    """Writes a header whose data section begins at a multiple of `alignment` bytes (padded with spaces, as safetensors allows).

    Args:
        tensors: (key, safetensors dtype, stored shape, nbytes), in the order in which they lie in the file, without gaps.
        metadata: The ``__metadata__``.
        alignment: In bytes.

    Raises:
        UsageError: The header would be longer than safetensors allows, or a key stands there twice or is no valid text.
    """
    body: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for key, dtype, shape, nbytes in tensors:
        if key in body:
            raise UsageError(f"the tensor name {key!r} can't be used twice in a shard ('__metadata__' is reserved)", hint="rename it")
        body[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    try:
        raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"a tensor name is no valid Unicode: {error.reason}", hint="remove lone surrogates from the state's keys"
        ) from error
    total = -(-(8 + len(raw)) // alignment) * alignment
    if total - 8 > MAX_HEADER_NBYTES:
        raise UsageError(
            f"a shard's header would have {total:,} bytes for {len(tensors):,} tensors; safetensors allows {MAX_HEADER_NBYTES:,}",
            hint="spread the state over more ranks, or use shorter names",
        )
    return _LENGTH.pack(total - 8) + raw + b" " * (total - 8 - len(raw))
