"""What objects are made of besides Python's own types: references to tensors, codecs of the caller's types, and unknown tags."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tierstore.errors import FormatError, UsageError

__all__ = ["BUILTIN_TAGS", "MAX_DEPTH", "TAG", "Codec", "ObjectCodecs", "Opaque", "TensorRef"]

T = TypeVar("T")

MAX_DEPTH = 100
"""No state is nested deeper."""

BUILTIN_TAGS = frozenset(
    {
        "array",
        "bytearray",
        "bytes",
        "complex",
        "dict",
        "dtype",
        "float",
        "frozenset",
        "int",
        "ordered_dict",
        "range",
        "scalar",
        "set",
        "str",
        "tensor",
        "tuple",
    }
)
TAG = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/+-]{0,99}")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A leaf that is a tensor of the index, by its name there."""

    name: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value whose tag no codec knows, kept as it was stored; it can be encoded again unchanged."""

    tag: str
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How one type is stored: `encode` makes plain values of it, `decode` makes it of them again."""

    type: type
    tag: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class ObjectCodecs:
    """The registered codecs: by exact type for encoding, by tag for decoding."""

    __slots__ = ("_by_tag", "_by_type")

    def __init__(self) -> None:
        self._by_type: dict[type, Codec] = {}
        self._by_tag: dict[str, Codec] = {}

    def register(self, type: type[T], tag: str, encode: Callable[[T], Any], decode: Callable[[Any], T]) -> None:
        """Registers a codec.

        Args:
            type: The exact type; subclasses need codecs of their own.
            tag: A name that stays the same for ever; with a dot in it (``mylib.Config``) it never meets a tag of ours.
            encode: Makes values of it that objects can hold (nested ones included).
            decode: The inverse; may raise anything on a malformed value.

        Raises:
            UsageError: The tag is malformed, one of ours, or taken, or the type has a codec already.
        """
        if not TAG.fullmatch(tag) or tag in BUILTIN_TAGS:
            raise UsageError(f"{tag!r} can't be a codec's tag", hint="use letters, digits and _.:/+-, e.g. 'mylib.Config'")
        if tag in self._by_tag or type in self._by_type:
            raise UsageError(f"a codec for {type.__qualname__} or with the tag {tag!r} is registered already", hint="register it once")
        codec = Codec(type=type, tag=tag, encode=encode, decode=decode)
        self._by_type[type] = self._by_tag[tag] = codec

    def find(self, type: type) -> Codec | None:
        """The codec of exactly this type, if any."""
        return self._by_type.get(type)

    def tagged(self, tag: str) -> Codec | None:
        """The codec with this tag, if any."""
        return self._by_tag.get(tag)

    def decode(self, tag: str, value: Any) -> Any:
        """Makes an object of a decoded value, by the codec that wrote it.

        Raises:
            FormatError: No codec has this tag, or the codec could not read the value.
        """
        codec = self._by_tag.get(tag)
        if codec is None:
            raise FormatError(
                f"objects: a value has the unknown tag {tag[:100]!r}",
                hint="register the codec that wrote it, or read the tree without codecs",
                tag=tag,
            )
        try:
            return codec.decode(value)
        except Exception as error:  # boundary: the codec is the caller's code, and the value came from outside
            raise FormatError(
                f"objects: the codec {tag!r} could not read a value: {type(error).__name__}: {error}",
                hint="the file is foreign or damaged, or the codec has changed",
                tag=tag,
            ) from error

    def copy(self) -> ObjectCodecs:
        """An independent registry with the same codecs."""
        made = ObjectCodecs()
        made._by_type.update(self._by_type)
        made._by_tag.update(self._by_tag)
        return made
