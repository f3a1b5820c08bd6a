"""Bytes that are being written: hashed block by block on their way into a temporary file, and published from there, or discarded."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import AccessError, ClosedError, StorageError, TierFullError
from tierstore.format.digest import BLOCK_NBYTES, DIGEST_NBYTES, Buffer, file_digest
from tierstore.names import TMP
from tierstore.storage.temporaries import temporary_name
from tierstore.tiers.files.entry import FileEntry
from tierstore.tiers.tier import Tiers

__all__ = ["Spool", "spool_folders"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_COPY_NBYTES = 8 << 20


def spool_folders(tiers: Tiers) -> list[Path]:
    """Where bytes may wait: the local tiers, nearest first, as what lies on a tier already is published without copying it."""
    found = [path.parent for tier in tiers if (path := tier.storage.local_path(f"{TMP}/spool")) is not None]
    return [*found, Path(tempfile.gettempdir())]


class Spool:
    """One writer's bytes, in order. Blocking; one thread at a time gets in.

    The temporary carries the name of this process, so that what a killed one leaves is swept with all others. It is moved to the next
    folder when the disk below it is full.

    Args:
        folders: Where it may lie, best first.
        block_nbytes: The unit of hashing, in bytes.
    """

    def __init__(self, folders: Sequence[Path], block_nbytes: int = BLOCK_NBYTES) -> None:
        self._folders = list(folders)
        self._block = block_nbytes
        self._digests: list[bytes] = []
        self._hash = hashlib.sha256()
        self._in_block = 0
        self._lock = threading.Lock()
        self._fd = -1
        self._path: Path | None = None
        self._pid = os.getpid()
        self._discarded = False
        self._torn = False
        self.nbytes = 0

    @property
    def path(self) -> Path | None:
        """The temporary; None while nothing was written."""
        return self._path

    def write(self, data: Buffer) -> int:
        """Appends bytes; returns how many. After a failure it takes no more, and gives no entry: bytes are missing then.

        Raises:
            ClosedError: It was discarded, or made in another process.
            TierFullError: No folder has room.
            AccessError, StorageError: No folder can be written, or an earlier write failed.
        """
        with self._lock, memoryview(data).cast("B") as view:
            self._check()
            self._torn = True  # until all of it is there, whatever stops it
            done = 0
            while done < view.nbytes:
                with view[done : done + _COPY_NBYTES] as part:
                    self._put(part)
                    self._take_in(part)
                    self.nbytes += part.nbytes
                    done += part.nbytes
            self._torn = False
            return view.nbytes

    def entry(self, owner: str, created_at: str) -> FileEntry:
        """What proves the bytes so far.

        Raises:
            StorageError: A write failed: a part is missing. A text layer closes its file after a failed flush as if all were well.
        """
        with self._lock:
            self._check_whole()
            last = [self._hash.digest()] if self._in_block else []
            blocks = b"".join([*self._digests, *last])
        return FileEntry(
            nbytes=self.nbytes,
            digest=file_digest(blocks),
            block_nbytes=self._block,
            blocks=blocks,
            owner=owner,
            created_at=created_at,
        )

    def discard(self) -> None:
        """Ends it, and removes the temporary; idempotent. What was published from it stays."""
        with self._lock:
            if self._discarded or os.getpid() != self._pid:  # a forked child's copy of the object owns nothing
                return
            self._discarded = True
            self._drop()

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes that were written, for who publishes them."""
        with self._lock:
            self._check()
            data = os.pread(self._fd, nbytes, offset) if nbytes else b""
        if len(data) != nbytes:
            raise StorageError(f"{self._path} lost bytes that were written to it", hint="is its disk still mounted? Write the file again")
        return data

    def __del__(self) -> None:
        self.discard()

    def _check(self) -> None:
        if self._discarded or os.getpid() != self._pid:
            raise ClosedError("these bytes were discarded, or are being written in another process", hint="open the file again")
        self._check_whole()

    def _check_whole(self) -> None:
        if self._torn:
            raise StorageError("a write failed before, and its bytes are missing: nothing is published", hint="write the file anew")

    def _put(self, part: memoryview) -> None:
        failure: OSError | None = None
        while self._folders:
            try:
                if self._fd < 0:
                    self._open(self._folders[0])
                done = 0
                while done < part.nbytes:
                    done += os.pwrite(self._fd, part[done:], self.nbytes + done)
            except OSError as error:
                if failure is None or error.errno in _FULL:
                    failure = error
                if self.nbytes and error.errno not in _FULL:
                    break  # bytes that are there already may be lost: to go on elsewhere would hide it
                self._move_on()
            else:
                return
        raise self._explained(failure)

    def _open(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / temporary_name("spool")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._path = path

    def _move_on(self) -> None:
        """Goes on in the next folder, with what was written so far."""
        fd, path = self._fd, self._path
        self._fd, self._path = -1, None
        del self._folders[0]
        try:
            if fd < 0 or not self.nbytes:
                return
            while self._folders:
                try:
                    self._open(self._folders[0])
                    for offset in range(0, self.nbytes, _COPY_NBYTES):
                        data = os.pread(fd, min(_COPY_NBYTES, self.nbytes - offset), offset)
                        done = 0
                        while done < len(data):
                            done += os.pwrite(self._fd, data[done:], offset + done)
                except OSError as error:
                    if error.errno not in _FULL and not isinstance(error, PermissionError):
                        raise
                    self._drop()
                    del self._folders[0]
                else:
                    return
        finally:
            if fd >= 0:
                os.close(fd)
            if path is not None:
                path.unlink(missing_ok=True)

    def _take_in(self, part: memoryview) -> None:
        done = 0
        while done < part.nbytes:
            piece = part[done : done + self._block - self._in_block]
            self._hash.update(piece)
            done += piece.nbytes
            self._in_block += piece.nbytes
            if self._in_block == self._block:
                digest = self._hash.digest()
                assert len(digest) == DIGEST_NBYTES
                self._digests.append(digest)
                self._hash, self._in_block = hashlib.sha256(), 0

    def _drop(self) -> None:
        fd, path = self._fd, self._path
        self._fd, self._path = -1, None
        if fd >= 0:
            os.close(fd)
        if path is not None:
            path.unlink(missing_ok=True)

    def _explained(self, failure: OSError | None) -> StorageError:
        hint = "free space on a local tier, or set TMPDIR to a disk that has room"
        if failure is None or failure.errno in _FULL:
            return TierFullError(f"no disk has room for the {self.nbytes} bytes that were written so far, and more", hint=hint)
        kind = AccessError if isinstance(failure, PermissionError) else StorageError
        return kind(f"can't write to {self._path or 'a temporary'}: {failure.strerror}", hint="check the tier's folder and its permissions")
