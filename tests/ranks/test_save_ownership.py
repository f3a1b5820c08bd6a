"""Which rank writes what: replicated bytes once and balanced, values that differ kept per rank, layouts of many rectangles."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_kit import run_ranks

import tierstore
from tierstore.errors import UsageError
from tierstore.format.part import decode_part
from tierstore.names import part_name


def tiers(folder: Path) -> list[str]:
    return [str(folder / "node"), str(folder / "shared")]


def saved(folder: Path, state: Any, *, step: int = 1, **rules: Any) -> list[Any]:
    """Saves on every rank; returns the tensors that this rank wrote, and how many bytes its shard has."""
    with tierstore.open({"version": 1, "run": "r", "tiers": tier_table(folder), **rules}) as store:
        ticket = store.save(step, state)
        written = sorted(t.name for t in ticket_job(store, ticket))
        ticket.wait("durable", 120)
        return written


def tier_table(folder: Path) -> list[dict[str, str]]:
    return [{"name": n, "uri": str(folder / n), "scope": "node" if n == "node" else "shared"} for n in ("node", "shared")]


def ticket_job(store: tierstore.Store, ticket: Any) -> Any:
    """What this rank's part record says."""
    ticket.wait("committed", 120)
    path = ticket.attempt.path(part_name(store.rank))
    data = Path(store.config.tiers[1].uri, path).read_bytes()
    return list(decode_part(data).index)


# ---- DDP: plain tensors


