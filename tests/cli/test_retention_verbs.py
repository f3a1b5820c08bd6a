"""Retention at the shell: what each verb shows, asks, refuses and does, on a small store with a history."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from cli_kit import NOW, Shell, make_store, save_again, shell_on
from store_kit import unsynced
from tiers_kit import failing

from tierstore.config import load_config
from tierstore.errors import TemporaryError
from tierstore.storage.contract import Storage
from tierstore.storage.temporaries import this_process
from tierstore.tiers.catalog import scan
from tierstore.tiers.leases import hold_lease
from tierstore.tiers.session import Session


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("retention") / "store")


@pytest.fixture
def shell(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A store of the test's own."""
    shutil.copytree(made.parent, tmp_path / "store")
    return shell_on(tmp_path / "store" / "tierstore.yaml", monkeypatch)


# ---- plan


def test_plan_is_the_table_of_the_design(shell: Shell) -> None:
    result = shell("plan")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout, "nothing is cut"
    text = re.sub(r"\s+", " ", result.stdout)
    assert text.startswith("run llama 6 committed, 1 incomplete STEP AGE SIZE TIERS ACTION WHY")
    assert "12500 10m" in text
    assert "nvme pfs ~object keep last #1" in text
    assert "evict:nvme nvme keeps last 1; 2 verified durable copies elsewhere" in text
    assert "expire no rule matched" in text
    assert "30 Nov 03:00Z" in text
    assert "(rank 1 missing; an orphan: gc" in text
    assert "2 checkpoints would expire (318KiB), 5 copies would leave nvme" in text


def test_plan_in_json_is_one_object_a_line(shell: Shell) -> None:
    values = shell.json("plan")
    actions = {v["step"]: v["action"] for v in values if v["type"] == "plan_entry"}
    assert actions == {12500: "keep", 12000: "keep", 11500: "expire", 11000: "keep", 10500: "expire", 10000: "keep"}
    assert [(v["step"], v["missing"]) for v in values if v["type"] == "plan_incomplete"] == [(12250, [1])]
    assert values[-1]["type"] == "plan"
    assert values[-1]["deletes"] == 2


def test_plan_looks_ahead_and_tries_another_policy(shell: Shell) -> None:
    other = shell.folder / "tight.yaml"
    other.write_text("keep: [{last: 1}]\n")
    assert _deletes(shell, other) == 4, "all but the newest, and those younger than an hour"
    assert _deletes(shell, other, "--at", "+1h") == 5
    assert _deletes(shell, other, "--at", "2026-11-29T04:00Z") == 5
    assert shell("plan", "--at", "tomorrow").exit_code == 2


def _deletes(shell: Shell, policy: Path, *more: str) -> int:
    (plan,) = shell.of_type("plan", "plan", "--policy", policy, *more)
    return int(plan["deletes"])


def test_without_a_policy_nothing_is_planned_and_gc_decides_nothing(shell: Shell) -> None:
    shell.config.write_text(shell.config.read_text().replace("retention: retention.yaml\n", ""))
    for verb in (["plan"], ["prune", "-y"]):
        result = shell(*verb)
        assert result.exit_code == 7, result.output
        assert "no retention policy" in result.stderr
        assert "keep: [{last: 5}]" in result.stderr
    before = shell.files()
    assert shell("gc", "-y").exit_code == 0
    assert {name for name in before if "/step-" in name} <= {*shell.files()}
    assert "nothing is ever deleted" in shell("explain", "@10500").stdout


