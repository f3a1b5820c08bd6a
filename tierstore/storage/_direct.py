"""Reading and writing extents of one file from several threads: past the page cache where alignment allows, through it elsewhere.

Writing 2 GB with O_DIRECT from mapped memory costs a tenth of the CPU of writing through the page cache, and is faster (FACTS.md §1).
It needs memory address, offset and length on multiples of the device's block; what is not aligned, the end of a file above all,
goes through the page cache. Both may be mixed in one file, as no page is written in both ways.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tierstore.storage._cachestat import cached_pages
from tierstore.storage._syscalls import Syscalls

__all__ = ["ALIGNMENT", "DIRECT_READ_NBYTES", "DIRECT_WRITE_NBYTES", "OpenFile", "address_of"]

ALIGNMENT = 4096
"""Bytes; a multiple of the logical block of every disk in use."""
DIRECT_WRITE_NBYTES = 1 << 20
"""Shorter files are written through the page cache, bytes."""
DIRECT_READ_NBYTES = 4 << 20
"""Shorter extents are read through the page cache, bytes."""
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_CACHED_ONLY = getattr(os, "RWF_NOWAIT", 0)


def address_of(view: memoryview) -> int:
    """The address of the first byte of a non-empty view of bytes."""
    import numpy as np  # a third of the start of a command that moves no bytes

    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


class OpenFile:
    """One file, used by several threads at once, whose descriptors are closed when the last of them has let go.

    A cancelled coroutine can't stop a thread in a system call. Closing its descriptor under it would give the number to another file,
    and the bytes with it. So `close` marks the file, waits for those threads, and lets none in again. Making an `OpenFile` does no I/O.

    Args:
        syscalls: The system calls to use.
        path: The absolute path.
        flags: ``os.O_RDONLY`` or ``os.O_RDWR | os.O_CREAT | os.O_EXCL``.
        direct: Try O_DIRECT for what is aligned.
    """

    def __init__(self, syscalls: Syscalls, path: str, flags: int, *, direct: bool) -> None:
        self._syscalls = syscalls
        self._path = path
        self._changed = threading.Condition()
        self._users = 0
        self._closing = False
        self._direct_fd = -1
        self._direct_flags = (flags & ~(os.O_CREAT | os.O_EXCL)) | _O_DIRECT
        self._direct_wanted = direct and bool(_O_DIRECT)
        self._flags = flags
        self._fd = -1

    def open(self) -> None:
        """Opens the file.

        Raises:
            OSError: What the system said; ECANCELED if `close` came first.
        """
        with self._changed:
            if self._closing:
                raise OSError(errno.ECANCELED, "the operation was given up")
            self._fd = self._syscalls.open(self._path, self._flags)

    def facts(self) -> os.stat_result:
        """fstat of the open file."""
        with self._used():
            return os.fstat(self._fd)

    def allocate(self, nbytes: int) -> None:
        """Reserves the space for `nbytes` bytes.

        Raises:
            OSError: ENOSPC or EDQUOT.
        """
        with self._used():
            self._syscalls.allocate(self._fd, nbytes)

    @contextmanager
    def _used(self) -> Iterator[None]:
        with self._changed:
            if self._closing:
                raise OSError(errno.ECANCELED, "the operation was given up")
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def _direct(self) -> int:
        """The descriptor for O_DIRECT, opened at its first use; -1 where the file system has none."""
        with self._changed:
            if self._direct_wanted and self._direct_fd < 0:
                try:
                    self._direct_fd = self._syscalls.open(self._path, self._direct_flags)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
                    self._direct_wanted = False
            return self._direct_fd if self._direct_wanted else -1

    def write(self, data: memoryview, offset: int) -> None:
        """Writes all of `data` at `offset`.

        Raises:
            OSError: What the system said; ECANCELED if the file is being closed.
        """
        with self._used():
            self._write(data, offset)

    def write_from(self, take: Callable[[], memoryview], offset: int) -> None:
        """`write` of what `take` gives, which is called when the file is known to be open, and for which `close` waits too."""
        with self._used(), take().cast("B") as data:
            self._write(data[:], offset)

    def beside(self, work: Callable[[], None]) -> None:
        """Does `work`, unless the file is being closed, and lets `close` wait for it."""
        with self._used():
            work()

    def _write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < data.nbytes:
            rest, at = data[done:], offset + done
            nbytes = rest.nbytes // ALIGNMENT * ALIGNMENT
            if nbytes and at % ALIGNMENT == 0 and address_of(rest) % ALIGNMENT == 0 and (fd := self._direct()) >= 0:
                try:
                    wrote = self._syscalls.pwrite(fd, rest[:nbytes], at)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
                    self._direct_wanted = False  # a device with larger blocks, or a file system that only pretends
                    continue
            else:
                wrote = self._syscalls.pwrite(self._fd, rest, at)
            if wrote <= 0:
                raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
            done += wrote

    def read(self, buffer: memoryview, offset: int) -> int:
        """Fills `buffer` from `offset`; returns the number of bytes read, which is less than wanted only at the end of the file."""
        if self._direct_wanted and buffer.nbytes >= DIRECT_READ_NBYTES and not self.is_cached(offset, buffer.nbytes):
            return self.read_direct(buffer, offset)
        return self.read_buffered(buffer, offset)

    def read_direct(self, buffer: memoryview, offset: int) -> int:
        """`read`, past the page cache where offset and memory are aligned and the file system allows it."""
        with self._used():
            done = 0
            while done < buffer.nbytes:
                rest, at = buffer[done:], offset + done
                nbytes = rest.nbytes // ALIGNMENT * ALIGNMENT
                if nbytes and at % ALIGNMENT == 0 and address_of(rest) % ALIGNMENT == 0 and (fd := self._direct()) >= 0:
                    try:
                        got = self._syscalls.preadv(fd, rest[:nbytes], at)
                    except OSError as error:
                        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                            raise
                        self._direct_wanted = False
                        continue
                else:
                    got = self._syscalls.preadv(self._fd, rest, at)
                if got == 0:
                    break
                done += got
            return done

    def read_buffered(self, buffer: memoryview, offset: int) -> int:
        """`read`, through the page cache."""
        with self._used():
            done = 0
            while done < buffer.nbytes and (got := self._syscalls.preadv(self._fd, buffer[done:], offset + done)):
                done += got
            return done

    def is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether the page cache has most of these bytes, so that reading through it is faster than the disk. Reads nothing ahead."""
        with self._used():
            pages = cached_pages(self._fd, offset, nbytes)
            if pages is None:
                return self._begins_cached(offset)
            return 4 * pages * mmap.PAGESIZE >= 3 * nbytes

    def _begins_cached(self, offset: int) -> bool:
        """One byte is asked for: the kernel begins to read from the disk what is asked for and is not there."""
        if not _CACHED_ONLY:
            return False
        try:
            return self._syscalls.preadv(self._fd, memoryview(bytearray(1)), offset, _CACHED_ONLY) == 1
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            return False

    def read_bytes(self, nbytes: int, offset: int) -> bytes:
        """Up to `nbytes` bytes from `offset`, through the page cache; fewer only at the end of the file."""
        with self._used():
            pieces: list[bytes] = []
            done = 0
            while done < nbytes:
                piece = self._syscalls.pread(self._fd, nbytes - done, offset + done)
                if not piece:
                    break
                pieces.append(piece)
                done += len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def sync(self) -> None:
        """Makes the bytes durable. A failure is final: the kernel may have dropped the pages, so that a second call would lie."""
        with self._used():
            self._syscalls.fsync(self._fd)

    def close(self) -> None:
        """Waits for the threads that use the file, then closes it; the second call does nothing.

        Raises:
            OSError: The system found out only now that bytes were not stored (EIO on network file systems).
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.wait_for(lambda: self._users == 0)
            fds = [fd for fd in (self._direct_fd, self._fd) if fd >= 0]
            self._direct_fd = self._fd = -1
        failed: OSError | None = None
        for fd in fds:
            try:
                self._syscalls.close(fd)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed
