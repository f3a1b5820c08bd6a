"""DTensor: which rectangle of the global tensor lies here, and whether this rank is the one that writes it.

torch.distributed is imported by nobody here: a DTensor is recognised by its class's name, so that plain states pay nothing for it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

from tierstore.errors import UnsupportedTypeError

__all__ = ["Chunk", "chunk_of", "is_dtensor", "shard_range"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The local part of a tensor: `tensor` covers ``[offsets, offsets + tensor.shape)`` of `global_shape`, in elements."""

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    owned: bool
    """This rank writes it. Of ranks that hold the same rectangle one is chosen by a hash of the name, the same on every rank."""
    ranks: int = 1
    """How many processes the tensor is spread over."""


def is_dtensor(value: object) -> bool:
    return any(c.__name__ == "DTensor" and c.__module__.startswith("torch.distributed.") for c in type(value).__mro__)


def chunk_of(dtensor: Any, name: str, shown: str) -> Chunk:
    """The local chunk of a DTensor.

    Args:
        dtensor: The DTensor.
        name: Its name, which all ranks share.
        shown: Its path in the state, for errors.

    Raises:
        UnsupportedTypeError: Partial placements (the values are not summed yet), or a local part that is no rectangle.
    """
    mesh = dtensor.device_mesh
    local = dtensor.detach().to_local()
    global_shape = tuple(dtensor.shape)
    coordinate = mesh.get_coordinate()
    ranks = int(mesh.size())
    if coordinate is None:  # this process is outside the mesh
        return Chunk(
            tensor=local.new_empty((0,) * len(global_shape)),
            global_shape=global_shape,
            offsets=(0,) * len(global_shape),
            owned=False,
            ranks=ranks,
        )
    begins, sizes = [0] * len(global_shape), list(global_shape)
    rows: dict[int, list[int]] = {}
    twin, twins = 0, 1
    for axis, placement in enumerate(dtensor.placements):
        extent, at = int(mesh.shape[axis]), int(coordinate[axis])
        if placement.is_partial():
            raise UnsupportedTypeError(
                f"{shown} is a DTensor with the placement {placement}: its values are not reduced yet",
                hint="redistribute it to Shard or Replicate before saving",
            )
        if placement.is_replicate():
            twin, twins = twin * extent + at, twins * extent
            continue
        dim = int(placement.dim) % max(len(global_shape), 1)
        here = rows.get(dim)
        factor = int(getattr(placement, "split_factor", 1)) if type(placement).__name__ == "_StridedShard" else 1
        if here is None and factor == 1 and dim not in rows:
            begin, end = shard_range(sizes[dim], extent, at)
            begins[dim], sizes[dim] = begins[dim] + begin, end - begin
            continue
        here = here if here is not None else list(range(begins[dim], begins[dim] + sizes[dim]))
        kept: list[int] = []
        for piece in range(factor):
            begin, end = shard_range(len(here), extent * factor, piece * extent + at)
            kept += here[begin:end]
        rows[dim] = kept
    for dim, kept in rows.items():
        begins[dim], sizes[dim] = (kept[0] if kept else 0), len(kept)
        if kept and kept != list(range(kept[0], kept[0] + len(kept))):
            raise UnsupportedTypeError(
                f"{shown} is a DTensor whose local part is not one rectangle ({dtensor.placements})",
                hint="redistribute it so that each rank holds one contiguous range per dimension",
            )
    if tuple(local.shape) != tuple(sizes):
        raise UnsupportedTypeError(
            f"{shown} is a DTensor whose local part has the shape {tuple(local.shape)}; its placements say {tuple(sizes)}",
            hint="redistribute it to plain Shard or Replicate placements before saving",
        )
    return Chunk(
        tensor=local,
        global_shape=global_shape,
        offsets=tuple(begins),
        owned=twin == zlib.crc32(name.encode("utf-8", "surrogatepass")) % twins,
        ranks=ranks,
    )


def shard_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Which of `size` elements part `index` of `parts` holds, split as `torch.chunk` does: ``ceil(size / parts)`` each but the last."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)
