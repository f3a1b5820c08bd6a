"""Power loss at every instant of a whole save, from `Store.save` to the last tier: recorded, enumerated, recovered (PROTOCOLS.md §9.2).

The real `Store` runs over the real `PosixStorage`, whose system calls are written down. From them every legal state of the disk after a
power failure is built (where the combinations at one instant are too many: a random choice, the same in each run). On every state of
the choice the readers' promises are checked; on a choice of these the next process is let loose: it resumes, saves again and syncs.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from store_kit import NAMES, open_over, unsynced

import tierstore
from tierstore.errors import TierStoreError
from tierstore.names import OBJECTS, shard_name
from tierstore.storage.posix import PosixStorage
from tierstore.testing.equality import assert_same_state
from tierstore.testing.recording import CrashState, Op, RecordingFs, crash_states, materialise
from tierstore.tiers.catalog import CheckpointInfo, scan
from tierstore.tiers.replica import Want, open_replica
from tierstore.tiers.tier import Tier, Tiers

STEPS = (1, 2, 3)
SHARD = shard_name(0, 1)


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.arange(40) * step, "b": torch.full((3,), float(step), dtype=torch.bfloat16), "step": step}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What one process did: its calls, and the bytes of the files that it left."""

    fs: RecordingFs
    start: int
    shards: dict[int, bytes]
    objects: dict[int, bytes]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Begins a store and saves three steps through three tiers, the last two at once."""
    root = tmp_path_factory.mktemp("recorded")
    for name in NAMES:  # the run's lock is no storage's: its folder is there before
        (root / name / ".tmp").mkdir(parents=True)
    fs = RecordingFs(root)
    start = len(fs.ops)

    def watched(step: int, store: tierstore.Store) -> None:
        ticket = store.save(step, state_of(step))
        for level in ("staged", "committed", "durable", *NAMES):
            ticket.on(level, lambda event: fs.acknowledge(f"{step}:{event.level}"))
        if step == STEPS[0]:
            ticket.wait("durable", timeout=200)

    with pytest.MonkeyPatch.context() as patch:
        with open_over(patch, lambda uri: PosixStorage(Path(uri), syscalls=fs), root) as store:
            for step in STEPS:
                watched(step, store)
            store.sync(timeout=200)
    folders = {step: next((root / "shared" / "r").glob(f"step-{step:010d}-*")) for step in STEPS}
    return Recording(
        fs=fs,
        start=start,
        shards={step: (folder / SHARD).read_bytes() for step, folder in folders.items()},
        objects={step: (folder / OBJECTS).read_bytes() for step, folder in folders.items()},
    )


def distinct(states: Iterator[CrashState]) -> list[CrashState]:
    """Each disk once, with the most that had been acknowledged by then: that promise holds all the others."""
    most: dict[object, CrashState] = {}
    for state in states:
        most[frozenset(state.files.items()), state.folders] = state
    return list(most.values())


def bounded(states: Sequence[CrashState], many: int) -> list[CrashState]:
    """A random choice, the same in each run; all where there are no more."""
    return list(states) if len(states) <= many else random.Random(many).sample(states, many)


def shuffled(states: Sequence[CrashState]) -> list[CrashState]:
    """All, in a random order that is the same in each run: for who looks for one of a kind, however few of it this recording has."""
    return random.Random(len(states)).sample(states, len(states))


def chosen_tiers(place: Path, names: Sequence[str]) -> Tiers:
    tiers = tuple(
        Tier(name=n, storage=unsynced(str(place / n)), scope="node" if n == "node" and len(names) > 1 else "shared") for n in names
    )
    authority = next(t for t in tiers if t.scope == "shared")
    return Tiers(tiers=tiers, authority=authority, durable_at=tiers[-1], store_id="any")


async def visible(place: Path, names: Sequence[str], recording: Recording) -> dict[int, CheckpointInfo]:
    """The steps that a reader of these tiers is shown; every file of each was read, proved and compared."""
    tiers = chosen_tiers(place, names)
    try:
        found = {}
        for info in (await scan(tiers, "r")).checkpoints:
            step = info.attempt.step
            assert info.usable, f"step {step} on {names} is shown, but can't be used"
            replica = await open_replica(tiers, info)
            shard = bytearray(len(recording.shards[step]))
            await replica.read([Want(SHARD, 0, memoryview(shard))])
            assert shard == recording.shards[step], f"step {step} on {names} loads other bytes"
            assert await replica.document(OBJECTS) == recording.objects[step]
            for file in replica.manifest.files:
                if file.kind != "shard":
                    await replica.document(file.name)
            found[step] = info
        return found
    finally:
        for tier in tiers:
            await tier.storage.close()


async def readers_promises(place: Path, state: CrashState, recording: Recording) -> None:
    """Whole or nothing, and all that was acknowledged: through all tiers, and on each tier alone what was acknowledged of it."""
    everywhere = await visible(place, NAMES, recording)
    for name, levels in (("shared", ("committed", "shared")), ("far", ("far", "durable"))):
        acknowledged = {step for step in STEPS for level in levels if f"{step}:{level}" in state.acknowledged}
        assert acknowledged <= everywhere.keys(), f"{levels} of {acknowledged} were acknowledged, readers see {set(everywhere)}"
        alone = await visible(place, [name], recording)
        assert acknowledged <= alone.keys(), f"{levels} of {acknowledged} were acknowledged, {name} alone has {set(alone)}"
        if name == "far":
            assert all("far" in everywhere[step].replicated for step in acknowledged), "the log forgot a copy that it had counted"


def check_readers(state: CrashState, place: Path, recording: Recording) -> None:
    materialise(state, place)
    asyncio.run(readers_promises(place, state, recording))


def check_recovery(state: CrashState, place: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process: resumes, saves, and brings everything to every tier."""
    materialise(state, place)
    with open_over(monkeypatch, unsynced, place) as store:
        resumed = store.resume()
        found = {info.attempt.step for info in store.checkpoints()}
        staged = {step for step in STEPS if f"{step}:staged" in state.acknowledged}
        assert staged <= found, f"staged on a durable tier, but not adopted: {staged - found}"
        assert (resumed.step if resumed else None) == max(found, default=None)
        for step in found:
            assert_same_state(store.load(step), state_of(step))
        store.save(9, state_of(9)).wait("durable", timeout=200)
        store.sync(timeout=200)
    folder = next((place / "shared" / "r").glob("step-0000000009-*"))
    shards = {**recording.shards, 9: (folder / SHARD).read_bytes()}
    with_nine = replace(recording, shards=shards, objects={**recording.objects, 9: (folder / OBJECTS).read_bytes()})
    for name in NAMES:
        assert set(asyncio.run(visible(place, [name], with_nine))) == found | {9}, f"after recovery, on {name}"


