"""At a real terminal: progress bars, ``status --watch`` until Ctrl-C, a reader that goes, and completion in the shells themselves."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cli_kit import children_hear_ctrl_c
from rich.console import Console
from rich.progress import Progress as RichProgress
from store_kit import unsynced
from tiers_kit import Hooked
from typer.testing import CliRunner

import tierstore
from tierstore.bars import TierBars, closing_bars, new_bars
from tierstore.cli.completion import verb_table
from tierstore.cli.main import app
from tierstore.cli.names_asked import answer
from tierstore.config import load_config, progress_wanted
from tierstore.names import Attempt, new_save_id
from tierstore.testing.fabricate import fabricate
from tierstore.tiers.session import Session

SCRIPT = Path(sys.executable).with_name("tierstore")
RUN = "llama/sft"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on two shared tiers; fabricated, for nothing is loaded here."""
    file = tmp_path_factory.mktemp("terminal") / "tierstore.yaml"
    file.write_text(
        f"run: {RUN}\ntiers:\n  - {{name: nvme, uri: ./nvme, scope: node}}\n"
        "  - {name: pfs, uri: ./pfs, scope: shared}\n  - {name: object, uri: ./object, scope: shared}\n"
    )
    with Session.open(load_config(file)) as session:
        session.run(fabricate(session.tiers, RUN, 12, every_steps=1000))
        session.run(fabricate(session.tiers, "mixtral", 3))
    return file


