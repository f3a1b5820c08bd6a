"""The real POSIX storage, recorded: no power failure tears or loses an acknowledged file, and a dropped fsync is found out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tierstore.errors import ConflictError
from tierstore.storage._syscalls import Syscalls
from tierstore.storage.posix import PosixStorage
from tierstore.testing.recording import CrashState, RecordingFs, crash_states, materialise

Scenario = Callable[[PosixStorage, RecordingFs], None]


class DroppingFs:
    """Passes everything on but the `nth` fsync of a file or folder (counted from 1)."""

    def __init__(self, inner: Syscalls, nth: int) -> None:
        self._inner = inner
        self._nth = nth
        self.count = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def _drops(self) -> bool:
        self.count += 1
        return self.count == self._nth

    def fsync(self, fd: int) -> None:
        if not self._drops():
            self._inner.fsync(fd)

    def fsync_folder(self, path: str) -> None:
        if not self._drops():
            self._inner.fsync_folder(path)


def _write(storage: PosixStorage, fs: RecordingFs) -> None:
    asyncio.run(storage.put("a/b/file", b"the first content"))
    fs.acknowledge("a/b/file=the first content")


def _replace(storage: PosixStorage, fs: RecordingFs) -> None:
    asyncio.run(storage.put("there", b"the newer, longer content"))
    fs.acknowledge("there=the newer, longer content")


def _create(storage: PosixStorage, fs: RecordingFs) -> None:
    asyncio.run(storage.create("run/.log/000000.json", b"committed by me"))
    fs.acknowledge("run/.log/000000.json=committed by me")


def _lose(storage: PosixStorage, fs: RecordingFs) -> None:
    """The winner has linked its record and gone no further when the loser is told about it."""
    root = storage.uri
    fs.mkdir(f"{root}/log")
    fd = fs.open(f"{root}/temporary", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    fs.pwrite(fd, memoryview(b"theirs"), 0)
    fs.fsync(fd)
    fs.close(fd)
    fs.link(f"{root}/temporary", f"{root}/log/record")
    with pytest.raises(ConflictError):
        asyncio.run(storage.create("log/record", b"my own"))
    fs.acknowledge("log/record=theirs")


def _delete(storage: PosixStorage, fs: RecordingFs) -> None:
    asyncio.run(storage.delete(["full/one", "full/two"]))
    fs.acknowledge("full/one=")
    fs.acknowledge("full/two=")


SCENARIOS: dict[str, Scenario] = {"write": _write, "replace": _replace, "create": _create, "lose": _lose, "delete": _delete}
LEGAL = {
    "there": {b"the old content", b"the newer, longer content"},
    "a/b/file": {b"the first content"},
    "run/.log/000000.json": {b"committed by me"},
    "log/record": {b"theirs"},
    "full/one": {b"1"},
    "full/two": {b"2"},
}


def _record(root: Path, scenario: Scenario, dropped: int = 0) -> tuple[RecordingFs, int]:
    (root / "full").mkdir(parents=True)
    (root / "there").write_bytes(b"the old content")
    (root / "full" / "one").write_bytes(b"1")
    (root / "full" / "two").write_bytes(b"2")
    fs = RecordingFs(root)
    counting = DroppingFs(fs, dropped)
    storage = PosixStorage(root, syscalls=counting)  # type: ignore[arg-type]
    scenario(storage, fs)
    asyncio.run(storage.close())
    return fs, counting.count


def _violations(state: CrashState, place: Path) -> Iterator[str]:
    """What the real storage finds wrong in a state."""
    materialise(state, place)
    storage = PosixStorage(place)

    async def look() -> dict[str, bytes]:
        try:
            return {info.path: await storage.read(info.path) for info in await storage.list()}
        finally:
            await storage.close()

    found = asyncio.run(look())
    for path, data in found.items():
        if path != "temporary" and data not in LEGAL[path]:
            yield f"torn {path}: {data!r}"
    for acknowledged in state.acknowledged:
        path, _, content = acknowledged.partition("=")
        if found.get(path, b"") != content.encode():
            yield f"lost {path}: {found.get(path)!r}"
    if "there" not in found:
        yield "lost there"


def _all_violations(fs: RecordingFs, tmp_path: Path) -> list[str]:
    found = []
    for number, state in enumerate(fs.crash_states()):
        assert not state.sampled
        found += _violations(state, tmp_path / "states" / str(number))
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_crash_state_is_torn_or_misses_what_was_acknowledged(tmp_path: Path, name: str) -> None:
    fs, fsyncs = _record(tmp_path / "root", SCENARIOS[name])
    assert fsyncs > 0
    states = list(fs.crash_states())
    assert len(states) >= 3
    assert any(state.acknowledged for state in states)
    assert _all_violations(fs, tmp_path) == []


NECESSARY = {"write": 4, "replace": 2, "create": 4, "delete": 1}
"""How many fsyncs each needs: the file's, and one for each folder up to the root."""


