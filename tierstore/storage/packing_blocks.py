"""One block of a raw shard, encoded: what is taken from elsewhere, what is quantised, the frame of the rest. Blocking; runs in threads."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tierstore.format.digest import BLOCK_NBYTES
from tierstore.format.packed.frame import FrameEncoder, is_lossy
from tierstore.format.packed.layout import holes_of, pieces_of
from tierstore.format.packed.rounding import is_rounding
from tierstore.format.packed.types import Piece, Run, Stretch
from tierstore.format.quantise import decode_moment
from tierstore.storage.contract import Unchanged
from tierstore.storage.packing_extras import Extra, covering
from tierstore.storage.packing_masters import Master
from tierstore.storage.packing_moments import Measured, Moments, zero_mask

__all__ = ["BlockEncoder", "EncodedBlock", "join_runs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBlock:
    """One block, encoded.

    Attributes:
        frame: What is stored.
        runs: What is not.
        lossy: SHA-256 of the frame where it is not exact; else empty.
        differs: 16-bit tensors that are not their master's rounding here.
        measured: How far off quantised tensors are here.
    """

    frame: bytes
    runs: tuple[Run, ...] = ()
    lossy: bytes = b""
    differs: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()


class BlockEncoder:
    """What is done with every block of one file; used by several threads at once.

    Args:
        nbytes: Length of the raw file, in bytes.
        stretches: Of the file.
        encoder: Of frames.
        moments: What is quantised.
        masters: Of 16-bit tensors, by name.
        unchanged: What lies in other files already; sorted, without overlaps.
        files: The paths of these, as the footer numbers them: path → number.
    """

    def __init__(
        self,
        nbytes: int,
        stretches: Sequence[Stretch],
        encoder: FrameEncoder,
        moments: Moments,
        masters: Mapping[str, Master],
        unchanged: Sequence[Unchanged],
        files: Mapping[str, int],
    ) -> None:
        self._nbytes = nbytes
        self._stretches = stretches
        self._encoder = encoder
        self._moments = moments
        self._masters = masters
        self._unchanged = unchanged
        self._unchanged_ends = [one.end for one in unchanged]
        self._files = files

    @property
    def masters(self) -> Collection[str]:
        """The 16-bit tensors that have a master."""
        return self._masters.keys()

    def extent(self, number: int) -> tuple[int, int]:
        """Begin and end of a block in the raw file."""
        return number * BLOCK_NBYTES, min((number + 1) * BLOCK_NBYTES, self._nbytes)

    def needs(self, begin: int, end: int, given_up: Collection[str]) -> list[tuple[int, int]]:
        """Which other ranges of the file have to be known to encode the blocks in ``[begin, end)``."""
        found = []
        copied = holes_of(self._copied(begin, end), begin, end)
        for stretch in self._within(begin, end):
            if not stretch.name:
                continue
            first, last = max(begin, stretch.begin), min(end, stretch.end)
            if any(low <= first and last <= high for low, high in copied):
                continue
            master = self._masters.get(stretch.name)
            if master is not None and stretch.name not in given_up:
                origin = master.stretch.begin + 2 * (first - stretch.begin)
                found.append((origin, origin + 2 * (last - first)))
            elif (second := self._moments.needs(stretch, first, last)) is not None:
                found.append(second)
        return found

    def encode(self, number: int, block: memoryview, extras: Sequence[Extra], given_up: Collection[str]) -> EncodedBlock:
        """Encodes one block.

        Args:
            number: The block.
            block: Its bytes.
            extras: What `needs` asked for.
            given_up: 16-bit tensors that are stored whatever they are.
        """
        begin, end = self.extent(number)
        runs = list(self._copied(begin, end))
        differs: list[str] = []
        # A block that is not exact is proved by its own frame alone: nothing in it may come from another one.
        lossy = any(stretch.name in self._moments.names for stretch in self._within(begin, end))
        for stretch in () if lossy else self._within(begin, end):
            master = self._masters.get(stretch.name) if stretch.name and stretch.name not in given_up else None
            if master is not None:
                found, same = self._rounded(stretch, master, begin, end, block, extras, runs)
                runs = join_runs(sorted([*runs, *found], key=lambda run: run.begin))
                if not same:
                    differs.append(stretch.name)
        return self._finish(number, block, tuple(runs), tuple(differs), extras, measure=True)

    def encode_again(self, number: int, block: memoryview, runs: Sequence[Run], extras: Sequence[Extra]) -> bytes:
        """The frame of a block whose runs are known."""
        return self._finish(number, block, tuple(runs), (), extras, measure=False).frame

    def _copied(self, begin: int, end: int) -> Iterator[Run]:
        for at in range(bisect_right(self._unchanged_ends, begin), len(self._unchanged)):
            one = self._unchanged[at]
            if one.begin >= end:
                return
            first, last = max(begin, one.begin), min(end, one.end)
            yield Run(begin=first, end=last, kind="copy", file=self._files[one.path], source=one.source + first - one.begin)

    def _within(self, begin: int, end: int) -> Iterator[Stretch]:
        for at in range(bisect_right(self._stretches, begin, key=lambda stretch: stretch.end), len(self._stretches)):
            if self._stretches[at].begin >= end:
                return
            yield self._stretches[at]

    def _rounded(
        self, stretch: Stretch, master: Master, begin: int, end: int, block: memoryview, extras: Sequence[Extra], runs: Sequence[Run]
    ) -> tuple[list[Run], bool]:
        """Runs of what is the master's rounding in this block, and whether all of it is."""
        found = []
        same = True
        for piece, _ in pieces_of((stretch,), max(begin, stretch.begin), min(end, stretch.end), holes_of(runs, begin, end)):
            first = max(begin, stretch.begin) + piece.begin
            last = first + piece.end - piece.begin
            source = master.stretch.begin + 2 * (first - stretch.begin)
            numbers = covering(extras, source, source + 2 * (last - first))
            if piece.itemsize == 2 and numbers is not None and is_rounding(numbers, block[first - begin : last - begin], master.kind):
                found.append(Run(begin=first, end=last, kind=master.kind, file=0, source=source))
            else:
                same = False
        return found, same

    def _finish(
        self, number: int, block: memoryview, runs: tuple[Run, ...], differs: tuple[str, ...], extras: Sequence[Extra], *, measure: bool
    ) -> EncodedBlock:
        begin, end = self.extent(number)
        holes = holes_of(runs, begin, end)
        pieces: list[Piece] = []
        zeros = {}
        coded: dict[int, bytes] = {}
        quantised: list[tuple[int, Piece, Stretch]] = []
        for piece, stretch in pieces_of(self._stretches, begin, end, holes):
            how = self._moments.quantised(piece, stretch, begin)
            if how is not None:
                zero = zero_mask(self._moments.second_of(piece, stretch, begin, extras)) if how.kind == "first" else None
                if zero is not None:
                    zeros[len(pieces)] = zero
                before = self._moments.coded(piece, stretch, begin) if how.kind == "second" else None
                if before is not None:
                    coded[len(pieces)] = before
                piece = replace(piece, quantised=how)
                quantised.append((len(pieces), piece, stretch))
            pieces.append(piece)
        frame = self._encoder.encode(block, pieces, zeros, coded)
        if not quantised or not measure or not is_lossy(frame):
            return EncodedBlock(frame=frame, runs=runs, differs=differs)
        measured = [self._measured(piece, stretch, begin, block, coded.get(place), extras) for place, piece, stretch in quantised]
        return EncodedBlock(
            frame=frame, runs=runs, differs=differs, lossy=hashlib.sha256(frame).digest(), measured=tuple(one for one in measured if one)
        )

    def _measured(
        self, piece: Piece, stretch: Stretch, begin: int, block: memoryview, coded: bytes | None, extras: Sequence[Extra]
    ) -> Measured | None:
        how = piece.quantised
        assert how is not None
        if how.kind == "second":
            return Measured(name=stretch.name)
        exact = np.frombuffer(block[piece.begin : piece.end], dtype="<f4")
        if not np.isfinite(exact).all():
            return None  # stored as it is
        made = exact if coded is None else decode_moment(coded, exact.size, how)
        return Measured(name=stretch.name, error=self._moments.measure(piece, stretch, begin, exact, made, extras))


def join_runs(runs: Sequence[Run]) -> list[Run]:
    """Joins runs that go on where another one ends, there and here."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        factor = 1 if run.kind == "copy" else 2
        if (
            last is not None
            and (last.end, last.kind, last.file) == (run.begin, run.kind, run.file)
            and last.source + factor * (last.end - last.begin) == run.source
        ):
            joined[-1] = replace(last, end=run.end)
        else:
            joined.append(run)
    return joined
