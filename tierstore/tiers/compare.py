"""Two checkpoints compared: tensor by tensor from their indexes' block digests, and, where those can't tell, from the data.

Equal digests of the blocks that cover a tensor prove equal bytes, if it lies at the same place within its blocks on both sides. A block
that lies wholly in the tensor and differs proves a change. What is left (small tensors that share a block with others, another layout)
only reading can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tierstore.format.digest import DIGEST_NBYTES
from tierstore.format.index import Extent, FileEntry, RoutingIndex, TensorEntry
from tierstore.tiers.replica import Replica, Want

__all__ = ["Change", "TensorDiff", "compare_data", "compare_indexes", "compare_trees"]

Change = Literal["same", "changed", "unknown", "reshaped", "added", "removed"]
"""``unknown``: digests can't tell; ``reshaped``: another dtype or shape, so nothing was compared."""

_SLAB_NBYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """What became of one tensor from the first checkpoint to the second; `nbytes` in the second, where it is there.

    `why` says what was compared, or why nothing could be.
    """

    name: str
    change: Change
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    why: str = ""


def compare_indexes(first: RoutingIndex, second: RoutingIndex) -> Iterator[TensorDiff]:
    """Compares all tensors by name, without reading any data; sorted by name."""
    names = sorted({*first.names(), *second.names()})
    blocks = first.block_nbytes if first.block_nbytes == second.block_nbytes else 0
    left = {file.name: file for file in first.files()}
    right = {file.name: file for file in second.files()}
    for name in names:
        if name not in second:
            yield _diff(first.find(name), "removed")
        elif name not in first:
            yield _diff(second.find(name), "added")
        else:
            one, other = first.find(name), second.find(name)
            if (one.dtype, one.shape) != (other.dtype, other.shape):
                yield _diff(other, "reshaped", f"was {one.dtype} {_shape(one.shape)}")
            else:
                yield _by_digests(one, other, left, right, blocks)


def _diff(entry: TensorEntry, change: Change, why: str = "") -> TensorDiff:
    return TensorDiff(name=entry.name, change=change, nbytes=_nbytes(entry), dtype=entry.dtype, shape=entry.shape, why=why)


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _nbytes(entry: TensorEntry) -> int:
    return sum(extent.end - extent.begin for extent in entry.extents)


def _by_digests(one: TensorEntry, other: TensorEntry, left: dict[str, FileEntry], right: dict[str, FileEntry], block: int) -> TensorDiff:
    if not block:
        return _diff(other, "unknown", "the block sizes differ")
    mine, theirs = _live(one), _live(other)
    if [(e.offsets, e.sizes) for e in mine] != [(e.offsets, e.sizes) for e in theirs]:
        return _diff(other, "unknown", "it was saved in another layout")
    words: set[str] = set()
    for a, b in zip(mine, theirs, strict=True):
        word = _extent_word(a, b, left[a.file], right[b.file], block)
        if word == "changed":
            return _diff(other, "changed", "by digest")
        words.add(word)
    why = next((word for word in sorted(words) if word != "same"), "")
    return _diff(other, "unknown", why) if why else _diff(other, "same", "by digest")


def _live(entry: TensorEntry) -> list[Extent]:
    """The extents that hold something, by their place in the tensor."""
    return sorted((e for e in entry.extents if e.end > e.begin), key=lambda e: e.offsets)


def _extent_word(a: Extent, b: Extent, left: FileEntry, right: FileEntry, block: int) -> str:
    """``same``, ``changed``, or why the digests can't tell."""
    if a.begin % block != b.begin % block:
        return "it lies elsewhere in its blocks"
    mine, theirs = _digests(a, left, block), _digests(b, right, block)
    differs = np.flatnonzero((mine != theirs).any(axis=1))
    if not len(differs):
        return "same"
    for number in differs.tolist():
        spans = [_span(extent, file, number, block) for extent, file in ((a, left), (b, right))]
        if spans[0] is not None and spans[0] == spans[1]:
            return "changed"
    return "it shares a block with other tensors"


