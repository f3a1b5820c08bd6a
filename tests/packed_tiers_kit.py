"""What the tests of packed tiers share: a store on folders and buckets in memory, and the state of an Adam in mixed precision."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers_kit import SteppedClock

import tierstore
from tierstore.clock import Clock
from tierstore.config import load_config
from tierstore.storage.contract import Storage
from tierstore.storage.posix import PosixStorage
from tierstore.testing.bucket import Bucket
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.housekeeping import Housekeeping
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.gc.reports import Freed
from tierstore.tiers.lease_watch import LeaseWatch
from tierstore.tiers.record_cache import RecordCache
from tierstore.tiers.session import Session

ROWS, COLUMNS = 512, 384
MOMENTS = ("exp_avg", "exp_avg_sq")


def adam_state(seed: int) -> dict[str, Any]:
    """Weights, their master, and moments with rows that were never trained; three blocks of 1 MiB and a rest."""
    numbers = torch.Generator().manual_seed(seed)
    master = torch.randn(ROWS, COLUMNS, generator=numbers) * 0.02
    first = torch.randn(ROWS, COLUMNS, generator=numbers) * 1e-4
    second = (torch.randn(ROWS, COLUMNS, generator=numbers) * 1e-4).square()
    first[7], second[7] = 0.0, 0.0
    return {
        "model": {"w": master.bfloat16()},
        "master": {"w": master},
        "optim": {"w": {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor(float(seed))}},
    }


class Place:
    """The tiers of one test: two folders, the node's and the authority's, and `far`, a bucket in memory or a third folder."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.buckets: dict[str, Bucket] = {}
        monkeypatch.setattr("tierstore.tiers.opening.open_storage", self._make)

    def _make(self, uri: str, *args: Any, **settings: Any) -> Storage:
        if uri.startswith("s3://"):
            return self.buckets.setdefault(uri, Bucket(uri.removeprefix("s3://").replace("/", "-")))
        return PosixStorage(Path(uri), durable=False)

    @property
    def bucket(self) -> Bucket:
        return self.buckets["s3://bucket/far"]

    def config(self, *, uri: str = "s3://bucket/far", more: dict[str, Any] | None = None, **far: Any) -> dict[str, Any]:
        near = [
            {"name": "node", "uri": str(self.root / "node"), "scope": "node"},
            {"name": "shared", "uri": str(self.root / "shared"), "scope": "shared"},
        ]
        return {"version": 1, "run": "r", "tiers": [*near, {"name": "far", "uri": uri, "scope": "shared", **far}], **(more or {})}

    def open(self, config: dict[str, Any], clock: Clock | None = None) -> tierstore.Store:
        return tierstore.open(config, clock=clock)

    def session(self, config: dict[str, Any], clock: Clock | None = None, *, create: bool = True) -> Session:
        return Session.open(load_config(config), clock=clock, create=create)

    def save(self, config: dict[str, Any], *steps: int, **how: Any) -> None:
        with self.open(config) as store:
            for step in steps:
                store.save(step, adam_state(step), **how).wait("far", timeout=200)

    def take(self, other: Place) -> None:
        """Holds from now on what the tiers of `other` hold."""
        shutil.copytree(other.root, self.root, dirs_exist_ok=True)
        for uri, bucket in other.buckets.items():
            mine = self._make(uri)
            assert isinstance(mine, Bucket)
            for name, data in bucket._files.items():
                mine._set(name, data)

    def free(self, config: dict[str, Any], clock: SteppedClock) -> tuple[Freed, ...]:
        """Lets all but the newest checkpoint expire and go, with nobody else at work; returns what was freed."""
        policy = {"keep": [{"last": 1}], "gc": {"undelete_window": "1h"}}
        with self.session({**config, "retention": policy}, clock) as session:
            policy_of = session.config.retention_for("r")
            h = Housekeeping(tiers=session.tiers, run="r", policy=policy_of, clock=clock, cache=RecordCache(), leases=LeaseWatch(clock))
            session.run(prune(h))
            clock.advance(90_000)
            return session.run(collect(h, now=True)).freed

    def lose_exact_shards(self) -> None:
        """The shards of all checkpoints on the folders; their documents and logs stay."""
        for path in [p for name in ("node", "shared") for p in (self.root / name).rglob("shard-*")]:
            path.unlink()

    def lose_near(self) -> None:
        """Both folders, with everything in them: the log, too."""
        for name in ("node", "shared"):
            shutil.rmtree(self.root / name)

    def names(self, part: str) -> list[str]:
        """The bucket's files whose path has `part` in it."""
        return [name for name in list(self.bucket._files) if part in name]  # a store at work may write there just now

    def remove(self, name: str) -> None:
        """Takes a file out of the bucket."""
        del self.bucket._files[name]
        self.bucket._names.remove(name)

    def flip(self, name: str, at: int) -> None:
        """Damages one byte of a file in the bucket."""
        data = bytearray(self.bucket._files[name])
        data[at] ^= 0xFF
        self.bucket._set(name, bytes(data))
