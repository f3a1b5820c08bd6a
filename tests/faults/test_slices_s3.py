"""Slices of large tensors from a real S3 server: the requests and the bytes that they take, counted on the wire (the issue's promises)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tierstore
from tierstore.state.lazy import Checkpoint
from tierstore.state.load import LoadOptions
from tierstore.testing.proxy import CuttingProxy
from tierstore.testing.servers import S3Server

pytestmark = pytest.mark.s3

MIB = 1 << 20
SHAPES = {
    "short": (4096, 4096),  # rows of 16 KiB
    "block": (64, 262_144),  # of 1 MiB
    "long": (16, 1_048_576),  # of 4 MiB
    "odd": (23, 731_111),  # of 2.8 MiB, and no whole number of anything
    "deep": (8, 16, 65_536),
}
SMALL = 60


@dataclass(frozen=True, kw_only=True)
class Far:
    store: tierstore.Store
    checkpoint: Checkpoint
    proxy: CuttingProxy


def value(name: str) -> torch.Tensor:
    """All elements differ, so that a byte from a wrong place shows."""
    shape = SHAPES[name]
    return torch.arange(math.prod(shape), dtype=torch.int32).view(shape)


@pytest.fixture(scope="module")
def far(s3_server: S3Server) -> Iterator[Far]:
    """A checkpoint of five tensors of 32 to 64 MiB and many small ones, opened through a proxy that counts."""
    bucket = s3_server.make_bucket("tierstore-test-slices")
    tier = {"name": "object", "uri": f"s3://{bucket}/slices", "options": s3_server.options()}
    with tierstore.open({"run": "r", "tiers": [tier]}) as store:
        state = {**{name: value(name) for name in SHAPES}, **{f"small{i}": torch.full((1000,), float(i)) for i in range(SMALL)}}
        store.save(1, state).wait("committed", timeout=120)
    with CuttingProxy(s3_server.endpoint_url) as proxy:
        options = {**s3_server.options(), "endpoint_url": proxy.endpoint_url}
        with tierstore.open(
            {"run": "r", "tiers": [{**tier, "options": options, "read": {"latency": "20ms", "bandwidth": "100MiB/s"}}]}
        ) as store:
            yield Far(store=store, checkpoint=store.open_checkpoint(), proxy=proxy)


def counted(far: Far, name: str, key: Any) -> tuple[int, int]:
    """Requests and body bytes for a slice, which is checked."""
    wanted = value(name)[key]
    far.proxy.clear()
    assert torch.equal(far.checkpoint[name][key], wanted)
    requests = [one for one in far.proxy.requests if "/.leases/" not in one[1]]  # the checkpoint's own is renewed now and then
    assert far.proxy.count("GET", "shard-") == len(requests)
    return len(requests), far.proxy.body_nbytes


def tensor_nbytes(name: str) -> int:
    return value(name).nbytes


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("share", [1, 16])
def test_a_row_slice_fetches_what_it_needs_and_at_most_a_block_at_each_end(far: Far, name: str, share: int) -> None:
    rows = SHAPES[name][0]
    key = slice(rows // 3 - 1, rows // 3 - 1 + max(1, rows // share // 2))
    _, nbytes = counted(far, name, key)
    assert nbytes <= 1.05 * value(name)[key].nbytes + 2 * MIB


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("part", ["first column", "an eighth", "all but one", "every second"])
def test_columns_take_at_most_one_request_for_8_mib_of_the_tensor(far: Far, name: str, part: str) -> None:
    width = SHAPES[name][-1]
    columns = {
        "first column": slice(0, 1),
        "an eighth": slice(width // 8, width // 4),
        "all but one": slice(0, width - 1),
        "every second": slice(1, None, 2),
    }
    requests, nbytes = counted(far, name, (..., columns[part]))
    assert requests <= max(1, tensor_nbytes(name) // (8 * MIB))
    assert nbytes <= tensor_nbytes(name) + 2 * MIB


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("step", [1, 3])
def test_cells_and_steps_take_no_more_requests_than_columns(far: Far, name: str, step: int) -> None:
    rows, width = SHAPES[name][0], SHAPES[name][-1]
    key = (slice(rows // 4, rows // 4 + rows // 2, step), ..., slice(width // 3, width // 2))
    requests, nbytes = counted(far, name, key)
    assert requests <= max(1, tensor_nbytes(name) // 2 // (8 * MIB))
    assert nbytes <= tensor_nbytes(name) // 2 + 2 * MIB


def test_many_small_neighbours_are_one_request(far: Far) -> None:
    into = {f"small{i}": torch.zeros(1000) for i in range(SMALL)}
    far.proxy.clear()
    far.store.load(into=into, options=LoadOptions(unexpected="ignore"))
    assert all(torch.equal(tensor, torch.full((1000,), float(i))) for i, tensor in enumerate(into.values()))
    assert far.proxy.count("GET", "shard-") == 1
