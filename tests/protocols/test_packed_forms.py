"""Several processes with different codecs write one shard on one tier: in the end it lies there in one form, and never in none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from packed_tiers_kit import Place, adam_state
from packing_kit import SHARD, run, stored, training_shard

from tierstore.format.packed.types import packed_name
from tierstore.storage.contract import Source
from tierstore.storage.packed import PackedStorage, Packing
from tierstore.storage.sources import BytesSource
from tierstore.testing.bucket import Bucket
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.catalog import scan
from tierstore.tiers.promote import promote
from tierstore.tiers.verify import verify

DATA = training_shard(rows=20)
PACKED = packed_name(SHARD, len(DATA))
PACK, PLAIN = Packing(codec="zstd"), None

Hook = Callable[[], Awaitable[None]]


class Meeting(Bucket):
    """Lets others act before something is done to a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, Hook] = {}

    async def _meet(self, operation: str) -> None:
        hook = self.before.pop(operation, None)
        if hook is not None:
            await hook()

    async def write(self, path: str, source: Source) -> Any:
        if "/shard-" in path:
            await self._meet("write")
        return await super().write(path, source)

    async def delete(self, paths: Sequence[str]) -> None:
        if paths:
            await self._meet("delete")
        await super().delete(paths)


def storage_of(bucket: Bucket, packing: Packing | None) -> PackedStorage:
    """Another process's."""
    return PackedStorage(bucket, packing)


@pytest.mark.parametrize("first", [PACK, PLAIN], ids=["packed first", "plain first"])
def test_what_two_processes_wrote_at_once_is_brought_to_one_form_by_either(first: Packing | None) -> None:
    async def body(tidier: int) -> None:
        bucket = Meeting()
        one, other = storage_of(bucket, first), storage_of(bucket, PACK if first is None else None)

        async def write_other() -> None:
            await other.write(SHARD, BytesSource(DATA))

        bucket.before["write"] = write_other  # `one` has seen that nothing is there
        await one.write(SHARD, BytesSource(DATA))
        assert await stored(bucket, "run") == sorted([SHARD, PACKED])
        chosen = (await storage_of(bucket, None)._names.find(SHARD)).path
        assert await (one, other)[tidier].keep_one("run/step") == [SHARD]
        assert await stored(bucket, "run") == [chosen]
        assert await (other, one)[tidier].keep_one("run/step") == []
        for storage in (one, other):
            assert await storage.read(SHARD) == DATA

    for tidier in (0, 1):
        run(lambda tidier=tidier: body(tidier))


@pytest.mark.parametrize("first", [PACK, PLAIN], ids=["packed", "plain"])
def test_two_that_remove_each_others_form_leave_one(first: Packing | None) -> None:
    """The second writes the old form anew while the first is about to remove it, and sees that its own is newer."""

    async def body() -> None:
        bucket = Meeting()
        second = PACK if first is None else None
        await storage_of(bucket, second).write(SHARD, BytesSource(DATA))
        one, other = storage_of(bucket, first), storage_of(bucket, second)

        async def write_other() -> None:
            await other.write(SHARD, BytesSource(DATA))

        bucket.before["delete"] = write_other
        await one.write(SHARD, BytesSource(DATA))
        assert len(await stored(bucket, "run")) == 1
        for storage in (one, other, storage_of(bucket, None)):
            assert await storage.read(SHARD) == DATA

    run(body)


def test_a_form_that_somebody_removes_while_theirs_is_removed_is_written_anew() -> None:
    async def body() -> None:
        bucket = Meeting()
        await storage_of(bucket, PLAIN).write(SHARD, BytesSource(DATA))

        async def remove() -> None:
            await Bucket.delete(bucket, [PACKED])

        bucket.before["delete"] = remove
        info = await storage_of(bucket, PACK).write(SHARD, BytesSource(DATA))
        assert await stored(bucket, "run") == [PACKED]
        assert (await bucket.stat(PACKED)).nbytes == info.stored_nbytes
        assert await storage_of(bucket, PLAIN).read(SHARD) == DATA

    run(body)


@pytest.mark.parametrize("packs_first", [True, False])
def test_two_processes_with_different_codecs_that_copy_a_checkpoint_at_once_leave_one_form(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, packs_first: bool
) -> None:
    place = Place(tmp_path, monkeypatch)
    monkeypatch.setattr("packed_tiers_kit.Bucket", lambda name: Meeting())
    packs, plain = place.config(codec="zstd"), place.config()
    with place.open({**plain, "tiers": plain["tiers"][:2]}) as store:
        store.save(1, adam_state(1)).wait("committed", timeout=200)
    with place.session(packs if packs_first else plain) as one, place.session(plain if packs_first else packs) as other:
        info = one.run(scan(one.tiers, "r")).find(1)
        assert info is not None
        bucket = place.bucket
        assert isinstance(bucket, Meeting)

        async def copy_other() -> None:
            await asyncio.to_thread(lambda: other.run(promote(other.tiers, info.attempt, "far", clock=other.clock)))

        bucket.before["write"] = copy_other
        one.run(promote(one.tiers, info.attempt, "far", clock=one.clock))
        assert len(place.names("shard-")) == 1
    with place.session(plain) as session:
        assert session.run(verify(session.tiers, "r", level="full")).damage == ()
    place.lose_exact_shards()
    for config in (packs, plain):
        with place.open(config) as store:
            assert_same_state(store.load(), adam_state(1))
