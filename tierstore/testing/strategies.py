"""Hypothesis strategies for training states: tensors of every dtype and kind of view, and nestings of them with objects."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tierstore.format.dtypes import DTYPES
from tierstore.state.bits import tensor_over, torch_dtype

__all__ = ["dtypes", "objects", "shapes", "states", "tensors"]


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """Every dtype that can be stored and this torch knows."""
    return st.sampled_from([torch_dtype(name) for name in DTYPES if hasattr(torch, name)])


def shapes(max_dims: int = 3, max_side: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with 0-d and empty ones among them."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Tensors with arbitrary bits: contiguous, transposed, sliced with steps, expanded; also parameters and ``requires_grad`` leaves."""
    kind = draw(dtypes()) if dtype is None else dtype
    sizes = draw(shapes()) if shape is None else shape
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    raw = rng.integers(0, 2 if kind is torch.bool else 256, size=math.prod(sizes) * kind.itemsize, dtype=np.uint8)
    tensor = tensor_over(raw.data, kind, sizes)
    if shape is None and sizes:
        view = draw(st.sampled_from(("contiguous", "transposed", "stepped", "offset", "expanded")))
        if view == "transposed":
            tensor = tensor.transpose(0, -1)
        elif view == "stepped":
            tensor = tensor[::2]
        elif view == "offset":
            tensor = tensor[1:]
        elif view == "expanded":
            tensor = tensor[:1].expand(3 if sizes[0] else 0, *sizes[1:])
    wrap = draw(st.sampled_from(("tensor", "tensor", "leaf", "parameter")))
    if wrap == "leaf" and (kind.is_floating_point or kind.is_complex):
        return tensor.requires_grad_()
    if wrap == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=(kind.is_floating_point or kind.is_complex) and draw(st.booleans()))
    return tensor


def objects() -> st.SearchStrategy[Any]:
    """Leaves that are not tensors."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(max_size=8),
        st.binary(max_size=8),
        st.integers(-(10**30), 10**30),
        st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), np.float32(1.5), np.int64(-1)]),
        st.integers(0, 5).map(lambda n: np.arange(n, dtype=np.float32)),
    )


def states(max_leaves: int = 12) -> st.SearchStrategy[dict[Any, Any]]:
    """Nested states whose root is a dict; keys with dots, ints and tuples among them."""
    keys = st.one_of(
        st.text(max_size=4), st.sampled_from(["a", "a.b", "b", "0", "__metadata__"]), st.integers(-3, 3), st.tuples(st.integers(0, 2))
    )

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.dictionaries(keys, inner, max_size=4),
            st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
        )

    return st.dictionaries(keys, st.recursive(st.one_of(tensors(), objects()), containers, max_leaves=max_leaves), max_size=4)
