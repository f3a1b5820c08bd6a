"""Trees come from storage: a malformed one is answered by name, and never crashes, executes or loops (issue 2: bad input)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from state_kit import ImageReader, run, staged

from tierstore.errors import IntegrityError, TierStoreError
from tierstore.format.objects import Opaque, TensorRef, encode_objects
from tierstore.state.load import load_state

REF = TensorRef("w")
NODES: list[Any] = [
    Opaque("torch.Tensor", None),
    Opaque("torch.Tensor", {}),
    Opaque("torch.Tensor", {"ref": "w"}),
    Opaque("torch.Tensor", {"ref": REF, "view": 3}),
    Opaque("torch.Tensor", {"ref": REF, "view": ["w", -1, "float32", (1,)]}),
    Opaque("torch.Tensor", {"ref": REF, "view": ["w", 0, "float32", (10**9,)]}),
    Opaque("torch.Tensor", {"ref": REF, "view": ["w", 0, "float32", (1 << 61, 1 << 61)]}),
    Opaque("torch.Tensor", {"ref": REF, "view": ["w", 0, "system", (1,)]}),
    Opaque("torch.Tensor", {"ref": REF, "view": ["w", 1, "float32", (1,)]}),
    Opaque("torch.sparse", {"layout": "sparse_coo", "shape": (2, 2)}),
    Opaque("torch.sparse", {"layout": "strided", "shape": (2, 2), "parts": {}}),
    Opaque("torch.sparse", {"layout": "nn", "shape": (2, 2), "parts": {}}),
    Opaque("torch.sparse", {"layout": "sparse_coo", "shape": (2, 2), "parts": {"indices": REF, "values": REF}}),
    Opaque("torch.sparse", {"layout": "sparse_coo", "shape": [2, 2], "parts": {"indices": REF, "values": REF}}),
    Opaque("torch.state_dict", [1, 2]),
    Opaque("torch.state_dict", [OrderedDict()]),
    Opaque("torch.dtype", "nn"),
    Opaque("torch.dtype", "os.system"),
    Opaque("torch.device", "nowhere:9"),
    Opaque("torch.Size", ["x"]),
    Opaque("torch.Generator", {"device": "cpu", "state": b"short"}),
    Opaque("numpy.random.Generator", {"bit_generator": "seed"}),
    Opaque("random.Random", (3, (1, 2), None)),
    Opaque("unknown.Tag", 1),
    TensorRef("absent"),
]


def reader_of(tree: Any) -> ImageReader:
    reader = staged({"w": torch.ones(4)})
    reader.trees = [encode_objects(tree)]
    return reader


@pytest.mark.parametrize("node", NODES, ids=lambda n: str(n)[:60])
def test_a_malformed_node_is_an_integrity_error(node: Any) -> None:
    with pytest.raises(IntegrityError) as caught:
        load_state(reader_of({"x": node}), run)
    assert caught.value.hint


def nodes() -> st.SearchStrategy[Any]:
    known = st.sampled_from([None, REF, "sparse_coo", "float32", "w", (1, 2), (2, 2), (4,)])
    leaves = st.one_of(known, st.integers(-2, 5), st.text(max_size=3))
    keys = st.sampled_from(["ref", "view", "layout", "shape", "parts", "indices", "values", "coalesced", "parameter", "requires_grad"])
    inner = st.recursive(leaves, lambda s: st.lists(s, max_size=4) | st.dictionaries(keys, s, max_size=4), max_leaves=8)
    return st.builds(Opaque, st.sampled_from(["torch.Tensor", "torch.sparse", "torch.state_dict", "torch.Size"]), inner)


@hypothesis.given(st.one_of(st.sampled_from(NODES), nodes()))
def test_any_made_up_node_is_loaded_or_refused(node: Any) -> None:
    for into in (None, {"x": torch.zeros(4)}, {"x": None}, {"x": {"a": 1}}, {"x": [torch.ones(1)]}):
        try:
            loaded = load_state(reader_of({"x": node}), run, into=into)
        except TierStoreError:
            continue
        assert set(loaded) == {"x"}
