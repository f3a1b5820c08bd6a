"""Gathering the ranks' part records for a commit: each is read once, checked, and kept without what can be told from the rest."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierstore.errors import IntegrityError, NotFoundError, VersionError
from tierstore.format.digest import block_digests, file_digest
from tierstore.format.index import Index
from tierstore.format.manifest import FileRecord
from tierstore.format.part import Part, decode_part
from tierstore.names import MANIFEST, Attempt, part_name
from tierstore.storage.contract import FileInfo, Storage
from tierstore.tiers.together import together
from tierstore.units import format_some

__all__ = ["Gathered", "Gathering", "PackedObjects"]

log = logging.getLogger(__name__)

_AT_ONCE = 16
_ASK_UNLISTED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What a commit needs of a part record.

    Attributes:
        rank: Whose it is.
        index: The rank's files and extents, in memory of their own.
        objects: Its objects, packed: thousands of ranks' are nearly the same text.
        facts: What it says of the checkpoint.
        record: The part record's own line of the manifest.
    """

    rank: int
    index: Index
    objects: bytes
    facts: Mapping[str, Any]
    record: FileRecord


class PackedObjects(Mapping[int, bytes]):
    """The ranks' objects, unpacked one at a time."""

    def __init__(self, parts: Sequence[Gathered]) -> None:
        self._parts = {part.rank: part for part in parts}

    def __getitem__(self, rank: int) -> bytes:
        return zlib.decompress(self._parts[rank].objects)

    def __iter__(self) -> Iterator[int]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _read_part(data: bytes, shared: dict[bytes, Any]) -> tuple[Part, Gathered]:
    """Reads a part record so that nothing kept of it holds on to `data`; see `Index.detached` for `shared`."""
    part = decode_part(data)
    name = part_name(part.rank)
    digest = file_digest(block_digests(data, part.index.block_nbytes))
    return part, Gathered(
        rank=part.rank,
        index=part.index.detached(shared),
        objects=zlib.compress(part.objects, 1),
        facts=part.facts,
        record=FileRecord(name=name, nbytes=len(data), digest=digest, kind="part"),
    )


@dataclass(slots=True, kw_only=True)
class Gathering:
    """What has been found so far of an attempt: parts by rank, and why others don't count yet."""

    storage: Storage
    attempt: Attempt
    world_size: int | None
    parts: dict[int, Gathered] = field(default_factory=dict)
    shared: dict[bytes, Any] = field(default_factory=dict)
    troubles: dict[int, str] = field(default_factory=dict)
    proven: set[int] = field(default_factory=set)
    seen: dict[str, FileInfo] = field(default_factory=dict)
    """What the storage says of each file that was proved to be there."""
    documented: bool = False
    """A manifest was there before: that of a committer that died, or of a checkpoint whose log was lost."""

    @property
    def complete(self) -> bool:
        return self.world_size is not None and len(self.proven) == self.world_size

    def take(self) -> list[Gathered]:
        """Hands out all parts in the order of the ranks, and keeps none of them."""
        parts, self.parts, self.shared = self.parts, {}, {}
        return [parts[rank] for rank in sorted(parts)]

    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size or 0) if rank not in self.proven]

    def explain(self) -> str:
        if self.world_size is None:
            return "; ".join(["no rank's part is there", *self.troubles.values()][:8])
        silent = [rank for rank in self.missing() if rank not in self.troubles]
        texts = [self.troubles[rank] for rank in self.missing() if rank in self.troubles][:8]
        if silent:
            shown = format_some(silent, 32)
            texts.insert(0, f"no part of rank{'s' if len(silent) > 1 else ''} {shown} of {self.world_size}")
        return "; ".join(texts)

    async def look(self) -> None:
        """Reads the parts that have come since the last look, and proves that their files are there with the right sizes.

        The names come from the ranks' own reports. A listing only speeds this up: what it does not show is asked for by name, for a
        shared file system may list late (PROTOCOLS.md §1).
        """
        listing = await self.storage.children(self.attempt.folder)
        names = {info.path.rpartition("/")[2] for info in listing.files}
        self.documented = MANIFEST in names
        if self.world_size is None:
            await self._learn_world_size(names)
        wanted = [rank for rank in self.missing() if rank not in self.parts]
        listed = [rank for rank in wanted if part_name(rank) in names]
        unlisted = [rank for rank in wanted if part_name(rank) not in names][:_ASK_UNLISTED]
        await together(self._take, [*listed, *unlisted], at_once=_AT_ONCE)
        await together(self._prove, [rank for rank in self.missing() if rank in self.parts], at_once=_AT_ONCE)

    async def _learn_world_size(self, names: set[str]) -> None:
        """The first part that can be read says how many ranks there are."""
        for rank in sorted(r for name in names if (r := _rank_of(name)) is not None) or [0]:
            await self._take(rank)
            if self.world_size is not None:
                return

    async def _take(self, rank: int) -> None:
        path = self.attempt.path(part_name(rank))
        try:
            data = await self.storage.read(path)
            part, gathered = await asyncio.to_thread(_read_part, data, self.shared)
        except NotFoundError:
            return
        except VersionError:
            raise
        except IntegrityError as error:
            self._trouble(rank, f"{path}: {error.message}")
            return
        if (part.run, part.step, part.save_id, part.rank) != (self.attempt.run, self.attempt.step, self.attempt.save_id, rank):
            self._trouble(rank, f"{path} is the part of rank {part.rank} of {part.run}@{part.step} ({part.save_id})")
            return
        if self.world_size is None:
            self.world_size = part.world_size
        if part.world_size != self.world_size or not 0 <= rank < part.world_size:
            self._trouble(rank, f"{path} says that {part.world_size} ranks save together, others say {self.world_size}")
            return
        self.troubles.pop(rank, None)
        self.parts[rank] = gathered

    async def _prove(self, rank: int) -> None:
        index = self.parts[rank].index
        for name in index.file_names:
            path = self.attempt.path(name)
            try:
                found = await self.storage.stat(path)
            except NotFoundError:
                self._trouble(rank, f"rank {rank} reported {path}, which is not there")
                return
            if found.nbytes != index.file_nbytes(name):
                self._trouble(rank, f"{path} has {found.nbytes} bytes, rank {rank} reported {index.file_nbytes(name)}")
                return
            self.seen[name] = found
        self.troubles.pop(rank, None)
        self.proven.add(rank)

    def _trouble(self, rank: int, text: str) -> None:
        if self.troubles.get(rank) != text:
            log.warning("checkpoint=%s rank=%d does not count yet: %s", self.attempt.folder, rank, text)
        self.troubles[rank] = text


def _rank_of(name: str) -> int | None:
    digits = name.removeprefix("part-").removesuffix(".safetensors")
    return int(digits) if digits.isascii() and digits.isdigit() and name == part_name(int(digits)) else None
