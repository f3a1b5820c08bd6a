"""Every verb for people and for programs: what it prints, how wide, and the exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import tierstore
from tierstore.cli.main import app
from tierstore.testing.servers import MotoServer
from tierstore.tiers.locks import RunLock, lock_path
from tierstore.tiers.session import Session


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with steps 10, 20 and 30 of run sft on three folders, made by the real thing."""
    root = tmp_path_factory.mktemp("cli")
    config = root / "tierstore.yaml"
    config.write_text(
        "run: sft\n"
        "tiers:\n"
        "  - {name: node, uri: ./node, scope: node}\n"
        "  - {name: shared, uri: ./shared, scope: shared}\n"
        "  - {name: far, uri: ./far, scope: shared}\n"
    )
    with tierstore.open(str(config)) as store:
        for step in (10, 20, 30):
            state = {"model": {"weight": torch.full((256, 64), float(step)), "bias": torch.zeros(64)}, "step": step}
            store.save(step, state, metrics={"val/loss": 1.0 / step}, tags=["release/1"] if step == 20 else None)
        store.sync()
    return config


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of the store that a test may harm."""
    shutil.copytree(saved.parent, tmp_path / "store")
    return tmp_path / "store" / "tierstore.yaml"


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_ls_shows_checkpoints_by_tiers(saved: Path) -> None:
    result = call("-c", saved, "ls")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if "shared" in line]
    assert [row[0] for row in rows] == ["30", "20", "10"]
    assert all(row[3:6] == ["node", "shared", "far"] for row in rows)
    assert "3 committed" in result.stdout
    assert "tag:release/1" in result.stdout


def test_ls_in_json_has_one_object_a_line(saved: Path) -> None:
    result = call("ls", "-c", saved, "--json")
    found = lines(result)
    assert [c["step"] for c in found] == [30, 20, 10]
    assert found[0]["tiers"] == {"node": "complete", "shared": "complete", "far": "complete"}
    assert found[1]["tags"] == ["release/1"]


@pytest.mark.parametrize("verb", [["ls"], ["show", "@20"], ["tensors"], ["verify"], ["status"], ["doctor"], ["sync"]])
def test_a_verb_fits_eighty_columns(saved: Path, verb: list[str]) -> None:
    result = call("-c", saved, *verb)
    assert result.exit_code == 0, result.output
    assert max((len(line) for line in result.stdout.splitlines()), default=0) <= 80


@pytest.mark.parametrize("verb", [["ls"], ["show", "@20"], ["tensors"], ["verify"], ["status"], ["doctor"]])
def test_json_is_nothing_but_json(saved: Path, verb: list[str]) -> None:
    assert lines(call("-c", saved, "--json", *verb))


def test_a_store_needs_no_file(saved: Path) -> None:
    folder = saved.parent
    result = call("ls", "--tier", folder / "node", "--tier", folder / "shared", "--tier", folder / "far", "--run", "sft", "--json")
    assert [c["step"] for c in lines(result)] == [30, 20, 10]


def test_show_has_files_replicas_and_log(saved: Path) -> None:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for value in lines(call("-c", saved, "show", "sft@best:val/loss", "--json")):
        kinds.setdefault(value["type"], []).append(value)
    assert kinds["checkpoint"][0]["step"] == 30
    assert {f["kind"] for f in kinds["file"]} == {"shard", "part", "objects", "index"}
    assert [r["tier"] for r in kinds["replica"]] == ["node", "shared", "far"]
    assert kinds["record"][0]["kind"] == "committed"


def test_tensors_are_chosen_by_a_pattern(saved: Path) -> None:
    found = lines(call("-c", saved, "tensors", "@tag:release/1", "*.weight", "--json"))
    assert [(t["name"], t["dtype"], t["shape"], t["nbytes"]) for t in found] == [("model.weight", "float32", [256, 64], 65536)]


def test_cat_writes_the_proved_bytes(saved: Path) -> None:
    folder = next((saved.parent / "shared" / "sft").glob("step-0000000020-*"))
    for file in sorted(folder.iterdir()):
        result = call("-c", saved, "cat", "@20", file.name)
        assert result.exit_code == 0
        assert result.stdout_bytes == file.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["show", "@21"], 4, "20"),
        (["ls", "stf"], 4, "did you mean"),
        (["tensors", "@20", "model.weigth"], 4, "model.weight"),
        (["cat", "@20", "manifset.json"], 4, "manifest.json"),
        (["show", "@tag:release/2"], 4, "release/1"),
        (["show", "sft@nonsense"], 2, "hint:"),
        (["show", "sft@latets"], 2, "did you mean latest?"),
        (["show", "sft@beast:val/loss"], 2, "did you mean best:METRIC?"),
        (["verify", "--read-data-subset", "8/7"], 2, "1/7"),
        (["verify", "--tier", "fra"], 2, "far"),
        (["ls", "--nonsense"], 2, "nonsense"),
    ],
)
def test_a_wrong_request_is_answered_with_what_is_right(saved: Path, arguments: list[str], code: int, words: str) -> None:
    result = call("-c", saved, *arguments)
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_v_shows_the_traceback(saved: Path) -> None:
    assert "Traceback" in call("-c", saved, "show", "@21", "-v").stderr


def test_a_wrong_configuration_exits_with_two(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("tires: [/a]\n")
    result = call("-c", tmp_path / "t.yaml", "ls")
    assert result.exit_code == 2
    assert "tiers" in result.stderr


def test_damage_exits_with_six_and_names_tier_and_file(copied: Path) -> None:
    shard = next((copied.parent / "far" / "sft").glob("step-0000000020-*/shard-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    assert call("-c", copied, "verify").exit_code == 0
    result = call("-c", copied, "verify", "--level", "full", "--json")
    assert result.exit_code == 6
    finding = next(v for v in lines(result) if v["type"] == "finding")
    assert (finding["code"], finding["tier"], finding["file"]) == ("V103", "far", shard.name)
    assert call("-c", copied, "verify", "--level", "full", "--tier", "node").exit_code == 0
    assert call("-c", copied, "verify", "@30", "--level", "full").exit_code == 0


def test_sync_copies_what_is_missing_and_a_dry_run_only_says_so(copied: Path) -> None:
    shutil.rmtree(copied.parent / "far")
    config = copied.parent / "wider.yaml"
    config.write_text(copied.read_text().replace("name: far, uri: ./far", "name: beyond, uri: ./beyond"))
    planned = [v for v in lines(call("-c", config, "sync", "-n", "--json")) if v["type"] == "copy"]
    assert [(c["step"], c["tier"], c["state"]) for c in planned] == [(s, "beyond", "pending") for s in (30, 20, 10)]
    assert not list((copied.parent / "beyond").glob("sft/step-*"))
    result = call("-c", config, "sync", "--json", "--bwlimit", "100MiB/s", "-j", 2)
    assert result.exit_code == 0, result.output
    assert {(c["step"], c["state"]) for c in lines(result) if c["type"] == "copy"} == {(s, "done") for s in (10, 20, 30)}
    assert lines(result)[-1]["done"] == 3
    assert "nothing was pending" in call("-c", config, "sync").stderr


def test_sync_exits_with_eight_while_another_works(copied: Path) -> None:
    with Session.open(tierstore.load_config(copied)) as session:
        lock = RunLock(lock_path(session.tiers, "sft"), "sft")
        lock.acquire()
        try:
            result = call("-c", copied, "sync")
        finally:
            lock.release()
    assert result.exit_code == 8, result.output
    assert str(os.getpid()) in result.stderr
    assert call("-c", copied, "sync").exit_code == 0


@pytest.mark.usefixtures("quick_retries")
def test_doctor_shows_no_secret_and_exits_with_five_while_an_endpoint_is_down(tmp_path: Path) -> None:
    config = tmp_path / "t.yaml"
    config.write_text(
        "run: r\nio: {request_timeout: 1s, stall_timeout: 1s}\n"
        "tiers:\n  - {name: node, uri: ./node, scope: node}\n  - {name: shared, uri: ./shared, scope: shared}\n"
        "  - name: object\n    uri: s3://bucket/x\n"
        "    options: {endpoint_url: 'http://127.0.0.1:9', key: AKIDEXAMPLE, secret: hunter2hunter2}\n"
    )
    result = call("-c", config, "doctor")
    assert result.exit_code == 5, result.output
    assert "hunter2" not in result.output
    assert "AKIDEXAMPLE" not in result.output
    assert re.search(r"^shared +yes +yes", result.stdout, re.M)


def test_probe_tries_the_contract_on_any_storage(tmp_path: Path) -> None:
    result = call("doctor", "--probe", tmp_path / "place", "--json")
    assert result.exit_code == 0
    assert lines(result)[-1]["can_be_authority"] is True
    with MotoServer(tmp_path / "s3") as server:
        bucket = server.make_bucket("probed")
        options = [f"--option={k}={v}" for k, v in server.options().items()]
        result = call("doctor", "--probe", f"s3://{bucket}/x", *options)
    assert "create-if-absent" in result.stdout
    assert result.exit_code == 0, result.output


def test_ls_starts_without_torch(saved: Path) -> None:
    code = (
        "import sys\nfrom tierstore.cli.main import app\n"
        "try:\n    app(['-c', sys.argv[1], 'ls'])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_m_tierstore_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "tierstore", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tierstore {tierstore.__version__}\n"


def test_recover_rebuilds_a_lost_log(copied: Path) -> None:
    shutil.rmtree(copied.parent / "shared")
    would = call("-c", copied, "recover", "-n", "--json")
    assert [(r["step"], r["state"]) for r in lines(would)] == [(10, "would be rebuilt"), (20, "would be rebuilt"), (30, "would be rebuilt")]
    assert call("-c", copied, "recover").exit_code == 0
    result = call("-c", copied, "ls", "--json")
    assert all(c["tiers"] == {"node": "complete", "shared": "complete", "far": "complete"} for c in lines(result))
    assert "nothing to recover" in call("-c", copied, "recover").output
