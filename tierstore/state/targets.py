"""What is filled in place: the tensors of `into`, each from a stored tensor or from what stands in for it, and each memory once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from tierstore.errors import IncompleteError, NotFoundError
from tierstore.format.index import RoutingIndex, TensorEntry
from tierstore.state.bits import dtype_name, torch_dtype
from tierstore.state.differences import Differences, LoadOptions
from tierstore.state.filling import Filling, StandIn, fits
from tierstore.state.guard import check_storable, is_plain
from tierstore.state.paths import Place, Shown, name_of, show
from tierstore.state.reading import Fill
from tierstore.state.sharded import Piece, chunk_of, is_spread

__all__ = ["Targets"]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class Targets:
    """Plans what the tensors of `into` are filled with; notes the differences.

    Args:
        index: The stored tensors.
        options: What may differ.
        filling: Is told what stands in for what.
        differences: Takes what differs.
        fills: Takes the plan.
        ties: Takes pairs of stored tensors that one memory of `into` stands for.

    Attributes:
        used: The names of the stored tensors that are asked for.
    """

    def __init__(
        self,
        index: RoutingIndex,
        options: LoadOptions,
        filling: Filling,
        differences: Differences,
        fills: list[Fill],
        ties: list[tuple[TensorEntry, TensorEntry, str]],
    ) -> None:
        self._index = index
        self._options = options
        self._filling = filling
        self._differences = differences
        self._fills = fills
        self._ties = ties
        self.used: set[str] = set()
        self._memory: dict[Any, TensorEntry] = {}

    def stands_in(self, found: StandIn, place: Place, dtype: str, shape: Sequence[int]) -> bool:
        """Whether `found` can fill a tensor of that dtype and shape; notes it, or the difference."""
        source, where = found.entry, ", ".join(found.sources[:3])
        if tuple(shape) != source.shape:
            self._differences.note("shape", place, f"is {list(shape)} in `into`, {list(source.shape)} in what is to fill it ({where})")
            return False
        if not fits(source.dtype, dtype):
            self._differences.note("kind", place, f"is {dtype} in `into`, and can't be filled from {source.dtype} ({where})")
            return False
        self.used.update(found.sources)
        self._filling.note(name_of(place), dtype, found)
        return True

    def fill(self, into: torch.Tensor, place: Place, source: str | StandIn) -> bool:
        """Plans to fill a tensor from the stored one of a name, or from what stands in for it; whether that is possible.

        What is not becomes a difference, and the tensor is left as it is.

        Raises:
            UnsupportedTypeError: It can't be filled at all (meta, quantised, freed).
            IncompleteError: The index does not have the tensor.
        """
        if isinstance(source, str) and type(into) in _PLAIN and not hasattr(into, "global_offsets") and is_plain(into):
            return self._fill_plain(into, source, place)  # nearly all of them are: few steps for each of tens of thousands
        if is_spread(into):
            chunk = chunk_of(into, f"into{show(place).removeprefix('state')}")
            target, shape, pieces = chunk.tensor, chunk.global_shape, chunk.pieces
            check_storable(target, Shown(place, "into"))
        else:
            target, shape = into.detach(), tuple(into.shape)
            pieces = (Piece(tensor=target, offsets=(0,) * target.ndim),)
            check_storable(into, Shown(place, "into"))
        if isinstance(source, StandIn):
            entry = cast(TensorEntry, source.entry)
            if not self.stands_in(source, place, dtype_name(target.dtype), shape):
                return False
        else:
            entry = self._find(source, _around(pieces, len(shape)))
            if shape != entry.shape:
                self._differences.note("shape", place, f"is {list(shape)} in `into`, {list(entry.shape)} stored")
                return False
            if dtype_name(target.dtype) != entry.dtype and not self._castable(entry, target, place):
                return False
        for piece in pieces:
            self._fill_piece(piece, entry, place)
        return True

    def _fill_plain(self, into: torch.Tensor, name: str, place: Place) -> bool:
        """`fill` for a dense, contiguous tensor in memory that this process has for itself."""
        shape, dtype = tuple(into.shape), into.dtype
        entry = self._find(name)  # all of it is wanted
        if shape != entry.shape:
            self._differences.note("shape", place, f"is {list(shape)} in `into`, {list(entry.shape)} stored")
            return False
        target = into.detach() if into.requires_grad or type(into) is not torch.Tensor else into
        if torch_dtype(entry.dtype) is not dtype and not self._castable(entry, target, place):
            return False
        if address := into.data_ptr():
            self._fill_box(target, entry, place, tuple(map(range, shape)), (address, shape, dtype))
        return True

    def _fill_piece(self, piece: Piece, entry: TensorEntry, place: Place) -> None:
        target = piece.tensor
        if not target.is_contiguous() and any(n == 0 and size > 1 for n, size in zip(target.stride(), target.shape, strict=True)):
            self._differences.note("kind", place, "is an expanded tensor in `into`: several of its elements are one place in memory")
            return
        if target.numel() == 0:
            return
        shape, dtype = tuple(target.shape), target.dtype
        if target.is_cpu and target.is_contiguous():
            memory: tuple[Any, ...] = (target.data_ptr(), shape, dtype)
        else:
            memory = (target.device, target.data_ptr(), shape, target.stride(), dtype)
        self._fill_box(target, entry, place, tuple(range(b, b + n) for b, n in zip(piece.offsets, shape, strict=True)), memory)

    def _fill_box(self, target: torch.Tensor, entry: TensorEntry, place: Place, box: tuple[range, ...], memory: tuple[Any, ...]) -> None:
        """Plans to fill the box `box` of a stored tensor into `target`, whose memory `memory` names, but once if it is tied."""
        before = self._memory.setdefault(memory, entry)
        if before is entry:
            self._fills.append(Fill(entry=entry, box=box, target=target))
        elif (before.dtype, before.extents) != (entry.dtype, entry.extents):  # tied in `into`, stored apart
            self._ties.append((self._find(before.name), self._find(entry.name), name_of(place)))

    def _castable(self, entry: TensorEntry, target: torch.Tensor, place: Place) -> bool:
        found = f"is {dtype_name(target.dtype)} in `into`, {entry.dtype} stored"
        if self._options.dtype == "exact":
            self._differences.note("dtype", place, found)
            return False
        stored = torch_dtype(entry.dtype)
        try:
            torch.zeros(stored.itemsize, dtype=torch.uint8, device="cpu").view(stored).to(target.dtype)
        except (RuntimeError, NotImplementedError):
            self._differences.note("dtype", place, f"{found}, and torch can't convert that")
            return False
        return True

    def _find(self, name: str, box: Sequence[range] | None = None) -> TensorEntry:
        try:
            return self._index.find(name, box)
        except NotFoundError as error:
            raise IncompleteError(
                f"the checkpoint's tree names the tensor {name!r}, its index does not", hint="run `tierstore verify`, or load another step"
            ) from error


def _around(pieces: Sequence[Piece], ndim: int) -> tuple[range, ...]:
    """A box around all pieces: of a stored tensor's extents, which may be thousands, only those within can be wanted."""
    if not pieces:
        return (range(0),) * ndim
    if len(pieces) == 1:
        piece = pieces[0]
        return tuple(range(begin, begin + size) for begin, size in zip(piece.offsets, piece.tensor.shape, strict=True))
    begins = [min(piece.offsets[axis] for piece in pieces) for axis in range(ndim)]
    ends = [max(piece.offsets[axis] + piece.tensor.shape[axis] for piece in pieces) for axis in range(ndim)]
    return tuple(range(begin, end) for begin, end in zip(begins, ends, strict=True))
