"""How planning grows with the number of tensors, counted in calls of Python functions: four times the tensors, four times the calls."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from tierstore.format.digest import block_count
from tierstore.format.index import FileEntry, Index, TensorEntry, build_index, decode_index, encode_index
from tierstore.format.index_table import Extent
from tierstore.format.objects import encode_objects
from tierstore.names import shard_name
from tierstore.state import flatten as flattening
from tierstore.state.codecs import default_codecs
from tierstore.state.collecting import collector_paused
from tierstore.state.differences import LoadOptions
from tierstore.state.fingerprint import fingerprints
from tierstore.state.flatten import flatten
from tierstore.state.image import ImagePool
from tierstore.state.matching import match
from tierstore.state.ownership import by_rank
from tierstore.state.reading import wants_of
from tierstore.state.stage import stage
from tierstore.state.units import table_of, units_of
from tierstore.tiers.costs import REMOTE_COST
from tierstore.tiers.reads import plan_spans

SMALL, FACTOR = 60, 4


def state_of(count: int) -> dict[str, Any]:
    return {"model": {f"layers.{i // 12}.{i % 12}.weight": torch.full((16,), float(i)) for i in range(count)}, "step": 3}


def index_of(count: int) -> Index:
    """As a save of `state_of` leaves it, read back."""
    file, start = shard_name(0, 1), 8192
    entries = [
        TensorEntry(
            name=f"model.layers.{i // 12}.{i % 12}.weight",
            dtype="float32",
            shape=(16,),
            extents=(Extent(file=file, begin=start + 64 * i, end=start + 64 * (i + 1), offsets=(0,), sizes=(16,)),),
        )
        for i in range(count)
    ]
    nbytes = start + 64 * count
    made = build_index(entries, [FileEntry(name=file, nbytes=nbytes, block_digests=bytes(32 * block_count(nbytes)))])
    return decode_index(encode_index(made, {}))[0]


def calls(work: Callable[[], Any]) -> int:
    """How many calls of Python and C functions `work` makes in this thread, without those that collecting what others left makes."""
    count = 0
    gc.collect()

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with collector_paused():
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(None)
    return count


CODECS = default_codecs()


def _flatten(count: int) -> Callable[[], Any]:
    state = state_of(count)
    return lambda: flatten(state, CODECS)


def _encode(count: int) -> Callable[[], Any]:
    flat = flatten(state_of(count), CODECS)
    return lambda: encode_objects(flat.tree(), CODECS)


def _agree(count: int) -> Callable[[], Any]:
    flat = flatten(state_of(count), CODECS)
    return lambda: (table_of(units_of(flat), [0, 1]), by_rank(flat, 1))


def _fingerprints(count: int) -> Callable[[], Any]:
    tensors = [leaf.pieces[0].tensor for leaf in flatten(state_of(count), CODECS).leaves]
    return lambda: fingerprints(tensors, threads=1)


def _stage(count: int) -> Callable[[], Any]:
    state, pool = state_of(count), ImagePool(None, max_nbytes=1 << 24)
    stage(state, pool=pool, threads=1).release()
    return lambda: stage(state, pool=pool, threads=1).release()


def _load(count: int) -> Callable[[], Any]:
    state, index = state_of(count), index_of(count)
    tree = flatten(state, CODECS).tree()

    def plan() -> None:
        wants = wants_of(match(state, tree, index, LoadOptions()).fills, index.block_nbytes)
        assert len(wants) == count
        plan_spans(wants, file_nbytes=index.file_nbytes, align=index.block_nbytes, cost=REMOTE_COST)

    return plan


PLANS: dict[str, tuple[Callable[[int], Callable[[], Any]], float]] = {
    "flatten": (_flatten, 60),
    "encode objects": (_encode, 30),
    "tables of an agreement": (_agree, 25),
    "fingerprints": (_fingerprints, 20),
    "stage again": (_stage, 110),
    "plan a load": (_load, 160),
}
"""What is planned, and the most calls it may make for each tensor."""


@pytest.mark.parametrize("name", PLANS)
def test_planning_grows_as_the_tensors_do(name: str) -> None:
    make, most = PLANS[name]
    few, many = make(SMALL), make(SMALL * FACTOR)
    few(), many()  # what is made at the first call
    small, large = calls(few), calls(many)
    assert large / small <= FACTOR + 0.5
    assert (large - small) / (SMALL * (FACTOR - 1)) <= most


def test_storages_with_one_tensor_are_not_compared_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    real = flattening._share_storage
    monkeypatch.setattr(flattening, "_share_storage", lambda slots: (compared.append(len(slots)), real(slots)))
    tied = torch.zeros(8)
    flat = flatten({**state_of(50), "tied": tied, "again": tied, "part": tied[2:4]})
    assert compared == [3]
    assert (len(flat.leaves), len(flat.aliases), len(flat.views)) == (51, 1, 1)


def test_an_index_that_is_asked_for_most_of_its_rows_answers_without_bisecting(monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of(400)
    names = index.names()
    looked: list[int] = []
    real = Index.raw_name
    monkeypatch.setattr(Index, "raw_name", lambda self, row: (looked.append(row), real(self, row))[1])
    found = [index.find(name, (range(16),)) for name in names]
    assert len(looked) < 400 / 8 * 12, "an eighth of the questions is bisected, in a dozen looks each"
    assert [entry.name for entry in found] == names
    fresh = index_of(400)
    assert found == [fresh.find(name) for name in names[:3]] + found[3:]
    assert index.find(names[7], (range(16, 20),)).extents == ()
    assert "nonsense" not in index


def test_a_box_is_not_walked_through_row_by_row() -> None:
    file, rows = shard_name(0, 1), 10_000_000
    extent = Extent(file=file, begin=4096, end=4096 + rows, offsets=(0, 0), sizes=(rows, 1))
    entry = TensorEntry(name="w", dtype="uint8", shape=(rows, 1), extents=(extent,))
    index = build_index([entry], [FileEntry(name=file, nbytes=4096 + rows, block_digests=bytes(32 * block_count(4096 + rows)))])
    calls_made = calls(lambda: index.find("w", (range(rows), range(1))))

    class Counted:
        """A range that notes how often it is looked at."""

        looks = 0

        def __init__(self, inner: range) -> None:
            self.inner = inner

        def __len__(self) -> int:
            return len(self.inner)

        def __getitem__(self, at: int) -> int:
            Counted.looks += 1
            return self.inner[at]

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("walked through")

    box: Any = (Counted(range(rows)), Counted(range(1)))
    assert index.find("w", box) == entry
    assert Counted.looks <= 16
    assert calls_made < 200


def test_the_collector_is_as_it_was_after_a_plan() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused():
        1 / 0  # noqa: B018
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled(), "a program that collects by itself goes on so"
    finally:
        gc.enable()
