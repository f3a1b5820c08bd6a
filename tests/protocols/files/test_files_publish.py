"""Publishing and reading files: whole or not at all, proved, from the nearest good copy; one creator; room made on a full tier."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from files_kit import BLOCK, FAST, bytes_of, child, content, opened, store, stored, the_file, until_pending_on, write
from tiers_kit import Hooked, failing, flip

from tierstore.errors import (
    AccessError,
    ClosedError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    StorageError,
    TemporaryError,
    TierFullError,
    UsageError,
)
from tierstore.tiers.files.places import check_path, parse_place, place_of
from tierstore.tiers.files.spool import Spool

ODD = [
    "a",
    "a/b",
    "a@",
    "@",
    "a%40",
    "a b/ü€.txt",
    "x\\y",
    "line\nbreak",
    ".hidden/.tmp",
    "step-0000000001-01M8N4GC4PZMGV76TDT52MGPWM",
    "n" * 254,
]


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 17])
def test_what_was_written_is_read_back_whole_and_in_parts(tmp_path: Path, nbytes: int) -> None:
    data = bytes_of(1, nbytes)
    with opened(store(tmp_path)) as (session, files):
        write(session, files, "d/f", data)
        version = session.run(files.look_up("d/f"))
        assert version is not None
        assert (version.nbytes, version.tiers[0], version.is_folder) == (nbytes, "node", False)
        assert version.published_at is not None
        for offset in (0, 1, BLOCK - 1, BLOCK, nbytes - 1, nbytes, nbytes + 5):
            for length in (0, 1, BLOCK, BLOCK + 1, None):
                if offset >= 0:
                    assert session.run(files.read(version, offset, length)) == data[offset:][:length]
        buffer = bytearray(nbytes)
        session.run(files.read_into(version, 0, memoryview(buffer)))
        assert buffer == data
        with pytest.raises(UsageError):
            session.run(files.read_into(version, 1, memoryview(bytearray(nbytes))))
    for tier in ("node", "shared", "far"):  # each tier alone has it
        with opened(store(tmp_path, tiers=[tier], node="node")) as (session, files):
            assert content(session, files, "d/f") == data


def test_any_name_that_a_file_system_takes_is_kept_and_listed_as_it_is(tmp_path: Path) -> None:
    with opened(store(tmp_path)) as (session, files):
        for number, path in enumerate(ODD):
            session.run(files.put(path, bytes([number])))
        listed = {one.path: one for one in session.run(files.list()) if not one.is_folder}
        assert set(listed) == set(ODD)
        assert [content(session, files, path) for path in ODD] == [bytes([number]) for number in range(len(ODD))]
        folders = {one.path for one in session.run(files.list()) if one.is_folder}
        assert folders == {"a", "a b", ".hidden"}
        top = session.run(files.list(recursive=False))
        assert "a/b" not in {one.path for one in top}
        assert {one.path for one in top} >= {"a", "a b", "a@"}
        assert [one.path for one in session.run(files.list("a"))] == ["a/b"]
        assert session.run(files.list("nowhere")) == []


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", ".", "a/../b", "n" * 255, "@" * 90, "/".join(["n" * 200] * 5), "\udc80"])
def test_a_path_that_can_not_be_stored_is_refused_before_anything_is_written(tmp_path: Path, path: str) -> None:
    with opened(store(tmp_path)) as (session, files):
        with pytest.raises(UsageError):
            session.run(files.put(path, b"x"))
        assert session.run(files.list()) == []


def test_what_lies_in_a_tier_is_found_by_its_name_alone() -> None:
    for path in ODD:
        leaf = parse_place(f"{place_of(path)}/0000000007-01M8N4GC4PZMGV76TDT52MGPWM-12.json")
        assert leaf is not None
        assert (leaf.path, leaf.is_folder, leaf.kind, leaf.mark.version, leaf.nbytes) == (check_path(path), False, "entry", 7, 12)
    assert parse_place(".files/a/@/0000000001-01M8N4GC4PZMGV76TDT52MGPWM.gone") is not None
    for foreign in (
        "run/step",
        ".files/a",
        ".files/a@/readme.txt",
        ".files/a/0000000001-01M8N4GC4PZMGV76TDT52MGPWM.data",
        ".files/a@/1.data",
    ):
        assert parse_place(foreign) is None


def test_bytes_that_lie_on_the_tier_already_are_published_without_copying_them(tmp_path: Path) -> None:
    with opened(store(tmp_path)) as (session, files):
        spool = files.spool()
        spool.write(bytes_of(1, 3 * BLOCK))
        assert spool.path is not None
        inode = spool.path.stat().st_ino
        session.run(files.publish("f", spool))
        assert the_file(tmp_path / "node", "f@/*.data").stat().st_ino == inode
        session.run(files.copy("f", "g"))
        assert the_file(tmp_path / "node", "g@/*.data").stat().st_ino == inode
        session.run(files.sync(120))
        session.run(files.remove(["f"]))
        assert content(session, files, "g") == bytes_of(1, 3 * BLOCK)
    assert [p for p in (tmp_path / "node" / ".tmp").iterdir() if p.suffix != ".lock"] == []


def test_a_spool_that_is_discarded_leaves_nothing_and_takes_nothing_more(tmp_path: Path) -> None:
    with opened(store(tmp_path)) as (session, files):
        spool = files.spool()
        spool.write(b"half of")
        spool.discard()
        spool.discard()
        with pytest.raises(ClosedError):
            spool.write(b"it")
        assert session.run(files.list()) == []
    assert not [p for p in (tmp_path / "node" / ".tmp").iterdir() if p.suffix != ".lock"]


def test_after_a_write_that_failed_nothing_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    full = threading.Event()

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, "no space left")
        return whole(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with opened(store(tmp_path)) as (session, files):
        write(session, files, "f", b"the old one")
        session.run(files.sync(120))  # else its copies might be what finds the disk full
        spool = files.spool()
        spool.write(b"the first half, ")
        full.set()
        with pytest.raises(TierFullError):
            spool.write(b"and the second")
        full.clear()
        with pytest.raises(StorageError, match="a write failed before"):
            spool.write(b", and the rest")
        with pytest.raises(StorageError, match="a write failed before"):
            session.run(files.publish("f", spool))
        spool.discard()
        assert content(session, files, "f") == b"the old one"


def test_a_spool_goes_on_in_the_next_folder_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    room = 10_000
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if "small" in os.readlink(f"/proc/self/fd/{fd}") and offset + len(data) > room:
            raise OSError(errno.ENOSPC, "no space")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    spool = Spool([small, large], BLOCK)
    data = bytes_of(3, 30_001)
    for begin in range(0, len(data), 4000):
        spool.write(data[begin : begin + 4000])
    assert spool.path is not None
    assert spool.path.parent == large
    assert spool.path.read_bytes() == data
    assert list(small.iterdir()) == []
    full = Spool([small], BLOCK)
    with pytest.raises(TierFullError):
        full.write(data)
    full.discard()
    spool.discard()
    assert list(large.iterdir()) == []


def test_a_replaced_file_shows_its_new_content_and_who_reads_the_old_one_is_told(tmp_path: Path) -> None:
    with opened(store(tmp_path)) as (session, files):
        write(session, files, "f", bytes_of(1, 3 * BLOCK))
        old = session.run(files.look_up("f"))
        assert old is not None
        session.run(files.sync(120))
        write(session, files, "f", bytes_of(2, BLOCK))
        session.run(files.sync(120))
        with pytest.raises(ConflictError, match="replaced while it was read"):
            session.run(files.read(old))
        assert content(session, files, "f") == bytes_of(2, BLOCK)
        session.run(files.remove(["f"]))
        with pytest.raises(NotFoundError, match="removed while it was read"):
            session.run(files.read(old, 0, 10))
        assert session.run(files.look_up("f")) is None
        session.run(files.put("f", b"back"))
        assert content(session, files, "f") == b"back"
    assert sorted(stored(tmp_path / "far")) == ["f@.data", "f@.json"]


def test_damage_is_read_from_the_next_tier_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = bytes_of(1, 5 * BLOCK)
    with opened(store(tmp_path)) as (session, files):
        write(session, files, "f", data)
    flip(the_file(tmp_path / "node", "f@/*.data"))
    flip(the_file(tmp_path / "shared", "f@/*.json"))
    with opened(store(tmp_path)) as (session, files):
        with caplog.at_level(logging.WARNING):
            assert content(session, files, "f") == data
        assert "tier=node file='f' can't be read from here" in caplog.text
        the_file(tmp_path / "shared", "f@/*.data").write_bytes(data[:BLOCK])
        the_file(tmp_path / "far", "f@/*.data").unlink()
        version = session.run(files.look_up("f"))
        assert version is not None
        assert session.run(files.read(version, 0, BLOCK)) == data[:BLOCK]  # that block is good on the node
        with pytest.raises(IntegrityError, match=r"no tier has a good copy of 'f' \(.*node.*shared.*far"):
            session.run(files.read(version))


def test_an_entry_without_its_bytes_is_damage_on_that_tier_only(tmp_path: Path) -> None:
    with opened(store(tmp_path)) as (session, files):
        write(session, files, "f", b"bytes")
    the_file(tmp_path / "node", "f@/*.data").unlink()
    with opened(store(tmp_path)) as (session, files):
        version = session.run(files.look_up("f"))
        assert version is not None
        assert version.tiers == ("shared",)
        assert session.run(files.read(version)) == b"bytes"


def test_of_many_that_create_a_file_exclusively_one_wins(tmp_path: Path) -> None:
    nodes = [f"node{n}" for n in range(3)]
    outcomes: list[str] = []
    gate = threading.Barrier(6)

    def race(node: str, name: str) -> None:
        with opened(store(tmp_path, node=node)) as (session, files):
            gate.wait(120)
            try:
                write(session, files, "d/only", name.encode() * 1000, exclusive=True)
            except ConflictError:
                outcomes.append("")
            else:
                outcomes.append(name)

    racers = [threading.Thread(target=race, args=(node, f"{node}.{n}")) for node in nodes for n in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(200)
    (winner,) = [name for name in outcomes if name]
    assert len(outcomes) == 6
    with opened(store(tmp_path, node="another")) as (session, files):
        assert content(session, files, "d/only") == winner.encode() * 1000
        with pytest.raises(ConflictError):
            session.run(files.put("d/only", b"late", exclusive=True))
        session.run(files.remove(["d/only"]))
        session.run(files.put("d/only", b"anew", exclusive=True))
        assert content(session, files, "d/only") == b"anew"


def test_the_claim_of_a_dead_creator_holds_nobody_up(tmp_path: Path) -> None:
    script = """
