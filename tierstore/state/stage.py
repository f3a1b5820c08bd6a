"""Staging: a state becomes the image of a shard file in memory, in one copy. `save` returns when this is done.

The layout (safetensors header and every tensor's place) depends on names, shapes and dtypes alone; it is planned once per structure and
remembered by the pool, so that a steady-state save costs one warm memcpy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tierstore.errors import UsageError
from tierstore.format.dtypes import DTYPES
from tierstore.format.index import Extent, TensorEntry
from tierstore.format.objects import ObjectCodecs, encode_objects
from tierstore.format.shard import ChunkSpec, ShardPlan, plan_shard, tensor_entries
from tierstore.names import shard_name
from tierstore.state.codecs import default_codecs
from tierstore.state.copying import Move, copy_all
from tierstore.state.flatten import FlatState, Leaf, flatten
from tierstore.state.image import ImagePool

__all__ = ["ImageSource", "StageTimes", "StagedState", "stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Where the stall of a save went, in seconds."""

    plan_s: float
    """Walking the state, encoding its objects, and planning or recalling the layout."""
    wait_s: float
    """Getting an image: waiting for an earlier save, or making a new one."""
    copy_s: float


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

    Raises:
        UnsupportedTypeError: The state holds something that can't be stored; names its place. Nothing was changed.
        UsageError: A tensor is spread over more processes than `world_size`.
        DeadlineError, TierFullError: No memory for the image.
    """
    began = time.perf_counter()
    codecs = codecs or default_codecs()
    flat = flatten(state, codecs, rank=rank)
    if flat.ranks > world_size:
        raise UsageError(
            f"the state has tensors spread over {flat.ranks} processes, but {world_size} save together",
            hint="open the store in every process with rank= and world_size= of the process group",
        )
    objects = encode_objects(flat.tree, codecs)
    layout = _layout(flat, rank, world_size, pool)
    planned = time.perf_counter()
    if make_room is not None:
        make_room(layout.plan.nbytes)
    image = pool.acquire(layout.plan.nbytes, timeout)
    acquired = time.perf_counter()
    try:
        view = image.view[: layout.plan.nbytes]
        view[: len(layout.plan.header)] = layout.plan.header
        leaves = {leaf.name: leaf for leaf in flat.leaves}
        copy_all(
            [Move(tensor=leaves[p.spec.name].tensor, begin=p.begin, nbytes=p.end - p.begin) for p in layout.plan.placements],
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
        seconds=StageTimes(plan_s=planned - began, wait_s=acquired - planned, copy_s=time.perf_counter() - acquired),
        _free=image.release,
    )


def _layout(flat: FlatState, rank: int, world_size: int, pool: ImagePool) -> _Layout:
    owned = [leaf for leaf in flat.leaves if leaf.owned]
    specs = tuple((leaf.name, leaf.dtype, tuple(leaf.tensor.shape), leaf.global_shape, leaf.offsets) for leaf in owned)
    signature = (rank, world_size, specs, tuple(flat.aliases.items()), flat.views)
    known = pool.layout(signature)
    if isinstance(known, _Layout):
        return known
    stored = {leaf.name for leaf in owned}
    aliases = {alias: name for alias, name in flat.aliases.items() if name in stored}
    plan = plan_shard([_spec(leaf) for leaf in owned], aliases=aliases, facts={"rank": rank, "world_size": world_size})
    file = shard_name(rank, world_size)
    layout = _Layout(plan=plan, tensors=_entries(flat, plan, file))
    pool.remember(signature, layout)
    return layout


def _spec(leaf: Leaf) -> ChunkSpec:
    return ChunkSpec(name=leaf.name, dtype=leaf.dtype, shape=tuple(leaf.tensor.shape), global_shape=leaf.global_shape, offsets=leaf.offsets)


def _entries(flat: FlatState, plan: ShardPlan, file: str) -> tuple[TensorEntry, ...]:
    """The index's entries: stored tensors and their aliases, and views as byte ranges within what they are views of."""
    entries = list(tensor_entries(plan, file))
    begins = {p.spec.name: p.begin for p in plan.placements}
    views: dict[str, TensorEntry] = {}
    for view in flat.views:
        begin, nbytes = begins[view.base] + view.offset, DTYPES[view.dtype].itemsize
        for size in view.shape:
            nbytes *= size
        extent = Extent(file=file, begin=begin, end=begin + nbytes, offsets=(0,) * len(view.shape), sizes=view.shape)
        views[view.name] = TensorEntry(name=view.name, dtype=view.dtype, shape=view.shape, extents=(extent,))
    for alias, name in flat.aliases.items():
        if name in views:
            same = views[name]
            views[alias] = TensorEntry(name=alias, dtype=same.dtype, shape=same.shape, extents=same.extents)
    return (*entries, *views.values())
