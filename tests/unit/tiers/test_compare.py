"""Two checkpoints compared: what digests prove, what only the data tells, and that neither says "same" of what differs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tiers_kit import BLOCK, Shard, SteppedClock, attempt_at, persist_rank, run, tiers_in

from tierstore.format.shard import ChunkSpec, plan_shard, tensor_entries
from tierstore.names import shard_name
from tierstore.tiers.catalog import scan
from tierstore.tiers.commit import commit
from tierstore.tiers.compare import compare_data, compare_indexes, compare_trees
from tierstore.tiers.replica import Replica, open_replica
from tierstore.tiers.tier import Tiers

Array = npt.NDArray[np.uint8]


async def saved(tiers: Tiers, step: int, tensors: Mapping[str, Array], *, ranks: int = 1, axis: int = 0) -> Replica:
    """A checkpoint of `ranks` ranks, each tensor cut along `axis` where that can be."""
    attempt = attempt_at(step)
    for rank in range(ranks):
        pieces = {name: np.array_split(value, ranks, axis=axis) for name, value in tensors.items()}
        specs, values = [], {}
        for name, value in tensors.items():
            piece = pieces[name][rank]
            before = sum(p.shape[axis] for p in pieces[name][:rank])
            offsets = tuple(before if number == axis else 0 for number in range(value.ndim))
            specs.append(ChunkSpec(name=name, dtype="uint8", shape=piece.shape, global_shape=value.shape, offsets=offsets))
            values[name] = piece
        plan = plan_shard(specs)
        data = bytearray(plan.nbytes)
        data[: len(plan.header)] = plan.header
        for placed in plan.placements:
            data[placed.begin : placed.end] = np.ascontiguousarray(values[placed.spec.name]).tobytes()
        shard = Shard(data=bytes(data), tensors=tensor_entries(plan, shard_name(rank, ranks)))
        await persist_rank(tiers, attempt, tiers.authority, rank=rank, world_size=ranks, shard=shard)
    await commit(tiers, attempt, deadline_s=0, clock=SteppedClock())
    info = (await scan(tiers, "run")).find(step)
    assert info is not None
    return await open_replica(tiers, info)


def values(seed: int, rows: int = 8, columns: int = BLOCK) -> Array:
    return np.random.default_rng(seed).integers(0, 255, (rows, columns), dtype=np.uint8)


async def changes(first: Replica, second: Replica) -> dict[str, tuple[str, str]]:
    """Tensor → what digests say, and what the data says where they do not know."""
    found = {}
    for one in compare_indexes(first.index, second.index):
        settled = one
        if one.change == "unknown":
            settled = await compare_data(first, first.index.find(one.name), second, second.index.find(one.name), one)
        found[one.name] = (one.change, settled.change)
    return found


def test_a_block_of_its_own_tells_and_a_shared_one_does_not(tmp_path: Path) -> None:
    async def main() -> None:
        tiers = tiers_in(tmp_path)
        small, large = values(1, 1, 16), values(2)
        other = large.copy()
        other[5, 7] ^= 1
        first = await saved(tiers, 1, {"large": large, "kept": large, "small": small, "still": small})
        second = await saved(tiers, 2, {"large": other, "kept": large, "small": small ^ 1, "still": small})
        assert await changes(first, second) == {
            "large": ("changed", "changed"),
            "kept": ("same", "same"),
            "small": ("unknown", "changed"),
            "still": ("unknown", "same"),
        }
        assert {c for pair in (await changes(first, first)).values() for c in pair} == {"same"}

    run(main())


def test_another_place_within_the_blocks_is_no_change(tmp_path: Path) -> None:
    async def main() -> None:
        tiers = tiers_in(tmp_path)
        table = values(6, 1, 3 * BLOCK - 7)
        first = await saved(tiers, 1, {"table": table})
        second = await saved(tiers, 2, {"before": values(7, 1, 3 * BLOCK - 7), "table": table})
        assert await changes(first, second) == {"before": ("added", "added"), "table": ("unknown", "same")}

    run(main())


@pytest.mark.parametrize(("ranks", "axis"), [(2, 0), (3, 1), (3, 0)])
def test_another_layout_is_compared_by_its_data(tmp_path: Path, ranks: int, axis: int) -> None:
    async def main() -> None:
        tiers = tiers_in(tmp_path)
        table = values(3, 7, 50)
        deep = values(4, 6, 60).reshape(1, 6, 60)
        wrong = deep.copy()
        wrong[0, 5, 59] ^= 1
        first = await saved(tiers, 1, {"table": table, "deep": deep})
        same = await saved(tiers, 2, {"table": table, "deep": deep}, ranks=ranks, axis=axis)
        other = await saved(tiers, 3, {"table": table, "deep": wrong}, ranks=ranks, axis=axis)
        assert {c[1] for c in (await changes(first, same)).values()} == {"same"}
        assert {name: c[1] for name, c in (await changes(first, other)).items()} == {"table": "same", "deep": "changed"}

    run(main())


def test_large_tensors_are_read_slab_by_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.tiers.compare._SLAB_NBYTES", 100)

    async def main() -> None:
        tiers = tiers_in(tmp_path)
        table = values(5, 9, 40)
        wrong = table.copy()
        wrong[8, 0] ^= 1
        first = await saved(tiers, 1, {"table": table})
        second = await saved(tiers, 2, {"table": wrong}, ranks=2)
        third = await saved(tiers, 3, {"table": table}, ranks=2)
        assert (await changes(first, second))["table"][1] == "changed"
        assert (await changes(first, third))["table"][1] == "same"

    run(main())


def test_what_came_went_or_has_another_shape_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        tiers = tiers_in(tmp_path)
        first = await saved(tiers, 1, {"gone": values(1, 2, 8), "grown": values(1, 2, 8)})
        second = await saved(tiers, 2, {"new": values(1, 2, 8), "grown": values(1, 3, 8)})
        found = {one.name: (one.change, one.why) for one in compare_indexes(first.index, second.index)}
        assert found == {"gone": ("removed", ""), "new": ("added", ""), "grown": ("reshaped", "was uint8 2×8")}

    run(main())


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"step": 1, "lr": 0.1}, {"step": 2, "lr": 0.1}, [("step", 1, 2)]),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, [("a.b[1]", 2, 3)]),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1]}}, [("a.b", [1, 2], [1])]),
        ({"a": {"$tuple": [1]}}, {"a": {"$tuple": [2]}}, [("a[0]", 1, 2)]),
        ({"a": 1}, {"b": 1}, [("a", 1, None), ("b", None, 1)]),
        ({"a": None}, {}, [("a", None, None)]),
        ({"a": 1}, {"a": True}, [("a", 1, True)]),
        ({"a": 1}, {"a": 1.0}, [("a", 1, 1.0)]),
        ({"a": 1}, {"a": 1}, []),
    ],
)
def test_trees_of_objects_differ_where_they_differ(first: Any, second: Any, expected: list[Any]) -> None:
    assert list(compare_trees(first, second)) == expected
