"""A long index is opened by its head: a load reads the rows that it wants, proves them, and takes the next tier's where they are bad."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiers_kit import BLOCK, Shard, SteppedClock, attempt_at, copy_to, flip, path_of, persist_rank, tiers_in

from tierstore.errors import IntegrityError, NotFoundError, UsageError
from tierstore.format.index import Extent, Index, PagedIndex, TensorEntry, decode_head, decode_index
from tierstore.names import INDEX, Attempt, shard_name
from tierstore.storage.loop import EventLoop
from tierstore.storage.s3 import S3Storage
from tierstore.testing.proxy import CuttingProxy
from tierstore.testing.servers import S3Server
from tierstore.tiers.catalog import scan
from tierstore.tiers.commit import commit
from tierstore.tiers.index_pages import WHOLE_NBYTES
from tierstore.tiers.replica import Replica, Want, open_replica
from tierstore.tiers.tier import Tier, Tiers

TENSORS = 9_000
WORLD = 2
ROW = 8


def name_of(number: int) -> str:
    return f"model.layers.{number:06d}.weight"


def a_shard(rank: int) -> Shard:
    """`TENSORS` tensors of two rows, one row on each rank."""
    file = shard_name(rank, WORLD)
    data = bytes((rank + 3 * i) % 251 for i in range(TENSORS * ROW))
    return Shard(
        data=data,
        tensors=[
            TensorEntry(
                name=name_of(i),
                dtype="uint8",
                shape=(WORLD, ROW),
                extents=(Extent(file=file, begin=ROW * i, end=ROW * (i + 1), offsets=(rank, 0), sizes=(1, ROW)),),
            )
            for i in range(TENSORS)
        ],
    )


async def save_large(tiers: Tiers, attempt: Attempt) -> None:
    for rank in range(WORLD):
        await persist_rank(tiers, attempt, tiers.authority, rank=rank, world_size=WORLD, shard=a_shard(rank))
    await commit(tiers, attempt, deadline_s=0, clock=SteppedClock())


async def opened(tiers: Tiers, loop: EventLoop | None) -> Replica:
    info = (await scan(tiers, "run")).latest()
    assert info is not None
    return await open_replica(tiers, info, run=loop.run if loop else None)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


def row(replica: Replica, loop: EventLoop, number: int, rank: int) -> bytes:
    extent = replica.index.find(name_of(number)).extents[rank]
    buffer = bytearray(extent.end - extent.begin)
    loop.run(replica.read([Want(extent.file, extent.begin, memoryview(buffer))]))
    return bytes(buffer)


# From a bucket, by the requests that the server sees


@pytest.mark.s3
def test_a_long_index_in_a_bucket_costs_its_head_and_the_rows_that_are_wanted(
    s3_server: S3Server, s3_bucket: str, s3_options: dict[str, Any], loop: EventLoop
) -> None:
    with CuttingProxy(s3_server.endpoint_url) as proxy:
        tier = Tier(name="object", storage=S3Storage(s3_bucket, {**s3_options, "endpoint_url": proxy.endpoint_url}), scope="shared")
        tiers = Tiers(tiers=(tier,), authority=tier, durable_at=tier, store_id="kit")
        attempt = attempt_at(1)
        try:
            loop.run(save_large(tiers, attempt))
            whole = len(loop.run(tier.storage.read(attempt.path(INDEX))))
            assert whole > WHOLE_NBYTES
            info = loop.run(scan(tiers, "run")).latest()
            assert info is not None
            proxy.clear()
            replica = loop.run(open_replica(tiers, info, run=loop.run))
            assert proxy.count("GET") == 2, "the manifest and the index's head"
            assert proxy.count("GET", INDEX) == 1
            assert isinstance(replica.index, PagedIndex)
            assert len(replica.index) == TENSORS

            assert replica.index.find(name_of(4321)).extents[1].offsets == (1, 0)
            assert proxy.count("GET", INDEX) == 2
            assert row(replica, loop, 4321, 1) == a_shard(1).data[ROW * 4321 : ROW * 4322]
            assert proxy.count("GET", INDEX) == 3, "the block digests of that shard"
            assert proxy.count("GET") == 5
            assert proxy.body_nbytes < whole // 5
            row(replica, loop, 4322, 1)
            assert proxy.count("GET", INDEX) == 3, "what was read is kept"

            proxy.clear()
            replica.index.prepare(name_of(i) for i in range(TENSORS))
            for i in range(TENSORS):
                replica.index.find(name_of(i))
            assert proxy.count("GET", INDEX) <= 2 + whole // (4 << 20) + 1
            assert proxy.body_nbytes <= whole
        finally:
            loop.run(tier.storage.close())


# Damage


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Attempt]:
    folder = tmp_path_factory.mktemp("index-pages")
    tiers, attempt = tiers_in(folder, ("shared", "far")), attempt_at(1)
    asyncio.run(save_large(tiers, attempt))
    asyncio.run(copy_to(tiers, attempt, "shared" if tiers.authority.name == "far" else "far"))
    return folder, attempt


@pytest.fixture
def two(base: tuple[Path, Attempt], tmp_path: Path) -> tuple[Tiers, Attempt]:
    """Two tiers of one store that hold the checkpoint; the nearest one's index may be damaged."""
    folder, attempt = base
    for tier in ("shared", "far"):
        for source in (folder / tier).rglob("*"):
            target = tmp_path / tier / source.relative_to(folder / tier)
            if source.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.name == INDEX:
                target.write_bytes(source.read_bytes())
            else:
                target.hardlink_to(source)
    return tiers_in(tmp_path, ("shared", "far")), attempt


