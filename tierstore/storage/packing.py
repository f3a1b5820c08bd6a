"""A raw shard on its way into a packed file: made block by block in threads, from front to back (`contract.Growing`)."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from tierstore.errors import FormatError, IntegrityError, StorageError
from tierstore.format.digest import BLOCK_NBYTES, block_count
from tierstore.format.header import header_nbytes, parse_header
from tierstore.format.packed.footer import encode_footer
from tierstore.format.packed.frame import FrameEncoder
from tierstore.format.packed.layout import plain_stretches, stretches_of
from tierstore.format.packed.types import Footer, Run, Stretch
from tierstore.format.quantise import UpdateError
from tierstore.storage._threads import DaemonPool
from tierstore.storage.contract import PackHints, Source
from tierstore.storage.packing_blocks import BlockEncoder, EncodedBlock, join_runs
from tierstore.storage.packing_extras import Extra, Extras, Samples
from tierstore.storage.packing_masters import Master, find_masters
from tierstore.storage.packing_moments import Moments, merged
from tierstore.storage.packing_rules import Packing
from tierstore.storage.tasks import end_all, to_the_end

__all__ = ["EncodedSource"]

_MOST_HEADER_NBYTES = 32 << 20
"""Of a file with a longer header the layout is not looked at, bytes: all before its end has to be held."""
_PULL_NBYTES = 8 << 20
_AHEAD = 2
"""So many pulls are read and encoded while the bytes of an earlier one are handed out."""
_GIVE_UP = 3
"""After so many blocks that are not its master's rounding a tensor is stored as it is."""
_ALIGN = 4096


@dataclass(slots=True, kw_only=True)
class _Made:
    """What is known of the packed file so far."""

    ends: list[int] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    lossy: dict[int, bytes] = field(default_factory=dict)
    differs: dict[str, int] = field(default_factory=dict)
    errors: dict[str, UpdateError | None] = field(default_factory=dict)

    def add(self, blocks: Sequence[EncodedBlock]) -> None:
        for block in blocks:
            if block.lossy:
                self.lossy[len(self.ends)] = block.lossy
            self.ends.append((self.ends[-1] if self.ends else 0) + len(block.frame))
            if block.runs:
                self.runs[-1:] = join_runs([*self.runs[-1:], *block.runs])
            for name in block.differs:
                self.differs[name] = self.differs.get(name, 0) + 1
            for measured in block.measured:
                self.errors[measured.name] = merged([self.errors.get(measured.name), measured.error])


