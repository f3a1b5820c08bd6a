"""`tierstore demo`, the real thing in short: it ends well, says what happened, and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierstore.cli.demo_process import Tally
from tierstore.cli.demo_report import curve_verdict, digest_verdict
from tierstore.cli.main import app

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
@pytest.mark.timeout(400)
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
@pytest.mark.timeout(200)
def test_ctrl_c_ends_the_demo_and_everything_that_it_started(tmp_path: Path) -> None:
    place = tmp_path / "demo"
    process = subprocess.Popen(
        [*DEMO, "--steps", "100000", "--directory", str(place), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where the tests run in a shell's background
    )
    giving_up = threading.Timer(150, process.kill)
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
