"""Staging: a state becomes the image of a shard file in memory, in one copy. `save` returns when this is done.

The layout (safetensors header and every tensor's place) depends on names, shapes and dtypes alone; it is planned once per structure and
remembered by the pool, so that a steady-state save costs one warm memcpy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from tierstore.errors import UsageError
from tierstore.format.dtypes import DTYPES
from tierstore.format.index import Extent, TensorEntry
from tierstore.format.objects import ObjectCodecs, encode_objects
from tierstore.format.shard import ChunkSpec, ShardPlan, plan_shard, tensor_entries
from tierstore.names import shard_name
from tierstore.state.codecs import default_codecs
from tierstore.state.copying import Move, copy_all
from tierstore.state.flatten import FlatState, ViewOf, flatten
from tierstore.state.image import ImagePool
from tierstore.state.ownership import Ownership, by_rank
from tierstore.state.ranks import JointSave

__all__ = ["ImageSource", "StageTimes", "StagedState", "stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Where the stall of a save went, in seconds."""

    plan_s: float
    """Walking the state, encoding its objects, and planning or recalling the layout."""
    wait_s: float
    """Getting an image: waiting for an earlier save, or making a new one."""
    copy_s: float
    agree_s: float = 0.0
    """Comparing fingerprints, and waiting for the other ranks of the save."""


class ImageSource:
    """The staged bytes as a `storage.contract.Source`: reads are read-only views of the image, nothing is copied."""

    __slots__ = ("_view",)

    def __init__(self, view: memoryview) -> None:
        self._view = view.toreadonly()

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    async def read(self, offset: int, nbytes: int) -> memoryview:
        if not 0 <= offset <= offset + nbytes <= self._view.nbytes:
            raise UsageError(f"bytes {offset} to {offset + nbytes} lie outside of a staged image of {self._view.nbytes}")
        return self._view[offset : offset + nbytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedState:
    """A state in host memory, independent of the tensors that it came from.

    Attributes:
        source: The shard file's bytes.
        tensors: What the routing index will say of them.
        objects: This rank's encoded tree: everything that is not a tensor, and references to those.
        nbytes: Length of the shard, in bytes.
        seconds: Where the time went.
    """

    source: ImageSource
    tensors: tuple[TensorEntry, ...]
    objects: bytes
    nbytes: int
    seconds: StageTimes
    _free: Callable[[], None] = field(repr=False)

    def release(self) -> None:
        """Gives the image back to its pool, when its bytes are on a tier; a second call does nothing."""
        self._free()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    plan: ShardPlan
    tensors: tuple[TensorEntry, ...]


def stage(
    state: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    pool: ImagePool,
    codecs: ObjectCodecs | None = None,
    timeout: float | None = None,
    threads: int | None = None,
    make_room: Callable[[int], None] | None = None,
    joint: JointSave | None = None,
) -> StagedState:
    """Copies `state` into an image of `pool`. Changing the state afterwards changes nothing of what is saved.

    Args:
        state: Any nesting of dicts, lists and tuples of tensors and objects.
        rank: This process among those that save together.
        world_size: How many save together.
        pool: Where the memory comes from.
        codecs: Codecs for further types; None: torch's own.
        timeout: Seconds to wait for memory that earlier saves hold; None: without limit.
        threads: How many threads copy; None: few.
        make_room: Called with the image's length before memory is asked for: the backlog's rule (`Worker.make_room`); its errors pass.
        joint: How this rank agrees with the others on who writes what; None: each rank writes all plain tensors that it has.

    Raises:
        UnsupportedTypeError: The state holds something that can't be stored; names its place. Nothing was changed.
        UsageError: A tensor is spread over more processes than `world_size`.
        DeadlineError, TierFullError: No memory for the image.
        RankError: Another rank can't save; nothing was staged on any.
    """
    began = time.perf_counter()
    codecs = codecs or default_codecs()
    with _telling(joint):
        flat = flatten(state, codecs)
        if flat.ranks > world_size:
            raise UsageError(
                f"the state has tensors spread over {flat.ranks} processes, but {world_size} save together",
                hint="open the store in every process of the group, without rank= and world_size=",
            )
    flattened = time.perf_counter()
    owned = by_rank(flat, rank) if joint is None else joint.settle(flat)
    settled = time.perf_counter()
    with _telling(joint):
        objects = encode_objects(flat.tree(owned.names), codecs)
        layout = _layout(flat, owned, rank, world_size, pool)
        planned = time.perf_counter()
        if make_room is not None:
            make_room(layout.plan.nbytes)
        image = pool.acquire(layout.plan.nbytes, timeout)
    acquired = time.perf_counter()
    try:
        if joint is not None:
            joint.ready()
        ready = time.perf_counter()
        view = image.view[: layout.plan.nbytes]
        view[: len(layout.plan.header)] = layout.plan.header
        pieces = {
            (owned.names.get(leaf.name, leaf.name), piece.offsets): piece.tensor
            for leaf in flat.leaves
            if leaf.name in owned.written
            for piece in leaf.pieces
        }
        copy_all(
            [Move(tensor=pieces[p.spec.name, p.spec.offsets], begin=p.begin, nbytes=p.end - p.begin) for p in layout.plan.placements],
            view,
            threads=threads,
        )
    except BaseException:
        image.release()
        raise
    return StagedState(
        source=ImageSource(view),
        tensors=layout.tensors,
        objects=objects,
        nbytes=layout.plan.nbytes,
        seconds=StageTimes(
            plan_s=flattened - began + planned - settled,
            agree_s=settled - flattened + ready - acquired,
            wait_s=acquired - planned,
            copy_s=time.perf_counter() - ready,
        ),
        _free=image.release,
    )


def _telling(joint: JointSave | None) -> AbstractContextManager[None]:
    return nullcontext() if joint is None else joint.telling()


def _layout(flat: FlatState, owned: Ownership, rank: int, world_size: int, pool: ImagePool) -> _Layout:
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
    if isinstance(known, _Layout):
        return known
    layout = _plan(specs, aliases, views, renamed, rank, world_size)
    pool.remember(signature, layout)
    return layout


_Spec = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _plan(
    specs: Sequence[_Spec], aliases: Mapping[str, str], views: Sequence[ViewOf], renamed: Mapping[str, str], rank: int, world_size: int
) -> _Layout:
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
    return _Layout(plan=plan, tensors=(*tensor_entries(plan, file), *lying.values()))
