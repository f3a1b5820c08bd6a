"""A folder of files as a state: what training frameworks write, taken into a checkpoint without reading it into Python.

The tensors of ``*.safetensors`` files become tensors of the checkpoint, so that slices, differences and exports know them; every other
file becomes one tensor of bytes. Names in the checkpoint, for a folder with ``model.safetensors`` and ``rng/state.pth``::

    model.<the tensor's name in the file>      the tensors; of model-00001-of-00003.safetensors too
    safetensors.model.safetensors              the file's header as it was, byte by byte
    files.rng/state.pth                        all bytes of a file

and ``folder: {"version": 1}`` among the objects. Files are mapped, so that saving costs one copy from the page cache; the folder has
to stay as it is until `Store.save` has returned. `state.folder_restore` is the way back, to files that are equal byte by byte.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierstore.errors import FormatError, NotFoundError, UsageError
from tierstore.format.dtypes import SAFETENSORS_NAMES
from tierstore.format.header import ShardHeader, header_nbytes, parse_header
from tierstore.names import check_relative
from tierstore.state.bits import empty, torch_dtype

__all__ = ["FILES", "FOLDER", "FOLDER_VERSION", "HEADERS", "FolderFile", "folder_state", "list_folder", "stem_of"]

log = logging.getLogger(__name__)

FOLDER = "folder"
"""The object that says that a state is a folder."""
FOLDER_VERSION = 1
FILES = "files"
"""Below this the files that are stored as bytes."""
HEADERS = "safetensors"
"""Below this the headers of the files that are stored as tensors."""

SUFFIX = ".safetensors"
_NUMBERED = re.compile(r"-\d{5}-of-\d{5}$")
_RANKED = re.compile(r"@rank\d+$")
"""How the store names a value that another rank has too (`state.ownership`): a name of a person's own must not look so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFile:
    """A file of a folder: its path inside it, with ``/``, and its length in bytes."""

    path: str
    nbytes: int


def stem_of(path: str) -> str:
    """What the tensors of a safetensors file are named below: its path without number and ending."""
    return _NUMBERED.sub("", path.removesuffix(SUFFIX))


def list_folder(folder: str | os.PathLike[str], *, ignore: Collection[str] = ()) -> list[FolderFile]:
    """Every file in a folder and the folders below it, by path. Folders without files don't count.

    Args:
        folder: Which.
        ignore: Paths of files to leave out.

    Raises:
        NotFoundError: There is no such folder.
        UsageError: Something in it is no regular file (a link, a socket), or has a name that can't be stored; named.
    """
    root = Path(folder)
    if not root.is_dir():
        raise NotFoundError(f"there is no folder {root}", hint="name the folder that the files were written to", path=str(root))
    found: list[FolderFile] = []
    pending = [""]
    while pending:
        below = pending.pop()
        with os.scandir(root / below) as entries:
            for entry in entries:
                path = f"{below}{entry.name}"
                if path in ignore:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path + "/")
                    continue
                facts = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(facts.st_mode):
                    kind = "a symbolic link" if stat.S_ISLNK(facts.st_mode) else "no regular file"
                    raise UsageError(
                        f"{path!r} in {root} is {kind}, which a checkpoint can't hold",
                        hint="put a copy of the file in its place, or keep it outside the checkpoint's folder",
                        path=path,
                    )
                found.append(FolderFile(path=_storable(path, root), nbytes=facts.st_size))
    return sorted(found, key=lambda file: file.path)


def _storable(path: str, root: Path) -> str:
    try:
        check_relative(path)
        fit = path.isprintable() and not _RANKED.search(path)
    except FormatError:
        fit = False
    if not fit:
        raise UsageError(
            f"the file name {path!r} in {root} can't be stored",
            hint="rename the file: printable characters without backslashes, no '@rank<n>' at its end, up to 255 bytes a part",
            path=path,
        )
    return path


def folder_state(
    folder: str | os.PathLike[str],
    files: Sequence[FolderFile] | None = None,
    *,
    reserved: Collection[str] = (),
    as_tensors: bool = True,
) -> dict[str, Any]:
    """The state of a folder, for `Store.save`; its tensors are the mapped files, copy-on-write.

    Args:
        folder: Which.
        files: The files of it that are meant, from `list_folder`; None: all.
        reserved: Further keys of the state that this becomes a part of: no tensor gets a name below them.
        as_tensors: Whether safetensors files become tensors; otherwise they are bytes like all others.

    Raises:
        NotFoundError: There is no such folder, or a file of it is gone.
        UsageError: Something in it can't be stored, or changed since it was listed; named.
    """
    root = Path(folder)
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    headers: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    taken: set[str] = set()
    for file in list_folder(root) if files is None else files:
        mapped = _mapped(root, file)
        if as_tensors and file.path.endswith(SUFFIX):
            stem = stem_of(file.path)
            found = None if stem.partition(".")[0] in {FOLDER, FILES, HEADERS, *reserved} else _tensors(mapped, file)
            names = {f"{stem}.{key}" for key in found[1]} if found else set()
            if found and taken.isdisjoint(names):
                taken |= names
                headers[file.path] = found[0]
                tensors.setdefault(stem, {}).update(found[1])
                continue
            log.info("file=%s is stored as bytes: its header, or the names of its tensors, are none to be stored", root / file.path)
        plain[file.path] = mapped
    return {FOLDER: {"version": FOLDER_VERSION}, **tensors, HEADERS: headers, FILES: plain}


def _mapped(root: Path, file: FolderFile) -> torch.Tensor:
    path = root / file.path
    try:
        if file.nbytes == path.stat().st_size:
            # A private mapping that holds no descriptor: a folder of thousands of files is no trouble.
            nothing = empty((0,), torch.uint8)
            return torch.from_file(str(path), shared=False, size=file.nbytes, dtype=torch.uint8) if file.nbytes else nothing
    except FileNotFoundError:
        raise NotFoundError(f"{path} is gone since the folder was listed", hint="save before anything removes it", path=file.path) from None
    except RuntimeError as error:  # torch's for whatever mmap says
        raise UsageError(f"{path} can't be mapped: {error}", hint="is it readable, and on a file system that maps files?") from error
    raise UsageError(f"{path} has changed since the folder was listed", hint="save when nothing writes to it any more", path=file.path)


def _tensors(mapped: torch.Tensor, file: FolderFile) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
    """A safetensors file's header and its tensors; None where they can't be stored as such."""
    try:
        length = header_nbytes(bytes(mapped[:8].numpy()), file.nbytes)
        header = parse_header(mapped[:length].numpy().tobytes(), file.nbytes)
    except FormatError as error:
        log.warning("file=%s is no good safetensors file, and is stored as it is: %s", file.path, error.message)
        return None
    found = {key: _tensor(mapped, header, key) for key in header.tensors}
    whole = {key: tensor for key, tensor in found.items() if tensor is not None}
    return (mapped[:length].clone(), whole) if len(whole) == len(found) else None


def _tensor(mapped: torch.Tensor, header: ShardHeader, key: str) -> torch.Tensor | None:
    told = header.tensors[key]
    known = SAFETENSORS_NAMES.get(told.dtype)
    if known is None or told.begin % known.itemsize or not key or not key.isprintable() or _RANKED.search(key):
        return None
    if told.begin == told.end:
        return empty(told.shape, torch_dtype(known.name))
    return mapped[told.begin : told.end].view(torch_dtype(known.name)).view(told.shape)
