"""The stores that a process's file systems have opened: one for each configuration and ack level, shared by all instances.

fsspec makes an instance for each set of options, and of asynchronous ones one for each thread; libraries make more. What is written must be
carried on in the order in which it was written, whichever instance wrote it, and when the process ends it must be drained: so the
background work belongs to the process, not to an instance.

`_REGISTRY` is the package's one piece of state in a module, for the reason that `tierstore.dcp.stores` has one: a URI in somebody else's
code gives us no object that lives from one call to the next.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass

from tierstore.config import StoreConfig, files_ack
from tierstore.errors import NotFoundError, StorageError, TierStoreError
from tierstore.fs.tree import Tree
from tierstore.tiers.exit_hook import ExitHook
from tierstore.tiers.files.files import Ack, Files
from tierstore.tiers.session import Session

__all__ = ["Key", "Opened", "Place", "close_files", "known_files", "open_files"]

log = logging.getLogger(__name__)

Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What tells two open stores apart: the configuration, and when a file counts as written (empty: as configured)."""

    config: StoreConfig
    ack: str = ""

    @property
    def key(self) -> Key:
        return self.config.fingerprint, self.ack


class Opened:
    """A session with its files, in the process that opened it. Made by `open_files`.

    Attributes:
        session: The session.
        files: Any file through its tiers.
        tree: Files and checkpoints as one tree.
        unwritable: Why it was opened for reading only; None: it can be written.
    """

    def __init__(self, place: Place) -> None:
        self.unwritable: TierStoreError | None = None
        try:
            self.session = Session.open(place.config, lost="read")
        except (StorageError, NotFoundError) as error:  # what lies on the tiers that work can be read all the same
            self.session = Session.open(place.config, create=False)
            self.unwritable = error
            log.warning("files can be read only: %s", error.message)
        self.files = Files(self.session, ack=_ack(place))
        self.tree = Tree(self.session, self.files)
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._exit_hook = ExitHook(self)

    @property
    def usable(self) -> bool:
        """Whether it is open, and this process's own."""
        return not self._closed and os.getpid() == self._pid

    def close(self, deadline: float | None = None) -> None:
        """Waits until the background work is done, and closes; idempotent. In a forked child it does nothing.

        Args:
            deadline: Seconds that the background work may take; None: as long as it goes on.

        Raises:
            DeadlineError, TierStoreError: As `Files.sync`: what has not reached all tiers is carried on by a later process.
        """
        with self._lock:
            if not self.usable:
                return
            self._closed = True
        self._exit_hook.forget()
        try:
            self.tree.checkpoints.close()
            self.session.run(self.files.close(deadline))
        finally:
            self.session.close()


class _Registry:
    """The open stores of this process."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.lock = threading.Lock()
        self.open: dict[Key, Opened] = {}
        self.left: list[Opened] = []


_REGISTRY = _Registry()


def known_files(key: Key, *, writing: bool = False) -> Opened | None:
    """What `open_files` would give, where it is open already and nothing has to be waited for."""
    known = _REGISTRY.open.get(key)
    return known if known is not None and known.usable and not (writing and known.unwritable is not None) else None


def open_files(place: Place, key: Key, *, writing: bool = False) -> Opened:
    """This process's files at `place`; opened if they are not yet.

    Args:
        place: The configuration.
        key: `place.key`, kept by the caller.
        writing: It is going to be written: what was opened for reading only, as a tier did not answer then, is opened anew.

    Raises:
        ConfigError, AccessError, TemporaryError, NotFoundError, StorageError: As `Session.open`.
    """
    found = known_files(key, writing=writing)
    if found is not None:
        return found
    with _REGISTRY.lock:
        known = _REGISTRY.open.get(key)
        if known is None or not known.usable:
            known = _REGISTRY.open[key] = Opened(place)
        elif writing and known.unwritable is not None:
            _REGISTRY.left.append(known)
            known = _REGISTRY.open[key] = Opened(place)
        if writing and known.unwritable is not None:
            raise known.unwritable
        return known


def close_files(key: Key | None = None, *, deadline: float | None = None) -> None:
    """Drains and closes the files of `key` (None: all) that are open in this process; the next use opens anew.

    Raises:
        DeadlineError, TierStoreError: As `Opened.close`, after all were closed.
    """
    with _REGISTRY.lock:
        keys = [key] if key is not None else sorted(_REGISTRY.open)
        found = [_REGISTRY.open.pop(each) for each in keys if each in _REGISTRY.open]
        if key is None:
            found += _REGISTRY.left
            _REGISTRY.left = []
    with contextlib.ExitStack() as closing:  # each is closed, whatever the others raise
        for each in found:
            closing.callback(each.close, deadline)


def _ack(place: Place) -> Ack:
    config = place.config
    if place.ack:
        config = config.model_copy(update={"files": config.files.model_copy(update={"ack": place.ack})})
    return files_ack(config)
