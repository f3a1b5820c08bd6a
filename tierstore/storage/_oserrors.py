"""From OSError to the error family: what happened to which file, and what to do next."""

from __future__ import annotations

import errno
import os

from tierstore.errors import AccessError, DeadlineError, NotFoundError, StorageError, TierFullError, TierStoreError
from tierstore.units import format_size

__all__ = ["NO_SPACE", "free_nbytes", "translate"]

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENXIO})
_HINTS = {
    errno.ESTALE: "the file server forgot the file (NFS): check the mount and try again",
    errno.EIO: "the disk or the file server failed: see the kernel log (dmesg), and `tierstore verify` what lies there",
    errno.ENOENT: "the folder vanished while it was used: another process cleans up there, or the file system was unmounted",
    errno.ENOTDIR: "a file has the name of a folder that is needed: move it away",
    errno.EISDIR: "a folder has the name of this file: move it away",
    errno.ENAMETOOLONG: "use shorter run and file names on this file system",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
}


def free_nbytes(path: str) -> int:
    """Bytes that an unprivileged process may still write to the file system of `path`, or of its nearest folder that exists."""
    while True:
        try:
            facts = os.statvfs(path)
        except FileNotFoundError:
            above = os.path.dirname(path)
            if above == path:
                raise
            path = above
        else:
            return facts.f_bavail * facts.f_frsize


def translate(error: OSError, doing: str, path: str, *, nbytes: int | None = None) -> TierStoreError:
    """The error to raise for `error`, that came while `doing` something (``"write"``) to the file or folder `path`.

    Args:
        error: What the operating system said; raise the result ``from`` it.
        doing: The verb.
        path: The absolute path that the user knows (never that of a temporary).
        nbytes: How many bytes were to be written, for the message about lack of space.
    """
    code = error.errno or 0
    reason = os.strerror(code) if code else str(error)
    message = f"can't {doing} {path}: {reason}"
    if code in NO_SPACE:
        wanted = f"{format_size(nbytes)} wanted, " if nbytes is not None else ""
        try:
            free = free_nbytes(path)
            message += f" ({wanted}{format_size(free)} free)"
        except OSError:
            free = None
        quota = "raise the quota of this user or project" if code == errno.EDQUOT else "free space on this file system"
        return TierFullError(
            message,
            hint=f"{quota}, keep fewer checkpoints on this tier, or name a larger one; nothing that was stored is lost",
            path=path,
            wanted_nbytes=nbytes,
            free_nbytes=free,
        )
    if code in _MISSING and doing in ("read", "stat"):
        return NotFoundError(f"there is no file {path}", path=path)
    if code in _DENIED:
        hint = (
            "the file system is mounted read-only" if code == errno.EROFS else "check owner and permissions of the folder and its parents"
        )
        failed: StorageError = AccessError(message, hint=hint, path=path)
    elif code == errno.ETIMEDOUT:
        failed = DeadlineError(message, hint="check that the file server answers", path=path)
    else:
        failed = StorageError(message, hint=_HINTS.get(code, ""), path=path)
    failed.errno = code
    return failed
