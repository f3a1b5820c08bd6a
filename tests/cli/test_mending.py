"""verify, repair and recover as people and programs meet them: one line a cause, what to run next, and the exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiers_kit import SteppedClock, attempt_at, flip, persist_rank, save
from typer.testing import CliRunner, Result

from tierstore.cli.check import subset_of
from tierstore.cli.main import app
from tierstore.config import load_config
from tierstore.errors import UsageError
from tierstore.names import Attempt, shard_name
from tierstore.tiers.log import append
from tierstore.tiers.promote import reconcile
from tierstore.tiers.session import Session

SHARD = shard_name(0, 1)
NAMES = ("node", "shared", "far")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with steps 10, 20 and 30 of run sft, and step 1 of run other, on the authority and on the tier after it."""
    folder = tmp_path_factory.mktemp("mending")
    tiers = "".join(f"  - {{name: {n}, uri: ./{n}, scope: {'node' if n == 'node' else 'shared'}}}\n" for n in NAMES)
    (folder / "tierstore.yaml").write_text(f"run: sft\ntiers:\n{tiers}")
    with Session.open(load_config(str(folder / "tierstore.yaml"))) as session:
        for run, steps in (("sft", (10, 20, 30)), ("other", (1,))):
            for step in steps:
                session.run(save(session.tiers, step, attempt=attempt_at(step, run)))
            session.run(reconcile(session.tiers, run, clock=SteppedClock()))
    return folder


