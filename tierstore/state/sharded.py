"""Tensors that are spread over processes: which rectangles of the global tensor lie here, and who else holds the same ones.

Three kinds: DTensor, torch's older ShardedTensor, and any tensor that says by four attributes which chunks of a global one it holds
(``CheckpointableTensor`` of torch 2.14). torch.distributed is imported by nobody here: they are recognised by their classes' names or
their attributes, so that plain states pay nothing for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierstore.errors import UnsupportedTypeError

__all__ = ["Chunk", "Piece", "Spread", "chunk_of", "is_dtensor", "is_spread", "local_runs", "shard_range"]

Runs = list[tuple[int, int]]
"""Half-open ranges of one dimension, in elements, increasing, not adjacent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle that lies here: `tensor` covers ``[offsets, offsets + tensor.shape)`` of the global tensor, in elements."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Which processes a tensor is spread over."""

    ranks: tuple[int, ...]
    """Their global ranks, in the mesh's order; empty where the tensor does not tell."""
    shape: tuple[int, ...] = ()
    """The mesh's."""
    sharded: tuple[bool, ...] = ()
    """Per axis of the mesh: whether its ranks hold different parts; along the others they hold the same."""
    layout: str = ""
    """The placements; ranks that hold a tensor in the same layout hold, place by place of the mesh, the same parts of it."""

    def sets(self) -> tuple[int, ...]:
        """For each of `ranks` a number: the ranks of one number hold the same part."""
        numbers = [0] * len(self.ranks)
        for place, coordinate in enumerate(itertools.product(*(range(size) for size in self.shape))):
            number = 0
            for at, size, sharded in zip(coordinate, self.shape, self.sharded, strict=True):
                number = number * size + at if sharded else number
            numbers[place] = number
        return tuple(numbers)

    @property
    def parts(self) -> int:
        """How many different parts there are."""
        return math.prod(size for size, sharded in zip(self.shape, self.sharded, strict=True) if sharded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The local part of a tensor: its pieces are disjoint, and none of them is empty unless the global tensor is."""

    tensor: torch.Tensor
    """All of the local memory; several pieces are parts of it."""
    pieces: tuple[Piece, ...]
    global_shape: tuple[int, ...]
    spread: Spread | None = None
    """None: this process has all of it for itself."""

    @property
    def ranks(self) -> int:
        """How many processes the tensor is spread over, as far as it tells."""
        return max(1, len(self.spread.ranks)) if self.spread is not None else 1


def is_dtensor(value: object) -> bool:
    return _is_a(value, "DTensor")


def is_spread(value: object) -> bool:
    """Whether a tensor is the local part of a global one."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return _says_its_chunks(value)
    return is_dtensor(value) or _is_a(value, "ShardedTensor") or _says_its_chunks(value)


def _is_a(value: object, name: str) -> bool:
    return any(c.__name__ == name and c.__module__.startswith("torch.distributed.") for c in type(value).__mro__)


def _says_its_chunks(value: object) -> bool:
    return hasattr(value, "global_offsets") and all(hasattr(value, n) for n in ("global_shape", "local_offsets", "local_sizes"))


def chunk_of(value: Any, shown: str, meshes: MutableMapping[int, tuple[int, ...]] | None = None) -> Chunk:
    """The local part of a tensor that is spread over processes.

    Args:
        value: The tensor; see `is_spread`.
        shown: Its path in the state, for errors.
        meshes: Remembers the ranks of meshes by their ids, for callers that ask for many tensors; valid while these live.

    Raises:
        UnsupportedTypeError: Partial placements (the values are not summed yet), or a local part that is not what its layout says.
    """
    if is_dtensor(value):
        return _of_dtensor(value, shown, {} if meshes is None else meshes)
    if _is_a(value, "ShardedTensor"):
        shape = tuple(value.metadata().size)
        found = [Piece(tensor=s.tensor.detach(), offsets=tuple(s.metadata.shard_offsets)) for s in value.local_shards()]
        first = found[0].tensor if found else torch.empty(0, dtype=value.dtype, device="cpu")
        return _checked(first, found, shape, shown)
    local = value.detach()
    found = []
    for begin, size, offsets in zip(value.local_offsets, value.local_sizes, value.global_offsets, strict=True):
        if not len(begin) == len(size) == local.ndim or any(b < 0 or b + n > m for b, n, m in zip(begin, size, local.shape, strict=True)):
            raise UnsupportedTypeError(
                f"{shown} says that {tuple(size)} at {tuple(begin)} of it is a chunk, but its local part is {tuple(local.shape)}",
                hint="local_offsets and local_sizes are positions in the local tensor, one per dimension",
            )
        part = local[tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))]
        found.append(Piece(tensor=part, offsets=tuple(offsets)))
    return _checked(local, found, tuple(value.global_shape), shown)


def _checked(tensor: torch.Tensor, pieces: Sequence[Piece], shape: tuple[int, ...], shown: str) -> Chunk:
    for piece in pieces:
        fits = len(piece.offsets) == piece.tensor.ndim == len(shape)
        if not fits or any(o < 0 or o + n > g for o, n, g in zip(piece.offsets, piece.tensor.shape, shape, strict=True)):
            raise UnsupportedTypeError(
                f"{shown} says that {tuple(piece.tensor.shape)} lies at {piece.offsets} of a tensor of shape {shape}: it does not fit",
                hint="its global shape, its chunks' offsets and their sizes contradict each other",
            )
    kept = tuple(p for p in pieces if p.tensor.numel() or 0 in shape)
    return Chunk(tensor=tensor, pieces=kept, global_shape=shape, spread=Spread(ranks=(), layout="chunks"))


