"""Does a storage keep the contract's core here and now? Run at open and by `tierstore doctor --probe`; leaves nothing behind."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tierstore.errors import ConflictError, IntegrityError, NotFoundError, TierStoreError
from tierstore.storage.contract import Storage
from tierstore.storage.sources import BytesSource

__all__ = ["ProbeCheck", "ProbeReport", "probe"]

_NBYTES = 3 << 18
"""Of the file that is written: enough for ranges, little enough for any link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCheck:
    """One promise that was tried. `detail` says what was seen, or what went wrong."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What a storage was found to do. The names of the checks are stable."""

    uri: str
    checks: tuple[ProbeCheck, ...]

    @property
    def ok(self) -> bool:
        """Everything holds that is needed to keep copies: all but create-if-absent."""
        return all(check.ok for check in self.checks if check.name != "create-if-absent")

    @property
    def can_be_authority(self) -> bool:
        """Everything holds, create-if-absent with a single winner included (PROTOCOLS.md §3)."""
        return all(check.ok for check in self.checks)

    @property
    def failures(self) -> tuple[ProbeCheck, ...]:
        return tuple(check for check in self.checks if not check.ok)


class _Broken(Exception):
    """A promise that does not hold."""


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Broken(otherwise)


async def probe(storage: Storage, *, racers: int = 8) -> ProbeReport:
    """Tries the promises that everything rests on, in a folder of its own that is removed at the end.

    Checks, in this order: ``writable``, ``read-your-writes``, ``range-reads``, ``atomic-replace``, ``list-after-write``,
    ``create-if-absent``, ``delete``. Of a storage that is not writable the others are not tried. Never raises for what the storage
    does wrong: that is in the report.

    Args:
        storage: What to try.
        racers: How many create the same name at once.
    """
    folder = f".tierstore-probe-{secrets.token_hex(8)}"
    checks = [await _run("writable", lambda: _writable(storage, folder))]
    try:
        if checks[0].ok:
            for name, check in (
                ("read-your-writes", _read_your_writes),
                ("range-reads", _range_reads),
                ("atomic-replace", _atomic_replace),
                ("list-after-write", _list_after_write),
            ):
                checks.append(await _run(name, lambda check=check: check(storage, folder)))  # type: ignore[misc]
            checks.append(await _run("create-if-absent", lambda: _one_winner(storage, folder, racers)))
    finally:
        last = await _run("delete", lambda: _delete(storage, folder))
    if checks[0].ok:
        checks.append(last)
    return ProbeReport(uri=storage.uri, checks=tuple(checks))


async def _run(name: str, check: Callable[[], Awaitable[str]]) -> ProbeCheck:
    try:
        return ProbeCheck(name=name, ok=True, detail=await check())
    except (_Broken, TierStoreError) as error:
        return ProbeCheck(name=name, ok=False, detail=str(error))


def _bytes(seed: int) -> bytes:
    return bytes((i * 7 + i // 256 + seed) % 256 for i in range(4096)) * (_NBYTES // 4096)


async def _writable(storage: Storage, folder: str) -> str:
    await storage.write(f"{folder}/data", BytesSource(_bytes(1)))
    return f"wrote {_NBYTES} bytes"


async def _read_your_writes(storage: Storage, folder: str) -> str:
    _expect(await storage.read(f"{folder}/data") == _bytes(1), "what was read is not what was written")
    _expect((await storage.stat(f"{folder}/data")).nbytes == _NBYTES, "the size is not that of what was written")
    return "content and size are those that were written"


async def _range_reads(storage: Storage, folder: str) -> str:
    data, path = _bytes(1), f"{folder}/data"
    for offset, nbytes in ((0, 1), (4095, 4098), (_NBYTES - 5, 5), (1 << 18, 1 << 18)):
        _expect(await storage.read(path, offset, nbytes) == data[offset : offset + nbytes], f"the range [{offset}, +{nbytes}) is wrong")
    buffer = bytearray(70_001)
    await storage.read_into(path, 12_345, memoryview(buffer))
    _expect(buffer == data[12_345 : 12_345 + 70_001], "a range read into memory is wrong")
    try:
        await storage.read(path, _NBYTES - 1, 2)
    except IntegrityError:
        return "ranges are exact, and a short one is an error"
    raise _Broken("a range past the end came back short, without an error")


async def _atomic_replace(storage: Storage, folder: str) -> str:
    path, old, new = f"{folder}/replaced", b"old" * 1000, b"newer" * 2000
    await storage.put(path, old)
    writing = asyncio.ensure_future(storage.write(path, BytesSource(new)))
    try:
        seen = 0
        while not writing.done():
            _expect(await storage.read(path) in (old, new), "while a file was replaced, a reader saw neither the old nor the new content")
            seen += 1
    finally:
        await asyncio.wait({writing})
    writing.result()
    _expect(await storage.read(path) == new, "after a replacement the old content is read")
    return f"{seen} reads during a replacement saw the old or the new content"


async def _list_after_write(storage: Storage, folder: str) -> str:
    wanted = {f"{folder}/data", f"{folder}/replaced"}
    for number in range(3):
        await storage.put(f"{folder}/listed/{number}", b"x")
        wanted.add(f"{folder}/listed/{number}")
        found = {info.path for info in await storage.list(folder)}
        _expect(found == wanted, f"the listing misses {sorted(wanted - found)} and has {sorted(found - wanted)} too many")
    _expect("listed" in (await storage.children(folder)).folders, "a folder is missing from the listing of one level")
    return "a listing shows each write at once"


async def _one_winner(storage: Storage, folder: str, racers: int) -> str:
    _expect(storage.capabilities.create, "the storage does not have it: it can hold copies, but can't be the authority")
    path = f"{folder}/raced"
    mine = [f"racer {number} {secrets.token_hex(8)}".encode() for number in range(racers)]
    ends = await asyncio.gather(*(storage.create(path, data) for data in mine), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, ConflictError):
            raise end
    stored = await storage.read(path)
    winners = [data for data, end in zip(mine, ends, strict=True) if end is None]
    _expect(winners == [stored], f"of {racers} racers {len(winners)} were told that they had won: it can't be the authority")
    told = all(end.context.get("existing") == stored for end in ends if isinstance(end, ConflictError))
    _expect(told, "a loser was told other bytes than the winner's")
    await storage.create(path, stored)
    return f"of {racers} racers one won, and the others were told so"


async def _delete(storage: Storage, folder: str) -> str:
    paths = [info.path for info in await storage.list(folder)]
    await storage.delete(paths)
    await storage.delete(paths)
    _expect(await storage.list(folder) == [], "files are listed after their deletion")
    for path in paths[:1]:
        try:
            await storage.stat(path)
        except NotFoundError:
            continue
        raise _Broken("a file is there after its deletion")
    return f"{len(paths)} files are gone"
