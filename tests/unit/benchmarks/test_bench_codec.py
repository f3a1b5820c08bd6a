"""The suite codec: on a small made-up state it measures ours and zstd, and compares what comes back."""

from __future__ import annotations

import bench_codec
import pytest
import torch
from measure import Table
from peers import codecs
from peers.codecs import OURS, PLAIN, Codec, Data


def made_up() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(200, 300, generator=generator) * 0.02
    moments = torch.randn(2, 200, 300, generator=generator) * 1e-3
    return {"model.w": master.to(torch.bfloat16), "master.w": master, "exp_avg.w": moments[0], "exp_avg_sq.w": moments[1] ** 2}


def test_the_suite_codec_measures_what_is_left_and_seconds_of_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_codec, "trained_state", lambda name: made_up())
    monkeypatch.setattr(bench_codec, "CODECS", [codec for codec in codecs.CODECS if codec.name in (OURS, PLAIN)])
    tables = {table.key: table for table in bench_codec.run(1 << 18, 1, "demo", {PLAIN: "left out"})}
    left, bound = (tables["codec.state.left"].median(name) for name in (OURS, bench_codec.BOUND))
    assert bound - 1 < left < 90
    assert tables["codec.master.encode.2"].rows[OURS].values
    assert tables["codec.state.left"].failed == {PLAIN: "left out"}
    assert tables["codec.whole"].median("both") < tables["codec.whole"].median("the codec") < 90


def test_a_codec_that_gives_back_other_bytes_is_listed() -> None:
    liar = Codec(name=PLAIN, make=lambda data: (bytes, lambda frame, nbytes: bytes(nbytes)))
    contest = bench_codec.Contest(Data(name="x", raw=b"abcd", itemsize=4), 50.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_codec, "CODECS", [liar])
        contest.run(1, {})
    assert "not what went in" in contest.left.failed[PLAIN]
    assert isinstance(contest.left, Table)
