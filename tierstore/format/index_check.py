"""Proves that an index's columns are consistent before anything trusts them: vectorised, a few passes over each column."""

from __future__ import annotations

import re

import numpy as np

from tierstore.errors import FormatError
from tierstore.format.digest import DIGEST_NBYTES
from tierstore.format.dtypes import DTYPES
from tierstore.format.header import MAX_NDIM
from tierstore.format.index_table import IndexColumns, Ints
from tierstore.names import check_relative

__all__ = ["MAX_BLOCK_NBYTES", "check_columns", "check_files", "check_rows"]

MAX_BLOCK_NBYTES = 1 << 30
_MAX = 1 << 62  # products and sums below it can't overflow int64 unnoticed
_HINT = "the index is foreign or damaged: run `tierstore verify`"
_PLAIN_FILE = re.compile(r"[A-Za-z0-9_=+-][A-Za-z0-9._=+-]{0,199}")
_DTYPE_NAME = re.compile(r"[a-z][a-z0-9_]{0,59}")


def check_columns(columns: IndexColumns, block_nbytes: int) -> None:
    """Checks every claim of an index's columns but the order of the names (`Index.check_order`) and coverage (`check_coverage`).

    Raises:
        FormatError: Names the column and the first bad row.
    """
    check_files(columns, block_nbytes, len(columns.digests))
    if columns.digests.ndim != 2 or columns.digests.shape[1] != DIGEST_NBYTES:
        raise FormatError(f"index: digests of shape {columns.digests.shape}", hint=_HINT)
    check_rows(columns)


def check_files(columns: IndexColumns, block_nbytes: int, blocks: int) -> None:
    """Checks the dtypes, the files, their sizes, and that they have `blocks` digests together (which need not be there).

    Raises:
        FormatError: Names the column and the first bad row.
    """
    if not 1 <= block_nbytes <= MAX_BLOCK_NBYTES:
        raise FormatError(f"index: blocks of {block_nbytes} bytes", hint=_HINT)
    _check_dtypes(columns)
    _check_files(columns, block_nbytes, blocks)


def check_rows(columns: IndexColumns) -> None:
    """Checks the tensors and extents, against files and dtypes that are checked already.

    Raises:
        FormatError: Names the column and the first bad row.
    """
    c = columns
    n, m = len(c.dtype_codes), len(c.begins)
    _refuse_first(c.dtype_codes >= len(c.dtypes), "its dtype is not in the table")
    _check_starts(c.name_starts, n, len(c.names), "name_starts")
    _check_starts(c.shape_starts, n, len(c.shapes), "shape_starts")
    _check_starts(c.extent_starts, n, m, "extent_starts")
    _check_starts(c.box_starts, n, len(c.offsets), "box_starts")
    for name, column in (("files", c.files), ("ends", c.ends)):
        if len(column) != m:
            raise FormatError(f"index: the column {name!r} has {len(column)} rows, not {m}", hint=_HINT)
    if len(c.sizes) != len(c.offsets):
        raise FormatError("index: the columns 'offsets' and 'sizes' differ in length", hint=_HINT)
    _check_names(c)
    _check_extents(c, _check_shapes(c))


def _refuse_first(bad: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], problem: str) -> None:
    if bad.any():
        raise FormatError(f"index: row {int(bad.argmax())}: {problem}", hint=_HINT)


def _check_starts(starts: Ints, rows: int, total: int, name: str) -> None:
    if len(starts) != rows + 1 or starts[0] != 0 or starts[-1] != total or bool((starts[1:] < starts[:-1]).any()):
        raise FormatError(f"index: the column {name!r} does not cut {total} values into {rows} rows", hint=_HINT)


def _check_dtypes(c: IndexColumns) -> None:
    for name, itemsize in c.dtypes:
        known = DTYPES.get(name)
        if not _DTYPE_NAME.fullmatch(name) or not 1 <= itemsize <= 64 or (known is not None and known.itemsize != itemsize):
            raise FormatError(f"index: {name[:60]!r} with {itemsize} bytes per element is no dtype", hint=_HINT)
    if len({name for name, _ in c.dtypes}) != len(c.dtypes):
        raise FormatError("index: a dtype stands twice in the table", hint=_HINT)


