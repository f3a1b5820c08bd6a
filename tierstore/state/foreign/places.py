"""Where the bytes of a foreign tensor lie, found when they are first wanted.

An index of a foreign checkpoint may name files that do not exist: ``model.pt@data/3`` stands for a storage within an archive of
``torch.save``, ``__0_0.distcp@7`` for an item of DCP's. Finding such a place takes one to three small reads, so it waits until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore.errors import FormatError, IncompleteError
from tierstore.format.dcp_metadata import DcpItem
from tierstore.format.dtypes import DTYPES, SAFETENSORS_NAMES
from tierstore.format.header import header_nbytes, parse_header
from tierstore.format.torch_zip import (
    LOCAL_NBYTES,
    Archive,
    SavedTensor,
    ZipEntry,
    find_directory,
    local_nbytes,
    parse_directory,
    parse_saved,
)
from tierstore.state.foreign.files import ForeignFiles

__all__ = ["ItemPlace", "Layout", "Made", "MemberPlace", "Place", "Wherever", "Window", "is_contiguous", "member_bytes", "open_archive"]

_HEAD_NBYTES = 4096
_MAX_PICKLE_NBYTES = 1 << 30
_LOCAL_EXTRA = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Elements that do not lie in order: `strides` in elements, as torch has them."""

    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Made(Protocol):
    """Rows of bytes that are calculated from others; `make` reads those by file, begin and length."""

    @property
    def rows(self) -> int: ...

    @property
    def row_nbytes(self) -> int: ...

    async def make(self, first: int, last: int, read: Callable[[str, int, int], Awaitable[bytes]]) -> npt.NDArray[np.uint8]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Bytes of a real file: `nbytes` from `begin`. With a `layout` they are to be put in order; with `made` they are calculated instead."""

    file: str
    begin: int
    nbytes: int
    layout: Layout | None = None
    made: Made | None = None


class Wherever(Protocol):
    """Finds a place when it is asked."""

    async def find(self, files: ForeignFiles) -> Place: ...


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements lie in C order without gaps."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


@dataclass(slots=True, kw_only=True)
class Window:
    """A range of a file, read in pieces; pieces that were read are not read again."""

    files: ForeignFiles
    file: str
    begin: int
    nbytes: int
    known: list[tuple[int, bytes]] = field(default_factory=list)

    async def read(self, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes, `offset` counted from the window's beginning."""
        if offset < 0 or offset + nbytes > self.nbytes:
            raise FormatError(f"{self.file}: bytes {offset} to {offset + nbytes} of {self.nbytes} are claimed", hint="it is damaged")
        for at, data in self.known:
            if at <= offset and offset + nbytes <= at + len(data):
                return data[offset - at : offset - at + nbytes]
        data = await self.files.read(self.file, self.begin + offset, nbytes)
        if nbytes <= 64 << 10:
            self.known.append((offset, data))
        return data


async def open_archive(window: Window, tail_nbytes: int) -> Archive:
    """Reads the directory of the ``torch.save`` archive that fills the window.

    Raises:
        FormatError: It is none; names the file.
    """
    try:
        length = min(tail_nbytes, window.nbytes)
        begin, size = find_directory(await window.read(window.nbytes - length, length), window.nbytes)
        return parse_directory(await window.read(begin, size), window.nbytes)
    except FormatError as error:
        raise FormatError(f"{window.file}: {error.message}", hint=error.hint, file=window.file) from error


async def member_begin(window: Window, entry: ZipEntry) -> int:
    """Where a member's data begin in the window.

    Raises:
        FormatError: The member has no header of its own, or its data do not fit the archive.
    """
    begin = entry.header + local_nbytes(await window.read(entry.header, LOCAL_NBYTES))
    if begin + entry.nbytes > window.nbytes:
        raise FormatError(f"{window.file}: a member's data lie outside the archive", hint="it is damaged", file=window.file)
    return begin


async def member_bytes(window: Window, entry: ZipEntry) -> bytes:
    """A small member's data."""
    if entry.nbytes > _MAX_PICKLE_NBYTES:
        raise FormatError(f"{window.file}: a pickle of {entry.nbytes:,} bytes", hint="it is damaged", file=window.file)
    begin = await member_begin(window, entry)
    return await window.read(begin, entry.nbytes)


