"""A storage that packs shards: shows raw paths, lengths and bytes, and keeps packed files (`docs/design/format.md`, "Packed files").

Names that are not a shard's pass through to the inner storage. A shard lies there as it is, or as ``<name>.<raw bytes>.packed``; which
of the two is nobody's business but this module's: a tier may hold both kinds. Content under the path of a shard can only ever be one, for
its folder is of one attempt at a save; so what was learned of a packed file is remembered, and looked up anew where it turns out to be
gone, or not to fit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tierstore.errors import IntegrityError, NotFoundError, TierStoreError, UsageError
from tierstore.names import check_relative
from tierstore.storage.bandwidth import Bandwidth
from tierstore.storage.contract import (
    Capabilities,
    FileInfo,
    Growing,
    Listing,
    MadeFrom,
    PacesWrites,
    PackedFacts,
    PackHints,
    Reading,
    ReadsEach,
    ReadsPieces,
    ReadsPlaced,
    ReadsProved,
    Source,
    Storage,
    Unchanged,
    WritesOn,
)
from tierstore.storage.packed_names import Form, StoredNames, form_of_packed, is_packable, shown_as, split
from tierstore.storage.packed_pieces import read_packed_pieces
from tierstore.storage.packing_rules import Packing, QuantiseRule
from tierstore.storage.sources import BytesSource

if TYPE_CHECKING:  # what moves bytes is loaded when bytes move
    from tierstore.storage._threads import DaemonPool
    from tierstore.storage.unpacking import Prove, Unpacker
    from tierstore.storage.unpacking_footers import Known

__all__ = ["PACKED_MARKER", "PackedStorage", "Packing", "QuantiseRule"]

T = TypeVar("T")

PACKED_MARKER = ".packed"
"""The marker at a tier's root that says: packed files were written here."""

_MARK = b"Some shards here are packed files: docs/design/format.md\n"
_EXACT = PackHints(exact=True)
"""Only who asks for it, by `write_packed`, and records what came of it, gets a file that is not what it was."""
_LOOKS = 4
"""So often a shard that somebody replaces meanwhile is looked for anew."""
_THREADS = 2


