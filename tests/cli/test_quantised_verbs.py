"""What the verbs say of copies that are not exact, and of what is stored."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_tiers_kit import adam_state
from tiers_kit import SteppedClock
from typer.testing import CliRunner, Result

import tierstore
from tierstore.cli.main import app


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """One checkpoint on three folders, the last of which quantises."""
    config = tmp_path / "tierstore.yaml"
    config.write_text(
        "run: sft\n"
        "tiers:\n"
        "  - {name: node, uri: ./node, scope: node}\n"
        "  - {name: shared, uri: ./shared}\n"
        "  - {name: far, uri: ./far, codec: zstd, quantise: q8}\n"
    )
    with tierstore.open(str(config)) as store:
        store.save(10, adam_state(10)).wait("far", timeout=60)
    return config


def call(config: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(app, ["-c", str(config), *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    return result


def values(config: Path, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in call(config, *arguments, "--json").stdout.splitlines()]


def test_quantised_copies_are_told_as_such_until_an_exact_one_is_pushed(saved: Path) -> None:
    shown = call(saved, "show").stdout
    assert "quantised q8 (steps off by" in shown
    replicas = {v["tier"]: v for v in values(saved, "show") if v["type"] == "replica"}
    assert (replicas["far"]["state"], replicas["far"]["quantised"]["scheme"]) == ("quantised", "q8")
    assert replicas["far"]["taken_nbytes"] < 0.6 * replicas["shared"]["taken_nbytes"]
    listed = call(saved, "ls").stdout
    assert "≈far" in listed
    assert "far q8 (steps off by" in listed
    assert "≈tier: quantised, not exact" in listed
    assert [v["quantised"]["far"]["scheme"] for v in values(saved, "ls") if v["type"] == "checkpoint"] == ["q8"]
    assert "1 (1 quantised)" in call(saved, "status").stdout
    assert call(saved, "verify", "--level", "full").exit_code == 0
    assert "already" in call(saved, "push", "@10", "--to", "far").stdout
    assert "done" in call(saved, "push", "@10", "--to", "far", "--exact").stdout
    assert "≈" not in call(saved, "ls").stdout
    assert "already" in call(saved, "push", "@10", "--to", "far", "--exact").stdout


def test_what_goes_back_to_a_quantised_copy_says_so_and_why_it_is_exact(saved: Path) -> None:
    for path in [p for name in ("node", "shared") for p in (saved.parent / name).rglob("shard-*")]:
        path.unlink()
    with tierstore.open(str(saved)) as store:
        resumed = store.resume()
        assert resumed is not None
        store.save(20, resumed.state).wait("far", timeout=60)
    shown = " ".join(call(saved, "show", "@20").stdout.split())
    assert "goes back to a quantised copy" in shown
    assert "complete, exact: the training was resumed from a quantised copy" in shown


def test_repair_names_the_quantised_copy_that_is_left_and_the_way_on(saved: Path) -> None:
    for path in [p for name in ("node", "shared") for p in (saved.parent / name).rglob("shard-*")]:
        path.unlink()
    result = CliRunner().invoke(app, ["-c", str(saved), "repair"], env={"COLUMNS": "160"})
    assert result.exit_code
    told = " ".join(result.output.split())
    assert "only a quantised copy is left, on far" in told
    assert (
        "load another step, or the quantised copy on far (it loads, with a warning), and save what was loaded as a new checkpoint" in told
    )


def test_recover_says_that_only_a_quantised_copy_is_left(saved: Path) -> None:
    for name in ("node", "shared"):
        shutil.rmtree(saved.parent / name)
    assert "no exact copy" in call(saved, "ls").stdout
    assert "what is left is quantised" in call(saved, "recover").stdout
    assert "≈far" in call(saved, "ls").stdout
    with tierstore.open(str(saved)) as store:
        resumed = store.resume()
        assert resumed is not None
        store.save(20, resumed.state).wait("far", timeout=60)
        assert store.checkpoints()[-1].complete_on == ("node", "shared", "far")


def test_verify_tells_before_and_after_recover_that_an_exact_copy_is_left_nowhere(saved: Path) -> None:
    assert call(saved, "verify").stdout.endswith("all is as promised\n")
    for name in ("node", "shared"):
        shutil.rmtree(saved.parent / name)
    runner = CliRunner()
    lost = runner.invoke(app, ["-c", str(saved), "verify"], env={"COLUMNS": "400"})
    assert lost.exit_code == 6
    assert "known from the copies on far alone; nothing of its files is left on shared" in lost.stdout
    told = "no-exact-copy: step 10: an exact copy is on no tier; this one is quantised (q8), and loads with a warning"
    assert told in lost.stdout
    assert "rebuilt" in call(saved, "recover").stdout
    after = call(saved, "verify").stdout
    assert told in after
    assert "all is as promised" not in after
    assert [(v["code"], v["tier"], v["severity"]) for v in values(saved, "verify", "--level", "full") if v["type"] == "finding"] == [
        ("V125", "far", "warning")
    ]
    assert "left alone sft@10 far: an exact copy is on no tier" in call(saved, "repair").stdout
    with tierstore.open(str(saved)) as store:
        loaded = store.load(10)
        assert torch.equal(loaded["master"]["w"], adam_state(10)["master"]["w"])
        store.save(20, loaded).wait("far", timeout=60)  # the way on
    assert [v["checkpoint"].partition("/")[2][:15] for v in values(saved, "verify") if v["type"] == "finding"] == ["step-0000000010"]


def test_push_foretells_what_becomes_of_a_quantised_copy_which_counts_for_nothing(tmp_path: Path) -> None:
    config = tmp_path / "tierstore.yaml"
    config.write_text(
        "run: sft\n"
        "tiers:\n"
        "  - {name: shared, uri: ./shared, scope: shared}\n"
        "  - {name: far, uri: ./far, codec: zstd, quantise: q8}\n"
        "retention: {keep: [{last: 5}], tiers: {shared: {keep: [{last: 1}]}, far: {keep: [{last: 1}]}}, protect: {min_age: 1h}}\n"
    )
    clock = SteppedClock()
    clock.wall = datetime.now(timezone.utc) - timedelta(days=2)
    with tierstore.open(str(config), clock=clock) as store:
        for step in (10, 20):
            store.save(step, adam_state(step)).wait("far", timeout=60)
    call(config, "gc", "-y")
    assert tiers_of(config, 10) == {"shared": "complete"}  # far keeps its last one, and shared the only copy that counts

    (foretold,) = [v for v in values(config, "push", "@10", "--to", "far", "-n") if v["type"] == "copy"]
    assert foretold["reason"] == "far keeps last 1"
    assert "done" in call(config, "push", "@10", "--to", "far", "-y").stdout
    assert tiers_of(config, 10) == {"shared": "complete", "far": "quantised"}
    call(config, "gc", "-y")
    assert tiers_of(config, 10) == {"shared": "complete"}  # as was said

    (foretold,) = [v for v in values(config, "push", "@10", "--to", "far", "--exact", "-n") if v["type"] == "copy"]
    assert foretold["reason"] == ""  # shared drops its own, and this one is the last that counts
    assert "done" in call(config, "push", "@10", "--to", "far", "--exact").stdout
    call(config, "gc", "-y")
    assert tiers_of(config, 10) == {"far": "complete"}


def tiers_of(config: Path, step: int) -> dict[str, str]:
    (tiers,) = [v["tiers"] for v in values(config, "ls") if v.get("step") == step]
    found: dict[str, str] = tiers
    return found
