"""The trees of several ranks as one: what each adds to the first, and where they differ.

Works on encoded trees: equal parts, which are nearly all of them, are compared by the interpreter at once, so that thousands of ranks'
trees take seconds. Numbers that are equal count as the same value whatever their type (1, 1.0, True): the first tree's is taken.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from tierstore.errors import FormatError
from tierstore.format.objects_codecs import BUILTIN_TAGS
from tierstore.format.objects_decode import decode_node

__all__ = ["ABSENT", "Union", "find_node"]

ABSENT: Any = object()
"""What `find_node` returns where there is nothing."""

Place = tuple[Hashable, ...]

_MALFORMED = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
_PAIRS = ("$dict", "$ordered_dict")
_SCALARS = frozenset(f"${tag}" for tag in BUILTIN_TAGS) - {*_PAIRS, "$tuple", "$tensor"}


class Union:
    """Grows with every `add`.

    Dicts are united key by key, lists and tuples that hold tensors or dicts item by item; all else is a value, taken from the first
    tree that has it.

    Args:
        tree: The first rank's encoded tree. No tree is changed; the union shares parts with all of them.
        see_through: The tag of nodes ``{tag: [node, more]}`` that stand for their `node`.
        tensor: The tag of nodes ``{tag: {"ref": <tensor>, ...}}`` that stand for a tensor.

    Attributes:
        tree: The united tree, encoded.
        differing: The places of values, and of tensors by name, that are not the same in all trees that have them.
    """

    def __init__(self, tree: Any, *, see_through: str, tensor: str) -> None:
        self.tree = tree
        self.differing: set[Place] = set()
        self._see_through = f"${see_through}"
        self._tensor = f"${tensor}"
        self._owned: dict[int, Any] = {}
        """Containers that were copied and so may be changed, by id."""

    def add(self, tree: Any) -> None:
        """Takes in another rank's tree.

        Raises:
            FormatError: A tree is malformed.
        """
        try:
            self.tree = self._unite(self.tree, tree, ())
        except _MALFORMED as error:
            raise _malformed(error) from error

    def _own(self, container: Any) -> Any:
        if id(container) in self._owned:
            return container
        container = container.copy()
        self._owned[id(container)] = container
        return container

    def _unite(self, ours: Any, theirs: Any, place: Place) -> Any:
        """What stands at `place` now: `ours` itself where nothing is added."""
        if ours is theirs or ours == theirs:
            return ours
        tag, other = _tag(ours), _tag(theirs)
        if tag == self._see_through:
            inner, metadata = ours[tag]
            theirs, more = theirs[other] if other == tag else (theirs, metadata)  # or theirs is a plain dict
            made = [self._unite(inner, theirs, place), self._unite(metadata, more, (*place, "_metadata"))]
            return ours if made[0] is inner and made[1] is metadata else {tag: made}
        if other == self._see_through:
            return self._unite(ours, theirs[other][0], place)
        if _is_mapping(ours, tag) and _is_mapping(theirs, other):
            return self._pairs(ours, tag, theirs, other, place) if tag else self._dicts(ours, theirs, other, place)
        if _is_sequence(ours, tag) and _is_sequence(theirs, other) and (self._deep(ours) or self._deep(theirs)):
            items = before = ours[tag] if tag else ours
            for at, item in enumerate(theirs[other] if other else theirs):
                new = self._unite(items[at], item, (*place, at)) if at < len(items) else item
                if at >= len(items):
                    items = self._own(items)
                    items.append(new)
                elif new is not items[at]:
                    items = self._own(items)
                    items[at] = new
            return ours if items is before else {tag: items} if tag else items
        name = self._tensor_name(ours)
        if name is None or name != self._tensor_name(theirs):
            self.differing.add(place)
        return ours

    def _dicts(self, ours: dict[str, Any], theirs: Any, other: str, place: Place) -> Any:
        entries = _items(theirs, other)
        if any(type(raw) is not str or raw.startswith("$") for _, raw, _ in entries):  # keys that a plain JSON object can't have
            return self._pairs({"$dict": [[k, v] for k, v in ours.items()]}, "$dict", theirs, other, place)
        for key, _, item in entries:
            new = self._unite(ours[key], item, (*place, key)) if key in ours else item
            if key not in ours or new is not ours[key]:
                ours = self._own(ours)
                ours[key] = new
        return ours

    def _pairs(self, ours: Any, tag: str, theirs: Any, other: str, place: Place) -> Any:
        pairs = before = ours[tag]
        rows = {key: number for number, key in enumerate(_keys(pairs))}
        for key, raw_key, item in _items(theirs, other):
            row = rows.get(key)
            if row is None:
                rows[key] = len(pairs)
                pairs = self._own(pairs)
                pairs.append([raw_key, item])
                continue
            new = self._unite(pairs[row][1], item, (*place, key))
            if new is not pairs[row][1]:
                pairs = self._own(pairs)
                pairs[row] = [pairs[row][0], new]
        return ours if pairs is before else {tag: pairs}

    def _tensor_name(self, node: Any) -> str | None:
        tag = _tag(node)
        if tag == self._tensor and isinstance(node[tag], dict):
            node = node[tag].get("ref")
            tag = _tag(node)
        return node[tag] if tag == "$tensor" else None

    def _deep(self, node: Any) -> bool:
        """Whether it holds tensors, dicts or values of codecs, as `state.matching` decides it for decoded trees."""
        if isinstance(node, dict):
            tag = _tag(node)
            if tag == "$tuple":
                return any(self._deep(item) for item in node[tag])
            return tag not in _SCALARS
        return isinstance(node, list) and any(self._deep(item) for item in node)


def find_node(tree: Any, place: Place, *, see_through: str) -> Any:
    """The encoded node at a place of an encoded tree, or `ABSENT`.

    Raises:
        FormatError: The tree is malformed.
    """
    try:
        return _find(tree, place, see_through)
    except _MALFORMED as error:
        raise _malformed(error) from error


def _find(tree: Any, place: Place, see_through: str) -> Any:
    node = tree
    for key in place:
        tag = _tag(node)
        while tag == f"${see_through}":
            node = node[tag][0]
            tag = _tag(node)
        if _is_mapping(node, tag):
            node = next((item for found, _, item in _items(node, tag) if found == key and type(found) is type(key)), ABSENT)
        elif _is_sequence(node, tag):
            items = node[tag] if tag else node
            node = items[key] if type(key) is int and 0 <= key < len(items) else ABSENT
        else:
            node = ABSENT
        if node is ABSENT:
            break
    return node


def _malformed(error: Exception) -> FormatError:
    return FormatError(f"the stored trees of the ranks are malformed: {error!r:.200}", hint="the file is damaged: run `tierstore verify`")


def _tag(node: Any) -> str:
    """The tag of a tagged node; empty for any other."""
    if isinstance(node, dict) and len(node) == 1:
        key = next(iter(node))
        return key if key.startswith("$") else ""
    return ""


def _is_mapping(node: Any, tag: str) -> bool:
    return isinstance(node, dict) and (not tag or (tag in _PAIRS and isinstance(node[tag], list)))


def _is_sequence(node: Any, tag: str) -> bool:
    return isinstance(node, list) or (tag == "$tuple" and isinstance(node[tag], list))


def _items(node: Any, tag: str) -> list[tuple[Any, Any, Any]]:
    """Key, encoded key and value of each entry."""
    if not tag:
        return [(key, key, item) for key, item in node.items()]
    return [(key, pair[0], pair[1]) for key, pair in zip(_keys(node[tag]), node[tag], strict=True)]


def _keys(pairs: list[Any]) -> list[Any]:
    return [pair[0] if type(pair[0]) in (str, int) else decode_node(pair[0]) for pair in pairs]
