"""Part records: what one rank reports of an attempt (its files, sizes, block digests, extents), as the same columns as the index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierstore.errors import UsageError
from tierstore.format.columns import decode_columns, encode_columns
from tierstore.format.digest import Buffer
from tierstore.format.document import plain_json, restore_json
from tierstore.format.fields import MAX_RANKS, Fields
from tierstore.format.index_codec import LAYOUT, index_columns, index_from_columns, index_metadata
from tierstore.format.index_table import Index

__all__ = ["Part", "decode_part", "encode_part"]

_FORMAT = "tierstore.part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's report.

    Attributes:
        run: The run, with `step` and `save_id` the attempt.
        step: The step.
        save_id: The attempt's ULID.
        rank: Who wrote it.
        world_size: How many ranks the attempt has.
        index: The rank's files and the extents in them.
        objects: What `encode_objects` made of the rank's state.
        facts: JSON values; rank 0's hold all that a taker-over needs to commit (metrics, tags, final, created_at …).
    """

    run: str
    step: int
    save_id: str
    rank: int
    world_size: int
    index: Index
    objects: bytes = b""
    facts: Mapping[str, Any] = field(default_factory=dict)


def encode_part(part: Part) -> bytes:
    """Writes a part record as a safetensors file.

    Raises:
        UsageError: The facts are no JSON values, or the rank is not below the world size.
    """
    if not 0 <= part.rank < part.world_size:
        raise UsageError(f"rank {part.rank} of {part.world_size}", hint="ranks go from 0 to world_size - 1")
    own = {
        "run": part.run,
        "step": part.step,
        "save_id": part.save_id,
        "rank": part.rank,
        "world_size": part.world_size,
        "facts": plain_json(part.facts, "facts"),
    }
    columns = {**index_columns(part.index), "objects": np.frombuffer(part.objects, dtype=np.uint8)}
    return encode_columns(columns, index_metadata(part.index, _FORMAT, own))


def decode_part(data: Buffer) -> Part:
    """Reads a part record; the index's columns are views of `data`, which must not change.

    Raises:
        FormatError: Malformed, foreign or inconsistent.
        VersionError: Written by a newer major version.
    """
    columns, metadata = decode_columns(data, {**LAYOUT, "objects": ("U8", 0)}, "part record")
    index, own = index_from_columns(columns, metadata, _FORMAT)
    fields = Fields(what=_FORMAT, body=own)
    world_size = fields.integer("world_size", low=1, high=MAX_RANKS)
    return Part(
        run=fields.run(),
        step=fields.step(),
        save_id=fields.save_id(),
        rank=fields.integer("rank", high=world_size - 1),
        world_size=world_size,
        index=index,
        objects=columns["objects"].tobytes(),
        facts=restore_json(fields.mapping("facts"), _FORMAT),
    )
