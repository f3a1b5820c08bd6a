"""What goes in comes out: values, types, dtypes, names, ties (CASES: tensors and dtypes 53 to 56, objects 71, loading 9, 10, 29)."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from state_kit import round_trip, run, staged

from tierstore.format.dtypes import DTYPES
from tierstore.state.bits import empty, memory_of, torch_dtype
from tierstore.state.codecs import default_codecs
from tierstore.state.load import load_state
from tierstore.testing.equality import assert_same_state
from tierstore.testing.strategies import states, tensors

SHAPES = [(), (1,), (7,), (0,), (0, 3), (3, 0, 2), (4, 5), (2, 3, 4)]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of arbitrary bits."""
    made = empty(shape, dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, size=made.nbytes, dtype=np.uint8)
    memory_of(made)[:] = raw.data
    return made


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_every_dtype_comes_back_bit_for_bit_in_every_shape(name: str) -> None:
    dtype = torch_dtype(name)
    state = {str(shape): filled(shape, dtype, seed) for seed, shape in enumerate(SHAPES)}
    state["strided"] = filled((6, 8), dtype).t()[1::2]
    assert_same_state(round_trip(state), state)


@hypothesis.given(states())
def test_any_nesting_comes_back_unchanged(state: dict[Any, Any]) -> None:
    assert_same_state(round_trip(state), state)


@hypothesis.given(st.lists(tensors(), max_size=4))
def test_loading_into_other_tensors_gives_the_same_values(values: list[torch.Tensor]) -> None:
    into = [empty(tuple(value.shape), value.dtype) for value in values]
    load_state(staged({"values": values}), run, into={"values": into})
    assert_same_state(into, [value.detach() for value in values])


@pytest.mark.parametrize("state", [{}, {"a": {}, "b": [], "c": ()}, [], (), {"step": 3}, {"empty": torch.empty(0)}])
def test_states_without_values_come_back(state: Any) -> None:
    assert_same_state(round_trip(state), state)


def test_a_state_may_be_one_tensor() -> None:
    assert staged(torch.ones(3)).index.names() == ["state"]
    assert_same_state(round_trip(torch.ones(3)), torch.ones(3))


def test_module_and_optimizer_states_come_back_unchanged_types_included() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    loaded = round_trip(state)
    assert_same_state(loaded, state)
    assert loaded["model"]._metadata == state["model"]._metadata
    assert list(loaded["optim"]["state"]) == list(range(6))
    assert loaded["optim"]["state"][0]["step"].shape == ()
    torch.optim.AdamW(model.parameters(), amsgrad=True).load_state_dict(loaded["optim"])
    model.load_state_dict(loaded["model"])


def test_parameters_and_leaves_keep_their_kind() -> None:
    state = {
        "trained": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
        "result": torch.nn.Parameter(torch.ones(2)) * 2,
        "counter": torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
    }
    loaded = round_trip(state)
    assert_same_state(loaded, {**state, "result": state["result"].detach().requires_grad_()})
    assert loaded["result"].is_leaf


def test_random_number_generators_go_on_where_they_were() -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    python, numpy_new, numpy_old = random.Random(3), np.random.default_rng(4), np.random.RandomState(5)
    python.gauss(0, 1)
    numpy_old.normal()
    state = {
        "torch": torch.get_rng_state(),
        "cuda": [torch.get_rng_state(), torch.arange(16, dtype=torch.uint8)],
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "objects": [generator, python, numpy_new, numpy_old],
        "philox": np.random.Generator(np.random.Philox(7)),
    }
    loaded = round_trip(state)
    assert_same_state(loaded, state)
    assert torch.equal(torch.rand(4, generator=loaded["objects"][0]), torch.rand(4, generator=generator))
    assert loaded["objects"][1].gauss(0, 1) == python.gauss(0, 1)
    assert loaded["objects"][2].random() == numpy_new.random()
    assert loaded["objects"][3].normal() == numpy_old.normal()
    random.setstate(loaded["python"])
    np.random.set_state(loaded["numpy"])
    torch.set_rng_state(loaded["torch"])


def test_torchs_small_types_come_back() -> None:
    state = {
        "dtype": torch.float8_e4m3fn,
        "device": torch.device("cuda", 3),
        "size": torch.Size([1, 2]),
        "layout": torch.sparse_csr,
        "format": torch.channels_last,
        "version": torch.__version__,
    }
    assert_same_state(round_trip(state), state)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_tensors_come_back_as_their_components() -> None:
    dense = torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 3.0, 0.0]])
    twice = torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 4))
    state = {
        "coo": dense.to_sparse(),
        "uncoalesced": twice,
        "empty": torch.sparse_coo_tensor(size=(3, 4)),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
        "leaf": dense.to_sparse().requires_grad_(),
        "hybrid": torch.randn(3, 2).to_sparse(1),
    }
    reader = staged(state)
    assert {"coo.indices", "coo.values", "csr.crow_indices", "bsc.row_indices"} <= set(reader.index.names())
    assert_same_state(load_state(reader, run), state)


def test_conjugate_and_negative_views_are_stored_by_value() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conj": base.conj(), "neg": base.conj().imag, "both": torch.view_as_real(base.conj().resolve_conj())}
    loaded = round_trip(state)
    assert_same_state(loaded, {"conj": torch.tensor([1 - 2j, 3 + 4j]), "neg": torch.tensor([-2.0, 4.0]), "both": state["both"]})


