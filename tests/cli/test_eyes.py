"""What a person sees: tables that fit and cut nothing, one way to write a time, errors without tracebacks; and what programs read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner, Result

import tierstore
from tierstore.cli.layout import Facts, FitTable, break_lines
from tierstore.cli.main import app
from tierstore.cli.render import plain_table
from tierstore.cli.verbs import VERBS
from tierstore.clock import when_text
from tierstore.names import new_save_id

RUN = "experiments/llama-3.1-405b-instruct-sft-long-context"
STEPS = (100, 200, 1234567890)
TIERS = ("memory", "nvme-local-scratch", "lustre-project-space", "object-eu", "object-us-west-archive", "cold")
TENSOR = "model.layers.0.attention.self_attention.query_key_value.weight_with_a_long_name"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with long names of everything, made by the real thing."""
    folder = tmp_path_factory.mktemp("eyes") / "a-project-folder-with-a-rather-long-name"
    folder.mkdir()
    scopes = ["node", "node", "shared", "shared", "shared", "shared"]
    tiers = "".join(f"  - {{name: {name}, uri: ./{name}, scope: {scope}}}\n" for name, scope in zip(TIERS, scopes, strict=True))
    (folder / "tierstore.yaml").write_text(
        f"run: {RUN}\ntiers:\n{tiers}retention:\n"
        "  keep: [{last: 2}, {best: {metric: validation/cross_entropy_loss, mode: min}}, {tags: ['release/*']}]\n"
        "  tiers: {nvme-local-scratch: {keep: [{last: 1}]}, object-us-west-archive: {keep: [{last: 3}], max_bytes: 3TiB}}\n"
        "  protect: {min_age: 10m}\n"
    )
    with tierstore.open(str(folder / "tierstore.yaml")) as store:
        for step in STEPS:
            state = {"model": {TENSOR.removeprefix("model."): torch.full((64, 32), float(step)), "b": torch.zeros(64)}, "step": step}
            metrics = {"validation/cross_entropy_loss": 1.2345 / step, "train/grad_norm_before_clipping": 0.125, "accuracy": 0.5}
            store.save(step, state, metrics=metrics, tags=["release/candidate-number-1"] if step == 200 else None)
        store.sync()
    return folder / "tierstore.yaml"


@pytest.fixture
def config(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made.parent, tmp_path / made.parent.name)
    return tmp_path / made.parent.name / made.name


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def call(config: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["-c", str(config), *map(str, arguments)])


# ---- tables


LOOKS: list[tuple[str, ...]] = [
    ("ls",),
    ("show", "latest"),
    ("show", "200"),
    ("tensors", "latest"),
    ("diff", "100", "200"),
    ("du",),
    ("du", "100"),
    ("df",),
    ("verify", "--level", "full"),
    ("sync",),
    ("status",),
    ("plan",),
    ("explain", "100"),
    ("prune", "-n"),
    ("gc", "-n"),
    ("push", "100", "-n"),
    ("pull", "100", "-n", "--to", "nvme-local-scratch"),
    ("evict", "200", "--tier", "cold", "-n"),
    ("repair", "-n"),
    ("recover", "-n"),
    ("pin", "100", "-n"),
    ("hold", "100", "--name", "needed", "--reason", "an evaluation on all benchmarks that takes until tomorrow", "--for", "2h", "-n"),
]


@pytest.mark.parametrize("arguments", LOOKS, ids=" ".join)
def test_no_line_is_wider_than_the_terminal_and_no_name_is_cut(made: Path, arguments: tuple[str, ...]) -> None:
    result = call(made, *arguments)
    assert result.exit_code == 0, result.output
    assert not [line for line in result.stdout.splitlines() if cell_len(line) > 80]
    assert not [line for line in result.stdout.splitlines() if "…" in re.sub(r"sha256:\w{12}…", "", line)]
    assert "\t" not in result.stdout


def test_what_matters_is_whole_in_every_table(made: Path) -> None:
    listed = call(made, "ls").stdout
    for whole in (*map(str, STEPS), *TIERS, "train/grad_norm_before_clipping=0.125", "tag:release/candidate-number-1"):
        assert re.search(rf"(^|\s){re.escape(whole)}(\s|$)", listed, re.MULTILINE), whole
    assert TENSOR in call(made, "tensors").stdout
    planned = call(made, "plan").stdout
    assert "why: " in planned
    assert "last #1" in planned
    for verb in (("status",), ("df",), ("show", "200"), ("explain", "200")):
        shown = call(made, *verb).stdout
        assert all(name in shown for name in TIERS), verb


