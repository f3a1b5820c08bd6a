"""``index.safetensors``: written with its head first, and read as a whole or by its head alone; see docs/design/format.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from tierstore.errors import FormatError
from tierstore.format.columns import Array, decode_columns, encode_columns
from tierstore.format.digest import DIGEST_NBYTES, Buffer
from tierstore.format.header import HeaderTensor, ShardHeader, parse_header
from tierstore.format.index_check import check_columns, check_files
from tierstore.format.index_codec import LAYOUT, file_names_of, index_body, index_columns, index_from_columns, index_metadata
from tierstore.format.index_groups import GROUP_NBYTES, HEAD_LAYOUT, Groups, gather_groups, grouped_columns, groups_from_columns
from tierstore.format.index_table import Index, IndexColumns, Ints

__all__ = ["IndexHead", "decode_head", "decode_index", "encode_index", "head_nbytes"]

_FORMAT = "tierstore.index"
_GROUPS = "tierstore:groups"
_DIGESTS = "tierstore:digests"
_HINT = "the index is foreign or damaged: run `tierstore verify`"
_FILE_COLUMNS = ("file_name_starts", "file_nbytes", "block_starts", "file_names")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHead:
    """What the beginning of an index says: the files, and where each group of tensors and each file's block digests lie.

    Attributes:
        files: The columns of files and dtypes; those of tensors and digests are empty.
        groups: The groups of tensors.
        block_nbytes: Bytes per block of the files' digests.
        digests_begin: The first block digest's byte in the file.
        metadata: What was kept with the index.
    """

    files: IndexColumns
    groups: Groups
    block_nbytes: int
    digests_begin: int
    metadata: Mapping[str, Any]

    def digests_extent(self, number: int) -> tuple[int, int]:
        """Where the block digests of a file lie in the index, half-open, in bytes."""
        first, last = (int(n) for n in self.files.block_starts[number : number + 2])
        return self.digests_begin + DIGEST_NBYTES * first, self.digests_begin + DIGEST_NBYTES * last


def encode_index(index: Index, metadata: Mapping[str, Any] | None = None, *, group_nbytes: int = GROUP_NBYTES) -> bytes:
    """Writes an index as a safetensors file.

    Args:
        index: The index.
        metadata: JSON values to keep with it (which checkpoint it belongs to).
        group_nbytes: How long a group of tensors is at least, in bytes, where there are more.
    """
    plain = index_columns(index)
    head, groups = grouped_columns(index, group_nbytes)
    head.update({name: plain[name] for name in _FILE_COLUMNS})
    ordered = {name: head[name] for name in HEAD_LAYOUT}
    # The header is aligned, and so the groups are: each begins at a multiple of 8.
    ordered["padding"] = np.zeros(-sum(column.nbytes for column in ordered.values()) % 8, np.uint8)
    ordered |= {**groups, "digests": plain["digests"]}
    return encode_columns(ordered, index_metadata(index, _FORMAT, dict(metadata or {})), ordered=True)


def head_nbytes(data: Buffer) -> int | None:
    """How long the head of an index is, in bytes; None for one without (written as plain columns).

    Args:
        data: The whole file.

    Raises:
        FormatError: It is no safetensors file.
    """
    groups = parse_header(memoryview(data), len(data)).tensors.get(_GROUPS)
    return groups.begin if groups is not None else None


def decode_head(data: Buffer, file_nbytes: int) -> IndexHead:
    """Reads the head of an index.

    Args:
        data: The file's beginning, at least the whole head.
        file_nbytes: The length of the whole file, in bytes.

    Raises:
        FormatError: Malformed, foreign, inconsistent, or it names a file outside its folder.
        VersionError: Written by a newer major version.
    """
    header = parse_header(memoryview(data), file_nbytes)
    block_nbytes, dtypes, own = index_body(header.metadata, _FORMAT)
    columns, _ = decode_columns(data, HEAD_LAYOUT, "index", header=header)
    groups, digests = _place(header, _GROUPS), _place(header, _DIGESTS)
    files = _columns(_nothing(), columns, dtypes, np.zeros((0, DIGEST_NBYTES), np.uint8))
    check_files(files, block_nbytes, (digests.end - digests.begin) // DIGEST_NBYTES)
    return IndexHead(
        files=files,
        groups=groups_from_columns(columns, groups.begin, groups.end - groups.begin),
        block_nbytes=block_nbytes,
        digests_begin=digests.begin,
        metadata=own,
    )


def decode_index(data: Buffer) -> tuple[Index, dict[str, Any]]:
    """Reads a whole index; returns it with its metadata. `data` must not change: some columns are views of it.

    Raises:
        FormatError: Malformed, foreign, inconsistent, or it names a file outside its folder.
        VersionError: Written by a newer major version.
    """
    view = memoryview(data).cast("B").toreadonly()
    header = parse_header(view, view.nbytes)
    if _GROUPS not in header.tensors:
        return index_from_columns(*decode_columns(view, LAYOUT, "index", header=header), _FORMAT)
    block_nbytes, dtypes, own = index_body(header.metadata, _FORMAT)
    columns, _ = decode_columns(view, {**HEAD_LAYOUT, "digests": LAYOUT["digests"]}, "index", header=header)
    place = _place(header, _GROUPS)
    groups = groups_from_columns(columns, place.begin, place.end - place.begin)
    made = _columns(gather_groups(groups, view[place.begin : place.end]), columns, dtypes, columns["digests"])
    check_columns(made, block_nbytes)
    return Index(columns=made, block_nbytes=block_nbytes), own


def _place(header: ShardHeader, name: str) -> HeaderTensor:
    found = header.tensors.get(name)
    if found is None or found.dtype != "U8":
        raise FormatError(f"index: the column {name!r} is missing or has another dtype", hint=_HINT)
    if len(found.shape) != (1 if name == _GROUPS else 2) or (name == _DIGESTS and found.shape[1] != DIGEST_NBYTES):
        raise FormatError(f"index: the column {name!r} has the shape {found.shape}", hint=_HINT)
    return found


def _nothing() -> dict[str, Any]:
    """The columns of an index without tensors."""
    starts: Ints = np.zeros(1, np.int64)
    empty: Ints = np.zeros(0, np.int64)
    names = dict.fromkeys(("name_starts", "shape_starts", "extent_starts", "box_starts"), starts)
    numbers = dict.fromkeys(("shapes", "begins", "ends", "offsets", "sizes"), empty)
    return {**names, **numbers, "names": empty.astype(np.uint8), "dtype_codes": empty.astype(np.uint16), "files": empty.astype(np.uint32)}


def _columns(rows: Mapping[str, Any], files: Mapping[str, Array], dtypes: tuple[tuple[str, int], ...], digests: Array) -> IndexColumns:
    return IndexColumns(
        **rows,
        file_nbytes=cast(Ints, files["file_nbytes"]),
        block_starts=cast(Ints, files["block_starts"]),
        digests=cast(Any, digests),
        dtypes=dtypes,
        file_names=file_names_of(files),
    )
