"""A directory that stock torch.distributed.checkpoint loads: ``__0_<n>.distcp`` files of `torch.save` items, and ``.metadata``.

Each item is a chunk of a tensor (large ones are cut along their first axes) or an object. How many bytes `torch.save` makes of a tensor
depends on its dtype and shape only, so that the files' layout is known, and uploads can begin, before anything is read.
"""

from __future__ import annotations

import bisect
import io
import logging
import math
import mmap
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tierstore.format.dtypes import DTYPES
from tierstore.state.bits import empty, tensor_over, torch_dtype
from tierstore.state.boxes import Box, whole
from tierstore.state.export.plan import ExportOptions, OutTensor, Plan
from tierstore.state.export.source import WindowSource
from tierstore.state.export.target import ExportTarget
from tierstore.state.export.tree import Path
from tierstore.state.reading import Fill, Reader, Run, fill_all

__all__ = ["write_dcp"]

log = logging.getLogger(__name__)

METADATA_NAME = ".metadata"
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """One chunk of a tensor, or one object (`data` is what `torch.save` made of it)."""

    name: str
    box: Box
    tensor: OutTensor | None
    data: bytes
    nbytes: int


def write_dcp(
    target: ExportTarget,
    reader: Reader,
    run: Run,
    plan: Plan,
    objects: Mapping[str, Any],
    paths: Mapping[str, Path],
    options: ExportOptions,
    on_bytes: Callable[[int], None],
) -> None:
    """Writes the files, then ``.metadata``.

    Args:
        target: Where to.
        reader: The open checkpoint.
        run: Runs a coroutine on its event loop.
        plan: The tensors.
        objects: What is not a tensor, by name.
        paths: Where each name stands in the nested state; DCP needs it to rebuild one.
        options: See `ExportOptions`.
        on_bytes: Told how many bytes more are made.
    """
    files = list(_files(_items(plan, objects, options.window_nbytes), options.shard_nbytes))
    target.begin()
    infos: dict[str, list[tuple[Box, _StorageInfo]]] = {}
    for number, items in enumerate(files):
        name = f"__0_{number}.distcp"
        begins = [0]
        for item in items:
            begins.append(begins[-1] + item.nbytes)
            infos.setdefault(item.name, []).append((item.box, _StorageInfo(name, begins[-2], item.nbytes)))
        maker = _Maker(items, begins, reader, run)
        tensors = len({item.name for item in items if item.tensor is not None})
        target.write(name, WindowSource(_cuts(begins, options.window_nbytes), maker.make, on_bytes), tensors)
    target.drop_stale()
    target.put(METADATA_NAME, pickle.dumps(_metadata(plan, objects, paths, infos)))


