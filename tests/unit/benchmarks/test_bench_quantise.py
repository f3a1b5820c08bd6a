"""The suite quantise, at a tiny size: what it measures of each scheme."""

from __future__ import annotations

from collections.abc import Iterator

import bench_quantise
import pytest
import torch

from tierstore.cli.demo_model import read_corpus


@pytest.fixture(scope="module")
def torch_as_it_was() -> Iterator[None]:
    """A trainer makes all of torch in this process deterministic; the next test file is to find it as it was."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def measured(torch_as_it_was: None) -> dict[str, dict[str, float]]:
    tables = bench_quantise.tables()
    with bench_quantise.sized({"LAYERS": 1, "PAIRS": 1024, "WIDTH": 64, "HEADS": 2}):
        bench_quantise.run(read_corpus(1 << 16), 0, 4, 2, tables)
    return {key: {row.name: row.median for row in table.measured()} for key, table in tables.items()}


def test_every_way_is_measured(measured: dict[str, dict[str, float]]) -> None:
    for key, rows in measured.items():
        assert set(rows) == set(bench_quantise.tables()[key].rows), key


def test_drift_is_in_the_order_of_the_errors(measured: dict[str, dict[str, float]]) -> None:
    drift = measured["drift"]
    assert 0 < drift["moments in bfloat16"] < drift["q8"] < drift["q4"] < drift["state reset"]
    assert drift["q8"] < drift[f"q8{bench_quantise.AGAIN}"]
    assert measured["rows"]["q8"] < measured["rows"]["PaddleNLP O1"]  # rows that never occur take its resolution


def test_bytes_and_errors_of_steps_are_those_of_the_schemes(measured: dict[str, dict[str, float]]) -> None:
    assert measured["steps"]["q8"] < 0.05 < measured["steps"]["q4"] < 0.4
    assert measured["bytes"]["q4"] < 1.4 < measured["bytes"]["q8"] < 2.2
    assert measured["row-steps"]["state reset"] == pytest.approx(1)
