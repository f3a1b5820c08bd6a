"""Leases: who holds one is waited for; who died, stood still or can't write is not, and knows it (PROTOCOLS.md §6)."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from stepping_kit import MemoryStorage, SteppingLoop, VirtualClock, run_virtually, tiers_over
from tiers_kit import SteppedClock, attempt_at, flip, path_of, save, tiers_in

from tierstore.errors import AccessError, IntegrityError, NotFoundError, TemporaryError, TierStoreError
from tierstore.names import Attempt
from tierstore.storage.contract import Storage
from tierstore.tiers.catalog import CheckpointInfo, scan
from tierstore.tiers.lease_store import LeaseStore, Sighting, boot_name
from tierstore.tiers.leased import Leases
from tierstore.tiers.leases import Lease, LeaseWatch, hold_lease, lease_path, lease_root
from tierstore.tiers.log import append
from tierstore.tiers.replica import Want, open_replica
from tierstore.tiers.tier import Tiers

T = TypeVar("T")
TTL_S = 100.0
RUN = "run"


@dataclass
class World:
    """One checkpoint in memory, a clock of virtual time, and storages that ask `hook` before each operation."""

    tiers: Tiers
    attempt: Attempt
    clock: VirtualClock
    calls: list[tuple[str, str]] = field(default_factory=list)
    hook: Callable[[str, str], Awaitable[None]] | None = None

    def lease(self, **more: Any) -> Lease:
        return hold_lease(self.tiers, self.attempt, **{"ttl_s": TTL_S, "clock": self.clock, **more})

    async def leases(self) -> list[str]:
        return [info.path for info in await self.tiers.authority.storage.list(lease_root(RUN))]

    async def sweep(self) -> None:
        await append(self.tiers.authority.storage, self.attempt, "swept", {"files": []}, clock=self.clock, actor="collector:7")

    async def info(self) -> CheckpointInfo:
        (found,) = (await scan(self.tiers, RUN)).checkpoints
        return found


async def world_of() -> World:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppingLoop)
    storages: dict[str, Storage] = {name: MemoryStorage(f"memory://{name}") for name in ("node", "shared", "far")}
    attempt = await save(tiers_over(storages), 1, attempt=attempt_at(1))
    world = World(tiers=tiers_over(storages), attempt=attempt, clock=VirtualClock(loop))

    async def ask(tier: str, operation: str, path: str) -> None:
        world.calls.append((operation, path))
        if world.hook is not None:
            await world.hook(operation, path)

    world.tiers = tiers_over(storages, ask)
    return world


def virtually(work: Callable[[World], Coroutine[Any, Any, T]]) -> T:
    async def main() -> T:
        return await work(await world_of())

    return run_virtually(main())


def failing(error: Callable[[], TierStoreError], *operations: str) -> Callable[[str, str], Awaitable[None]]:
    async def hook(operation: str, path: str) -> None:
        if operation in operations and "/.leases/" in f"{path}/":
            raise error()

    return hook


# ---- holding


def test_a_held_lease_is_seen_by_every_observer_and_gone_when_it_is_released() -> None:
    async def work(world: World) -> None:
        async with world.lease(kind="verify") as lease:
            assert lease.alive
            assert not lease.trouble
            (seen,) = (await LeaseWatch(world.clock).living(world.tiers, RUN))[world.attempt]
            assert (seen.kind, seen.ttl_s, seen.beat) == ("verify", TTL_S, 1)
        assert not lease.alive
        assert await world.leases() == []
        assert await LeaseWatch(world.clock).living(world.tiers, RUN) == {}

    virtually(work)


def test_it_beats_four_times_a_ttl_for_as_long_as_it_is_held() -> None:
    async def work(world: World) -> None:
        watch = LeaseWatch(world.clock)
        async with world.lease() as lease:
            for _ in range(40):
                await asyncio.sleep(TTL_S / 2)
                assert lease.alive
                assert world.attempt in await watch.living(world.tiers, RUN)
        puts = [path for operation, path in world.calls if operation == "put"]
        assert len(puts) in (80, 81)
        assert len(set(puts)) == 1

    virtually(work)


def test_a_lease_that_comes_after_the_sweep_is_none() -> None:
    """The collector writes swept, then lists the leases: who looks at the log after making one hears of it."""

    async def work(world: World) -> None:
        known = (await world.info()).records[-1].seq
        await world.sweep()
        with pytest.raises(NotFoundError, match=r"step 1 of run 'run' was deleted by collector:7 at 29 Nov 2026"):
            async with world.lease(known=known):
                pytest.fail("it is held")
        assert await world.leases() == []

    virtually(work)


def test_it_looks_at_the_log_when_its_file_is_there_and_not_before() -> None:
    async def work(world: World) -> None:
        async with world.lease(known=0):
            pass
        operations = [operation for operation, path in world.calls if RUN in path]
        assert operations.index("put") < operations.index("list")
        assert sorted(operations) == sorted(["put", "list", "stat", "delete"])

    virtually(work)


def test_a_log_that_was_trimmed_after_its_sweep_says_so_too() -> None:
    """Records between 000000 and ``swept`` are gone then: the next number after the last known one is no answer."""

    async def work(world: World) -> None:
        storage = world.tiers.authority.storage
        for name in ("a", "b"):
            await append(storage, world.attempt, "pinned", {"name": name}, clock=world.clock)
        await world.sweep()
        await storage.delete([world.attempt.record_path(1), world.attempt.record_path(2)])
        with pytest.raises(NotFoundError, match="was deleted"):
            async with world.lease(known=0):
                pytest.fail("it is held")

    virtually(work)


# ---- observing


def test_a_dead_holder_is_waited_for_one_ttl_of_watching_and_then_removed(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)

    async def dies() -> Attempt:
        attempt = await save(tiers, 1)
        lease = hold_lease(tiers, attempt, ttl_s=TTL_S, clock=SteppedClock())
        lease.begin()
        assert await lease.settled()
        return attempt  # the loop ends under it: nothing is removed

    attempt = asyncio.run(dies())
    clock = SteppedClock()
    watch = LeaseWatch(clock)
    assert attempt in asyncio.run(watch.living(tiers, RUN))
    clock.advance(TTL_S - 1)
    assert attempt in asyncio.run(watch.living(tiers, RUN))
    clock.advance(1)
    assert asyncio.run(watch.living(tiers, RUN)) == {}
    assert (tmp_path / "shared" / lease_root(RUN)).exists(), "looking changes nothing"
    asyncio.run(watch.remove_dead(tiers, RUN))
    assert not (tmp_path / "shared" / lease_root(RUN)).exists()


@pytest.mark.parametrize("skew_days", [-400.0, 400.0])
def test_wall_clocks_say_nothing_about_a_lease(skew_days: float) -> None:
    """The holder's year, the observer's, a file's date: only what one observer saw, by its own monotonic clock."""

    async def work(world: World) -> None:
        world.clock.skew_s = skew_days * 86400
        async with world.lease():
            observer = SteppedClock()
            watch = LeaseWatch(observer)
            for _ in range(4):
                assert world.attempt in await watch.living(world.tiers, RUN)
                observer.wall += timedelta(days=50)
            await asyncio.sleep(TTL_S / 4)  # it beats
            observer.advance(TTL_S - 1)
            assert world.attempt in await watch.living(world.tiers, RUN)

    virtually(work)


