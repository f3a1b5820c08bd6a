"""Planning reads: merge by gap, split by length, align to blocks; never a needless request or byte (CASES loading 1, 4, 23)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import IntegrityError
from tierstore.tiers.costs import LOCAL_COST, REMOTE_COST
from tierstore.tiers.reads import AnyWant, Handover, ReadCost, Span, Want, plan_spans, spread_spans

COST = ReadCost(gap_nbytes=100, span_nbytes=800, concurrency=4)
MIB = 1 << 20


def want(offset: int, nbytes: int, file: str = "f", group: str = "") -> Want:
    return Want(file, offset, memoryview(bytearray(nbytes)), group)


def spans(*wants: AnyWant, nbytes: int = 10_000, align: int = 10, cost: ReadCost = COST) -> list[tuple[int, int]]:
    return [(s.begin, s.end) for s in plan_spans(wants, file_nbytes=lambda _: nbytes, align=align, cost=cost)]


def test_spans_are_whole_blocks_and_end_with_the_file() -> None:
    assert spans(want(13, 5)) == [(10, 20)]
    assert spans(want(19, 2)) == [(10, 30)]
    assert spans(want(9_995, 5), nbytes=10_000) == [(9_990, 10_000)]
    assert spans(want(9_991, 4), nbytes=9_995) == [(9_990, 9_995)]


def test_small_gaps_are_read_and_wide_ones_are_not() -> None:
    assert spans(want(0, 10), want(110, 10)) == [(0, 120)]
    assert spans(want(0, 10), want(120, 10)) == [(0, 10), (120, 130)]


def test_long_ranges_are_split_at_multiples_of_half_a_request() -> None:
    assert spans(want(5, 1000)) == [(0, 400), (400, 1010)]
    assert spans(want(5, 790)) == [(0, 800)]
    assert spans(want(5, 805)) == [(0, 400), (400, 810)]


@given(st.integers(0, 200 * MIB), st.integers(1, 200 * MIB))
def test_requests_meet_at_the_borders_of_uploaded_parts(offset: int, nbytes: int) -> None:
    """A request across a part's border costs the server two reads: only the ends of what is wanted lie within parts."""
    wanted = Handover("f", offset, nbytes, lambda memory: None)
    made = plan_spans([wanted], file_nbytes=lambda _: 1 << 30, align=MIB, cost=REMOTE_COST)
    assert all(before.end == after.begin and after.begin % (8 * MIB) == 0 for before, after in itertools.pairwise(made))
    assert len(made) == max(1, nbytes // (8 * MIB))
    assert max(s.nbytes for s in made) <= REMOTE_COST.span_nbytes + MIB
    assert min(s.nbytes for s in made) >= min(nbytes, 4 * MIB)


def test_gaps_at_the_edges_of_a_split_are_not_read() -> None:
    assert spans(want(0, 390), want(480, 380)) == [(0, 390), (480, 860)]


def test_a_want_that_covers_a_span_is_read_directly() -> None:
    wide = want(5, 1200)
    planned = plan_spans([wide], file_nbytes=lambda _: 10_000, align=10, cost=COST)
    assert [s.direct() is not None for s in planned] == [False, True, False]
    view = planned[1].direct()
    assert view is not None
    view[0] = 7
    assert wide.buffer[planned[1].begin - 5] == 7


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
    assert len(spans(*rows, nbytes=32 << 20, align=4096, cost=REMOTE_COST)) == 3
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


def strided(run: int, pitch: int, count: int, group: str = "t", offset: int = 0) -> list[Want]:
    """`count` runs of a tensor of rows of `pitch` bytes. Their buffers share one run's memory."""
    memory = memoryview(bytearray(run))
    return [Want("f", offset + at * pitch, memory, group) for at in range(count)]


@pytest.mark.parametrize("offset", [0, 4096, 3 * MIB + 77])
@pytest.mark.parametrize("share", [64, 4, 2, 1.01])
@pytest.mark.parametrize("pitch", [MIB, MIB + 4096, 2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB, 7 * MIB, 8 * MIB, 9 * MIB, 16 * MIB, 40 * MIB])
def test_columns_never_take_more_requests_than_the_tensor_has_times_8_mib(pitch: int, share: float, offset: int) -> None:
    """Rows of any length from a block on, wherever the tensor begins in its file (the issue's promise for 64 MiB)."""
    for tensor_nbytes in (12 * MIB, 64 * MIB, 300 * MIB):
        rows = max(1, tensor_nbytes // pitch)
        wants = strided(int(pitch / share), pitch, rows, offset=offset)
        made = spans(*wants, nbytes=1 << 32, align=MIB, cost=REMOTE_COST)
        assert len(made) <= max(1, rows * pitch // (8 * MIB))
        assert max(end - begin for begin, end in made) <= REMOTE_COST.span_nbytes + 2 * MIB


def test_on_a_near_tier_a_wide_gap_is_left_out_whatever_the_number_of_requests() -> None:
    wants = strided(MIB // 2, 4 * MIB, 16)
    assert spans(*wants, nbytes=1 << 30, align=MIB, cost=LOCAL_COST) == [(4 * MIB * at, 4 * MIB * at + MIB) for at in range(16)]


def test_the_limit_is_each_tensors_own() -> None:
    """Small tensors far apart are requests of their own; a wide gap between two tensors is never read."""
    singles = [want(at * 5 * MIB, 1000, group=f"t{at}") for at in range(20)]
    assert len(spans(*singles, nbytes=1 << 30, align=MIB, cost=REMOTE_COST)) == 20
    first, second = strided(1000, 3 * MIB, 16), strided(1000, 3 * MIB, 16, "u", 16 * 3 * MIB)
    made = spans(*first, *second, nbytes=1 << 30, align=MIB, cost=REMOTE_COST)
    assert len(made) <= 12
    assert 46 * MIB in [end for _, end in made]


@pytest.mark.parametrize("cost", [LOCAL_COST, REMOTE_COST])
@pytest.mark.parametrize("nbytes", [1, 4096, 3 * MIB + 1, 8 * MIB, 64 * MIB, 100 * MIB])
def test_a_row_slice_fetches_its_bytes_and_at_most_a_block_at_each_end(nbytes: int, cost: ReadCost) -> None:
    for offset in (0, 1, MIB - 1, 5 * MIB):
        made = spans(want(offset, nbytes, group="t"), nbytes=1 << 30, align=MIB, cost=cost)
        assert sum(end - begin for begin, end in made) <= nbytes + 2 * MIB - 2 * (offset % MIB == 0)
        assert len(made) <= max(1, nbytes // (8 * MIB))


def test_row_slices_of_many_tensors_are_merged_only_over_what_blocks_would_fetch_anyway() -> None:
    for gap in (MIB, 2 * MIB + 1, 3 * MIB):
        slices = [want(at * (4 * MIB + gap), 4 * MIB, group=f"t{at}") for at in range(30)]
        for cost in (LOCAL_COST, REMOTE_COST):
            made = spans(*slices, nbytes=1 << 30, align=MIB, cost=cost)
            assert sum(end - begin for begin, end in made) <= sum(w.nbytes for w in slices) + 30 * 2 * MIB


def test_whole_tensors_and_many_small_neighbours_are_read_in_few_requests() -> None:
    shards = strided(MIB, MIB, 64)  # 64 row shards of one tensor, side by side
    assert len(spans(*shards, nbytes=1 << 30, align=MIB, cost=REMOTE_COST)) == 8
    small = [want(at * 3000, 2900, group=f"norm.{at}") for at in range(1000)]
    assert len(spans(*small, nbytes=1 << 30, align=MIB, cost=LOCAL_COST)) == 1


@given(st.data())
def test_whatever_is_wanted_arrives_once_the_spans_are_read(data: st.DataObject) -> None:
    """Spans cover all wants, are whole blocks, do not overlap, and keep to the cost's bounds."""
    draw = data.draw
    nbytes = draw(st.integers(1, 5000))
    content = random.Random(nbytes).randbytes(nbytes)
    align = draw(st.sampled_from([1, 7, 64]))
    taken: list[tuple[int, bytes]] = []
    wants: list[AnyWant] = []

    def take_at(number: int) -> Callable[[memoryview], None]:
        return lambda memory: taken.append((number, bytes(memory)))

    for _ in range(draw(st.integers(1, 30))):
        offset = draw(st.integers(0, nbytes))
        length, group = draw(st.integers(0, nbytes - offset)), draw(st.sampled_from(["", "a", "b"]))
        if draw(st.booleans()):
            wants.append(want(offset, length, group=group))
        else:
            wants.append(Handover("f", offset, length, take_at(len(wants)), group))
    span_nbytes = draw(st.sampled_from([64, 700, 10_000]))
    cost = ReadCost(
        gap_nbytes=draw(st.sampled_from([0, 10, 500])),
        span_nbytes=span_nbytes,
        concurrency=1,
        pitch_nbytes=draw(st.sampled_from([0, span_nbytes // 2])),
    )
    planned = plan_spans(wants, file_nbytes=lambda _: nbytes, align=align, cost=cost)
    for span in draw(st.permutations(planned)):
        assert span.begin % align == 0
        assert span.end % align == 0 or span.end == nbytes
        assert 0 < span.nbytes <= cost.span_nbytes + 2 * align
        view = span.direct()
        if view is not None:
            view[:] = content[span.begin : span.end]
        else:
            span.scatter(memoryview(content)[span.begin : span.end])
    assert all(before.end <= after.begin for before, after in itertools.pairwise(planned))
    arrived = dict(taken)
    assert len(arrived) == len(taken)
    for number, each in enumerate(wants):
        if each.nbytes:
            got = each.buffer if isinstance(each, Want) else arrived[number]
            assert got == content[each.offset : each.end]


def test_a_handover_whose_buffer_was_filled_is_taken_by_finish_and_only_once() -> None:
    taken: list[bytes] = []
    handover = Handover("f", 10, 4, lambda memory: taken.append(bytes(memory)))
    handover.finish()
    assert taken == []
    handover.buffer[:] = b"abcd"
    handover.finish()
    handover.finish()
    assert taken == [b"abcd"]


def spread(wants: list[AnyWant], cost: ReadCost, align: int = MIB) -> list[Span]:
    return spread_spans(plan_spans(wants, file_nbytes=lambda _: 1 << 32, align=align, cost=cost), align=align, cost=cost)


@pytest.mark.parametrize(
    ("nbytes", "requests"), [(4096, 1), (MIB, 1), (2 * MIB, 2), (8 * MIB, 8), (32 * MIB, 32), (64 * MIB, 32), (512 * MIB, 64)]
)
def test_a_short_load_is_cut_so_that_every_connection_has_a_part(nbytes: int, requests: int) -> None:
    """FACTS §7: a connection gives so much whatever is asked of it; 1 to 8 MiB each, about span over concurrency."""
    made = spread([want(0, nbytes, group="t")], REMOTE_COST)
    assert len(made) == requests
    assert sum(s.nbytes for s in made) == -(-nbytes // MIB) * MIB
    assert max(s.nbytes for s in made) <= 8 * MIB


def test_a_row_slice_of_several_tensors_has_no_more_than_one_request_for_a_connection_and_a_tensor() -> None:
    made = spread([want(at * 64 * MIB + 8 * MIB + 5, 8 * MIB, group=f"t{at}") for at in range(4)], REMOTE_COST)
    assert len(made) == 32
    assert sum(s.direct() is not None for s in made) == 24  # all but the two ends of each are read in place


def test_what_is_handed_over_is_not_cut_and_neither_is_what_lies_on_a_disk() -> None:
    columns: list[AnyWant] = [Handover("f", at * 2 * MIB, 2 * MIB, lambda memory: None, "t") for at in range(4)]
    assert len(spread(columns, REMOTE_COST)) == 1
    assert len(spread(list(strided(4 * MIB - 4, 4 * MIB, 4)), REMOTE_COST)) == 1  # all columns but one
    assert len(spread([want(0, 8 * MIB)], LOCAL_COST)) == 1


@given(st.lists(st.tuples(st.integers(0, 60_000), st.integers(1, 9_000)), min_size=1, max_size=8), st.sampled_from([1, 10, 512]))
def test_cutting_changes_neither_the_bytes_nor_who_gets_them(ranges: list[tuple[int, int]], align: int) -> None:
    data = random.Random(7).randbytes(70_000)
    cost = ReadCost(gap_nbytes=100, span_nbytes=8_000, concurrency=5, least_nbytes=300)
    wants: list[AnyWant] = [want(offset, nbytes, group=str(at)) for at, (offset, nbytes) in enumerate(ranges)]
    plan = plan_spans(wants, file_nbytes=lambda _: len(data), align=align, cost=cost)
    made = spread_spans(plan, align=align, cost=cost)
    assert sum(s.nbytes for s in made) <= sum(s.nbytes for s in plan)
    assert all(a.end <= b.begin for a, b in itertools.pairwise(made))
    for span in made:
        scratch = memoryview(bytearray(data[span.begin : span.end]))
        place = span.direct()
        if place is None:
            span.scatter(scratch)
        else:
            place[:] = scratch
    assert all(bytes(w.buffer) == data[w.offset : w.end] for w in wants)