class EncodedSource:
    """The packed file of `source`, as a source that grows.

    Every block of the raw file is pulled once, in order and a little ahead (a source that proves or hashes what is pulled has then seen all
    of it); what else is looked at is pulled beside that. Whoever has used it awaits `close`.

    Args:
        source: The raw file.
        packing: How it is packed.
        hints: What is known of it.
        pool: Threads that encode.
    """

    def __init__(self, source: Source, packing: Packing, hints: PackHints, pool: DaemonPool) -> None:
        self._source = source
        self._packing = packing
        self._hints = hints
        self._pool = pool
        self._extras = Extras(source, _PULL_NBYTES)
        self._pull = self._extras.unit * max(1, _PULL_NBYTES // self._extras.unit)
        self._raw_nbytes = source.nbytes
        self._paths = tuple(dict.fromkeys(one.path for one in hints.unchanged))
        self._blocks: BlockEncoder | None = None
        self._moments = Moments((), None, None, BLOCK_NBYTES)
        self._known: tuple[Extra, ...] = ()
        self._turn = asyncio.Lock()
        self._order = asyncio.Lock()
        self._held: dict[int, memoryview] = {}
        self._next = 0
        self._groups: deque[asyncio.Task[list[EncodedBlock]]] = deque()
        self._busy: set[Future[None]] = set()
        self._made = _Made()
        self._out: deque[memoryview] = deque()
        self._out_at = 0
        """Where in the packed file the first byte of `_out` lies."""
        self._out_nbytes = 0
        self._tail = b""
        self.length: int | None = None

    @property
    def nbytes(self) -> int:
        """What its length is at most: bytes that can't be made fewer, heads of segments, the footer."""
        return self._raw_nbytes + self._raw_nbytes // 16 + (1 << 20)

    async def read(self, offset: int, nbytes: int) -> memoryview:
        """`contract.Growing`; what the raw source raises passes."""
        async with self._turn:
            until = offset + nbytes
            parts: list[memoryview] = []
            if offset < self._out_at:
                parts.append(await self._again(offset, min(until, self._out_at)))
                offset = min(until, self._out_at)
            while self._out_at + self._out_nbytes < until and self.length is None:
                await self._more()
            parts += self._taken(offset, until)
            return parts[0] if len(parts) == 1 else await asyncio.to_thread(_joined, parts)

    async def close(self) -> None:
        """Ends what runs ahead; when it returns no thread looks at the source's memory any more."""
        await to_the_end(self._close())

    async def _close(self) -> None:
        groups, self._groups = list(self._groups), deque()
        await end_all(groups)
        while busy := list(self._busy):  # in one step: threads take out of it what has ended
            await asyncio.gather(*map(asyncio.wrap_future, busy), return_exceptions=True)
        await self._extras.forget()
        self._held.clear()
        self._known = ()

    # From front to back

    def _taken(self, offset: int, until: int) -> list[memoryview]:
        """Takes the bytes ``[offset, until)`` out of what was made, and drops what lies before them."""
        taken = []
        while self._out and self._out_at < until:
            piece = self._out.popleft()
            end = self._out_at + piece.nbytes
            if end > until:
                self._out.appendleft(piece[until - self._out_at :])
                piece, end = piece[: until - self._out_at], until
            if end > offset:
                taken.append(piece[max(0, offset - self._out_at) :])
            self._out_nbytes -= piece.nbytes
            self._out_at = end
        return taken

    async def _more(self) -> None:
        """Makes more bytes: those of the next pull, or the footer."""
        if self._blocks is None:
            self._blocks = await self._begin()
        self._look_ahead(self._blocks)
        if not self._groups:
            self._end()
            return
        await asyncio.wait([self._groups[0]])  # a caller that is cancelled meanwhile does not cancel it
        made = self._groups[0].result()
        self._groups.popleft()
        self._made.add(made)
        for block in made:
            self._give(block.frame)
        self._look_ahead(self._blocks)

    def _look_ahead(self, blocks: BlockEncoder) -> None:
        while len(self._groups) <= _AHEAD and self._next * self._pull < self._raw_nbytes:
            # Of what was handed out, not of what happens to be known by now: the same file is to become the same bytes.
            given_up = frozenset(name for name, count in self._made.differs.items() if count >= _GIVE_UP)
            self._groups.append(asyncio.ensure_future(self._group(blocks, self._next, given_up)))
            self._next += 1

    def _give(self, data: bytes) -> None:
        if data:
            self._out.append(memoryview(data))
            self._out_nbytes += len(data)

    def _end(self) -> None:
        made = self._made
        assert self._blocks is not None
        footer = Footer(
            nbytes=self._raw_nbytes,
            block_nbytes=BLOCK_NBYTES,
            frame_ends=np.array(made.ends, dtype=np.int64),
            files=("", *self._paths),
            runs=tuple(made.runs),
            lossy=made.lossy,
            quantised=self._moments.facts(made.errors),
        )
        self._tail = encode_footer(footer)
        self._give(self._tail)
        length = (made.ends[-1] if made.ends else 0) + len(self._tail)
        if length > self.nbytes:
            raise StorageError(
                f"a packed file became {length} bytes, more than {self.nbytes}", hint="this is a fault of tierstore; report it"
            )
        self.length = length

    async def _begin(self) -> BlockEncoder:
        """Learns what lies where in the file."""
        stretches = await self._layout()
        hints = self._hints
        rule = None if hints.exact else self._packing.quantise
        self._moments = Moments(stretches, rule, hints.scheme, BLOCK_NBYTES)
        masters: dict[str, Master] = {}
        if self._packing.master_once:
            copied = [s.name for s in stretches if any(one.begin <= s.begin and s.end <= one.end for one in hints.unchanged)]
            found = await find_masters(stretches, Samples(self._extras), [*self._moments.names, *copied])
            masters.update(found)
            await self._extras.forget()
        return BlockEncoder(
            self._raw_nbytes,
            stretches,
            FrameEncoder(self._packing.codec, self._packing.level),
            self._moments,
            masters,
            hints.unchanged,
            {path: number for number, path in enumerate(self._paths, 1)},
        )

    async def _layout(self) -> tuple[Stretch, ...]:
        plain = plain_stretches(self._raw_nbytes)
        if not self._raw_nbytes:
            return plain
        try:
            needed = header_nbytes(bytes((await self._hold(0))[:8]), self._raw_nbytes)
            if needed > _MOST_HEADER_NBYTES:
                return plain
            parts = [await self._hold(number) for number in range(-(-needed // self._pull))]
            prefix = parts[0][:needed] if len(parts) == 1 else _joined(parts)[:needed]
            header = await asyncio.to_thread(parse_header, prefix, self._raw_nbytes)
            return await asyncio.to_thread(stretches_of, header, self._raw_nbytes)
        except FormatError:
            return plain

    async def _hold(self, number: int) -> memoryview:
        """A pull that is kept until its turn."""
        if number not in self._held:
            self._held[number] = await asyncio.to_thread(_joined, [await self._raw(number)])  # out of memory that may be rationed
        return self._held[number]

    async def _raw(self, number: int) -> memoryview:
        begin = number * self._pull
        nbytes = min(self._pull, self._raw_nbytes - begin)
        data = await self._source.read(begin, nbytes)
        if data.nbytes != nbytes:
            raise IntegrityError(
                f"the source gave {data.nbytes} bytes at {begin} where {nbytes} were asked for", hint="the source was cut short"
            )
        return data

    async def _group(self, blocks: BlockEncoder, number: int, given_up: frozenset[str]) -> list[EncodedBlock]:
        """One pull, encoded."""
        begin, end = number * self._pull, min((number + 1) * self._pull, self._raw_nbytes)
        async with self._order:  # what one needs is read before the next one asks for anything: of rationed memory nobody has too much
            wanted = self._extras.widened(blocks.needs(begin, end, given_up))
            extras = [await self._extras.read(*needed, self._known) for needed in wanted]
            self._known = tuple(extras)
            pull = asyncio.ensure_future(self._pulled(number))
            await asyncio.sleep(0)
        try:
            data = await pull
        finally:
            await end_all([pull])
        first = begin // BLOCK_NBYTES

        def encode(at: int) -> EncodedBlock:
            low, high = blocks.extent(first + at)
            return blocks.encode(first + at, data[low - begin : high - begin], extras, given_up)

        return await self._in_threads(encode, block_count(end - begin))

    async def _pulled(self, number: int) -> memoryview:
        return self._held.pop(number) if number in self._held else await self._raw(number)

    async def _in_threads(self, encode: Callable[[int], EncodedBlock], count: int) -> list[EncodedBlock]:
        """What `encode` makes of 0, 1, … `count` - 1."""
        made: list[EncodedBlock | None] = [None] * count
        numbers = iter(range(count))
        stopped = False

        def work() -> None:
            for number in numbers:  # one step of the interpreter: none is taken twice
                if stopped:
                    return
                made[number] = encode(number)

        calls = [self._pool.submit(work) for _ in range(min(self._packing.threads, count))]
        self._busy.update(calls)
        for call in calls:
            call.add_done_callback(self._busy.discard)
        try:
            await asyncio.gather(*(asyncio.wrap_future(call) for call in calls))
        finally:
            stopped = True
        return [block for block in made if block is not None]

    # Once more

    async def _again(self, offset: int, until: int) -> memoryview:
        """Bytes that were handed out before, made from the same blocks again."""
        made, parts = self._made, []
        frames = made.ends[-1] if made.ends else 0
        number = bisect_right(made.ends, offset)
        while number < len(made.ends) and (begin := made.ends[number - 1] if number else 0) < min(until, frames):
            frame = await self._frame_again(number)
            if len(frame) != made.ends[number] - begin:
                raise IntegrityError("a source changed while it was written", hint="nothing was published; write it again")
            parts.append(memoryview(frame)[max(0, offset - begin) : until - begin])
            number += 1
        if until > frames:
            parts.append(memoryview(self._tail)[max(0, offset - frames) : until - frames])
        return await asyncio.to_thread(_joined, parts)

    async def _frame_again(self, number: int) -> bytes:
        blocks = self._blocks
        assert blocks is not None
        if self._made.ends[number] == (self._made.ends[number - 1] if number else 0):
            return b""
        begin, end = blocks.extent(number)
        runs = [
            Run(
                begin=max(run.begin, begin),
                end=min(run.end, end),
                kind=run.kind,
                file=run.file,
                source=run.source + (max(run.begin, begin) - run.begin) * (1 if run.kind == "copy" else 2),
            )
            for run in self._made.runs[bisect_right(self._made.runs, begin, key=lambda run: run.end) :]
            if run.begin < end
        ]
        extras = [await self._extras.read(*needed) for needed in self._extras.widened(blocks.needs(begin, end, blocks.masters))]
        block = (await self._extras.read(begin, end)).part(begin, end)
        made: list[EncodedBlock] = await self._in_threads(lambda _: EncodedBlock(frame=blocks.encode_again(number, block, runs, extras)), 1)
        return made[0].frame


def _joined(parts: Sequence[memoryview]) -> memoryview:
    """The parts behind one another, in memory that O_DIRECT can use."""
    nbytes = sum(part.nbytes for part in parts)
    whole = np.empty(nbytes + _ALIGN, dtype=np.uint8)
    start = -whole.ctypes.data % _ALIGN
    at = start
    for part in parts:
        if part.nbytes:
            whole[at : at + part.nbytes] = np.frombuffer(part, dtype=np.uint8)
            at += part.nbytes
    return whole[start : start + nbytes].data
