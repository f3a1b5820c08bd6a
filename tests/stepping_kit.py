"""Several clients of one store in one thread, step by step: a loop with virtual time, storages in memory, and who may go on next.

The real code runs; only its surroundings are made to measure. Every storage operation is a scheduling point, work for threads is done
on the spot, and time passes only when nobody can do anything else: so a run is a function of the schedule, and repeats exactly.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import selectors
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

from tiers_kit import Hooked

from tierstore.errors import ConflictError, IntegrityError, NotFoundError, UsageError
from tierstore.names import TMP
from tierstore.storage.contract import Capabilities, FileInfo, Listing, Source, Storage
from tierstore.tiers.tier import Tier, Tiers

T = TypeVar("T")
START = datetime(2026, 11, 29, 12, 0, tzinfo=timezone.utc)


_NO_TIME_S = 1e-6


class Stuck(AssertionError):
    """Everybody waits, and nothing is going to happen."""


class _Selector(selectors.SelectSelector):
    """Where an event loop would wait, this one lets somebody go on, or time pass."""

    loop: SteppingLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if timeout is not None and timeout < _NO_TIME_S:
            self.loop.now_s += timeout  # a pace that is faster than anything: nobody else comes in between
            return []
        if self.loop.idle is not None and self.loop.idle():
            return []
        if timeout is None:
            raise Stuck("everybody waits, and nothing is going to happen")
        self.loop.now_s += timeout
        return []


class SteppingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is virtual. `idle` is asked when nobody can go on: True if somebody can now."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.idle: Callable[[], bool] | None = None
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """On the spot: a thread would end whenever it likes."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: the error goes to whoever waits
            future.set_exception(error)
        return future

    def finish(self) -> None:
        """Ends what still runs, and the loop."""
        self.idle = None
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.close()