# ---- DTensor


def _of_dtensor(dtensor: Any, shown: str, meshes: MutableMapping[int, tuple[int, ...]]) -> Chunk:
    mesh, placements = dtensor.device_mesh, tuple(dtensor.placements)
    global_shape = tuple(dtensor.shape)
    for placement in placements:
        if placement.is_partial():
            raise UnsupportedTypeError(
                f"{shown} is a DTensor with the placement {placement}: its values are not reduced yet",
                hint="redistribute it to Shard or Replicate before saving",
            )
    if (ranks := meshes.get(id(mesh))) is None:
        ranks = meshes[id(mesh)] = tuple(mesh.mesh.flatten().tolist())
    spread = Spread(
        ranks=ranks,
        shape=tuple(mesh.shape),
        # Of an empty tensor all ranks hold the same: nothing.
        sharded=tuple(not p.is_replicate() and 0 not in global_shape for p in placements),
        layout=f"{tuple(mesh.shape)} {placements}",
    )
    local = dtensor.detach().to_local()
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this process is outside the mesh
        return Chunk(tensor=local.new_empty(0), pieces=(), global_shape=global_shape, spread=spread)
    if 0 in global_shape:
        empty = local.new_empty(global_shape)
        return Chunk(tensor=empty, pieces=(Piece(tensor=empty, offsets=(0,) * empty.ndim),), global_shape=global_shape, spread=spread)
    runs = local_runs(global_shape, tuple(mesh.shape), placements, coordinate)
    sizes = tuple(sum(end - begin for begin, end in dim) for dim in runs)
    if tuple(local.shape) != sizes:
        raise UnsupportedTypeError(
            f"{shown} is a DTensor whose local part has the shape {tuple(local.shape)}; its placements {placements} say {sizes}",
            hint="redistribute it to plain Shard or Replicate placements before saving",
        )
    return Chunk(tensor=local, pieces=tuple(_pieces(local, runs)), global_shape=global_shape, spread=spread)


def local_runs(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Any], coordinate: Sequence[int]) -> list[Runs]:
    """Which ranges of each dimension the rank at `coordinate` of a mesh holds; its local part is their product, in order.

    Placements are applied from the first axis of the mesh to the last. ``_StridedShard(dim, split_factor=n)`` cuts the dimension in n
    parts as torch.chunk does, each of them in as many as the axis has ranks, and a rank holds its piece of every part. Where n is the
    number of parts that the axes after it make of the same dimension, it says that these were applied first (FSDP2 over tensor
    parallelism), and so they are here: with uneven sizes the two readings differ, and this one is what FSDP2 holds.
    """
    runs: list[Runs] = [[(0, size)] if size else [] for size in shape]
    later: list[tuple[int, int, int]] = []  # dimension, extent, place: applied when all others are, the last one first
    for axis, (placement, extent, at) in enumerate(zip(placements, mesh, coordinate, strict=True)):
        if placement.is_replicate():
            continue
        dim = int(placement.dim) % len(shape)
        factor = int(getattr(placement, "split_factor", 1)) if type(placement).__name__ == "_StridedShard" else 1
        after = [n for p, n in zip(placements[axis + 1 :], mesh[axis + 1 :], strict=True) if _shards(p, dim, len(shape))]
        if after and factor == math.prod(after) and type(placement).__name__ == "_StridedShard":
            later.append((dim, extent, at))
        else:
            runs[dim] = _sharded(runs[dim], factor, extent, at)
    for dim, extent, at in reversed(later):
        runs[dim] = _sharded(runs[dim], 1, extent, at)
    return runs


def _shards(placement: Any, dim: int, ndim: int) -> bool:
    return not placement.is_replicate() and int(placement.dim) % ndim == dim


def _sharded(runs: Runs, factor: int, extent: int, at: int) -> Runs:
    """What rank `at` of `extent` holds of each of `factor` parts."""
    total = sum(end - begin for begin, end in runs)
    kept: Runs = []
    for number in range(factor):
        first, last = shard_range(total, factor, number)
        begin, end = shard_range(last - first, extent, at)
        for run in _cut(runs, first + begin, first + end):
            if kept and kept[-1][1] == run[0]:
                kept[-1] = (kept[-1][0], run[1])
            else:
                kept.append(run)
    return kept


def _cut(runs: Runs, begin: int, end: int) -> Runs:
    """The elements number `begin` to `end` of all that `runs` hold."""
    found: Runs = []
    passed = 0
    for first, last in runs:
        low, high = max(begin, passed), min(end, passed + last - first)
        if low < high:
            found.append((first + low - passed, first + high - passed))
        passed += last - first
    return found


def _pieces(local: torch.Tensor, runs: Sequence[Runs]) -> list[Piece]:
    if all(len(dim) == 1 for dim in runs):
        return [Piece(tensor=local, offsets=tuple(dim[0][0] for dim in runs))]
    places = []  # per dimension: where a run begins in the local part, and the run
    for dim in runs:
        begins = itertools.accumulate((end - begin for begin, end in dim), initial=0)
        places.append([(at, begin, end) for at, (begin, end) in zip(begins, dim, strict=False)])
    return [
        Piece(
            tensor=local[tuple(slice(at, at + end - begin) for at, begin, end in chosen)],
            offsets=tuple(begin for _, begin, _ in chosen),
        )
        for chosen in itertools.product(*places)
    ]


def shard_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Which of `size` elements part `index` of `parts` holds, split as `torch.chunk` does: ``ceil(size / parts)`` each but the last."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)
