"""The state's tree as exports need it: which tensors stand where, and the state as stock DCP would flatten it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tierstore.errors import UsageError
from tierstore.format.index import RoutingIndex
from tierstore.format.objects import ObjectCodecs, Opaque, TensorRef
from tierstore.state.bits import torch_dtype
from tierstore.state.paths import name_of
from tierstore.state.unflatten import MODULE_STATE, SPARSE, TENSOR, rebuilt, stored_tensors, unflatten

__all__ = ["FlatTree", "beyond", "check_one_model", "flat_tree", "in_order", "plain_tree", "sparse_parts"]

Path = tuple[str | int, ...]


def in_order(tree: Any, index: RoutingIndex) -> list[str]:
    """The index's names: in the tree's order, as the model has them, then those that this tree does not have."""
    known = dict.fromkeys(t.name for t in stored_tensors(tree) if t.name in index)
    return [*known, *(name for name in index.names() if name not in known)]


def beyond(tree: Any, index: RoutingIndex) -> list[str]:
    """The index's names that stand nowhere in the tree: what other ranks have. Further names of a tied tensor do not count."""
    known = {name for t in stored_tensors(tree) for name in (t.name, t.base)}
    rest = [name for name in index.names() if name not in known]
    if not rest:
        return []
    index.prepare(known)
    places = {index.find(name).extents for name in known if name in index}
    return [name for name in rest if index.find(name).extents not in places]


def check_one_model(tree: Any) -> None:
    """Refuses a training state as a whole where a model is wanted.

    Raises:
        UsageError: The state has several parts; names them.
    """
    top = tree.value[0] if isinstance(tree, Opaque) and tree.tag == MODULE_STATE else tree
    if not isinstance(top, dict):
        return
    counts = {key: sum(1 for _ in stored_tensors(node)) for key, node in top.items()}
    parts = [key for key, count in counts.items() if count]
    nested = [key for key in parts if not isinstance(top[key], TensorRef)]
    if not nested or len(parts) < 2 or all(_is_leaf(top[key]) for key in nested):
        return
    shown = ", ".join(f"{key}.* ({counts[key]:,})" for key in parts[:6])
    raise UsageError(
        f"the state has several parts with tensors: {shown}; a Hugging Face directory holds one model",
        hint=f"choose it: --include '{nested[0]}.*' --strip {nested[0]}.   (all of it: --include '*')",
    )


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Opaque) and node.tag in (TENSOR, SPARSE)


def plain_tree(node: Any, *, sparse: bool) -> Any:
    """The tree without what only PyTorch's own objects know: Parameter flags, views, module metadata.

    Args:
        node: The decoded tree.
        sparse: Whether sparse tensors stay; else each is a dict of its components.
    """
    if isinstance(node, Opaque) and node.tag == TENSOR:
        return node.value["ref"]
    if isinstance(node, Opaque) and node.tag == MODULE_STATE:
        return plain_tree(node.value[0], sparse=sparse)
    if isinstance(node, Opaque) and node.tag == SPARSE:
        parts = {part: plain_tree(item, sparse=sparse) for part, item in node.value["parts"].items()}
        plain = {key: value for key, value in node.value.items() if key not in ("parameter", "requires_grad")}
        return Opaque(SPARSE, {**plain, "parts": parts}) if sparse else parts
    return rebuilt(node, lambda item: plain_tree(item, sparse=sparse))


def sparse_parts(node: Any, place: tuple[Any, ...] = ()) -> dict[str, tuple[str, ...]]:
    """The sparse tensors of a tree by name, each with the stored names of its components."""
    if isinstance(node, Opaque) and node.tag == SPARSE:
        return {name_of(place): tuple(t.name for t in stored_tensors(node))}
    if isinstance(node, Opaque):
        return sparse_parts(node.value[0] if node.tag == MODULE_STATE else node.value, place)
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
    return {name: parts for key, item in items for name, parts in sparse_parts(item, (*place, key)).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTree:
    """A state flattened by DCP's own rules: by dotted name the stored tensor's name or the object, and each one's path."""

    tensors: Mapping[str, str]
    objects: Mapping[str, Any]
    paths: Mapping[str, Path]


def flat_tree(tree: Any, index: RoutingIndex, load: Callable[[set[str]], Mapping[str, torch.Tensor]], codecs: ObjectCodecs) -> FlatTree:
    """Flattens a decoded tree as `dcp.save` flattens the state that it stands for.

    Args:
        tree: The decoded tree.
        index: The routing index.
        load: Reads tensors by name; asked only for those that DCP stores inside an object (in a tuple, say).
        codecs: Codecs for the tree's tags.

    Raises:
        UsageError: It is no dict, or two places get the same dotted name.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # takes a second to import, and only DCP's format needs it

    plain = plain_tree(tree, sparse=False)  # stock DCP can't store a sparse tensor
    if not isinstance(plain, dict):
        raise UsageError("the state is no dict, and DCP stores dicts", hint="choose tensors with --include '*': they are stored by name")
    inside = load({t.name for node in _objects(plain) for t in stored_tensors(node)})
    stand_ins: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}

    def tensor(name: str) -> torch.Tensor:
        if name in inside:
            return inside[name]
        if name not in stand_ins:
            stand_ins[name] = made = torch.empty(index.shape(name), dtype=torch_dtype(index.dtype(name)), device="meta")
            names[id(made)] = name
        return stand_ins[name]

    names.update({id(value): name for name, value in inside.items()})
    try:
        flat, paths = flatten_state_dict(unflatten(plain, tensor, codecs))
    except ValueError as error:
        raise UsageError(
            f"two places of the state get the same name in DCP: {error}", hint="rename one of the keys, or choose with --exclude"
        ) from error
    return FlatTree(
        tensors={fqn: names[id(value)] for fqn, value in flat.items() if isinstance(value, torch.Tensor)},
        objects={fqn: value for fqn, value in flat.items() if not isinstance(value, torch.Tensor)},
        paths=paths,
    )


def _objects(node: Any) -> Iterator[Any]:
    """What DCP stores as one object although it holds tensors: tuples, and what codecs make."""
    if isinstance(node, dict):
        for item in node.values():
            yield from _objects(item)
    elif isinstance(node, list):
        for item in node:
            yield from _objects(item)
    elif isinstance(node, tuple | Opaque):
        yield node
