"""``du --explain``: what a checkpoint's bytes are, and what each option would save, against checkpoints of which that is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

import tierstore
from tierstore.cli.main import app
from tierstore.config import load_config

ROWS, COLUMNS = 384, 1024
LAYERS = 3


def state(step: int) -> dict[str, Any]:
    """AdamW with a master: weights rounded from it; moments that change with every step, an embedding that never does; a tied head."""
    torch.manual_seed(step)
    names = [f"layers.{n}.w" for n in range(LAYERS)]
    master = {name: torch.randn(ROWS, COLUMNS) * 0.02 for name in names}
    torch.manual_seed(0)
    frozen = torch.randn(2 * ROWS, COLUMNS).bfloat16()
    return {
        "model": {**{name: value.bfloat16() for name, value in master.items()}, "embed.w": frozen, "head.w": frozen},
        "optim": {
            "master": master,
            "state": {
                name: {"exp_avg": value * 1e-3, "exp_avg_sq": value.square() * 1e-6, "step": torch.tensor(float(step))}
                for name, value in master.items()
            },
        },
        "rng": torch.get_rng_state(),
    }


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explained")
    path = folder / "tierstore.yaml"
    path.write_text(
        "run: demo\ntiers:\n"
        "  - {name: node, uri: ./node, scope: node}\n"
        "  - {name: shared, uri: ./shared, codec: zstd, master_once: true}\n"
        "  - {name: far, uri: ./far}\n"
    )
    with tierstore.open(str(path)) as store:
        for step in (10, 20):
            store.save(step, state(step))
        store.sync()
    return path


def call(config: Path, *arguments: str, columns: int = 80) -> Result:
    return CliRunner().invoke(app, ["-c", str(config), "du", "--explain", *arguments], env={"COLUMNS": str(columns)})


def values(config: Path, *arguments: str) -> list[dict[str, Any]]:
    result = call(config, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def told(config: Path) -> list[dict[str, Any]]:
    """What is told of the newest checkpoint."""
    return values(config)


def of_type(told: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [value for value in told if value["type"] == kind]


NUMBERS = LAYERS * ROWS * COLUMNS
FROZEN = 2 * ROWS * COLUMNS


def test_bytes_are_told_apart_by_names_and_content_and_none_is_counted_twice(told: list[dict[str, Any]]) -> None:
    found = {one["class"]: one for one in of_type(told, "class")}
    sizes = {name: one["nbytes"] for name, one in found.items()}
    assert sizes.pop("other") == 5056 + 4 * LAYERS
    assert sizes == {
        "weights_16": 2 * (NUMBERS + FROZEN),
        "master": 4 * NUMBERS,
        "first_moment": 4 * NUMBERS,
        "second_moment": 4 * NUMBERS,
    }
    assert found["weights_16"]["rounded_nbytes"] == 2 * NUMBERS
    assert (found["weights_16"]["tied"], found["weights_16"]["tied_nbytes"]) == (1, 2 * FROZEN)
    assert found["master"]["tiers"]["far"] == 4 * NUMBERS
    [explained] = of_type(told, "explained")
    assert explained["before"] == 10
    assert 2 * FROZEN - (1 << 20) <= explained["unchanged_nbytes"] <= 2 * FROZEN  # in whole blocks


def test_what_it_foretells_is_what_packing_makes_of_it(config: Path, told: list[dict[str, Any]]) -> None:
    [packed] = (config.parent / "shared" / "demo").glob("step-0000000020-*/*.packed")
    [foretold] = [o["nbytes"] for o in of_type(told, "option") if (o["codec"], o["master_once"], o["quantise"]) == ("zstd", True, None)][:1]
    assert foretold == pytest.approx(packed.stat().st_size, rel=0.02)
    assert sum(one["tiers"]["shared"] for one in of_type(told, "class")) == pytest.approx(packed.stat().st_size, rel=0.001)


def test_each_option_is_told_with_what_it_saves(told: list[dict[str, Any]]) -> None:
    options = {(o["codec"], o["master_once"], o["unchanged_once"], o["quantise"]): o for o in of_type(told, "option")}
    whole = 14 * NUMBERS + 2 * FROZEN
    saved = {key: 1 - one["nbytes"] / whole for key, one in options.items()}
    assert saved["raw", True, False, None] == pytest.approx(2 * NUMBERS / whole, abs=0.01)
    assert saved["raw", False, True, None] == pytest.approx(2 * FROZEN / whole, abs=0.05)
    assert saved["raw", False, False, "q8"] == pytest.approx((8 - 2.1) * NUMBERS / whole, abs=0.03)
    assert 0.1 < saved["zstd", False, False, None] < 0.5
    lossless = saved["zstd", True, True, None]
    assert saved["zstd", True, False, None] < lossless < saved["zstd", True, False, "q8"] < saved["zstd", True, False, "q4"]


def test_the_lines_to_write_are_a_configuration_for_the_farthest_tier(config: Path, told: list[dict[str, Any]]) -> None:
    [advice] = of_type(told, "advice")
    written = yaml.safe_load(advice["yaml"])["tiers"]
    assert [(tier["name"], tier["codec"], tier["master_once"], tier["unchanged_once"]) for tier in written] == [("far", "zstd", True, True)]
    base = yaml.safe_load(config.read_text())
    merged = [{**tier, **next((w for w in written if w["name"] == tier["name"]), {})} for tier in base["tiers"]]
    assert load_config({**base, "tiers": merged}).tier("far").codec.name == "zstd"


def test_it_fits_eighty_columns_and_cuts_nothing_and_ends_with_what_to_write(config: Path, told: list[dict[str, Any]]) -> None:
    result = call(config)
    assert result.exit_code == 0, result.output
    [advice] = of_type(told, "advice")
    assert result.stdout.endswith(advice["yaml"])
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]


def test_of_an_older_checkpoint_and_with_a_small_sample(config: Path) -> None:
    told = values(config, "10", "--sample", "1MiB")
    [explained] = of_type(told, "explained")
    assert explained["before"] is None
    assert 0 < explained["sampled_nbytes"] < 24 << 20
    assert not [o for o in of_type(told, "option") if o["unchanged_once"] and o["codec"] == "raw"]


@pytest.mark.parametrize(("arguments", "told"), [(("10", "20"), "about one checkpoint"), (("--sample", "3KiB"), "a sample of 3KiB")])
def test_what_makes_no_sense_is_refused(config: Path, arguments: tuple[str, ...], told: str) -> None:
    result = call(config, *arguments)
    assert result.exit_code == 2
    assert told in result.output
