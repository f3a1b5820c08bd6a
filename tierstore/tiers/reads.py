"""Planning reads: from wanted byte ranges to block-aligned spans, merged where a gap costs less than a request. Pure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tierstore.errors import IntegrityError

__all__ = ["AnyWant", "Handover", "ReadCost", "Span", "Want", "plan_spans", "spread_spans"]


@dataclass(frozen=True, slots=True)
class Want:
    """Bytes that a caller wants: as many as `buffer` (writable, contiguous) has, from `offset` of a checkpoint's file.

    `group` names what the bytes are a part of (a tensor); see `ReadCost.pitch_nbytes`. Empty: of nothing.
    """

    file: str
    offset: int
    buffer: memoryview
    group: str = ""

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    @property
    def end(self) -> int:
        return self.offset + self.buffer.nbytes

    def receive(self, offset: int, data: memoryview) -> None:
        """Takes the part of its bytes that begins at `offset` of the file."""
        at = offset - self.offset
        self.buffer[at : at + data.nbytes] = data


@dataclass(slots=True, eq=False)
class Handover:
    """Bytes that a caller takes out of the reader's scratch memory, as soon as they are all there.

    A reader that knows of no such thing fills `buffer`, as it does a Want's; the caller's `finish` then takes them from there.

    Attributes:
        file, offset, nbytes: The bytes.
        take: Called once, with all of them, on any thread; it keeps no reference to them.
        group: As a Want's.
    """

    file: str
    offset: int
    nbytes: int
    take: Callable[[memoryview], None]
    group: str = ""
    _missing: int = field(init=False)
    _memory: memoryview | None = field(init=False, default=None)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._missing = self.nbytes

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def buffer(self) -> memoryview:
        """Memory for the bytes, made when it is first asked for."""
        if self._memory is None:
            self._memory = memoryview(bytearray(self.nbytes))
        return self._memory

    def receive(self, offset: int, data: memoryview) -> None:
        """Takes the part of its bytes that begins at `offset` of the file: each part once, in any order, from any thread."""
        if data.nbytes == self.nbytes:
            self._missing = 0
            self.take(data)
            return
        at = offset - self.offset
        with self._lock:
            self.buffer[at : at + data.nbytes] = data
            self._missing -= data.nbytes
            complete = self._missing == 0
        if complete:
            self.finish()

    def finish(self) -> None:
        """Takes the bytes out of `buffer`, if they are there and were not taken before."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self.take(memory)


AnyWant = Want | Handover


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCost:
    """What reading from a storage costs, as the planner needs it; `costs.cost_of` derives it.

    Attributes:
        gap_nbytes: Unwanted bytes that are cheaper to read than a further request.
        span_nbytes: The longest request, in bytes, to within a block at each end. Longer ranges are split into requests of about
            half of that, so that several go at once: at multiples of it in the file, where object stores have the borders of the parts
            that it was uploaded in (a request across one costs the server two reads).
        concurrency: How many do.
        pitch_nbytes: For the parts of one group that lie in one file: no more requests than the range from its first part to its last
            has of these, whatever the gaps; half of `span_nbytes` at most. 0: no limit. So the columns of a matrix never become
            thousands of requests.
        least_nbytes: Into no shorter requests are long ones cut, so that all that may go at once do (`spread_spans`), in bytes. 0: they
            are not cut.
    """

    gap_nbytes: int
    span_nbytes: int = 16 << 20
    concurrency: int
    pitch_nbytes: int = 0
    least_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One request: the bytes ``[begin, end)`` of `file`, and the wants that they serve (each overlaps the span)."""

    file: str
    begin: int
    end: int
    wants: tuple[AnyWant, ...]

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def direct(self) -> memoryview | None:
        """The place in a want's own buffer that the whole span belongs to, where there is only that one; else None."""
        if len(self.wants) != 1:
            return None
        want = self.wants[0]
        if isinstance(want, Want) and want.offset <= self.begin and self.end <= want.end:
            return want.buffer[self.begin - want.offset : self.end - want.offset]
        return None

    def part(self, begin: int, end: int) -> Span | None:
        """The bytes ``[begin, end)`` of it as a request of their own; None where nobody wants any of them."""
        wants = tuple(want for want in self.wants if want.offset < end and want.end > begin)
        return Span(file=self.file, begin=begin, end=end, wants=wants) if wants else None

    def scatter(self, scratch: memoryview) -> None:
        """Brings what is wanted from `scratch`, which holds the span's bytes, to those who want it."""
        for want in self.wants:
            begin, end = max(want.offset, self.begin), min(want.end, self.end)
            want.receive(begin, scratch[begin - self.begin : end - self.begin])


