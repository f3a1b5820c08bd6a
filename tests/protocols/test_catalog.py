"""The catalog: what exists is what the logs say, whatever else lies in the folders (PROTOCOLS.md §2)."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiers_kit import (
    Hooked,
    SteppedClock,
    attempt_at,
    copy_to,
    failing,
    path_of,
    persist_rank,
    run,
    save,
    tiers_in,
)

from tierstore.errors import AccessError, IntegrityError, NotFoundError, TemporaryError, TierStoreError, UsageError
from tierstore.names import MANIFEST, Attempt, Reference, parse_reference, shard_name
from tierstore.storage.contract import FileInfo, Listing, Storage
from tierstore.testing.faults import FaultPlan, FaultStorage
from tierstore.tiers.catalog import RecordCache, runs, scan
from tierstore.tiers.commit import commit
from tierstore.tiers.log import append, decide_fate
from tierstore.tiers.tier import Tiers

CLOCK = SteppedClock()


def add(tiers: Tiers, attempt: Attempt, kind: str, **data: object) -> None:
    run(append(tiers.authority.storage, attempt, kind, data, clock=CLOCK))


def latest_step(tiers: Tiers) -> int | None:
    found = run(scan(tiers, "run")).latest()
    return found.step if found else None


def test_steps_are_numbers_and_file_times_are_not_looked_at(tmp_path: Path) -> None:
    """CASES 23, 25: 1000 is later than 999 and 9, whatever the folders' times say."""
    tiers = tiers_in(tmp_path)
    for age, step in enumerate((1000, 9, 999)):
        attempt = run(save(tiers, step))
        for path in (tmp_path / "shared" / attempt.folder, tmp_path / "shared" / attempt.log_folder):
            os.utime(path, (10**9 + age * 1000, 10**9 + age * 1000))
    catalog = run(scan(tiers, "run"))
    assert [c.step for c in catalog.checkpoints] == [9, 999, 1000]
    assert latest_step(tiers) == 1000


def test_no_pointer_is_needed_and_a_wrong_one_does_no_harm(tmp_path: Path) -> None:
    """CASES 8, 19."""
    tiers = tiers_in(tmp_path)
    run(save(tiers, 5))
    (tmp_path / "shared/run/latest").write_text("99")
    catalog = run(scan(tiers, "run"))
    assert latest_step(tiers) == 5
    assert catalog.foreign == ("shared:run/latest",)


def test_names_that_are_not_ours_are_ignored_and_listed(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5))
    for name in ("step-5", "step-0000000009-not-a-save-id", "notes"):
        (tmp_path / "shared/run" / name).mkdir()
        (tmp_path / "shared/run" / name / "x").write_text("x")
    log_folder = tmp_path / "shared" / attempt.log_folder
    for leaf in ("000000.json.tmp", "1.json", "receipt-x.json"):
        (log_folder / leaf).write_text("{}")
    (tmp_path / "shared/run/.log/other").mkdir()
    (tmp_path / "shared/run/.log/other/000000.json").write_text("{}")
    catalog = run(scan(tiers, "run"))
    assert [c.attempt for c in catalog.checkpoints] == [attempt]
    assert catalog.foreign == tuple(
        sorted(
            [
                "shared:run/step-5",
                "shared:run/step-0000000009-not-a-save-id",
                "shared:run/.log/other/000000.json",
                *(f"shared:{attempt.log_folder}/{leaf}" for leaf in ("000000.json.tmp", "1.json", "receipt-x.json")),
            ]
        )
    )


def test_replicas_are_seen_on_every_tier(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5))
    run(copy_to(tiers, attempt, "far"))
    run(copy_to(tiers, attempt, "node", record=False))
    info = run(scan(tiers, "run")).find(5)
    assert info is not None
    assert info.replicas == {"node": "partial", "shared": "complete", "far": "complete"}
    assert info.complete_on == ("shared", "far")


