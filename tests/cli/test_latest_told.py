"""``ls`` marks as the latest what ``latest`` loads, also where a log is damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from store_kit import unsynced
from typer.testing import CliRunner, Result

import tierstore
from tierstore.cli.main import app
from tierstore.errors import IntegrityError


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps on two tiers; each log has a record after the commit's."""
    monkeypatch.setattr("tierstore.tiers.opening.open_storage", lambda uri, *_args, **_settings: unsynced(uri))
    path = tmp_path / "tierstore.yaml"
    path.write_text("run: r\ntiers:\n  - {name: shared, uri: ./shared, scope: shared}\n  - {name: far, uri: ./far, scope: shared}\n")
    with tierstore.open(str(path)) as store:
        for step in (1, 2):
            store.save(step, {"w": torch.full((8,), float(step))}).wait("far", timeout=60)
            store.retention.tag(step, [f"t{step}"])
    return path


def damage(config: Path, step: int, number: int) -> None:
    """Makes a record of a step's log unreadable on every tier that has it."""
    found = list(config.parent.glob(f"*/r/.log/step-{step:010d}-*/{number:06d}.json"))
    assert found
    for path in found:
        path.write_text("nothing of ours")


def call(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["-c", str(config), *arguments], env={"COLUMNS": "200"})


def marked(config: Path) -> list[str]:
    """The steps that `ls` marks as the latest."""
    return [line.split()[0] for line in call(config, "ls").stdout.splitlines() if "latest" in line]


def of_type(config: Path, kind: str, *arguments: str) -> list[dict[str, Any]]:
    values = [json.loads(line) for line in call(config, *arguments, "--json").stdout.splitlines()]
    return [value for value in values if value["type"] == kind]


def test_a_checkpoint_whose_log_is_damaged_later_on_is_the_latest_for_ls_as_for_load(config: Path) -> None:
    assert marked(config) == ["2"]
    damage(config, 2, 2)
    assert marked(config) == ["2"]
    assert "log unreadable, latest" in call(config, "ls").stdout
    assert of_type(config, "checkpoint", "show")[0]["step"] == 2
    with tierstore.open(str(config)) as store:
        latest = store.latest()
        assert latest is not None
        assert (latest.step, store.load()["w"][0]) == (2, 2.0)
        resumed = store.resume()
    assert resumed is not None
    assert resumed.step == 2


def test_nothing_is_marked_as_the_latest_where_loading_the_latest_is_refused_and_it_is_said_why(config: Path) -> None:
    damage(config, 2, 0)
    assert marked(config) == []
    told = call(config, "ls")
    assert "its commit record can't be read" in told.stdout
    assert "nothing is r@latest: run 'r': the commit record of step 2 can't be read" in " ".join(told.stderr.split())
    (attempt,) = of_type(config, "attempt", "ls")
    assert "000000.json" in attempt["unreadable"]
    assert call(config, "show").exit_code == IntegrityError.exit_code
    with tierstore.open(str(config)) as store:
        with pytest.raises(IntegrityError, match="the commit record of step 2 can't be read"):
            store.latest()
        with pytest.raises(IntegrityError, match="the commit record of step 2 can't be read"):
            store.resume()
    damage(config, 1, 0)  # of a step that is older than what can be loaded it would say nothing: here there is none
    assert marked(config) == []


def test_a_damaged_commit_record_of_an_older_step_does_not_take_the_mark_from_the_latest(config: Path) -> None:
    damage(config, 1, 0)
    assert marked(config) == ["2"]
    assert "nothing is" not in call(config, "ls").stderr


def test_the_list_of_runs_names_the_latest_of_each_only_where_there_is_one(config: Path) -> None:
    with tierstore.open(str(config), run="q") as store:
        store.save(7, {"w": torch.zeros(8)}).wait("far", timeout=60)
    damage(config, 2, 0)
    tiers = [word for name in ("shared", "far") for word in ("--tier", str(config.parent / name))]
    listed = CliRunner().invoke(app, [*tiers, "ls", "--json"])
    assert listed.exit_code == 0, listed.output
    found = {value["run"]: (value["latest"], value["out_of_reach"]) for value in map(json.loads, listed.stdout.splitlines())}
    assert found == {"q": (7, []), "r": (None, [2])}


def test_where_the_newest_has_no_copy_left_the_one_before_is_the_latest_but_resume_asks_first(config: Path) -> None:
    for folder in config.parent.glob("*/r/step-0000000002-*"):
        shutil.rmtree(folder)
    assert marked(config) == ["1"]
    told = "step=2 is committed, but no tier that was reached has a complete copy"
    assert told in call(config, "ls").stderr
    with tierstore.open(str(config)) as store:
        assert store.load()["w"][0] == 1.0
        with pytest.raises(IntegrityError, match=r"pass it over with resume\(fallback=True\)"):
            store.resume()
        resumed = store.resume(fallback=True)
    assert resumed is not None
    assert (resumed.step, resumed.skipped) == (1, (2,))
