"""A process dies at each crash point of files: readers see the old or the new, never half; the next process carries on and tidies up."""

from __future__ import annotations

from pathlib import Path

import pytest
from files_kit import bytes_of, child, content, opened, store, stored

from tierstore.config import load_config
from tierstore.crashpoints import CRASH_EXIT, CRASH_POINTS
from tierstore.tiers.files.syncing import sync_files
from tierstore.tiers.session import Session

POINTS = [point for point in CRASH_POINTS if point.startswith("files.")]
LATER = ("after-data", "before-entry", "before-clean")
"""Those that are passed on further tiers too: there a process dies as well."""
SIZE = 30_000

# Room for two files on the node, so that the third one evicts. What was acknowledged is printed at once.
WORK = """
import sys
from pathlib import Path
from files_kit import *

config = store(Path(sys.argv[1]))
config["tiers"][0]["capacity"] = "100KiB"
with opened(config) as (session, files):
    def done(what):
        session.run(files.sync(120))
        print(what, flush=True)

    write(session, files, "f", bytes_of(1, 30_000)); print("f1", flush=True)
    write(session, files, "f", bytes_of(2, 30_000)); print("f2", flush=True)
    done("synced")
    write(session, files, "new", bytes_of(3, 30_000), exclusive=True); print("new", flush=True)
    done("synced")
    write(session, files, "third", bytes_of(4, 50_000)); print("third", flush=True)
    session.run(files.remove(["f"])); print("removed", flush=True)
    done("end")
"""


def check(session: Session, files: object, acked: set[str]) -> dict[str, bytes | None]:
    """What a reader sees: nothing half, and nothing less than what was acknowledged."""
    seen = {path: content(session, files, path) for path in ("f", "new", "third")}  # type: ignore[arg-type]
    assert seen["f"] in {b"", bytes_of(1, SIZE), bytes_of(2, SIZE), None}
    assert seen["new"] in {bytes_of(3, SIZE), None}
    assert seen["third"] in {bytes_of(4, 50_000), None}
    if "removed" in acked:
        assert seen["f"] is None
    elif "third" not in acked:  # else the removal may have been under way
        possible = [bytes_of(2, SIZE)] if "f2" in acked else [bytes_of(1, SIZE), bytes_of(2, SIZE)]
        assert seen["f"] in (possible if "f1" in acked else [None, bytes_of(1, SIZE)])
    if "new" in acked:
        assert seen["new"] is not None
    if "third" in acked:
        assert seen["third"] is not None
    return seen


@pytest.mark.parametrize(("point", "nth"), [*((point, 1) for point in POINTS), *((f"files.{name}", 4) for name in LATER)])
def test_death_at_a_crash_point_leaves_the_old_or_the_new(tmp_path: Path, point: str, nth: int) -> None:
    status, output = child(WORK, str(tmp_path), env={"TIERSTORE_CRASH_AT": f"{point}:{nth}"})
    acked = set(output.split()) if status == CRASH_EXIT else set()
    if nth == 1:
        assert status == CRASH_EXIT, output
    else:
        assert status in (CRASH_EXIT, 0), output
        acked = set(output.split())
    config = store(tmp_path)
    with opened(config, drain=None) as (session, files):
        before = check(session, files, acked)
    with Session.open(load_config(config)) as session:
        report = session.run(sync_files(session), 60)
    assert not report.failed
    assert not report.left
    with opened(config) as (session, files):
        after = check(session, files, acked)
        assert after == before
        live = {path for path, data in after.items() if data is not None}
    for tier in ("shared", "far"):  # each tier alone has what is there, and no more but claims and tombstones
        with opened(store(tmp_path, tiers=[tier])) as (session, files):
            assert {path: content(session, files, path) for path in after} == after
        assert sorted(stored(tmp_path / tier, ".json")) == sorted(f"{path}@.json" for path in live)
    with opened(config) as (session, files):
        session.run(files.put("f", b"again"))
        assert content(session, files, "f") == b"again"
