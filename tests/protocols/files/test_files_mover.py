"""The mover: files come to the further tiers in the order in which they were published, whoever dies, fails or races meanwhile."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from files_kit import BLOCK, FAST, bytes_of, child, content, opened, store, stored, the_file, until_pending_on, write
from tiers_kit import Hooked, SteppedClock, failing, flip

from tierstore.config import load_config
from tierstore.errors import DeadlineError, IntegrityError, LockedError, TemporaryError
from tierstore.storage.contract import Capabilities, FileInfo, Source, Storage
from tierstore.testing.around import Call
from tierstore.tiers.budget import ByteBudget
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.files.reconcile import FILES_LOCK
from tierstore.tiers.files.syncing import FilesReport, sync_files
from tierstore.tiers.locks import RunLock, lock_path
from tierstore.tiers.session import Session

T = TypeVar("T")

PUBLISH = """
import sys; from pathlib import Path; from files_kit import *
with opened(store(Path(sys.argv[1])), drain=None) as (session, files):
    write(session, files, "data", bytes_of(1, 50_000))
    session.run(files.put(".metadata", b"first"))
    write(session, files, "data", bytes_of(2, 50_000))
    session.run(files.put(".metadata", b"second"))
"""


class Gate:
    """Holds back writes of what is chosen until it is opened; keeps the order of all others."""

    def __init__(self, chosen: str, operation: str = "write") -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self.order: list[str] = []
        self._chosen, self._operation = chosen, operation

    def wrap(self, storage: Storage) -> Storage:
        async def hook(operation: str, path: str) -> None:
            if operation == self._operation and self._chosen in path:
                self.reached.set()
                while not self.open.is_set():  # noqa: ASYNC110 - the test is on another thread
                    await asyncio.sleep(0.005)
            if operation == "put" and path.startswith(".files") and path.endswith((".json", ".gone")):
                self.order.append(path.split("/")[-2])

        return Hooked(storage, hook)


def sync(config: dict[str, Any], **options: Any) -> Any:
    """What ``tierstore sync`` does."""
    with Session.open(load_config(config)) as session:
        return session.run(sync_files(session, patience_s=1.0, **options), 60)


def test_a_further_tier_never_shows_a_file_before_those_that_were_published_earlier(tmp_path: Path) -> None:
    gate = Gate("large@")
    with opened(store(tmp_path), wrap={"far": gate.wrap}) as (session, files):
        write(session, files, "large", bytes_of(1, 300_000))
        for number in range(5):
            session.run(files.put(f"small{number}", b"x" * (number + 1)))
        session.run(files.put(".metadata", b"all of them"))
        assert gate.reached.wait(120)
        deadline = threading.Event()
        while not any("small4@.data" in name for name in stored(tmp_path / "far")):  # their bytes go ahead
            assert not deadline.wait(0.01)
        assert stored(tmp_path / "far", ".json") == []
        assert next(one.path for one in files.pending() if one.tier == "far") == "large"
        gate.open.set()
        session.run(files.sync(120))
    assert gate.order == ["large@", *(f"small{number}@" for number in range(5)), ".metadata@"]


def test_a_version_that_was_replaced_meanwhile_still_comes_first_so_that_nothing_overtakes(tmp_path: Path) -> None:
    gate = Gate("data@")
    with opened(store(tmp_path), wrap={"far": gate.wrap}) as (session, files):
        for number in (1, 2, 3):
            write(session, files, "data", bytes_of(number, 50_000))
            session.run(files.put(".metadata", str(number).encode()))
        assert len(stored(tmp_path / "node", ".data")) == 6  # older versions stay while they are carried on
        gate.open.set()
        session.run(files.sync(120))
        assert content(session, files, "data") == bytes_of(3, 50_000)
    assert gate.order == ["data@", ".metadata@"] * 3
    for tier in ("node", "shared", "far"):
        assert sorted(stored(tmp_path / tier)) == [".metadata@.data", ".metadata@.json", "data@.data", "data@.json"]


@pytest.mark.parametrize("bucket", ["node", "far"])
def test_a_bucket_that_was_quicker_than_another_tier_lets_older_versions_go_once_nobody_copies_them_from_it(
    tmp_path: Path, bucket: str
) -> None:
    class Bucket(Hooked):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, local=False)

    async def nothing(operation: str, path: str) -> None: ...

    gate = Gate("f@")
    wrap = {"shared": gate.wrap, bucket: lambda storage: Bucket(storage, nothing)}
    with opened(store(tmp_path), wrap=wrap) as (session, files):
        for number in (1, 2):
            write(session, files, "f", bytes_of(number, 50_000))
        until_pending_on(files, "shared", "")
        assert len(stored(tmp_path / bucket, ".data")) == 2
        gate.open.set()
        session.run(files.sync(120))
        for tier in ("node", "shared", "far"):
            assert sorted(stored(tmp_path / tier)) == ["f@.data", "f@.json"]


def test_what_was_removed_before_it_came_there_is_not_carried_on(tmp_path: Path) -> None:
    gate = Gate("first@")
    with opened(store(tmp_path), wrap={"far": gate.wrap}) as (session, files):
        session.run(files.put("first", b"holds the lane"))
        write(session, files, "gone", bytes_of(1, 50_000))
        session.run(files.copy("gone", "kept"))
        session.run(files.remove(["gone"]))
        assert content(session, files, "gone") is None
        gate.open.set()
        session.run(files.sync(120))
    assert gate.order == ["first@", "kept@", "gone@"]
    assert sorted(stored(tmp_path / "far")) == ["first@.data", "first@.json", "gone@.gone", "kept@.data", "kept@.json"]


def test_bytes_that_were_on_their_way_to_the_last_tier_are_gone_there_too_when_the_file_is_removed(tmp_path: Path) -> None:
    gate = Gate("f@", "put")
    with opened(store(tmp_path, tiers=["node", "shared"]), wrap={"shared": gate.wrap}) as (session, files):
        write(session, files, "first", b"x")
        session.run(files.sync(120))
        write(session, files, "f", bytes_of(1, 50_000))
        assert gate.reached.wait(120)  # its bytes are there, its entry is not
        gate.open.set()
        session.run(files.remove(["f"]))
        session.run(files.sync(120))
    assert sorted(stored(tmp_path / "shared")) == ["f@.gone", "first@.data", "first@.json"]


def test_a_tier_that_fails_holds_up_nothing_but_itself_and_gets_everything_later(tmp_path: Path) -> None:
    down = threading.Event()
    down.set()

    async def hook(operation: str, path: str) -> None:
        if down.is_set() and operation in ("write", "put", "stat") and path.startswith(".files"):
            raise TemporaryError("far is down")

    with opened(store(tmp_path), wrap={"far": lambda storage: Hooked(storage, hook)}) as (session, files):
        write(session, files, "a", bytes_of(1, 20_000))
        session.run(files.put("b", b"b"))
        until_pending_on(files, "far", "far is down")
        with pytest.raises(DeadlineError, match="2 files are not on far"):
            session.run(files.sync(0.3))
        assert stored(tmp_path / "shared", ".json") == ["a@.json", "b@.json"]
        assert stored(tmp_path / "far") == []
        first = files.pending()[0]
        assert (first.tier, first.path, first.nbytes) == ("far", "a", 20_000)
        assert "far is down" in first.reason
        down.clear()
        session.run(files.sync(120))
        assert files.pending() == []
    assert stored(tmp_path / "far", ".json") == ["a@.json", "b@.json"]


def test_damage_is_never_copied_and_the_next_good_copy_is_taken(tmp_path: Path) -> None:
    gate = Gate("f@")
    with opened(store(tmp_path), wrap={"far": gate.wrap}) as (session, files):
        write(session, files, "f", bytes_of(1, 20_000))
        assert gate.reached.wait(120)
        waited = threading.Event()
        while "f@.json" not in stored(tmp_path / "shared"):  # pytest-timeout ends it
            assert not waited.wait(0.01)
        flip(the_file(tmp_path / "node", "f@/*.data"))
        gate.open.set()
        session.run(files.sync(120))
    assert the_file(tmp_path / "far", "f@/*.data").read_bytes() == bytes_of(1, 20_000)


def test_what_is_damaged_everywhere_is_told_and_holds_nothing_else_up(tmp_path: Path) -> None:
    down = {"shared": failing(TemporaryError("down"), "write", "put"), "far": failing(TemporaryError("down"), "write", "put")}
    with opened(store(tmp_path)) as (session, files):
        session.run(files.put("before", b"x"))
    with opened(store(tmp_path), wrap=down, drain=None) as (session, files):
        write(session, files, "f", bytes_of(1, 20_000))
        session.run(files.put("g", b"good"))
    flip(the_file(tmp_path / "node", "f@/*.data"))
    report = sync(store(tmp_path))
    assert {(path, tier) for path, tier, error in report.failed if isinstance(error, IntegrityError)} == {("f", "shared"), ("f", "far")}
    assert "g@.json" in stored(tmp_path / "far")
    assert "f@.json" not in stored(tmp_path / "far")


def test_the_next_process_of_the_node_carries_on_what_a_dead_one_left_in_its_order(tmp_path: Path) -> None:
    status, output = child(PUBLISH + "import os; os._exit(0)\n", str(tmp_path))
    assert status == 0, output
    shutil.rmtree(tmp_path / "far" / ".files", ignore_errors=True)  # however far it came
    shutil.rmtree(tmp_path / "shared" / ".files", ignore_errors=True)
    gate = Gate("nothing")
    with opened(store(tmp_path), wrap={"far": gate.wrap}) as (session, files):
        session.run(files.put("later", b"x"))
        session.run(files.sync(120))
    names = list(dict.fromkeys(gate.order))
    assert sorted(names) == [".metadata@", "data@", "later@"]
    assert names.index("data@") < names.index(".metadata@")  # its own may come before, after or between them: another process's
    with opened(store(tmp_path, tiers=["far"])) as (session, files):
        assert content(session, files, ".metadata") == b"second"
        assert content(session, files, "data") == bytes_of(2, 50_000)


def test_what_an_earlier_container_left_on_this_nodes_disk_is_carried_on_once_it_must_be_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host name is another one, so that nobody can tell whether it lives; and no other node sees its files."""
    clock = SteppedClock()
    down = {name: failing(TemporaryError("down"), "write", "put") for name in ("shared", "far")}
    with opened(store(tmp_path), clock=clock):
        pass
    with monkeypatch.context() as before:
        before.setattr(socket, "gethostname", lambda: "pod-1")
        with opened(store(tmp_path), clock=clock, wrap=down, drain=None) as (session, files):
            session.run(files.put("left", b"by pod-1"))
    with opened(store(tmp_path), clock=clock, options=replace(FAST, look_again_s=0.02)) as (session, files):
        session.run(files.put("own", b"x"))
        session.run(files.sync(120))
        assert stored(tmp_path / "far", ".json") == ["own@.json"]
        clock.advance(timedelta(minutes=11).total_seconds())
        waited = threading.Event()
        while "left@.json" not in stored(tmp_path / "far"):  # pytest-timeout ends it
            assert not waited.wait(0.01)