def _digests(extent: Extent, file: FileEntry, block: int) -> npt.NDArray[np.uint8]:
    table = np.frombuffer(file.block_digests, np.uint8).reshape(-1, DIGEST_NBYTES)
    return table[extent.begin // block : -(-extent.end // block)]


def _span(extent: Extent, file: FileEntry, number: int, block: int) -> tuple[int, int] | None:
    """Where the extent's `number`-th block lies in the tensor's bytes, if it lies in it wholly."""
    begin = (extent.begin // block + number) * block
    end = min(begin + block, file.nbytes)
    return (begin - extent.begin, end - extent.begin) if extent.begin <= begin and end <= extent.end else None


async def compare_data(first: Replica, one: TensorEntry, second: Replica, other: TensorEntry, found: TensorDiff) -> TensorDiff:
    """Settles what the digests could not: reads the tensor from both, in slabs of 32 MiB, every block proved.

    Args:
        first: One checkpoint.
        one: The tensor in its index.
        second: The other checkpoint.
        other: The tensor in its index, of the same dtype and shape.
        found: What the digests said.

    Raises:
        IntegrityError, StorageError: Some of its bytes can't be had from any tier.
    """
    axis = next((number for number, size in enumerate(one.shape) if size != 1), max(0, len(one.shape) - 1))
    shape = one.shape[axis:] or (1,)
    itemsize = _nbytes(one) // max(1, prod(one.shape))
    row_nbytes = prod(shape[1:]) * itemsize
    if not row_nbytes:
        return replace(found, change="same", why="it is empty")
    rows = max(1, _SLAB_NBYTES // row_nbytes)
    for begin in range(0, shape[0], rows):
        end = min(begin + rows, shape[0])
        mine = await _slab(first, one, axis, shape, itemsize, begin, end)
        if mine != await _slab(second, other, axis, shape, itemsize, begin, end):
            return replace(found, change="changed", why="by its data")
    return replace(found, change="same", why="by its data")


async def _slab(replica: Replica, entry: TensorEntry, axis: int, shape: tuple[int, ...], itemsize: int, begin: int, end: int) -> bytes:
    """Rows ``[begin, end)`` of the tensor along `axis`, before which all axes have one element, in C order."""
    slab = np.zeros((end - begin, *shape[1:]), dtype=f"V{itemsize}")
    wants: list[Want] = []
    pieces: list[tuple[tuple[slice, ...], tuple[int, ...], bytearray]] = []
    for extent in _live(entry):
        offsets, sizes = extent.offsets[axis:] or (0,), extent.sizes[axis:] or (1,)
        low, high = max(begin, offsets[0]), min(end, offsets[0] + sizes[0])
        if low >= high:
            continue
        row = prod(sizes[1:]) * itemsize
        buffer = bytearray((high - low) * row)
        wants.append(Want(extent.file, extent.begin + (low - offsets[0]) * row, memoryview(buffer)))
        box = (slice(low - begin, high - begin), *(slice(o, o + s) for o, s in zip(offsets[1:], sizes[1:], strict=True)))
        pieces.append((box, (high - low, *sizes[1:]), buffer))
    await replica.read(wants)
    for box, sizes, buffer in pieces:
        slab[box] = np.frombuffer(buffer, dtype=slab.dtype).reshape(sizes)
    return slab.tobytes()


def compare_trees(first: Any, second: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two trees of encoded objects differ: path, the value before, the value after (None where there is none)."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in dict.fromkeys((*first, *second)):
            below = path if key.startswith("$") else f"{path}.{key}" if path else key
            if key in first and key in second:
                yield from compare_trees(first[key], second[key], below)
            else:
                yield below, first.get(key), second.get(key)
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for number, (a, b) in enumerate(zip(first, second, strict=True)):
            yield from compare_trees(a, b, f"{path}[{number}]")
    elif first != second or type(first) is not type(second):
        yield path, first, second
