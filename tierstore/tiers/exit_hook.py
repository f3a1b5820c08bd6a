"""What was left open when the interpreter ends is closed then, so that its background work is done."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import Protocol

from tierstore.errors import TierStoreError

__all__ = ["ExitHook"]

log = logging.getLogger(__name__)


class Closable(Protocol):
    """What can be closed."""

    def close(self) -> None: ...


class ExitHook:
    """Closes `owner` when the interpreter ends; until then it keeps it, and so its background work, alive.

    The hook must run before Python's own thread pools are shut down, which happens before ordinary atexit callbacks: threading
    has such a hook (used by concurrent.futures itself), private by name; atexit is the fallback.
    """

    def __init__(self, owner: Closable) -> None:
        self._owner: Closable | None = owner
        self._pid = os.getpid()
        getattr(threading, "_register_atexit", atexit.register)(self._close)

    def forget(self) -> None:
        """The owner is closed: nothing is left to do."""
        self._owner = None

    def _close(self) -> None:
        if self._owner is None or os.getpid() != self._pid:
            return
        try:
            self._owner.close()
        except TierStoreError as error:
            log.error("closing at exit: %s", error)
