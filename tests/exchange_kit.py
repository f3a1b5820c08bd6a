"""A checkpoint in memory that several ranks open: saved by rows, its digests true, with reads that are counted and can fail."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from tierstore.errors import IntegrityError, TemporaryError
from tierstore.format.digest import block_digests
from tierstore.format.index import Extent, FileEntry, Index, TensorEntry
from tierstore.format.index_build import build_index
from tierstore.names import shard_name
from tierstore.state.bits import dtype_name, memory_of
from tierstore.tiers.reads import AnyWant

T = TypeVar("T")
BLOCK = 4096


def run(coro: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coro)


def truth(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of awkward sizes, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"wide": (37, 700), "tall": (900, 33), "cube": (7, 11, 130), "bias": (13,), "scale": (), "none": (0, 4)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**made, "half": torch.randn((128, 257), generator=generator).to(torch.bfloat16)}


class MemoryReader:
    """One rank's view of the checkpoint; see `tierstore.state.exchange.exchange.SharedReader`.

    Args:
        tensors: The truth.
        savers: How many ranks saved it; each has a file with its rows.
        on_node: Files that this rank's node has.
        damaged: (file, block) that is good on no tier of this rank.
        down: No tier answers.
        dies: Called instead of the n-th read, counted from 1.
    """

    hydrating: object | None = None

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        savers: int = 2,
        on_node: Iterable[str] = (),
        damaged: Iterable[tuple[str, int]] = (),
        down: bool = False,
        dies: tuple[int, Any] | None = None,
    ) -> None:
        self.files = {shard_name(rank, savers): bytearray(64) for rank in range(savers)}
        extents: dict[str, list[Extent]] = {name: [] for name in tensors}
        for name, tensor in tensors.items():
            rows = tensor.shape[0] if tensor.dim() else 1
            for rank, (file, data) in enumerate(self.files.items()):
                first, last = rank * rows // savers, (rank + 1) * rows // savers
                part = tensor[first:last] if tensor.dim() else tensor
                if part.numel() == 0 or first == last:
                    continue
                data += bytes(-len(data) % tensor.element_size())
                begin = len(data)
                data += memory_of(part.contiguous())
                offsets = (first, *(0,) * (tensor.dim() - 1)) if tensor.dim() else ()
                extents[name].append(Extent(file=file, begin=begin, end=len(data), offsets=offsets, sizes=tuple(part.shape)))
        entries = [FileEntry(name=n, nbytes=len(d), block_digests=block_digests(d, BLOCK)) for n, d in self.files.items()]
        self._index = build_index(
            [TensorEntry(name=n, dtype=dtype_name(t.dtype), shape=tuple(t.shape), extents=tuple(extents[n])) for n, t in tensors.items()],
            entries,
            BLOCK,
        )
        self.identity = "run/step-0000000001 (sha256:0)"
        self.on_node, self.damaged, self.down, self.dies = frozenset(on_node), frozenset(damaged), down, dies
        self.blocks: Counter[tuple[str, int]] = Counter()
        self.calls = 0
        self.most_nbytes = 0

    @property
    def index(self) -> Index:
        return self._index

    def near_files(self) -> tuple[frozenset[str], frozenset[str]]:
        return self.on_node, frozenset()

    async def hydrate(self, wants: Sequence[AnyWant]) -> None:
        return None

    async def objects(self, rank: int) -> bytes:
        raise NotImplementedError

    async def object_ranks(self) -> dict[int, int]:
        raise NotImplementedError

    async def read(self, wants: Sequence[AnyWant]) -> None:
        self.calls += 1
        self.most_nbytes = max(self.most_nbytes, sum(w.nbytes for w in wants))
        if self.dies is not None and self.calls >= self.dies[0]:
            self.dies[1]()
        if self.down:
            raise TemporaryError("no tier answers", hint="this is a test")
        blocks = {(w.file, b) for w in wants for b in range(w.offset // BLOCK, math.ceil(w.end / BLOCK))}
        for file, block in sorted(blocks & self.damaged):
            raise IntegrityError(f"block {block} of {file} is good on no tier", hint="this is a test", file=file)
        self.blocks.update(blocks)
        for want in wants:
            want.buffer[:] = self.files[want.file][want.offset : want.end]
