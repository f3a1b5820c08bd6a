"""Images: page-aligned mapped memory that a save is laid out in, recycled from save to save.

Touching fresh memory costs 7 to 14 times what copying into touched memory costs (FACTS.md §4), so an image is never
allocated per save: it goes back to its pool when the save's bytes are on the next tier. On a memory tier (tmpfs) an image is a
file in the tier's ``.tmp/`` that the tier takes in by a link: then the memory is the tier's, until eviction unlinks it and the pool has
it again. Elsewhere it is anonymous shared memory, which a fork does not make copy-on-write.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any

from tierstore.errors import AccessError, ClosedError, DeadlineError, StorageError, TierFullError, UsageError
from tierstore.state.copy_threads import CopyThreads
from tierstore.state.image_memory import Memory, NoRoomError, whole_pages
from tierstore.storage.temporaries import owner_is_dead, temporary_name
from tierstore.units import format_size

__all__ = ["Image", "ImagePool"]

log = logging.getLogger(__name__)

_KIND = "image"
_WASTE = 1.5
"""A free image is taken for a save that fills at least 1/1.5 of it; a much larger one would hold memory for nothing."""
_SMALL_NBYTES = 4 << 20
"""Below this, waste does not matter."""
_TOUCH_NBYTES = 32 << 20
"""What one thread faults in at a time."""
_LAYOUTS = 4
"""How many layouts are remembered: a run alternates between few structures (full state, weights only)."""


class Image:
    """Mapped memory for one save, until `release`."""

    __slots__ = ("_memory", "_pid", "_pool", "allocate_s", "nbytes")

    def __init__(self, pool: ImagePool, memory: Memory, nbytes: int, allocate_s: float) -> None:
        self.nbytes = nbytes
        """What the save asked for; the mapping may be larger."""
        self.allocate_s = allocate_s
        """What making and touching it took, in seconds; 0 for recycled memory."""
        self._pool = pool
        self._memory = memory
        self._pid = os.getpid()

    @property
    def view(self) -> memoryview:
        """Its `nbytes` bytes, writable; their content is what an earlier save left."""
        return self._memory.view

    @property
    def memory(self) -> Memory:
        """What it lies in."""
        return self._memory

    @property
    def path(self) -> Path | None:
        """The file on a memory tier that is exactly these bytes; None for anonymous memory."""
        return self._memory.path

    @property
    def capacity(self) -> int:
        """Length, in bytes: a whole number of pages."""
        return self._memory.capacity

    def touch(self, threads: CopyThreads) -> None:
        """Faults the pages of fresh memory in, which costs much more than filling them; nothing for memory that was used before."""
        memory = self._memory
        if memory.fresh:
            began = time.perf_counter()
            threads.run([partial(memory.touch, at, at + _TOUCH_NBYTES) for at in range(0, memory.nbytes, _TOUCH_NBYTES)])
            memory.fresh = False
            self.allocate_s += time.perf_counter() - began

    def release(self) -> None:
        """Gives the memory back for the next save; a second call, or one in a forked child, does nothing."""
        if os.getpid() == self._pid:
            self._pool._take_back(self)


class ImagePool:
    """Recycles images under a byte budget. Safe from several threads; a forked child starts with an empty pool.

    Args:
        directory: The memory tier's ``.tmp`` folder; None: anonymous shared memory.
        max_nbytes: The budget for what saves in flight have asked for, in bytes; idle images are kept within it only. One save larger
            than it is let through when nothing else is in flight. What a memory tier holds by a link is the tier's, and not counted.
    """

    def __init__(self, directory: Path | str | None, *, max_nbytes: int) -> None:
        if max_nbytes <= 0:
            raise UsageError(
                f"an image pool of {max_nbytes} bytes can hold nothing", hint="set io.max_inflight to the state's size or more"
            )
        self.directory = None if directory is None else Path(directory)
        self.max_nbytes = max_nbytes
        self._layouts: OrderedDict[Hashable, Any] = OrderedDict()
        self._kept: int
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
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if self._closed:
                    raise ClosedError("the image pool is closed", hint="open the store again")
                image = self._take(nbytes, bounded=True)
                if image is not None:
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

    def reserve(self, nbytes: int, count: int, touch: Callable[[Image], None]) -> int:
        """Sees to it that `count` images of `nbytes` bytes are idle or lent, so that the next saves make none; returns how many it made.

        So many are kept from now on, whatever the budget: who asks for them means to use them all.

        Args:
            nbytes: Bytes of each.
            count: How many.
            touch: Called with each before it is idle, to fault its pages in.

        Raises:
            TierFullError: There is no memory for the first one. Where there is none for a further one, there are fewer.
            ClosedError: The pool was closed.
        """
        self._check_owner()
        taken: list[Image] = []
        with self._changed:
            made = self.made
            self._kept = max(count, self._kept)
            self._reclaim()
            elsewhere = (*self._lent, *(image.memory for image in self._busy.values()))  # they come back by themselves
            wanted = count - len([m for m in elsewhere if _fits(m, nbytes)])
        try:
            while len(taken) < wanted:
                with self._changed:
                    if self._closed:
                        raise ClosedError("the image pool is closed", hint="open the store again")
                    try:
                        image = self._take(nbytes, bounded=False)
                    except TierFullError as error:
                        if not taken and wanted == count:
                            raise
                        log.warning("images=%d are prepared, not %d: %s", len(taken), wanted, error.message)
                        break
                assert image is not None  # without the bound nothing is waited for
                taken.append(image)
                touch(image)
        finally:
            for image in taken:
                image.release()
        return self.made - made

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
        """Bytes of all images: in use, free, and lent to a memory tier."""
        with self._changed:
            return self._total() + sum(m.capacity for m in self._lent)

    def close(self) -> None:
        """Frees the free images now and the others as they are released; what a memory tier holds is the tier's. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            for memory in (*self._free, *self._lent):
                memory.discard()
            self._free.clear()
            self._lent.clear()
            self._layouts.clear()
            self._changed.notify_all()

    # ---- inside; the lock is held but where said

    def _start_empty(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._busy: dict[int, Image] = {}
        self._free: list[Memory] = []  # least recently used first
        self._lent: list[Memory] = []
        self._kept = 1
        self.made: int = 0
        """How many images were made so far; the others were recycled."""
        self._closed = False

    def _check_owner(self) -> None:
        """After a fork: the parent's images stay the parent's, its lock may be held by a thread that does not exist here (no lock held)."""
        if os.getpid() != self._pid:
            self._start_empty()

    def _total(self) -> int:
        return sum(i.capacity for i in self._busy.values()) + sum(i.capacity for i in self._free)

    def _take(self, nbytes: int, *, bounded: bool) -> Image | None:
        """An image, or None where the budget is spent (never without `bounded`)."""
        self._reclaim()
        began, made = time.perf_counter(), self.made
        memory = self._recycle(nbytes) or self._allocate(nbytes, bounded=bounded)
        if memory is None:
            return None
        image = Image(self, memory, nbytes, time.perf_counter() - began if self.made > made else 0.0)
        self._busy[id(image)] = image
        return image

    def _reclaim(self) -> None:
        """Takes back what a tier has let go of."""
        for memory in tuple(self._lent):
            standing = memory.standing()
            if standing == "lent":
                continue
            self._lent.remove(memory)
            self._idle(memory) if standing == "ours" else memory.discard()

    def _idle(self, memory: Memory) -> None:
        """Keeps it for the next save, or frees it."""
        others = self._total()
        if self._closed or (others and others + memory.capacity > self.max_nbytes and len(self._busy) + len(self._free) >= self._kept):
            memory.discard()
        else:  # alone, even an oversized one is kept: the next save of the same state is as large
            self._free.append(memory)

    def _recycle(self, nbytes: int) -> Memory | None:
        fitting = [memory for memory in self._free if _fits(memory, nbytes)]
        if not fitting:
            return None
        memory = min(fitting, key=lambda m: (m.path is None, m.capacity))
        self._free.remove(memory)
        if self.directory is not None and memory.path is not None:
            self._drop([m for m in self._free if m.path is None])  # they stood in while the tier was full
        try:
            memory.fit(nbytes)
        except NoRoomError:
            memory.discard()
            return None
        return memory

    def _drop(self, memories: list[Memory]) -> None:
        for memory in memories:
            self._free.remove(memory)
            memory.discard()

    def _allocate(self, nbytes: int, *, bounded: bool) -> Memory | None:
        need = whole_pages(nbytes)
        while self._free and self._total() + need > self.max_nbytes:
            self._free.pop(0).discard()
        # In use counts what was asked for, as the worker's backlog does (`tiers.saves`): a save that it let in is never held up here
        # by pages, or by a recycled image that is larger than it had to be.
        if bounded and sum(i.nbytes for i in self._busy.values()) + nbytes > self.max_nbytes:
            if self._busy:
                return None
            log.warning("save nbytes=%d is larger than io.max_inflight=%d: let through alone", nbytes, self.max_nbytes)
        try:
            memory = self._map(nbytes)
        except TierFullError as error:
            memory = self._squeezed(nbytes, error, stand_in=bounded)
        self.made += 1
        return memory

    def _squeezed(self, nbytes: int, full: TierFullError, *, stand_in: bool) -> Memory:
        """Room after all: our own idle images may be what fills the memory, or what the tier holds of ours, which stays (`stand_in`)."""
        if self._free:
            self._drop(list(self._free))
            try:
                return self._map(nbytes)
            except TierFullError as error:
                full = error
        ours = (*self._lent, *(image.memory for image in self._busy.values()))  # those in use will be the tier's in a moment
        if not stand_in or all(memory.path is None for memory in ours):
            raise full
        log.warning("%s; the save is staged in anonymous memory, and its tier will not take it: %s", full.message, full.hint)
        return self._anonymous(nbytes)

    def _anonymous(self, nbytes: int) -> Memory:
        try:
            return Memory.anonymous(nbytes)
        except OSError as error:
            raise TierFullError(
                f"the host has no memory for a staging image of {format_size(nbytes)} ({error.strerror})",
                hint="free memory, or save a smaller state",
                nbytes=nbytes,
            ) from error

    def _map(self, nbytes: int) -> Memory:
        if self.directory is None:
            return self._anonymous(nbytes)
        path = self.directory / temporary_name(_KIND)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            return Memory.in_file(path, nbytes)
        except PermissionError as error:
            raise AccessError(
                f"can't make a staging image in {self.directory}: {error.strerror}", hint="make the folder writable for this user"
            ) from error
        except NoRoomError as error:
            raise TierFullError(
                f"{self.directory} has no room for a staging image of {format_size(nbytes)}: {format_size(error.free_nbytes)} are free",
                hint="free space there, give the tmpfs more (mount -o remount,size=...), or name another first tier; nothing was lost",
                nbytes=nbytes,
                free=error.free_nbytes,
            ) from error
        except OSError as error:
            raise StorageError(f"can't make a staging image in {self.directory}: {error}", hint="check the first tier's folder") from error

    def _take_back(self, image: Image) -> None:
        """`Image.release` (no lock held)."""
        with self._changed:
            if self._busy.pop(id(image), None) is None:
                return
            memory = image._memory
            standing = memory.standing()
            if standing == "lost" or self._closed:
                memory.discard()
            elif standing == "lent":
                self._lent.append(memory)
            else:
                self._idle(memory)
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


def _fits(memory: Memory, nbytes: int) -> bool:
    return whole_pages(nbytes) <= memory.capacity <= max(whole_pages(nbytes) * _WASTE, _SMALL_NBYTES)
