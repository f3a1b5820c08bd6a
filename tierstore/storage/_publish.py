"""Publishing a file: temporary, fsync, rename or link, fsync of the folders (PROTOCOLS.md §1 and §3). Blocking; runs in threads."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from datetime import datetime, timezone

from tierstore import crashpoints
from tierstore.errors import AccessError, ConflictError, OutcomeUnknownError, StorageError
from tierstore.names import TMP
from tierstore.storage._direct import DIRECT_WRITE_NBYTES, OpenFile
from tierstore.storage._syscalls import Syscalls
from tierstore.storage.temporaries import temporary_name

__all__ = ["Tree", "WritingFile", "create_file"]

_ATTEMPTS = 100
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


class Tree:
    """The folders below one root.

    Args:
        root: The absolute path of the root.
        syscalls: The system calls to use.
        durable: fsync files and folders.
    """

    def __init__(self, root: str, syscalls: Syscalls, *, durable: bool) -> None:
        self.root = root
        self.syscalls = syscalls
        self.durable = durable

    def inside(self, full: str) -> str:
        """`full` with all symbolic links followed, if that is inside the root.

        Raises:
            AccessError: A symbolic link leads out of the root.
        """
        if self._has_no_link(full):
            return full
        real, root = os.path.realpath(full), os.path.realpath(self.root)
        if real != root and not real.startswith(root.rstrip("/") + "/"):
            raise AccessError(
                f"{full} is a symbolic link that leads out of {self.root}, to {real}",
                hint="links to outside are not followed: copy the file into the tier, or open its own folder as a tier",
                path=full,
            )
        return real

    def _has_no_link(self, full: str) -> bool:
        """Whether nothing below the root on the way to `full` is a symbolic link. The root itself may be one."""
        at = self.root.rstrip("/")
        if not full.startswith(f"{at}/"):
            return False
        try:
            for name in full[len(at) + 1 :].split("/"):
                at = f"{at}/{name}"
                if stat.S_ISLNK(os.lstat(at).st_mode):
                    return False
        except OSError:  # nothing lies there, or may be looked at: whoever opens it learns why
            return True
        return True

    def make_folder(self, folder: str) -> None:
        """Makes `folder` and what is missing above it; the entries of a root that was missing itself are made durable above it too."""
        missing = []
        at = folder
        while not os.path.isdir(at):
            missing.append(at)
            at = os.path.dirname(at)
        for path in reversed(missing):
            try:
                self.syscalls.mkdir(path)
            except FileExistsError:
                # Or it existed: a deletion took the folder away that another writer had just made. Then `into_folder` tries again.
                if not stat.S_ISDIR(os.stat(path).st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
            if self.durable and not path.startswith(self.root + "/"):
                self.syscalls.fsync_folder(os.path.dirname(path))

    def sync_folders(self, folder: str) -> None:
        """Makes the entries of `folder` and of every folder above it durable, up to the root.

        All of them, not only the new ones: another process may have made one a moment ago and not yet have synced it.
        fsync of a folder without changes costs microseconds. It is not remembered by folders held open: these would keep a disk mounted.
        """
        if not self.durable:
            return
        at = folder
        while True:
            self.syscalls.fsync_folder(at)
            if at == self.root or not at.startswith(self.root.rstrip("/") + "/"):  # or what still stands above a root that is gone
                return
            at = os.path.dirname(at)

    def into_folder(self, final: str, publish: Callable[[], None]) -> None:
        """Runs `publish`, that makes the entry `final`, in a folder that a concurrent deletion may take away at any instant."""
        for attempt in range(_ATTEMPTS):
            try:
                self.make_folder(os.path.dirname(final))
                self.inside(os.path.dirname(final))
                publish()
            except FileNotFoundError:
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                return

    def temporary(self, kind: str) -> str:
        """The path of a fresh temporary; makes its folder."""
        folder = f"{self.root}/{TMP}"
        self.make_folder(folder)
        return f"{folder}/{temporary_name(kind)}"


class WritingFile:
    """A file that is written under a temporary name. Making one does no I/O; `discard` ends it at any time, from any thread.

    Args:
        tree: Where it is.
        final: What its path will be.
        nbytes: How long it will be, in bytes.
        direct: Go past the page cache where that pays.
        grows: `nbytes` is only what it will be at most: no space is reserved, and `grown` tells the length before it is published.
    """

    def __init__(self, tree: Tree, final: str, nbytes: int, *, direct: bool, grows: bool = False) -> None:
        self.final = final
        self._tree = tree
        self._nbytes = nbytes
        self._grows = grows
        self._direct = direct and nbytes >= DIRECT_WRITE_NBYTES
        self._lock = threading.Lock()
        self._given_up = False
        self._synced = False
        self._temporary = ""
        self._file: OpenFile | None = None

    def open(self) -> None:
        """Makes the temporary and reserves its space.

        Raises:
            OSError: ENOSPC or EDQUOT before a byte is written, where the file system can reserve.
        """
        with self._lock:
            if self._given_up:
                raise OSError(errno.ECANCELED, "the operation was given up")
            self._temporary = self._tree.temporary("write")
            self._file = file = OpenFile(self._tree.syscalls, self._temporary, _NEW, direct=self._direct)
            file.open()
        if self._nbytes >= DIRECT_WRITE_NBYTES and not self._grows:
            file.allocate(self._nbytes)

    def grown(self, nbytes: int) -> None:
        """Tells how long it became, in bytes."""
        self._nbytes = nbytes

    def write(self, data: memoryview, offset: int) -> None:
        assert self._file is not None
        self._file.write(data, offset)

    def write_from(self, take: Callable[[], memoryview], offset: int) -> None:
        """Writes what `take` gives; once `discard` has returned, neither of them looks at those bytes any more."""
        assert self._file is not None
        self._file.write_from(take, offset)

    def beside(self, work: Callable[[], None]) -> None:
        """Does `work` on the source's bytes; once `discard` has returned, it looks at them no more."""
        assert self._file is not None
        self._file.beside(work)

    def sync(self) -> None:
        """Makes the bytes durable, once all are written."""
        assert self._file is not None
        self._synced = True
        if self._tree.durable:
            self._file.sync()

    def publish(self) -> datetime:
        """Makes the bytes durable if `sync` has not, then the name; returns the time of the last change.

        Raises:
            OSError: Nothing was published, unless it came from the last step, the folders' fsync: then the new content is there,
                but might not survive a power failure.
        """
        tree, file = self._tree, self._file
        assert file is not None
        if not self._synced:
            self.sync()
        facts = file.facts()
        file.close()  # network file systems report lost bytes here
        if facts.st_size != self._nbytes:
            raise OSError(errno.EIO, f"{facts.st_size} bytes were stored of {self._nbytes}")
        crashpoints.reach("posix.before-rename")
        tree.into_folder(self.final, self._rename)
        crashpoints.reach("posix.after-rename")
        tree.sync_folders(os.path.dirname(self.final))
        return datetime.fromtimestamp(facts.st_mtime, timezone.utc)

    def _rename(self) -> None:
        with self._lock:
            if self._given_up:
                raise OSError(errno.ECANCELED, "the operation was given up")
            self._tree.syscalls.rename(self._temporary, self.final)

    def discard(self) -> None:
        """Removes the temporary; after `publish`, and a second time, it does nothing."""
        with self._lock:
            self._given_up = True
            file = self._file
        if file is None:
            return
        try:
            self._tree.syscalls.unlink(self._temporary)
        except FileNotFoundError:
            pass  # published, never made, or removed before
        try:
            file.close()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE):
                raise
            # bytes of a file that is given up were lost: that is what was wanted


