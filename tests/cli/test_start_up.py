"""What a start of the command line loads: its verb's modules, and none of those that are only for other verbs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
import typer.main

from tierstore.cli.main import app
from tierstore.cli.verbs import VERBS
from tierstore.config import load_config
from tierstore.testing.fabricate import fabricate
from tierstore.tiers.session import Session

HEAVY = ("torch", "numpy", "s3fs", "fsspec", "botocore", "aiobotocore", "aiohttp", "cryptography", "prometheus_client", "tierstore.store")
"""What most verbs have no use for, each a tenth of a second or more."""

PROGRAM = """
import json, runpy, sys
sys.argv = ["tierstore", *sys.argv[1:]]
try:
    runpy.run_module("tierstore", run_name="__main__")
except SystemExit as end:
    print("", json.dumps([end.code or 0, sorted(sys.modules)]), sep="\\n", flush=True)
"""


def modules_of(*arguments: str) -> set[str]:
    """What is loaded when the command line ends well."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=False)
    code, loaded = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return set(loaded)


def test_ls_of_a_local_store_loads_no_array_library_no_client_and_no_other_verb(tmp_path: Path) -> None:
    config = tmp_path / "tierstore.yaml"
    config.write_text("run: sft\ntiers:\n  - {name: node, uri: ./node, scope: node}\n  - {name: shared, uri: ./shared, scope: shared}\n")
    with Session.open(load_config(config)) as session:
        session.run(fabricate(session.tiers, "sft", 3))
    loaded = modules_of("-c", str(config), "ls")
    assert not loaded & set(HEAVY)
    assert {name for name in loaded if name.startswith("tierstore.cli.")} == {
        f"tierstore.cli.{name}" for name in ("find", "group", "layout", "listing", "main", "options", "render", "terminal", "verbs")
    }
    assert len([name for name in loaded if name.startswith("tierstore.")]) <= 84
    assert len(loaded) <= 700


def test_a_verb_has_pythons_collector_and_what_was_loaded_for_it_is_left_alone(tmp_path: Path) -> None:
    program = PROGRAM.replace("sorted(sys.modules)", "[gc.isenabled(), gc.get_freeze_count()]").replace("import json", "import gc, json")
    done = subprocess.run(
        [sys.executable, "-c", program, "ls", "--run", "sft", "--tier", str(tmp_path)], capture_output=True, text=True, check=False
    )
    _, (enabled, frozen) = json.loads(done.stdout.splitlines()[-1])
    assert enabled, done.stderr
    assert frozen > 10_000


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_the_help_loads_nothing_of_a_store(arguments: list[str]) -> None:
    loaded = modules_of(*arguments)
    assert not loaded & {*HEAVY, "asyncio", "tierstore.config", "tierstore.tiers", "tierstore.storage"}
    assert not {name.removeprefix("tierstore.cli.") for name in loaded} & {module for module, _ in VERBS.values()}


def test_the_table_of_verbs_says_of_each_what_its_function_says() -> None:
    for name, (module, does) in VERBS.items():
        function = getattr(import_module(f"tierstore.cli.{module}"), name)
        assert function.__module__ == f"tierstore.cli.{module}"
        assert " ".join(function.__doc__.split("\n\n")[0].split()) == does


def test_the_group_knows_every_verb_before_it_is_loaded() -> None:
    group = typer.main.get_command(app)
    context = group.make_context("tierstore", ["ls"], resilient_parsing=True)
    assert group.list_commands(context) == list(VERBS)
    assert [name for name, command in group.commands.items() if command.name != name] == []
    assert group.get_command(context, "nonsense") is None