def test_a_node_that_holds_only_its_own_ranks_is_not_a_complete_copy(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = attempt_at(5)
    run(persist_rank(tiers, attempt, tiers.nearest, rank=1, world_size=2))
    run(save(tiers, 5, world_size=2, attempt=attempt))
    info = run(scan(tiers, "run")).find(5)
    assert info is not None
    assert (info.replicas["node"], info.receipts) == ("receipt", {"node": (1,)})
    node, shared = tiers.nearest.storage, tiers.authority.storage
    for path in (attempt.path(MANIFEST), attempt.record_path(0)):  # documented, but still one rank of two
        run(node.put(path, run(shared.read(path))))
    info = run(scan(tiers, "run")).find(5)
    assert info is not None
    assert info.replicas["node"] == "receipt"
    run(persist_rank(tiers, attempt, tiers.nearest, rank=0, world_size=2))
    info = run(scan(tiers, "run")).find(5)
    assert info is not None
    assert info.replicas["node"] == "complete"


def test_later_records_are_folded_in_order(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5, metrics={"loss": 2.0}, tags=["a"]))
    run(copy_to(tiers, attempt, "far"))
    add(tiers, attempt, "replicated", tier="far", files={"x": {"nbytes": 1}})
    add(tiers, attempt, "metrics", metrics={"val": 1.0, "loss": 1.5})
    add(tiers, attempt, "tagged", tags=["b"])
    add(tiers, attempt, "untagged", tags=["a"])
    add(tiers, attempt, "pinned", name="alice")
    info = run(scan(tiers, "run")).find(5)
    assert info is not None
    assert (info.metrics, info.tags, info.pins) == ({"loss": 1.5, "val": 1.0}, ("b",), ("alice",))
    assert info.replicated == {"far": {"tier": "far"}}, "what it says of single files is read where it is wanted"
    assert [r.kind for r in info.records if "files" in r.data] == []
    add(tiers, attempt, "unpinned", name="alice")
    add(tiers, attempt, "evicting", tier="far")
    info = run(scan(tiers, "run")).find(5)
    assert info is not None
    assert (info.pins, info.replicas["far"], info.replicated) == ((), "evicting", {})
    add(tiers, attempt, "evicted", tier="far")
    add(tiers, attempt, "replicated", tier="far")
    info = run(scan(tiers, "run")).find(5)
    assert info is not None
    assert info.replicas["far"] == "complete"


