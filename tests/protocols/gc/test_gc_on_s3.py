"""The same on a real S3 server, with a bucket as the authority: batched deletions, records by number, unfinished uploads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gc_kit import DAY, HOUR, policy_of
from tiers_kit import Hooked, SteppedClock, attempt_at, persist_rank

from tierstore.config import load_config
from tierstore.errors import RefusedError
from tierstore.names import Attempt, shard_name
from tierstore.storage.s3 import S3Storage
from tierstore.tiers.catalog import RecordCache, scan
from tierstore.tiers.commit import commit
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.deleting import Emptying, Remover, find
from tierstore.tiers.gc.evict import evict
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.leases import LeaseWatch
from tierstore.tiers.log import read_log
from tierstore.tiers.promote import reconcile
from tierstore.tiers.session import Session
from tierstore.tiers.tier import Tier, Tiers
from tierstore.tiers.verify import verify

pytestmark = pytest.mark.s3


@pytest.fixture
def session(tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any]) -> Iterator[Session]:
    tiers = [
        str(tmp_path / "node"),
        {"uri": s3_bucket, "name": "object", "options": s3_options},
        {"uri": str(tmp_path / "far"), "name": "far"},
    ]
    with Session.open(load_config(tiers, run="run"), clock=SteppedClock()) as opened:
        yield opened


def housekeeping(tiers: Tiers, clock: SteppedClock, **gc: Any) -> Housekeeping:
    rules = {"object": {"keep": [{"last": 1}]}}
    policy = policy_of({"last": 2}, tiers=rules, gc=gc)
    return Housekeeping(tiers=tiers, run="run", policy=policy, clock=clock, cache=RecordCache(), leases=LeaseWatch(clock))


async def save(tiers: Tiers, clock: SteppedClock, step: int) -> Attempt:
    attempt = attempt_at(step, at=clock.now())
    await persist_rank(tiers, attempt, tiers.authority)
    await commit(tiers, attempt, deadline_s=0, clock=clock)
    clock.advance(60)
    return attempt


def test_from_save_to_gone_and_a_copy_dropped_in_a_bucket(session: Session) -> None:
    tiers, clock = session.tiers, SteppedClock()
    assert tiers.authority.name == "object"

    async def work() -> None:
        one, two, three = [await save(tiers, clock, step) for step in (1, 2, 3)]
        assert (await reconcile(tiers, "run", clock=clock)).ok
        clock.advance(2 * HOUR)
        assert (await prune(housekeeping(tiers, clock))).expired == (one,)
        clock.advance(2 * DAY)
        report = await collect(housekeeping(tiers, clock))
        assert report.failed == ()
        kinds = {(f.attempt, f.tier, f.kind) for f in report.freed}
        assert kinds == {(one, "object", "sweep"), (one, "far", "sweep"), (two, "object", "evict")}
        storage = tiers.authority.storage
        assert await storage.list(one.folder) == []
        assert [r.kind for r in await read_log(storage, one)] == ["committed", "swept"]
        assert [r.kind for r in await read_log(storage, two)][-2:] == ["evicting", "evicted"]
        catalog = await scan(tiers, "run")
        assert [(c.attempt, c.complete_on) for c in catalog.checkpoints] == [(two, ("far",)), (three, ("object", "far"))]
        assert (await verify(tiers, "run", level="full")).damage == ()
        again = await collect(housekeeping(tiers, clock))
        assert (again.freed, again.failed) == ((), ())

    session.run(work(), timeout=240)


def test_many_files_go_in_few_requests(session: Session) -> None:
    clock = SteppedClock()
    batches: list[int] = []

    async def hook(operation: str, path: str) -> None:
        if operation == "delete":
            batches.append(path.count(",") + 1)

    async def work() -> None:
        inner = session.tiers.authority.storage
        tier = Tier(name="object", storage=Hooked(inner, hook), scope="shared")
        tiers = Tiers(tiers=(tier,), authority=tier, durable_at=tier, store_id=session.tiers.store_id)
        attempts = [attempt_at(step) for step in range(3)]
        for attempt in attempts:
            for rank in range(60):
                await inner.put(attempt.path(shard_name(rank, 60)), b"x")
        h = housekeeping(tiers, clock, max_deletes_per_s=1000)
        found = [await find(h, Emptying(attempt=a, tier=tier, kind="orphan", why="test")) for a in attempts]
        assert sum(len(one.files) for one in found) == 180
        assert await Remover(h, 3).remove(found) == [None] * 3
        assert batches == [180]
        assert [await inner.list(a.folder) for a in attempts] == [[], [], []]

    session.run(work(), timeout=240)


def test_a_copy_that_the_server_calls_another_does_not_count(session: Session) -> None:
    """The same size, other bytes: the manifest and the sizes alone would not tell."""
    tiers, clock = session.tiers, SteppedClock()

    async def work() -> None:
        attempt = await save(tiers, clock, 1)
        assert (await reconcile(tiers, "run", clock=clock)).ok
        storage, path = tiers.authority.storage, attempt.path(shard_name(0, 1))
        data = bytearray(await storage.read(path))
        data[-1] ^= 1
        await storage.put(path, bytes(data))
        (info,) = (await scan(tiers, "run")).checkpoints
        with pytest.raises(RefusedError, match=r"these do: none .*is not what was copied there, by the server's word"):
            await evict(housekeeping(tiers, clock), info, "far")
        data[-1] ^= 1
        await storage.put(path, bytes(data))
        assert (await evict(housekeeping(tiers, clock), info, "far")).files

    session.run(work(), timeout=240)


def test_uploads_that_nobody_finishes_end_after_the_policys_grace(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteppedClock()
    abort = S3Storage.abort_stale_uploads

    async def an_hour_later(self: S3Storage, older_than_s: float) -> list[str]:
        return await abort(self, older_than_s - HOUR)

    async def work() -> None:
        await save(session.tiers, clock, 1)
        storage = session.tiers.authority.storage
        assert isinstance(storage, S3Storage)
        key = storage._key("run/step-left/shard")
        await storage._requests.send("starting", key, "create_multipart_upload", Key=key)
        monkeypatch.setattr(S3Storage, "abort_stale_uploads", an_hour_later)
        patient = await collect(housekeeping(session.tiers, clock))
        assert patient.leftovers == {}
        hasty = await collect(housekeeping(session.tiers, clock, multipart_grace_s=HOUR - 5))
        assert hasty.leftovers == {}, "one run's grace says nothing of the other runs' uploads: the store's own counts too"
        tiers = replace(session.tiers, upload_grace_s=HOUR - 5)
        report = await collect(housekeeping(tiers, clock, multipart_grace_s=HOUR - 5))
        assert report.leftovers == {"object": ("run/step-left/shard",)}
        assert (await collect(housekeeping(tiers, clock, multipart_grace_s=HOUR - 5))).leftovers == {}

    session.run(work(), timeout=240)
