"""Which folders' own names this process has made durable already, so that a file in them costs one fsync of a folder and not one a level.

A folder that was removed and made anew has a name that is not durable, be it made by another process, between two looks. So each known
folder is held open: while it is, no other folder can have its number, and comparing numbers tells whether it still stands at its path.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

__all__ = ["DurableFolders"]

_MOST = 16
"""So many are held: a save works in one folder of a run and one of its log."""
_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A folder that is held open, and its number."""

    descriptor: int
    number: tuple[int, int]


class DurableFolders:
    """Safe from several threads. A pickled one is empty again; what a forked child inherits stays true."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held over a look at the file system, which may hang
        self._held: OrderedDict[str, Held] = OrderedDict()

    def __reduce__(self) -> Any:
        return DurableFolders, ()

    def hold(self, path: str) -> Held | None:
        """Holds the folder that stands at `path` now, to be given to `add` or `let_go`; None where that can't be done."""
        try:
            descriptor = os.open(path, _FLAGS)
        except OSError:
            return None
        try:
            return Held(descriptor=descriptor, number=_number(os.fstat(descriptor)))
        except OSError:
            os.close(descriptor)
            return None

    def add(self, path: str, held: Held) -> None:
        """The name of the folder `held` in the one above it, and so on up to the root, is durable."""
        with self._lock:
            dropped = [self._held.pop(path, None)]
            self._held[path] = held
            if len(self._held) > _MOST:
                dropped.append(self._held.popitem(last=False)[1])
        self.let_go(*dropped)

    def has(self, path: str) -> bool:
        """Whether the folder that stands at `path` now has a durable name."""
        try:
            there = _number(os.stat(path))
        except OSError:
            return False
        with self._lock:
            held = self._held.get(path)
            if held is None or held.number != there:
                return False
            self._held.move_to_end(path)
            return True

    def let_go(self, *held: Held | None) -> None:
        """Closes what is held."""
        for each in held:
            if each is not None:
                os.close(each.descriptor)

    def clear(self) -> None:
        """Knows nothing any more, and holds nothing."""
        with self._lock:
            held = list(self._held.values())
            self._held.clear()
        self.let_go(*held)

    def __del__(self) -> None:
        self.clear()


def _number(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino
