"""A state from its tree: the way back from `flatten`, and what a decoded tree says of its tensors.

Trees come from storage: a malformed node is a FormatError that names it, and nothing is executed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierstore.errors import FormatError, StateMismatchError
from tierstore.format.dtypes import DTYPES
from tierstore.format.objects import ObjectCodecs, Opaque, TensorRef
from tierstore.state.bits import as_bits, torch_dtype
from tierstore.state.paths import Place

__all__ = [
    "COMPONENTS",
    "MODULE_STATE",
    "OMITTED",
    "SPARSE",
    "TENSOR",
    "StoredTensor",
    "check_tree",
    "dressed",
    "rebuilt",
    "sparse_tensor",
    "stored_tensors",
    "unflatten",
]

MODULE_STATE = "torch.state_dict"
TENSOR = "torch.Tensor"
SPARSE = "torch.sparse"
OMITTED = "torch.omitted"
"""Stands for a tensor that was left out of the checkpoint on purpose: ``{"dtype", "shape"}``, and the flags that a `TENSOR` has."""

COMPONENTS: Mapping[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def check_node(node: Opaque) -> None:
    """Raises FormatError where one of our own tagged nodes is not made as `flatten` makes it."""
    value = node.value
    if node.tag == MODULE_STATE:
        good = isinstance(value, list) and len(value) == 2 and isinstance(value[0], OrderedDict)
    elif node.tag == TENSOR:
        good = isinstance(value, dict) and isinstance(value.get("ref"), TensorRef) and ("view" not in value or _is_view(value["view"]))
    elif node.tag == OMITTED:
        good = isinstance(value, dict) and value.get("dtype") in DTYPES and _are_sizes(value.get("shape"))
    else:
        layout = getattr(torch, str(value.get("layout")), None) if isinstance(value, dict) else None
        parts = COMPONENTS.get(layout) if isinstance(layout, torch.layout) else None
        good = parts is not None and isinstance(value.get("parts"), dict) and tuple(value["parts"]) == parts
        good = good and _are_sizes(value.get("shape")) and type(value.get("coalesced", False)) is bool
    if not good:
        raise FormatError(f"the stored tree has a malformed {node.tag} node", hint="the file is foreign or damaged: run `tierstore verify`")


def check_tree(tree: Any) -> Any:
    """Returns a decoded tree whose own tagged nodes are all well made; raises FormatError for any other."""
    if isinstance(tree, Opaque):
        if tree.tag in (TENSOR, SPARSE, MODULE_STATE, OMITTED):
            check_node(tree)
        check_tree(tree.value)
    elif isinstance(tree, dict):
        for item in tree.values():
            check_tree(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            check_tree(item)
    return tree


def _is_view(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 4
        and isinstance(value[0], str)
        and isinstance(value[2], str)
        and _are_sizes((value[1],))
        and _are_sizes(value[3])
    )


def _are_sizes(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and 0 <= size < 1 << 62 for size in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor that a tree refers to: where in the state, and by which name the index knows it."""

    place: Place
    name: str
    base: str
    """The tensor whose memory holds it: itself, or the one that it is a view of."""


def stored_tensors(tree: Any, place: Place = ()) -> Iterator[StoredTensor]:
    """Every tensor of a decoded tree, in the tree's order; components of sparse tensors count as tensors."""
    if isinstance(node := tree, TensorRef):
        yield StoredTensor(place=place, name=node.name, base=node.name)
    elif isinstance(node, Opaque) and node.tag in (TENSOR, SPARSE, MODULE_STATE):
        if node.tag == TENSOR:
            name = node.value["ref"].name
            yield StoredTensor(place=place, name=name, base=node.value["view"][0] if "view" in node.value else name)
        elif node.tag == SPARSE:
            for part, inner in node.value["parts"].items():
                yield from stored_tensors(inner, (*place, part))
        else:
            yield from stored_tensors(node.value[0], place)
    elif isinstance(node, Opaque):
        yield from stored_tensors(node.value, place)
    elif isinstance(node, dict):
        for key, item in node.items():
            if type(item) is TensorRef:  # a generator of its own costs as much as all else
                yield StoredTensor(place=(*place, key), name=item.name, base=item.name)
            else:
                yield from stored_tensors(item, (*place, key))
    elif isinstance(node, list | tuple):
        for i, item in enumerate(node):
            yield from stored_tensors(item, (*place, i))


def rebuilt(node: Any, change: Callable[[Any], Any]) -> Any:
    """A container with `change` applied to what it holds; anything else as it is."""
    kind = type(node)
    if kind is dict or kind is OrderedDict:
        return kind((key, change(item)) for key, item in node.items())
    if kind is list or kind is tuple:
        return kind(change(item) for item in node)
    if kind is Opaque:
        return Opaque(node.tag, change(node.value))
    return node


