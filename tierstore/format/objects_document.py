"""The documents that hold objects: one rank's, and ``objects.json`` with all ranks', where what they have in common is stored once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.errors import FormatError, NotFoundError, UsageError
from tierstore.format.document import FORMAT_VERSION, check_version, load_json
from tierstore.format.fields import MAX_RANKS
from tierstore.format.objects_changes import WholeTree, apply_changes

__all__ = [
    "MAX_OBJECTS_NBYTES",
    "ObjectsDocument",
    "encode_tree",
    "load_objects",
    "load_tree",
    "merge_objects",
    "object_ranks",
    "split_objects",
]

MAX_OBJECTS_NBYTES = 1 << 30
_RANK = "tierstore.objects.rank"
_ALL = "tierstore.objects"
_CANDIDATES = 4  # how many of the newest whole trees are tried
_BEGINNING = 256  # characters
_HINT = "the file is foreign or damaged: run `tierstore verify`"


def encode_tree(tree: Any) -> bytes:
    """Writes one rank's encoded tree."""
    return _dump({"format": _RANK, "format_version": FORMAT_VERSION, "tree": tree})


def _dump(body: Any) -> bytes:
    try:
        data = _text(body).encode("utf-8") + b"\n"
    except RecursionError as error:
        raise UsageError("the objects are nested too deep for this thread's stack", hint="make the state flatter") from error
    if len(data) > MAX_OBJECTS_NBYTES:
        raise UsageError(
            f"the objects have {len(data):,} bytes; {MAX_OBJECTS_NBYTES:,} are allowed",
            hint="store large arrays as tensors",
        )
    return data


def _load(data: bytes, kind: str) -> dict[str, Any]:
    body = load_json(data, kind, max_nbytes=MAX_OBJECTS_NBYTES)
    if not isinstance(body, dict):
        raise FormatError(f"{kind}: the document is no JSON object", hint=_HINT)
    found = body.get("format")
    if found != kind:
        hint = "take one rank's with split_objects first" if (found, kind) == (_ALL, _RANK) else _HINT
        raise FormatError(f"{kind}: the document says it is {str(found)[:60]!r}", hint=hint)
    check_version(body.get("format_version"), kind)
    return body


def load_tree(data: bytes) -> Any:
    """Reads one rank's encoded tree.

    Raises:
        FormatError: Malformed, foreign or oversized.
        VersionError: Written by a newer major version.
    """
    body = _load(data, _RANK)
    if "tree" not in body:
        raise FormatError(f"{_RANK}: the tree is missing", hint=_HINT)
    return body["tree"]


def merge_objects(parts: Mapping[int, bytes]) -> bytes:
    """Makes ``objects.json`` of all ranks' objects.

    Ranks whose bytes are equal are stored once. A tree that is like one that is stored already is stored as what differs from it, so
    that the document grows with what the ranks have of their own. Only the trees that are stored whole are in memory together.

    Args:
        parts: What `encode_objects` made, by rank.

    Raises:
        FormatError: A part is malformed.
        UsageError: There are none, or all together are too large.
    """
    if not parts:
        raise UsageError("no rank has objects to merge", hint="every rank's part record holds some, if only an empty dict")
    places: dict[bytes, tuple[bool, int]] = {}
    wholes = _Wholes()
    changes: list[list[Any]] = []
    found: list[tuple[int, bool, int]] = []
    for rank in sorted(parts):
        data = bytes(parts[rank])
        digest = hashlib.sha256(data).digest()
        if digest not in places:
            differing = wholes.changes(data)
            if differing is None:
                places[digest] = (True, wholes.add(data))
            else:
                places[digest] = (False, len(changes))
                changes.append(differing)
        found.append((rank, *places[digest]))
    trees = [whole.tree for whole in wholes.trees]
    ranks = [[rank, number if whole else len(trees) + number] for rank, whole, number in found]
    body: dict[str, Any] = {"format": _ALL, "format_version": FORMAT_VERSION, "ranks": ranks, "trees": trees}
    return _dump({**body, "changes": changes} if changes else body)


class _Wholes:
    """The trees that are stored whole, and which of them a further tree is like."""

    def __init__(self) -> None:
        self.trees: list[WholeTree] = []
        self._by_beginning: dict[str, int] = {}
        self._head, _, self._tail = str(encode_tree(None), "utf-8").rpartition("null")

    def add(self, data: bytes) -> int:
        self.trees.append(WholeTree(load_tree(data), write=_text, parse=_parse))
        self._by_beginning[self._beginning(str(data, "utf-8"))] = len(self.trees) - 1
        return len(self.trees) - 1

    def changes(self, data: bytes) -> list[Any] | None:
        """``[number of a whole tree, what differs]``, where that is less than half of the tree."""
        try:
            text = str(data, "utf-8")
        except UnicodeDecodeError:
            return None  # `load_tree` will say what is wrong with it
        if not (text.startswith(self._head) and text.endswith(self._tail)):
            return None
        tree = text[len(self._head) : len(text) - len(self._tail)]
        newest = range(len(self.trees) - 1, -1, -1)[:_CANDIDATES]
        alike = self._by_beginning.get(self._beginning(text))
        for number in newest if alike is None else dict.fromkeys((alike, *newest)):
            differing = self.trees[number].changes(tree)
            if differing is not None:
                return [number, differing]
        return None

    def _beginning(self, text: str) -> str:
        """Trees that begin alike (a pipeline stage's with its first layer) are likely to be alike."""
        return text[len(self._head) : len(self._head) + _BEGINNING]


