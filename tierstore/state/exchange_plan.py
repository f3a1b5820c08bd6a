"""Who reads what for whom: every rank computes the same plan from what all ranks told. Pure.

Each rank tells which blocks of which files its reads need, and which files lie on its own node. A block that a rank has on its node it
reads there. Of the others, blocks that several ranks ask for are read once, by a rank that has the file on its node, else by one of
those that ask, balanced by bytes; short pieces between such blocks go with them, so that interleaved columns become long requests. What
only one rank asks for stays out of the plan: it reads that by itself. (The dynamic loading of PaddleNLP's Unified Checkpoint,
arXiv:2408.04275, sends whole tensors by such tables; here they are blocks, so that slices and other layouts profit too.)

Rounds bound the memory. Units are taken in the order of files and offsets; each goes into the earliest round that none of its ranks has
passed and where its bytes fit into the memory of all of them. So every rank meets its units in order of files and offsets, ranks without
common units do not wait for each other, and who works round by round can't deadlock.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.errors import FormatError

__all__ = ["Message", "Needs", "Plan", "Unit", "decode_needs", "encode_needs", "merge_ranges", "plan_exchange"]

Ints = npt.NDArray[np.int64]

UNIT_NBYTES = 8 << 20
"""What one rank reads in a row, in bytes: a full request of a remote storage."""

SMALL_NBYTES = UNIT_NBYTES // 4
"""A piece that only one rank asks for, next to others: shorter ones go with their neighbours, for a request of its own costs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What one rank tells.

    Attributes:
        checkpoint: Which one it opened: all ranks must have opened the same.
        machine: Names the machine that it runs on.
        budget_nbytes: Memory that it may use for bytes on their way, in bytes.
        ranges: File number, first block, one past the last block; shape (n, 3), sorted, neither overlapping nor touching.
        on_node: Per file, whether this rank's node has it for itself.
        local: Per file, whether it lies on a local file system (which other nodes may share).
    """

    checkpoint: str
    machine: str
    budget_nbytes: int
    ranges: Ints
    on_node: npt.NDArray[np.bool_]
    local: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Unit:
    """The blocks ``[first, last)`` of the file with the number `file`."""

    file: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one rank reads and sends to all of `receivers` in one round: the bytes of `units`, one after the other.

    `number` is the same on all ranks and unlike that of any other message. Where the reader wants the units too, `kept` says so.
    """

    number: int
    round: int
    reader: int
    receivers: tuple[int, ...]
    kept: bool
    units: tuple[Unit, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One rank's part of the plan.

    Attributes:
        members: The ranks among which messages may pass, this one included, ascending; empty where this rank has no part.
        messages: Those that this rank sends or receives, by round, then number.
        slowest_nbytes: Bytes that the rank that moves most of all reads and receives.
    """

    members: tuple[int, ...]
    messages: tuple[Message, ...]
    slowest_nbytes: int


def encode_needs(needs: Needs) -> bytes:
    """As bytes to send; `decode_needs` turns them back."""
    facts = {"checkpoint": needs.checkpoint, "machine": needs.machine, "budget": needs.budget_nbytes, "files": len(needs.on_node)}
    columns = [
        np.ascontiguousarray(needs.ranges.T, dtype="<i8").tobytes(),
        np.packbits(needs.on_node).tobytes(),
        np.packbits(needs.local).tobytes(),
    ]
    return json.dumps(facts).encode() + b"\n" + zlib.compress(b"".join(columns), 1)


def decode_needs(data: bytes) -> Needs:
    """Raises FormatError where `data` is not what `encode_needs` makes."""
    head, _, body = data.partition(b"\n")
    try:
        facts = json.loads(head)
        columns = zlib.decompress(body)
        files = int(facts["files"])
        bits = -(-files // 8)
        split = len(columns) - 2 * bits
        ranges = np.frombuffer(columns[:split], dtype="<i8").reshape(3, -1).T.astype(np.int64)
        flags = np.frombuffer(columns[split:], dtype=np.uint8).reshape(2, bits)
        on_node, local = (np.unpackbits(row, count=files).astype(bool) for row in flags)
        return Needs(
            checkpoint=str(facts["checkpoint"]),
            machine=str(facts["machine"]),
            budget_nbytes=int(facts["budget"]),
            ranges=ranges,
            on_node=on_node,
            local=local,
        )
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise FormatError(f"another rank's list of reads can't be read: {error}", hint="all ranks run the same tierstore") from error


def merge_ranges(files: Ints, firsts: Ints, lasts: Ints) -> Ints:
    """The union of block ranges, sorted, neither overlapping nor touching; shape (n, 3): file, first, one past the last."""
    if not len(files):
        return np.empty((0, 3), dtype=np.int64)
    stride = int(lasts.max()) + 1
    begins, ends = files * stride + firsts, files * stride + lasts
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    heads = np.flatnonzero(np.concatenate([[True], begins[1:] > ends[:-1]]))
    tails = np.concatenate([heads[1:] - 1, [len(begins) - 1]])
    file = begins[heads] // stride
    return np.stack([file, begins[heads] - file * stride, ends[tails] - file * stride], axis=1)


def plan_exchange(needs: Sequence[Needs], *, rank: int, file_nbytes: Ints, block_nbytes: int) -> Plan:
    """Plans the exchange of one load; all ranks get the same messages, each those that it has a part in.

    Args:
        needs: What each rank told, by rank.
        rank: Whose part is returned.
        file_nbytes: Length of each file, in bytes.
        block_nbytes: Bytes per block.
    """
    near = _near(needs)
    pieces = _pieces(needs, near, file_nbytes, block_nbytes)
    budget = max(1, min(n.budget_nbytes for n in needs) // 2)  # half: while one round is sent the next is read
    planned = _Planned(len(needs), pieces, near, rank, budget, max(1, min(UNIT_NBYTES, budget // 2) // block_nbytes))
    return planned.plan(file_nbytes, block_nbytes)


def _near(needs: Sequence[Needs]) -> npt.NDArray[np.bool_]:
    """Which files each rank reads for itself without going far, (ranks, files). On one machine its page cache is the best exchange."""
    alone = len({n.machine for n in needs}) == 1
    return np.stack([n.on_node | n.local if alone else n.on_node for n in needs])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pieces:
    """What is exchanged, before it is cut: `askers[sets[i]]` ask for, and `wanters[sets[i]]` need, the blocks ``[first, last)`` of a file.

    `loads`: bytes that each rank reads alone.
    """

    files: Ints
    firsts: Ints
    lasts: Ints
    sets: Ints
    askers: list[Ints]
    wanters: list[frozenset[int]]
    loads: Ints


def _pieces(needs: Sequence[Needs], near: npt.NDArray[np.bool_], file_nbytes: Ints, block_nbytes: int) -> _Pieces:
    """Cuts the union of all ranges where the set of those who want a block changes; keeps what is to be exchanged."""
    counts = [len(n.ranges) for n in needs]
    ranges = np.concatenate([n.ranges for n in needs]) if needs else np.empty((0, 3), dtype=np.int64)
    ranks = np.repeat(np.arange(len(needs)), counts)
    stride = (int(ranges[:, 2].max()) if len(ranges) else 0) + 1
    begins, ends = ranges[:, 0] * stride + ranges[:, 1], ranges[:, 0] * stride + ranges[:, 2]
    cuts = np.unique(np.concatenate([begins, ends]))
    first, last = np.searchsorted(cuts, begins), np.searchsorted(cuts, ends)
    # One row for each interval between cuts and each rank that wants it.
    spans = last - first
    rows = np.repeat(first - np.concatenate([[0], np.cumsum(spans)[:-1]]), spans) + np.arange(int(spans.sum()))
    owners = np.repeat(ranks, spans)
    order = np.lexsort((owners, rows))
    rows, owners = rows[order], owners[order]
    files = cuts[rows] // stride
    asks: npt.NDArray[np.bool_] = np.logical_not(near[owners, files])
    nbytes = np.minimum((cuts[rows + 1] - files * stride) * block_nbytes, file_nbytes[files]) - (cuts[rows] - files * stride) * block_nbytes
    loads = np.bincount(owners, weights=nbytes, minlength=len(needs)).astype(np.int64)

    wanted, at, many = np.unique(rows, return_index=True, return_counts=True)
    asking = np.add.reduceat(asks, at, dtype=np.int64) if len(at) else np.empty(0, dtype=np.int64)
    file, begin, end = files[at], cuts[wanted], cuts[wanted + 1]
    held = near.any(axis=0)[file] if len(at) else np.empty(0, dtype=bool)
    beside = np.zeros(len(at), dtype=bool)  # a neighbour begins where it ends, or ends where it begins
    touch = (end[:-1] == begin[1:]) & (file[:-1] == file[1:])
    beside[:-1] |= touch
    beside[1:] |= touch
    small = (end - begin) * block_nbytes < SMALL_NBYTES
    keep = np.flatnonzero((asking > 1) | ((asking == 1) & (held | (small & beside))))
    interned: dict[bytes, int] = {}
    askers: list[Ints] = []
    wanters: list[frozenset[int]] = []
    sets = np.empty(len(keep), dtype=np.int64)
    for i, row in enumerate(keep.tolist()):
        group = slice(int(at[row]), int(at[row] + many[row]))
        who = owners[group] * 2 + asks[group]  # who wants it, and who of them asks
        key = who.tobytes()
        number = interned.setdefault(key, len(askers))
        if number == len(askers):
            askers.append(owners[group][asks[group]])
            wanters.append(frozenset(owners[group].tolist()))
        sets[i] = number
        loads[owners[group][asks[group]]] -= nbytes[int(at[row])]  # whoever reads it in the end, it is counted then
    return _Pieces(
        files=file[keep],
        firsts=begin[keep] - file[keep] * stride,
        lasts=end[keep] - file[keep] * stride,
        sets=sets,
        askers=askers,
        wanters=wanters,
        loads=loads,
    )


class _Planned:
    def __init__(self, ranks: int, pieces: _Pieces, near: npt.NDArray[np.bool_], rank: int, budget: int, unit_blocks: int) -> None:
        self.pieces, self.near, self.rank, self.budget, self.unit_blocks = pieces, near, rank, budget, unit_blocks
        self.loads = pieces.loads.copy()
        self.rounds = np.zeros(ranks, dtype=np.int64)
        self.used = np.zeros(ranks, dtype=np.int64)
        self.moved = np.zeros(ranks, dtype=np.int64)
        self.holders = {file: np.flatnonzero(near[:, file]) for file in np.unique(pieces.files).tolist()}

    def plan(self, file_nbytes: Ints, block_nbytes: int) -> Plan:
        gathered: dict[tuple[int, int, int], list[tuple[Unit, int]]] = {}
        for run in self._runs(file_nbytes, block_nbytes):
            reader = self._reader(run[0][0].file, {set_number for _, set_number, _ in run})
            for unit, set_number, nbytes in run:
                taking = np.union1d(self.pieces.askers[set_number], [reader])
                turn = self._turn(taking, nbytes)
                self.loads[reader] += nbytes
                self.moved[taking] += nbytes
                gathered.setdefault((turn, reader, set_number), []).append((unit, nbytes))
        return self._part(gathered)

    def _runs(self, file_nbytes: Ints, block_nbytes: int) -> Iterator[list[tuple[Unit, int, int]]]:
        """Units (with the number of their set, and their bytes) that follow upon each other, as many as one rank reads in a row."""
        run: list[tuple[Unit, int, int]] = []
        pieces, most, length = self.pieces, self.unit_blocks, 0
        rows = zip(pieces.files.tolist(), pieces.firsts.tolist(), pieces.lasts.tolist(), pieces.sets.tolist(), strict=True)
        for file, first, last, set_number in rows:
            for at in range(first, last, most):
                unit = Unit(file, at, min(at + most, last))
                follows = bool(run) and (run[-1][0].file, run[-1][0].last) == (file, at)
                if run and (not follows or length + unit.last - at > most):
                    yield run
                    run, length = [], 0
                run.append((unit, set_number, min(unit.last * block_nbytes, int(file_nbytes[file])) - at * block_nbytes))
                length += unit.last - at
        if run:
            yield run

    def _reader(self, file: int, sets: set[int]) -> int:
        """Of those who have the file on their node, one that wants it anyway; else of those who ask: the one with the least to read."""
        able = self.holders[file]
        if len(able):
            wanters = frozenset[int]().union(*(self.pieces.wanters[number] for number in sets))
            also = [rank for rank in able.tolist() if rank in wanters]
            able = np.array(also, dtype=np.int64) if also else able
        else:
            able = np.unique(np.concatenate([self.pieces.askers[number] for number in sets]))
        return int(able[np.argmin(self.loads[able])])

    def _turn(self, taking: Ints, nbytes: int) -> int:
        turn = int(self.rounds[taking].max())
        used = self.used[taking[self.rounds[taking] == turn]]
        if bool(((used > 0) & (used + nbytes > self.budget)).any()):
            turn += 1
        fresh = taking[self.rounds[taking] < turn]
        self.rounds[fresh], self.used[fresh] = turn, 0
        self.used[taking] += nbytes
        return turn

    def _part(self, gathered: dict[tuple[int, int, int], list[tuple[Unit, int]]]) -> Plan:
        messages: list[Message] = []
        together = list(range(len(self.loads)))  # union-find: which ranks are linked by messages
        for number, ((turn, reader, set_number), listed) in enumerate(sorted(gathered.items(), key=lambda item: item[0])):
            receivers = tuple(r for r in self.pieces.askers[set_number].tolist() if r != reader)
            for receiver in receivers:
                together[_root(together, receiver)] = _root(together, reader)
            if self.rank == reader or self.rank in receivers:
                messages.append(
                    Message(
                        number=number,
                        round=turn,
                        reader=reader,
                        receivers=receivers,
                        kept=reader in self.pieces.wanters[set_number],
                        units=tuple(unit for unit, _ in listed),
                        nbytes=sum(nbytes for _, nbytes in listed),
                    )
                )
        mine = _root(together, self.rank)
        members = tuple(rank for rank in range(len(together)) if _root(together, rank) == mine)
        return Plan(
            members=members if len(members) > 1 else (),
            messages=tuple(messages),
            slowest_nbytes=int((self.loads + self.moved).max()) if len(self.loads) else 0,
        )


def _root(parents: list[int], at: int) -> int:
    while parents[at] != at:
        parents[at] = parents[parents[at]]
        at = parents[at]
    return at
