"""The way back from a checkpoint to the folder that it was saved from (`state.folder`): whole, proved, and in bounded memory."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierstore.errors import AccessError, FormatError, NotFoundError, RefusedError, StorageError, TierFullError, UsageError, VersionError
from tierstore.format.dtypes import DTYPES, SAFETENSORS_NAMES
from tierstore.format.header import header_nbytes, parse_header
from tierstore.format.index import TensorEntry
from tierstore.format.objects import TensorRef
from tierstore.names import check_relative
from tierstore.state.bits import empty, memory_of, torch_dtype
from tierstore.state.boxes import Box
from tierstore.state.export.plan import boxes_of_range
from tierstore.state.folder import FILES, FOLDER, FOLDER_VERSION, HEADERS, list_folder, stem_of
from tierstore.state.lazy import Checkpoint
from tierstore.state.reading import Fill
from tierstore.storage.temporaries import owner_is_dead, temporary_name

__all__ = ["RestoredFolder", "restore_folder", "same_folder", "sweep_temporaries"]

log = logging.getLogger(__name__)

_WINDOW_NBYTES = 64 << 20
"""So much is read at a time; two windows are in memory."""
_KIND = "restoring"
_TEMPORARY = "."
_OF_RANK = re.compile(r"@rank\d+$")
_NO_ROOM = (28, 122)  # ENOSPC, EDQUOT


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredFolder:
    """A folder that `restore_folder` made: where, how many files, and their bytes."""

    path: Path
    files: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Bytes of a file from `at` on: those of a stored box, or `raw`."""

    file: int
    at: int
    nbytes: int
    entry: TensorEntry | None = None
    box: Box = ()
    raw: torch.Tensor | None = None


_Part = tuple[int, int, memoryview]
"""A file's number, where in it, and what is there."""


