"""A configuration's text: YAML read strictly, with the line of every key, and ``${VARS}`` expanded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from tierstore.config_mistakes import KeyPath, Mistake

__all__ = ["Document", "expand", "parse_yaml"]

_MAX_NODES = 100_000
"""A configuration has hundreds of values; aliases of aliases (a "billion laughs") have more than memory."""

_VARIABLE = re.compile(r"\$\$|\$\{([^{}]*)\}|\$\{")
_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_PLAIN_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


@dataclass(slots=True, kw_only=True)
class Document:
    """What a text says: plain Python values, the 1-based line of every key, and what is wrong with the text itself."""

    name: str
    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def line(self, path: KeyPath) -> int | None:
        """The line of `path`, or of the nearest key above it that the text has."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return None

    def complain(self, path: KeyPath, reason: str, remedy: str, line: int | None = None) -> None:
        self.mistakes.append(Mistake(path=path, reason=reason, remedy=remedy, file=self.name, line=line))


def parse_yaml(text: str, name: str) -> Document:
    """Reads one YAML document. Unlike YAML itself it refuses duplicate keys, keys that are not text, and tags.

    Syntax errors and the rest are in `Document.mistakes`; nothing is raised, nothing is constructed but plain values.
    """
    document = Document(name=name)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        # The mark's snippet of the text is left out: it may hold a secret.
        mark = error.problem_mark or error.context_mark
        reason = f"not valid YAML: {error.problem or error.context}"
        column = f", near column {mark.column + 1}" if mark else ""
        remedy = "check quotes, brackets and indentation there"
        if mark and "${" in "".join(text.splitlines()[mark.line : mark.line + 1]):
            remedy = 'within {…} and […] quote a variable: "${NAME}"'
        document.complain((), reason + column, remedy, mark.line + 1 if mark else None)
        return document
    except (yaml.YAMLError, RecursionError) as error:
        reason = "a character that YAML does not allow" if isinstance(error, yaml.YAMLError) else "nested too deeply"
        document.complain((), f"not valid YAML: {reason}", "save it as plain UTF-8 text, see docs/reference/configuration.md")
        return document
    if node is not None:
        document.value = _Reader(loader, document).read(node, ())
    return document


class _Reader:
    """Turns nodes into values, in one pass that keeps lines and finds mistakes."""

    def __init__(self, loader: yaml.SafeLoader, document: Document) -> None:
        self._loader = loader
        self._document = document
        self._open: set[int] = set()
        self._nodes = 0

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        self._document.lines.setdefault(path, line)
        self._nodes += 1
        if self._nodes > _MAX_NODES or id(node) in self._open:
            if self._nodes <= _MAX_NODES + 1:
                self._document.complain(path, "aliases make it endless", "write the values out", line)
            self._nodes = max(self._nodes, _MAX_NODES + 1)
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag not in _PLAIN_TAGS:
            self._document.complain(path, f"the tag {node.tag!r} is not allowed", "write plain values", line)
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.read(item, (*path, i)) for i, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self._mapping(node, path)
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError):
            what = node.tag.removeprefix("tag:yaml.org,2002:")
            self._document.complain(path, f"can't be read as {what!r}", "quote it if it is text", node.start_mark.line + 1)
            return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value_node in self._pairs(node, path):
            result[key] = self.read(value_node, (*path, key))
        return result

    def _pairs(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, yaml.Node]]:
        own: dict[str, int] = {}
        merged: dict[str, yaml.Node] = {}
        pairs: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                for inherited in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    if not isinstance(inherited, yaml.MappingNode) or id(inherited) in self._open:
                        self._document.complain(
                            (*path, "<<"), "only a mapping can be merged", "merge an anchored mapping, or write it out", line
                        )
                        continue
                    for key, inner in self._pairs(inherited, path):
                        merged.setdefault(key, inner)
                continue
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                shown = key if isinstance(key, str) else "a list or mapping"
                self._document.complain((*path, str(shown)), "a key must be text", "quote the key", line)
                continue
            if key in own:
                reason = f"the key stands twice: here and in line {own[key]}"
                self._document.complain((*path, key), reason, "keep one of the two", line)
                continue
            own[key] = line
            pairs[key] = value_node
        yield from {**merged, **pairs}.items()


def expand(value: Any, env: Mapping[str, str], path: KeyPath = ()) -> tuple[Any, list[Mistake]]:
    """Expands ``${NAME}`` and ``${NAME:-default}`` in every text value; ``$$`` is a dollar sign. Keys stay as they are.

    An unset variable without default is a mistake that names it; a set but empty one takes the default, as in a shell.
    """
    mistakes: list[Mistake] = []
    if isinstance(value, Mapping):
        mapping = {}
        for key, inner in value.items():
            mapping[key], found = expand(inner, env, (*path, str(key)))
            mistakes += found
        return mapping, mistakes
    if isinstance(value, (list, tuple)):
        items = []
        for i, inner in enumerate(value):
            item, found = expand(inner, env, (*path, i))
            items.append(item)
            mistakes += found
        return items, mistakes
    if not isinstance(value, str) or "$" not in value:
        return value, mistakes

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        named = _NAME.fullmatch(match[1]) if match[1] is not None else None
        if named is None:
            remedy = "write ${NAME} or ${NAME:-default}, and $$ for a dollar sign"
            mistakes.append(Mistake(path=path, value=value, reason=f"{match[0]!r} names no variable", remedy=remedy))
            return ""
        name, default = named[1], named[2]
        found = env.get(name)
        if found is None and default is None:
            remedy = f"set {name} in the environment, or write ${{{name}:-default}}"
            mistakes.append(Mistake(path=path, value=value, reason=f"the environment variable {name} is not set", remedy=remedy))
            return ""
        return (found or default) if default is not None else (found or "")

    return _VARIABLE.sub(replace, value), mistakes
