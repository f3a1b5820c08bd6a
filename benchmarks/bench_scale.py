"""How the cost of each operation grows with the work: seconds of the processor, requests, bytes, and the exponent of the growth.

Each operation is done at several sizes in this process, with the imports and first calls behind it. The exponent is the slope of a line
through the logarithms (``fit``), and that between the two largest sizes alone (``last``), where constants no longer hide the growth: 1 is
linear. Storages are buckets in memory that count requests as an object store bills them (a page of a listing is 1,000 names).

    python benchmarks/bench_scale.py            some minutes: 50,000 tensors, 1,000,000 extents, 10,000 checkpoints
    python benchmarks/bench_scale.py --short    less than 20 seconds
    python benchmarks/bench_scale.py --long     100,000 checkpoints
    python benchmarks/bench_scale.py --only catalog

Meshes of up to 2,048 ranks with their files are in `bench_index.py`, collecting and its peers in `bench_retention.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_index import moved, name_of, rank_index
from measure import fact
from planning import POLICY, many_checkpoints
from planning import TIERS as PLANNING_TIERS

from tierstore.clock import SystemClock
from tierstore.config import load_config
from tierstore.config_retention import GcConfig, KeepRule, RetentionConfig
from tierstore.format.digest import block_count
from tierstore.format.index import (
    FileEntry,
    Index,
    PagedIndex,
    build_index,
    decode_head,
    decode_index,
    encode_index,
    head_nbytes,
    merge_indexes,
)
from tierstore.format.objects import encode_objects
from tierstore.format.part import Part, encode_part
from tierstore.names import shard_name
from tierstore.state.codecs import default_codecs
from tierstore.state.differences import LoadOptions
from tierstore.state.fingerprint import fingerprints
from tierstore.state.flatten import flatten
from tierstore.state.image import ImagePool
from tierstore.state.matching import match
from tierstore.state.ownership import Agreed
from tierstore.state.reading import wants_of
from tierstore.state.sharded import Spread
from tierstore.state.stage import stage
from tierstore.state.units import Unit, merge, table_of, units_of
from tierstore.testing.bucket import Bucket, bucket_tiers, requests
from tierstore.testing.fabricate import fabricate
from tierstore.tiers.catalog import RecordCache, scan
from tierstore.tiers.costs import REMOTE_COST
from tierstore.tiers.files.files import Files
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.leases import LeaseWatch
from tierstore.tiers.pending import pending
from tierstore.tiers.reads import plan_spans
from tierstore.tiers.record_store import RecordStore
from tierstore.tiers.retention import evaluate
from tierstore.tiers.session import Session
from tierstore.tiers.tier import Tiers
from tierstore.tiers.verify import verify

RUN = "bench"
REPEAT = 3
_SOON_S = 0.1
"""What takes longer is done once."""


@dataclass(slots=True, kw_only=True)
class Curve:
    """One operation at several sizes."""

    group: str
    name: str
    unit: str
    sizes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)

    def exponents(self, values: Sequence[float]) -> tuple[float, float] | None:
        """The slope over all sizes, and over the last two; None where there is nothing to fit."""
        points = [(math.log(n), math.log(v)) for n, v in zip(self.sizes, values, strict=False) if v > 0]
        if len(points) < 2 or len(values) < len(self.sizes):
            return None
        fit = statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope
        (a, b), (c, d) = points[-2:]
        return fit, (d - b) / (c - a)

    def as_json(self) -> dict[str, Any]:
        exponents = {
            "seconds": self.exponents(self.seconds),
            "requests": self.exponents(self.requests),
            "nbytes": self.exponents(self.nbytes),
        }
        return {
            "group": self.group,
            "name": self.name,
            "unit": self.unit,
            "sizes": self.sizes,
            "cpu_s": self.seconds,
            "requests": self.requests,
            "nbytes": self.nbytes,
            "exponents": {of: {"fit": e[0], "last": e[1]} for of, e in exponents.items() if e},
        }


class Curves:
    """The operations, in the order in which they were first measured."""

    def __init__(self) -> None:
        self.curves: dict[tuple[str, str], Curve] = {}

    def add(
        self,
        group: str,
        name: str,
        unit: str,
        size: int,
        work: Callable[[], Any],
        *,
        tiers: Tiers | None = None,
        nbytes: Callable[[Any], int] | None = None,
        once: bool = False,
    ) -> Any:
        """Measures `work` at a size; `tiers`: whose requests count; `once`: it can't be done twice. Returns what it returned last."""
        curve = self.curves.setdefault((group, name), Curve(group=group, name=name, unit=unit))
        seconds: list[float] = []
        result: Any = None
        while not seconds or (not once and len(seconds) < REPEAT and seconds[0] < _SOON_S):
            result = None
            gc.collect()
            if tiers is not None:
                requests(tiers)
            began = time.process_time()
            result = work()
            seconds.append(time.process_time() - began)
        curve.sizes.append(size)
        curve.seconds.append(statistics.median(seconds))
        if tiers is not None:
            curve.requests.append(sum(requests(tiers).values()))
        if nbytes is not None:
            curve.nbytes.append(nbytes(result))
        return result

    def show(self) -> None:
        group = ""
        for curve in self.curves.values():
            if curve.group != group:
                group = curve.group
                print(f"\n{group}\n{'':<44}{'size':>10}{'CPU s':>10}{'µs each':>9}{'requests':>10}{'MiB':>8}{'fit':>7}{'last':>6}")
            for number, size in enumerate(curve.sizes):
                last = number == len(curve.sizes) - 1
                exponents = curve.exponents(curve.seconds) if last else None
                told = f"{exponents[0]:>7.2f}{exponents[1]:>6.2f}" if exponents else ""
                asked = f"{curve.requests[number]:>10,}" if curve.requests else f"{'':>10}"
                held = f"{curve.nbytes[number] / 2**20:>8.1f}" if curve.nbytes else f"{'':>8}"
                each = curve.seconds[number] / size * 1e6
                name = f"{curve.name}, {curve.unit}" if number == 0 else ""
                print(f"  {name:<42}{size:>10,}{curve.seconds[number]:>10.3f}{each:>9.1f}{asked}{held}{told}")

    def tell(self) -> None:
        """The exponents for the results of `make bench`."""
        for curve in self.curves.values():
            exponents = curve.exponents(curve.seconds)
            if exponents:
                fact(f"exponent of {curve.name} ({curve.unit})", round(exponents[1], 2))