def plan_spans(wants: Iterable[AnyWant], *, file_nbytes: Callable[[str], int], align: int, cost: ReadCost) -> list[Span]:
    """Turns wants into spans that begin and end on multiples of `align` (or at the file's end) and do not overlap.

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
    by_file: dict[str, list[AnyWant]] = {}
    for want in wants:
        if want.nbytes:
            by_file.setdefault(want.file, []).append(_flat(want))
    spans: list[Span] = []
    for file, listed in by_file.items():
        nbytes = file_nbytes(file)
        listed.sort(key=lambda w: (w.offset, w.end))
        if listed[0].offset < 0 or any(w.end > nbytes for w in listed):
            bad = next(w for w in listed if w.offset < 0 or w.end > nbytes)
            raise IntegrityError(f"bytes {bad.offset} to {bad.end} are wanted of {file}, which has {nbytes}", file=file)
        for together in _merge(listed, align, cost):
            spans.extend(_split(file, together, nbytes, align, cost))
    return spans


def spread_spans(spans: Sequence[Span], *, align: int, cost: ReadCost) -> list[Span]:
    """Cuts the spans of a short load so that each request that may be under way has a part of it: a connection gives so much and no more.

    Cut is what goes into callers' own memory, of each tensor one piece, into requests of about the load's length over the concurrency:
    8 MiB at most, `least_nbytes` at least. What is to be handed over stays as it is (a piece of that across two requests is copied once
    more), and so do the many pieces of one tensor: for columns the number of requests is promised.

    Args:
        spans: Of one load, from `plan_spans`.
        align: As there.
        cost: As there.
    """
    if not cost.least_nbytes:
        return list(spans)
    total = sum(span.nbytes for span in spans)
    piece = max(cost.least_nbytes, min(total // cost.concurrency, cost.span_nbytes // 2))
    made: list[Span] = []
    for span in spans:
        count = min(round(span.nbytes / piece), -(-span.nbytes // align))
        if count < 2 or not _in_one_piece(span.wants):
            made.append(span)
        else:
            made.extend(_cut(span.file, span.wants, span.begin, span.end, span.end, align, count))
    return made


def _in_one_piece(wants: Sequence[AnyWant]) -> bool:
    return len({want.group for want in wants}) == len(wants) and not any(isinstance(want, Handover) for want in wants)


def _flat(want: AnyWant) -> AnyWant:
    if isinstance(want, Handover) or (want.buffer.format == "B" and want.buffer.ndim == 1):
        return want
    return Want(want.file, want.offset, want.buffer.cast("B"), want.group)


def _merge(wants: Sequence[AnyWant], align: int, cost: ReadCost) -> Iterator[list[AnyWant]]:
    """Wants, sorted by offset, in lists between which the gap is worth a request of its own."""
    pitches = _Pitches(wants, cost) if cost.pitch_nbytes else None
    made: list[AnyWant] = []
    end = 0
    for want in wants:
        begin = want.offset - want.offset % align
        if made and begin > end + cost.gap_nbytes and (pitches is None or pitches.may_begin(want)):
            yield made
            made, end = [], 0
        made.append(want)
        end = max(end, -(-want.end // align) * align)
        if pitches is not None:
            pitches.add(want, begins=len(made) == 1)
    if made:
        yield made


@dataclass(slots=True)
class _Pitch:
    first: int
    end: int
    requests: int = 0
    """Made for the group so far, the last one left out."""
    begin: int = 0
    """Where the last one begins, and `last` where it ends."""
    last: int = 0


class _Pitches:
    """Counts the requests for each group, and says whether a further one is within its limit.

    With a limit of n for a range, its k-th request may begin only behind (k - 1) / n of it: so there are never more than n.
    """

    def __init__(self, wants: Sequence[AnyWant], cost: ReadCost) -> None:
        self._cost = cost
        self._groups: dict[str, _Pitch] = {}
        for want in wants:
            if want.group:
                found = self._groups.setdefault(want.group, _Pitch(first=want.offset, end=want.end))
                found.end = max(found.end, want.end)

    def may_begin(self, want: AnyWant) -> bool:
        group = self._groups.get(want.group)
        if group is None or not group.last:
            return True
        length = group.end - group.first
        limit = max(1, length // self._cost.pitch_nbytes)
        made = group.requests + _pieces(group.last - group.begin, self._cost)
        return (want.offset - group.first) * limit >= made * length

    def add(self, want: AnyWant, *, begins: bool) -> None:
        group = self._groups.get(want.group)
        if group is None:
            return
        if begins and group.last:
            group.requests += _pieces(group.last - group.begin, self._cost)
        if begins or not group.last:
            group.begin = want.offset
        group.last = max(group.last, want.end)


def _pieces(nbytes: int, cost: ReadCost) -> int:
    """How many requests a range without wide gaps is read in."""
    return max(1, nbytes // (cost.span_nbytes // 2))


def _split(file: str, wants: Sequence[AnyWant], nbytes: int, align: int, cost: ReadCost) -> Iterator[Span]:
    first, last = wants[0].offset, max(w.end for w in wants)
    begin, end = first - first % align, min(-(-last // align) * align, nbytes)
    count = min(_pieces(last - first, cost), -(-(end - begin) // align))
    yield from _cut(file, wants, begin, end, nbytes, align, count, grid=cost.span_nbytes // 2)


def _cut(
    file: str, wants: Sequence[AnyWant], begin: int, end: int, nbytes: int, align: int, count: int, *, grid: int = 0
) -> Iterator[Span]:
    """``[begin, end)`` in `count` spans of whole blocks. `wants` by offset; `nbytes`: where no span goes beyond.

    Spans are about equally long; with a `grid` they end at the nearest multiples of that, if that's possible: none is shorter than it.
    """
    blocks = -(-(end - begin) // align)
    edges = [min(begin + -(-blocks * number // count) * align, end) for number in range(count + 1)]
    if grid and grid % align == 0 and all(after - before >= grid for before, after in pairwise(edges[:-1])):
        edges[1:-1] = [(edge + grid // 2) // grid * grid for edge in edges[1:-1]]
    active: list[AnyWant] = []
    following = 0
    for start, limit in pairwise(edges):
        active = [w for w in active if w.end > start]
        while following < len(wants) and wants[following].offset < limit:
            active.append(wants[following])
            following += 1
        if active:  # what is not wanted at the edges is not read
            low = max(start, min(w.offset for w in active))
            high = min(limit, max(w.end for w in active))
            yield Span(file=file, begin=low - low % align, end=min(-(-high // align) * align, nbytes), wants=tuple(active))
