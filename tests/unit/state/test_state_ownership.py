"""Who writes what, as arithmetic: balance, conflicts, and thousands of ranks; and fingerprints that tell any two values apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tierstore.errors import UsageError
from tierstore.state.fingerprint import fingerprints, mixed
from tierstore.state.flatten import Leaf
from tierstore.state.ownership import Agreed, Ownership
from tierstore.state.sharded import Piece, Spread
from tierstore.state.units import Unit, merge, signature_of, table_of

EMPTY = torch.empty(0)


def unit(name: str, nbytes: int = 4, spread: Spread | None = None, others: tuple[str, ...] = (), form: str = "f") -> Unit:
    piece = Piece(tensor=EMPTY, offsets=(0,))
    leaf = Leaf(name=name, dtype="float32", global_shape=(nbytes // 4,), pieces=(piece,), spread=spread)
    return Unit(leaf=leaf, names=(name, *others), form=form, nbytes=nbytes)


def agreed_of(units: list[list[Unit]]) -> list[Agreed]:
    members = range(len(units))
    tables = [table_of(own, members) for own in units]
    firsts: dict[bytes, int] = {}
    speakers = [firsts.setdefault(signature_of(table), rank) for rank, table in enumerate(tables)]
    merged = merge({rank: tables[rank] for rank in set(speakers)}, speakers)
    return [Agreed(merged, rank=rank, world_size=len(units)) for rank in members]


def owned(units: list[list[Unit]], values: list[dict[str, bytes]] | None = None) -> list[Ownership]:
    """The conversation of `state.ranks`, without ranks. `values`: fingerprints by name, by default all the same."""
    agreed = agreed_of(units)
    prints = [
        {number: (values[rank][u.names[0]] if values else b"") .ljust(16) for number, u in each.compared(units[rank]).items()}
        for rank, each in enumerate(agreed)
    ]  # fmt: skip
    buckets = agreed[0].differing([each.digests(prints[rank]) for rank, each in enumerate(agreed)])
    apart = agreed[0].apart([each.details(prints[rank], buckets) for rank, each in enumerate(agreed)], buckets) if buckets else {}
    return [each.ownership(units[rank], apart, range(len(units))) for rank, each in enumerate(agreed)]


def test_replicas_go_to_the_least_loaded_the_largest_first() -> None:
    units = [unit(f"w{n}", n) for n in (100, 90, 80, 30, 20, 10)]
    found = owned([units] * 3)
    loads = [sum(int(name[1:]) for name in own.written) for own in found]
    assert sorted(name for own in found for name in own.written) == sorted(u.names[0] for u in units)
    assert sorted(loads) == [110, 110, 110]
    assert all(not own.names for own in found)


def test_hsdp_is_balanced_over_each_set_of_replicas_and_norms_over_all() -> None:
    hsdp = Spread(ranks=tuple(range(8)), shape=(2, 4), sharded=(False, True), layout="hsdp")
    flat = Spread(ranks=tuple(range(8)), shape=(8,), sharded=(False,), layout="norm")
    units = [unit(f"p{i}", 1000 - i, hsdp) for i in range(20)] + [unit(f"n{i}", 10, flat) for i in range(40)]
    found = owned([units] * 8)
    for i in range(20):
        assert [sum(f"p{i}" in found[r].written for r in (n, n + 4)) for n in range(4)] == [1] * 4
    assert sum(len([n for n in own.written if n[0] == "n"]) for own in found) == 40
    loads = [sum(u.nbytes for u in units if u.names[0] in own.written) for own in found]
    assert max(loads) - min(loads) <= 20


def test_values_that_differ_are_stored_once_each_under_their_lowest_rank() -> None:
    units = [[unit("w"), unit("x")] for _ in range(4)]
    values = [{"w": v, "x": b"x"} for v in (b"1", b"2", b"1", b"2")]
    found = owned(units, values)
    assert [own.names.get("w", "w") for own in found] == ["w", "w@rank1", "w", "w@rank1"]
    assert [("w" in own.written) for own in found] == [True, True, False, False]
    assert sum("x" in own.written for own in found) == 1


def test_units_that_share_a_name_but_not_their_memory_never_share_a_place() -> None:
    units = [[unit("a", others=("b",), form="ab")], [unit("a"), unit("b")], [unit("b", form="other")], [unit("a"), unit("b")]]
    found = owned(units)
    names = [sorted(own.names.get(n, n) for u in units[r] for n in u.names) for r, own in enumerate(found)]
    assert names == [["a", "b"], ["a@rank1", "b@rank1"], ["b@rank2"], ["a@rank1", "b@rank1"]]
    written = [own.names.get(n, n) for own in found for n in own.written]
    assert sorted(written) == ["a", "a@rank1", "b@rank1", "b@rank2"]


def test_two_meshes_with_the_same_tensor_store_it_once_and_with_others_twice() -> None:
    spreads = [Spread(ranks=ranks, shape=(2,), sharded=(True,), layout="tp") for ranks in ((0, 1), (2, 3))]
    units = [[unit("w", spread=spreads[rank // 2])] for rank in range(4)]
    same = owned(units, [{"w": v} for v in (b"l", b"r", b"l", b"r")])
    assert sorted(len(own.written) for own in same) == [0, 0, 1, 1]
    assert {len(same[0].written) + len(same[2].written), len(same[1].written) + len(same[3].written)} == {1}
    other = owned(units, [{"w": v} for v in (b"l", b"r", b"l", b"R")])
    assert [own.names.get("w", "w") for own in other] == ["w", "w", "w@rank2", "w@rank2"]
    assert all(own.written for own in other)


def test_what_can_not_be_whole_is_refused_by_name() -> None:
    spread = Spread(ranks=(0, 1), shape=(2,), sharded=(True,), layout="s")
    with pytest.raises(UsageError, match="'w' is spread over ranks that do not have it in their state, or have it in another form: 1"):
        agreed_of([[unit("w", spread=spread)], [unit("v")]])
    with pytest.raises(UsageError, match="'w' is spread over rank 5 too, which is not among the 2 that save together"):
        table_of([unit("w", spread=Spread(ranks=(0, 5), shape=(2,), sharded=(True,), layout="s"))], range(2))
    with pytest.raises(UsageError, match="'w@rank1', is another tensor's own"):
        owned([[unit("w"), unit("w@rank1")]] * 2, [{"w": b"1", "w@rank1": b"x"}, {"w": b"2", "w@rank1": b"x"}])


def test_2048_ranks_with_1200_tensors_agree_on_a_few_messages() -> None:
    """HSDP 16 × 128 with replicated norms and plain counters: one table speaks for all, and a rank has decided in moments."""
    world = 2048
    hsdp = Spread(ranks=tuple(range(world)), shape=(16, 128), sharded=(False, True), layout="hsdp")
    flat = Spread(ranks=hsdp.ranks, shape=(world,), sharded=(False,), layout="flat")
    units = [unit(f"layers.{i}.w", 4096, hsdp) for i in range(800)]
    units += [unit(f"layers.{i}.norm", 64, flat) for i in range(200)] + [unit(f"optim.{i}.step", 4) for i in range(200)]
    table = table_of(units, range(world))
    merged = merge({0: table}, [0] * world)
    agreed = [Agreed(merged, rank=rank, world_size=world) for rank in (0, 1, 2047)]
    assert len(table) < 200_000
    assert len(merged) < 250_000
    prints = dict.fromkeys(agreed[0].compared(units), b"1" * 16)
    digests = agreed[0].digests(prints)
    assert len(digests) <= 64 * 16
    assert agreed[0].differing([digests] * world) == []
    mine = [each.ownership(units, {}, range(world)).written for each in agreed]
    # Each rank writes its share: 800 * 128 parts and 400 others over 2048 ranks.
    assert all(45 <= len(m) <= 55 for m in mine)


# ---- fingerprints


def test_any_change_of_a_bit_or_a_place_changes_the_fingerprint() -> None:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(4099, generator=generator)
    tensors = [base]
    for place, bit in ((0, 0), (4098, 31), (17, 31), (18, 31), (2000, 7)):
        changed = base.clone()
        changed.view(torch.int32)[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
        tensors.append(changed)
    both = base.clone()
    both[[17, 18]] *= -1  # two signs: what a plain sum of products would not notice
    swapped = base.clone()
    swapped[[100, 102]] = base[[102, 100]]
    tensors += [both, swapped]
    for make in (lambda t: fingerprints([t])[0], lambda t: mixed(t.view(torch.uint8))):
        assert len({make(t) for t in tensors}) == len(tensors)
        assert make(base) == make(base.clone())


def test_a_device_s_fingerprint_needs_no_alignment() -> None:
    values = torch.arange(1000, dtype=torch.uint8)
    for begin, end in ((0, 1000), (1, 9), (3, 1000), (5, 5), (7, 10)):
        assert mixed(values[begin:end]) == mixed(values[begin:end].clone())
        assert begin == end or mixed(values[begin:end]) != mixed(values[begin : end - 1])


def test_layout_threads_and_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.state.fingerprint._PIECE_NBYTES", 4096)
    values = [torch.arange(5000.0).view(50, 100), torch.ones(3), torch.tensor(True), torch.arange(24, dtype=torch.int8)]
    strided: list[Any] = [values[0].t().contiguous().t(), *values[1:]]
    assert not strided[0].is_contiguous()
    assert fingerprints(values, threads=1) == fingerprints(strided, threads=3)
    assert fingerprints([torch.tensor(3.0).to(torch.bfloat16)]) != fingerprints([torch.tensor(4.0).to(torch.bfloat16)])
    assert fingerprints([]) == []
