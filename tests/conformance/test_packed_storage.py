"""PackedStorage keeps the contract for shards, that lie packed in a folder or a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
from packing_kit import ShardNames

from tierstore.storage.contract import Storage
from tierstore.storage.packed import PackedStorage, Packing
from tierstore.storage.posix import PosixStorage
from tierstore.storage.s3 import S3Storage
from tierstore.testing.conformance import StorageConformance
from tierstore.testing.servers import S3Server


class TestPackedInAFolder(StorageConformance):
    many = 12

    @pytest.fixture(autouse=True)
    def _new_processes_know_the_kit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))

    def make_storage(self, place: Path) -> Storage:
        return ShardNames(PackedStorage(PosixStorage(place / "root", durable=False), Packing(codec="raw")))

    def leftovers(self, place: Path) -> list[str]:
        return sorted(str(path) for path in (place / "root" / ".tmp").glob("*"))

    def test_says_what_it_is(self, tmp_path: Path) -> None:
        """As in the suite, but that nobody is told where a shard lies: it may be a packed file."""
        storage = self.make_storage(tmp_path)
        assert storage.uri == str(tmp_path / "root")
        assert storage.capabilities.local
        assert storage.local_path("a/b") is None


@pytest.mark.s3
class TestPackedInABucket:
    """A few rules of the suite: the others are of the storage below."""

    many = 6

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server, s3_bucket: str) -> None:
        self.server = s3_server
        self.bucket = s3_bucket.split("/")[2]

    def make_storage(self, place: Path) -> Storage:
        inner = S3Storage(f"s3://{self.bucket}/{place.name}", self.server.options(), part_nbytes=5 << 20)
        return ShardNames(PackedStorage(inner, Packing(codec="raw")))

    def leftovers(self, place: Path) -> list[str]:
        return []

    use = StorageConformance.use
    test_reads_ranges_exactly = StorageConformance.test_reads_ranges_exactly
    test_a_short_file_is_an_error_that_names_it = StorageConformance.test_a_short_file_is_an_error_that_names_it
    test_a_missing_file_is_named = StorageConformance.test_a_missing_file_is_named
    test_an_empty_file_is_a_file = StorageConformance.test_an_empty_file_is_a_file
    test_a_write_replaces_whole_files = StorageConformance.test_a_write_replaces_whole_files
    test_another_instance_sees_every_change_at_once = StorageConformance.test_another_instance_sees_every_change_at_once
    test_one_instance_serves_several_event_loops = StorageConformance.test_one_instance_serves_several_event_loops
    test_an_instance_in_use_works_after_a_fork = StorageConformance.test_an_instance_in_use_works_after_a_fork