@pytest.fixture
def store(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may harm, as the working directory."""
    shutil.copytree(made, tmp_path / "store")
    monkeypatch.chdir(tmp_path / "store")
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path / "store"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def lines(result: Result, kind: str = "") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in result.stdout.splitlines()]
    return [value for value in found if not kind or value["type"] == kind]


def shard(store: Path, tier: str, step: int) -> Path:
    (path,) = (store / tier / "sft").glob(f"step-{step:010d}-*/{SHARD}")
    return path


def test_a_lost_log_is_one_line_and_the_next_command_stands_below(store: Path) -> None:
    shutil.rmtree(store / "shared")
    result = call("verify", "-q")
    assert result.exit_code == 6, result.output
    assert len([line for line in result.stdout.splitlines() if line.startswith("V")]) == 1
    assert "steps 10, 20, 30" in " ".join(result.stdout.split())
    assert "next: tierstore recover" in result.stdout
    assert lines(call("verify", "--json"), "report")[0]["next"] == ["tierstore recover"]


def test_repair_mends_and_says_from_where_and_how_much(store: Path) -> None:
    good = shard(store, "far", 20).read_bytes()
    flip(shard(store, "far", 20))
    flip(shard(store, "far", 30))
    result = call("verify", "--level", "full", "@20", "@30", "--json")
    assert result.exit_code == 6
    assert sorted(f["checkpoint"].split("-")[1] for f in lines(result, "finding")) == ["0000000020", "0000000030"]
    dry = call("repair", "-n", "@20", "--json")
    assert [(r["state"], r["step"]) for r in lines(dry, "repair")] == [("would be mended", 20)]
    assert shard(store, "far", 20).read_bytes() != good
    done = call("repair", "@20")
    assert done.exit_code == 0, done.output
    assert "sft@20 far shard" in done.stdout
    assert "from shared" in done.stdout
    assert shard(store, "far", 20).read_bytes() == good
    everything = call("repair", "--json")
    (report,) = lines(everything, "report")
    assert (report["mended"], report["unmended"]) == (1, 0)
    assert 0 < report["nbytes_fetched"] <= 4096
    assert "nothing to mend" in call("repair").stdout


def test_what_is_good_nowhere_has_a_line_with_its_tensors_and_an_exit_code(store: Path) -> None:
    for tier in ("shared", "far"):
        flip(shard(store, tier, 20))
    assert call("repair", "-q").exit_code == 6
    flip(shard(store, "far", 10))
    result = call("repair", "--json")
    assert result.exit_code == 3
    lost = [r for r in lines(result, "repair") if r["state"] == "not mended"]
    assert {(r["tier"], tuple(r["tensors"])) for r in lost} == {("shared", ("w",)), ("far", ("w",))}


def test_one_tier_alone_is_verified_and_mended(store: Path) -> None:
    flip(shard(store, "far", 20))
    flip(shard(store, "shared", 30))
    assert call("repair", "--tier", "far", "-q").exit_code == 0
    assert call("verify", "--level", "full", "--tier", "far", "-q").exit_code == 0
    assert call("verify", "--level", "full", "--tier", "shared", "-q").exit_code == 6
    assert call("repair", "--tier", "fra").exit_code == 2


def test_a_step_whose_commit_record_cannot_be_read_is_found_and_mended(store: Path) -> None:
    for path in (store / "shared" / "sft" / ".log").glob("step-0000000030-*/000000.json"):
        flip(path, 0)
    assert call("verify", "@30", "-q").exit_code == 6
    assert call("repair", "@30", "-q").exit_code == 0
    assert call("verify", "-q").exit_code == 0
    assert call("verify", "@31").exit_code == 4


def test_an_emptied_authority_is_refused_by_writers_and_recovered_with_all_runs(store: Path) -> None:
    shutil.rmtree(store / "shared")
    refused = call("sync")
    assert refused.exit_code == 7
    assert "mounted" in refused.output
    assert call("repair").exit_code == 7
    assert call("ls").exit_code == 0
    assert not (store / "shared").exists()
    would = lines(call("recover", "-n", "--json"), "recover")
    assert {(r["run"], r["state"]) for r in would} == {("sft", "would be rebuilt"), ("other", "would be rebuilt")}
    assert not (store / "shared").exists()
    recovered = call("recover")
    assert recovered.exit_code == 0
    assert "pin again what must stay" in " ".join(recovered.stderr.split())
    for run in ("sft", "other"):
        assert call("verify", "--run", run, "--level", "full", "-q").exit_code == 0
    assert call("sync").exit_code == 0
    again = call("recover", "--all-runs")
    assert "nothing to recover" in again.output
    assert "pin again" not in again.stderr


def test_recover_works_on_one_run_or_on_all(store: Path) -> None:
    for run in ("sft", "other"):
        shutil.rmtree(store / "shared" / run)
    assert {r["run"] for r in lines(call("recover", "--json"), "recover")} == {"sft"}
    assert {r["run"] for r in lines(call("recover", "--all-runs", "--json"), "recover")} == {"other"}


def test_a_dropped_copy_is_no_finding(store: Path) -> None:
    (folder,) = (store / "far" / "sft").glob("step-0000000010-*")
    attempt = Attempt.parse("sft", folder.name)
    assert attempt is not None
    with Session.open(load_config(str(store / "tierstore.yaml"))) as session:
        for kind in ("evicting", "evicted"):
            session.run(append(session.tiers.authority.storage, attempt, kind, {"tier": "far"}, clock=SteppedClock()))
    shutil.rmtree(folder)
    shutil.rmtree(store / "far" / attempt.log_folder)
    assert lines(call("verify", "--json"), "finding") == []
    assert "nothing to mend" in call("repair").stdout


def test_an_unfinished_attempt_asks_for_nothing(store: Path) -> None:
    with Session.open(load_config(str(store / "tierstore.yaml"))) as session:
        session.run(persist_rank(session.tiers, attempt_at(40, "sft"), session.tiers.authority))
    result = call("verify")
    assert result.exit_code == 0
    assert "V107" in result.stdout
    assert "next:" not in result.stdout


@pytest.mark.parametrize(
    ("text", "subset"), [("1/7", (1, 7)), ("7/7", (7, 7)), ("100%", (1, 1)), ("50%", (2, 2)), ("5%", (10, 20)), ("0.5%", (150, 200))]
)
def test_a_subset_is_a_group_of_blocks_or_a_share_that_takes_turns(text: str, subset: tuple[int, int]) -> None:
    clock = SteppedClock()
    assert subset_of(None, text, clock, default="quick") == ("sample", subset)
    if text == "5%":
        groups = set()
        for _ in range(20):
            groups.add(subset_of("sample", text, clock, default="quick")[1])
            clock.advance(86400)
        assert groups == {(k, 20) for k in range(1, 21)}


@pytest.mark.parametrize("text", ["0/7", "8/7", "7", "a/b", "0%", "101%", "%", "-5%", "1/7%"])
def test_a_bad_subset_is_answered_with_a_good_one(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        subset_of(None, text, SteppedClock(), default="quick")
    assert "1/7" in caught.value.hint


def test_a_subset_and_another_level_contradict_each_other(store: Path) -> None:
    assert call("verify", "--level", "full", "--read-data-subset", "1/7").exit_code == 2
    assert call("verify", "--level", "quick", "--read-data-subset", "5%").exit_code == 2
    assert call("verify", "--read-data-subset", "5%", "--json").exit_code == 0


def test_verify_notes_damage_in_the_log_and_a_dry_run_does_not(store: Path) -> None:
    flip(shard(store, "far", 20))
    logs = sorted((store / "shared" / "sft" / ".log").rglob("*.json"))
    assert call("verify", "-n", "--level", "full").exit_code == 6
    assert sorted((store / "shared" / "sft" / ".log").rglob("*.json")) == logs
    assert call("verify", "--level", "full").exit_code == 6
    (made,) = set((store / "shared" / "sft" / ".log").rglob("*.json")) - set(logs)
    assert '"quarantined"' in made.read_text()