def test_in_a_pipe_a_row_is_one_line(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    row = next(line for line in call(made, "ls").stdout.splitlines() if line.lstrip().startswith("200 "))
    assert all(name in row for name in TIERS)
    assert "tag:release/candidate-number-1" in row


def printed(thing: object, width: int = 40) -> list[str]:
    console = Console(width=width, markup=False, highlight=False, emoji=False, color_system=None)
    with console.capture() as captured:
        console.print(thing)
    return captured.get().splitlines()


def test_a_column_gives_way_between_words_before_it_goes_below() -> None:
    table = plain_table(("STEP", "right"), "NAME", "WHY", fold=("NAME", "WHY"))
    table.add_row("1200", "nvme", "kept for it is the newest of all of them")
    assert printed(table, 30) == ["STEP  NAME  WHY", "1200  nvme  kept for it is the", "            newest of all of", "            them"]
    table.add_row("1", "nvme", "a-word-that-is-far-too-wide-for-it")
    assert printed(table, 30)[1:3] == ["1200  nvme", "    why: kept for it is the"]


def test_a_first_column_that_is_too_wide_stands_above_the_others() -> None:
    table = FitTable(("TENSOR", ("SIZE", "right")), wraps=("TENSOR",))
    table.add_row("model.layers.0.attention.query", "8KiB")
    assert printed(table, 32) == ["TENSOR", "    SIZE", "model.layers.0.attention.query", "    8KiB"]


def test_a_fact_that_does_not_fit_beside_its_name_stands_below_it() -> None:
    facts = Facts([("state", "committed"), ("folder", "runs/step-0000000100-01M8N468M18XDQS5AMJTBQVE62")])
    assert printed(facts, 50) == ["state   committed", "folder", "  runs/step-0000000100-01M8N468M18XDQS5AMJTBQVE62"]


def test_a_word_is_broken_only_where_it_has_to_be() -> None:
    assert [line.plain for line in break_lines(Text("to /a/very/long/path now"), 8)] == ["to", "/a/very/long/path", "now"]
    assert [line.plain for line in break_lines(Text("/a/very/long"), 8, fold=True)] == ["/a/very/", "long"]
    assert [line.plain for line in break_lines(Text("世界世界 ok"), 8)] == ["世界世界", "ok"]


# ---- times


def test_a_time_is_written_one_way_everywhere(config: Path) -> None:
    assert when_text(datetime(2026, 11, 30, 14, 2, tzinfo=timezone.utc), datetime(2026, 1, 1, tzinfo=timezone.utc)) == "30 Nov 14:02Z"
    assert when_text(datetime(2025, 1, 2, 14, 2, tzinfo=timezone(timedelta(hours=1)))) == "2 Jan 2025 13:02Z"
    call(config, "hold", "100", "--name", "x", "--reason", "y", "--for", "30d")
    told = [call(config, *v).stdout for v in (("show", "100"), ("explain", "100"), ("plan",), ("du",), ("gc", "-n"), ("prune", "-n"))]
    text = "\n".join([*told, call(config, "hold", "200", "--name", "x", "--reason", "y", "--for", "2h").stdout])
    assert not re.search(r"\d{4}-\d\d-\d\d[T ]\d\d", text)
    assert len(set(re.findall(r"\d{1,2} [A-Z][a-z]{2} (?:\d{4} )?\d\d:\d\dZ", text))) > 1


def test_free_is_the_same_in_status_and_df_and_minds_the_capacity(config: Path) -> None:
    config.write_text(config.read_text().replace("uri: ./cold,", "uri: ./cold, capacity: 1MiB,"))
    free = []
    for verb in ("status", "df"):
        found = [json.loads(line) for line in call(config, verb, "--json").stdout.splitlines()]
        free.append(next(v for v in found if v["type"] == "tier" and v["tier"] == "cold"))
    shown = [next(line for line in call(config, verb).stdout.splitlines() if line.startswith("cold")) for verb in ("status", "df")]
    assert free[0]["free_nbytes"] < 1 << 20
    sizes = [set(re.findall(r"\d+KiB", line)) for line in shown]
    assert sizes[0] & sizes[1]


# ---- for programs


EVERY: list[tuple[str, ...]] = [
    *LOOKS,
    ("ls", RUN),
    ("cat", "200", "manifest.json"),
    ("plan", "--at", "+3d"),
    ("unpin", "100"),
    ("release", "100", "--name", "needed"),
    ("tag", "100", "x"),
    ("untag", "100", "x"),
    ("metrics", "100", "eval=1.5"),
    ("prune", "-y"),
    ("undelete", "--all"),
    ("gc", "-y"),
    ("evict", "200", "--tier", "cold", "-y"),
    ("push", "200", "--to", "cold"),
    ("explain", "200"),
    ("doctor",),
    ("export", "200", "out", "-n"),
    ("adopt", "src", "--step", "5", "-n"),
    ("completion", "bash"),
]


def test_each_verb_prints_objects_for_programs_and_nothing_else(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    save_file({"w": torch.zeros(4)}, tmp_path / "src" / "model.safetensors")
    keys: dict[tuple[str, str], set[str]] = {}
    for arguments in EVERY:
        result = call(config, *arguments, "--json")
        assert result.exit_code == 0, (arguments, result.output)
        for line in result.stdout.splitlines():
            value: dict[str, Any] = json.loads(line)
            assert isinstance(value["type"], str), (arguments, line)
            known = keys.setdefault((arguments[0], value["type"]), set(value))
            if value["type"] not in ("plan_entry", "plan_incomplete", "configuration", "repair", "tier"):
                assert known == set(value), (arguments, value)
        assert result.stdout or arguments[0] in ("undelete", "repair", "recover"), arguments
    assert VERBS.keys() - {a[0] for a in EVERY} == {"demo"}, "each verb stands above"


# ---- mistakes


def test_misuse_is_told_as_every_other_error(made: Path) -> None:
    for arguments, message in (
        (["lss"], "error: no such command 'lss'. Did you mean 'ls'?"),
        (["ls", "--jsn"], "error: no such option: --jsn"),
        (["cat"], "error: missing argument 'REF'"),
        (["verify", "--level", "deep"], "error: invalid value for '--level'"),
        (["status", "--interval", "0"], "error: invalid value for '--interval'"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code, result.stdout) == (2, ""), arguments
        assert result.stderr.startswith(message), result.stderr
        assert re.search(r"^hint: `.* --help` says what can be given$", result.stderr, re.MULTILINE)
        assert "╭" not in result.stderr
    helped = CliRunner().invoke(app, [])
    assert (helped.exit_code, helped.stderr) == (2, "")
    assert helped.stdout.count("Usage") == 1


def broken() -> Iterator[tuple[str, str]]:
    yield "no file", ""
    yield "not yaml", "tiers: [1\n"
    yield "unknown key", "run: x\ntires: []\n"
    yield "no tier", "run: x\ntiers: []\n"
    yield (
        "dead server",
        "run: x\ntiers: [{uri: 's3://bucket/x', scope: shared, options: {key: a, secret: b, endpoint_url: 'http://127.0.0.1:9', "
        "config_kwargs: {connect_timeout: 0.2, retries: {max_attempts: 0}}}}]\n",
    )


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize(("what", "text"), list(broken()), ids=[name for name, _ in broken()])
@pytest.mark.parametrize("verb", ["ls", "status", "pull @latest"])
def test_what_is_broken_is_one_message_without_a_traceback(what: str, text: str, verb: str, tmp_path: Path) -> None:
    config = tmp_path / "tierstore.yaml"
    if text:
        config.write_text(text)
    result = call(config, *verb.split(), "--no-progress")
    assert result.exit_code == (5 if what == "dead server" else 2), result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(re.findall(r"^error: ", result.stderr, re.MULTILINE)) == 1
    assert re.search(r"^hint: ", result.stderr, re.MULTILINE)


def test_a_traceback_is_for_who_asks(made: Path) -> None:
    assert "Traceback" not in call(made, "show", "7").stderr
    result = call(made, "-v", "show", "7")
    assert result.exit_code == 4
    assert "Traceback" in result.stderr


def test_a_decision_that_comes_too_late_says_it_in_words(config: Path) -> None:
    from tierstore.format.record import Record
    from tierstore.names import Attempt
    from tierstore.tiers.log import too_late

    at = datetime(2026, 11, 30, 14, 2, tzinfo=timezone.utc)
    attempt = Attempt(run="r", step=5, save_id=new_save_id(at))
    swept = Record(seq=3, kind="swept", at=at, nonce="0" * 32, actor="node7:1", data={})
    told = too_late(attempt, "revived", swept).message
    assert told == "taking it back comes too late: step 5 of run 'r' was deleted at 30 Nov 2026 14:02Z by node7:1"
