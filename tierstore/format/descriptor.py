"""The store's descriptor, ``tierstore.json`` at the root of every tier: which store the tier belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tierstore.format.document import decode_document, encode_document
from tierstore.format.fields import Fields

__all__ = ["Descriptor", "decode_descriptor", "encode_descriptor"]

_DOCUMENT = "tierstore.store"
_STORE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """What a descriptor says.

    Attributes:
        store_id: Letters, digits, ``_`` and ``-``; the same on every tier of a store.
    """

    store_id: str


def encode_descriptor(descriptor: Descriptor) -> bytes:
    """Writes a descriptor as a document."""
    return encode_document(_DOCUMENT, {"store_id": descriptor.store_id}, sealed=True)


def decode_descriptor(data: bytes) -> Descriptor:
    """Reads a descriptor.

    Raises:
        FormatError: Malformed, foreign or oversized.
        VersionError: Written by a newer major version.
    """
    fields = Fields(what=_DOCUMENT, body=decode_document(data, _DOCUMENT, max_nbytes=1 << 20))
    return Descriptor(store_id=fields.text("store_id", pattern=_STORE_ID))
