"""Storages that fail on purpose: the n-th operation, for n = 1, 2, 3 … until a run meets no fault (PROTOCOLS.md §9.3).

::

    for plan in sweep("error_after"):
        run(FaultStorage(inner, plan))      # ends with a result or a typed error, never with silence
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Literal, TypeVar, get_args

from tierstore.errors import IntegrityError, NotFoundError, OutcomeUnknownError, TemporaryError, TierFullError, UsageError
from tierstore.storage.contract import FileInfo, Listing, Storage
from tierstore.testing.around import AroundStorage, Call

__all__ = ["OPERATIONS", "FaultKind", "FaultPlan", "FaultStorage", "HidingStorage", "sweep"]

T = TypeVar("T")
FaultKind = Literal["error_before", "error_after", "short_read", "bit_flip", "no_space", "cancel", "hang"]
"""What happens to the chosen operation.

- ``error_before``: `TemporaryError`, and it was not done; ``error_after``: it was done, and its acknowledgement is lost
  (`OutcomeUnknownError` for a create, as the contract has it).
- ``short_read``: the file seems to end early (`IntegrityError`); ``bit_flip``: one bit of what is read is wrong, and nobody says so.
- ``no_space``: `TierFullError`; ``cancel``: the operation is cancelled in the middle; ``hang``: it never ends.
"""
OPERATIONS = ("read", "read_into", "write", "put", "create", "stat", "list", "children", "delete", "free_nbytes")
_READS = frozenset({"read", "read_into"})
_WRITES = frozenset({"write", "put", "create"})
_APPLIES: dict[str, frozenset[str]] = {"short_read": _READS, "bit_flip": _READS, "no_space": _WRITES}


class FaultPlan:
    """Which operation fails, and how. One plan may serve several storages: it counts over all of them, from any thread.

    Args:
        kind: What happens.
        nth: Which one, counted from 1 over the operations that this kind applies to.
        operations: Count only these.
        match: Count only operations on paths of which this is a part.
    """

    def __init__(self, kind: FaultKind, nth: int, *, operations: Collection[str] = OPERATIONS, match: str = "") -> None:
        if kind not in get_args(FaultKind) or nth < 1:
            raise UsageError(f"no fault plan {kind!r}, {nth}", hint=f"kinds are {', '.join(get_args(FaultKind))}, and counting begins at 1")
        self.kind = kind
        self.nth = nth
        self.count = 0
        """How many operations were counted."""
        self.fired: str = ""
        """The operation that failed, as ``"read run/…/index.safetensors"``; empty as long as none did."""
        self._operations = frozenset(operations) & _APPLIES.get(kind, frozenset(OPERATIONS))
        self._match = match
        self._lock = threading.Lock()

    def meets(self, operation: str, path: str) -> bool:
        """Counts an operation; True if it is the one that fails."""
        if operation not in self._operations or self._match not in path:
            return False
        with self._lock:
            self.count += 1
            if self.count != self.nth:
                return False
            self.fired = f"{operation} {path}"
            return True


def sweep(
    kind: FaultKind, *, operations: Collection[str] = OPERATIONS, match: str = "", limit: int = 10_000, step: int = 1
) -> Iterator[FaultPlan]:
    """Plans for n = 1, 2, 3 …, or each `step`-th of them, that end after the first run that met no fault.

    Raises:
        AssertionError: After `limit` plans the run still meets faults, or the first run made no operation at all.
    """
    for nth in range(1, limit + 1, step):
        plan = FaultPlan(kind, nth, operations=operations, match=match)
        yield plan
        if not plan.fired:
            assert nth > 1, f"the run made no operation that {kind!r} applies to"
            return
    raise AssertionError(f"after {limit} plans of {kind!r} the run still meets faults")


class FaultStorage(AroundStorage):
    """A storage in which one operation fails as `plan` says, and all others are those of `inner`."""

    def __init__(self, inner: Storage, plan: FaultPlan) -> None:
        super().__init__(inner)
        self.plan = plan

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        if not self.plan.meets("read", path):
            return await self.inner.read(path, offset, nbytes)
        if self.plan.kind == "bit_flip":
            data = bytearray(await self.inner.read(path, offset, nbytes))
            _flip(memoryview(data))
            return bytes(data)
        return await self._fail("read", path, lambda: self.inner.read(path, offset, nbytes))

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        if not self.plan.meets("read_into", path):
            return await self.inner.read_into(path, offset, buffer)
        if self.plan.kind == "bit_flip":
            await self.inner.read_into(path, offset, buffer)
            _flip(buffer.cast("B"))
            return None
        return await self._fail("read_into", path, lambda: self.inner.read_into(path, offset, buffer))

    async def around(self, operation: str, path: str, call: Call[T]) -> T:
        if not self.plan.meets(operation, path):
            return await call()
        return await self._fail(operation, path, call)

    async def _fail(self, operation: str, path: str, call: Call[T]) -> T:
        what = f"{operation} {self.uri}/{path}"
        kind = self.plan.kind
        if kind == "hang":
            await asyncio.Event().wait()
        if kind == "no_space":
            raise TierFullError(f"injected: no space left for {what}", path=path)
        if kind == "short_read":
            raise IntegrityError(f"injected: the file ends early in {what}", path=path)
        if kind == "cancel":
            task = asyncio.ensure_future(call())
            await asyncio.sleep(0)  # so far it gets
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # it was faster, or failed by itself: nobody hears of it, as the caller is cancelled
            raise asyncio.CancelledError(f"injected: cancelled in {what}")
        if kind == "error_after":
            await call()
            if operation == "create":
                raise OutcomeUnknownError(f"injected: the answer was lost in {what}", path=path)
            raise TemporaryError(f"injected: the answer was lost in {what}", path=path)
        raise TemporaryError(f"injected: failed before {what}", path=path)


def _flip(view: memoryview) -> None:
    if view.nbytes:
        view[view.nbytes // 2] ^= 0x10


class HidingStorage(FaultStorage):
    """A storage whose files are seen only after `lookups` looks at each, as on a file system that caches missing names.

    Applies to paths of which `match` is a part; what `create` finds is never hidden.
    """

    def __init__(self, inner: Storage, *, lookups: int, match: str = "") -> None:
        super().__init__(inner, FaultPlan("hang", 1, operations=()))
        self._lookups = lookups
        self._match = match
        self._looks: Counter[str] = Counter()

    def _hidden(self, path: str) -> bool:
        if self._match not in path:
            return False
        self._looks[path] += 1
        return self._looks[path] <= self._lookups

    def _look(self, path: str) -> None:
        if self._hidden(path):
            raise NotFoundError(f"there is no file {self.uri}/{path} (hidden for a while)", path=path)

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        self._look(path)
        return await super().read(path, offset, nbytes)

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self._look(path)
        await super().read_into(path, offset, buffer)

    async def stat(self, path: str) -> FileInfo:
        self._look(path)
        return await super().stat(path)

    async def children(self, folder: str = "") -> Listing:
        level = await super().children(folder)
        return Listing(files=tuple(info for info in level.files if not self._hidden(info.path)), folders=level.folders)

    async def list(self, folder: str = "") -> list[FileInfo]:
        return [info for info in await super().list(folder) if not self._hidden(info.path)]
