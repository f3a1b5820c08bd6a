"""The end of a packed file: the table of its blocks and runs, a JSON footer, and a trailer of fixed length.

The format is described in `docs/design/format.md`, "Packed files".
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tierstore.errors import FormatError, UsageError
from tierstore.format.digest import DIGEST_NBYTES, Buffer, block_count, digest_of
from tierstore.format.document import decode_document, encode_document
from tierstore.format.packed.types import Footer, Run, RunKind
from tierstore.names import check_relative

__all__ = [
    "MAX_BLOCK_NBYTES",
    "MAX_FOOTER_NBYTES",
    "MAX_RUNS",
    "MIN_BLOCK_NBYTES",
    "TRAILER_NBYTES",
    "decode_footer",
    "encode_footer",
    "footer_digest",
    "footer_nbytes",
]

MAX_FOOTER_NBYTES = 256 << 20
"""No footer is longer; 12 bytes a block and 25 a run leave room for files of many terabytes."""

MIN_BLOCK_NBYTES, MAX_BLOCK_NBYTES = 4 << 10, 16 << 20
"""Of which a reader holds some, and which it counts; ours have 1 MiB."""

MAX_RUNS = 1 << 20
"""Of one file: neighbours are one run, so that some thousands are much."""

_KIND = "tierstore.packed"
_MAGIC = b"TS-PACK1"
_TRAILER = struct.Struct("<QII8s")  # bytes of the table, bytes of the JSON, CRC-32 of both, magic
TRAILER_NBYTES = _TRAILER.size
_RUN_KINDS: Final[tuple[RunKind, ...]] = ("copy", "bfloat16", "float16")
_FRAME_MOST = (1 << 32) - 1
_MAX_NBYTES = 1 << 60
_HINT = "the packed file is damaged, truncated or foreign: run `tierstore verify`"

_BLOCKS, _LOSSY, _RUNS = "blocks", "lossy", "runs"
_TABLE: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(  # rows of these, in this order, without gaps
    {
        _BLOCKS: np.dtype("<u4"),  # bytes of its frame
        _LOSSY: np.dtype([("block", "<u4"), ("digest", "u1", (DIGEST_NBYTES,))]),
        _RUNS: np.dtype([("begin", "<i8"), ("end", "<i8"), ("source", "<i8"), ("file", "<u4"), ("kind", "u1")]),
    }
)

Rows = npt.NDArray[Any]
Table = Mapping[str, Rows]


def encode_footer(footer: Footer) -> bytes:
    """Writes what follows the frames: table, JSON and trailer.

    Raises:
        UsageError: The footer contradicts itself.
    """
    sizes = np.diff(np.asarray(footer.frame_ends, np.int64), prepend=np.int64(0))
    lossy = sorted(footer.lossy.items())
    if ((sizes < 0) | (sizes > _FRAME_MOST)).any() or any(len(digest) != DIGEST_NBYTES for _, digest in lossy):
        raise UsageError("the footer of a packed file contradicts itself: a frame's end or digest is none")
    try:
        table = {
            _BLOCKS: sizes.astype(_TABLE[_BLOCKS]),
            _LOSSY: _rows(_LOSSY, [(block, np.frombuffer(digest, np.uint8)) for block, digest in lossy]),
            _RUNS: _rows(_RUNS, [(run.begin, run.end, run.source, run.file, _RUN_KINDS.index(run.kind)) for run in footer.runs]),
        }
        _check(footer.nbytes, footer.block_nbytes, footer.files, table)
    except (FormatError, OverflowError) as error:
        why = error.message if isinstance(error, FormatError) else error
        raise UsageError(f"the footer of a packed file contradicts itself: {why}") from error
    body: dict[str, Any] = {
        "nbytes": footer.nbytes,
        "block_nbytes": footer.block_nbytes,
        _BLOCKS: len(sizes),
        _LOSSY: len(lossy),
        _RUNS: len(footer.runs),
        "files": list(footer.files),
        "quantised": footer.quantised,
    }
    rows = b"".join(table[name].tobytes() for name in _TABLE)
    document = encode_document(_KIND, body)
    return rows + document + _TRAILER.pack(len(rows), len(document), zlib.crc32(document, zlib.crc32(rows)), _MAGIC)


def footer_digest(data: Buffer) -> str:
    """The digest of a whole footer, as `encode_footer` returned it."""
    return digest_of(data)


def footer_nbytes(tail: Buffer, stored_nbytes: int) -> int:
    """How many bytes of a packed file's end its footer takes.

    Args:
        tail: The end of the file, at least its last `TRAILER_NBYTES` bytes.
        stored_nbytes: Of the whole packed file.

    Raises:
        FormatError: It is the end of no packed file.
    """
    view = memoryview(tail).cast("B")
    if view.nbytes < TRAILER_NBYTES or stored_nbytes < TRAILER_NBYTES:
        raise FormatError(f"a packed file has at least {TRAILER_NBYTES} bytes; this one has {min(view.nbytes, stored_nbytes)}", hint=_HINT)
    table, document, _, magic = _TRAILER.unpack(view[-TRAILER_NBYTES:])
    if magic != _MAGIC:
        raise FormatError("the file does not end as packed files do", hint=_HINT)
    nbytes: int = table + document + TRAILER_NBYTES
    if nbytes > min(stored_nbytes, MAX_FOOTER_NBYTES):
        raise FormatError(f"the footer claims {nbytes:,} bytes; the file has {stored_nbytes:,}", hint=_HINT)
    return nbytes


def decode_footer(data: Buffer, stored_nbytes: int) -> Footer:
    """Reads a footer and checks all that it claims.

    Args:
        data: The end of the file, at least as much as `footer_nbytes` says.
        stored_nbytes: Of the whole packed file.

    Raises:
        FormatError: It is damaged, or makes no sense.
        VersionError: Written by a newer major version.
    """
    nbytes = footer_nbytes(data, stored_nbytes)
    view = memoryview(data).cast("B")
    if view.nbytes < nbytes:
        raise FormatError(f"the footer has {nbytes:,} bytes, but only {view.nbytes:,} were given", hint=_HINT)
    view = view[view.nbytes - nbytes :]
    table_nbytes, document_nbytes, crc, _ = _TRAILER.unpack(view[-TRAILER_NBYTES:])
    if zlib.crc32(view[: table_nbytes + document_nbytes]) != crc:
        raise FormatError("the footer is not what its checksum says", hint=_HINT)
    body = decode_document(bytes(view[table_nbytes : table_nbytes + document_nbytes]), _KIND, max_nbytes=MAX_FOOTER_NBYTES)
    counts = {name: _integer(body, name, table_nbytes) for name in _TABLE}
    table = _table(view[:table_nbytes], counts)
    whole, block_nbytes = _integer(body, "nbytes", _MAX_NBYTES), _integer(body, "block_nbytes", MAX_BLOCK_NBYTES)
    files, quantised = body.get("files"), body.get("quantised")
    if not isinstance(files, list) or not isinstance(quantised, dict) or not all(isinstance(facts, dict) for facts in quantised.values()):
        raise FormatError("the footer's `files` or `quantised` are missing", hint=_HINT)
    _check(whole, block_nbytes, tuple(files), table)
    ends = np.cumsum(table[_BLOCKS], dtype=np.int64)
    if (int(ends[-1]) if len(ends) else 0) != stored_nbytes - nbytes:
        raise FormatError("the frames don't end where the footer begins", hint=_HINT)
    lossy = {int(block): digest.tobytes() for block, digest in table[_LOSSY]}
    rows: Sequence[tuple[int, int, int, int, int]] = table[_RUNS].tolist()
    runs = tuple(Run(begin=begin, end=end, kind=_RUN_KINDS[kind], file=file, source=source) for begin, end, source, file, kind in rows)
    return Footer(nbytes=whole, block_nbytes=block_nbytes, frame_ends=ends, files=tuple(files), runs=runs, lossy=lossy, quantised=quantised)


def _integer(body: Mapping[str, Any], name: str, most: int) -> int:
    value = body.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise FormatError(f"the footer's `{name}` is {str(value)[:40]}", hint=_HINT)
    return value


def _rows(name: str, rows: Sequence[tuple[Any, ...]]) -> Rows:
    return np.array(rows, _TABLE[name])


def _table(data: memoryview, counts: Mapping[str, int]) -> Table:
    """The table's rows; views of it."""
    table, at = {}, 0
    for name, kind in _TABLE.items():
        end = at + counts[name] * kind.itemsize
        if end > data.nbytes:
            break
        table[name] = np.frombuffer(data[at:end], kind)
        at = end
    if len(table) < len(_TABLE) or at != data.nbytes:
        raise FormatError(f"the footer's table of {data.nbytes:,} bytes can't have {dict(counts)}", hint=_HINT)
    return table


