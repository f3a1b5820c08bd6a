"""async_save: overlapping saves, ties, errors, and both executors, the process one for real."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import IGNORED, causes, config, config_file, quiet
from ranks_kit import run_ranks
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import tierstore
import tierstore.dcp
from tierstore.dcp import TierStorageReader, TierStorageWriter
from tierstore.errors import UnsupportedTypeError

pytestmark = pytest.mark.filterwarnings(IGNORED)


def test_overlapping_saves_hold_the_values_of_their_own_steps(tmp_path: Path) -> None:
    """E16: stock's stager reuses its buffers, and the first checkpoint holds the second's values."""
    weight = torch.zeros(1 << 16)
    writer = TierStorageWriter(config(tmp_path))
    futures = []
    for step in range(1, 5):
        weight.fill_(float(step))
        futures.append(dcp.async_save({"w": weight, "step": step}, storage_writer=writer, checkpoint_id=step, no_dist=True))
    weight.fill_(-1.0)
    for future in futures:
        future.result(200)
    with tierstore.open(config(tmp_path)) as store:
        for step in range(1, 5):
            loaded = store.load(step)
            assert loaded["step"] == step
            assert torch.equal(loaded["w"], torch.full_like(weight, step))
    writer.close()


def test_staging_keeps_ties_and_shares_no_memory_with_the_state_or_another_save(tmp_path: Path) -> None:
    """E16, E13."""
    writer = TierStorageWriter(config(tmp_path))
    weight = torch.arange(6.0)
    state = {"a": weight, "b": weight, "n": {"c": [1, {"d": weight[2:4]}]}}
    first, second = writer.stage(state), writer.stage(state)
    for staged in (first, second):
        assert staged["a"].data_ptr() == staged["b"].data_ptr() == staged["n"]["c"][1]["d"].data_ptr() - 8
        assert staged["a"].data_ptr() != weight.data_ptr()
    assert first["a"].data_ptr() != second["a"].data_ptr()
    future = dcp.async_save({"a": weight, "b": weight}, storage_writer=writer, checkpoint_id=1, no_dist=True)
    future.result(200)
    with tierstore.open(config(tmp_path)) as store:
        loaded = store.load(1)
        assert loaded["a"] is loaded["b"]
    writer.close()


def test_a_failed_async_save_tells_its_future(tmp_path: Path) -> None:
    writer = TierStorageWriter(config(tmp_path))
    future = dcp.async_save({"a": object()}, storage_writer=writer, checkpoint_id=1, no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        future.result(200)
    [error] = causes(caught.value)
    assert isinstance(error, UnsupportedTypeError)
    writer.close()


def reserved_port() -> int:
    """Torch names a port seconds before it listens there: one that nobody else is given meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10000, 20000)  # below what Linux gives to clients, and what test servers choose from
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", port))
            return port


def thread_and_process(rank: int, world_size: int, folder: Path) -> Any:
    quiet()
    torch.multiprocessing.set_start_method("spawn", force=True)
    patch = pytest.MonkeyPatch()
    patch.setattr(_async_process_executor, "get_free_port", reserved_port)
    patch.setenv("MASTER_ADDR", "127.0.0.1")  # whatever a resolver says of this machine
    mesh = init_device_mesh("cpu", (world_size,))
    local = torch.zeros(10)
    writer = TierStorageWriter(f"tier://{folder / 'store.yaml'}/r/step-0")
    for step, kind in enumerate([AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS, AsyncCheckpointerType.PROCESS], 1):
        local.fill_(float(step))
        state = {
            "w": distribute_tensor(torch.arange(7.0) * step, mesh, [Shard(0)]),
            "plain": local,
            "rank": {"id": rank, "rng": (rank, step)},
        }
        if step == 3:  # through our own function, which makes the writer: the child process has never heard of tier://
            future = tierstore.dcp.async_save(state, checkpoint_id=f"tier://{folder / 'store.yaml'}/r/step-3", async_checkpointer_type=kind)
        else:
            future = dcp.async_save(state, storage_writer=writer, checkpoint_id=f"step-{step}", async_checkpointer_type=kind)
        local.fill_(-1.0)
        future.result(200)
    writer.close()
    reader = TierStorageReader(f"tier://{folder / 'store.yaml'}/r")
    found = []
    for step in (1, 2, 3):
        into = {
            "w": distribute_tensor(torch.zeros(7), mesh, [Shard(0)]),
            "plain": torch.zeros(10),
            "rank": {"id": None, "rng": None},
        }
        dcp.load(into, storage_reader=reader, checkpoint_id=f"step-{step}")
        found.append([into["w"].full_tensor().tolist(), into["plain"].tolist(), into["rank"]])
    reader.close()
    return found


def test_both_executors_save_with_two_ranks_what_was_staged(tmp_path: Path) -> None:
    config_file(tmp_path)
    for rank, found in enumerate(run_ranks(2, thread_and_process, tmp_path)):
        for step, (weight, plain, own) in enumerate(found, 1):
            assert weight == (torch.arange(7.0) * step).tolist()
            assert plain == [float(step)] * 10
            assert own == {"id": rank, "rng": [rank, step]}
