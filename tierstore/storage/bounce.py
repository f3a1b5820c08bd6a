"""Memory that bytes pass through on their way: aligned for O_DIRECT, on huge pages, used again; and copying out of it without the GIL."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

__all__ = ["Bounces", "copy_bytes"]

_WITHOUT_GIL_NBYTES = 32 << 10
"""Shorter pieces are copied faster than the GIL changes hands, bytes."""
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)


class Bounces:
    """Pieces of memory, each lent to one thread at a time; as many as threads ask for at once are made, and none is ever made twice.

    It belongs to the process that made it: after a fork a child that filled them would copy every page.

    Args:
        nbytes: The length of each, in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.pid = os.getpid()
        self.nbytes = nbytes
        self.made = 0
        """How many there are: `nbytes` times this is what they cost."""
        self._lock = threading.Lock()
        self._spare: list[memoryview] = []
        self._closed = False

    def take(self) -> memoryview:
        """Page-aligned, writable memory, of any content."""
        with self._lock:
            if self._spare:
                return self._spare.pop()
            self.made += 1
        memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages by default
        if _HUGE is not None:
            try:
                memory.madvise(_HUGE)
            except OSError:
                pass  # a kernel without them: it costs a little more
        return memoryview(memory)

    def give_back(self, memory: memoryview) -> None:
        """Ends a loan."""
        with self._lock:
            if not self._closed:
                self._spare.append(memory)

    def close(self) -> None:
        """Frees what is not lent, at once, and what is, when it comes back."""
        with self._lock:
            self._closed = True
            self._spare.clear()


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies `source` over `target`; both are contiguous, writable bytes of one length. Other threads run on meanwhile."""
    nbytes = source.nbytes
    if nbytes < _WITHOUT_GIL_NBYTES:
        target[:] = source
        return
    if target.nbytes != nbytes:  # before memory is written that is not the target's
        raise ValueError(f"{nbytes} bytes don't fit into {target.nbytes}")
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(target)), ctypes.addressof(ctypes.c_char.from_buffer(source)), nbytes)
