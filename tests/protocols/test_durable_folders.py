"""A file costs the fsyncs that its durability needs, and no more: a folder whose name is durable is not asked for again while it stands."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierstore
from tierstore.storage._folders import DurableFolders
from tierstore.storage._syscalls import OsSyscalls
from tierstore.storage.posix import PosixStorage
from tierstore.testing.recording import RecordingFs, materialise


class Syncs(OsSyscalls):
    """Notes what is synced: folders by their path, files as ``file``."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self.made.append("file")

    def fsync_folder(self, path: str) -> None:
        super().fsync_folder(path)
        self.made.append(path)

    def take(self) -> list[str]:
        made, self.made = self.made, []
        return made


def test_the_folders_above_are_synced_once_while_they_stand(tmp_path: Path) -> None:
    syscalls = Syncs()
    root = str(tmp_path)

    async def main() -> None:
        storage = PosixStorage(tmp_path, syscalls=syscalls)
        await storage.put("run/step/one", b"x")
        assert syscalls.take() == ["file", f"{root}/run/step", f"{root}/run", root]
        await storage.put("run/step/two", b"x")
        await storage.create("run/step/three", b"x")
        assert syscalls.take() == ["file", f"{root}/run/step"] * 2
        await storage.put("run/other/one", b"x")
        assert syscalls.take() == ["file", f"{root}/run/other", f"{root}/run"]
        await storage.close()

    asyncio.run(main())


def test_a_folder_that_was_made_anew_behind_our_back_is_synced_with_all_above_it(tmp_path: Path) -> None:
    syscalls = Syncs()

    async def main() -> None:
        storage = PosixStorage(tmp_path, syscalls=syscalls)
        await storage.put("run/step/one", b"x")
        await storage.put("run/step/one", b"y")
        for remade in ("run/step", "run"):  # on ext4 the new folder would have the old one's number
            (tmp_path / "run/step/one").unlink()
            (tmp_path / "run/step").rmdir()
            if remade == "run":
                (tmp_path / "run").rmdir()
            (tmp_path / "run/step").mkdir(parents=True)
            syscalls.take()
            await storage.put("run/step/one", b"x")
            above = [f"{tmp_path}/run", str(tmp_path)][: 1 if remade == "run/step" else 2]
            assert syscalls.take() == ["file", f"{tmp_path}/run/step", *above]
        await storage.close()

    asyncio.run(main())


def _violations(root: Path, states: Path) -> Iterator[str]:
    """What power failures can take of a file whose folder another process removed and made anew, and did not sync."""
    root.mkdir()
    fs = RecordingFs(root)
    storage = PosixStorage(root, syscalls=fs)

    async def main() -> None:
        await storage.put("run/step/file", b"first")
        fs.unlink(f"{root}/run/step/file")
        fs.rmdir(f"{root}/run/step")
        fs.mkdir(f"{root}/run/step")
        await storage.put("run/step/file", b"second")
        fs.acknowledge("second")
        await storage.put("run/step/more", b"third")
        fs.acknowledge("third")
        await storage.close()

    asyncio.run(main())
    for number, state in enumerate(fs.crash_states()):
        materialise(state, states / str(number))
        for name, content in (("file", "second"), ("more", "third")):
            found = states / str(number) / "run" / "step" / name
            if content in state.acknowledged and not (found.exists() and found.read_text() == content):
                yield f"{name} is lost after {state.after}"


def test_what_was_acknowledged_survives_a_power_failure_in_a_folder_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(_violations(tmp_path / "root", tmp_path / "states")) == []
    monkeypatch.setattr(DurableFolders, "has", lambda self, path: path in self._held)
    assert list(_violations(tmp_path / "root2", tmp_path / "states2")), "who trusts the path alone is found out"


def test_few_folders_are_held_open_and_none_after_close(tmp_path: Path) -> None:
    def held() -> int:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(os.path.lexists(link) and os.readlink(link).startswith(str(tmp_path)) for link in links)

    async def main() -> None:
        storage = PosixStorage(tmp_path)
        for number in range(20):
            await storage.put(f"run/step-{number}/file", b"x")
        assert 0 < held() <= 16
        copy = pickle.loads(pickle.dumps(storage))  # noqa: S301 - our own
        await copy.put("run/step-0/file", b"y")
        await copy.close()
        await storage.close()
        assert held() == 0

    asyncio.run(main())


def test_a_save_on_one_tier_of_the_disk_costs_six_fsyncs_of_files_and_eight_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard, part, objects, index, manifest, record: each its own and its folder's; and the run's and the log's for what is new there."""
    syscalls = Syncs()
    monkeypatch.setattr("tierstore.storage.posix.OsSyscalls", lambda: syscalls)
    with tierstore.open({"run": "r", "tiers": [{"name": "disk", "uri": str(tmp_path), "scope": "shared"}]}) as store:
        store.save(1, {"w": torch.zeros(10)}).wait("durable")
        syscalls.take()
        store.save(2, {"w": torch.zeros(10)}).wait("durable")
        made = syscalls.take()
    step = next(str(path) for path in (tmp_path / "r").glob("step-0000000002-*"))
    log = str(tmp_path / "r" / ".log")
    assert [path.replace(os.path.basename(step), "S") for path in made] == [
        *["file", f"{tmp_path}/r/S", f"{tmp_path}/r"],
        *["file", f"{tmp_path}/r/S"] * 4,
        *["file", f"{log}/S", log],
    ]
