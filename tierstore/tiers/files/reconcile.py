"""What dead processes left: files that further tiers lack are carried on, what was replaced or never published is deleted.

Like promotion, it needs no journal: what is to be done is computed from what the tiers hold. That also fills a shared tier again that
was lost. Processes that live are left to carry on what is theirs, in their own order.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tierstore.clock import Clock
from tierstore.errors import IntegrityError, NotFoundError, StorageError, TierStoreError
from tierstore.names import save_id_time
from tierstore.storage.temporaries import owner_is_alive
from tierstore.tiers.files.entry import FileEntry, decode_entry, owner_in
from tierstore.tiers.files.looking import Key, OnTier, group
from tierstore.tiers.files.mover import Item, Mover
from tierstore.tiers.files.places import ROOT, Mark, leaf_name, place_of
from tierstore.tiers.files.placing import FilePut, clean
from tierstore.tiers.tier import Tier, Tiers, recheck
from tierstore.tiers.together import together

__all__ = ["FILES_LOCK", "FilesPicture", "Lacking", "TakenOver", "look_at_files", "take_over", "tidy"]

log = logging.getLogger(__name__)

FILES_LOCK = ".files"
"""The name of the lock under which one process of a node at a time does this; no run can have it."""

GONE_KEPT = timedelta(days=7)
"""How long a tombstone stays that every shared tier has: a node that was away for longer may bring back what was removed."""

_UNPUBLISHED_KEPT = timedelta(days=1)
"""How long bytes may wait for their entry, by the storage's clock."""

