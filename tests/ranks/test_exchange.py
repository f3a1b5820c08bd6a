"""Ranks that load together: all bytes are right, each is read from afar once, and what one rank meets the others hear of in time."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_kit import MemoryReader, run, truth
from ranks_kit import die, run_ranks, wait_only_for

from tierstore.errors import IncompleteError, IntegrityError, RankError, TierStoreError, UsageError
from tierstore.names import shard_name
from tierstore.state.agreement import Agreement
from tierstore.state.boxes import Box, whole
from tierstore.state.exchange.exchange import Exchange
from tierstore.state.reading import Fill

TINY = 64 << 10
"""Memory for an exchange, in bytes, that makes it take several rounds."""


def wish(reader: MemoryReader, name: str, box: Box | None = None, dtype: torch.dtype | None = None, strided: bool = False) -> Fill:
    entry = reader.index.find(name)
    box = whole(entry.shape) if box is None else box
    shape = tuple(len(r) for r in box)
    target = torch.zeros(shape, dtype=dtype or getattr(torch, entry.dtype))
    if strided and len(shape) > 1:
        target = torch.zeros((*shape[:-2], shape[-1], shape[-2]), dtype=target.dtype).transpose(-1, -2)
    return Fill(entry=entry, box=box, target=target)


def load(rank: int, reader: MemoryReader, fills: list[Fill], *, budget: int = TINY) -> None:
    with Exchange(Agreement(deadline_s=60), what="the load of step 1", budget_nbytes=budget) as exchange:
        exchange.fill(reader, run, fills)


def check(fills: list[Fill], tensors: dict[str, torch.Tensor]) -> None:
    for fill in fills:
        wanted = tensors[fill.entry.name]
        for axis, r in enumerate(fill.box):
            wanted = wanted.index_select(axis, torch.tensor(list(r), dtype=torch.int64))
        assert torch.equal(fill.target, wanted.to(fill.target.dtype)), fill.entry.name


def part(shape: tuple[int, ...], axis: int, rank: int, world_size: int) -> Box:
    """The `rank`-th of `world_size` parts along an axis."""
    axis = min(axis, len(shape) - 1)
    return tuple(
        range(rank * size // world_size, (rank + 1) * size // world_size) if at == axis else range(size) for at, size in enumerate(shape)
    )


def wishes(kind: str, reader: MemoryReader, rank: int, world_size: int) -> list[Fill]:
    names = reader.index.names()
    shapes = {name: reader.index.shape(name) for name in names}
    if kind == "replicated" or (kind == "mixed" and rank == 0):
        return [wish(reader, name) for name in names]
    if kind == "mixed" and rank == world_size - 1:
        return []
    if kind == "cast":
        return [wish(reader, name, dtype=torch.float64, strided=True) for name in names]
    if kind == "hsdp":
        return [wish(reader, name, part(shapes[name], 0, rank % 2, 2)) for name in names]
    return [wish(reader, name, part(shapes[name], 1 if kind == "columns" else 0, rank, world_size)) for name in names]


def loads(rank: int, world_size: int, folder: Path, kind: str, budget: int) -> Any:
    tensors = truth()
    reader = MemoryReader(tensors, savers=3)
    fills = wishes(kind, reader, rank, world_size)
    load(rank, reader, fills, budget=budget)
    check(fills, tensors)
    blocks = sum(-(-len(data) // 4096) for data in reader.files.values())
    return [[[file, block, count] for (file, block), count in reader.blocks.items()], blocks, reader.most_nbytes]


@pytest.mark.parametrize("budget", [TINY, 256 << 20], ids=["many-rounds", "one-round"])
@pytest.mark.parametrize("kind", ["replicated", "columns", "rows", "hsdp", "mixed", "cast"])
def test_each_block_is_read_by_one_rank_only_and_all_have_the_truth(tmp_path: Path, kind: str, budget: int) -> None:
    found = run_ranks(4, loads, tmp_path, kind=kind, budget=budget)
    read: Counter[tuple[str, int]] = Counter()
    for blocks, _, most in found:
        read.update({(file, block): count for file, block, count in blocks})
        assert kind != "replicated" or most <= budget // 3
    assert len(read) == found[0][1]
    assert set(read.values()) == {1}


def loads_in_pairs(rank: int, world_size: int, folder: Path, times: int) -> Any:
    """Ranks 0 and 2 want one file, ranks 1 and 3 the other."""
    tensors = truth()
    names = [name for name, value in tensors.items() if value.dim() and value.shape[0] > 1]
    for _ in range(times):
        reader = MemoryReader(tensors, savers=2)
        fills = [wish(reader, name, part(reader.index.shape(name), 0, rank % 2, 2)) for name in names]
        load(rank, reader, fills)
        check(fills, tensors)
    return sum(reader.blocks.values()), sum(-(-len(data) // 4096) for data in reader.files.values())


def test_pairs_of_replicas_exchange_at_the_same_time(tmp_path: Path) -> None:
    found = run_ranks(4, loads_in_pairs, tmp_path, times=5)
    assert sum(read for read, _ in found) == found[0][1]


def loads_at_random(rank: int, world_size: int, folder: Path, seeds: int) -> Any:
    tensors = truth()
    names = [shard_name(n, 3) for n in range(3)]
    for seed in range(seeds):
        chance = random.Random(seed * 100 + rank)
        reader = MemoryReader(tensors, savers=3, on_node=[n for n in names if chance.random() < 0.2])
        fills = []
        for _ in range(chance.randrange(12)):
            name = chance.choice(list(tensors))
            box = []
            for size in tensors[name].shape:
                ends = sorted(chance.choices(range(size + 1), k=2))
                box.append(range(ends[0], ends[1], chance.choice([1, 1, 1, 3])))
            fills.append(wish(reader, name, tuple(box), chance.choice([None, torch.float64]), chance.random() < 0.3))
        load(rank, reader, fills, budget=[1, TINY, 1 << 20][seed % 3])
        check(fills, tensors)
    return seeds


def test_whatever_ranks_wish_for_and_have_on_their_nodes_they_get_the_truth(tmp_path: Path, long_run: bool) -> None:
    seeds = 500 if long_run else 20
    assert run_ranks(4, loads_at_random, tmp_path, seeds=seeds) == [seeds] * 4


def reads_for_another(rank: int, world_size: int, folder: Path, broken: str) -> Any:
    """Rank 1 has all files on its node and wants none of them; what it reads for rank 0 fails."""
    tensors = truth()
    files = [shard_name(n, 2) for n in range(2)]
    trouble: dict[str, Any] = {"damaged": [(files[0], 3), (files[1], 0)]} if broken == "damaged" else {"down": True}
    reader = MemoryReader(tensors, on_node=files, **trouble) if rank == 1 else MemoryReader(tensors)
    fills = [wish(reader, name) for name in reader.index.names()] if rank == 0 else []
    load(rank, reader, fills)
    check(fills, tensors)
    return sum(reader.blocks.values()), sum(-(-len(data) // 4096) for data in reader.files.values())


def test_what_a_rank_can_not_read_for_another_that_one_reads_itself(tmp_path: Path) -> None:
    (read, blocks), _ = run_ranks(2, reads_for_another, tmp_path, broken="damaged")
    assert 2 <= read < blocks
    (read, blocks), _ = run_ranks(2, reads_for_another, tmp_path, broken="down")
    assert read == blocks


def meets_damage(rank: int, world_size: int, folder: Path, failing: str) -> Any:
    """All ranks want all; rank 1 meets something."""
    tensors = truth()
    damaged = [(shard_name(0, 2), 3)] if failing == "damaged" or (failing == "one" and rank == 1) else []
    reader = MemoryReader(tensors, damaged=damaged, down=failing == "down" and rank == 1)
    try:
        load(rank, reader, [wish(reader, name) for name in reader.index.names()])
    except TierStoreError as error:
        return [type(error).__name__, error.message]
    return None


@pytest.mark.parametrize(("failing", "kinds"), [("damaged", {"IntegrityError"}), ("down", {"TemporaryError", "RankError"})])
def test_what_is_good_nowhere_is_told_on_every_rank(tmp_path: Path, failing: str, kinds: set[str]) -> None:
    found = run_ranks(3, meets_damage, tmp_path, failing=failing)
    assert {kind for kind, _ in found} == kinds
    if failing == "damaged":
        assert all("block 3 of shard-00000-of-00002" in message for _, message in found)
    else:
        assert found[1][0] == "TemporaryError"
        assert all("rank 1 of 3 failed: TemporaryError: no tier answers" in found[rank][1] for rank in (0, 2))


def dies(rank: int, world_size: int, folder: Path, when: str) -> Any:
    tensors = truth()
    died = folder / "died"
    reader = MemoryReader(tensors, dies=(2, lambda: die(died)) if rank == 1 and when == "between" else None)
    agreement = Agreement(deadline_s=60)
    agreement.share("all are there", b"")
    agreement.deadline_s = 2
    wait_only_for(agreement, {1}, died)
    if rank == 1 and when == "before":
        die(died)
    try:
        with Exchange(agreement, what="the load of step 1", budget_nbytes=TINY) as exchange:
            exchange.fill(reader, run, [wish(reader, name) for name in reader.index.names()])
    except TierStoreError as error:
        return [type(error).__name__, error.context.get("ranks")]
    return None


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_rank_that_dies_is_named_on_every_other(tmp_path: Path, when: str) -> None:
    found = run_ranks(4, dies, tmp_path, when=when, may_die={1: -9})
    assert [found[rank] for rank in (0, 2, 3)] == [["DeadlineError", [1]]] * 3


def differs(rank: int, world_size: int, folder: Path, how: str) -> Any:
    reader = MemoryReader(truth())
    if rank == 1 and how == "checkpoint":
        reader.identity = "run/step-0000000002 (sha256:1)"
    agreement = Agreement(deadline_s=60)
    try:
        with Exchange(agreement, what="the load of step 1") as exchange:
            if rank == 1 and how == "error":
                raise UsageError("this rank wants the impossible", hint="this is a test")
            if rank == 1 and how == "damage":
                raise IncompleteError("rows of this rank's are stored nowhere", hint="this is a test")
            exchange.fill(reader, run, [wish(reader, name) for name in reader.index.names()])
    except (RankError, UsageError, IntegrityError) as error:
        return [type(error).__name__, error.message, agreement.share("and then", b"together again").decode()]
    return None


def test_ranks_that_opened_different_checkpoints_refuse(tmp_path: Path) -> None:
    message = "the load of step 1: rank 0 opened run/step-0000000001 (sha256:0), rank 1 opened run/step-0000000002 (sha256:1)"
    assert run_ranks(3, differs, tmp_path, how="checkpoint") == [["RankError", message, "together again"]] * 3


def test_a_rank_that_fails_before_the_exchange_says_so(tmp_path: Path) -> None:
    found = run_ranks(3, differs, tmp_path, how="error")
    assert [kind for kind, _, _ in found] == ["RankError", "UsageError", "RankError"]
    assert all("this rank wants the impossible" in message and after == "together again" for _, message, after in found)


def test_damage_that_one_rank_meets_before_the_exchange_is_damage_to_all(tmp_path: Path) -> None:
    """So that `resume(fallback=True)` goes on with an older step on every rank."""
    found = run_ranks(3, differs, tmp_path, how="damage")
    assert [kind for kind, _, _ in found] == ["IntegrityError", "IncompleteError", "IntegrityError"]
    assert all("rows of this rank's are stored nowhere" in message and after == "together again" for _, message, after in found)


@pytest.mark.parametrize("hydrating", [False, True])
def test_ranks_that_have_everything_wait_for_those_that_copy_it_to_their_node(hydrating: bool) -> None:
    waited: list[float] = []

    class Alone(Agreement):
        """What an exchange asks of an agreement, without a process group."""

        def __init__(self) -> None:
            self.rank, self.deadline_s = 0, 60.0

        def agree(self, what: str, value: bytes, combine: Any) -> bytes:
            waited.append(self.deadline_s)
            raise RankError("far enough", ranks=[1])

    agreement = Alone()
    reader = MemoryReader(truth())
    reader.hydrating = object() if hydrating else None
    nbytes = sum(len(data) for data in reader.files.values())
    with pytest.raises(RankError, match="far enough"), Exchange(agreement, what="the load of step 1") as exchange:
        exchange.fill(reader, run, [wish(reader, name) for name in reader.index.names()])
    assert waited == [60 + (nbytes / (4 << 20) if hydrating else 0)]
    assert agreement.deadline_s == 60
