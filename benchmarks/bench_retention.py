"""Retention: listing and planning very many checkpoints; collecting, against rmtree and the ways to empty a bucket; a save's stall."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import resource
import shutil
import statistics
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import s3fs
from common import scratch, training_state
from planning import measure_planning

import tierstore
from tierstore.clock import SystemClock
from tierstore.config_retention import GcConfig, KeepRule, RetentionConfig
from tierstore.storage.contract import Storage
from tierstore.storage.posix import PosixStorage
from tierstore.storage.s3 import S3Storage
from tierstore.testing.fabricate import fabricate
from tierstore.testing.servers import S3Server, embedded_server
from tierstore.tiers.catalog import RecordCache, scan
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.leases import LeaseWatch
from tierstore.tiers.record_store import RecordStore
from tierstore.tiers.tier import Tier, Tiers
from tierstore.units import format_size, parse_size

RUN = "bench"
SHARDS = 98
"""A checkpoint of as many shards has a hundred files, its manifest and its commit record counted."""


class Counted:
    """A storage that counts what is asked of it."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not asyncio.iscoroutinefunction(value):
            return value

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return await value(*args, **kwargs)

        return call


def one_tier(storage: Any) -> Tiers:
    tier = Tier(name="shared", storage=storage, scope="shared")
    return Tiers(tiers=(tier,), authority=tier, durable_at=tier, store_id="bench")


class Tomorrow(SystemClock):
    """The machine's clock, a day ahead: nothing is too young to go."""

    def now(self) -> datetime:
        return datetime.now(timezone.utc) + timedelta(days=1)


# ---- listing


def bare(root: Path) -> int:
    """What a script does: every log's folder is listed, and every record parsed."""
    checkpoints = {entry.name for entry in os.scandir(root / RUN) if entry.name.startswith("step-")}
    found = 0
    for log in os.scandir(root / RUN / ".log"):
        for record in os.scandir(log.path):
            json.loads(Path(record.path).read_bytes())
        found += log.name in checkpoints
    return found


def look(root: Path, kept: Path | None) -> tuple[float, float, Counter[str]]:
    """Two looks of one process: seconds of each, and the operations of the first."""
    storage = Counted(PosixStorage(root, threads=2))
    tiers = one_tier(storage)
    cache = RecordCache(RecordStore(kept, "bench") if kept is not None else None)
    seconds = []
    first: Counter[str] = Counter()
    for turn in range(2):
        storage.calls.clear()
        began = time.perf_counter()
        asyncio.run(scan(tiers, RUN, cache))
        seconds.append(time.perf_counter() - began)
        first = first if turn else Counter(storage.calls)
    return seconds[0], seconds[1], first


