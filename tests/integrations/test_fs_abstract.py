"""fsspec's own abstract suites on the ``tier://`` file system: over local tiers, and with an S3 tier behind a local one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

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
from fsspec.tests.abstract.common import GLOB_EDGE_CASES_TESTS

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


QUICK_ON_S3 = (
    "test_copy_directory_to_new_directory",
    "test_copy_list_of_files_to_existing_directory",
    "test_get_directory_to_new_directory",
    "test_get_list_of_files_to_new_directory",
    "test_put_directory_to_existing_directory",
    "test_put_file_to_new_directory",
    "test_put_list_of_files_to_new_directory",
    "test_open_exclusive",
    "test_pipe_exclusive",
)
"""Each request to S3 costs milliseconds of a CPU: these tell whether listings, writes and removals work there as on folders."""


class S3Tier(TierFixtures):
    @pytest.fixture
    def fs(self, s3_tier: TierFileSystem) -> TierFileSystem:
        return s3_tier


def globs(every: int, long_run: bool) -> Iterator[tuple[Any, ...]]:
    """The suites' cases of globs: all of them in a long run, else each n-th."""
    yield from GLOB_EDGE_CASES_TESTS["argvalues"][:: 1 if long_run else every]


class TestCopyLocally(LocalTiers, AbstractCopyTests):
    every = 10

    def test_copy_glob_edge_cases(  # the suite has them as parameters, each with a set-up of its own
        self, long_run: bool, fs: Any, fs_join: Any, fs_glob_edge_cases_files: str, fs_target: str, fs_sanitize_path: Any
    ) -> None:
        for case in globs(self.every, long_run):
            super().test_copy_glob_edge_cases(*case, fs, fs_join, fs_glob_edge_cases_files, fs_target, fs_sanitize_path)


class TestGetLocally(LocalTiers, AbstractGetTests):
    every = 10

    def test_get_glob_edge_cases(
        self,
        long_run: bool,
        fs: Any,
        fs_join: Any,
        fs_glob_edge_cases_files: str,
        local_fs: Any,
        local_join: Any,
        local_target: str,
    ) -> None:
        for case in globs(self.every, long_run):
            super().test_get_glob_edge_cases(*case, fs, fs_join, fs_glob_edge_cases_files, local_fs, local_join, local_target)


class TestPutLocally(LocalTiers, AbstractPutTests):
    every = 10

    def test_put_glob_edge_cases(
        self,
        long_run: bool,
        fs: Any,
        fs_join: Any,
        fs_target: str,
        local_glob_edge_cases_files: str,
        local_join: Any,
        fs_sanitize_path: Any,
    ) -> None:
        for case in globs(self.every, long_run):
            super().test_put_glob_edge_cases(*case, fs, fs_join, fs_target, local_glob_edge_cases_files, local_join, fs_sanitize_path)


class TestOpenLocally(LocalTiers, AbstractOpenTests):
    pass


class TestPipeLocally(LocalTiers, AbstractPipeTests):
    pass


def on_s3(*suites: type) -> type:
    """The suites over S3: with TIERSTORE_TEST_LONG=1 all of them, else `QUICK_ON_S3`."""
    whole = os.environ.get("TIERSTORE_TEST_LONG", "") not in ("", "0")
    chosen = {n: getattr(s, n) for s in suites for n in dir(s) if n.startswith("test_") and (whole or n in QUICK_ON_S3)}
    assert len(chosen) >= len(QUICK_ON_S3)
    return type("TestWithS3", (S3Tier,), chosen)


TestWithS3 = pytest.mark.s3(on_s3(AbstractCopyTests, AbstractGetTests, AbstractPutTests, AbstractOpenTests, AbstractPipeTests))