def unflatten(tree: Any, tensors: Callable[[str], torch.Tensor], codecs: ObjectCodecs | None = None) -> Any:
    """Builds the state of a decoded tree.

    Args:
        tree: What `flatten` made, or `decode_objects` read without codecs.
        tensors: Gives the tensor of a name, the same object each time; tied places then hold the same tensor.
        codecs: Codecs for the types that the tree's tags name.

    Raises:
        FormatError: The tree is malformed, or has a tag that no codec knows.
    """
    return _Build(tensors, codecs or ObjectCodecs(), {}).build(tree)


@dataclass(frozen=True, slots=True)
class _Build:
    tensors: Callable[[str], torch.Tensor]
    codecs: ObjectCodecs
    made: dict[tuple[Any, ...], torch.Tensor]

    def build(self, node: Any) -> Any:
        if isinstance(node, TensorRef):
            return self.tensors(node.name)
        if not isinstance(node, Opaque):
            return rebuilt(node, self.build)
        if node.tag == OMITTED:
            raise StateMismatchError(
                f"a tensor of the state ({node.value['dtype']} {list(node.value['shape'])}) was left out of the checkpoint on purpose",
                hint="load with LoadOptions(fill=…), which says from what it is filled, or missing='keep'",
            )
        if node.tag not in (TENSOR, SPARSE, MODULE_STATE):
            return self.codecs.decode(node.tag, self.build(node.value))
        if node.tag == MODULE_STATE:
            items, metadata = (self.build(item) for item in node.value)
            items._metadata = metadata
            return items
        try:
            return self.tensor(node.value) if node.tag == TENSOR else self.sparse(node.value)
        except (RuntimeError, TypeError, ValueError) as error:  # sizes and indices that torch refuses
            names = ", ".join(repr(t.name) for t in stored_tensors(node))
            raise FormatError(
                f"the stored tree has a {node.tag} node (of {names}) that torch refuses: {error}", hint="run `tierstore verify`"
            ) from error

    def tensor(self, facts: Mapping[str, Any]) -> torch.Tensor:
        view = facts.get("view")
        key = (facts["ref"].name, facts.get("parameter", False), facts.get("requires_grad", False))
        if key in self.made:
            return self.made[key]
        if view is None:
            value = self.tensors(facts["ref"].name)
        else:
            base, offset, dtype, shape = view
            wanted = torch_dtype(dtype)
            count = wanted.itemsize
            for size in shape:
                count *= size
            flat = as_bits(self.tensors(base)).reshape(-1).view(torch.uint8)
            if not 0 <= offset <= offset + count <= flat.numel():
                raise ValueError(f"bytes {offset} to {offset + count} lie outside of {base!r}")
            value = flat[offset : offset + count].view(wanted).view(shape)
        self.made[key] = made = dressed(value, facts)
        return made

    def sparse(self, facts: Mapping[str, Any]) -> torch.Tensor:
        layout, coalesced = getattr(torch, facts["layout"]), facts.get("coalesced", False)
        parts = [self.build(facts["parts"][part]) for part in COMPONENTS[layout]]
        flags = (coalesced, facts.get("parameter", False), facts.get("requires_grad", False))
        key = (layout, facts["shape"], tuple(id(part) for part in parts), *flags)  # tied ones have the same components, which live on
        if key not in self.made:
            self.made[key] = dressed(sparse_tensor(layout, parts, facts["shape"], coalesced=coalesced), facts)
        return self.made[key]


def sparse_tensor(layout: torch.layout, parts: Sequence[torch.Tensor], shape: Sequence[int], *, coalesced: bool = False) -> torch.Tensor:
    """A sparse tensor over the memory of its components, which are in the order of `COMPONENTS`; their invariants are checked.

    Raises:
        RuntimeError, TypeError, ValueError: Torch's, where the components are not those of such a tensor: an index out of range, say.
    """
    size, device = tuple(shape), parts[-1].device  # said explicitly: a default device that the caller set must not matter
    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(parts[0], parts[1], size, device=device, is_coalesced=coalesced, check_invariants=True)
    return torch.sparse_compressed_tensor(parts[0], parts[1], parts[2], size, layout=layout, device=device, check_invariants=True)


def dressed(tensor: torch.Tensor, facts: Mapping[str, Any]) -> torch.Tensor:
    """The tensor as a node's facts say it was: a `Parameter`, or with ``requires_grad``."""
    needs_grad = bool(facts.get("requires_grad", False))
    if facts.get("parameter", False):
        return torch.nn.Parameter(tensor, requires_grad=needs_grad)
    return tensor.detach().requires_grad_() if needs_grad else tensor
