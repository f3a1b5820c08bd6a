"""What the machine can do and no checkpoint does: memcpy, and writing and reading one file past the page cache."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from peers.base import Peer, State, Wait, nothing

_PIECE, _PAGE = 8 << 20, 4096
_BLOCK = 1 << 20


def memcpy(state: State, buffer: torch.Tensor) -> None:
    """Copies all of the state into a buffer of its size; by one thread or as many as torch takes."""
    at = 0
    for tensor in state.values():
        flat = tensor.reshape(-1).view(torch.uint8)
        buffer[at : at + flat.numel()].copy_(flat)
        at += flat.numel()


def image_of(state: State) -> mmap.mmap:
    """The bytes of a state in aligned memory that has been touched."""
    # Private: shared memory has no huge pages, and pinning it page by page for the disk slows the limit down.
    image = mmap.mmap(-1, sum(t.nbytes for t in state.values()), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        image.madvise(mmap.MADV_HUGEPAGE)
    memcpy(state, torch.frombuffer(image, dtype=torch.uint8))
    return image


class Image:
    """The bytes of a state, made at the first use and shared by all raw sessions: three of them would be three times the memory."""

    def __init__(self) -> None:
        self.memory: mmap.mmap | None = None

    def of(self, state: State) -> mmap.mmap:
        """Of a state of this size; whose values are in it does not matter to the disk."""
        if self.memory is None or len(self.memory) != sum(t.nbytes for t in state.values()):
            self.memory = image_of(state)
        return self.memory


class Raw:
    """One file with O_DIRECT from and into aligned memory, by some threads; what is less than a page at its end goes by the page cache.

    Args:
        folder: Where the file lies.
        image: What is written, and where it is read to.
        threads: How many write and read.
        prove: Each block of 1 MiB is hashed (SHA-256) before it is written, and hashed again when it was read.
    """

    def __init__(self, folder: Path, image: Image, *, threads: int, prove: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.image, self.threads, self.prove = folder / "raw.bin", image, threads, prove

    def save(self, state: State, turn: int) -> Wait:
        """Writes an image that was made at the first call: what is measured is the disk alone."""
        view = memoryview(self.image.of(state))
        whole = len(view) // _PAGE * _PAGE
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
        try:
            self._work(view, lambda piece, at: os.pwrite(fd, piece, at), whole, first=True)
            os.fsync(fd)
            os.ftruncate(fd, whole)
        finally:
            os.close(fd)
            view.release()
        return nothing

    def load(self, into: State) -> State:
        """Reads into the image, not into the tensors."""
        view = memoryview(self.image.of(into))
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        try:
            self._work(view, lambda piece, at: os.preadv(fd, [piece], at), len(view) // _PAGE * _PAGE, first=False)
        finally:
            os.close(fd)
            view.release()
        return into

    def files(self) -> Path:
        return self.path.parent

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Its image goes when the benchmark does."""
        self.image.memory = None

    def _work(self, view: memoryview, move: Callable[[memoryview, int], int], nbytes: int, *, first: bool) -> None:
        def piece(at: int) -> None:
            part = view[at : min(at + _PIECE, nbytes)]
            if self.prove and first:
                hash_blocks(part)
            if move(part, at) != len(part):
                raise OSError("short")
            if self.prove and not first:
                hash_blocks(part)

        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(piece, range(0, nbytes, _PIECE)))


def hash_blocks(part: memoryview) -> None:
    for at in range(0, len(part), _BLOCK):
        hashlib.sha256(part[at : at + _BLOCK]).digest()


def hash_files(folder: Path) -> None:
    """What a user does who wants digests of what a peer has written: reads the files again and hashes them, here by two threads."""

    def piece(path: Path, at: int) -> None:
        with path.open("rb", buffering=0) as file:
            file.seek(at)
            hashlib.sha256(file.read(_PIECE)).digest()

    pieces = [(path, at) for path in folder.rglob("*") if path.is_file() for at in range(0, path.stat().st_size, _PIECE)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: piece(*one), pieces))


def _raw(threads: int, *, prove: bool = False) -> Callable[[Path], Raw]:
    return lambda folder: Raw(folder, _IMAGE, threads=threads, prove=prove)


_IMAGE = Image()
RAW = "raw O_DIRECT"
RAW_HASHED = "raw O_DIRECT + SHA-256"
PEERS = [
    Peer(name=f"{RAW}, 1 thread", kind="limit", note="8 MiB pieces from an image", open=_raw(1), syncs=True),
    Peer(name=f"{RAW}, 4 threads", kind="limit", note="8 MiB pieces from an image", open=_raw(4), syncs=True),
    Peer(name=f"{RAW_HASHED}, 4 threads", kind="limit", note="each block of 1 MiB", open=_raw(4, prove=True), syncs=True),
]
