"""Dtypes: torch's names, their sizes, and what safetensors and numpy call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tierstore.errors import UsageError

__all__ = ["DTYPES", "SAFETENSORS_BITS", "SAFETENSORS_NAMES", "DType", "dtype_named", "stored_as"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One dtype that a tensor may have.

    Attributes:
        name: torch's name without the prefix, e.g. ``bfloat16``.
        itemsize: Bytes per element (``float4_e2m1fn_x2`` packs two numbers in its one byte).
        safetensors: The name in a shard's header; None: stored as ``U8`` with one more trailing axis of `itemsize` bytes.
        numpy: numpy's little-endian type string, e.g. ``<f4``; None where numpy has no such type.
    """

    name: str
    itemsize: int
    safetensors: str | None
    numpy: str | None = None


def _table() -> dict[str, DType]:
    # What safetensors 0.8 reads into torch *and* names: the format itself also knows F4 and F8_E8M0, but its readers raise
    # KeyError on them (FACTS: DCP has the same defect), so these two travel as raw bytes.
    rows: tuple[tuple[str, int, str | None, str | None], ...] = (
        ("float64", 8, "F64", "<f8"),
        ("float32", 4, "F32", "<f4"),
        ("float16", 2, "F16", "<f2"),
        ("bfloat16", 2, "BF16", None),
        ("float8_e4m3fn", 1, "F8_E4M3", None),
        ("float8_e5m2", 1, "F8_E5M2", None),
        ("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", None),
        ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", None),
        ("float8_e8m0fnu", 1, None, None),
        ("float4_e2m1fn_x2", 1, None, None),
        ("complex32", 4, None, None),
        ("complex64", 8, "C64", "<c8"),
        ("complex128", 16, None, "<c16"),
        ("bool", 1, "BOOL", "|b1"),
        ("uint8", 1, "U8", "|u1"),
        ("uint16", 2, "U16", "<u2"),
        ("uint32", 4, "U32", "<u4"),
        ("uint64", 8, "U64", "<u8"),
        ("int8", 1, "I8", "|i1"),
        ("int16", 2, "I16", "<i2"),
        ("int32", 4, "I32", "<i4"),
        ("int64", 8, "I64", "<i8"),
    )
    return {name: DType(name=name, itemsize=size, safetensors=stored, numpy=array) for name, size, stored, array in rows}


DTYPES: Mapping[str, DType] = MappingProxyType(_table())
"""Every dtype that a tensor may have, by its canonical name."""

SAFETENSORS_NAMES: Mapping[str, DType] = MappingProxyType({d.safetensors: d for d in DTYPES.values() if d.safetensors})
"""The dtypes by the name that a safetensors header uses."""

SAFETENSORS_BITS: Mapping[str, int] = MappingProxyType(
    {d.safetensors: 8 * d.itemsize for d in DTYPES.values() if d.safetensors}
    | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8}  # never written by us; read in headers of foreign files
)
"""Bits per element of each dtype name that safetensors 0.8 accepts in a header."""


def dtype_named(name: str) -> DType:
    """Returns the dtype called `name` (``bfloat16``, ``torch.bfloat16``).

    Raises:
        UsageError: There is no such dtype, or its elements are smaller than a byte and have no layout of their own.
    """
    found = DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise UsageError(f"{name!r} names no dtype that can be stored", hint=f"known are {', '.join(DTYPES)}")
    return found


def stored_as(dtype: DType, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The dtype name and shape under which a tensor of `dtype` and `shape` stands in a safetensors header."""
    if dtype.safetensors is not None:
        return dtype.safetensors, shape
    return "U8", (*shape, dtype.itemsize)