def test_the_files_of_a_living_process_are_left_to_it_but_a_person_may_ask(tmp_path: Path) -> None:
    down = {"far": failing(TemporaryError("down"), "write", "put")}
    with opened(store(tmp_path), wrap=down, drain=None) as (session, files):
        session.run(files.put("mine", b"x"))
        until_pending_on(files, "far", "down")
        gate = Gate("nothing")
        with opened(store(tmp_path), wrap={"far": gate.wrap}) as (other, others):
            other.run(others.put("yours", b"y"))
            other.run(others.sync(120))
        assert gate.order == ["yours@"]
        looked = sync(store(tmp_path), dry_run=True)
        assert [(one.path, [t.name for t in one.targets]) for one in looked.lacking] == [("mine", ["far"])]
        assert not sync(store(tmp_path)).left
        assert "mine@.json" in stored(tmp_path / "far")
        assert sync(store(tmp_path)).lacking == ()


@pytest.mark.parametrize("lost", ["shared", "far"])
def test_a_shared_tier_that_was_lost_is_filled_again(tmp_path: Path, lost: str) -> None:
    with opened(store(tmp_path)) as (session, files):
        for number in range(5):
            write(session, files, f"d/f{number}", bytes_of(number, 9000))
        session.run(files.make_folder("empty"))
        session.run(files.remove(["d/f4"]))
    shutil.rmtree(tmp_path / lost)
    with opened(store(tmp_path, node="another")) as (session, files):  # a node that holds nothing itself
        assert content(session, files, "d/f1") == bytes_of(1, 9000)
        assert content(session, files, "d/f4") is None
        assert [one.path for one in session.run(files.list("d"))] == ["d/f0", "d/f1", "d/f2", "d/f3"]
    report = sync(store(tmp_path, node="another"))
    assert {one.path for one in report.lacking} == {"d/f0", "d/f1", "d/f2", "d/f3", "d/f4", "empty"}
    assert not report.left
    assert not report.failed
    assert sorted(stored(tmp_path / "shared")) == sorted(stored(tmp_path / "far"))
    with opened(store(tmp_path, tiers=[lost])) as (session, files):
        assert [content(session, files, f"d/f{n}") for n in range(5)] == [*(bytes_of(n, 9000) for n in range(4)), None]


