"""Ranks that load together read each byte once: what several of them need, one reads from afar and sends to the others.

All ranks tell which blocks they need (one question over the agreement), each computes the same plan (`exchange_plan`), and then reads,
sends and receives round by round (`exchange_lines`) in memory of bounded size. What arrives from a rank is proved by SHA-256 like what
comes from a tier; what is not good is read again from the tiers, so that a rank whose reads fail costs the others time, not their load.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from tierstore.errors import IntegrityError, NotFoundError, RankError, StorageError, TierStoreError, reason_of
from tierstore.format.digest import DIGEST_NBYTES, bad_blocks, block_digests
from tierstore.state.agreement import Agreement
from tierstore.state.bits import memory_of
from tierstore.state.exchange.lines import Lines, Passing
from tierstore.state.exchange.plan import Message, Needs, Plan, Unit, decode_needs, encode_needs, merge_ranges, plan_exchange
from tierstore.state.exchange.wants import Sorted
from tierstore.state.jointly import jointly
from tierstore.state.reading import Fill, Reader, Run, read_wants, wants_of
from tierstore.tiers.reads import AnyWant, Want

__all__ = ["BUDGET_NBYTES", "Exchange", "SharedReader"]

log = logging.getLogger(__name__)

BUDGET_NBYTES = 256 << 20
"""Memory of one rank for bytes on their way, in bytes."""

_FAILED = b"!"
"""Before what a rank tells that failed."""

_SLOWEST = 4 << 20
"""A rank that moves fewer bytes per second than this is taken for hung, at the end of a load, once the deadline is over as well."""


@runtime_checkable
class SharedReader(Reader, Protocol):
    """What an exchange needs of an open checkpoint; `tiers.replica.Replica` is one."""

    @property
    def identity(self) -> str:
        """Names the checkpoint so that no other one has this name."""

    @property
    def hydrating(self) -> object | None:
        """What `hydrate` does its work with; None: it does nothing."""

    def near_files(self) -> tuple[frozenset[str], frozenset[str]]:
        """The files that this node's own tiers should have; those that lie on local file systems, other nodes' too."""

    async def hydrate(self, wants: Sequence[AnyWant]) -> None:
        """Brings files onto this node of which `wants` are a large part, where it is to."""


class Exchange:
    """The exchange of one load: a context manager around all that a rank does for it, so that a rank that fails says so to the others.

    Collective: all ranks of the agreement make one at the same time, and each calls `fill` once.

    Args:
        agreement: The ranks; its deadline is how long they wait for each other.
        what: What is loaded, for messages: "the load of step 5".
        budget_nbytes: Memory for bytes on their way, in bytes; the smallest of all ranks counts.
    """

    def __init__(self, agreement: Agreement, *, what: str, budget_nbytes: int = BUDGET_NBYTES) -> None:
        self._agreement = agreement
        self._what = what
        self._budget_nbytes = budget_nbytes
        self._met = False

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """A rank that fails before it meets the others takes part in their question by saying so."""
        if self._met or not isinstance(error, Exception):
            return
        self._met = True
        told = {"error": reason_of(error)[:4000], "damage": isinstance(error, IntegrityError)}
        with contextlib.suppress(TierStoreError):  # this rank's own error is the one to raise
            self._agreement.agree(self._what, _FAILED + json.dumps(told).encode(), _pack)

    def fill(self, reader: SharedReader, run: Run, fills: Sequence[Fill]) -> None:
        """Reads every wish, as `reading.fill_all` does, together with the other ranks.

        Raises:
            IncompleteError: A wished box has elements that no extent holds.
            IntegrityError: Some bytes of this rank's are good on no tier.
            RankError: Another rank failed; or ranks opened different checkpoints.
            DeadlineError: Ranks died or hang; ``context["ranks"]`` names them.
        """
        index = reader.index
        wanted = [w for w in wants_of(fills, index.block_nbytes) if w.nbytes]
        run(reader.hydrate(wanted))  # before the ranks tell each other what lies near
        wants = Sorted(wanted, index.file_names)
        sizes = np.array([index.file_nbytes(name) for name in index.file_names], dtype=np.int64)
        agreement, deadline_s = self._agreement, self._agreement.deadline_s
        try:
            if reader.hydrating is not None:  # ranks whose nodes have everything wait for those that copy all of it
                agreement.deadline_s = deadline_s + int(sizes.sum()) / _SLOWEST
            needs = self._meet(self._needs(reader, wants))
        finally:
            agreement.deadline_s = deadline_s
        plan = plan_exchange(needs, rank=agreement.rank, file_nbytes=sizes, block_nbytes=index.block_nbytes)
        # Who is done early waits for the slowest. Who sees a connection break comes up to a deadline before who only sees silence, and
        # rank 0 is waited for longest, as it is rank 0 that names who is missing.
        patience_s = plan.slowest_nbytes / _SLOWEST + deadline_s * (2 if agreement.rank == 0 else 3)
        try:
            agreement.deadline_s = patience_s
            jointly(agreement, self._what, lambda: self._carry_out(reader, run, plan, wants, deadline_s))
        finally:
            agreement.deadline_s = deadline_s

    # ---- inside

    def _needs(self, reader: SharedReader, wants: Sorted) -> Needs:
        block, names = reader.index.block_nbytes, reader.index.file_names
        on_node, local = (np.array([name in files for name in names], dtype=bool) for files in reader.near_files())
        return Needs(
            checkpoint=reader.identity,
            machine=platform.node(),
            budget_nbytes=self._budget_nbytes,
            ranges=merge_ranges(wants.files, wants.offsets // block, -(-(wants.offsets + wants.sizes) // block)),
            on_node=on_node,
            local=local,
        )

    def _meet(self, own: Needs) -> list[Needs]:
        told = encode_needs(own)
        self._met = True
        packed = self._agreement.agree(self._what, told, _pack)
        needs = self._needs_of(_unpack(packed))
        others = [rank for rank, n in enumerate(needs) if n.checkpoint != needs[0].checkpoint]
        if others:
            raise RankError(
                f"{self._what}: rank 0 opened {needs[0].checkpoint}, rank {others[0]} opened {needs[others[0]].checkpoint}",
                hint="load a step by its number, the same on all ranks, or use resume()",
                ranks=others,
            )
        return needs

    def _needs_of(self, values: Sequence[bytes]) -> list[Needs]:
        failed = {rank: json.loads(value[len(_FAILED) :]) for rank, value in enumerate(values) if value.startswith(_FAILED)}
        if not failed:
            decoded = {value: decode_needs(value) for value in set(values)}
            return [decoded[value] for value in values]
        ranks = sorted(failed)
        message = f"{self._what}: rank {ranks[0]} of {len(values)} failed: {failed[ranks[0]]['error']}"
        if all(told["damage"] for told in failed.values()):  # what is damaged for one rank an older checkpoint mends for all
            raise IntegrityError(message, hint="load an older step, or `resume(fallback=True)`", ranks=ranks)
        raise RankError(message, hint="mend that rank; every rank has stopped at the same place", ranks=ranks)

    def _carry_out(self, reader: SharedReader, run: Run, plan: Plan, wants: Sorted, timeout_s: float) -> None:
        alone = wants.share(_kept_units(plan, self._agreement.rank), reader.index.block_nbytes)
        if not plan.messages:
            read_wants(reader, run, alone)
            return
        with ThreadPoolExecutor(max_workers=2 + min(4, os.cpu_count() or 1), thread_name_prefix="tierstore-exchange") as pool:
            aside = pool.submit(read_wants, reader, run, alone)
            sweep = _Sweep(reader, run, plan, wants, self._agreement.rank, pool)
            if plan.members:
                store = self._agreement.place(str(plan.members[0]))  # others may have lines of their own at the same time
                try:
                    with Lines(store, rank=self._agreement.rank, members=plan.members, timeout_s=timeout_s) as lines:
                        sweep.run(lines)
                except RankError:
                    if self._agreement.rank == 0:  # the others see that too, or have waited in vain, by then: who does not come is gone
                        self._agreement.deadline_s = timeout_s
                    raise
            else:
                sweep.run(None)
            aside.result()


def _kept_units(plan: Plan, rank: int) -> list[Unit]:
    return [unit for message in plan.messages if message.reader != rank or message.kept for unit in message.units]


class _Sweep:
    """Goes through the rounds: while one is sent and received the next is read."""

    def __init__(self, reader: SharedReader, run: Run, plan: Plan, wants: Sorted, rank: int, pool: ThreadPoolExecutor) -> None:
        self.reader, self.run_on_loop, self.wants, self.rank, self.pool = reader, run, wants, rank, pool
        self.block = reader.index.block_nbytes
        self.turns = [list(group) for _, group in itertools.groupby(plan.messages, key=lambda m: m.round)]
        self.digests: dict[str, bytes] = {}
        self.down = False
        self.failure: Exception | None = None

    def run(self, lines: Lines | None) -> None:
        """Raises what kept this rank from having its bytes, but only after it did its part for the others; or a RankError at once."""
        outgoing = [[m for m in turn if m.reader == self.rank] for turn in self.turns]
        incoming = [[m for m in turn if m.reader != self.rank] for turn in self.turns]
        places = [torch.empty(_most(outgoing[first::2]), dtype=torch.uint8, device="cpu") for first in (0, 1)]
        place = torch.empty(_most(incoming), dtype=torch.uint8, device="cpu")
        following = self.pool.submit(self.read, outgoing[0], places[0])
        for number in range(len(self.turns)):
            receiving: list[tuple[Message, torch.Tensor, Passing]] = []
            if lines is not None:
                receiving = [(m, part, lines.receive(part, m.reader, m.number)) for m, part in _laid_out(incoming[number], place)]
            proved = following.result()
            if number + 1 < len(self.turns):
                following = self.pool.submit(self.read, outgoing[number + 1], places[(number + 1) % 2])
            sending: list[Passing] = []
            for message, part in _laid_out(outgoing[number], places[number % 2]):
                if lines is not None:
                    sending += [lines.send(part, receiver, message.number) for receiver in message.receivers]
                if message.kept:
                    self.take(message, part, proved=proved)
            for message, part, passing in receiving:
                passing.wait()
                self.take(message, part, proved=False)
            self.close()
            for passing in sending:
                passing.wait()
        if self.failure is not None:
            raise self.failure

    def read(self, messages: Sequence[Message], place: torch.Tensor) -> bool:
        """Reads what this rank sends in one round; False where some of it may be wrong, which those who want it see by its digests."""
        units = [(unit, memory) for message, part in _laid_out(messages, place) for unit, memory in self.units(message, part)]
        wants = [Want(self.name(unit), unit.first * self.block, memory) for unit, memory in units]
        if not wants or self.down:
            return not wants
        try:
            self.run_on_loop(self.reader.read(wants))
            return True
        except (IntegrityError, StorageError, NotFoundError) as error:
            log.warning("rank=%d what it reads for other ranks too is not to be had, they read it for themselves: %s", self.rank, error)
            self.down = isinstance(error, StorageError)
        for want in wants if not self.down else ():  # all but the damaged ones
            try:
                self.run_on_loop(self.reader.read([want]))
            except (IntegrityError, StorageError, NotFoundError):
                continue  # told above; the digests tell which
        return False

    def take(self, message: Message, part: torch.Tensor, *, proved: bool) -> None:
        """Brings what arrived to those who want it."""
        if self.failure is not None:
            return  # this rank's load has failed: it goes on for the others' sake
        try:
            units = list(self.units(message, part))
            if not proved:
                bad = [want for found in self.pool.map(self.unproved, units) for want in found]
                if bad:
                    if message.reader != self.rank:
                        log.warning("rank=%d %d pieces from rank %d are not good, they are read anew", self.rank, len(bad), message.reader)
                    self.run_on_loop(self.reader.read(bad))
            for unit, memory in units:
                self.wants.deliver(unit.file, unit.first * self.block, memory)
        except Exception as error:  # noqa: BLE001 - raised at the end of `run`
            self.failure = error

    def close(self) -> None:
        """Reads what is left of wishes that the exchange brought in part."""
        rest: Sequence[AnyWant] = self.wants.remainders()
        if not rest or self.failure is not None:
            return
        try:
            read_wants(self.reader, self.run_on_loop, rest)
        except Exception as error:  # noqa: BLE001 - raised at the end of `run`
            self.failure = error

    def unproved(self, unit_and_memory: tuple[Unit, memoryview]) -> list[Want]:
        """The blocks whose bytes are not what the index promises."""
        unit, memory = unit_and_memory
        name = self.name(unit)
        promised = self.digests.get(name) or self.digests.setdefault(name, self.reader.index.file(name).block_digests)
        bad = bad_blocks(block_digests(memory, self.block), promised[unit.first * DIGEST_NBYTES : unit.last * DIGEST_NBYTES])
        return [Want(name, (unit.first + n) * self.block, memory[n * self.block : (n + 1) * self.block]) for n in bad]

    def units(self, message: Message, part: torch.Tensor) -> list[tuple[Unit, memoryview]]:
        memory, at, found = memory_of(part), 0, []
        for unit in message.units:
            nbytes = min(unit.last * self.block, self.reader.index.file_nbytes(self.name(unit))) - unit.first * self.block
            found.append((unit, memory[at : at + nbytes]))
            at += nbytes
        return found

    def name(self, unit: Unit) -> str:
        return self.reader.index.file_names[unit.file]


def _most(turns: Sequence[Sequence[Message]]) -> int:
    return max((sum(m.nbytes for m in turn) for turn in turns), default=0)


def _laid_out(messages: Sequence[Message], place: torch.Tensor) -> list[tuple[Message, torch.Tensor]]:
    ends = list(itertools.accumulate((m.nbytes for m in messages), initial=0))
    return [(m, place[begin : begin + m.nbytes]) for m, begin in zip(messages, ends, strict=False)]


def _pack(values: Sequence[bytes]) -> bytes:
    """All ranks' values; the same one is sent once, for ranks that replicate each other need the same."""
    unique = list(dict.fromkeys(values))
    numbers = {value: number for number, value in enumerate(unique)}
    head = {"sizes": [len(value) for value in unique], "ranks": [numbers[value] for value in values]}
    return json.dumps(head).encode() + b"\n" + b"".join(unique)


def _unpack(packed: bytes) -> list[bytes]:
    head, _, body = packed.partition(b"\n")
    told: dict[str, Any] = json.loads(head)
    ends = list(itertools.accumulate(told["sizes"]))
    unique = [body[end - size : end] for end, size in zip(ends, told["sizes"], strict=True)]
    return [unique[number] for number in told["ranks"]]
