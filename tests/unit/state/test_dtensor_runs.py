"""Which rows of a DTensor lie on which rank: compared with what torch's own placements cut, for meshes, sizes and nestings of all kinds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from tierstore.state.sharded import Spread, local_runs

MESHES_1D = [((n,), (p,)) for n in (1, 2, 3, 4, 8) for p in (Shard(0), Shard(1), Replicate(), _StridedShard(0, split_factor=2))]
MESHES_2D = [
    ((outer, inner), placements)
    for outer, inner in ((2, 2), (2, 3), (3, 2), (4, 2), (2, 4))
    for placements in (
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Replicate(), Shard(0)),
        (Shard(1), Replicate()),
        (_StridedShard(0, split_factor=inner), Shard(0)),  # FSDP2 over tensor parallelism
        (_StridedShard(1, split_factor=inner), Shard(1)),
        (_StridedShard(0, split_factor=3), Replicate()),  # a local part of many runs
        (Shard(0), _StridedShard(0, split_factor=2)),
        (_StridedShard(0, split_factor=inner), Shard(1)),
    )
]


def torch_local(full: torch.Tensor, mesh: tuple[int, ...], placements: tuple[Any, ...], coordinate: tuple[int, ...]) -> torch.Tensor:
    steps = list(zip(placements, mesh, coordinate, strict=True))
    if is_fsdp_over_tp(placements):  # what fully_shard does with a parameter that parallelize_module has sharded
        steps = [steps[1], (Shard(placements[0].dim), *steps[0][1:])]
    for placement, extent, at in steps:
        if not placement.is_replicate():
            full = placement._split_tensor(full, extent, with_padding=False)[0][at]
    return full


def is_fsdp_over_tp(placements: tuple[Any, ...]) -> bool:
    return len(placements) == 2 and isinstance(placements[0], _StridedShard) and placements[1] == Shard(placements[0].dim)


def taken(full: torch.Tensor, runs: list[list[tuple[int, int]]]) -> torch.Tensor:
    for dim, ranges in enumerate(runs):
        index = torch.tensor([i for begin, end in ranges for i in range(begin, end)], dtype=torch.long)
        full = full.index_select(dim, index)
    return full


@pytest.mark.parametrize(("mesh", "placements"), [*MESHES_1D, *MESHES_2D], ids=str)
def test_runs_are_what_torch_cuts(mesh: tuple[int, ...], placements: tuple[Any, ...]) -> None:
    for rows, columns in itertools.product((1, 2, 3, 5, 7, 8, 13, 14, 17), (2, 5)):
        full = torch.arange(rows * columns).view(rows, columns)
        seen: list[int] = []
        for coordinate in itertools.product(*(range(n) for n in mesh)):
            runs = local_runs((rows, columns), mesh, placements, coordinate)
            expected = torch_local(full, mesh, placements, coordinate)
            assert torch.equal(taken(full, runs), expected), (rows, columns, coordinate)
            shape, offsets = _compute_local_shape_and_global_offset((rows, columns), mesh, list(coordinate), list(placements))
            if not is_fsdp_over_tp(placements) or (rows, columns)[placements[0].dim] % (mesh[0] * mesh[1]) == 0:  # else they may be off
                assert tuple(shape) == tuple(expected.shape)
                if expected.numel():
                    assert tuple(offsets) == tuple(dim[0][0] for dim in runs)
            if all(at == 0 or not p.is_replicate() for p, at in zip(placements, coordinate, strict=True)):
                seen += expected.flatten().tolist()
        assert sorted(seen) == full.flatten().tolist()  # once each, leaving out replicas


def test_runs_do_not_touch() -> None:
    runs = local_runs((12,), (2,), (_StridedShard(0, split_factor=3),), (1,))
    assert runs == [[(2, 4), (6, 8), (10, 12)]]
    assert local_runs((8,), (1,), (_StridedShard(0, split_factor=4),), (0,)) == [[(0, 8)]]  # one whole, though cut in four


def test_ranks_with_the_same_number_hold_the_same_part() -> None:
    spread = Spread(ranks=tuple(range(6)), shape=(2, 3), sharded=(False, True))
    assert spread.sets() == (0, 1, 2, 0, 1, 2)
    assert spread.parts == 3
    assert Spread(ranks=tuple(range(6)), shape=(2, 3), sharded=(True, False)).sets() == (0, 0, 0, 1, 1, 1)
    assert Spread(ranks=(4, 5), shape=(2,), sharded=(False,)).parts == 1