def saves_replicas(rank: int, world_size: int, folder: Path) -> Any:
    torch.manual_seed(0)
    state = {
        "model": {f"w{i}": torch.randn(64 * (i + 1), 8) for i in range(6)},
        "rng": torch.full((16,), rank, dtype=torch.uint8),
        "pairs": torch.full((4,), float(rank // 2)),
        "steps": torch.tensor(7),
        "only" if rank == 2 else "other": torch.full((2,), float(rank)),
        "rank": rank,
    }
    written = saved(folder, state)
    with tierstore.open(tiers(folder), run="r") as store:
        loaded = store.load(1)
    same = all(torch.equal(loaded[k], state[k]) for k in state if isinstance(state[k], torch.Tensor))
    same = same and all(torch.equal(loaded["model"][k], v) for k, v in state["model"].items())
    return [written, same and loaded["rank"] == rank]


def test_equal_tensors_are_written_once_and_balanced_and_different_ones_are_kept_per_rank(tmp_path: Path) -> None:
    found = run_ranks(4, saves_replicas, tmp_path)
    assert [ok for _, ok in found] == [True] * 4
    every = sorted(name for written, _ in found for name in written)
    # `other` differs on 0, 1 and 3; `pairs` is one value on ranks 0 and 1, another on 2 and 3.
    own = ["rng", "rng@rank1", "rng@rank2", "rng@rank3", "pairs", "pairs@rank2", "other", "other@rank1", "other@rank3", "only"]
    assert every == sorted([*own, *(f"model.w{i}" for i in range(6)), "steps"])
    weights = [sum(64 * (int(name[-1]) + 1) for name in written if name.startswith("model")) for written, _ in found]
    assert weights == [384, 320, 320, 320]  # w5, w4, w3 + w0, w2 + w1: the largest first, each to the least loaded
    with tierstore.open(tiers(tmp_path), run="r") as store:
        opened = store.open_checkpoint(1)
        assert [opened[f"rng@rank{r}" if r else "rng"].full()[0].item() for r in range(4)] == [0, 1, 2, 3]
        assert opened["pairs@rank2"].full()[0] == 1.0


def changes_between_saves(rank: int, world_size: int, folder: Path) -> Any:
    written = []
    with tierstore.open({"version": 1, "run": "r", "tiers": tier_table(folder)}) as store:
        for step, state in enumerate(
            [
                {"a": torch.ones(8), "b": torch.ones(4)},
                {"a": torch.ones(8), "b": torch.full((4,), float(rank))},  # differs now
                {"a": torch.ones(8), "b": torch.ones(4)},
                {"a": torch.ones(8 + rank), "b": torch.ones(4)},  # of different shapes: not one tensor
                {"a": torch.ones(8), "b": torch.ones(4)} if rank else {"b": torch.ones(4), "c": torch.ones(1)},
            ]
        ):
            written.append(sorted(t.name for t in ticket_job(store, store.save(step, state))))
            assert torch.equal(store.load(step)["b"], state["b"])
    return written


def test_each_save_stores_what_is_true_then(tmp_path: Path) -> None:
    found = run_ranks(2, changes_between_saves, tmp_path)
    together = [sorted(x + y) for x, y in zip(*found, strict=True)]
    assert together == [["a", "b"], ["a", "b", "b@rank1"], ["a", "b"], ["a", "a@rank1", "b"], ["a", "b", "c"]]


def saves_shared_memory(rank: int, world_size: int, folder: Path) -> Any:
    big = torch.arange(4096.0)
    tied = torch.full((256,), 2.0)
    state: dict[str, Any] = {"big": big, "head": tied, "emb": tied, "view": big[8:16].view(2, 4), "again": big[8:16].view(2, 4)}
    if rank == 1:
        state["odd"] = {"base": torch.ones(3), "view": torch.ones(1)}
    else:
        base = torch.ones(3)
        state["odd"] = {"base": base, "view": base[1:2]}
    written = saved(folder, state)
    with tierstore.open(tiers(folder), run="r") as store:
        loaded = store.load(1)
        names = sorted(store.open_checkpoint(1))
    assert loaded["head"] is loaded["emb"]
    assert loaded["view"].untyped_storage().data_ptr() == loaded["big"].untyped_storage().data_ptr()
    assert torch.equal(loaded["again"], big[8:16].view(2, 4))
    assert torch.equal(loaded["odd"]["view"], torch.ones(1))
    return [written, names]


def test_ties_and_views_follow_the_rank_that_writes_their_memory(tmp_path: Path) -> None:
    (first, names), (second, _) = run_ranks(2, saves_shared_memory, tmp_path)
    assert set(first) & set(second) == set()
    assert names == sorted(first + second)
    for group in ({"big", "view", "again"}, {"head", "emb"}):
        assert group <= set(first) or group <= set(second)
    # What shares memory on one rank and not on the other is no common tensor, whatever its values are.
    assert {"odd.base", "odd.view"} <= set(first)
    assert {"odd.base@rank1", "odd.view@rank1"} <= set(second)


def takes_a_name(rank: int, world_size: int, folder: Path) -> Any:
    with pytest.raises(UsageError, match="'w@rank1', is another tensor's own"):
        saved(folder, {"w": torch.full((2,), float(rank)), "w@rank1": torch.ones(2)})
    return saved(folder, {"w": torch.ones(2), "w@rank1": torch.ones(2)}, step=2)


def test_a_name_that_another_rank_s_value_needs_is_refused_on_all_ranks(tmp_path: Path) -> None:
    found = run_ranks(2, takes_a_name, tmp_path)
    assert sorted(found[0] + found[1]) == ["w", "w@rank1"]


# ---- DTensors


def saves_dtensors(rank: int, world_size: int, folder: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh("cpu", (4,))
    full = {f"p{i}": torch.arange(float(n * 5)).view(n, 5) + i for i, n in enumerate((40, 30, 20, 7, 3, 1))}
    state: dict[str, Any] = {
        "hsdp": {k: distribute_tensor(v, hsdp, [Replicate(), Shard(0)]) for k, v in full.items()},
        "norm": distribute_tensor(torch.arange(100.0), flat, [Replicate()]),
        "scalar": distribute_tensor(torch.tensor(3.0), flat, [Replicate()]),
        "empty": distribute_tensor(torch.empty(0, 4), flat, [Shard(0)]),
        "uneven": distribute_tensor(torch.arange(10.0).view(5, 2), flat, [Shard(0)]),
        # As tensor parallelism under plain data parallelism leaves it: two meshes, each of which has the whole tensor.
        "tp": distribute_tensor(torch.arange(24.0).view(4, 6), hsdp["shard"], [Shard(1)]),
        "apart": distribute_tensor(torch.arange(8.0) + 100 * (rank // 2), hsdp["shard"], [Shard(0)]),
    }
    written = saved(folder, state)
    with tierstore.open(tiers(folder), run="r") as store:
        loaded = store.load(1)
        into = {k: torch.zeros_like(v) if k != "hsdp" else {n: torch.zeros_like(d) for n, d in v.items()} for k, v in state.items()}
        store.load(1, into)
    for name, value in full.items():
        assert torch.equal(loaded["hsdp"][name], value)
        assert torch.equal(into["hsdp"][name].full_tensor(), value)
    for name in ("norm", "scalar", "empty", "uneven", "tp", "apart"):
        assert torch.equal(loaded[name], state[name].full_tensor()), name
        assert torch.equal(into[name].full_tensor(), state[name].full_tensor()), name
    return written


def test_replicated_chunks_are_written_once_by_the_least_loaded_and_empty_ones_not_at_all(tmp_path: Path) -> None:
    found = run_ranks(4, saves_dtensors, tmp_path)
    chunks = Counter(name for written in found for name in written)
    assert chunks == {
        **{f"hsdp.p{i}": 2 for i in range(5)},
        "hsdp.p5": 1,
        "norm": 1,
        "scalar": 1,
        "empty": 1,
        "uneven": 3,
        "tp": 2,
        "apart": 2,
        "apart@rank2": 2,
    }
    nbytes = [sum(p.stat().st_size for p in Path(tmp_path, "shared", "r").rglob(f"shard-0000{r}*")) for r in range(4)]
    assert max(nbytes) - min(nbytes) <= 800, nbytes  # `norm` has 400 bytes, headers differ a little


def lacks_a_part(rank: int, world_size: int, folder: Path) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    value = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    try:
        saved(folder, {"w": value} if rank == 0 else {"v": torch.ones(1)})
    except tierstore.TierStoreError as error:
        return error.message
    return None


def test_a_tensor_that_some_ranks_of_its_mesh_lack_is_named(tmp_path: Path) -> None:
    assert (
        run_ranks(2, lacks_a_part, tmp_path)
        == ["tensor 'w' is spread over ranks that do not have it in their state, or have it in another form: 1"] * 2
    )


def outside_of_its_mesh(rank: int, world_size: int, folder: Path) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0, 1])
    full = torch.arange(6.0)
    if rank < 2:
        value = distribute_tensor(full, mesh, [Shard(0)])
    else:
        value = DTensor.from_local(torch.empty(0), mesh, [Shard(0)], run_check=False, shape=torch.Size([6]), stride=(1,))
    saved(folder, {"w": value, "own": torch.full((1,), float(rank))})
    dist.barrier()
    with tierstore.open(tiers(folder), run="r") as store:
        with pytest.raises(tierstore.TierStoreError, match="'w' is in the state of ranks outside of its mesh only"):
            store.save(2, {"w": value} if rank == 2 else {})
        return store.load(1)["w"].tolist()


def test_a_rank_outside_of_a_tensor_s_mesh_refers_to_what_the_others_wrote(tmp_path: Path) -> None:
    assert run_ranks(3, outside_of_its_mesh, tmp_path) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3


def in_a_group(rank: int, world_size: int, folder: Path) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    group = dist.new_group([1, 3])
    mesh = DeviceMesh("cpu", [1, 3])
    if rank not in (1, 3):
        with pytest.raises(UsageError, match="not in the process group"):
            tierstore.open(tiers(folder), run="r", process_group=group)
        return None
    state = {"w": distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]), "n": distribute_tensor(torch.ones(3), mesh, [Replicate()])}
    with tierstore.open(tiers(folder), run="r", process_group=group) as store:
        store.save(1, state).wait("durable", 60)
        return [store.rank, store.world_size, store.load(1)["w"].tolist()]


def test_a_process_group_of_some_ranks_saves_by_itself(tmp_path: Path) -> None:
    whole = [float(i) for i in range(7)]
    assert run_ranks(4, in_a_group, tmp_path) == [None, [0, 2, whole], None, [1, 2, whole]]


def says_its_chunks(rank: int, world_size: int, folder: Path) -> Any:
    full = torch.arange(60.0).view(10, 6)
    # Rank 0 holds rows 0-1 and 6-7 in one padded buffer, rank 1 rows 2-5 and 8-9; both hold the last tensor's only chunk.
    local = torch.full((5, 6), -1.0)
    rows = [(0, 2), (6, 2)] if rank == 0 else [(2, 4), (8, 2)]
    local = torch.full((rows[0][1] + 1 + rows[1][1], 6), -1.0)
    local[: rows[0][1]] = full[rows[0][0] : rows[0][0] + rows[0][1]]
    local[rows[0][1] + 1 :] = full[rows[1][0] : rows[1][0] + rows[1][1]]

    def described(tensor: torch.Tensor, shape: Any, at: Any, begin: Any, size: Any) -> torch.Tensor:
        tensor.global_shape, tensor.global_offsets, tensor.local_offsets, tensor.local_sizes = shape, at, begin, size  # type: ignore[attr-defined]
        return tensor

    def chunked(tensor: torch.Tensor) -> torch.Tensor:
        return described(
            tensor, (10, 6), ((rows[0][0], 0), (rows[1][0], 0)), ((0, 0), (rows[0][1] + 1, 0)), ((rows[0][1], 6), (rows[1][1], 6))
        )

    twice = described(torch.ones(3), (3,), ((0,),), ((0,),), ((3,),))
    written = saved(folder, {"w": chunked(local), "twice": twice})
    with tierstore.open(tiers(folder), run="r") as store:
        assert torch.equal(store.load(1)["w"], full)
        into = {"w": chunked(torch.full_like(local, -1.0)), "twice": twice}
        store.load(1, into)
        assert torch.equal(into["w"], local)
    return written


def test_tensors_that_describe_their_own_chunks_are_sharded_and_written_once(tmp_path: Path) -> None:
    assert sorted(run_ranks(2, says_its_chunks, tmp_path)) == [["twice", "w"], ["w"]]


def old_sharded(rank: int, world_size: int, folder: Path) -> Any:
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    full = torch.arange(20.0).view(5, 4)
    part = full[:3] if rank == 0 else full[3:]
    shard = Shard.from_tensor_and_offsets(part.clone(), [0 if rank == 0 else 3, 0], rank)
    saved(folder, {"w": init_from_local_shards([shard], 5, 4)})
    with tierstore.open(tiers(folder), run="r") as store:
        return torch.equal(store.load(1)["w"], full)


def test_torch_s_sharded_tensor_is_stored_by_its_shards(tmp_path: Path) -> None:
    assert run_ranks(2, old_sharded, tmp_path) == [True, True]


def test_a_process_of_a_group_can_save_alone(tmp_path: Path) -> None:
    assert run_ranks(2, saves_alone, tmp_path) == [[0, 1, 0.0], [0, 1, 1.0]]


def saves_alone(rank: int, world_size: int, folder: Path) -> Any:
    with tierstore.open(tiers(folder / os.environ["RANK"]), run="r", rank=0, world_size=1) as store:
        store.save(1, {"w": torch.full((1,), float(rank))}).wait("durable", 60)
        assert store.agreement is None
        return [store.rank, store.world_size, store.load(1)["w"].item()]
