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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    `number` is the same at both ends, and unlike that of any other message between the two that may be under way at the same time. Where
    the reader wants the units too, `kept` says so.
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
        messages: Those that this rank sends or receives, by round; the same order on all ranks.
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
    # A third: what is sent, what is received, and what is read meanwhile for the next round.
    budget = max(1, min(n.budget_nbytes for n in needs) // 3)
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
    askers: list[list[int]]
    asked: list[frozenset[int]]
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
    asks: npt.NDArray[np.bool_] = ~near[owners, files]
    nbytes = np.minimum((cuts[rows + 1] - files * stride) * block_nbytes, file_nbytes[files]) - (cuts[rows] - files * stride) * block_nbytes
    loads = np.bincount(owners, weights=nbytes, minlength=len(needs)).astype(np.int64)

    wanted, at, many = np.unique(rows, return_index=True, return_counts=True)
    asking = np.add.reduceat(asks, at, dtype=np.int64) if len(at) else np.empty(0, dtype=np.int64)
    file, begin, end = files[at], cuts[wanted], cuts[wanted + 1]
    held = np.asarray(near.any(axis=0))[file]
    beside = np.zeros(len(at), dtype=bool)  # a neighbour begins where it ends, or ends where it begins
    touch = (end[:-1] == begin[1:]) & (file[:-1] == file[1:])
    beside[:-1] |= touch
    beside[1:] |= touch
    small = (end - begin) * block_nbytes < SMALL_NBYTES
    keep = np.flatnonzero((asking > 1) | ((asking == 1) & (held | (small & beside))))
    who = owners * 2 + asks  # who wants it, and who of them asks
    interned: dict[bytes, int] = {}
    askers: list[list[int]] = []
    wanters: list[frozenset[int]] = []
    sets = np.empty(len(keep), dtype=np.int64)
    for i, row in enumerate(keep.tolist()):
        group = slice(int(at[row]), int(at[row] + many[row]))
        key = who[group].tobytes()
        number = interned.setdefault(key, len(askers))
        if number == len(askers):
            askers.append(owners[group][asks[group]].tolist())
            wanters.append(frozenset(owners[group].tolist()))
        sets[i] = number
    # Whoever reads in the end what is exchanged, it is counted then.
    exchanged = np.repeat(np.isin(np.arange(len(at)), keep), many) & asks
    loads -= np.bincount(owners[exchanged], weights=nbytes[exchanged], minlength=len(needs)).astype(np.int64)
    return _Pieces(
        files=file[keep],
        firsts=begin[keep] - file[keep] * stride,
        lasts=end[keep] - file[keep] * stride,
        sets=sets,
        askers=askers,
        asked=[frozenset(ranks) for ranks in askers],
        wanters=wanters,
        loads=loads,
    )


_Row = tuple[int, int, int, int, int]
"""File, first block, one past the last, the number of its set, bytes: a unit before it is this rank's."""


class _Planned:
    def __init__(self, ranks: int, pieces: _Pieces, near: npt.NDArray[np.bool_], rank: int, budget: int, unit_blocks: int) -> None:
        self.pieces, self.rank, self.budget, self.unit_blocks = pieces, rank, budget, unit_blocks
        self.loads: list[int] = pieces.loads.tolist()
        self.rounds, self.used, self.moved = (np.zeros(ranks, dtype=np.int64) for _ in range(3))
        self.able: dict[tuple[int, frozenset[int]], list[int]] = {}
        self.taking: dict[tuple[int, int], Ints] = {}
        self.holders: dict[int, list[int]] = {file: np.flatnonzero(near[:, file]).tolist() for file in np.unique(pieces.files).tolist()}

    def plan(self, file_nbytes: Ints, block_nbytes: int) -> Plan:
        mine: dict[tuple[int, int, int], list[_Row]] = {}
        links: set[tuple[int, int]] = set()
        for run in self._runs(file_nbytes, block_nbytes):
            reader = self._reader(run[0][0], frozenset(row[3] for row in run))
            self.loads[reader] += sum(row[4] for row in run)
            turn = self._turn(*self._shares(reader, run))
            for row in run:
                links.add((reader, row[3]))
                if reader == self.rank or self.rank in self.pieces.asked[row[3]]:
                    mine.setdefault((turn, reader, row[3]), []).append(row)
        return self._part(mine, links)

    def _runs(self, file_nbytes: Ints, block_nbytes: int) -> Iterator[list[_Row]]:
        """Units that follow upon each other, as many as one rank reads in a row."""
        pieces, most = self.pieces, self.unit_blocks
        run: list[_Row] = []
        length = 0
        rows = zip(pieces.files.tolist(), pieces.firsts.tolist(), pieces.lasts.tolist(), pieces.sets.tolist(), strict=True)
        sizes: list[int] = file_nbytes.tolist()
        for file, first, last, set_number in rows:
            for at in range(first, last, most):
                end = min(at + most, last)
                if run and (length + end - at > most or run[-1][0] != file or run[-1][2] != at):
                    yield run
                    run, length = [], 0
                run.append((file, at, end, set_number, min(end * block_nbytes, sizes[file]) - at * block_nbytes))
                length += end - at
        if run:
            yield run

    def _shares(self, reader: int, run: Sequence[_Row]) -> tuple[Ints, Ints | int]:
        """The ranks whose memory a run passes through, and how many bytes of it."""
        if len(run) == 1:
            key = (reader, run[0][3])
            found = self.taking.get(key)
            if found is None:
                found = self.taking[key] = np.array(sorted({reader, *self.pieces.askers[key[1]]}), dtype=np.int64)
            return found, run[0][4]
        shares = {reader: sum(row[4] for row in run)}
        for row in run:
            for asker in self.pieces.askers[row[3]]:
                if asker != reader:
                    shares[asker] = shares.get(asker, 0) + row[4]
        return np.array(list(shares), dtype=np.int64), np.array(list(shares.values()), dtype=np.int64)

    def _reader(self, file: int, sets: frozenset[int]) -> int:
        """Of those who may read for the others, the one with the least to read."""
        able = self.able.get((file, sets))
        if able is None:
            able = self.able[file, sets] = self._able(file, sets)
        return min(able, key=self.loads.__getitem__)

    def _able(self, file: int, sets: frozenset[int]) -> list[int]:
        """Those who have the file on their node, best such that want it anyway; where there are none, those who ask."""
        holders = self.holders[file]
        if holders:
            wanters = frozenset[int]().union(*(self.pieces.wanters[number] for number in sets))
            return [rank for rank in holders if rank in wanters] or holders
        return sorted({rank for number in sets for rank in self.pieces.askers[number]})

    def _turn(self, ranks: Ints, nbytes: Ints | int) -> int:
        """The earliest round that none of these ranks has passed and where their bytes fit into the memory of each."""
        rounds = self.rounds[ranks]
        turn = int(rounds.max())
        used = np.where(rounds == turn, self.used[ranks], 0)
        if bool(((used > 0) & (used + nbytes > self.budget)).any()):
            turn += 1
            used = np.zeros_like(used)
        self.used[ranks] = used + nbytes
        self.rounds[ranks] = turn
        self.moved[ranks] += nbytes
        return turn

    def _part(self, mine: Mapping[tuple[int, int, int], Sequence[_Row]], links: Iterable[tuple[int, int]]) -> Plan:
        pieces = self.pieces
        together = list(range(len(self.loads)))  # union-find: which ranks are linked by messages
        for reader, set_number in links:
            for asker in pieces.askers[set_number]:
                together[_root(together, asker)] = _root(together, reader)
        own = _root(together, self.rank)
        members = tuple(rank for rank in range(len(together)) if _root(together, rank) == own)
        messages = [
            Message(
                number=(turn * len(pieces.askers) + set_number) % 2**31,  # gloo's tags
                round=turn,
                reader=reader,
                receivers=tuple(rank for rank in pieces.askers[set_number] if rank != reader),
                kept=reader in pieces.wanters[set_number],
                units=tuple(Unit(*row[:3]) for row in rows),
                nbytes=sum(row[4] for row in rows),
            )
            for (turn, reader, set_number), rows in sorted(mine.items(), key=lambda item: item[0])
        ]
        return Plan(
            members=members if len(members) > 1 else (),
            messages=tuple(messages),
            slowest_nbytes=int((np.array(self.loads) + self.moved).max()),
        )


def _root(parents: list[int], at: int) -> int:
    while parents[at] != at:
        parents[at] = parents[parents[at]]
        at = parents[at]
    return at
