"""How shards are packed: what `PackedStorage` is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tierstore.config_packing import MOMENTS

__all__ = ["Packing", "QuantiseRule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiseRule:
    """Which tensors of a shard are quantised, and how.

    Attributes:
        scheme: ``q8`` or ``q4`` (`format.quantise`).
        include: Patterns (`fnmatch`) of keys in the shard's header, of which one must match.
        exclude: Patterns of which none may match.
        min_numel: Smaller tensors stay as they are, in elements.
    """

    scheme: Literal["q8", "q4"]
    include: tuple[str, ...] = MOMENTS
    exclude: tuple[str, ...] = ()
    min_numel: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How shards are packed.

    Attributes:
        codec: ``raw``: frames are stored without compression; ``zstd``.
        level: Of zstd; 0: few matches, fast.
        threads: How many threads encode, and how many decode.
        nice: By how much those that encode are nicer than the process, 0 to 19.
        master_once: 16-bit tensors that are the rounding of a float32 tensor in the same shard are not stored.
        quantise: Which tensors are quantised; None: none.
    """

    codec: Literal["raw", "zstd"] = "zstd"
    level: int = 0
    threads: int = 2
    nice: int = 0
    master_once: bool = False
    quantise: QuantiseRule | None = None