import sys; from pathlib import Path; from files_kit import *
with opened(store(Path(sys.argv[1]))) as (session, files):
    session.run(files.put("f", b"half", exclusive=True))
"""
    status, output = child(script, str(tmp_path), env={"TIERSTORE_CRASH_AT": "files.after-claim"})
    assert status == 86, output
    assert stored(tmp_path / "shared") == ["f@.claim"]
    with opened(store(tmp_path)) as (session, files):
        assert session.run(files.look_up("f")) is None
        session.run(files.put("f", b"mine", exclusive=True))
        assert content(session, files, "f") == b"mine"


def test_the_claim_of_a_living_creator_holds_until_somebody_removes_the_file(tmp_path: Path) -> None:
    with opened(store(tmp_path)) as (session, files):
        session.run(files.put("f", b"mine", exclusive=True))
        session.run(files.sync(120))
        for tier in ("node", "shared", "far"):
            for path in (tmp_path / tier / ".files" / "f@").glob("*-*"):
                path.unlink()
        with pytest.raises(ConflictError, match="being created"):
            session.run(files.put("f", b"other", exclusive=True))
        session.run(files.remove(["f"]))
        session.run(files.put("f", b"other", exclusive=True))
        assert content(session, files, "f") == b"other"


def test_a_full_nearest_tier_lets_go_of_what_is_durable_elsewhere_the_oldest_first(tmp_path: Path) -> None:
    config = store(tmp_path)
    config["tiers"][0]["capacity"] = "100KiB"
    with opened(config) as (session, files):
        for number in range(3):
            write(session, files, f"f{number}", bytes_of(number, 30_000))
        session.run(files.sync(120))
        write(session, files, "new", bytes_of(9, 40_000))
        version = session.run(files.look_up("new"))
        assert version is not None
        assert version.tiers[0] == "node"
        assert stored(tmp_path / "node", ".data") == ["f2@.data", "new@.data"]
        for number in range(3):
            assert content(session, files, f"f{number}") == bytes_of(number, 30_000)


def test_what_is_on_no_other_tier_is_never_evicted_the_next_tier_takes_the_new_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = store(tmp_path)
    config["tiers"][0]["capacity"] = "100KiB"
    down = {"far": failing(TemporaryError("far is down"))}
    with opened(config, wrap=down, drain=None) as (session, files):
        write(session, files, "old", bytes_of(1, 60_000))
        with caplog.at_level(logging.WARNING):
            write(session, files, "new", bytes_of(2, 60_000))
        version = session.run(files.look_up("new"))
        assert version is not None
        assert version.tiers == ("shared",)
        assert "the next tier is tried" in caplog.text
        assert "old@.data" in stored(tmp_path / "node")
        assert content(session, files, "old") == bytes_of(1, 60_000)


def test_an_exclusive_creation_that_is_cancelled_gives_its_claim_back(tmp_path: Path) -> None:
    reached, wait = threading.Event(), threading.Event()

    async def hook(operation: str, path: str) -> None:
        while operation == "put" and path.endswith(".json") and not wait.is_set():
            reached.set()
            await asyncio.sleep(0.005)

    with opened(store(tmp_path), wrap={"node": lambda storage: Hooked(storage, hook)}) as (session, files):
        creating = session.submit(files.put("f", b"cancelled", exclusive=True))
        assert reached.wait(120)
        assert stored(tmp_path / "shared") == ["f@.claim"]
        creating.cancel()
        later = threading.Event()
        while stored(tmp_path / "shared"):  # pytest-timeout ends it
            assert not later.wait(0.01)
        wait.set()
        session.run(files.put("f", b"created", exclusive=True))
        assert content(session, files, "f") == b"created"


def test_a_tier_that_was_passed_over_keeps_no_older_version(tmp_path: Path) -> None:
    """Else it would be read as the newest where the authority does not answer."""
    with opened(store(tmp_path)) as (session, files):
        write(session, files, "f", b"older")
    with opened(store(tmp_path), wrap={"node": failing(TierFullError("node is full"), "write", "put")}) as (session, files):
        write(session, files, "f", b"newer")
        assert stored(tmp_path / "node") == []
        assert content(session, files, "f") == b"newer"


def test_a_nearest_tier_that_refuses_does_not_keep_a_file_from_being_written(tmp_path: Path) -> None:
    broken = {"node": failing(AccessError("read-only"), "write", "put")}
    with opened(store(tmp_path), wrap=broken) as (session, files):
        write(session, files, "f", b"bytes")
        assert content(session, files, "f") == b"bytes"
    assert sorted(stored(tmp_path / "shared")) == sorted(stored(tmp_path / "far")) == ["f@.data", "f@.json"]


def test_where_no_tier_takes_a_file_the_error_says_so_and_the_bytes_are_kept(tmp_path: Path) -> None:
    broken = {name: failing(TierFullError(f"{name} is full"), "write", "put") for name in ("shared", "far")}
    broken["node"] = failing(TierFullError("node is full"), "put")
    with opened(store(tmp_path), wrap={}) as (session, files):
        session.run(files.put("f", b"old"))
    with opened(store(tmp_path), wrap=broken, drain=None) as (session, files):
        spool = files.spool()
        spool.write(b"new")
        with pytest.raises(TierFullError, match="node is full"):
            session.run(files.publish("f", spool))
        assert spool.read(0, 3) == b"new"
        spool.discard()
        assert content(session, files, "f") == b"old"


@pytest.mark.parametrize("authority", ["answers", "is away", "was lost"])
def test_one_level_shows_what_all_levels_show_of_it_without_a_look_at_what_lies_deeper(tmp_path: Path, authority: str) -> None:
    down = threading.Event()

    async def away(operation: str, path: str) -> None:
        if down.is_set():
            raise TemporaryError("down")

    async def nothing(operation: str, path: str) -> None: ...

    nodes: list[Hooked] = []

    def noting(storage: Any) -> Hooked:
        nodes.append(Hooked(storage, nothing))
        return nodes[-1]

    with opened(store(tmp_path)) as (session, files):
        for path in ("top", "a@", "both", "both/x", "d/1", "d/e/2", "d/e/f/3", "deep/er/x", "gone", "dead/1", "dead/e/2", "anew/1", *ODD):
            write(session, files, path, path.encode())
        for path in ("made", "made/inner", "unmade", "dead/made", "d/e"):
            session.run(files.make_folder(path))
        session.run(files.remove(["gone", "dead/1", "dead/e/2", "unmade", "dead/made", "anew/1"]))
        write(session, files, "anew/1", b"x")
        session.run(files.sync(120))
    for tier in ("node", "far"):
        (tmp_path / tier / ".files" / "both" / "theirs%zz" / "x").mkdir(parents=True)
    if authority == "was lost":
        for entry in (tmp_path / "shared" / ".files").iterdir():
            shutil.rmtree(entry)
    wrap = {"node": noting, "shared": lambda storage: Hooked(storage, away)}
    with opened(store(tmp_path), wrap=wrap, drain=None) as (session, files):
        if authority == "is away":
            down.set()
        for folder in ("", "d", "d/e", "both", "made", "made/inner", "unmade", "dead", "dead/e", "deep", "anew", "nowhere"):
            everything = session.run(files.list(folder))
            start = f"{folder}/" if folder else ""
            level = [(one.path, one.is_folder, one.version, one.nbytes) for one in everything if "/" not in one.path[len(start) :]]
            nodes[0].calls.clear()
            found = session.run(files.list(folder, recursive=False))
            assert [(one.path, one.is_folder, one.version, one.nbytes) for one in found] == level
            if folder in ("", "d"):
                assert ("list", f".files/{folder}".rstrip("/")) not in nodes[0].calls
        down.clear()


def test_folders_are_there_when_made_or_when_something_lies_in_them(tmp_path: Path) -> None:
    with opened(store(tmp_path)) as (session, files):
        session.run(files.make_folder("made/deep"))
        session.run(files.make_folder("made/deep"))
        session.run(files.put("implied/f", b"x"))
        assert [(one.path, one.is_folder, one.version > 0) for one in session.run(files.list())] == [
            ("implied", True, False),
            ("implied/f", False, True),
            ("made", True, False),
            ("made/deep", True, True),
        ]
        session.run(files.remove(["made/deep", "implied/f"]))
        assert session.run(files.list()) == []
        assert session.run(files.look_up("made")) is None
        root = session.run(files.look_up(""))
        assert root is not None
        assert root.is_folder
        with pytest.raises(NotFoundError):
            session.run(files.remove(["implied/f"]))


@pytest.mark.parametrize(("ack", "tier"), [("nearest", "node"), ("authority", "shared"), ("durable", "far")])
def test_publishing_returns_when_the_tier_that_ack_names_has_it(tmp_path: Path, ack: Any, tier: str) -> None:
    with opened(store(tmp_path), ack=ack) as (session, files):
        write(session, files, "f", b"bytes")
        assert "f@.json" in stored(tmp_path / tier)


def test_an_acknowledgement_that_does_not_come_is_an_error_and_the_file_is_carried_on(tmp_path: Path) -> None:
    down = {"far": failing(TemporaryError("far is down"), "write", "put")}
    options = replace(FAST, patience_s=0.05)
    with opened(store(tmp_path), ack="durable", wrap=down, options=options, drain=None) as (session, files):
        with pytest.raises(TimeoutError, match="is not on tier 'far'"):
            write(session, files, "f", b"bytes")
        assert content(session, files, "f") == b"bytes"
        until_pending_on(files, "far", "far is down")  # the authority may be slower than far's patience is short
        assert [(one.path, one.tier) for one in files.pending()] == [("f", "far")]
