"""Verify: every kind of damage is found under its code, on the tier and file that has it, and nothing is touched."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierstore.clock import SystemClock
from tierstore.config import load_config
from tierstore.errors import NotFoundError, TemporaryError
from tierstore.names import Attempt
from tierstore.storage.s3 import S3Storage
from tierstore.testing.flows import HookedStorage, LoopSession, folder_tiers, new_attempt, save_job
from tierstore.tiers.commit import commit
from tierstore.tiers.findings import FINDING_KINDS, findings_markdown, grouped, next_steps
from tierstore.tiers.jobs import WorkerOptions
from tierstore.tiers.log import append
from tierstore.tiers.persist import persist
from tierstore.tiers.promote import reconcile
from tierstore.tiers.repair import repair
from tierstore.tiers.session import Session
from tierstore.tiers.tier import Scope
from tierstore.tiers.verify import Level, VerifyReport, verify
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
        worker.close(200)
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
    subprocess.run([sys.executable, "-c", code, str(root / "nvme" / ".tmp")], check=True, timeout=200)
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
        worker.close(200)
    report = check(tmp_path)
    assert [(f.code, f.tier) for f in report.findings] == [("V112", "object")]
    assert report.exit_code == 0


@pytest.mark.parametrize(("level", "code"), [("quick", "V109"), ("full", "V119")])
def test_a_changed_server_checksum_is_found_without_a_download(stored: tuple[Path, Attempt], level: Level, code: str) -> None:
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
            return replace(await inner(path), checksum="sha256:of-today")

        storage.inner.stat = stat  # type: ignore[method-assign,assignment]
        return await verify(tiers, "r", level=level)

    report = asyncio.run(run())
    assert [(f.code, f.tier, f.file) for f in report.findings] == [(code, "object", SHARD)]
    assert (report.nbytes_read == 0) == (level == "quick")
    assert report.exit_code == (6 if level == "quick" else 0)


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


def append_all(root: Path, attempt: Attempt, *decisions: tuple[str, dict[str, object]]) -> None:
    async def decide() -> None:
        for kind, data in decisions:
            await append(folder_tiers(root, LAYOUT).authority.storage, attempt, kind, data, clock=SystemClock())

    asyncio.run(decide())


def codes(report: VerifyReport) -> list[tuple[str, str]]:
    return [(f.code, f.tier) for f in report.findings]


def test_neighbouring_bad_blocks_are_one_finding(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    for block in (1, 2, 3, 5):
        flip(root / "pfs" / attempt.path(SHARD), block * 2**20)
    found = check(root, level="full").findings
    assert [f.blocks for f in found] == [(1, 2, 3), (5,)]
    assert "blocks 1 to 3 (bytes 1048576 to 4194304)" in found[0].detail


def test_a_whole_copy_that_is_gone_is_one_finding(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    for tier in ("nvme", "object"):
        shutil.rmtree(root / tier / attempt.folder)
    report = check(root)
    assert codes(report) == [("V113", "nvme"), ("V113", "object")]
    assert next_steps(report.findings)[0][0] == "tierstore repair"


def test_what_was_dropped_is_no_finding_and_what_was_left_of_it_is_a_note(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    append_all(root, attempt, ("evicting", {"tier": "object"}))
    assert codes(check(root)) == [("V117", "object")]
    append_all(root, attempt, ("evicted", {"tier": "object"}))
    assert codes(check(root)) == [("V116", "object")]
    shutil.rmtree(root / "object" / "r")
    assert check(root, level="full").findings == ()


def test_what_a_deletion_left_is_a_note(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    append_all(root, attempt, ("swept", {}))
    report = check(root, level="full")
    assert codes(report) == [("V116", tier) for tier in LAYOUT]
    assert report.exit_code == 0
    assert next_steps(report.findings) == []


def test_a_quarantined_file_is_named_until_its_copy_is_recorded_anew(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    append_all(root, attempt, ("quarantined", {"tier": "object", "file": SHARD, "detail": ""}))
    assert codes(check(root)) == [("V115", "object")]
    assert "good now" in check(root, level="full").findings[0].detail


def test_a_commit_record_that_no_tier_can_read_is_damage_and_no_open_attempt(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    for tier in LAYOUT:
        flip(root / tier / attempt.record_path(0), 0)
    report = check(root)
    assert [(f.code, f.file) for f in report.findings] == [("V105", attempt.record_path(0))]
    assert report.exit_code == 6


def test_each_record_that_cannot_be_read_is_named(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    append_all(root, attempt, ("pinned", {"name": "a"}), ("pinned", {"name": "b"}))
    flip(root / "pfs" / attempt.record_path(1), 0)
    (root / "pfs" / attempt.record_path(2)).unlink()
    assert [f.file for f in check(root).findings] == [attempt.record_path(1), attempt.record_path(2)]


def test_lost_logs_are_one_line_with_all_steps(tmp_path: Path) -> None:
    with LoopSession(folder_tiers(tmp_path, LAYOUT)) as session:
        worker = Worker(session, "r", options=FAST)
        for step in (1, 2, 3):
            worker.submit(save_job(new_attempt("r", step)))
        worker.close(200)
    shutil.rmtree(tmp_path / "pfs")
    report = check(tmp_path)
    assert codes(report) == [("V110", "pfs")] * 3
    assert report.exit_code == 6
    ((finding, steps),) = grouped(report.findings)
    assert (finding.code, steps) == ("V110", (1, 2, 3))
    assert [command for command, _ in next_steps(report.findings)] == ["tierstore recover"]


def test_a_copy_that_is_dropped_while_it_is_looked_at_is_no_damage(stored: tuple[Path, Attempt]) -> None:
    root, attempt = stored
    tiers = folder_tiers(root, LAYOUT)
    storage = tiers.get("object").storage
    assert isinstance(storage, HookedStorage)

    async def evict(operation: str, path: str) -> None:
        if operation == "children" and path == attempt.folder:
            await append(tiers.authority.storage, attempt, "evicting", {"tier": "object"}, clock=SystemClock())
            shutil.rmtree(root / "object" / attempt.folder)

    storage.hook = evict
    assert asyncio.run(verify(tiers, "r")).findings == ()


def test_a_tier_that_goes_down_is_not_asked_for_every_checkpoint(tmp_path: Path) -> None:
    with LoopSession(folder_tiers(tmp_path, LAYOUT)) as session:
        worker = Worker(session, "r", options=FAST)
        for step in range(12):
            worker.submit(save_job(new_attempt("r", step), nbytes=1000))
        worker.close(200)
    tiers = folder_tiers(tmp_path, LAYOUT)
    storage = tiers.get("object").storage
    assert isinstance(storage, HookedStorage)
    asked = 0

    async def down(operation: str, path: str) -> None:
        nonlocal asked
        if operation == "children" and "/step-" in path:
            asked += 1
            raise TemporaryError("connection refused")

    storage.hook = down
    report = asyncio.run(verify(tiers, "r"))
    assert {f.code for f in report.findings} == {"V111"}
    assert asked <= 4
    assert any(f.detail.startswith(f"{12 - asked} more checkpoints") for f in report.findings)


@pytest.mark.parametrize("files", [1, 3])
def test_so_many_files_are_read_at_once(tmp_path: Path, files: int) -> None:
    attempt = new_attempt("r", 1)
    with LoopSession(folder_tiers(tmp_path, LAYOUT)) as session:
        for rank in range(4):
            job = save_job(attempt, rank=rank, world_size=4, nbytes=100_000)
            facts = {"shard": job.shard, "tensors": job.tensors, "objects": job.objects, "facts": job.facts, "clock": SystemClock()}
            session.run(persist(session.tiers.authority, attempt, rank=rank, world_size=4, authority=True, **facts))  # type: ignore[arg-type]
        session.run(commit(session.tiers, attempt, deadline_s=0, clock=SystemClock()))
    tiers = folder_tiers(tmp_path, LAYOUT)
    storage = tiers.authority.storage
    assert isinstance(storage, HookedStorage)
    running, most = 0, 0
    full = asyncio.Event()

    async def count(operation: str, path: str) -> None:
        nonlocal running, most
        if operation == "read_into":
            running += 1
            most = max(most, running)
            if running >= files:
                full.set()
            try:
                await asyncio.wait_for(full.wait(), timeout=120)  # whoever reads waits until as many read as may
            except asyncio.TimeoutError:
                pytest.fail(f"only {running} of {files} files are read at once")
            for _ in range(20):  # and lets one more come that must not
                await asyncio.sleep(0)
            running -= 1

    storage.hook = count
    asyncio.run(verify(tiers, "r", level="full", files_in_flight=files, only=["pfs"]))
    assert most == files


def test_who_reads_payload_holds_a_lease_and_a_quick_look_writes_nothing(stored: tuple[Path, Attempt]) -> None:
    root, _ = stored

    def leases(level: str, **options: object) -> set[int]:
        tiers = folder_tiers(root, LAYOUT)
        storage = tiers.get("object").storage
        assert isinstance(storage, HookedStorage)
        seen = set()

        async def look(operation: str, path: str) -> None:
            if path.endswith("manifest.json"):
                seen.add(len(list((root / "pfs" / "r" / ".leases").rglob("*.json"))))

        storage.hook = look
        asyncio.run(verify(tiers, "r", level=level, **options))  # type: ignore[arg-type]
        return seen

    assert leases("quick") == {0}
    assert leases("full") == {1}
    assert leases("full", leases=False) == {0}
    assert not list((root / "pfs" / "r" / ".leases").rglob("*.json"))


@pytest.mark.s3
def test_what_the_server_said_at_the_commit_proves_the_authority_and_repair_says_it_anew(
    tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any]
) -> None:
    """The authority is a bucket: its shards are compared by HEAD, and the mended object's new facts are recorded."""
    config = load_config({"version": 1, "tiers": [str(tmp_path / "nvme"), {"name": "s3", "uri": s3_bucket, "options": s3_options}]})
    clock, attempt = SystemClock(), new_attempt("r", 1)
    with Session.open(config) as session:
        tiers, storage = session.tiers, session.tiers.authority.storage
        assert not storage.capabilities.local
        job = save_job(attempt, nbytes=3_000_000)
        for tier, decides in ((tiers.nearest, False), (tiers.authority, True)):
            session.run(
                persist(tier, attempt, rank=0, world_size=1, shard=job.shard, tensors=job.tensors, objects=job.objects, facts=job.facts,
                        clock=clock, authority=decides)
            )  # fmt: skip
        record = session.run(commit(tiers, attempt, deadline_s=0, clock=clock))
        session.run(reconcile(tiers, "r", clock=clock))
        assert record.data["files"][SHARD]["etag"]
        assert session.run(verify(tiers, "r")).findings == ()
        data = bytearray(session.run(storage.read(attempt.path(SHARD))))
        data[2**20] ^= 1
        session.run(storage.put(attempt.path(SHARD), bytes(data)))
        quick = session.run(verify(tiers, "r"))
        assert (codes(quick), quick.nbytes_read) == ([("V109", "s3")], 0)
        assert codes(session.run(verify(tiers, "r", level="full"))) == [("V103", "s3")]
        report = session.run(repair(tiers, "r", clock=clock, level="quick"))
        assert [(m.tier, m.file, m.blocks, m.sources) for m in report.mended] == [("s3", SHARD, (1,), ("node",))]
        assert session.run(verify(tiers, "r", level="full")).findings == ()
        assert isinstance(storage, S3Storage)
        key = f"{s3_bucket.split('/', 3)[3]}/{attempt.path('big')}"
        session.run(storage._requests.send("starting", key, "create_multipart_upload", Key=key))
        assert session.run(verify(tiers, "r")).findings == ()
        found = session.run(verify(replace(tiers, upload_grace_s=-60.0), "r")).findings
        assert [(f.code, f.file) for f in found if f.code == "V118"] == [("V118", attempt.path("big"))]
        assert session.run(storage.stale_uploads(-60.0)) == [attempt.path("big")]
