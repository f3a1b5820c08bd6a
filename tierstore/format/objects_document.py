"""The documents that hold objects: one rank's, and ``objects.json`` with all ranks', where identical ranks are stored once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tierstore.errors import FormatError, NotFoundError, UsageError
from tierstore.format.document import FORMAT_VERSION, check_version, load_json
from tierstore.format.fields import MAX_RANKS

__all__ = ["MAX_OBJECTS_NBYTES", "encode_tree", "load_tree", "merge_objects", "object_ranks", "split_objects"]

MAX_OBJECTS_NBYTES = 1 << 30
_RANK = "tierstore.objects.rank"
_ALL = "tierstore.objects"
_HINT = "the file is foreign or damaged: run `tierstore verify`"


def encode_tree(tree: Any) -> bytes:
    """Writes one rank's encoded tree."""
    return _dump({"format": _RANK, "format_version": FORMAT_VERSION, "tree": tree})


def _dump(body: Any) -> bytes:
    try:
        data = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8") + b"\n"
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

    Args:
        parts: What `encode_objects` made, by rank; ranks whose bytes are equal are stored once.

    Raises:
        FormatError: A part is malformed.
        UsageError: There are none, or all together are too large.
    """
    if not parts:
        raise UsageError("no rank has objects to merge", hint="every rank's part record holds some, if only an empty dict")
    places: dict[bytes, int] = {}
    trees: list[Any] = []
    ranks: list[list[int]] = []
    for rank in sorted(parts):
        data = bytes(parts[rank])
        if data not in places:
            places[data] = len(trees)
            trees.append(load_tree(data))
        ranks.append([rank, places[data]])
    return _dump({"format": _ALL, "format_version": FORMAT_VERSION, "ranks": ranks, "trees": trees})


def split_objects(data: bytes, rank: int) -> bytes:
    """Takes one rank's objects out of ``objects.json``.

    Raises:
        NotFoundError: The checkpoint has no objects of this rank (it was saved by fewer ranks).
        FormatError: Malformed, foreign or oversized.
        VersionError: Written by a newer major version.
    """
    ranks, trees = _tables(data)
    if rank not in ranks:
        raise NotFoundError(
            f"the checkpoint has no objects of rank {rank}: it was saved by {len(ranks)} ranks",
            hint=f"its ranks are {min(ranks)} to {max(ranks)}: choose whose objects a new rank takes over",
            rank=rank,
        )
    return encode_tree(trees[ranks[rank]])


def object_ranks(data: bytes) -> dict[int, int]:
    """Which tree each rank has, by number: ranks with the same number have the same objects.

    Raises:
        FormatError: Malformed, foreign or oversized.
        VersionError: Written by a newer major version.
    """
    return _tables(data)[0]


def _tables(data: bytes) -> tuple[dict[int, int], list[Any]]:
    body = _load(data, _ALL)
    rows, trees = body.get("ranks"), body.get("trees")
    if not isinstance(rows, list) or not rows or not isinstance(trees, list):
        raise FormatError(f"{_ALL}: the ranks or the trees are missing", hint=_HINT)
    ranks: dict[int, int] = {}
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or not all(type(n) is int for n in row):
            raise FormatError(f"{_ALL}: {str(row)[:60]} is no pair of rank and tree", hint=_HINT)
        rank, tree = row
        if not 0 <= rank < MAX_RANKS or not 0 <= tree < len(trees) or rank in ranks:
            raise FormatError(f"{_ALL}: rank {rank} with tree {tree} is out of range or stands there twice", hint=_HINT)
        ranks[rank] = tree
    return ranks, trees