def check_tensor(tensor: SavedTensor, archive: Archive, file: str, name: str) -> ZipEntry:
    """The member that holds a tensor.

    Raises:
        FormatError: The tensor reaches beyond it.
    """
    entry = archive.member(f"data/{tensor.storage}")
    if (tensor.offset + tensor.span) * DTYPES[tensor.dtype].itemsize > entry.nbytes:
        raise FormatError(
            f"{file}: tensor {name[:200]!r} of shape {tensor.shape} reaches beyond its storage of {entry.nbytes:,} bytes",
            hint="it is damaged",
            tensor=name,
            file=file,
        )
    return entry


def layout_of(tensor: SavedTensor) -> Layout | None:
    if is_contiguous(tensor.shape, tensor.strides):
        return None
    return Layout(itemsize=DTYPES[tensor.dtype].itemsize, shape=tensor.shape, strides=tensor.strides)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlace:
    """A storage in an archive that is a file; with a `layout` the part of it from `offset` bytes on, to be put in order."""

    file: str
    file_nbytes: int
    entry: ZipEntry
    offset: int = 0
    layout: Layout | None = None

    async def find(self, files: ForeignFiles) -> Place:
        window = Window(files=files, file=self.file, begin=0, nbytes=self.file_nbytes)
        begin = await member_begin(window, self.entry)
        return Place(file=self.file, begin=begin + self.offset, nbytes=self.entry.nbytes - self.offset, layout=self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPlace:
    """A chunk in a ``.distcp`` file: an archive of ``torch.save`` with one tensor, or a tensor of a safetensors file."""

    name: str
    dtype: str
    sizes: tuple[int, ...]
    item: DcpItem

    async def find(self, files: ForeignFiles) -> Place:
        item = self.item
        head = await files.read(item.file, item.offset, min(_HEAD_NBYTES, item.nbytes)) if item.nbytes else b""
        if head[:4] == b"PK\x03\x04":
            return await self._archived(files, head)
        return await self._plain(files)

    async def _archived(self, files: ForeignFiles, head: bytes) -> Place:
        item = self.item
        window = Window(files=files, file=item.file, begin=item.offset, nbytes=item.nbytes, known=[(0, head)])
        archive = await open_archive(window, _HEAD_NBYTES)
        if await member_bytes(window, archive.member("byteorder")) != b"little" if "byteorder" in archive.members else False:
            raise self._wrong("big-endian numbers")
        pickle = await member_bytes(window, archive.member("data.pkl"))
        tensor = await asyncio.to_thread(parse_saved, pickle, f"{item.file} at {item.offset}")
        if not isinstance(tensor, SavedTensor) or (tensor.dtype, tensor.shape) != (self.dtype, self.sizes):
            raise self._wrong(f"{tensor.dtype} {tensor.shape}" if isinstance(tensor, SavedTensor) else "no tensor")
        entry = check_tensor(tensor, archive, item.file, self.name)
        offset = tensor.offset * DTYPES[tensor.dtype].itemsize
        begin = item.offset + await member_begin(window, entry) + offset
        return Place(file=item.file, begin=begin, nbytes=entry.nbytes - offset, layout=layout_of(tensor))

    async def _plain(self, files: ForeignFiles) -> Place:
        item = self.item
        rest = await files.nbytes(item.file) - item.offset
        window = Window(files=files, file=item.file, begin=item.offset, nbytes=rest)
        try:
            length = header_nbytes(await window.read(0, 8) if rest >= 8 else b"", rest)
            header = parse_header(await window.read(0, length), rest)
        except FormatError as error:
            raise FormatError(
                f"{item.file}: what lies at {item.offset} is neither an archive of torch.save nor safetensors: {error.message}",
                hint="the file is damaged, or was written by an extension of DCP that is not known here",
                tensor=self.name,
                file=item.file,
            ) from error
        found = header.tensors.get(self.name)
        known = SAFETENSORS_NAMES.get(found.dtype) if found is not None else None
        if found is None or known is None or (known.name, found.shape) != (self.dtype, self.sizes):
            raise self._wrong(f"{found.dtype} {found.shape}" if found is not None else "no tensor of that name")
        return Place(file=item.file, begin=item.offset + found.begin, nbytes=found.end - found.begin)

    def _wrong(self, found: str) -> IncompleteError:
        return IncompleteError(
            f"{self.item.file}: for tensor {self.name[:200]!r} .metadata promises {self.dtype} {self.sizes}, the file has {found}",
            hint="file and .metadata are of different saves, or the file is damaged",
            tensor=self.name,
            file=self.item.file,
        )


Places = Mapping[str, Wherever]
"""By the name that the index has for them."""
