"""``tierstore export``: what a person and a program see, its exit codes, and what Ctrl-C leaves."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from export_kit import assert_tensors, hf_tensors, stored
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import tierstore
from tierstore.cli.main import app
from tierstore.errors import UsageError

MODEL = {"w": torch.rand(700, 512), "head": torch.rand(10, 4)}


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("export")
    with stored(root, {"model": {**MODEL, "tied": MODEL["w"]}, "optim": {"m": torch.rand(700, 512)}, "step": 1}):
        pass
    return root / "tier"


def call(tier: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["--tier", str(tier), "--run", "r", *map(str, arguments)])


def test_the_last_line_says_what_was_written_how_much_and_where(tier: Path, tmp_path: Path) -> None:
    to = tmp_path / "hf"
    done = call(tier, "export", "@1", to, "--strip", "model.", "--max-shard-size", "1MiB")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[-1] == f"wrote r@1 as hf: 2 tensors, 1.4MiB in 3 files, to {to}"
    assert "1 names are left out, as they are tied: tied is w" in lines
    assert "1 stored tensors were not chosen" in lines
    assert lines[0].split() == ["FILE", "SIZE", "TENSORS"]
    assert_tensors(hf_tensors(to), MODEL)
    again = call(tier, "export", "@1", to, "--strip", "model.")
    assert again.exit_code == 7
    assert "is not empty" in again.stderr
    assert call(tier, "export", "@1", to, "--strip", "model.", "--overwrite").exit_code == 0
    assert [f.name for f in to.iterdir()] == ["model.safetensors"]


def test_a_hugging_face_folder_without_a_configuration_is_told_of(tier: Path, tmp_path: Path) -> None:
    assert "no config.json goes along" in call(tier, "export", "@1", tmp_path / "bare", "--strip", "model.").stderr
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    done = call(tier, "export", "@1", tmp_path / "full", "--strip", "model.", "--config-from", tmp_path / "base")
    assert done.exit_code == 0
    assert "config.json goes along" not in done.stderr
    assert "config.json goes along" not in call(tier, "export", "@1", tmp_path / "dcp", "--format", "dcp").stderr


def test_a_dry_run_writes_nothing(tier: Path, tmp_path: Path) -> None:
    done = call(tier, "export", "@1", tmp_path / "hf", "-n", "--include", "*")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1].startswith("would write r@1 as hf: 3 tensors, 2.7MiB in 1 file, to ")
    assert not (tmp_path / "hf").exists()


def test_programs_get_one_object_a_line(tier: Path, tmp_path: Path) -> None:
    done = call(tier, "export", "latest", tmp_path / "dcp", "--format", "dcp", "--json")
    assert done.exit_code == 0, done.output
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["type"] for line in told] == ["file", "file", "export"]
    assert told[-1]["checkpoint"] == "r@1"
    assert told[-1]["tied"] == {"model.tied": "model.w"}
    assert told[-1]["nbytes"] == sum(line["nbytes"] for line in told[:-1]) == sum(f.stat().st_size for f in (tmp_path / "dcp").iterdir())


def test_rules_come_from_a_file(tier: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("others: drop\nrules:\n  - {match: w, to: weight, transpose: true}\n")
    done = call(tier, "export", "@1", tmp_path / "hf", "--strip", "model.", "--rules", rules, "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    assert_tensors(load_file(tmp_path / "hf" / "model.safetensors"), {"weight": MODEL["w"].T.bfloat16().contiguous()})


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["@1", "to"], 2, "choose it: --include 'model.*' --strip model."),
        (["@2", "to", "--strip", "model."], 4, "no committed step 2"),
        (["@1", "to", "--include", "nothing*"], 4, "nothing that is stored matches 'nothing*'"),
        (["@1", "to", "--dtype", "int4"], 2, "dtype is one of"),
        (["@1", "to", "--format", "onnx"], 2, "format is one of 'hf', 'dcp', 'torch'"),
        (["@1", "to", "--budget", "1MiB"], 2, "give 32MiB or more"),
        (["@1", "to", "--rules", "absent.yaml"], 4, "absent.yaml can't be read"),
        (["@1", "to", "--option", "endpoint_url"], 2, "has no value"),
        (["@1", "to", "--format", "dcp", "--config-from", "x"], 2, "goes with a Hugging Face directory"),
    ],
)
def test_a_mistake_has_its_code_and_a_way_out(
    tier: Path, tmp_path: Path, monkeypatch: Any, arguments: list[str], code: int, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(tier, "export", *arguments)
    assert (done.exit_code, told in done.stderr) == (code, True), done.stderr
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("inside", ["", "hf", "r/step-1", "r/.log/x"])
def test_the_store_s_own_places_are_no_target(tier: Path, inside: str) -> None:
    before = sorted(tier.rglob("*"))
    done = call(tier, "export", "@1", tier / inside, "--strip", "model.", "--overwrite")
    assert (done.exit_code, "lies within tier" in " ".join(done.stderr.split())) == (2, True), done.stderr
    with tierstore.open([str(tier)], run="r") as store, pytest.raises(UsageError, match="lies within tier"):
        store.export(1, tier / inside, tierstore.ExportOptions(strip="model.", overwrite=True))
    assert sorted(tier.rglob("*")) == before


def test_a_foreign_checkpoint_goes_straight_into_another_format(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file(MODEL, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text('{"dtype": "float32"}')
    done = CliRunner().invoke(app, ["export", "--foreign", str(tmp_path / "hf"), str(tmp_path / "state.pt"), "--format", "torch"])
    assert done.exit_code == 0, done.output
    assert_tensors(torch.load(tmp_path / "state.pt", weights_only=True), MODEL)
    done = CliRunner().invoke(app, ["export", "--foreign", str(tmp_path / "hf"), str(tmp_path / "cast"), "--dtype", "float16"])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "cast" / "config.json").read_text()) == {"dtype": "float16"}
    assert_tensors(hf_tensors(tmp_path / "cast"), {name: value.half() for name, value in MODEL.items()})


STOPPING = """
import asyncio, sys
from tierstore.__main__ import main
from tierstore.state.export.source import WindowSource

read, reads = WindowSource.read, 0

async def few(self, offset, nbytes):
    global reads
    reads += 1
    if reads > 5:
        await asyncio.Event().wait()
    return await read(self, offset, nbytes)

WindowSource.read = few
sys.argv[0] = "tierstore"
main()
"""
"""The command line; an export stands still after a few pieces, so that a Ctrl-C comes into the middle of it however late it is sent."""


def test_ctrl_c_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    with stored(tmp_path, {f"w{i}": torch.rand(4 << 20) for i in range(16)}):
        pass
    to = tmp_path / "hf"
    options = ["--tier", str(tmp_path / "tier"), "--run", "r", "--max-shard-size", "16MB"]
    command = [sys.executable, "-c", STOPPING, "export", "@1", str(to), *options]
    default = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # it is ignored where the tests run in a shell's background
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=default) as process:
        deadline = time.monotonic() + 120
        while not (to.is_dir() and any(to.glob("model-*"))):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise AssertionError(f"nothing was written: {process.communicate()}")
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        try:
            _, told = process.communicate(timeout=120)
        finally:
            process.kill()  # or one that did not hear of it would be waited for without end
    assert process.returncode == 130, told
    assert "interrupted" in told
    assert not (to / "model.safetensors.index.json").exists()
    assert list(to.iterdir()) == []