def test_an_observer_that_comes_late_begins_to_count_when_it_comes() -> None:
    async def work(world: World) -> None:
        await world.tiers.authority.storage.put(lease_path(world.attempt, "0" * 32), b"whatever it is")
        early, late = LeaseWatch(world.clock), LeaseWatch(world.clock)
        assert world.attempt in await early.living(world.tiers, RUN)
        await asyncio.sleep(599)
        assert world.attempt in await late.living(world.tiers, RUN)
        assert world.attempt in await early.living(world.tiers, RUN)

    virtually(work)


def test_the_time_that_looking_takes_proves_nothing() -> None:
    """A lease that was read early in a look that took long has beaten since then, for all that anybody knows."""

    async def work(world: World) -> None:
        storage, watch = world.tiers.authority.storage, LeaseWatch(world.clock)
        for number in (0, 1):
            await storage.put(lease_path(world.attempt, str(number) * 32), b"whatever it is")
        assert len((await watch.living(world.tiers, RUN))[world.attempt]) == 2

        async def slow(operation: str, path: str) -> None:
            if operation == "read" and path.endswith("1.json"):
                await asyncio.sleep(600)

        world.hook = slow
        assert len((await watch.living(world.tiers, RUN))[world.attempt]) == 2
        world.hook = None
        assert await watch.living(world.tiers, RUN) == {}

    virtually(work)


