"""The probe finds what a storage does wrong; the fault storages do wrong what they say."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tierstore.errors import (
    ConflictError,
    IntegrityError,
    NotFoundError,
    OutcomeUnknownError,
    TemporaryError,
    TierFullError,
    TierStoreError,
    UsageError,
)
from tierstore.storage.contract import FileInfo
from tierstore.storage.posix import PosixStorage
from tierstore.storage.probe import probe
from tierstore.testing.faults import FaultKind, FaultPlan, FaultStorage, HidingStorage, sweep


class NoWinner(FaultStorage):
    """Takes every creation for a success."""

    async def create(self, path: str, data: bytes) -> None:
        await self.inner.put(path, data)


class Stale(FaultStorage):
    """Lists what it saw at first, for ever."""

    async def list(self, folder: str = "") -> list[FileInfo]:
        return []


def _harmless(root: Path, kind: type[FaultStorage] = FaultStorage) -> FaultStorage:
    return kind(PosixStorage(root), FaultPlan("hang", 1, operations=()))


def test_the_probe_finds_a_good_storage_good_and_leaves_nothing_behind(tmp_path: Path) -> None:
    report = asyncio.run(probe(PosixStorage(tmp_path)))
    assert report.ok
    assert report.can_be_authority
    assert report.uri == str(tmp_path)
    assert [check.name for check in report.checks] == [
        "writable",
        "read-your-writes",
        "range-reads",
        "atomic-replace",
        "list-after-write",
        "create-if-absent",
        "delete",
    ]
    assert [path for path in tmp_path.rglob("*") if path.name != ".tmp"] == []


def test_the_probe_refuses_many_winners_as_an_authority_only(tmp_path: Path) -> None:
    report = asyncio.run(probe(_harmless(tmp_path, NoWinner)))
    assert report.ok
    assert not report.can_be_authority
    assert "8 were told that they had won" in report.failures[0].detail


def test_the_probe_finds_stale_listings(tmp_path: Path) -> None:
    report = asyncio.run(probe(_harmless(tmp_path, Stale)))
    assert not report.ok
    assert "list-after-write" in [check.name for check in report.failures]


def test_the_probe_says_that_a_storage_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    report = asyncio.run(probe(PosixStorage(tmp_path / "file")))
    assert [check.name for check in report.checks] == ["writable"]
    assert not report.ok
    assert str(tmp_path / "file") in report.checks[0].detail


@pytest.mark.parametrize("kind", ["error_before", "short_read", "bit_flip", "no_space"])
def test_the_probe_notices_every_single_fault(tmp_path: Path, kind: FaultKind) -> None:
    found = []
    for number, plan in enumerate(sweep(kind)):
        report = asyncio.run(probe(FaultStorage(PosixStorage(tmp_path / str(number)), plan)))
        found.append(report.can_be_authority)
    # One fault may hit the read that has to fail anyway; the last run met none.
    assert found[-1]
    assert sum(found[:-1]) <= (kind in ("short_read", "bit_flip"))
    assert len(found) > 3


async def _ends(plan: FaultPlan, root: Path) -> tuple[str, BaseException | None, PosixStorage]:
    inner = PosixStorage(root)
    storage = FaultStorage(inner, plan)
    await inner.put("file", b"12345678")
    try:
        await storage.put("other", b"1")
        await storage.create("record", b"mine")
        data = await storage.read("file")
        buffer = bytearray(4)
        await storage.read_into("file", 4, memoryview(buffer))
        await storage.delete(["other"])
    except (TierStoreError, asyncio.CancelledError) as error:
        return "error", error, inner
    return f"{data!r} {bytes(buffer)!r}", None, inner


@pytest.mark.parametrize(
    ("kind", "error", "faults"),
    [
        ("error_before", TemporaryError, 5),
        ("error_after", (TemporaryError, OutcomeUnknownError), 5),
        ("short_read", IntegrityError, 2),
        ("no_space", TierFullError, 2),
        ("cancel", asyncio.CancelledError, 5),
    ],
)
def test_a_sweep_fails_each_operation_once_and_ends(
    tmp_path: Path, kind: FaultKind, error: type[BaseException] | tuple[type[BaseException], ...], faults: int
) -> None:
    fired = []
    for number, plan in enumerate(sweep(kind)):
        _, failed, _ = asyncio.run(_ends(plan, tmp_path / str(number)))
        assert (failed is not None) == bool(plan.fired)
        if failed is not None:
            assert isinstance(failed, error)
            fired.append(plan.fired)
    assert len(fired) == len(set(fired)) == faults


def test_a_lost_acknowledgement_means_that_it_was_done(tmp_path: Path) -> None:
    _, failed, inner = asyncio.run(_ends(FaultPlan("error_after", 2), tmp_path))
    assert isinstance(failed, OutcomeUnknownError)
    assert asyncio.run(inner.read("record")) == b"mine"
    with pytest.raises(ConflictError):
        asyncio.run(inner.create("record", b"theirs"))


def test_a_flipped_bit_is_silent_and_single(tmp_path: Path) -> None:
    ends = [asyncio.run(_ends(plan, tmp_path / plan.kind / str(plan.nth)))[0] for plan in sweep("bit_flip")]
    assert len(ends) == 3
    assert ends[2] == "b'12345678' b'5678'"
    assert len(set(ends)) == 3


def test_a_hang_ends_with_the_callers_patience(tmp_path: Path) -> None:
    async def main() -> None:
        storage = FaultStorage(PosixStorage(tmp_path), FaultPlan("hang", 1, operations=("stat",)))
        await storage.put("file", b"x")
        looking = asyncio.ensure_future(storage.stat("file"))
        done, _ = await asyncio.wait({looking}, timeout=0.05)
        assert not done
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        assert (await storage.stat("file")).nbytes == 1
        await storage.close()

    asyncio.run(main())


def test_a_sweep_over_nothing_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no operation"):
        list(sweep("hang"))
    with pytest.raises(UsageError):
        FaultPlan("hang", 0)


def test_hidden_files_appear_after_some_lookups(tmp_path: Path) -> None:
    async def main() -> None:
        storage = HidingStorage(PosixStorage(tmp_path), lookups=2, match="part-")
        await storage.put("part-0", b"x")
        await storage.put("other", b"x")
        assert await storage.read("other") == b"x"
        with pytest.raises(NotFoundError, match="part-0"):
            await storage.stat("part-0")
        assert [info.path for info in await storage.list()] == ["other"]
        assert await storage.read("part-0") == b"x"
        assert len(await storage.list()) == len((await storage.children()).files) == 2
        await storage.close()

    asyncio.run(main())