# ---- saving and loading of very many tensors


def tiny_state(count: int) -> dict[str, Any]:
    return {"model": {f"layers.{i // 12}.block.{i % 12}.weight": torch.full((16,), float(i)) for i in range(count)}, "step": 3}


def tensors(curves: Curves, sizes: Sequence[int]) -> None:
    group, unit, codecs = "Saving and loading tiny tensors", "tensors", default_codecs()
    for count in sizes:
        state = tiny_state(count)
        flat = curves.add(group, "flatten", unit, count, lambda state=state: flatten(state, codecs))
        curves.add(group, "encode objects", unit, count, lambda flat=flat: encode_objects(flat.tree(), codecs), nbytes=len)
        units = curves.add(group, "units of the agreement", unit, count, lambda flat=flat: units_of(flat))
        curves.add(group, "table of the agreement", unit, count, lambda units=units: table_of(units, [0, 1]), nbytes=len)
        plain = [leaf.pieces[0].tensor for leaf in flat.leaves]
        curves.add(group, "fingerprints", unit, count, lambda plain=plain: fingerprints(plain))
        pool = ImagePool(None, max_nbytes=1 << 30)
        first = curves.add(group, "stage, the first time", unit, count, lambda s=state, p=pool: stage(s, pool=p), once=True)
        index = index_of(first)
        objects = first.objects
        first.release()
        curves.add(group, "stage again", unit, count, lambda s=state, p=pool: stage(s, pool=p).release())
        pool.close()
        part = Part(run=RUN, step=1, save_id="01ARZ3NDEKTSV4RRFFQ69G5FAV", rank=0, world_size=1, index=index, objects=objects)
        curves.add(group, "encode the part", unit, count, lambda part=part: encode_part(part), nbytes=len)
        data = curves.add(group, "encode the index", unit, count, lambda index=index: encode_index(index, {}), nbytes=len)
        index, _ = decode_index(data)
        tree = flat.tree()
        fills = curves.add(group, "match", unit, count, lambda s=state, t=tree, i=index: match(s, t, i, LoadOptions()).fills)
        wants = curves.add(group, "reads of all", unit, count, lambda f=fills, i=index: wants_of(f, i.block_nbytes))
        curves.add(
            group,
            "plan requests",
            unit,
            count,
            lambda w=wants, i=index: plan_spans(w, file_nbytes=i.file_nbytes, align=i.block_nbytes, cost=REMOTE_COST),
            nbytes=lambda spans: sum(span.nbytes for span in spans) if spans and hasattr(spans[0], "nbytes") else 0,
        )


