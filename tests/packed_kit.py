"""A packed tier in memory that does one thing only: it keeps unchanged bytes once. For the protocols, over which real code runs."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from stepping_kit import Hook, MemoryStorage, OneByOne
from tiers_kit import BLOCK, Shard, SteppedClock, persist_rank, shard_of

from tierstore.errors import IntegrityError
from tierstore.format.index import TensorEntry
from tierstore.format.packed.types import packable
from tierstore.names import Attempt
from tierstore.storage.contract import FileInfo, PackedFacts, PackHints, Source, Storage, Unchanged
from tierstore.tiers.commit import commit
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.direct import Refers
from tierstore.tiers.tier import Tier, Tiers

_MAGIC = b"packed!\n"


class PackedMemory(MemoryStorage):
    """Stores a shard as its bytes, but for ranges that it takes from other shards: reading those fails where these are gone."""

    def _bytes(self, path: str) -> bytes:
        head, own = _split(super()._bytes(path))
        if head is None:
            return own
        raw = bytearray(head["nbytes"])
        at = 0
        for begin, end, source, offset in head["pieces"]:
            if source:
                if source not in self.files:
                    raise IntegrityError(f"{path} takes bytes from {source}, which is not there", file=path)
                raw[begin:end] = self._bytes(source)[offset : offset + end - begin]
            else:
                raw[begin:end] = own[at : at + end - begin]
                at += end - begin
        return bytes(raw)

    def _info(self, path: str) -> FileInfo:
        stored = super()._bytes(path)
        head, _ = _split(stored)
        nbytes = len(stored) if head is None else head["nbytes"]
        return FileInfo(path=path, nbytes=nbytes, stored_nbytes=len(stored), modified_at=self.dates.get(path, self._now()))

    async def write_packed(self, path: str, source: Source, hints: PackHints) -> FileInfo:
        pieces: list[tuple[int, int, str, int]] = []
        own = bytearray()
        at = 0
        for piece in (*hints.unchanged, Unchanged(begin=source.nbytes, end=source.nbytes, path="", source=0)):
            if piece.begin > at:
                pieces.append((at, piece.begin, "", 0))
                own += await source.read(at, piece.begin - at)
            if piece.path:
                pieces.append((piece.begin, piece.end, piece.path, piece.source))
            at = piece.end
        assert packable(path.rpartition("/")[2]) or not hints.unchanged
        if hints.unchanged:
            head = json.dumps({"nbytes": source.nbytes, "pieces": pieces}).encode()
            return await self.put(path, _MAGIC + len(head).to_bytes(4, "big") + head + own)
        return await self.put(path, bytes(own))

    async def packed_facts(self, path: str) -> PackedFacts | None:
        return PackedFacts(
            digest="", stored_nbytes=len(super()._bytes(path)), lossy=frozenset(), refers_to=self.refers_to(path), quantised={}
        )

    def refers_to(self, path: str) -> tuple[str, ...]:
        """The files that a file takes bytes from."""
        head, _ = _split(super()._bytes(path))
        return () if head is None else tuple(sorted({piece[2] for piece in head["pieces"] if piece[2]}))

    async def origins(self, path: str, begin: int, end: int) -> Sequence[Unchanged]:
        head, _ = _split(super()._bytes(path))
        return [
            Unchanged(begin=b, end=e, path=source, source=offset)
            for b, e, source, offset in (head["pieces"] if head else ())
            if source and b < end and e > begin
        ]

    def raw(self) -> dict[str, bytes]:
        """What can be read of every file; one that takes bytes from a file that is gone is not there."""
        found = {}
        for path in self.files:
            try:
                found[path] = self._bytes(path)
            except IntegrityError:
                continue
        return found

    def dangling(self) -> dict[str, tuple[str, ...]]:
        """The files that can't be read any more, and what they lack."""
        return {path: gone for path in self.files if (gone := tuple(p for p in self.refers_to(path) if p not in self.files))}


