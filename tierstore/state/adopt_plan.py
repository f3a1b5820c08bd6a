"""What a foreign checkpoint becomes in a store: safetensors files are shards as they are, all else is streamed into new shards."""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierstore.errors import UsageError
from tierstore.format.index import Extent, TensorEntry
from tierstore.format.objects import TensorRef, encode_objects
from tierstore.format.shard import ChunkSpec, ShardPlan, plan_shard, tensor_entries
from tierstore.names import shard_name
from tierstore.state.codecs import default_codecs
from tierstore.state.foreign.opening import Foreign
from tierstore.state.foreign.reader import ForeignReader
from tierstore.state.passthrough import FACT, pick_companions, plan_companions
from tierstore.state.paths import Place, name_of
from tierstore.state.renaming import parse_rules
from tierstore.state.unflatten import stored_tensors
from tierstore.storage.contract import Source
from tierstore.storage.sources import BytesSource, LocalSource, StorageSource
from tierstore.tiers.reads import Want

__all__ = ["Adoption", "Share", "plan_adoption"]

log = logging.getLogger(__name__)

_SHARD_NBYTES = 4 << 30
"""Length of a shard that tensors are streamed into, bytes, where one tensor alone is not longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What becomes one shard.

    Attributes:
        origin: The foreign file that is taken as it is; empty: a new file is written.
        nbytes: Its length.
        tensors: Its tensors, in the file that the shard will be.
        open: Makes its bytes.
    """

    origin: str
    nbytes: int
    tensors: tuple[TensorEntry, ...]
    open: Callable[[], Source]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """How a foreign checkpoint becomes one of the store's.

    Attributes:
        foreign: What is taken in.
        shares: The shards, in the order of their ranks.
        objects: The tree, encoded.
        facts: Facts of rank 0 beside the usual ones.
        companions: Files beside the tensors that go along.
        dropped: Tensors that the renaming rules drop.
    """

    foreign: Foreign
    shares: tuple[Share, ...]
    objects: bytes
    facts: Mapping[str, Any]
    companions: tuple[str, ...]
    dropped: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(share.nbytes for share in self.shares)

    @property
    def tensors(self) -> int:
        return len({entry.name for share in self.shares for entry in share.tensors})


async def plan_adoption(foreign: Foreign, *, rename: Any = None, link: bool = False) -> Adoption:
    """Decides which shards there will be, and reads what is not a tensor. Nothing is written.

    Args:
        foreign: From `look_at`.
        rename: Renaming rules (`tierstore.state.renaming.parse_rules`): names only.
        link: Local files may become hard links where the file system can't share blocks.

    Raises:
        UsageError: The rules change more than names, or don't fit.
        UnsupportedTypeError: Objects can't be stored; names the place.
    """
    names = _renamed(foreign, rename)
    reader = foreign.reader()
    tree = await foreign.tree()
    if rename is not None:
        tree = _flattened(tree, names)
    objects = await asyncio.to_thread(encode_objects, tree, default_codecs())
    taken, left = pick_companions(foreign.files.beside)
    if left:
        log.warning("%s: left out, being too large for a configuration: %s", foreign.files.uri, ", ".join(left[:8]))
    groups = [] if foreign.shards else await asyncio.to_thread(_groups, foreign, names)
    count = len(foreign.shards or groups) + bool(taken)
    if foreign.shards:
        shares = _as_they_are(foreign, names, count, link=link)
    else:
        shares = [_streamed(reader, entries, rank, count) for rank, entries in enumerate(groups)]
    facts: dict[str, Any] = {"adopted": {"from": foreign.files.uri, "format": foreign.format}}
    if taken:
        share, facts[FACT] = await _companions(foreign, taken, count)
        shares.append(share)
    known = set(names)
    return Adoption(
        foreign=foreign,
        shares=tuple(shares),
        objects=objects,
        facts=facts,
        companions=tuple(taken),
        dropped=tuple(entry.name for entry in foreign.entries if entry.name not in known),
    )


def _renamed(foreign: Foreign, rename: Any) -> dict[str, str]:
    """Old name → new name, of the tensors that are kept."""
    listed = [entry.name for entry in foreign.entries]
    if rename is None:
        return {name: name for name in listed}
    made = {old: new for new, old in parse_rules(rename).rename(listed).items()}
    if not made:
        raise UsageError("the rules drop every tensor", hint="correct them")
    return made


def _flattened(tree: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """The tree as a flat dict: tensors by their new names, other values by their places."""
    made: dict[str, Any] = {new: TensorRef(new) for new in names.values()}

    def walk(node: Any, place: Place) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, (*place, key))
        elif name_of(place) not in made and not any(True for _ in stored_tensors(node)):
            made[name_of(place)] = node

    walk(tree, ())
    return made


# ---- files that are shards already