def test_gc_names_the_tiers_that_it_did_not_see(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all that is left lies on a tier that is down, that there is nothing to free would not be true."""
    assert shell("prune", "-y").exit_code == 0
    with monkeypatch.context() as patch:
        down = failing(TemporaryError("endpoint down", hint="start it"))
        patch.setattr("tierstore.tiers.opening.open_storage", lambda uri, *_a, **_k: (down if "object" in uri else same)(unsynced(uri)))
        for _ in range(3):
            shell("gc", "--now", "-y")
        last = shell("gc", "--now", "-y")
        assert "freed:" not in last.stdout
        assert "not seen  object: endpoint down; what is to go there is freed by a later gc" in " ".join(last.stdout.splitlines())
        assert shell.of_type("gc", "gc", "-n")[0]["unseen"] == {"object": "endpoint down"}
    assert "object" in {freed["tier"] for freed in shell.of_type("freed", "gc", "--now", "-y")}
    assert "not seen" not in shell("gc", "-y").stdout


def test_gc_of_a_run_without_anything_to_free_says_so_only_of_the_tiers_that_it_saw(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = shell.folder / "all.yaml"
    keep.write_text("keep: [{last: 100}]\n")
    shell("gc", "-y", "--policy", keep)  # the attempt that broke
    assert shell("gc", "-y", "--policy", keep).stderr.endswith("run llama: nothing to free\n")
    down = failing(TemporaryError("endpoint down", hint="start it"))
    monkeypatch.setattr("tierstore.tiers.opening.open_storage", lambda uri, *_a, **_k: (down if "object" in uri else same)(unsynced(uri)))
    assert "run llama: nothing to free on the tiers that were reached\n" in shell("gc", "-y", "--policy", keep).stderr


def same(storage: Storage) -> Storage:
    return storage


def test_a_dry_run_of_gc_names_the_leftovers_of_dead_processes(shell: Shell) -> None:
    me = this_process()
    left = shell.folder / "pfs" / ".tmp" / f"write-{me.host}-{me.boot}-{me.namespace}-{me.pid}-{me.start + 1}-0123456789abcdef"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"half a shard")
    assert "1 temporary or unfinished uploads of dead processes would be removed on pfs" in shell("gc", "-n").stdout
    assert shell.of_type("gc", "gc", "-n")[0]["leftovers"] == {"pfs": [left.name]}
    assert left.exists()
    assert "of dead processes removed on pfs" in shell("gc", "-y").stdout
    assert not left.exists()


# ---- asking, and not writing


@pytest.mark.parametrize("verb", [["prune"], ["gc"], ["gc", "--now"], ["evict", "@12000", "--tier", "nvme"]])
def test_where_nobody_can_be_asked_it_is_refused_and_nothing_changes(shell: Shell, verb: list[str]) -> None:
    before = shell.files()
    result = shell(*verb)
    assert result.exit_code == 7, result.output
    assert "-y (--yes)" in result.stderr
    assert "-n (--dry-run)" in result.stderr
    assert _but_the_lock(shell.files()) == _but_the_lock(before)


def _but_the_lock(files: dict[str, tuple[int, int]]) -> dict[str, int]:
    """The sizes of all files but those of `.tmp`, where a lock lies: it is taken before anybody can be asked."""
    return {name: size for name, (size, _) in files.items() if "/.tmp" not in name}


def test_a_dry_run_writes_nothing_at_all(shell: Shell) -> None:
    assert shell("prune", "-y").exit_code == 0
    assert shell("pin", "@11000").exit_code == 0
    assert shell("hold", "@12000", "--name", "eval", "--reason", "x").exit_code == 0
    before = shell.files()
    for verb in (
        ["prune", "--policy", shell.folder / "retention.yaml"],
        ["gc"],
        ["gc", "--now"],
        ["undelete", "--all"],
        ["evict", "@11000", "--tier", "nvme"],
        ["pin", "@10000"],
        ["unpin", "@11000"],
        ["tag", "@10000", "a"],
        ["untag", "@10000", "a"],
        ["hold", "@10000", "--name", "a", "--reason", "b"],
        ["release", "@12000", "--name", "eval"],
        ["metrics", "@10000", "a=1"],
    ):
        result = shell("-n", *verb)
        assert result.exit_code == 0, (verb, result.output)
        assert "would" in result.output or "nothing" in result.output, verb
        assert shell.files() == before, verb
    for look in (["plan"], ["explain", "@10500"], ["du"], ["df"]):
        assert shell(*look).exit_code == 0
        assert shell.files() == before, look


def test_a_person_is_asked_on_a_terminal_of_eighty_columns(shell: Shell) -> None:
    command = [sys.executable, "-c", AT_NOW, "-c", str(shell.config), "prune"]
    (shell.folder / "retention.yaml").write_text("keep: [{last: 2}, {every: {steps: 5000}}, {best: {metric: val/loss, mode: min}}]\n")
    code, text = _on_terminal(command, "n")
    assert code == 7, text
    assert "Expire 2 checkpoints of run llama (318KiB)? [y/N]" in text
    assert "you did not say yes" in text
    shown = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert max(len(line.rstrip()) for line in shown if not line.startswith(("error", "hint"))) <= 80
    code, text = _on_terminal(command, "y")
    assert code == 0, text
    assert "llama@11500 expired: no rule matched; undelete until" in text


AT_NOW = f"""
import datetime
import tierstore.cli.options
from tierstore.__main__ import main
class Then(tierstore.cli.options.SystemClock):
    def now(self):
        return datetime.datetime.fromisoformat("{NOW.isoformat()}")
tierstore.cli.options.SystemClock = Then
main()
"""
"""``tierstore``, at `NOW`, whatever the day is."""


def _on_terminal(command: list[str], answer: str) -> tuple[int, str]:
    """Runs a command on a pseudo-terminal of 80 columns and answers its question."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80)) if hasattr(termios, "tcsetwinsize") else None
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "LINES": "24", "COLUMNS": "80"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        text, asked = b"", False
        while True:
            ready, _, _ = select.select([ours], [], [], 250)
            assert ready, f"it says nothing more: {text.decode()}"
            try:
                data = os.read(ours, 65536)
            except OSError:  # Linux's word for a terminal that nobody holds any more
                break
            if not data:
                break
            text += data
            if b"[y/N]" in text and not asked:
                asked = True
                os.write(ours, f"{answer}\n".encode())
        os.close(ours)
        return process.wait(), text.decode()


# ---- prune, undelete, gc


def test_prune_decides_undelete_takes_back_and_gc_frees(shell: Shell) -> None:
    decided = shell.of_type("decision", "prune", "-y")
    assert [(v["step"], v["kind"], v["not_before"]) for v in decided] == [
        (11500, "expired", "2026-11-30T03:00:00.000000Z"),
        (10500, "expired", "2026-11-30T03:00:00.000000Z"),
    ]
    assert [c["state"] for c in shell.json("ls") if c.get("step") in (11500, 10500)] == ["expired", "expired"]
    assert shell("undelete", "@11500").exit_code == 0
    shell.clock.advance(25 * 3600)
    freed = shell.of_type("freed", "gc", "-y")
    assert {v["step"] for v in freed if v["kind"] == "sweep"} == {10500}
    assert {v["step"] for v in freed if v["kind"] == "orphan"} == {12250}
    assert shell.steps_on("object") == [10000, 11000, 11500, 12000]
    assert 10500 not in shell.steps_on("nvme") + shell.steps_on("pfs")
    assert shell("verify").exit_code == 0
    assert "nothing to free" in shell("gc", "-y").output


def test_undelete_takes_back_all_or_what_one_plan_expired(shell: Shell) -> None:
    assert "nothing has expired" in shell("undelete", "--all").output
    plan = shell.of_type("prune", "prune", "-y")[0]["plan"]
    unknown = shell("undelete", "--plan", "ffff")
    assert unknown.exit_code == 4
    assert plan in unknown.stderr, "the plans that there are"
    back = shell.of_type("decision", "undelete", "--plan", plan)
    assert [(v["step"], v["state"]) for v in back] == [(10500, "done"), (11500, "done")]
    assert shell("undelete").exit_code == 2
    assert shell("undelete", "@11500", "--all").exit_code == 2
    again = shell("undelete", "@11500")
    assert "it was so already" in again.stdout
    assert "kept until" not in again.output, "nothing was taken back by it"
    assert "nothing to decide" in shell("prune", "-y").output, "what was taken back stays for a while, whatever the rules say"


def test_now_gives_up_the_window_and_afterwards_it_is_too_late(shell: Shell) -> None:
    assert shell("prune", "-y").exit_code == 0
    waits = shell.of_type("waiting", "gc", "-y")
    assert {v["step"] for v in waits} == {11500, 10500}
    assert all("can be taken back until 30 Nov 03:00Z" in v["why"] for v in waits)
    result = shell("gc", "--now", "-y")
    assert result.exit_code == 0
    assert "freed: 2 checkpoints: " in result.stdout
    refused = shell("undelete", "@11500")
    assert refused.exit_code == 7
    assert "too late" in refused.stderr
    mixed = shell("undelete", "@11500", "@12000")
    assert mixed.exit_code == 3, mixed.output


def test_a_lease_holds_gc_up_and_names_its_holder(shell: Shell) -> None:
    assert shell("prune", "-y").exit_code == 0
    with Session.open(load_config(shell.config), clock=shell.clock, create=False) as session:
        info = session.run(scan(session.tiers, "llama")).find(11500)
        assert info is not None
        replica = session.open_replica(info)
        result = shell("gc", "--now", "-y")
        assert replica.info.step == 11500, "it was open all the time"
    assert result.exit_code == 0, result.output
    assert re.search(r"waits +llama@11500: .*read by \S+:\d+", re.sub(r"\s+", " ", result.stdout)), result.stdout
    assert 11500 in shell.steps_on("object")
    assert 10500 not in shell.steps_on("object")


def _killed_reader(shell: Shell, step: int) -> None:
    """Leaves a lease that nobody keeps or releases."""
    with Session.open(load_config(shell.config), clock=shell.clock, create=False) as session:
        info = session.run(scan(session.tiers, "llama")).find(step)
        assert info is not None
        session.run(hold_lease(session.tiers, info.attempt, ttl_s=600, clock=shell.clock).beat())


def test_crons_gc_lets_go_what_a_killed_reader_held(shell: Shell) -> None:
    """Each command is a process of its own: together they have watched the lease for its TTL. One that changes nothing removes nothing."""
    assert shell("prune", "-y").exit_code == 0
    _killed_reader(shell, 11500)
    assert "waits" in shell("gc", "--now", "-y").stdout
    refused = shell("gc", "--now", "--wait")
    assert refused.exit_code == 7, "waiting ends in freeing: that is asked about before"
    assert "1 checkpoint when nobody reads them any more" in re.sub(r"\s+", " ", refused.stderr)
    shell.clock.advance(599)
    assert shell("gc", "--now", "-y").exit_code == 0
    assert 11500 in shell.steps_on("object")
    shell.clock.advance(1)
    before = shell.files()
    assert shell("plan").exit_code == 0
    assert "would go: 1 checkpoint" in shell("gc", "--now", "-n").stdout
    assert _but_the_lock(shell.files()) == _but_the_lock(before)
    assert shell("gc", "--now", "-y").exit_code == 0
    assert 11500 not in shell.steps_on("object")
    assert not [name for name in shell.files() if ".leases/" in name]


def test_a_brake_speaks_before_anybody_is_asked(shell: Shell) -> None:
    policy = shell.folder / "tight.yaml"
    policy.write_text("keep: [{last: 1}]\nprotect: {min_age: 1m}\n")
    result = shell("prune", "--policy", policy)
    assert result.exit_code == 7, result.output
    assert "5 of 6 checkpoints" in result.stderr
    assert "at most 50%" in result.stderr
    assert shell("prune", "--policy", policy, "--max-delete-fraction", "90%", "-y").exit_code == 0
    assert sum(c["state"] == "expired" for c in shell.json("ls") if c["type"] == "checkpoint") == 5


def test_what_another_policy_expired_is_freed_by_that_one(shell: Shell) -> None:
    """The configuration's policy keeps more, or there is none: then its gc frees nothing, and says what would."""
    policy = shell.folder / "tight.yaml"
    policy.write_text("keep: [{last: 1}]\nprotect: {min_age: 1m}\ngc: {max_delete_fraction: 100%}\n")
    shell.config.write_text(shell.config.read_text().replace("retention: retention.yaml\n", ""))
    pruned = shell("prune", "--policy", policy, "-y")
    assert "gc --policy" in re.sub(r"\s+", " ", pruned.stdout)
    shell.clock.advance(2 * 86400)
    result = shell("gc", "-y")
    assert "what has expired is not freed; `tierstore gc --policy FILE`" in re.sub(r"\s+", " ", result.stderr)
    assert 11000 in shell.steps_on("pfs")
    assert shell("gc", "--policy", policy, "-y").exit_code == 0
    assert [step for step in shell.steps_on("pfs") if step < 12000] == []


def test_a_plan_says_what_prune_would_refuse(shell: Shell) -> None:
    policy = shell.folder / "tight.yaml"
    policy.write_text("keep: [{last: 1}]\nprotect: {min_age: 1m}\n")
    (brake,) = shell.of_type("brake", "plan", "--policy", policy)
    assert "5 of 6" in brake["message"]
    assert "refused: `tierstore prune` would not do it" in shell("plan", "--policy", policy).stdout
    assert not shell.of_type("brake", "plan")
    record = next((shell.folder / "pfs" / "llama" / ".log").glob("step-0000011000-*/000000.json"))
    record.chmod(0o644)
    record.write_text("garbage")
    (brake,) = shell.of_type("brake", "plan")
    assert "11000 can't be read" in brake["message"]
    for verb in (["prune", "-y"], ["gc", "-y"], ["prune", "-n"]):
        assert shell(*verb).exit_code == 7, verb


def test_a_run_that_is_not_there_is_answered_with_the_nearest(shell: Shell) -> None:
    for verb in (["plan"], ["prune", "-y"], ["gc", "-y"], ["gc", "-n"], ["gc"], ["undelete", "--all"], ["du"]):
        result = shell(*verb, "--run", "lama")
        assert result.exit_code == 4, (verb, result.output)
        assert "did you mean llama?" in result.stderr, verb


def test_several_runs_are_worked_on_one_after_the_other(shell: Shell) -> None:
    for tier in ("nvme", "pfs", "object"):
        shutil.copytree(shell.folder / tier / "llama", shell.folder / tier / "other" / "run")
    shell.config.write_text(shell.config.read_text().replace("run: llama\n", ""))
    result = shell("plan")
    assert result.exit_code == 2
    assert "other/run" in result.stderr
    assert [v["run"] for v in shell.of_type("plan", "plan", "--all-runs")] == ["llama", "other/run"]
    assert [v["run"] for v in shell.of_type("run_usage", "du")] == ["llama", "other/run"]
    assert shell("prune", "--run", "other/run", "-y").exit_code == 0
    assert all(v["state"] == "committed" for v in shell.of_type("checkpoint", "ls", "llama"))


# ---- evict


def test_evict_drops_a_copy_and_never_the_last(shell: Shell) -> None:
    dropped = shell.of_type("freed", "evict", "@10000", "@10500", "--tier", "object", "-y")
    assert [(v["step"], v["tier"]) for v in dropped] == [(10000, "object"), (10500, "object")]
    assert shell.steps_on("object") == [11000, 11500, 12000]
    result = shell("evict", "@10000", "--tier", "pfs", "-y")
    assert result.exit_code == 7, result.output
    assert "object has dropped its copy" in result.stderr
    assert "nvme is a node's own" in result.stderr
    assert 10000 in shell.steps_on("pfs")
    some = shell("evict", "@10000", "@11000", "--tier", "pfs", "-y")
    assert some.exit_code == 3, some.output
    assert shell.steps_on("pfs") == [10000, 10500, 11500, 12000, 12250, 12500]
    assert shell("evict", "@11500").exit_code == 2
    assert shell("evict", "@11500", "--tier", "pffs").exit_code == 2


def test_what_was_evicted_is_not_copied_there_again(shell: Shell) -> None:
    assert shell("evict", "@12000", "--tier", "nvme", "-y").exit_code == 0
    assert shell("sync").exit_code == 0
    assert 12000 not in shell.steps_on("nvme")
    assert 12500 in shell.steps_on("object"), "the pending copy was made"


# ---- labels


def test_labels_are_records_and_said_once(shell: Shell) -> None:
    for verb in (
        ["pin", "@10500", "@11500", "--name", "paper", "--reason", "figure 3"],
        ["tag", "@10500", "release/1", "keep"],
        ["hold", "@12000", "--name", "eval", "--reason", "evaluation", "--for", "2h"],
        ["metrics", "@10500", "acc=0.5", "val/loss=nan"],
    ):
        assert all(v["state"] == "done" for v in shell.of_type("decision", *verb)), verb
        assert all(v["state"] == "already" for v in shell.of_type("decision", *verb)), verb
    found = {c["step"]: c for c in shell.of_type("checkpoint", "ls")}
    assert found[10500]["pins"] == found[11500]["pins"] == ["paper"]
    assert sorted(found[10500]["tags"]) == ["keep", "release/1"]
    assert found[10500]["metrics"] == {"acc": 0.5, "val/loss": "NaN"}
    assert found[12000]["holds"] == [
        {"name": "eval", "reason": "evaluation", "at": "2026-11-29T03:00:00.000000Z", "until": "2026-11-29T05:00:00.000000Z"}
    ]
    shown = shell("show", "@12000").stdout
    assert "until 29 Nov 05:00Z: evaluation" in shown
    for verb in (["unpin", "@tag:keep", "--name", "paper"], ["untag", "@10500", "keep"], ["release", "@12000", "--name", "eval"]):
        assert [v["state"] for v in shell.of_type("decision", *verb)] == ["done"]
    found = {c["step"]: c for c in shell.of_type("checkpoint", "ls")}
    assert (found[10500]["pins"], found[10500]["tags"], found[12000]["holds"]) == ([], ["release/1"], [])


def test_labels_decide_what_goes(shell: Shell) -> None:
    shell("pin", "@11500")
    shell("metrics", "@10500", "val/loss=0.5")
    shell("hold", "@12000", "--name", "eval", "--reason", "evaluation")
    plan = {v["step"]: v for v in shell.of_type("plan_entry", "plan")}
    assert plan[11500]["action"] == "keep"
    assert plan[10500]["action"] == "keep"
    assert plan[11000]["action"] == "expire", "it is not the best any more"
    assert plan[12000]["drops"][0]["blocked"]
    assert shell("evict", "@12000", "--tier", "nvme", "-y").exit_code == 7


def test_a_pin_brings_an_expired_one_back(shell: Shell) -> None:
    shell("prune", "-y")
    result = shell("pin", "@11500")
    assert "taken back: it was expired" in result.stdout
    assert shell.of_type("checkpoint", "show", "@11500")[0]["state"] == "committed"


@pytest.mark.parametrize(
    ("verb", "code", "words"),
    [
        (["pin", "@11500", "@11501"], 4, "11500"),
        (["tag", "@tag:nope", "a"], 4, "tags"),
        (["hold", "@11500", "--name", "a"], 2, "--reason"),
        (["hold", "@11500", "--name", "a", "--reason", "b", "--for", "2"], 2, "unit"),
        (["metrics", "@11500", "loss"], 2, "NAME=VALUE"),
        (["metrics", "@11500", "loss=low"], 2, "NAME=VALUE"),
        (["pin", "@11500", "--tier", "pfs"], 2, "all tiers"),
        (["undelete", "@11501"], 4, "11500"),
        (["explain", "@11501"], 4, "11500"),
    ],
)
def test_a_wrong_request_changes_nothing_and_says_what_is_right(shell: Shell, verb: list[str], code: int, words: str) -> None:
    before = shell.files()
    result = shell(*verb)
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert shell.files() == before


# ---- explain


def test_explain_has_every_rule_s_word_and_the_log(shell: Shell) -> None:
    shell("hold", "@12000", "--name", "eval", "--reason", "evaluation")
    values = shell.json("explain", "@12000")
    words = {(v["rule"], v["tier"]): v["matched"] for v in values if v["type"] == "word"}
    assert words["last 2", ""] is True
    assert sum(not matched for matched in words.values()) >= 2, "also those that do not keep it"
    copies = {v["tier"]: v for v in values if v["type"] == "copy"}
    assert [copies[t]["counted"] for t in ("nvme", "pfs", "object")] == [False, True, True]
    assert [v["words"] for v in values if v["type"] == "record"] == [
        "committed",
        "copied to object",
        "held 'eval' until it is released: evaluation",
    ]
    shown = shell("explain", "@12000")
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_explain_tells_when_why_and_by_whom_one_went(shell: Shell) -> None:
    shell("prune", "-y")
    shell("gc", "--now", "-y")
    values = shell.json("explain", "@11500")
    assert values[0]["type"] == "gone"
    assert values[0]["reason"] == "no rule matched"
    assert values[0]["swept_at"] == "2026-11-29T03:00:00.000000Z"
    assert values[0]["actor"] == "node7:4711"
    audit = [v for v in values if v["type"] == "audit"]
    assert {v["tier"] for v in audit} == {"nvme", "pfs", "object"}
    assert any(v["path"].endswith("/manifest.json") and v["tier"] == "object" for v in audit)
    text = shell("explain", "@11500").stdout
    assert "gone: freed for good 29 Nov 03:00Z" in text
    assert "lines of the audit log, llama/.audit" in text


def test_explain_names_the_other_attempts_at_the_step(shell: Shell) -> None:
    shell("prune", "-y")
    shell("gc", "--now", "-y")
    save_again(shell.config, 11500)
    values = shell.json("explain", "@11500")
    assert [v["state"] for v in values if v["type"] == "other_attempt"] == ["gone: freed for good"]
    assert values[0]["type"] == "checkpoint"
    save_again(shell.config, 11500)
    values = shell.json("explain", "@11500")
    assert [v["state"] for v in values if v["type"] == "other_attempt"] == ["superseded", "gone: freed for good"]


# ---- du, df, diff


def test_du_counts_what_lies_there(shell: Shell) -> None:
    values = shell.json("du")
    total = next(v for v in values if v["type"] == "total")
    for tier in ("nvme", "pfs", "object"):
        lying = sum(p.stat().st_size for p in (shell.folder / tier / "llama").rglob("*") if p.is_file())
        assert total["tiers"][tier] == lying, tier
    usage = {v["step"]: v for v in values if v["type"] == "usage"}
    assert sorted(usage) == [10000, 10500, 11000, 11500, 12000, 12250, 12500]
    assert usage[12250]["state"] == "incomplete"
    assert set(usage[12500]["tiers"]) == {"nvme", "pfs"}
    assert set(usage[12000]["kinds"]) == {"shard", "part", "objects", "index", "manifest", "log"}
    assert sum(v["nbytes"] for v in usage.values()) == total["nbytes"]
    (one,) = shell.json("du", "@12000")
    assert one["kinds"] == usage[12000]["kinds"]


def test_du_says_what_will_be_freed(shell: Shell) -> None:
    shell("prune", "-y")
    total = shell.of_type("total", "du")[0]
    assert total["expired"] == 2
    freed: dict[str, int] = {}
    text = re.sub(r"\s+", " ", shell("du").stdout)
    assert "2 expired: `tierstore gc` frees" in text
    assert "from 30 Nov 03:00Z" in text
    for value in shell.of_type("freed", "gc", "--now", "-n"):
        if value["kind"] == "sweep":
            freed[value["tier"]] = freed.get(value["tier"], 0) + value["nbytes"]
    logs = {tier: sum(p.stat().st_size for p in _logs(shell, tier)) for tier in ("nvme", "object")}
    assert {t: n + logs.get(t, 0) for t, n in total["expired_tiers"].items()} == freed


def _logs(shell: Shell, tier: str) -> list[Path]:
    return [p for step in (10500, 11500) for p in (shell.folder / tier / "llama" / ".log").glob(f"step-{step:010d}-*/*")]


def test_df_shows_limits_and_which_are_passed(shell: Shell) -> None:
    found = {v["tier"]: v for v in shell.json("df")}
    nvme = found["nvme"]
    assert (nvme["capacity"], nvme["over"]) == (256 * 1024, ["over 85%"])
    assert nvme["store_nbytes"] == sum(p.stat().st_size for p in (shell.folder / "nvme").rglob("*") if p.is_file())
    assert found["pfs"]["total_nbytes"] > 0
    assert found["pfs"]["limits"] == []
    assert [v["tier"] for v in shell.json("df", "--tier", "pfs")] == ["pfs"]
    assert "from 85% down to 70%" in shell("df").stdout
    shell("gc", "-y")
    assert shell.json("df")[0]["over"] == []


def test_diff_tells_what_changed_by_digest_and_the_rest_by_data(shell: Shell) -> None:
    changes = {v["name"]: v["change"] for v in shell.of_type("tensor_diff", "diff", "@12000", "@12500")}
    assert changes == {"w": "changed", "own.0": "unknown"}
    read = {v["name"]: (v["change"], v["why"]) for v in shell.of_type("tensor_diff", "diff", "@12000", "@12500", "--data")}
    assert read == {"w": ("changed", "by digest"), "own.0": ("changed", "by its data")}
    objects = {v["path"]: (v["first"], v["second"]) for v in shell.of_type("object_diff", "diff", "@12000", "@12500")}
    assert objects["step"] == (12000, 12500)
    same = shell("diff", "@12000", "@12000")
    assert same.exit_code == 0
    assert "2 the same" in same.stdout
    assert "objects: the same" in same.stdout
    told = shell("diff", "@12000", "@12500").stdout
    assert "it shares a block with other tensors" in told
    assert "--data reads them" in told


@pytest.mark.parametrize("verb", [["du"], ["df"], ["du", "@12000"], ["diff", "@12000", "@11000"], ["gc", "-n"], ["prune", "-n"]])
def test_a_verb_fits_eighty_columns(shell: Shell, verb: list[str]) -> None:
    result = shell(*verb)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_verbs_of_retention_start_without_torch(shell: Shell) -> None:
    code = (
        "import sys\nfrom tierstore.cli.main import app\n"
        "for verb in (['plan'], ['gc', '-n'], ['explain'], ['diff', '@12000', '@11000', '--data']):\n"
        "    try:\n        app(['-c', sys.argv[1], *verb])\n    except SystemExit as end:\n        assert not end.code, (verb, end.code)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(shell.config)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_status_says_that_the_policy_is_not_carried_out(shell: Shell) -> None:
    """A trainer's worker that refuses tells its own log only; who looks from a shell sees it here."""
    assert "refused" not in shell("status").stdout
    (shell.folder / "retention.yaml").write_text("keep: [{last: 1}]\nprotect: {min_age: 1m}\n")
    assert "refused: `tierstore prune` would not do it" in shell("status").stdout


def test_a_mistyped_label_does_not_read_as_done(shell: Shell) -> None:
    assert shell("pin", "@11000", "--name", "paper").exit_code == 0
    wrong = shell("unpin", "@11000", "--name", "papr")
    assert (wrong.exit_code, "its pins are paper" in wrong.stderr) == (4, True)
    assert shell("unpin", "@11000", "--name", "paper").exit_code == 0
    assert "it was so already" in shell("unpin", "@11000", "--name", "paper").stdout
