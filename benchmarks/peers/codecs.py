"""Lossless codecs behind one interface: blocks in, fewer bytes out, and back."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import zstandard

from peers import installed
from tierstore.format.packed.frame import FrameEncoder, decode_frame
from tierstore.format.packed.types import Piece

Encode = Callable[[memoryview], Any]
Decode = Callable[[Any, int], Any]
"""What `Encode` returned, and the block's length, to something with the block's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Bytes of one kind.

    Attributes:
        itemsize: Of its numbers, in bytes.
        floats: `bfloat16`, `float32` or empty.
    """

    name: str
    raw: bytes
    itemsize: int
    floats: Literal["bfloat16", "float32", ""] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A codec.

    Attributes:
        make: Makes the pair for one thread; nothing of it is shared.
        slow: It is measured once, and by one thread.
        needs: The module that must be importable.
        only_floats: It knows no other numbers.
    """

    name: str
    make: Callable[[Data], tuple[Encode, Decode]]
    kind: str = "peer"
    note: str = ""
    slow: bool = False
    needs: str = ""
    only_floats: bool = False

    def why_not(self, data: Data) -> str | None:
        """Why it can't take this; None if it can."""
        if self.only_floats and not data.floats:
            return "it knows floating point only"
        if self.needs:
            try:
                importlib.import_module(self.needs)
            except ImportError as error:
                return installed.why_not(self.needs) or str(error)
        return None


def _ours(level: int) -> Callable[[Data], tuple[Encode, Decode]]:
    def make(data: Data) -> tuple[Encode, Decode]:
        encoder = FrameEncoder("zstd", level)
        room = memoryview(bytearray(1 << 20))

        def encode(block: memoryview) -> bytes:
            return encoder.encode(block, [Piece(begin=0, end=block.nbytes, itemsize=data.itemsize, rotated=bool(data.floats))])

        def decode(frame: bytes, nbytes: int) -> memoryview:
            decode_frame(frame, room[:nbytes])
            return room[:nbytes]

        return encode, decode

    return make


def _zstd(level: int) -> Callable[[Data], tuple[Encode, Decode]]:
    def make(data: Data) -> tuple[Encode, Decode]:
        compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        return compressor.compress, lambda frame, nbytes: decompressor.decompress(frame)

    return make


def _blosc2(shuffle: str) -> Callable[[Data], tuple[Encode, Decode]]:
    def make(data: Data) -> tuple[Encode, Decode]:
        import blosc2

        options = {
            "typesize": data.itemsize,
            "clevel": 1,
            "codec": blosc2.Codec.ZSTD,
            "filters": [getattr(blosc2.Filter, shuffle)],
            "nthreads": 1,
        }
        return (
            lambda block: blosc2.compress2(block, **options),
            lambda frame, nbytes: blosc2.decompress2(frame, nthreads=1),
        )

    return make


def _zipnn(data: Data) -> tuple[Encode, Decode]:
    import zipnn

    codec = zipnn.ZipNN(method="HUFFMAN", input_format="byte", bytearray_dtype=data.floats, threads=1)
    return lambda block: codec.compress(bytearray(block)), lambda frame, nbytes: codec.decompress(frame)


def _lmz(data: Data) -> tuple[Encode, Decode]:
    codec, planner = importlib.import_module("lmz.codec"), importlib.import_module("lmz.planner")
    kind = planner.KIND_BF16 if data.floats == "bfloat16" else planner.KIND_BYTES

    def encode(block: memoryview) -> tuple[bytes, int, int]:
        payload, code, flags, _ = codec.encode_chunk(block, data.itemsize, checksum=False, kind=kind)
        return payload if isinstance(payload, bytes) else b"".join(payload), code, flags

    def decode(frame: tuple[bytes, int, int], nbytes: int) -> Any:
        return codec.decode_chunk(frame[0], frame[1], data.itemsize, frame[2], nbytes, verify=False)

    return encode, decode


OURS = "tierstore, level 0"
PLAIN = "zstd 1"

CODECS = [
    Codec(name=OURS, make=_ours(0), kind="ours", note="the default"),
    Codec(name="tierstore, level 1", make=_ours(1), kind="ours"),
    Codec(name="tierstore, level 3", make=_ours(3), kind="ours"),
    Codec(name="tierstore, level 9", make=_ours(9), kind="ours", slow=True),
    Codec(name=PLAIN, make=_zstd(1), note="the bytes as they lie"),
    Codec(name="zstd 3", make=_zstd(3)),
    Codec(name="blosc2, shuffle, zstd 1", make=_blosc2("SHUFFLE"), needs="blosc2"),
    Codec(name="blosc2, bitshuffle, zstd 1", make=_blosc2("BITSHUFFLE"), needs="blosc2"),
    Codec(name="ZipNN", make=_zipnn, needs="zipnn", only_floats=True),
    Codec(name="lmz", make=_lmz, needs="lmz", note="package lmzip, its chunks without checksums"),
]


def stored_nbytes(frame: Any) -> int:
    """What a frame takes up."""
    return len(frame[0]) if isinstance(frame, tuple) else memoryview(frame).nbytes
