"""Staging chunks that somebody else planned: each is asked for when its place in the image is filled, so memory stays bounded.

`state.stage` lays out a whole state that lies in memory; a door whose caller plans for itself (torch.distributed.checkpoint) brings
chunks with names, places and a way to get each. The layout is made from what was promised; where a chunk turns out to have another
dtype, all are asked once to learn their true ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tierstore.errors import UnsupportedTypeError, UsageError
from tierstore.format.shard import ChunkSpec, Placement, ShardPlan, plan_shard, tensor_entries
from tierstore.names import shard_name
from tierstore.state.bits import dtype_name
from tierstore.state.copy_threads import CopyThreads
from tierstore.state.copying import Move, copy_all
from tierstore.state.device_copy import Arrival, DeviceCopies
from tierstore.state.guard import check_storable
from tierstore.state.image import Image, ImagePool
from tierstore.state.staged import StagedState, staged_in
from tierstore.tiers.stall import StageTimes

__all__ = ["PlannedChunk", "stage_chunks"]

_BATCH_NBYTES = 64 << 20
"""Chunks are got and copied in groups of about this size: what a planner makes for us (casts, gathers) lives no longer than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChunk:
    """A chunk to store: where it belongs, and how to get it.

    Attributes:
        spec: Its place; the dtype may turn out to be another one.
        get: Gives the chunk, on any device, with any strides; may be called more than once.
    """

    spec: ChunkSpec
    get: Callable[[], torch.Tensor] = field(repr=False)


class _OtherDtypeError(UsageError):
    """Internal: a chunk is not of the dtype that was promised."""


def stage_chunks(
    chunks: Sequence[PlannedChunk],
    *,
    objects: bytes,
    rank: int,
    world_size: int,
    pool: ImagePool,
    aliases: Mapping[str, str] | None = None,
    omitted: Mapping[str, int] | None = None,
    make_room: Callable[[int], None] | None = None,
    threads: CopyThreads | None = None,
    devices: DeviceCopies | None = None,
) -> StagedState:
    """Lays `chunks` out as a shard and copies each into an image of `pool`, once.

    Args:
        chunks: The chunks.
        objects: This rank's encoded tree.
        rank: This process among those that save together.
        world_size: How many save together.
        pool: Where the memory comes from.
        aliases: Further names of tensors among `chunks`: alias to stored name.
        omitted: Names of tensors that were left out on purpose, and their lengths as wholes, in bytes.
        make_room: Called with the image's length before memory is asked for.
        threads: Who copies; None: a few threads that are started for this.
        devices: Devices whose copies go on after this has returned; None: all copies are waited for.

    Raises:
        UnsupportedTypeError: A chunk can't be stored; names the tensor.
        UsageError: A chunk has not the shape that was planned, or chunks contradict each other.
        DeadlineError, TierFullError: No memory for the image.
    """
    workers = threads or CopyThreads()

    def stage(chosen: Sequence[PlannedChunk]) -> StagedState:
        return _stage(chosen, objects, rank, world_size, pool, aliases or {}, make_room, workers, devices)

    try:
        try:
            return replace(stage(chunks), omitted=omitted or {})
        except _OtherDtypeError:
            true = [replace(c, spec=replace(c.spec, dtype=dtype_name(c.get().dtype))) for c in chunks]
            return replace(stage(true), omitted=omitted or {})
    finally:
        if workers is not threads:
            workers.close()


def _stage(
    chunks: Sequence[PlannedChunk],
    objects: bytes,
    rank: int,
    world_size: int,
    pool: ImagePool,
    aliases: Mapping[str, str],
    make_room: Callable[[int], None] | None,
    threads: CopyThreads,
    devices: DeviceCopies | None,
) -> StagedState:
    began = time.perf_counter()
    plan = _plan(chunks, aliases, rank, world_size, pool)
    planned = time.perf_counter()
    if make_room is not None:
        make_room(plan.nbytes)
    image = pool.acquire(plan.nbytes)
    acquired, made_s = time.perf_counter(), image.allocate_s
    arrival = Arrival()
    try:
        image.touch(threads)
        touched = time.perf_counter()
        image.view[: len(plan.header)] = plan.header
        _fill(chunks, plan, image, arrival, threads, devices)
    except BaseException:
        arrival.settle()
        image.release()
        raise
    return staged_in(
        image,
        arrival,
        tensors=tensor_entries(plan, shard_name(rank, world_size)),
        objects=objects,
        seconds=StageTimes(
            plan_s=planned - began,
            wait_s=acquired - planned - made_s,
            allocate_s=image.allocate_s,
            copy_s=time.perf_counter() - touched,
        ),
    )


def _plan(chunks: Sequence[PlannedChunk], aliases: Mapping[str, str], rank: int, world_size: int, pool: ImagePool) -> ShardPlan:
    signature = (rank, world_size, tuple(c.spec for c in chunks), tuple(sorted(aliases.items())))
    known = pool.layout(signature)
    if isinstance(known, ShardPlan):
        return known
    plan = plan_shard([c.spec for c in chunks], aliases=aliases, facts={"rank": rank, "world_size": world_size})
    pool.remember(signature, plan)
    return plan


def _fill(
    chunks: Sequence[PlannedChunk],
    plan: ShardPlan,
    image: Image,
    arrival: Arrival,
    threads: CopyThreads,
    devices: DeviceCopies | None,
) -> None:
    send = None if devices is None else devices.sender(image, arrival)
    by_place = {(c.spec.name, c.spec.offsets): c for c in chunks}
    batch: list[Move] = []
    nbytes = 0
    for placement in plan.placements:
        tensor = _got(by_place[placement.spec.name, placement.spec.offsets], placement)
        batch.append(Move(tensor=tensor, begin=placement.begin, nbytes=placement.end - placement.begin))
        nbytes += placement.end - placement.begin
        if nbytes >= _BATCH_NBYTES:
            copy_all(batch, image.view, threads=threads, send=send)
            batch, nbytes = [], 0
    copy_all(batch, image.view, threads=threads, send=send)


def _got(chunk: PlannedChunk, placement: Placement) -> torch.Tensor:
    spec = placement.spec
    tensor = chunk.get()
    check_storable(tensor, f"tensor {spec.name!r}")
    if tensor.layout is not torch.strided:
        raise UnsupportedTypeError(
            f"tensor {spec.name!r} is sparse", hint="save it with Store.save, which stores its components; or as dense: .to_dense()"
        )
    if dtype_name(tensor.dtype) != spec.dtype:
        raise _OtherDtypeError(
            f"tensor {spec.name!r} came as {dtype_name(tensor.dtype)} and was {spec.dtype} a moment ago",
            hint="a planner gives the same dtype each time",
        )
    if tuple(tensor.shape) != spec.shape:
        raise UsageError(
            f"tensor {spec.name!r}: a chunk of shape {tuple(tensor.shape)} came where {spec.shape} was planned",
            hint="a planner that changes shapes changes its plan too: WriteItem.tensor_data.size and .chunk",
        )
    return tensor.detach().resolve_conj().resolve_neg()