def _check_files(c: IndexColumns, block_nbytes: int, blocks: int) -> None:
    f = len(c.file_names)
    for name in c.file_names:
        if not _PLAIN_FILE.fullmatch(name):  # the rule below is slower, and almost every name is plain
            check_relative(name)
    if len(set(c.file_names)) != f:
        raise FormatError("index: a file stands there twice", hint=_HINT)
    if len(c.file_nbytes) != f:
        raise FormatError(f"index: the column 'file_nbytes' has {len(c.file_nbytes)} rows, not {f}", hint=_HINT)
    _check_starts(c.block_starts, f, blocks, "block_starts")
    _refuse_first((c.file_nbytes < 0) | (c.file_nbytes >= _MAX), "a file of absurd size")
    wanted = (c.file_nbytes + (block_nbytes - 1)) // block_nbytes
    _refuse_first(np.diff(c.block_starts) != wanted, "a file's length and its number of blocks don't fit")


def _check_names(c: IndexColumns) -> None:
    try:
        str(c.names.data, "utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"index: tensor names are not UTF-8 at byte {error.start}", hint=_HINT) from error
    begins = c.name_starts[:-1]
    inside = begins[begins < len(c.names)]
    _refuse_first((c.names[inside] & 0xC0) == 0x80, "a tensor name begins inside a character")


def _check_shapes(c: IndexColumns) -> Ints:
    """Returns each tensor's number of axes."""
    ndim = np.diff(c.shape_starts)
    _refuse_first(ndim > MAX_NDIM, "a tensor of too many axes")
    _refuse_first((c.shapes < 0) | (c.shapes >= _MAX), "an absurd shape")
    # The product of all sizes but zeros is bounded, so the products of extents' sizes (never larger) can't wrap around.
    filled = np.flatnonzero(ndim)
    if len(filled):
        volumes = np.multiply.reduceat(np.maximum(c.shapes, 1).astype(np.float64), c.shape_starts[filled])
        itemsizes = np.array([size for _, size in c.dtypes], dtype=np.float64)[c.dtype_codes[filled]]
        _refuse_first(volumes * itemsizes >= float(_MAX >> 1), "a tensor of absurd size")
    counts = np.diff(c.extent_starts)
    _refuse_first(np.diff(c.box_starts) != ndim * counts, "the extents' places don't fit the tensor's axes")
    return ndim


def _check_extents(c: IndexColumns, ndim: Ints) -> None:
    if not len(c.begins):
        return
    # Bounds by minimum and maximum first: cheaper than a mask, and the sums below can't wrap around then.
    for name in ("begins", "ends", "offsets", "sizes"):
        column = getattr(c, name)
        if len(column) and not (column.min() >= 0 and column.max() < _MAX):
            _refuse_first((column < 0) | (column >= _MAX), f"{name} out of range: an extent outside its file or outside its tensor")
    if int(c.files.max()) >= len(c.file_names):
        _refuse_first(c.files >= len(c.file_names), "an extent in a file that is not listed")
    _refuse_first(c.ends > np.take(c.file_nbytes, c.files), "an extent outside its file")
    counts = np.diff(c.extent_starts)
    extent_ndim = np.repeat(ndim, counts)
    _refuse_first(c.offsets + c.sizes > _tiled_shapes(c, ndim, counts), "an extent outside its tensor")
    starts = np.cumsum(extent_ndim)
    starts -= extent_ndim
    if len(ndim) and int(ndim.min()) > 0:
        lengths: Ints = np.multiply.reduceat(c.sizes, starts)
    else:
        lengths = np.ones(len(c.begins), dtype=np.int64)
        boxed = np.flatnonzero(extent_ndim)
        if len(boxed):
            lengths[boxed] = np.multiply.reduceat(c.sizes, starts[boxed])
    itemsizes = np.array([size for _, size in c.dtypes], dtype=np.int64)
    lengths *= np.repeat(itemsizes[c.dtype_codes], counts)
    _refuse_first(lengths != c.ends - c.begins, "an extent's byte range does not fit its shape and dtype")


def _tiled_shapes(c: IndexColumns, ndim: Ints, counts: Ints) -> Ints:
    """Each tensor's shape once per extent, concatenated: the same layout as `offsets` and `sizes`."""
    if bool((counts == 1).all()):
        return c.shapes
    total = len(c.offsets)
    kind = np.int32 if total < 1 << 31 else np.int64  # half the memory traffic where it suffices
    boxes = np.diff(c.box_starts)
    axis = np.arange(total, dtype=kind)
    axis -= np.repeat(c.box_starts[:-1].astype(kind), boxes)
    axis %= np.repeat(np.maximum(ndim, 1).astype(kind), boxes)
    axis += np.repeat(c.shape_starts[:-1].astype(kind), boxes)
    tiled: Ints = np.take(c.shapes, axis)
    return tiled