def test_an_expired_checkpoint_is_hidden_until_it_is_brought_back_and_swept_is_gone(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    run(save(tiers, 4))
    attempt = run(save(tiers, 5, tags=["t"]))
    for back in ("revived", "pinned", "tagged"):
        add(tiers, attempt, "expired", plan="p", rule="r", not_before="2026-12-01T00:00:00.000000Z")
        assert latest_step(tiers) == 4
        catalog = run(scan(tiers, "run"))
        assert catalog.resolve(parse_reference("run@5")).hidden
        with pytest.raises(NotFoundError):
            catalog.resolve(parse_reference("run@tag:t"))
        add(tiers, attempt, back)
        assert latest_step(tiers) == 5
    add(tiers, attempt, "swept")
    catalog = run(scan(tiers, "run"))
    assert (latest_step(tiers), catalog.swept) == (4, (attempt,))
    with pytest.raises(NotFoundError, match="it was deleted"):
        catalog.resolve(parse_reference("run@5"))


def test_of_two_attempts_the_later_wins_unless_it_was_swept(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    first = run(save(tiers, 5))
    second = run(save(tiers, 5, attempt=attempt_at(5, at=CLOCK.now())))
    catalog = run(scan(tiers, "run"))
    assert [(c.attempt, c.superseded) for c in catalog.checkpoints] == [(first, True), (second, False)]
    assert catalog.resolve(parse_reference("5")).attempt == second
    add(tiers, second, "swept")
    info = run(scan(tiers, "run")).latest()
    assert info is not None
    assert info.attempt == first


def test_a_lost_authority_is_replaced_by_the_replicas_copies_with_a_loud_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5))
    add(tiers, attempt, "tagged", tags=["kept"])
    run(copy_to(tiers, attempt, "far"))
    for path in sorted((tmp_path / "shared").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    catalog = run(scan(tiers, "run"))
    info = catalog.latest()
    assert info is not None
    assert (info.attempt, info.authority_lost, info.tags, info.replicas) == (attempt, True, ("kept",), {"far": "complete"})
    assert "knows nothing of it" in caplog.text
    assert "tierstore recover" in catalog.warnings[0]


def test_a_commit_between_two_listings_is_not_taken_for_a_lost_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The authority is listed, then a checkpoint commits and is copied, then the replica's tier is listed."""
    plain = tiers_in(tmp_path)
    attempt = attempt_at(5)
    run(persist_rank(plain, attempt, plain.authority))

    async def work() -> None:
        logs, listed = asyncio.Event(), asyncio.Event()

        class LogsFirst(Hooked):
            async def list(self, folder: str = "") -> list[FileInfo]:
                found = await super().list(folder)
                logs.set()
                return found

        async def at_authority(operation: str, path: str) -> None:
            if operation == "children" and not listed.is_set():
                await logs.wait()
                await commit(plain, attempt, deadline_s=0, clock=CLOCK)
                await copy_to(plain, attempt, "far")
                listed.set()

        async def at_far(operation: str, path: str) -> None:
            await listed.wait()

        wrap = {"shared": lambda s: LogsFirst(s, at_authority), "far": lambda s: Hooked(s, at_far)}
        info = (await scan(tiers_in(tmp_path, wrap=wrap), "run")).latest()
        assert info is not None
        assert (info.authority_lost, info.complete_on) == (False, ("shared", "far"))

    run(work())
    assert "knows nothing" not in caplog.text


def test_a_folder_that_is_made_while_the_log_is_listed_is_not_missed(tmp_path: Path) -> None:
    """Both listings go at once: this one of the folders is old when the other shows the commit."""
    plain = tiers_in(tmp_path)
    attempt = attempt_at(5)

    async def work() -> None:
        listed = asyncio.Event()

        class FoldersFirst(Hooked):
            async def children(self, folder: str) -> Listing:
                found = await super().children(folder)
                listed.set()
                return found

        async def late_log(operation: str, path: str) -> None:
            if operation == "list" and not plain.authority.storage.local_path(attempt.folder).exists():
                await listed.wait()
                await save(plain, 5, attempt=attempt)

        wrapped = tiers_in(tmp_path, wrap={"shared": lambda s: FoldersFirst(s, late_log)})
        info = (await scan(wrapped, "run")).latest()
        assert info is not None
        assert info.complete_on == ("shared",)

    run(work())


def test_a_swept_checkpoint_is_not_revived_by_a_replica_that_still_lies_there(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5))
    run(copy_to(tiers, attempt, "far"))
    add(tiers, attempt, "swept")
    assert latest_step(tiers) is None


@pytest.mark.parametrize("error", [TemporaryError("endpoint down"), AccessError("wrong keys"), NotFoundError("no such bucket")])
def test_a_tier_that_is_down_does_not_hide_the_others(tmp_path: Path, error: TierStoreError, caplog: pytest.LogCaptureFixture) -> None:
    attempt = run(save(tiers_in(tmp_path), 5))
    tiers = tiers_in(tmp_path, wrap={"far": failing(error)})
    catalog = run(scan(tiers, "run"))
    assert dict(catalog.unreachable) == {"far": error}
    assert [c.attempt for c in catalog.checkpoints] == [attempt]
    assert latest_step(tiers) == 5
    assert "tier=far" in caplog.text


def test_an_authority_that_is_down_is_not_mistaken_for_an_empty_one(tmp_path: Path) -> None:
    """CASES 19: training must not begin anew because the store could not be asked."""
    attempt = run(save(tiers_in(tmp_path), 5))
    down = TemporaryError("endpoint down")
    tiers = tiers_in(tmp_path, wrap={"shared": failing(down)})
    catalog = run(scan(tiers, "run"))
    for look in (catalog.latest, lambda: catalog.resolve(parse_reference("5"))):
        with pytest.raises(TemporaryError):
            look()
    run(copy_to(tiers_in(tmp_path), attempt, "far"))
    info = run(scan(tiers, "run")).latest()
    assert info is not None
    assert (info.attempt, info.authority_lost) == (attempt, True)