def test_a_removal_is_not_undone_by_another_nodes_older_copy(tmp_path: Path) -> None:
    one, two = store(tmp_path, node="one"), store(tmp_path, node="two")
    with opened(one) as (session, files):
        write(session, files, "f", bytes_of(1, 9000))
    down = {"shared": failing(TemporaryError("down"), "write", "put"), "far": failing(TemporaryError("down"), "write", "put")}
    with opened(two, wrap=down, drain=None) as (session, files):
        write(session, files, "f", bytes_of(2, 9000))  # only its own node has it
    with opened(one) as (session, files):
        session.run(files.remove(["f"]))
    report = sync(two)
    assert not report.failed
    for config in (one, two):
        with opened(config) as (session, files):
            assert content(session, files, "f") is None
            assert session.run(files.list()) == []
    for tier in ("shared", "far", "one", "two"):
        assert stored(tmp_path / tier, ".data") == []


def test_tombstones_go_after_a_week_and_unpublished_bytes_after_a_day(tmp_path: Path) -> None:
    clock = SteppedClock()
    with opened(store(tmp_path), clock=clock) as (session, files):
        write(session, files, "f", bytes_of(1, 9000))
        session.run(files.remove(["f"]))
        session.run(files.make_folder("d"))
        session.run(files.remove(["d"]))
    for tier in ("node", "shared", "far"):
        assert sorted(stored(tmp_path / tier)) == ["d/@.gone", "f@.gone"]
    orphan = tmp_path / "shared" / ".files" / "half@" / "0000000001-01M8N4GC4PZMGV76TDT52MGPWM.data"
    orphan.parent.mkdir()
    orphan.write_bytes(b"half")
    os.utime(orphan, (clock.now().timestamp(),) * 2)  # whatever day it is where this runs
    clock.advance(timedelta(days=6).total_seconds())
    for days, left in ((0, ["d/@.gone", "f@.gone"]), (2, [])):
        clock.advance(timedelta(days=days).total_seconds())
        with Session.open(load_config(store(tmp_path)), clock=clock) as session:
            session.run(sync_files(session), 60)
        for tier in ("node", "shared", "far"):
            assert sorted(stored(tmp_path / tier)) == left
    assert not orphan.exists()


