"""An index as plain columns, one safetensors tensor each: what part records hold, and how indexes were written at first (format.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from tierstore.errors import FormatError
from tierstore.format.columns import Array
from tierstore.format.digest import DIGEST_NBYTES
from tierstore.format.document import FORMAT_VERSION, check_version, load_json
from tierstore.format.header import MAX_HEADER_NBYTES
from tierstore.format.index_check import check_columns
from tierstore.format.index_groups import cut_names
from tierstore.format.index_table import Index, IndexColumns, Ints

__all__ = ["LAYOUT", "file_names_of", "index_body", "index_columns", "index_from_columns", "index_metadata"]

_METADATA_KEY = "tierstore"

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
    block_nbytes, dtypes, own = index_body(metadata, kind)
    made = IndexColumns(
        **{name: cast(Any, columns[name]) for name in LAYOUT if not name.startswith("file_name")},
        dtypes=dtypes,
        file_names=file_names_of(columns),
    )
    check_columns(made, block_nbytes)
    return Index(columns=made, block_nbytes=block_nbytes), own


def index_body(metadata: Mapping[str, str], kind: str) -> tuple[int, tuple[tuple[str, int], ...], dict[str, Any]]:
    """Reads what `index_metadata` wrote: bytes per block, the dtype table, and the caller's own metadata.

    Raises:
        FormatError: Malformed or of another kind.
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
    return block_nbytes, tuple((name, size) for name, size in dtypes), own


def file_names_of(columns: Mapping[str, Array]) -> tuple[str, ...]:
    """The files' names, from the columns that hold them.

    Raises:
        FormatError: They are not cut, or no UTF-8.
    """
    try:
        return tuple(
            str(name, "utf-8") for name in cut_names(columns["file_names"], cast(Ints, columns["file_name_starts"]), "file_name_starts")
        )
    except UnicodeDecodeError as error:
        raise FormatError("index: a file name is not UTF-8", hint="the file is foreign or damaged") from error
