"""A session: one configuration, its tiers and the event loop that works on them. What `Store` and the command line stand on."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Coroutine
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from tierstore.clock import Clock, SystemClock
from tierstore.config import cache_folder
from tierstore.config_models import StoreConfig
from tierstore.errors import ClosedError, TierStoreError
from tierstore.storage.loop import EventLoop
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.lease_store import LeaseStore
from tierstore.tiers.lease_watch import LeaseWatch
from tierstore.tiers.opening import LostAuthority, Opener, default_opener, open_tiers
from tierstore.tiers.record_cache import RecordCache
from tierstore.tiers.record_store import RecordStore
from tierstore.tiers.tier import Tiers

if TYPE_CHECKING:
    from tierstore.tiers.leased import Leases
    from tierstore.tiers.replica import Replica

__all__ = ["Session"]

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0
_T = TypeVar("_T")


class Session:
    """Made by `Session.open`; safe from several threads, a context manager.

    Attributes:
        config: The configuration.
        clock: The clock of everything that this session does.
        tiers: The opened tiers.
        loop: The event loop; made anew in a forked child, where the storages build their clients anew too.
    """

    def __init__(self, config: StoreConfig, tiers: Tiers, loop: EventLoop, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        self.loop = loop
        self._leases: Leases | None = None
        self._tiers = tiers
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        *,
        clock: Clock | None = None,
        create: bool = True,
        lost: LostAuthority = "refuse",
        opener: Opener = default_opener,
    ) -> Session:
        """Opens a store's tiers.

        Args:
            config: The configuration.
            clock: For tests.
            create: Open for writing: the authority and the nearest tier must work, and descriptors are made where there are none.
                False opens for reading: nothing is written, and tiers that can't be reached are left out with a warning.
            lost: What to do where the authority is empty and other tiers hold checkpoints.
            opener: Makes a tier's storage from its configuration; for tests.

        Raises:
            ConfigError: A tier belongs to another store, or the authority can't be one.
            RefusedError: The authority is empty, but other tiers hold checkpoints of the store.
            AccessError, TemporaryError, NotFoundError, StorageError: What must work does not; names the tier and the remedy.
        """
        clock = clock or SystemClock()
        loop = EventLoop(threads=config.io.threads, nice=config.io.nice)
        try:
            tiers = loop.run(open_tiers(config, create=create, lost=lost, opener=opener))
        except BaseException:
            loop.close()
            raise
        return cls(config, tiers, loop, clock)

    @property
    def tiers(self) -> Tiers:
        self._check_open()
        return self._tiers

    @property
    def leases(self) -> Leases:
        """Those that this session holds on checkpoints that are open.

        Made when it is first asked for: replicas stand on numpy, which would be a third of the start of a command that opens none.
        """
        with self._lock:
            if self._leases is None:
                leased = import_module("tierstore.tiers.leased")
                self._leases = leased.Leases(self._tiers, self.clock, lambda run: leased.lease_ttl_s(self.config, run))
            return self._leases

    def run(self, coro: Coroutine[Any, Any, _T], timeout: float | None = None) -> _T:
        """Runs a coroutine on the session's loop and returns its result.

        Args:
            coro: The coroutine; closed where it can't be run.
            timeout: Seconds; None waits for ever.

        Raises:
            ClosedError: The session is closed.
            DeadlineError: Not done within `timeout`; the coroutine was cancelled.
        """
        if self._closed:
            coro.close()
            self._check_open()
        return self.loop.run(coro, timeout)

    def submit(self, coro: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Starts a coroutine on the session's loop and returns at once."""
        if self._closed:
            coro.close()
            self._check_open()
        return self.loop.submit(coro)

    def new_cache(self) -> RecordCache:
        """A cache of log records that begins with what this machine has kept from earlier processes."""
        folder = cache_folder()
        return RecordCache(RecordStore(folder, self.tiers.store_id) if folder is not None else None)

    def new_watch(self) -> LeaseWatch:
        """An observer of leases that goes on where this machine's earlier processes stopped."""
        folder = cache_folder()
        return LeaseWatch(self.clock, LeaseStore(folder, self.tiers.store_id) if folder is not None else None)

    def open_replica(self, info: CheckpointInfo, *, objects: bool = False) -> Replica:
        """Opens a checkpoint under a lease, to be asked from the caller's threads; errors as `Leases.open`."""
        return self.run(self.leases.open(info, run=self.run, objects=objects))

    def forget(self, coro: Coroutine[Any, Any, None]) -> None:
        """Starts a clean-up on the session's loop, that nobody waits for; where the session is closed, there is nothing left to clean."""
        try:
            self.submit(coro)
        except ClosedError:
            log.debug("the session was closed first")

    def close(self) -> None:
        """Ends the storages' clients and the loop; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            if self._leases is not None:
                self.loop.run(self._leases.close())
            for tier in self._tiers:
                try:
                    self.loop.run(tier.storage.close(), _CLOSE_TIMEOUT_S)
                except TierStoreError as error:
                    log.warning("tier=%s did not close cleanly: %s", tier.name, error.message)
        finally:
            self.loop.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this store's session is closed", hint="open the store again")
