"""Loading another layout: bytes fetched for the bytes needed, requests and time, for row, column and 2-D slices of one checkpoint.

Four matrices are saved by four ranks by rows, and again whole by one (as DDP does, and as Hugging Face files are). One rank of eight then
loads its rows, its columns, or its cell of a 2 x 4 grid: from a local directory, from a real S3 server behind 20 ms of latency for each
request, and from one that besides gives each connection 80 MB/s, which is what S3 looks like from one machine. Then four ranks load
their columns together. The peers are stock DCP, Hugging Face's reader of it, and s3torchconnector; they load the same chunks into the
same DTensors, through readers made anew each time.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import arguments, scratch
from far import Counts, far_away
from measure import timed
from peers.s3 import for_s3fs, s3torchconnector_reader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import tierstore
from tierstore.format.digest import BLOCK_NBYTES
from tierstore.testing.servers import embedded_server
from tierstore.units import format_size

RANKS, TENSORS, LATENCY_S, CONNECTION_RATE = 4, 4, 0.020, 80e6
SAVED = {"rows": f"saved by {RANKS} ranks by rows", "whole": "saved whole by one rank"}
LAYOUTS = {
    "rows, Shard(0) of 8": ((8,), [Shard(0)]),
    "columns, Shard(1) of 8": ((8,), [Shard(1)]),
    "2-D, Shard(0) of 2, Shard(1) of 4": ((2, 4), [Shard(0), Shard(1)]),
    "everything": ((8,), [Replicate()]),
}
OURS = "tierstore, every block proved"
FAR = f"S3, {LATENCY_S * 1000:.0f} ms for each request"
FARS = {FAR: None, f"{FAR}, {CONNECTION_RATE / 1e6:.0f} MB/s for each connection": CONNECTION_RATE}


def main() -> None:
    warnings.simplefilter("ignore")
    args = arguments(__doc__ or "", nbytes="256MiB", repeat=5)
    side = int((args.nbytes / TENSORS / 4) ** 0.5) // 64 * 64
    with scratch(args.directory) as root, embedded_server(root / "server") as server:
        server.make_bucket("bench")
        options = server.options()
        os.environ.update(AWS_ACCESS_KEY_ID=options["key"], AWS_SECRET_ACCESS_KEY=options["secret"], AWS_EC2_METADATA_DISABLED="true")
        with_ranks(save_rank, root, options, side)
        dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=8)
        print(f"{TENSORS} float32 tensors of {side} x {side}; rank 2 of 8 loads its part; {server.kind}")
        for saved, how in SAVED.items():
            print(f"\n==== {how}")
            with near_peers(root, saved) as peers:
                bench_all(Bench(where="a local directory, in the page cache", peers=peers, counters=local_counters), side, args.repeat)
            for where, rate in FARS.items():
                with far_away(options["endpoint_url"], LATENCY_S, rate) as (endpoint_url, counts):
                    with far_peers(saved, {**options, "endpoint_url": endpoint_url}, world_size=1) as peers:
                        bench_all(Bench(where=where, peers=peers, counters=counts.read), side, args.repeat)
        dist.destroy_process_group()
        print("\n==== together")
        for where, rate in FARS.items():
            with far_away(options["endpoint_url"], LATENCY_S, rate) as (endpoint_url, counts):
                with_ranks(load_rank, {**options, "endpoint_url": endpoint_url}, where, side, args.repeat, counts)


def bench_all(bench: Bench, side: int, repeat: int) -> None:
    for name, (mesh, placements) in LAYOUTS.items():
        bench.run(name, side, mesh, placements, repeat)


# ---- the measurements


@dataclass(kw_only=True)
class Bench:
    """Peers that load from one place. `counters` returns requests and bytes so far."""

    where: str
    peers: dict[str, Callable[[Any], object]]
    counters: Callable[[], tuple[int, int]]
    failed: dict[str, str] = field(default_factory=dict)

    def run(self, layout: str, side: int, mesh: tuple[int, ...], placements: list[Any], repeat: int) -> None:
        device_mesh = init_device_mesh("cpu", mesh)
        seconds: dict[str, list[float]] = {name: [] for name in self.peers}
        together = device_mesh.size() == dist.get_world_size() and dist.get_backend() == "gloo"
        requests: dict[str, int] = {}
        fetched: dict[str, int] = {}
        needed = 0
        for turn in range(repeat + 1):  # the first is to warm up: connections, imports, page cache
            for name, peer in self.peers.items():
                if name in self.failed:
                    continue
                into = {f"t{i}": empty(side, device_mesh, placements) for i in range(TENSORS)}
                needed = sum(t.to_local().nbytes for t in into.values())
                before = self.counters()
                try:
                    if together:
                        dist.barrier()
                    took = timed(peer, into) if not together else timed(lambda: (peer(into), dist.barrier()))  # noqa: B023
                except Exception as error:  # a peer that can't do it is part of the result
                    if name == OURS:
                        raise
                    self.failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
                    continue
                after = self.counters()
                requests[name], fetched[name] = after[0] - before[0], after[1] - before[1]
                if turn:
                    seconds[name].append(took)
                else:
                    check(into, side)
        if together:
            needed *= dist.get_world_size()
            if dist.get_rank():
                return
        print(f"\n{layout}, from {self.where}: {format_size(needed)} needed of {format_size(TENSORS * side * side * 4)}")
        if len(placements) == 1 and placements[0] == Shard(0):
            print(f"  (promised: at most x{1.05 + 2 * TENSORS * BLOCK_NBYTES / needed:.3f}: 5 %, and one block at each end of each range)")
        base = statistics.median(seconds[OURS])
        for name in self.peers:
            if name in self.failed:
                print(f"  {name:<50} can't: {self.failed[name]}")
                continue
            median = statistics.median(seconds[name])
            counted = f"{requests[name]:5} requests, bytes x{fetched[name] / needed:6.3f}"
            print(f"  {name:<50}{median:8.3f} s   x{median / base:6.2f}   {counted}   ({min(seconds[name]):.3f}..{max(seconds[name]):.3f})")


def load(into: Any, reader: Any) -> None:
    dcp.load(into, storage_reader=reader, no_dist=True)


@contextmanager
def near_peers(root: Path, saved: str) -> Iterator[dict[str, Callable[[Any], object]]]:
    shards = next((root / "ours").rglob(f"{saved}/step-*"))
    with tierstore.open({"run": saved, "tiers": [str(root / "ours")]}, rank=0, world_size=1) as store:
        yield {
            OURS: lambda into: store.load(into=into),
            "DCP FileSystemReader, no check": lambda into: load(into, dcp.FileSystemReader(root / f"dcp-{saved}")),
            "DCP HuggingFaceStorageReader (mapped), no check": lambda into: load(into, HuggingFaceStorageReader(str(shards))),
        }


@contextmanager
def far_peers(saved: str, options: dict[str, Any], *, world_size: int) -> Iterator[dict[str, Callable[[Any], object]]]:
    tier = {"name": "object", "uri": "s3://bench/ours", "options": options}
    rank = dist.get_rank() if world_size > 1 else 0
    uri = f"s3://bench/dcp-{saved}"
    with tierstore.open({"run": saved, "tiers": [tier]}, rank=rank, world_size=world_size) as store:
        yield {
            OURS: lambda into: store.load(into=into),
            "DCP FsspecReader (s3fs), no check": lambda into: load(into, FsspecReader(uri, **for_s3fs(options))),
            "s3torchconnector S3StorageReader, no check": lambda into: load(into, s3torchconnector_reader(uri, options["endpoint_url"])),
        }


def value(number: int, side: int) -> torch.Tensor:
    return torch.randn(side, side, generator=torch.Generator().manual_seed(number))


def empty(side: int, mesh: Any, placements: list[Any]) -> DTensor:
    shape, _ = torch.distributed.tensor._utils.compute_local_shape_and_global_offset((side, side), mesh, placements)
    return DTensor.from_local(torch.zeros(shape), mesh, placements, run_check=False, shape=torch.Size((side, side)), stride=(side, 1))


def check(into: dict[str, DTensor], side: int) -> None:
    for i in range(TENSORS):
        tensor = into[f"t{i}"]
        shape, offsets = torch.distributed.tensor._utils.compute_local_shape_and_global_offset(
            (side, side), tensor.device_mesh, tensor.placements
        )
        part = tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))
        assert torch.equal(tensor.to_local(), value(i, side)[part])


# ---- several ranks


def with_ranks(body: Callable[..., None], *values: Any) -> None:
    """Runs ``body(rank, *values)`` in the ranks of a gloo group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=in_group, args=(body, rank, port, values)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert all(process.exitcode == 0 for process in ranks)