def create_file(tree: Tree, final: str, data: bytes) -> None:
    """Create-if-absent (PROTOCOLS.md §3): a whole temporary is linked to its name, which fails if the name is taken.

    Raises:
        ConflictError: The name exists with other bytes.
        StorageError: The file system has no hard links.
        OutcomeUnknownError: The link was asked for, and neither its answer nor the temporary can be read.
        OSError: Anything else; the file was not made.
    """
    syscalls = tree.syscalls
    temporary = tree.temporary("create")
    try:
        file = OpenFile(syscalls, temporary, _NEW, direct=False)
        try:
            file.open()
            file.write(memoryview(data), 0)
            if tree.durable:
                file.sync()
        finally:
            file.close()
        crashpoints.reach("posix.create-before-link")
        tree.into_folder(final, lambda: _link(syscalls, temporary, final, data))
        crashpoints.reach("posix.create-after-link")
        tree.sync_folders(os.path.dirname(final))
    except ConflictError:
        # The winner may not have got so far. Whoever hears of its record acts on it, so the record has to be durable first.
        tree.sync_folders(os.path.dirname(final))
        raise
    finally:
        try:
            syscalls.unlink(temporary)
        except FileNotFoundError:
            pass  # it was never made


def _link(syscalls: Syscalls, temporary: str, final: str, data: bytes) -> None:
    try:
        syscalls.link(temporary, final)
        return
    except FileNotFoundError:
        raise
    except OSError as error:
        failed = error
    # NFS repeats a request whose answer was lost, and the repeat fails: two names on the temporary tell that it was made.
    try:
        linked = os.stat(temporary).st_nlink == 2
    except OSError as error:
        raise OutcomeUnknownError(
            f"creating {final}: its link failed ({failed}), and the temporary can't be read back ({error})",
            hint="read the file again when the file server answers: it holds either these bytes or another writer's",
            path=final,
        ) from failed
    if linked:
        return
    if isinstance(failed, FileExistsError):
        existing = _read_whole(syscalls, final)
        if existing != data:
            raise ConflictError(f"{final} exists with other content", path=final, existing=existing) from failed
        return
    if failed.errno in _NO_LINKS:
        raise StorageError(
            f"can't create {final}: the file system has no hard links ({failed.strerror})",
            hint="it can hold copies but can't be the authority: name a tier on another file system, or an S3 bucket, for that",
            path=final,
        ) from failed
    raise failed


def _read_whole(syscalls: Syscalls, path: str) -> bytes:
    """The content of a record; FileNotFoundError if a racing deletion took it, which makes the caller try again."""
    file = OpenFile(syscalls, path, os.O_RDONLY, direct=False)
    try:
        file.open()
        buffer = memoryview(bytearray(file.facts().st_size))
        return bytes(buffer[: file.read(buffer, 0)])
    finally:
        file.close()
