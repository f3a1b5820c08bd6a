"""The short way for a tensor in one piece is taken for exactly that; whatever only looks like it is read or refused as ever."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tierstore.errors import IncompleteError
from tierstore.format.index import Extent, TensorEntry
from tierstore.state.bits import memory_of
from tierstore.state.collecting import collector_paused
from tierstore.state.flatten import flatten
from tierstore.state.paths import name_of
from tierstore.state.reading import Fill, wants_of
from tierstore.tiers.reads import Handover, Want

BLOCK = 4096


def entry_of(*extents: tuple[int, int], rows: int = 8) -> TensorEntry:
    """A tensor of 8 rows of 2 of which these rows are stored, each extent in a file of its own."""
    made = tuple(
        Extent(file=f"f{n}", begin=0, end=(end - begin) * 8, offsets=(begin, 0), sizes=(end - begin, 2))
        for n, (begin, end) in enumerate(extents)
    )
    return TensorEntry(name="t", dtype="float32", shape=(rows, 2), extents=made)


def test_a_part_as_long_as_what_is_wanted_but_elsewhere_is_not_taken_for_it() -> None:
    """It was: where a rank's part was missing, rows 0 to 3 were filled with rows 2 to 5 instead of an error."""
    fill = Fill(entry=entry_of((2, 6)), box=(range(4), range(2)), target=torch.zeros(4, 2))
    with pytest.raises(IncompleteError, match="4 of the 8 elements"):
        wants_of([fill], BLOCK)


def test_a_whole_tensor_is_one_want_of_its_own_memory() -> None:
    target = torch.zeros(8, 2)
    (want,) = wants_of([Fill(entry=entry_of((0, 8)), box=(range(8), range(2)), target=target)], BLOCK)
    assert isinstance(want, Want)
    want.buffer[:4] = torch.tensor(1.5).numpy().tobytes()
    assert target[0, 0] == 1.5


@pytest.mark.parametrize("target", [torch.zeros(2, 8).t(), torch.zeros(8, 2, dtype=torch.float64), torch.zeros(8, 2, dtype=torch.int32)])
def test_another_layout_or_dtype_is_handed_over(target: torch.Tensor) -> None:
    (want,) = wants_of([Fill(entry=entry_of((0, 8)), box=(range(8), range(2)), target=target)], BLOCK)
    assert isinstance(want, Handover)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64, torch.complex128]
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 2)])
def test_memory_of_a_tensor_is_its_own_whatever_its_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    memory = memory_of(tensor)
    assert (memory.nbytes, memory.format, memory.readonly) == (tensor.nbytes, "B", False)
    memory[:] = bytes([1]) * memory.nbytes
    assert bool((tensor != 0).all())
    assert memory_of(torch.nn.Parameter(torch.ones(2))).nbytes == 8


def test_a_tensor_with_lazy_bits_is_resolved_and_one_without_a_gradient_is_taken_as_it_is() -> None:
    plain, lazy = torch.ones(4), torch.tensor([1 + 2j]).conj().imag
    assert lazy.is_neg()
    flat = flatten({"plain": plain, "lazy": lazy, "parameter": torch.nn.Parameter(torch.ones(2))})
    by_name = {leaf.name: leaf.pieces[0].tensor for leaf in flat.leaves}
    assert by_name["plain"] is plain
    assert not by_name["lazy"].is_neg()
    assert by_name["lazy"].tolist() == [-2.0]
    assert type(by_name["parameter"]) is torch.Tensor
    assert not by_name["parameter"].requires_grad


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ((), "state"),
        (("a", "b"), "a.b"),
        (("a", 1), "a.1"),
        (("",), "''"),
        (("a", "", "b"), "a.''.b"),
        (("a\n",), "a\\n"),
        (("a.b",), "a.b"),
    ],
)
def test_a_place_gives_the_name_that_it_always_gave(place: tuple[str | int, ...], name: str) -> None:
    assert name_of(place) == name


def test_the_collector_goes_on_after_a_pause_and_finds_what_was_made_before() -> None:
    class Cycle:
        me: Cycle

    with collector_paused():
        lost = Cycle()
        lost.me = lost
        gone = weakref.ref(lost)
        del lost
        assert gone() is not None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert gone() is None


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with collector_paused():
            pass
        assert 0 < gc.get_freeze_count() <= before
    finally:
        gc.unfreeze()
