"""Columns: named one- and two-dimensional numpy arrays in one safetensors file; what the index and the part records are made of.

Each column is contiguous, so that a reader may range-read a part of one column after reading the header alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tierstore.errors import FormatError
from tierstore.format.digest import Buffer
from tierstore.format.header import ShardHeader, encode_header, parse_header

__all__ = ["Array", "decode_columns", "encode_columns"]

Array = npt.NDArray[np.generic]

ALIGNMENT = 4096
_PREFIX = "tierstore:"
"""Column names begin with this: DCP's Hugging Face reader lists every ``.safetensors`` file of a folder and would mix up plain names."""

_NAMES = {"|u1": "U8", "<u2": "U16", "<u4": "U32", "<i8": "I64"}
_DTYPES = {name: np.dtype(text) for text, name in _NAMES.items()}


def encode_columns(columns: Mapping[str, Array], metadata: Mapping[str, str], *, ordered: bool = False) -> bytes:
    """Writes columns (uint8, uint16, uint32 or int64) as a safetensors file, largest items first unless they are `ordered` already."""
    rows_of = list(columns.items()) if ordered else sorted(columns.items(), key=lambda item: (-item[1].itemsize, item[0]))
    arrays = [(f"{_PREFIX}{name}", np.ascontiguousarray(array)) for name, array in rows_of]
    rows = [(name, _NAMES[array.dtype.newbyteorder("<").str], array.shape, array.nbytes) for name, array in arrays]
    header = encode_header(rows, {"format": "pt", **metadata}, ALIGNMENT)
    return b"".join([header, *(array.data.cast("B") if array.nbytes else b"" for _, array in arrays)])


def decode_columns(
    data: Buffer, layout: Mapping[str, tuple[str, int]], what: str, *, header: ShardHeader | None = None
) -> tuple[dict[str, Array], Mapping[str, str]]:
    """Reads columns without copying them; the arrays are read-only views of `data`.

    Args:
        data: The whole file, or with `header` at least its beginning up to the last of the columns.
        layout: The wanted columns: name to (safetensors dtype, row length; 0 for a one-dimensional column). Others are ignored.
        what: The file's name, for messages.
        header: The file's header, where it is parsed already.

    Raises:
        FormatError: Not a safetensors file, or a column is missing or has another dtype or shape.
    """
    view = memoryview(data).cast("B").toreadonly()
    header = header or parse_header(view, view.nbytes)
    columns: dict[str, Array] = {}
    for name, (dtype, width) in layout.items():
        tensor = header.tensors.get(f"{_PREFIX}{name}")
        if tensor is None:
            raise FormatError(f"{what}: the column {name!r} is missing", hint="the file is foreign or damaged: run `tierstore verify`")
        shape = tensor.shape
        if tensor.dtype != dtype or len(shape) != (2 if width else 1) or (width and shape[1] != width):
            raise FormatError(
                f"{what}: the column {name!r} has dtype {tensor.dtype} and shape {shape}",
                hint="the file is foreign or damaged: run `tierstore verify`",
            )
        if tensor.end > view.nbytes:
            raise FormatError(
                f"{what}: the column {name!r} lies beyond the {view.nbytes:,} bytes that were read",
                hint="the file is foreign or damaged: run `tierstore verify`",
            )
        column = np.frombuffer(view[tensor.begin : tensor.end], dtype=_DTYPES[dtype])
        columns[name] = column.reshape(shape) if width else column
    return columns, header.metadata