class Terminal:
    """A pseudo-terminal, 80 columns wide: what was written to it, without the sequences that move the cursor."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self._seen = bytearray()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        while not self._ended.is_set():
            if select.select([self.master], [], [], 0.05)[0]:
                try:
                    self._seen += os.read(self.master, 65536)
                except OSError:
                    return

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    @property
    def text(self) -> str:
        """What came so far; of a sequence that came in part, nothing."""
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07|\x1b[^\x1b]{0,9}\Z", "", self._seen.decode("utf-8", "ignore"))
        return re.sub(r"\r\n?", "\n", plain)

    def wait_for(self, what: str, within_s: float = 200.0) -> None:
        """Until `what`, a regular expression, has come: that a process has ended does not say that all it wrote was read."""
        end = time.monotonic() + within_s
        while not re.search(what, self.text):
            assert time.monotonic() < end, f"{what!r} did not come; this did: {self.text!r}"
            threading.Event().wait(0.02)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("TIERSTORE_PROGRESS", raising=False)
    made = Terminal()
    yield made
    made.close()


@contextmanager
def stderr_is(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with os.fdopen(os.dup(terminal.slave), "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        yield


# ---- bars


def test_a_bar_has_bytes_rate_and_the_time_left(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(run="r", step=1, save_id=new_save_id(datetime.now(timezone.utc)))
    with stderr_is(terminal, monkeypatch), closing_bars(lambda: {"nvme-local-scratch-disk": 8 << 20, "object": 8 << 20}) as bars:
        assert bars is not None
        for number in range(1, 9):
            bars("nvme-local-scratch-disk", attempt, "shard", number << 20, 8 << 20)
        terminal.wait_for("8MiB/8MiB")
    terminal.wait_for(r"nvme-local-scratch-disk ━+ +8MiB/8MiB +[\d.]+\w+/s +\d\d:\d\d")
    terminal.wait_for(r"object +━+ +0B/8MiB +- +-+:--")
    assert max(map(len, terminal.text.splitlines())) <= 80


def test_what_is_told_again_after_a_failure_counts_once() -> None:
    attempt = Attempt(run="r", step=1, save_id=new_save_id(datetime.now(timezone.utc)))
    rich_bars = new_bars(Console(file=io.StringIO()))
    bars = TierBars(rich_bars, {"object": 100})
    for done in (60, 0, 30, 100):  # a retry begins anew
        bars("object", attempt, "shard", done, 100)
    bars("object", attempt, "index", 20, 20)
    task = rich_bars.tasks[0]
    assert (task.completed, task.total) == (120, 120)


def test_a_checkpoint_that_was_dealt_with_fills_its_share_whatever_of_it_had_to_be_read() -> None:
    attempt = Attempt(run="r", step=1, save_id=new_save_id(datetime.now(timezone.utc)))
    rich_bars = new_bars(Console(file=io.StringIO()))
    bars = TierBars(rich_bars, {"object": 100})
    bars("object", attempt, "shard", 60, 60)
    bars("object", attempt, "", 100, 100)
    task = rich_bars.tasks[0]
    assert (task.completed, task.total) == (100, 100)
    bars("object", attempt, "index", 10, 30)  # mended after that: it was counted already
    assert (task.completed, task.total) == (80, 100)
    bars("object", attempt, "index", 30, 30)
    assert (task.completed, task.total) == (100, 100)


@pytest.mark.parametrize("damage", ["none", "a shard is gone", "a copy is gone"])
def test_the_bars_of_verify_repair_and_sync_end_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    made: list[RichProgress] = []

    @contextmanager
    def watched(console: Console) -> Iterator[RichProgress]:
        made.append(RichProgress(console=Console(file=io.StringIO())))
        yield made[-1]

    def full(*arguments: str) -> None:
        made.clear()
        CliRunner().invoke(app, ["-c", str(config), *arguments])
        (bars,) = made
        assert {task.description: (task.completed, task.total) for task in bars.tasks if task.completed != task.total} == {}
        assert sum(task.completed for task in bars.tasks) > 4 << 20

    config = tmp_path / "tierstore.yaml"
    near = "run: r\ntiers:\n  - {name: node, uri: ./node, scope: node}\n  - {name: shared, uri: ./shared, scope: shared}\n"
    config.write_text(near)
    with tierstore.open(str(config)) as store:
        for step in (1, 2):
            store.save(step, {"w": torch.full((1 << 20,), float(step)), "b": torch.zeros(3)}).wait("committed", timeout=60)
    config.write_text(near + "  - {name: far, uri: ./far, codec: zstd}\n")
    monkeypatch.setattr("tierstore.cli.progress.new_bars", watched)
    monkeypatch.setattr("tierstore.cli.options.progress_wanted", lambda: True)
    monkeypatch.setattr("tierstore.cli.terminal._console", lambda stream: Console(file=stream, force_terminal=True))
    full("sync")
    if damage != "none":
        for path in (tmp_path / "shared/r").glob("step-0000000001-*/" + ("shard-*" if damage == "a shard is gone" else "*")):
            path.unlink()
    full("verify", "--level", "full")
    full("verify", "--level", "sample", "--tier", "shared")
    full("repair")
    full("verify", "--level", "full")


def test_a_store_shows_bars_while_it_is_closed_at_a_terminal(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    drawn = threading.Event()

    async def hold_back(operation: str, path: str) -> None:
        if "/shard-" in path:
            await asyncio.to_thread(drawn.wait, 250)  # or all may be there before there is anything to show

    def look() -> None:
        try:
            terminal.wait_for(r"(near|far) +[━╸╺]+")
        finally:
            drawn.set()

    monkeypatch.setattr(
        "tierstore.tiers.opening.open_storage",
        lambda uri, *_args, **_settings: Hooked(unsynced(uri), hold_back) if uri.endswith("far") else unsynced(uri),
    )
    tiers = [{"name": "near", "uri": str(tmp_path / "near")}, {"name": "far", "uri": str(tmp_path / "far")}]
    store = tierstore.open({"run": "r", "tiers": tiers})
    store.save(1, {"w": torch.zeros(4 << 20)})
    looking = threading.Thread(target=look)
    looking.start()
    with stderr_is(terminal, monkeypatch):
        store.close()
    looking.join()
    terminal.wait_for(r"far +[━╸╺]+ +16MiB/16MiB")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("how", ["pipe", "switched off", "no stderr", "another rank"])
def test_a_store_is_quiet_where_nobody_looks(
    how: str, tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store = tierstore.open([str(tmp_path / "a"), str(tmp_path / "b")], run="r")
    store.save(1, {"w": torch.zeros(1 << 16)})
    if how == "switched off":
        monkeypatch.setenv("TIERSTORE_PROGRESS", "0")
        with stderr_is(terminal, monkeypatch):
            store.close()
    elif how == "another rank":
        store.rank = 1
        with stderr_is(terminal, monkeypatch):
            store.close()
    elif how == "no stderr":
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", None)
            store.close()
    else:
        store.close()
    assert terminal.text == ""
    assert capfd.readouterr() == ("", "")


def test_the_switch_is_read_as_a_person_writes_it() -> None:
    assert progress_wanted({})
    assert progress_wanted({"TIERSTORE_PROGRESS": "1", "TERM": "xterm"})
    assert not any(progress_wanted({"TIERSTORE_PROGRESS": text}) for text in ("0", "no", "OFF", "false "))
    assert not progress_wanted({"TERM": "dumb"})


def test_push_draws_on_stderr_and_keeps_stdout_for_programs(tmp_path: Path, terminal: Terminal) -> None:
    """The script itself, slowed down by --bwlimit, with its results in a pipe."""
    file = tmp_path / "tierstore.yaml"
    file.write_text("run: r\ntiers: [{name: near, uri: ./near, scope: shared}, {name: far, uri: ./far}]\n")
    with tierstore.open({"run": "r", "tiers": [{"name": "near", "uri": str(tmp_path / "near"), "scope": "shared"}]}) as store:
        store.save(1, {"w": torch.zeros(4 << 20)})
    done = subprocess.run(
        [SCRIPT, "-c", file, "push", "@1", "--bwlimit", "24MiB/s", "--json"],
        stdout=subprocess.PIPE,
        stderr=terminal.slave,
        timeout=200,
        check=True,
    )
    assert [json.loads(line)["state"] for line in done.stdout.splitlines()] == ["done"]
    terminal.wait_for(r"far +[━╸╺]+ +[\d.]+MiB/16MiB")


# ---- status --watch


def test_watch_at_a_terminal_ends_with_ctrl_c(config: Path, terminal: Terminal) -> None:
    with children_hear_ctrl_c():
        process = subprocess.Popen(
            [SCRIPT, "-c", config, "status", "--watch", "--interval", "0.1"],
            stdin=terminal.slave,
            stdout=terminal.slave,
            stderr=terminal.slave,
            start_new_session=True,
        )
    try:
        terminal.wait_for("again every 0.1s; Ctrl-C ends")
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == 130
    finally:
        process.kill()
        process.wait()
    terminal.wait_for("interrupted")
    assert "Traceback" not in terminal.text
    assert "12 committed, newest step 12000" in terminal.text


def watched(config: Path, monkeypatch: pytest.MonkeyPatch, looks: int, *arguments: str, between: object = None) -> list[str]:
    slept = 0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += 1
        if slept == looks:
            raise KeyboardInterrupt
        if callable(between):
            between(slept)

    monkeypatch.setattr("tierstore.cli.status.time", SimpleNamespace(sleep=sleep))  # this one alone: other threads sleep too
    result = CliRunner().invoke(app, ["-c", str(config), "status", "--watch", *arguments])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (130, "interrupted")
    return result.stdout.splitlines()


def test_watch_in_a_pipe_writes_a_line_for_each_change(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(config.parent, tmp_path / "store")
    copied = tmp_path / "store" / config.name

    def change(number: int) -> None:
        if number == 2:
            with Session.open(load_config(copied)) as session:
                session.run(fabricate(session.tiers, RUN, 13, every_steps=1000))

    monkeypatch.setenv("COLUMNS", "80")
    told = watched(copied, monkeypatch, 5, between=change)
    assert len(told) == 2
    assert "12 committed, newest step 12000; nvme 0; pfs 12; object 12" in told[0]
    assert "13 committed, newest step 13000" in told[1]


def test_watch_for_programs_is_an_object_for_each_look(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [json.loads(line) for line in watched(config, monkeypatch, 3, "--json")]
    assert [v["type"] for v in values] == ["status"] * 3
    assert [tier["tier"] for tier in values[0]["tiers"]] == ["nvme", "pfs", "object"]
    assert (values[0]["committed"], values[0]["newest_step"], values[0]["error"]) == (12, 12000, "")


def test_watch_goes_on_after_a_look_that_failed(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(config.parent, tmp_path / "store")
    root = tmp_path / "store"

    def away(number: int) -> None:
        for name in ("nvme", "pfs", "object"):
            here, there = root / name, root / f"{name}.away"
            here.rename(there) if number == 1 else there.rename(here) if number == 2 else None

    told = watched(root / config.name, monkeypatch, 4, between=away)
    assert len(told) == 3
    assert "12 committed" not in told[1]
    assert told[0].partition("  ")[2] == told[2].partition("  ")[2]


# ---- the reader goes


def test_a_reader_that_goes_is_no_error(config: Path) -> None:
    line = f"'{SCRIPT}' -c '{config}' ls | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=200, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


# ---- completion


def complete(config: Path, tmp_path: Path, lines: list[str]) -> list[list[str]]:
    """What bash is offered for each line; on a machine that may stand still for longer than who presses Tab is kept waiting."""
    patient = tmp_path / "bin" / "tierstore"
    patient.parent.mkdir()
    program = "from tierstore.__main__ import main\nfrom tierstore.cli import names_asked\nnames_asked._REMOTE_S = 100.0\nmain()\n"
    patient.write_text(f"#!{sys.executable}\n{program}")
    patient.chmod(0o755)
    script = tmp_path / "completion.bash"
    script.write_text(CliRunner().invoke(app, ["completion", "bash"]).stdout)
    breaks = "COMP_WORDBREAKS=$' \\t\\n\"'\"'\"'><=;|&(:@'"
    asks = [
        f"COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMPREPLY=(); _tierstore; (IFS=,; echo \"${{COMPREPLY[*]}}\")" for line in lines
    ]
    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join([f"source '{script}'", breaks, *asks])],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
        cwd=config.parent,
        env={**os.environ, "PATH": f"{patient.parent}:{os.environ['PATH']}"},
    )
    assert done.stderr == ""
    return [line.split(",") if line else [] for line in done.stdout.splitlines()]


def test_bash_completes_verbs_options_tiers_runs_and_steps(config: Path, tmp_path: Path) -> None:
    offered = complete(
        config,
        tmp_path,
        [
            "tierstore sta",
            "tierstore -c x --json stat",
            "tierstore status --wat",
            "tierstore push 1000 --to ",
            "tierstore show mix",
            "tierstore show mixtral@1",
            f"tierstore -c {config} pull @12",
            "tierstore -c /nowhere.yaml show ",
            "tierstore verify --level ",
        ],
    )
    assert offered == [
        ["status "],
        ["status "],
        ["--watch "],
        ["nvme", "pfs", "object"],
        ["mixtral@"],
        ["@100 "],
        ["@12000 "],
        [],
        ["quick", "sample", "full"],
    ]


def test_the_names_that_a_shell_asks_for(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config.parent)
    assert answer(["tiers"]) == ["nvme", "pfs", "object"]
    assert answer(["runs"]) == [RUN, "mixtral"]
    assert answer(["refs", "mixtral@"]) == ["mixtral@latest", "mixtral@300", "mixtral@200", "mixtral@100"]
    assert answer(["refs"])[:3] == ["latest", "12000", "11000"]
    assert answer(["--tier", str(config.parent / "pfs"), "--run", "mixtral", "refs", "1"]) == [
        "latest",
        "300",
        "200",
        "100",
        f"{RUN}@",
        "mixtral@",
    ]


def test_every_verb_and_option_is_in_every_script() -> None:
    for shell in ("bash", "zsh", "fish"):
        script = CliRunner().invoke(app, ["completion", shell]).stdout
        for verb, (_, options, _) in verb_table().items():
            assert re.search(rf"\b{verb}\b", script), (shell, verb)
            assert all(text.lstrip("-") in script for text, _, _ in options), (shell, verb)
    assert CliRunner().invoke(app, ["completion", "csh"]).exit_code == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_what_its_shell_can_read(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["completion", shell, "--install"])
    assert result.exit_code == 0, result.output
    written = next(path for path in tmp_path.rglob("*") if path.is_file())
    assert str(written) in result.stdout.replace("\n", "")
    if shutil.which(shell) is not None:  # bash is everywhere; the others are read where they are installed
        subprocess.run([shell, "-n", written], check=True, timeout=60)
