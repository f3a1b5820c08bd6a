"""Loads that bring what they largely want onto a tier of the node first: once for all its processes, and never at a load's cost."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_kit import SERVER
from hydrate_kit import Counted, config_of, files_below, load_in_child, make_store, near_and_far, patiently, shards, state_of
from tiers_kit import LeapingClock, flip

import tierstore
import tierstore.dcp
from tierstore.dcp.reader import TierStorageReader
from tierstore.errors import ConfigError, RefusedError, UsageError
from tierstore.names import Attempt
from tierstore.state.load import LoadOptions
from tierstore.testing.equality import assert_same_state
from tierstore.tiers.hydrate import lock_path
from tierstore.tiers.locks import FileLock
from tierstore.tiers.session import Session
from tierstore.tiers.verify import verify


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    patiently(monkeypatch)
    monkeypatch.setattr("tierstore.dcp.reader._SETTLE_S", 200.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_store(tmp_path)
    return tmp_path


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counted]:
    return near_and_far(monkeypatch)


def load(root: Path, *, options: LoadOptions | None = None, clock: Any = None, **config: Any) -> Any:
    with tierstore.open(config_of(root, **config), clock=clock) as store:
        return store.load(1, options=options)


def checkpoint(root: Path) -> tierstore.CheckpointInfo:
    with tierstore.open(config_of(root)) as store:
        return store.checkpoints()[0]


def from_far(storages: dict[str, Counted]) -> int:
    return sum(storages["far"].nbytes.values())


def findings(root: Path) -> tuple[Any, ...]:
    with Session.open(tierstore.load_config(config_of(root)), create=False) as session:
        return session.run(verify(session.tiers, "r", level="full")).findings


def lock_of(root: Path) -> FileLock:
    """The lock of the first checkpoint's shard."""
    with Session.open(tierstore.load_config(config_of(root))) as session:
        path = shards(root, "far")["step-0000000001/shard-00000-of-00001.safetensors"]
        attempt = Attempt.parse("r", path.parent.name)
        assert attempt is not None
        return FileLock(lock_path(session.tiers.get("node"), attempt, path.name))


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="tierstore")
    return caplog


def test_a_load_brings_a_checkpoint_onto_the_node_and_the_next_one_needs_nothing_from_afar(
    root: Path, storages: dict[str, Counted], told: pytest.LogCaptureFixture
) -> None:
    (far,) = shards(root, "far").values()
    assert_same_state(load(root), state_of(1))
    assert from_far(storages) == far.stat().st_size
    (near,) = shards(root, "node").values()
    assert near.read_bytes() == far.read_bytes()
    assert_same_state(load(root), state_of(1))
    assert from_far(storages) == 0
    lines = [r.getMessage() for r in told.records if "hydrated" in r.getMessage()]
    assert any(f"tier=node checkpoint=r/{near.parent.name} file={near.name} nbytes={far.stat().st_size} seconds=" in line for line in lines)


def test_what_was_hydrated_is_a_copy_like_others(root: Path) -> None:
    load(root)
    info = checkpoint(root)
    assert (dict(info.replicas), dict(info.receipts)) == ({"node": "complete", "far": "complete"}, {"node": (0,)})
    assert not findings(root)
    with tierstore.open(config_of(root)) as store:
        assert {tier.name: tier.checkpoints for tier in store.status().tiers} == {"node": 1, "far": 1}
        store.retention.evict(1, "node")
    assert not shards(root, "node")


def test_what_was_hydrated_lets_no_other_copy_go(root: Path) -> None:
    load(root)
    with tierstore.open(config_of(root)) as store, pytest.raises(RefusedError, match="node is a node's own"):
        store.retention.evict(1, "far")


def test_a_copy_that_was_dropped_comes_back_because_somebody_loads_it(root: Path) -> None:
    load(root)
    with tierstore.open(config_of(root)) as store:
        store.retention.evict(1, "node")
    assert list((root / "node").glob("r/.log/*/evicted*"))
    load(root)
    assert not list((root / "node").glob("r/.log/*/evicted*"))
    assert checkpoint(root).replicas["node"] == "complete"


def test_several_processes_of_a_node_fetch_a_checkpoint_from_afar_once_between_them(root: Path) -> None:
    count = 4
    barrier, results = SERVER.Barrier(count), SERVER.Queue()
    config = config_of(root, io={"block_size": "64KiB", "stall_timeout": "10m"})
    children = [SERVER.Process(target=load_in_child, args=(str(root), config, barrier, results, number)) for number in range(count)]
    for child in children:
        child.start()
    got = sorted(results.get(timeout=250) for _ in children)
    for child in children:
        child.join(200)
    (far,) = shards(root, "far").values()
    assert [(right, error) for _, _, right, error in got] == [(True, "")] * count
    assert sum(nbytes["far"] for _, nbytes, _, _ in got) == far.stat().st_size
    assert not [name for name in files_below(root / "node") if name.startswith(".tmp/")], "locks and temporaries go"
    assert checkpoint(root).replicas["node"] == "complete"
    assert not list((root / "far").glob("**/*lease*/*")), "leases end"


