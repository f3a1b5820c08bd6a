"""Faults of files that somebody found by trying to break them; each has a test of its name."""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from files_kit import bytes_of, content, opened, store, stored, write

from tierstore.errors import AccessError, TemporaryError
from tierstore.storage.contract import FileInfo, Storage
from tierstore.tiers.files import looking
from tierstore.tiers.files.mover import Item
from tierstore.tiers.files.places import Mark
from tierstore.tiers.files.placing import FilePut


def unmount(folder: Path) -> Path:
    """What an unmounted disk leaves: an empty folder. Returns where its content is now."""
    away = folder.with_name("away")
    folder.rename(away)
    folder.mkdir()
    return away


def test_an_exclusive_create_claims_nothing_on_the_empty_mount_point_of_the_authority(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(store(tmp_path), drain=None) as (session, files):
        write(session, files, "first", bytes_of(1, 10))
        session.run(files.sync(120))
        unmount(tmp_path / "shared")
        with pytest.raises(AccessError, match="has lost its tierstore"):
            write(session, files, "new", bytes_of(2, 10), exclusive=True)
        assert list((tmp_path / "shared").iterdir()) == []
        assert "the next tier is tried" not in caplog.text
        assert stored(tmp_path / "node", ".json") == ["first@.json"]


def test_where_the_authority_is_an_empty_mount_point_the_further_tiers_are_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "_AWAY_S", 0.0)  # a look that fails slowly, on a machine that stands still, would put the next one off
    with opened(store(tmp_path)) as (session, files):
        write(session, files, "f", bytes_of(1, 9000))
    with opened(store(tmp_path, node="other"), drain=None) as (session, files):  # a node that has nothing of its own
        assert content(session, files, "f") == bytes_of(1, 9000)
        away = unmount(tmp_path / "shared")
        assert content(session, files, "f") == bytes_of(1, 9000)
        assert "tier=shared can't be asked for files: the further tiers are asked" in caplog.text
        shutil.rmtree(tmp_path / "shared")
        away.rename(tmp_path / "shared")
        assert content(session, files, "f") == bytes_of(1, 9000)
        assert "tier=shared answers again" in caplog.text


def test_not_each_look_waits_for_all_retries_of_an_authority_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "_SLOW_S", 0.0)  # the retries that fail below take no time
    down = Down()
    with opened(store(tmp_path), wrap={"shared": down.wrap}, drain=None) as (session, files):
        write(session, files, "f", bytes_of(1, 9000))
        session.run(files.sync(120))
        down.since, before = time.monotonic(), down.asked
        for _ in range(5):
            assert content(session, files, "f") == bytes_of(1, 9000)
        assert time.monotonic() - down.since > looking._AWAY_S or down.asked - before < 5  # the mover may ask too
        down.since = None
        monkeypatch.setattr(looking, "_AWAY_S", 0.0)
        before = down.asked
        assert content(session, files, "f") == bytes_of(1, 9000)
        assert down.asked > before


def test_a_foreign_name_that_no_path_has_is_not_listed_and_keeps_nobody_from_removing_the_rest(tmp_path: Path) -> None:
    with opened(store(tmp_path)) as (session, files):
        write(session, files, "f", bytes_of(1, 10))
        session.run(files.sync(120))
        entry = next((tmp_path / "shared" / ".files" / "f@").glob("*.json"))
        for name in ("%zz@", "%61@", "a@b@"):
            (tmp_path / "shared" / ".files" / name).mkdir()
            shutil.copy(entry, tmp_path / "shared" / ".files" / name)
        listed = [version.path for version in session.run(files.list())]
        assert listed == ["f"]
        session.run(files.remove(listed))
        assert session.run(files.list()) == []


def test_a_process_that_ends_at_once_leaves_no_copy_that_nobody_has_awaited(tmp_path: Path) -> None:
    gc.collect()  # what earlier tests have left is not told here
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")

        async def publish_and_end(files: Any) -> None:
            await files.put("f", bytes_of(1, 10))
            for number in range(6):  # the lanes begin, and end before what they began has begun
                await files._mover.close()
                mark = Mark(version=number + 1, save_id=f"{number:026d}")
                put = FilePut(path="g", is_folder=False, mark=mark, nbytes=0, kind="gone", document=b"{}")
                files._mover.add(Item(put=put, entry=None), files._tiers)
                await asyncio.sleep(0)

        with opened(store(tmp_path), drain=None) as (session, files):
            session.run(publish_and_end(files))
        gc.collect()
    assert not [str(one.message) for one in told if "never awaited" in str(one.message)]


class Down:
    """A storage that can be down, and counts who asks."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.asked = 0

    def wrap(self, storage: Storage) -> Storage:
        real = storage.list

        async def listed(place: str, *args: Any, **options: Any) -> Sequence[FileInfo]:
            self.asked += 1
            if self.since is not None:
                raise TemporaryError("it does not answer")
            return await real(place, *args, **options)

        storage.list = listed  # type: ignore[method-assign]
        return storage
