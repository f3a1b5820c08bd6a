"""Frames: the bytes of one block that no run covers, as segments of byte planes or quantised moments.

The format is described in `docs/design/format.md`, "Packed files".
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import zstandard

from tierstore.errors import FormatError
from tierstore.format.digest import Buffer
from tierstore.format.packed.layout import gaps
from tierstore.format.packed.planes import SCRATCH_NBYTES, Array, items_of, join_planes, plane_of, rotate_top
from tierstore.format.packed.types import Piece, Quantised
from tierstore.format.quantise import decode_moment, encode_moment, encoded_nbytes

__all__ = ["FrameDecoder", "FrameEncoder", "decode_frame", "is_lossy"]

_SEGMENT = struct.Struct("<BBHI")  # flags, bytes of a number, planes, bytes of the raw file
_PLANE = struct.Struct("<BBHI")  # coding, bytes of each number, 0, bytes here
_QUANTISED = struct.Struct("<BBHIQQ")  # scheme, kind, 0, 0, columns, first column

_ROTATED, _LOSSY = 1, 2
_RAW, _ZSTD = 0, 1
_SCHEMES: Final[tuple[Literal["q8", "q4"], ...]] = ("q8", "q4")
_KINDS: Final[tuple[Literal["first", "second"], ...]] = ("first", "second")

_SAMPLED_FROM = 16 << 10
"""Numbers from which on a sample decides what is compressed; fewer are just tried."""

_SPOTS, _SPOT = 8, 512
"""A sample is so many spots of so many numbers each, spread evenly: rows of zeros, or of padding, are seen that way."""

_WORTH = 0.97
"""A plane is compressed where that leaves less than this part of its sample: what is won pays for the time of reading it."""

_RARE_MATCHES = 0.8
"""A plane is given to an ordinary level of zstd where that leaves less than this part of what few matches leave (text, tables)."""

_HINT = "the packed file is damaged: run `tierstore verify`"


class FrameEncoder:
    """Encodes blocks; may be used by any number of threads at once. What it writes depends on nothing but its arguments.

    Args:
        codec: ``raw``: nothing is compressed (quantised pieces are quantised all the same).
        level: 0: zstd that looks for few matches, the fastest; 1 to 19: the levels of zstd.
    """

    def __init__(self, codec: Literal["raw", "zstd"] = "zstd", level: int = 0) -> None:
        if codec not in ("raw", "zstd") or not 0 <= level <= 19:
            raise ValueError(f"there is no codec {codec!r} of level {level}")
        self._raw = codec == "raw"
        self._level = level
        self._local = threading.local()  # compressors can't be shared by threads

    def encode(
        self,
        block: Buffer,
        pieces: Iterable[Piece],
        zeros: Mapping[int, npt.NDArray[np.bool_]] | None = None,
        coded: MutableMapping[int, bytes] | None = None,
    ) -> bytes:
        """Encodes the bytes of `block` that lie in `pieces`: sorted, without overlaps. What they leave out is not stored.

        Args:
            block: The raw bytes.
            pieces: As `layout.pieces_of` makes them; empty ones are allowed.
            zeros: By number of a quantised piece in `pieces`: which of its numbers must stay zero (`quantise.encode_moment`).
            coded: By number of a quantised piece: what `encode_moment` made of it before. What it makes here is put there.
        """
        view = memoryview(block).cast("B")
        parts: list[Buffer] = []
        for number, piece in enumerate(pieces):
            data = view[piece.begin : piece.end]
            if not data.nbytes:
                continue
            if piece.quantised is not None and data.nbytes % 4 == 0:
                moment = None if coded is None else coded.get(number)
                if moment is None:
                    moment = encode_moment(np.frombuffer(data, "<f4"), piece.quantised, (zeros or {}).get(number))
                if moment is not None:
                    parts += self._quantised(data.nbytes, moment, piece.quantised)
                    if coded is not None:
                        coded[number] = moment
                    continue
            whole = data.nbytes - data.nbytes % piece.itemsize
            if whole:
                parts += self._exact(data[:whole], piece.itemsize, piece.rotated)
            if whole < data.nbytes:
                parts += _plain(data[whole:])
        return b"".join(parts)

    def _quantised(self, nbytes: int, coded: bytes, quantised: Quantised) -> list[Buffer]:
        less = self._smaller(coded)
        return [
            _SEGMENT.pack(_LOSSY, 4, 1, nbytes),
            _QUANTISED.pack(
                _SCHEMES.index(quantised.scheme), _KINDS.index(quantised.kind), 0, 0, quantised.columns, quantised.first_column
            ),
            _PLANE.pack(_RAW if less is None else _ZSTD, 1, 0, len(coded if less is None else less)),
            coded if less is None else less,
        ]

    def _exact(self, data: memoryview, itemsize: int, rotated: bool) -> list[Buffer]:
        if self._raw:
            return _plain(data)
        items = items_of(data, itemsize)
        rotated = rotated and itemsize > 1
        widths = self._widths(items, rotated)
        if widths == [(itemsize, None)]:
            return _plain(data)
        heads: list[Buffer] = [_SEGMENT.pack(_ROTATED if rotated else 0, itemsize, len(widths), data.nbytes)]
        bodies: list[Buffer] = []
        tops = rotate_top(items) if rotated else None
        place = 0
        for width, compressor in widths:
            plane = tops[place - itemsize + 2] if tops is not None and place >= itemsize - 2 else plane_of(items, place, width)
            less = compressor.compress(plane.data) if compressor is not None else None
            if less is not None and len(less) < plane.nbytes:
                heads.append(_PLANE.pack(_ZSTD, width, 0, len(less)))
                bodies.append(less)
            else:
                heads.append(_PLANE.pack(_RAW, width, 0, plane.nbytes))
                bodies.append(plane.data)
            place += width
        parts = heads + bodies
        return parts if sum(memoryview(part).nbytes for part in parts) < data.nbytes + _SEGMENT.size + _PLANE.size else _plain(data)

    def _widths(self, items: Array, rotated: bool) -> list[tuple[int, zstandard.ZstdCompressor | None]]:
        """How the numbers are cut into planes, lowest first, and by what each is compressed; None: it is noise."""
        size = items.itemsize
        few, more = self._compressors()
        if len(items) < _SAMPLED_FROM:
            return [(1, few if rotated else more)] * size
        step = (len(items) - _SPOT) // (_SPOTS - 1)
        sample = np.concatenate([items[step * spot : step * spot + _SPOT] for spot in range(_SPOTS)])
        tops = rotate_top(sample) if rotated else ()
        planes = [*(plane_of(sample, place, 1) for place in range(size - len(tops))), *tops]
        chosen = [self._chosen(plane, rotated) for plane in planes]
        noise = [compressor is None for compressor in chosen]
        widths: list[tuple[int, zstandard.ZstdCompressor | None]] = []
        joined = size - 2 if rotated else size
        place = 0
        while place < size:
            width = size if all(noise) else 1
            while width < size and place % (2 * width) == 0 and place + 2 * width <= joined and all(noise[place : place + 2 * width]):
                width *= 2
            widths.append((width, chosen[place]))
            place += width
        return widths

    def _chosen(self, sample: Array, rotated: bool) -> zstandard.ZstdCompressor | None:
        few, more = self._compressors()
        left = len(few.compress(sample.data))
        if not rotated and more is not few and len(more.compress(sample.data)) < min(_RARE_MATCHES * left, _WORTH * sample.nbytes):
            return more
        return few if left < _WORTH * sample.nbytes else None

    def _compressors(self) -> tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor]:
        """What looks for few matches, and an ordinary one; the same twice where a level is given."""
        found: tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor] | None = getattr(self._local, "compressors", None)
        if found is None:
            ordinary = zstandard.ZstdCompressor(level=self._level or 3)
            found = (zstandard.ZstdCompressor(compression_params=_few_matches()) if self._level == 0 else ordinary, ordinary)
            self._local.compressors = found
        return found

    def _smaller(self, data: bytes) -> bytes | None:
        if self._raw:
            return None
        less = self._compressors()[0].compress(data)
        return less if len(less) < len(data) else None


def _few_matches() -> zstandard.ZstdCompressionParameters:
    # target_length 0: any other turns the entropy coding of literals off, which is all that is wanted here.
    return zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        window_log=20,
        chain_log=6,
        search_log=1,
        target_length=0,
        write_content_size=1,
        write_checksum=0,
    )


def _plain(data: memoryview) -> list[Buffer]:
    return [_SEGMENT.pack(0, 1, 1, data.nbytes), _PLANE.pack(_RAW, 1, 0, data.nbytes), data]


class FrameDecoder:
    """Decodes frames; may be used by any number of threads at once. Each keeps what it needs for the next frame."""

    def __init__(self) -> None:
        self._local = threading.local()

    def decode(self, frame: Buffer, target: memoryview, holes: Sequence[tuple[int, int]] = ()) -> bool:
        """Decodes a frame into `target`, the block's memory, leaving `holes` as they are.

        It takes up no more memory than a few times the longest segment, whatever the frame says.

        Args:
            frame: The whole frame.
            target: Writable, as long as the block.
            holes: Ranges of the block that runs cover, sorted, without overlaps.

        Returns:
            Whether something in it is not exactly what was encoded.

        Raises:
            FormatError: The frame is not one of this block; parts of `target` may have been written.
        """
        view, into = memoryview(frame).cast("B"), memoryview(target).cast("B")
        tools: _Tools | None = getattr(self._local, "tools", None)
        if tools is None:
            tools = self._local.tools = _Tools()
        reader = _Reader(view=view, tools=tools)
        lossy = False
        if holes and holes[-1][1] > into.nbytes:
            raise ValueError(f"a hole ends at {holes[-1][1]}, after a block of {into.nbytes} bytes")
        for begin, end in list(gaps(0, into.nbytes, holes)):
            while begin < end:
                nbytes, inexact = _decode_segment(reader, into[begin:end])
                lossy |= inexact
                begin += nbytes
        if reader.at != view.nbytes:
            raise FormatError(f"a frame has {view.nbytes - reader.at:,} bytes too many", hint=_HINT)
        return lossy


def decode_frame(frame: Buffer, target: memoryview, holes: Sequence[tuple[int, int]] = ()) -> bool:
    """`FrameDecoder.decode` of a single frame."""
    return FrameDecoder().decode(frame, target, holes)


def is_lossy(frame: Buffer) -> bool:
    """Whether a frame has segments that are not exactly what was encoded; reads no more than their heads.

    Raises:
        FormatError: It is no frame.
    """
    reader = _Reader(view=memoryview(frame).cast("B"), tools=_Tools())
    while reader.at < reader.view.nbytes:
        flags, _, count, _ = _SEGMENT.unpack(reader.take(_SEGMENT.size))
        if flags & _LOSSY:
            return True
        heads = [_PLANE.unpack(reader.take(_PLANE.size)) for _ in range(count)]
        reader.take(sum(stored for *_, stored in heads))
    return False


class _Tools:
    """What a thread decodes with, made when it is first needed."""

    @cached_property
    def decompressor(self) -> zstandard.ZstdDecompressor:
        return zstandard.ZstdDecompressor()

    @cached_property
    def scratch(self) -> Array:
        return np.empty(SCRATCH_NBYTES, np.uint8)


@dataclass(slots=True, kw_only=True)
class _Reader:
    """Takes the frame's bytes one after the other."""

    view: memoryview
    tools: _Tools
    at: int = 0

    def take(self, nbytes: int) -> memoryview:
        if nbytes > self.view.nbytes - self.at:
            raise FormatError(f"a frame ends after {self.view.nbytes:,} bytes, within what it holds", hint=_HINT)
        self.at += nbytes
        return self.view[self.at - nbytes : self.at]

    def plane(self, coding: int, stored: int, nbytes: int) -> memoryview:
        """The plane of `nbytes` bytes that `stored` bytes here are."""
        data = self.take(stored)
        if coding == _RAW and stored == nbytes:
            return data
        if coding != _ZSTD:
            raise FormatError(f"a plane of {nbytes:,} bytes can't be {stored:,} bytes of coding {coding}", hint=_HINT)
        try:
            said = zstandard.get_frame_parameters(data)
            if said.content_size != nbytes or said.dict_id:
                raise FormatError(f"a plane of {nbytes:,} bytes says that it has {said.content_size:,}", hint=_HINT)
            made = self.tools.decompressor.decompress(data, max_output_size=nbytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise FormatError(f"a plane can't be decompressed: {error}", hint=_HINT) from error
        if len(made) != nbytes:
            raise FormatError(f"a plane of {nbytes:,} bytes has {len(made):,}", hint=_HINT)
        return memoryview(made)


def _decode_segment(reader: _Reader, into: memoryview) -> tuple[int, bool]:
    """Decodes the next segment to the begin of `into`; returns how long it is, and whether it is lossy."""
    flags, itemsize, count, nbytes = _SEGMENT.unpack(reader.take(_SEGMENT.size))
    if not 0 < nbytes <= into.nbytes or itemsize not in (1, 2, 4, 8) or nbytes % itemsize or flags not in (0, _ROTATED, _LOSSY):
        raise FormatError(f"a segment of {nbytes:,} bytes (kind {flags}, numbers of {itemsize}) can't lie here", hint=_HINT)
    into = into[:nbytes]
    if flags == _LOSSY:
        _decode_quantised(reader, into, itemsize, count)
        return nbytes, True
    if not 0 < count <= itemsize:
        raise FormatError(f"a segment has {count} planes of numbers of {itemsize} bytes", hint=_HINT)
    heads = [_PLANE.unpack(reader.take(_PLANE.size)) for _ in range(count)]
    widths = [width for _, width, _, _ in heads]
    places = [sum(widths[:n]) for n in range(count)]
    if (
        sum(widths) != itemsize
        or any(width not in (1, 2, 4, 8) or place % width for width, place in zip(widths, places, strict=True))
        or (flags == _ROTATED and widths[-2:] != [1, 1])
    ):
        raise FormatError(f"planes {widths} are none of numbers of {itemsize} bytes", hint=_HINT)
    items = nbytes // itemsize
    planes = [items_of(reader.plane(coding, stored, items * width), width) for coding, width, _, stored in heads]
    join_planes(planes, into, itemsize, rotated=flags == _ROTATED, scratch=reader.tools.scratch)
    return nbytes, False


def _decode_quantised(reader: _Reader, into: memoryview, itemsize: int, count: int) -> None:
    scheme, kind, _, _, columns, first = _QUANTISED.unpack(reader.take(_QUANTISED.size))
    coding, _, _, stored = _PLANE.unpack(reader.take(_PLANE.size))
    if itemsize != 4 or count != 1 or scheme >= len(_SCHEMES) or kind >= len(_KINDS) or not first < columns < 1 << 62:
        raise FormatError(f"a quantised segment is of scheme {scheme}, kind {kind}, rows of {columns} from {first} on", hint=_HINT)
    quantised = Quantised(scheme=_SCHEMES[scheme], kind=_KINDS[kind], columns=columns, first_column=first)
    numbers = into.nbytes // 4
    coded = reader.plane(coding, stored, encoded_nbytes(numbers, quantised))
    np.frombuffer(into, "<f4")[:] = decode_moment(coded, numbers, quantised)