_OTHERS = timedelta(minutes=10)
"""How long another node's process, of which nobody knows whether it lives, is left to carry on what it published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """A version that some tiers lack. `at` hold it, nearest first; `nbytes` is its length."""

    path: str
    is_folder: bool
    mark: Mark
    gone: bool
    nbytes: int
    at: tuple[Tier, ...]
    targets: tuple[Tier, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOver:
    """What came of `take_over`.

    Attributes:
        items: What is on its way now.
        unreadable: What can't be carried on, because no copy of what proves it can be read.
        to_look_again: This node's own tiers hold what was left to a process of which nobody knows whether it lives: an earlier container
            on the same disk, most likely. Nobody else sees these tiers, so that somebody here has to look again.
    """

    items: tuple[Item, ...]
    unreadable: tuple[tuple[Lacking, TierStoreError], ...]
    to_look_again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesPicture:
    """What every tier that answered holds of files. `failures`: why the others did not."""

    tiers: Tiers
    held: dict[str, dict[Key, OnTier]]
    failures: dict[str, TierStoreError] = field(default_factory=dict)

    @property
    def keeping(self) -> tuple[Tier, ...]:
        """The authority and the tiers after it: they should hold everything."""
        return self.tiers.tiers[self.tiers.names.index(self.tiers.authority.name) :]

    @property
    def complete(self) -> bool:
        """Whether all of those answered."""
        return not any(t.name in self.failures for t in self.keeping)

    def lacking(self, *, now: datetime, only: Collection[str] | None = None) -> list[Lacking]:
        """What tiers lack, in the order of publication. Those before the authority are not filled: what left one left it for its room."""
        targets = [t for t in self._answering() if t in self.keeping and (only is None or t.name in only)]
        keys = {key for held in self.held.values() for key in held}
        found = [one for key in keys for one in self._lacking(key, targets, now)]
        return sorted(found, key=lambda one: one.mark.save_id)

    def _answering(self) -> list[Tier]:
        return [t for t in self.tiers if t.name in self.held]

    def _lacking(self, key: Key, targets: list[Tier], now: datetime) -> Iterator[Lacking]:
        holders: dict[Mark, list[Tier]] = {}
        for tier in self._answering():
            for mark, held in self._on(tier, key).marks.items():
                if held.published:
                    holders.setdefault(mark, []).append(tier)
        # The newest alone: an older one that is left here may be younger than what was replaced before it elsewhere in its folder, and
        # would be seen on a further tier without it.
        if not holders:
            return
        mark = max(holders)
        held = self._on(holders[mark][0], key).marks[mark]
        lack = [t for t in targets if (last := self._on(t, key).newest) is None or last < mark]
        if held.gone and now - save_id_time(mark.save_id) > GONE_KEPT:
            lack = [t for t in lack if self._on(t, key).newest is not None]
        if lack:
            whole = sorted(holders[mark], key=lambda t: not self._on(t, key).marks[mark].whole)
            yield Lacking(
                path=key[0],
                is_folder=key[1],
                mark=mark,
                gone=held.gone,
                nbytes=held.entry or 0,
                at=tuple(whole),
                targets=tuple(lack),
            )

    def _on(self, tier: Tier, key: Key) -> OnTier:
        return self.held[tier.name].get(key) or OnTier()

    def passed(self, key: Key) -> Mark | None:
        """The version that every tier that should have it has, or a newer one; None where one lacks the path, or does not answer."""
        there = [self._on(t, key).newest for t in self.keeping if t.name in self.held]
        found = [mark for mark in there if mark is not None]
        return min(found) if self.complete and len(found) == len(there) else None


async def look_at_files(tiers: Tiers) -> FilesPicture:
    """Lists the files of every tier that answers.

    Raises:
        StorageError, NotFoundError: None does.
    """
    held: dict[str, dict[Key, OnTier]] = {}
    failures: dict[str, TierStoreError] = {}

    async def one(tier: Tier) -> None:
        try:
            await recheck(tiers, tier)
            held[tier.name] = group(await tier.storage.list(ROOT))
        except (StorageError, NotFoundError) as error:
            failures[tier.name] = error

    await together(one, list(tiers))
    if not held:
        raise next(iter(failures.values()))
    return FilesPicture(tiers=tiers, held=held, failures=failures)


async def take_over(lacking: list[Lacking], mover: Mover, *, now: datetime, all_of_them: bool = False) -> TakenOver:
    """Hands what tiers lack to the mover, in the order of publication.

    Args:
        lacking: From `FilesPicture.lacking`.
        mover: Who carries it on.
        now: The wall time; it steers only who does the work.
        all_of_them: Also what a process published that may be alive: for a person who asks for it.
    """
    items, unreadable, to_look_again = [], [], False
    for one, found in zip(lacking, await together(_read, lacking), strict=True):
        if isinstance(found, NotFoundError):  # it went since it was listed
            continue
        if isinstance(found, TierStoreError):
            log.warning("file=%r can't be carried on: %s", one.path, found.message)
            unreadable.append((one, found))
            continue
        put, entry, owner = found
        if mover.knows(put):
            continue
        if not all_of_them and _is_cared_for(owner, one.mark, mover.owner, now):
            to_look_again |= owner_is_alive(owner) is None and any(tier.scope == "node" for tier in one.at)
            continue
        item = Item(put=put, entry=entry if not put.is_folder else None)
        mover.add(item, one.targets)
        items.append(item)
    if items:
        log.info("%d files that other processes left are carried on", len(items))
    return TakenOver(items=tuple(items), unreadable=tuple(unreadable), to_look_again=to_look_again)


async def tidy(picture: FilesPicture, mover: Mover, clock: Clock) -> None:
    """Deletes what newer versions have replaced everywhere, bytes that were never published, and old tombstones.

    A tier that fails is passed over: it is there the next time.
    """
    now = clock.now()
    for tier in picture.tiers:
        for key in picture.held.get(tier.name, ()):
            on_tier, passed = picture.held[tier.name][key], picture.passed(key)
            try:
                wanted = {mark for mark in on_tier.marks if passed is None or mark > passed}
                keep = wanted | mover.wanted_from(tier, key)
                await clean(tier, key[0], on_tier, is_folder=key[1], keep=keep, than=passed)
                await _drop_unpublished(tier, key, on_tier, now)
            except (StorageError, NotFoundError) as error:
                log.debug("tier=%s file=%r is not tidied: %s", tier.name, key[0], error.message)
    if picture.complete:
        await _drop_tombstones(picture, now)


async def _read(one: Lacking) -> tuple[FilePut, FileEntry | None, str] | TierStoreError:
    """The document of a version, from the nearest tier whose copy is good; else why there is none."""
    kind = "gone" if one.gone else "entry"
    failure: TierStoreError = NotFoundError(f"no tier holds {one.path!r} any more", hint="look again", path=one.path)
    place = place_of(one.path, is_folder=one.is_folder)
    for tier in one.at:
        try:
            document = await tier.storage.read(f"{place}/{leaf_name('gone' if one.gone else 'entry', one.mark, one.nbytes)}")
            entry = None if one.gone else decode_entry(document, one.path, one.nbytes)
            owner = owner_in(document, kind) if entry is None else entry.owner
        except NotFoundError:
            continue
        except (StorageError, IntegrityError) as error:
            failure = error
            continue
        put = FilePut(
            path=one.path,
            is_folder=one.is_folder,
            mark=one.mark,
            nbytes=one.nbytes,
            kind="gone" if one.gone else "entry",
            document=document,
        )
        return put, entry, owner
    return failure


def _is_cared_for(owner: str, mark: Mark, own: str, now: datetime) -> bool:
    """Whether the process that published it is, or may be, alive and at work on it."""
    if owner == own:
        return False
    alive = owner_is_alive(owner)
    return alive is True or (alive is None and now - save_id_time(mark.save_id) < _OTHERS)


async def _drop_unpublished(tier: Tier, key: Key, on_tier: OnTier, now: datetime) -> None:
    newest = on_tier.newest
    place = place_of(key[0], is_folder=key[1])
    old = [
        f"{place}/{leaf_name('data', mark)}"
        for mark, held in on_tier.marks.items()
        if not held.published and held.data_at is not None and now - held.data_at > _UNPUBLISHED_KEPT and (newest is None or mark > newest)
    ]
    if old:
        log.info("tier=%s file=%r bytes that were never published are deleted", tier.name, key[0])
        await tier.storage.delete(old)


async def _drop_tombstones(picture: FilesPicture, now: datetime) -> None:
    """The authority's goes last: it is what keeps the file removed while the others lose theirs."""
    first, last = [t for t in picture.tiers if not picture.tiers.is_authority(t)], picture.tiers.authority
    for key, on_tier in picture.held.get(last.name, {}).items():
        mark = on_tier.newest
        if mark is None or not on_tier.marks[mark].gone or now - save_id_time(mark.save_id) <= GONE_KEPT:
            continue
        same = [picture.held[t.name].get(key) for t in picture.keeping]
        if not all(one is not None and one.newest == mark and len(one.marks) == 1 for one in same):
            continue
        if any(version > mark.version for version in on_tier.claims):
            continue  # somebody may be creating it anew right now: who comes next is to count on from the same number
        path = f"{place_of(key[0], is_folder=key[1])}/{leaf_name('gone', mark)}"
        claims = [f"{place_of(key[0])}/{version:010d}.claim" for version in on_tier.claims]
        try:
            for tier in (*first, last):
                if tier.name in picture.held:
                    await tier.storage.delete([path, *claims])
        except (StorageError, NotFoundError) as error:
            log.debug("file=%r its tombstone stays: %s", key[0], error.message)
