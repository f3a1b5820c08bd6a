"""The system calls that durability rests on, as an object: tests record them, drop one, or let one fail.

`PosixStorage` calls nothing else to change the file system. Paths are absolute. What a call returns and raises is what
the module `os` returns and raises.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Protocol

__all__ = ["OsSyscalls", "Syscalls"]


class Syscalls(Protocol):
    """Everything that reads or changes a file's bytes or a folder's entries."""

    def open(self, path: str, flags: int) -> int:
        """A file's descriptor; new files get mode 0666 less the umask."""

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserves space for `nbytes` bytes and makes the file that long; nothing where the file system can't.

        Raises:
            OSError: ENOSPC or EDQUOT: the space isn't there.
        """

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int: ...

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes: ...

    def preadv(self, fd: int, buffer: memoryview, offset: int, flags: int = 0) -> int: ...

    def fsync(self, fd: int) -> None: ...

    def close(self, fd: int) -> None: ...

    def link(self, source: str, target: str) -> None: ...

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def mkdir(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...

    def fsync_folder(self, path: str) -> None:
        """Makes the entries of a folder durable."""


class OsSyscalls:
    """The operating system's own."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def allocate(self, fd: int, nbytes: int) -> None:
        # Not os.posix_fallocate: where the file system can't (NFS before 4.2), glibc writes a byte to every block, at the
        # price of writing the file twice. fallocate(2) says EOPNOTSUPP instead, and lack of space shows while writing.
        libc = ctypes.CDLL(None, use_errno=True)
        offset_type = ctypes.c_int64
        try:
            fallocate = libc.fallocate64 if hasattr(libc, "fallocate64") else libc.fallocate
        except AttributeError:
            return
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, offset_type, offset_type)
        while fallocate(fd, 0, 0, nbytes) != 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV):
                return
            raise OSError(code, os.strerror(code))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        return os.pread(fd, nbytes, offset)

    def preadv(self, fd: int, buffer: memoryview, offset: int, flags: int = 0) -> int:
        return os.preadv(fd, [buffer], offset, flags)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def fsync_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
