"""One process at a time works on a node's tier: an advisory lock per run, on a node-local disk.

The lock saves work, it does not keep anything safe: every step of promotion is idempotent and every file appears whole, so two
processes that copy the same checkpoint do harm to nothing but the bandwidth. That is also why a store without a node-local tier
works without a lock: flock may be local or off on Lustre and NFS (PROTOCOLS.md §1), and a lock that holds on some nodes only
is worse than none.

A file's lock (`FileLock`) is as harmless: of those that want one file copied onto the node's tier one copies it, and tells the others
how far it is.

flock is the operating system's: it is gone when the process that holds it is gone, however it died.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tierstore.errors import AccessError, LockedError
from tierstore.names import TMP
from tierstore.tiers.tier import Tiers

__all__ = ["FileLock", "RunLock", "lock_path"]

_POLL_S = 0.1
_TOLD_NBYTES = 64


def lock_path(tiers: Tiers, run: str) -> Path | None:
    """Where the lock of `run` lies: in the nearest node-local tier; None where there is no such tier."""
    name = f"reconcile-{hashlib.sha256(run.encode()).hexdigest()[:16]}.lock"
    for tier in tiers.tiers:
        if tier.scope == "node" and tier.storage.capabilities.local:
            return tier.storage.local_path(f"{TMP}/{name}")
    return None


class RunLock:
    """The lock of one run, held by one `RunLock` at a time; within it any number of tasks share it (`hold`)."""

    def __init__(self, path: Path | None, run: str) -> None:
        self.path = path
        self.run = run
        self._fd = -1
        self._holders = 0
        _close_in_children(self)

    @property
    def held(self) -> bool:
        return self._holders > 0

    def acquire(self) -> None:
        """Takes a share of the lock without waiting.

        Raises:
            LockedError: Another process has it; ``context["pid"]`` says which, where it could be read.
            AccessError: The lock file can't be made.
        """
        if self._holders == 0 and self.path is not None:
            self._fd = self._open(self.path)
        self._holders += 1

    def release(self) -> None:
        """Gives the share back; the last one frees the lock."""
        self._holders -= 1
        if self._holders == 0 and self._fd >= 0:
            fd, self._fd = self._fd, -1
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    @asynccontextmanager
    async def hold(self, *, wait_s: float | None = 0.0) -> AsyncIterator[None]:
        """Holds a share of the lock; waits up to `wait_s` seconds for it (None: without end).

        Raises:
            LockedError: Another process still has it after `wait_s` seconds.
        """
        waited = 0.0
        while True:
            try:
                self.acquire()
                break
            except LockedError:
                if wait_s is not None and waited >= wait_s:
                    raise
            await asyncio.sleep(_POLL_S)
            waited += _POLL_S
        try:
            yield
        finally:
            self.release()

    def _open(self, path: Path) -> int:
        fd, told = _take(path)
        if fd >= 0:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return fd
        pid = told.strip()
        raise LockedError(
            f"run {self.run!r} is being worked on by process {pid or 'unknown'} on this node",
            hint="wait for it (--wait), or ask that process: a trainer's background worker promotes by itself",
            run=self.run,
            pid=int(pid) if pid.isdigit() else None,
        )


class FileLock:
    """The lock of one piece of work on this node, with what its holder tells the others; its file goes with the work.

    A file that is there and that nobody holds was left by a process that died.

    Attributes:
        path: Its file.
        told: Where another process holds it: what that one told last. Where it was taken over from a process that died: that one's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told = ""
        self._fd = -1
        self._pid = -1

    @property
    def held(self) -> bool:
        return self._fd >= 0 and self._pid == os.getpid()

    def take(self) -> bool:
        """Takes it, if no other process has it; says whether it did.

        Raises:
            AccessError: The lock file can't be made or locked.
        """
        fd, self.told = _take(self.path)
        if fd < 0:
            return False
        self._fd, self._pid = fd, os.getpid()
        self.told = os.pread(fd, _TOLD_NBYTES, 0).decode("ascii", "replace")
        self.tell("")
        return True

    def tell(self, text: str) -> None:
        """What the others read while they wait: behind this process's number, a short line of ASCII."""
        if self.held:
            os.pwrite(self._fd, f"{self._pid} {text}".ljust(_TOLD_NBYTES - 1)[: _TOLD_NBYTES - 1].encode() + b"\n", 0)

    def release(self) -> None:
        """Removes its file, then lets it go: who finds the file finds somebody at work, or dead. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0 or self._pid != os.getpid():
            return
        with contextlib.suppress(OSError):  # a read-only file system, a swept folder: an empty file is left at worst
            if _same_file(fd, self.path):
                os.unlink(self.path)
        os.close(fd)

    def forget(self) -> None:
        """For a forked child: closes the parent's descriptor, so that the child does not keep the lock when the parent is gone."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _take(path: Path) -> tuple[int, str]:
    """Opens and locks a file: its descriptor; or -1 and what it holds, where another process has it.

    Raises:
        AccessError: It can't be made or locked.
    """
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise AccessError(
                f"can't open the lock {path}: {error.strerror}", hint="make the node tier writable", file=str(path)
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(fd, path):  # else somebody removed the name between opening and locking
                return fd, ""
            os.close(fd)
        except OSError as error:
            told = os.pread(fd, _TOLD_NBYTES, 0).decode("ascii", "replace")
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise AccessError(f"can't lock {path}: {error.strerror}", hint="put the node tier on a local disk") from error
            return -1, told


def _same_file(fd: int, path: Path) -> bool:
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _close_in_children(lock: RunLock) -> None:
    """Closes the descriptor in forked children: a child that outlives the trainer must not keep the lock."""
    reference = weakref.ref(lock)

    def forget() -> None:
        alive = reference()
        if alive is not None and alive._fd >= 0:
            os.close(alive._fd)
            alive._fd, alive._holders = -1, 0

    os.register_at_fork(after_in_child=forget)
