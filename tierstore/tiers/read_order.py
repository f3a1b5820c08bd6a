"""Planned reads in the order in which they cost least: what a storage makes from other bytes of the same load right after these."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from tierstore.errors import IntegrityError, NotFoundError, StorageError
from tierstore.format.digest import BLOCK_NBYTES
from tierstore.names import Attempt
from tierstore.storage.contract import MadeFrom, MakesBytes, Storage
from tierstore.storage.reading_order import Range, reading_order
from tierstore.storage.tasks import all_or_none
from tierstore.tiers.passed_over import PassedOver
from tierstore.tiers.reads import Span

__all__ = ["file_order", "in_order"]

_PART_NBYTES = 4 << 20
"""So much of a file is read at once that is read as a whole."""
_MOST_PART_NBYTES = 16 << 20
"""Blocks of which more would have to be read at once are not ours: such a file is read from front to back."""

_ASKED_AT_ONCE = 16
"""Of so many files at a time is asked what in them is made from what."""


async def in_order(spans: Sequence[Span], passed: PassedOver, attempt: Attempt, align: int) -> list[Span]:
    """Orders spans, and cuts those of which a part is made from others; as they are where the first copy's storage makes nothing.

    Args:
        spans: Of one load.
        passed: Says which copy is read first, and is told if its tier does not answer.
        attempt: Whose files they are of.
        align: Spans are cut at multiples of so many bytes.
    """
    by_file: dict[str, list[Span]] = {}
    for span in spans:
        by_file.setdefault(span.file, []).append(span)
    turns = asyncio.Semaphore(_ASKED_AT_ONCE)

    async def ask(file: str) -> Sequence[Sequence[MadeFrom]]:
        source = next(iter(passed.order(file)), None)
        if source is None or not isinstance(source.tier.storage, MakesBytes):
            return ()
        async with turns:
            try:
                return await source.tier.storage.made_from(attempt.path(file), [(span.begin, span.end) for span in by_file[file]])
            except (NotFoundError, IntegrityError):
                return ()  # who reads it says so
            except StorageError as error:
                passed.note(source, file, error)  # nobody is to be as patient with it once more
                return ()

    asked = dict(zip(by_file, await all_or_none([ask(file) for file in by_file]), strict=True))
    if not any(made for found in asked.values() for made in found):
        return list(spans)
    listed: list[Span] = []
    ranges: list[Range] = []
    for file, some in by_file.items():
        listed += some
        for span, made in zip(some, asked[file] or [()] * len(some), strict=True):
            ranges.append(Range(path=attempt.path(file), begin=span.begin, end=span.end, made=made))
    parts = [listed[part.number].part(part.begin, part.end) for part in reading_order(ranges, align)]
    return [part for part in parts if part is not None]


async def file_order(storage: Storage, path: str, nbytes: int, block_nbytes: int) -> list[tuple[int, int]]:
    """Ranges that are a whole file, in the order in which reading it costs least; none where the storage makes nothing of it.

    Args:
        storage: Where it is read.
        path: Its name there.
        nbytes: Its length.
        block_nbytes: The file is cut at multiples of so many bytes.
    """
    if not isinstance(storage, MakesBytes):
        return []
    align = math.lcm(block_nbytes, BLOCK_NBYTES)  # and where blocks of packed files begin
    if align > _MOST_PART_NBYTES:
        return []
    step = max(1, _PART_NBYTES // align) * align
    pieces = [(begin, min(begin + step, nbytes)) for begin in range(0, nbytes, step)]
    try:
        made = await storage.made_from(path, pieces)
    except (NotFoundError, IntegrityError, StorageError):
        return []  # who reads it says so
    if not any(made):
        return []
    ranges = [Range(path=path, begin=begin, end=end, made=found) for (begin, end), found in zip(pieces, made, strict=True)]
    return [(part.begin, part.end) for part in reading_order(ranges, align)]
