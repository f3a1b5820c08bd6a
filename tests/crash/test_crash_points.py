"""A process that dies at any named point loses nothing that it acknowledged, and leaves no half checkpoint (PROTOCOLS.md §9.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import Child, acknowledged, check_promises, events_of

from tierstore.crashpoints import CRASH_EXIT, CRASH_POINTS

S3_POINTS = [p for p in CRASH_POINTS if p.startswith("s3.")]
GC = ("expire.", "evict.", "sweep.", "orphan.", "delete.")
"""The points of the deletions: test_gc_crash_points.py."""
LOCAL_POINTS = [p for p in CRASH_POINTS if not p.startswith(("s3.", "files.", "bring.", "quantise.", "reference.", *GC))]
"""Those of files: tests/protocols/files/test_files_crash_points.py; of copies that loads bring nearer: tests/protocols/test_hydrate.py; of
quantised copies: tests/protocols/test_quantised_copies.py; of references: test_reference_crash_points.py."""


def local_tiers(tmp_path: Path) -> list[Any]:
    return [str(tmp_path / "node"), str(tmp_path / "shared"), {"name": "far", "uri": str(tmp_path / "far"), "scope": "shared"}]


def s3_tiers(tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any]) -> list[Any]:
    remote = {"name": "object", "uri": s3_bucket, "scope": "shared", "options": s3_options}
    return [str(tmp_path / "node"), str(tmp_path / "shared"), remote]


def crash_and_check(tiers: list[Any], point: str, nth: int, nbytes: int, errors: Path) -> None:
    child = Child(tiers, steps=3, sync=True, env={"TIERSTORE_CRASH_AT": f"{point}:{nth}"}, nbytes=nbytes, errors=errors)
    status, output = child.end(250)
    assert status == CRASH_EXIT, f"{point} was not passed {nth} times: {child.errors}"
    events = events_of(output)
    check_promises(tiers, acknowledged(events), acknowledged(events, "staged"), nbytes=nbytes)


@pytest.mark.parametrize("point", LOCAL_POINTS)
def test_a_crash_at_any_point_loses_nothing_acknowledged(point: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    for nth in range(1, 9) if pytestconfig.getoption("--long") else (2,):
        crash_and_check(local_tiers(tmp_path / str(nth)), point, nth, 3_000_000, tmp_path / "errors")


@pytest.mark.parametrize("point", S3_POINTS)
def test_a_crash_around_an_upload_loses_nothing_acknowledged(
    point: str, tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any]
) -> None:
    crash_and_check(s3_tiers(tmp_path, s3_bucket, s3_options), point, 1, 20_000_000, tmp_path / "errors")


def test_every_registered_point_is_reached(tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any]) -> None:
    log = tmp_path / "passed"
    tiers = s3_tiers(tmp_path, s3_bucket, s3_options)
    env = {"TIERSTORE_CRASH_LOG": str(log)}
    child = Child(tiers, steps=1, sync=True, env=env, nbytes=20_000_000, errors=tmp_path / "errors")
    status, _ = child.end(250)
    assert status == 0, child.errors
    assert {p for p in log.read_text().split() if not p.startswith(GC)} == {*S3_POINTS, *LOCAL_POINTS}
