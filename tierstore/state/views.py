"""Views of stored tensors: parts of them, joined and permuted, without reading anything. What renaming rules make.

A view knows for each of its rectangles which box of which stored tensor it is, so that a slice of a view is read as slices of what is
stored, straight into place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tierstore.errors import UsageError
from tierstore.format.index import TensorEntry
from tierstore.state.boxes import Box, intersect, whole

__all__ = ["NamedView", "Piece", "View", "joined", "parted", "parts_of", "stored_view"]


class Find(Protocol):
    """Gives a stored tensor's entry, as `RoutingIndex.find` does: with the extents that meet a box, at least."""

    def __call__(self, name: str, box: Sequence[range] | None = None) -> TensorEntry: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of a view.

    Attributes:
        tensor: The stored tensor's name.
        box: Which part of it.
        axes: Per axis of the view, the stored axis that it runs along; None: an axis of size 1 that the stored tensor does not have.
            Stored axes that are not named have one index in `box`.
        offsets: Where the rectangle begins in the view.
    """

    tensor: str
    box: Box
    axes: tuple[int | None, ...]
    offsets: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its shape in the view."""
        return tuple(1 if axis is None else len(self.box[axis]) for axis in self.axes)

    def moved(self, axis: int, by: int) -> Piece:
        offsets = tuple(o + by if i == axis else o for i, o in enumerate(self.offsets))
        return Piece(tensor=self.tensor, box=self.box, axes=self.axes, offsets=offsets)

    def cut(self, box: Box) -> Piece | None:
        """The part of it that lies in `box` of the view, in the coordinates of that box."""
        found = intersect(box, self.offsets, self.sizes)
        if found is None:
            return None
        inside, positions = found
        return Piece(tensor=self.tensor, box=self.stored(inside), axes=self.axes, offsets=tuple(p.start for p in positions))

    def stored(self, inside: Box) -> Box:
        """The stored box of a part that is given in the piece's own coordinates."""
        box = list(self.box)
        for axis, part in zip(self.axes, inside, strict=True):
            if axis is not None:
                box[axis] = box[axis][part.start : part.stop : part.step]
        return tuple(box)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor made of stored ones: its dtype (a name of `DTYPES`), its shape, and the pieces that cover it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def part(self, axis: int, begin: int, end: int) -> View:
        """The indices ``[begin, end)`` of one axis."""
        box = tuple(range(begin, end) if i == axis else range(n) for i, n in enumerate(self.shape))
        pieces = tuple(cut for piece in self.pieces if (cut := piece.cut(box)) is not None)
        return View(dtype=self.dtype, shape=tuple(len(r) for r in box), pieces=pieces)

    def permuted(self, axes: Sequence[int]) -> View:
        """The axes in another order, as `torch.Tensor.permute` takes it.

        Raises:
            UsageError: The tensor has another number of axes.
        """
        if len(axes) != len(self.shape):
            raise UsageError(f"a tensor of shape {list(self.shape)} has not {len(axes)} axes to permute", hint="list each axis once")
        pieces = tuple(
            Piece(tensor=p.tensor, box=p.box, axes=tuple(p.axes[a] for a in axes), offsets=tuple(p.offsets[a] for a in axes))
            for p in self.pieces
        )
        return View(dtype=self.dtype, shape=tuple(self.shape[a] for a in axes), pieces=pieces)

    def without(self, axis: int) -> View:
        """An axis of size 1 removed."""
        pieces = tuple(
            Piece(
                tensor=p.tensor,
                box=p.box,
                axes=p.axes[:axis] + p.axes[axis + 1 :],
                offsets=p.offsets[:axis] + p.offsets[axis + 1 :],
            )
            for p in self.pieces
        )
        return View(dtype=self.dtype, shape=self.shape[:axis] + self.shape[axis + 1 :], pieces=pieces)

    def with_axis(self, axis: int) -> View:
        """A new axis of size 1."""
        pieces = tuple(
            Piece(
                tensor=p.tensor,
                box=p.box,
                axes=(*p.axes[:axis], None, *p.axes[axis:]),
                offsets=(*p.offsets[:axis], 0, *p.offsets[axis:]),
            )
            for p in self.pieces
        )
        return View(dtype=self.dtype, shape=(*self.shape[:axis], 1, *self.shape[axis:]), pieces=pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedView:
    """A view by a name of its own. Has what a load asks of an index's `TensorEntry`; its `extents` are compared only, to find ties.

    Attributes:
        name: Its name.
        view: What it shows.
        find: Gives a stored tensor's entry.
    """

    name: str
    view: View
    find: Find

    @property
    def dtype(self) -> str:
        return self.view.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def extents(self) -> tuple[Piece, ...]:
        return self.view.pieces

    def parts(self, box: Box, target: torch.Tensor) -> Iterator[tuple[TensorEntry, Box, torch.Tensor]]:
        """What fills `target` with the part `box` of it: boxes of stored tensors, and where each goes."""
        return parts_of(self.view, box, target, self.find)


def stored_view(name: str, dtype: str, shape: tuple[int, ...]) -> View:
    """A stored tensor as it is."""
    piece = Piece(tensor=name, box=whole(shape), axes=tuple(range(len(shape))), offsets=(0,) * len(shape))
    return View(dtype=dtype, shape=shape, pieces=(piece,))


def parted(
    view: View, axis: int, *, sizes: Sequence[int] | None = None, parts: int | None = None, heads: int = 1, unstack: bool = False
) -> list[View]:
    """Splits a tensor along `axis`.

    Args:
        view: What to split.
        axis: The axis; from the end where negative.
        sizes: The parts' lengths; with `heads` those within one head.
        parts: So many equal parts.
        heads: The axis consists of so many equal groups, each of which is split; parts with the same number are put together.
        unstack: Each index of the axis becomes a tensor without it.

    Raises:
        UsageError: The axis is not there, or its length does not fit.
    """
    axis = _axis(view, axis, "split")
    length = view.shape[axis]
    if unstack:
        return [view.part(axis, i, i + 1).without(axis) for i in range(length)]
    if length % heads:
        raise UsageError(f"axis {axis} of shape {list(view.shape)} has no {heads} equal heads", hint="correct `heads` or `axis`")
    head = length // heads
    if sizes is None:
        assert parts is not None
        if head % parts:
            raise UsageError(
                f"axis {axis} of shape {list(view.shape)} is not {parts} equal parts" + (f" in each of {heads} heads" if heads > 1 else ""),
                hint="give `sizes`, or correct `parts`, `heads` or `axis`",
            )
        sizes = [head // parts] * parts
    if sum(sizes) != head:
        raise UsageError(
            f"the sizes {list(sizes)} add up to {sum(sizes)}, but axis {axis} of shape {list(view.shape)} has {head}"
            + (f" in each of {heads} heads" if heads > 1 else ""),
            hint="correct `sizes`",
        )
    made, begin = [], 0
    for size in sizes:
        bits = [view.part(axis, h * head + begin, h * head + begin + size) for h in range(heads)]
        made.append(bits[0] if heads == 1 else joined(bits, axis))
        begin += size
    return made


def joined(views: Sequence[View], axis: int, *, heads: int = 1, stack: bool = False) -> View:
    """Puts tensors together along `axis`, or with `stack` along a new one; with `heads`, head by head (the inverse of `parted`).

    Raises:
        UsageError: Their dtypes or shapes don't fit together.
    """
    if stack:
        ndim = len(views[0].shape) + 1
        if not -ndim <= axis < ndim:
            raise UsageError(f"a tensor of shape {list(views[0].shape)} can't get a new axis {axis}", hint="correct `axis`")
        axis %= ndim
        if odd := next((v for v in views if v.shape != views[0].shape), None):
            raise UsageError(f"tensors of shapes {list(views[0].shape)} and {list(odd.shape)} can't be stacked", hint="correct the members")
        views = [view.with_axis(axis) for view in views]
    axis = _axis(views[0], axis, "fuse")
    first = views[0]
    for view in views[1:]:
        if view.dtype != first.dtype:
            raise UsageError(f"a {first.dtype} and a {view.dtype} tensor can't be one", hint="export them with a common dtype first")
        if len(view.shape) != len(first.shape) or any(
            a != b for i, (a, b) in enumerate(zip(view.shape, first.shape, strict=True)) if i != axis
        ):
            raise UsageError(
                f"tensors of shapes {list(first.shape)} and {list(view.shape)} can't be joined along axis {axis}", hint="correct `axis`"
            )
    if heads > 1:
        shares = [parted(view, axis, parts=heads) for view in views]
        views = [share[h] for h in range(heads) for share in shares]
    pieces: list[Piece] = []
    at = 0
    for view in views:
        pieces.extend(piece.moved(axis, at) for piece in view.pieces)
        at += view.shape[axis]
    return View(dtype=first.dtype, shape=(*first.shape[:axis], at, *first.shape[axis + 1 :]), pieces=tuple(pieces))


def parts_of(view: View, box: Box, target: torch.Tensor, find: Find) -> Iterator[tuple[TensorEntry, Box, torch.Tensor]]:
    """What fills `target` (strided, detached; its shape is the box's) with the part `box` of a view.

    Args:
        view: The tensor.
        box: Which part of it.
        target: Where to.
        find: Gives a stored tensor's entry.
    """
    for piece in view.pieces:
        found = intersect(box, piece.offsets, piece.sizes)
        if found is None:
            continue
        inside, positions = found
        part = target[positions] if positions else target
        part = part[tuple(0 if axis is None else slice(None) for axis in piece.axes)] if piece.axes else part
        named = [axis for axis in piece.axes if axis is not None]
        part = part.permute(sorted(range(len(named)), key=named.__getitem__)) if named else part
        for axis in range(len(piece.box)):
            if axis not in named:
                part = part.unsqueeze(axis)
        stored = piece.stored(inside)
        yield find(piece.tensor, stored), stored, part


def _axis(view: View, axis: int, what: str) -> int:
    ndim = len(view.shape)
    if not -ndim <= axis < ndim:
        raise UsageError(f"a tensor of shape {list(view.shape)} has no axis {axis} to {what} along", hint="correct `axis`")
    return axis % ndim
