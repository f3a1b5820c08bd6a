"""Blocks of raw shards that others are made of: decoded once for all who want them at about the same time."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

from tierstore.storage.tasks import end_all

__all__ = ["Blocks", "Decoded", "Flights", "Key"]

Key = tuple[str, str, int]
"""A file's path in the storage, the digest of its footer (empty: a plain file), the block's number."""
Blocks = dict[int, memoryview]
"""Block's number → its bytes, that nobody changes; where runs of its own file lie, they are anything."""


class Decoded:
    """Keeps the blocks used last, and those that somebody is about to use, as far as there is room. Usable from any thread.

    Args:
        most_nbytes: Of the blocks used last, bytes.
        more_nbytes: Of further ones that are about to be used.
    """

    def __init__(self, most_nbytes: int = 32 << 20, more_nbytes: int = 64 << 20) -> None:
        self._most = most_nbytes
        self._more = more_nbytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Key, memoryview] = OrderedDict()
        self._nbytes = 0
        self._wanted: Counter[Key] = Counter()

    @contextmanager
    def wanting(self, keys: Collection[Key]) -> Iterator[None]:
        """Within it these blocks are about to be used: who is to read them waits for its turn, or for others of them."""
        with self._lock:
            self._wanted.update(keys)
        try:
            yield
        finally:
            with self._lock:
                self._wanted.subtract(keys)
                for key in keys:
                    if not self._wanted[key]:
                        del self._wanted[key]
                self._shrink()

    def get(self, key: Key) -> memoryview | None:
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            return block

    def put(self, key: Key, block: memoryview) -> None:
        """Keeps a block; the memory must be its own, or that of blocks that are put as well."""
        with self._lock:
            before = self._blocks.pop(key, None)
            self._nbytes += block.nbytes - (before.nbytes if before is not None else 0)
            self._blocks[key] = block
            self._shrink()

    def _shrink(self) -> None:
        if self._nbytes <= self._most:
            return
        for key in [key for key in self._blocks if key not in self._wanted]:
            if self._nbytes <= self._most:
                return
            self._nbytes -= self._blocks.pop(key).nbytes
        while self._nbytes > self._most + self._more:
            self._nbytes -= self._blocks.popitem(last=False)[1].nbytes

    def forget(self, stored: str) -> None:
        """The file under this name in the storage is not what it was."""
        with self._lock:
            for key in [key for key in self._blocks if key[0] == stored]:
                self._nbytes -= self._blocks.pop(key).nbytes


class Flights:
    """What is being decoded on one event loop: who wants the same waits for it."""

    def __init__(self) -> None:
        self._tasks: dict[Key, asyncio.Task[Blocks]] = {}
        self._keys: dict[asyncio.Task[Blocks], list[Key]] = {}
        self._waiting: dict[asyncio.Task[Blocks], int] = {}

    def of(self, key: Key) -> asyncio.Task[Blocks] | None:
        """What is decoding a block."""
        return self._tasks.get(key)

    def begin(self, keys: list[Key], load: Callable[[], Awaitable[Blocks]]) -> asyncio.Task[Blocks]:
        """Begins to decode blocks, which waits for no other block."""

        async def work() -> Blocks:
            return await load()

        task = asyncio.ensure_future(work())
        self._keys[task] = keys
        self._tasks.update(dict.fromkeys(keys, task))
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Blocks]) -> None:
        for key in self._keys.pop(task, ()):
            if self._tasks.get(key) is task:
                del self._tasks[key]
        if task.done() and not task.cancelled():
            task.exception()  # somebody who was to hear of it may have been cancelled

    async def wait(self, task: asyncio.Task[Blocks]) -> Blocks:
        """The blocks of a task; when all who wait for it are cancelled, so is it."""
        self._waiting[task] = self._waiting.get(task, 0) + 1
        try:
            await asyncio.wait([task])
        finally:
            self._waiting[task] -= 1
            if not self._waiting[task]:
                if not task.done():
                    self._ended(task)  # nobody joins any more
                    await asyncio.sleep(0)  # who has joined just now begins to wait
                if not self._waiting.get(task):
                    self._waiting.pop(task, None)
                    await end_all([task])
        return task.result()