class PackedStorage:
    """`inner` with packed shards in it: `contract.WritesPacked`, and as much of the rest beyond the contract as `inner` has.

    Args:
        inner: Where the bytes lie.
        packing: How shards are packed; None: they are written as they are, and packed ones are read.
    """

    pace_writes: Callable[[Bandwidth | None], None]
    """`contract.PacesWrites`; there only if `inner` has it. So are these: `contract.ReadsEach`, `contract.ReadsPieces`,
    `contract.ReadsPlaced`, and `PosixStorage.clone`."""
    read_each: Callable[[Sequence[str]], Awaitable[list[bytes | Exception]]]
    read_pieces: Callable[[Sequence[Reading]], Awaitable[None]]
    read_placed: Callable[[Reading], Awaitable[bool]]
    clone: Callable[..., Awaitable[FileInfo | None]]

    def __init__(self, inner: Storage, packing: Packing | None) -> None:
        self.inner = inner
        self.packing = packing
        self._names = StoredNames(inner)
        self._unpacker: Unpacker | None = None
        self._encoders: DaemonPool | None = None
        self._marked = False
        if isinstance(inner, PacesWrites):
            self.pace_writes = inner.pace_writes
        if isinstance(inner, ReadsEach):
            self.read_each = partial(self._read_each, inner)
        if isinstance(inner, ReadsPieces):
            self.read_pieces = partial(self._read_pieces, inner)
        if isinstance(inner, ReadsPlaced):
            self.read_placed = partial(self._read_placed, inner)
        if hasattr(inner, "clone"):
            self.clone = partial(self._clone, inner.clone)

    def __repr__(self) -> str:
        return f"PackedStorage({self.inner!r}, {self.packing!r})"

    def __reduce__(self) -> Any:
        return PackedStorage, (self.inner, self.packing)

    @property
    def uri(self) -> str:
        return self.inner.uri

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def local_path(self, path: str) -> Path | None:
        """As of the inner storage; None for a shard, of which nobody can say beforehand what the file is."""
        return None if is_packable(check_relative(path)) else self.inner.local_path(path)

    async def free_nbytes(self) -> int | None:
        return await self.inner.free_nbytes()

    async def close(self) -> None:
        for pool in (self._unpacker, self._encoders):
            if pool is not None and pool.pid == os.getpid():
                pool.shutdown()
        self._unpacker = self._encoders = None
        await self.inner.close()

    # Reading

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        if not is_packable(check_relative(path)):
            return await self.inner.read(path, offset, nbytes)
        if offset < 0 or (nbytes is not None and nbytes < 0):
            raise UsageError(f"no file has {nbytes} bytes at {offset}", hint="offset and length are not negative")
        if nbytes == 0:
            return b""

        async def attempt(form: Form) -> bytes:
            if not form.packed:
                return await self.inner.read(form.path, offset, nbytes)
            wanted = form.nbytes - offset if nbytes is None else nbytes
            self._check_range(path, form, offset, wanted)
            buffer = bytearray(wanted)
            await self._unpacked(path, form, offset, memoryview(buffer), None, 1)
            return bytes(buffer)

        return await self._found(path, attempt)

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        if not is_packable(check_relative(path)):
            return await self.inner.read_into(path, offset, buffer)
        if not buffer.nbytes:
            return None

        async def attempt(form: Form) -> None:
            if not form.packed:
                return await self.inner.read_into(form.path, offset, buffer)
            self._check_range(path, form, offset, buffer.nbytes)
            return await self._unpacked(path, form, offset, buffer.cast("B"), None, 1)

        return await self._found(path, attempt)

    async def read_proved(
        self, path: str, offset: int, buffer: memoryview, prove: Callable[[int, memoryview], None], *, unit: int = 1 << 20
    ) -> None:
        """`contract.ReadsProved`."""
        inner = self.inner
        if not buffer.nbytes:
            return None

        async def plain(stored: str) -> None:
            if isinstance(inner, ReadsProved):
                return await inner.read_proved(stored, offset, buffer, prove, unit=unit)
            await inner.read_into(stored, offset, buffer)
            return await asyncio.to_thread(prove, offset, buffer.cast("B"))

        if not is_packable(check_relative(path)):
            return await plain(path)

        async def attempt(form: Form) -> None:
            if not form.packed:
                return await plain(form.path)
            self._check_range(path, form, offset, buffer.nbytes)
            return await self._unpacked(path, form, offset, buffer.cast("B"), prove, unit)

        return await self._found(path, attempt)

    async def _found(self, path: str, attempt: Callable[[Form], Awaitable[T]]) -> T:
        """Does `attempt` where the shard lies; once more where what was remembered of that may no longer be so."""
        looked_anew = False
        for left in range(_LOOKS - 1, -1, -1):
            form = await self._names.find(path)
            try:
                return await attempt(form)
            except NotFoundError:
                self._names.forget(path, form)
                if not left:
                    raise
            except IntegrityError:
                if looked_anew or not left or not form.packed:
                    raise
                # Somebody may have written it, or a shard that it takes bytes from, anew: then frames lie elsewhere than they did.
                looked_anew = True
                self._forget_with_names(path)
        raise AssertionError("the last round returns or raises")

    async def _unpacked(self, path: str, form: Form, offset: int, buffer: memoryview, prove: Prove | None, unit: int) -> None:
        if buffer.readonly or not buffer.c_contiguous:
            raise UsageError(f"can't read {path} into memory that is read-only or not contiguous", hint="pass a writable memoryview")
        unpacker = self._unpacking()
        await unpacker.read(path, await unpacker.footers.of(form, path), offset, buffer, prove, unit)

    def _check_range(self, path: str, form: Form, offset: int, nbytes: int) -> None:
        if offset < 0:
            raise UsageError(f"no file has {nbytes} bytes at {offset}", hint="offset and length are not negative")
        if nbytes < 0 or offset + nbytes > form.nbytes:
            wanted = "bytes" if nbytes < 0 else f"{nbytes} bytes"
            raise IntegrityError(
                f"{self.uri}/{path} has {form.nbytes} bytes, but {wanted} from {offset} were wanted",
                hint="the file was cut short, or its manifest is of another file: run `tierstore verify`",
                file=path,
            )

    def _unpacking(self) -> Unpacker:
        from tierstore.storage.unpacking import Unpacker

        unpacker = self._unpacker
        if unpacker is None or unpacker.pid != os.getpid():  # threads don't survive a fork
            threads = self.packing.threads if self.packing is not None else _THREADS
            unpacker = self._unpacker = Unpacker(self.inner, self._names.find, threads)
        return unpacker

    async def _read_each(self, inner: ReadsEach, paths: Sequence[str]) -> list[bytes | Exception]:
        """`contract.ReadsEach`."""
        if not any(is_packable(path) for path in paths):
            return await inner.read_each(paths)
        found: list[bytes | Exception] = []
        for path in paths:
            try:
                found.append(await self.read(path))
            except TierStoreError as error:
                found.append(error)
        return found

    async def _read_pieces(self, inner: ReadsPieces, readings: Sequence[Reading]) -> None:
        """`contract.ReadsPieces`: plain files by the inner storage's threads."""
        plain: list[Reading] = []
        packed: list[Reading] = []
        for reading in readings:
            try:
                is_packed = is_packable(reading.path) and (await self._names.find(reading.path)).packed
            except NotFoundError:
                is_packed = False  # the inner storage says what is missing
            except (TierStoreError, OSError) as error:
                for begin, end in reading.ranges:
                    reading.failed(begin, end, error)
                continue
            (packed if is_packed else plain).append(reading)
        if plain:
            await inner.read_pieces(plain)
        if packed:
            await read_packed_pieces(self, packed)

    async def _read_placed(self, inner: ReadsPlaced, reading: Reading) -> bool:
        """`contract.ReadsPlaced`, for files that are not packed; what can't be told, or found, is left to who reads in another way."""
        if is_packable(reading.path):
            try:
                if (await self._names.find(reading.path)).packed:
                    return False
            except (TierStoreError, OSError):
                return False
        return await inner.read_placed(reading)

    # Writing

    async def write(self, path: str, source: Source) -> FileInfo:
        return await self._write(path, source, _EXACT, self.inner.write)

    async def write_on(self, path: str, source: Source) -> FileInfo:
        """`contract.WritesOn`, as far as the inner storage goes on with anything."""
        return await self._write(path, source, _EXACT, self._going_on())

    async def write_packed(self, path: str, source: Source, hints: PackHints) -> FileInfo:
        """`contract.WritesPacked`."""
        return await self._write(path, source, hints, self._going_on())

    async def put(self, path: str, data: bytes) -> FileInfo:
        if is_packable(check_relative(path)):
            return await self.write(path, BytesSource(data))
        return await self.inner.put(path, data)

    async def create(self, path: str, data: bytes) -> None:
        await self.inner.create(path, data)

    def _going_on(self) -> Callable[[str, Source], Awaitable[FileInfo]]:
        return self.inner.write_on if isinstance(self.inner, WritesOn) else self.inner.write

    async def _write(self, path: str, source: Source, hints: PackHints, write: Callable[[str, Source], Awaitable[FileInfo]]) -> FileInfo:
        if not is_packable(check_relative(path)):
            return await write(path, source)
        before = await self._names.look(path)
        form, info = await self._written(path, source, hints, write)
        if not await self._became(path, form, before):
            form, info = await self._written(path, source, hints, write)
            await self._became(path, form, ())  # removes nothing
        return shown_as(path, form, info)

    async def _written(
        self, path: str, source: Source, hints: PackHints, write: Callable[[str, Source], Awaitable[FileInfo]]
    ) -> tuple[Form, FileInfo]:
        """Writes a shard; the form that it got."""
        if self.packing is None or isinstance(source, Growing):  # a packed file's name tells the length of the raw one
            info = await write(path, source)
            return Form(path=path, nbytes=info.nbytes, stored_nbytes=info.nbytes, packed=False), info
        from tierstore.storage.packing import EncodedSource

        await self._mark()
        encoded = EncodedSource(source, self.packing, hints, self._encoding(self.packing))
        try:
            info = await write(form_of_packed(path, source.nbytes, None).path, encoded)
        finally:
            await encoded.close()
        return form_of_packed(path, source.nbytes, info.nbytes), info

    def _encoding(self, packing: Packing) -> DaemonPool:
        from tierstore.storage._threads import DaemonPool

        pool = self._encoders
        if pool is None or pool.pid != os.getpid():
            pool = self._encoders = DaemonPool(packing.threads, "tierstore-pack", packing.nice)
        return pool

    async def _became(self, path: str, form: Form, before: Sequence[Form]) -> bool:
        """A form was published; those that there were before go. False: so did this one, for somebody published another one meanwhile."""
        outdated = await self._names.outdated(path, form, before)
        self._forget_files(form.path, *outdated)
        if not outdated:
            return True
        await self.inner.delete(outdated)
        try:  # who removes a form looks afterwards: of two that remove each other's the later one sees it
            await self.inner.stat(form.path)
        except NotFoundError:
            self._names.note(path, ())
            return False
        return True

    async def keep_one(self, folder: str) -> Sequence[str]:
        """`contract.KeepsForms`."""
        shards = [info.path for info in self._names.shown((await self.inner.children(folder)).files, folder) if is_packable(info.path)]
        forms = {path: self._names.known(path) for path in shards}
        outdated = {path: [form.path for form in some[1:]] for path, some in forms.items() if len(some) > 1}
        if outdated:
            await self.inner.delete([stored for some in outdated.values() for stored in some])
            for path in outdated:
                self._forget_files(*(form.path for form in forms[path]))
                self._names.note(path, ())  # whoever looks next lists the folder
        return list(outdated)

    async def _mark(self) -> None:
        """Before the first packed file there is the marker."""
        if self._marked:
            return
        try:
            await self.inner.stat(PACKED_MARKER)
        except NotFoundError:
            await self.inner.put(PACKED_MARKER, _MARK)
        self._marked = True

    async def _clone(
        self, clone: Callable[..., Awaitable[FileInfo | None]], path: str, origin: Path, *, hard: bool = False
    ) -> FileInfo | None:
        """`PosixStorage.clone`; a shard that is to be packed can't be taken in as it is."""
        if not is_packable(check_relative(path)):
            return await clone(path, origin, hard=hard)
        if self.packing is not None:
            return None
        before = await self._names.look(path)
        info = await clone(path, origin, hard=hard)
        if info is not None:
            form = Form(path=path, nbytes=info.nbytes, stored_nbytes=info.nbytes, packed=False)
            return info if await self._became(path, form, before) else None
        return info

    # Names

    async def stat(self, path: str) -> FileInfo:
        if not is_packable(check_relative(path)):
            return await self.inner.stat(path)

        async def attempt(form: Form) -> FileInfo:
            info = shown_as(path, form, await self.inner.stat(form.path))
            if form.packed and info.stored_nbytes != form.stored_nbytes:
                self._forget_files(form.path)
                self._names.note(path, [form_of_packed(path, form.nbytes, info.stored_nbytes)])
            return info

        return await self._found(path, attempt)

    async def list(self, folder: str = "") -> list[FileInfo]:
        return self._names.shown(await self.inner.list(folder), folder, deep=True)

    async def children(self, folder: str = "") -> Listing:
        level = await self.inner.children(folder)
        return Listing(files=tuple(self._names.shown(level.files, folder)), folders=level.folders)

    async def delete(self, paths: Sequence[str]) -> None:
        stored = dict.fromkeys(check_relative(path) for path in paths)
        shards = [path for path in stored if is_packable(path)]
        for folder in dict.fromkeys(split(path)[0] for path in shards if not self._names.known(path)):
            self._names.shown((await self.inner.children(folder)).files, folder)
        forms = [form for path in shards for form in self._names.known(path)]
        await self.inner.delete(list(stored | dict.fromkeys(form.path for form in forms)))
        for path in shards:
            self._names.note(path, ())
        self._forget_files(*(form.path for form in forms))

    # Packed files

    async def packed_facts(self, path: str) -> PackedFacts | None:
        """`contract.WritesPacked`."""
        known = await self._known(path)
        if known is None:
            return None
        footer = known.footer
        return PackedFacts(
            digest=known.digest,
            stored_nbytes=int(footer.frame_ends[-1]) + known.nbytes if len(footer.frame_ends) else known.nbytes,
            lossy=frozenset(footer.lossy),
            refers_to=tuple(sorted(footer.files[1:])),
            quantised=footer.quantised,
            block_nbytes=footer.block_nbytes,
        )

    def forget(self, path: str) -> None:
        """Forgets what is in a shard, and in those that it takes bytes from: who asks whether its bytes are good wants those that lie
        there now."""
        self._forget_files(*(form.path for one in self._with_sources(path) for form in self._names.known(one)))

    def _forget_files(self, *stored: str) -> None:
        unpacker = self._unpacker
        if unpacker is not None and unpacker.pid == os.getpid():  # a parent's locks may be held for ever; what it knew is not used here
            for one in stored:
                unpacker.forget(one)

    def _forget_with_names(self, path: str) -> None:
        """As `forget`, and also where these shards lie."""
        shards = self._with_sources(path)
        self.forget(path)
        for one in shards:
            self._names.note(one, ())

    def _with_sources(self, path: str) -> Sequence[str]:
        """A shard, and all that it takes bytes from, as far as that is remembered."""
        found = [path]
        for one in found:  # grows meanwhile
            for form in self._names.known(one):
                known = self._unpacking().footers.kept(form.path)
                found += [source for source in (known.footer.files[1:] if known is not None else ()) if source not in found]
        return found

    async def origins(self, path: str, begin: int, end: int) -> Sequence[Unchanged]:
        """`contract.WritesPacked`."""
        known = await self._known(path)
        if known is None:
            return ()
        return [
            Unchanged(begin=part.begin, end=part.end, path=known.footer.files[part.file], source=part.source)
            for part in known.parts(begin, end)
            if part.file and part.kind == "copy"
        ]

    async def made_from(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Sequence[MadeFrom]]:
        """`contract.MakesBytes`."""
        if not is_packable(check_relative(path)):
            return [()] * len(ranges)
        known = await self._known(path)
        if known is None or not known.footer.runs:
            return [()] * len(ranges)
        return [await self._unpacking().made_from(path, known, begin, end) for begin, end in ranges]

    async def _known(self, path: str) -> Known | None:
        """The packed file of a shard; None: it is a plain one, or no shard."""
        if not is_packable(check_relative(path)):
            await self.inner.stat(path)
            return None

        async def attempt(form: Form) -> Known | None:
            if form.packed:
                return await self._unpacking().footers.of(form, path)
            await self.inner.stat(form.path)
            return None

        return await self._found(path, attempt)
