"""A checkpoint in memory: the images of staged states behind the interface that loading reads from, counting what is read."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from tierstore.format.digest import BLOCK_NBYTES
from tierstore.format.index import FileEntry, Index
from tierstore.format.index_build import build_index, merge_indexes
from tierstore.format.index_coverage import check_coverage
from tierstore.format.objects import ObjectCodecs
from tierstore.names import shard_name
from tierstore.state.image import ImagePool
from tierstore.state.load import load_state
from tierstore.state.stage import StagedState, stage
from tierstore.tiers.reads import Want

T = TypeVar("T")


def run(coro: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coro)


class ImageReader:
    """What `tiers.replica.Replica` is to loading, over bytes in memory."""

    def __init__(self, staged: Sequence[StagedState], *, block_nbytes: int = BLOCK_NBYTES) -> None:
        self.files = {shard_name(rank, len(staged)): bytes(run(s.source.read(0, s.nbytes))) for rank, s in enumerate(staged)}
        self.trees = [s.objects for s in staged]
        parts = [
            build_index(
                s.tensors,
                [FileEntry(name=name, nbytes=len(data), block_digests=bytes(32 * -(-len(data) // block_nbytes)))],
                block_nbytes,
            )
            for s, (name, data) in zip(staged, self.files.items(), strict=True)
        ]
        self._index = merge_indexes(parts)
        check_coverage(self._index)
        self.wants: list[Want] = []
        self.calls = 0

    @property
    def index(self) -> Index:
        return self._index

    @property
    def nbytes_read(self) -> int:
        return sum(w.buffer.nbytes for w in self.wants)

    async def objects(self, rank: int) -> bytes:
        return self.trees[rank]

    async def object_ranks(self) -> dict[int, int]:
        return {rank: self.trees.index(tree) for rank, tree in enumerate(self.trees)}

    async def read(self, wants: Sequence[Want]) -> None:
        self.calls += 1
        for want in wants:
            assert want.buffer.contiguous
            assert not want.buffer.readonly
            assert want.buffer.format == "B"
            data = self.files[want.file][want.offset : want.end]
            assert len(data) == want.buffer.nbytes > 0
            want.buffer[:] = data
        self.wants += wants


def staged(state: Any, *, codecs: ObjectCodecs | None = None, block_nbytes: int = BLOCK_NBYTES) -> ImageReader:
    """`state`, saved by one process."""
    pool = ImagePool(None, max_nbytes=1 << 30)
    made = stage(state, pool=pool, codecs=codecs)
    try:
        return ImageReader([made], block_nbytes=block_nbytes)
    finally:
        made.release()
        pool.close()


def round_trip(state: Any, codecs: ObjectCodecs | None = None) -> Any:
    """`state` after saving and loading it."""
    return load_state(staged(state, codecs=codecs), run, codecs=codecs)
