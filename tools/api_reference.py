"""Writes docs/reference/api.md: the signatures and docstrings of the public API, in the order of tools/api_reference.md.

    python tools/api_reference.py            writes the page
    python tools/api_reference.py --check    exits with 1 where the page is not what it would write

The template's lines ``::: NAME`` become the signature and docstring of NAME; ``::: CLASS.*`` and ``::: MODULE.*`` stand for every public
name of them that no other line names, so that a new method or function is on the page without further ado; ``::: NAME text`` is the
docstring without the signature, ``::: NAME omitted`` nothing at all: it is not for callers. Everything else of the template (headings,
introductions, tables, examples) stays as it is.

The source is read, not imported: a framework takes seconds, and what is not installed here has its page all the same.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEMPLATE = Path(__file__).with_suffix(".md")
PAGE = ROOT / "docs" / "reference" / "api.md"
NOTE = "<!-- Written by `make reference` from the docstrings and tools/api_reference.md: change those. -->\n\n"
WIDTH = 110
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 where the page is out of date")
    text = page()
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    """The whole page, as the code is now."""
    template = TEMPLATE.read_text(encoding="utf-8")
    named = {line.split()[1] for line in template.splitlines() if line.startswith("::: ")}
    out = []
    for line in template.splitlines():
        if not line.startswith("::: "):
            out.append(line)
            continue
        _, name, *how = line.split()
        if name.endswith(".*"):
            out.append("\n\n".join(entry(member) for member in members(name.removesuffix(".*")) if member not in named))
        else:
            out.append("" if "omitted" in how else entry(name, signed="text" not in how))
    return NOTE + re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip() + "\n"


# Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module's source: what it defines, what it imports from where, and ``__all__``."""

    definitions: dict[str, Definition]
    imports: dict[str, tuple[str, str]]
    public: tuple[str, ...]


@cache
def module(name: str) -> Module | None:
    base = ROOT.joinpath(*name.split("."))
    path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
    if path is None:
        return None
    definitions: dict[str, Definition] = {}
    imports: dict[str, tuple[str, str]] = {}
    public: tuple[str, ...] = ()
    for node in flat(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, Definition):
            definitions.setdefault(node.name, node)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports.update({alias.asname or alias.name: (node.module, alias.name) for alias in node.names})
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            public = tuple(ast.literal_eval(node.value))
    return Module(definitions=definitions, imports=imports, public=public)


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those below ``if`` and ``try`` too."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from flat(node.body)
            yield from flat(node.orelse)
        else:
            yield node


def find(name: str) -> Definition:
    """What a dotted name stands for: a function or class of a module, or a method, followed through imports.

    Raises:
        LookupError: The template, or an ``__all__``, names something that is not there.
    """
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        home = module(".".join(parts[:split]))
        if home is None:
            continue
        first, *rest = parts[split:]
        if first in home.definitions:
            found: Definition = home.definitions[first]
        elif first in home.imports:
            found = find(".".join(home.imports[first]))
        else:
            break
        for part in rest:
            found = next(node for node in found.body if isinstance(node, Definition) and node.name == part)
        return found
    raise LookupError(f"there is no {name}")


def members(name: str) -> Iterator[str]:
    """Public functions, classes and methods of a class (its own, in their order) or of a module (``__all__``, each class with its own).

    A method without a docstring is one of an interface that somebody else has described.
    """
    home = module(name)
    if home is None:
        seen = [node.name for node in find(name).body if isinstance(node, Function) and ast.get_docstring(node)]
        yield from (f"{name}.{method}" for method in dict.fromkeys(seen) if not method.startswith("_"))
        return
    for public in home.public:
        if public in home.definitions or public in home.imports:
            yield f"{name}.{public}"
            if isinstance(find(f"{name}.{public}"), ast.ClassDef):
                yield from members(f"{name}.{public}")


# Writing