def _text(node: Any) -> str:
    return json.dumps(node, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _parse(text: str) -> Any:
    return load_json(text.encode("utf-8"), _RANK, max_nbytes=MAX_OBJECTS_NBYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectsDocument:
    """``objects.json``, parsed once.

    Attributes:
        ranks: Which tree each rank has, by number: ranks with the same number have the same objects.
        trees: The trees that are stored whole; the first numbers.
        changes: ``[number of a whole tree, what differs]``; the numbers after those.
    """

    ranks: Mapping[int, int]
    trees: Sequence[Any]
    changes: Sequence[Any]

    def split(self, rank: int) -> bytes:
        """One rank's objects, as `encode_objects` made them; raises as `tree`."""
        return encode_tree(self.tree(rank))

    def tree(self, rank: int) -> Any:
        """One rank's tree, still encoded. It shares parts with other ranks' trees: it is not to be changed.

        Raises:
            NotFoundError: The checkpoint has no objects of this rank (it was saved by fewer ranks).
            FormatError: What differs from another tree is malformed.
        """
        if rank not in self.ranks:
            raise NotFoundError(
                f"the checkpoint has no objects of rank {rank}: it was saved by {len(self.ranks)} ranks",
                hint=f"its ranks are {min(self.ranks)} to {max(self.ranks)}: choose whose objects a new rank takes over",
                rank=rank,
            )
        return self._tree(self.ranks[rank])

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], bytes]]:
        """Each different tree once, with the ranks that have it, by the lowest of them.

        Raises:
            FormatError: What differs from another tree is malformed.
        """
        holders: dict[int, list[int]] = {}
        for rank, number in sorted(self.ranks.items()):
            holders.setdefault(number, []).append(rank)
        return ((tuple(ranks), encode_tree(self._tree(number))) for number, ranks in holders.items())

    def _tree(self, number: int) -> Any:
        if number < len(self.trees):
            return self.trees[number]
        base, differing = self.changes[number - len(self.trees)]
        return apply_changes(self.trees[base], differing)


def load_objects(data: bytes) -> ObjectsDocument:
    """Reads ``objects.json``.

    Raises:
        FormatError: Malformed, foreign or oversized.
        VersionError: Written by a newer major version.
    """
    body = _load(data, _ALL)
    rows, trees, changes = body.get("ranks"), body.get("trees"), body.get("changes", [])
    if not isinstance(rows, list) or not rows or not isinstance(trees, list) or not isinstance(changes, list):
        raise FormatError(f"{_ALL}: the ranks, the trees or the changes are missing", hint=_HINT)
    for change in changes:
        if not isinstance(change, list) or len(change) != 2 or type(change[0]) is not int or not 0 <= change[0] < len(trees):
            raise FormatError(f"{_ALL}: {str(change)[:60]} is no change of a tree", hint=_HINT)
    ranks: dict[int, int] = {}
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or not all(type(n) is int for n in row):
            raise FormatError(f"{_ALL}: {str(row)[:60]} is no pair of rank and tree", hint=_HINT)
        rank, tree = row
        if not 0 <= rank < MAX_RANKS or not 0 <= tree < len(trees) + len(changes) or rank in ranks:
            raise FormatError(f"{_ALL}: rank {rank} with tree {tree} is out of range or stands there twice", hint=_HINT)
        ranks[rank] = tree
    return ObjectsDocument(ranks=ranks, trees=trees, changes=changes)


def split_objects(data: bytes, rank: int) -> bytes:
    """Takes one rank's objects out of ``objects.json``.

    Raises:
        NotFoundError: The checkpoint has no objects of this rank (it was saved by fewer ranks).
        FormatError: Malformed, foreign or oversized.
        VersionError: Written by a newer major version.
    """
    return load_objects(data).split(rank)


def object_ranks(data: bytes) -> dict[int, int]:
    """Which tree each rank has, by number: ranks with the same number have the same objects.

    Raises:
        FormatError: Malformed, foreign or oversized.
        VersionError: Written by a newer major version.
    """
    return dict(load_objects(data).ranks)