def test_a_process_that_is_killed_while_it_copies_is_taken_over(root: Path, tmp_path: Path) -> None:
    barrier, results, flag = SERVER.Barrier(2), SERVER.Queue(), tmp_path / "copying"
    first = SERVER.Process(target=load_in_child, args=(str(root), config_of(root), None, results, 0, str(flag)))
    first.start()
    end = time.monotonic() + 200
    while not flag.exists() and first.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert flag.exists(), results.get(timeout=5)
    second = SERVER.Process(target=load_in_child, args=(str(root), config_of(root), barrier, results, 1))
    second.start()
    barrier.wait(200)  # it waits for the first one's copy from here on, or is about to
    os.kill(int(flag.read_text()), signal.SIGKILL)
    first.join(200)
    number, nbytes, right, error = results.get(timeout=250)
    second.join(200)
    (far,) = shards(root, "far").values()
    assert (number, right, error) == (1, True, "")
    assert nbytes["far"] == far.stat().st_size
    assert checkpoint(root).replicas["node"] == "complete"
    assert not [name for name in files_below(root / "node") if name.startswith(".tmp/hydrate")]


def test_who_waits_in_vain_reads_from_afar(root: Path, storages: dict[str, Counted], told: pytest.LogCaptureFixture) -> None:
    lock = lock_of(root)
    assert lock.take()
    try:
        assert_same_state(load(root, clock=LeapingClock()), state_of(1))
    finally:
        lock.release()
    assert from_far(storages) >= state_of(1)["w"].nbytes
    assert not shards(root, "node")
    assert f"is read from afar: process {os.getpid()} has not got on with it for 60 s" in told.text
    assert not [r for r in told.records if r.levelno >= logging.WARNING]


