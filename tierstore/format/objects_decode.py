"""Decoding objects: typed JSON from outside to Python values; total, bounded, and nothing is executed."""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from tierstore.errors import FormatError
from tierstore.format.objects_codecs import MAX_DEPTH, TAG, ObjectCodecs, Opaque, TensorRef
from tierstore.format.objects_document import load_tree

__all__ = ["decode_node", "decode_objects"]

_DECIMAL = re.compile(r"-?[1-9][0-9]{15,1300}")
_HEXADECIMAL = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_NAN_BITS = re.compile(r"nan:([0-9a-f]{16})")
_NUMPY_DTYPE = re.compile(r"[<>|=]([biufcSU])([1-9][0-9]{0,8}|0)|[<>]([mM])8(\[[0-9]{0,9}[A-Za-z]{1,7}\])?")
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_ROOT = "state"


def decode_objects(data: bytes, codecs: ObjectCodecs | None = None, *, lenient: bool = False) -> Any:
    """Reads one rank's objects, as `encode_objects` wrote them.

    Args:
        data: The document.
        codecs: For tags that are not ours. Without any, such values become `Opaque`.
        lenient: Unknown tags become `Opaque` even where `codecs` are given.

    Raises:
        FormatError: Malformed, or an unknown tag; names the path in the state.
        VersionError: Written by a newer major version.
    """
    return decode_node(load_tree(data), codecs, lenient=lenient)


def decode_node(node: Any, codecs: ObjectCodecs | None = None, *, lenient: bool = False) -> Any:
    """Reads a part of an encoded tree; the arguments and errors of `decode_objects`."""
    decoder = _Decoder(codecs or ObjectCodecs(), lenient=lenient or codecs is None)
    try:
        return decoder.value(node)
    except RecursionError as error:
        raise decoder.error("is nested too deep for this thread's stack") from error


