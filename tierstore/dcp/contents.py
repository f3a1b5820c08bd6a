"""What a stored checkpoint looks like to DCP: flat keys as stock's planner makes them, whoever wrote the checkpoint.

Each tensor is shown as one chunk that is all of it: our reader takes any box, so a plan has one entry per tensor however many extents it
was stored in (stock's `.metadata` lists all of them: 26 MiB and seconds on every rank for 3,000 tensors of 64 chunks).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tierstore.format.index import RoutingIndex
from tierstore.format.objects import Opaque, TensorRef
from tierstore.state.bits import torch_dtype
from tierstore.state.stored_kinds import is_omitted
from tierstore.state.unflatten import MODULE_STATE, OMITTED, SPARSE, TENSOR

__all__ = ["Contents", "StoredObject", "contents_of", "metadata_of"]

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """Something that is no tensor, or holds tensors within an object: the part of the tree that it is."""

    node: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A checkpoint by DCP's keys.

    Attributes:
        tensors: Key → the tensor's name in the index.
        objects: Key → the object.
        paths: Key → path in the nested state, as DCP's planners keep it in `Metadata.planner_data`.
    """

    tensors: Mapping[str, str]
    objects: Mapping[str, StoredObject]
    paths: Mapping[str, Path]


def contents_of(tree: Any) -> Contents:
    """Flattens a decoded tree; of two places with the same key the first counts (such a state can't be loaded through DCP at all)."""
    tensors: dict[str, str] = {}
    objects: dict[str, StoredObject] = {}
    paths: dict[str, Path] = {}
    for path, node in _leaves(tree):
        key = ".".join(map(str, path))
        if key in paths:
            continue
        paths[key] = path
        name = _tensor_name(node)
        if name is None:
            objects[key] = StoredObject(node=node)
        else:
            tensors[key] = name
    return Contents(tensors=tensors, objects=objects, paths=paths)


def metadata_of(contents: Contents, index: RoutingIndex, checkpoint_id: str) -> Metadata:
    """The `Metadata` that planners plan with: its size is that of the tensors' list, not of the extents'.

    Raises:
        NotFoundError: The tree names a tensor that the index lacks.
    """
    entries: dict[str, STORAGE_TYPES] = {}
    index.prepare(contents.tensors.values())
    for key in contents.paths:
        name = contents.tensors.get(key)
        if name is None:
            entries[key] = BytesStorageMetadata()
            continue
        size = torch.Size(index.shape(name))
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
        entries[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=torch_dtype(index.dtype(name))),
            size=size,
            chunks=[chunk],
        )
    return Metadata(
        state_dict_metadata=entries,
        planner_data=dict(contents.paths),
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id),
        version="1.0.0",
    )


def _leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Walks as DCP's ``flatten_state_dict`` does: mappings always, and lists that hold tensors or mappings."""
    if isinstance(node, Opaque) and node.tag == MODULE_STATE:
        node = node.value[0]
    if isinstance(node, dict):
        for key, item in node.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(node, list) and _is_walked(node):
        for number, item in enumerate(node):
            yield from _leaves(item, (*path, number))
    elif not is_omitted(node):
        yield path or ("state",), node


def _is_walked(items: list[Any]) -> bool:
    return any(
        _tensor_name(item) is not None
        or isinstance(item, dict)
        or (isinstance(item, Opaque) and item.tag in (MODULE_STATE, OMITTED, SPARSE))
        or (isinstance(item, list) and _is_walked(item))
        for item in items
    )


def _tensor_name(node: Any) -> str | None:
    if isinstance(node, TensorRef):
        return node.name
    if isinstance(node, Opaque) and node.tag == TENSOR:
        name: str = node.value["ref"].name
        return name
    return None
