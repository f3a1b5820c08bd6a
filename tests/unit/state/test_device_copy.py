"""Copies that a device makes by itself, on a device that does what it was asked for only when somebody waits: order, memory, failures.

Strided tensors on the CPU stand for tensors on the device: both go to `DeviceCopies` and never through memmove.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from state_kit import ImageReader, run

import tierstore
from tierstore.errors import IntegrityError
from tierstore.state.device_copy import DeviceCopies
from tierstore.state.image import ImagePool
from tierstore.state.load import load_state
from tierstore.state.stage import prepare, stage
from tierstore.state.stage_chunks import ChunkSpec, PlannedChunk, stage_chunks

_turn = threading.RLock()
"""The device does one thing after the other, whoever asks."""


class LazyStream:
    """Work is done in order, and only when `run_to` asks for it."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.at = 0
        self.fails = False

    def run_to(self, place: int) -> None:
        if self.fails:
            raise RuntimeError("an illegal memory access was encountered")
        with _turn:
            while self.at < place:
                self.work[self.at]()
                self.at += 1

    def ask(self, work: Callable[[], object]) -> None:
        self.work.append(work)

    def wait(self, other: Any) -> None:
        place = len(other.work)
        self.ask(lambda: other.run_to(place))

    def copy(self, place: torch.Tensor, source: torch.Tensor) -> None:
        self.ask(lambda: place.copy_(source))

    def mark(self) -> LazyEvent:
        return LazyEvent(self, len(self.work))


class LazyEvent:
    def __init__(self, stream: LazyStream, place: int) -> None:
        self.stream, self.place = stream, place

    def done(self) -> bool:
        return self.stream.at >= self.place

    def wait(self) -> None:
        self.stream.run_to(self.place)


class LazyDevice:
    def __init__(self) -> None:
        self.streams = {"current": LazyStream(), "side": LazyStream()}
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.refuses = False

    def register(self, address: int, nbytes: int) -> None:
        self.calls.append("register")
        if self.refuses:
            raise RuntimeError("cudaHostRegister answered 2")
        assert address not in self.registered
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self.calls.append("unregister")
        del self.registered[address]

    def current(self, device: torch.device) -> LazyStream:
        return self.streams["current"]

    def side(self, device: torch.device) -> LazyStream:
        return self.streams["side"]


@pytest.fixture
def device() -> LazyDevice:
    return LazyDevice()


@pytest.fixture
def copies(device: LazyDevice) -> DeviceCopies:
    return DeviceCopies({"cpu": device})


