"""What can't be stored is refused by name, place and remedy, before any memory is taken (CASES 56)."""

from __future__ import annotations

import enum
import warnings
from collections import Counter, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from state_kit import round_trip
from torch._subclasses.fake_tensor import FakeTensorMode

from tierstore.errors import UnsupportedTypeError
from tierstore.state.codecs import default_codecs
from tierstore.state.image import ImagePool
from tierstore.state.stage import stage

Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


class Sub(torch.Tensor):
    pass


def freed() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but states that hold them exist
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


TENSORS = {
    "meta": (lambda: torch.empty(3, device="meta"), "meta device", "to_empty"),
    "quantised": (quantised, "quantised tensor (qint8)", "dequantize"),
    "nested": (lambda: nested(torch.strided), "nested tensor", "unbind"),
    "jagged": (lambda: nested(torch.jagged), "nested tensor", "unbind"),
    "subclass": (lambda: torch.ones(3).as_subclass(Sub), "test_state_refusals.Sub", "codec"),
    "fake": (fake, "FakeTensor", "tracing"),
    "uninitialised": (lambda: torch.nn.LazyLinear(3).weight, "UninitializedParameter", "forward"),
    "freed": (freed, "storage was freed", "unshard"),
    "bits": (lambda: torch.empty(3, dtype=torch.bits8), "bits8", "uint8"),
    "small-ints": (lambda: torch.empty(3, dtype=torch.uint4), "uint4", "uint8"),
    "mkldnn": (lambda: torch.ones(3, 3).to_mkldnn(), "_mkldnn", "to_dense"),
}

OBJECTS = {
    "class": (object(), "builtins.object"),
    "function": (len, "builtin_function_or_method"),
    "enum": (Colour.RED, "Colour"),
    "path": (Path("x"), "PosixPath"),
    "defaultdict": (defaultdict(int), "defaultdict"),
    "counter": (Counter(), "Counter"),
    "namedtuple": (Point(1, 2), "Point"),
    "module": (torch.nn.Linear(1, 1), "Linear"),
}


def refused(state: Any) -> UnsupportedTypeError:
    pool = ImagePool(None, max_nbytes=1 << 20)
    with pytest.raises(UnsupportedTypeError) as caught:
        stage(state, pool=pool)
    assert pool.nbytes == 0
    return caught.value


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_without_plain_bytes_is_refused_by_name_and_place(kind: str) -> None:
    make, what, remedy = TENSORS[kind]
    error = refused({"good": torch.ones(2), "model": {"layers.3.weight": [make()]}})
    assert "state['model']['layers.3.weight'][0]" in error.message
    assert what in error.message
    assert remedy in error.hint


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_unknown_object_is_refused_by_name_and_place(kind: str) -> None:
    value, what = OBJECTS[kind]
    error = refused({"extra": {1: (value,)}})
    assert "state['extra'][1][0]" in error.message
    assert what in error.message
    assert "codec" in error.hint


def test_an_object_beside_a_module_state_is_refused_at_its_place() -> None:
    model = torch.nn.Linear(2, 2).state_dict()
    model["extra"] = object()
    assert refused({"model": model}).message.startswith("state['model']['extra'] is a builtins.object")


def test_a_cycle_is_refused_and_a_value_that_occurs_twice_is_not() -> None:
    loop: dict[str, Any] = {"a": [torch.ones(1)]}
    loop["a"].append(loop)
    assert "cycle" in refused(loop).message
    shared = [1, torch.ones(1)]
    loaded = round_trip({"x": shared, "y": shared})
    assert loaded["x"][0] == loaded["y"][0] == 1


def test_a_bottomless_nesting_is_refused() -> None:
    state: Any = torch.ones(1)
    for _ in range(500):
        state = [state]
    assert "nested deeper" in refused(state).message


def test_a_registered_codec_lets_a_type_through() -> None:
    codecs = default_codecs()
    codecs.register(Point, "test.Point", lambda p: [p.x, p.y], lambda v: Point(*v))
    codecs.register(Sub, "test.Sub", lambda t: t.as_subclass(torch.Tensor), lambda v: v.as_subclass(Sub))
    loaded = round_trip({"p": Point(torch.ones(1), 2), "s": torch.ones(3).as_subclass(Sub)}, codecs)
    assert type(loaded["p"]) is Point
    assert type(loaded["s"]) is Sub
    assert torch.equal(loaded["p"].x, torch.ones(1))
