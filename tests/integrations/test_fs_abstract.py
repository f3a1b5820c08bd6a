"""fsspec's own abstract suites on the ``tier://`` file system: over local tiers, and with an S3 tier behind a local one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from fs_kit import file_system, two_tiers
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)

from tierstore.fs.filesystem import TierFileSystem
from tierstore.testing.servers import S3Server


class TierFixtures(AbstractFixtures):
    """Each test in a folder of its own."""

    @pytest.fixture
    def fs_path(self) -> str:
        return f"/{secrets.token_hex(4)}"


@pytest.fixture(scope="module")
def local_tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierFileSystem]:
    with file_system(*two_tiers(tmp_path_factory.mktemp("tiers"))) as fs:
        yield fs


@pytest.fixture(scope="module")
def s3_tier(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server, _s3_bucket_name: str) -> Iterator[TierFileSystem]:
    bucket = f"s3://{_s3_bucket_name}/{secrets.token_hex(8)}"
    with file_system(tmp_path_factory.mktemp("tiers") / "node", {"uri": bucket, "options": s3_server.options()}) as fs:
        yield fs


class LocalTiers(TierFixtures):
    @pytest.fixture
    def fs(self, local_tiers: TierFileSystem) -> TierFileSystem:
        return local_tiers


@pytest.mark.s3
class S3Tier(TierFixtures):
    @pytest.fixture
    def fs(self, s3_tier: TierFileSystem) -> TierFileSystem:
        return s3_tier


class TestCopyLocally(LocalTiers, AbstractCopyTests):
    pass


class TestGetLocally(LocalTiers, AbstractGetTests):
    pass


class TestPutLocally(LocalTiers, AbstractPutTests):
    pass


class TestOpenLocally(LocalTiers, AbstractOpenTests):
    pass


class TestPipeLocally(LocalTiers, AbstractPipeTests):
    pass


class TestCopyWithS3(S3Tier, AbstractCopyTests):
    pass


class TestGetWithS3(S3Tier, AbstractGetTests):
    pass


class TestPutWithS3(S3Tier, AbstractPutTests):
    pass


class TestOpenWithS3(S3Tier, AbstractOpenTests):
    pass


class TestPipeWithS3(S3Tier, AbstractPipeTests):
    pass