def test_with_every_tier_down_there_is_an_error_and_no_empty_catalog(tmp_path: Path) -> None:
    down = failing(TemporaryError("endpoint down"))
    tiers = tiers_in(tmp_path, wrap={"node": down, "shared": down, "far": down})
    with pytest.raises(TemporaryError):
        run(scan(tiers, "run"))
    with pytest.raises(TemporaryError):
        run(runs(tiers))


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": "tierstore.record", "format_version": "9.0"}'])
@pytest.mark.parametrize("seq", [0, 1])
def test_a_record_that_cannot_be_read_is_told_and_what_else_is_known_is_used(
    tmp_path: Path, damage: bytes, seq: int, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = tiers_in(tmp_path)
    run(save(tiers, 4))
    attempt = run(save(tiers, 5))
    add(tiers, attempt, "pinned", name="x")
    run(copy_to(tiers, attempt, "far"))
    (tmp_path / "shared" / attempt.record_path(seq)).write_bytes(damage)
    catalog = run(scan(tiers, "run"))
    latest = catalog.latest()
    assert latest is not None
    assert (latest.step, latest.damaged, latest.complete_on) == (5, True, ("shared", "far"))
    assert f"{seq:06d}.json" in caplog.text


def test_an_unreadable_commit_record_is_no_reason_to_take_an_older_step(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    run(save(tiers, 4))
    attempt = run(save(tiers, 5))
    (tmp_path / "shared" / attempt.record_path(0)).write_bytes(b"{")
    catalog = run(scan(tiers, "run"))
    with pytest.raises(IntegrityError, match="commit record of step 5"):
        catalog.latest()
    assert catalog.find(4) is not None


def test_a_record_that_was_read_wrongly_once_is_read_again(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    run(save(tiers, 5))
    plan = FaultPlan("bit_flip", 1, operations=("read",), match=".log/")
    shared = tiers.get("shared")
    faulty = replace(shared, storage=FaultStorage(shared.storage, plan))
    catalog = run(scan(replace(tiers, tiers=tuple(faulty if t is shared else t for t in tiers), authority=faulty), "run"))
    assert plan.fired
    assert catalog.warnings == ()


def test_a_missing_record_in_the_middle_is_damage(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5))
    add(tiers, attempt, "pinned", name="x")
    add(tiers, attempt, "unpinned", name="x")
    (tmp_path / "shared" / attempt.record_path(1)).unlink()
    catalog = run(scan(tiers, "run"))
    latest = catalog.latest()
    assert latest is not None
    assert latest.damaged
    assert "000001.json is missing" in catalog.warnings[0]


def test_records_are_read_once(tmp_path: Path) -> None:
    counted: list[str] = []

    async def hook(operation: str, path: str) -> None:
        counted.append(operation)

    def count(storage: Storage) -> Storage:
        return Hooked(storage, hook)

    for step in range(5):
        run(save(tiers_in(tmp_path), step))
    tiers = tiers_in(tmp_path, wrap={"shared": count})
    cache = RecordCache()
    run(scan(tiers, "run", cache))
    assert (counted.count("read"), counted.count("list"), counted.count("children"), len(cache)) == (5, 1, 1, 5)
    counted.clear()
    run(scan(tiers, "run", cache))
    assert counted == ["list", "children"]


def test_warnings_are_said_once_and_listed_always(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = tiers_in(tmp_path, wrap={"far": failing(TemporaryError("endpoint down"))})
    cache = RecordCache()
    for _ in range(3):
        assert len(run(scan(tiers, "run", cache)).warnings) == 1
    assert len([r for r in caplog.records if r.levelno == logging.WARNING and r.name.startswith("tierstore.")]) == 1


def test_a_payload_that_was_taken_away_is_no_replica(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5))
    run(copy_to(tiers, attempt, "far"))
    for path in (tmp_path / "shared" / attempt.folder).iterdir():
        path.unlink()
    (tmp_path / "shared" / attempt.folder).rmdir()
    info = run(scan(tiers, "run")).latest()
    assert info is not None
    assert info.complete_on == ("far",)


def test_best_and_tags_are_resolved_and_nan_ranks_worst(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    for step, loss in ((1, 2.0), (2, 1.0), (3, float("nan")), (4, 1.0), (5, 3.0)):
        run(save(tiers, step, metrics={"val/loss": loss}, tags=["odd"] if step % 2 else []))
    run(save(tiers, 6))
    catalog = run(scan(tiers, "run"))
    assert catalog.resolve(parse_reference("best:val/loss")).step == 4
    assert catalog.resolve(parse_reference("best:val/loss"), modes={"val/loss": "max"}).step == 5
    assert catalog.resolve(parse_reference("tag:odd")).step == 5
    assert catalog.resolve(parse_reference("run@latest")).step == 6
    with pytest.raises(UsageError, match="other"):
        catalog.resolve(parse_reference("other@latest"))


@pytest.mark.parametrize(
    ("reference", "message", "hint"),
    [
        ("13", r"no committed step 13\b", "nearest committed steps are 5, 10, 20"),
        ("7", "an attempt is incomplete; rank 1 missing", "nearest"),
        ("8", "an attempt was condemned: .*late", "nearest"),
        ("best:val/los", "metric 'val/los'", "did you mean 'val/loss'"),
        ("tag:relase", "tag 'relase'", "did you mean 'release'"),
    ],
)
def test_what_does_not_exist_is_answered_with_what_does(tmp_path: Path, reference: str, message: str, hint: str) -> None:
    tiers = tiers_in(tmp_path)
    for step in (5, 10, 20):
        run(save(tiers, step, metrics={"val/loss": 1.0}, tags=["release"]))
    run(persist_rank(tiers, attempt_at(7), tiers.authority, rank=0, world_size=2))
    run(decide_fate(tiers.authority.storage, attempt_at(8), "condemned", {"reason": "a rank was late"}, CLOCK))
    with pytest.raises(NotFoundError, match=message) as caught:
        run(scan(tiers, "run")).resolve(parse_reference(reference))
    assert hint in caught.value.hint


def test_a_run_that_does_not_exist_is_answered_with_the_nearest_names(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    run(save(tiers, 1, attempt=attempt_at(1, "llama/sft-7")))
    run(save(tiers, 1, attempt=attempt_at(1, "llama")))
    assert run(runs(tiers)) == ["llama", "llama/sft-7"]
    with pytest.raises(NotFoundError, match="does not exist") as caught:
        run(scan(tiers, "llama/sft-8")).resolve(Reference(run="", selector="latest"))
    assert "'llama/sft-7'" in caught.value.hint


def test_a_run_with_attempts_only_is_not_called_missing(tmp_path: Path) -> None:
    tiers = tiers_in(tmp_path)
    run(persist_rank(tiers, attempt_at(7), tiers.nearest, rank=0, world_size=2))
    catalog = run(scan(tiers, "run"))
    (incomplete,) = catalog.incomplete
    assert (incomplete.world_size, incomplete.parts, incomplete.receipts, incomplete.missing) == (2, {"node": (0,)}, {"node": (0,)}, (1,))
    with pytest.raises(NotFoundError, match="only attempts at steps 7"):
        catalog.resolve(parse_reference("latest"))


def test_a_torn_empty_copy_of_the_commit_record_makes_no_replica(tmp_path: Path) -> None:
    """CASES 3: an empty file after a power loss."""
    tiers = tiers_in(tmp_path)
    attempt = run(save(tiers, 5))
    run(copy_to(tiers, attempt, "far"))
    (tmp_path / "far" / attempt.record_path(0)).write_bytes(b"")
    info = run(scan(tiers, "run")).find(5)
    assert info is not None
    assert info.replicas["far"] == "partial"


def test_a_save_under_way_does_not_move_latest_until_its_record_is_there(tmp_path: Path) -> None:
    """CASES 2, 20: latest follows the commit record, nothing earlier."""
    seen: list[int | None] = []
    plain = tiers_in(tmp_path)
    run(save(plain, 1))

    def watching() -> Callable[[str, str], Awaitable[None]]:
        async def hook(operation: str, path: str) -> None:
            if operation in ("write", "put", "create"):
                found = (await scan(plain, "run")).latest()
                seen.append(found.step if found else None)

        return hook

    tiers = tiers_in(tmp_path, wrap={"shared": lambda s: Hooked(s, watching())})
    attempt = attempt_at(2)
    run(persist_rank(tiers, attempt, tiers.authority))
    run(commit(tiers, attempt, deadline_s=0, clock=CLOCK))
    assert len(seen) == 6
    assert set(seen) == {1}
    assert latest_step(plain) == 2
    assert path_of(plain, "shared", attempt, shard_name(0, 1)).exists()
