"""Putting one version of a file onto one tier, and taking away what it replaces. The only code that writes or deletes below ``.files``.

Data first, then the entry: what has an entry is published. Entry first when it goes: what is half gone is not published any more.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tierstore.crashpoints import reach
from tierstore.storage.bandwidth import Bandwidth
from tierstore.storage.contract import Source
from tierstore.storage.posix import PosixStorage
from tierstore.storage.sources import LocalSource, ThrottledSource
from tierstore.tiers.files.entry import FileEntry, encode_entry
from tierstore.tiers.files.looking import Key, OnTier
from tierstore.tiers.files.places import Kind, Mark, leaf_name, place_of
from tierstore.tiers.space import check_space
from tierstore.tiers.tier import Tier

__all__ = ["FilePut", "clean", "place_data", "place_entry", "take_away"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePut:
    """One version on its way to a tier. `document` is what publishes it: an entry, or a tombstone (``gone``)."""

    path: str
    is_folder: bool
    mark: Mark
    nbytes: int
    kind: Kind
    document: bytes

    @staticmethod
    def of_entry(path: str, mark: Mark, entry: FileEntry, *, is_folder: bool = False) -> FilePut:
        document = encode_entry(path, entry, is_folder=is_folder)
        return FilePut(path=path, is_folder=is_folder, mark=mark, nbytes=entry.nbytes, kind="entry", document=document)

    @property
    def key(self) -> Key:
        return self.path, self.is_folder

    @property
    def place(self) -> str:
        return place_of(self.path, is_folder=self.is_folder)

    @property
    def data_path(self) -> str:
        return f"{self.place}/{leaf_name('data', self.mark)}"

    @property
    def document_path(self) -> str:
        return f"{self.place}/{leaf_name(self.kind, self.mark, self.nbytes)}"


async def place_data(tier: Tier, put: FilePut, source: Source, limits: Mapping[str, Bandwidth]) -> None:
    """Writes the bytes; without a copy where they lie on the same file system already. Nothing is published by it.

    Raises:
        TierFullError: There is no room, or the tier's capacity is used up.
        StorageError, IntegrityError: The tier failed, or the source did. Nothing was written.
    """
    if not put.nbytes:
        return
    reach("files.before-data")
    if isinstance(source, LocalSource) and isinstance(tier.storage, PosixStorage):
        if tier.capacity is not None:
            await check_space(tier, put.nbytes)
        if await tier.storage.clone(put.data_path, source.origin, hard=source.hard) is not None:
            reach("files.after-data")
            return
    await check_space(tier, put.nbytes)
    limit = limits.get(tier.name)
    await tier.storage.write(put.data_path, source if limit is None else ThrottledSource(source, limit))
    reach("files.after-data")


async def place_entry(tier: Tier, put: FilePut) -> None:
    """Publishes a version whose bytes are there, or a removal; `StorageError` where the tier failed."""
    reach("files.before-entry")
    await tier.storage.put(put.document_path, put.document)
    reach("files.after-entry")


async def take_away(tier: Tier, put: FilePut) -> None:
    """Takes back what was not to be published after all: the entry first."""
    await tier.storage.delete([put.document_path])
    await tier.storage.delete([put.data_path])


async def clean(
    tier: Tier, path: str, on_tier: OnTier, *, is_folder: bool = False, keep: Collection[Mark] = (), than: Mark | None = None
) -> None:
    """Deletes what a newer version has replaced: data, entries, tombstones and claims of older ones.

    Args:
        tier: Where.
        path: The file's path.
        on_tier: What the tier holds of it.
        is_folder: Whether it is a folder.
        keep: Older versions that are still being carried on from here.
        than: The version that replaced them; None: the newest on this tier.
    """
    newest = max((mark for mark in (than, on_tier.newest) if mark is not None), default=None)
    if newest is None:
        return
    place = place_of(path, is_folder=is_folder)
    entries, rest = [], []
    for mark, held in on_tier.marks.items():
        if mark >= newest or mark in keep:
            continue
        if held.entry is not None:
            entries.append(f"{place}/{leaf_name('entry', mark, held.entry)}")
        if held.gone:
            entries.append(f"{place}/{leaf_name('gone', mark)}")
        if held.data is not None:
            rest.append(f"{place}/{leaf_name('data', mark)}")
    gone = newest in on_tier.marks and on_tier.marks[newest].gone
    claims = sorted(version for version in on_tier.claims if version < newest.version)
    # The last one may be what the newest version was created by: it keeps out who has not seen that yet.
    rest += [f"{place}/{version:010d}.claim" for version in (claims if gone else claims[:-1])]
    if gone and on_tier.marks[newest].data is not None:
        rest.append(f"{place}/{leaf_name('data', newest)}")
    if not entries and not rest:
        return
    reach("files.before-clean")
    await tier.storage.delete([*entries, *rest])
    reach("files.after-clean")
