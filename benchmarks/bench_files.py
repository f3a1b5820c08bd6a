"""Files by ``tier://`` against fsspec's local file system: one large file written and read back, and many small ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import arguments, scratch
from fsspec.implementations.local import LocalFileSystem
from measure import Table, timed
from memory import settle

from tierstore.fs.filesystem import TierFileSystem

_WINDOW = 8 << 20
_SMALL = 4096
_COUNT = 100


def write(fs: Any, path: str, data: memoryview, *, sync: bool) -> None:
    """Writes and closes a file; `sync`: with what a file system needs to be told beside, so that it survives a power loss."""
    with fs.open(path, "wb") as file:
        for begin in range(0, len(data), _WINDOW):
            file.write(data[begin : begin + _WINDOW])
        if sync:
            file.flush()
            os.fsync(file.fileno())


def read(fs: Any, path: str) -> None:
    with fs.open(path, "rb", block_size=_WINDOW) as file:
        while file.read(_WINDOW):
            pass


def small(fs: Any, folder: str, data: memoryview, *, sync: bool) -> None:
    for number in range(_COUNT):
        write(fs, f"{folder}/{number}", data[number * _SMALL : (number + 1) * _SMALL], sync=sync)


def read_small(fs: Any, folder: str) -> None:
    for number in range(_COUNT):
        fs.cat_file(f"{folder}/{number}")


def main() -> None:
    args = arguments(__doc__ or "", nbytes="256MiB")
    logging.getLogger("tierstore").setLevel(logging.ERROR)
    data = memoryview(os.urandom(args.nbytes))
    base, plain, ours, drained = "local, with fsync", "local, without fsync", "tier://", "tier://, and on both tiers"
    writing = Table("Write and close (tier://: hashed and synced, on the nearest tier)", args.nbytes, base)
    reading = Table("Read it back in windows of 8 MiB (tier://: each block proved)", args.nbytes, plain)
    writing_small = Table(f"Write and close {_COUNT} files of 4 KiB, one after the other", _COUNT * _SMALL, base)
    reading_small = Table(f"Read {_COUNT} files of 4 KiB, one after the other", _COUNT * _SMALL, plain)
    with scratch(args.directory) as root:
        local = LocalFileSystem(auto_mkdir=True)
        fs = TierFileSystem(tiers=[str(root / "node"), str(root / "shared")])
        here = str(root / "local")

        def measure(table: Table, name: str, work: Callable[..., object], *arguments: Any, **options: Any) -> None:
            settle()
            table.add(name, timed(work, *arguments, **options))

        def both(name: str, work: Callable[..., object], *arguments: Any) -> None:
            work(*arguments, sync=False)
            fs.sync_tiers()

        for turn in range(args.repeat):
            measure(writing, base, write, local, f"{here}/synced", data, sync=True)
            measure(writing, plain, write, local, f"{here}/plain", data, sync=False)
            measure(writing, ours, write, fs, f"/large/{turn}", data, sync=False)
            fs.sync_tiers()
            measure(writing, drained, both, drained, write, fs, f"/large/{turn}", data)
            measure(reading, plain, read, local, f"{here}/plain")
            measure(reading, ours, read, fs, f"/large/{turn}")
            measure(writing_small, base, small, local, f"{here}/small-synced/{turn}", data, sync=True)
            measure(writing_small, plain, small, local, f"{here}/small/{turn}", data, sync=False)
            measure(writing_small, ours, small, fs, f"/small/{turn}", data, sync=False)
            fs.sync_tiers()
            measure(reading_small, plain, read_small, local, f"{here}/small/{turn}")
            measure(reading_small, ours, read_small, fs, f"/small/{turn}")
            fs.rm(f"/large/{turn}")
            Path(f"{here}/synced").unlink()
        fs.close()
    for table in (writing, reading, writing_small, reading_small):
        table.show()


if __name__ == "__main__":
    main()
