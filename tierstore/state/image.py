"""Images: page-aligned mapped memory that a save is laid out in, recycled from save to save.

Touching fresh memory costs 7 to 14 times what copying into touched memory costs (FACTS.md §4), so an image is never
allocated per save: it goes back to its pool when the save's bytes are on the next tier. On a tmpfs tier an image is a
preallocated file in the tier's ``.tmp/``: a full tmpfs is an error with sizes when the image is made, never a SIGBUS in mid-copy.
Elsewhere it is anonymous shared memory, which a fork does not make copy-on-write.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from tierstore.errors import AccessError, ClosedError, DeadlineError, StorageError, TierFullError, UsageError
from tierstore.storage.temporaries import owner_is_dead, temporary_name
from tierstore.units import format_size

__all__ = ["Image", "ImagePool"]

log = logging.getLogger(__name__)

_KIND = "image"
_WASTE = 1.5
"""A free image is taken for a save that fills at least 1/1.5 of it; a much larger one would hold memory for nothing."""
_SMALL_NBYTES = 4 << 20
"""Below this, waste does not matter."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LAYOUTS = 4
"""How many layouts are remembered: a run alternates between few structures (full state, weights only)."""


class _Memory:
    """One mapping, which lives as long as its pool wants it."""

    __slots__ = ("capacity", "map", "path", "view")

    def __init__(self, mapping: mmap.mmap, path: Path | None) -> None:
        self.map = mapping
        self.path = path
        self.capacity = len(mapping)
        self.view = memoryview(mapping)

    def discard(self) -> None:
        """Drops the name at once, and the memory when the last view of it is gone."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        try:
            self.view.release()
            self.map.close()
        except BufferError:
            pass  # a view that someone still holds keeps the mapping alive, as it must; the collector unmaps it


class Image:
    """Mapped memory for one save, until `release`."""

    __slots__ = ("_memory", "_pid", "_pool", "nbytes")

    def __init__(self, pool: ImagePool, memory: _Memory, nbytes: int) -> None:
        self.nbytes = nbytes
        """What the save asked for; the mapping may be larger."""
        self._pool = pool
        self._memory = memory
        self._pid = os.getpid()

    @property
    def view(self) -> memoryview:
        """All of it, writable; its content is what an earlier save left."""
        return self._memory.view

    @property
    def capacity(self) -> int:
        """Length, in bytes: a whole number of pages."""
        return self._memory.capacity

    def release(self) -> None:
        """Gives the memory back for the next save; a second call, or one in a forked child, does nothing."""
        if os.getpid() == self._pid:
            self._pool._take_back(self)


class ImagePool:
    """Recycles images under a byte budget. Safe from several threads; a forked child starts with an empty pool.

    Args:
        directory: The tmpfs tier's ``.tmp`` folder; None: anonymous shared memory.
        max_nbytes: The budget for what saves in flight have asked for, in bytes; idle images are kept within it only. One save larger
            than it is let through when nothing else is in flight.
    """

    def __init__(self, directory: Path | str | None, *, max_nbytes: int) -> None:
        if max_nbytes <= 0:
            raise UsageError(
                f"an image pool of {max_nbytes} bytes can hold nothing", hint="set io.max_inflight to the state's size or more"
            )
        self.directory = None if directory is None else Path(directory)
        self.max_nbytes = max_nbytes
        self._layouts: OrderedDict[Hashable, Any] = OrderedDict()
        self._start_empty()
        if self.directory is not None:
            self._sweep(self.directory)

    def acquire(self, nbytes: int, timeout: float | None = None) -> Image:
        """Returns an image of at least `nbytes` bytes with any content, waiting for one where the budget is spent.

        Args:
            nbytes: Bytes needed.
            timeout: Seconds to wait for another save to end; None: without limit.

        Raises:
            DeadlineError: None became free in time; names the sizes.
            TierFullError: The tmpfs or the host's memory has no room.
            ClosedError: The pool was closed.
        """
        self._check_owner()
        need = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if self._closed:
                    raise ClosedError("the image pool is closed", hint="open the store again")
                memory = self._recycle(need) or self._allocate(need, nbytes)
                if memory is not None:
                    image = Image(self, memory, nbytes)
                    self._busy[id(image)] = image
                    return image
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    in_flight = sum(i.capacity for i in self._busy.values())
                    raise DeadlineError(
                        f"no staging memory for {format_size(nbytes)} within {timeout:g} s: {format_size(in_flight)} in {len(self._busy)} "
                        f"earlier saves are still on their way, of {format_size(self.max_nbytes)} allowed",
                        hint="save less often, raise io.max_inflight, or use save.backlog: skip_oldest",
                        nbytes=nbytes,
                        in_flight=in_flight,
                    )
                self._changed.wait(left)

    def layout(self, signature: Hashable) -> Any | None:
        """A layout remembered under `signature` (`state.stage` keeps its plans here, beside the images made for them), or None."""
        with self._changed:
            found = self._layouts.get(signature)
            if found is not None:
                self._layouts.move_to_end(signature)
            return found

    def remember(self, signature: Hashable, layout: Any) -> None:
        """Keeps `layout` for `layout()`; the least recently used of more than four is forgotten."""
        with self._changed:
            self._layouts[signature] = layout
            while len(self._layouts) > _LAYOUTS:
                self._layouts.popitem(last=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all images, in use and free."""
        with self._changed:
            return self._total()

    def close(self) -> None:
        """Frees the free images now and the others as they are released; idempotent."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            while self._free:
                self._free.pop().discard()
            self._layouts.clear()
            self._changed.notify_all()

    # ---- inside; the lock is held but where said

    def _start_empty(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._busy: dict[int, Image] = {}
        self._free: list[_Memory] = []  # least recently used first
        self._closed = False

    def _check_owner(self) -> None:
        """After a fork: the parent's images stay the parent's, its lock may be held by a thread that does not exist here (no lock held)."""
        if os.getpid() != self._pid:
            self._start_empty()

    def _total(self) -> int:
        return sum(i.capacity for i in self._busy.values()) + sum(i.capacity for i in self._free)

    def _recycle(self, need: int) -> _Memory | None:
        fitting = [i for i in self._free if need <= i.capacity and i.capacity <= max(need * _WASTE, _SMALL_NBYTES)]
        if not fitting:
            return None
        memory = min(fitting, key=lambda i: i.capacity)
        self._free.remove(memory)
        return memory

    def _allocate(self, need: int, nbytes: int) -> _Memory | None:
        while self._free and self._total() + need > self.max_nbytes:
            self._free.pop(0).discard()
        # In use counts what was asked for, as the worker's backlog does (`tiers.saves`): a save that it let in is never held up here
        # by pages, or by a recycled image that is larger than it had to be.
        if sum(i.nbytes for i in self._busy.values()) + nbytes > self.max_nbytes:
            if self._busy:
                return None
            log.warning("save nbytes=%d is larger than io.max_inflight=%d: let through alone", nbytes, self.max_nbytes)
        try:
            return self._map(need)
        except TierFullError:
            if not self._free:
                raise
            while self._free:  # our own idle images may be what fills it
                self._free.pop().discard()
            return self._map(need)

    def _map(self, need: int) -> _Memory:
        if self.directory is None:
            try:
                mapping = mmap.mmap(-1, need)
            except OSError as error:
                raise TierFullError(
                    f"the host has no memory for a staging image of {format_size(need)} ({error.strerror})",
                    hint="free memory, or save a smaller state",
                    nbytes=need,
                ) from error
            _advise_huge(mapping)
            return _Memory(mapping, None)
        path = self.directory / temporary_name(_KIND)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            mapping = _map_file(path, need)
        except PermissionError as error:
            raise AccessError(
                f"can't make a staging image in {self.directory}: {error.strerror}", hint="make the folder writable for this user"
            ) from error
        except _NoRoom as error:
            raise TierFullError(
                f"{self.directory} has no room for a staging image of {format_size(need)}: {format_size(error.free_nbytes)} are free",
                hint="free space there, give the tmpfs more (mount -o remount,size=...), or name another first tier; nothing was lost",
                nbytes=need,
                free=error.free_nbytes,
            ) from error
        except OSError as error:
            raise StorageError(f"can't make a staging image in {self.directory}: {error}", hint="check the first tier's folder") from error
        return _Memory(mapping, path)

    def _take_back(self, image: Image) -> None:
        """`Image.release` (no lock held)."""
        with self._changed:
            if self._busy.pop(id(image), None) is None:
                return
            others = self._total()
            if self._closed or (others and others + image.capacity > self.max_nbytes):
                image._memory.discard()
            else:  # alone, even an oversized one is kept: the next save of the same state is as large
                self._free.append(image._memory)
            self._changed.notify_all()

    def _sweep(self, directory: Path) -> None:
        """Removes images whose owners are provably dead; an unlinked image of a live one would only lose its name."""
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            return
        for name in names:
            if name.startswith(f"{_KIND}-") and owner_is_dead(name):
                (directory / name).unlink(missing_ok=True)
                log.info("swept image=%s of a dead process", directory / name)


class _NoRoom(OSError):
    """Internal: posix_fallocate found no room; carries what is free."""

    def __init__(self, free_nbytes: int) -> None:
        super().__init__("no room")
        self.free_nbytes = free_nbytes


def _map_file(path: Path, nbytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno in _NO_ROOM:
                stats = os.fstatvfs(fd)
                raise _NoRoom(stats.f_bavail * stats.f_frsize) from error
            raise
        mapping = mmap.mmap(fd, nbytes)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    _advise_huge(mapping)
    return mapping


def _advise_huge(mapping: mmap.mmap) -> None:
    """Asks for huge pages; a kernel built without them answers EINVAL, and small pages serve as well."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        pass
