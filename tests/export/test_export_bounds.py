"""Memory is bounded whatever the tensors' sizes, S3 is a target as any other, and the source of windows keeps its contract."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_kit import assert_tensors, saved, stored
from fork_kit import run_forked
from safetensors.torch import load as load_bytes

from tierstore.errors import UsageError
from tierstore.state.export.exporting import ExportOptions
from tierstore.state.export.plan import boxes_of_range
from tierstore.state.export.source import WindowSource
from tierstore.storage.loop import EventLoop
from tierstore.storage.opening import open_storage

MIB = 1 << 20

CHILD = """
import sys
import tierstore
from tierstore.state.export.exporting import ExportOptions

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

tier, to, format = sys.argv[1:]
with tierstore.open([tier], run="r") as store:
    checkpoint = store.open_checkpoint(1)
    checkpoint.export(to + "-small", ExportOptions(format=format, include=("small",), budget="32MiB"))  # imports and pools
    before = peak()
    checkpoint.export(to, ExportOptions(format=format, budget="32MiB", dtype="bfloat16" if format == "hf" else None))
    print(peak() - before)
"""


@pytest.mark.parametrize("format", ["hf", "dcp"])
def test_one_tensor_larger_than_the_budget_is_never_in_memory(tmp_path: Path, format: str) -> None:
    large = torch.rand(64, 1024, 1024)
    with stored(tmp_path, {"large": large, "small": torch.rand(3)}):
        pass
    done = run_forked(CHILD, str(tmp_path / "tier"), str(tmp_path / "out"), format)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout) << 10
    assert large.nbytes == 256 * MIB
    assert grown < 112 * MIB, f"{grown / MIB:.0f} MiB"  # the budget, what the reader of the store has for itself, and the allocator's slack


@pytest.mark.s3
@pytest.mark.parametrize("format", ["hf", "dcp", "torch"])
def test_s3_is_a_target_as_any_other(tmp_path: Path, s3_bucket: str, s3_options: dict[str, Any], format: str) -> None:
    state = {f"w{i}": torch.rand(1500, 1024) for i in range(5)}
    to = f"{s3_bucket}/model" + ("/state.pt" if format == "torch" else "")
    with saved(tmp_path, state) as checkpoint:
        options = ExportOptions(format=format, max_shard_size="13MB", budget="32MiB")  # type: ignore[arg-type]
        done = checkpoint.export(to, options, storage_options=s3_options)
    loop = EventLoop()
    storage = open_storage(f"{s3_bucket}/model", s3_options)
    try:
        found = {f.path: loop.run(storage.read(f.path)) for f in loop.run(storage.list(""))}
    finally:
        loop.run(storage.close())
        loop.close()
    assert {name: len(data) for name, data in found.items()} == {f.name: f.nbytes for f in done.files}
    if format == "hf":
        read: dict[str, torch.Tensor] = {}
        for name, data in found.items():
            if name.endswith(".safetensors"):
                read.update(load_bytes(data))
        assert_tensors(read, state)
    elif format == "dcp":
        for name, data in found.items():
            (tmp_path / "dcp").mkdir(exist_ok=True)
            (tmp_path / "dcp" / name).write_bytes(data)
        import torch.distributed.checkpoint as dcp

        into = {name: torch.zeros_like(value) for name, value in state.items()}
        with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
            dcp.load(into, checkpoint_id=tmp_path / "dcp")
        assert_tensors(into, state)
    else:
        (tmp_path / "state.pt").write_bytes(found["state.pt"])
        assert_tensors(torch.load(tmp_path / "state.pt", weights_only=True), state)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 5), (1, 6, 1, 2), (2, 1, 1, 3)])
def test_a_range_of_a_tensor_s_elements_is_few_boxes_in_order(shape: tuple[int, ...]) -> None:
    values = np.arange(int(np.prod(shape))).reshape(shape)
    for begin in range(values.size + 1):
        for end in range(begin, values.size + 1):
            boxes = list(boxes_of_range(shape, begin, end))
            parts = [values[tuple(slice(r.start, r.stop) for r in box)].ravel() for box in boxes]
            assert np.concatenate([np.zeros(0, int), *parts]).tolist() == list(range(begin, end))
            assert len(boxes) <= 2 * len(shape) + 1


class TestWindowSource:
    DATA = bytes(range(250)) * 41

    def make(self, begin: int, end: int) -> memoryview:
        self.made.append(begin)
        return memoryview(self.DATA)[begin:end]

    @pytest.fixture(autouse=True)
    def nothing_made(self) -> None:
        self.made: list[int] = []

    def source(self, make: Any = None) -> WindowSource:
        return WindowSource([*range(0, len(self.DATA), 1000), len(self.DATA)], make or self.make)

    def test_pulls_of_any_place_and_order_give_the_bytes(self) -> None:
        async def pulled() -> None:
            source = self.source()
            assert source.nbytes == len(self.DATA)
            ranges = [(0, 700), (700, 700), (9000, 1250), (3000, 1000), (2999, 2), (10249, 1), (5, 0), (500, 4000)]
            views = await asyncio.gather(*(source.read(begin, count) for begin, count in ranges))
            for (begin, count), view in zip(ranges, views, strict=True):
                assert view == self.DATA[begin : begin + count]
            with pytest.raises(UsageError, match="has no 2 bytes at 10249"):
                await source.read(10249, 2)
            source.close()

        asyncio.run(pulled())

    def test_what_is_pulled_in_order_is_made_once_and_one_window_ahead(self) -> None:
        async def pulled() -> None:
            source = self.source()
            for begin in range(0, len(self.DATA), 250):
                await source.read(begin, min(250, len(self.DATA) - begin))
            source.close()

        asyncio.run(pulled())
        assert self.made == list(range(0, len(self.DATA), 1000))

    def test_a_window_that_failed_is_made_again_when_it_is_pulled_again(self) -> None:
        failing = [OSError("once")]

        def make(begin: int, end: int) -> memoryview:
            if begin == 1000 and failing:
                raise failing.pop()
            return self.make(begin, end)

        async def pulled() -> None:
            source = self.source(make)
            assert await source.read(0, 10) == self.DATA[:10]
            with pytest.raises(OSError, match="once"):
                await source.read(1000, 10)
            assert await source.read(1000, 10) == self.DATA[1000:1010]
            source.close()

        asyncio.run(pulled())

    def test_one_pull_that_is_cancelled_does_not_take_the_window_from_another(self) -> None:
        free = threading.Event()

        def make(begin: int, end: int) -> memoryview:
            assert free.wait(30)
            return self.make(begin, end)

        async def pulled() -> None:
            source = self.source(make)
            first, second = asyncio.ensure_future(source.read(0, 10)), asyncio.ensure_future(source.read(10, 10))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
            free.set()
            assert await second == self.DATA[10:20]
            with pytest.raises(asyncio.CancelledError):
                await first
            source.close()

        asyncio.run(pulled())
