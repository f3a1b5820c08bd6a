"""The cache of records on this machine's disk: it saves reads, is never believed blindly, and nothing rests on it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tiers_kit import Hooked, SteppedClock, run, save, tiers_in

from tierstore.config import cache_folder, load_config
from tierstore.names import Attempt
from tierstore.storage.contract import Storage
from tierstore.tiers import decisions
from tierstore.tiers.catalog import Catalog, RecordCache, scan
from tierstore.tiers.record_store import RecordStore
from tierstore.tiers.session import Session
from tierstore.tiers.verify import verify

CLOCK = SteppedClock()


class Counted:
    """A store in `root` whose reads of records are counted; each look is that of a new process with the same cache folder."""

    def __init__(self, root: Path, cache: Path | None = None, store_id: str = "kit") -> None:
        self.reads: list[str] = []
        self.cache = cache or root / "cache"
        self.store_id = store_id

        async def hook(operation: str, path: str) -> None:
            if operation == "read" and "/.log/" in path:
                self.reads.append(path)

        def counted(storage: Storage) -> Storage:
            return Hooked(storage, hook)

        self.tiers = tiers_in(root, wrap={"shared": counted, "far": counted})

    def look(self) -> tuple[Catalog, int]:
        self.reads.clear()
        catalog = run(scan(self.tiers, "run", RecordCache(RecordStore(self.cache, self.store_id))))
        return catalog, len(self.reads)

    @property
    def file(self) -> Path:
        return next(self.cache.glob("records-*.sqlite"))


def filled(root: Path) -> tuple[Counted, list[Attempt]]:
    store = Counted(root)
    attempts = [run(save(store.tiers, step, metrics={"loss": float("nan"), "é": 1.5})) for step in (1, 2, 3)]
    run(decisions.pin(store.tiers, attempts[1], "paper", clock=CLOCK, reason="Grün"))
    return store, attempts


def test_the_next_process_reads_only_what_is_new_and_sees_the_same(tmp_path: Path) -> None:
    store, attempts = filled(tmp_path)
    first, reads = store.look()
    assert reads == 4
    again, reads = store.look()
    assert reads == 0
    assert repr(again.checkpoints) == repr(first.checkpoints)  # repr: NaN equals itself
    run(decisions.tag(store.tiers, attempts[0], ["good"], clock=CLOCK))
    catalog, reads = store.look()
    assert (reads, catalog.checkpoints[0].tags, catalog.checkpoints[1].pins) == (1, ("good",), ("paper",))
    assert store.look()[1] == 0


def test_another_store_in_the_same_place_is_not_mistaken_for_it(tmp_path: Path) -> None:
    store, _ = filled(tmp_path)
    store.look()
    other = Counted(tmp_path, store.cache, "other-id")
    assert other.look()[1] == 4
    assert store.look()[1] == 0


def test_a_record_that_was_written_anew_since_is_read_anew(tmp_path: Path) -> None:
    """A log that was lost and goes on otherwise has other files under the same names: what is cached of them counts no more."""
    store, attempts = filled(tmp_path)
    path = tmp_path / "shared" / attempts[1].record_path(1)
    os.utime(path, (1_000_000_000, 1_000_000_000))  # a file system's clock may tick more slowly than this test goes on
    assert store.look()[1] == 4
    path.unlink()
    run(decisions.pin(store.tiers, attempts[1], "other", clock=CLOCK, reason="Grün"))
    catalog, reads = store.look()
    assert (reads, catalog.checkpoints[1].pins) == (1, ("other",))


def test_what_is_gone_from_the_store_is_forgotten(tmp_path: Path) -> None:
    store, attempts = filled(tmp_path)
    store.look()
    for path in (tmp_path / "shared" / attempts[0].log_folder).iterdir():
        path.unlink()
    run(decisions.tag(store.tiers, attempts[2], ["news"], clock=CLOCK))
    store.look()
    with sqlite3.connect(store.file) as cache:
        paths = [path for (path,) in cache.execute("SELECT path FROM records ORDER BY path")]
    cache.close()
    assert paths == [attempts[1].record_path(0), attempts[1].record_path(1), attempts[2].record_path(0), attempts[2].record_path(1)]


def _flip_bodies(file: Path) -> None:
    with sqlite3.connect(file) as cache:
        cache.execute("UPDATE records SET body = replace(CAST(body AS TEXT), 'paper', 'other')")
    cache.close()


def _swap(file: Path) -> None:
    with sqlite3.connect(file) as cache:
        rows = cache.execute("SELECT path, stamp, body, sum FROM records ORDER BY path").fetchall()
        cache.execute("UPDATE records SET body = ?, sum = ? WHERE path = ?", (*rows[0][2:], rows[-1][0]))
    cache.close()


def _no_database(file: Path) -> None:
    file.write_bytes(b"not a database " * 1000)


def _torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


def _other_table(file: Path) -> None:
    file.unlink()
    with sqlite3.connect(file) as cache:
        cache.execute("CREATE TABLE records (x INTEGER)")
    cache.close()


def _a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("spoil", [_flip_bodies, _swap, _no_database, _torn, _other_table, _a_folder])
def test_a_rewritten_cache_file_changes_nothing_but_the_number_of_reads(tmp_path: Path, spoil: object) -> None:
    store, _ = filled(tmp_path)
    right, _ = store.look()
    spoil(store.file)  # type: ignore[operator]
    catalog, reads = store.look()
    assert reads > 0
    assert repr(catalog.checkpoints) == repr(right.checkpoints)
    assert catalog.warnings == ()
    if spoil in (_flip_bodies, _swap, _no_database, _torn):  # mended by then
        store.look()
        assert store.look()[1] == 0


@pytest.mark.parametrize("folder", ["/proc/no-home", "file/below"])
def test_without_a_place_to_write_the_records_are_read_from_the_tiers(tmp_path: Path, folder: str) -> None:
    store, _ = filled(tmp_path)
    (tmp_path / "file").write_text("no folder")
    store.cache = tmp_path / folder
    assert [store.look()[1] for _ in range(2)] == [4, 4]


def test_a_cache_that_another_process_holds_is_not_waited_for(tmp_path: Path) -> None:
    store, attempts = filled(tmp_path)
    store.look()
    held = sqlite3.connect(store.file, isolation_level=None)
    held.execute("PRAGMA locking_mode = EXCLUSIVE")
    held.execute("BEGIN IMMEDIATE")  # another process writes just now, and for long: reading goes on, or is done without
    run(decisions.tag(store.tiers, attempts[0], ["good"], clock=CLOCK))
    catalog, _ = store.look()
    held.close()
    assert catalog.checkpoints[0].tags == ("good",)
    assert store.look()[1] <= 1


def test_what_could_not_be_kept_because_another_process_held_the_cache_is_kept_by_the_next_look(tmp_path: Path) -> None:
    store, attempts = filled(tmp_path)
    store.look()
    run(decisions.tag(store.tiers, attempts[0], ["good"], clock=CLOCK))
    cache = RecordCache(RecordStore(store.cache, "kit"))
    held = sqlite3.connect(store.file, isolation_level=None)
    held.execute("BEGIN IMMEDIATE")
    run(scan(store.tiers, "run", cache))
    held.close()
    run(scan(store.tiers, "run", cache))
    assert store.look()[1] == 0


def test_two_processes_fill_one_cache_at_once(tmp_path: Path) -> None:
    store, _ = filled(tmp_path)
    script = """
