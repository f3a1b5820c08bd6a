"""How the routing index scales: simulated meshes of up to 2,048 ranks with 1,200 tensors each, and a million extents against `.metadata`.

Half of the tensors are cut over all ranks, half over a two-dimensional mesh. Shards are sparse files: only what is said about them is real.
Each step runs in a process of its own and prints its seconds (of the processor, so that other work on the machine does not count, and
``wall`` by the clock) and its peak of memory (MiB over the imports), with the exponent of growth with the number of ranks from the two
largest meshes (1 is linear; the parts, the extents and the index grow with it).

    python benchmarks/bench_index.py            2,048 ranks, 1,000,000 extents: some minutes
    python benchmarks/bench_index.py --short    128 ranks, 50,000 extents
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import pickle
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import scratch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

import tierstore.tiers.commit as committing
from tierstore.clock import SystemClock
from tierstore.format.digest import block_count
from tierstore.format.index import Extent, FileEntry, Index, PagedIndex, TensorEntry, build_index
from tierstore.format.index_table import IndexColumns
from tierstore.format.objects import TensorRef, encode_objects
from tierstore.format.part import Part, encode_part
from tierstore.names import INDEX, Attempt, part_name, shard_name
from tierstore.state.reading import Fill, fill_all
from tierstore.storage.loop import EventLoop
from tierstore.storage.posix import PosixStorage
from tierstore.tiers.catalog import scan
from tierstore.tiers.costs import REMOTE_COST
from tierstore.tiers.reads import plan_spans
from tierstore.tiers.replica import Replica, open_replica
from tierstore.tiers.tier import Tier, Tiers

TENSORS = 1200
CHUNK = (16, 1024)  # bfloat16: 32 KiB of each tensor on each rank
HEADER = 4096
_WALL = ("commit, all of it", "open", "find one", "plan a rank's load")
ATTEMPT = Attempt(run="bench", step=1, save_id="01ARZ3NDEKTSV4RRFFQ69G5FAV")


def name_of(number: int) -> str:
    return f"model.layers.{number // 12:03d}.block.{number % 12:02d}.mlp.experts.weight"


def mesh_of(number: int, ranks: int) -> tuple[int, int]:
    """How tensor `number` is cut: by rows over all ranks, or over a mesh of eight columns."""
    return (ranks, 1) if number % 2 == 0 else (ranks // 8, 8)


def box_of(number: int, rank: int, ranks: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The offsets of a rank's chunk, and the whole tensor's shape."""
    rows, columns = mesh_of(number, ranks)
    return (CHUNK[0] * (rank // columns), CHUNK[1] * (rank % columns)), (CHUNK[0] * rows, CHUNK[1] * columns)


def rank_index(rank: int, ranks: int, tensors: int) -> Index:
    """What a rank reports: a chunk of each tensor, in a shard of its own."""
    file, nbytes = shard_name(rank, ranks), 2 * math.prod(CHUNK)
    entries = []
    for number in range(tensors):
        offsets, shape = box_of(number, rank, ranks)
        begin = HEADER + nbytes * number
        extent = Extent(file=file, begin=begin, end=begin + nbytes, offsets=offsets, sizes=CHUNK)
        entries.append(TensorEntry(name=name_of(number), dtype="bfloat16", shape=shape, extents=(extent,)))
    total = HEADER + nbytes * tensors
    return build_index(entries, [FileEntry(name=file, nbytes=total, block_digests=bytes(32 * block_count(total)))])


def moved(first: Index, rank: int, ranks: int, tensors: int) -> Index:
    """The first rank's index as rank `rank` would report it, without making its objects again."""
    offsets = np.array([box_of(number, rank, ranks)[0] for number in range(tensors)], dtype=np.int64).reshape(-1)
    columns: IndexColumns = replace(first.columns, offsets=offsets, file_names=(shard_name(rank, ranks),))
    return Index(columns=columns, block_nbytes=first.block_nbytes)


def tiers_at(folder: Path) -> Tiers:
    tier = Tier(name="shared", storage=PosixStorage(folder, durable=False), scope="shared")
    return Tiers(tiers=(tier,), authority=tier, durable_at=tier, store_id="bench")


class Steps:
    """Seconds of named steps in this process, and its peak of memory over what the imports took."""

    def __init__(self) -> None:
        self.base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        begin, clock = time.process_time(), time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin
        if name in _WALL:
            self.seconds[f"{name}, wall"] = time.perf_counter() - clock

    def around(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.step(name):
                return work(*args, **kwargs)

        return timed

    def report(self, what: str, **more: float) -> None:
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.base) / 1024
        print(json.dumps({**self.seconds, f"{what}: peak MiB": peak, **more}))


# ---- the steps, each in a process of its own


def save(folder: Path, ranks: int, tensors: int) -> None:
    """Every rank's plan, part record and (sparse) shard; the first rank's is timed."""
    steps = Steps()
    with steps.step("plan a rank's part"):
        first = rank_index(0, ranks, tensors)
    target = folder / ATTEMPT.folder
    target.mkdir(parents=True)
    tree = {name_of(number): TensorRef(name_of(number)) for number in range(tensors)}
    for rank in range(ranks):
        objects = encode_objects({"model": tree, "step": 1000, "rng": rank.to_bytes(4, "little") * 1264})
        part = Part(
            run=ATTEMPT.run,
            step=ATTEMPT.step,
            save_id=ATTEMPT.save_id,
            rank=rank,
            world_size=ranks,
            index=moved(first, rank, ranks, tensors),
            objects=objects,
        )
        (target / part_name(rank)).write_bytes(encode_part(part))
        with (target / shard_name(rank, ranks)).open("wb") as file:
            file.truncate(int(first.columns.file_nbytes[0]))
    steps.report("save")


def commit(folder: Path, ranks: int, tensors: int) -> None:
    """One committer merges all ranks' parts."""
    steps = Steps()
    for name, what in (
        ("merge_indexes", "merge"),
        ("check_coverage", "coverage"),
        ("encode_index", "encode"),
        ("merge_objects", "objects"),
    ):
        setattr(committing, name, steps.around(what, getattr(committing, name)))
    with steps.step("commit, all of it"):
        asyncio.run(committing.commit(tiers_at(folder), ATTEMPT, deadline_s=0, clock=SystemClock()))
    target = folder / ATTEMPT.folder
    steps.report(
        "commit", **{"index MiB": (target / INDEX).stat().st_size / 2**20, "objects MiB": (target / "objects.json").stat().st_size / 2**20}
    )


class PlanningReader:
    """Plans reads as a replica does, and reads nothing."""

    def __init__(self, replica: Replica) -> None:
        self.index = replica.index
        self.wants = 0

    async def objects(self, rank: int) -> bytes:
        raise NotImplementedError

    async def object_ranks(self) -> dict[int, int]:
        raise NotImplementedError

    def near(self, file: str) -> bool:
        return True

    async def read(self, wants: Any) -> None:
        self.wants = len(wants)
        plan_spans(wants, file_nbytes=self.index.file_nbytes, align=self.index.block_nbytes, cost=REMOTE_COST)


def opened(folder: Path, loop: EventLoop) -> Replica:
    tiers = tiers_at(folder)
    info = loop.run(scan(tiers, ATTEMPT.run)).latest()
    assert info is not None
    replica: Replica = loop.run(open_replica(tiers, info, run=loop.run))
    return replica


def load(folder: Path, ranks: int, tensors: int) -> None:
    """One of half as many ranks finds one tensor, then plans the load of its share of all of them."""
    steps, loop = Steps(), EventLoop()
    with steps.step("open"):
        replica = opened(folder, loop)
    with steps.step("find one"):
        found = replica.index.find(name_of(tensors // 2))
    assert len(found.extents) == ranks
    looked_up = replica.bytes_fetched["shared"]
    with steps.step("plan a rank's load"):
        fills = []
        names = [name_of(number) for number in range(tensors)]
        replica.index.prepare(names)
        for number, name in enumerate(names):
            offsets, _ = box_of(number, (ranks // 2) // 3, ranks // 2)
            sizes = (2 * CHUNK[0], CHUNK[1])
            offsets = (2 * offsets[0], offsets[1])
            box = tuple(range(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            entry = replica.index.find(name, box)
            fills.append(Fill(entry=entry, box=box, target=torch.empty(sizes, dtype=torch.bfloat16)))
        reader = PlanningReader(replica)
        fill_all(reader, asyncio.run, fills)
    loop.close()
    steps.report("load", **{"open and find, KiB read": looked_up / 1024})


def million(folder: Path, extents: int) -> None:
    """The same chunks in our index and in stock DCP's `.metadata`: opening, and finding one tensor; medians of several runs."""
    ranks = 256
    chunks = extents // ranks
    save_quietly(folder, ranks, chunks)
    stock = folder / "stock"
    stock.mkdir()
    write_metadata(stock, ranks, chunks)

    def ours() -> None:
        loop = EventLoop()
        replica = opened(folder, loop)
        assert isinstance(replica.index, PagedIndex) or extents < 100_000
        assert len(replica.index.find(name_of(chunks // 2)).extents) == ranks
        loop.close()

    def theirs() -> None:
        metadata = FileSystemReader(stock).read_metadata()
        tensor = metadata.state_dict_metadata[name_of(chunks // 2)]
        assert isinstance(tensor, TensorStorageMetadata)
        assert len(tensor.chunks) == ranks

    print(
        json.dumps(
            {"ours": seconds(ours, 5), "stock": seconds(theirs, 1 if extents > 500_000 else 3), "metadata MiB": size(stock / ".metadata")}
        )
    )


def save_quietly(folder: Path, ranks: int, tensors: int) -> None:
    for step in (save, commit):
        child(step.__name__, folder, ranks, tensors)


def write_metadata(folder: Path, ranks: int, tensors: int) -> None:
    properties = TensorProperties(dtype=torch.bfloat16)
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    nbytes = 2 * math.prod(CHUNK)
    for number in range(tensors):
        name, boxes = name_of(number), []
        for rank in range(ranks):
            offsets, shape = box_of(number, rank, ranks)
            boxes.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(CHUNK)))
            place = _StorageInfo(relative_path=f"__{rank}_0.distcp", offset=nbytes * number, length=nbytes)
            storage[MetadataIndex(name, torch.Size(offsets), rank)] = place
        state[name] = TensorStorageMetadata(properties=properties, size=torch.Size(shape), chunks=boxes)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(state_dict_metadata=state, storage_data=storage), file)


def seconds(work: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def size(path: Path) -> float:
    return path.stat().st_size / 2**20


# ---- running and printing


def child(step: str, folder: Path, *numbers: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--step", step, "--directory", str(folder), "--numbers", *map(str, numbers)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def meshes(folder: Path, sizes: list[int], tensors: int) -> None:
    rows: dict[int, dict[str, float]] = {}
    for ranks in sizes:
        place = folder / f"mesh-{ranks}"
        rows[ranks] = {"extents": ranks * tensors}
        for step in ("save", "commit", "load"):
            rows[ranks] |= child(step, place, ranks, tensors)
    print(f"{tensors:,} tensors on each rank\n{'':<28}" + "".join(f"{ranks:>12,}" for ranks in sizes) + f"{'exponent':>10}")
    for name in rows[sizes[0]]:
        values = [rows[ranks][name] for ranks in sizes]
        slope = f"{math.log(max(values[-1], 1e-9) / max(values[-2], 1e-9), sizes[-1] / sizes[-2]):>10.2f}" if len(sizes) > 1 else ""
        print(f"{name:<28}" + "".join(f"{value:>12,.0f}" if value >= 1000 else f"{value:>12.3f}" for value in values) + slope)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a size for CI")
    parser.add_argument("--directory", type=Path, default=None, help="where files are made (default: a fresh folder in ./.cache/bench)")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--numbers", type=int, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = {"save": save, "commit": commit, "load": load, "million": million}
    if options.step:
        steps[options.step](options.directory, *options.numbers)
        return
    with scratch(options.directory) as folder:
        meshes(folder, [32, 128] if options.short else [128, 512, 2048], 200 if options.short else TENSORS)
        extents = 50_000 if options.short else 1_000_000
        result = child("million", folder / "million", extents)
        ratio = result["stock"] / result["ours"]
        print(
            f"\nopen and find one tensor of {extents:,} extents: tierstore {result['ours']:.3f} s, stock .metadata {result['stock']:.3f} s"
        )
        print(f"({result['metadata MiB']:.0f} MiB of pickle): {ratio:.0f} times as fast")


if __name__ == "__main__":
    main()
