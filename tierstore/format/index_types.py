"""What a routing index is made of and asked for: tensors, extents, files, the columns of the table, and the questions of a load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore.format.digest import file_digest

__all__ = ["Bytes", "Extent", "ExtentTable", "FileEntry", "IndexColumns", "Ints", "RoutingIndex", "TensorEntry"]

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The part of a shard that holds one rectangular chunk of one tensor, in C order.

    Attributes:
        file: The shard's name.
        begin: First byte in the file, absolute.
        end: One past the last byte.
        offsets: Where the chunk begins in the whole tensor, per axis.
        sizes: The chunk's shape.
    """

    file: str
    begin: int
    end: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor: its true dtype (a name of `DTYPES`), its whole shape, and where its chunks lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One shard: its name, its length in bytes, and its blocks' digests (32 bytes each, concatenated)."""

    name: str
    nbytes: int
    block_digests: bytes

    @property
    def digest(self) -> str:
        """The file's digest, ``sha256:<hex>``."""
        return file_digest(self.block_digests)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentTable:
    """The extents of one tensor as arrays, for planning at scale: n extents of a tensor of d axes.

    Attributes:
        files: Number of each extent's file in `Index.file_names`, shape (n,).
        begins: First byte in the file, shape (n,), int64.
        ends: One past the last byte, shape (n,), int64.
        offsets: Place in the whole tensor, shape (n, d), int64.
        sizes: Shape of the chunk, shape (n, d), int64.
    """

    files: npt.NDArray[np.uint32]
    begins: Ints
    ends: Ints
    offsets: Ints
    sizes: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexColumns:
    """The index's columns; n tensors, m extents, f files. ``*_starts`` have one element more than rows and begin with 0.

    Attributes:
        names: UTF-8 names of all tensors, concatenated; `name_starts` (n + 1) cuts them.
        dtype_codes: Per tensor, the number of its dtype in `dtypes`.
        shapes: Shapes of all tensors, concatenated; `shape_starts` (n + 1) cuts them.
        extent_starts: Which extents belong to each tensor (n + 1).
        box_starts: Where each tensor's rows begin in `offsets` and `sizes` (n + 1): ndim numbers per extent.
        files: Per extent, the number of its file; `begins`, `ends`: its byte range.
        offsets: Places of all extents, concatenated; `sizes`: their shapes.
        file_nbytes: Per file, its length; `block_starts` (f + 1): its rows of `digests` (b, 32).
        dtypes: (name, itemsize in bytes) of the dtypes that occur.
        file_names: The files' names.
    """

    names: Bytes
    name_starts: Ints
    dtype_codes: npt.NDArray[np.uint16]
    shapes: Ints
    shape_starts: Ints
    extent_starts: Ints
    box_starts: Ints
    files: npt.NDArray[np.uint32]
    begins: Ints
    ends: Ints
    offsets: Ints
    sizes: Ints
    file_nbytes: Ints
    block_starts: Ints
    digests: Bytes
    dtypes: tuple[tuple[str, int], ...]
    file_names: tuple[str, ...]


class RoutingIndex(Protocol):
    """What a load asks of a routing index: `Index` answers from memory, `PagedIndex` reads what it needs (and waits for it)."""

    @property
    def block_nbytes(self) -> int:
        """Bytes per block of the files' digests."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files that the index names."""

    @property
    def extent_count(self) -> int:
        """How many extents all tensors have together."""

    @property
    def file_names(self) -> tuple[str, ...]:
        """All files, by number."""

    def __len__(self) -> int: ...

    def __contains__(self, name: object) -> bool: ...

    def __iter__(self) -> Iterator[TensorEntry]: ...

    def names(self) -> list[str]:
        """All names, sorted; reads the rows of all tensors."""

    def prepare(self, names: Iterable[str]) -> None:
        """Says which tensors will be asked for, in about that order, so that they need not be fetched one by one."""

    def find(self, name: str, box: Sequence[range] | None = None) -> TensorEntry:
        """The tensor called `name`, with the extents that meet `box` (None: all), or NotFoundError with the nearest names."""

    def table(self, name: str) -> ExtentTable:
        """Its extents as arrays."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Its whole shape."""

    def dtype(self, name: str) -> str:
        """Its dtype's name."""

    def files(self) -> tuple[FileEntry, ...]:
        """All files; reads all block digests."""

    def file(self, name: str) -> FileEntry:
        """The file called `name`, with its block digests, or NotFoundError."""

    def file_nbytes(self, name: str) -> int:
        """The length of the file called `name`, in bytes; nothing is read."""
