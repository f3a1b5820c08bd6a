"""A real S3 server on the same cores: upload, loading all of it, and behind 20 ms a request: a rank's rows and the first tensor.

The raw clients move one object of the same size, from a file in memory and into a buffer, and prove nothing: they are what the server and
the client library allow.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import change, contest_arguments, flattened, scratch, training_state
from far import far_away
from measure import Table, fact, timed
from peers import s3
from peers.base import State
from saving import Sessions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from turns import Turns, part_of

import tierstore
from tierstore.testing.servers import embedded_server
from tierstore.units import format_size

LATENCY_S, RANKS = 0.020, 8
FIRST = "master.embedding"
_MATRICES, _ROWS = 4, "rows"


_UPLOAD_PART, _LOAD_PART, _ROWS_PART = 0.5, 0.4, 0.6
"""Of the time that is left each time."""


def run(nbytes: int, repeat: int, directory: Path | None, without: Mapping[str, str], until: float | None = None) -> list[Table]:
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
        saved = upload(sessions, state, flat, up, repeat, part_of(until, _UPLOAD_PART))
        for name in set(sessions.peers) - set(saved):
            down.fail(name, "its upload was not measured: nothing to load")
        loaders = Sessions(s3.remote_loaders(options), root / "loaders", [down], without)
        everything(sessions, saved, loaders, flat, down, repeat, part_of(until, _LOAD_PART))
        sessions.close()
        far = slices(options, nbytes, flat[FIRST], repeat, without, until)
    return [up, down, *far]


def matters(name: str) -> bool:
    """Limits, tierstore, and whom the targets name have their turns first."""
    return name.startswith(("tierstore", s3.DCP, s3.CONNECTOR, "boto3", "obstore"))


def upload(sessions: Sessions, state: Any, flat: State, table: Table, repeat: int, until: float | None) -> list[str]:
    """Measures the uploads; returns whose bytes are in the bucket."""
    turns = Turns(sessions.peers, repeat=repeat, first=matters, until=until)
    for turn, order in turns:
        change(state)
        for name in order:

            def measure(name: str = name, turn: int = turn) -> None:
                session = sessions.get(name)[1]
                gc.collect()
                os.sync()
                seconds = timed(lambda: session.save(flat, turn)())
                turns.took(name, seconds)
                if turn >= 0:
                    table.add(name, seconds, turn)

            turns.attempt(name, [table], measure)
    turns.list_left_out([table])
    return turns.able()


def everything(
    sessions: Sessions, saved: list[str], loaders: Sessions, flat: State, table: Table, repeat: int, until: float | None
) -> None:
    into = {name: torch.zeros_like(tensor) for name, tensor in flat.items()}
    owners = {**dict.fromkeys(saved, sessions), **dict.fromkeys(loaders.peers, loaders)}
    turns = Turns(owners, repeat=repeat, first=matters, until=until)
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
                turns.took(name, seconds)
                if turn >= 0:
                    table.add(name, seconds, turn)
                elif peer.kind != "limit" and not all(torch.equal(into[n], t) for n, t in flat.items()):
                    raise ValueError("what was loaded is not what was saved")

            turns.attempt(name, [table], measure)
    turns.list_left_out([table])


def slices(
    options: dict[str, Any], nbytes: int, first: torch.Tensor, repeat: int, without: Mapping[str, str], until: float | None
) -> list[Table]:
    """One rank of eight loads its rows of four matrices; and one tensor is there, the store opened for it."""
    side = max(RANKS, int((nbytes / _MATRICES / 4) ** 0.5) // 64 * 64)
    matrices = {f"matrix.{i}": torch.randn(side, side, generator=torch.Generator().manual_seed(i)) for i in range(_MATRICES)}
    wanted = sum(t.nbytes for t in matrices.values()) // RANKS
    far = f"{LATENCY_S * 1000:.0f} ms a request"
    rows = Table(f"One rank of {RANKS} loads its rows of {_MATRICES} matrices, {far}", wanted, s3.DCP, key="s3.rows")
    requests = Table("Requests for those rows", 0, s3.DCP, key="s3.rows.requests", unit="")
    fetched = Table("Bytes fetched for those rows", 0, s3.DCP, key="s3.rows.fetched", unit="MiB")
    one = Table(f"The first tensor of the state, opening included, {far}", first.nbytes, s3.DCP, key="s3.first")
    tables = [rows, requests, fetched, one]
    saved = save_matrices(options, {**matrices, FIRST: first}, tables, without)
    fact("rows", f"{format_size(wanted)} wanted of {format_size(wanted * RANKS)}")
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    with far_away(options["endpoint_url"], LATENCY_S) as (endpoint_url, counts), contextlib.ExitStack() as stores:
        there = {**options, "endpoint_url": endpoint_url}
        only = tierstore.LoadOptions(unexpected="ignore")  # FIRST is in the checkpoint, too
        open_stores: dict[str, s3.Ours] = {}
        ways: dict[str, Callable[[Any], object]] = {}
        firsts: dict[str, Callable[[], object]] = {}
        for name, more in ((s3.OURS, {"client": "s3fs"}), (s3.OURS_DIRECT, {"client": "direct"})):
            if "ours" in saved and name not in without:
                ways[name] = lambda into, more=more: opened(open_stores, stores, {**there, **more}).store.load(into=into, options=only)
                firsts[name] = lambda more=more: lazily({**there, **more})
        for name, ends in ((s3.DCP, s3.fsspec_ends(there)), (s3.CONNECTOR, s3.connector_ends(there))):
            if name in saved:
                ways[name] = lambda into, ends=ends, uri=saved[name]: dcp.load(into, storage_reader=ends[1](uri), no_dist=True)
                firsts[name] = lambda way=ways[name]: way({FIRST: torch.zeros_like(first)})
        for table in tables:
            for name in ways:
                table.describe(name, kind="ours" if name in (s3.OURS, s3.OURS_DIRECT) else "peer")
        turns = Turns(ways, repeat=repeat, first=matters, until=part_of(until, _ROWS_PART))
        for turn, order in turns:
            for name in order:

                def measure(name: str = name, turn: int = turn) -> None:
                    into = {n: empty(t, mesh) for n, t in matrices.items()}
                    before = counts.read()
                    seconds = timed(ways[name], into)
                    after = counts.read()
                    if turn < 0:
                        rank = dist.get_rank()
                        if not all(torch.equal(into[n].to_local(), t.chunk(RANKS)[rank]) for n, t in matrices.items()):
                            raise ValueError("what was loaded is not what was saved")
                        return
                    rows.add(name, seconds, turn)
                    requests.add(name, after[0] - before[0], turn)
                    fetched.add(name, (after[1] - before[1]) / 2**20, turn)

                turns.attempt(name, [rows, requests, fetched], measure)
        turns.list_left_out([rows, requests, fetched])
        turns = Turns([name for name in firsts if name not in turns.failed], repeat=repeat, first=matters, until=until)
        for turn, order in turns:
            for name in order:

                def measure_first(name: str = name, turn: int = turn) -> None:
                    began = time.perf_counter()
                    end = firsts[name]()
                    seconds = time.perf_counter() - began
                    if callable(end):
                        end()  # closing is not waited for by anybody
                    if turn >= 0:
                        one.add(name, seconds, turn)

                turns.attempt(name, [one], measure_first)
        turns.list_left_out([one])
    dist.destroy_process_group()
    return tables


def save_matrices(options: dict[str, Any], state: State, tables: list[Table], without: Mapping[str, str]) -> dict[str, str]:
    """Saves without latency; returns the URI that each reader reads, `ours` for both of tierstore's clients."""
    saved = {}
    turns = Turns([name for name in (s3.DCP, s3.CONNECTOR) if name not in without], repeat=1, warm_ups=0)

    def ours() -> None:
        session = s3.Ours(_ROWS, options)
        session.save(state, 0)()
        session.close()

    turns.attempt("ours", tables, ours)
    if "ours" not in turns.failed:
        saved["ours"] = _ROWS
    for name, ends in ((s3.DCP, s3.fsspec_ends(options)), (s3.CONNECTOR, s3.connector_ends(options))):
        if name not in without:
            session = s3.Dcp(*ends, f"rows-{'dcp' if name == s3.DCP else 'connector'}")
            turns.attempt(name, tables, lambda session=session: session.save(state, 0)())
            if name not in turns.failed:
                saved[name] = session.uri
    return saved


def opened(those: dict[str, s3.Ours], stores: contextlib.ExitStack, options: dict[str, Any]) -> s3.Ours:
    """A store that a training process has opened; the first turn, which warms up, opens it."""
    client = str(options["client"])
    if client not in those:
        those[client] = s3.Ours(_ROWS, options)
        stores.callback(those[client].close)
    return those[client]


def lazily(options: dict[str, Any]) -> Callable[[], object]:
    """Opens the newest checkpoint and takes one tensor out of it; returns what closes the store."""
    session = s3.Ours(_ROWS, options)
    checkpoint = session.store.open_checkpoint()
    assert checkpoint is not None
    checkpoint[FIRST].full()
    return session.close


def empty(tensor: torch.Tensor, mesh: Any) -> DTensor:
    local = torch.zeros(tensor.shape[0] // RANKS, tensor.shape[1], dtype=tensor.dtype)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def main() -> None:
    warnings.simplefilter("ignore")
    args = contest_arguments(__doc__ or "", nbytes="256MiB", repeat=5)
    for table in run(args.nbytes, args.repeat, args.directory, args.without, args.until):
        table.show()


if __name__ == "__main__":
    main()
