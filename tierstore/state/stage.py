"""Staging: a state becomes the image of a shard file in memory, in one copy. `save` returns when this is done.

The layout is planned once per structure and the memory recycled, so that a steady-state save costs one warm memcpy. `prepare` does
what the first save would have to do beside that: planning, and making memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tierstore.errors import UsageError
from tierstore.format.objects import ObjectCodecs, encode_objects
from tierstore.state.codecs import default_codecs
from tierstore.state.collecting import collector_paused
from tierstore.state.copy_threads import CopyThreads
from tierstore.state.copying import Move, copy_all
from tierstore.state.device_copy import Arrival, DeviceCopies
from tierstore.state.flatten import FlatState, flatten
from tierstore.state.image import Image, ImagePool
from tierstore.state.layout import Layout, layout_of
from tierstore.state.ownership import Ownership, by_rank
from tierstore.state.ranks import JointSave
from tierstore.state.staged import ImageSource, StagedState, staged_in
from tierstore.tiers.stall import StageTimes

__all__ = ["ImageSource", "Prepared", "StageTimes", "StagedState", "prepare", "stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What `prepare` did."""

    nbytes: int
    """What this rank writes of such a state, in bytes."""
    images: int
    """How many images were made; 0 where all was there already."""
    seconds: float


def stage(
    state: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    pool: ImagePool,
    codecs: ObjectCodecs | None = None,
    timeout: float | None = None,
    threads: CopyThreads | int | None = None,
    devices: DeviceCopies | None = None,
    make_room: Callable[[int], None] | None = None,
    joint: JointSave | None = None,
    omit: Sequence[str] = (),
) -> StagedState:
    """Copies `state` into an image of `pool`. Changing the state afterwards changes nothing of what is saved.

    Args:
        state: Any nesting of dicts, lists and tuples of tensors and objects.
        rank: This process among those that save together.
        world_size: How many save together.
        pool: Where the memory comes from.
        codecs: Codecs for further types; None: torch's own.
        timeout: Seconds to wait for memory that earlier saves hold; None: without limit.
        threads: Who copies: a store's threads, or how many are to be started; None: few.
        devices: Devices whose copies go on after this has returned; None: all copies are waited for.
        make_room: Called with the image's length before memory is asked for: the backlog's rule (`Worker.make_room`); its errors pass.
        joint: How this rank agrees with the others on who writes what; None: each rank writes all plain tensors that it has.
        omit: Globs of names of tensors to leave out.

    Raises:
        UnsupportedTypeError: The state holds something that can't be stored; names its place. Nothing was changed.
        UsageError: A tensor is spread over more processes than `world_size`.
        DeadlineError, TierFullError: No memory for the image.
        RankError: Another rank can't save; nothing was staged on any.
    """
    with _workers(threads) as workers:
        plan = _planned(state, codecs or default_codecs(), rank, world_size, pool, joint, omit)
        with _telling(joint):
            if make_room is not None:
                make_room(plan.nbytes)
            image = pool.acquire(plan.nbytes, timeout)
        acquired, made_s = time.perf_counter(), image.allocate_s
        try:
            image.touch(workers)
            touched = time.perf_counter()
            if joint is not None:
                joint.ready()
            ready = time.perf_counter()
            arrival = _fill(image, plan, workers, devices)
        except BaseException:
            image.release()
            raise
    return staged_in(
        image,
        arrival,
        tensors=plan.layout.tensors,
        objects=plan.objects,
        omitted=plan.flat.omitted,
        seconds=StageTimes(
            plan_s=plan.plan_s,
            agree_s=plan.agree_s + ready - touched,
            wait_s=acquired - plan.ended_s - made_s,
            allocate_s=image.allocate_s,
            copy_s=time.perf_counter() - ready,
        ),
    )


