"""How much of a file the page cache has, without touching the file: cachestat(2) of Linux 6.5."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable

__all__ = ["cached_pages"]

_NUMBER = 451
"""The system call's, the same on all architectures named below."""


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Found(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted"))


def cached_pages(fd: int, offset: int, nbytes: int) -> int | None:
    """How many pages of the range are in memory; None where the kernel does not say (older, forbidden, or a file of somebody else)."""
    call = _syscall()
    if call is None or not nbytes:
        return None
    found = _Found()
    if call(_NUMBER, fd, ctypes.byref(_Range(offset, nbytes)), ctypes.byref(found), 0) != 0:
        return None
    return int(found.cached)


@functools.cache
def _syscall() -> Callable[..., int] | None:
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64", "ppc64le", "s390x", "riscv64"):
        return None
    call: Callable[..., int] = ctypes.CDLL(None).syscall
    return call
