"""open_storage picks the storage that a URI names, and answers each bad one with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tierstore.errors import ConfigError
from tierstore.storage.fsspec_storage import FsspecStorage
from tierstore.storage.opening import open_storage
from tierstore.storage.posix import PosixStorage
from tierstore.storage.s3 import S3Storage
from tierstore.storage.s3_options import parse_s3_options
from tierstore.storage.s3_upload import MAX_PARTS, MIB, part_nbytes_for


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    return dict(parse_s3_options(options, connections=1, connect_timeout_s=1, read_timeout_s=1).s3fs)


@pytest.mark.parametrize(
    ("uri", "kind"), [("/a/b", PosixStorage), ("file:///a/b", PosixStorage), ("s3://b/x", S3Storage), ("memory://x", FsspecStorage)]
)
def test_the_scheme_picks_the_storage(uri: str, kind: type) -> None:
    assert isinstance(open_storage(uri), kind)


def test_a_file_uri_may_hold_escapes(tmp_path: Path) -> None:
    assert open_storage((tmp_path / "a b").as_uri()).local_path("x") == tmp_path / "a b" / "x"


@pytest.mark.parametrize("uri", ["nope://x", "file://host/x", "s3:///x", "s3://key:canary@bucket/x", "s3://b/../x", "s3://b/a//c"])
def test_a_bad_uri_is_a_configuration_error_with_a_remedy(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_storage(uri)
    assert caught.value.hint
    assert "canary" not in str(caught.value)


def test_a_protocol_without_its_package_names_the_package() -> None:
    with pytest.raises(ConfigError) as caught:
        open_storage("gs://bucket/x")
    assert "gcsfs" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"endpont_url": "http://x"}, "endpoint_url"),
        ({"Key": "x"}, "key"),
        ({"client_kwargs": 3}, "client_kwargs"),
        ({"checksums": "yes"}, "auto"),
    ],
)
def test_a_bad_option_is_named_with_the_nearest_good_one(options: dict[str, Any], near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_storage("s3://b/x", options)
    assert near in str(caught.value)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "ftp://x", "http://key:canary@host:1", "http://host:port"])
def test_a_bad_endpoint_is_refused_without_being_shown(endpoint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_storage("s3://b/x", {"endpoint_url": endpoint})
    assert "canary" not in str(caught.value)


def test_the_endpoint_may_stand_on_top_or_in_client_kwargs() -> None:
    on_top = arguments({"endpoint_url": "http://h:1", "region_name": "eu-west-1"})
    within = arguments({"client_kwargs": {"endpoint_url": "http://h:1", "region_name": "eu-west-1"}})
    assert on_top == within
    assert on_top["endpoint_url"] == "http://h:1"


def test_the_addressing_style_is_passed_on() -> None:
    assert arguments({"addressing_style": "virtual"})["config_kwargs"]["s3"] == {"addressing_style": "virtual"}
    assert arguments({"addressing_style": "path"})["config_kwargs"]["s3"] == {"addressing_style": "path"}


@pytest.mark.parametrize("nbytes", [1, 8 * MIB, 80_000 * MIB, 80_000 * MIB + 1, 5 * 1024**4])
def test_parts_are_whole_mib_and_at_most_ten_thousand(nbytes: int) -> None:
    part = part_nbytes_for(nbytes, 8 * MIB)
    assert part >= 8 * MIB
    assert part % MIB == 0
    assert -(-nbytes // part) <= MAX_PARTS


def test_an_object_larger_than_s3_allows_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 TiB"):
        part_nbytes_for(5 * 1024**4 + 1, 8 * MIB)
