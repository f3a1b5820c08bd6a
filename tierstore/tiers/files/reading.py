"""Reading files: block-aligned, each block proved, from the nearest tier whose copy is good."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.errors import ConflictError, IntegrityError, NotFoundError, StorageError, TierStoreError, UsageError
from tierstore.format.digest import DIGEST_NBYTES, bad_blocks, block_digests
from tierstore.tiers.budget import ByteBudget
from tierstore.tiers.files.entry import FileEntry, FileVersion, decode_entry
from tierstore.tiers.files.looking import Looker
from tierstore.tiers.files.places import Mark, leaf_name, place_of
from tierstore.tiers.tier import Tier, Tiers, recheck
from tierstore.tiers.together import together

__all__ = ["AnyTierSource", "Reader", "data_path", "entry_path", "mark_of"]

log = logging.getLogger(__name__)

_PIECE_NBYTES = 8 << 20
_AT_ONCE = 8
_KEEP_ENTRIES = 256
_KEEP_BLOCKS_NBYTES = 32 << 20


def mark_of(version: FileVersion) -> Mark:
    return Mark(version=version.version, save_id=version.save_id)


def entry_path(version: FileVersion) -> str:
    """Where a version's entry lies in a tier."""
    return f"{place_of(version.path, is_folder=version.is_folder)}/{leaf_name('entry', mark_of(version), version.nbytes)}"


def data_path(version: FileVersion) -> str:
    """Where a version's bytes lie in a tier."""
    return f"{place_of(version.path)}/{leaf_name('data', mark_of(version))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    tier: str
    error: TierStoreError


