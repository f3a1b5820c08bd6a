"""Power loss at every instant of publishing, carrying on and removing: recorded, enumerated, recovered (PROTOCOLS.md §9.2).

The real code runs over the real `PosixStorage`, whose system calls are written down. In every legal state of the disk after a power
failure a reader sees the old or the new, never half, and what was acknowledged; and the next process finishes what was begun.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from files_kit import FAST, bytes_of, store

from tierstore.config import load_config
from tierstore.storage.posix import PosixStorage
from tierstore.testing.recording import CrashState, Op, RecordingFs, crash_states, materialise
from tierstore.tiers.files.entry import FileVersion
from tierstore.tiers.files.files import Files
from tierstore.tiers.files.looking import Looker
from tierstore.tiers.files.reading import Reader
from tierstore.tiers.files.syncing import sync_files
from tierstore.tiers.session import Session
from tierstore.tiers.tier import Tier, Tiers

NAMES = ("node", "shared", "far")
VERSIONS = [bytes_of(n, 4096 + n) for n in range(3)]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sequence[Op], int]:
    """A file is published twice, the first time to the end, the second time replaced at once; then it is removed."""
    root = tmp_path_factory.mktemp("recorded")
    for name in NAMES:  # what no storage makes: the lock, the spool
        (root / name / ".tmp").mkdir(parents=True)
    fs = RecordingFs(root)
    with Session.open(load_config(store(root)), opener=lambda tier, _: PosixStorage(Path(tier.uri), syscalls=fs)) as session:
        files = Files(session, options=FAST)
        start = len(fs.ops)

        def publish(number: int) -> None:
            spool = files.spool()
            spool.write(VERSIONS[number])
            session.run(files.publish("d/f", spool))
            fs.acknowledge(f"{number} on node")

        publish(0)
        session.run(files.sync(120))
        fs.acknowledge("0 on all")
        publish(1)
        publish(2)
        session.run(files.sync(120))
        fs.acknowledge("2 on all")
        session.run(files.remove(["d/f"]))
        fs.acknowledge("removed")
        session.run(files.close(120))
        fs.acknowledge("removed on all")
    return fs.ops, start


def tiers_at(place: Path, names: Sequence[str]) -> Tiers:
    made = tuple(
        Tier(name=n, storage=PosixStorage(place / n, durable=False), scope="node" if n == "node" and len(names) > 1 else "shared")
        for n in names
    )
    authority = next(t for t in made if t.scope == "shared")
    return Tiers(tiers=made, authority=authority, durable_at=made[-1], store_id="any")


async def visible(place: Path, names: Sequence[str]) -> bytes | None:
    """What a reader of these tiers gets, every byte proved; None where it is told that there is no file."""
    tiers = tiers_at(place, names)
    try:
        looker = Looker(tiers)
        found: FileVersion | None = await looker.look_up("d/f")
        return None if found is None else await Reader(tiers, looker).read(found)
    finally:
        for tier in tiers:
            await tier.storage.close()


def newest_acknowledged(state: CrashState, where: str) -> int | None:
    """The number of the version that must be there at least; None: none; 3: it must be gone."""
    if ("removed" if where == "node" else "removed on all") in state.acknowledged:
        return 3
    return max((n for n in range(3) if f"{n} on {where}" in state.acknowledged), default=None)


def check(state: CrashState, place: Path) -> None:
    for names in (NAMES, ("shared",), ("far",)):
        seen = asyncio.run(visible(place, names))
        least = newest_acknowledged(state, "node" if names == NAMES else "all")
        removal = "2 on all" in state.acknowledged  # from then on it may be under way
        allowed: list[bytes | None] = list(VERSIONS[least or 0 :]) if least != 3 else []
        if least in (None, 3) or removal:
            allowed.append(None)
        assert seen in allowed, f"{names} after {state.after} calls, {sorted(state.acknowledged)}"


def distinct(states: Iterator[CrashState]) -> list[CrashState]:
    """Each disk once, with the most that had been acknowledged by then."""
    most: dict[object, CrashState] = {}
    for state in states:
        most[frozenset(state.files.items()), state.folders] = state
    return list(most.values())


def test_after_a_power_failure_the_old_or_the_new_is_seen_and_the_next_process_finishes(
    tmp_path: Path, recording: tuple[Sequence[Op], int], long_run: bool
) -> None:
    ops, start = recording
    states = distinct(crash_states(ops, start=start, limit=64 if long_run else 12))
    assert len(states) > 100
    chance = random.Random(7)
    chosen = states if long_run else chance.sample(states, min(len(states), 250))
    finished = set(chance.sample(range(len(chosen)), min(len(chosen), len(chosen) if long_run else 20)))
    for number, state in enumerate(chosen):
        place = tmp_path / str(number)
        materialise(state, place)
        check(state, place)
        if number in finished:
            finish(place)
            check(state, place)


def finish(place: Path) -> None:
    config: dict[str, Any] = store(place)
    with Session.open(load_config(config), opener=lambda tier, _: PosixStorage(Path(tier.uri), durable=False)) as session:
        report = session.run(sync_files(session), 60)
        assert not report.failed
        assert not report.left
    seen = {names: asyncio.run(visible(place, names)) for names in (NAMES, ("shared",), ("far",))}
    assert len(set(seen.values())) == 1, seen