def _check(nbytes: int, block_nbytes: int, files: tuple[object, ...], table: Table) -> None:
    """Refuses what no packed file can say.

    Raises:
        FormatError: It says it.
    """
    blocks = len(table[_BLOCKS])
    if (
        not MIN_BLOCK_NBYTES <= block_nbytes <= MAX_BLOCK_NBYTES
        or not 0 <= nbytes <= _MAX_NBYTES
        or blocks != block_count(nbytes, block_nbytes)
    ):
        raise FormatError(f"{blocks:,} frames can't be a file of {nbytes:,} bytes in blocks of {block_nbytes:,}", hint=_HINT)
    lossy = table[_LOSSY]["block"].astype(np.int64)
    if (lossy >= blocks).any() or (np.diff(lossy) <= 0).any():
        raise FormatError("the footer names lossy blocks that are none, or not in order", hint=_HINT)
    if not files or files[0] != "" or len(set(map(str, files))) != len(files):
        raise FormatError("the footer's `files` don't begin with the file itself, or name one twice", hint=_HINT)
    for path in files[1:]:
        check_relative(path)  # type: ignore[arg-type]  # refuses what is no text
    if (problem := _problem_of_runs(nbytes, len(files), table[_RUNS])) is not None:
        raise FormatError(f"the footer has a run that {problem}", hint=_HINT)
    begins, ends = table[_RUNS]["begin"], table[_RUNS]["end"]
    first = np.searchsorted(ends, lossy * block_nbytes, side="right")
    there = first < len(begins)
    if (begins[first[there]] < (lossy[there] + 1) * block_nbytes).any():  # its own frame alone proves such a block
        raise FormatError("the footer has a run in a block that is not exact", hint=_HINT)


