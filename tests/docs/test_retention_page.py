"""docs/guides/retention.md shows what the commands print: its console blocks are run in this process, on the store that it describes.

Each section begins with that store anew, at three in the morning. `test_examples.py` says what may differ: numbers, ages and widths;
here also the ids of plans.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from cli_kit import CONFIG, POLICY, make_store, shell_on
from test_examples import ROOT, Block, Command, assert_printed, blocks, commands

PAGE = (ROOT / "docs" / "guides" / "retention.md").read_text(encoding="utf-8")
SECTIONS = [section for section in re.split(r"(?m)^(?=## )", PAGE) if "$ tierstore" in section]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("page") / "store")


def test_the_page_s_store_is_the_one_that_its_output_comes_from() -> None:
    files = {b.mark.removeprefix("file: "): b.text for b in blocks(PAGE) if b.mark.startswith("file: ")}
    assert files["retention.yaml"] == POLICY
    assert files["tierstore.yaml"] == CONFIG + "retention: retention.yaml\n"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0].strip("# "))
def test_the_commands_of_the_section_print_what_stands_there(
    section: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made.parent, tmp_path / "store")
    monkeypatch.chdir(tmp_path / "store")
    shell = shell_on(tmp_path / "store" / "tierstore.yaml", monkeypatch)
    code = 0
    for block in blocks(section):
        if block.mark.startswith("file: "):
            Path(block.mark.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
        for command in _run(block):
            if command.line == "echo $?":
                assert command.output == [str(code)]
                code = 0
                continue
            assert code == 0, "an exit code other than 0 is shown"
            result = shell(*shlex.split(command.line)[1:])
            code = result.exit_code
            shown = Command(line=command.line, output=[_without_ids(line) for line in command.output])
            assert_printed(shown, _without_ids(result.output))
    assert code == 0


def _run(block: Block) -> list[Command]:
    return list(commands(block.text)) if block.language == "console" and not block.mark.startswith("not run: ") else []


def _without_ids(text: str) -> str:
    return re.sub(r"\b[0-9a-f]{20}\b", "0", text)
