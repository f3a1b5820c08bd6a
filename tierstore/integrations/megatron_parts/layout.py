"""How a Megatron checkpoint lies in a store: the state's tree, and the chunks of one rank.

::

    {"megatron": {"version": 1}, "sharded": {key: tensor}, "objects": {unique key: object}, "common": {...}}

A `ShardedTensor` is stored under its key, each rank its main replicas as chunks at their global offsets; so any other sharding of the same
key can be loaded, and `Store.load` gives whole tensors. A `ShardedObject` and the common state are typed values; tensors within them are
stored by the rank that saves them. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica

from tierstore.errors import UnsupportedTypeError, UsageError
from tierstore.format.objects import ObjectCodecs, TensorRef, encode_objects
from tierstore.format.shard import ChunkSpec
from tierstore.state.bits import dtype_name
from tierstore.state.flatten import Leaf, flatten
from tierstore.state.ownership import by_rank
from tierstore.state.sharded import Piece
from tierstore.state.stage_chunks import PlannedChunk

__all__ = ["ABOUT", "COMMON", "OBJECTS", "SHARDED", "Share", "at_global_rank", "share_of"]

ABOUT, SHARDED, OBJECTS, COMMON = "megatron", "sharded", "objects", "common"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank stores: its encoded tree, its chunks, and further names of tensors among them."""

    objects: bytes
    chunks: tuple[PlannedChunk, ...]
    aliases: Mapping[str, str]


def share_of(values: Iterable[Any], common: Mapping[str, Any] | None, *, rank: int, codecs: ObjectCodecs) -> Share:
    """Plans this rank's share.

    Args:
        values: The `ShardedTensor` and `ShardedObject` of its sharded state, replicas too.
        common: The common state, on the rank that saves it.
        rank: This rank.
        codecs: Codecs of the objects.

    Raises:
        UnsupportedTypeError: An object can't be stored; names its place.
        UsageError: Something else than the two stands in the sharded state, or a tensor has no data.
    """
    tensors: dict[str, list[ShardedTensor]] = {}
    objects: dict[str, Any] = {}
    for value in values:
        if isinstance(value, ShardedTensor):
            tensors.setdefault(value.key, []).append(value)
        elif not isinstance(value, ShardedObject):
            raise UsageError(f"the sharded state holds a {type(value).__name__}", hint="wrap it in a ShardedTensor or a ShardedObject")
        elif is_main_replica(value.replica_id):
            objects[value.unique_key] = value.data
    chunks = [_chunk(shard) for shards in tensors.values() for shard in shards if is_main_replica(shard.replica_id) and _has_some(shard)]
    # Views of each other are nothing that matters in these small states, and can't be told apart from ties once they are apart.
    plain = dict_list_map_outplace(_own_memory, {OBJECTS: objects, **({} if common is None else {COMMON: dict(common)})})
    flat = flatten(plain, codecs)
    own = by_rank(flat, rank)
    for view in flat.views:
        raise UnsupportedTypeError(f"{view.name!r} is a view of {view.base!r}", hint="clone it before saving", path=view.name)
    for leaf in flat.leaves:
        name = own.names.get(leaf.name, leaf.name)
        if name in tensors:
            raise UsageError(f"a tensor within an object would be stored as {name!r}, as a ShardedTensor is", hint="rename one of the two")
        chunks += [_piece(name, leaf, piece) for piece in leaf.pieces if leaf.name in own.written]
    tree = {ABOUT: {"version": 1}, SHARDED: {key: TensorRef(key) for key in tensors}, **flat.tree(own.names)}
    aliases = {own.names.get(alias, alias): own.names.get(name, name) for alias, name in flat.aliases.items()}
    return Share(objects=encode_objects(tree, codecs), chunks=tuple(chunks), aliases=aliases)


def at_global_rank(tensor: torch.Tensor, shard: ShardedTensor) -> torch.Tensor:
    """The local tensor with the axes of length 1 that its global shape has before it; the same memory."""
    return tensor[(None,) * shard.prepend_axis_num]


def _has_some(shard: ShardedTensor) -> bool:
    if shard.data is None:
        raise UsageError(f"the ShardedTensor {shard.key!r} has no data", hint="save a state that holds its tensors")
    return shard.data.numel() > 0 or 0 in shard.global_shape


def _chunk(shard: ShardedTensor) -> PlannedChunk:
    tensor = at_global_rank(shard.data.detach(), shard)
    spec = ChunkSpec(
        name=shard.key,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        global_shape=tuple(shard.global_shape),
        offsets=tuple(shard.global_offset),
    )
    return PlannedChunk(spec=spec, get=partial(_itself, tensor))


def _piece(name: str, leaf: Leaf, piece: Piece) -> PlannedChunk:
    shape: Sequence[int] = tuple(piece.tensor.shape)
    spec = ChunkSpec(name=name, dtype=leaf.dtype, shape=tuple(shape), global_shape=leaf.global_shape, offsets=piece.offsets)
    return PlannedChunk(spec=spec, get=partial(_itself, piece.tensor))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _own_memory(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if type(value) is torch.Tensor else value