class Reader:
    """Reads from the tiers of one store."""

    def __init__(self, tiers: Tiers, looker: Looker) -> None:
        self._tiers = tiers
        self._looker = looker
        self._entries: dict[tuple[str, str], FileEntry] = {}
        self._entries_nbytes = 0
        self._warned: set[tuple[str, str]] = set()

    async def entry(self, version: FileVersion) -> FileEntry:
        """The entry of a version, from the nearest tier whose copy is good.

        Raises:
            ConflictError: The file was replaced meanwhile.
            NotFoundError: It was removed meanwhile.
            IntegrityError: Every copy is damaged; names each.
            StorageError: No tier that may hold it answers.
        """
        if version.version == 0:
            raise UsageError(f"{version.path!r} is a folder that nobody made: it has no entry", hint="list it")
        key = (version.path, version.save_id)
        known = self._entries.get(key)
        if known is not None:
            return known
        path = entry_path(version)
        failures: list[_Failure] = []
        for tier in self._order(version):
            try:
                await recheck(self._tiers, tier)
                found = decode_entry(await tier.storage.read(path), version.path, version.nbytes)
            except TierStoreError as error:
                failures.append(self._note(version, tier, error))
            else:
                self._keep(key, found)
                return found
        raise await self._no_good(version, failures)

    async def read(self, version: FileVersion, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of a version, proved; fewer than `nbytes` only at the end of the file. Errors as `entry`."""
        if offset < 0 or (nbytes is not None and nbytes < 0):
            raise UsageError(f"no file has {nbytes} bytes at {offset}", hint="offset and length are not negative")
        end = version.nbytes if nbytes is None else min(version.nbytes, offset + nbytes)
        if offset >= end:
            return b""
        buffer = bytearray(end - offset)
        await self.read_into(version, offset, memoryview(buffer))
        return bytes(buffer)

    async def read_into(self, version: FileVersion, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (writable, contiguous) with the bytes from `offset`, proved; several pieces at once. Errors as `entry`.

        Raises:
            UsageError: The version has not so many bytes there.
        """
        target = buffer.cast("B")
        if offset < 0 or offset + target.nbytes > version.nbytes:
            raise UsageError(f"{version.path!r} has {version.nbytes} bytes, not {target.nbytes} at {offset}", hint="read inside the file")
        if not target.nbytes:
            return
        entry = await self.entry(version)
        block = entry.block_nbytes
        piece = max(block, _PIECE_NBYTES // block * block)
        first = offset // piece * piece
        end = offset + target.nbytes

        async def fill(start: int) -> None:
            begin, stop = max(start, offset), min(start + piece, end)
            await self._fill(version, entry, begin, target[begin - offset : stop - offset])

        await together(fill, range(first, end, piece), at_once=_AT_ONCE)

    async def _fill(self, version: FileVersion, entry: FileEntry, begin: int, part: memoryview) -> None:
        """Reads the blocks around a range, straight into `part` where it consists of whole blocks."""
        block = entry.block_nbytes
        low = begin // block * block
        high = min(-(-(begin + part.nbytes) // block) * block, entry.nbytes)
        exact = low == begin and high == begin + part.nbytes
        whole = part if exact else memoryview(bytearray(high - low))
        failures: list[_Failure] = []
        for tier in self._order(version):
            try:
                await recheck(self._tiers, tier)
                await tier.storage.read_into(data_path(version), low, whole)
                await asyncio.to_thread(_prove, version, entry, low, whole)
            except TierStoreError as error:
                failures.append(self._note(version, tier, error))
            else:
                if not exact:
                    part[:] = whole[begin - low : begin - low + part.nbytes]
                return
        raise await self._no_good(version, failures)

    def _order(self, version: FileVersion) -> list[Tier]:
        """Nearest first those that were seen to hold it; then the others, for every byte is proved anyway."""
        seen = [t for t in self._tiers if t.name in version.tiers]
        return [*seen, *(t for t in self._tiers if t.name not in version.tiers)]

    def _note(self, version: FileVersion, tier: Tier, error: TierStoreError) -> _Failure:
        """Damage is told, once for each file and tier; that a tier has no copy is no news."""
        key = (version.save_id, tier.name)
        expected = tier.name in version.tiers or not isinstance(error, NotFoundError)
        if expected and not isinstance(error, NotFoundError) and key not in self._warned:
            if len(self._warned) > 10_000:
                self._warned.clear()
            self._warned.add(key)
            log.warning("tier=%s file=%r can't be read from here, the next tier is asked: %s", tier.name, version.path, error.message)
        return _Failure(tier=tier.name, error=error)

    async def _no_good(self, version: FileVersion, failures: Sequence[_Failure]) -> TierStoreError:
        """Why no tier could give the bytes: replaced or removed since it was looked up, away, or damaged everywhere."""
        try:
            now = await self._looker.state(version.path, is_folder=version.is_folder)
        except StorageError:
            now = None
        if now is not None and now.newest is not None and now.newest > mark_of(version):
            if now.live is None:
                return NotFoundError(f"{version.path!r} was removed while it was read", hint="look it up again", path=version.path)
            return ConflictError(
                f"{version.path!r} was replaced while it was read", hint="open it again: it has new content now", path=version.path
            )
        told = "; ".join(f"{failure.tier}: {failure.error.message}" for failure in failures)
        away = [f.error for f in failures if isinstance(f.error, StorageError)]
        if away:
            kind = type(away[0])
            return kind(
                f"no tier that answers has a good copy of {version.path!r} ({told})",
                hint="bring the tier back, or wait until it answers",
                path=version.path,
            )
        if not version.tiers and all(isinstance(f.error, NotFoundError) for f in failures):
            return NotFoundError(f"no tier holds {version.path!r}", hint="look it up again", path=version.path)
        return IntegrityError(
            f"no tier has a good copy of {version.path!r} ({told})",
            hint="write the file again; `tierstore verify` tells what else is damaged",
            path=version.path,
        )

    def _keep(self, key: tuple[str, str], entry: FileEntry) -> None:
        if len(self._entries) >= _KEEP_ENTRIES or self._entries_nbytes > _KEEP_BLOCKS_NBYTES:
            self._entries.clear()
            self._entries_nbytes = 0
        self._entries[key] = entry
        self._entries_nbytes += len(entry.blocks)


class AnyTierSource:
    """A version as a `Source`: read from whichever tier has good bytes, proved, in bounded memory."""

    def __init__(self, reader: Reader, version: FileVersion, budget: ByteBudget) -> None:
        self._reader = reader
        self._version = version
        self._budget = budget

    @property
    def nbytes(self) -> int:
        return self._version.nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        buffer = await self._budget.take(nbytes)
        await self._reader.read_into(self._version, offset, buffer)
        return buffer


def _prove(version: FileVersion, entry: FileEntry, low: int, data: memoryview) -> None:
    first = low // entry.block_nbytes
    found = block_digests(data, entry.block_nbytes)
    bad = bad_blocks(found, entry.blocks[first * DIGEST_NBYTES : first * DIGEST_NBYTES + len(found)])
    if bad:
        begin = low + bad[0] * entry.block_nbytes
        raise IntegrityError(
            f"{data_path(version)} is damaged: {len(bad)} of its blocks, the first at {begin}, do not match their SHA-256",
            hint="it is read from the next tier",
            path=version.path,
        )