def _items(plan: Plan, objects: Mapping[str, Any], limit: int) -> Iterator[_Item]:
    measured: dict[tuple[str, tuple[int, ...]], int] = {}
    for tensor in plan.tensors:
        for box in _chunks(whole(tensor.shape), max(1, limit // 2 // DTYPES[tensor.dtype].itemsize)):
            shape = tuple(len(r) for r in box)
            if (tensor.dtype, shape) not in measured:
                measured[tensor.dtype, shape] = _saved_nbytes(tensor.dtype, shape)
            yield _Item(name=tensor.name, box=box, tensor=tensor, data=b"", nbytes=measured[tensor.dtype, shape])
    for name, value in objects.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        yield _Item(name=name, box=(), tensor=None, data=buffer.getvalue(), nbytes=buffer.tell())


def _chunks(box: Box, limit: int) -> Iterator[Box]:
    """Boxes of at most `limit` elements, cut along the first axes."""
    count = math.prod(len(r) for r in box)
    if count <= limit:
        yield box
        return
    axis = next(i for i, r in enumerate(box) if len(r) > 1)
    rows = max(1, limit // (count // len(box[axis])))
    for begin in range(box[axis].start, box[axis].stop, rows):
        yield from _chunks((*box[:axis], range(begin, min(begin + rows, box[axis].stop)), *box[axis + 1 :]), limit)


def _files(items: Iterator[_Item], limit: int) -> Iterator[list[_Item]]:
    group: list[_Item] = []
    used = 0
    for item in items:
        if group and used + item.nbytes > limit:
            yield group
            group, used = [], 0
        group.append(item)
        used += item.nbytes
    if group:
        yield group


def _cuts(begins: Sequence[int], limit: int) -> list[int]:
    """Windows of whole items."""
    cuts = [0]
    for before, begin in pairwise(begins):
        if begin - cuts[-1] > limit and before > cuts[-1]:
            cuts.append(before)
    return [*cuts, begins[-1]] if begins[-1] > cuts[-1] else cuts


class _Into(io.BytesIO):
    """Takes what is written into `memory`, or where there is none only counts it."""

    def __init__(self, memory: memoryview | None = None) -> None:
        super().__init__()
        self._memory = memory
        self.nbytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._memory is not None:
            self._memory[self.nbytes : self.nbytes + view.nbytes] = view
        self.nbytes += view.nbytes
        return view.nbytes


def _saved_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    counter = _Into()
    torch.save(empty(shape, torch_dtype(dtype)), counter)  # the memory is never touched but for reading: it costs none
    return counter.nbytes


class _Maker:
    """Makes byte ranges that are whole items."""

    def __init__(self, items: Sequence[_Item], begins: Sequence[int], reader: Reader, run: Run) -> None:
        self._items = items
        self._begins = begins
        self._reader = reader
        self._run = run

    def make(self, begin: int, end: int) -> memoryview:
        # Both of pages of their own, which go back to the system at once: malloc would keep what is freed on a thread.
        window, values = memoryview(mmap.mmap(-1, end - begin)), memoryview(mmap.mmap(-1, end - begin))
        first, last = bisect.bisect_left(self._begins, begin), bisect.bisect_left(self._begins, end)
        chunks: dict[int, torch.Tensor] = {}
        fills: list[Fill] = []
        for number in range(first, last):
            item = self._items[number]
            if item.tensor is not None:
                dtype, shape = torch_dtype(item.tensor.dtype), tuple(len(r) for r in item.box)
                at = -(-(self._begins[number] - begin) // _ALIGNMENT) * _ALIGNMENT  # an item is longer than its values by more than that
                chunks[number] = tensor_over(values[at : at + math.prod(shape) * dtype.itemsize], dtype, shape)
                fills.append(item.tensor.fill(self._reader, item.box, chunks[number]))
        fill_all(self._reader, self._run, fills)
        for number in range(first, last):
            item, at = self._items[number], self._begins[number] - begin
            into = _Into(window[at : at + item.nbytes])
            if item.tensor is None:
                into.write(item.data)
            else:
                torch.save(chunks[number], into)
            if into.nbytes != item.nbytes:
                raise RuntimeError(f"torch.save made {into.nbytes} bytes of {item.name!r}, not {item.nbytes}")  # a fault of ours
        return window


def _metadata(
    plan: Plan, objects: Mapping[str, Any], paths: Mapping[str, Path], infos: Mapping[str, list[tuple[Box, _StorageInfo]]]
) -> Metadata:
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    for name in plan.names:
        kept = plan.tied.get(name, name)  # a tied name leads to the same bytes
        tensor = by_name[kept]
        chunks = []
        for number, (box, info) in enumerate(infos[kept]):
            offsets = torch.Size([r.start for r in box])
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([len(r) for r in box])))
            storage[MetadataIndex(name, offsets, number)] = info
        described[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch_dtype(tensor.dtype)), size=torch.Size(tensor.shape), chunks=chunks
        )
    for name in objects:
        described[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = infos[name][0][1]
    return Metadata(
        state_dict_metadata=described,
        planner_data={name: paths.get(name, (name,)) for name in described},
        storage_data=storage,
        storage_meta=StorageMeta(),
        version="1.0.0",
    )
