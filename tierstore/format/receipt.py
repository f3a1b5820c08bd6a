"""The node tier's receipt: "this rank's part of this attempt is complete and synced here"."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.format.document import decode_document, encode_document
from tierstore.format.fields import MAX_RANKS, Fields

__all__ = ["Receipt", "decode_receipt", "encode_receipt"]

_DOCUMENT = "tierstore.receipt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a receipt says.

    Attributes:
        part_digest: `digest_of` the part record's bytes.
        rank: Whose part it is.
        world_size: How many ranks the attempt has.
    """

    part_digest: str
    rank: int
    world_size: int


def encode_receipt(receipt: Receipt) -> bytes:
    """Writes a receipt as a document."""
    body = {"part_digest": receipt.part_digest, "rank": receipt.rank, "world_size": receipt.world_size}
    return encode_document(_DOCUMENT, body, sealed=True)


def decode_receipt(data: bytes) -> Receipt:
    """Reads a receipt.

    Raises:
        FormatError: Malformed, foreign or oversized.
        VersionError: Written by a newer major version.
    """
    fields = Fields(what=_DOCUMENT, body=decode_document(data, _DOCUMENT, max_nbytes=1 << 20))
    world_size = fields.integer("world_size", low=1, high=MAX_RANKS)
    return Receipt(part_digest=fields.digest("part_digest"), rank=fields.integer("rank", high=world_size - 1), world_size=world_size)
