"""Pointers: the small file at a checkpoint's path that says which checkpoint of the store is meant."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from tierstore.errors import FormatError, UsageError, VersionError
from tierstore.integrations.local_files import write_whole
from tierstore.names import check_run, check_step
from tierstore.tier_uri import is_tier_uri

__all__ = ["Pointer", "Unit", "path_of", "read_pointer", "remove_file", "siblings", "write_pointer"]

Unit = tuple[str, ...]
"""A part of a checkpoint that is kept or left out as a whole: ``(key,)``, or ``("callbacks", key)``."""

MAX_NBYTES = 16 << 20
"""A pointer holds names and small values; what is longer is none."""

_FORMAT = "tierstore.lightning.pointer"
_FORMAT_VERSION = 1
_HINT = "it is damaged or no pointer of tierstore: pass another checkpoint's path, or '@latest' for the newest of the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """Which checkpoint a path stands for.

    Attributes:
        run: Its run.
        step: Its step, Lightning's ``global_step``.
        save_id: The attempt that was saved.
        units: Which parts of it the path stands for, in order; None: all.
        inline: Small parts in which this path differs from what was saved, each a document of `tierstore.format.objects`.
    """

    run: str
    step: int
    save_id: str
    units: tuple[Unit, ...] | None = None
    inline: tuple[tuple[Unit, bytes], ...] = ()


def path_of(path: object) -> str:
    """A checkpoint's path as text.

    Raises:
        UsageError: It is a URI that `pathlib` or `os.path.normpath` has damaged (``tier:/a`` for ``tier:///a``).
    """
    is_tier_uri(path)  # raises where a Path was made of one
    text = os.fspath(path) if isinstance(path, (str, PurePath)) else str(path)
    if text.lower().startswith("tier:/") and not is_tier_uri(text):
        raise UsageError(
            f"the path {text!r} is a tier:// URI that a path function has damaged ('//' became '/')",
            hint="pass the URI as a str; for ckpt_path='last' use TierModelCheckpoint, or a local dirpath; nothing was read or written",
        )
    return text


def encode_pointer(pointer: Pointer) -> bytes:
    """The file's bytes: JSON that a person can read."""
    body = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "run": pointer.run,
        "step": pointer.step,
        "save_id": pointer.save_id,
        "units": None if pointer.units is None else [list(unit) for unit in pointer.units],
        "inline": [[list(unit), json.loads(document)] for unit, document in pointer.inline],
    }
    return json.dumps(body, indent=1).encode("utf-8") + b"\n"


def decode_pointer(data: bytes, path: str) -> Pointer | None:
    """Reads a pointer; None where the bytes are something else.

    Raises:
        FormatError, VersionError: It is one, and damaged or of a newer version.
    """
    if not data.startswith(b"{") or len(data) > MAX_NBYTES:
        return None
    try:
        body = json.loads(data)
    except ValueError as error:
        if _FORMAT.encode() in data[:200]:
            raise FormatError(f"the pointer {path} is no whole JSON document", hint=_HINT) from error
        return None
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        return None
    if body.get("format_version") != _FORMAT_VERSION:
        raise VersionError(f"the pointer {path} has the version {body.get('format_version')!r}", hint="use a newer tierstore")
    return _pointer(body, path)


def _pointer(body: Mapping[str, Any], path: str) -> Pointer:
    try:
        units = body["units"]
        return Pointer(
            run=check_run(body["run"]),
            step=check_step(body["step"]),
            save_id=str(body["save_id"]),
            units=None if units is None else tuple(_unit(unit) for unit in units),
            inline=tuple((_unit(unit), json.dumps(document).encode("utf-8")) for unit, document in body["inline"]),
        )
    except (KeyError, TypeError, ValueError) as error:  # what a person edited, or another program wrote
        raise FormatError(f"the pointer {path} has malformed fields", hint=_HINT) from error


def _unit(names: Any) -> Unit:
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{names!r} names no part")
    return tuple(names)


def read_pointer(path: str) -> Pointer | None:
    """The pointer at `path`; None where another file, or a folder, is there.

    Raises:
        FileNotFoundError: Nothing is there.
        FormatError, VersionError: As `decode_pointer`; or it is certainly no file of torch's either, which would only say so in riddles.
    """
    fs, name = url_to_fs(path)
    if fs.isdir(name):
        return None
    with fs.open(name, "rb") as file:
        head = file.read(64)
        data = head + file.read(MAX_NBYTES) if head.startswith(b"{") else head
    pointer = decode_pointer(data, path)
    if pointer is None and (not data or data.startswith(b"{")):
        what = "neither a pointer nor a checkpoint" if data else "empty"
        raise FormatError(f"the file {path} is {what}", hint=_HINT)
    return pointer


def write_pointer(path: str, pointer: Pointer) -> None:
    """Publishes the pointer at `path` in one step: a reader sees the old file or the new one."""
    fs, name = url_to_fs(path)
    fs.makedirs(fs._parent(name), exist_ok=True)
    data = encode_pointer(pointer)
    if not isinstance(fs, LocalFileSystem):  # tier:// and object stores publish on close
        with fs.open(name, "wb") as file:
            file.write(data)
        return
    write_whole(Path(name), lambda file: file.write(data))


def remove_file(path: str) -> Pointer | None:
    """Removes what is at `path`, and returns the pointer that it was; nothing happens where nothing is there."""
    fs, name = url_to_fs(path)
    if not fs.lexists(name):
        return None
    try:
        pointer = read_pointer(path)
    except (FileNotFoundError, FormatError, VersionError):  # a link to nothing, or damaged: gone all the same
        pointer = None
    fs.rm(name, recursive=fs.isdir(name))
    return pointer


def siblings(path: str, pointer: Pointer) -> list[str]:
    """Other files of the folder that point to the same checkpoint."""
    fs, name = url_to_fs(path)
    found = []
    for entry in fs.ls(fs._parent(name), detail=True):
        other = str(entry["name"])
        if entry.get("type") != "file" or other == name or int(entry.get("size") or 0) > MAX_NBYTES or not other.endswith(".ckpt"):
            continue
        with fs.open(other, "rb") as file:
            seen = decode_pointer(file.read(MAX_NBYTES), other)
        if seen is not None and (seen.run, seen.step) == (pointer.run, pointer.step):
            found.append(other)
    return found
