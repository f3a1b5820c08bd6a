"""An authority that is empty while other tiers hold checkpoints is not written to: it is unmounted, or lost and for `recover`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from store_kit import open_over, unsynced
from tiers_kit import SteppedClock, attempt_at, persist_rank, save

from tierstore.config import load_config
from tierstore.config_models import StoreConfig
from tierstore.config_tiers import TierConfig
from tierstore.errors import RefusedError, TemporaryError
from tierstore.names import DESCRIPTOR, Attempt
from tierstore.storage.contract import Storage
from tierstore.storage.posix import PosixStorage
from tierstore.tiers.catalog import Catalog, scan
from tierstore.tiers.log import append, read_log
from tierstore.tiers.log_facts import fold
from tierstore.tiers.opening import LostAuthority, rejoin
from tierstore.tiers.promote import reconcile
from tierstore.tiers.recover import recover
from tierstore.tiers.session import Session
from tierstore.tiers.tier import read_store_id
from tierstore.tiers.verify import verify

NAMES = ("node", "shared", "far")


def quick(tier: TierConfig, config: StoreConfig) -> Storage:
    return PosixStorage(Path(tier.uri), durable=False)


def opened(folder: Path, *, create: bool = True, lost: LostAuthority = "refuse") -> Session:
    tiers = [{"name": name, "uri": str(folder / name), "scope": "node" if name == "node" else "shared"} for name in NAMES]
    config = load_config({"version": 1, "run": "run", "tiers": tiers})
    return Session.open(config, clock=SteppedClock(), create=create, lost=lost, opener=quick)


def stored(folder: Path, *steps: int) -> list[Attempt]:
    with opened(folder) as session:
        attempts = [session.run(save(session.tiers, step)) for step in steps]
        session.run(reconcile(session.tiers, "run", clock=SteppedClock()))
    return attempts


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and ".tmp" not in p.parts}


def catalog(session: Session) -> Catalog:
    return session.run(scan(session.tiers, "run"))


@pytest.mark.parametrize("gone", ["everything", "descriptor and logs"])
def test_a_writer_is_refused_and_nothing_is_written(tmp_path: Path, gone: str) -> None:
    stored(tmp_path, 1)
    shutil.rmtree(tmp_path / "shared")
    if gone == "everything":
        (tmp_path / "shared").mkdir()
    else:
        (tmp_path / "shared" / "run").mkdir(parents=True)
    before = files(tmp_path)
    with pytest.raises(RefusedError) as caught:
        opened(tmp_path)
    assert "'shared'" in caught.value.message
    assert "far" in caught.value.message
    assert "mounted" in caught.value.hint
    assert "tierstore recover" in caught.value.hint
    assert caught.value.exit_code == 7
    assert files(tmp_path) == before


def test_a_reader_reads_on_with_a_warning_that_says_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(tmp_path, 1, 2)
    shutil.rmtree(tmp_path / "shared")
    with opened(tmp_path, create=False) as session:
        assert [c.step for c in catalog(session).checkpoints] == [1, 2]
    assert "is it mounted" in caplog.text
    assert not (tmp_path / "shared").exists()


def test_a_store_that_has_committed_nothing_yet_has_lost_nothing(tmp_path: Path) -> None:
    """A save is staged on the node, and the shared file system is made anew before the first commit."""
    with opened(tmp_path) as session:
        session.run(persist_rank(session.tiers, attempt_at(1), session.tiers.nearest))
        store_id = session.tiers.store_id
    shutil.rmtree(tmp_path / "shared")
    with opened(tmp_path) as session:
        assert session.tiers.store_id == store_id
        assert session.run(read_store_id(session.tiers.authority)) == store_id


def test_recover_rebuilds_and_only_then_does_the_authority_belong_to_the_store_again(tmp_path: Path) -> None:
    stored(tmp_path, 1, 2)
    store_id = (tmp_path / "far" / DESCRIPTOR).read_bytes()
    shutil.rmtree(tmp_path / "shared")
    with opened(tmp_path, lost="recover") as session:
        assert session.run(recover(session.tiers, "run", clock=SteppedClock())).ok
        assert not (tmp_path / "shared" / DESCRIPTOR).exists()
        with pytest.raises(RefusedError):
            opened(tmp_path)
        assert session.run(rejoin(session.tiers))
        assert not session.run(rejoin(session.tiers))
    assert (tmp_path / "shared" / DESCRIPTOR).read_bytes() == store_id
    with opened(tmp_path) as session:
        assert [(c.step, c.authority_lost) for c in catalog(session).checkpoints] == [(1, False), (2, False)]
        assert session.run(verify(session.tiers, "run", level="full")).findings == ()


def test_a_recovery_that_is_interrupted_among_the_records_is_finished_by_the_next(tmp_path: Path) -> None:
    """The commit record comes last: without it the checkpoint is still lost, and no later decision can be lost for good."""
    (attempt,) = stored(tmp_path, 1)
    with opened(tmp_path) as session:
        storage = session.tiers.authority.storage
        session.run(append(storage, attempt, "pinned", {"name": "paper"}, clock=SteppedClock()))
        for seq in (1, 2):
            path = attempt.record_path(seq)
            session.run(session.tiers.get("far").storage.put(path, session.run(storage.read(path))))
    shutil.rmtree(tmp_path / "shared")
    with opened(tmp_path, lost="recover") as session:
        storage = session.tiers.authority.storage
        create, made = storage.create, 0

        async def once(path: str, data: bytes) -> None:
            nonlocal made
            made += "/.log/" in path
            if made == 2:
                raise TemporaryError("connection refused")
            await create(path, data)

        storage.create = once  # type: ignore[method-assign]
        assert not session.run(recover(session.tiers, "run", clock=SteppedClock())).ok
        assert [c.authority_lost for c in catalog(session).checkpoints] == [True]
        assert session.run(recover(session.tiers, "run", clock=SteppedClock())).ok
        facts = fold(session.run(read_log(storage, attempt)))
        assert (facts.pins, set(facts.replicated)) == (("paper",), {"far"})


def test_what_the_authority_had_dropped_on_purpose_comes_back_as_a_log_only(tmp_path: Path) -> None:
    kept, dropped = stored(tmp_path, 1, 2)
    with opened(tmp_path) as session:
        storage = session.tiers.authority.storage
        for kind in ("evicting", "evicted"):
            session.run(append(storage, dropped, kind, {"tier": "shared"}, clock=SteppedClock()))
        for info in session.run(storage.list(dropped.log_folder)):
            session.run(session.tiers.get("far").storage.put(info.path, session.run(storage.read(info.path))))
    shutil.rmtree(tmp_path / "shared")
    with opened(tmp_path, lost="recover") as session:
        report = session.run(recover(session.tiers, "run", clock=SteppedClock()))
        assert report.ok
        assert [(r.attempt, r.nbytes > 0) for r in report.rebuilt] == [(kept, True), (dropped, False)]
        assert (tmp_path / "shared" / kept.folder).exists()
        assert not (tmp_path / "shared" / dropped.folder).exists()
        assert [(c.authority_lost, "shared" in c.dropped) for c in catalog(session).checkpoints] == [(False, False), (False, True)]
        assert session.run(verify(session.tiers, "run", level="full")).findings == ()


def test_a_store_in_python_loads_and_refuses_to_save_before_anything_is_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer hears of it when it resumes, not hours later."""
    with open_over(monkeypatch, unsynced, tmp_path) as store:
        store.save(1, {"step": 1}).wait("durable", timeout=200)
    shutil.rmtree(tmp_path / "shared")
    before = files(tmp_path)
    with open_over(monkeypatch, unsynced, tmp_path) as store:
        assert store.load() == {"step": 1}
        for attempted in (lambda: store.save(2, {"step": 2}), store.resume, store.sync):
            with pytest.raises(RefusedError, match="shared"):
                attempted()
    assert files(tmp_path) == before
    assert not (tmp_path / "shared").exists()
