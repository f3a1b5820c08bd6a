"""`tierstore demo`, the real thing in short: it ends well, says what happened, and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_kit import children_hear_ctrl_c
from typer.testing import CliRunner

from tierstore.cli.demo import _Demo
from tierstore.cli.demo_place import DemoPlace
from tierstore.cli.demo_process import Tally
from tierstore.cli.demo_report import curve_verdict, digest_verdict
from tierstore.cli.main import app
from tierstore.cli.options import Cli, Options
from tierstore.cli.terminal import Terminal
from tierstore.clock import SystemClock
from tierstore.errors import SaveError

DEMO = [sys.executable, "-m", "tierstore", "demo"]


def processes_in(folder: Path) -> list[str]:
    """Command lines of processes that name `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in command:
                found.append(command)
    return found


@pytest.mark.s3
@pytest.mark.timeout(900)
def test_the_demo_is_killed_resumes_bit_equal_and_needs_s3_alone(tmp_path: Path) -> None:
    place = tmp_path / "demo"
    done = subprocess.run([*DEMO, "--steps", "8", "--directory", str(place), "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    events: dict[str, list[dict[str, Any]]] = {}
    for value in told:
        events.setdefault(value.get("event", value["type"]), []).append(value)
    assert events["killed"][0]["step"] >= 2
    assert [e["equal"] for e in events["curve"]] == [True, True]
    assert [(e["step"], e["equal"]) for e in events["digest"]] == [(8, True), (8, True), (9, True)]
    resumed = [e["step"] for e in events["resumed"]]
    assert resumed[0] <= events["killed"][0]["step"]
    assert resumed[1] == 8
    assert events["recovered"][0]["sources"] == "object", "after the loss only S3 held anything, and it was enough"
    assert 8 in events["recovered"][0]["steps"]
    last = [c for c in events["checkpoint"] if c["step"] == 8][-1]
    assert last["tiers"] == {"shared": "complete", "object": "complete"}
    assert len(events["stalls"][0]["tierstore_s"]) >= 8
    assert processes_in(place) == []
    # What it left can be looked at while its server is gone.
    shown = CliRunner().invoke(app, ["-c", str(place / "tierstore.yaml"), "show", "@9", "--json"])
    assert shown.exit_code == 0, shown.output


@pytest.mark.s3
@pytest.mark.timeout(600)
def test_ctrl_c_ends_the_demo_and_everything_that_it_started(tmp_path: Path) -> None:
    place = tmp_path / "demo"
    with children_hear_ctrl_c():
        process = subprocess.Popen(
            [*DEMO, "--steps", "100000", "--directory", str(place), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    giving_up = threading.Timer(500, process.kill)
    giving_up.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line).get("number") == 2:  # the training process is being started
                break
        process.send_signal(signal.SIGINT)
        process.communicate()
    finally:
        giving_up.cancel()
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert processes_in(place) == []


def events_of(begun: Sequence[int], committed: Mapping[int, Sequence[int]]) -> list[dict[str, Any]]:
    """What a training process reports that begins these saves; `committed`: step → which saves commit right after that step's began."""
    told: list[dict[str, Any]] = []
    for step in begun:
        told += [{"event": "saving", "step": step}, {"event": "save", "step": step, "stall_s": 0.1}]
        told += [{"event": "level", "step": other, "level": "committed", "seconds": 0.2} for other in committed.get(step, ())]
    return told


@pytest.mark.parametrize(
    ("begun", "committed", "killed_at", "sent_after"),
    [
        ((1, 2, 3, 4, 5, 6), {2: (1,), 6: (5,)}, 6, 4),  # the kill came late: two more saves were begun, and one of them is whole
        ((1, 2, 3, 4, 5, 6, 7), {7: (1,)}, 7, 7),  # the disk is slow: nothing is committed until training stands still
        ((1, 2, 3, 4, 5, 6, 7, 8), {2: (1,), 8: (8,)}, None, 4),  # so late that it had ended
    ],
    ids=["late", "slow disk", "too late"],
)
def test_the_demo_is_killed_at_the_last_save_that_was_begun_and_not_before_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: Any, committed: Any, killed_at: int | None, sent_after: int
) -> None:
    seen: list[int] = []
    sent: list[int] = []

    @contextmanager
    def trainee(*_: object) -> Iterator[Any]:
        def events() -> Iterator[dict[str, Any]]:
            for event in [*events_of(begun, committed), *([{"event": "closed"}] if killed_at is None else [])]:
                seen.extend([event["step"]] if event["event"] == "saving" else [])
                yield event

        yield SimpleNamespace(pid=1, events=events, kill=lambda: sent.append(seen[-1]))

    monkeypatch.setattr(_Demo, "_trainee", trainee)
    monkeypatch.setattr(_Demo, "_show_catalog", lambda *_: SimpleNamespace(find=lambda step: None, incomplete=()))
    cli = Cli(options=Options(), terminal=Terminal(as_json=True), clock=SystemClock())
    demo = _Demo(cli, DemoPlace(root=tmp_path), 8)
    if killed_at is None:
        with pytest.raises(SaveError, match="ended before it could be killed"):
            demo._train_and_kill()
    else:
        demo._train_and_kill()
        assert demo.killed_at == killed_at
    assert sent == [sent_after]


def test_a_folder_that_is_not_a_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "precious").write_text("mine")
    result = CliRunner().invoke(app, ["demo", "--directory", str(tmp_path)])
    assert result.exit_code == 7
    assert "--directory" in result.stderr
    assert (tmp_path / "node" / "precious").read_text() == "mine"


def test_serving_needs_an_earlier_demo(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["demo", "--serve", "--directory", str(tmp_path)]).exit_code == 4


def test_one_differing_bit_fails_the_demo() -> None:
    reference = Tally(losses={1: [2.0], 2: [1.5]}, digests={2: ["aa"]})
    assert curve_verdict(Tally(losses={1: [2.0, 2.0], 2: [1.5]}), reference) == (3, [])
    assert curve_verdict(Tally(losses={1: [2.0], 2: [1.5000000000000002]}), reference)[1]
    assert curve_verdict(Tally(losses={1: [2.0]}), reference)[1] == ["step 2 is missing"]
    assert digest_verdict(Tally(digests={2: ["aa", "aa"]}), reference, 2) == ("aa", [])
    assert digest_verdict(Tally(digests={2: ["aa", "ab"]}), reference, 2)[1]
    assert digest_verdict(Tally(), reference, 2)[1]