def entry(name: str, *, signed: bool = True) -> str:
    """A name's signature, in a block of its own, and its docstring in Markdown."""
    node = find(name)
    parts = [f"```text\n{name}{signature(name, node)}\n```"] if signed else []
    parts.append(rendered(ast.get_docstring(node) or ""))
    if isinstance(node, ast.ClassDef):
        begin = method(node, "__init__")
        parts.append(rendered(ast.get_docstring(begin) or "") if begin else "")
        parts.append(fields(node))
    return "\n\n".join(part for part in parts if part)


def method(node: ast.ClassDef, name: str) -> Function | None:
    return next((item for item in node.body if isinstance(item, Function) and item.name == name), None)


def decorators(node: Definition) -> set[str]:
    return {ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list}


def signature(name: str, node: Definition) -> str:
    """As in the source, without self; over several lines where it is long. Of an error class there is none, of a property its type."""
    result = ""
    if isinstance(node, ast.ClassDef):
        begin = method(node, "__init__")
        if begin is not None:
            shown = parameters(begin)
        elif "dataclass" in decorators(node):
            shown = ["*", *(f"{ast.unparse(item)}" for item in fields_of(node))]
        else:
            return ""
    else:
        returns = ast.unparse(node.returns) if node.returns else ""
        if decorators(node) & {"property", "cached_property"}:
            return f": {returns or 'Any'}"
        shown, result = parameters(node), f" -> {returns}" if returns else ""
    line = f"({', '.join(shown)}){result}"
    return line if len(name + line) <= WIDTH else "(\n" + "".join(f"    {part},\n" for part in shown) + f"){result}"


def parameters(node: Function) -> list[str]:
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(given.defaults)), *given.defaults]
    shown = [parameter(arg, default) for arg, default in zip(plain, defaults, strict=True)]
    if plain and plain[0].arg in ("self", "cls"):
        shown = shown[1:]
    if given.vararg:
        shown.append("*" + parameter(given.vararg, None))
    elif given.kwonlyargs:
        shown.append("*")
    shown += [parameter(arg, default) for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [*shown, "**" + parameter(given.kwarg, None)] if given.kwarg else shown


def parameter(arg: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {ast.unparse(arg.annotation)}" if arg.annotation else ""
    return arg.arg + annotation + ("" if default is None else f"{' = ' if annotation else '='}{ast.unparse(default)}")


def fields_of(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [i for i in node.body if isinstance(i, ast.AnnAssign) and isinstance(i.target, ast.Name) and not i.target.id.startswith("_")]


def fields(node: ast.ClassDef) -> str:
    """The fields of a value class that say in the source what they are."""
    own = fields_of(node)
    found = []
    for item, after in zip(node.body, node.body[1:], strict=False):
        if item in own and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            text = " ".join(inspect.cleandoc(after.value.value).split())
            found.append(f"- `{ast.unparse(item.target)}`: {marked(text)}")  # type: ignore[attr-defined]
    return "\n".join(found)


def rendered(doc: str) -> str:
    """A Google docstring in Markdown."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):$", doc, flags=re.MULTILINE)
    out = [marked(parts[0].strip())] if parts[0].strip() else []
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        inside, outside = body_of(body)
        if title in ("Returns", "Yields"):
            out.append(f"{title}: {marked(' '.join(inside.split()))}")
        else:
            items = [" ".join(item.split()) for item in re.split(r"\n(?=\S)", inside.strip())]
            word = "Raises " if title == "Raises" else ""
            out.append("\n".join(f"- {word}{item_of(item)}" for item in items))
        if outside:
            out.append(marked(outside))
    return "\n\n".join(out)


def body_of(body: str) -> tuple[str, str]:
    """The section's indented lines, and what follows it."""
    lines = body.strip("\n").splitlines()
    end = next((n for n, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return textwrap.dedent("\n".join(lines[:end])), "\n".join(lines[end:]).strip()


def item_of(item: str) -> str:
    name, colon, text = item.partition(": ")
    if not colon or " " in name.replace(", ", ""):
        return marked(item)
    return f"{', '.join(f'`{one}`' for one in name.split(', '))}: {marked(text)}"


def marked(text: str) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", text)


if __name__ == "__main__":
    sys.exit(main())