@pytest.mark.parametrize(("name", "dropped"), [(name, n) for name, count in NECESSARY.items() for n in range(1, count + 1)])
def test_any_dropped_fsync_is_found_out(tmp_path: Path, name: str, dropped: int) -> None:
    fs, fsyncs = _record(tmp_path / "root", SCENARIOS[name], dropped)
    assert fsyncs == NECESSARY[name]
    assert _all_violations(fs, tmp_path) != []


@pytest.mark.parametrize("dropped", [2, 3])
def test_a_loser_that_does_not_sync_the_winners_folders_is_found_out(tmp_path: Path, dropped: int) -> None:
    fs, fsyncs = _record(tmp_path / "root", _lose, dropped)
    assert fsyncs == 3  # its own temporary, whose durability matters to nobody, then the winner's folders
    assert _all_violations(fs, tmp_path) != []


def test_a_write_in_place_is_found_out(tmp_path: Path) -> None:
    def in_place(storage: PosixStorage, fs: RecordingFs) -> None:
        fd = fs.open(f"{storage.uri}/there", os.O_RDWR)
        fs.pwrite(fd, memoryview(b"the newer, longer content"), 0)
        fs.fsync(fd)
        fs.close(fd)

    fs, _ = _record(tmp_path / "root", in_place)
    assert any("torn there" in violation for violation in _all_violations(fs, tmp_path))


def test_several_writes_and_a_deletion_stay_enumerable(tmp_path: Path) -> None:
    fs = RecordingFs(tmp_path / "root")
    storage = PosixStorage(tmp_path / "root", syscalls=fs)

    async def main() -> None:
        for number in range(3):
            await storage.put(f"run/step/shard-{number}", b"%d" % number * 20)
            fs.acknowledge(f"shard-{number}")
        await storage.create("run/.log/000000", b"committed")
        fs.acknowledge("000000")
        await storage.create("run/.log/000001", b"swept")
        fs.acknowledge("000001")
        await storage.delete([f"run/step/shard-{number}" for number in range(3)])
        fs.acknowledge("deleted")
        await storage.close()

    asyncio.run(main())
    count = 0
    for state in fs.crash_states():
        count += 1
        assert not state.sampled
        if "000000" in state.acknowledged:
            assert state.files["run/.log/000000"] == b"committed"
        for number in range(3):
            shard = state.files.get(f"run/step/shard-{number}")
            assert shard in (None, b"%d" % number * 20)
            if f"shard-{number}" in state.acknowledged and "000001" not in state.acknowledged:
                assert shard is not None
            if "deleted" in state.acknowledged:
                assert shard is None
    assert count > 50


def test_too_many_states_are_sampled_and_say_so(tmp_path: Path) -> None:
    fs = RecordingFs(tmp_path / "root")
    for number in range(10):
        fs.close(fs.open(f"{tmp_path}/root/{number}", os.O_RDWR | os.O_CREAT | os.O_EXCL))
    states = list(crash_states(fs.ops, limit=100))
    assert any(state.sampled for state in states)
    assert max(sum(1 for state in states if state.after == after) for after in range(12)) <= 100
