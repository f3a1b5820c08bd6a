"""Planning reads: merge by gap, split by length, align to blocks; never a needless request or byte (CASES loading 1, 4, 23)."""

from __future__ import annotations

import itertools
import random

import pytest

from tierstore.errors import IntegrityError
from tierstore.tiers.reads import LOCAL_COST, REMOTE_COST, ReadCost, Want, plan_spans

COST = ReadCost(gap_nbytes=100, span_nbytes=400, concurrency=4)


def want(offset: int, nbytes: int, file: str = "f") -> Want:
    return Want(file, offset, memoryview(bytearray(nbytes)))


def spans(*wants: Want, nbytes: int = 10_000, align: int = 10, cost: ReadCost = COST) -> list[tuple[int, int]]:
    return [(s.begin, s.end) for s in plan_spans(wants, file_nbytes=lambda _: nbytes, align=align, cost=cost)]


def test_spans_are_whole_blocks_and_end_with_the_file() -> None:
    assert spans(want(13, 5)) == [(10, 20)]
    assert spans(want(19, 2)) == [(10, 30)]
    assert spans(want(9_995, 5), nbytes=10_000) == [(9_990, 10_000)]
    assert spans(want(9_991, 4), nbytes=9_995) == [(9_990, 9_995)]


def test_small_gaps_are_read_and_wide_ones_are_not() -> None:
    assert spans(want(0, 10), want(110, 10)) == [(0, 120)]
    assert spans(want(0, 10), want(120, 10)) == [(0, 10), (120, 130)]


def test_long_ranges_are_split_evenly_at_blocks() -> None:
    assert spans(want(5, 1000)) == [(0, 400), (400, 800), (800, 1010)]


def test_gaps_at_the_edges_of_a_split_are_not_read() -> None:
    assert spans(want(0, 390), want(460, 10)) == [(0, 390), (460, 470)]


def test_a_want_that_covers_a_span_is_read_directly() -> None:
    wide = want(5, 1000)
    planned = plan_spans([wide], file_nbytes=lambda _: 10_000, align=10, cost=COST)
    assert [s.direct() is not None for s in planned] == [False, True, False]
    view = planned[1].direct()
    assert view is not None
    view[0] = 7
    assert wide.buffer[395] == 7


def test_one_whole_load_makes_few_large_requests() -> None:
    """CASES loading 1: N bytes take at most ceil(N / 8 MiB) + k requests, none below 1 MiB but tails."""
    nbytes = 256 << 20
    step = 3_000_001
    wants = [want(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]
    for cost in (LOCAL_COST, REMOTE_COST):
        made = spans(*wants, nbytes=nbytes, align=1 << 20, cost=cost)
        assert len(made) == 32
        assert sum(end - begin for begin, end in made) == nbytes


def test_rows_of_a_slice_are_merged_where_a_request_costs_more_than_the_gap() -> None:
    rows = [want(at, 1000) for at in range(0, 32 << 20, 512 << 10)]
    assert len(spans(*rows, nbytes=32 << 20, align=4096, cost=REMOTE_COST)) == 4
    assert len(spans(*rows, nbytes=32 << 20, align=4096, cost=LOCAL_COST)) == len(rows)


def test_empty_wants_never_reach_a_storage() -> None:
    assert spans(want(10, 0)) == []
    assert spans() == []


@pytest.mark.parametrize(("offset", "nbytes"), [(9_999, 2), (10_000, 1), (-1, 5), (1 << 60, 1)])
def test_a_want_outside_its_file_is_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(IntegrityError, match="which has 10000"):
        spans(want(offset, nbytes))


def test_buffers_of_other_item_types_are_taken_as_bytes() -> None:
    numbers = memoryview(bytearray(32)).cast("d")
    (span,) = plan_spans([Want("f", 0, numbers)], file_nbytes=lambda _: 32, align=1, cost=COST)
    view = span.direct()
    assert view is not None
    assert view.nbytes == 32


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_wanted_arrives_once_the_spans_are_read(seed: int) -> None:
    chance = random.Random(seed)
    nbytes = chance.randint(1, 5000)
    content = chance.randbytes(nbytes)
    align = chance.choice([1, 7, 64])
    wants = []
    for _ in range(chance.randint(1, 30)):
        offset = chance.randint(0, nbytes)
        wants.append(want(offset, chance.randint(0, nbytes - offset)))
    cost = ReadCost(gap_nbytes=chance.choice([0, 10, 500]), span_nbytes=chance.choice([64, 700, 10_000]), concurrency=1)
    planned = plan_spans(wants, file_nbytes=lambda _: nbytes, align=align, cost=cost)
    for span in planned:
        assert span.begin % align == 0
        assert span.end % align == 0 or span.end == nbytes
        assert 0 < span.nbytes <= max(align, cost.span_nbytes)
        view = span.direct()
        if view is not None:
            view[:] = content[span.begin : span.end]
        else:
            span.scatter(memoryview(content)[span.begin : span.end])
    assert all(before.end <= after.begin for before, after in itertools.pairwise(planned))
    for each in wants:
        assert each.buffer == content[each.offset : each.end]
