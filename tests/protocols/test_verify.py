"""Verify: every kind of damage is found under its code, on the tier and file that has it, and nothing is touched."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tierstore.clock import SystemClock
from tierstore.errors import NotFoundError, TemporaryError
from tierstore.names import Attempt
from tierstore.testing.flows import HookedStorage, LoopSession, folder_tiers, new_attempt, save_job
from tierstore.tiers.findings import FINDING_KINDS, findings_markdown
from tierstore.tiers.jobs import WorkerOptions
from tierstore.tiers.log import append
from tierstore.tiers.tier import Scope
from tierstore.tiers.verify import VerifyReport, verify
from tierstore.tiers.worker import Worker

LAYOUT: dict[str, Scope] = {"nvme": "node", "pfs": "shared", "object": "shared"}
FAST = WorkerOptions(poll_s=0.01, retry_first_s=0.01, retry_most_s=0.05, patience_s=0.5)
SHARD = "shard-00000-of-00001.safetensors"


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Attempt]:
    """A store with one checkpoint of about 7 MB on all tiers."""
    attempt = new_attempt("r", 1)
    with LoopSession(folder_tiers(tmp_path, LAYOUT)) as session:
        worker = Worker(session, "r", options=FAST)
        worker.submit(save_job(attempt, nbytes=7_000_000))
        worker.close(30)
    return tmp_path, attempt


def check(root: Path, **options: object) -> VerifyReport:
    return asyncio.run(verify(folder_tiers(root, LAYOUT), "r", **options))  # type: ignore[arg-type]


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(root)): (p.stat().st_size, p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file()}


def flip(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def test_a_sound_store_has_no_findings_at_any_level(stored: tuple[Path, Attempt]) -> None:
    root, _ = stored
    before = snapshot(root)
    for level in ("quick", "sample", "full"):
        report = check(root, level=level)
        assert report.findings == ()
        assert report.exit_code == 0
        assert report.checkpoints == 3
    assert check(root, level="quick").nbytes_read == 0
    assert check(root, level="full").nbytes_read > 3 * 7_000_000
    assert snapshot(root) == before


@pytest.mark.parametrize(
    ("file", "harm", "code", "level"),
    [
        (SHARD, Path.unlink, "V101", "quick"),
        (SHARD, truncate, "V102", "quick"),
        (SHARD, flip, "V103", "full"),
        ("objects.json", flip, "V103", "full"),
        ("part-00000.safetensors", flip, "V103", "sample"),
        ("index.safetensors", flip, "V103", "quick"),
        ("manifest.json", flip, "V104", "quick"),
        ("manifest.json", Path.unlink, "V104", "quick"),
    ],
)
@pytest.mark.parametrize("tier", list(LAYOUT))
def test_damage_is_found_where_it_is(
    stored: tuple[Path, Attempt], tier: str, file: str, harm: Callable[[Path], None], code: str, level: str
) -> None:
    root, attempt = stored
    harm(root / tier / attempt.path(file))
    before = snapshot(root)
    report = check(root, level=level)
    assert [(f.code, f.tier, f.file, f.checkpoint) for f in report.findings] == [(code, tier, file, attempt.folder)]
    assert report.exit_code == 6
    assert report.findings[0].hint
    assert snapshot(root) == before
    others = [name for name in LAYOUT if name != tier]
    assert check(root, level=level, only=others).findings == ()


def test_a_bad_block_is_named_by_its_number(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    flip(root / "pfs" / attempt.path(SHARD), 5 * 2**20 + 17)
    assert check(root, level="quick").findings == ()
    (finding,) = check(root, level="full").findings
    assert "block 5 (bytes 5242880 to 6291456)" in finding.detail


def test_the_groups_of_a_sample_together_read_everything_once(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    flip(root / "object" / attempt.path(SHARD), 6 * 2**20)
    reports = [check(root, level="sample", subset=(k, 4), only=["object"]) for k in (1, 2, 3, 4)]
    assert sum(len(r.findings) for r in reports) == 1
    small = sum((root / "object" / attempt.path(name)).stat().st_size for name in ("objects.json", "part-00000.safetensors"))
    whole = (root / "object" / attempt.path(SHARD)).stat().st_size
    assert sum(r.nbytes_read - small for r in reports) == whole
    again = check(root, level="sample", subset=(1, 4), only=["object"])
    assert again.nbytes_read == reports[0].nbytes_read


def test_foreign_files_leftovers_and_incomplete_attempts_are_named_but_no_damage(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    (root / "pfs" / attempt.folder / "notes.txt").write_text("mine")
    code = (
        "import sys; from pathlib import Path; from tierstore.storage.temporaries import temporary_name\n"
        "p = Path(sys.argv[1]); p.mkdir(exist_ok=True); (p / temporary_name('write')).write_bytes(b'x')"
    )
    subprocess.run([sys.executable, "-c", code, str(root / "nvme" / ".tmp")], check=True, timeout=60)
    unfinished = new_attempt("r", 2)
    (root / "pfs" / unfinished.folder).mkdir(parents=True)
    (root / "pfs" / unfinished.path("shard-00000-of-00002.safetensors")).write_bytes(b"x")
    report = check(root)
    assert {(f.code, f.tier) for f in report.findings} == {("V106", "pfs"), ("V108", "nvme"), ("V107", "pfs")}
    assert report.exit_code == 0


def test_a_record_that_cannot_be_read_is_damage(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    flip(root / "pfs" / attempt.record_path(1), 0)
    report = check(root)
    assert "V105" in {f.code for f in report.findings}
    assert report.exit_code == 6


def test_a_lost_log_is_named(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    for path in (root / "pfs" / attempt.log_folder).iterdir():
        path.unlink()
    assert ("V110", "pfs") in {(f.code, f.tier) for f in check(root).findings}


def test_a_tier_that_does_not_answer_is_said_and_the_others_are_checked(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    flip(root / "nvme" / attempt.path(SHARD))
    tiers = folder_tiers(root, LAYOUT)
    storage = tiers.get("object").storage
    assert isinstance(storage, HookedStorage)

    async def down(operation: str, path: str) -> None:
        raise TemporaryError("connection refused")

    storage.hook = down
    report = asyncio.run(verify(tiers, "r", level="full"))
    assert {(f.code, f.tier) for f in report.findings} == {("V111", "object"), ("V103", "nvme")}


def test_a_copy_that_is_still_pending_is_a_note(tmp_path: Path) -> None:
    with LoopSession(folder_tiers(tmp_path, {"nvme": "node", "pfs": "shared"})) as session:
        worker = Worker(session, "r", options=FAST)
        worker.submit(save_job(new_attempt("r", 1)))
        worker.close(30)
    report = check(tmp_path)
    assert [(f.code, f.tier) for f in report.findings] == [("V112", "object")]
    assert report.exit_code == 0


def test_a_changed_server_checksum_is_found_without_a_download(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    tiers = folder_tiers(root, LAYOUT)

    async def run() -> VerifyReport:
        size = (root / "object" / attempt.path(SHARD)).stat().st_size
        files = {SHARD: {"nbytes": size, "etag": "", "checksum": "sha256:of-that-day"}}
        await append(tiers.authority.storage, attempt, "replicated", {"tier": "object", "files": files}, clock=SystemClock())
        storage = tiers.get("object").storage
        assert isinstance(storage, HookedStorage)
        inner = storage.inner.stat

        async def stat(path: str) -> object:
            from dataclasses import replace

            return replace(await inner(path), checksum="sha256:of-today")

        storage.inner.stat = stat  # type: ignore[method-assign,assignment]
        return await verify(tiers, "r")

    report = asyncio.run(run())
    assert [(f.code, f.tier, f.file) for f in report.findings] == [("V109", "object", SHARD)]
    assert report.nbytes_read == 0


def test_a_file_that_goes_while_verify_looks_is_a_finding_and_no_crash(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    tiers = folder_tiers(root, LAYOUT)

    async def run() -> VerifyReport:
        size = (root / "object" / attempt.path(SHARD)).stat().st_size
        files = {SHARD: {"nbytes": size, "etag": "x", "checksum": ""}}
        await append(tiers.authority.storage, attempt, "replicated", {"tier": "object", "files": files}, clock=SystemClock())
        storage = tiers.get("object").storage
        assert isinstance(storage, HookedStorage)

        async def hook(operation: str, path: str) -> None:
            if operation == "stat":
                raise NotFoundError(f"{path} is gone")

        storage.hook = hook
        return await verify(tiers, "r", only=["object"])

    report = asyncio.run(run())
    assert [(f.code, f.file) for f in report.findings] == [("V101", SHARD)]


def test_when_a_tier_fails_in_mid_verify_nothing_goes_on_behind_it(stored: tuple[Path, Attempt]) -> None:
    root, _ = stored
    tiers = folder_tiers(root, LAYOUT)
    storage = tiers.get("object").storage
    assert isinstance(storage, HookedStorage)
    running = 0

    async def hook(operation: str, path: str) -> None:
        nonlocal running
        if operation not in ("read", "read_into") or "/step-" not in path or path.endswith(("manifest.json", "index.safetensors")):
            return
        if path.endswith("objects.json"):
            raise TemporaryError("down")
        running += 1
        await asyncio.sleep(0.01)
        running -= 1

    async def run() -> None:
        storage.hook = hook
        report = await verify(tiers, "r", level="full", only=["object"])
        assert [f.code for f in report.findings] == ["V111"]
        assert running == 0

    asyncio.run(run())


def test_the_table_of_codes_is_the_reference_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "findings.md"
    assert page.read_text(encoding="utf-8") == findings_markdown()
    assert sorted(FINDING_KINDS) == list(FINDING_KINDS)