import asyncio, sys
from pathlib import Path
from tiers_kit import tiers_in
from tierstore.tiers.catalog import RecordCache, scan
from tierstore.tiers.record_store import RecordStore
for _ in range(10):
    catalog = asyncio.run(scan(tiers_in(Path(sys.argv[1])), "run", RecordCache(RecordStore(Path(sys.argv[2]), "kit"))))
    assert [c.pins for c in catalog.checkpoints] == [(), ("paper",), ()], catalog
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    children = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(store.cache)], env=env) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    assert store.look()[1] == 0


def test_verify_does_not_use_it(tmp_path: Path) -> None:
    store, _ = filled(tmp_path)
    store.look()
    store.reads.clear()
    run(verify(store.tiers, "run"))
    assert len(store.reads) >= 4


def test_sessions_share_it_and_it_lies_where_caches_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(env={"HOME": "/home/ada"}) == Path("/home/ada/.cache/tierstore")
    assert cache_folder(env={"HOME": "/home/ada", "XDG_CACHE_HOME": "/scratch"}) == Path("/scratch/tierstore")
    assert cache_folder(env={"HOME": "/home/ada", "XDG_CACHE_HOME": "relative"}) == Path("/home/ada/.cache/tierstore")
    assert cache_folder(env={}) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    config = load_config([tmp_path / "tier"], run="run")
    with Session.open(config) as session:
        attempt = session.run(save(session.tiers, 1))
        session.run(scan(session.tiers, "run", session.new_cache()))
        cache = session.new_cache()
        assert session.run(scan(session.tiers, "run", cache)).checkpoints[0].attempt == attempt
    (file,) = (tmp_path / "xdg" / "tierstore").iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
