"""Power loss at every instant of an eviction and of a sweep: recorded, enumerated, finished by the next process (PROTOCOLS.md §6, §9.2).

The real collector runs over the real `PosixStorage`, whose system calls are written down. In every legal state of the disk after a power
failure the promises hold; and the next collector, let loose on it, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from retention_kit import (
    AUTHORITY,
    HOUR_S,
    NAMES,
    RUN,
    Truth,
    check_alone,
    check_step,
    client_tiers,
    garbage,
    housekeeping,
    load_whole,
    policy_of,
    save_id_at,
    save_small,
)
from stepping_kit import START, MemoryStorage, run_virtually
from test_store_crash_states import without_temporaries
from tiers_kit import SteppedClock

from tierstore.errors import TierStoreError
from tierstore.names import Attempt
from tierstore.storage.posix import PosixStorage
from tierstore.testing.recording import CrashState, Op, RecordingFs, crash_states
from tierstore.tiers.catalog import scan
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.evict import evict
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.promote import promote
from tierstore.tiers.tier import Tiers

POLICY = policy_of({"last": 1}, min_age_s=1.0, undelete_window_s=1.0, max_clock_skew_s=1.0)
VICTIM, NEWEST = (Attempt(run=RUN, step=step, save_id=save_id_at(START + timedelta(seconds=step), 0)) for step in (1, 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What one process did, from `start` on, to the tiers that held `before`."""

    ops: tuple[Op, ...]
    start: int
    before: Truth


def later() -> SteppedClock:
    clock = SteppedClock()
    clock.advance(10 * HOUR_S)
    return clock


async def build(tiers: Tiers) -> None:
    await save_small(tiers, VICTIM)
    await save_small(tiers, NEWEST)
    for attempt in (VICTIM, NEWEST):
        await promote(tiers, attempt, "far", clock=SteppedClock())


async def evicting(tiers: Tiers) -> None:
    info = next(c for c in (await scan(tiers, RUN)).checkpoints if c.attempt == VICTIM)
    await evict(housekeeping(tiers, POLICY, later()), info, "far", reason="by hand")


async def sweeping(tiers: Tiers) -> None:
    keeper = housekeeping(tiers, POLICY, later())
    await prune(keeper)
    report = await collect(keeper, now=True)
    assert not report.failed


ACTS: dict[str, Callable[[Tiers], object]] = {"evict": evicting, "sweep": sweeping}


def record(root: Path, act: Callable[[Tiers], object]) -> Recorded:
    plain = {name: PosixStorage(root / name, durable=False) for name in NAMES}
    asyncio.run(build(client_tiers(plain)))
    for name in NAMES:
        (root / name).mkdir(exist_ok=True)
    fs = RecordingFs(root)
    start = len(fs.ops)
    before = truth_of({str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()})
    asyncio.run(act(client_tiers({name: PosixStorage(root / name, syscalls=fs) for name in NAMES})))  # type: ignore[arg-type]
    fs.acknowledge("done")
    return Recorded(ops=tuple(without_temporaries(fs.ops)), start=start, before=before)


@pytest.fixture(scope="module", params=ACTS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp(request.param), ACTS[request.param])


def truth_of(files: dict[str, bytes]) -> Truth:
    tiers: dict[str, dict[str, bytes]] = {name: {} for name in NAMES}
    for path, data in files.items():
        name, _, rest = path.partition("/")
        tiers[name][rest] = data
    return Truth(tiers)


def states_of(ops: Sequence[Op], start: int, limit: int) -> list[CrashState]:
    """Each disk once, with the most that had been acknowledged by then."""
    most: dict[object, CrashState] = {}
    for state in crash_states(ops, start=start, limit=limit):
        most[frozenset(state.files.items())] = state
    return list(most.values())


async def check_disk(state: CrashState, recorded: Recorded, *, finish: bool) -> None:
    truth = truth_of(dict(state.files))
    check_step(recorded.before, truth)
    storages = {name: MemoryStorage(f"memory://{name}", files) for name, files in truth.files.items()}
    await check_alone(storages, truth)
    if not finish:
        return
    tiers = client_tiers(storages)
    keeper = housekeeping(tiers, POLICY, later())
    for _ in range(2):
        report = await collect(keeper, now=True)
        assert not report.failed, report.failed
    left = Truth({name: dict(storage.files) for name, storage in storages.items()})
    check_step(truth, left)
    assert not garbage(left), garbage(left)
    ended = left.facts()[VICTIM]
    assert not ended.evicting, "the eviction was not finished"
    assert not (ended.evicted and any(VICTIM.name in path for path in left.files["far"])), "the evicted copy is still there"
    for attempt in left.existing():
        await load_whole(tiers, attempt)


def violation(ops: Sequence[Op], recorded: Recorded) -> str:
    for state in states_of(ops, recorded.start, limit=16):
        try:
            run_virtually(check_disk(state, recorded, finish=False))
        except (AssertionError, TierStoreError) as error:
            return str(error)
    return ""


def test_after_a_power_failure_at_any_instant_of_a_deletion_the_promises_hold(recorded: Recorded, long_run: bool) -> None:
    states = states_of(recorded.ops, recorded.start, limit=4096 if long_run else 32)
    print(f"{len(states)} states")
    assert len(states) > 10
    for state in states:
        run_virtually(check_disk(state, recorded, finish=False))


def test_after_a_power_failure_the_next_collector_finishes(recorded: Recorded, long_run: bool) -> None:
    states = states_of(recorded.ops, recorded.start, limit=64)
    chosen = states if long_run or len(states) <= 12 else random.Random(1).sample(states, 12)
    for state in chosen:
        run_virtually(check_disk(state, recorded, finish=True))


@pytest.mark.parametrize("tier", [AUTHORITY, "far"])
def test_a_deletion_without_its_fsyncs_would_be_found_out(tier: str, recorded: Recorded, request: pytest.FixtureRequest) -> None:
    """The enumeration is able to fail: where the folders of a tier are never synced, something half deleted looks like a checkpoint."""
    paths = {number: op.path for op in recorded.ops for _, _, number in op.entries if number is not None}
    dropped = [
        op for op in recorded.ops[recorded.start :] if op.kind.startswith("fsync") and paths.get(op.node, "").partition("/")[0] == tier
    ]
    gone = {id(op) for op in dropped}
    found = violation([op for op in recorded.ops if id(op) not in gone], recorded)
    print(found)
    if dropped:
        assert found
