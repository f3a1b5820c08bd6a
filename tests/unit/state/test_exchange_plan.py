"""The exchange's plan: whatever the ranks need, each block comes once to each of them, and from afar it is read once."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import FormatError
from tierstore.state.exchange.plan import UNIT_NBYTES, Needs, Plan, decode_needs, encode_needs, merge_ranges, plan_exchange

BLOCK = 1 << 20


def needs(
    ranges: list[tuple[int, int, int]],
    *,
    files: int,
    on_node: set[int] = frozenset(),
    machine: str = "m",
    budget: int = 64 << 20,
    local: Any = (),
) -> Needs:
    table = np.array(ranges, dtype=np.int64).reshape(-1, 3)
    return Needs(
        checkpoint="c",
        machine=machine,
        budget_nbytes=budget,
        ranges=merge_ranges(table[:, 0], table[:, 1], table[:, 2]),
        on_node=np.array([f in on_node for f in range(files)], dtype=bool),
        local=np.array([f in local for f in range(files)], dtype=bool),
    )


def plans(told: list[Needs], sizes: list[int], block: int = BLOCK) -> list[Plan]:
    nbytes = np.array(sizes, dtype=np.int64)
    return [plan_exchange(told, rank=rank, file_nbytes=nbytes, block_nbytes=block) for rank in range(len(told))]


def blocks_of(ranges: Any) -> set[tuple[int, int]]:
    return {(int(f), b) for f, first, last in ranges for b in range(first, last)}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Needs], list[int], int]:
    block = draw(st.sampled_from([1 << 20, 4 << 20, 1 << 12]))
    sizes = draw(st.lists(st.integers(1, 24 * block), min_size=1, max_size=3))
    budget = draw(st.sampled_from([1, 2 * block, 16 * block, 64 << 20]))
    told = []
    for _ in range(draw(st.integers(1, 5))):
        ranges = []
        for file, size in enumerate(sizes):
            count = -(-size // block)
            for first in draw(st.lists(st.integers(0, count - 1), max_size=4)):
                ranges.append((file, first, draw(st.integers(first + 1, count))))
        on_node = draw(st.sets(st.integers(0, len(sizes) - 1)))
        told.append(needs(ranges, files=len(sizes), on_node=on_node, machine=draw(st.sampled_from("ab")), budget=budget))
    return told, sizes, block


@given(worlds())
def test_each_block_comes_once_to_each_rank_and_from_afar_it_is_read_once(world: tuple[list[Needs], list[int], int]) -> None:
    told, sizes, block = world
    made = plans(told, sizes, block)
    wanted = [blocks_of(n.ranges.tolist()) for n in told]
    arrives: list[Counter[tuple[int, int]]] = [Counter() for _ in told]
    read: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for rank, plan in enumerate(made):
        for message in plan.messages:
            blocks = blocks_of((u.file, u.first, u.last) for u in message.units)
            assert message.nbytes == sum(min(u.last * block, sizes[u.file]) - u.first * block for u in message.units) > 0
            if message.reader == rank:
                for one in blocks:
                    read[one][rank] += 1
            if message.reader != rank or message.kept:
                arrives[rank].update(blocks)
        for one in wanted[rank] - set(arrives[rank]):  # what is not exchanged it reads alone
            read[one][rank] += 1
    for rank in range(len(told)):
        assert set(arrives[rank]) <= wanted[rank]
        assert all(count == 1 for count in arrives[rank].values())
    for (file, _), readers in read.items():
        holders = {rank for rank, n in enumerate(told) if n.on_node[file]}
        assert all(count == 1 for count in readers.values())
        assert len(readers) == 1 or set(readers) <= holders  # who has it on its node reads it there
        assert not holders or set(readers) <= holders


@given(worlds())
def test_both_ends_know_of_a_message_and_rounds_fit_into_memory(world: tuple[list[Needs], list[int], int]) -> None:
    told, sizes, block = world
    made = plans(told, sizes, block)
    known = {(m.round, m.reader, m.number): m for plan in made for m in plan.messages}
    budget = min(n.budget_nbytes for n in told) // 3
    for rank, plan in enumerate(made):
        mine = [m for m in known.values() if rank in (m.reader, *m.receivers)]
        assert sorted(mine, key=str) == sorted(plan.messages, key=str)
        assert len({(m.round, m.reader, m.number) for m in plan.messages}) == len(plan.messages)
        assert [m.round for m in plan.messages] == sorted(m.round for m in plan.messages)
        assert all({m.reader, *m.receivers} <= set(plan.members) for m in plan.messages if m.receivers)
        in_round = Counter[int]()
        units = Counter[int]()
        for m in plan.messages:
            in_round[m.round] += m.nbytes
            units[m.round] += len(m.units)
        assert all(n <= max(budget, 1) or units[turn] == 1 for turn, n in in_round.items())
        order = [(u.file, u.first) for turn in sorted(in_round) for u in sorted(_units(plan, turn), key=lambda u: (u.file, u.first))]
        assert order == sorted(order)  # so that only wishes at the edge of the sweep are held in part


def _units(plan: Plan, turn: int) -> list[Any]:
    return [u for m in plan.messages if m.round == turn for u in m.units]


@given(worlds())
def test_what_a_rank_tells_is_what_the_others_hear(world: tuple[list[Needs], list[int], int]) -> None:
    for one in world[0]:
        again = decode_needs(encode_needs(one))
        assert (again.checkpoint, again.machine, again.budget_nbytes) == (one.checkpoint, one.machine, one.budget_nbytes)
        assert all(np.array_equal(getattr(again, name), getattr(one, name)) for name in ("ranges", "on_node", "local"))


@pytest.mark.parametrize("data", [b"", b"{}\n", b"[1]\nxx", encode_needs(needs([(0, 0, 1)], files=1))[:-3]])
def test_what_is_no_list_of_reads_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="another rank's list of reads"):
        decode_needs(data)


def test_replicas_share_the_reading_evenly() -> None:
    size = 400 << 20
    made = plans([needs([(0, 0, 400)], files=1, machine=str(rank)) for rank in range(4)], [size])
    read = [sum(m.nbytes for m in plan.messages if m.reader == rank) for rank, plan in enumerate(made)]
    assert sum(read) == size
    assert max(read) - min(read) <= UNIT_NBYTES


def test_what_only_one_rank_wants_is_not_exchanged() -> None:
    made = plans([needs([(0, rank * 50, rank * 50 + 50)], files=1, machine=str(rank)) for rank in range(4)], [200 << 20])
    assert all(not plan.messages and not plan.members for plan in made)


def test_interleaved_columns_are_read_in_long_pieces() -> None:
    """A matrix with rows of 4 MiB: each rank wants 1 MiB of every row."""
    told = [needs([(0, row * 4 + rank, row * 4 + rank + 1) for row in range(64)], files=1, machine=str(rank)) for rank in range(4)]
    made = plans(told, [256 << 20])
    requests = 0
    for rank, plan in enumerate(made):
        mine = np.array(sorted((u.first, u.last) for m in plan.messages if m.reader == rank for u in m.units))
        requests += len(merge_ranges(np.zeros(len(mine), dtype=np.int64), mine[:, 0], mine[:, 1]))
        assert sum(m.nbytes for m in plan.messages if m.reader == rank) == 64 << 20
    assert requests <= 256 // 8


def test_ranks_without_common_blocks_are_not_connected_and_wait_for_no_common_rounds() -> None:
    """Four pairs of replicas, each pair with a file of its own: HSDP."""
    told = [needs([(rank // 2, 0, 64)], files=4, machine=str(rank), budget=32 << 20) for rank in range(8)]
    made = plans(told, [64 << 20] * 4)
    for rank, plan in enumerate(made):
        assert plan.members == (rank // 2 * 2, rank // 2 * 2 + 1)
        assert plan.messages[0].round == 0


def test_on_one_machine_local_files_are_read_by_everyone() -> None:
    told = [needs([(0, 0, 64)], files=1, local={0}) for _ in range(4)]
    assert all(not plan.messages for plan in plans(told, [64 << 20]))
    apart = [needs([(0, 0, 64)], files=1, local={0}, machine=str(rank)) for rank in range(4)]
    assert all(plan.messages for plan in plans(apart, [64 << 20]))


def test_a_node_that_has_the_files_reads_them_for_one_that_lacks_them() -> None:
    told = [needs([], files=1, on_node={0}), needs([(0, 0, 64)], files=1)]
    first, second = plans(told, [64 << 20])
    assert sum(m.nbytes for m in first.messages if m.reader == 0 and m.receivers == (1,)) == 64 << 20
    assert not any(m.kept for m in first.messages)
    assert all(m.reader == 0 for m in second.messages)