def restore_folder(
    checkpoint: Checkpoint,
    to: str | os.PathLike[str],
    *,
    wanted: Callable[[str], bool] = lambda path: True,
    progress: Callable[[int, int], None] | None = None,
) -> RestoredFolder:
    """Writes the folder of a checkpoint to the new folder `to`: into a temporary beside it, which is renamed when all of it is there.

    Every byte is proved by SHA-256 while it is read. Files that several ranks had of their own are those of the rank that the checkpoint
    was opened as; files that other ranks alone had are written too.

    Args:
        checkpoint: From `Store.open_checkpoint`.
        to: The folder to make; its parents are made too.
        wanted: Which files, by their paths.
        progress: Told how many bytes are written, of how many.

    Raises:
        RefusedError: There is something at `to`.
        UsageError: The checkpoint was not saved from a folder.
        VersionError: It was saved by a newer version of tierstore.
        IntegrityError: A part is damaged on every tier, or names in the checkpoint lead outside the folder. Nothing is left at `to`.
        TierFullError, AccessError, StorageError: The disk is full, or can't be written.
    """
    target = Path(to)
    if os.path.lexists(target):
        raise RefusedError(f"{target} exists already", hint="name a new folder, or move that one away", path=str(target))
    objects = _objects(checkpoint)
    files = _files(checkpoint, objects, wanted)
    sweep_temporaries(target.parent)
    temporary = target.parent / f"{_TEMPORARY}{temporary_name(_KIND)}"
    try:
        temporary.mkdir(parents=True)
        nbytes = _write(checkpoint, objects, temporary, files, progress or (lambda done, total: None))
        os.rename(temporary, target)  # fails where somebody has put files there meanwhile
        _sync_folder(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise _told(error, target) from error
        raise
    log.info("restored folder=%s files=%d nbytes=%d", target, len(files), nbytes)
    return RestoredFolder(path=target, files=len(files), nbytes=nbytes)


def sweep_temporaries(folder: Path) -> None:
    """Removes what restores of dead processes left in `folder`."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if name.startswith(f"{_TEMPORARY}{_KIND}-") and owner_is_dead(name.removeprefix(_TEMPORARY)):
            shutil.rmtree(folder / name, ignore_errors=True)
            log.info("swept folder=%s of a dead process", folder / name)


def _told(error: OSError, target: Path) -> StorageError:
    if error.errno in _NO_ROOM:
        return TierFullError(f"no room to restore {target}: {error.strerror}", hint="free space there, or restore to another disk")
    if isinstance(error, PermissionError):
        return AccessError(f"can't restore {target}: {error.strerror}", hint="make the folder above it writable for this user")
    return StorageError(f"can't restore {target}: {error}", hint="look at the folder above it, and at the disk")


def _objects(checkpoint: Checkpoint) -> dict[Any, Any]:
    """The tree of a checkpoint that is a folder."""
    objects = checkpoint.objects
    if not (isinstance(objects, dict) and isinstance(objects.get(FOLDER), dict) and "version" in objects[FOLDER]):
        raise UsageError(
            f"{checkpoint!r} was not saved from a folder of files",
            hint="load its state with Store.load, or write it for other programs with Store.export",
        )
    version = objects[FOLDER]["version"]
    if not isinstance(version, int) or version > FOLDER_VERSION:
        raise VersionError(
            f"{checkpoint!r} holds a folder of version {version!r}; this tierstore knows {FOLDER_VERSION}", hint="install a newer tierstore"
        )
    return objects


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    path: str
    entry: TensorEntry
    """All of its bytes, or its header."""
    stem: str | None = None


def _files(checkpoint: Checkpoint, objects: Mapping[Any, Any], wanted: Callable[[str], bool]) -> list[_File]:
    """What to write, by path: what this rank's tree refers to, and what other ranks alone have."""
    chosen: dict[str, tuple[str, str]] = {}
    for kind in (FILES, HEADERS):
        for name in checkpoint:
            if name.startswith(kind + ".") and not _OF_RANK.search(name):
                chosen[name[len(kind) + 1 :]] = (kind, name)
    for kind in (FILES, HEADERS):
        for path, reference in objects.get(kind, {}).items():
            if isinstance(reference, TensorRef):
                chosen[path] = (kind, reference.name)
    found: dict[str, _File] = {}
    for path, (kind, name) in chosen.items():
        check_relative(path)
        entry = checkpoint.replica.index.find(name)
        if entry.dtype != "uint8" or len(entry.shape) != 1:
            raise FormatError(f"{checkpoint!r} has no sensible file {path!r}", hint="take another step", file=path)
        found[path] = _File(path=path, entry=entry, stem=stem_of(path) if kind == HEADERS else None)
    folders = {path[:at] for path in found for at, letter in enumerate(path) if letter == "/"}
    if clash := folders & found.keys():
        raise FormatError(f"{min(clash)!r} is a file and a folder in {checkpoint!r}", hint="take another step", file=min(clash))
    return [found[path] for path in sorted(found) if wanted(path)]


def same_folder(checkpoint: Checkpoint, folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has the very files of a checkpoint, byte by byte; nothing is written.

    Raises:
        UsageError, VersionError, IntegrityError: As `restore_folder`.
    """
    objects = _objects(checkpoint)
    files = _files(checkpoint, objects, lambda path: True)
    pieces = _all_pieces(checkpoint, objects, files)
    sizes = dict.fromkeys((file.path for file in files), 0)
    for piece in pieces:
        sizes[files[piece.file].path] += piece.nbytes
    try:
        if {file.path: file.nbytes for file in list_folder(folder)} != sizes:
            return False
    except (NotFoundError, UsageError):
        return False

    def differ(parts: Sequence[_Part]) -> None:
        for number, at, memory in parts:
            with open(Path(folder) / files[number].path, "rb", buffering=0) as file:
                found = np.fromfile(file, dtype=np.uint8, count=len(memory), offset=at)
            if not np.array_equal(found, np.frombuffer(memory, dtype=np.uint8)):
                raise _Differs

    try:
        _walk(checkpoint, pieces, differ, lambda done, total: None)
    except _Differs:
        return False
    return True


class _Differs(Exception):
    """Internal: bytes differ."""


def _write(
    checkpoint: Checkpoint, objects: Mapping[Any, Any], root: Path, files: Sequence[_File], progress: Callable[[int, int], None]
) -> int:
    pieces = _all_pieces(checkpoint, objects, files)
    made: set[Path] = {root}
    for file in files:
        path = root / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        made.update(parent for parent in path.parents if parent.is_relative_to(root))
        path.touch()
    _walk(checkpoint, pieces, lambda parts: _put([(root / files[n].path, at, memory) for n, at, memory in parts]), progress)
    for file in files:
        _sync_file(root / file.path)
    for folder in made:
        _sync_folder(folder)
    return sum(piece.nbytes for piece in pieces)


def _all_pieces(checkpoint: Checkpoint, objects: Mapping[Any, Any], files: Sequence[_File]) -> list[_Piece]:
    headers = {file.path: checkpoint[file.entry.name].full() for file in files if file.stem is not None}
    return [piece for number, file in enumerate(files) for piece in _pieces(checkpoint, objects, number, file, headers.get(file.path))]


def _walk(
    checkpoint: Checkpoint, pieces: Sequence[_Piece], take: Callable[[Sequence[_Part]], None], progress: Callable[[int, int], None]
) -> None:
    """Reads all pieces, window by window, in order; each is given to `take` on another thread while the next one is read."""
    total = sum(piece.nbytes for piece in pieces)
    done = 0
    with ThreadPoolExecutor(1, thread_name_prefix="tierstore-restore") as pool:
        taking: Future[None] | None = None
        for window in _windows(pieces):
            targets = [_target(piece) for piece in window]
            checkpoint.fill([fill for fill, _ in targets if fill is not None])
            if taking is not None:
                taking.result()
                progress(done, total)
            taking = pool.submit(take, [(p.file, p.at, memory_of(tensor)) for p, (_, tensor) in zip(window, targets, strict=True)])
            done += sum(piece.nbytes for piece in window)
        if taking is not None:
            taking.result()
    progress(total, total)


def _pieces(checkpoint: Checkpoint, objects: Mapping[Any, Any], number: int, file: _File, header: torch.Tensor | None) -> Iterator[_Piece]:
    if header is None:
        yield from _ranges(number, 0, file.entry)
        return
    raw = bytes(memory_of(header))
    length = header_nbytes(raw[:8], 1 << 62)
    if length != len(raw):
        raise FormatError(f"the header of {file.path!r} in {checkpoint!r} is cut", hint="run `tierstore verify`, or take another step")
    end = max((end for _, end in _claims(raw)), default=0) + length
    parsed = parse_header(raw, end)
    yield _Piece(file=number, at=0, nbytes=length, raw=header)
    own = objects.get(file.stem)
    for key, told in parsed.tensors.items():
        reference = own.get(key) if isinstance(own, dict) else None
        entry = checkpoint.replica.index.find(reference.name if isinstance(reference, TensorRef) else f"{file.stem}.{key}")
        known = SAFETENSORS_NAMES.get(told.dtype)
        if known is None or known.name != entry.dtype or tuple(entry.shape) != tuple(told.shape):
            raise FormatError(
                f"tensor {entry.name!r} is not what the header of {file.path!r} says", hint="run `tierstore verify`", tensor=entry.name
            )
        yield from _ranges(number, told.begin, entry)


def _claims(raw: bytes) -> Iterator[tuple[int, int]]:
    """The offsets that a header names, before it is checked."""
    for begin, end in re.findall(rb'"data_offsets"\s*:\s*\[\s*(\d{1,19})\s*,\s*(\d{1,19})\s*\]', raw):
        yield int(begin), int(end)


def _ranges(number: int, at: int, entry: TensorEntry) -> Iterator[_Piece]:
    itemsize = DTYPES[entry.dtype].itemsize
    count = 1
    for size in entry.shape:
        count *= size
    step = _WINDOW_NBYTES // itemsize
    for begin in range(0, count, step):
        for box in boxes_of_range(tuple(entry.shape), begin, min(begin + step, count)):
            nbytes = itemsize
            for span in box:
                nbytes *= len(span)
            yield _Piece(file=number, at=at, nbytes=nbytes, entry=entry, box=box)
            at += nbytes


def _windows(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    window: list[_Piece] = []
    used = 0
    for piece in pieces:
        if window and used + piece.nbytes > _WINDOW_NBYTES:
            yield window
            window, used = [], 0
        window.append(piece)
        used += piece.nbytes
    if window:
        yield window


def _target(piece: _Piece) -> tuple[Fill | None, torch.Tensor]:
    if piece.entry is None:
        assert piece.raw is not None
        return None, piece.raw
    tensor = empty(tuple(len(span) for span in piece.box), torch_dtype(piece.entry.dtype))
    return Fill(entry=piece.entry, box=piece.box, target=tensor), tensor


def _put(parts: Sequence[tuple[Path, int, memoryview]]) -> None:
    opened: tuple[Path, Any] | None = None
    try:
        for path, at, memory in parts:
            if opened is None or opened[0] != path:
                if opened is not None:
                    opened[1].close()
                opened = (path, open(path, "r+b", buffering=0))  # noqa: SIM115 - closed below
            opened[1].seek(at)
            left = memory
            while left:
                left = left[opened[1].write(left) :]
    finally:
        if opened is not None:
            opened[1].close()


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
