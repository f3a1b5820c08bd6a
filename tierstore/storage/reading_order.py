"""In which order ranges are read where some of their bytes are made from others: right after these, which are kept for a while. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tierstore.storage.contract import MadeFrom

__all__ = ["Part", "Range", "reading_order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bytes ``[begin, end)`` of a file that are read at once; `made`: what of them is made from others, sorted."""

    path: str
    begin: int
    end: int
    made: Sequence[MadeFrom] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The bytes ``[begin, end)`` of the range `number`."""

    number: int
    begin: int
    end: int


def reading_order(ranges: Sequence[Range], align: int) -> list[Part]:
    """Orders ranges, and cuts those that are made from others, so that each is read when the last bytes that it is made from have been.

    What is not made from anything is not cut, but from what is. Files stay in their order.

    Args:
        ranges: In any order; those of one file do not overlap.
        align: Cuts are made at multiples of so many bytes from a range's begin.
    """
    apart = [(number, piece) for number, one in enumerate(ranges) for piece in _apart(one, align)]
    ends: dict[str, list[int]] = {}
    for _, one in apart:
        if not one.made:
            ends.setdefault(one.path, []).append(one.end)
    for some in ends.values():
        some.sort()
    files: dict[str, int] = {}
    placed: list[tuple[tuple[int, int, int], Part]] = []
    for number, one in apart:
        begin = one.begin
        for end in (*_cuts(one, ends, align), one.end):
            last = next((made for made in reversed(one.made) if made.begin < end and made.end > begin), None)
            if last is None:
                path, place, after = one.path, begin, 0
            else:
                path, place, after = last.path, _source_of(last, min(end, last.end)) - 1, 1
            placed.append(((files.setdefault(path, len(files)), place, after), Part(number=number, begin=begin, end=end)))
            begin = end
    placed.sort(key=lambda item: item[0])
    return [part for _, part in placed]


def _apart(one: Range, align: int) -> list[Range]:
    """A range in pieces of which something is made from others, and pieces of which nothing is."""
    edges = [one.begin]
    for made in one.made:
        begin = made.begin - (made.begin - one.begin) % align
        end = made.end + (one.begin - made.end) % align
        if begin > edges[-1] or len(edges) == 1:
            edges += [begin, end]  # even: made from nothing begins, odd: made begins
        else:
            edges[-1] = max(edges[-1], end)
    edges = [min(max(edge, one.begin), one.end) for edge in (*edges, one.end)]
    pieces: list[Range] = []
    for number, (begin, end) in enumerate(pairwise(edges)):
        if begin < end:
            found = [made for made in one.made if made.begin < end and made.end > begin] if number % 2 else []
            pieces.append(Range(path=one.path, begin=begin, end=end, made=found))
    return pieces


def _cuts(one: Range, ends: dict[str, list[int]], align: int) -> list[int]:
    """Where a range is cut: what is made from bytes before the end of another range does not wait for those behind it."""
    found: dict[int, None] = {}
    for made in one.made:
        edges = ends.get(made.path, [])
        for at in range(bisect_right(edges, made.source), len(edges)):
            if edges[at] >= made.source_end:
                break
            cut = made.begin + (edges[at] - made.source) * (made.end - made.begin) // (made.source_end - made.source)
            cut -= (cut - one.begin) % align
            if one.begin < cut < one.end:
                found[cut] = None
    return sorted(found)


def _source_of(made: MadeFrom, end: int) -> int:
    """The end of what the bytes before `end` are made from."""
    return made.source + -(-(end - made.begin) * (made.source_end - made.source) // (made.end - made.begin))
