"""The examples in the documents are true: Python runs, commands exist, and the tutorial's commands print what it shows.

A page's blocks are worked off in their order, in an empty folder:

- ``python`` blocks run in one namespace;
- a block below ``<!-- file: NAME -->`` is written to that file;
- ``console`` blocks: each ``$ tierstore …`` must name a verb and options that exist. On a page with ``<!-- commands run -->`` every
  ``$ …`` is run, and must print what stands below it. Numbers, ages and widths may differ; a line ``...`` stands for any lines;
  ``$ echo $?`` checks the exit code of the command before it, which is 0 where nothing is said;
- a block below ``<!-- not run: reason -->`` is left out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from fork_kit import run_forked, run_tierstore

from tierstore.cli.main import app
from tierstore.testing.servers import S3Server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "README.md", ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
FENCE = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
S3_PLACE = "s3://ckpt/tutorial"
"""Where the documents' bucket is; the tests put a fresh prefix in its place."""
RUN_FILE = "import runpy, sys; del sys.argv[0]; sys.path.insert(0, ''); runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    language: str
    text: str
    mark: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A line ``$ …`` and what stands below it."""

    line: str
    output: list[str]


def blocks(page: str) -> list[Block]:
    return [
        Block(language=m["language"], text=m["text"], mark=m["mark"] or "", line=page.count("\n", 0, m.start("text")) + 1)
        for m in FENCE.finditer(page)
    ]


def commands(text: str) -> Iterator[Command]:
    found: Command | None = None
    for line in text.splitlines():
        if line.startswith("$ "):
            if found is not None:
                yield found
            found = Command(line=line[2:], output=[])
        elif found is not None:
            found.output.append(line)
        else:
            raise AssertionError(f"a console block begins with its command, not with {line!r}")
    if found is not None:
        yield found


def masked(text: str) -> str:
    """What must be the same in every run: no numbers, ids, times or widths."""
    text = re.sub(r"\b[0-9A-HJKMNP-TV-Z]{26}\b|\d(?:[\d.:,]*\d)?(?:[KMGTP]?i?B\b|ms\b|[smhd](?![a-z]))?(?:\d+[smh]\b)*", "#", text)
    return re.sub(r"[ \t]+", " ", text).strip()


def assert_printed(command: Command, printed: str) -> None:
    wanted = [masked(line) for line in command.output]
    found = [masked(line) for line in printed.splitlines()]
    pattern = "".join("(?:.*\n)*?" if line.strip() == "..." else re.escape(line) + "\n" for line in wanted)
    assert re.fullmatch(pattern, "".join(line + "\n" for line in found)), f"$ {command.line}\nprints\n{printed}"


def check_exists(line: str) -> None:
    """Every ``tierstore VERB --option`` of a shell line is one that the command line has."""
    root: Any = typer.main.get_command(app)  # a group; whose click it is differs between versions of typer
    for part in re.split(r"\|\||&&|[|;]", line):
        words = shlex.split(part, comments=True)
        while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
            words.pop(0)
        if words[:1] != ["tierstore"]:
            continue
        common = {name for parameter in root.params for name in parameter.opts}
        verbs = [word for word in words[1:] if word in root.commands]
        takes_nothing = {"--version", "--help"} & set(words)
        assert verbs or takes_nothing, f"`{line}` names no verb of the command line: {', '.join(root.commands)}"
        known = common | {name for parameter in root.commands[verbs[0]].params for name in parameter.opts} if verbs else common
        for word in words[1:]:
            option = word.partition("=")[0]
            if option.startswith("-") and option != "--help":
                assert option in known, f"`{line}`: {option} is no option of {verbs[0] if verbs else 'tierstore'}"


def run_line(line: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell's line; a plain ``tierstore …`` or ``python FILE …`` without the seconds that a fresh Python takes to import torch."""
    if not re.search(r"[|&;<>$`#*?]", line):
        first, *words = shlex.split(line)
        if first == "tierstore":
            return run_tierstore(*words, merged=True)
        if first == "python" and words[0].endswith(".py"):
            return run_forked(RUN_FILE, *words, merged=True, timeout_s=400)
    return subprocess.run(["bash", "-c", line], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400, check=False)


