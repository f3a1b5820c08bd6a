"""What lies under a path: a file through the tiers, a checkpoint's file, or a folder; and what fsspec is told of it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tierstore.errors import RefusedError, UsageError
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.files.entry import FileVersion

__all__ = [
    "CheckpointFile",
    "Node",
    "NotAFolderError",
    "NotEmptyError",
    "ReadOnlyError",
    "UnsupportedModeError",
    "folder_node",
    "node_of",
]


class ReadOnlyError(RefusedError, PermissionError):
    """A checkpoint's folder is not written to file by file; nothing was changed."""


class UnsupportedModeError(UsageError, io.UnsupportedOperation):
    """A file can't be opened in this mode; nothing was changed."""


class NotEmptyError(UsageError, OSError):
    """A folder that holds something can't be removed by itself; nothing was changed."""


class NotAFolderError(UsageError, NotADirectoryError):
    """It is a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One file of a committed checkpoint.

    Attributes:
        info: The catalog's entry.
        name: The file's name in the checkpoint's folder.
        digest: SHA-256 over the blocks' digests, ``sha256:<hex>``.
    """

    info: CheckpointInfo
    name: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a look found under a path.

    Attributes:
        path: Without a slash at either end; empty for the root.
        nbytes: The length in bytes; 0 for a folder.
        is_folder: Whether it is one.
        source: Where the bytes are; of a folder that somebody made, its mark; None for a folder that holds something, and nothing more.
    """

    path: str
    nbytes: int = 0
    is_folder: bool = False
    source: FileVersion | CheckpointFile | None = None

    @property
    def at(self) -> datetime | None:
        """When it was published; None for a folder that nobody made."""
        if isinstance(self.source, FileVersion):
            return self.source.published_at
        return None if self.source is None else self.source.info.committed_at

    @property
    def identity(self) -> str:
        """Names these very bytes: another version of the file has another one."""
        if isinstance(self.source, CheckpointFile):
            return f"{self.source.info.attempt.folder}/{self.source.name}"
        return "" if self.source is None else f"{self.source.version}-{self.source.save_id}"

    def info(self) -> dict[str, Any]:
        """What `fsspec` calls an info: ``name``, ``size``, ``type``, and beside these ``created``, ``version`` and ``tiers``."""
        found: dict[str, Any] = {"name": f"/{self.path}", "size": self.nbytes, "type": "directory" if self.is_folder else "file"}
        if self.at is not None:
            found |= {"created": self.at, "version": self.identity}
        if isinstance(self.source, FileVersion) and not self.is_folder:
            found["tiers"] = list(self.source.tiers)
        elif isinstance(self.source, CheckpointFile):
            found["tiers"] = list(self.source.info.complete_on)
        return found


def node_of(version: FileVersion) -> Node:
    """A file or folder of the files through the tiers."""
    made = version if version.version or not version.is_folder else None
    return Node(path=version.path, nbytes=version.nbytes, is_folder=version.is_folder, source=made)


def folder_node(path: str) -> Node:
    """A folder that exists because it holds something."""
    return Node(path=path, is_folder=True)
