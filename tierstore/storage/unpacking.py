"""Reading ranges of packed files: neighbouring frames in one request, decoded in threads, runs followed to where their bytes are."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from tierstore.errors import FormatError, IntegrityError, NotFoundError
from tierstore.format.packed.frame import FrameDecoder
from tierstore.storage._threads import DaemonPool
from tierstore.storage.contract import MadeFrom, Storage
from tierstore.storage.packed_names import Form, is_packable
from tierstore.storage.tasks import all_or_none, to_the_end
from tierstore.storage.unpacking_cache import Blocks, Decoded, Flights, Key
from tierstore.storage.unpacking_footers import Footers, Known, Part
from tierstore.storage.unpacking_memory import Frames, Held, Pieces, Sources, Spare, copy_bytes, fill
from tierstore.storage.unpacking_plan import BATCH_NBYTES, batches, groups, joined, taken_blocks

__all__ = ["Unpacker"]

_BATCHES = 6
"""Of all reads together; what runs need is not counted."""
_AT_ONCE = 16
"""So many parts of runs are made at once for one batch."""
_LOADS = 16
"""So many ranges of what runs are made of are loaded at once, of all reads: runs of runs could ask for any number."""
_DEEPEST = 8
"""So many runs that are made of runs are followed."""
_FOLLOWED, _FOLLOWED_PARTS = 3, 64
"""So deep, and of no range with more parts, runs are followed only to order reads."""
_PLAIN_BLOCK_NBYTES = 1 << 20

Prove = Callable[[int, memoryview], None]
Find = Callable[[str], Awaitable[Form]]


class Unpacker:
    """Reads packed files of one storage; for one process, any thread and event loop.

    Args:
        inner: The storage.
        find: Where raw shards lie in it.
        threads: That decode.
    """

    def __init__(self, inner: Storage, find: Find, threads: int) -> None:
        self.pid = os.getpid()
        self.footers = Footers(inner)
        self._inner = inner
        self._find = find
        self._pool = DaemonPool(threads, "tierstore-unpack")
        self._threads = threads
        self._decoded = Decoded()
        self._decoder = FrameDecoder()
        self._lock = threading.Lock()
        self._by_loop: dict[int, _Here] = {}

    def forget(self, stored: str) -> None:
        """The file under this name in the storage is not what it was."""
        self.footers.forget(stored)
        self._decoded.forget(stored)

    def shutdown(self) -> None:
        """Ends the threads when they are through."""
        self._pool.shutdown()

    async def read(self, path: str, known: Known, offset: int, buffer: memoryview, prove: Prove | None, unit: int) -> None:
        """Fills `buffer` from `offset` of a raw shard.

        Args:
            path: The raw path, for errors.
            known: Its packed file.
            offset: In the raw file, in bytes; all of the range lies in it.
            buffer: Writable bytes.
            prove: As of `contract.ReadsProved`.
            unit: As there.

        Raises:
            IntegrityError: The packed file, or one that it takes bytes from, is damaged.
        """
        proofs = None if prove is None else _Proofs(offset, buffer, prove, unit)
        here = self._here()

        async def one(begin: int, end: int) -> None:
            async with here.batches:
                await self._batch(path, known, begin, end, buffer[begin - offset : end - offset], 0, Held(path), proofs)

        with self._decoded.wanting(taken_blocks(known, offset, offset + buffer.nbytes)):
            await all_or_none([one(begin, end) for begin, end in batches(known, offset, offset + buffer.nbytes)])

    async def made_from(self, path: str, known: Known, begin: int, end: int, depth: int = 1) -> list[MadeFrom]:
        """What of ``[begin, end)`` of a raw shard is made from what: from stored bytes, as far as runs of runs are followed."""
        parts = list(known.parts(begin, end))
        if len(parts) > _FOLLOWED_PARTS:
            depth = _FOLLOWED
        found: list[MadeFrom] = []
        for part in parts:
            other = known.footer.files[part.file] if part.file else path
            whole = MadeFrom(begin=part.begin, end=part.end, path=other, source=part.source, source_end=part.source_end)
            found += await self._deeper(whole, known if other == path else None, depth) or [whole]
        return found

    async def _deeper(self, made: MadeFrom, known: Known | None, depth: int) -> list[MadeFrom]:
        """Of what its sources are made, where they are themselves made from others."""
        if depth >= _FOLLOWED:
            return []
        try:
            if known is None:
                form = await self._find(made.path)
                if not form.packed:
                    return []
                known = await self.footers.of(form, made.path)
        except (NotFoundError, IntegrityError):
            return []  # who reads it says what is wrong
        factor = 2 if made.source_end - made.source > made.end - made.begin else 1
        found = await self.made_from(made.path, known, made.source, made.source_end, depth + 1)
        low, high = made.begin, made.end
        return [
            replace(
                one,
                begin=min(high, low + (one.begin - made.source) // factor),
                end=min(high, low + -(-(one.end - made.source) // factor)),
            )
            for one in found
        ]

    def _here(self) -> _Here:
        loop = asyncio.get_running_loop()
        with self._lock:
            for number, here in list(self._by_loop.items()):
                if here.loop.is_closed():
                    del self._by_loop[number]
            found = self._by_loop.get(id(loop))
            if found is None:
                found = self._by_loop[id(loop)] = _Here(loop)
            return found

    async def _batch(
        self, path: str, known: Known, begin: int, end: int, target: memoryview, depth: int, held: Held, proofs: _Proofs | None = None
    ) -> None:
        """Fills `target` with ``[begin, end)`` of the raw file."""
        size = known.footer.block_nbytes
        numbers = range(begin // size, -(-end // size))
        taken = [number for number in numbers if known.is_taken_from(*known.block(number))]
        parts = {n: list(known.parts(max(begin, known.block(n)[0]), min(end, known.block(n)[1]))) for n in numbers}
        left = iter(joined(parts))
        there: Blocks = {}

        async def shared() -> None:
            there.update(await self._own(path, known.form, known, size, taken))

        async def made() -> None:
            for part, members in left:
                sources.expect(part)
                sources.add(part, members, await self._source(path, known, part, depth, held))

        def work(number: int) -> None:
            first, last = known.block(number)
            low, high = max(first, begin), min(last, end)
            into = target[low - begin : high - begin]
            block = there.get(number)
            if block is None and low == first and high == last:
                self._decode(path, known, number, frames, into)
            else:
                if block is None:
                    block = np.empty(last - first, dtype=np.uint8).data
                    self._decode(path, known, number, frames, block)
                copy_bytes(into, block[low - first : high - first])
            fill(into, low, parts[number], sources)
            if proofs is not None:
                proofs.filled(low, high)

        with Sources(held) as sources, Frames(self._here().spare) as frames:
            jobs: list[Awaitable[None]] = [shared()] if taken else []
            jobs += [self._frames(known, group, frames) for group in groups(known, sorted({*numbers} - {*taken}))]
            jobs += [made() for _ in range(min(_AT_ONCE, sum(map(len, parts.values()))))]
            await all_or_none(jobs)
            await self._in_threads(work, numbers)

    def _decode(self, path: str, known: Known, number: int, frames: Frames, block: memoryview) -> None:
        """Decodes a block's frame, but for what runs cover."""
        first, last = known.block(number)
        holes = [(begin - first, end - first) for begin, end in known.holes(first, last)]
        frame = frames.of(*known.frame(number))
        promised = known.footer.lossy.get(number)
        try:
            if promised is not None and hashlib.sha256(frame).digest() != promised:
                raise FormatError("its frame is not what the footer promises", hint="")
            if self._decoder.decode(frame, block, holes) and promised is None:
                raise FormatError("its frame is not exact, and the footer does not say so", hint="")
        except FormatError as error:
            raise IntegrityError(
                f"{path} in {self._inner.uri} is damaged: block {number} (bytes {first} to {last}) of its packed file: {error.message}",
                hint="run `tierstore verify --level full`; docs/guides/recovery.md shows how to put a good copy back",
                file=path,
                block=number,
            ) from error

    async def _frames(self, known: Known, extent: tuple[int, int], frames: Frames) -> None:
        begin, end = extent
        data = frames.memory(end - begin)
        await self._inner.read_into(known.form.path, begin, data)
        frames.add(begin, data)

    # Runs

    async def _source(self, path: str, known: Known, part: Part, depth: int, held: Held) -> Pieces:
        """The bytes that a part of a run is made of; raises as `read`."""
        if depth >= _DEEPEST:
            raise self._lost(path, part, path, f"takes them from others, more than {_DEEPEST} times over")
        other, form = path, known.form
        if part.file:
            other = known.footer.files[part.file]
            if not is_packable(other):
                raise self._lost(path, part, other, "is no shard")
            try:
                form = await self._find(other)
            except NotFoundError as error:
                raise self._lost(path, part, other, "is not there") from error
        if part.source_end > form.nbytes:
            raise self._lost(path, part, other, f"has {form.nbytes} bytes only")
        try:
            return await self._made(other, form, part.source, part.source_end, depth + 1, held)
        except NotFoundError as error:
            raise self._lost(path, part, other, "is not there") from error

    def _lost(self, path: str, part: Part, other: str, why: str) -> IntegrityError:
        return IntegrityError(
            f"{path} in {self._inner.uri} is damaged: it takes bytes {part.begin} to {part.end} from {other}, which {why}",
            hint="run `tierstore verify --level full`; docs/guides/recovery.md shows how to put a good copy back",
            file=path,
            source=other,
        )

    async def _made(self, path: str, form: Form, begin: int, end: int, depth: int, held: Held) -> Pieces:
        """The bytes ``[begin, end)`` of a raw shard, in pieces with their places, that nobody changes; maybe more at both ends."""
        known = await self.footers.of(form, path) if form.packed else None
        if known is not None and known.holes(begin, end):
            memory = np.empty(end - begin, dtype=np.uint8).data
            await self._batch(path, known, begin, end, memory, depth, held)
            return [(begin, memory)]
        size = _PLAIN_BLOCK_NBYTES if known is None else known.footer.block_nbytes
        blocks = await self._own(path, form, known, size, range(begin // size, -(-end // size)))
        return [(number * size, block) for number, block in sorted(blocks.items())]

    async def _own(self, path: str, form: Form, known: Known | None, size: int, numbers: Sequence[int]) -> Blocks:
        """Blocks of a raw shard, as far as they are not made of others."""
        digest = "" if known is None else known.digest
        flights = self._here().flights
        found: Blocks = {}
        tasks: dict[asyncio.Task[Blocks], None] = {}
        group: list[int] = []

        def load() -> None:
            if group:
                some = list(group)
                keys: list[Key] = [(form.path, digest, number) for number in some]
                tasks[flights.begin(keys, lambda: self._load(path, form, known, size, some, keys))] = None
                group.clear()

        for number in numbers:
            key = (form.path, digest, number)
            block = self._decoded.get(key)
            if block is not None:
                found[number] = block
                load()
            elif (flight := flights.of(key)) is not None:
                tasks[flight] = None
                load()
            else:
                group.append(number)
                if len(group) * size >= BATCH_NBYTES:
                    load()
        load()
        for blocks in await all_or_none([flights.wait(task) for task in tasks]):
            found.update(blocks)
        return {number: found[number] for number in numbers}

    async def _load(self, path: str, form: Form, known: Known | None, size: int, numbers: Sequence[int], keys: Sequence[Key]) -> Blocks:
        begin, end = numbers[0] * size, min((numbers[-1] + 1) * size, form.nbytes)
        here = self._here()
        async with here.loads:  # which wait for no other one
            memory = np.empty(end - begin, dtype=np.uint8).data
            blocks = {n: memory[n * size - begin : min((n + 1) * size, end) - begin] for n in numbers}
            if known is None:
                await self._inner.read_into(form.path, begin, memory)
            else:
                packed = known
                with Frames(here.spare) as frames:
                    await all_or_none([self._frames(packed, group, frames) for group in groups(packed, numbers)])
                    await self._in_threads(lambda number: self._decode(path, packed, number, frames, blocks[number]), numbers)
        for key in keys:
            self._decoded.put(key, blocks[key[2]])
        return blocks

    async def _in_threads(self, work: Callable[[int], None], numbers: Sequence[int]) -> None:
        """Does `work` for all numbers; when it returns, however it does, no thread is at it."""
        left = iter(numbers)
        stopped = False

        def turn() -> None:
            for number in left:
                if stopped:
                    return
                work(number)

        calls = [asyncio.wrap_future(self._pool.submit(turn)) for _ in range(min(self._threads, len(numbers)))]
        everything = asyncio.gather(*calls)
        try:
            await asyncio.shield(everything)
        finally:
            stopped = True
            await to_the_end(_all_ended(calls))


async def _all_ended(calls: Sequence[asyncio.Future[None]]) -> None:
    await asyncio.gather(*calls, return_exceptions=True)


class _Here:
    """What belongs to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.batches = asyncio.Semaphore(_BATCHES)
        self.loads = asyncio.Semaphore(_LOADS)
        self.spare = Spare()
        self.flights = Flights()


class _Proofs:
    """Proves the units of a read as they become complete, in the thread that completes them."""

    def __init__(self, offset: int, buffer: memoryview, prove: Prove, unit: int) -> None:
        self._offset = offset
        self._buffer = buffer
        self._prove = prove
        self._unit = unit
        self._lock = threading.Lock()
        self._left: dict[int, int] = {}

    def filled(self, begin: int, end: int) -> None:
        """The bytes ``[begin, end)`` of the file are there."""
        low, high = begin - self._offset, end - self._offset
        for number in range(low // self._unit, -(-high // self._unit)):
            first, last = number * self._unit, min((number + 1) * self._unit, self._buffer.nbytes)
            with self._lock:
                left = self._left.pop(number, last - first) - (min(last, high) - max(first, low))
                if left:
                    self._left[number] = left
            if not left:
                self._prove(self._offset + first, self._buffer[first:last])
