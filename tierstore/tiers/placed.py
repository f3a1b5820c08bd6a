"""Reading a span from a storage far away straight to those who want parts of it: a block passes the CPU's cache once.

What can't be read so, and what was not good, is left over for who reads spans into memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tierstore.format.index import FileEntry
from tierstore.storage.contract import ReadsPlaced
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.nearby import FileReading, note_damage
from tierstore.tiers.passed_over import PassedOver
from tierstore.tiers.reads import Handover, Span
from tierstore.tiers.sources import Source

__all__ = ["Placed", "read_placed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What came of it.

    Attributes:
        nbytes: Bytes read.
        left: What is to be read elsewhere: the copy was no good for that.
    """

    nbytes: int
    left: Sequence[Span]


async def read_placed(
    span: Span, source: Source, info: CheckpointInfo, passed: PassedOver, entry_of: Callable[[str], Awaitable[FileEntry]], block_nbytes: int
) -> Placed | None:
    """Reads a span from one copy; None: that is not possible, and nothing was read.

    Args:
        span: Of whole blocks.
        source: The copy.
        info: The checkpoint.
        passed: Told what is wrong with the copy.
        entry_of: Gives a file with the digests of its blocks.
        block_nbytes: Their length.
    """
    storage = source.tier.storage
    if source.quantised is not None or not isinstance(storage, ReadsPlaced) or any(isinstance(want, Handover) for want in span.wants):
        return None
    speed, path = source.tier.speed, info.attempt.path(span.file)
    reading = FileReading(await entry_of(span.file), path, [span], block_nbytes, speed.now)
    began = speed.now()
    if not await storage.read_placed(reading):
        return None
    left = reading.left()
    if left:
        note_damage(passed, source, reading, block_nbytes)
    else:
        speed.note(span.nbytes, speed.now() - began)
        passed.answers(source.tier)
    return Placed(nbytes=reading.nbytes, left=tuple(reading.spans(left, span.nbytes)))
