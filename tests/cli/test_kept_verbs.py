"""What the verbs say of a checkpoint that was deleted, or dropped from a tier, while its bytes serve a later one."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiers_kit import SteppedClock
from typer.testing import CliRunner, Result

import tierstore
from tierstore.cli.main import app


def state(step: int) -> dict[str, Any]:
    """Frozen weights of 3 MiB, and an adapter."""
    frozen = torch.Generator().manual_seed(0)
    return {"base": torch.randn(768, 1024, generator=frozen), "lora": torch.full((64,), float(step))}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two checkpoints; the second one's packed file takes bytes from the first one's."""
    config = tmp_path / "tierstore.yaml"
    config.write_text(
        "run: sft\n"
        "tiers:\n"
        "  - {name: shared, uri: ./shared, scope: shared}\n"
        "  - {name: far, uri: ./far, scope: shared, codec: zstd, unchanged_once: true}\n"
        "retention: {keep: [{last: 1}], protect: {min_age: 1h}, gc: {undelete_window: 1h}}\n"
    )
    clock = SteppedClock()
    clock.wall = datetime.now(timezone.utc) - timedelta(days=2)
    with tierstore.open(str(config), clock=clock) as store:
        for step in (10, 20):
            store.save(step, state(step)).wait("far", timeout=60)
    return config


def call(config: Path, *arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["-c", str(config), *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def values(config: Path, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in call(config, *arguments, "--json").stdout.splitlines()]


def text(config: Path, *arguments: str) -> str:
    return " ".join(call(config, *arguments).stdout.split())


def test_export_and_diff_follow_what_a_copy_takes_from_an_earlier_one(saved: Path) -> None:
    """The packed copies are the only ones that are left."""
    for shard in (saved.parent / "shared").rglob("shard-*"):
        shard.unlink()
    assert "changed lora" in text(saved, "diff", "10", "20", "--data")
    assert "1 the same" in text(saved, "diff", "10", "20", "--data")
    call(saved, "export", "20", str(saved.parent / "hf"))
    exported = load_file(saved.parent / "hf" / "model.safetensors")
    assert exported.keys() == {"base", "lora"}
    assert all(torch.equal(exported[name], tensor) for name, tensor in state(20).items())


def test_the_bytes_of_a_deleted_checkpoint_are_told_to_be_kept_and_for_whom(saved: Path) -> None:
    assert "its bytes on far are kept for step 20" in text(saved, "plan")
    assert "step 20 takes bytes from it on far" in text(saved, "explain", "@10")
    call(saved, "prune", "--yes")
    assert "deleted, but its bytes on far are kept for step 20" in text(saved, "gc", "--now", "--yes")
    assert "kept its bytes on far are kept for step 20" in text(saved, "explain", "@10")
    (gone,) = [value for value in values(saved, "explain", "@10") if value["type"] == "gone"]
    assert gone["kept"] == {"far": [20]}
    assert "deleted, kept for step 20" in text(saved, "du")
    assert "leftovers" not in text(saved, "du")
    assert text(saved, "du", "@10").startswith("sft@10 deleted, kept for step 20 KIND")
    (used,) = [v for v in values(saved, "du", "@10") if v["type"] == "usage"]
    assert (used["state"], used["kinds"]["shard"]["far"] > 1 << 20) == ("deleted, kept for step 20", True)
    assert "bytes of 1 deleted checkpoint are kept for others" in text(saved, "status")
    assert "10" not in [value.get("step") for value in values(saved, "ls")]
    assert "1 committed, 1 deleted but for bytes that others take" in text(saved, "ls")
    assert "it was deleted; its bytes on far are kept for step 20" in call(saved, "tensors", "@10", code=4).output
    assert not [value for value in values(saved, "verify", "--level", "full") if value["type"] == "finding"]


def test_a_dropped_copy_says_for_whom_its_bytes_stay(saved: Path) -> None:
    assert "its bytes on far are kept for step 20" in text(saved, "evict", "@10", "--tier", "far", "--yes")
    assert "dropped; its bytes are kept for step 20" in text(saved, "show", "@10")
    assert "dropped; its bytes are kept for step 20" in text(saved, "explain", "@10")


def test_show_tells_whose_bytes_a_copy_takes_and_who_takes_its_own_also_when_it_was_deleted(saved: Path) -> None:
    assert "far taken from step 10 3MiB" in text(saved, "show", "@20")
    assert "far taken by step 20: these shards stay here while that lives" in text(saved, "show", "@10")
    takes = {v["tier"]: v["takes"] for v in values(saved, "show", "@20") if v["type"] == "replica"}
    assert [(one["step"], one["nbytes"], one["missing"]) for one in takes["far"]] == [(10, 3 << 20, [])]
    assert takes["shared"] == []
    serves = {v["tier"]: [one["step"] for one in v["serves"]] for v in values(saved, "show", "@10") if v["type"] == "replica"}
    assert serves == {"shared": [], "far": [20]}
    assert {v["step"]: v["serves"] for v in values(saved, "ls")} == {20: {}, 10: {"far": [20]}}

    call(saved, "prune", "--yes")
    assert "taken from step 10 (expired)" in text(saved, "show", "@20")
    call(saved, "gc", "--now", "--yes")
    assert "taken from step 10 (deleted; these bytes stay) 3MiB" in text(saved, "show", "@20")
    deleted = text(saved, "show", "@10")
    assert "it can't be loaded or taken back; only shards are left" in deleted
    assert "far shards, kept for step 20" in deleted
    assert "shared nothing" in deleted
    (gone,) = [v for v in values(saved, "show", "@10") if v["type"] == "gone"]
    assert gone["kept"] == {"far": [20]}
    (left,) = [v for v in values(saved, "show", "@10") if v["type"] == "replica" and v["tier"] == "far"]
    assert left["taken_nbytes"] == sum(path.stat().st_size for path in (saved.parent / "far/sft").glob("step-0000000010-*/shard-*"))

    for shard in (saved.parent / "far/sft").glob("step-0000000010-*/shard-*"):
        shard.unlink()
    assert "is not there, run `tierstore verify`" in text(saved, "show", "@20")
    for shard in (saved.parent / "far/sft").glob("step-0000000020-*/shard-*"):
        shard.write_bytes(shard.read_bytes()[:-5])
    assert "taken from others, but not looked up" in text(saved, "show", "@20")
