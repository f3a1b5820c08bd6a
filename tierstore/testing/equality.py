"""Comparing states bit by bit: types, dtypes, shapes, key order, and the bits of NaNs."""

from __future__ import annotations

import random
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from tierstore.state.bits import as_bits
from tierstore.state.paths import Place, show
from tierstore.state.unflatten import COMPONENTS

__all__ = ["assert_same_state"]


def assert_same_state(left: Any, right: Any, *, place: Place = ()) -> None:
    """Raises AssertionError, with the place, where two states differ in anything but strides and identity of memory.

    Tensors agree in type (Tensor, Parameter), dtype, shape, layout, device, ``requires_grad`` and every bit; dicts also in the order of
    their keys and in a module's ``_metadata``.
    """
    at = show(place)
    assert type(left) is type(right), f"{at}: {type(left)} and {type(right)}"
    if isinstance(left, torch.Tensor):
        _same_tensor(left, right, at)
    elif isinstance(left, dict):
        assert [(type(k), k) for k in left] == [(type(k), k) for k in right], f"{at}: keys {list(left)!r} and {list(right)!r}"
        for key, item in left.items():
            assert_same_state(item, right[key], place=(*place, key))
        if isinstance(left, OrderedDict):
            assert getattr(left, "_metadata", None) == getattr(right, "_metadata", None), f"{at}: module metadata"
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), f"{at}: {len(left)} and {len(right)} items"
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same_state(a, b, place=(*place, i))
    elif isinstance(left, float) and not isinstance(left, np.generic):
        assert struct.pack("<d", left) == struct.pack("<d", right), f"{at}: {left!r} and {right!r}"
    elif isinstance(left, complex) and not isinstance(left, np.generic):
        assert struct.pack("<dd", left.real, left.imag) == struct.pack("<dd", right.real, right.imag), f"{at}: {left!r} and {right!r}"
    elif isinstance(left, np.ndarray | np.generic):
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes()), f"{at}: {left!r} and {right!r}"
    elif isinstance(left, torch.Generator):
        assert left.device == right.device, f"{at}: {left.device} and {right.device}"
        assert torch.equal(left.get_state(), right.get_state()), f"{at}: generators differ"
    elif isinstance(left, random.Random):
        assert left.getstate() == right.getstate(), f"{at}: generators differ"
    elif isinstance(left, np.random.Generator):
        assert_same_state(left.bit_generator.state, right.bit_generator.state, place=place)
    elif isinstance(left, np.random.RandomState):
        assert_same_state(left.get_state(legacy=False), right.get_state(legacy=False), place=place)
    else:
        assert left == right, f"{at}: {left!r} and {right!r}"


def _same_tensor(left: torch.Tensor, right: torch.Tensor, at: str) -> None:
    for fact in ("dtype", "shape", "layout", "device", "requires_grad"):
        assert getattr(left, fact) == getattr(right, fact), f"{at}: {fact} {getattr(left, fact)} and {getattr(right, fact)}"
    if left.layout is torch.strided:
        a, b = (as_bits(t.detach().resolve_conj().resolve_neg()) for t in (left, right))
        # equal() of integers compares bits: as_bits of a NaN is a number like any other
        assert torch.equal(a, b), f"{at}: values differ"
        return
    if left.layout is torch.sparse_coo:
        assert left.is_coalesced() == right.is_coalesced(), f"{at}: one is coalesced"
    for part in COMPONENTS[left.layout]:
        name = f"_{part}" if left.layout is torch.sparse_coo else part
        _same_tensor(getattr(left.detach(), name)(), getattr(right.detach(), name)(), f"{at}.{part}")