# ---- memory is stored once


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64))
    state = {"embed": weight, "head": weight, "sd": {"w": weight.detach(), "row": weight.detach()[2:3]}}
    reader = staged(state)
    assert reader.index.nbytes < 1.5 * weight.nbytes
    assert reader.index.find("head").extents == reader.index.find("embed").extents
    loaded = load_state(reader, run)
    assert_same_state(loaded, state)
    assert loaded["embed"] is loaded["head"]
    assert loaded["sd"]["w"].data_ptr() == loaded["embed"].data_ptr()
    with torch.no_grad():
        loaded["embed"][2, 0] = 9.0
    assert loaded["sd"]["row"][0, 0] == 9.0


def test_contained_views_are_stored_within_what_contains_them() -> None:
    flat = torch.arange(100.0)
    state = {"tail": flat[60:], "grid": flat[:60].view(6, 10), "flat": flat, "bytes": flat.view(torch.uint8)[8:16], "again": flat[60:]}
    reader = staged(state)
    assert reader.index.nbytes < 5000 + flat.nbytes
    whole = reader.index.find("flat").extents[0]
    assert reader.index.find("tail").extents[0].begin == whole.begin + 240
    loaded = load_state(reader, run)
    assert_same_state(loaded, state)
    assert len({t.untyped_storage().data_ptr() for t in loaded.values()}) == 1
    assert loaded["again"] is loaded["tail"]


def test_partly_overlapping_and_strided_views_are_copied_whole() -> None:
    flat = torch.arange(100.0)
    state = {"a": flat[:60], "b": flat[40:], "every": flat[::2], "grid": flat.view(10, 10).t(), "wide": flat[:1].expand(50)}
    loaded = round_trip(state)
    assert_same_state(loaded, {name: value.contiguous() for name, value in state.items()})


def test_a_small_view_stores_nothing_of_its_big_storage() -> None:
    reader = staged({"view": torch.zeros(10**6)[:4], "column": torch.zeros(1000, 1000)[:, 3]})
    header = 4096
    assert reader.index.nbytes <= header + 16 + 4000


def test_a_misaligned_view_of_another_dtype_is_copied() -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    state = {"raw": raw[2:], "floats": raw[4:12].view(torch.float32)}
    assert_same_state(round_trip(state), state)


def test_every_loaded_tensor_owns_its_memory() -> None:
    loaded = round_trip({str(i): torch.full((10,), float(i)) for i in range(20)})
    assert len({t.untyped_storage().data_ptr() for t in loaded.values()}) == 20
    assert all(t.untyped_storage().nbytes() == 40 for t in loaded.values())


# ---- names


def test_names_are_key_paths_and_collisions_get_their_own() -> None:
    one = torch.ones(1)
    state = {"a.b": one * 1, "a": {"b": one * 2}, 1: one * 3, "1": one * 4, (2, "x"): one * 5, "l": [one * 6, (one * 7,)], "": one * 8}
    names = staged(state).index.names()
    assert set(names) == {"a.b", "a.b#2", "1", "1#2", "(2, 'x')", "l.0", "l.1.0", "''"}
    assert_same_state(round_trip(state), state)


def test_names_do_not_depend_on_the_order_of_keys() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    for state in ({"x.y": a, "x": {"y": b}}, {"x": {"y": b}, "x.y": a}):
        reader = staged(state)
        loaded = load_state(reader, run, names=["x.y"])
        assert torch.equal(loaded["x.y"], b)


def test_a_suffix_never_meets_a_name_that_is_taken() -> None:
    one = torch.ones(1)
    state = {"a": {"b": one}, "a.b": one * 2, "a.b#2": one * 3, "__metadata__": one * 4}
    assert len(set(staged(state).index.names())) == 4
    assert_same_state(round_trip(state), state)


def test_control_characters_in_keys_are_escaped_in_names() -> None:
    state = {"tab\there": torch.ones(1), "nul\0": torch.ones(2), "\ud800": torch.ones(3), "naïve→": torch.ones(4)}
    assert set(staged(state).index.names()) == {"tab\\there", "nul\\x00", "\\ud800", "naïve→"}
    assert_same_state(round_trip(state), state)


# ---- codecs


class Averages:
    def __init__(self, shadow: dict[str, torch.Tensor], decay: float) -> None:
        self.shadow, self.decay = shadow, decay


def test_a_registered_type_may_hold_tensors() -> None:
    codecs = default_codecs()
    codecs.register(Averages, "test.Averages", lambda a: {"shadow": a.shadow, "decay": a.decay}, lambda v: Averages(**v))
    weight = torch.randn(3)
    state = {"ema": Averages({"w": weight}, 0.9), "w": weight}
    reader = staged(state, codecs=codecs)
    assert set(reader.index.names()) == {"ema.shadow.w", "w"}
    loaded = load_state(reader, run, codecs=codecs)
    assert (type(loaded["ema"]), loaded["ema"].decay) == (Averages, 0.9)
    assert loaded["ema"].shadow["w"] is loaded["w"]


def test_ordered_dicts_keep_their_type_and_their_metadata_may_be_absent() -> None:
    state = OrderedDict(b=torch.ones(1), a=OrderedDict())
    loaded = round_trip(state)
    assert_same_state(loaded, state)
    assert not hasattr(loaded, "_metadata")
