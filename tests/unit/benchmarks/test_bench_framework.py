"""The benchmarks' framework: medians and ratios, turns, failing peers, the journal, verdicts, the page."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import measure
import page
import plots
import pytest
import run
import targets
from measure import Table, read_journal
from suites import SUITES, Suite
from turns import Turns

ROOT = Path(__file__).parents[3]


def table_of(key: str = "t", base: str = "a", unit: str = "s", **rows: list[float]) -> Table:
    table = Table("Title", 10**9, base, key=key, unit=unit)
    for name, values in rows.items():
        for value in values:
            table.add(name, value)
    return table


def test_a_row_is_its_median_and_its_ratio_to_the_base() -> None:
    table = table_of(a=[2.0, 1.0, 9.0], b=[1.0, 1.0, 1.0])
    assert table.median("a") == 2.0
    assert table.ratio("b") == 0.5
    assert table.ratio("c") is None


def test_a_table_prints_in_100_columns_with_spread_and_reasons() -> None:
    table = table_of(a=[2.0, 1.0], **{"a name that is a good deal longer than what there is room for in one line": [4.0, 8.0]})
    table.fail("c", "RuntimeError: " + "no " * 80)
    lines = table.lines()
    assert max(map(len, lines)) <= 100
    assert any("(4.000..8.000)" in line for line in lines)
    assert any("c: not measured: RuntimeError" in line for line in lines)


def test_without_its_base_a_table_has_no_ratios_but_figures() -> None:
    table = table_of(a=[1.0], b=[2.0])
    table.fail("a", "gone")
    assert table.ratio("b") is None
    assert any("2.000 s" in line for line in table.lines())


def test_each_turn_another_one_is_first() -> None:
    orders = [order for _, order in Turns("abc", repeat=2, warm_ups=1)]
    assert orders == [["c", "a", "b"], ["a", "b", "c"], ["b", "c", "a"]]


def test_who_fails_is_listed_and_left_out_and_the_others_go_on() -> None:
    table = table_of(a=[1.0], b=[1.0], **{"b: synced": [2.0]})

    def broken() -> None:
        raise RuntimeError("does not\nrun here")

    turns = Turns("ab", repeat=2, warm_ups=0)
    seen = []
    for _, order in turns:
        for name in order:
            seen.append(name)
            turns.attempt(name, [table], broken if name == "b" else lambda: None)
    assert seen == ["a", "b", "a"]
    assert table.failed == {"b": "RuntimeError: does not run here"}
    assert [row.name for row in table.measured()] == ["a"]


def test_who_does_not_end_is_interrupted() -> None:
    def forever() -> None:
        while True:
            pass

    table = table_of(a=[1.0])
    assert Turns("a", repeat=1, limit_s=0.05).attempt("a", [table], forever) is None
    assert "Overdue" in table.failed["a"]


def test_the_journal_tells_what_was_measured_before_a_process_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    monkeypatch.setenv(measure.JOURNAL, str(path))
    table = Table("Title", 100, "a", key="key", unit="MiB")
    table.describe("a", kind="limit", note="fast")
    table.add("a", 1.5)
    table.fail("b", "why")
    measure.fact("server", "real")
    measure.tell({"doing": "c"})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"table": "key", "add": "a", "val')  # died here
    found = read_journal(path)
    assert [t.as_json() for t in found.tables] == [table.as_json()]
    assert found.facts == {"server": "real"}
    assert found.doing == "c"


def test_a_table_comes_back_from_json() -> None:
    table = table_of(a=[1.0, 2.0])
    table.fail("b", "why")
    assert Table.of_json(json.loads(json.dumps(table.as_json()))).as_json() == table.as_json()


def test_a_suite_goes_on_without_the_peer_that_ended_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CACHE", tmp_path)
    program = tmp_path / "bench_deadly.py"
    program.write_text(
        "import json, os, sys\n"
        f"sys.path.append({str(ROOT / 'benchmarks')!r})\n"
        "from measure import Table, tell\n"
        "without = json.loads(sys.argv[sys.argv.index('--without') + 1]) if '--without' in sys.argv else {}\n"
        "table = Table('T', 0, 'a', key='t')\n"
        "for name in ('a', 'b', 'c'):\n"
        "    if name in without:\n"
        "        table.fail(name, without[name])\n"
        "        continue\n"
        "    tell({'doing': name})\n"
        "    if name == 'b':\n"
        "        os.abort()\n"
        "    table.add(name, 1.0)\n"
    )
    ran = run.run_suite(Suite(name="deadly", contest=True), [], 240, program=program)
    assert ran.ended == "done"
    assert [row.name for row in ran.tables[0].measured()] == ["a", "c"]
    assert ran.tables[0].failed == {"b": "its process ended (SIGABRT)"}


def test_a_suite_that_does_not_end_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "begun"

    class Popen(subprocess.Popen[str]):
        """The limit passes when the program has come to where it waits for ever, however long that took it."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            assert 1.0 <= timeout <= 2.0
            end = time.monotonic() + 240
            while not begun.exists():
                assert time.monotonic() < end, "the program never came to where it waits"
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(run, "subprocess", SimpleNamespace(Popen=Popen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired))
    monkeypatch.setattr(run, "CACHE", tmp_path)
    program = tmp_path / "bench_endless.py"
    program.write_text(
        f"import sys, threading\nsys.path.append({str(ROOT / 'benchmarks')!r})\nfrom measure import Table\n"
        "import os, pathlib\nfolder = pathlib.Path(sys.argv[2]) / f'tierstore-bench-{os.getpid()}-x'\nfolder.mkdir()\n"
        f"Table('T', 0, 'a', key='t').add('a', 1.0)\npathlib.Path({str(begun)!r}).touch()\nthreading.Event().wait()\n"
    )
    ran = run.run_suite(Suite(name="endless"), ["--directory", str(tmp_path)], 2.0, program=program)
    assert ran.ended == "not done after 2 s"
    assert not list(tmp_path.glob("tierstore-bench-*")), "what it left is gone"
    assert ran.tables[0].rows["a"].values == [1.0]


