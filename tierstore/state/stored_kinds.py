"""What lies at a place of a stored tree, and at one of a wanted state: told apart, listed and named for messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tierstore.format.objects import Opaque, TensorRef
from tierstore.state.paths import Place
from tierstore.state.unflatten import MODULE_STATE, OMITTED, SPARSE, TENSOR, stored_tensors

__all__ = ["deep", "describe", "flat", "is_omitted", "is_tensor", "layout", "leaves"]


def leaves(node: Any, place: Place = ()) -> Iterator[Place]:
    """The places of all tensors and values of a stored tree; tensors that were left out of it are none."""
    if isinstance(node, Opaque) and node.tag == MODULE_STATE:
        node = node.value[0]
    if isinstance(node, dict) and node:
        for key, item in node.items():
            yield from leaves(item, (*place, key))
    elif isinstance(node, list | tuple) and deep(node):
        for at, item in enumerate(node):
            yield from leaves(item, (*place, at))
    elif is_omitted(node):
        return
    elif isinstance(node, Opaque) and node.tag == SPARSE:
        yield from (t.place for t in stored_tensors(node, place))
    else:
        yield place


def is_tensor(node: Any) -> bool:
    """Whether it stands for one tensor."""
    return isinstance(node, TensorRef) or (isinstance(node, Opaque) and node.tag == TENSOR)


def is_omitted(node: Any) -> bool:
    """Whether it stands for a tensor that was left out of the checkpoint on purpose."""
    return isinstance(node, Opaque) and node.tag == OMITTED


def deep(node: Any) -> bool:
    """Whether a container holds tensors or dicts, so that it is compared place by place and not replaced as a whole."""
    if isinstance(node, torch.Tensor | TensorRef | Opaque | dict):
        return True
    return isinstance(node, list | tuple) and any(deep(item) for item in node)


def flat(tree: Any) -> bool:
    """Whether it is a dict of names and nothing but tensors."""
    return isinstance(tree, dict) and bool(tree) and all(isinstance(k, str) and isinstance(v, TensorRef) for k, v in tree.items())


def layout(tensor: torch.Tensor) -> str:
    """A tensor's layout before the word "tensor"; nothing for a strided one."""
    return "" if tensor.layout is torch.strided else f"{tensor.layout} ".removeprefix("torch.")


def describe(node: Any) -> str:
    """What a place holds, for messages."""
    if is_tensor(node):
        return "a tensor"
    if is_omitted(node):
        return "a tensor that was left out"
    if isinstance(node, Opaque):
        return str(node.value.get("layout", "sparse")) if node.tag == SPARSE else node.tag
    return f"{type(node).__name__} {node!r}"[:80] if isinstance(node, int | float | str | None) else f"a {type(node).__name__}"