@pytest.fixture(params=["anonymous", "file"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ImagePool]:
    made = ImagePool(None if request.param == "anonymous" else tmp_path / ".tmp", max_nbytes=1 << 30)
    yield made
    made.close()


def on_device(value: float, rows: int = 300) -> torch.Tensor:
    return torch.full((200, rows), value).t()


def loaded(staged: Any) -> Any:
    return load_state(ImageReader([staged]), run)


def test_save_returns_while_the_copies_go_on_and_readers_wait_for_them(copies: DeviceCopies, device: LazyDevice, pool: ImagePool) -> None:
    staged = stage({"w": on_device(3.0), "host": torch.ones(5)}, pool=pool, devices=copies)
    assert device.streams["side"].at == 0
    assert bytes(staged.source.view(0, 8)) == bytes(run(staged.source.read(0, 8)))
    assert device.streams["side"].at == 2
    got = loaded(staged)
    assert torch.equal(got["w"], torch.full((300, 200), 3.0))
    assert torch.equal(got["host"], torch.ones(5))


def test_the_caller_may_change_its_tensors_at_once(copies: DeviceCopies, device: LazyDevice, pool: ImagePool) -> None:
    weight, current = on_device(1.0), device.streams["current"]
    current.ask(lambda: weight.fill_(2.0))  # a kernel that was asked for and has not run yet when save is called
    staged = stage({"w": weight}, pool=pool, devices=copies)
    current.ask(lambda: weight.fill_(9.0))  # the next step of training
    current.run_to(len(current.work))
    assert float(weight[0, 0]) == 9.0
    assert torch.equal(loaded(staged)["w"], torch.full((300, 200), 2.0))


def test_an_image_is_registered_once_and_let_go_before_its_memory(copies: DeviceCopies, device: LazyDevice, pool: ImagePool) -> None:
    for value in range(4):
        staged = stage({"w": on_device(float(value))}, pool=pool, devices=copies)
        assert torch.equal(loaded(staged)["w"], torch.full((300, 200), float(value)))
        staged.release()
    assert device.calls == ["register"]
    stage({"w": on_device(1.0, rows=260)}, pool=pool, devices=copies).release()
    assert device.calls == ["register", "unregister", "register"], "pages of another length are other pages"
    pool.close()
    assert device.calls[3:] == ["unregister"]
    assert device.registered == {}


def test_host_tensors_alone_register_nothing(copies: DeviceCopies, device: LazyDevice, pool: ImagePool) -> None:
    stage({"w": torch.ones(1000)}, pool=pool, devices=copies).release()
    assert device.calls == []


def test_preparing_registers_the_images(copies: DeviceCopies, device: LazyDevice, pool: ImagePool) -> None:
    assert prepare({"w": on_device(1.0)}, images=2, pool=pool, devices=copies).images == 2
    assert device.calls == ["register"] * 2
    stage({"w": on_device(1.0)}, pool=pool, devices=copies)
    stage({"w": on_device(1.0)}, pool=pool, devices=copies)
    assert device.calls == ["register"] * 2


def test_without_registration_save_waits_for_its_copies(
    copies: DeviceCopies, device: LazyDevice, pool: ImagePool, caplog: pytest.LogCaptureFixture
) -> None:
    device.refuses = True
    for value in (4.0, 5.0):
        weight = on_device(value)
        staged = stage({"w": weight}, pool=pool, devices=copies)
        weight.zero_()
        assert torch.equal(loaded(staged)["w"], torch.full((300, 200), value))
    assert device.calls == ["register"], "it is not asked again"
    assert caplog.text.count("copies are waited for") == 1
    assert device.streams["side"].work == []


def test_memory_is_recycled_only_when_no_copy_is_under_way(copies: DeviceCopies, device: LazyDevice, pool: ImagePool) -> None:
    stage({"w": on_device(1.0)}, pool=pool, devices=copies).release()
    staged = stage({"w": torch.full((300, 200), 2.0)}, pool=pool, devices=copies)
    side = device.streams["side"]
    side.run_to(len(side.work))
    assert torch.equal(loaded(staged)["w"], torch.full((300, 200), 2.0))
    assert pool.made == 1


def test_a_device_that_fails_fails_the_save_and_nothing_else(
    copies: DeviceCopies, device: LazyDevice, pool: ImagePool, caplog: pytest.LogCaptureFixture
) -> None:
    staged = stage({"w": on_device(1.0)}, pool=pool, devices=copies)
    device.streams["side"].fails = True
    with pytest.raises(IntegrityError, match="illegal memory access"):
        run(staged.source.read(0, 8))
    with pytest.raises(IntegrityError, match="from cpu"):
        staged.source.view(0, 8)
    staged.release()
    assert "illegal memory access" in caplog.text
    assert not pool._busy


def test_a_device_that_fails_when_it_is_asked_how_far_it_is_fails_the_save_as_well(
    copies: DeviceCopies, device: LazyDevice, pool: ImagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(event: LazyEvent) -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(LazyEvent, "done", lost)
    device.streams["side"].fails = True
    staged = stage({"w": on_device(1.0)}, pool=pool, devices=copies)
    with pytest.raises(IntegrityError, match="illegal memory access"):
        run(staged.source.read(0, 8))
    staged.release()
    assert not pool._busy


def test_copies_that_cannot_be_begun_are_made_one_by_one(
    copies: DeviceCopies, device: LazyDevice, pool: ImagePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, left = LazyStream.copy, [1]

    def copy(stream: LazyStream, place: torch.Tensor, source: torch.Tensor) -> None:
        if not left:
            raise RuntimeError("out of memory")
        left.pop()
        real(stream, place, source)

    monkeypatch.setattr(LazyStream, "copy", copy)
    staged = stage({"a": on_device(1.0), "b": on_device(2.0)}, pool=pool, devices=copies)
    assert torch.equal(loaded(staged)["b"], torch.full((300, 200), 2.0))
    assert "out of memory" in caplog.text


def test_chunks_of_a_planner_go_the_same_way(copies: DeviceCopies, device: LazyDevice, pool: ImagePool) -> None:
    weight = on_device(6.0)
    spec = ChunkSpec(name="w", dtype="float32", shape=(300, 200), global_shape=(300, 200), offsets=(0, 0))
    chunk = PlannedChunk(spec=spec, get=lambda: weight)
    staged = stage_chunks([chunk], objects=b"", rank=0, world_size=1, pool=pool, devices=copies)
    side = device.streams["side"]
    assert (side.at, len(side.work)) == (0, 2)
    extent = staged.tensors[0].extents[0]
    assert bytes(staged.source.view(extent.begin, 8)) == b"\0\0\xc0@" * 2
    staged.release()


@pytest.mark.parametrize("durable", [True, False])
def test_a_store_saves_what_the_device_had_when_save_was_called(
    tmp_path: Path, device: LazyDevice, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    monkeypatch.setattr("tierstore.store.DeviceCopies", lambda: DeviceCopies({"cpu": device}))
    tiers = [{"name": "near", "uri": str(tmp_path / "near"), "durable": durable}, {"name": "far", "uri": str(tmp_path / "far")}]
    weight, current = on_device(1.0), device.streams["current"]
    with tierstore.open({"run": "r", "tiers": tiers}) as store:
        for step in range(3):
            store.save(step, {"w": weight})
            current.ask(lambda: weight.add_(1))
            current.run_to(len(current.work))
        store.sync()
        for step in range(3):
            assert torch.equal(store.load(step)["w"], torch.full((300, 200), 1.0 + step))
