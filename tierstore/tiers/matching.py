"""Equal blocks of two checkpoints' files, by their digests alone. Pure, and vectorised: a terabyte has a million blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.format.digest import DIGEST_NBYTES
from tierstore.format.index import FileEntry

__all__ = ["MOST_BLOCKS", "BlockTable", "Match", "is_worth_it", "match_blocks"]

MOST_BLOCKS = 1 << 18
"""Of a checkpoint with more blocks only those at the same place of the same file are compared: 256 GiB in blocks of 1 MiB."""

_LEAST_NBYTES = 4 << 20
_LEAST_SHARE = 0.05
_WORDS = DIGEST_NBYTES // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Bytes ``[begin, end)`` of a file that are those of the earlier checkpoint's file `name` from `source` on; whole blocks."""

    begin: int
    end: int
    name: str
    source: int


class BlockTable:
    """The blocks of an earlier checkpoint's files: by place, and, unless they are too many, by digest.

    Args:
        files: Its files, or those of them that are known.
        block_nbytes: What is hashed as one, in bytes.
    """

    def __init__(self, files: Sequence[FileEntry], block_nbytes: int) -> None:
        self.block_nbytes = block_nbytes
        self.files: Mapping[str, FileEntry] = {file.name: file for file in files}
        self.nbytes = sum(len(file.block_digests) for file in files)
        self._sorted: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64]] | None = None

    def digests(self, name: str) -> npt.NDArray[np.uint64]:
        """The digests of a file's blocks, a row of four words each; none of a file that it does not have."""
        file = self.files.get(name)
        return _rows(file.block_digests) if file is not None else _rows(b"")

    def find(self, wanted: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Where each digest stands among all blocks, the files in their order; -1: nowhere."""
        if self.nbytes > MOST_BLOCKS * DIGEST_NBYTES or not self.nbytes:
            return np.full(len(wanted), -1, dtype=np.int64)
        if self._sorted is None:
            rows = _rows(b"".join(file.block_digests for file in self.files.values()))
            order = np.argsort(rows[:, 0], kind="stable")
            self._sorted = rows, rows[order, 0], order
        rows, keys, order = self._sorted
        at = np.minimum(np.searchsorted(keys, wanted[:, 0]), len(keys) - 1)
        # Of blocks whose first words are the same one is looked at: that they are not the same block all the same won't happen.
        found = order[at]
        return np.where((rows[found] == wanted).all(axis=1), found, -1)

    def starts(self) -> npt.NDArray[np.int64]:
        """The numbers at which files begin, the first one's first."""
        counts = [len(file.block_digests) // DIGEST_NBYTES for file in self.files.values()]
        return np.cumsum([0, *counts[:-1]], dtype=np.int64)


def match_blocks(file: FileEntry, base: BlockTable) -> list[Match]:
    """The blocks of `file` that the earlier checkpoint has, neighbours as one; first at the same place of the same file, then anywhere."""
    wanted = _rows(file.block_digests)
    if not len(wanted):
        return []
    names = tuple(base.files)
    numbers = np.full(len(wanted), -1, dtype=np.int64)
    starts = base.starts()
    same = base.digests(file.name)[: len(wanted)]
    if len(same):
        equal = (same == wanted[: len(same)]).all(axis=1)
        numbers[: len(same)] = np.where(equal, starts[names.index(file.name)] + np.arange(len(same)), -1)
    left = np.flatnonzero(numbers < 0)
    if len(left):
        numbers[left] = base.find(wanted[left])
    return _joined(file, numbers, base, names, starts)


def is_worth_it(nbytes: int, file_nbytes: int) -> bool:
    """Whether a file of `file_nbytes` bytes is to refer to another one for `nbytes` of them: that keeps the other from going."""
    return nbytes >= min(_LEAST_NBYTES, _LEAST_SHARE * file_nbytes)


def _joined(
    file: FileEntry, numbers: npt.NDArray[np.int64], base: BlockTable, names: Sequence[str], starts: npt.NDArray[np.int64]
) -> list[Match]:
    which = np.where(numbers >= 0, np.searchsorted(starts, numbers, side="right") - 1, -1)
    follows = (np.diff(numbers) == 1) & (np.diff(which) == 0) & (numbers[1:] > 0)
    heads = np.concatenate([[0], np.flatnonzero(~follows) + 1]).astype(np.int64)
    tails = np.concatenate([heads[1:], [len(numbers)]]).astype(np.int64)
    block = base.block_nbytes
    found = []
    for head, tail in zip(heads.tolist(), tails.tolist(), strict=True):
        if numbers[head] < 0:
            continue
        name, source = names[which[head]], int(numbers[head] - starts[which[head]]) * block
        end = min(tail * block, file.nbytes)
        end = min(end, head * block + base.files[name].nbytes - source)  # as long as the source has: equal digests say so
        found.append(Match(begin=head * block, end=end, name=name, source=source))
    return found


def _rows(digests: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(digests, dtype=np.uint64).reshape(-1, _WORDS)
