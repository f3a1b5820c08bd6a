"""From a bucket to the first rows of a tensor: which requests that takes, and that none waits for another without need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import tierstore
from tierstore.testing.proxy import CuttingProxy, Rule
from tierstore.testing.servers import S3Server

pytestmark = pytest.mark.s3

NAMES = [f"t{number}" for number in range(50)]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[CuttingProxy]:
    with CuttingProxy(s3_server.endpoint_url) as one:
        yield one


@pytest.fixture
def far(proxy: CuttingProxy, s3_bucket: str, s3_options: dict[str, Any]) -> Iterator[tierstore.Store]:
    """A store with one checkpoint, opened anew through a proxy that counts; nothing of the run was read yet."""
    tier = {"name": "object", "uri": s3_bucket, "options": s3_options}
    with tierstore.open({"run": "r", "tiers": [tier]}) as store:
        store.save(1, {name: torch.full((1000, 64), float(i)) for i, name in enumerate(NAMES)}).wait("committed", timeout=120)
    options = {**s3_options, "endpoint_url": proxy.endpoint_url}
    with tierstore.open({"run": "r", "tiers": [{**tier, "options": options}]}) as store:
        proxy.clear()
        yield store


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_the_first_rows_take_one_request_beside_what_opens_the_checkpoint(far: tierstore.Store, proxy: CuttingProxy) -> None:
    checkpoint = far.open_checkpoint()
    opened = {what: proxy.count("GET", what) for what in ("manifest.json", "index.safetensors", "shard-", "objects.json")}
    assert opened == {"manifest.json": 1, "index.safetensors": 1, "shard-": 0, "objects.json": 0}
    assert proxy.count("GET", r"/000000\.json") <= 1  # the commit record, unless this machine has read it before
    assert torch.equal(checkpoint["t7"][0:1], torch.full((1, 64), 7.0))
    assert proxy.count("GET", "shard-") == 1
    assert torch.equal(checkpoint["t8"][5:6], torch.full((1, 64), 8.0))
    assert proxy.count("GET", "shard-") == 2
    assert proxy.count("GET", "manifest.json|index.safetensors") == 2  # nothing is read twice


@pytest.mark.parametrize("held", ["manifest.json", "index.safetensors"])
def test_manifest_index_and_lease_are_asked_for_at_once(far: tierstore.Store, proxy: CuttingProxy, held: str) -> None:
    """Each a round trip, and none needs another's answer to be sent: only to be believed."""
    rule = proxy.add(Rule(method="GET", path=held, action="hold"))
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(far.open_checkpoint)
        try:
            until(rule.reached.is_set)
            until(lambda: proxy.count("GET", "manifest.json") == proxy.count("GET", "index.safetensors") == 1)
            until(lambda: proxy.count("PUT", r"\.leases/") == 1)
            assert not opening.done()
        finally:
            rule.release()
        assert torch.equal(opening.result(120)["t3"][0:1], torch.full((1, 64), 3.0))


def test_the_two_listings_of_a_run_are_asked_for_at_once(far: tierstore.Store, proxy: CuttingProxy) -> None:
    rule = proxy.add(Rule(method="GET", path="list-type=2", action="hold"))
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(far.open_checkpoint)
        try:
            until(rule.reached.is_set)
            until(lambda: proxy.count("GET", "list-type=2") == 2)
        finally:
            rule.release()
        assert len(opening.result(120)) == len(NAMES)
