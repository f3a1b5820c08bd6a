"""The states of memory and page cache that measurements are made in, and the peak of a process's memory.

A virtual machine gets its memory from the host on first touch, several times slower than memory that it has touched before, and gives
back what has been free for a second (free page reporting, where the kernel has it). So there are two states to measure in: `warm_memory`
touches as much as a measurement may take and frees it just before; `fresh_memory` drops the page cache and waits until the free pages
have gone back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

_DROP = Path("/proc/sys/vm/drop_caches")
_REPORTED = Path("/sys/module/page_reporting/parameters/reported_kib")
_WINDOW = 1 << 20
_FRESH_WAIT_S, _QUIET_S = 12.0, 1.5


def settle() -> None:
    """Lets the disk write out what earlier measurements left dirty, so that they do not pay for each other."""
    os.sync()
    time.sleep(0.2)


def touch(nbytes: int) -> float:
    """Writes so many bytes of new anonymous memory and frees them; returns bytes a second."""
    if not nbytes:
        return 0.0
    began = time.perf_counter()
    with mmap.mmap(-1, nbytes) as memory:
        ones = b"\x01" * _WINDOW
        for at in range(0, nbytes, _WINDOW):
            memory[at : at + _WINDOW] = ones[: min(_WINDOW, nbytes - at)]
        seconds = time.perf_counter() - began
    return nbytes / seconds


def warm_memory(nbytes: int) -> None:
    """The next `nbytes` that anybody takes, for the page cache or for itself, have been touched before."""
    touch(nbytes)


def fresh_memory() -> str:
    """Drops the page cache and waits until the machine's free memory has gone back to its host.

    Returns:
        How far that went: what can be done depends on the kernel and on being root.
    """
    os.sync()
    dropped = drop_caches()
    if not _REPORTED.exists():
        time.sleep(_FRESH_WAIT_S if dropped else 0.0)
        return "page cache dropped, waited" if dropped else "neither page cache nor memory could be given back (not root)"
    end = time.monotonic() + _FRESH_WAIT_S
    last, since = _reported(), time.monotonic()
    while time.monotonic() < end and time.monotonic() - since < _QUIET_S:
        time.sleep(0.1)
        now = _reported()
        if now != last:
            last, since = now, time.monotonic()
    return (
        "page cache dropped, free pages reported to the host" if dropped else "free pages reported to the host, page cache kept (not root)"
    )


def drop_caches() -> bool:
    """Drops the clean page cache of the whole machine; False where that is not allowed."""
    try:
        _DROP.write_text("3")
    except OSError:
        return False
    return True


def forget(folder: Path) -> None:
    """Drops the files below `folder` from the page cache; what is dirty is written out first."""
    for path in files_below(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def make_cold(folder: Path) -> None:
    """Nothing of the files below `folder` is in memory when this returns.

    Raises:
        RuntimeError: Something is, for it is mapped somewhere, or dirty, and dropping all caches is not allowed.
    """
    forget(folder)
    if resident_nbytes(files_below(folder)):
        drop_caches()
        if left := resident_nbytes(files_below(folder)):
            raise RuntimeError(f"{left} bytes below {folder} stay in the page cache: not a cold read")


def make_warm(folder: Path) -> None:
    """All files below `folder` are in the page cache."""
    buffer = bytearray(8 << 20)
    for path in files_below(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def resident_nbytes(paths: Iterable[Path]) -> int:
    """Bytes of the files that lie in the page cache, by mincore, in whole pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    found = 0
    for path in paths:
        nbytes = path.stat().st_size
        if not nbytes:
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        finally:
            os.close(fd)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap", str(path))
        try:
            pages = ctypes.create_string_buffer((nbytes + mmap.PAGESIZE - 1) // mmap.PAGESIZE)
            if libc.mincore(address, nbytes, pages):
                raise OSError(ctypes.get_errno(), "mincore", str(path))
        finally:
            libc.munmap(address, nbytes)
        found += sum(page & 1 for page in pages.raw) * mmap.PAGESIZE
    return found


def files_below(folder: Path) -> list[Path]:
    """The regular files, links left out."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]


def fsync_all(folder: Path) -> None:
    """What a framework leaves out that does not sync: its files, and the folders that name them, are on the disk when this returns."""
    for path in [folder, *folder.rglob("*")]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class Peak:
    """The peak of this process's resident memory above what it was when the body began; Linux, 0 elsewhere.

    Memory that the process shares with others counts where it maps it. Files on a tmpfs that are not mapped do not.
    """

    extra_nbytes = 0

    def __enter__(self) -> Peak:
        self._before = 0
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the high water mark begins anew
            self._before = _status("VmRSS")
        except OSError:
            pass
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before:
            self.extra_nbytes = max(0, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _reported() -> int:
    return int(_REPORTED.read_text())
