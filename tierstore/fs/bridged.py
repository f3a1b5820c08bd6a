"""fsspec's methods on the session's event loop: `BridgedFileSystem` brings work there, from a coroutine on any loop or from a thread.

Coroutines may be awaited on any event loop: each piece of work goes to the session's own one. Synchronous methods run there too and wait
(never by `fsspec.asyn.sync`, which returns None where a coroutine was cancelled, and hangs in some forked children: PROTOCOLS.md §8).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import _Cached

from tierstore.fs.opened import Key, Opened, Place, close_files, known_files, open_files
from tierstore.fs.places import place_of, with_config
from tierstore.fs.tree import Tree
from tierstore.storage._threads import DaemonPool

__all__ = ["BridgedFileSystem"]

_T = TypeVar("_T")
_ASIDE = 4
"""How many files of a transaction are written at once."""

_WRITES = frozenset(
    {"copy", "cp_file", "makedirs", "mkdir", "mv", "pipe", "pipe_file", "put", "put_file", "rm", "rm_file", "rmdir", "touch"}
)


class _Placed(_Cached):  # type: ignore[misc]
    """Instances are kept by the configuration that is meant, not by what was written to mean it."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return super().__call__(*args, **with_config(options))


class BridgedFileSystem(AsyncFileSystem, metaclass=_Placed):  # type: ignore[misc]
    """What `TierFileSystem` stands on: the store of its configuration, opened when it is needed, and the ways to its event loop.

    A class made of it has for each coroutine method `_x` that fsspec knows as `x` also `x`, which waits.
    """

    mirror_sync_methods = False  # ours are made here: fsspec's bridge has traps
    cachable = True

    def __init__(self, config: Any, tiers: Iterable[Any] | None, ack: str, *, asynchronous: bool, **options: Any) -> None:
        # A loop is named only because the base class would start one of its own; `loop` gives the session's.
        super().__init__(asynchronous=True, **{**options, "use_listings_cache": False})
        self.asynchronous = asynchronous
        self._given: dict[str, Any] = {"config": config, "tiers": None if tiers is None else list(tiers), "ack": ack}
        self._place: Place | None = None
        self._key: Key = ("", "")
        self._pool: DaemonPool | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in [name[1:] for name in dir(cls) if inspect.iscoroutinefunction(getattr(cls, name))]:
            if hasattr(AsyncFileSystem, name) and name not in vars(cls):
                setattr(cls, name, _synchronous(cls, name))

    def _opened(self, *, writing: bool = False) -> Opened:
        if self._place is None:
            place = place_of(self._given["config"], self._given["tiers"], self._given["ack"])
            self._key = place.key
            self._place = place
        return open_files(self._place, self._key, writing=writing)

    def _close(self, deadline: float | None) -> None:
        if self._place is not None:
            close_files(self._key, deadline=deadline)

    def _wait(self, coro: Callable[[], Coroutine[Any, Any, _T]], *, writing: bool = False) -> _T:
        """Runs a coroutine on the session's loop and waits for it; as `EventLoop.run`."""
        return self._opened(writing=writing).session.run(coro())

    async def _there(self, work: Callable[[Tree], Coroutine[Any, Any, _T]], *, writing: bool = False) -> _T:
        """Runs `work` on the session's loop, from whichever loop this is awaited on."""
        opened = known_files(self._key, writing=writing)
        if opened is None:
            opened = await asyncio.to_thread(self._opened, writing=writing)
        if asyncio.get_running_loop() is opened.session.loop.asyncio_loop:
            return await work(opened.tree)
        return await asyncio.wrap_future(opened.session.submit(work(opened.tree)))

    async def _aside(self, work: Callable[..., object], *args: object) -> None:
        """Runs `work`, which waits for the session's loop, in a thread of our own: the loop's threads may be what it waits for."""
        if self._pool is None or self._pool.pid != os.getpid():
            self._pool = DaemonPool(_ASIDE, "tierstore-fs")
        await asyncio.wrap_future(self._pool.submit(work, *args))

    def __reduce__(self) -> Any:
        """Another process opens the same configuration for itself."""
        return _make, (type(self), {**self._given, "asynchronous": self.asynchronous})


def _make(cls: type[BridgedFileSystem], options: dict[str, Any]) -> BridgedFileSystem:
    return cls(**{key: value for key, value in options.items() if value})


def _synchronous(cls: type[BridgedFileSystem], name: str) -> Callable[..., Any]:
    method = getattr(cls, f"_{name}")

    @functools.wraps(method)
    def wait(self: BridgedFileSystem, *args: Any, **options: Any) -> Any:
        return self._wait(lambda: getattr(self, f"_{name}")(*args, **options), writing=name in _WRITES)

    wait.__name__ = name
    return wait
