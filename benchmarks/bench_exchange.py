"""Four ranks load together from a real S3 server behind 20 ms of latency for each request: with the exchange, without it, and stock DCP.

Four ranks save four matrices by rows, and load them replicated, as HSDP of 2 x 2, and by columns. Requests and bytes are those of all
ranks together; "needed" is what the ranks need with their replicas counted, so that 1 / (copies) is one read of every byte.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from bench_reshard import FAR, LATENCY_S, OURS, RANKS, TENSORS, Bench, far_peers, save_rank, with_ranks
from common import arguments, scratch
from far import Counts, far_away
from torch.distributed.tensor import Replicate, Shard

import tierstore
from tierstore.testing.servers import embedded_server

LAYOUTS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "replicated on 4 ranks (needed: 4 copies)": ((RANKS,), [Replicate()]),
    "HSDP, 2 replicas of 2 shards (needed: 2 copies)": ((2, 2), [Replicate(), Shard(0)]),
    "columns on 4 ranks (needed: 1 copy)": ((RANKS,), [Shard(1)]),
}
ALONE = "tierstore, exchange off"


def main() -> None:
    warnings.simplefilter("ignore")
    args = arguments(__doc__ or "", nbytes="256MiB", repeat=3)
    side = int((args.nbytes / TENSORS / 4) ** 0.5) // 64 * 64
    with scratch(args.directory) as root, embedded_server(root / "server") as server:
        server.make_bucket("bench")
        options = server.options()
        os.environ.update(AWS_ACCESS_KEY_ID=options["key"], AWS_SECRET_ACCESS_KEY=options["secret"], AWS_EC2_METADATA_DISABLED="true")
        with_ranks(save_rank, root, options, side)
        print(f"{TENSORS} float32 tensors of {side} x {side}, saved by {RANKS} ranks by rows; loaded by all {RANKS} at once; {server.kind}")
        with far_away(options["endpoint_url"], LATENCY_S) as (endpoint_url, counts):
            with_ranks(load_rank, {**options, "endpoint_url": endpoint_url}, side, args.repeat, counts)


def load_rank(rank: int, options: dict[str, Any], side: int, repeat: int, counts: Counts) -> None:
    tier = {"name": "object", "uri": "s3://bench/ours", "options": options}
    config = {"run": "rows", "tiers": [tier]}
    alone = tierstore.LoadOptions(exchange="off")
    with tierstore.open(config, rank=rank, world_size=RANKS) as store, far_peers("rows", options, world_size=RANKS) as others:
        peers = {OURS: others.pop(OURS), ALONE: lambda into: store.load(into=into, options=alone), **others}
        for name, (mesh, placements) in LAYOUTS.items():
            Bench(where=FAR, peers=peers, counters=counts.read).run(name, side, mesh, placements, repeat)


if __name__ == "__main__":
    main()