def check_both(state: CrashState, place: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    check_readers(state, place / "readers", recording)
    check_recovery(state, place / "recovery", recording, monkeypatch)
    shutil.rmtree(place)


def without_temporaries(ops: Sequence[Op]) -> list[Op]:
    """The calls without the entries of ``.tmp``: no reader and no recovery looks there, and what is left there, as it is never synced,
    would make the combinations at one instant many times too many."""
    temporary = {number for op in ops if op.kind == "mkdir" and op.path.endswith(".tmp") for _, _, number in op.entries}
    kept = [replace(op, entries=tuple(entry for entry in op.entries if entry[0] not in temporary)) for op in ops]
    return [new for new, op in zip(kept, ops, strict=True) if new.entries or not op.entries]


def all_states(ops: Sequence[Op], start: int, *, limit: int = 1 << 16) -> list[CrashState]:
    """The states after the process's start; `start` counts in the complete recording.

    Without its temporaries no instant has more combinations than that, also where both saves met on every tier: mostly it is a thousand.
    """
    return distinct(crash_states(ops, start=start, limit=limit))


@pytest.fixture(scope="module")
def states(recording: Recording) -> Sequence[CrashState]:
    """All but for what may be left in ``.tmp``. Building them takes seconds."""
    return all_states(without_temporaries(recording.fs.ops), recording.start)


def test_after_a_power_failure_at_any_instant_readers_see_whole_checkpoints_and_all_acknowledged_ones(
    recording: Recording, states: Sequence[CrashState], tmp_path: Path
) -> None:
    assert len(states) > 100
    assert not any(state.sampled for state in states)
    assert {f"{step}:durable" for step in STEPS} <= states[-1].acknowledged
    print(f"{len(states)} states, all of them")
    for number, state in enumerate(states):
        check_readers(state, tmp_path / str(number), recording)


def test_after_a_power_failure_the_next_process_adopts_saves_and_fills_every_tier(
    recording: Recording, states: Sequence[CrashState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_run: bool
) -> None:
    chosen = states if long_run else bounded(states, 20)
    print(f"{len(chosen)} of {len(states)} states")
    for number, state in enumerate(chosen):
        check_recovery(state, tmp_path / str(number), recording, monkeypatch)


def test_what_a_power_failure_leaves_of_temporaries_is_in_nobodys_way(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_run: bool
) -> None:
    states = [state for state in all_states(recording.fs.ops, recording.start, limit=8) if any(".tmp/" in path for path in state.files)]
    assert all(state.sampled for state in states[-10:])
    for number, state in enumerate(bounded(states, 1000 if long_run else 7)):
        check_both(state, tmp_path / str(number), recording, monkeypatch)


def of_file(pattern: str) -> Callable[[str, str], bool]:
    return lambda kind, path: kind == "fsync" and re.search(pattern, path) is not None


def of_folder(pattern: str) -> Callable[[str, str], bool]:
    return lambda kind, path: kind == "fsync_folder" and re.fullmatch(pattern, path) is not None


DROPPED: dict[str, Callable[[str, str], bool]] = {
    "of every file": of_file(""),
    "of every folder": of_folder(".*"),
    "of the shards": of_file(r"/shard-"),
    "of the shards on the authority": of_file(r"^shared/.*/shard-"),
    "of the shards on a further tier": of_file(r"^far/.*/shard-"),
    "of the part records": of_file(r"^(shared|far)/.*/part-"),
    "of the objects": of_file(r"/objects\.json$"),
    "of the index": of_file(r"/index\.safetensors$"),
    "of the manifest": of_file(r"/manifest\.json$"),
    "of the commit record": of_file(r"^shared/.*/000000\.json$"),
    "of the replicated record": of_file(r"^shared/.*/00000[1-9]\.json$"),
    "of the checkpoints' folders": of_folder(r"[a-z]+/r/step-[^/]*"),
    "of the logs' folders": of_folder(r"[a-z]+/r/\.log/step-[^/]*"),
    "of the folder of the logs": of_folder(r"[a-z]+/r/\.log"),
    "of the run's folder": of_folder(r"[a-z]+/r"),
    "of the tier's folder": of_folder(r"[a-z]+"),
}
"""Each kind of fsync that a commit or a copy needs."""
DROPPED_ON_THE_NODE: dict[str, Callable[[str, str], bool]] = {
    "of the node's shards": of_file(r"^node/.*/shard-"),
    "of the node's part records": of_file(r"^node/.*/part-"),
    "of the node's receipts": of_file(r"^node/.*receipt"),
    "of the node's folders": of_folder(r"node/.*"),
}
"""What a node tier needs to keep its own word: a receipt says that this node's part is complete and synced."""


def without_fsyncs(ops: Sequence[Op], drops: Callable[[str, str], bool], start: int) -> list[Op]:
    """The calls as code would make them that left these fsyncs out."""
    paths: dict[int, str] = {0: ""}
    for op in ops:
        paths.update({number: op.path for _, _, number in op.entries if number is not None and ".tmp" not in op.path})
    dropped = [op for op in ops[start:] if op.kind.startswith("fsync") and drops(op.kind, paths.get(op.node, ""))]
    assert dropped, "nothing was dropped"
    gone = {id(op) for op in dropped}
    return [op for op in ops if id(op) not in gone]


def first_violation(states: Sequence[CrashState], check: Callable[[CrashState, Path], None], place: Path) -> str:
    for number, state in enumerate(states):
        try:
            check(state, place / str(number))
        except (AssertionError, TierStoreError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("what", DROPPED)
def test_a_dropped_fsync_is_found_out(what: str, recording: Recording, tmp_path: Path) -> None:
    ops = without_fsyncs(without_temporaries(recording.fs.ops), DROPPED[what], recording.start)
    states = [state for state in all_states(ops, recording.start, limit=8) if state.acknowledged]
    violation = first_violation(shuffled(states), lambda state, place: check_readers(state, place, recording), tmp_path)
    print(violation)
    assert violation


@pytest.mark.parametrize("what", DROPPED_ON_THE_NODE)
def test_a_dropped_fsync_of_the_node_is_found_out(what: str, recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = without_fsyncs(without_temporaries(recording.fs.ops), DROPPED_ON_THE_NODE[what], recording.start)
    states = [
        state
        for state in all_states(ops, recording.start, limit=8)
        if any(f"{step}:staged" in state.acknowledged and f"{step}:committed" not in state.acknowledged for step in STEPS)
    ]
    violation = first_violation(shuffled(states), lambda state, place: check_recovery(state, place, recording, monkeypatch), tmp_path)
    print(violation)
    assert violation
