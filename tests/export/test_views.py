"""Views against torch: any sequence of splits, joins and permutations, and any slice of what comes out."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.format.index import TensorEntry
from tierstore.state.views import View, joined, parted, parts_of, stored_view

SHAPE = (4, 6, 2)
STORED = {name: torch.arange(48).view(SHAPE) + 100 * i for i, name in enumerate("ab")}


def find(name: str, box: Any = None) -> TensorEntry:
    return TensorEntry(name=name, dtype="int64", shape=SHAPE, extents=())


def read(view: View, box: tuple[range, ...]) -> torch.Tensor:
    target = torch.full([len(r) for r in box], -1)
    for entry, inside, part in parts_of(view, box, target, find):
        part.copy_(STORED[entry.name][tuple(slice(r.start, r.stop, r.step) for r in inside)])
    return target


def torch_heads(parts: list[torch.Tensor], axis: int, heads: int) -> torch.Tensor:
    return torch.cat([chunk for h in range(heads) for chunk in (p.chunk(heads, axis)[h] for p in parts)], axis)


@given(st.data())
def test_any_sequence_of_operations_shows_what_torch_makes(data: st.DataObject) -> None:
    views = {name: (stored_view(name, "int64", SHAPE), STORED[name]) for name in STORED}
    view, truth = views["a"]
    for _ in range(data.draw(st.integers(1, 5))):
        kind = data.draw(st.sampled_from(["permute", "split", "sizes", "join", "stack", "unstack"]))
        axis = data.draw(st.integers(0, truth.ndim - 1)) if truth.ndim else 0
        length = truth.shape[axis] if truth.ndim else 0
        if kind == "permute":
            order = data.draw(st.permutations(range(truth.ndim)))
            view, truth = view.permuted(order), truth.permute(order)
        elif kind == "split" and length > 1:
            parts = data.draw(st.sampled_from([n for n in range(2, length + 1) if length % n == 0]))
            heads = data.draw(st.sampled_from([h for h in range(1, length // parts + 1) if length % (h * parts) == 0]))
            number = data.draw(st.integers(0, parts - 1))
            view = parted(view, axis, parts=parts, heads=heads)[number]
            truth = truth.unflatten(axis, (heads, parts, -1)).select(axis + 1, number).flatten(axis, axis + 1)
        elif kind == "sizes" and length > 1:
            first = data.draw(st.integers(1, length - 1))
            view, truth = parted(view, axis - truth.ndim, sizes=[first, length - first])[1], truth.narrow(axis, first, length - first)
        elif kind == "join" and truth.ndim and truth.numel() < 5000:
            heads = data.draw(st.sampled_from([h for h in range(1, length + 1) if length % h == 0]))
            view, truth = joined([view, view], axis, heads=heads), torch_heads([truth, truth], axis, heads)
        elif kind == "stack" and truth.ndim < 6 and truth.numel() < 5000:
            place = data.draw(st.integers(0, truth.ndim))
            view, truth = joined([view] * 3, place, stack=True), torch.stack([truth] * 3, place)
        elif kind == "unstack" and truth.ndim:
            index = data.draw(st.integers(0, length - 1))
            view, truth = parted(view, axis, unstack=True)[index], truth.select(axis, index)
    assert view.shape == tuple(truth.shape)
    box = []
    for size in truth.shape:
        begin = data.draw(st.integers(0, size))
        box.append(range(begin, data.draw(st.integers(begin, size)), data.draw(st.integers(1, 3))))
    for wanted in (tuple(box), tuple(map(range, truth.shape))):
        assert torch.equal(read(view, wanted), truth[tuple(slice(r.start, r.stop, r.step) for r in wanted)])


def test_two_tensors_joined_and_slices_over_the_seam() -> None:
    view = joined([stored_view("a", "int64", SHAPE), stored_view("b", "int64", SHAPE)], 1)
    truth = torch.cat([STORED["a"], STORED["b"]], 1)
    assert torch.equal(read(view, (range(1, 4, 2), range(4, 9), range(1, 2))), truth[1:4:2, 4:9, 1:2])
