"""Quantising encodes each run of second moments once, though first moments are measured against what becomes of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import torch

from tierstore.format.packed import frame
from tierstore.format.shard import ChunkSpec, plan_shard
from tierstore.storage import packing_moments
from tierstore.storage.contract import PackHints
from tierstore.storage.packed import PackedStorage
from tierstore.storage.packing_rules import Packing, QuantiseRule
from tierstore.storage.sources import BytesSource
from tierstore.testing.bucket import Bucket

SHARD = "run/save/shard-00000-of-00001.safetensors"


def test_second_moments_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(600, 1000, generator=generator) * 1e-3
    state = {"w.exp_avg": m, "w.exp_avg_sq": m * m + 1e-12}
    specs = [ChunkSpec(name=k, dtype="float32", shape=(600, 1000), global_shape=(600, 1000), offsets=(0, 0)) for k in state]
    plan = plan_shard(specs)
    data = bytearray(plan.nbytes)
    data[: len(plan.header)] = plan.header
    for place in plan.placements:
        data[place.begin : place.end] = state[place.spec.name].reshape(-1).view(torch.uint8).numpy().tobytes()
    encoded: Counter[bytes] = Counter()
    encode = frame.encode_moment

    def counted(values: Any, q: Any, *zero: Any) -> Any:
        if q.kind == "second":
            encoded[values.tobytes()] += 1
        return encode(values, q, *zero)

    for module in (frame, packing_moments):
        monkeypatch.setattr(module, "encode_moment", counted)
    rule = QuantiseRule(scheme="q8", include=("*exp_avg", "*exp_avg_sq"))

    async def write() -> None:
        storage = PackedStorage(Bucket(), Packing(quantise=rule, threads=1))
        await storage.write_packed(SHARD, BytesSource(bytes(data)), PackHints())
        await storage.close()

    asyncio.run(write())
    assert sum(len(run) for run in encoded) == state["w.exp_avg_sq"].nbytes  # all of them, in runs of a block each
    assert set(encoded.values()) == {1}