def _as_they_are(foreign: Foreign, names: Mapping[str, str], count: int, *, link: bool) -> list[Share]:
    by_file: dict[str, list[TensorEntry]] = {file: [] for file in foreign.shards}
    shard_of = {file: shard_name(rank, count) for rank, file in enumerate(foreign.shards)}
    for entry in foreign.entries:
        if entry.name not in names:
            continue
        parts: dict[str, list[Extent]] = {}
        for extent in entry.extents:
            parts.setdefault(extent.file, []).append(replace(extent, file=shard_of[extent.file]))
        for file, extents in parts.items():
            by_file[file].append(replace(entry, name=names[entry.name], extents=tuple(extents)))
    files = foreign.files

    def share(file: str, entries: Sequence[TensorEntry]) -> Share:
        nbytes, path = files.infos[file].nbytes, files.path(file)
        local = files.storage.local_path(path)

        def open_file() -> Source:
            source = StorageSource(files.storage, path, nbytes)
            return source if local is None else LocalSource(source, local, hard=link)

        return Share(origin=file, nbytes=nbytes, tensors=tuple(entries), open=open_file)

    return [share(file, entries) for file, entries in by_file.items()]


# ---- tensors that are written anew


def _groups(foreign: Foreign, names: Mapping[str, str]) -> list[list[TensorEntry]]:
    """The kept tensors, renamed, in groups of about `_SHARD_NBYTES`; further names of a tensor (ties) stay with it."""
    groups: list[list[TensorEntry]] = [[]]
    group_of: dict[tuple[Extent, ...], int] = {}
    nbytes = 0
    for entry in foreign.entries:
        if entry.name not in names:
            continue
        renamed = replace(entry, name=names[entry.name])
        if entry.extents in group_of:
            groups[group_of[entry.extents]].append(renamed)
            continue
        size = sum(extent.end - extent.begin for extent in entry.extents)
        if groups[-1] and nbytes + size > _SHARD_NBYTES:
            groups.append([])
            nbytes = 0
        if size:
            group_of[entry.extents] = len(groups) - 1
        groups[-1].append(renamed)
        nbytes += size
    return groups


def _streamed(reader: ForeignReader, entries: Sequence[TensorEntry], rank: int, count: int) -> Share:
    specs: list[ChunkSpec] = []
    sources: dict[tuple[str, tuple[int, ...]], Extent] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Extent, ...], str] = {}
    bare: list[TensorEntry] = []
    for entry in entries:
        if any(extent.end > extent.begin for extent in entry.extents):
            stored = first.setdefault(entry.extents, entry.name)
            if stored != entry.name:
                aliases[entry.name] = stored
                continue
        empty = 0 in entry.shape
        kept = [e for e in entry.extents if empty or 0 not in e.sizes]  # a rank may have had nothing of a tensor
        for extent in kept[:1] if empty else kept:
            spec = ChunkSpec(name=entry.name, dtype=entry.dtype, shape=extent.sizes, global_shape=entry.shape, offsets=extent.offsets)
            specs.append(spec)
            sources[entry.name, extent.offsets] = extent
        if not kept:
            bare.append(replace(entry, extents=()))
    plan = plan_shard(specs, aliases=aliases, facts={"rank": rank, "world_size": count})
    tensors = (*tensor_entries(plan, shard_name(rank, count)), *bare)
    return Share(origin="", nbytes=plan.nbytes, tensors=tensors, open=lambda: _ImageSource(plan, sources, reader))


class _ImageSource:
    """A planned shard whose tensors are read from the foreign files as they are pulled; nothing is kept."""

    def __init__(self, plan: ShardPlan, sources: Mapping[tuple[str, tuple[int, ...]], Extent], reader: ForeignReader) -> None:
        self._plan = plan
        self._reader = reader
        self._places = [(p.begin, p.end, sources[p.spec.name, p.spec.offsets]) for p in plan.placements]

    @property
    def nbytes(self) -> int:
        return self._plan.nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of the header and the tensors that lie there."""
        if nbytes == 0:
            return memoryview(b"")
        end = offset + nbytes
        view = memoryview(mmap.mmap(-1, nbytes))  # page-aligned, and given back when the last view of it is gone
        header = self._plan.header[offset:end]
        view[: len(header)] = header
        wants = [
            Want(e.file, e.begin + max(begin, offset) - begin, view[max(begin, offset) - offset : min(stop, end) - offset])
            for begin, stop, e in self._places
            if begin < end and offset < stop
        ]
        await self._reader.read(wants)
        return view


async def _companions(foreign: Foreign, names: Sequence[str], count: int) -> tuple[Share, dict[str, list[Any]]]:
    files = foreign.files
    plan = plan_companions({name: files.beside[name].nbytes for name in names})
    data = bytearray(plan.nbytes)
    data[: len(plan.header)] = plan.header
    shard = shard_name(count - 1, count)
    places: dict[str, list[Any]] = {}
    for placed in plan.placements:
        name = placed.spec.name
        await files.storage.read_into(files.path(name), 0, memoryview(data)[placed.begin : placed.end])
        places[name] = [shard, placed.begin, placed.end]
    return Share(origin="", nbytes=plan.nbytes, tensors=(), open=lambda: BytesSource(data)), places
