"""Making an index: from entries, or by merging the indexes of all ranks' part records (concatenating columns)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tierstore.errors import IncompleteError, UsageError
from tierstore.format.digest import BLOCK_NBYTES, DIGEST_NBYTES, digest_of
from tierstore.format.dtypes import dtype_named
from tierstore.format.index_check import check_columns
from tierstore.format.index_table import FileEntry, Index, IndexColumns, Ints, TensorEntry

__all__ = ["build_index", "merge_indexes"]


def build_index(tensors: Iterable[TensorEntry], files: Iterable[FileEntry], block_nbytes: int = BLOCK_NBYTES) -> Index:
    """Makes an index of what one rank wrote (or of a whole checkpoint).

    Args:
        tensors: In any order; each name once.
        files: Every file that an extent names, each once.
        block_nbytes: Bytes per block of the files' digests.

    Raises:
        UsageError: A name stands there twice or is no text, a dtype is unknown, or an extent names a file that is not listed.
        FormatError: An extent lies outside its file or its tensor, or a number of digests does not fit a file's length.
    """
    listed = list(files)
    numbers = {file.name: number for number, file in enumerate(listed)}
    try:
        rows = sorted(((tensor.name.encode("utf-8"), tensor) for tensor in tensors), key=lambda row: row[0])
    except UnicodeEncodeError as error:
        raise UsageError(
            f"a tensor name is no valid Unicode: {error.object!r}", hint="remove lone surrogates from the state's keys"
        ) from error
    for (before, _), (name, _) in pairwise(rows):
        if before == name:
            raise UsageError(f"the tensor name {name.decode()!r} stands there twice", hint="each name is stored once")
    entries = [tensor for _, tensor in rows]
    extents = [extent for tensor in entries for extent in tensor.extents]
    if unknown := {extent.file for extent in extents} - numbers.keys():
        raise UsageError(f"extents lie in files that are not listed: {sorted(unknown)[:3]}", hint="list every file with its digests")
    if bad := [t.name for t in entries if any(not len(e.offsets) == len(e.sizes) == len(t.shape) for e in t.extents)]:
        raise UsageError(f"the extents of {bad[0]!r} have another number of axes than its shape", hint="offsets and sizes are per axis")
    dtypes = sorted({dtype_named(tensor.dtype).name for tensor in entries})
    codes = {name: code for code, name in enumerate(dtypes)}
    digests = b"".join(file.block_digests for file in listed)
    if any(len(file.block_digests) % DIGEST_NBYTES for file in listed):
        raise UsageError(f"block digests are {DIGEST_NBYTES} bytes each", hint="use block_digests() of tierstore.format.digest")
    columns = IndexColumns(
        names=np.frombuffer(b"".join(name for name, _ in rows), dtype=np.uint8),
        name_starts=_starts([len(name) for name, _ in rows]),
        dtype_codes=np.array([codes[tensor.dtype] for tensor in entries], dtype=np.uint16),
        shapes=_ints([n for tensor in entries for n in tensor.shape]),
        shape_starts=_starts([len(tensor.shape) for tensor in entries]),
        extent_starts=_starts([len(tensor.extents) for tensor in entries]),
        box_starts=_starts([len(tensor.extents) * len(tensor.shape) for tensor in entries]),
        files=np.array([numbers[extent.file] for extent in extents], dtype=np.uint32),
        begins=_ints([extent.begin for extent in extents]),
        ends=_ints([extent.end for extent in extents]),
        offsets=_ints([n for extent in extents for n in extent.offsets]),
        sizes=_ints([n for extent in extents for n in extent.sizes]),
        file_nbytes=_ints([file.nbytes for file in listed]),
        block_starts=_starts([len(file.block_digests) // DIGEST_NBYTES for file in listed]),
        digests=np.frombuffer(digests, dtype=np.uint8).reshape(-1, DIGEST_NBYTES),
        dtypes=tuple((name, dtype_named(name).itemsize) for name in dtypes),
        file_names=tuple(file.name for file in listed),
    )
    check_columns(columns, block_nbytes)
    return Index(columns=columns, block_nbytes=block_nbytes)


def _ints(values: Sequence[int]) -> Ints:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise UsageError("a size or an offset does not fit 64 bits", hint="shapes, offsets and byte ranges are below 2**62") from error


def _starts(counts: Sequence[int] | Ints) -> Ints:
    made = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=made[1:])
    return made


def merge_indexes(indexes: Sequence[Index], *, labels: Sequence[str] | None = None) -> Index:
    """Merges the indexes of all ranks: files are united, a tensor that several of them name gets all their extents.

    Columns are concatenated and gathered; the cost is that of sorting the names. Whether the extents cover their tensors is
    another question: `check_coverage`.

    Args:
        indexes: In the order of the ranks; all of the same block size.
        labels: What to call each of them in messages; ``rank 0``, ``rank 1`` … unless given.

    Raises:
        IncompleteError: Two of them disagree about a tensor's dtype or shape, or list the same file.
        UsageError: Their block sizes differ.
    """
    labels = labels or [f"rank {number}" for number in range(len(indexes))]
    if len({index.block_nbytes for index in indexes}) > 1:
        raise UsageError("the parts were hashed with different block sizes", hint="all ranks use the same configuration")
    all_columns = [index.columns for index in indexes]
    file_names = _merged_files(indexes, labels)
    dtypes = sorted({entry for c in all_columns for entry in c.dtypes})
    codes = {entry: code for code, entry in enumerate(dtypes)}

    # Every input row gets the number of its name among all names, sorted; rows of the same tensor then lie together, ranks in order.
    # Most ranks have the same names: each list is looked at once.
    lists: dict[str, list[bytes]] = {}
    keys = [digest_of(c.names.data) + digest_of(c.name_starts.data.cast("B")) for c in all_columns]
    for key, index in zip(keys, indexes, strict=True):
        if key not in lists:
            lists[key] = [index.raw_name(row) for row in range(len(index))]
    unique = sorted(set().union(*lists.values()))
    number_of = {name: number for number, name in enumerate(unique)}
    numbers = {key: np.array([number_of[name] for name in names], dtype=np.int64) for key, names in lists.items()}
    tensor_of = _concat([numbers[key] for key in keys], np.int64)
    order = np.argsort(tensor_of, kind="stable")
    tensor_of = tensor_of[order]
    first = np.flatnonzero(np.diff(tensor_of, prepend=-1))

    label_of = np.repeat(np.arange(len(indexes)), [len(index) for index in indexes])[order]
    dtype_of = _concat([np.array([codes[e] for e in c.dtypes] or [0], dtype=np.uint16)[c.dtype_codes] for c in all_columns], np.uint16)[
        order
    ]
    ndim = _concat([np.diff(c.shape_starts) for c in all_columns], np.int64)
    extents = _concat([np.diff(c.extent_starts) for c in all_columns], np.int64)
    shapes = _gather(_concat([c.shapes for c in all_columns], np.int64), ndim, order)
    shape_starts = _starts(ndim[order])
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(order))))
    _check_agreement(unique, labels, label_of, dtype_of, shapes, shape_starts, first, group, [name for name, _ in dtypes])

    file_base = np.cumsum([0, *(len(c.file_names) for c in all_columns)])
    files = _concat([c.files.astype(np.int64) + base for c, base in zip(all_columns, file_base, strict=False)], np.int64)
    box = ndim * extents
    kept_ndim = np.diff(shape_starts)[first]
    columns = IndexColumns(
        names=np.frombuffer(b"".join(unique), dtype=np.uint8),
        name_starts=_starts([len(name) for name in unique]),
        dtype_codes=dtype_of[first],
        shapes=_gather(shapes, np.diff(shape_starts), first),
        shape_starts=_starts(kept_ndim),
        extent_starts=_starts(_sum_groups(extents[order], first)),
        box_starts=_starts(_sum_groups(box[order], first)),
        files=_gather(files, extents, order).astype(np.uint32),
        begins=_gather(_concat([c.begins for c in all_columns], np.int64), extents, order),
        ends=_gather(_concat([c.ends for c in all_columns], np.int64), extents, order),
        offsets=_gather(_concat([c.offsets for c in all_columns], np.int64), box, order),
        sizes=_gather(_concat([c.sizes for c in all_columns], np.int64), box, order),
        file_nbytes=_concat([c.file_nbytes for c in all_columns], np.int64),
        block_starts=_starts(_concat([np.diff(c.block_starts) for c in all_columns], np.int64)),
        digests=np.concatenate([np.zeros((0, DIGEST_NBYTES), np.uint8), *(c.digests for c in all_columns)]),
        dtypes=tuple(dtypes),
        file_names=file_names,
    )
    block_nbytes = indexes[0].block_nbytes if indexes else BLOCK_NBYTES
    check_columns(columns, block_nbytes)
    return Index(columns=columns, block_nbytes=block_nbytes)


def _merged_files(indexes: Sequence[Index], labels: Sequence[str]) -> tuple[str, ...]:
    owner: dict[str, str] = {}
    for index, label in zip(indexes, labels, strict=True):
        for name in index.file_names:
            if name in owner:
                raise IncompleteError(
                    f"{owner[name]} and {label} both list the file {name!r}",
                    hint="two processes saved with the same rank: check rank and world_size",
                    file=name,
                )
            owner[name] = label
    return tuple(owner)


def _concat(arrays: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.generic]]], dtype: type[np.generic]) -> Any:
    return np.concatenate([np.zeros(0, dtype), *arrays])


def _gather(values: Ints, counts: Ints, order: Ints) -> Ints:
    """Rows of different lengths (`counts`, concatenated in `values`) in another order, concatenated."""
    starts = (np.cumsum(counts) - counts)[order]
    wanted = counts[order]
    within = np.arange(int(wanted.sum()), dtype=np.int64) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    return values[np.repeat(starts, wanted) + within]


def _sum_groups(values: Ints, first: Ints) -> Ints:
    return np.add.reduceat(values, first) if len(first) else values


def _check_agreement(
    unique: Sequence[bytes],
    labels: Sequence[str],
    label_of: Ints,
    dtype_of: np.ndarray[tuple[int, ...], np.dtype[np.uint16]],
    shapes: Ints,
    shape_starts: Ints,
    first: Ints,
    group: Ints,
    dtypes: Sequence[str],
) -> None:
    leader = first[group]  # for each row, the first row of the same tensor
    ndim = np.diff(shape_starts)
    bad = (dtype_of != dtype_of[leader]) | (ndim != ndim[leader])
    same = np.flatnonzero(~bad)
    counts = ndim[same]
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    differs = (
        shapes[np.repeat(shape_starts[:-1][same], counts) + within] != shapes[np.repeat(shape_starts[:-1][leader[same]], counts) + within]
    )
    bad[np.repeat(same, counts)[differs]] = True
    if not bad.any():
        return
    row = int(bad.argmax())
    two = (int(leader[row]), row)
    says = [
        f"{labels[label_of[r]]} says {dtypes[dtype_of[r]]} {tuple(shapes[shape_starts[r] : shape_starts[r + 1]].tolist())}" for r in two
    ]
    name = unique[int(group[row])].decode("utf-8")
    raise IncompleteError(
        f"the ranks disagree about tensor {name!r}: {says[0]}, {says[1]}",
        hint="every rank must save the same model; a tensor that is local to a rank needs a name of its own",
        tensor=name,
    )
