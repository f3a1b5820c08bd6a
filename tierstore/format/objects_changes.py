"""What differs between two ranks' encoded trees, place by place: thousands are alike but for a few values (RNG states, say).

Texts are compared, not values: equal texts are found at the speed of memory, only what differs is parsed, and 1, 1.0 and true differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tierstore.errors import FormatError

__all__ = ["Changes", "WholeTree", "apply_changes"]

Changes = list[list[Any]]
"""``[[path, value], ...]``: what stands at each path instead; a path is a list of keys and of positions in lists."""

MAX_DEPTH = 100
_HINT = "the file is foreign or damaged: run `tierstore verify`"
_PLAIN = json.JSONDecoder()


class WholeTree:
    """A tree that others are compared with.

    Args:
        tree: The tree, as JSON values.
        write: Writes JSON values as the trees' texts are written.
        parse: Parses a part of a text.
    """

    def __init__(self, tree: Any, *, write: Callable[[Any], str], parse: Callable[[str], Any]) -> None:
        self.tree = tree
        self._write = write
        self._parse = parse
        self._texts: dict[int, str] = {}

    def changes(self, text: str) -> Changes | None:
        """What makes the tree that `text` holds of this one; None where half of the text or more differs, or it is not written as ours.

        Raises:
            FormatError: A part that differs is malformed; from `parse`.
        """
        walk = _Walk(whole=self, text=text, allowed=len(text) // 2)
        try:
            end = walk.follow(self.tree, 0, [])
        except (_Different, ValueError, RecursionError):  # no JSON, or deeper than this thread's stack: the caller parses the whole of it
            return None
        if end != len(text):
            return None
        return [[path, self._parse(text[begin:end])] for path, begin, end in walk.changes]

    def text_of(self, node: Any) -> str:
        found = self._texts.get(id(node))  # the nodes live as long as the tree
        if found is None:
            found = self._texts[id(node)] = self._write(node)
        return found


class _Different(Exception):
    """Too much differs."""


class _Walk:
    def __init__(self, *, whole: WholeTree, text: str, allowed: int) -> None:
        self.whole = whole
        self.text = text
        self.allowed = allowed
        self.changes: list[tuple[list[Any], int, int]] = []

    def follow(self, node: Any, at: int, path: list[Any]) -> int:
        """Compares `node` with the value whose text begins at `at`; returns where that ends. `path` is as before afterwards."""
        expected = self.whole.text_of(node)
        if self.text.startswith(expected, at) and not isinstance(node, int | float):
            return at + len(expected)
        if isinstance(node, dict | list) and node and len(path) < MAX_DEPTH:
            before = len(self.changes)
            end = self._inside(node, at, path)
            if end is not None:
                return end
            del self.changes[before:]
        _, end = _PLAIN.raw_decode(self.text, at)
        if self.text[at:end] != expected:
            if not path or sum(e - b for _, b, e in self.changes) + end - at > self.allowed:
                raise _Different
            self.changes.append((path.copy(), at, end))
        return end

    def _inside(self, node: dict[str, Any] | list[Any], at: int, path: list[Any]) -> int | None:
        """As `follow`, entry by entry; None where there are other keys, or more or fewer items."""
        begin, end = "{}" if isinstance(node, dict) else "[]"
        items: Iterable[tuple[Any, Any]] = node.items() if isinstance(node, dict) else enumerate(node)
        path.append(None)
        try:
            for key, item in items:
                lead = begin + (f"{self.whole.text_of(key)}:" if isinstance(node, dict) else "")
                if not self.text.startswith(lead, at):
                    return None
                path[-1] = key
                at = self.follow(item, at + len(lead), path)
                begin = ","
        finally:
            path.pop()
        return at + 1 if self.text.startswith(end, at) else None


def apply_changes(base: Any, changes: Any) -> Any:
    """The tree that `changes`, which come from outside, make of `base`; it shares what did not change with `base`, which stays as it is.

    Raises:
        FormatError: They are no changes, name a place that `base` does not have, or contradict each other.
    """
    if not isinstance(changes, list) or not all(isinstance(c, list) and len(c) == 2 and _is_path(c[0]) for c in changes):
        raise FormatError("objects: a rank's changes are no list of paths and values", hint=_HINT)
    ends = {tuple(path) for path, _ in changes}
    if len(ends) != len(changes) or any(tuple(path[:n]) in ends for path, _ in changes for n in range(1, len(path))):
        raise FormatError("objects: two of a rank's changes are about the same place", hint=_HINT)
    root = [base]
    owned: dict[tuple[Any, ...], Any] = {(): root}
    for path, value in changes:
        full = [0, *path]
        node: Any = root
        for step, key in enumerate(full[:-1], 1):
            prefix = tuple(full[:step])
            child = owned.get(prefix)
            if child is None:
                child = _child(node, key, path)
                if not isinstance(child, dict | list):
                    raise _nowhere(path)
                child = owned[prefix] = node[key] = child.copy()
            node = child
        _child(node, full[-1], path)
        node[full[-1]] = value
    return root[0]


def _is_path(path: Any) -> bool:
    return isinstance(path, list) and 0 < len(path) <= MAX_DEPTH and all(type(key) in (str, int) for key in path)


def _child(node: Any, key: Any, path: Sequence[Any]) -> Any:
    if isinstance(node, dict) and key in node and isinstance(key, str):
        return node[key]
    if isinstance(node, list) and isinstance(key, int) and 0 <= key < len(node):
        return node[key]
    raise _nowhere(path)


def _nowhere(path: Sequence[Any]) -> FormatError:
    return FormatError(f"objects: a rank's changes name {str(list(path))[:200]}, where there is nothing", hint=_HINT)