def test_many_overwrites_leave_one_version_on_every_tier(tmp_path: Path) -> None:
    with opened(store(tmp_path)) as (session, files):
        for number in range(20):
            write(session, files, "latest", bytes_of(number, BLOCK + number))
        session.run(files.sync(120))
    for tier in ("node", "shared", "far"):
        assert sorted(stored(tmp_path / tier)) == ["latest@.data", "latest@.json"]
    with opened(store(tmp_path)) as (session, files):
        assert content(session, files, "latest") == bytes_of(19, BLOCK + 19)


def test_a_tier_that_hangs_takes_no_turns_of_the_others(tmp_path: Path) -> None:
    gate = Gate(".files")
    with opened(store(tmp_path, io={"block_size": "4KiB", "threads": 2}), wrap={"far": gate.wrap}, ack="authority") as (session, files):
        for number in range(6):
            session.run(files.put(f"f{number}", b"x" * (number + 1)), 120)
            assert gate.reached.wait(120)
        assert len(stored(tmp_path / "shared", ".json")) == 6
        gate.open.set()


def test_a_tier_that_hangs_with_bytes_in_its_hands_takes_no_memory_of_the_others(tmp_path: Path) -> None:
    going_on, holding = threading.Event(), threading.Event()

    class Stuck(Hooked):
        async def write(self, path: str, source: Source) -> FileInfo:
            held = [await source.read(0, BLOCK)]
            holding.set()
            while not going_on.is_set():  # noqa: ASYNC110 - the test is on another thread
                await asyncio.sleep(0.005)
            held.clear()
            return await super().write(path, source)

    async def nothing(operation: str, path: str) -> None: ...

    down = {name: failing(TemporaryError("down"), "write", "put") for name in ("shared", "far")}
    names = [f"f{number}" for number in range(6)]
    with opened(store(tmp_path)):
        pass
    with opened(store(tmp_path), wrap=down, drain=None) as (session, files):
        for number, name in enumerate(names):
            write(session, files, name, bytes_of(number, 50_000))
    with opened(store(tmp_path), wrap={"far": lambda storage: Stuck(storage, nothing)}) as (session, _):
        made = CopyContext.make(session.tiers, session.clock)
        context = replace(made, budget=ByteBudget(4 * BLOCK, patience_s=600.0))
        syncing = session.submit(sync_files(session, context=context))
        assert holding.wait(120)
        waited = threading.Event()
        while len(stored(tmp_path / "shared", ".json")) < len(names):  # pytest-timeout ends it
            assert not waited.wait(0.01)
        assert stored(tmp_path / "far", ".json") == []
        going_on.set()
        assert not syncing.result(120).left


