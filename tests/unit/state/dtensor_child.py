"""One rank of a gloo group that stages DTensors, and after all have staged, loads them back in other layouts. Run by test_state_dtensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_kit import ImageReader, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Partial

from tierstore.errors import UnsupportedTypeError, UsageError
from tierstore.state.image import ImagePool
from tierstore.state.load import load_state
from tierstore.state.sharded import chunk_of
from tierstore.state.stage import stage


class Gathered(ImageReader):
    """Every rank's staged image, exchanged through the group."""

    def __init__(self, mine: Any) -> None:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (bytes(run(mine.source.read(0, mine.nbytes))), mine.tensors, mine.objects))
        super().__init__([_Part(*part) for part in parts])
        self.written = [len(data) for data, _, _ in parts]


class _Part:
    def __init__(self, data: bytes, tensors: Any, objects: bytes) -> None:
        self.data, self.tensors, self.objects, self.nbytes, self.source = data, tensors, objects, len(data), self

    async def read(self, offset: int, nbytes: int) -> bytes:
        return self.data[offset : offset + nbytes]


def body(rank: int, world: int, folder: Path) -> list[int]:
    """Returns how many bytes each rank had staged."""
    mesh = init_device_mesh("cpu", (world,))
    rows, cols = torch.arange(35.0).view(7, 5), torch.arange(24.0).view(4, 6)
    tied = torch.nn.Parameter(distribute_tensor(rows * 3, mesh, [Shard(0)]))
    state = {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "cols": torch.nn.Parameter(distribute_tensor(cols, mesh, [Shard(1)])),
        "same": distribute_tensor(rows, mesh, [Replicate()]),
        "tiny": distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)]),
        "tied": tied,
        "head": tied,
        "mine": torch.full((3,), float(rank)),
        "rank": rank,
    }
    pool = ImagePool(None, max_nbytes=1 << 20)
    reader = Gathered(stage(state, rank=rank, world_size=world, pool=pool))

    whole = load_state(reader, run, rank=rank)
    assert type(whole["cols"]) is torch.nn.Parameter
    assert torch.equal(whole["rows"], rows)
    assert torch.equal(whole["cols"], cols)
    assert torch.equal(whole["same"], rows)
    assert torch.equal(whole["tiny"], torch.ones(1, 3))
    assert whole["head"] is whole["tied"]
    assert torch.equal(whole["tied"], rows * 3)
    assert torch.equal(whole["mine"], torch.full((3,), float(rank)))
    assert whole["rank"] == rank
    assert len(reader.index.find("same").extents) == 1  # of replicas one rank writes
    assert len(reader.index.find("rows").extents) == world

    other = distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)])
    local = other.to_local().data_ptr()
    into = {
        "rows": other,
        "cols": distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)]),
        "same": torch.zeros(7, 5),
        "tiny": distribute_tensor(torch.zeros(1, 3), mesh, [Replicate()]),
        "tied": tied,
        "head": tied,
        "mine": torch.zeros(3),
        "rank": None,
    }
    with torch.no_grad():
        tied.zero_()
    load_state(reader, run, into=into, rank=rank)
    assert isinstance(into["rows"], DTensor)
    assert other.to_local().data_ptr() == local
    assert torch.equal(other.full_tensor(), rows)
    assert torch.equal(into["cols"].full_tensor(), cols)
    assert torch.equal(into["same"], rows)
    assert torch.equal(into["tiny"].full_tensor(), torch.ones(1, 3))
    assert torch.equal(tied.full_tensor(), rows * 3)

    if world > 1:
        expect(UsageError, "spread over 2 processes", lambda: stage(state, pool=pool))
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        expect(UnsupportedTypeError, "not reduced yet", lambda: stage({"p": partial}, rank=rank, world_size=world, pool=pool))
    for shape, placements in (((9, 4), [Shard(0)]), ((2, 9, 4), [Shard(1)])):
        full = torch.arange(float(torch.Size(shape).numel())).view(shape)
        (piece,) = chunk_of(distribute_tensor(full, mesh, placements), "x").pieces
        region = full[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))]
        assert torch.equal(piece.tensor, region)
    return reader.written


def expect(kind: type[Exception], text: str, act: Any) -> None:
    with pytest.raises(kind, match=text):
        act()