def places(tiers: Tiers, attempt: Attempt) -> dict[str, int]:
    """A byte in each part of the index."""
    data = path_of(tiers, tiers.nearest.name, attempt, INDEX).read_bytes()
    head = decode_head(data, len(data))
    number = head.groups.number_of(name_of(4321).encode())
    assert number is not None
    return {
        "head": 5000,
        "header": 100,
        "rows": sum(head.groups.extent(number)) // 2,
        "digests": head.digests_extent(1)[0] + 40,
    }


SAYS = {
    "head": "its head is damaged",
    "header": "its head is damaged",
    "rows": "the rows of the tensors from",
    "digests": "the block digests",
}


@pytest.mark.parametrize("part", sorted(SAYS))
def test_damage_in_any_part_of_the_index_is_named_and_the_next_tier_is_used(part: str, two: tuple[Tiers, Attempt], loop: EventLoop) -> None:
    tiers, attempt = two
    flip(path_of(tiers, tiers.nearest.name, attempt, INDEX), places(tiers, attempt)[part])
    replica = loop.run(opened(tiers, loop))
    assert isinstance(replica.index, PagedIndex)
    assert row(replica, loop, 4321, 1) == a_shard(1).data[ROW * 4321 : ROW * 4322]
    (bad,) = replica.bad_copies
    assert (bad.tier, bad.file) == (tiers.nearest.name, INDEX)
    assert SAYS[part] in bad.reason
    assert row(replica, loop, 8000, 0) == a_shard(0).data[ROW * 8000 : ROW * 8001]


@pytest.mark.parametrize("part", sorted(SAYS))
def test_damage_on_every_tier_is_an_error_that_names_the_index_and_each_tier(
    part: str, two: tuple[Tiers, Attempt], loop: EventLoop
) -> None:
    tiers, attempt = two
    at = places(tiers, attempt)[part]
    for tier in tiers:
        flip(path_of(tiers, tier.name, attempt, INDEX), at)
    with pytest.raises(
        IntegrityError, match=rf"(?s)no tier has a good copy of index\.safetensors.*shared: .*{SAYS[part]}.*far: .*{SAYS[part]}"
    ):
        row(loop.run(opened(tiers, loop)), loop, 4321, 1)


def test_a_cut_index_is_read_from_the_next_tier(two: tuple[Tiers, Attempt], loop: EventLoop) -> None:
    tiers, attempt = two
    path = path_of(tiers, tiers.nearest.name, attempt, INDEX)
    path.write_bytes(path.read_bytes()[: places(tiers, attempt)["rows"]])
    replica = loop.run(opened(tiers, loop))
    assert row(replica, loop, 4321, 1) == a_shard(1).data[ROW * 4321 : ROW * 4322]
    assert [(bad.tier, bad.file) for bad in replica.bad_copies] == [(tiers.nearest.name, INDEX)]


def test_damage_elsewhere_in_the_index_does_not_hinder_a_load(two: tuple[Tiers, Attempt], loop: EventLoop) -> None:
    tiers, attempt = two
    flip(path_of(tiers, tiers.nearest.name, attempt, INDEX), places(tiers, attempt)["rows"])
    replica = loop.run(opened(tiers, loop))
    row(replica, loop, 10, 0)
    assert replica.bad_copies == []


# The same answers either way


def test_a_paged_and_a_whole_index_give_the_same_answers(two: tuple[Tiers, Attempt], loop: EventLoop) -> None:
    tiers, _ = two
    paged, whole = loop.run(opened(tiers, loop)), loop.run(opened(tiers, None))
    assert isinstance(paged.index, PagedIndex)
    assert isinstance(whole.index, Index)
    assert paged.index.names() == whole.index.names()
    assert paged.index.files() == whole.index.files()
    assert list(paged.index)[::500] == list(whole.index)[::500]
    assert loop.run(paged.document(INDEX)) == loop.run(whole.document(INDEX))
    assert decode_index(loop.run(paged.document(INDEX)))[0].names() == whole.index.names()
    with pytest.raises(NotFoundError, match=r"model\.layers\.000100\.weight"):
        paged.index.find("model.layers.000100.wieght")


def test_reads_without_proof_need_no_digests(two: tuple[Tiers, Attempt], loop: EventLoop) -> None:
    tiers, _ = two
    replica = loop.run(opened(tiers, loop))
    before = replica.requests[tiers.nearest.name]
    buffer = bytearray(BLOCK + 5)
    loop.run(replica.read([Want(shard_name(0, WORLD), 3, memoryview(buffer))], verify=False))
    assert bytes(buffer) == a_shard(0).data[3 : 3 + len(buffer)]
    assert replica.requests[tiers.nearest.name] - before == 1


def test_rows_asked_for_on_the_event_loop_itself_are_an_error_and_no_deadlock(two: tuple[Tiers, Attempt], loop: EventLoop) -> None:
    tiers, _ = two

    async def ask() -> None:
        replica = await opened(tiers, loop)
        with pytest.raises(UsageError, match="own event loop"):
            replica.index.find(name_of(1))

    loop.run(ask(), timeout=200)
