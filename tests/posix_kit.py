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
from tierstore.storage.posix import PosixStorage


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


def hurry_once(hangs: threading.Event, storage: PosixStorage, deadline_s: float) -> None:
    """A call has a minute, however long a busy machine stands still; once one `hangs` it is `deadline_s`, until a test says else."""
    calls = storage._calls
    begun, patient = calls._begun, [60.0]
    calls.deadline_s = patient[0]

    def look() -> None:
        if patient and hangs.is_set():
            patient.clear()
            calls.deadline_s = deadline_s

    async def over_or_hanging(pool: Any, started: threading.Event, call: Any, future: asyncio.Future[Any]) -> bool:
        look()
        while patient and not future.done():
            await asyncio.wait({future}, timeout=0.005)
            look()
        return await begun(pool, started, call, future)

    setattr(calls, "_begun", over_or_hanging)  # noqa: B010 - mypy lets nobody assign to a method


async def cancel_within(reading: Coroutine[Any, Any, Any], slow: SlowReads) -> None:
    """Cancels a reading whose thread stands within `slow`: it must not end before that thread has."""
    task = asyncio.ensure_future(reading)
    assert await asyncio.to_thread(slow.reading.wait, 60)
    task.cancel()
    assert not (await asyncio.wait({task}, timeout=0.05))[0], "it ended while a thread could still write into the buffer"
    slow.go.set()
    assert (await asyncio.wait({task}, timeout=60))[0]
    assert task.cancelled()


def has_direct(folder: Path) -> bool:
    """Whether files in `folder` can be opened with O_DIRECT."""
    (folder / "try").write_bytes(b"")
    try:
        os.close(os.open(folder / "try", os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True
