"""A real training state goes from a near disk to a real S3 server and back: raw against packed, lossless and quantised.

Each turn saves the state to a tier on the disk, promotes that checkpoint to a tier of each kind in the same bucket, and loads it from each
of them in place, all of it proved by SHA-256. The server runs on the same cores: what a codec takes of the processor it takes from the
server, too, and nothing is won by a link that is slow. The state is that of `trained.py`.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from common import contest_arguments, scratch
from measure import Table, fact
from trained import KINDS, trained_state
from turns import Turns

import tierstore
from tierstore.config import load_config
from tierstore.names import Attempt
from tierstore.testing.servers import embedded_server
from tierstore.tiers.catalog import scan
from tierstore.tiers.promote import promote
from tierstore.tiers.session import Session

RAW, ZSTD, MASTER, QUANTISED = "raw", "codec: zstd", "codec: zstd, master_once", "codec: zstd, master_once, quantise: q8"
_PACKED = {"codec": "zstd", "unchanged_once": False}  # the state is the same in all turns
OPTIONS: Mapping[str, dict[str, Any]] = {
    RAW: {},
    ZSTD: {**_PACKED, "master_once": False},
    MASTER: {**_PACKED, "master_once": True},
    QUANTISED: {**_PACKED, "master_once": True, "quantise": "q8"},
}
_BUCKET, _RUN = "bench", "state"


class Kind:
    """One kind of tier in the bucket."""

    def __init__(self, name: str, number: int, options: dict[str, Any]) -> None:
        self.name = name
        self.uri = f"s3://{_BUCKET}/kind{number}"
        self.tier = {"name": f"kind{number}", "uri": self.uri, "scope": "shared", "options": options, **OPTIONS[name]}

    def reads(self) -> tierstore.Store:
        """A store that knows this tier alone, and reads what was promoted to it."""
        alone = {key: value for key, value in self.tier.items() if key != "quantise"}  # which a store's only tier can't be told
        return tierstore.open({"version": 1, "run": _RUN, "tiers": [alone]}, rank=0, world_size=1)


def run(repeat: int, model: str, directory: Path | None, without: Mapping[str, str], until: float | None = None) -> list[Table]:
    state = {named(key): tensor for key, tensor in trained_state(model).items()}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    up = Table("Promotion from the disk to S3", nbytes, RAW, key="packed.promote")
    up_cpu = Table("The same, seconds of the client's processor", nbytes, RAW, key="packed.promote.cpu")
    down = Table("Load everything from S3, in place", nbytes, RAW, key="packed.load")
    down_cpu = Table("The same, seconds of the client's processor", nbytes, RAW, key="packed.load.cpu")
    sent = Table("What the shards take up in the bucket", 0, RAW, key="packed.sent", unit="MiB")
    tables = [up, up_cpu, down, down_cpu, sent]
    fact("packed: state", f"AdamW, {sum(t.numel() for t in state.values()) // 4:,} parameters after {KINDS[model].steps} steps")
    with scratch(directory) as root, embedded_server(root / "server") as server:
        server.make_bucket(_BUCKET)
        fact("packed: server", f"{server.kind}, on the same {os.cpu_count()} cores as the client")
        options = {**server.options(), "client": "direct"}
        kinds = {name: Kind(name, number, options) for number, name in enumerate(OPTIONS) if name not in without}
        for name in OPTIONS:
            for table in tables:
                if name in without:
                    table.fail(name, without[name])
                else:
                    table.describe(name, kind="ours")
        near = {"name": "disk", "uri": str(root / "disk"), "scope": "shared"}
        config = {"version": 1, "run": _RUN, "tiers": [near, *(kind.tier for kind in kinds.values())]}
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        turns = Turns(kinds, repeat=repeat, first=lambda name: True, until=until)
        for turn, planned in turns:
            step, order = turn + 2, list(planned)
            for path in (root / "disk").rglob("shard-*"):
                path.unlink()
            with tierstore.open({**config, "tiers": [near]}, rank=0, world_size=1) as store:
                store.save(step, dict(state)).wait("committed", timeout=600)
            with Session.open(load_config(config)) as session:
                info = session.run(scan(session.tiers, _RUN)).find(step)
                assert info is not None
                for name in order:
                    tier = str(kinds[name].tier["name"])

                    def send(tier: str = tier, attempt: Attempt = info.attempt) -> None:
                        done = session.run(promote(session.tiers, attempt, tier, clock=session.clock))
                        if not done.done:
                            raise ValueError(f"it was not promoted: {done}")

                    def measure(name: str = name, turn: int = turn, send: Callable[[], None] = send) -> None:
                        seconds, cpu = timed(send)
                        if turn >= 0:
                            up.add(name, seconds, turn)
                            up_cpu.add(name, cpu, turn)

                    turns.attempt(name, tables, measure)
                promoted = session.run(scan(session.tiers, _RUN)).find(step)
                for name in kinds if promoted is not None and turn >= 0 else ():
                    if name not in turns.failed:
                        sent.add(name, promoted.taken_on(str(kinds[name].tier["name"])) / 2**20, turn)
            for name in [name for name in order if name not in turns.failed]:

                def measure_load(name: str = name, turn: int = turn, step: int = step) -> None:
                    with kinds[name].reads() as store:
                        for tensor in into.values():
                            tensor.zero_()
                        seconds, cpu = timed(lambda: store.load(step, into=into))
                        if turn >= 0:
                            down.add(name, seconds, turn)
                            down_cpu.add(name, cpu, turn)
                    for key, tensor in state.items():
                        if not (torch.equal(into[key], tensor) or (name == QUANTISED and "exp_avg" in key)):
                            raise ValueError(f"what was loaded of {key} is not what was saved")

                turns.attempt(name, tables, measure_load)
    return tables


def named(key: str) -> str:
    """``exp_avg.layer.weight`` becomes ``layer.weight.exp_avg``, as optimizers name it: by that it is known what may be quantised."""
    group, _, name = key.partition(".")
    return f"{name}.{group}" if group.startswith("exp_avg") else key


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that pass, and seconds of this process's processor; what is dirty is written out before."""
    gc.collect()
    os.sync()
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(KINDS), default="large", help="whose state (default large); trained first, once")
    args = contest_arguments(__doc__ or "", nbytes="1GiB", repeat=5, parser=parser)
    for table in run(args.repeat, args.model, args.directory, args.without, args.until):
        table.show()


if __name__ == "__main__":
    main()
