"""The same protocols with a bucket as the authority, on a real S3 server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiers_kit import SteppedClock, attempt_at, path_of, persist_rank, shard_of

from tierstore.config import load_config
from tierstore.config_models import StoreConfig
from tierstore.errors import AccessError, CondemnedError, NotFoundError, TemporaryError
from tierstore.format.record import Record
from tierstore.names import MANIFEST, shard_name
from tierstore.storage.s3 import S3Storage
from tierstore.testing.servers import S3Server
from tierstore.tiers.catalog import scan
from tierstore.tiers.commit import commit
from tierstore.tiers.replica import Want, open_replica
from tierstore.tiers.session import Session
from tierstore.tiers.tier import Tier, Tiers

pytestmark = pytest.mark.s3
CLOCK = SteppedClock()


def config_of(folder: Path, bucket: str, options: dict[str, Any]) -> StoreConfig:
    return load_config([str(folder / "node"), {"uri": bucket, "name": "object", "options": options}], run="run")


@pytest.fixture
def session(tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any]) -> Iterator[Session]:
    with Session.open(config_of(tmp_path, s3_bucket, s3_options), clock=CLOCK) as opened:
        yield opened


def test_a_checkpoint_is_saved_found_and_read_from_a_bucket(session: Session, tmp_path: Path) -> None:
    tiers, attempt = session.tiers, attempt_at(5)
    assert tiers.authority.name == "object"

    async def work() -> None:
        for rank in range(2):
            await persist_rank(tiers, attempt, tiers.authority, rank=rank, world_size=2, metrics={"loss": 1.0})
        assert (await scan(tiers, "run")).latest() is None
        fates = await asyncio.gather(*(commit(tiers, attempt, deadline_s=0, clock=CLOCK) for _ in range(4)))
        assert len({f.nonce for f in fates}) == 1
        info = (await scan(tiers, "run")).latest()
        assert info is not None
        assert (info.attempt, info.complete_on, info.metrics) == (attempt, ("object",), {"loss": 1.0})
        replica = await open_replica(tiers, info)
        fetched = replica.bytes_fetched["object"]
        data = shard_of(1, 2).data
        row = bytearray(5000)
        await replica.read([Want(shard_name(1, 2), len(data) - 5000, memoryview(row))])
        assert bytes(row) == data[-5000:]
        assert replica.bytes_fetched["object"] - fetched <= 3 * 4096

    session.run(work(), timeout=200)
    assert not path_of(tiers, tiers.nearest.name, attempt, MANIFEST).exists()


def test_racing_sessions_decide_one_fate_in_a_bucket(session: Session, s3_bucket: str, s3_options: dict[str, Any]) -> None:
    attempt = attempt_at(6)

    def tiers() -> Tiers:
        object_tier = Tier(name="object", storage=S3Storage(s3_bucket, s3_options), scope="shared")
        return Tiers(tiers=(object_tier,), authority=object_tier, durable_at=object_tier, store_id=session.tiers.store_id)

    async def racer(condemner: bool) -> Record | CondemnedError:
        mine = tiers()
        try:
            return await commit(mine, attempt, deadline_s=0, clock=CLOCK, world_size=2 if condemner else 1)
        except CondemnedError as error:
            return error
        finally:
            await mine.authority.storage.close()

    async def work() -> list[Record | CondemnedError]:
        await persist_rank(session.tiers, attempt, session.tiers.authority)
        return await asyncio.gather(*(racer(n % 2 == 0) for n in range(6)))

    ends = session.run(work(), timeout=200)
    assert len({type(e) for e in ends}) == 1, ends


def test_a_missing_bucket_wrong_keys_and_a_dead_endpoint_are_told_apart_at_start(
    tmp_path: Path, s3_server: S3Server, s3_bucket: str, s3_options: dict[str, Any]
) -> None:
    wrong = {**s3_options, "secret": "wrong-secret-key-0123456789"}
    cases: list[tuple[str, dict[str, Any], type[Exception]]] = [
        ("s3://tierstore-no-such-bucket/x", s3_options, NotFoundError),
        (s3_bucket, wrong, AccessError),
        (s3_bucket, {**s3_options, "endpoint_url": "http://127.0.0.1:9"}, TemporaryError),
    ]
    for bucket, options, kind in cases:
        with pytest.raises(kind) as caught:
            Session.open(config_of(tmp_path, bucket, options))
        assert "'object'" in str(caught.value)
        assert "hint:" in str(caught.value)
        assert "wrong-secret" not in str(caught.value)
