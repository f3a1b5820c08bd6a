"""The routing index on disk: ``index.safetensors``, one column a tensor; see docs/design/format.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

import numpy as np

from tierstore.errors import FormatError
from tierstore.format.columns import Array, decode_columns, encode_columns
from tierstore.format.digest import DIGEST_NBYTES, Buffer
from tierstore.format.document import FORMAT_VERSION, check_version, load_json
from tierstore.format.header import MAX_HEADER_NBYTES
from tierstore.format.index_check import check_columns
from tierstore.format.index_table import Index, IndexColumns, Ints

__all__ = ["decode_index", "encode_index", "index_columns", "index_from_columns", "index_metadata"]

_METADATA_KEY = "tierstore"
_FORMAT = "tierstore.index"

LAYOUT: Mapping[str, tuple[str, int]] = {
    "names": ("U8", 0),
    "name_starts": ("I64", 0),
    "dtype_codes": ("U16", 0),
    "shapes": ("I64", 0),
    "shape_starts": ("I64", 0),
    "extent_starts": ("I64", 0),
    "box_starts": ("I64", 0),
    "files": ("U32", 0),
    "begins": ("I64", 0),
    "ends": ("I64", 0),
    "offsets": ("I64", 0),
    "sizes": ("I64", 0),
    "file_names": ("U8", 0),
    "file_name_starts": ("I64", 0),
    "file_nbytes": ("I64", 0),
    "block_starts": ("I64", 0),
    "digests": ("U8", DIGEST_NBYTES),
}
"""The columns: safetensors dtype, and the row length of two-dimensional ones."""


def encode_index(index: Index, metadata: Mapping[str, Any] | None = None) -> bytes:
    """Writes an index as a safetensors file.

    Args:
        index: The index.
        metadata: JSON values to keep with it (which checkpoint it belongs to).
    """
    return encode_columns(index_columns(index), index_metadata(index, _FORMAT, dict(metadata or {})))


def decode_index(data: Buffer) -> tuple[Index, dict[str, Any]]:
    """Reads an index without copying its columns (they are views of `data`, which must not change); returns it with its metadata.

    Raises:
        FormatError: Malformed, foreign, inconsistent, or it names a file outside its folder.
        VersionError: Written by a newer major version.
    """
    columns, metadata = decode_columns(data, LAYOUT, "index")
    return index_from_columns(columns, metadata, _FORMAT)


def index_columns(index: Index) -> dict[str, Array]:
    """The index as columns to be written."""
    names = [name.encode("utf-8") for name in index.file_names]
    columns: dict[str, Array] = {name: getattr(index.columns, name) for name in LAYOUT if not name.startswith("file_name")}
    columns["file_names"] = np.frombuffer(b"".join(names), dtype=np.uint8)
    columns["file_name_starts"] = np.cumsum([0, *map(len, names)], dtype=np.int64)
    return columns


def index_metadata(index: Index, kind: str, metadata: dict[str, Any]) -> dict[str, str]:
    """The header's ``__metadata__``: version, block size, dtype table, and what the caller keeps there."""
    body = {
        "format": kind,
        "format_version": FORMAT_VERSION,
        "block_nbytes": index.block_nbytes,
        "dtypes": [list(entry) for entry in index.columns.dtypes],
        "metadata": metadata,
    }
    return {_METADATA_KEY: json.dumps(body, separators=(",", ":"), allow_nan=False)}


def index_from_columns(columns: Mapping[str, Array], metadata: Mapping[str, str], kind: str) -> tuple[Index, dict[str, Any]]:
    """Checks decoded columns and makes the index of them; returns it with the caller's own metadata.

    Raises:
        FormatError: Anything is inconsistent.
        VersionError: Written by a newer major version.
    """
    text = metadata.get(_METADATA_KEY)
    if text is None:
        raise FormatError(f"{kind}: the header has no 'tierstore' metadata", hint="the file is foreign or damaged")
    body = load_json(text.encode("utf-8", "surrogatepass"), kind, max_nbytes=MAX_HEADER_NBYTES)
    if not isinstance(body, dict) or body.get("format") != kind:
        raise FormatError(f"{kind}: the header says the file is something else", hint="the file is foreign, damaged or misplaced")
    check_version(body.get("format_version"), kind)
    block_nbytes, dtypes, own = body.get("block_nbytes"), body.get("dtypes"), body.get("metadata")
    if type(block_nbytes) is not int or not isinstance(own, dict) or not isinstance(dtypes, list):
        raise FormatError(f"{kind}: the header's 'tierstore' metadata is malformed", hint="the file is foreign or damaged")
    if not all(isinstance(d, list) and len(d) == 2 and isinstance(d[0], str) and type(d[1]) is int for d in dtypes):
        raise FormatError(f"{kind}: the dtype table is malformed", hint="the file is foreign or damaged")
    made = IndexColumns(
        **{name: cast(Any, columns[name]) for name in LAYOUT if not name.startswith("file_name")},
        dtypes=tuple((name, size) for name, size in dtypes),
        file_names=_file_names(columns, kind),
    )
    check_columns(made, block_nbytes)
    return Index(columns=made, block_nbytes=block_nbytes), own


def _file_names(columns: Mapping[str, Array], kind: str) -> tuple[str, ...]:
    blob = columns["file_names"].tobytes()
    starts = cast(Ints, columns["file_name_starts"])
    if not len(starts) or starts[0] != 0 or starts[-1] != len(blob) or bool((starts[1:] < starts[:-1]).any()):
        raise FormatError(f"{kind}: the column 'file_name_starts' does not cut the file names", hint="the file is foreign or damaged")
    cuts = starts.tolist()
    try:
        return tuple(str(blob[begin:end], "utf-8") for begin, end in pairwise(cuts))
    except UnicodeDecodeError as error:
        raise FormatError(f"{kind}: a file name is not UTF-8", hint="the file is foreign or damaged") from error
