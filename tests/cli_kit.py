"""What the tests of the retention verbs share: a small store with a history, and the command line in this process, at a time of ours."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_kit import unsynced
from tiers_kit import SteppedClock, copy_to, persist_rank, shard_of
from typer.testing import CliRunner, Result

from tierstore.cli.main import app
from tierstore.config import load_config
from tierstore.names import Attempt, new_save_id
from tierstore.tiers.commit import commit
from tierstore.tiers.log import append
from tierstore.tiers.session import Session

NOW = datetime(2026, 11, 29, 3, 0, tzinfo=timezone.utc)
"""When the disk is full."""

POLICY = """\
keep:
  - last: 2
  - every: {steps: 5000}
  - best: {metric: val/loss, mode: min}
tiers:
  nvme: {keep: [{last: 1}], evict: {high_watermark: 85%, low_watermark: 70%}}
  pfs: {keep: [{last: 3}]}
protect: {min_age: 30m}
"""

CONFIG = """\
run: llama
tiers:
  - {name: nvme, uri: ./nvme, scope: node, capacity: 256KiB}
  - {name: pfs, uri: ./pfs, scope: shared}
  - {name: object, uri: ./object, scope: shared}
"""

STEPS = (10000, 10500, 11000, 11500, 12000, 12500)
"""Half an hour apart, the newest 10 minutes old; 11000 has the best val/loss."""


class StillClock(SteppedClock):
    """A clock that stands at `NOW` until a test moves it."""

    def __init__(self, wall: datetime = NOW) -> None:
        super().__init__()
        self.wall = wall


def make_store(folder: Path) -> Path:
    """Makes the store in `folder`; returns its configuration.

    Each step has a copy on all three tiers, the newest none on ``object`` yet; 12250 lacks the part of rank 1, and is two days old.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "retention.yaml").write_text(POLICY)
    config = folder / "tierstore.yaml"
    config.write_text(CONFIG + "retention: retention.yaml\n")
    with pytest.MonkeyPatch.context() as patch:
        _surround(patch)
        with Session.open(load_config(config)) as session:
            for number, step in enumerate(STEPS):
                at = NOW - timedelta(minutes=10 + 30 * (len(STEPS) - 1 - number))
                session.run(_save(session, step, at, loss={11000: 1.75, 10000: 2.5}.get(step, 2.0), copied=step != STEPS[-1]))
            session.run(_broken(session, 12250, NOW - timedelta(days=2)))
    return config


def save_again(config: Path, step: int) -> None:
    """Another attempt at a step, now; the second call's supersedes the first's."""
    with Session.open(load_config(config)) as session:
        session.run(_save(session, step, NOW, loss=2.0, copied=False))


def _surround(patch: pytest.MonkeyPatch) -> None:
    """Storages without fsync, and a host and process of ours in the records: their widths decide how tables are laid out. Patience."""
    patch.setattr("tierstore.tiers.opening.open_storage", lambda uri, *_args, **_settings: unsynced(uri))
    patch.setattr("tierstore.tiers.log.platform", SimpleNamespace(node=lambda: "node7"))
    patch.setattr("tierstore.tiers.log.os", SimpleNamespace(getpid=lambda: 4711))
    patch.setattr("tierstore.tiers.leased._RELEASE_S", 200.0)  # a lease that is left where the machine stands still keeps gc waiting


async def _save(session: Session, step: int, at: datetime, *, loss: float, copied: bool) -> None:
    tiers, clock = session.tiers, StillClock(at)
    attempt = Attempt(run="llama", step=step, save_id=new_save_id(at))
    shard = shard_of(0, 1, seed=step % 7, rows=1, columns=40_000)
    await persist_rank(tiers, attempt, tiers.authority, shard=shard, metrics={"val/loss": loss})
    await commit(tiers, attempt, deadline_s=0, clock=clock)
    if copied:
        await copy_to(tiers, attempt, "object")
        await append(tiers.authority.storage, attempt, "replicated", {"tier": "object"}, clock=clock)
    await copy_to(tiers, attempt, "nvme")


async def _broken(session: Session, step: int, at: datetime) -> None:
    attempt = Attempt(run="llama", step=step, save_id=new_save_id(at))
    shard = shard_of(0, 2, rows=1, columns=40_000)
    await persist_rank(session.tiers, attempt, session.tiers.authority, rank=0, world_size=2, shard=shard)
    for info in await session.tiers.authority.storage.list(attempt.folder):
        path = session.tiers.authority.storage.local_path(info.path)
        assert path is not None
        os.utime(path, (at.timestamp(), at.timestamp()))  # a collector looks at these too: nobody may be writing


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """The command line on one store, at the time of `clock`."""

    config: Path
    clock: StillClock

    @property
    def folder(self) -> Path:
        return self.config.parent

    def __call__(self, *arguments: object) -> Result:
        return CliRunner().invoke(app, ["-c", str(self.config), *map(str, arguments)])

    def json(self, *arguments: object, code: int = 0) -> list[dict[str, Any]]:
        """The objects that a verb prints with ``--json``."""
        result = self(*arguments, "--json")
        assert result.exit_code == code, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]

    def of_type(self, kind: str, *arguments: object, code: int = 0) -> list[dict[str, Any]]:
        return [value for value in self.json(*arguments, code=code) if value["type"] == kind]

    def files(self) -> dict[str, tuple[int, int]]:
        """Every file and folder of the tiers: its size and when it was last changed, in nanoseconds."""
        found = [path for tier in ("nvme", "pfs", "object") for path in [self.folder / tier, *(self.folder / tier).rglob("*")]]
        return {str(path.relative_to(self.folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}

    def steps_on(self, tier: str) -> list[int]:
        """Of which steps the tier has a folder, whatever a log says."""
        return sorted(int(path.name.split("-")[1]) for path in (self.folder / tier / "llama").glob("step-*"))


@contextmanager
def children_hear_ctrl_c() -> Iterator[None]:
    """Where the tests run in a shell's background they ignore SIGINT, and so would what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def shell_on(config: Path, monkeypatch: pytest.MonkeyPatch, *, columns: int = 80) -> Shell:
    """A shell whose commands run in this process, without fsync, 80 columns wide, at `NOW`."""
    clock = StillClock()
    _surround(monkeypatch)
    monkeypatch.setattr("tierstore.cli.options.SystemClock", lambda: clock)
    monkeypatch.setenv("COLUMNS", str(columns))
    return Shell(config=config, clock=clock)
