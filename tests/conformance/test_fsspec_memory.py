"""FsspecStorage keeps the contract on memory://, as far as a file system inside one process can, and on async s3fs over moto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest

from tierstore.storage.contract import Storage
from tierstore.storage.fsspec_storage import FsspecStorage
from tierstore.testing.conformance import StorageConformance
from tierstore.testing.servers import MotoServer


class TestFsspecMemory(StorageConformance):
    """memory:// is a dict of the process: create-if-absent has no one winner there, so that it is not claimed."""

    @pytest.fixture(autouse=True)
    def _empty(self) -> None:
        memory: Any = fsspec.filesystem("memory")
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]

    def make_storage(self, place: Path) -> Storage:
        return FsspecStorage(f"memory://{place.name}")

    def leftovers(self, place: Path) -> list[str]:
        memory: Any = fsspec.filesystem("memory")
        return [name for name in memory.store if "/.tmp/" in name]

    @pytest.mark.skip(reason="memory:// lives in one process: another process has a memory of its own")
    def test_a_pickled_instance_works_in_a_new_process(self, tmp_path: Path) -> None: ...

    @pytest.mark.skip(reason="memory:// lives in one process: what a forked child writes is the child's own")
    def test_an_instance_in_use_works_after_a_fork(self, tmp_path: Path) -> None: ...


class TestFsspecOverAsyncS3fs(StorageConformance):
    """The generic storage over an asynchronous file system; users get `S3Storage` for s3://."""

    many = 12

    @pytest.fixture(autouse=True)
    def _server(self, moto_server: MotoServer) -> None:
        self.server = moto_server
        self.bucket = moto_server.make_bucket("generic")

    @property
    def secrets(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.server.secret_key,)

    def make_storage(self, place: Path) -> Storage:
        options = {key: value for key, value in self.server.options().items() if key != "region_name"}
        return FsspecStorage(f"s3://{self.bucket}/{place.name}", {**options, "client_kwargs": {"region_name": "us-east-1"}})
