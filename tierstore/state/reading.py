"""Filling tensors from a checkpoint: boxes of stored tensors, read straight into memory where the layout allows it.

What can't be read in place (another device, strided memory, a cast, gathered columns) is taken out of the reader's scratch memory, piece
by piece as it arrives, so that a load needs little more memory than what it loads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tierstore.errors import IncompleteError
from tierstore.format.index import Extent, RoutingIndex, TensorEntry
from tierstore.state.bits import as_bits, memory_of, tensor_over, torch_dtype
from tierstore.state.boxes import Box, Read, intersect, reads_of
from tierstore.state.collecting import collector_paused
from tierstore.tiers.reads import AnyWant, Handover, Want

__all__ = ["Fill", "Reader", "Run", "deliver", "fill_all", "read_wants", "reads_for", "same_values", "wants_of"]

_PIECE_NBYTES = 16 << 20

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the process's event loop and returns its result (`storage.loop.EventLoop.run`)."""


class Reader(Protocol):
    """What a load needs of an open checkpoint; `tiers.replica.Replica` is one."""

    @property
    def index(self) -> RoutingIndex:
        """The routing index."""

    async def objects(self, rank: int) -> bytes:
        """The encoded tree of `rank`."""

    async def object_ranks(self) -> Mapping[int, int]:
        """The number of each saved rank's tree; ranks with the same number have the same tree."""

    async def read(self, wants: Sequence[AnyWant]) -> None:
        """Fills the buffer of each want with verified bytes; a `Handover` it may hand over instead (`Handover.receive`), in less memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """One wish: the box `box` of the stored tensor `entry` into `target`, whose shape is the box's. `target` is strided and detached."""

    entry: TensorEntry
    box: Box
    target: torch.Tensor


def fill_all(reader: Reader, run: Run, fills: Sequence[Fill]) -> None:
    """Reads every wish. Values of another dtype are cast.

    Raises:
        IncompleteError: A wished box has elements that no extent holds.
        IntegrityError: No tier has good bytes; from `Reader.read`.
    """
    read_wants(reader, run, wants_of(fills, reader.index.block_nbytes))


def wants_of(fills: Sequence[Fill], block_nbytes: int) -> list[AnyWant]:
    """What to ask a reader for, so that every wish is filled; raises IncompleteError as `reads_for` does."""
    wants: list[AnyWant] = []
    with collector_paused():
        for fill in _stored(fills):
            if (extent := _one_extent(fill)) is not None:
                wants.append(Want(extent.file, extent.begin, memory_of(fill.target), fill.entry.name))
                continue
            for read in reads_for(fill, block_nbytes):
                if read.strides is None:
                    wants.append(Want(read.file, read.offset, memory_of(read.target), fill.entry.name))
                else:
                    wants.append(Handover(read.file, read.offset, read.nbytes, _taker(read), fill.entry.name))
    return wants


def _stored(fills: Iterable[Fill]) -> Iterator[Fill]:
    """The wishes as wishes for stored tensors: a renamed one (`views.NamedView`) says which parts of stored ones it is."""
    for fill in fills:
        parts = getattr(fill.entry, "parts", None)
        if parts is None:
            yield fill
        else:
            yield from _stored(Fill(entry=entry, box=box, target=target) for entry, box, target in parts(fill.box, fill.target))


def read_wants(reader: Reader, run: Run, wants: Sequence[AnyWant]) -> None:
    """Reads them, and sees to it that handovers are handed over, also by a reader that knows none; raises as `Reader.read`."""
    if wants:
        run(reader.read(wants))
    for want in wants:
        if isinstance(want, Handover):
            want.finish()


def _taker(read: Read) -> Callable[[memoryview], None]:
    """Delivers from a thread of the reader's as the caller's own thread would: on the stream on which its device works for it now."""
    if read.target.device.type != "cuda":
        return functools.partial(deliver, read)
    stream = torch.cuda.current_stream(read.target.device)

    def take(memory: memoryview) -> None:
        with torch.cuda.stream(stream):
            deliver(read, memory)

    return take