def test_a_planned_suite_is_told_what_time_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CACHE", tmp_path)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: 5.0))
    program = tmp_path / "bench_told.py"
    program.write_text("import sys; print(sys.argv[sys.argv.index('--within') + 1])")
    ran = run.run_suite(Suite(name="told", planned=True), [], 100.0, program=program)
    assert float(ran.output) == 70, "something is left for the last measurement"


def test_planned_suites_make_do_with_less_where_all_limits_are_too_much() -> None:
    planned, other = Suite(name="a", limit_s=300, planned=True), Suite(name="b", limit_s=100)
    assert [run.share_of(one, [planned, other], 200) for one in (planned, other)] == [150, 100]
    assert run.share_of(planned, [planned, other], 1000) == 300


def test_each_suite_has_a_program() -> None:
    missing = [suite.name for suite in SUITES if not (ROOT / "benchmarks" / suite.program).exists()]
    assert missing in ([], ["scale"])


def test_verdicts_take_the_fastest_peer_and_the_faster_of_ours() -> None:
    stall = table_of(
        "save.stall", base="warm memcpy, 1 thread", **{"warm memcpy, 1 thread": [1.0], "tierstore": [1.2], "torch.save": [11.0]}
    )
    verdicts = {verdict.what: verdict for verdict in targets.judged([stall])}
    assert verdicts["stall, second and later: of one warm memcpy"].met is True
    assert verdicts["stall: torch.save blocks longer"].met is False
    assert verdicts["stall: torch.save blocks longer"].measured == "9.17 x"
    assert verdicts["stall: DCP async_save blocks longer"].word == "not measured"
    up = Table("Up", 1, "x", key="s3.upload")
    for name, kind, seconds in (("tierstore (s3fs)", "ours", 4.0), ("boto3", "limit", 3.0), ("obstore", "limit", 3.8)):
        up.describe(name, kind=kind)
        up.add(name, seconds)
    verdict = next(v for v in targets.judged([up]) if v.what.startswith("upload to S3: share"))
    assert (verdict.measured, verdict.met) == ("0.75 x", False)
    assert max(map(len, targets.lines(verdicts.values()))) <= 100


