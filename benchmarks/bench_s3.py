"""A real S3 server on the same cores: upload, loading all of it, and behind 20 ms a request: a rank's rows and the first tensor.

The raw clients move one object of the same size, from a file in memory and into a buffer, and prove nothing: they are what the server and
the client library allow.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import change, contest_arguments, flattened, scratch, training_state
from far import far_away
from measure import Table, Turns, fact, timed
from peers import s3
from peers.base import State
from saving import Sessions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tierstore.testing.servers import embedded_server
from tierstore.units import format_size

LATENCY_S, RANKS = 0.020, 8
FIRST = "master.embedding"


def run(nbytes: int, repeat: int, directory: Path | None, without: Mapping[str, str]) -> list[Table]:
    state = training_state(nbytes)
    flat = flattened(state)
    nbytes = sum(t.nbytes for t in flat.values())
    up = Table("Upload until readable in the bucket", nbytes, s3.DCP, key="s3.upload")
    down = Table("Load everything from the bucket, in place", nbytes, s3.DCP, key="s3.load")
    with scratch(directory) as root, embedded_server(root / "server") as server:
        server.make_bucket(s3.BUCKET)
        options = server.options()
        os.environ.update(AWS_ACCESS_KEY_ID=options["key"], AWS_SECRET_ACCESS_KEY=options["secret"], AWS_EC2_METADATA_DISABLED="true")
        fact("server", f"{server.kind}, on the same {os.cpu_count()} cores as the client")
        sessions = Sessions(s3.remote_peers(options), root / "peers", [up, down], without)
        upload(sessions, state, flat, up, repeat)
        loaders = Sessions(s3.remote_loaders(options), root / "loaders", [down], without)
        everything(sessions, loaders, flat, down, repeat)
        runs = {name: sessions.get(name)[1] for name in (s3.DCP, s3.CONNECTOR) if name in sessions.peers}
        uris = {name: session.uri for name, session in runs.items() if isinstance(session, s3.Dcp)}
        sessions.close()
        far = slices(options, flat, uris, repeat, without)
    return [up, down, *far]


def upload(sessions: Sessions, state: Any, flat: State, table: Table, repeat: int) -> None:
    turns = Turns(sessions.peers, repeat=repeat)
    for turn, order in turns:
        change(state)
        for name in order:

            def measure(name: str = name, turn: int = turn) -> None:
                session = sessions.get(name)[1]
                gc.collect()
                os.sync()
                seconds = timed(lambda: session.save(flat, turn)())
                if turn >= 0:
                    table.add(name, seconds)

            turns.attempt(name, [table], measure)


def everything(sessions: Sessions, loaders: Sessions, flat: State, table: Table, repeat: int) -> None:
    into = {name: torch.zeros_like(tensor) for name, tensor in flat.items()}
    owners = {**dict.fromkeys(sessions.peers, sessions), **dict.fromkeys(loaders.peers, loaders)}
    turns = Turns(owners, repeat=repeat)
    for name in loaders.peers:
        turns.attempt(name, [table], lambda name=name: loaders.get(name)[1].save(flat, 0)())
    for turn, order in turns:
        for name in order:

            def measure(name: str = name, turn: int = turn) -> None:
                peer, session = owners[name].get(name)
                if turn < 0:
                    for tensor in into.values():
                        tensor.zero_()
                seconds = timed(session.load, into)
                if turn >= 0:
                    table.add(name, seconds)
                elif peer.kind != "limit" and not all(torch.equal(into[n], t) for n, t in flat.items()):
                    raise ValueError("what was loaded is not what was saved")

            turns.attempt(name, [table], measure)


def slices(options: dict[str, Any], flat: State, uris: Mapping[str, str], repeat: int, without: Mapping[str, str]) -> list[Table]:
    """One rank of eight loads its rows of every tensor; and the first tensor is there, the store opened for it."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    rows = {name: tensor for name, tensor in flat.items() if tensor.ndim == 2 and tensor.shape[0] % RANKS == 0}
    wanted = sum(t.nbytes // RANKS if name in rows else t.nbytes for name, t in flat.items())
    far = f"{LATENCY_S * 1000:.0f} ms a request"
    sliced = Table(f"One rank of {RANKS} loads its rows of {len(rows)} tensors from S3, {far}", wanted, s3.DCP, key="s3.rows")
    first = Table(f"Time to the first tensor from S3, opening included, {far}", flat[FIRST].nbytes, s3.DCP, key="s3.first")
    requests = Table("Requests for those rows", 0, s3.DCP, key="s3.rows.requests", unit="")
    fetched = Table("Bytes fetched for those rows", 0, s3.DCP, key="s3.rows.fetched", unit="MiB")
    with far_away(options["endpoint_url"], LATENCY_S) as (endpoint_url, counts):
        there = {**options, "endpoint_url": endpoint_url}

        def ours(run: str, more: dict[str, Any]) -> Callable[[Any], object]:
            def load(into: Any) -> None:
                session = s3.Ours(run, {**there, **more}, run=run)
                try:
                    session.store.load(into=into)
                finally:
                    session.close()

            return load

        def stock(reader: Any, uri: str) -> Callable[[Any], object]:
            return lambda into: dcp.load(into, storage_reader=reader(uri), no_dist=True)

        ways = {s3.OURS: ours("ours", {}), s3.OURS_OBSTORE: ours("ours-obstore", {"client": "obstore"})}
        for name, ends in ((s3.DCP, s3.fsspec_ends(there)), (s3.CONNECTOR, s3.connector_ends(there))):
            if name in uris:
                ways[name] = stock(ends[1], uris[name])
        for table in (sliced, first, requests, fetched):
            for name in ways:
                table.describe(name, kind="ours" if name.startswith("tierstore") else "peer")
        turns = Turns([name for name in ways if name not in without], repeat=repeat)
        for turn, order in turns:
            for name in order:

                def measure(name: str = name, turn: int = turn) -> None:
                    into = {n: empty(t, mesh) if n in rows else torch.zeros_like(t) for n, t in flat.items()}
                    before = counts.read()
                    seconds = timed(ways[name], into)
                    after = counts.read()
                    if turn < 0:
                        rank = dist.get_rank()
                        if not all(torch.equal(into[n].to_local(), t.chunk(RANKS)[rank]) for n, t in rows.items()):
                            raise ValueError("what was loaded is not what was saved")
                        return
                    sliced.add(name, seconds)
                    requests.add(name, after[0] - before[0])
                    fetched.add(name, (after[1] - before[1]) / 2**20)

                turns.attempt(name, [sliced, requests, fetched], measure)
        readers = {name: lambda way=way: way({FIRST: torch.zeros_like(flat[FIRST])}) for name, way in ways.items()}
        readers[s3.OURS] = lambda: lazily("ours", there)
        readers[s3.OURS_OBSTORE] = lambda: lazily("ours-obstore", {**there, "client": "obstore"})
        turns = Turns([name for name in readers if name not in turns.failed and name not in without], repeat=repeat)
        for turn, order in turns:
            for name in order:

                def measure_first(name: str = name, turn: int = turn) -> None:
                    seconds = timed(readers[name])
                    if turn >= 0:
                        first.add(name, seconds)

                turns.attempt(name, [first], measure_first)
    fact("rows", f"{format_size(wanted)} wanted of {format_size(sum(t.nbytes for t in flat.values()))}")
    dist.destroy_process_group()
    return [sliced, requests, fetched, first]


def lazily(run: str, options: dict[str, Any]) -> None:
    """Opens the newest checkpoint and takes one tensor out of it."""
    session = s3.Ours(run, options, run=run)
    try:
        checkpoint = session.store.open_checkpoint()
        assert checkpoint is not None
        checkpoint[FIRST].full()
    finally:
        session.close()


def empty(tensor: torch.Tensor, mesh: Any) -> DTensor:
    local = torch.zeros(tensor.shape[0] // RANKS, tensor.shape[1], dtype=tensor.dtype)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def main() -> None:
    warnings.simplefilter("ignore")
    args = contest_arguments(__doc__ or "", nbytes="256MiB", repeat=3)
    for table in run(args.nbytes, args.repeat, args.directory, args.without):
        table.show()


if __name__ == "__main__":
    main()
