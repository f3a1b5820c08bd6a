"""Sparse tensors: stored by their components, loaded as they were, filled in place, refused where torch itself would not take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state_kit import ImageReader, run, staged

from tierstore.errors import FormatError, NotFoundError, StateMismatchError, UnsupportedTypeError
from tierstore.format.objects import Opaque, TensorRef, decode_objects, encode_objects
from tierstore.state.differences import LoadOptions
from tierstore.state.lazy import Checkpoint
from tierstore.state.load import load_state
from tierstore.testing.equality import assert_same_state

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta", "ignore:Sparse invariant checks are implicitly disabled"
)

DENSE = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0], [0, 0, 4, 5], [0, 0, 0, 0]])
OTHER = torch.eye(4)
KINDS = ("coo", "csr", "csc", "bsr", "bsc", "half", "batch", "hybrid", "hybrid_csr", "complex", "leaf", "parameter")


def kinds(dense: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix of 4 x 4 in every layout."""
    made = {
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
        "half": dense.bfloat16().to_sparse_csr(),
        "batch": torch.stack([dense, dense]).to_sparse_csr(),
        "hybrid": torch.stack([dense, dense * 2], -1).to_sparse(2),
        "hybrid_csr": torch.stack([dense, dense * 2], -1).to_sparse_csr(dense_dim=1),
        "complex": dense.to(torch.complex64).to_sparse(),
        "leaf": dense.to_sparse_csr().requires_grad_(),
        "parameter": torch.nn.Parameter(dense.to_sparse()),
    }
    assert tuple(made) == KINDS
    return made


def odd() -> dict[str, Any]:
    """What is at the edges."""
    return {
        "uncoalesced": torch.sparse_coo_tensor(torch.tensor([[0, 0, 1], [1, 1, 0]]), torch.tensor([1.0, 2, 3]), (4, 4)),
        "of nothing": {
            "coo": torch.zeros(4, 4).to_sparse(),
            "csr": torch.zeros(4, 4).to_sparse_csr(),
            "bsc": torch.zeros(4, 4).to_sparse_bsc((2, 2)),
        },
        "without rows": torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), (0, 3)),
        "a number": torch.sparse_coo_tensor(torch.zeros(0, 1, dtype=torch.int64), torch.tensor([3.0]), ()),
        "indices of 32 bits": torch.sparse_csr_tensor(
            torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1.0, 2.0]), size=(2, 2)
        ),
        "larger than any memory": torch.sparse_coo_tensor(torch.tensor([[1 << 40]]), torch.tensor([1.0]), (1 << 41,)),
    }


def test_every_layout_comes_back_as_it_was_also_deep_in_containers() -> None:
    state = {"top": kinds(DENSE), "list": [odd(), (kinds(OTHER)["csr"], 3)]}
    reader = staged(state)
    assert {"top.coo.indices", "top.coo.values", "list.1.0.crow_indices"} <= set(reader.index.names())
    assert_same_state(load_state(reader, run), state)


def test_a_tied_sparse_tensor_is_stored_once_and_comes_back_tied() -> None:
    tied = DENSE.to_sparse()
    loaded = load_state(staged({"a": tied, "b": [tied], "apart": DENSE.to_sparse()}), run)
    assert loaded["a"] is loaded["b"][0]
    assert loaded["a"] is not loaded["apart"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_the_caller_is_filled_in_place_with_however_many_elements(kind: str) -> None:
    stored, target = kinds(DENSE)[kind], kinds(OTHER)[kind]
    loaded = load_state(staged({"s": stored}), run, into={"s": target})
    assert loaded["s"] is target
    assert_same_state(target, stored)


def test_another_dtype_is_cast_where_that_is_allowed() -> None:
    reader = staged({"s": DENSE.to_sparse_csr()})
    target = OTHER.bfloat16().to_sparse_csr()
    with pytest.raises(StateMismatchError, match="is bfloat16 in `into`, float32 stored"):
        load_state(reader, run, into={"s": target})
    load_state(reader, run, into={"s": target}, options=LoadOptions(dtype="cast"))
    assert torch.equal(target.to_dense(), DENSE.bfloat16())


def test_another_split_into_sparse_and_dense_axes_is_a_difference_that_is_told_before_anything_changes() -> None:
    reader = staged({"a": torch.ones(2), "s": torch.ones(4, 3).to_sparse(1)})
    into = {"a": torch.zeros(2), "s": torch.zeros(4, 3).to_sparse()}
    with pytest.raises(StateMismatchError, match=r"s: has 2 sparse axes in `into`, 1 stored"):
        load_state(reader, run, into=into)
    assert not into["a"].any()


def test_a_checkpoint_shows_the_components_and_says_so_where_the_tensor_is_asked_for() -> None:
    checkpoint = Checkpoint(staged({"s": DENSE.to_sparse_csr(), "w": torch.ones(2)}), run)
    assert sorted(checkpoint) == ["s.col_indices", "s.crow_indices", "s.values", "w"]
    assert torch.equal(checkpoint["s.values"][1:3], torch.tensor([2.0, 3.0]))
    with pytest.raises(
        NotFoundError, match=r"'s' is a sparse tensor, which is stored by its components: 's.crow_indices', 's.col_indices'"
    ):
        checkpoint["s"]


def malformed(**facts: Any) -> ImageReader:
    """A checkpoint from outside, whose tree says of dense tensors that they are a sparse one's components."""
    reader = staged({"indices": torch.tensor([[0, 9]]), "values": torch.tensor([1.0, 2.0]), "crow": torch.tensor([0, 5, 1])})
    node = Opaque("torch.sparse", facts)
    assert isinstance(decode_objects(reader.trees[0]), dict)
    reader.trees[0] = encode_objects({"s": node})
    return reader


COO = {"indices": TensorRef("indices"), "values": TensorRef("values")}
CSR = {"crow_indices": TensorRef("crow"), "col_indices": TensorRef("indices"), "values": TensorRef("values")}


@pytest.mark.parametrize(
    "facts",
    [
        {"layout": "sparse_coo", "shape": (4,), "parts": COO, "coalesced": False},  # an index is out of range
        {"layout": "sparse_coo", "shape": (10, 10), "parts": COO, "coalesced": False},  # too few rows of indices
        {"layout": "sparse_csr", "shape": (2, 10), "parts": CSR},
        {"layout": "sparse_coo", "shape": (10,), "parts": {**COO, "values": TensorRef("crow")}, "coalesced": True},  # too many values
    ],
)
def test_components_from_outside_that_contradict_each_other_are_an_error_that_names_them(facts: dict[str, Any]) -> None:
    reader = malformed(**facts)
    with pytest.raises(FormatError, match=r"torch.sparse node \(of .*'(values|crow)'\) that torch refuses"):
        load_state(reader, run)


def test_what_could_not_be_loaded_is_not_saved() -> None:
    wrong = torch.sparse_coo_tensor(torch.tensor([[0, 9]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=False)
    with pytest.raises(UnsupportedTypeError, match=r"state\['s'\] is a sparse tensor whose components contradict each other"):
        staged({"s": wrong})