def in_group(body: Callable[..., None], rank: int, port: int, values: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    body(rank, *values)
    dist.barrier()
    dist.destroy_process_group()


def save_rank(rank: int, root: Path, options: dict[str, Any], side: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    rows = side // RANKS
    state = {f"t{i}": DTensor.from_local(value(i, side)[rank * rows : (rank + 1) * rows].clone(), mesh, [Shard(0)]) for i in range(TENSORS)}
    save_everywhere(state, "rows", root, options, rank=rank, world_size=RANKS)
    if rank == 0:
        whole = {f"t{i}": value(i, side) for i in range(TENSORS)}
        save_everywhere(whole, "whole", root, options, rank=0, world_size=1)


def save_everywhere(state: Any, saved: str, root: Path, options: dict[str, Any], *, rank: int, world_size: int) -> None:
    for tier in (str(root / "ours"), {"name": "object", "uri": "s3://bench/ours", "options": options}):
        with tierstore.open({"run": saved, "tiers": [tier]}, rank=rank, world_size=world_size) as store:
            store.save(1, state).wait("committed", timeout=600)
    alone = world_size == 1
    dcp.save(state, storage_writer=dcp.FileSystemWriter(root / f"dcp-{saved}"), no_dist=alone)
    dcp.save(state, storage_writer=FsspecWriter(f"s3://bench/dcp-{saved}", **for_s3fs(options)), no_dist=alone)


def load_rank(rank: int, options: dict[str, Any], where: str, side: int, repeat: int, counts: Counts) -> None:
    for saved, how in SAVED.items():
        with far_peers(saved, options, world_size=RANKS) as peers:
            bench = Bench(where=f"{where}; {how}", peers=peers, counters=counts.read)
            bench.run(f"columns, Shard(1), all {RANKS} ranks at once", side, (RANKS,), [Shard(1)], repeat)


# ---- counting


def local_counters() -> tuple[int, int]:
    """This process's read calls and the bytes that they returned (Linux); what is mapped is not seen."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["syscr"]), int(facts["rchar"])


if __name__ == "__main__":
    main()
