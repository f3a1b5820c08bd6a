"""docs/reference/api.md and errors.md say what the code is: signatures, the table of strictness, the error tree with kinds and codes."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import tierstore
from tierstore import errors
from tierstore.crashpoints import CRASH_POINTS
from tierstore.errors import TierStoreError

DOCS = Path(__file__).parents[2] / "docs"
API = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
ERRORS = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
SHOWN = dict(re.findall(r"^```text\n(tierstore[\w.]*)(.*?)\n```$", API, re.DOTALL | re.MULTILINE))
NOT_FOR_CALLERS = {"Ticket.fail", "Ticket.reach", "Ticket.report"}
"""What the background work calls."""


def test_the_page_is_what_the_docstrings_and_the_template_say() -> None:
    """Where it fails: `make reference`."""
    spec = importlib.util.spec_from_file_location("api_reference", DOCS.parent / "tools" / "api_reference.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool  # its dataclass looks there
    spec.loader.exec_module(tool)
    assert tool.page() == API


@pytest.mark.parametrize("path", sorted(p for p in SHOWN if p.split(".")[1] in tierstore.__all__))
def test_a_signature_on_the_page_is_the_code_s(path: str) -> None:
    """The page is written from the source's text: here from what runs."""
    target: Any = tierstore
    for name in path.split(".")[1:]:
        target = inspect.getattr_static(target, name) if inspect.isclass(target) else getattr(target, name)
    if isinstance(target, property):
        assert SHOWN[path].startswith(": ")
    else:
        wanted = [name for name in inspect.signature(target).parameters if name != "self"]
        assert re.findall(r"[(,]\s*\*{0,2}(\w+)(?=: )", SHOWN[path].rpartition(" -> ")[0] or SHOWN[path]) == wanted


def test_every_public_name_and_method_is_on_the_page_with_what_it_does() -> None:
    wanted = {
        "open",
        "load_config",
        "open_foreign",
        "ExportOptions",
        "LoadOptions",
        "RankValues",
        "keep_modulo",
        "keep_rank_0",
        "require_same",
    }
    for name in ("Store", "Retention", "Ticket", "Checkpoint", "Checkpointer", "LazyTensor", "ObjectCodecs"):
        for method, value in vars(getattr(tierstore, name)).items():
            if inspect.isfunction(value) and not method.startswith("_"):
                wanted.add(f"{name}.{method}")
            if isinstance(value, property) and not method.startswith("_"):
                assert f"tierstore.{name}.{method}: " in API or f"`{method}`" in API, f"{name}.{method} is not on the page"
    assert {f"tierstore.{name}" for name in wanted - NOT_FOR_CALLERS} <= set(SHOWN)
    assert not [name for name in tierstore.__all__ if name not in API and name != "__version__"]
    silent = re.findall(r"^```text\n(tierstore[\w.]*)[^`]*?\n```\n\n(?=```text|#)", API, re.MULTILINE)
    assert not [name for name in silent if not name.startswith("tierstore.integrations.")], "each says what it does"


def test_the_table_of_strictness_has_every_option() -> None:
    hints = get_type_hints(tierstore.LoadOptions)
    for option in ("missing", "unexpected", "shape", "dtype"):
        for value in get_args(hints[option]):
            assert f'`{option}="{value}"`' in API
        assert f'| `{option}="{getattr(tierstore.LoadOptions(), option)}"` |' in API, f"the default of {option} stands in the second column"


def rows() -> list[tuple[int, str, str, int, bool, str]]:
    found = re.findall(r"^\| ((?:&nbsp;)*)`(\w+Error)` \| `([\w-]+)` \| (\d+) \| (yes)? ?\| ([^|]*)\|", ERRORS, re.MULTILINE)
    return [(len(i) // len("&nbsp;&nbsp;"), name, kind, int(code), bool(again), also.strip()) for i, name, kind, code, again, also in found]


def test_every_error_is_on_the_page_once() -> None:
    assert sorted(row[1] for row in rows()) == errors.__all__


def test_kinds_codes_and_parents_are_the_classes() -> None:
    above: dict[int, type[TierStoreError]] = {}
    for depth, name, kind, code, again, also in rows():
        cls: type[TierStoreError] = getattr(errors, name)
        assert (cls.kind, cls.exit_code, cls.retryable) == (kind, code, again), name
        if depth:
            assert cls.__bases__[0] is above[depth - 1], f"{name} stands below {above[depth - 1].__name__}"
        builtin = [b.__name__ for b in cls.__bases__ if b.__module__ == "builtins" and depth]
        if builtin:
            assert also == ", ".join(f"`{b}`" for b in builtin), name
        above[depth] = cls


def test_the_exit_codes_of_the_pages_are_those_of_the_errors() -> None:
    for page in (DOCS / "reference" / "cli.md", DOCS / "guides" / "recovery.md"):
        told = {int(code) for code in re.findall(r"^\| (\d+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)}
        assert {getattr(errors, name).exit_code for name in errors.__all__} <= told, page.name


def test_the_examples_of_the_reference_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for page in (API, ERRORS):
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for text in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
            exec(text, namespace)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: str(p.relative_to(DOCS)))
def test_every_link_of_the_documents_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, f"{page.name} links to {target}"


def test_every_test_that_the_documents_name_exists() -> None:
    root = DOCS.parent
    for page in DOCS.rglob("*.md"):
        for path, name in re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", page.read_text(encoding="utf-8")):
            assert (root / path).exists(), f"{page.name} names {path}"
            if name:
                assert f"def {name}(" in (root / path).read_text(encoding="utf-8"), f"{page.name} names {path}::{name}"


def test_every_crash_point_is_in_the_protocol() -> None:
    page = (DOCS / "design" / "protocol.md").read_text(encoding="utf-8")
    assert not [point for point in CRASH_POINTS if f"`{point}`" not in page]
