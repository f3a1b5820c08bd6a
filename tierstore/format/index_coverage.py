"""Coverage: do a tensor's extents tile the whole tensor, each element exactly once?"""

from __future__ import annotations

import numpy as np

from tierstore.errors import IncompleteError
from tierstore.format.index_table import ExtentTable, Index, Ints

__all__ = ["check_coverage"]


def check_coverage(index: Index) -> None:
    """Proves that every tensor's extents cover its whole shape without overlap; a tensor without elements needs no extents.

    The volumes must add up, and no two boxes may overlap: together that is an exact cover. Overlap is decided for all tensors at
    once by sorting along one axis after the other: boxes that are slabs of a grid separate; what does not is compared pair by pair.

    Raises:
        IncompleteError: Names the tensor, and the missing box or the files that overlap.
        FormatError: The names are out of order or stand there twice.
    """
    index.check_order()
    c = index.columns
    counts = np.diff(c.extent_starts)
    ndim = np.diff(c.shape_starts)
    tensor_of = np.repeat(np.arange(len(index)), counts)
    extent_ndim = ndim[tensor_of]
    box_of = np.cumsum(extent_ndim) - extent_ndim
    wanted = _products(c.shapes, c.shape_starts[:-1], ndim)
    volumes = _products(c.sizes, box_of, extent_ndim)
    # int64 sums may wrap around where many huge boxes overlap; the float sum tells such a case from a true match.
    total = np.zeros(len(index), dtype=np.int64)
    np.add.at(total, tensor_of, volumes)
    rough = np.bincount(tensor_of, weights=volumes.astype(np.float64), minlength=len(index))
    wrong = (total != wanted) | (np.abs(rough - wanted) > 1.0 + 1e-6 * wanted)
    irregular = _irregular(len(index), tensor_of, extent_ndim, box_of, c.offsets, c.sizes, volumes)
    for row in np.flatnonzero(wrong | irregular).tolist():
        _explain(index, row)


def _products(values: Ints, starts: Ints, counts: Ints) -> Ints:
    made = np.ones(len(counts), dtype=np.int64)
    filled = np.flatnonzero(counts)
    if len(filled):
        made[filled] = np.multiply.reduceat(values, starts[filled])
    return made


def _irregular(
    tensors: int, tensor_of: Ints, extent_ndim: Ints, box_of: Ints, offsets: Ints, sizes: Ints, volumes: Ints
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which tensors have boxes that don't separate axis by axis (overlapping, or tiled in a way that needs the slow check)."""
    marked = np.zeros(tensors, dtype=bool)
    live = np.flatnonzero(volumes > 0)
    group = tensor_of[live].copy()
    for axis in range(int(extent_ndim[live].max(initial=0)) + 1):
        if not len(live):
            break
        # Alone in its group: it overlaps nothing.
        _, inverse, size = np.unique(group, return_inverse=True, return_counts=True)
        crowded = size[inverse] > 1
        live, group = live[crowded], inverse[crowded].astype(np.int64)
        has_axis = extent_ndim[live] > axis
        marked[tensor_of[live[~has_axis]]] = True  # the same box twice: equal along all axes
        live, group = live[has_axis], group[has_axis]
        begins = offsets[box_of[live] + axis]
        ends = begins + sizes[box_of[live] + axis]
        order = np.lexsort((ends, begins, group))
        live, group, begins, ends = live[order], group[order], begins[order], ends[order]
        fresh = np.diff(group, prepend=-1) != 0
        equal = np.zeros(len(live), dtype=bool)
        apart = np.zeros(len(live), dtype=bool)
        equal[1:] = (begins[1:] == begins[:-1]) & (ends[1:] == ends[:-1])
        apart[1:] = begins[1:] >= ends[:-1]
        marked[tensor_of[live[~(fresh | equal | apart)]]] = True
        group = np.cumsum(fresh | ~equal)
        keep = ~marked[tensor_of[live]]
        live, group = live[keep], group[keep]
    return marked


def _explain(index: Index, row: int) -> None:
    """Checks one tensor on its own; raises what is wrong with it, if anything is."""
    entry_name = index.raw_name(row).decode("utf-8")
    table = index.table(entry_name)
    shape = np.array(index.shape(entry_name), dtype=np.int64)
    live = np.flatnonzero((table.sizes > 0).all(axis=1))
    names = index.file_names
    pair = _overlapping(table, live)
    if pair is not None:
        one, two = (f"{names[int(table.files[i])]!r} at {tuple(table.offsets[i].tolist())}" for i in pair)
        raise IncompleteError(
            f"tensor {entry_name!r}: the chunk in {one} overlaps the chunk in {two}",
            hint="two ranks wrote the same elements: of replicated chunks exactly one rank writes each",
            tensor=entry_name,
            files=[names[int(table.files[i])] for i in pair],
        )
    hole = _missing(shape, table, live)
    if hole is not None:
        offsets, sizes = hole
        raise IncompleteError(
            f"tensor {entry_name!r} of shape {tuple(shape.tolist())}: no file holds the {tuple(sizes)} elements at {tuple(offsets)}",
            hint="a rank's part is missing or was saved with another layout; load an older step, or run `tierstore verify`",
            tensor=entry_name,
            offsets=offsets,
            sizes=sizes,
        )


def _overlapping(table: ExtentTable, live: Ints) -> tuple[int, int] | None:
    """Two extents of one tensor that share an element: a sweep along the first axis, each box against those still open."""
    if len(live) < 2:
        return None
    if table.offsets.shape[1] == 0:
        return int(live[0]), int(live[1])
    live = live[np.argsort(table.offsets[live, 0], kind="stable")]
    begins, ends = table.offsets[live], table.offsets[live] + table.sizes[live]
    later = np.searchsorted(begins[:, 0], ends[:, 0], side="left")
    for i in range(len(live)):
        span = slice(i + 1, int(later[i]))
        hits = ((begins[span] < ends[i]) & (begins[i] < ends[span])).all(axis=1)
        if hits.any():
            return int(live[i]), int(live[i + 1 + int(hits.argmax())])
    return None


def _missing(shape: Ints, table: ExtentTable, live: Ints) -> tuple[list[int], list[int]] | None:
    """A box of the tensor that no extent covers: boxes are halved along the extents' faces until one is free or all are covered."""
    if not (shape > 0).all():
        return None
    begins, ends = table.offsets[live], table.offsets[live] + table.sizes[live]
    stack = [(np.zeros_like(shape), shape, np.arange(len(live)))]
    while stack:
        low, high, near = stack.pop()
        near = near[((begins[near] < high) & (low < ends[near])).all(axis=1)]
        if not len(near):
            return low.tolist(), (high - low).tolist()
        if ((begins[near] <= low) & (high <= ends[near])).all(axis=1).any():
            continue
        axis, cut = _median_face(low, high, begins[near], ends[near])
        middle_high, middle_low = high.copy(), low.copy()
        middle_high[axis] = middle_low[axis] = cut
        stack += [(middle_low, high, near), (low, middle_high, near)]
    return None


def _median_face(low: Ints, high: Ints, begins: Ints, ends: Ints) -> tuple[int, int]:
    """The axis with the most faces inside the box, and the median of these faces: halves the work."""
    best: tuple[int, Ints] = (0, low[:0])
    for axis in range(len(low)):
        faces = np.concatenate([begins[:, axis], ends[:, axis]])
        faces = np.sort(faces[(faces > low[axis]) & (faces < high[axis])])
        if len(faces) > len(best[1]):
            best = (axis, faces)
    axis, faces = best
    return axis, int(faces[len(faces) // 2])
