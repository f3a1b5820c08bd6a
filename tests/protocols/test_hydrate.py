"""What a load brings onto a node's tier, file by file: what it wants largely and no more; at every crash, and beside collectors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fork_kit import SERVER
from hydrate_kit import Counted, Hook, config_of, files_below, load_in_child, make_store, nothing, patiently, state_of
from retention_kit import housekeeping, info_of, policy_of
from tiers_kit import SteppedClock, attempt_at, path_of, run, save, tiers_in

import tierstore
from tierstore.clock import SystemClock
from tierstore.crashpoints import CRASH_EXIT, CRASH_POINTS
from tierstore.names import Attempt, shard_name
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.bring import BRING
from tierstore.tiers.catalog import scan
from tierstore.tiers.gc.collect import collect
from tierstore.tiers.gc.evict import evict
from tierstore.tiers.gc.prune import prune
from tierstore.tiers.hydrate import Hydration, largely_wanted
from tierstore.tiers.leased import Leases
from tierstore.tiers.locks import FileLock
from tierstore.tiers.promote import promote
from tierstore.tiers.reads import Want
from tierstore.tiers.retention import tier_facts
from tierstore.tiers.retention.facts import counted_copies
from tierstore.tiers.tier import Tiers
from tierstore.tiers.verify import verify

RANKS = 8


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """A machine that stands still for seconds is no reason to leave something for the next process."""
    with pytest.MonkeyPatch.context() as patch:
        patiently(patch)
        yield


def counted(folder: Path, hook: Hook = nothing) -> Tiers:
    return tiers_in(folder, ("node", "far"), wrap={"far": lambda storage: Counted(storage, hook)})


def far_of(tiers: Tiers) -> Counted:
    storage = tiers.get("far").storage
    assert isinstance(storage, Counted)
    return storage


class Node:
    """A process of a node that opens a checkpoint and reads from it."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.leases = Leases(tiers, SystemClock(), lambda run_name: 600.0)
        self.hydration = Hydration(tiers, SystemClock(), self.leases, stall_s=60.0, files_in_flight=2)

    async def read(self, attempt: Attempt, wants: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Reads ranges (file, first byte, end) as one load; returns when what came near counts."""
        replica = await self.leases.open(await info_of(self.tiers, attempt))
        if replica.lease is not None:
            await replica.lease.settled()  # else it may still be on its way when a test looks for it
        replica.hydrating = self.hydration.onto(self.tiers.get("node"))
        buffers = [memoryview(bytearray(end - begin)) for _, begin, end in wants]
        await replica.read([Want(file, begin, buffer) for (file, begin, _), buffer in zip(wants, buffers, strict=True)])
        await self.hydration.settled(200.0)
        await self.hydration.close(1.0)
        replica.let_go()
        await self.leases.close()
        return [bytes(buffer) for buffer in buffers]


def sizes(tiers: Tiers, attempt: Attempt) -> dict[str, int]:
    return {name: path_of(tiers, "far", attempt, name).stat().st_size for name in (shard_name(r, RANKS) for r in range(RANKS))}


def test_a_file_counts_where_at_least_half_of_its_bytes_are_wanted() -> None:
    def want(file: str, begin: int, end: int) -> Want:
        return Want(file, begin, memoryview(bytearray(end - begin)))

    wants = [want("half", 0, 50), want("less", 0, 49), want("twice", 0, 30), want("twice", 10, 30), want("parts", 90, 100)]
    wants += [want("parts", 0, 40), want("empty", 0, 0)]
    assert largely_wanted(wants, lambda file: 100) == ["half", "parts"]


def test_one_shard_of_eight_is_a_share_of_the_node_and_no_more(tmp_path: Path) -> None:
    async def body() -> None:
        tiers = counted(tmp_path)
        attempt = await save(tiers, 1, world_size=RANKS)
        size = sizes(tiers, attempt)
        name, other = shard_name(3, RANKS), shard_name(5, RANKS)
        far_of(tiers).nbytes.clear()
        data, _ = await Node(tiers).read(attempt, [(name, 0, size[name]), (other, 0, size[other] // 3)])
        assert data == path_of(tiers, "far", attempt, name).read_bytes()
        assert far_of(tiers).nbytes[name] == size[name]
        assert sorted(p.name for p in path_of(tiers, "node", attempt, name).parent.glob("shard-*")) == [name]
        info = await info_of(tiers, attempt)
        assert (info.replicas["node"], info.receipts["node"]) == ("receipt", (3,))
        assert counted_copies(info, tier_facts(tiers)) == ("far",)
        assert not (await verify(tiers, "run", level="full")).findings
        far_of(tiers).nbytes.clear()
        await Node(tiers).read(attempt, [(name, 0, size[name])])
        assert not far_of(tiers).nbytes

    run(body())


def test_shares_of_several_processes_become_a_whole_copy(tmp_path: Path) -> None:
    async def body() -> None:
        tiers = counted(tmp_path)
        attempt = await save(tiers, 1, world_size=RANKS)
        size = sizes(tiers, attempt)
        states = []
        for rank in range(RANKS):
            await Node(tiers).read(attempt, [(shard_name(rank, RANKS), 0, size[shard_name(rank, RANKS)])])
            info = await info_of(tiers, attempt)
            states.append(info.replicas["node"])
            assert info.receipts["node"] == tuple(range(rank + 1))
        assert states == ["receipt"] * (RANKS - 1) + ["complete"]
        assert not (await verify(tiers, "run", level="full")).findings

    run(body())


def test_a_share_goes_by_the_policy_of_its_tier(tmp_path: Path) -> None:
    async def body() -> None:
        tiers = counted(tmp_path)
        old, new = [await save(tiers, step, world_size=RANKS) for step in (1, 2)]
        for attempt in (old, new):
            await Node(tiers).read(attempt, [(shard_name(0, RANKS), 0, sizes(tiers, attempt)[shard_name(0, RANKS)])])
        clock = SteppedClock()
        clock.advance(365 * 86400.0)
        policy = policy_of({"last": 9}, tiers={"node": {"keep": [{"last": 1}]}})
        report = await collect(housekeeping(tiers, policy, clock), now=True)
        assert [(freed.attempt, freed.tier) for freed in report.freed] == [(old, "node")]
        assert "node" not in (await info_of(tiers, old)).replicas

    run(body())


def test_a_collector_leaves_alone_what_is_being_brought_back(tmp_path: Path) -> None:
    async def body() -> None:
        held: list[list[str]] = []
        waiting: list[str] = []

        async def tidy(operation: str, path: str) -> None:
            if operation == "read_into" and shard_name(RANKS - 1, RANKS) in path and not held:  # others are there by now
                held.append([lease.kind for leases in (await keeper.leases.living(tiers, "run")).values() for lease in leases])
                report = await collect(keeper, now=True)
                waiting.extend(why for _, why in report.waiting)

        tiers = counted(tmp_path)
        attempt = await save(tiers, 1, world_size=RANKS)
        size = sizes(tiers, attempt)
        wants = [(name, 0, nbytes) for name, nbytes in size.items()]
        await Node(tiers).read(attempt, wants)
        await evict(housekeeping(tiers, None, SteppedClock()), await info_of(tiers, attempt), "node")
        keeper = housekeeping(tiers, policy_of({"last": 9}), SystemClock())
        far_of(tiers).hook = tidy
        await Node(tiers).read(attempt, wants)
        assert sorted(held[0]) == [BRING, "reader"]
        assert any("is copying it" in why for why in waiting)
        info = await info_of(tiers, attempt)
        assert (info.replicas["node"], info.receipts["node"]) == ("complete", tuple(range(RANKS)))

    run(body())


def test_an_expired_checkpoint_is_read_from_afar(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        tiers = counted(tmp_path)
        attempt = await save(tiers, 1, world_size=RANKS)
        await save(tiers, 2, world_size=RANKS)
        clock = SteppedClock()
        clock.advance(365 * 86400.0)
        await prune(housekeeping(tiers, policy_of({"last": 1}), clock))
        name = shard_name(0, RANKS)
        await Node(tiers).read(attempt, [(name, 0, sizes(tiers, attempt)[name])])
        assert not path_of(tiers, "node", attempt, name).exists()

    run(body())
    assert "has expired" in caplog.text


def test_where_the_authority_has_lost_its_log_nothing_is_brought_anywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        tiers = tiers_in(tmp_path)
        attempt = await save(tiers, 1, world_size=RANKS)
        await promote(tiers, attempt, "far", clock=SteppedClock())
        name = shard_name(0, RANKS)
        nbytes = path_of(tiers, "far", attempt, name).stat().st_size
        for path in (tmp_path / "shared" / "run" / ".log").rglob("*.json"):
            path.unlink()
        await Node(tiers).read(attempt, [(name, 0, nbytes)])
        assert not path_of(tiers, "node", attempt, name).exists()

    run(body())
    assert "the authority has lost its log" in caplog.text


# ---- crashes

POINTS = [
    "promote.before-file",
    "posix.before-rename",
    "posix.after-rename",
    "promote.after-file",
    *(point for point in CRASH_POINTS if point.startswith("bring.")),
]


@pytest.fixture(scope="module")
def dropped(patient: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint on the far tier, whose copy on the node was dropped on purpose."""
    root = tmp_path_factory.mktemp("dropped")
    make_store(root)
    with tierstore.open(config_of(root)) as store:
        store.load(1)
        store.retention.evict(1, "node")
    return root


def in_child(root: Path, environment: dict[str, str]) -> tuple[int | None, Any]:
    results = SERVER.Queue()
    child = SERVER.Process(target=load_in_child, args=(str(root), config_of(root), None, results, 0, "", environment))
    child.start()
    child.join(200)
    return child.exitcode, None if child.exitcode != 0 else results.get(timeout=200)


@pytest.mark.parametrize("point", POINTS)
def test_a_load_that_dies_while_it_hydrates_leaves_no_copy_that_seems_whole(point: str, dropped: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(dropped, root)
    status, _ = in_child(root, {"TIERSTORE_CRASH_AT": point})
    assert status == CRASH_EXIT, f"{point} was not passed"
    with tierstore.open(config_of(root)) as store:
        state = store.checkpoints()[0].replicas.get("node")
        assert state == "complete" if point == "bring.after-unmark" else state in ("evicting", None)
        assert_same_state(store.load(1), state_of(1))
        assert store.checkpoints()[0].replicas["node"] == "complete"
        assert not store._session.run(verify(store._session.tiers, "r", level="full")).damage
        assert not [name for name in files_below(root / "node") if ".tmp/hydrate" in name]


# ---- locks


def test_a_file_lock_tells_those_who_wait_how_far_it_is_and_goes_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / ".tmp/one.lock"
    first, second = FileLock(path), FileLock(path)
    assert first.take()
    first.tell("17")
    assert not second.take()
    assert second.told.split() == [str(os.getpid()), "17"]
    first.release()
    assert not path.exists()
    assert second.take()
    assert not second.told, "nobody died"
    second.release()


def test_a_forked_child_does_not_keep_its_parents_file_lock(tmp_path: Path) -> None:
    tiers = counted(tmp_path)
    node = Node(tiers)
    lock = node.hydration.lock(tiers.get("node"), attempt_at(1), "one")
    assert lock.take()
    (ready, tell), (wait, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # it lives on until the parent lets it go
        os.write(tell, b".")
        os.close(end)
        os.read(wait, 1)
        os._exit(0)
    os.read(ready, 1)
    os.close(lock._fd)  # as the death of this process would
    lock._fd = -1
    other = FileLock(lock.path)
    taken = other.take()
    other.release()
    for fd in (ready, tell, wait, end):
        os.close(fd)
    os.waitpid(child, 0)
    assert taken


def test_what_a_scan_shows_while_a_share_is_made_to_count_is_never_the_whole(tmp_path: Path) -> None:
    async def body() -> None:
        states: list[str] = []

        async def look(operation: str, path: str) -> None:
            node = tiers_in(tmp_path, ("node", "far"))
            states.extend(info.replicas.get("node", "") for info in (await scan(node, "run")).checkpoints)

        tiers = counted(tmp_path)
        attempt = await save(tiers, 1, world_size=RANKS)
        name = shard_name(3, RANKS)
        nbytes = sizes(tiers, attempt)[name]
        far_of(tiers).hook = look
        await Node(tiers).read(attempt, [(name, 0, nbytes)])
        assert "complete" not in states
        assert {"partial", "receipt"} <= set(states)

    run(body())