def measured(work: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """What `work` returns in a fresh process, and how many bytes that process grew by at most."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_measure, args=(writer, work, args))
    process.start()
    found = reader.recv()
    process.join()
    return found


def _measure(writer: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    logging.disable(logging.CRITICAL)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    result = work(*args)
    seconds = time.perf_counter() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    writer.send(((result, seconds), grown))


def listing(root: Path, count: int) -> None:
    store, kept = root / f"store-{count}", root / f"kept-{count}"
    asyncio.run(fabricate(one_tier(PosixStorage(store, durable=False)), RUN, count))
    (found, base), memory = measured(bare, store)
    print(f"\nListing {count:,} checkpoints on a folder ({2 * count:,} folders; time relative to the bare loop)")
    show("a bare loop that lists and parses every record", base, base, f"{found:,} found, +{format_size(memory)}")
    for name, place in (("first process", kept), ("second process, with the records that the first kept", kept), ("no records kept", None)):
        ((first, again, calls), _), memory = measured(look, store, place)
        show(f"tierstore, {name}: first look", first, base, f"{operations(calls)}, +{format_size(memory)}")
        show(f"tierstore, {name}: second look", again, base)
    planned = measure_planning(count, repeat=1)
    show("planning under twelve rules", planned.seconds, base, f"+{format_size(planned.peak_nbytes)}")
    shutil.rmtree(store)


def operations(calls: Mapping[str, int]) -> str:
    return ", ".join(f"{n:,} × {name}" for name, n in sorted(calls.items()))


def show(name: str, seconds: float, base: float, more: str = "") -> None:
    print(f"  {name:<76}{seconds:9.3f} s  x{seconds / base:7.2f}  {more}")


# ---- collecting


def policy(rate: int) -> RetentionConfig:
    return RetentionConfig(keep=(KeepRule(last=1),), gc=GcConfig(max_delete_fraction=1.0, max_deletes_per_s=rate))


async def sweep_all(tiers: Tiers, rate: int) -> tuple[float, int]:
    """Seconds to free everything but one checkpoint, decided before, and how many files that were."""
    clock = Tomorrow()
    h = Housekeeping(tiers=tiers, run=RUN, policy=policy(rate), clock=clock, cache=RecordCache(), leases=LeaseWatch(clock))
    await prune(h)
    began = time.perf_counter()
    report = await collect(h, now=True)
    assert not report.failed
    return time.perf_counter() - began, report.files


def on_folders(root: Path, files: int, repeat: int) -> None:
    count = max(2, files // (SHARDS + 2)) + 1
    ours, theirs, freed = [], [], 0
    for turn in range(repeat):
        for name in ("ours", "theirs"):
            asyncio.run(fabricate(one_tier(PosixStorage(root / f"{name}-{turn}", durable=False)), RUN, count, n_files=SHARDS))
        seconds, freed = asyncio.run(sweep_all(one_tier(PosixStorage(root / f"ours-{turn}")), 10**9))
        ours.append(seconds)
        began = time.perf_counter()
        for folder in (root / f"theirs-{turn}" / RUN).glob("step-*"):
            shutil.rmtree(folder)
        theirs.append(time.perf_counter() - began)
    base = statistics.median(theirs)
    print(f"\nCollecting {freed:,} files of {count - 1} checkpoints on a folder (median of {repeat})")
    show("shutil.rmtree, nothing synced, nothing written down", base, base)
    show("tierstore collect: decided, written down, in order, synced", statistics.median(ours), base)


def on_s3(server: S3Server, files: int, repeat: int) -> None:
    count = max(2, files // (SHARDS + 2)) + 1
    options = server.options()
    server.make_bucket("collect")
    seconds: dict[str, list[float]] = {}
    freed = 0
    for turn in range(repeat):
        places = {name: f"collect/{name}-{turn}" for name in ("ours", "rm", "pool", "loop")}
        for place in places.values():
            asyncio.run(filled(f"s3://{place}", options, count))
        took, freed = asyncio.run(emptied(f"s3://{places['ours']}", options))
        seconds.setdefault("tierstore collect: decided, written down, in order", []).append(took)
        fs = s3fs.S3FileSystem(**for_s3fs(options), skip_instance_cache=True, use_listings_cache=False)
        began = time.perf_counter()
        fs.rm(places["rm"], recursive=True)
        seconds.setdefault("s3fs.rm(recursive=True): batches", []).append(time.perf_counter() - began)
        client = server._client()
        began = time.perf_counter()
        keys = [name.partition("/")[2] for name in fs.find(places["pool"])]
        with ThreadPoolExecutor(10) as pool:  # as `aws s3 rm --recursive` does: one request a file, ten at once
            for done in [pool.submit(client.delete_object, Bucket="collect", Key=key) for key in keys]:
                done.result()
        seconds.setdefault("one request a file, ten at once, as `aws s3 rm --recursive`", []).append(time.perf_counter() - began)
        began = time.perf_counter()
        for name in fs.find(places["loop"]):
            fs.rm_file(name)
        seconds.setdefault("s3fs.rm_file in a loop", []).append(time.perf_counter() - began)
    base = statistics.median(seconds["s3fs.rm(recursive=True): batches"])
    print(f"\nCollecting {freed:,} files of {count - 1} checkpoints on {server.kind} (median of {repeat}; no limit of deletions a second)")
    for name, times in seconds.items():
        show(name, statistics.median(times), base)


async def filled(uri: str, options: Mapping[str, Any], count: int) -> None:
    storage = S3Storage(uri, options)
    try:
        await fabricate(one_tier(storage), RUN, count, n_files=SHARDS)
    finally:
        await storage.close()


async def emptied(uri: str, options: Mapping[str, Any]) -> tuple[float, int]:
    storage = S3Storage(uri, options)
    try:
        return await sweep_all(one_tier(storage), 10**9)
    finally:
        await storage.close()


def for_s3fs(options: dict[str, Any]) -> dict[str, Any]:
    """The same options as bare s3fs takes them."""
    rest = {key: value for key, value in options.items() if key != "region_name"}
    return {**rest, "client_kwargs": {"region_name": options["region_name"]}}


# ---- the stall of a save


class SlowToDelete(PosixStorage):
    """A folder on which each deletion of a file takes five seconds."""

    deleting: threading.Event
    stop: threading.Event

    async def delete(self, paths: Any) -> None:
        if any("/step-" in path and ".leases" not in path for path in paths):
            self.deleting.set()
            await asyncio.to_thread(self.stop.wait, 5.0 * len(paths))
        await super().delete(paths)


@contextlib.contextmanager
def slow_store(root: Path, retention: Mapping[str, Any] | None) -> Iterator[tuple[tierstore.Store, threading.Event]]:
    deleting, stop = threading.Event(), threading.Event()

    def make(uri: str, *_: Any, **__: Any) -> Storage:
        storage = SlowToDelete(Path(uri))
        storage.deleting, storage.stop = deleting, stop
        return storage

    with mock.patch("tierstore.tiers.opening.open_storage", make):
        config = {"version": 1, "run": RUN, "tiers": [{"uri": str(root / "node"), "scope": "node"}, {"uri": str(root / "shared")}]}
        with tierstore.open({**config, **({"retention": retention} if retention else {})}) as store:
            try:
                yield store, deleting
            finally:
                stop.set()


def stall(root: Path, nbytes: int, repeat: int) -> None:
    state = training_state(nbytes)
    retention = {
        "keep": [{"last": 1}],
        "protect": {"min_age": "1ms"},
        "gc": {"undelete_window": "1ms", "max_clock_skew": "1ms", "max_delete_fraction": "100%"},
    }
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name, rules in (("nothing is deleted", None), ("a deletion runs that takes 5 s a file", retention)):
        stalls, commits = found.setdefault(name, ([], []))
        with slow_store(root / ("slow" if rules else "idle"), rules) as (store, deleting):
            step = 0
            while step < 3 or (rules and not deleting.is_set() and step < 200):  # the first saves make the images
                step += 1
                store.save(step, state).wait("durable", timeout=600)
            if rules:
                assert deleting.wait(60), "no deletion was begun"
            for _ in range(repeat):
                step += 1
                began = time.perf_counter()
                ticket = store.save(step, state)
                ticket.wait("durable", timeout=600)
                commits.append(time.perf_counter() - began)
                stalls.append(ticket.stall_s)
    base = statistics.median(found["nothing is deleted"][0])
    durable = statistics.median(found["nothing is deleted"][1])
    print(f"\nA save of {format_size(nbytes)} (median of {repeat})")
    for name, (stalls, commits) in found.items():
        show(f"stall while {name}", statistics.median(stalls), base, f"({min(stalls):.3f}..{max(stalls):.3f})")
        show(f"until durable while {name}", statistics.median(commits), durable, f"({min(commits):.3f}..{max(commits):.3f})")


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, nargs="*", default=[10_000, 100_000], help="how many are listed and planned about")
    parser.add_argument("--files", type=int, default=10_000, help="how many are collected")
    parser.add_argument("--nbytes", type=parse_size, default=256 << 20, help="size of the state whose save is timed, with a unit")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of what is deleted; saves: as many, and two more")
    parser.add_argument("--directory", type=Path, default=None, help="where files are made (default: a fresh folder in ./.cache/bench)")
    args = parser.parse_args()
    with scratch(args.directory) as root:
        for count in args.checkpoints:
            listing(root, count)
        on_folders(root / "folders", args.files, args.repeat)
        with embedded_server(root / "server") as server:
            on_s3(server, args.files, args.repeat)
        stall(root / "stall", args.nbytes, args.repeat + 2)


if __name__ == "__main__":
    main()
