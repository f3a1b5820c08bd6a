"""S3Storage keeps the contract: on a real server (SeaweedFS, or MinIO by TIERSTORE_TEST_S3), and on moto."""

from __future__ import annotations

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


class TestS3OnMoto(S3Conformance):
    @pytest.fixture(autouse=True)
    def _server(self, moto_server: MotoServer) -> None:
        self.server = moto_server
        self.bucket = moto_server.make_bucket("conformance")
