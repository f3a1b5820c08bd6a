"""Planning reads: from wanted byte ranges to block-aligned spans, merged where a gap costs less than a request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tierstore.errors import IntegrityError

__all__ = ["LOCAL_COST", "REMOTE_COST", "ReadCost", "Span", "Want", "plan_spans"]


@dataclass(frozen=True, slots=True)
class Want:
    """Bytes that a caller wants: as many as `buffer` (writable, contiguous) has, from `offset` of a checkpoint's file."""

    file: str
    offset: int
    buffer: memoryview

    @property
    def end(self) -> int:
        return self.offset + self.buffer.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCost:
    """What reading from a storage costs, as the planner needs it.

    `gap_nbytes`: unwanted bytes that are cheaper to read than a further request. `span_nbytes`: the longest request, in bytes; longer
    ranges are split so that several go at once. `concurrency`: how many do.
    """

    gap_nbytes: int
    span_nbytes: int = 8 << 20
    concurrency: int


LOCAL_COST = ReadCost(gap_nbytes=256 << 10, concurrency=4)
"""A file system: a request costs some 100 µs, about what 256 KiB cost."""

REMOTE_COST = ReadCost(gap_nbytes=1 << 20, concurrency=16)
"""An object store: a request costs some 10 ms, and one stream gets 50 to 100 MB/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One request: the bytes ``[begin, end)`` of `file`, and the wants that they serve (each overlaps the span)."""

    file: str
    begin: int
    end: int
    wants: tuple[Want, ...]

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def direct(self) -> memoryview | None:
        """The place in a want's own buffer that the whole span belongs to, where there is only that one; else None."""
        if len(self.wants) != 1:
            return None
        want = self.wants[0]
        if want.offset <= self.begin and self.end <= want.end:
            return want.buffer[self.begin - want.offset : self.end - want.offset]
        return None

    def scatter(self, scratch: memoryview) -> None:
        """Copies from `scratch`, which holds the span's bytes, to where they are wanted."""
        for want in self.wants:
            begin, end = max(want.offset, self.begin), min(want.end, self.end)
            want.buffer[begin - want.offset : end - want.offset] = scratch[begin - self.begin : end - self.begin]


def plan_spans(wants: Iterable[Want], *, file_nbytes: Callable[[str], int], align: int, cost: ReadCost) -> list[Span]:
    """Turns wants into spans that begin and end on multiples of `align` (or at the file's end).

    Args:
        wants: In any order; they may overlap. Empty ones are dropped: a zero-length read never reaches a storage.
        file_nbytes: A file's length in bytes; raises for a file that does not exist.
        align: The block size in bytes where blocks are verified, else 1.
        cost: What a request costs.

    Returns:
        Spans by file, in the order of the file's first want, then by offset; so that a file is read from front to back.

    Raises:
        IntegrityError: A want lies outside its file: the index that it came from is damaged.
    """
    by_file: dict[str, list[Want]] = {}
    for want in wants:
        if want.buffer.nbytes:
            flat = want.buffer if want.buffer.format == "B" and want.buffer.ndim == 1 else want.buffer.cast("B")
            by_file.setdefault(want.file, []).append(want if flat is want.buffer else Want(want.file, want.offset, flat))
    spans: list[Span] = []
    for file, listed in by_file.items():
        nbytes = file_nbytes(file)
        listed.sort(key=lambda w: (w.offset, w.end))
        if listed[0].offset < 0 or any(w.end > nbytes for w in listed):
            bad = next(w for w in listed if w.offset < 0 or w.end > nbytes)
            raise IntegrityError(f"bytes {bad.offset} to {bad.end} are wanted of {file}, which has {nbytes}", file=file)
        for group in _merge(listed, align, cost.gap_nbytes):
            spans.extend(_split(file, group, nbytes, align, max(align, cost.span_nbytes - cost.span_nbytes % align)))
    return spans


def _merge(wants: Sequence[Want], align: int, gap: int) -> Iterable[list[Want]]:
    """Groups of wants, sorted by offset, between which no gap is worth a request of its own."""
    group: list[Want] = []
    end = 0
    for want in wants:
        begin = want.offset - want.offset % align
        if group and begin > end + gap:
            yield group
            group = []
        end = max(end, -(-want.end // align) * align) if group else -(-want.end // align) * align
        group.append(want)
    if group:
        yield group


def _split(file: str, group: Sequence[Want], nbytes: int, align: int, longest: int) -> Iterable[Span]:
    begin = group[0].offset - group[0].offset % align
    last = max(w.end for w in group)
    active: list[Want] = []
    following = 0
    while begin < last:
        limit = begin + longest
        active = [w for w in active if w.end > begin]
        while following < len(group) and group[following].offset < limit:
            active.append(group[following])
            following += 1
        if active:
            first = max(begin, min(w.offset for w in active))
            first -= first % align
            end = min(limit, max(w.end for w in active))
            end = min(-(-end // align) * align, nbytes)
            yield Span(file=file, begin=first, end=end, wants=tuple(active))
            begin = limit
        else:
            begin = group[following].offset - group[following].offset % align  # nothing is wanted in the gap itself