def test_a_lease_that_is_rewritten_while_it_is_read_at_each_look_is_alive() -> None:
    async def work(world: World) -> None:
        storage, watch, torn = world.tiers.authority.storage, LeaseWatch(world.clock), [False]

        async def once_a_look(operation: str, path: str) -> None:
            torn[0] = operation == "read" and not torn[0]
            if torn[0]:
                raise IntegrityError("it changed while it was read")

        for beat in (b"beat 1", b"beat 2"):
            await storage.put(lease_path(world.attempt, "0" * 32), beat)
            world.hook = once_a_look
            assert world.attempt in await watch.living(world.tiers, RUN)
            world.hook = None
            await asyncio.sleep(600)

    virtually(work)


# ---- observing with short commands


def test_short_commands_together_watch_as_one_long_process(tmp_path: Path) -> None:
    """Cron's gc: each is a new observer, and goes on where the machine's earlier ones stopped. The TTL counts from the first."""

    async def work(world: World) -> None:
        def look(boot: str = "boot") -> Any:
            return LeaseWatch(world.clock, LeaseStore(tmp_path / "cache", "kit", boot=boot)).living(world.tiers, RUN)

        storage, path = world.tiers.authority.storage, lease_path(world.attempt, "0" * 32)
        await asyncio.sleep(1000)
        await storage.put(path, b"beat 1")
        assert world.attempt in await look()
        await asyncio.sleep(599)
        assert world.attempt in await look()
        await asyncio.sleep(1)
        assert await look() == {}
        assert await look() == {}
        assert await world.leases() == [path], "looking changes nothing"
        await storage.put(path, b"beat 2")
        assert world.attempt in await look(), "another beat"
        await asyncio.sleep(600)
        assert world.attempt in await look("another boot")
        assert world.attempt in await look(), "and the other boot's sighting has taken its place"
        await asyncio.sleep(600)
        assert await look() == {}
        await storage.delete([path])
        assert await look() == {}
        assert list((tmp_path / "cache").iterdir()) == [], "nothing is kept of what is gone"

    virtually(work)


SEEN = {"run/.leases/a/b.json": Sighting(digest="sha256:0", since=100.5)}


def kept_in(folder: Path, store: str = "kit", boot: str = "boot") -> LeaseStore:
    return LeaseStore(folder, store, boot=boot)


def test_a_sighting_counts_in_its_boot_its_store_and_its_run_and_not_before_it_was_made(tmp_path: Path) -> None:
    kept_in(tmp_path).save(RUN, SEEN)
    assert kept_in(tmp_path).load(RUN, 100.5) == SEEN
    assert kept_in(tmp_path).load(RUN, 100.4) == {}, "from the future"
    assert kept_in(tmp_path).load("other", 200) == {}
    assert kept_in(tmp_path, "other").load(RUN, 200) == {}
    assert kept_in(tmp_path, boot="later").load(RUN, 200) == {}
    assert stat.S_IMODE(next(tmp_path.iterdir()).stat().st_mode) == 0o600


def test_without_a_boot_s_name_nothing_is_kept(tmp_path: Path) -> None:
    kept_in(tmp_path, boot="").save(RUN, SEEN)
    assert list(tmp_path.iterdir()) == []
    assert kept_in(tmp_path, boot="").load(RUN, 200) == {}


@pytest.mark.parametrize("spoil", ["since", "cut", "empty", "folder"])
def test_a_spoiled_file_of_sightings_is_passed_over_and_made_anew(tmp_path: Path, spoil: str) -> None:
    kept_in(tmp_path).save(RUN, SEEN)
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    if spoil == "folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes({"since": data.replace(b"100.5", b"000.5"), "cut": data[:-9], "empty": b""}[spoil])
    assert kept_in(tmp_path).load(RUN, 200) == {}
    kept_in(tmp_path).save(RUN, SEEN)
    assert list(tmp_path.iterdir()) == [file], "no temporary is left"
    assert kept_in(tmp_path).load(RUN, 200) == ({} if spoil == "folder" else SEEN)