class Runner:
    """Runs a page's blocks in the current folder."""

    def __init__(self, *, place: str, run_commands: bool) -> None:
        self.place = place
        self.run_commands = run_commands
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.ran = 0

    def work(self, block: Block, name: str) -> None:
        text = block.text.replace(S3_PLACE, self.place)
        if block.mark.startswith("not run: "):
            if block.language == "console":
                for command in commands(text):
                    check_exists(command.line)
            return
        if block.mark.startswith("file: "):
            Path(block.mark.removeprefix("file: ")).write_text(text, encoding="utf-8")
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + text, name, "exec"), self.namespace)
            self.ran += 1
        elif block.language == "console":
            self.shell(text)

    def shell(self, text: str) -> None:
        """Runs the block's commands, or checks that they exist."""
        before: subprocess.CompletedProcess[str] | None = None
        for command in commands(text):
            if not self.run_commands:
                check_exists(command.line)
                continue
            if command.line == "echo $?":
                assert before is not None
                code = before.returncode if before.returncode >= 0 else 128 - before.returncode
                assert command.output == [str(code)], f"{before.args} exited with {code}: {before.stdout}"
                before = None
                continue
            if before is not None:
                assert before.returncode == 0, f"{before.args} exited with {before.returncode}: {before.stdout}"
            before = run_line(command.line)
            assert_printed(command, before.stdout)
            self.ran += 1
        assert before is None or before.returncode == 0, before and before.stdout


@pytest.mark.timeout(900)  # the tutorial trains a model several times
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_examples_of_the_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page.read_text(encoding="utf-8")
    found = blocks(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "10000")  # tables are not cut, whatever terminal the tests run in
    place = S3_PLACE
    if any("S3_ENDPOINT" in b.text and not b.mark.startswith("not run: ") for b in found):
        server: S3Server = request.getfixturevalue("s3_server")
        place = request.getfixturevalue("s3_bucket")
        options = server.options()
        for name, option in (("S3_ENDPOINT", "endpoint_url"), ("S3_KEY", "key"), ("S3_SECRET", "secret")):
            monkeypatch.setenv(name, options[option])
    runner = Runner(place=place, run_commands="<!-- commands run -->" in text)
    threads = set(threading.enumerate())
    for block in found:
        runner.work(block, str(page))
    assert all(b.mark.startswith(("not run: ", "file: ", "commands run")) for b in found if b.mark), "an unknown mark excuses nothing"
    assert all(len(b.mark) > len("not run: ") + 10 for b in found if b.mark.startswith("not run:")), "an excuse gives its reason"
    if any(b.language == "python" and not b.mark for b in found):
        assert runner.ran
    left = [t for t in set(threading.enumerate()) - threads if not t.daemon and "tierstore" in t.name]
    assert not left, f"the page leaves a store open: {left}"


def test_the_check_of_commands_finds_what_does_not_exist() -> None:
    check_exists("S3_KEY=x tierstore -c a.yaml verify @latest --level full | head -3")
    with pytest.raises(AssertionError, match="no verb"):
        check_exists("tierstore frobnicate --all")
    with pytest.raises(AssertionError, match="no option of verify"):
        check_exists("true && tierstore verify --levle full")


def test_the_comparison_sees_a_changed_word_and_not_a_changed_number() -> None:
    command = Command(line="x", output=["run a   3 committed", "...", "   60  1m  ok"])
    assert_printed(command, "run a  12 committed\nsomething\nmore\n20  2s  ok\n")
    with pytest.raises(AssertionError, match="prints"):
        assert_printed(command, "run a  12 lost\n20  2s  ok\n")