class _Decoder:
    """One run of the decoder."""

    def __init__(self, codecs: ObjectCodecs, *, lenient: bool) -> None:
        self._codecs = codecs
        self._lenient = lenient
        self._path: list[str] = []
        self._tags: dict[str, Callable[[Any], Any]] = {
            "$array": self._array,
            "$bytearray": lambda body: bytearray(self._base64(body)),
            "$bytes": self._base64,
            "$complex": self._complex,
            "$dict": lambda body: self._mapping(body),
            "$dtype": self._dtype,
            "$float": self._float,
            "$frozenset": lambda body: frozenset(self._set(body)),
            "$int": self._int,
            "$ordered_dict": lambda body: OrderedDict(self._mapping(body)),
            "$range": self._range,
            "$scalar": self._scalar,
            "$set": self._set,
            "$str": self._str,
            "$tensor": self._tensor,
            "$tuple": lambda body: tuple(self._each(body)),
        }

    def error(self, problem: str) -> FormatError:
        path = _ROOT + "".join(self._path)
        return FormatError(f"objects: {path} {problem}", hint="the file is foreign or damaged: run `tierstore verify`", path=path)

    def value(self, node: Any) -> Any:
        if isinstance(node, dict):
            tag = next(iter(node), "")
            if len(node) == 1 and tag.startswith("$"):
                return self._tagged(tag, node[tag])
            if bad := [key for key in node if key.startswith("$")]:
                raise self.error(f"has the tag {bad[0][:60]!r} beside other keys")
            return {key: self._at(f"[{key!r:.60}]", item) for key, item in node.items()}
        if isinstance(node, list):
            return self._each(node)
        return node

    def _at(self, step: str, node: Any) -> Any:
        self._path.append(step)
        if len(self._path) > 2 * MAX_DEPTH:
            raise self.error(f"is nested deeper than {MAX_DEPTH} levels")
        made = self.value(node)
        self._path.pop()
        return made

    def _tagged(self, tag: str, body: Any) -> Any:
        decode = self._tags.get(tag)
        if decode is not None:
            return decode(body)
        if not TAG.fullmatch(tag[1:]):
            raise self.error(f"has the malformed tag {tag[:100]!r}")
        codec = self._codecs.tagged(tag[1:])
        if codec is None and not self._lenient:
            raise self.error(f"has the unknown tag {tag[:100]!r}: register the codec that wrote it, or decode leniently")
        plain = self._at(f".{tag:.60}", body)
        if codec is None:
            return Opaque(tag[1:], plain)
        try:
            return self._codecs.decode(codec.tag, plain)
        except FormatError as error:
            raise self.error(f"could not be decoded: {error.message}") from error

    def _each(self, body: Any) -> list[Any]:
        if not isinstance(body, list):
            raise self.error("holds something that is not a list")
        return [self._at(f"[{i}]", item) for i, item in enumerate(body)]

    def _set(self, body: Any) -> set[Any]:
        items = self._each(body)
        try:
            made = set(items)
        except TypeError as error:
            raise self.error(f"is a set of what can't be in one: {error}") from error
        if len(made) != len(items):
            raise self.error("is a set with an element twice")
        return made

    def _mapping(self, body: Any) -> dict[Any, Any]:
        if not isinstance(body, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in body):
            raise self.error("is no list of pairs")
        made: dict[Any, Any] = {}
        for i, (key_node, node) in enumerate(body):
            key = self._at(f" key {i}", key_node)
            try:
                twice = key in made
            except TypeError as error:
                raise self.error(f"has a key that can't be one: {error}") from error
            if twice:
                raise self.error(f"has the key {key!r:.60} twice")
            made[key] = self._at(f"[{key!r:.60}]", node)
        return made

    def _text(self, body: Any, what: str) -> str:
        if not isinstance(body, str):
            raise self.error(f"is {what} without a text")
        return body

    def _base64(self, body: Any) -> bytes:
        try:
            return base64.b64decode(self._text(body, "base64").encode("ascii"), validate=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            raise self.error(f"is no base64: {error}") from error

    def _int(self, body: Any) -> int:
        text = self._text(body, "an int")
        if _DECIMAL.fullmatch(text):
            return int(text)
        if _HEXADECIMAL.fullmatch(text):
            return int(text, 16)
        raise self.error(f"is no tagged int: {text[:60]!r}")

    def _float(self, body: Any) -> float:
        text = self._text(body, "a float")
        if text in _FLOATS:
            return _FLOATS[text]
        found = _NAN_BITS.fullmatch(text)
        value: float = struct.unpack(">d", bytes.fromhex(found[1]))[0] if found else 0.0
        if not math.isnan(value):
            raise self.error(f"is no tagged float: {text[:60]!r}")
        return value

    def _complex(self, body: Any) -> complex:
        parts = self._each(body)
        if len(parts) != 2 or not all(type(part) is float for part in parts):
            raise self.error("is no complex number")
        return complex(parts[0], parts[1])

    def _range(self, body: Any) -> range:
        parts = self._each(body)
        if len(parts) != 3 or not all(type(part) is int for part in parts) or parts[2] == 0:
            raise self.error("is no range")
        return range(*parts)

    def _str(self, body: Any) -> str:
        try:
            return self._base64(body).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise self.error("is no tagged text") from error

    def _tensor(self, body: Any) -> TensorRef:
        return TensorRef(self._text(body, "a tensor"))

    def _dtype(self, body: Any) -> np.dtype[Any]:
        text = self._text(body, "a numpy dtype")
        found = _NUMPY_DTYPE.fullmatch(text)
        try:
            dtype = np.dtype(text) if found else None
        except (TypeError, ValueError) as error:
            raise self.error(f"has the numpy dtype {text[:60]!r}, which does not exist") from error
        if dtype is None or (dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16)):
            raise self.error(f"has the numpy dtype {text[:60]!r}, which is none that is stored")
        return dtype

    def _fields(self, body: Any, names: set[str]) -> dict[str, Any]:
        if not isinstance(body, dict) or set(body) != names:
            raise self.error(f"does not have the fields {', '.join(sorted(names))}")
        return body

    def _array(self, body: Any) -> np.ndarray[Any, Any]:
        fields = self._fields(body, {"dtype", "shape", "order", "data"})
        dtype, data, shape = self._dtype(fields["dtype"]), self._base64(fields["data"]), fields["shape"]
        if not isinstance(shape, list) or len(shape) > 64 or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
            raise self.error(f"has an absurd shape {str(shape)[:60]}")
        if fields["order"] not in ("C", "F") or math.prod(shape) * dtype.itemsize != len(data):
            raise self.error(f"has {len(data)} bytes, which do not fit dtype {dtype.str} and shape {str(shape)[:60]}")
        try:
            flat = np.frombuffer(bytearray(data), dtype=dtype) if data else np.empty(math.prod(shape), dtype)
            self._check_text(flat)
            return flat.reshape(shape, order=fields["order"])
        except (ValueError, MemoryError) as error:
            raise self.error(f"has a shape that numpy refuses: {error}") from error

    def _scalar(self, body: Any) -> Any:
        fields = self._fields(body, {"dtype", "data"})
        dtype, data = self._dtype(fields["dtype"]), self._base64(fields["data"])
        if len(data) != dtype.itemsize:
            raise self.error(f"is a numpy scalar of {len(data)} bytes and dtype {dtype.str}")
        if not data:
            return dtype.type()
        one = np.frombuffer(data, dtype=dtype)
        self._check_text(one)
        return one[0]

    def _check_text(self, flat: np.ndarray[Any, Any]) -> None:
        # numpy takes any 32 bits for a character, and fails only where it makes a str of them.
        if flat.dtype.kind == "U" and flat.size and int(flat.view(flat.dtype.str[0] + "u4").max()) > 0x10FFFF:
            raise self.error("is a numpy text that is no Unicode")