def test_who_waits_for_one_that_gives_up_reads_from_afar_at_once(
    root: Path, storages: dict[str, Counted], monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    lock = lock_of(root)
    assert lock.take()
    take = FileLock.take

    def give_up(waiting: FileLock) -> bool:
        taken = take(waiting)
        if not taken:
            lock.release()
        return taken

    monkeypatch.setattr(FileLock, "take", give_up)
    assert_same_state(load(root), state_of(1))
    assert not shards(root, "node")
    assert "gave it up" in told.text
    assert not lock.path.exists()


def test_a_lock_that_a_dead_process_left_holds_nobody_up(root: Path, storages: dict[str, Counted]) -> None:
    lock = lock_of(root)
    lock.path.parent.mkdir(parents=True, exist_ok=True)
    lock.path.write_text("4711 1000\n")
    assert_same_state(load(root), state_of(1))
    assert shards(root, "node")
    assert not lock.path.exists()


def test_a_near_copy_that_rots_is_passed_over_and_its_good_blocks_are_used(
    root: Path, storages: dict[str, Counted], told: pytest.LogCaptureFixture
) -> None:
    load(root)
    (near,) = shards(root, "node").values()
    flip(near)
    assert_same_state(load(root), state_of(1))
    assert from_far(storages) == 64 << 10, "the block that is bad"
    assert f"tier=node file=r/{near.parent.name}/{near.name} is passed over for the next tier: block" in told.text
    assert {(f.tier, f.file) for f in findings(root)} == {("node", near.name)}


def test_no_room_is_told_once_and_the_load_goes_on(root: Path, storages: dict[str, Counted], told: pytest.LogCaptureFixture) -> None:
    config = config_of(root)
    config["tiers"][0]["capacity"] = "1MiB"
    with tierstore.open(config) as store:
        for _ in range(2):
            assert_same_state(store.load(1), state_of(1))
    assert not shards(root, "node")
    warnings = [r.getMessage() for r in told.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("tier=node run=r step=1 is not hydrated, and read from afar: tier 'node' holds")


def test_a_tier_that_cannot_be_written_fails_no_load(root: Path, storages: dict[str, Counted], told: pytest.LogCaptureFixture) -> None:
    (root / "node").mkdir()
    with tierstore.open(config_of(root)) as store:
        for path in (root / "node").glob(".tmp/*"):
            path.unlink()
        (root / "node/.tmp").rmdir()
        (root / "node/.tmp").write_text("not a folder")
        assert_same_state(store.load(1), state_of(1))
    assert [r.levelno for r in told.records if "is not hydrated, and read from afar: can't open the lock" in r.getMessage()] == [30]


def test_off_by_default_a_load_writes_nothing(root: Path) -> None:
    with tierstore.open({k: v for k, v in config_of(root).items() if k != "load"}) as store:
        before = files_below(root / "node")
        store.load(1)
        assert files_below(root / "node") == before


def test_single_slices_and_tensors_hydrate_nothing(root: Path) -> None:
    with tierstore.open(config_of(root)) as store:
        before = files_below(root / "node")
        with store.open_checkpoint(1) as opened:
            assert torch.equal(opened["w"][5:9], state_of(1)["w"][5:9])
            assert torch.equal(opened["w"].full(), state_of(1)["w"])
        assert files_below(root / "node") == before


def test_what_is_wanted_in_small_part_is_read_from_afar(root: Path, storages: dict[str, Counted]) -> None:
    with tierstore.open(config_of(root)) as store:
        assert store.load(1, into={"b": torch.zeros(7)}, options=LoadOptions(unexpected="ignore"))["b"][0] == 1.0
    assert not shards(root, "node")
    assert 0 < from_far(storages) <= 64 << 10


def test_the_options_of_a_load_win_over_the_configuration(root: Path) -> None:
    load(root, options=LoadOptions(hydrate=False))
    assert not shards(root, "node")
    load(root, options=LoadOptions(hydrate="node"), hydrate="off")
    assert shards(root, "node")


def test_resume_hydrates_too(root: Path, storages: dict[str, Counted]) -> None:
    with tierstore.open(config_of(root)) as store:
        found = store.resume()
        assert found is not None
        assert_same_state(found.state, state_of(1))
    assert checkpoint(root).replicas["node"] == "complete"


@pytest.mark.parametrize(
    ("hydrate", "reason"),
    [("far", "all nodes see this tier"), ("nowhere", "no tier has this name"), ("", "hydrate=''"), (True, "hydrate=True")],
)
def test_a_tier_that_is_none_of_the_node_is_refused(root: Path, hydrate: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load(root, options=LoadOptions(hydrate=hydrate))


@pytest.mark.parametrize(
    ("tiers", "hydrate", "reason", "remedy"),
    [
        (["/a", "/b"], "shared", "all nodes see this tier", "name node, or write off"),
        (["/a", "/b"], "nod", "no tier has this name", "name node, or write off"),
        (["/a", "/b"], True, "it must be the name of a tier, or off", "off"),
        (["/a"], "shared", "all nodes see this tier", "put a folder of the node's own before the other tiers"),
        ([{"uri": "/a", "name": "disk", "scope": "node"}], "disk", "decides what is committed", "or write off"),
        ([{"uri": "memory://a", "name": "ram", "scope": "node"}, "/b"], "ram", "it is no path", "or write off"),
    ],
)
def test_a_configuration_that_hydrates_onto_no_tier_of_the_node_is_a_mistake(
    tiers: list[Any], hydrate: Any, reason: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        tierstore.load_config({"tiers": tiers, "load": {"hydrate": hydrate}}, env={})
    (mistake,) = caught.value.context["mistakes"]
    assert mistake["key"] == "load.hydrate"
    assert reason in mistake["reason"]
    assert remedy in mistake["remedy"]


def test_off_is_off_whichever_way_yaml_reads_it(tmp_path: Path) -> None:
    for written in ("off", '"off"', "false"):
        (tmp_path / "c.yaml").write_text(f"tiers: [/a, /b]\nload: {{hydrate: {written}}}\n")
        assert tierstore.load_config(tmp_path / "c.yaml", env={}).load.hydrate == "off"


def test_status_and_progress_show_what_is_on_its_way(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    events: list[tuple[str, str, int, int]] = []
    stores: list[tierstore.Store] = []

    async def look(operation: str, path: str) -> None:
        if operation == "read_into" and "/shard-" in path and not seen:
            seen.append(stores[0]._worker.progress.transfers())  # type: ignore[attr-defined]

    near_and_far(monkeypatch, {"far": look})
    config = tierstore.load_config(config_of(root))

    def note(tier: str, attempt: Attempt, file: str, nbytes_done: int, nbytes: int) -> None:
        events.append((tier, file, nbytes_done, nbytes))

    with tierstore.Store(config, progress=note) as store:
        stores.append(store)
        store.load(1)
        assert not store.status().worker.transfers
    (far,) = shards(root, "far").values()
    size = far.stat().st_size
    moved = [event for event in events if event[1] == far.name]
    assert moved[-1] == ("node", far.name, size, size)
    assert any(0 < event[2] < size for event in moved)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_reader_hydrates_as_its_configuration_says(root: Path, storages: dict[str, Counted]) -> None:
    state = {"w": torch.zeros_like(state_of(1)["w"]), "b": torch.zeros(7)}
    reader = TierStorageReader(config_of(root))
    tierstore.dcp.load(state, storage_reader=reader, no_dist=True)
    reader.close()
    assert torch.equal(state["w"], state_of(1)["w"])
    assert checkpoint(root).replicas["node"] == "complete"