def _problem_of_runs(nbytes: int, files: int, runs: Rows) -> str | None:
    if len(runs) > MAX_RUNS:
        return f"is one of more than {MAX_RUNS:,}"
    begins, ends, sources = (runs[name].astype(np.int64) for name in ("begin", "end", "source"))
    if (begins < 0).any() or (ends > nbytes).any() or (begins >= ends).any() or (begins[1:] < ends[:-1]).any():
        return "lies outside the file, is empty, or overlaps the next one"
    if (runs["kind"] >= len(_RUN_KINDS)).any() or (runs["file"] >= files).any():
        return "is of an unknown kind, or of a file that is not named"
    rounded = runs["kind"] > 0
    if (rounded != (runs["file"] == 0)).any():
        return "is copied from its own file, or rounded from another one"
    lengths = (ends - begins) << rounded
    if (rounded & ((lengths & 3) != 0)).any():
        return "is made of numbers, but ends within one"
    if (sources < 0).any() or (sources > np.where(rounded, nbytes, _MAX_NBYTES) - lengths).any():
        return "is made of what can't be there"
    begins, ends, sources = (some[rounded] for some in (begins, ends, sources))
    first = np.searchsorted(ends, sources, side="right")  # the first one that ends behind where the source begins
    there = first < len(begins)
    if (begins[first[there]] < (sources + lengths[rounded])[there]).any():
        return "is made of what is itself rounded"
    return None
