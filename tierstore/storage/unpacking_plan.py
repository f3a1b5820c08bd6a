"""What is read of a packed file at once: batches of blocks, their frames in few requests, the parts of their runs joined. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tierstore.storage.unpacking_cache import Key
from tierstore.storage.unpacking_footers import Known, Part

__all__ = ["BATCH_NBYTES", "batches", "groups", "joined", "taken_blocks"]

BATCH_NBYTES = 8 << 20
"""Of raw bytes that are read and decoded at once."""
_GAP_NBYTES = 128 << 10
"""Of stored bytes between frames that are read as well rather than asked for apart."""


def joined(parts: Mapping[int, Sequence[Part]]) -> list[tuple[Part, list[Part]]]:
    """The parts of many blocks, in one where they are of one run; each with those that it is of."""
    found: list[tuple[Part, list[Part]]] = []
    for part in (part for some in parts.values() for part in some):
        last, members = found[-1] if found else (None, [])
        if (
            last is not None
            and (last.end, last.kind, last.file) == (part.begin, part.kind, part.file)
            and last.source <= part.source <= last.source_end
        ):
            members.append(part)
            found[-1] = replace(last, end=part.end, source_end=max(last.source_end, part.source_end)), members
        else:
            found.append((part, [part]))
    return found


def batches(known: Known, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges that are read and decoded at once: whole blocks, but for the ends."""
    step = max(1, BATCH_NBYTES // known.footer.block_nbytes) * known.footer.block_nbytes
    while begin < end:
        until = min(end, (begin // known.footer.block_nbytes) * known.footer.block_nbytes + step)
        yield begin, until
        begin = until


def taken_blocks(known: Known, begin: int, end: int) -> list[Key]:
    """The blocks of the file itself that runs in ``[begin, end)`` take bytes from."""
    size = known.footer.block_nbytes
    own = [part for part in known.parts(begin, end) if part.file == 0]
    numbers = dict.fromkeys(number for part in own for number in range(part.source // size, -(-part.source_end // size)))
    return [(known.form.path, known.digest, number) for number in numbers]


def groups(known: Known, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The extents of the packed file that have the frames of these blocks."""
    extents: list[tuple[int, int]] = []
    for number in numbers:
        begin, end = known.frame(number)
        if begin == end:
            continue
        if extents and begin - extents[-1][1] <= _GAP_NBYTES:
            extents[-1] = extents[-1][0], end
        else:
            extents.append((begin, end))
    return extents
