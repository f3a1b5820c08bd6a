"""Taking a local file into a folder without copying it: as a clone that shares its blocks, or as a hard link. Blocking."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from tierstore.errors import AccessError
from tierstore.storage._publish import Tree

__all__ = ["clone_file"]

_FICLONE = 0x40049409
"""ioctl_ficlone(2)."""

_CANNOT = frozenset(
    {errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY, errno.EMLINK, errno.EBADF}
)


def clone_file(tree: Tree, final: str, origin: Path, *, hard: bool) -> int | None:
    """Publishes the content of `origin` as `final`, which is replaced; atomic and durable as any other write.

    Args:
        tree: The storage's folders.
        final: The new file's path.
        origin: The file to take in; links are followed.
        hard: Where the file system can't clone, make a hard link: both names are one file then.

    Returns:
        The file's length in bytes; None where neither can be done here, and nothing was.

    Raises:
        OSError: Anything else.
    """
    real = os.path.realpath(origin)
    temporary = tree.temporary("write")
    syscalls = tree.syscalls
    try:
        try:
            if not _cloned(tree, real, temporary):
                if not hard:
                    return None
                syscalls.link(real, temporary)
        except OSError as error:
            if isinstance(error, AccessError) or error.errno not in _CANNOT:
                raise
            return None
        descriptor = syscalls.open(temporary, os.O_RDONLY)
        try:
            nbytes = os.fstat(descriptor).st_size
            if tree.durable:
                syscalls.fsync(descriptor)
        finally:
            syscalls.close(descriptor)
        tree.into_folder(final, lambda: syscalls.rename(temporary, final))
        tree.sync_folders(os.path.dirname(final))
        return nbytes
    finally:
        try:
            syscalls.unlink(temporary)  # also after a rename of a link to its own file, which does nothing
        except FileNotFoundError:
            pass  # it was published, or never made


def _cloned(tree: Tree, real: str, temporary: str) -> bool:
    source = tree.syscalls.open(real, os.O_RDONLY)
    try:
        target = tree.syscalls.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.ioctl(target, _FICLONE, source)
            return True
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            tree.syscalls.unlink(temporary)
            return False
        finally:
            tree.syscalls.close(target)
    finally:
        tree.syscalls.close(source)
