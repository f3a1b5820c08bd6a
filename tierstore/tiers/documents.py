"""The small files of one open checkpoint: manifest, index and objects, each from the nearest tier whose bytes pass the proof."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from tierstore.errors import IntegrityError, NotFoundError, StorageError
from tierstore.format.digest import block_digests, digest_of, file_digest
from tierstore.format.index import FileEntry, Index, PagedIndex, RoutingIndex, decode_head, decode_index
from tierstore.format.manifest import FileRecord, Manifest, decode_manifest
from tierstore.format.objects import ObjectsDocument, load_objects
from tierstore.names import INDEX, MANIFEST, OBJECTS
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.index_pages import IndexPages, read_whole
from tierstore.tiers.passed_over import PassedOver
from tierstore.tiers.sources import Source
from tierstore.tiers.tier import Tier

__all__ = ["Documents", "Run"]

_ENTRIES_NBYTES = 64 << 20
"""Block digests that are kept, in bytes: those of 2 TiB."""

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the event loop that a replica lives on, from another thread (`storage.loop.EventLoop.run`)."""


class Documents:
    """Those of one checkpoint; `open` comes first.

    Args:
        info: The catalog's entry.
        passed: Which copies are asked, in what order, and what was wrong with them.
        run: See `open_replica`.
        requests: Reads sent to storages, by tier: counted here.
        bytes_fetched: Bytes read, by tier: counted here.
    """

    def __init__(
        self, info: CheckpointInfo, passed: PassedOver, *, run: Run | None, requests: Counter[str], bytes_fetched: Counter[str]
    ) -> None:
        self.manifest: Manifest
        self.index: RoutingIndex
        self.requests = requests
        self.bytes_fetched = bytes_fetched
        self._info = info
        self._passed = passed
        self._run = run
        self._pages: IndexPages | None = None
        self._objects: ObjectsDocument | None = None
        self._ahead: dict[tuple[str, str, int, int | None], asyncio.Future[bytes]] = {}
        self._manifest_document = b""
        self._entries: dict[str, FileEntry] = {}

    async def open(self, nearest: Source, *, objects: bool) -> None:
        """Reads manifest and index, and the objects if they are wanted; raises as `open_replica`."""
        if not nearest.tier.storage.capabilities.local:  # far away each question costs its time: all that are known are asked at once
            for name, nbytes in self._info.opening.items():
                if name == INDEX or (name == OBJECTS and objects):
                    read = nearest.tier.storage.read(self._info.attempt.path(name), 0, nbytes)
                    self._ahead[nearest.tier.name, name, 0, nbytes] = asyncio.ensure_future(read)
        try:
            await self._open_documents()
            if objects:
                await self.objects()
        finally:
            unused = list(self._ahead.values())
            self._ahead.clear()
            for task in unused:
                task.cancel()
            await asyncio.gather(*unused, return_exceptions=True)

    async def objects(self) -> ObjectsDocument:
        """The objects of all ranks.

        Raises:
            IntegrityError: No tier has a good copy of objects.json.
        """
        if self._objects is None:
            self._objects = await asyncio.to_thread(load_objects, await self._document(self._record(OBJECTS)))
        return self._objects

    async def bytes_of(self, name: str) -> bytes:
        """One as a whole; raises as `Replica.document`."""
        if name == MANIFEST:
            return self._manifest_document
        if name not in (f.name for f in self.manifest.files):
            raise NotFoundError(
                f"the checkpoint in {self._info.attempt.folder} has no file {name!r}", hint="see `tierstore show`", file=name
            )
        return await self._document(self._record(name))

    async def entry(self, name: str) -> FileEntry:
        """A file with the digests of its blocks."""
        while (entry := self._entries.get(name)) is None:
            await self.load_entries([name])
        return entry

    async def load_entries(self, names: Iterable[str]) -> None:
        """Reads the block digests of files, as far as they are not here."""
        missing = [name for name in dict.fromkeys(names) if name not in self._entries]
        if isinstance(self.index, PagedIndex) and self._pages is not None:
            found = await self._pages.digests([self.index.file_number(name) for name in missing])
            nbytes = map(self.index.file_nbytes, missing)
            made = [FileEntry(name=n, nbytes=b, block_digests=d) for n, b, d in zip(missing, nbytes, found, strict=True)]
        else:
            made = [self.index.file(name) for name in missing]
        held = sum(len(entry.block_digests) for entry in (*self._entries.values(), *made))
        while self._entries and held > _ENTRIES_NBYTES:  # the oldest first
            held -= len(self._entries.pop(next(iter(self._entries))).block_digests)
        self._entries |= {entry.name: entry for entry in made}

    async def _document(self, file: FileRecord) -> bytes:
        """A small file as a whole, proved against the manifest."""
        block_nbytes = self.manifest.block_nbytes

        def prove(data: bytes) -> None:
            if file_digest(block_digests(data, block_nbytes)) != file.digest:
                raise IntegrityError("its SHA-256 is not the one in the manifest")

        return await self._proved(file.name, file.nbytes, prove)

    async def _proved(self, name: str, nbytes: int | None, prove: Callable[[bytes], None], begin: int = 0) -> bytes:
        for source in self._passed.order(name):
            try:
                self.requests[source.tier.name] += 1
                data = await self._asked(source, name, begin, nbytes)
                self.bytes_fetched[source.tier.name] += len(data)
                await asyncio.to_thread(prove, data)
            except (StorageError, NotFoundError, IntegrityError) as error:
                path = self._info.attempt.path(name)
                self._passed.note(source, name, error, partial(_read_and_prove, source.tier, path, begin, nbytes, prove))
                continue
            return data
        raise await self._passed.no_copy(name)

    async def _asked(self, source: Source, name: str, begin: int, nbytes: int | None) -> bytes:
        ahead = self._ahead.pop((source.tier.name, name, begin, nbytes), None)
        return await (ahead or source.tier.storage.read(self._info.attempt.path(name), begin, nbytes))

    async def _open_documents(self) -> None:
        info = self._info

        def prove_manifest(data: bytes) -> None:
            if digest_of(data) != info.manifest_digest:
                raise IntegrityError("its SHA-256 is not the one in the commit record")

        document = await self._proved(MANIFEST, info.manifest_nbytes, prove_manifest)
        self._manifest_document = document
        self.manifest = await asyncio.to_thread(decode_manifest, document)
        claimed = (self.manifest.run, self.manifest.step, self.manifest.save_id)
        if claimed != (info.attempt.run, info.attempt.step, info.attempt.save_id):
            raise IntegrityError(
                f"the manifest in {info.attempt.folder} is that of {claimed[0]}@{claimed[1]}, save id {claimed[2]}",
                hint="run `tierstore verify`",
                run=info.run,
                step=info.step,
            )
        record = self._record(INDEX)
        if self._run is None or read_whole(record):
            self.index, _ = await asyncio.to_thread(decode_index, await self._document(record))
        else:
            self.index = await self._open_pages(record, self._run)
        self._check_index()

    async def _open_pages(self, record: FileRecord, run: Run) -> PagedIndex:
        """Reads the index's head alone; the rest when it is asked for."""

        def prove_head(data: bytes) -> None:
            if digest_of(data) != record.head_digest:
                raise IntegrityError("its head is damaged: its SHA-256 is not the one in the manifest")

        async def read(begin: int, nbytes: int, prove: Callable[[bytes], None]) -> bytes:
            return await self._proved(INDEX, nbytes, prove, begin)

        head = await asyncio.to_thread(decode_head, await read(0, record.head_nbytes, prove_head), record.nbytes)
        shards = {f.name: f for f in self.manifest.files if f.kind == "shard"}
        pages = self._pages = IndexPages(head=head, shards=shards, read=read)
        return PagedIndex(head, lambda numbers: run(pages.groups(numbers)), lambda number: run(pages.digests([number]))[0])

    def _check_index(self) -> None:
        """Index and manifest name the same shards with the same sizes and digests (which a paged index proves when it reads them)."""
        promised = {f.name: f for f in self.manifest.files if f.kind == "shard"}
        for name in self.index.file_names:
            record = promised.pop(name, None)
            digest = self.index.file(name).digest if isinstance(self.index, Index) else record and record.digest
            if record is None or record.nbytes != self.index.file_nbytes(name) or record.digest != digest:
                raise IntegrityError(f"index and manifest of {self._info.attempt.folder} disagree about {name}", file=name)
        if promised or self.index.block_nbytes != self.manifest.block_nbytes:
            raise IntegrityError(f"index and manifest of {self._info.attempt.folder} disagree about their files or block size")

    def _record(self, name: str) -> FileRecord:
        record = next((f for f in self.manifest.files if f.name == name), None)
        if record is None:
            raise IntegrityError(f"the manifest in {self._info.attempt.folder} does not name {name}", file=name)
        return record


async def _read_and_prove(tier: Tier, path: str, begin: int, nbytes: int | None, prove: Callable[[bytes], None]) -> None:
    await asyncio.to_thread(prove, await tier.storage.read(path, begin, nbytes))
