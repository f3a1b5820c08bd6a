"""The values that packed files are described by, and their names in a storage."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # names of packed files are asked about by commands that move no bytes
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Footer",
    "Piece",
    "Quantised",
    "Run",
    "RunKind",
    "Stretch",
    "packable",
    "packed_name",
    "parse_packed_name",
]

RunKind = Literal["copy", "bfloat16", "float16"]
"""``copy``: the same bytes as there; ``bfloat16``, ``float16``: the float32 numbers there, rounded to the nearest, ties to even."""

_PACKABLE = re.compile(r"shard-\d{5,8}-of-\d{5,8}\.safetensors")
_PACKED = re.compile(rf"({_PACKABLE.pattern})\.(0|[1-9]\d{{0,18}})\.packed")


def packable(name: str) -> bool:
    """Whether a file of this name (without folders) may be packed: shards are, documents are not."""
    return _PACKABLE.fullmatch(name) is not None


def packed_name(name: str, nbytes: int) -> str:
    """What the packed file of the raw file `name`, of `nbytes` bytes, is called; folders in front may stand in `name`."""
    return f"{name}.{nbytes}.packed"


def parse_packed_name(name: str) -> tuple[str, int] | None:
    """The raw file's name and length in bytes; None: it is not the name of a packed file. `name` is without folders."""
    found = _PACKED.fullmatch(name)
    return (found[1], int(found[2])) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """How a run of float32 numbers of an optimizer's moment is quantised.

    Attributes:
        scheme: ``q8`` or ``q4`` (`format.quantise`).
        kind: ``first`` moment (signed) or ``second`` (not negative).
        columns: The length of the tensor's last axis.
        first_column: At which column of its row the run's first number stands.
    """

    scheme: Literal["q8", "q4"]
    kind: Literal["first", "second"]
    columns: int
    first_column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Part of a raw file whose bytes are of one kind; all stretches together are the file.

    Attributes:
        begin, end: Bytes of the raw file, half-open.
        itemsize: Of its numbers, in bytes: 1, 2, 4 or 8 (`begin` and `end` need not be multiples of it).
        rotated: They are floating point: the sign bit is moved out of the exponent's byte before bytes are put in planes.
        name: The tensor in the header (its key there); empty: several small ones, or none.
        dtype: Its dtype, as `format.dtypes` calls it; empty where `name` is.
        shape: Of what lies here of the tensor; empty where `name` is.
    """

    begin: int
    end: int
    itemsize: int
    rotated: bool
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of one block, as `Stretch`; `begin` and `end` are counted from the block's begin."""

    begin: int
    end: int
    itemsize: int
    rotated: bool
    quantised: Quantised | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A range of the raw file that is not stored, for it is made of other bytes.

    Attributes:
        begin, end: Bytes of the raw file, half-open.
        kind: What is done with the source.
        file: Where the source is: an index in `Footer.files`; 0 is this file itself.
        source: Where the source begins, in bytes of that raw file. It is as long as the run, or twice as long where it is rounded.
    """

    begin: int
    end: int
    kind: RunKind
    file: int
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What a packed file says of itself, at its end.

    Attributes:
        nbytes: Length of the raw file, in bytes.
        block_nbytes: Bytes of the raw file that a frame stands for; the last one may be shorter.
        frame_ends: Where each block's frame ends in the packed file, int64, one a block; the first begins at 0.
        files: Paths of the raw files that runs take their bytes from, relative to the tier's root; the first is ``""``, this file.
        runs: Sorted by `begin`, without overlaps.
        lossy: Block → SHA-256 (32 bytes) of its frame, of the blocks that are not exactly what they were.
        quantised: Tensor (key in the shard's header) → facts, JSON: scheme, errors.
    """

    nbytes: int
    block_nbytes: int
    frame_ends: npt.NDArray[np.int64]
    files: tuple[str, ...] = ("",)
    runs: tuple[Run, ...] = ()
    lossy: Mapping[int, bytes] = field(default_factory=dict)
    quantised: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
