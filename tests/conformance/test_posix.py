"""The POSIX storage keeps every rule of the contract: on disk, in memory, with and without O_DIRECT."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierstore.storage.posix import PosixStorage
from tierstore.testing.conformance import StorageConformance

SHM = Path("/dev/shm")


class TestPosixOnDisk(StorageConformance):
    def make_storage(self, place: Path) -> PosixStorage:
        return PosixStorage(place / "root")

    def leftovers(self, place: Path) -> list[str]:
        return sorted(str(path) for path in (place / "root" / ".tmp").glob("*"))


class TestPosixThroughThePageCache(TestPosixOnDisk):
    def make_storage(self, place: Path) -> PosixStorage:
        return PosixStorage(place / "root", direct=False, threads=1, deadline_s=60)


@pytest.mark.skipif(not SHM.is_dir(), reason="/dev/shm, the tmpfs of every Linux, is not there")
class TestPosixInMemory(TestPosixOnDisk):
    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        place = Path(tempfile.mkdtemp(prefix="tierstore-test-", dir=SHM))
        yield place
        shutil.rmtree(place)

    def make_storage(self, place: Path) -> PosixStorage:
        return PosixStorage(place / "root", durable=False)
