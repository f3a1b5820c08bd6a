"""The memory of one image: a mapping, anonymous or of a file that a memory tier may take in under a name of its own.

Such a file has exactly the shard's length, so that a link is the whole write. It may be filled again only when nobody else has it: its
only name is ours (the tier's was unlinked by eviction), and no one has it open, for a reader of an unlinked file would get the next
save's bytes. The kernel tells the latter by granting a write lease (fcntl(2)); where it grants none, a reader finds out by the digests.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

__all__ = ["Memory", "NoRoomError", "whole_pages"]

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_HELD_OPEN = (errno.EAGAIN, errno.EWOULDBLOCK)
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), Linux 5.14: faults pages in without changing them."""

Standing = Literal["ours", "lent", "lost"]


class NoRoomError(OSError):
    """Internal: the file system has no room; carries how many bytes are free."""

    def __init__(self, free_nbytes: int) -> None:
        super().__init__("no room")
        self.free_nbytes = free_nbytes


def whole_pages(nbytes: int) -> int:
    """`nbytes`, rounded up to pages; one at least."""
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


class Memory:
    """One mapping, which lives as long as its pool wants it. Made by `anonymous` or `in_file`.

    Attributes:
        capacity: Length of the mapping, in bytes: whole pages.
        nbytes: Length of the file, in bytes; of anonymous memory, what was asked for last.
        path: The file's own name; None for anonymous memory.
        fresh: Its pages may not have been touched yet.
        registered: The kind of device that has it registered; empty if none has.
    """

    __slots__ = ("_fd", "_identity", "_map", "_unregister", "_whole", "capacity", "fresh", "nbytes", "path", "registered")

    def __init__(self, mapping: mmap.mmap, nbytes: int, fd: int = -1, path: Path | None = None) -> None:
        self._map = mapping
        self._whole = memoryview(mapping)
        self._fd = fd
        self._identity = _identity(os.fstat(fd)) if path is not None else None
        self._unregister: Callable[[], None] | None = None
        self.capacity = len(mapping)
        self.nbytes = nbytes
        self.path = path
        self.fresh = True
        self.registered = ""

    @classmethod
    def anonymous(cls, nbytes: int) -> Memory:
        """Shared memory without a name, which a fork does not make copy-on-write.

        Raises:
            OSError: The host has none.
        """
        mapping = mmap.mmap(-1, whole_pages(nbytes))
        _advise_huge(mapping)
        return cls(mapping, nbytes)

    @classmethod
    def in_file(cls, path: Path, nbytes: int) -> Memory:
        """A new file at `path` with all its space reserved: a full tmpfs is an error here, never a SIGBUS in mid-copy.

        Raises:
            NoRoomError: The space is not there; nothing was left behind.
            OSError: The file can't be made.
        """
        # As other files of a tier: mode 0666 less the umask.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _reserve(fd, whole_pages(nbytes))
            mapping = mmap.mmap(fd, whole_pages(nbytes))  # Python maps no byte beyond the file's end; the kernel maps whole pages
            os.ftruncate(fd, nbytes)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        _advise_huge(mapping)
        return cls(mapping, nbytes, fd, path)

    @property
    def view(self) -> memoryview:
        """The first `nbytes` bytes, writable."""
        return self._whole[: self.nbytes]

    @property
    def address(self) -> int:
        """Where it begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def fit(self, nbytes: int) -> None:
        """Makes it `nbytes` long, within `capacity`. Whoever still has views of what was longer must not look beyond the new end.

        Raises:
            NoRoomError: It grew again, and the file system has no room for that any more.
        """
        if nbytes == self.nbytes:
            return
        if whole_pages(nbytes) != whole_pages(self.nbytes):
            self.unregister()  # a device keeps the pages that it knows, also when the file has others in their place
        if self.path is not None:
            if nbytes > self.nbytes:
                _reserve(self._fd, nbytes)
                self.fresh = self.fresh or whole_pages(nbytes) > whole_pages(self.nbytes)
            os.ftruncate(self._fd, nbytes)
        self.nbytes = nbytes

    def standing(self) -> Standing:
        """Whose the memory is: ``ours`` alone, ``lent`` to a tier or to somebody who reads it, or ``lost``: our name of it is gone."""
        if self.path is None:
            return "ours"
        facts = os.fstat(self._fd)
        try:
            named = _identity(os.lstat(self.path)) == self._identity
        except OSError:
            named = False
        if not named:  # without our name the number of names says nothing
            return "lost"
        return "lent" if facts.st_nlink != 1 or _open_elsewhere(self._fd) else "ours"

    def touch(self, begin: int, end: int) -> None:
        """Faults the pages of ``[begin, end)`` in; their content stays, or is zeroed where it is `fresh`. Releases the GIL."""
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        last = min(whole_pages(end), whole_pages(self.nbytes))
        if last <= first:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        asked = libc.madvise(ctypes.c_void_p(self.address + first), ctypes.c_size_t(last - first), _POPULATE_WRITE)
        if asked != 0 and self.fresh:
            ctypes.memset(self.address + first, 0, last - first)

    def register(self, kind: str, unregister: Callable[[], None]) -> None:
        """Notes which kind of device has it registered, and how that is ended before the memory goes."""
        self.registered, self._unregister = kind, unregister

    def unregister(self) -> None:
        """Ends a device's registration; nothing where there is none."""
        unregister, self._unregister, self.registered = self._unregister, None, ""
        if unregister is not None:
            unregister()

    def discard(self) -> None:
        """Drops the name at once, and the memory when the last view of it is gone."""
        self.unregister()
        if self.path is not None:
            with suppress(OSError):
                if _identity(os.lstat(self.path)) == self._identity:
                    self.path.unlink(missing_ok=True)
            os.close(self._fd)
        try:
            self._whole.release()
            self._map.close()
        except BufferError:
            pass  # a view that someone still holds keeps the mapping alive, as it must; the collector unmaps it


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


def _reserve(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in _NO_ROOM:
            stats = os.fstatvfs(fd)
            raise NoRoomError(stats.f_bavail * stats.f_frsize) from error
        raise


def _open_elsewhere(fd: int) -> bool:
    """Whether somebody else has the file open or mapped; False where the kernel does not tell."""
    try:
        # Who opens the file within these microseconds makes the kernel signal us: not by SIGIO, which would end the process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno in _HELD_OPEN
    return False


def _advise_huge(mapping: mmap.mmap) -> None:
    """Asks for huge pages; a kernel built without them answers EINVAL, and small pages serve as well."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        pass
