"""Ranges that many want are read from S3 straight to each (`contract.ReadsPlaced`): by both clients, in lent memory, exact, resumed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from s3_kit import use

import tierstore
from tierstore.errors import IntegrityError
from tierstore.storage.packed import PackedStorage
from tierstore.storage.s3 import S3Storage
from tierstore.testing.proxy import CuttingProxy, Rule
from tierstore.testing.servers import S3Server
from tierstore.testing.sources import pattern
from tierstore.tiers import fetching

pytestmark = pytest.mark.s3

MIB = 1 << 20
DATA = pattern(6 * MIB + 77)
ODD = 3 * MIB - 1000
"""Two places meet here, in the middle of a unit."""


class Wanted:
    """A `contract.Reading` of the whole file for two places."""

    path = "file"
    ranges = ((0, len(DATA)),)
    unit = MIB

    def __init__(self) -> None:
        self.memory = bytearray(len(DATA))
        self.taken: list[tuple[int, int, bool]] = []
        self.lent: set[int] = set()
        self.errors: list[tuple[int, int, Exception]] = []
        self.reached = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def place(self, begin: int, end: int) -> memoryview | None:
        return None if begin < ODD < end else memoryview(self.memory)[begin:end]

    def take(self, begin: int, piece: memoryview, placed: bool) -> None:
        self.reached.set()
        self.go.wait(120)
        if not placed:
            self.memory[begin : begin + piece.nbytes] = piece
        self.taken.append((begin, piece.nbytes, placed))

    def failed(self, begin: int, end: int, error: Exception) -> None:
        self.errors.append((begin, end, error))


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[CuttingProxy]:
    with CuttingProxy(s3_server.endpoint_url) as one:
        yield one


@pytest.fixture(params=["direct", "s3fs"])
def options(proxy: CuttingProxy, s3_options: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**s3_options, "endpoint_url": proxy.endpoint_url, "client": request.param}


@pytest.fixture(autouse=True)
def _stored(s3_bucket: str, s3_options: dict[str, Any]) -> None:
    use(s3_bucket, s3_options, lambda storage: storage.put("file", DATA))


def test_each_unit_is_taken_once_and_lies_where_it_belongs(proxy: CuttingProxy, options: dict[str, Any], s3_bucket: str) -> None:
    wanted = Wanted()

    async def body(storage: S3Storage) -> None:
        assert await storage.read_placed(wanted)
        assert storage._bounces is not None
        assert storage._bounces.made == 1  # for the unit that two want

    use(s3_bucket, options, body)
    assert wanted.memory == DATA
    assert wanted.taken == [(at, min(MIB, len(DATA) - at), at != 2 * MIB) for at in range(0, len(DATA), MIB)]
    assert not wanted.errors
    assert proxy.count("GET", "/file") == 1


def test_a_broken_read_goes_on_in_the_middle_of_a_unit(proxy: CuttingProxy, options: dict[str, Any], s3_bucket: str) -> None:
    proxy.add(Rule(method="GET", path="/file", action="cut-body", nbytes=2 * MIB + 300_000, times=2))
    wanted = Wanted()
    use(s3_bucket, options, lambda storage: storage.read_placed(wanted))
    assert wanted.memory == DATA
    assert [at for at, _, _ in wanted.taken] == list(range(0, len(DATA), MIB))
    assert proxy.body_nbytes < len(DATA) + MIB


def test_what_is_replaced_after_some_was_taken_fails_for_the_rest_alone(
    proxy: CuttingProxy, options: dict[str, Any], s3_bucket: str, s3_options: dict[str, Any]
) -> None:
    proxy.add(Rule(method="GET", path="/file", action="cut-body", nbytes=2 * MIB + 300_000))
    held = proxy.add(Rule(method="GET", path="/file", action="hold"))
    wanted = Wanted()

    async def body(storage: S3Storage) -> None:
        reading = asyncio.ensure_future(storage.read_placed(wanted))
        assert await asyncio.to_thread(held.reached.wait, 120)
        other = S3Storage(s3_bucket, s3_options)
        await other.put("file", pattern(len(DATA), seed=1))
        await other.close()
        held.release()
        assert await reading

    use(s3_bucket, options, body)
    ((begin, end, error),) = wanted.errors
    assert isinstance(error, IntegrityError)
    assert "was replaced" in error.message
    assert (begin % MIB, end) == (0, len(DATA))
    assert begin  # something was taken before
    assert wanted.memory[:begin] == DATA[:begin]


def test_who_is_cancelled_waits_for_what_is_being_taken(options: dict[str, Any], s3_bucket: str) -> None:
    wanted = Wanted()
    wanted.go.clear()

    async def body(storage: S3Storage) -> None:
        task = asyncio.ensure_future(storage.read_placed(wanted))
        assert await asyncio.to_thread(wanted.reached.wait, 120)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        wanted.go.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 120)

    use(s3_bucket, options, body)
    assert len(wanted.taken) < 7  # and what was not begun is not


def test_a_packed_tier_reads_so_what_is_not_packed(s3_bucket: str, options: dict[str, Any]) -> None:
    wanted = Wanted()

    async def body(storage: S3Storage) -> None:
        assert await PackedStorage(storage, None).read_placed(wanted)

    use(s3_bucket, options, body)
    assert wanted.memory == DATA


def test_a_load_of_many_small_tensors_needs_no_scratch_memory_and_passes_damaged_blocks_over(
    s3_bucket: str, s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two copies in buckets the nearer one has a damaged block: that alone comes from the other one."""
    state = {f"w{number:02d}": torch.arange(70_000, dtype=torch.float32) + number for number in range(40)}  # 280 kB each
    tiers = [{"name": name, "uri": f"{s3_bucket}/{name}", "options": {**s3_options, "client": "direct"}} for name in ("near", "far")]
    taken: list[int] = []
    take = fetching._Places.take

    async def noted(self: Any) -> memoryview:
        taken.append(self._longest)
        return await take(self)

    monkeypatch.setattr(fetching._Places, "take", noted)
    with tierstore.open({"version": 1, "run": "r", "tiers": tiers}, rank=0, world_size=1) as store:
        store.save(1, state).wait("far", timeout=200)
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        store.load(into=into)
        assert all(torch.equal(into[name], state[name]) for name in state)
        assert not taken

        async def damage(storage: S3Storage) -> None:
            (shard,) = [info.path for info in await storage.list() if "/shard-" in info.path]
            data = bytearray(await storage.read(shard))
            data[2 * MIB + 5] ^= 1
            await storage.put(shard, bytes(data))

        use(f"{s3_bucket}/near", s3_options, damage)
        for tensor in into.values():
            tensor.zero_()
        store.load(into=into)
        assert all(torch.equal(into[name], state[name]) for name in state)