def reads_for(fill: Fill, block_nbytes: int) -> Iterator[Read]:
    """What must be read for one wish: pieces of files, and where each goes. Nothing is read here; `deliver` puts a piece in place.

    Args:
        fill: The wish.
        block_nbytes: The unit of verification, in bytes; see `boxes.reads_of`.

    Raises:
        IncompleteError: The wished box has elements that no extent holds; raised after the last read.
    """
    entry, target = fill.entry, fill.target
    stored = torch_dtype(entry.dtype)
    if target.numel() == 0:
        return
    direct = _takes_bytes(target, stored)
    if (extent := _one_extent(fill)) is not None:
        yield Read(file=extent.file, offset=extent.begin, nbytes=extent.end - extent.begin, dtype=stored, target=target, strides=None)
        return
    covered = 0
    for extent in entry.extents:
        found = intersect(fill.box, extent.offsets, extent.sizes)
        if found is None:
            continue
        inside, positions = found
        part = target[positions] if positions else target
        covered += part.numel()
        yield from reads_of(
            file=extent.file,
            begin=extent.begin,
            sizes=extent.sizes,
            dtype=stored,
            inside=inside,
            target=part,
            direct=direct,
            block_nbytes=block_nbytes,
        )
    if covered != target.numel():
        raise IncompleteError(
            f"tensor {entry.name!r}: the stored extents hold {covered:,} of the {target.numel():,} elements that are wanted",
            hint="a rank's part is missing: run `tierstore verify`, or load another step",
            tensor=entry.name,
        )


def _takes_bytes(target: torch.Tensor, stored: torch.dtype) -> bool:
    """Whether the stored bytes can be its memory's, as they are."""
    return target.is_cpu and target.dtype is stored and not (target.is_conj() or target.is_neg())


def _one_extent(fill: Fill) -> Extent | None:
    """The extent that is read into the target as it is: nearly all are whole tensors in one piece, and states have tens of thousands."""
    entry, target = fill.entry, fill.target
    if len(entry.extents) != 1 or entry.extents[0].sizes != tuple(target.shape) or not target.numel() or not target.is_contiguous():
        return None
    begins = entry.extents[0].offsets
    if any(wanted.start != begin or wanted.step != 1 for wanted, begin in zip(fill.box, begins, strict=True)):
        return None
    return entry.extents[0] if _takes_bytes(target, torch_dtype(entry.dtype)) else None


def deliver(read: Read, memory: memoryview) -> None:
    """Puts the bytes of `read` into its target: copied as they are, or gathered by its strides, and cast where the dtypes differ.

    Args:
        read: From `reads_for`.
        memory: Its bytes, `Read.nbytes` of them, wherever they lie; they are not kept.
    """
    if read.strides is None:
        memory_of(read.target)[:] = memory
        return
    with torch.inference_mode(read.target.is_inference()), torch.no_grad():
        raw = torch.from_numpy(np.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=np.uint8))
        if raw.data_ptr() % read.dtype.itemsize:
            raw = raw.clone()  # torch views bytes as another dtype only where they are aligned to it
        values = raw.view(read.dtype).as_strided(tuple(read.target.shape), read.strides)
        target = read.target
        if target.dtype != read.dtype or target.is_conj() or target.is_neg():
            target.copy_(values)
        else:
            as_bits(target).copy_(as_bits(values))


def same_values(reader: Reader, run: Run, first: TensorEntry, second: TensorEntry) -> bool:
    """Whether two stored tensors of equal dtype and shape hold the same bits; read in pieces, nothing is kept."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if first.extents == second.extents or 0 in first.shape:
        return True
    dtype = torch_dtype(first.dtype)
    for box in _pieces(first.shape, dtype.itemsize):
        shape = tuple(len(r) for r in box)
        count = math.prod(shape) * dtype.itemsize
        pair = [tensor_over(memoryview(bytearray(count)), dtype, shape) for _ in range(2)]
        fill_all(reader, run, [Fill(entry=e, box=box, target=t) for e, t in zip((first, second), pair, strict=True)])
        if not torch.equal(as_bits(pair[0]), as_bits(pair[1])):
            return False
    return True


def _pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    if not shape:
        yield ()
        return
    rows = max(1, _PIECE_NBYTES // max(1, math.prod(shape[1:]) * itemsize))
    for begin in range(0, shape[0], rows):
        yield (range(begin, min(begin + rows, shape[0])), *(range(size) for size in shape[1:]))
