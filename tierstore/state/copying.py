"""Copying tensors into an image: one pass over the bytes, spread over a few threads, no other memory.

Contiguous host memory is moved with memmove from Python threads: as fast as torch's own parallel copy, without starting a team of
OpenMP threads per Python thread, and independent of `torch.set_num_threads`. What is strided or lives on a device goes through
`Tensor.copy_` between integer views, which gathers and transfers in the same pass.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tierstore.state.bits import as_bits, tensor_over

__all__ = ["Move", "copy_all", "default_threads"]

_PIECE_NBYTES = 16 << 20
"""What one thread moves at a time: large enough for memmove's streaming stores, small enough to balance the threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One tensor's copy: `tensor` (dense, detached, no lazy bits) goes row-major to ``[begin, begin + nbytes)`` of the image."""

    tensor: torch.Tensor
    begin: int
    nbytes: int


def default_threads() -> int:
    """Threads that saturate a memory bus with memmove: few, and never more than this process may run on."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


def copy_all(moves: Sequence[Move], image: memoryview, *, threads: int | None = None) -> None:
    """Copies every tensor to its place in `image`, and returns when all of it is there.

    Args:
        moves: Disjoint places, each aligned to its tensor's item size.
        image: Writable memory that holds them all.
        threads: How many threads move bytes; None: `default_threads`.
    """
    threads = threads or default_threads()
    base = ctypes.addressof(ctypes.c_char.from_buffer(image)) if moves else 0
    pieces: list[list[tuple[int, int, int]]] = []
    batch: list[tuple[int, int, int]] = []
    room = _PIECE_NBYTES
    strided: list[Move] = []
    for move in moves:
        if move.nbytes == 0:
            continue
        tensor = move.tensor
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            strided.append(move)
            continue
        source, target, left = tensor.data_ptr(), base + move.begin, move.nbytes
        while left:
            count = min(left, room)
            batch.append((target, source, count))
            source, target, left, room = source + count, target + count, left - count, room - count
            if room == 0:
                pieces.append(batch)
                batch, room = [], _PIECE_NBYTES
    if batch:
        pieces.append(batch)
    if threads == 1 or len(pieces) <= 1:
        for piece in pieces:
            _move(piece)
        _gather(strided, image)
        return
    with ThreadPoolExecutor(threads if not strided else max(1, threads - 1), thread_name_prefix="tierstore-copy") as pool:
        futures = [pool.submit(_move, piece) for piece in pieces]
        _gather(strided, image)
        for future in futures:
            future.result()


def _move(piece: Sequence[tuple[int, int, int]]) -> None:
    for target, source, nbytes in piece:
        ctypes.memmove(target, source, nbytes)  # releases the GIL


def _gather(moves: Sequence[Move], image: memoryview) -> None:
    with torch.no_grad():
        for move in moves:
            place = tensor_over(image[move.begin : move.begin + move.nbytes], move.tensor.dtype, tuple(move.tensor.shape))
            as_bits(place).copy_(as_bits(move.tensor))