def index_of(staged: Any) -> Index:
    file = FileEntry(name=shard_name(0, 1), nbytes=staged.nbytes, block_digests=bytes(32 * block_count(staged.nbytes)))
    return build_index(staged.tensors, [file])


# ---- ranks


def ranks(curves: Curves, sizes: Sequence[int]) -> None:
    """Half of the tensors are spread over all ranks, the rest is plain and equal: one table speaks for all, each rank agrees by itself."""
    group, unit = "Ranks that save together, 600 tensors each", "ranks"
    for world in sizes:
        spread = Spread(ranks=tuple(range(world)), shape=(world,), sharded=(True,), layout="fsdp")
        flat = flatten(tiny_state(300), default_codecs())
        plain = units_of(flat)
        spreads = [Unit(leaf=replaced(u.leaf, spread), names=(f"{u.names[0]}.cut",), form=u.form, nbytes=u.nbytes) for u in plain]
        held = [*plain, *spreads]
        table = curves.add(group, "table of a rank", unit, world, lambda h=held, w=world: table_of(h, range(w)), nbytes=len)
        merged = curves.add(group, "merge on rank 0", unit, world, lambda t=table, w=world: merge({0: t}, [0] * w), nbytes=len)
        curves.add(group, "agree on one rank", unit, world, lambda m=merged, w=world: Agreed(m, rank=w // 2, world_size=w))


def replaced(leaf: Any, spread: Spread) -> Any:
    return type(leaf)(name=f"{leaf.name}.cut", dtype=leaf.dtype, global_shape=leaf.global_shape, pieces=leaf.pieces, spread=spread)


# ---- the index


def extents(curves: Curves, sizes: Sequence[int]) -> None:
    """250 tensors a rank, on as many ranks as there are extents for; half of each tensor lies with every rank."""
    group, unit = "The routing index", "extents"
    for count in sizes:
        world, each = max(8, count // 250), 250
        first = rank_index(0, world, each)
        spared = [moved(first, rank, world, each) for rank in range(world)]
        merged = curves.add(group, "merge the parts", unit, count, lambda s=spared: merge_indexes(s))
        data = curves.add(group, "encode", unit, count, lambda m=merged: encode_index(m, {}), nbytes=len)
        curves.add(group, "decode whole", unit, count, lambda d=data: decode_index(d))
        curves.add(group, "open by the head, find one", unit, count, lambda d=data: paged(d).find(name_of(125)))


def paged(data: bytes) -> PagedIndex:
    head = decode_head(data[: head_nbytes(data)], len(data))
    return PagedIndex(head, lambda numbers: [data[slice(*head.groups.extent(n))] for n in numbers], lambda number: b"")


# ---- catalogs


def catalog(curves: Curves, sizes: Sequence[int]) -> None:
    group, unit = "A run's checkpoints on two buckets", "checkpoints"
    for count in sizes:
        tiers = bucket_tiers("near", "far")
        run(fabricate(tiers, RUN, count))
        with tempfile.TemporaryDirectory() as kept:
            known = RecordCache(RecordStore(Path(kept), "scale"))
            found = curves.add(group, "list, nothing known", unit, count, lambda t=tiers, k=known: look(t, k), tiers=tiers, once=True)
            curves.add(group, "list again", unit, count, lambda t=tiers, k=known: look(t, k), tiers=tiers)
            curves.add(
                group,
                "list in a new process",
                unit,
                count,
                lambda t=tiers, k=kept: look(t, RecordCache(RecordStore(Path(k), "scale"))),
                tiers=tiers,
            )
        curves.add(group, "what is pending", unit, count, lambda f=found, t=tiers: pending(f, t))
        curves.add(group, "verify --level quick", unit, count, lambda t=tiers: run(checked(t)), tiers=tiers, once=True)
        curves.add(group, "plan of what is to be freed", unit, count, lambda t=tiers, k=known: run(freed(t, k)), tiers=tiers)
        infos = many_checkpoints(count)
        now = infos[-1].committed_at
        curves.add(group, "retention plan, twelve rules", unit, count, lambda i=infos, n=now: evaluate(i, POLICY, n, tiers=PLANNING_TIERS))


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """Not `asyncio.run`, which makes a text of what the coroutine returned (for a signal handler's error that nobody sees)."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coro)
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def look(tiers: Tiers, cache: RecordCache) -> Any:
    return run(scan(tiers, RUN, cache))


async def checked(tiers: Tiers) -> Any:
    return await verify(tiers, RUN, level="quick", leases=False)


async def freed(tiers: Tiers, cache: RecordCache) -> Any:
    clock = SystemClock()
    policy = RetentionConfig(keep=(KeepRule(last=5),), gc=GcConfig(max_delete_fraction=1.0))
    h = Housekeeping(tiers=tiers, run=RUN, policy=policy, clock=clock, cache=cache, leases=LeaseWatch(clock))
    return await collect(h, now=True, dry_run=True)


def files(curves: Curves, sizes: Sequence[int]) -> None:
    group, unit = "tier:// files in one folder of a bucket", "files"
    for count in sizes:
        bucket = Bucket()
        config = load_config({"version": 1, "tiers": [{"uri": "memory://near", "durable": True, "name": "near"}]})
        with Session.open(config, opener=lambda tier, config, b=bucket: b) as session:
            made = Files(session)
            for number in range(count):
                session.run(made.put(f"data/{number % 20:02d}/part-{number:06d}.bin", b"x"))
            other = Files(session)
            looks = (("ls of all", "data", True), ("ls of one level", "data", False), ("ls of a twentieth", "data/07", False))
            for name, folder, recursive in looks:

                def listed(f: str = folder, r: bool = recursive, o: Files = other, s: Session = session) -> Any:
                    return s.run(o.list(f, recursive=r))

                curves.add(group, name, unit, count, listed, tiers=session.tiers)
            made.close()
            other.close()


GROUPS: dict[str, tuple[Callable[[Curves, Sequence[int]], None], dict[str, tuple[int, ...]]]] = {
    "tensors": (tensors, {"short": (200, 800, 2400), "full": (1000, 5000, 20_000, 50_000)}),
    "ranks": (ranks, {"short": (8, 32, 128), "full": (8, 64, 512, 2048)}),
    "extents": (extents, {"short": (4000, 12_000, 32_000), "full": (16_000, 64_000, 256_000, 1_000_000)}),
    "catalog": (catalog, {"short": (100, 300, 900), "full": (100, 1000, 10_000), "long": (1000, 10_000, 100_000)}),
    "files": (files, {"short": (40, 120, 320), "full": (100, 500, 2000)}),
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="sizes for CI")
    parser.add_argument("--long", action="store_true", help="the largest sizes")
    parser.add_argument("--only", choices=GROUPS, nargs="*", default=list(GROUPS), help="which groups")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH", help="where all of it is written")
    options = parser.parse_args()
    curves = Curves()
    tensors(Curves(), (50,))  # first calls, of torch above all
    for name in options.only:
        work, sizes = GROUPS[name]
        work(curves, sizes["short"] if options.short else sizes.get("long", sizes["full"]) if options.long else sizes["full"])
        sys.stdout.flush()
    curves.show()
    curves.tell()
    if options.json:
        options.json.write_text(json.dumps({"name": "scale", "rows": [c.as_json() for c in curves.curves.values()]}, indent=1))


if __name__ == "__main__":
    main()
