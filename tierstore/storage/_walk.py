"""Listing and deleting below a root, while other processes do the same. Blocking; runs in threads."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from tierstore.errors import AccessError, FormatError
from tierstore.names import TMP, check_relative
from tierstore.storage._publish import Tree
from tierstore.storage.contract import FileInfo, Listing
from tierstore.storage.temporaries import owner_is_dead

__all__ = ["delete_files", "list_dead", "list_files", "list_level", "stat_file", "sweep"]

_log = logging.getLogger(__name__)


def _info(path: str, facts: os.stat_result) -> FileInfo:
    return FileInfo(path=path, nbytes=facts.st_size, modified_at=datetime.fromtimestamp(facts.st_mtime, timezone.utc))


def _is_file(facts: os.stat_result) -> bool:
    return facts.st_mode & 0o170000 == 0o100000


def stat_file(tree: Tree, path: str) -> FileInfo:
    """Size and time of one regular file; OSError (EISDIR for anything else)."""
    facts = os.stat(tree.inside(f"{tree.root}/{path}"))
    if not _is_file(facts):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    return _info(path, facts)


def _entries(tree: Tree, folder: str, *, inside: bool = False) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """The entries of a folder with their paths, without temporaries and names that are not ours to give; none if it is gone.

    `inside`: it was found by listing a folder inside the root, and is no link.
    """
    try:
        full = f"{tree.root}/{folder}" if folder else tree.root
        scan = os.scandir(full if inside or not folder else tree.inside(full))
    except (FileNotFoundError, NotADirectoryError):
        return
    with scan:
        for entry in scan:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if path == TMP:
                continue
            try:
                yield check_relative(path), entry
            except FormatError:
                _log.debug("event=foreign-name folder=%r name=%r", folder, entry.name)


def _file(tree: Tree, path: str, entry: os.DirEntry[str]) -> FileInfo | None:
    """What is said of an entry that is a file; None if it is none, or was just deleted. Links are followed inside the root only."""
    try:
        if entry.is_symlink():
            return stat_file(tree, path)
        facts = entry.stat(follow_symlinks=False)
    except AccessError:
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    return _info(path, facts) if _is_file(facts) else None


def list_files(tree: Tree, folder: str) -> list[FileInfo]:
    """Every file below `folder`. Linked folders are not entered: they could lead round in circles."""
    found = []
    pending = [folder]
    while pending:
        at = pending.pop()
        for path, entry in _entries(tree, at, inside=at is not folder):
            if entry.is_dir(follow_symlinks=False):
                pending.append(path)
            elif (info := _file(tree, path, entry)) is not None:
                found.append(info)
    return found


def list_level(tree: Tree, folder: str) -> Listing:
    files, folders = [], []
    for path, entry in _entries(tree, folder):
        if entry.is_dir(follow_symlinks=False):
            folders.append(entry.name)
        elif (info := _file(tree, path, entry)) is not None:
            files.append(info)
    return Listing(files=tuple(files), folders=tuple(folders))


def delete_files(tree: Tree, paths: Sequence[str]) -> None:
    """Removes files, then the folders that are empty by it, then makes that durable."""
    touched: dict[str, None] = {}
    for path in paths:
        full = f"{tree.root}/{path}"
        folder = os.path.dirname(full)
        tree.inside(folder)
        try:
            tree.syscalls.unlink(full)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            pass
        # Missing files count: what an earlier attempt removed may not be durable yet, and its folders may still stand.
        touched[folder] = None
    changed: dict[str, None] = {}
    for folder in touched:
        at = folder
        while at != tree.root and at != f"{tree.root}/{TMP}":
            try:
                tree.syscalls.rmdir(at)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR):
                    at = os.path.dirname(at)
                    continue
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    break
                raise
            at = os.path.dirname(at)
        changed[at] = None
    if tree.durable:
        for folder in changed:
            try:
                tree.syscalls.fsync_folder(folder)
            except FileNotFoundError:
                # Another deletion took the folder and what is above it; it answers for that, and what is gone stays gone after
                # its own fsync only: do it here too.
                tree.sync_folders(_standing(folder))


def _standing(folder: str) -> str:
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return folder


def list_dead(tree: Tree) -> list[str]:
    """The names of the temporaries of processes that provably live no more."""
    try:
        names = os.listdir(f"{tree.root}/{TMP}")
    except FileNotFoundError:
        return []
    return [name for name in sorted(names) if owner_is_dead(name)]


def sweep(tree: Tree) -> list[str]:
    """Removes the temporaries of processes that provably live no more; returns their names."""
    removed = []
    for name in list_dead(tree):
        try:
            tree.syscalls.unlink(f"{tree.root}/{TMP}/{name}")
        except FileNotFoundError:
            continue  # another process sweeps too
        removed.append(name)
    return removed
