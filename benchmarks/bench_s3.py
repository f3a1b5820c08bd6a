"""Upload to and load from a real S3 server, against DCP with FsspecWriter/FsspecReader on s3fs; bytes fetched for a row slice."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from common import Table, arguments, change, save_until, scratch, state_nbytes, timed, training_state
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import tierstore
from tierstore.testing.proxy import CuttingProxy
from tierstore.testing.servers import embedded_server
from tierstore.units import format_size


def main() -> None:
    warnings.simplefilter("ignore")
    args = arguments(__doc__ or "", repeat=3)
    state = training_state(args.nbytes)
    nbytes = state_nbytes(state)
    flat = {f"{group}.{name}": tensor for group, tensors in state.items() for name, tensor in tensors.items()}
    up = Table("Upload until readable in the bucket", nbytes, "DCP save, FsspecWriter on s3fs, no hash")
    down = Table("Load everything from the bucket into existing tensors", nbytes, "DCP load, FsspecReader on s3fs, no check")
    with scratch(args.directory) as root, embedded_server(root / "server") as server, CuttingProxy(server.endpoint_url) as proxy:
        server.make_bucket("bench")
        options = server.options()
        counted = {**options, "endpoint_url": proxy.endpoint_url}
        print(f"server: {server.kind}, on the same two cores as the client; {format_size(nbytes)} of state")
        tier = {"name": "object", "uri": "s3://bench/tierstore", "options": options}
        with tierstore.open({"version": 1, "run": "bench", "tiers": [tier]}) as store:
            for turn in range(1, args.repeat + 1):
                change(state)
                up.add("tierstore, SHA-256 of every block, until committed", timed(save_until, store, turn, state, "committed"))
                writer = FsspecWriter(f"s3://bench/dcp-{turn}", **for_s3fs(options))
                up.add("DCP save, FsspecWriter on s3fs, no hash", timed(dcp.save, flat, storage_writer=writer, no_dist=True))

                target = {group: {n: torch.zeros_like(t) for n, t in tensors.items()} for group, tensors in state.items()}
                down.add("tierstore, every block proved", timed(store.load, into=target))
                assert all(torch.equal(target[g][n], t) for g, ts in state.items() for n, t in ts.items())
                other = {name: torch.zeros_like(tensor) for name, tensor in flat.items()}
                reader = FsspecReader(f"s3://bench/dcp-{turn}", **for_s3fs(options))
                down.add("DCP load, FsspecReader on s3fs, no check", timed(dcp.load, other, storage_reader=reader, no_dist=True))
                assert all(torch.equal(other[n], t) for n, t in flat.items())
        up.show()
        down.show()

        name = max(state["master"], key=lambda n: state["master"][n].nbytes)
        rows = state["master"][name].shape[0] // 8
        wanted = state["master"][name][rows : 2 * rows]
        print(f"\nOne eighth of the rows of master.{name} ({format_size(wanted.nbytes)} of {format_size(state['master'][name].nbytes)})")
        with tierstore.open({"version": 1, "run": "bench", "tiers": [{**tier, "options": counted}]}) as store:
            checkpoint = store.open_checkpoint()
            proxy.clear()
            assert torch.equal(checkpoint[f"master.{name}"][rows : 2 * rows], wanted)
            print(f"  tierstore: {fetched(proxy, wanted.nbytes)}")
        proxy.clear()
        reader = FsspecReader(f"s3://bench/dcp-{args.repeat}", **for_s3fs(counted))
        dcp.load({f"master.{name}": torch.zeros_like(state["master"][name])}, storage_reader=reader, no_dist=True)
        print(f"  DCP FsspecReader (whole tensors, through the read-ahead of s3fs): {fetched(proxy, wanted.nbytes)}")


def for_s3fs(options: dict[str, Any]) -> dict[str, Any]:
    """The same options as bare s3fs takes them."""
    rest = {key: value for key, value in options.items() if key != "region_name"}
    return {**rest, "client_kwargs": {"region_name": options["region_name"]}}


def fetched(proxy: CuttingProxy, nbytes: int) -> str:
    return f"{len(proxy.requests)} requests, {format_size(proxy.body_nbytes)}, x{proxy.body_nbytes / nbytes:.3f} of the slice"


if __name__ == "__main__":
    main()