def run_virtually(coro: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a loop of virtual time."""
    loop = SteppingLoop()
    try:
        return loop.run_until_complete(coro)
    finally:
        loop.finish()


class InlinePool(concurrent.futures.Executor):
    """Stands for `storage._threads.DaemonPool` where a `PosixStorage` runs on a `SteppingLoop`."""

    crowded = False

    def __init__(self, size: int, name: str, nice: int = 0) -> None:
        self.pid = os.getpid()
        self.completed = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: the error goes to whoever waits
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        pass


class VirtualClock:
    """One machine's clock: the loop's time, off by `skew_s`. Its monotonic time has an origin of its own."""

    def __init__(self, loop: SteppingLoop, *, skew_s: float = 0.0) -> None:
        self._loop = loop
        self.skew_s = skew_s

    def now(self) -> datetime:
        return START + timedelta(seconds=self._loop.now_s + self.skew_s)

    def monotonic(self) -> float:
        return self._loop.now_s + 1000.0


class MemoryStorage:
    """Bytes in a dict: as strongly consistent as the protocols ask of a storage. `now` dates its files."""

    def __init__(self, uri: str, files: Mapping[str, bytes] | None = None, *, now: Callable[[], datetime] = lambda: START) -> None:
        self._uri = uri
        self._now = now
        self.files: dict[str, bytes] = dict(files or {})
        self.dates: dict[str, datetime] = {}

    @property
    def uri(self) -> str:
        return self._uri

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create=True, checksums=False, part_nbytes=8 << 20, local=False)

    def local_path(self, path: str) -> Path | None:
        return None

    def _bytes(self, path: str) -> bytes:
        if path not in self.files:
            raise NotFoundError(f"there is no file {self._uri}/{path}", path=path)
        return self.files[path]

    def _info(self, path: str) -> FileInfo:
        return FileInfo(path=path, nbytes=len(self._bytes(path)), modified_at=self.dates.get(path, START))

    def _set(self, path: str, data: bytes) -> None:
        self.files[path] = data
        self.dates[path] = self._now()

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = self._bytes(path)
        end = len(data) if nbytes is None else offset + nbytes
        if end > len(data):
            raise IntegrityError(f"{self._uri}/{path} has {len(data)} bytes, not {end}", path=path)
        return data[offset:end]

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        buffer.cast("B")[:] = await self.read(path, offset, buffer.nbytes)

    async def write(self, path: str, source: Source) -> FileInfo:
        part = self.capabilities.part_nbytes
        data = b"".join([bytes(await source.read(at, min(part, source.nbytes - at))) for at in range(0, source.nbytes, part)])
        return await self.put(path, data)

    async def put(self, path: str, data: bytes) -> FileInfo:
        self._set(path, bytes(data))
        return self._info(path)

    async def create(self, path: str, data: bytes) -> None:
        if not data:
            raise UsageError("a record is never empty")
        existing = self.files.get(path)
        if existing is not None and existing != data:
            raise ConflictError(f"{self._uri}/{path} exists", path=path, existing=existing)
        self._set(path, bytes(data))

    async def stat(self, path: str) -> FileInfo:
        return self._info(path)

    async def list(self, folder: str = "") -> list[FileInfo]:
        start = f"{folder}/" if folder else ""
        return [self._info(p) for p in sorted(self.files) if p.startswith(start) and not p.startswith(f"{TMP}/")]

    async def children(self, folder: str = "") -> Listing:
        start = f"{folder}/" if folder else ""
        files, folders = [], set()
        for path in self.files:
            if path.startswith(start) and not path.startswith(f"{TMP}/"):
                head, slash, _ = path[len(start) :].partition("/")
                if slash:
                    folders.add(start + head)
                else:
                    files.append(self._info(path))
        return Listing(files=tuple(files), folders=tuple(sorted(folders)))

    async def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.files.pop(path, None)
            self.dates.pop(path, None)

    async def free_nbytes(self) -> int | None:
        return None

    async def close(self) -> None:
        pass


class OneByOne(Hooked):
    """A storage of which the hook is asked before every operation, and before each file that a batch deletes."""

    async def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            await self._ask("delete", path)
            await self.inner.delete([path])


Hook = Callable[[str, str, str], Awaitable[None]]
"""Asked before every storage operation: tier, operation, path."""


def tiers_over(storages: Mapping[str, Storage], hook: Hook | None = None, *, nodes: int = 1) -> Tiers:
    """A client's own view of the store: the first `nodes` tiers are the node's, the next one is the authority."""
    made = [
        Tier(
            name=name,
            storage=OneByOne(storage, functools.partial(hook, name)) if hook else storage,
            scope="node" if number < nodes else "shared",
        )
        for number, (name, storage) in enumerate(storages.items())
    ]
    return Tiers(tiers=tuple(made), authority=made[nodes], durable_at=made[nodes], store_id="kit")


# ---- schedules

CHANGES = frozenset({"write", "put", "create", "delete"})


@dataclass(frozen=True, slots=True)
class Call:
    """One storage operation, and whose."""

    actor: str
    tier: str
    operation: str
    path: str

    def conflicts(self, other: Call) -> bool:
        """Whether their order can matter: one of them changes what the other looks at, or changes too."""
        if self.tier != other.tier or (self.operation not in CHANGES and other.operation not in CHANGES):
            return False
        return self.path == other.path or self._lists(other.path) or other._lists(self.path)

    def _lists(self, path: str) -> bool:
        return self.operation in ("list", "children") and (self.path == "" or path.startswith(f"{self.path}/"))


@dataclass(frozen=True, slots=True)
class Step:
    """One call that was made, and the calls of others that could have been made instead."""

    call: Call
    others: tuple[Call, ...]


@dataclass(slots=True)
class Stage:
    """Lets one actor go on at a time: the same one, until it waits for something else or `switches` names another for a step.

    `lives`: after how many operations of its own an actor is never let go on again.
    """

    loop: SteppingLoop
    order: Sequence[str]
    switches: Mapping[int, str] = field(default_factory=dict)
    waiting: dict[str, deque[tuple[asyncio.Future[None], Call]]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    current: str = ""
    closed: bool = False
    lives: dict[str, int] = field(default_factory=dict)

    def hook(self, actor: str) -> Hook:
        """For `tiers_over`: the actor's operations wait for their turn."""
        queue = self.waiting.setdefault(actor, deque())

        async def ask(tier: str, operation: str, path: str) -> None:
            if self.closed:
                raise asyncio.CancelledError("the actor is dead")
            future: asyncio.Future[None] = self.loop.create_future()
            queue.append((future, Call(actor, tier, operation, path)))
            await future

        return ask

    def close(self) -> None:
        """All who still wait are dead: what they asked for is not done, nor what they ask for in dying."""
        self.closed = True
        for queue in self.waiting.values():
            for future, _ in queue:
                future.cancel()

    def idle(self) -> bool:
        for queue in self.waiting.values():
            while queue and queue[0][0].done():  # cancelled meanwhile
                queue.popleft()
        ready = [actor for actor in self.order if self.waiting.get(actor) and self.lives.get(actor, 1) > 0]
        if not ready:
            return False
        wanted = self.switches.get(len(self.steps), self.current)
        self.current = wanted if wanted in ready else ready[0]
        future, call = self.waiting[self.current].popleft()
        self.steps.append(Step(call, tuple(self.waiting[actor][0][1] for actor in ready if actor != self.current)))
        if self.current in self.lives:
            self.lives[self.current] -= 1
        future.set_result(None)
        return True


# ---- every schedule

Actor = Callable[[Storage], Coroutine[Any, Any, Any]]


def interleavings(files: Mapping[str, bytes], *actors: tuple[Actor, str]) -> Iterator[tuple[MemoryStorage, list[Any]]]:
    """Runs the actors on one storage, once for every order of their operations; yields it, and each one's result or exception.

    Beside each actor stand the operations before which it hands over.
    """
    ahead: list[list[str]] = [[]]
    loop = SteppingLoop()
    try:
        while ahead:
            prefix = ahead.pop()
            storage, results, steps = _play(loop, files, actors, prefix)
            chosen = [step.call.actor for step in steps]
            for depth in range(len(prefix), len(steps)):
                ahead += [[*chosen[:depth], other.actor] for other in steps[depth].others]
            yield storage, results
    finally:
        loop.finish()


def _play(
    loop: SteppingLoop, files: Mapping[str, bytes], actors: Sequence[tuple[Actor, str]], prefix: Sequence[str]
) -> tuple[MemoryStorage, list[Any], list[Step]]:
    """One order: the choices of `prefix`, then as a `Stage` goes on."""
    storage = MemoryStorage("memory:", files)
    stage = Stage(loop, [str(number) for number in range(len(actors))], dict(enumerate(prefix)))

    def view_of(name: str, stops: str) -> Storage:
        ask = stage.hook(name)

        async def hook(operation: str, path: str) -> None:
            if operation in stops.split():
                await ask("", operation, path)

        return Hooked(storage, hook)

    async def play() -> list[Any]:
        works = [actor(view_of(name, stops)) for name, (actor, stops) in zip(stage.order, actors, strict=True)]
        return await asyncio.gather(*works, return_exceptions=True)

    loop.idle = stage.idle
    return storage, loop.run_until_complete(play()), stage.steps
