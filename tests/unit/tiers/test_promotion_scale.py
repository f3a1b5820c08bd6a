"""How many requests a look for pending promotions costs in a bucket with very many checkpoints: pages of listings, and what is new.

``--long`` does the same with 10,000 checkpoints.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tiers_kit import SteppedClock

from tierstore.config import load_config
from tierstore.testing.bucket import PAGE, Bucket, bucket_tiers, requests
from tierstore.testing.fabricate import fabricate
from tierstore.tiers.catalog import RecordCache, scan
from tierstore.tiers.pending import pending
from tierstore.tiers.promote import reconcile
from tierstore.tiers.record_store import RecordStore
from tierstore.tiers.session import Session
from tierstore.tiers.tier import Tiers
from tierstore.tiers.worker import Worker

RUN = "r"


@pytest.fixture(scope="module")
def count(long_run: bool) -> int:
    return 10_000 if long_run else 1_200


@pytest.fixture(scope="module")
def tiers(count: int) -> Tiers:
    made = bucket_tiers("near", "far")
    asyncio.run(fabricate(made, RUN, count))
    return made


def pages(tiers: Tiers, count: int) -> int:
    """Of the listings that a look can't do without: the logs and the run's folder, on each tier."""
    logs = sum(tier.storage.pages(f"{RUN}/.log") for tier in tiers if isinstance(tier.storage, Bucket))
    return logs + len(tiers) * (1 + count // PAGE)


def look(tiers: Tiers, cache: RecordCache) -> int:
    """Requests of one look at what is pending."""
    requests(tiers)
    copies = pending(asyncio.run(scan(tiers, RUN, cache)), tiers)
    assert not copies
    return sum(requests(tiers).values())


def test_a_second_look_reads_pages_of_listings_and_no_record(tiers: Tiers, count: int, tmp_path: Path) -> None:
    cache = RecordCache(RecordStore(tmp_path, "scale"))
    first = look(tiers, cache)
    assert first >= 2 * count, "two records of each checkpoint"
    assert look(tiers, cache) <= pages(tiers, count)
    assert look(tiers, RecordCache(RecordStore(tmp_path, "scale"))) <= pages(tiers, count), "a new process finds them on its disk"


def test_working_off_what_is_pending_reads_no_record_twice(
    tiers: Tiers, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.tiers.promote.lock_path", lambda tiers, run: tmp_path / "lock")
    requests(tiers)
    asyncio.run(reconcile(tiers, RUN, clock=SteppedClock()))
    assert requests(tiers)["read"] <= 2 * count, "both looks of one pass share what was read"
    kept = RecordCache()
    asyncio.run(scan(tiers, RUN, kept))
    requests(tiers)
    report = asyncio.run(reconcile(tiers, RUN, clock=SteppedClock(), cache=kept))
    found = requests(tiers)
    assert report.ok
    assert found["read"] == 0
    assert found["list"] <= 2 * pages(tiers, count) + 10


def test_of_what_is_new_only_its_records_are_read(tiers: Tiers) -> None:
    cache = RecordCache()
    look(tiers, cache)
    asyncio.run(fabricate(tiers, RUN, 3, every_steps=7))
    asyncio.run(scan(tiers, RUN, cache))
    assert requests(tiers)["read"] == 2 * 3


def test_a_new_process_s_worker_reads_no_record_that_an_earlier_process_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    buckets = {name: Bucket(name) for name in ("near", "far")}
    config = load_config(
        {"version": 1, "run": RUN, "tiers": [{"uri": f"memory://{name}", "durable": True, "name": name} for name in buckets]}
    )

    def read_by_a_start() -> int:
        with Session.open(config, opener=lambda tier, config: buckets[tier.name]) as session:
            worker = Worker(session, RUN, cache=session.new_cache())
            requests(session.tiers)
            report = worker.adopt()
            worker.drain()
            worker.close()
            assert report is not None
            assert report.ok
            return requests(session.tiers)["read"]

    async def fill(tiers: Tiers) -> None:
        """A store on which housekeeping has nothing to do: what it left over at a worker's end, the next one's would read and copy."""
        await fabricate(tiers, RUN, 40)
        for record in await buckets["near"].list(f"{RUN}/.log"):
            await buckets["far"].put(record.path, await buckets["near"].read(record.path))

    with Session.open(config, opener=lambda tier, config: buckets[tier.name]) as session:
        session.run(fill(session.tiers))
    assert read_by_a_start() >= 2 * 40
    assert read_by_a_start() <= 10
