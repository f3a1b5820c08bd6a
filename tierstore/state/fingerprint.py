"""Fingerprints of tensors: 128 bits that tell whether two ranks hold the same bytes. Fast, and not made against forgery.

Host memory is hashed with XXH3 (https://xxhash.com), at about the speed of reading it. On a device it is not brought over for this:
each 8-byte word is mixed with its position as SplitMix64 does (Steele, Lea, Flood, OOPSLA 2014), and the sum of all is kept, twice with
other constants. The two kinds give different fingerprints of the same bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import torch
import xxhash

from tierstore.state.bits import as_bits
from tierstore.state.copy_threads import CopyThreads

__all__ = ["fingerprints"]

_PIECE_NBYTES = 64 << 20
"""What one thread hashes at a time; on a device also what bounds the memory that mixing takes."""
_ODD = (
    (-7046029254386353131, -4658895280553007687, -7723592293110705685),
    (-4417276706812531889, 1609587929392839161, -8796714831421723037),
)


def fingerprints(tensors: Sequence[torch.Tensor], *, threads: CopyThreads | int | None = None) -> list[bytes]:
    """16 bytes for each tensor, of its elements' bits in row-major order; dtype and shape are not part of it.

    Args:
        tensors: Dense ones, on any device.
        threads: Who hashes: a store's threads, or how many are to be started; None: few.
    """
    kept: list[torch.Tensor] = []  # what had to be made for this lives until it is hashed
    pieces: list[tuple[torch.Tensor, int, int]] = []
    counts = []
    for tensor in tensors:
        dense = tensor if tensor.is_contiguous() else tensor.contiguous()
        kept.append(dense)
        counts.append(max(1, -(-dense.nbytes // _PIECE_NBYTES)))
        pieces += [(dense, at, min(_PIECE_NBYTES, dense.nbytes - at)) for at in range(0, max(1, dense.nbytes), _PIECE_NBYTES)]
    digests = [b""] * len(pieces)
    works: list[list[int]] = []
    room = 0
    for number, (_, _, nbytes) in enumerate(pieces):  # small tensors are hashed many at a time
        if room <= 0:
            works.append([])
            room = _PIECE_NBYTES // 4
        works[-1].append(number)
        room -= nbytes

    def digest(numbers: Sequence[int]) -> None:
        for number in numbers:
            digests[number] = _of_piece(pieces[number])

    workers = threads if isinstance(threads, CopyThreads) else CopyThreads(threads)
    try:
        workers.run([partial(digest, numbers) for numbers in works])
    finally:
        if workers is not threads:
            workers.close()
    found, at = [], 0
    for count in counts:
        found.append(digests[at] if count == 1 else xxhash.xxh3_128_digest(b"".join(digests[at : at + count])))
        at += count
    return found


def _of_piece(piece: tuple[torch.Tensor, int, int]) -> bytes:
    tensor, at, nbytes = piece
    if tensor.device.type == "cpu":
        memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr() + at) if nbytes else b""
        return xxhash.xxh3_128_digest(memory)  # releases the GIL
    return mixed(as_bits(tensor).reshape(-1).view(torch.uint8)[at : at + nbytes])


def mixed(flat: torch.Tensor) -> bytes:
    """The fingerprint of bytes on any device, computed there: two sums of mixed 8-byte words, modulo 2**64."""
    with torch.no_grad():
        whole = flat.numel() // 8 * 8
        words = flat[:whole].clone() if flat.storage_offset() % 8 else flat[:whole]
        tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        tail[: flat.numel() - whole] = flat[whole:]
        values = torch.cat([words.view(torch.int64), tail.view(torch.int64)])
        place = torch.arange(len(values), dtype=torch.int64, device=flat.device)
        sums = [_mix(values ^ _mix(place * first + second, second, third), first, third).sum() for first, second, third in _ODD]
        return torch.stack(sums).cpu().numpy().tobytes()


def _mix(words: torch.Tensor, first: int, second: int) -> torch.Tensor:
    words = (words ^ _shifted(words, 30)) * first
    words = (words ^ _shifted(words, 27)) * second
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """A right shift that brings in zeros; torch's copies the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
