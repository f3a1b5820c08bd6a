"""The layout of a shard: its safetensors header and every tensor's place, planned once for each structure of a state.

It depends on names, shapes and dtypes alone, and is remembered by the pool beside the images that are made for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.format.dtypes import DTYPES
from tierstore.format.index import Extent, TensorEntry
from tierstore.format.shard import ChunkSpec, ShardPlan, plan_shard, tensor_entries
from tierstore.names import shard_name
from tierstore.state.flatten import FlatState, ViewOf
from tierstore.state.image import ImagePool
from tierstore.state.ownership import Ownership

__all__ = ["Layout", "layout_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each tensor of a rank's share goes, and what the routing index says of them."""

    plan: ShardPlan
    tensors: tuple[TensorEntry, ...]


def layout_of(flat: FlatState, owned: Ownership, rank: int, world_size: int, pool: ImagePool) -> Layout:
    """The layout of what this rank writes of `flat`: recalled from `pool`, else planned and remembered there."""
    specs = tuple(
        (owned.names.get(leaf.name, leaf.name), leaf.dtype, tuple(piece.tensor.shape), leaf.global_shape, piece.offsets)
        for leaf in flat.leaves
        if leaf.name in owned.written
        for piece in leaf.pieces
    )
    stored = {leaf.name for leaf in flat.leaves if leaf.name in owned.written and leaf.pieces}
    views = tuple(view for view in flat.views if view.base in stored)
    stored.update(view.name for view in views)
    aliases = {alias: name for alias, name in flat.aliases.items() if name in stored}
    renamed = {name: owned.names[name] for name in (*stored, *aliases) if name in owned.names}
    signature = (rank, world_size, specs, tuple(aliases.items()), views, tuple(sorted(renamed.items())))
    known = pool.layout(signature)
    if isinstance(known, Layout):
        return known
    layout = _plan(specs, aliases, views, renamed, rank, world_size)
    pool.remember(signature, layout)
    return layout


_Spec = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _plan(
    specs: Sequence[_Spec], aliases: Mapping[str, str], views: Sequence[ViewOf], renamed: Mapping[str, str], rank: int, world_size: int
) -> Layout:
    def stored_as(name: str) -> str:
        return renamed.get(name, name)

    inner = {view.name for view in views}
    plan = plan_shard(
        [ChunkSpec(name=name, dtype=dtype, shape=shape, global_shape=whole, offsets=at) for name, dtype, shape, whole, at in specs],
        aliases={stored_as(alias): stored_as(name) for alias, name in aliases.items() if name not in inner},
        facts={"rank": rank, "world_size": world_size},
    )
    file = shard_name(rank, world_size)
    # Views are byte ranges within what they are views of.
    begins = {p.spec.name: p.begin for p in plan.placements}
    lying: dict[str, TensorEntry] = {}
    for view in views:
        begin = begins[stored_as(view.base)] + view.offset
        end = begin + math.prod(view.shape) * DTYPES[view.dtype].itemsize
        extent = Extent(file=file, begin=begin, end=end, offsets=(0,) * len(view.shape), sizes=view.shape)
        lying[view.name] = TensorEntry(name=stored_as(view.name), dtype=view.dtype, shape=view.shape, extents=(extent,))
    for alias, name in aliases.items():
        if name in lying:
            lying[alias] = replace(lying[name], name=stored_as(alias))
    return Layout(plan=plan, tensors=(*tensor_entries(plan, file), *lying.values()))
