"""A folder that several ranks have written: which of them stores which file, and which of them restores it.

Ranks of one node see the same folder, ranks of another node another one, or all of them the same on a shared file system. So each tells
which files it sees, once all have written theirs; a file that several see is stored by one of them, and the bytes are balanced. Two nodes
may have files of one name: these are stored by a rank of each, and the store keeps equal ones once and different ones apart.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tierstore.state.agreement import Agreement, telling
from tierstore.state.folder import SUFFIX, FolderFile, list_folder
from tierstore.state.jointly import jointly, time_to_read

__all__ = ["Share", "restore_once_a_node", "share_files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank stores of a folder; `as_tensors`: whether its safetensors files become tensors."""

    files: tuple[FolderFile, ...]
    as_tensors: bool


def share_files(ranks: Agreement | None, folder: str | os.PathLike[str], what: str, *, ignore: Collection[str] = ()) -> Share:
    """Returns when all ranks are here, that is when all have written their files.

    Args:
        ranks: Who takes part; None: this process alone.
        folder: Where this rank's files lie.
        what: What it is about, for messages.
        ignore: Paths of files to leave out.

    Raises:
        NotFoundError, UsageError: As `list_folder`; on the other ranks a RankError.
        RankError, DeadlineError: Other ranks failed, or did not come.
    """
    if ranks is None:
        return Share(files=tuple(list_folder(folder, ignore=ignore)), as_tensors=True)
    # Not `listed` before the others are here: a rank may still be writing.
    ranks.share(f"{what}: all have written their files", b"")
    with telling(ranks, what):
        # On nodes where no rank writes anything there may be no folder.
        mine = list_folder(folder, ignore=ignore) if ranks.rank == 0 or os.path.isdir(folder) else []
    told = json.dumps([[file.path, file.nbytes, _mark(os.path.join(folder, file.path))] for file in mine]).encode()
    verdict = json.loads(ranks.agree(what, told, _divide))
    own = set(verdict["files"][ranks.rank])
    return Share(files=tuple(file for file in mine if file.path in own), as_tensors=ranks.rank in verdict["tensors"])


def _divide(values: Sequence[bytes]) -> bytes:
    """On rank 0: who stores which file, and whose safetensors files become tensors."""
    seen: dict[str, dict[str, list[int]]] = {}
    sizes: dict[str, int] = {}
    tensors: list[list[tuple[str, int]]] = [[] for _ in values]
    for rank, value in enumerate(values):
        for path, nbytes, mark in json.loads(value):
            seen.setdefault(path, {}).setdefault(mark, []).append(rank)
            sizes[path] = max(sizes.get(path, 0), nbytes)
            if path.endswith(SUFFIX):
                tensors[rank].append((path, nbytes))
    # All safetensors files go to one rank of those that see them, for their tensors' names may clash.
    first = next((rank for rank, found in enumerate(tensors) if found), 0)
    loads = [0] * len(values)
    files: list[list[str]] = [[] for _ in values]
    for path in sorted(seen, key=lambda path: (not path.endswith(SUFFIX), -sizes[path], path)):
        for holders in seen[path].values():
            if len(seen[path]) > 1 or path.endswith(SUFFIX):
                holder = min(holders)  # a node's first rank, which restores there too
            else:
                holder = min(holders, key=lambda rank: (loads[rank], rank))
            loads[holder] += sizes[path]
            files[holder].append(path)
    alike = [rank for rank, found in enumerate(tensors) if found and found == tensors[first]]
    return json.dumps({"files": files, "tensors": alike}).encode()


def restore_once_a_node(ranks: Agreement | None, what: str, target: str, nbytes: int, restore: Callable[[], None]) -> None:
    """Has one rank of each node `restore` something at `target`; returns on all when it is there everywhere.

    Rank 0 goes first, and on other nodes only those ranks restore that do not see it then: so a shared file system gets it once.

    Args:
        ranks: Who takes part; None: this process alone.
        what: What it is about, for messages.
        target: The folder that `restore` makes.
        nbytes: How much will be written: so much longer may it take.
        restore: Makes it.

    Raises:
        IntegrityError, RankError, DeadlineError: As `jointly`.
    """
    if ranks is None:
        restore()
        return
    with time_to_read(ranks, nbytes):
        jointly(ranks, f"{what}: on rank 0", lambda: restore() if ranks.rank == 0 else None)
        mark = _mark(target) if ranks.rank == 0 else ""
        mark = ranks.share(what, mark.encode()).decode()
        lacking = ranks.rank != 0 and _mark(target) != mark
        hosts = ranks.gather(what, (platform.node() if lacking else "").encode())
        first = lacking and hosts.index(platform.node().encode()) == ranks.rank
        jointly(ranks, f"{what}: on the other nodes", lambda: restore() if first else None)


def _mark(target: str) -> str:
    """What tells a file or folder from another of the same path on another node."""
    try:
        facts = os.stat(target)
    except FileNotFoundError:
        return ""
    return f"{facts.st_ino} {facts.st_mtime_ns}"
