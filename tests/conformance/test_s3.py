"""S3Storage keeps the contract: on a real server (SeaweedFS, or MinIO by TIERSTORE_TEST_S3), and on moto."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tierstore.storage.contract import Storage
from tierstore.storage.s3 import S3Storage
from tierstore.testing.conformance import StorageConformance
from tierstore.testing.servers import MotoServer, S3Server


class S3Conformance(StorageConformance):
    """A prefix of its own for each test; unfinished uploads are what a failure could leave behind."""

    server: S3Server
    bucket: str

    def make_storage(self, place: Path) -> Storage:
        return S3Storage(f"s3://{self.bucket}/{place.name}", self.server.options())

    @property
    def secrets(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.server.secret_key,)

    def leftovers(self, place: Path) -> list[str]:
        client: Any = self.server._client()  # type: ignore[attr-defined]
        try:
            answer = client.list_multipart_uploads(Bucket=self.bucket, Prefix=f"{place.name}/")
            return [upload["Key"] for upload in answer.get("Uploads", ())]
        finally:
            client.close()


@pytest.mark.s3
class TestS3OnARealServer(S3Conformance):
    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server, s3_bucket: str) -> None:
        self.server = s3_server
        self.bucket = s3_bucket.split("/")[2]

    def test_deletes_what_is_named_and_nothing_else(self, tmp_path: Path) -> None:
        """As in the suite, but that SeaweedFS shows an emptied folder for a while longer: its name is only a hint."""

        async def body(storage: Storage) -> None:
            names = [f"run/step/{number:03d}" for number in range(self.many)]
            await asyncio.gather(*(storage.put(name, b"x") for name in [*names, "run/keep", "runner/keep"]))
            await storage.delete([])
            await storage.delete([*names, "run/step/missing", "nowhere/missing"])
            assert sorted(info.path for info in await storage.list()) == ["run/keep", "runner/keep"]
            level = await storage.children("run")
            assert [info.path for info in level.files] == ["run/keep"]
            assert level.folders in ((), ("step",))
            assert await storage.list("run/step") == []
            await storage.delete(names)
            await storage.put("run/step/000", b"again")
            assert await storage.read("run/step/000") == b"again"

        self.use(tmp_path, body)


_READING = (
    "reads",
    "short_file",
    "missing_file",
    "zero_length",
    "whole_files",
    "old_or_the_new",
    "event_loops",
    "pickled",
    "fork",
    "close",
)
"""What of the suite is about reading: all of it runs with ``--long``."""


@pytest.mark.s3
class TestS3ReadDirectlyOnARealServer(TestS3OnARealServer):
    """Large ranges beside s3fs; here every range is large."""

    @pytest.fixture(autouse=True)
    def _chosen(self, request: pytest.FixtureRequest, long_run: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if not long_run and not any(word in request.node.name for word in _READING):
            pytest.skip("of writing and listing, which s3fs does here too: runs with --long")
        monkeypatch.setattr("tierstore.storage.s3_direct._SMALL_NBYTES", 1)
        monkeypatch.setattr("tierstore.storage.s3_direct._LARGE_NBYTES", 1)

    def make_storage(self, place: Path) -> Storage:
        return S3Storage(f"s3://{self.bucket}/{place.name}", {**self.server.options(), "client": "direct"})


class TestS3OnMoto(S3Conformance):
    @pytest.fixture(autouse=True)
    def _server(self, moto_server: MotoServer) -> None:
        self.server = moto_server
        self.bucket = moto_server.make_bucket("conformance")
