"""Opening a store: one store's tiers, an authority that is one, clear errors at start, and readers that write nothing."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tiers_kit import Hooked, SteppedClock, copy_to, failing, run, save

from tierstore.config import load_config
from tierstore.config_models import StoreConfig
from tierstore.config_tiers import TierConfig
from tierstore.errors import (
    AccessError,
    ClosedError,
    ConfigError,
    DeadlineError,
    FormatError,
    NotFoundError,
    StorageError,
    TemporaryError,
    TierStoreError,
    VersionError,
)
from tierstore.format.descriptor import decode_descriptor
from tierstore.names import DESCRIPTOR
from tierstore.storage.contract import Capabilities, Storage
from tierstore.storage.posix import PosixStorage
from tierstore.tiers import tier as tier_module
from tierstore.tiers.catalog import runs, scan
from tierstore.tiers.opening import Opener
from tierstore.tiers.session import Session
from tierstore.tiers.tier import ensure_tier

NAMES = ("node", "shared", "far")


def config_in(folder: Path) -> StoreConfig:
    return load_config([str(folder / name) for name in NAMES], run="run")


def quick(tier: TierConfig, config: StoreConfig) -> Storage:
    """The tier's folder without fsync, which takes most of a test's time."""
    return PosixStorage(Path(tier.uri), durable=False)


def opener_with(number: int, wrap: Callable[[Storage], Storage]) -> Opener:
    """The tier of that number gets a wrapped storage."""

    def opener(tier: TierConfig, config: StoreConfig) -> Storage:
        made = quick(tier, config)
        return wrap(made) if tier is config.tiers[number] else made

    return opener


def ids(folder: Path) -> list[str]:
    return [decode_descriptor((folder / name / DESCRIPTOR).read_bytes()).store_id for name in NAMES]


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_the_first_opening_makes_one_store_of_all_tiers_and_leaves_nothing_else(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with Session.open(config, opener=quick) as session:
        tiers = session.tiers
        assert ids(tmp_path) == [tiers.store_id] * 3
        assert (tiers.authority.uri, tiers.durable_at.name, tiers.nearest.scope) == (str(tmp_path / "shared"), tiers.authority.name, "node")
        assert session.run(runs(tiers)) == []
    with Session.open(config, opener=quick) as session:
        assert session.tiers.store_id == ids(tmp_path)[0]
    assert [p for p in files(tmp_path) if "probe" in p] == []


def test_many_processes_that_begin_a_store_at_once_agree_on_its_id(tmp_path: Path) -> None:
    def begin(_: int) -> str:
        with Session.open(config_in(tmp_path), opener=quick) as session:
            return session.tiers.store_id

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(begin, range(4)))
    assert len({*found, *ids(tmp_path)}) == 1


def test_a_tier_of_another_store_is_refused_and_both_are_named(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        Session.open(config_in(tmp_path / folder), opener=quick).close()
    mine, other = ids(tmp_path / "a")[0], ids(tmp_path / "b")[0]
    (tmp_path / "a/far" / DESCRIPTOR).write_bytes((tmp_path / "b/far" / DESCRIPTOR).read_bytes())
    for create in (True, False):
        with pytest.raises(ConfigError, match=f"{other}.*{mine}"):
            Session.open(config_in(tmp_path / "a"), create=create, opener=quick)


def test_an_authority_that_lost_its_descriptor_joins_the_store_again(tmp_path: Path) -> None:
    Session.open(config_in(tmp_path), opener=quick).close()
    store_id = ids(tmp_path)[0]
    (tmp_path / "shared" / DESCRIPTOR).unlink()
    Session.open(config_in(tmp_path), opener=quick).close()
    assert ids(tmp_path) == [store_id] * 3


def test_a_reader_writes_nothing_anywhere(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with Session.open(config, opener=quick) as session:
        run(save(session.tiers, 5))
    (tmp_path / "node" / DESCRIPTOR).unlink()
    before = files(tmp_path)

    async def no_writes(operation: str, path: str) -> None:
        assert operation in ("read", "children", "list", "stat", "read_into"), operation

    with Session.open(config, create=False, opener=lambda t, c: Hooked(quick(t, c), no_writes)) as session:
        found = session.run(scan(session.tiers, "run")).latest()
        assert found is not None
        assert found.step == 5
    assert files(tmp_path) == before


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("content", [b"", b"not ours", b'{"format": "tierstore.store", "format_version": "7.0", "store_id": "x"}'])
def test_a_descriptor_that_cannot_be_read_is_never_written_over(tmp_path: Path, number: int, content: bytes) -> None:
    config = config_in(tmp_path)
    with Session.open(config, opener=quick) as session:
        attempt = run(save(session.tiers, 5))
        run(copy_to(session.tiers, attempt, session.tiers.names[2]))
    (tmp_path / NAMES[number] / DESCRIPTOR).write_bytes(content)
    with pytest.raises(VersionError if b"7.0" in content else FormatError, match=f"{DESCRIPTOR} on tier '{config.tiers[number].name}'"):
        Session.open(config, opener=quick)
    assert (tmp_path / NAMES[number] / DESCRIPTOR).read_bytes() == content
    with Session.open(config, create=False, opener=quick) as session:
        catalog = session.run(scan(session.tiers, "run"))
        assert [c.step for c in catalog.checkpoints] == [5]
        assert list(catalog.unreachable) == [config.tiers[number].name]


def test_a_reader_of_a_place_without_a_store_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no store"):
        Session.open(config_in(tmp_path), create=False, opener=quick)
    assert files(tmp_path) == []


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_reader_shows_what_it_can_reach(tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture) -> None:
    config = config_in(tmp_path)
    with Session.open(config, opener=quick) as session:
        attempt = run(save(session.tiers, 5))
        for name in session.tiers.names:
            run(copy_to(session.tiers, attempt, name))
    opener = opener_with(number, failing(TemporaryError("endpoint down")))
    with Session.open(config, create=False, opener=opener) as session:
        catalog = session.run(scan(session.tiers, "run"))
        assert [c.step for c in catalog.checkpoints] == [5]
        assert list(catalog.unreachable) == [session.tiers.tiers[number].name]
    assert "endpoint down" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        AccessError("wrong credentials", hint="check the key"),
        TemporaryError("connection refused"),
        NotFoundError("there is no bucket 'b'"),
        StorageError("input/output error"),
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_writer_is_told_at_start_which_tier_it_needs_and_what_to_do(tmp_path: Path, error: TierStoreError, number: int) -> None:
    config = config_in(tmp_path)
    with pytest.raises(type(error)) as caught:
        Session.open(config, opener=opener_with(number, failing(error)))
    assert config.tiers[number].name in caught.value.message
    assert error.message in caught.value.message
    assert caught.value.hint


class Remote(Hooked):
    """Looks like a storage behind a server."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, local=False)

    def local_path(self, path: str) -> Path | None:
        return None


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("born", [True, False])
def test_a_tier_that_cannot_be_written_is_found_out_at_start(tmp_path: Path, number: int, born: bool) -> None:
    config = config_in(tmp_path)
    if born:
        Session.open(config, opener=quick).close()

    async def hook(operation: str, path: str) -> None:
        if operation in ("put", "write", "create"):
            raise AccessError("permission denied")

    with pytest.raises(AccessError, match="permission denied"):
        Session.open(config, opener=opener_with(number, lambda s: Remote(s, hook)))


