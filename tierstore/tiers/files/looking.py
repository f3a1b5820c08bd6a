"""What the tiers show of files: which versions each one holds, and which of all is the newest.

A look asks the node's own tiers and the authority. Where the authority does not answer, or has lost all that it had, the further shared
tiers are asked too. Nothing is remembered between looks: another node may have published since.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from tierstore.errors import NotFoundError, StorageError, TierStoreError, UsageError
from tierstore.storage.contract import FileInfo
from tierstore.tiers.files.entry import FileVersion
from tierstore.tiers.files.places import ROOT, Mark, check_path, decode_name, folder_place, parse_place, place_of
from tierstore.tiers.tier import Tier, Tiers, recheck, still_there
from tierstore.tiers.together import together

__all__ = ["Held", "Key", "Looker", "OnTier", "State", "group"]

log = logging.getLogger(__name__)

Key = tuple[str, bool]
"""A path, and whether it is a folder."""

_T = TypeVar("_T")
_PROBES = 8
"""How many names of a folder are looked at before everything below it is listed."""
_LEVEL = 100
"""How many names of a folder are looked at one by one to list it alone; where there are more, everything below it is listed."""
_SLOW_S, _AWAY_S = 1.0, 5.0
"""A tier that failed only after so long (its storage had tried again and again) is not asked again for so long, in seconds."""


@dataclass(slots=True, kw_only=True)
class Held:
    """What one tier holds of one version. `entry` and `data`: lengths in bytes or None; `data_at`: when it was written."""

    entry: int | None = None
    data: int | None = None
    data_at: datetime | None = None
    gone: bool = False

    @property
    def published(self) -> bool:
        return self.gone or self.entry is not None

    @property
    def whole(self) -> bool:
        """Whether the bytes are there too, as far as their length tells. Of no bytes nothing is kept."""
        return self.entry is not None and self.entry == (self.data or 0)


@dataclass(slots=True, kw_only=True)
class OnTier:
    """What one tier holds of one path: the versions, and the numbers that somebody has claimed."""

    marks: dict[Mark, Held] = field(default_factory=dict)
    claims: set[int] = field(default_factory=set)

    @property
    def newest(self) -> Mark | None:
        """The greatest version that is published or removed here."""
        return max((mark for mark, held in self.marks.items() if held.published), default=None)


@dataclass(slots=True, kw_only=True)
class State:
    """What all tiers that were asked show of one path. `tiers` is by name, nearest first."""

    path: str
    is_folder: bool
    tiers: dict[str, OnTier] = field(default_factory=dict)

    @property
    def newest(self) -> Mark | None:
        return max((mark for held in self.tiers.values() if (mark := held.newest) is not None), default=None)

    @property
    def last_version(self) -> int:
        """The highest number that was published, as far as it is seen; 0 if none was.

        Bytes without an entry do not count: somebody may be about to publish under that number, and has claimed it.
        """
        newest = self.newest
        return newest.version if newest is not None else 0

    @property
    def live(self) -> FileVersion | None:
        """The newest version, if it is not a removal."""
        mark = self.newest
        if mark is None:
            return None
        holders = {name: held.marks[mark] for name, held in self.tiers.items() if mark in held.marks}
        if any(held.gone for held in holders.values()):
            return None
        nbytes = next(held.entry for held in holders.values() if held.entry is not None)
        return FileVersion(
            path=self.path,
            version=mark.version,
            save_id=mark.save_id,
            nbytes=nbytes,
            is_folder=self.is_folder,
            tiers=tuple(name for name, held in holders.items() if held.whole),
        )


def group(files: Iterable[FileInfo]) -> dict[Key, OnTier]:
    """Sorts a tier's files by what they belong to; what is not of our grammar is passed over."""
    found: dict[Key, OnTier] = {}
    for info in files:
        leaf = parse_place(info.path)
        if leaf is None:
            log.debug("%s is no file of ours", info.path)
            continue
        on_tier = found.setdefault((leaf.path, leaf.is_folder), OnTier())
        if leaf.kind == "claim":
            on_tier.claims.add(leaf.mark.version)
            continue
        held = on_tier.marks.setdefault(leaf.mark, Held())
        if leaf.kind == "entry":
            held.entry = leaf.nbytes
        elif leaf.kind == "data":
            held.data, held.data_at = info.nbytes, info.modified_at
        else:
            held.gone = True
    return found


