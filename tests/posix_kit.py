"""System calls that fail or wait, for the tests of what reads local files, and what a file system can do."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tierstore.storage._syscalls import OsSyscalls


class BrokenShards(OsSyscalls):
    """The disk gives nothing of a shard; `reads` counts who asked."""

    reads = 0

    def preadv(self, fd: int, buffer: memoryview, offset: int, flags: int = 0) -> int:
        if "shard" in os.readlink(f"/proc/self/fd/{fd}"):
            self.reads += 1
            raise OSError(errno.EIO, "broken")
        return super().preadv(fd, buffer, offset, flags)


class SlowReads(OsSyscalls):
    """A read sets `reading`, and waits until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.go = threading.Event(), threading.Event()

    def preadv(self, fd: int, buffer: memoryview, offset: int, flags: int = 0) -> int:
        self.reading.set()
        self.go.wait(60)
        return super().preadv(fd, buffer, offset, flags)


async def cancel_within(reading: Coroutine[Any, Any, Any], slow: SlowReads) -> None:
    """Cancels a reading whose thread stands within `slow`: it must not end before that thread has."""
    task = asyncio.ensure_future(reading)
    assert await asyncio.to_thread(slow.reading.wait, 20)
    task.cancel()
    assert not (await asyncio.wait({task}, timeout=0.05))[0], "it ended while a thread could still write into the buffer"
    slow.go.set()
    assert (await asyncio.wait({task}, timeout=20))[0]
    assert task.cancelled()


def has_direct(folder: Path) -> bool:
    """Whether files in `folder` can be opened with O_DIRECT."""
    (folder / "try").write_bytes(b"")
    try:
        os.close(os.open(folder / "try", os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True