def _split(stored: bytes) -> tuple[dict[str, Any] | None, bytes]:
    if not stored.startswith(_MAGIC):
        return None, stored
    end = len(_MAGIC) + 4
    length = int.from_bytes(stored[len(_MAGIC) : end], "big")
    return json.loads(stored[end : end + length]), stored[end + length :]


class PackedOneByOne(OneByOne):
    """`PackedMemory` with a hook before every operation; what is read of other files is asked for, too."""

    inner: PackedMemory

    async def _with_sources(self, operation: str, path: str) -> None:
        await self._ask(operation, path)
        if path in self.inner.files:
            for source in self.inner.refers_to(path):
                await self._ask(operation, source)

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        await self._with_sources("read", path)
        return await self.inner.read(path, offset, nbytes)

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        await self._with_sources("read_into", path)
        await self.inner.read_into(path, offset, buffer)

    async def write_packed(self, path: str, source: Source, hints: PackHints) -> FileInfo:
        await self._ask("write", path)
        return await self.inner.write_packed(path, source, hints)

    async def packed_facts(self, path: str) -> PackedFacts | None:
        await self._ask("read", path)
        return await self.inner.packed_facts(path)

    async def origins(self, path: str, begin: int, end: int) -> Sequence[Unchanged]:
        return await self.inner.origins(path, begin, end)


def packed_tiers(storages: Mapping[str, Storage], hook: Hook | None = None) -> Tiers:
    """A client's own view: the first tier is the node's, the second the authority; those that pack store unchanged bytes once."""
    made = []
    for number, (name, storage) in enumerate(storages.items()):
        packed = isinstance(storage, PackedMemory)
        if hook is not None:
            storage = (PackedOneByOne if packed else OneByOne)(storage, functools.partial(hook, name))
        made.append(Tier(name=name, storage=storage, scope="shared" if number else "node", unchanged_once=packed))
    return Tiers(tiers=tuple(made), authority=made[1], durable_at=made[1], store_id="kit")


def lora_shard(step: int, *, seed: int = 0, rank: int = 0, world_size: int = 1, blocks: int = 24) -> Shard:
    """A shard of so many blocks, of which only the last one, the adapter's, differs from step to step; another `seed` is another base."""
    plain = shard_of(rank, world_size, seed=seed, rows=1, columns=blocks * BLOCK - 700)
    data = bytearray(plain.data)
    begin = 8 + int.from_bytes(data[:8], "little")
    data[begin:] = random.Random(seed * 1000 + rank).randbytes(len(data) - begin)
    data[-100:] = bytes((step * 37 + i) % 251 for i in range(100))
    tensors: Sequence[TensorEntry] = plain.tensors
    return Shard(data=bytes(data), tensors=tensors)


async def persist_lora(
    tiers: Tiers,
    attempt: Attempt,
    *,
    seed: int = 0,
    tier: str = "shared",
    world_size: int = 1,
    blocks: int = 24,
    context: CopyContext | None = None,
) -> None:
    """All ranks' parts of a checkpoint, onto a tier; not committed. `context`: of a saver that refers to what the tier has already."""
    target = tiers.get(tier)
    refer = None
    if context is not None:
        refer = Refers(context=context, attempt=attempt, tier=target, block_nbytes=BLOCK, whole=world_size == 1)
    for rank in range(world_size):
        shard = lora_shard(attempt.step, seed=seed, rank=rank, world_size=world_size, blocks=blocks)
        await persist_rank(tiers, attempt, target, rank=rank, world_size=world_size, shard=shard, refer=refer)


async def save_lora(tiers: Tiers, attempt: Attempt, *, seed: int = 0, world_size: int = 1, blocks: int = 24) -> Attempt:
    """A committed checkpoint on the authority."""
    await persist_lora(tiers, attempt, seed=seed, world_size=world_size, blocks=blocks)
    await commit(tiers, attempt, deadline_s=0, clock=SteppedClock())
    return attempt