class Looker:
    """Asks the tiers of one store."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self._warned: set[str] = set()
        self._lost: bool | None = None
        self._away: dict[str, tuple[float, StorageError]] = {}

    def answered(self, tier: Tier) -> None:
        """A tier has just answered somebody: the next look asks it, whatever it did before."""
        self._away.pop(tier.name, None)

    def restored(self) -> None:
        """The authority holds what it should: further tiers need not be asked any more."""
        self._lost = False

    async def state(self, path: str, *, is_folder: bool = False, everywhere: bool = False) -> State:
        """What is there of one path; errors as `places.check_path`, and `StorageError` where no tier answers."""
        place = place_of(path, is_folder=is_folder)
        key = (path, is_folder)
        found = await self._files(place, everywhere=everywhere)
        return self._merge(found).get(key) or State(path=path, is_folder=is_folder)

    async def below(self, folder: str, *, everywhere: bool = False) -> dict[Key, State]:
        """What is there below a folder at any depth, and of the folder itself; errors as `state`."""
        return self._merge(await self._files(folder_place(folder), everywhere=everywhere))

    async def look_up(self, path: str) -> FileVersion | None:
        """The newest version of the file `path`, else the folder of that name, else None; errors as `state`."""
        if not path:
            return FileVersion(path="", version=0, save_id="", nbytes=0, is_folder=True, tiers=self.tiers.names)
        file, made = await asyncio.gather(self.state(path), self.state(path, is_folder=True))
        if file.live is not None:
            return file.live
        if made.live is not None:
            return made.live
        return implied_folder(path) if await self._anything_below(path) else None

    async def _anything_below(self, folder: str) -> bool:
        """Whether something live lies below a folder; most often the first names of its first level tell, and nobody lists all of it."""
        levels = await self._ask(folder_place(folder), lambda tier, place: tier.storage.children(place))
        names = sorted({name for level in levels.values() for name in level.folders})
        first = [name[:-1] for name in names if name.endswith("@") and name != "@"][:_PROBES]
        states = await together(self.state, [f"{folder}/{decode_name(name)}" for name in first])
        if any(state.live is not None for state in states):
            return True
        if not names or names == [f"{name}@" for name in first]:
            return False
        return any(state.live is not None for state in (await self.below(folder)).values())

    async def list(self, folder: str = "", *, recursive: bool = True) -> list[FileVersion]:
        """The live files and folders below `folder`, sorted by path; errors as `state`."""
        if folder:
            check_path(folder)
        start = f"{folder}/" if folder else ""
        found: dict[Key, FileVersion] = {}
        if not recursive and (level := await self._level(folder)) is not None:
            return [*level]
        for state in (await self.below(folder)).values():
            live = state.live
            if live is None or not state.path.startswith(start):
                continue
            parts = state.path[len(start) :].split("/")
            for depth in range(1, len(parts)):
                above = start + "/".join(parts[:depth])
                found.setdefault((above, True), implied_folder(above))
            if state.path != folder:
                found[(state.path, state.is_folder)] = live
        listed = [one for one in found.values() if recursive or "/" not in one.path[len(start) :]]
        return sorted(listed, key=lambda one: (one.path, one.is_folder))

    async def _level(self, folder: str) -> Sequence[FileVersion] | None:
        """As `list` not recursive, without a look at all that lies below; None where that takes no less."""
        levels = await self._ask(folder_place(folder), lambda tier, place: tier.storage.children(place))
        names = {name for level in levels.values() for name in level.folders} - {"@"}
        folders = [name for name in names if not name.endswith("@")]
        if names and (not folders or len(names) > _LEVEL):
            return None
        start = f"{folder}/" if folder else ""
        paths = {name: start + decode_name(name.removesuffix("@")) for name in names}
        if not all(_leads_to(path, name) for name, path in paths.items()):
            return None  # somebody else's names: passed over where everything is listed

        async def look(name: str) -> FileVersion | None:
            path = paths[name]
            if name.endswith("@"):
                return (await self.state(path)).live
            made = (await self.state(path, is_folder=True)).live
            return made or (implied_folder(path) if await self._anything_below(path) else None)

        found = [one for one in await together(look, sorted(names)) if one is not None]
        return sorted(found, key=lambda one: (one.path, one.is_folder))

    async def _files(self, place: str, *, everywhere: bool) -> dict[str, dict[Key, OnTier]]:
        listed = await self._ask(place, lambda tier, place: tier.storage.list(place), everywhere=everywhere)
        return {name: group(files) for name, files in listed.items()}

    async def _ask(self, place: str, ask: Callable[[Tier, str], Awaitable[_T]], *, everywhere: bool = False) -> dict[str, _T]:
        """Asks the tiers that decide, and those that stand in for the authority; the answers by tier, nearest first."""
        lost = everywhere or await self._authority_lost()
        asked = [t for t in self.tiers if lost or t.scope == "node" or self.tiers.is_authority(t)]
        found, failures = await self._from_each(asked, lambda tier: ask(tier, place))
        if self.tiers.authority.name in failures and not lost:
            others = [t for t in self.tiers if t not in asked]
            more, more_failures = await self._from_each(others, lambda tier: ask(tier, place))
            found.update(more)
            failures.update(more_failures)
        if not found and failures:
            raise next(iter(failures.values()))
        return {name: found[name] for name in self.tiers.names if name in found}

    async def _from_each(
        self, tiers: Sequence[Tier], ask: Callable[[Tier], Awaitable[_T]]
    ) -> tuple[dict[str, _T], dict[str, TierStoreError]]:
        found: dict[str, _T] = {}
        failures: dict[str, TierStoreError] = {}

        async def one(tier: Tier) -> None:
            try:
                found[tier.name] = await self._from_one(tier, ask)
            except (StorageError, NotFoundError) as error:
                failures[tier.name] = error
                if tier.name not in self._warned:
                    self._warned.add(tier.name)
                    others = ": the further tiers are asked" if self.tiers.is_authority(tier) and len(self.tiers) > 1 else ""
                    log.warning("tier=%s can't be asked for files%s: %s", tier.name, others, error.message)
            else:
                if tier.name in self._warned:
                    self._warned.discard(tier.name)
                    log.warning("tier=%s answers again", tier.name)

        for done in await asyncio.gather(*(one(tier) for tier in tiers), return_exceptions=True):
            if done is not None:
                raise done
        return found, failures

    async def _from_one(self, tier: Tier, ask: Callable[[Tier], Awaitable[_T]]) -> _T:
        """A tier's answer. An empty mount point is none, and one that is down does not cost each look all retries of its storage."""
        since, failure = self._away.get(tier.name, (0.0, None))
        begun = time.monotonic()
        if failure is not None and begun - since < _AWAY_S:
            raise failure
        try:
            await recheck(self.tiers, tier)
            await still_there(self.tiers, tier)
            answer = await ask(tier)
        except StorageError as error:
            if time.monotonic() - begun >= _SLOW_S:
                self._away[tier.name] = time.monotonic(), error
            raise
        self._away.pop(tier.name, None)
        return answer

    async def _authority_lost(self) -> bool:
        """Whether the authority holds no files at all though further tiers do, which were its own then; asked once."""
        if self._lost is None:
            authority = self.tiers.authority
            try:
                await recheck(self.tiers, authority)
                level = await authority.storage.children(ROOT)
            except (StorageError, NotFoundError):
                return False  # `_ask` finds the same and says so
            if level.folders or level.files:
                self._lost = False
            else:
                others = [t for t in self.tiers if t.scope == "shared" and not self.tiers.is_authority(t)]
                found, failures = await self._from_each(others, lambda tier: tier.storage.list(ROOT))
                if failures and not any(found.values()):
                    return False  # nobody knows yet
                self._lost = any(found.values())
                if self._lost:
                    log.warning("tier=%s holds no files, but further tiers do: they are asked until they are put back", authority.name)
        return self._lost

    @staticmethod
    def _merge(found: dict[str, dict[Key, OnTier]]) -> dict[Key, State]:
        merged: dict[Key, State] = {}
        for name, keys in found.items():
            for key, on_tier in keys.items():
                merged.setdefault(key, State(path=key[0], is_folder=key[1])).tiers[name] = on_tier
        return merged


def _leads_to(path: str, name: str) -> bool:
    """Whether the place of `path` has that name."""
    try:
        return (place_of(path) if name.endswith("@") else folder_place(path)).rpartition("/")[2] == name
    except UsageError:
        return False


def implied_folder(path: str) -> FileVersion:
    """A folder that exists because something lies below it."""
    return FileVersion(path=path, version=0, save_id="", nbytes=0, is_folder=True, tiers=())