@pytest.mark.parametrize("folder", ["/proc/no-home", "file/below"])
def test_without_a_place_to_keep_them_each_command_begins_anew(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("no folder")
    kept_in(tmp_path / folder).save(RUN, SEEN)
    assert kept_in(tmp_path / folder).load(RUN, 200) == {}


def test_all_processes_of_a_boot_read_one_clock_and_one_name() -> None:
    script = "import time; from tierstore.tiers.lease_store import boot_name; print(time.monotonic()); print(boot_name())"
    before = time.monotonic()
    seconds, name = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.splitlines()
    assert before <= float(seconds) <= time.monotonic()
    assert name == boot_name()
    assert re.match(r"[0-9a-f-]{36}( |$)", name)


def test_processes_that_keep_sightings_at_once_never_leave_half_of_one(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from tierstore.tiers.lease_store import LeaseStore, Sighting
store = LeaseStore(Path(sys.argv[1]), "kit", boot="boot")
for number in range(100):
    store.save("run", {f"lease-{sys.argv[2]}": Sighting(digest="sha256:0", since=float(number))})
    assert len(store.load("run", 1000.0)) == 1
"""
    children = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), number]) for number in "12"]
    assert [child.wait() for child in children] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 1


# ---- observing what is odd


def test_a_lease_that_can_not_be_read_holds_for_the_default_ttl_and_foreign_names_hold_nothing() -> None:
    async def work(world: World) -> None:
        storage, watch = world.tiers.authority.storage, LeaseWatch(world.clock)
        foreign = [f"{lease_root(RUN)}/{world.attempt.name}/notes.txt", f"{lease_root(RUN)}/{'0' * 32}.json"]
        for path in foreign:
            await storage.put(path, b"x")
        assert await watch.living(world.tiers, RUN) == {}
        await storage.put(lease_path(world.attempt, "0" * 32), b'{"ttl_s": 1e300}')
        (seen,) = (await watch.living(world.tiers, RUN))[world.attempt]
        assert (seen.kind, seen.ttl_s) == ("unreadable", 600.0)
        await asyncio.sleep(600)
        assert await watch.living(world.tiers, RUN) == {}
        await watch.remove_dead(world.tiers, RUN)
        assert sorted(await world.leases()) == sorted(foreign)

    virtually(work)


def test_what_can_not_be_listed_is_not_taken_for_nothing() -> None:
    async def work(world: World) -> None:
        world.hook = failing(lambda: TemporaryError("away"), "list")
        with pytest.raises(TemporaryError, match="away"):
            await LeaseWatch(world.clock).living(world.tiers, RUN)

    virtually(work)


# ---- what goes wrong with the holder


def test_a_holder_that_can_not_beat_ends_before_any_observer_calls_it_dead(caplog: pytest.LogCaptureFixture) -> None:
    async def work(world: World) -> None:
        watch = LeaseWatch(world.clock)
        async with world.lease() as lease:
            assert world.attempt in await watch.living(world.tiers, RUN)
            world.hook = failing(lambda: TemporaryError("the endpoint is down"), "put", "delete")
            await asyncio.sleep(TTL_S * 0.75 - 1)
            assert lease.alive
            await asyncio.sleep(1)
            assert not lease.alive
            assert world.attempt in await watch.living(world.tiers, RUN)
            await asyncio.sleep(TTL_S)
            assert [r.levelname for r in caplog.records if r.name.startswith("tierstore.")] == ["WARNING"]
            assert "step=1 the reader's lease ended: TemporaryError: the endpoint is down" in caplog.text
            world.hook = None
            assert await watch.living(world.tiers, RUN) == {}
            await watch.remove_dead(world.tiers, RUN)
            await asyncio.sleep(TTL_S / 4)
            assert lease.alive, "taken anew, and the log was looked at again"
            assert world.attempt in await watch.living(world.tiers, RUN)
        assert await world.leases() == []

    virtually(work)


def test_a_process_that_stood_still_knows_it_when_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """SIGSTOP, a debugger, a machine that slept: the collector went on meanwhile."""

    async def work(world: World) -> None:
        clock = SteppedClock()
        async with world.lease(clock=clock) as lease:
            clock.advance(TTL_S * 10)
            assert not lease.alive
            assert "it has not beaten for 1000 s" in lease.trouble
            await world.sweep()
            await lease.beat()
            assert not lease.alive
            error = await lease.explain(IntegrityError("no tier has a good copy of manifest.json"))
            assert isinstance(error, NotFoundError)
            assert "was deleted by collector:7" in error.message
        assert await world.leases() == []

    virtually(work)


def test_one_that_wakes_up_in_time_never_holds_under_a_name_that_was_given_up() -> None:
    async def work(world: World) -> None:
        clock, watch = SteppedClock(), LeaseWatch(world.clock)
        async with world.lease(clock=clock) as lease:
            before = await world.leases()
            assert world.attempt in await watch.living(world.tiers, RUN)
            clock.advance(TTL_S)
            await lease.beat()
            assert lease.alive
            assert len(await world.leases()) == 1
            assert await world.leases() != before

    virtually(work)


def test_a_beat_that_was_long_on_its_way_does_not_hold_on_under_the_old_name() -> None:
    """It may have come after an observer called the lease dead: the log has to be looked at again."""

    async def work(world: World) -> None:
        async with world.lease() as lease:
            before = await world.leases()
            slow = [TTL_S * 0.6]

            async def hook(operation: str, path: str) -> None:
                if operation == "put":
                    await asyncio.sleep(slow.pop() if slow else 0)

            world.hook = hook
            await asyncio.sleep(TTL_S * 0.9)
            assert lease.alive
            assert len(await world.leases()) == 1
            assert await world.leases() != before

    virtually(work)


def test_read_only_credentials_are_warned_of_once_and_reading_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def work(world: World) -> None:
        world.hook = failing(lambda: AccessError("not allowed"), "put")
        leases = Leases(world.tiers, world.clock, lambda run: TTL_S)
        for _ in range(3):
            replica = await leases.open(await world.info())
            await asyncio.sleep(10 * TTL_S)
            assert replica.lease is not None
            assert not replica.lease.alive
        assert [r.levelname for r in caplog.records if r.name.startswith("tierstore.")] == ["WARNING"]
        assert "run=run is read without a lease, which a collector would wait for: tier 'shared': AccessError: not allowed" in caplog.text
        assert len([1 for operation, path in world.calls if operation == "put"]) == 3, "it is not tried again"

    virtually(work)


def test_a_lease_ended_is_named_by_the_reads_that_then_fail() -> None:
    async def work(world: World) -> None:
        clock = SteppedClock()
        leases = Leases(world.tiers, clock, lambda run: TTL_S)
        info = await world.info()
        replica = await leases.open(info)
        assert replica.lease is not None
        await replica.lease.settled()
        clock.advance(TTL_S)
        shard = replica.index.file_names[0]
        await world.tiers.authority.storage.delete([info.attempt.path(shard)])
        with pytest.raises(IntegrityError, match=r"no tier has a good copy .*; this reader's lease had ended: it has not beaten for 100 s"):
            await replica.read([Want(shard, 0, memoryview(bytearray(10)))])

    virtually(work)


# ---- readers


async def read_all(world: World, opened: Coroutine[Any, Any, Any]) -> float:
    """Opens and reads everything; how many round trips that takes, at one second each."""

    async def second(operation: str, path: str) -> None:
        await asyncio.sleep(1)

    world.hook = second
    began = asyncio.get_running_loop().time()
    replica = await opened
    await replica.read([Want(name, 0, memoryview(bytearray(replica.index.file_nbytes(name)))) for name in replica.index.file_names])
    world.hook = None
    return asyncio.get_running_loop().time() - began


def test_a_lease_costs_a_load_no_round_trip() -> None:
    """It is made, and the log is looked at, while manifest, index and objects are read; nobody waits for either."""

    async def work(world: World) -> None:
        info = await world.info()
        without = await read_all(world, open_replica(world.tiers, info, objects=True))
        leases = Leases(world.tiers, world.clock, lambda run: TTL_S)
        assert await read_all(world, leases.open(info, objects=True)) == without
        assert without >= 2
        await leases.close()

    virtually(work)


def test_a_read_that_failed_tells_nothing_before_the_log_was_asked() -> None:
    """Also where the lease itself is still on its way: what was deleted is not called damaged."""

    async def work(world: World) -> None:
        info = await world.info()
        await world.sweep()
        storage = world.tiers.authority.storage
        await storage.delete([file.path for file in await storage.list(world.attempt.folder)])
        asked = asyncio.Event()
        answer = asyncio.Event()

        async def hold_back(operation: str, path: str) -> None:
            if "/.leases/" in path:
                await asyncio.Event().wait()
            if "/.log/" in path:
                asked.set()
                await answer.wait()

        world.hook = hold_back
        opening = asyncio.ensure_future(Leases(world.tiers, world.clock, lambda run: TTL_S).open(info))
        await asked.wait()
        await asyncio.sleep(1000)
        assert not opening.done()
        answer.set()
        with pytest.raises(NotFoundError, match=r"was deleted by collector:7"):
            await opening

    virtually(work)


def test_damage_is_called_damage_where_the_log_says_that_the_checkpoint_is_there(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)

    async def work() -> None:
        attempt = await save(tiers, 1)
        (info,) = (await scan(tiers, RUN)).checkpoints
        flip(path_of(tiers, "shared", attempt, "manifest.json"))
        leases = Leases(tiers, SteppedClock(), lambda run: TTL_S)
        with pytest.raises(IntegrityError, match="no tier has a good copy of manifest"):
            await leases.open(info)
        await leases.close()

    asyncio.run(work())


def test_the_last_reference_to_what_is_open_ends_its_lease() -> None:
    async def work(world: World) -> None:
        leases = Leases(world.tiers, world.clock, lambda run: TTL_S)
        replica = await leases.open(await world.info())
        assert replica.lease is not None
        await replica.lease.settled()
        await asyncio.sleep(50 * TTL_S)
        assert replica.lease.alive, "however long nobody reads"
        del replica
        gc.collect()
        await asyncio.sleep(0.001)
        assert await world.leases() == []

    virtually(work)


def test_it_can_be_ended_from_any_thread() -> None:
    async def work(world: World) -> None:
        lease = world.lease()
        lease.begin()
        await lease.settled()
        thread = threading.Thread(target=lease.let_go)
        thread.start()
        thread.join()
        await lease.release()
        assert await world.leases() == []
        lease.begin()
        assert await world.leases() == [], "ended is ended"

    virtually(work)


def test_an_authority_that_is_down_keeps_nobody_from_reading_another_tier(caplog: pytest.LogCaptureFixture) -> None:
    async def work(world: World) -> None:
        info = await world.info()
        node = world.tiers.nearest.storage
        for file in await world.tiers.authority.storage.list(world.attempt.folder):
            await node.put(file.path, await world.tiers.authority.storage.read(file.path))

        async def down(operation: str, path: str) -> None:
            if "/.leases/" in path or "/.log/" in path:
                raise TemporaryError("the share is down")

        world.hook = down
        leases = Leases(world.tiers, world.clock, lambda run: TTL_S)
        replica = await leases.open(info)
        await replica.read([Want(name, 0, memoryview(bytearray(10))) for name in replica.index.file_names])
        assert replica.lease is not None
        assert not await replica.lease.settled()
        world.hook = None
        await asyncio.sleep(TTL_S)
        assert replica.lease.alive, "it is taken when the authority is back"
        assert sum("without a lease" in r.message for r in caplog.records) == 1
        await leases.close()

    virtually(work)


def test_a_forked_child_holds_a_lease_of_its_own_and_does_not_end_its_parents(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    clock = SteppedClock()

    async def ids() -> set[str]:
        return {info.path for info in await tiers.authority.storage.list(lease_root(RUN))}

    async def in_child(lease: Lease, other: Lease, parents: set[str]) -> bool:
        if lease.alive:
            return False
        await other.release()  # what a child closes ends nothing of its parent's
        if await ids() != parents:
            return False
        lease.begin()
        held = await lease.settled() and len(await ids()) == 3
        await lease.release()
        return held and await ids() == parents

    async def work() -> int:
        attempt = await save(tiers, 1)
        holding = (hold_lease(tiers, attempt, ttl_s=TTL_S, clock=clock) for _ in range(2))
        async with next(holding) as lease, next(holding) as other:
            parents = await ids()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    asyncio.events._set_running_loop(None)
                    code = 0 if asyncio.run(in_child(lease, other, parents)) else 2
                finally:
                    os._exit(code)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert lease.alive
            assert await ids() == parents
            return os.waitstatus_to_exitcode(status)

    assert asyncio.run(work()) == 0
