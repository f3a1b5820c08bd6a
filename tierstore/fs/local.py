"""Files between the tiers and this machine: into a spool, and out into a temporary that takes the name when all bytes are there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os

from tierstore.fs.nodes import Node
from tierstore.fs.tree import Range, Tree
from tierstore.storage.temporaries import temporary_name

__all__ = ["receive_file", "send_file"]

_WINDOW_NBYTES = 16 << 20


def send_file(source: Path, write: Callable[[bytes], object], progress: Callable[[int], object]) -> None:
    """Writes a local file by `write`, window by window; blocking. `progress` is told how many bytes each window had."""
    with source.open("rb") as file:
        while data := file.read(_WINDOW_NBYTES):
            write(data)
            progress(len(data))


async def receive_file(tree: Tree, node: Node, target: Any, progress: Callable[[int], object]) -> None:
    """Copies a file of the tree to a local path, or into an open file.

    Under the path there is what was there before, or all of the new, at every instant: who finds a file there may use it. An existing file
    is replaced, not written over.
    """
    if not isinstance(target, Path):
        await _copy(tree, node, partial(asyncio.to_thread, target.write), progress)
        return
    temporary = target.with_name(f".{temporary_name('get')}")
    try:
        async with aiofiles.open(temporary, "xb") as file:  # its end waits in a thread, too, for what is buffered still
            await _copy(tree, node, file.write, progress)
        await aiofiles.os.replace(temporary, target)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # a write on a full disk does not say what it wrote
            error.filename = str(target)
        raise
    finally:
        await asyncio.to_thread(temporary.unlink, missing_ok=True)


async def _copy(tree: Tree, node: Node, write: Callable[[bytes], Awaitable[object]], progress: Callable[[int], object]) -> None:
    for begin in range(0, node.nbytes, _WINDOW_NBYTES):
        data = await tree.read(node, Range(start=begin, end=min(begin + _WINDOW_NBYTES, node.nbytes)))
        await write(data)
        progress(len(data))