def left_by_a_dead_process(root: Path) -> None:
    status, output = child(PUBLISH + "import os; os._exit(0)\n", str(root))
    assert status == 0, output
    for tier in ("shared", "far"):
        shutil.rmtree(root / tier / ".files", ignore_errors=True)  # however far it came


def test_who_took_over_keeps_nobody_waiting_for_a_further_tier_that_is_down(tmp_path: Path) -> None:
    left_by_a_dead_process(tmp_path)
    down = {"far": failing(TemporaryError("down"), "write", "put")}
    with opened(store(tmp_path), wrap=down, drain=None) as (session, files):
        session.run(files.put("own", b"x"))
        waited = threading.Event()
        while ".metadata@.json" not in stored(tmp_path / "shared"):  # pytest-timeout ends it
            assert not waited.wait(0.01)
        lock = RunLock(lock_path(session.tiers, FILES_LOCK), FILES_LOCK)
        while not lock.held:
            with suppress(LockedError):
                lock.acquire()
        lock.release()
        assert stored(tmp_path / "far") == []
        assert not sync(store(tmp_path)).left
        assert stored(tmp_path / "far", ".json") == [".metadata@.json", "data@.json", "own@.json"]


def test_while_another_process_takes_over_sync_works_and_others_look_again_later(tmp_path: Path) -> None:
    left_by_a_dead_process(tmp_path)
    with opened(store(tmp_path), options=replace(FAST, look_again_s=0.02)) as (session, files):
        lock = RunLock(lock_path(session.tiers, FILES_LOCK), FILES_LOCK)
        lock.acquire()
        session.run(files.put("own", b"x"))
        session.run(files.sync(120))
        assert stored(tmp_path / "far", ".json") == ["own@.json"]
        assert not sync(store(tmp_path), only=["shared"]).left
        assert stored(tmp_path / "shared", ".json") == [".metadata@.json", "data@.json", "own@.json"]
        lock.release()
        waited = threading.Event()
        while ".metadata@.json" not in stored(tmp_path / "far"):  # pytest-timeout ends it
            assert not waited.wait(0.01)


def test_what_the_look_at_what_others_left_sees_before_its_publication_returns_is_on_its_way_once(tmp_path: Path) -> None:
    placed = asyncio.Event()

    class Meeting(Hooked):
        async def around(self, operation: str, path: str, call: Call[T]) -> T:
            if operation == "list" and path == ".files":
                await placed.wait()
            result = await super().around(operation, path, call)
            if operation == "put" and path.endswith(".json"):
                placed.set()
                while not files.pending():  # noqa: ASYNC110 - until the look has seen it, and handed it on
                    await asyncio.sleep(0.005)
            return result

    async def nothing(operation: str, path: str) -> None: ...

    wrap: dict[str, Any] = {name: failing(TemporaryError("down"), "write", "put") for name in ("shared", "far")}
    wrap["node"] = lambda storage: Meeting(storage, nothing)
    with opened(store(tmp_path)):
        pass
    with opened(store(tmp_path), wrap=wrap, drain=None) as (session, files):
        session.run(files.put("f", b"bytes"))
        assert [(one.path, one.tier) for one in files.pending()] == [("f", "shared"), ("f", "far")]