@pytest.mark.parametrize("name", ["node", "shared"])
def test_a_folder_that_became_read_only_is_found_out_at_start(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path)
    Session.open(config, opener=quick).close()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path / name))  # root may write whatever the mode says
    with pytest.raises(AccessError, match=f"{name} is not writable"):
        Session.open(config, opener=quick)
    Session.open(config, create=False, opener=quick).close()


@pytest.mark.parametrize("born", [True, False])
def test_a_storage_without_a_working_create_is_no_authority(tmp_path: Path, born: bool) -> None:
    class Overwriting(Remote):
        async def create(self, path: str, data: bytes) -> None:
            await self.put(path, data)

    async def nothing(operation: str, path: str) -> None:
        return

    config = config_in(tmp_path)
    if born:
        Session.open(config, opener=quick).close()
    with pytest.raises(ConfigError, match="can't be the authority"):
        Session.open(config, opener=opener_with(1, lambda s: Overwriting(s, nothing)))


def test_a_far_tier_that_is_down_at_start_is_joined_when_it_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = [True]

    async def hook(operation: str, path: str) -> None:
        if down[0]:
            raise TemporaryError("endpoint down")

    config = config_in(tmp_path)
    with Session.open(config, opener=opener_with(2, lambda s: Hooked(s, hook))) as session:
        tiers = session.tiers
        far = tiers.tiers[2]
        assert list(tiers.unreachable) == [far.name]
        assert "left out for now" in caplog.text
        with pytest.raises(TemporaryError):
            session.run(ensure_tier(tiers, far))
        down[0] = False
        monkeypatch.setattr(tier_module, "_ASK_AGAIN_S", 3600.0)
        assert list(session.run(scan(tiers, "run")).unreachable) == [far.name]  # not asked again at once
        monkeypatch.setattr(tier_module, "_ASK_AGAIN_S", 0.0)
        session.run(ensure_tier(tiers, far))
        assert tiers.unreachable == {}
        assert ids(tmp_path) == [tiers.store_id] * 3


def test_a_reader_asks_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down = [True]

    async def hook(operation: str, path: str) -> None:
        if down[0]:
            raise TemporaryError("endpoint down")

    config = config_in(tmp_path)
    Session.open(config, opener=quick).close()
    with Session.open(config, create=False, opener=opener_with(2, lambda s: Hooked(s, hook))) as session:
        monkeypatch.setattr(tier_module, "_ASK_AGAIN_S", 0.0)
        assert len(session.run(scan(session.tiers, "run")).unreachable) == 1
        down[0] = False
        assert len(session.run(scan(session.tiers, "run")).unreachable) == 0


def test_a_closed_session_says_so(tmp_path: Path) -> None:
    session = Session.open(config_in(tmp_path), clock=SteppedClock(), opener=quick)
    tiers = session.tiers
    session.close()
    session.close()
    for use in (lambda: session.tiers, lambda: session.run(runs(tiers)), lambda: session.submit(runs(tiers))):
        with pytest.raises(ClosedError):
            use()


def test_a_call_that_takes_too_long_is_broken_off(tmp_path: Path) -> None:
    with Session.open(config_in(tmp_path), opener=quick) as session:
        with pytest.raises(DeadlineError):
            session.run(asyncio.sleep(600), timeout=0.01)
        assert session.run(runs(session.tiers)) == []


def test_a_forked_child_uses_a_session_anew(tmp_path: Path) -> None:
    """CASES (loading) 18: the loop and the clients are made again in the child."""
    with Session.open(config_in(tmp_path), opener=quick) as session:
        run(save(session.tiers, 5))
        session.run(scan(session.tiers, "run"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork with threads: that is what is tested
            pid = os.fork()
        if pid == 0:
            status = 1
            try:
                found = session.run(scan(session.tiers, "run"), timeout=200).latest()
                status = 0 if found is not None and found.step == 5 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert session.run(runs(session.tiers)) == ["run"]
