"""Slices as byte ranges: which bytes of a stored extent hold a wanted box, and where they go.

A box is one `range` per dimension, in elements, with steps of at least 1. An extent holds a rectangle of the global tensor row-major.
`reads_of` turns the part of a box that lies in an extent into reads: runs that are contiguous on both sides go straight into the
target's memory; otherwise the covering span is read into scratch and gathered from there, as long as what lies between the wanted
runs is less than a block, which verification would fetch anyway; wider gaps are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["SPAN_NBYTES", "Box", "Read", "intersect", "reads_of", "whole"]

Box = tuple[range, ...]

SPAN_NBYTES = 2 << 20
"""The longest piece that is gathered at once, in bytes. Short, as pieces that lie across two requests are put together in memory of
their own; the planner makes long requests of neighbouring pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One contiguous piece of a file and where it goes.

    With `strides` None the bytes are `target`'s own, in order, and `target` is contiguous host memory. Otherwise they go to scratch,
    where `strides` (in elements of `dtype`, the stored one) pick out `target`'s elements.
    """

    file: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    target: torch.Tensor
    strides: tuple[int, ...] | None


def whole(shape: Sequence[int]) -> Box:
    """The box of everything in `shape`."""
    return tuple(range(size) for size in shape)


def intersect(box: Box, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Box, tuple[slice, ...]] | None:
    """The part of `box` that lies in the rectangle ``[offsets, offsets + sizes)``.

    Returns:
        The part in the rectangle's own coordinates, and which positions of the box it is; None where they don't meet.
    """
    inside: list[range] = []
    positions: list[slice] = []
    for wanted, offset, size in zip(box, offsets, sizes, strict=True):
        step = wanted.step
        first = max(0, -(-(offset - wanted.start) // step))
        last = min(len(wanted), -(-(offset + size - wanted.start) // step))
        if first >= last:
            return None
        begin = wanted.start + first * step - offset
        inside.append(range(begin, begin + (last - first - 1) * step + 1, step))
        positions.append(slice(first, last))
    return tuple(inside), tuple(positions)


def reads_of(
    *, file: str, begin: int, sizes: Sequence[int], dtype: torch.dtype, inside: Box, target: torch.Tensor, direct: bool, block_nbytes: int
) -> Iterator[Read]:
    """The reads that fill `target` with the box `inside` of an extent.

    Args:
        file: The extent's file.
        begin: Where the extent begins in it, in bytes.
        sizes: The extent's shape.
        dtype: The stored dtype.
        inside: The wanted box in the extent's coordinates, not empty.
        target: Its shape is the box's.
        direct: `target` is host memory of the stored dtype, so that contiguous parts of it may be read into.
        block_nbytes: The unit of verification: gaps shorter than this cost nothing extra to read.
    """
    unit = dtype.itemsize
    strides: list[int] = []
    for size in reversed(sizes):
        strides.append(unit)
        unit *= size
    strides.reverse()
    offset = begin + sum(r.start * s for r, s in zip(inside, strides, strict=True))
    steps = tuple(s * r.step for r, s in zip(inside, strides, strict=True))
    yield from _split(file, offset, steps, dtype, target, direct, block_nbytes)


def _split(
    file: str, offset: int, steps: tuple[int, ...], dtype: torch.dtype, target: torch.Tensor, direct: bool, block: int
) -> Iterator[Read]:
    """`steps`: bytes in the file from one index to the next, per dimension of `target`."""
    counts = tuple(target.shape)
    itemsize = dtype.itemsize
    span = itemsize + sum((count - 1) * step for count, step in zip(counts, steps, strict=True))
    dense = span == math.prod(counts) * itemsize
    direct_now = direct and target.is_contiguous()
    if dense and direct_now:
        yield Read(file=file, offset=offset, nbytes=span, dtype=dtype, target=target, strides=None)
        return
    run, gap = _run_and_gap(counts, steps, itemsize)
    if span <= SPAN_NBYTES and gap < block and not (direct_now and run >= block):
        yield Read(file=file, offset=offset, nbytes=span, dtype=dtype, target=target, strides=tuple(step // itemsize for step in steps))
        return
    axis = next(i for i, count in enumerate(counts) if count > 1)
    below = itemsize + sum((counts[i] - 1) * steps[i] for i in range(axis + 1, len(counts)))
    group = 1
    if steps[axis] - below < block and below <= SPAN_NBYTES and not (direct_now and run >= block):
        group = max(1, (SPAN_NBYTES - below) // steps[axis] + 1)
        if group >= counts[axis]:
            group = 1  # it is an inner gap that is too wide: take the indices one by one
    for at in range(0, counts[axis], group):
        yield from _split(
            file, offset + at * steps[axis], steps, dtype, target.narrow(axis, at, min(group, counts[axis] - at)), direct, block
        )


def _run_and_gap(counts: Sequence[int], steps: Sequence[int], itemsize: int) -> tuple[int, int]:
    """The length of the contiguous runs and the widest gap between them, in bytes."""
    run = span = itemsize
    gap = 0
    for count, step in zip(reversed(counts), reversed(steps), strict=True):
        if count == 1:
            continue
        gap = max(gap, step - span)
        if run == span == step:
            run *= count
        span += (count - 1) * step
    return run, gap
