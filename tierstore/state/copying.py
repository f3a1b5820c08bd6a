"""Copying tensors into an image: one pass over the bytes, spread over a few threads, no other memory.

Contiguous host memory is moved with memmove from Python threads: as fast as torch's own parallel copy, without starting a team of
OpenMP threads per Python thread, and independent of `torch.set_num_threads`. What is strided or lives on a device goes through
`Tensor.copy_` between integer views, which gathers and transfers in the same pass; a device whose copies can go on by themselves
(`state.device_copy`) is only told of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tierstore.state.bits import as_bits, tensor_over
from tierstore.state.copy_threads import CopyThreads

__all__ = ["Move", "as_place", "copy_all"]

_PIECE_NBYTES = 8 << 20
"""What one thread moves at a time: large enough for memmove's streaming stores, small enough to balance the threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One tensor's copy: `tensor` (dense, detached, no lazy bits) goes row-major to ``[begin, begin + nbytes)`` of the image."""

    tensor: torch.Tensor
    begin: int
    nbytes: int


def copy_all(
    moves: Sequence[Move],
    image: memoryview,
    *,
    threads: CopyThreads | int | None = None,
    send: Callable[[Sequence[Move], memoryview], Sequence[Move]] | None = None,
) -> None:
    """Copies every tensor to its place in `image`, and returns when all of it is there, but for what `send` took over.

    Args:
        moves: Disjoint places, each aligned to its tensor's item size.
        image: Writable memory that holds them all.
        threads: Who moves bytes: a store's threads, or how many are to be started for this; None: few.
        send: Begins the copies of tensors on devices that make them by themselves, and returns those that are left.
    """
    if isinstance(threads, CopyThreads):
        _copy(moves, image, threads, send)
        return
    own = CopyThreads(threads)
    try:
        _copy(moves, image, own, send)
    finally:
        own.close()


def _copy(
    moves: Sequence[Move],
    image: memoryview,
    threads: CopyThreads,
    send: Callable[[Sequence[Move], memoryview], Sequence[Move]] | None,
) -> None:
    others = [m for m in moves if m.nbytes and not (m.tensor.is_cpu and m.tensor.is_contiguous())]
    if others:
        odd = {id(m) for m in others}
        moves = [m for m in moves if id(m) not in odd]
        if send is not None:
            others = list(send(others, image))
    works = (partial(_move, piece) for piece in _pieces(moves, image))  # the first is copied while the others are still listed
    threads.run(works, (lambda: _gather(others, image)) if others else None)


def _pieces(moves: Sequence[Move], image: memoryview) -> Iterator[list[tuple[int, int, int]]]:
    """What one thread moves at a time, as (to, from, bytes); of contiguous host memory."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(image)) if moves else 0
    batch: list[tuple[int, int, int]] = []
    room = _PIECE_NBYTES
    for move in moves:
        left = move.nbytes
        if not left:
            continue
        source, target = move.tensor.data_ptr(), base + move.begin
        while left:
            count = left if left < room else room
            batch.append((target, source, count))
            source, target, left, room = source + count, target + count, left - count, room - count
            if room == 0:
                yield batch
                batch, room = [], _PIECE_NBYTES
    if batch:
        yield batch


def _move(piece: Sequence[tuple[int, int, int]]) -> None:
    for target, source, nbytes in piece:
        ctypes.memmove(target, source, nbytes)  # releases the GIL


def as_place(move: Move, image: memoryview) -> torch.Tensor:
    """Where `move` goes, as a tensor of the bits of its tensor's."""
    return as_bits(tensor_over(image[move.begin : move.begin + move.nbytes], move.tensor.dtype, tuple(move.tensor.shape)))


def _gather(moves: Sequence[Move], image: memoryview) -> None:
    with torch.no_grad():
        for move in moves:
            as_place(move, image).copy_(as_bits(move.tensor))
