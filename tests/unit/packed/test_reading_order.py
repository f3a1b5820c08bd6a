"""Ranges that are made from others are read right after these."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_kit import MIB, SHARD, training_shard

from tierstore.clock import SystemClock
from tierstore.storage.bandwidth import Bandwidth
from tierstore.storage.contract import MadeFrom
from tierstore.storage.packed import PackedStorage, Packing
from tierstore.storage.posix import PosixStorage
from tierstore.storage.reading_order import Part, Range, reading_order
from tierstore.storage.sources import BytesSource, ThrottledSource
from tierstore.storage.unpacking_cache import Decoded, Key
from tierstore.testing.bucket import Bucket
from tierstore.tiers.read_order import file_order


def half(begin: int, end: int, source: int, path: str = "f") -> MadeFrom:
    return MadeFrom(begin=begin, end=end, path=path, source=source, source_end=source + 2 * (end - begin))


def stored(begin: int, end: int, path: str = "f") -> Range:
    return Range(path=path, begin=begin, end=end)


def test_what_is_made_from_nothing_stays_as_it_is() -> None:
    ranges = [stored(0, 5), stored(5, 9), stored(0, 3, "g")]
    assert reading_order(ranges, 1) == [Part(number=0, begin=0, end=5), Part(number=1, begin=5, end=9), Part(number=2, begin=0, end=3)]


def test_a_range_is_cut_so_that_each_part_follows_the_last_bytes_that_it_is_made_from() -> None:
    made = Range(path="f", begin=0, end=10, made=[half(0, 10, 100)])
    found = reading_order([made, stored(90, 104), stored(104, 113), stored(113, 130)], 2)
    assert [(part.number, part.begin, part.end) for part in found] == [
        (1, 90, 104),
        (0, 0, 2),
        (2, 104, 113),
        (0, 2, 6),
        (3, 113, 130),
        (0, 6, 10),
    ]


def test_what_is_made_from_others_is_not_read_with_what_is_not() -> None:
    mixed = Range(path="f", begin=0, end=20, made=[half(5, 7, 100), half(9, 10, 104), half(17, 18, 200)])
    found = reading_order([mixed, stored(100, 106)], 4)
    assert [(part.number, part.begin, part.end) for part in found] == [(0, 0, 4), (0, 12, 16), (1, 100, 106), (0, 4, 12), (0, 16, 20)]


@pytest.mark.parametrize("broken", [[], [(4, 10)], [(0, 4), (4, 8)], [(0, 6), (4, 10)], [(0, 4), (0, 4), (4, 10)], [(0, 12)]])
def test_a_folder_pulls_a_source_in_its_order_if_that_is_all_of_it(broken: list[tuple[int, int]], tmp_path: Path) -> None:
    class InOrder(BytesSource):
        def __init__(self, order: list[tuple[int, int]]) -> None:
            super().__init__(b"0123456789")
            self.order, self.pulled = order, list[tuple[int, int]]()

        view = None  # type: ignore[assignment]  # it is pulled

        async def read(self, offset: int, nbytes: int) -> memoryview:
            self.pulled.append((offset, offset + nbytes))
            return self._view[offset : offset + nbytes]

    async def body() -> None:
        storage = PosixStorage(tmp_path, durable=False)
        for order, pulled in (([(4, 8), (0, 4), (8, 10)],) * 2, (broken, [(0, 10)])):
            for source in (asked := InOrder(order), ThrottledSource(asked, Bandwidth(1 << 40, SystemClock()))):
                asked.pulled.clear()
                await storage.write("a", source)
                assert (await storage.read("a"), asked.pulled) == (b"0123456789", pulled)
        await storage.close()

    asyncio.run(body())


def test_a_file_in_blocks_that_are_no_power_of_two_is_not_read_at_once() -> None:
    class Halves(Bucket):
        async def made_from(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Sequence[MadeFrom]]:
            return [[half(begin, end, 0)] for begin, end in ranges]

    async def body() -> None:
        for block_nbytes in (MIB, 3 * MIB, 8 * MIB, MIB + 1, 1 << 30):
            order = await file_order(Halves(), "f", 1 << 32, block_nbytes)
            assert all(end - begin <= 16 * MIB for begin, end in order)
            assert bool(order) == (block_nbytes <= 8 * MIB and not block_nbytes % MIB)

    asyncio.run(body())


def test_what_is_made_from_another_file_follows_that() -> None:
    copied = MadeFrom(begin=0, end=4, path="g", source=20, source_end=24)
    found = reading_order([Range(path="f", begin=0, end=4, made=[copied]), stored(10, 30, "g"), stored(4, 8)], 1)
    assert [part.number for part in found] == [1, 0, 2]


@st.composite
def loads(draw: st.DrawFn) -> list[Range]:
    edges = sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=9)))
    ranges = []
    for begin, end in itertools.pairwise(edges):
        inner = sorted(draw(st.sets(st.integers(begin, end), max_size=4)))
        made = [half(a, b, draw(st.integers(0, 90)), draw(st.sampled_from("fg"))) for a, b in itertools.pairwise(inner)]
        ranges.append(Range(path="f", begin=begin, end=end, made=made if draw(st.booleans()) else []))
    return ranges


@given(loads(), st.sampled_from([1, 4]))
def test_every_byte_is_read_once_and_cut_only_where_it_may_be(ranges: list[Range], align: int) -> None:
    found = reading_order(ranges, align)
    for number, one in enumerate(ranges):
        parts = sorted((part.begin, part.end) for part in found if part.number == number)
        assert [parts[0][0], *(end for _, end in parts)] == [*(begin for begin, _ in parts), one.end]
        assert parts[0][0] == one.begin
        assert all((begin - one.begin) % align == 0 for begin, _ in parts)
        assert one.made or len(parts) == 1


def test_a_packed_shard_tells_what_its_weights_are_made_from() -> None:
    data = training_shard(rows=900)

    async def body() -> None:
        storage = PackedStorage(Bucket(), Packing(codec="raw", master_once=True))
        await storage.write(SHARD, BytesSource(data))
        ranges = [(at, min(at + MIB, len(data))) for at in range(0, len(data), MIB)]
        found = await storage.made_from(SHARD, ranges)
        weights = 2 * 900 * 700 * 2
        assert sum(made.end - made.begin for some in found for made in some) > 0.9 * weights
        for (begin, end), some in zip(ranges, found, strict=True):
            assert all(begin <= made.begin < made.end <= end and made.path == SHARD for made in some)
            assert all(made.source_end - made.source == 2 * (made.end - made.begin) for made in some)
        await storage.put("document", b"{}")
        assert list(await storage.made_from("document", [(0, 2)])) == [()]
        await storage.close()

    asyncio.run(body())


def test_blocks_that_are_about_to_be_used_are_kept_as_long_as_there_is_room() -> None:
    def key(number: int) -> Key:
        return "f", "", number

    kept = Decoded(most_nbytes=2, more_nbytes=2)
    with kept.wanting([key(0), key(1)]), kept.wanting([key(1)]):
        for number in range(6):
            kept.put(key(number), memoryview(b"x"))
        assert [number for number in range(6) if kept.get(key(number)) is not None] == [0, 1]
    kept.put(key(6), memoryview(b"x"))
    assert kept.get(key(0)) is None
    with kept.wanting([key(number) for number in range(9)]):
        for number in range(9):
            kept.put(key(number), memoryview(b"x"))
        assert [number for number in range(9) if kept.get(key(number)) is not None] == [5, 6, 7, 8]
