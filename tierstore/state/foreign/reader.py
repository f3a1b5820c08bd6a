"""Reading a foreign checkpoint where it lies: a `Reader` over its own files, by byte ranges. There are no digests: nothing is proved."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tierstore.errors import IntegrityError
from tierstore.format.index import Index
from tierstore.format.objects import encode_objects
from tierstore.state.codecs import default_codecs
from tierstore.state.foreign.files import ForeignFiles
from tierstore.state.foreign.places import Layout, Made, Place, Wherever
from tierstore.tiers.costs import ReadSpeed
from tierstore.tiers.fetching import BUDGET_NBYTES, fetch
from tierstore.tiers.reads import AnyWant, Handover, Span, Want, plan_spans
from tierstore.tiers.together import together

__all__ = ["ForeignReader"]

_AT_ONCE = 16
_SLAB_NBYTES = 16 << 20


class ForeignReader:
    """What `open_foreign` reads through; a `tierstore.state.reading.Reader`.

    Attributes:
        index: The routing index. Its digests are zeros: `verified` is False.
        files: The foreign files.
        requests, bytes_fetched: Reads sent to the storage so far, and their bytes; headers are not counted.
    """

    verified = False

    def __init__(self, *, files: ForeignFiles, index: Index, places: Mapping[str, Wherever], tree: Callable[[], Awaitable[Any]]) -> None:
        self.index = index
        self.files = files
        self.requests = 0
        self.bytes_fetched = 0
        self._wherever = places
        self._places: dict[str, Place] = {}
        self._tree = tree
        self._objects: bytes | None = None
        self._speed = ReadSpeed()
        self._ordered: OrderedDict[str, np.ndarray[Any, Any]] = OrderedDict()

    async def objects(self, rank: int = 0) -> bytes:
        """The tree, encoded; the same for every rank.

        Raises:
            UnsupportedTypeError: It holds what can't be stored without pickle; names the place.
        """
        if self._objects is None:
            self._objects = await asyncio.to_thread(encode_objects, await self._tree(), default_codecs())
        return self._objects

    async def object_ranks(self) -> dict[int, int]:
        """There is one tree, and it is everybody's."""
        return {0: 0}

    async def read(self, wants: Sequence[AnyWant]) -> None:
        """Fills the buffers by coalesced range reads. The bytes are what the storage gives: nothing proves them.

        Raises:
            IntegrityError: A file is shorter than its header, or metadata, say.
            NotFoundError, StorageError: As the storage says.
        """
        places = await self._find({want.file for want in wants})
        await self._read([moved for want in wants if (moved := _moved(want, places.get(want.file))) is not None])
        for want in wants:
            place = places.get(want.file)
            if place is not None and place.layout is not None and want.nbytes:
                await self._put_in_order(want, place, place.layout)
            elif place is not None and place.made is not None and want.nbytes:
                await self._make(want, place.made)

    async def close(self) -> None:
        """Ends the storage's clients."""
        await self.files.storage.close()

    async def _find(self, names: set[str]) -> dict[str, Place]:
        missing = sorted(name for name in names if name in self._wherever and name not in self._places)

        async def one(name: str) -> None:
            self._places[name] = await self._wherever[name].find(self.files)

        await together(one, missing, at_once=_AT_ONCE)
        return {name: self._places[name] for name in names if name in self._places}

    async def _read(self, wants: Sequence[AnyWant]) -> None:
        sizes = {name: await self.files.nbytes(name) for name in {want.file for want in wants}}
        cost = self._speed.cost(local=self.files.storage.capabilities.local)
        spans = plan_spans(wants, file_nbytes=sizes.__getitem__, align=1, cost=cost)
        await fetch(spans, self._fill, concurrency=cost.concurrency)

    async def _fill(self, span: Span, view: memoryview) -> None:
        self.requests += 1
        self.bytes_fetched += span.nbytes
        began = self._speed.now()
        await self.files.storage.read_into(self.files.path(span.file), span.begin, view)
        self._speed.note(span.nbytes, self._speed.now() - began)

    # ---- tensors whose elements lie in another order

    async def _make(self, want: AnyWant, made: Made) -> None:
        """Fills a want of calculated bytes from the rows around it. Small tensors are calculated once and kept for the next want."""
        row = made.row_nbytes
        kept = self._ordered.get(want.file)
        if kept is None and made.rows * row <= BUDGET_NBYTES:
            kept = await self._calculated(made, 0, made.rows)
            self._keep(want.file, kept)
        if kept is not None:
            want.receive(want.offset, kept.reshape(-1)[want.offset : want.end].data)
            return
        at = want.offset
        few = max(1, _SLAB_NBYTES // row)
        while at < want.end:
            first = at // row
            last = min(first + few, -(-want.end // row))
            rows = await self._calculated(made, first, last)
            end = min(want.end, last * row)
            want.receive(at, rows.reshape(-1)[at - first * row : end - first * row].data)
            at = end

    async def _calculated(self, made: Made, first: int, last: int) -> np.ndarray[Any, Any]:
        async def read(file: str, begin: int, nbytes: int) -> bytes:
            scratch = bytearray(nbytes)
            await self._read([Want(file, begin, memoryview(scratch))])
            return bytes(scratch)

        return await made.make(first, last, read)

    def _keep(self, name: str, rows: np.ndarray[Any, Any]) -> None:
        self._ordered[name] = rows
        while len(self._ordered) > 1 and sum(kept.nbytes for kept in self._ordered.values()) > BUDGET_NBYTES:
            self._ordered.popitem(last=False)

    async def _put_in_order(self, want: AnyWant, place: Place, layout: Layout) -> None:
        """Fills a want of a strided tensor from whole rows around it. Small tensors are gathered once and kept for the next want."""
        total = _nbytes(layout, layout.shape[0])
        row = total // layout.shape[0]
        first, last = want.offset // row, -(-want.end // row)
        if total <= BUDGET_NBYTES:
            rows = self._ordered.get(want.file)
            if rows is None:
                rows = await self._gather(place, layout, 0, layout.shape[0])
                self._keep(want.file, rows)
            first = 0
        else:
            rows = await self._gather(place, layout, first, last)
        begin = want.offset - first * row
        want.receive(want.offset, rows.reshape(-1)[begin : begin + want.nbytes].data)

    async def _gather(self, place: Place, layout: Layout, first: int, last: int) -> np.ndarray[Any, Any]:
        """Rows ``[first, last)`` in C order, as bytes; read slab by slab along the axis that is outermost in the file."""
        size = layout.itemsize
        shape = (last - first, *layout.shape[1:])
        rows = np.empty((*shape, size), dtype=np.uint8)
        steps = [stride * size for stride in layout.strides]
        base = place.begin + first * steps[0]
        axis = max(range(len(shape)), key=lambda i: steps[i] if shape[i] > 1 else -1)
        inner = size + sum((n - 1) * step for i, (n, step) in enumerate(zip(shape, steps, strict=True)) if i != axis)
        group = max(1, (_SLAB_NBYTES - inner) // max(1, steps[axis]) + 1)
        for at in range(0, shape[axis], group):
            count = min(group, shape[axis] - at)
            span = inner + (count - 1) * steps[axis]
            scratch = np.empty(span, dtype=np.uint8)
            await self._read([Want(place.file, base + at * steps[axis], scratch.data)])
            part = np.lib.stride_tricks.as_strided(
                scratch, (*(count if i == axis else n for i, n in enumerate(shape)), size), (*steps, 1), writeable=False
            )
            np.moveaxis(rows, axis, 0)[at : at + count] = np.moveaxis(part, axis, 0)
        return rows


def _moved(want: AnyWant, place: Place | None) -> AnyWant | None:
    """The same want in the file where its bytes really lie; None where they are to be put in order first."""
    if place is None:
        return want
    if place.layout is not None or place.made is not None:
        return None
    if want.end > place.nbytes:
        raise IntegrityError(f"{place.file}: a tensor reaches beyond its storage", hint="the file is damaged", file=place.file)
    begin = place.begin + want.offset
    if isinstance(want, Handover):
        return Handover(place.file, begin, want.nbytes, want.take, want.group)
    return Want(place.file, begin, want.buffer.cast("B"), want.group)


def _nbytes(layout: Layout, rows: int) -> int:
    nbytes = layout.itemsize * rows
    for size in layout.shape[1:]:
        nbytes *= size
    return nbytes