def test_two_movers_that_carry_the_same_versions_at_once_do_no_harm(tmp_path: Path) -> None:
    left_by_a_dead_process(tmp_path)
    writing: set[object] = set()

    class Slow(Hooked):
        async def write(self, path: str, source: Source) -> FileInfo:
            writing.add((asyncio.current_task(), path))
            deadline = asyncio.get_running_loop().time() + 120.0
            while len({p for _, p in writing}) == len(writing) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.005)  # until both are at one file
            return await super().write(path, source)

    async def nothing(operation: str, path: str) -> None: ...

    with opened(store(tmp_path), wrap={"far": lambda storage: Slow(storage, nothing)}) as (session, files):

        async def both() -> list[FilesReport]:
            return list(await asyncio.gather(sync_files(session), sync_files(session)))

        assert [(report.left, report.failed) for report in session.run(both(), 200)] == [((), ())] * 2
        assert len({p for _, p in writing}) < len(writing)
        assert not session.run(sync_files(session), 60).lacking
        assert content(session, files, "data") == bytes_of(2, 50_000)
    for tier in ("shared", "far"):
        assert sorted(stored(tmp_path / tier)) == [".metadata@.data", ".metadata@.json", "data@.data", "data@.json"]
    with opened(store(tmp_path, tiers=["far"])) as (session, files):
        assert content(session, files, ".metadata") == b"second"


def test_what_is_written_while_the_authority_is_away_replaces_what_another_node_wrote_before(tmp_path: Path) -> None:
    down = threading.Event()

    async def hook(operation: str, path: str) -> None:
        if down.is_set():
            raise TemporaryError("no shared tier answers")

    away = {"shared": lambda storage: Hooked(storage, hook), "far": lambda storage: Hooked(storage, hook)}
    with opened(store(tmp_path, node="node-1")) as (session, files):
        for number in range(5):
            session.run(files.put("last", f"step {number}".encode()))
    with opened(store(tmp_path, node="node-2"), wrap=away) as (session, files):
        down.set()
        session.run(files.put("last", b"step 5"))
        assert content(session, files, "last") == b"step 5"
        down.clear()
        session.run(files.sync(120))
        assert content(session, files, "last") == b"step 5"
    with opened(store(tmp_path, node="node-1")) as (session, files):
        assert content(session, files, "last") == b"step 5"


@pytest.mark.parametrize("exclusive", [False, True])
def test_what_comes_back_after_its_tombstone_was_dropped_is_older_than_what_was_made_anew(tmp_path: Path, exclusive: bool) -> None:
    clock = SteppedClock()
    down = {name: failing(TemporaryError("down"), "write", "put") for name in ("shared", "far")}
    with opened(store(tmp_path, node="node-1"), clock=clock) as (session, files):
        for number in range(3):
            session.run(files.put("f", f"old {number}".encode()))
    with opened(store(tmp_path, node="node-1"), clock=clock, wrap=down, drain=None) as (session, files):
        session.run(files.put("f", b"never carried on"))
    with opened(store(tmp_path, node="node-2"), clock=clock) as (session, files):
        session.run(files.remove(["f"]))
    clock.advance(timedelta(days=8).total_seconds())
    with Session.open(load_config(store(tmp_path, node="node-2")), clock=clock) as session:
        session.run(sync_files(session), 60)
    assert stored(tmp_path / "shared") == []
    with opened(store(tmp_path, node="node-2"), clock=clock) as (session, files):
        session.run(files.put("f", b"new", exclusive=exclusive))
    with Session.open(load_config(store(tmp_path, node="node-1")), clock=clock) as session:
        session.run(sync_files(session), 60)
    with opened(store(tmp_path, node="node-1"), clock=clock) as (session, files):
        assert content(session, files, "f") == b"new"


def test_a_forked_child_publishes_by_itself_and_leaves_its_parents_work_alone(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from files_kit import *
from tiers_kit import failing
from tierstore.errors import TemporaryError

down = {"far": failing(TemporaryError("down"), "write")}
with opened(store(Path(sys.argv[1])), wrap=down, drain=None) as (session, files):
    write(session, files, "parents", bytes_of(1, 9000))
    pid = os.fork()
    if not pid:
        assert files.pending() == ()
        session.run(files.put("childs", b""), 100)
        assert content(session, files, "parents") == bytes_of(1, 9000)
        session.run(files.close(100), 100)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert [one.path for one in files.pending() if one.tier == "far"] == ["parents"]
"""
    status, output = child(script, str(tmp_path))
    assert status == 0, output
    assert stored(tmp_path / "far", ".json") == ["childs@.json"]