def prepare(
    state: Any,
    *,
    images: int,
    room: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    pool: ImagePool,
    codecs: ObjectCodecs | None = None,
    threads: CopyThreads | None = None,
    devices: DeviceCopies | None = None,
    joint: JointSave | None = None,
    omit: Sequence[str] = (),
) -> Prepared:
    """Plans as `stage` does, sees to it that `images` images are there, touched and registered, and starts the threads; copies nothing.

    Args:
        images: How many.
        room: The memory tier's capacity, in bytes: there are no more than it can hold, and one beside them; None: nothing bounds them.
        omit: Globs of names of tensors that saves will leave out.

    Raises:
        UnsupportedTypeError, UsageError, RankError: As `stage`.
        TierFullError: There is no memory for an image.
    """
    began = time.perf_counter()
    with _workers(threads) as workers:
        plan = _planned(state, codecs or default_codecs(), rank, world_size, pool, joint, omit)
        kinds = sorted({piece.tensor.device.type for leaf in plan.flat.leaves for piece in leaf.pieces})

        def touch(image: Image) -> None:
            image.touch(workers)
            if devices is not None:
                for kind in kinds:
                    devices.register(image, kind)

        with _telling(joint):
            workers.start()
            held = images if room is None else room // plan.nbytes
            made = pool.reserve(plan.nbytes, min(images, held + 1), touch)
        if joint is not None:
            joint.ready()
    return Prepared(nbytes=plan.nbytes, images=made, seconds=time.perf_counter() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is to be copied, and where to; `ended_s` is when planning ended, by `time.perf_counter`."""

    flat: FlatState
    owned: Ownership
    objects: bytes
    layout: Layout
    plan_s: float
    agree_s: float
    ended_s: float

    @property
    def nbytes(self) -> int:
        return self.layout.plan.nbytes


def _planned(
    state: Any, codecs: ObjectCodecs, rank: int, world_size: int, pool: ImagePool, joint: JointSave | None, omit: Sequence[str]
) -> _Plan:
    began = time.perf_counter()
    with _telling(joint):
        flat = flatten(state, codecs, omit)
        if flat.ranks > world_size:
            raise UsageError(
                f"the state has tensors spread over {flat.ranks} processes, but {world_size} save together",
                hint="open the store in every process of the group, without rank= and world_size=",
            )
    flattened = time.perf_counter()
    owned = by_rank(flat, rank) if joint is None else joint.settle(flat)
    settled = time.perf_counter()
    with _telling(joint), collector_paused():
        objects = encode_objects(flat.tree(owned.names), codecs)
        layout = layout_of(flat, owned, rank, world_size, pool)
    ended = time.perf_counter()
    agreeing = settled - flattened
    return _Plan(flat=flat, owned=owned, objects=objects, layout=layout, plan_s=ended - began - agreeing, agree_s=agreeing, ended_s=ended)


def _fill(image: Image, plan: _Plan, threads: CopyThreads, devices: DeviceCopies | None) -> Arrival:
    view, placements, arrival = image.view, plan.layout.plan.placements, Arrival()
    view[: len(plan.layout.plan.header)] = plan.layout.plan.header
    names, written = plan.owned.names, plan.owned.written
    pieces = {
        (names.get(leaf.name, leaf.name), piece.offsets): piece.tensor
        for leaf in plan.flat.leaves
        if leaf.name in written
        for piece in leaf.pieces
    }
    moves = [Move(tensor=pieces[p.spec.name, p.spec.offsets], begin=p.begin, nbytes=p.end - p.begin) for p in placements]
    try:
        copy_all(moves, view, threads=threads, send=None if devices is None else devices.sender(image, arrival))
    except BaseException:
        arrival.settle()
        raise
    return arrival


@contextmanager
def _workers(threads: CopyThreads | int | None) -> Iterator[CopyThreads]:
    """A store's threads; or some of our own, which end with this."""
    if isinstance(threads, CopyThreads):
        yield threads
        return
    own = CopyThreads(threads)
    try:
        yield own
    finally:
        own.close()


def _telling(joint: JointSave | None) -> AbstractContextManager[None]:
    return nullcontext() if joint is None else joint.telling()
