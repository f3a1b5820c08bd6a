"""A memory tier before a disk: a save copies its bytes once, its image is the tier's file, and eviction gives the memory back."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from folder_kit import files_below

import tierstore
from tierstore.errors import NotFoundError, TierFullError
from tierstore.state import image_memory
from tierstore.storage._syscalls import OsSyscalls
from tierstore.storage.posix import PosixStorage
from tierstore.tiers.persist import HashingSource
from tierstore.tiers.replica import Want, open_replica

ELEMENTS = 300_000
RETENTION = {"keep": [{"last": 4}], "tiers": {"memory": {"keep": [{"last": 1}]}}, "protect": {"min_age": "1ms"}}


class Counting(OsSyscalls):
    """Counts the bytes that each tier is given by writing."""

    written: dict[str, int]

    def __init__(self, tier: str, written: dict[str, int]) -> None:
        self.tier = tier
        self.written = written
        self.stands_for: dict[str, int] = {}
        self.lock = threading.Lock()

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        done = super().pwrite(fd, data, offset)
        with self.lock:
            self.written[self.tier] = self.written.get(self.tier, 0) + done
        return done

    def open(self, path: str, flags: int) -> int:
        return os.dup(self.stands_for[path]) if path in self.stands_for else super().open(path, flags)


@pytest.fixture
def written() -> dict[str, int]:
    return {}


@pytest.fixture
def opened(tmp_path: Path, written: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tierstore.Store]]:
    """Opens stores over a memory tier and a disk."""
    stores: list[tierstore.Store] = []

    def storage(uri: str, *_: Any, **__: Any) -> PosixStorage:
        name = Path(uri).name
        return PosixStorage(Path(uri), durable=False, syscalls=Counting(name, written))

    def make(memory: dict[str, Any] | None = None, **config: Any) -> tierstore.Store:
        monkeypatch.setattr("tierstore.tiers.opening.open_storage", storage)
        tiers = [
            {"name": "memory", "uri": str(tmp_path / "memory"), "scope": "node", "durable": False, **(memory or {})},
            {"name": "disk", "uri": str(tmp_path / "disk"), "scope": "shared"},
        ]
        stores.append(tierstore.open({"run": "r", "tiers": tiers, "retention": RETENTION, **config}))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((ELEMENTS,), float(step)), "step": step}


def shards(tmp_path: Path, tier: str = "memory") -> list[Path]:
    return files_below(tmp_path / tier, "shard-*")


def settle(store: tierstore.Store, tmp_path: Path) -> None:
    """Until all is everywhere, and the memory tier has dropped what it does not keep."""
    store.sync()
    end = time.monotonic() + 200
    while len(shards(tmp_path)) > 1 and time.monotonic() < end:
        store._worker._call(lambda engine: engine.tending.nudge())
        time.sleep(0.01)
    assert len(shards(tmp_path)) == 1


def test_the_bytes_are_copied_once_into_memory_and_once_to_the_disk(
    opened: Callable[..., tierstore.Store], written: dict[str, int], tmp_path: Path
) -> None:
    store = opened()
    written.clear()  # opening probes the authority
    store.save(0, state_of(0)).wait("durable", 200)
    store.sync()
    (image,) = shards(tmp_path)
    nbytes = image.stat().st_size
    assert image.stat().st_nlink == 2
    assert [name for name in os.listdir(tmp_path / "memory" / ".tmp") if name.startswith("image-")] != []
    assert written["memory"] < 100_000 < nbytes, "documents alone are written to the memory tier"
    assert nbytes <= written["disk"] < nbytes + 100_000
    assert shards(tmp_path, "disk")[0].read_bytes() == image.read_bytes()
    assert torch.equal(store.load()["w"], state_of(0)["w"])


def test_a_memory_tier_with_a_bandwidth_limit_takes_the_image_in_all_the_same(
    opened: Callable[..., tierstore.Store], written: dict[str, int], tmp_path: Path
) -> None:
    store = opened(memory={"max_bandwidth": "1GiB/s"})
    store.save(1, state_of(1)).wait("committed")
    settle(store, tmp_path)
    assert len(shards(tmp_path)) == 1
    assert written.get("memory", 0) < ELEMENTS, "its documents alone"


def test_two_images_take_turns_and_no_save_makes_fresh_memory(opened: Callable[..., tierstore.Store], tmp_path: Path) -> None:
    store = opened()
    pool = store._pool
    prepared = store.prepare(state_of(0))
    assert (prepared.images, store.prepare(state_of(1)).images) == (2, 0)
    held, files = pool.nbytes, set()
    for step in range(6):
        ticket = store.save(step, state_of(step))
        assert ticket.stall is not None
        assert ticket.stall.allocate_s == 0
        ticket.wait("durable", 200)
        settle(store, tmp_path)
        files.add(shards(tmp_path)[0].stat().st_ino)
        assert pool.nbytes == held
    assert pool.made == len(files) == 2
    for step in range(2, 6):
        assert torch.equal(store.load(step)["w"], state_of(step)["w"])


def test_the_file_is_as_long_as_the_shard_when_the_state_grows_and_shrinks(opened: Callable[..., tierstore.Store], tmp_path: Path) -> None:
    store = opened()
    for step, elements in enumerate((ELEMENTS, ELEMENTS - 700, ELEMENTS + 5000, 10, ELEMENTS)):
        state = {"w": torch.full((elements,), float(step))}
        store.save(step, state).wait("durable", 200)
        settle(store, tmp_path)
        assert shards(tmp_path)[0].stat().st_size == max(p.stat().st_size for p in shards(tmp_path, "disk") if f"{step:010d}" in str(p))
        assert torch.equal(store.load()["w"], state["w"])


def test_a_reader_of_a_copy_that_is_evicted_and_filled_again_gets_its_bytes_from_the_next_tier(
    opened: Callable[..., tierstore.Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where the kernel does not tell that somebody has the file open: then the digests have to.
    monkeypatch.setattr(image_memory, "_open_elsewhere", lambda fd: False)
    store = opened()
    store.save(0, state_of(0)).wait("durable", 200)
    store.sync()
    # As a reader whose lease has run out: what is leased is not evicted.
    replica = store._session.run(open_replica(store._session.tiers, store.checkpoints()[0]))
    extent = replica.index.find("w").extents[0]
    (path,) = shards(tmp_path)
    before = path.stat().st_ino
    with path.open("rb") as reading:
        syscalls = store._session.tiers.nearest.storage._tree.syscalls  # type: ignore[attr-defined]
        for step in (1, 2):
            store.save(step, state_of(step)).wait("durable", 200)
            settle(store, tmp_path)
        assert shards(tmp_path)[0].stat().st_ino == before, "the file that the reader has open is that of step 2 by now"
        syscalls.stands_for[str(path)] = reading.fileno()
        got = torch.empty(ELEMENTS)
        buffer = memoryview(got.numpy()).cast("B")  # type: ignore[arg-type]
        store._session.run(replica.read([Want(file=extent.file, offset=extent.begin, buffer=buffer)]))
        syscalls.stands_for.clear()
    assert torch.equal(got, state_of(0)["w"])
    assert replica.bytes_fetched["disk"] > 0 < replica.bytes_fetched["memory"], "both were read, and the memory tier's bytes refused"
    store.sync()
    assert not [r for c in store.checkpoints() for r in c.records if r.kind == "quarantined"]
    assert torch.equal(store.load(2)["w"], state_of(2)["w"])


def test_a_tier_that_has_no_room_for_two_images_fails_no_save(
    opened: Callable[..., tierstore.Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    store.save(0, state_of(0)).wait("durable", 200)

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image_memory.os, "posix_fallocate", full)
    ticket = store.save(1, state_of(1))
    ticket.wait("durable", 200)
    store.sync()
    assert torch.equal(store.load()["w"], state_of(1)["w"])


def test_who_keeps_the_ticket_of_a_save_that_a_full_tier_refused_keeps_no_image(
    opened: Callable[..., tierstore.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[weakref.ref[HashingSource]] = []

    async def full(self: PosixStorage, path: str, source: HashingSource) -> None:
        if path.endswith(".safetensors") and self.uri.endswith("memory"):
            kept.append(weakref.ref(source))
            raise TierFullError("no room")
        return await write(self, path, source)

    write: Any = PosixStorage.write
    monkeypatch.setattr(PosixStorage, "write", full)
    monkeypatch.setattr(PosixStorage, "clone", None)
    store = opened()
    gc.disable()
    try:
        ticket = store.save(1, state_of(1))
        ticket.wait("durable", 200)
        store.close()
        assert kept
        assert [reference() for reference in kept] == [None] * len(kept)
        assert ticket.errors
    finally:
        gc.enable()


def test_a_memory_tier_that_was_removed_meanwhile_costs_no_save(opened: Callable[..., tierstore.Store], tmp_path: Path) -> None:
    store = opened()
    store.save(0, state_of(0)).wait("durable", 200)
    store.sync()
    for name in os.listdir(tmp_path / "memory"):
        if name != "tierstore.json":
            shutil.rmtree(tmp_path / "memory" / name, ignore_errors=True)
    for step in (1, 2):
        store.save(step, state_of(step)).wait("durable", 200)
    store.sync()
    for step in range(3):
        assert torch.equal(store.load(step)["w"], state_of(step)["w"])


def test_what_a_dead_process_left_in_the_memory_tier_is_swept_and_its_checkpoint_stays(
    opened: Callable[..., tierstore.Store], tmp_path: Path
) -> None:
    store = opened()
    store.save(0, state_of(0)).wait("durable", 200)
    store.sync()
    (image,) = (tmp_path / "memory" / ".tmp").glob("image-*")
    dead = image.with_name(image.name.rsplit("-", 2)[0] + "-1-" + image.name.rsplit("-", 1)[1])  # another start: the id was used again
    os.link(image, dead)
    other = opened()
    assert not dead.exists()
    assert image.exists()
    assert torch.equal(other.load()["w"], state_of(0)["w"])
    with pytest.raises(NotFoundError):
        other.load(7)