def test_the_page_of_performance_is_what_the_committed_results_say() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert page.filled(text, json.loads(run.LATEST.read_text(encoding="utf-8"))) == text, "run: python benchmarks/page.py"


def test_results_are_written_with_a_line_for_a_row() -> None:
    document = {"suites": {"s": {"tables": [table_of("k", a=[1.0, 2.0], b=[2.0]).as_json()], "output": ["{\n       }"]}}, "targets": []}
    text = run.as_text(document)
    assert json.loads(text) == document
    assert sum('"values"' in line and line.strip().startswith("{") for line in text.splitlines()) == 2


def test_every_picture_of_the_page_is_there() -> None:
    document = json.loads(run.LATEST.read_text(encoding="utf-8"))
    for name in plots.draw_all(document, ROOT, lambda picture, table, folder: None):
        for kind in ("png", "svg"):
            assert (ROOT / "docs" / "images" / f"bench-{name}.{kind}").stat().st_size > 1000


def test_a_section_is_written_from_the_results() -> None:
    table = table_of("k", a=[1.0, 1.0], b=[2.0])
    document = {"suites": {"s": {"tables": [table.as_json()], "facts": {}, "output": ["said"]}}, "targets": []}
    written = page.filled("x\n<!-- bench: table k -->\nold\n<!-- /bench -->\ny", document)
    assert "| b | 2.000 | 0.50 | 2.00 | 2.000 to 2.000 | 1 |" in written
    assert "old" not in written
    assert page.filled(written, document) == written
    assert "said" in page.section("output s", document)
    with pytest.raises(ValueError, match="no section"):
        page.section("weather", document)


def test_the_page_leaves_out_columns_that_would_say_nothing() -> None:
    once = table_of("k", base="", unit="B", a=[1.0], b=[2.0]).as_json()
    document = {"suites": {"s": {"tables": [once], "facts": {}, "output": []}}, "targets": []}
    assert page.section("table k", document).splitlines() == [
        "Title (954MiB)",
        "",
        "|  | B |  |",
        "| --- | --- | --- |",
        "| a | 1.000 |  |",
        "| b | 2.000 |  |",
    ]


def test_the_page_folds_what_is_long_and_says_how_to_measure_what_was_not() -> None:
    document = {"suites": {"s": {"tables": [], "facts": {}, "output": [f"line {n}" for n in range(50)]}}, "targets": []}
    assert page.section("output s", document).startswith("<details><summary>What the suite s printed, 50 lines</summary>")
    assert '--only scale --merge"' in page.section("output scale", document)


def test_who_has_figures_elsewhere_is_listed_with_the_table_that_it_lacks_in() -> None:
    first, second = table_of("a", a=[1.0], b=[1.0]), table_of("b", a=[1.0])
    second.fail("b", "no time")
    second.fail("c", "not there")
    document = {"suites": {"s": {"tables": [first.as_json(), second.as_json()], "facts": {}}}, "targets": []}
    assert "| b: Title | `no time` |" in page.section("peers", document)
    assert "| c | `not there` |" in page.section("peers", document)


def test_a_run_of_most_suites_is_the_head_of_what_it_is_merged_into_and_others_keep_theirs(tmp_path: Path) -> None:
    path = tmp_path / "latest.json"
    suites = {"a": {"revision": "new"}, "b": {}, "c": {}}
    path.write_text(json.dumps({"revision": "old", "machine": {"cores": 1}, "at": "then", "suites": suites}))
    assert run._begin(path, ["a"], False, "now", {})["revision"] == "old"
    merged = run._begin(path, ["a", "b"], False, "now", {"cores": 2})
    assert (merged["revision"], merged["machine"]) == ("now", {"cores": 2})
    assert merged["suites"]["c"] == {"revision": "old", "machine": {"cores": 1}}
    assert merged["suites"]["a"]["revision"] == "new"
