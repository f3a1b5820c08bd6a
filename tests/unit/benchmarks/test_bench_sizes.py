"""The suite sizes: every combination is copied and weighed, on a small made-up state."""

from __future__ import annotations

from pathlib import Path

import bench_sizes
import pytest
import torch


def made_up() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (256, 320)
    master = torch.randn(shape, generator=generator) * 0.02
    moments = torch.randn(2, *shape, generator=generator) * 1e-3
    return {"model.w": master.to(torch.bfloat16), "master.w": master, "exp_avg.w": moments[0], "exp_avg_sq.w": moments[1] ** 2}


def test_whole_checkpoints_are_weighed_by_every_option_and_combination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_sizes, "trained_state", lambda name: made_up())
    few = [*bench_sizes.ways()][::5]
    monkeypatch.setattr(bench_sizes, "ways", lambda: few)
    whole, dense, adapters = bench_sizes.run("demo", tmp_path)
    taken = {row.name: row.median for row in whole.measured()}
    assert 14 <= taken[bench_sizes.RAW] < 15
    assert all(value < 14 for name, value in taken.items() if name != bench_sizes.RAW)
    assert set(dense.rows) == set(taken)
    assert adapters.median("codec: zstd, unchanged_once") <= adapters.median(bench_sizes.RAW)
    notes = {row.name: row.note for row in whole.measured()}
    assert {name for name, note in notes.items() if note} == {n for n in notes if "q8" in n or "q4" in n or "masters" in n or "Paddle" in n}


def test_the_combinations_are_those_of_codec_scheme_and_what_is_left_out() -> None:
    names = [way.name for way in bench_sizes.ways()]
    assert len(names) == len(set(names)) == 24
    assert names[0] == bench_sizes.RAW
    assert {"codec: zstd, master_once", "omit weights, quantise: q4, codec: zstd", "omit masters, quantise: q8"} <= set(names)
