"""What lies where in a raw file: stretches of numbers of one size, and the pieces of one block."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tierstore.errors import FormatError
from tierstore.format.document import load_json
from tierstore.format.dtypes import DTYPES, SAFETENSORS_BITS, SAFETENSORS_NAMES
from tierstore.format.header import MAX_HEADER_NBYTES, HeaderTensor, ShardHeader
from tierstore.format.packed.types import Piece, Run, Stretch

__all__ = ["SMALL_NBYTES", "gaps", "holes_of", "numbers_of", "pieces_of", "plain_stretches", "stretches_of"]

SMALL_NBYTES = 16 << 10
"""Tensors smaller than this are not told apart. No two stretches below it lie side by side, so that a block of 1 MiB has at most 130."""

_ROTATED = frozenset({"float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"})
_PARTS = {"complex32": 2, "complex64": 4, "complex128": 8}  # bytes of one number; a complex one has two


def numbers_of(dtype: str) -> tuple[int, bool]:
    """What a dtype's numbers are, as planes see them: how many bytes each has, and whether they are floating point (rotated)."""
    return _PARTS.get(dtype) or DTYPES[dtype].itemsize, dtype in _ROTATED


def plain_stretches(nbytes: int) -> tuple[Stretch, ...]:
    """The one stretch of a file of which only the length is known."""
    return (Stretch(begin=0, end=nbytes, itemsize=1, rotated=False),) if nbytes else ()


def stretches_of(header: ShardHeader, nbytes: int) -> tuple[Stretch, ...]:
    """Cuts a safetensors file of `nbytes` bytes into stretches; they cover it, sorted, without gaps.

    Small tensors (below `SMALL_NBYTES`) that follow each other are one stretch without a name; where they are of different kinds, and
    still small together, it is one of plain bytes.
    """
    dtypes = _own_dtypes(header)
    found = [Stretch(begin=0, end=header.data_start, itemsize=1, rotated=False)]
    for key, tensor in sorted(header.tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < tensor.end:
            _append(found, _stretch(key, tensor, dtypes.get(key)))
    if found[-1].end != nbytes:  # a parsed header covers its file; whoever made one by hand gets plain bytes
        return plain_stretches(nbytes)
    return tuple(_joined(found))


def pieces_of(stretches: Sequence[Stretch], begin: int, end: int, holes: Iterable[tuple[int, int]] = ()) -> list[tuple[Piece, Stretch]]:
    """The pieces of the block [`begin`, `end`) of a file, each with the stretch that it is of, in order.

    A piece begins and ends with a whole number of its stretch; what is cut from a number by the block's edge or by a hole is a piece of
    plain bytes.

    Args:
        stretches: Sorted, without gaps; may be those of the whole file.
        begin, end: Bytes of the raw file.
        holes: Ranges of the raw file that are left out, sorted, without overlaps (what runs cover).
    """
    left = list(gaps(begin, end, holes))
    found = []
    for at in range(bisect_right(stretches, begin, key=lambda stretch: stretch.end), len(stretches)):
        stretch = stretches[at]
        if stretch.begin >= end:
            break
        for first, last in left:
            first, last = max(first, stretch.begin), min(last, stretch.end)
            if first < last:
                found += [(piece, stretch) for piece in _whole_numbers(stretch, first, last, begin)]
    return found


def holes_of(runs: Iterable[Run], begin: int, end: int) -> list[tuple[int, int]]:
    """What `runs`, sorted and without overlaps, cover of ``[begin, end)`` of the raw file, joined where they touch."""
    holes: list[tuple[int, int]] = []
    for run in runs:
        first, last = max(begin, run.begin), min(end, run.end)
        if first >= last:
            continue
        if holes and holes[-1][1] == first:
            holes[-1] = holes[-1][0], last
        else:
            holes.append((first, last))
    return holes


def gaps(begin: int, end: int, holes: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What `holes` leave of ``[begin, end)``; they are sorted and don't overlap.

    Raises:
        ValueError: They are not, or do: a mistake of the caller.
    """
    at, before = begin, 0
    for first, last in holes:
        if not before <= first <= last:
            raise ValueError(f"a hole from {first} to {last} after one that ends at {before}: holes are sorted and don't overlap")
        before = last
        if at < min(first, end):
            yield at, min(first, end)
        at = max(at, last)
    if at < end:
        yield at, end


def _whole_numbers(stretch: Stretch, first: int, last: int, origin: int) -> Iterator[Piece]:
    size = stretch.itemsize
    head = min(last, first + (stretch.begin - first) % size)
    tail = max(head, last - (last - stretch.begin) % size)
    if first < head:
        yield Piece(begin=first - origin, end=head - origin, itemsize=1, rotated=False)
    if head < tail:
        yield Piece(begin=head - origin, end=tail - origin, itemsize=size, rotated=stretch.rotated)
    if tail < last:
        yield Piece(begin=tail - origin, end=last - origin, itemsize=1, rotated=False)


def _stretch(key: str, tensor: HeaderTensor, raw_dtype: str | None) -> Stretch:
    known = SAFETENSORS_NAMES.get(tensor.dtype)
    dtype, shape = (known.name if known else ""), tensor.shape
    if raw_dtype is not None and tensor.dtype == "U8" and tensor.shape[-1:] == (DTYPES[raw_dtype].itemsize,):
        dtype, shape = raw_dtype, tensor.shape[:-1]
    itemsize, rotated = numbers_of(dtype) if dtype else (max(1, SAFETENSORS_BITS[tensor.dtype] // 8), False)
    nbytes = tensor.end - tensor.begin
    if (dtype and math.prod(shape) * DTYPES[dtype].itemsize != nbytes) or nbytes % itemsize:
        dtype, shape, itemsize, rotated = "", (), 1, False
    stretch = Stretch(begin=tensor.begin, end=tensor.end, itemsize=itemsize, rotated=rotated)
    return stretch if nbytes < SMALL_NBYTES or not dtype else replace(stretch, name=key, dtype=dtype, shape=shape)


def _append(found: list[Stretch], stretch: Stretch) -> None:
    """Adds a stretch, to the last one where both are nameless, small at first, and of one kind."""
    last = found[-1]
    if len(found) > 1 and not last.name and not stretch.name and (last.itemsize, last.rotated) == (stretch.itemsize, stretch.rotated):
        found[-1] = replace(last, end=stretch.end)
    else:
        found.append(stretch)


def _joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Joins neighbours that are both small: a foreign file may change the dtype with every few bytes."""
    found: list[Stretch] = []
    for stretch in stretches:
        if found and found[-1].end - found[-1].begin < SMALL_NBYTES and stretch.end - stretch.begin < SMALL_NBYTES:
            found[-1] = Stretch(begin=found[-1].begin, end=stretch.end, itemsize=1, rotated=False)
        else:
            found.append(stretch)
    return found


def _own_dtypes(header: ShardHeader) -> dict[str, str]:
    """The true dtypes of tensors that stand there as raw bytes. They matter for nothing but the ratio: what is wrong is ignored."""
    try:
        body = load_json(header.metadata.get("tierstore", "{}").encode("utf-8", "replace"), "shard metadata", max_nbytes=MAX_HEADER_NBYTES)
    except FormatError:
        return {}
    table = body.get("dtypes") if isinstance(body, dict) else None
    if not isinstance(table, dict):
        return {}
    return {key: value for key, value in table.items() if isinstance(value, str) and value in DTYPES}
