"""What a stored checkpoint looks like to DCP: flat keys as stock's planner makes them, whoever wrote the checkpoint.

Each tensor is shown as one chunk that is all of it: our reader takes any box, so a plan has one entry per tensor however many extents it
was stored in (stock's `.metadata` lists all of them: 26 MiB and seconds on every rank for 3,000 tensors of 64 chunks).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import STORAGE_TYPES, BytesStorageMetadata, Metadata, StorageMeta

from tierstore.dcp.filled import Keys, Lacking, LeftOut, tensor_metadata
from tierstore.format.index import RoutingIndex
from tierstore.format.objects import Opaque, TensorRef
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
        left_out: Key → what was left out of the checkpoint there, on purpose.
    """

    tensors: Mapping[str, str]
    objects: Mapping[str, StoredObject]
    paths: Mapping[str, Path]
    left_out: Mapping[str, LeftOut]


def contents_of(tree: Any) -> Contents:
    """Flattens a decoded tree; of two places with the same key the first counts (such a state can't be loaded through DCP at all)."""
    tensors: dict[str, str] = {}
    objects: dict[str, StoredObject] = {}
    paths: dict[str, Path] = {}
    left_out: dict[str, LeftOut] = {}
    for path, node in _leaves(tree):
        key = ".".join(map(str, path))
        if key in paths:
            continue
        if is_omitted(node):
            left_out.setdefault(key, LeftOut(path=path, facts=node.value))
            continue
        paths[key] = path
        name = _tensor_name(node)
        if name is None:
            objects[key] = StoredObject(node=node)
        else:
            tensors[key] = name
    return Contents(tensors=tensors, objects=objects, paths=paths, left_out={k: left_out[k] for k in left_out if k not in paths})


def metadata_of(contents: Contents, lacking: Lacking, index: RoutingIndex, checkpoint_id: str) -> Metadata:
    """The `Metadata` that planners plan with, with what `lacking` can fill: its size is that of the tensors' list, not of the extents'.

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
        entries[key] = tensor_metadata(index.dtype(name), index.shape(name))
    filled = {key: contents.left_out[key] for key in lacking.filled()}
    entries.update((key, tensor_metadata(left.facts["dtype"], left.shape)) for key, left in filled.items())
    return Metadata(
        state_dict_metadata=Keys(entries.items(), lacking),
        planner_data={**contents.paths, **{key: left.path for key, left in filled.items()}},
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
    else:
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
