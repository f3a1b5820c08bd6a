"""The design pages name what there is: tests that prove the invariants, and every module of the package."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs" / "design"


def test_each_test_that_a_design_page_names_exists() -> None:
    named = {name for page in DESIGN.glob("*.md") for name in re.findall(r"`(tests/[\w/]+\.py::\w+)", page.read_text(encoding="utf-8"))}
    lost = [
        name
        for name in sorted(named)
        if not re.search(rf"^def {name.partition('::')[2]}\(", (ROOT / name.partition("::")[0]).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not lost, f"renamed or gone: {lost}"
    assert len(named) > 50


def test_each_module_is_on_the_page_of_the_architecture() -> None:
    page = (DESIGN / "architecture.md").read_text(encoding="utf-8")
    patterns = [re.compile(name.replace("*", r"\w*")) for name in re.findall(r"[\w*]+\.py", page)]
    missing = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tierstore").rglob("*.py"))
        if not path.name.startswith("_") and not any(pattern.fullmatch(path.name) for pattern in patterns)
    ]
    assert not missing, f"give each a line: {missing}"


def test_each_benchmark_has_a_row() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    programs = [path.name for path in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]
    assert len(programs) > 7
    assert not [name for name in programs if not re.search(rf"^\| `{name}\b", page, re.MULTILINE)]
