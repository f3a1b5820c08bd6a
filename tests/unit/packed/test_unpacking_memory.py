"""Packed files that ask a reader for very much: what is made for a few MiB of them stays bounded."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from packing_kit import MIB, run

from tierstore.errors import IntegrityError
from tierstore.format.packed.footer import encode_footer
from tierstore.format.packed.types import Footer, Run, packed_name
from tierstore.storage.packed import PackedStorage
from tierstore.storage.packed_names import Form
from tierstore.storage.unpacking_memory import HELD_NBYTES
from tierstore.testing.bucket import Bucket


def shard(number: int) -> str:
    return f"r/step-{number}/shard-00000-of-00001.safetensors"


async def nothing_but_runs(bucket: Bucket, number: int, nbytes: int, runs: Sequence[Run], files: Sequence[str] = ()) -> None:
    """A packed file of which no byte is stored."""
    ends = np.zeros(-(-nbytes // MIB), np.int64)
    footer = Footer(nbytes=nbytes, block_nbytes=MIB, frame_ends=ends, files=("", *files), runs=tuple(runs))
    await bucket.put(packed_name(shard(number), nbytes), encode_footer(footer))


class Zeros(Bucket):
    """Has a plain shard, of zeros, that takes no memory."""

    blocks = 256
    loading = most_loading = 0

    async def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        if path == shard(0):
            np.frombuffer(buffer, np.uint8)[:] = 0
            buffer[0] = offset // MIB % 251
            self.loading += 1
            self.most_loading = max(self.most_loading, self.loading)
            for _ in range(20):  # so that all who would begin beside it do
                await asyncio.sleep(0)
            self.loading -= 1
            return
        await super().read_into(path, offset, buffer)


def test_runs_that_each_take_a_few_bytes_of_another_block_hold_these_bytes_alone() -> None:
    async def body() -> None:
        bucket = Zeros()
        await bucket.put(shard(0), b"")
        runs = [Run(begin=8 * n, end=8 * n + 8, kind="copy", file=1, source=n * MIB) for n in range(bucket.blocks)]
        await nothing_but_runs(bucket, 1, 8 * bucket.blocks, runs, [shard(0)])
        storage = PackedStorage(bucket, None)
        storage._names.note(shard(0), [Form(path=shard(0), nbytes=bucket.blocks * MIB, stored_nbytes=None, packed=False)])
        tracemalloc.start()
        found = await storage.read(shard(1))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert found == b"".join(bytes([n % 251]) + bytes(7) for n in range(bucket.blocks))
        assert peak < 100 * MIB
        await storage.close()

    run(body)


def test_runs_of_runs_that_each_take_a_few_bytes_of_another_block_load_some_blocks_at_a_time() -> None:
    async def body() -> None:
        bucket = Zeros()
        await bucket.put(shard(0), b"")
        one, nbytes = 8 * 16, 8 * bucket.blocks
        far = [Run(begin=8 * n, end=8 * n + 8, kind="copy", file=1, source=(bucket.blocks - 1 - n) * MIB) for n in range(bucket.blocks)]
        some = [Run(begin=at, end=at + one, kind="copy", file=1, source=nbytes - at - one) for at in range(0, nbytes, one)]
        await nothing_but_runs(bucket, 2, nbytes, far, [shard(0)])
        await nothing_but_runs(bucket, 1, nbytes, some, [shard(2)])
        storage = PackedStorage(bucket, None)
        storage._names.note(shard(0), [Form(path=shard(0), nbytes=bucket.blocks * MIB, stored_nbytes=None, packed=False)])
        assert len(await storage.read(shard(1))) == nbytes
        assert bucket.most_loading <= 16
        await storage.close()

    run(body)


def test_a_chain_of_files_each_of_which_doubles_what_is_made_is_refused() -> None:
    async def body() -> None:
        bucket, own = Bucket(), 8 * MIB
        for number in range(1, 6):
            runs = [
                Run(begin=0, end=own, kind="bfloat16", file=0, source=own),
                Run(begin=own, end=3 * own, kind="copy", file=1, source=0),
            ]
            await nothing_but_runs(bucket, number, 3 * own, runs, [shard(number + 1)])
            own *= 2
        storage = PackedStorage(bucket, None)
        with pytest.raises(IntegrityError, match=f"step-1/.* made of more than {HELD_NBYTES // MIB} MiB"):
            await storage.read(shard(1), 0, 8 * MIB)
        await storage.close()

    run(body)
