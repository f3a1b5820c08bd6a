"""Encoding objects: a Python value to typed JSON, refused with its path in the state where it can't be lossless."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from tierstore.errors import TierStoreError, UnsupportedTypeError
from tierstore.format.objects_codecs import BUILTIN_TAGS, MAX_DEPTH, TAG, Codec, ObjectCodecs, Opaque, TensorRef
from tierstore.format.objects_document import encode_tree

__all__ = ["encode_objects"]

MAX_PLAIN_INT = 1 << 53
"""Larger integers are tagged: many JSON readers turn numbers into doubles."""

_MAX_VALUES = 50_000_000
_ROOT = "state"


def encode_objects(tree: Any, codecs: ObjectCodecs | None = None) -> bytes:
    """Writes one rank's objects.

    Args:
        tree: Dicts, lists, tuples, sets and leaves as `tierstore.format.objects` lists them; tensors are `TensorRef`.
        codecs: For other types.

    Raises:
        UnsupportedTypeError: A value can't be stored; names its path, e.g. ``state['optimizer']['state'][0]['foo']``.
    """
    return encode_tree(_Encoder(codecs or ObjectCodecs()).run(tree))


class _Encoder:
    """One run of the encoder: the path to where it is, the containers it is in (for cycles), and how much it has seen."""

    def __init__(self, codecs: ObjectCodecs) -> None:
        self._codecs = codecs
        self._path: list[str] = []
        self._open: set[int] = set()
        self._count = 0
        self._types: dict[type, Callable[[Any], Any]] = {
            dict: self._dict,
            list: lambda value: self._each(value),
            tuple: lambda value: {"$tuple": self._each(value)},
            set: lambda value: {"$set": self._unordered(value)},
            frozenset: lambda value: {"$frozenset": self._unordered(value)},
            OrderedDict: lambda value: {"$ordered_dict": self._pairs(value)},
            str: self._str,
            int: lambda value: value if -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT else {"$int": int_text(value)},
            float: lambda value: value if math.isfinite(value) else {"$float": float_text(value)},
            complex: lambda value: {"$complex": [self._types[float](value.real), self._types[float](value.imag)]},
            bytes: lambda value: {"$bytes": base64.b64encode(value).decode("ascii")},
            bytearray: lambda value: {"$bytearray": base64.b64encode(value).decode("ascii")},
            range: lambda value: {"$range": self._each((value.start, value.stop, value.step))},
            TensorRef: lambda value: {"$tensor": self._name(value.name)},
            Opaque: self._opaque,
            np.ndarray: self._array,
        }

    def run(self, tree: Any) -> Any:
        try:
            return self._value(tree)
        except RecursionError as error:
            raise self._error("is nested too deep for this thread's stack", "make the state flatter") from error

    def _error(self, problem: str, hint: str) -> UnsupportedTypeError:
        path = _ROOT + "".join(self._path)
        return UnsupportedTypeError(f"{path} {problem}", hint=hint, path=path)

    def _value(self, value: Any) -> Any:
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        self._count += 1
        if self._count > _MAX_VALUES:
            raise self._error(f"is more than {_MAX_VALUES:,} values in", "store large data as tensors")
        codec = self._codecs.find(kind)
        if codec is not None:
            return self._inside(value, lambda: {f"${codec.tag}": self._coded(codec, value)})
        encode = self._types.get(kind)
        if encode is None:
            return self._other(value)
        if kind in (dict, list, tuple, set, frozenset, OrderedDict, Opaque):
            return self._inside(value, lambda: encode(value))
        return encode(value)

    def _inside(self, value: Any, encode: Callable[[], Any]) -> Any:
        if id(value) in self._open:
            raise self._error("contains itself", "a state is a tree: break the cycle")
        if len(self._open) >= MAX_DEPTH:
            raise self._error(f"is nested deeper than {MAX_DEPTH} levels", "make the state flatter")
        self._open.add(id(value))
        try:
            return encode()
        finally:
            self._open.discard(id(value))

    def _at(self, step: str, value: Any) -> Any:
        # Not a `finally`: after an error the path must still say where it happened.
        self._path.append(step)
        made = self._value(value)
        self._path.pop()
        return made

    def _each(self, values: Iterable[Any]) -> list[Any]:
        return [self._at(f"[{i}]", item) for i, item in enumerate(values)]

    def _unordered(self, values: Iterable[Any]) -> list[Any]:
        # Sorted by their text, so that equal sets have equal bytes.
        made = [self._at(f"{{{item!r:.60}}}", item) for item in values]
        return sorted(made, key=lambda item: json.dumps(item, ensure_ascii=True))

    def _dict(self, value: dict[Any, Any]) -> Any:
        if all(type(key) is str and not key.startswith("$") and _is_text(key) for key in value):
            return {key: self._at(f"[{key!r}]", item) for key, item in value.items()}
        return {"$dict": self._pairs(value)}

    def _pairs(self, value: dict[Any, Any]) -> list[Any]:
        return [[self._at(f" key {key!r:.60}", key), self._at(f"[{key!r:.60}]", item)] for key, item in value.items()]

    def _str(self, value: str) -> Any:
        if _is_text(value):
            return value
        return {"$str": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode("ascii")}

    def _name(self, name: object) -> str:
        if type(name) is not str or not _is_text(name):
            raise self._error(f"refers to a tensor by {name!r:.60}, which is no valid text", "tensor names are Unicode text")
        return name

    def _opaque(self, value: Opaque) -> Any:
        if not TAG.fullmatch(value.tag) or value.tag in BUILTIN_TAGS:
            raise self._error(f"has the tag {value.tag!r:.100}, which can't be one", "use letters, digits and _.:/+-, e.g. 'mylib.Config'")
        return {f"${value.tag}": self._value(value.value)}

    def _coded(self, codec: Codec, value: Any) -> Any:
        try:
            plain = codec.encode(value)
        except TierStoreError:
            raise
        except Exception as error:
            problem = f"could not be encoded by the codec {codec.tag!r}: {type(error).__name__}: {error}"
            raise self._error(problem, "mend the codec that was registered for it") from error
        return self._value(plain)

    def _array(self, value: np.ndarray[Any, Any]) -> Any:
        dtype = self._dtype(value.dtype)
        fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        order: Literal["F", "C"] = "F" if fortran else "C"
        data = base64.b64encode(value.tobytes(order=order)).decode("ascii")
        return {"$array": {"dtype": dtype, "shape": list(value.shape), "order": order, "data": data}}

    def _dtype(self, dtype: np.dtype[Any]) -> str:
        if dtype.kind not in "biufcSUMm" or dtype.fields is not None or dtype.subdtype is not None:
            raise self._error(f"has the numpy dtype {dtype}", "store plain numeric, text, bytes or time arrays")
        if dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16):
            raise self._error(f"has the numpy dtype {dtype}, whose layout depends on the machine", "convert it to float64 or complex128")
        return str(dtype.str)

    def _other(self, value: Any) -> Any:
        if isinstance(value, np.generic) and type(value) is value.dtype.type:
            data = value.tobytes()[: value.dtype.itemsize]  # numpy gives an empty text four bytes
            return {"$scalar": {"dtype": self._dtype(value.dtype), "data": base64.b64encode(data).decode("ascii")}}
        if isinstance(value, np.dtype):
            return {"$dtype": self._dtype(value)}
        kind = type(value)
        base = next((known.__name__ for known in kind.__mro__[1:] if known in self._types), None)
        hint = f"convert it to a plain {base}, or register a codec for it" if base else "remove it, or register a codec for it"
        raise self._error(f"is a {kind.__module__}.{kind.__qualname__}, which can't be stored without pickle", hint)


def _is_text(value: str) -> bool:
    return value.isascii() or not any(0xD800 <= ord(c) <= 0xDFFF for c in value)


def int_text(value: int) -> str:
    """Decimal, or hexadecimal where decimal would take Python quadratic time (and is limited to 4,300 digits)."""
    return str(value) if value.bit_length() <= 4096 else hex(value)


def float_text(value: float) -> str:
    """``inf``, ``-inf``, ``nan``, or ``nan:<the 16 hexadecimal digits of its bits>`` for any other NaN."""
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    bits = struct.pack(">d", value).hex()
    return "nan" if bits == "7ff8000000000000" else f"nan:{bits}"
