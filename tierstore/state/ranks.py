"""What the ranks that save together tell each other before the save is under way: the step, one save id, and who writes what.

Two questions in the usual case, a few more where the state's structure is new or values differ. In all of them a rank that can't go on
says so, and every rank raises: nothing is half submitted. `state.ownership` has the arithmetic.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from tierstore.errors import UsageError
from tierstore.state.agreement import Agreement, group_of, telling
from tierstore.state.copy_threads import CopyThreads
from tierstore.state.fingerprint import fingerprints
from tierstore.state.flatten import FlatState
from tierstore.state.ownership import Agreed, Ownership
from tierstore.state.units import Unit, merge, signature_of, table_of, units_of

__all__ = ["JointSave", "Ranks", "differences", "rank_and_size", "ranks_of"]

_LAYOUTS = 4
"""How many agreed tables are remembered: a run alternates between few structures."""


class Ranks:
    """The ranks of one store, save after save.

    Args:
        agreement: How they agree.
        members: Their global ranks, in order.
    """

    def __init__(self, agreement: Agreement, members: Sequence[int]) -> None:
        self.agreement = agreement
        self.members = tuple(members)
        self._known: OrderedDict[bytes, tuple[int, Agreed]] = OrderedDict()
        self._count = 0
        self._same = False
        self._comparing = threading.Lock()

    def check_same(self, opened: Mapping[str, Any]) -> None:
        """Proves once, before the first thing that the ranks do together, that all of them have opened the same store.

        Args:
            opened: What has to be the same on all ranks (JSON), e.g. the run's name.

        Raises:
            UsageError: A rank differs; says in what. A RankError on other ranks than 0.
            RankError, DeadlineError: A rank failed, or is missing; named.
        """
        with self._comparing:
            if not self._same:
                self.agreement.agree("opening the store on all ranks", json.dumps(opened).encode(), _all_same)
                self._same = True

    def known(self, signature: bytes) -> tuple[int, Agreed | None]:
        """What was agreed for a table of this rank, and the agreement's number; 0 if nothing was."""
        found = self._known.get(signature)
        if found is None:
            return 0, None
        self._known.move_to_end(signature)
        return found

    def remember(self, signature: bytes, number: int, agreed: Agreed) -> None:
        self._known[signature] = (number, agreed)
        self._known.move_to_end(signature)
        while len(self._known) > _LAYOUTS:
            self._known.popitem(last=False)

    def next_number(self) -> int:
        """On rank 0: a number that no agreed table has had."""
        self._count += 1
        return self._count


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """In what a rank's store is another one than rank 0's, for messages."""
    return [f"{key} is {other.get(key)!r} there and {value!r} on rank 0" for key, value in first.items() if other.get(key) != value]


def _all_same(values: Sequence[bytes]) -> bytes:
    told = [json.loads(value) for value in values]
    for rank, other in enumerate(told):
        if apart := differences(told[0], other):
            raise UsageError(
                f"rank {rank} has opened another store than rank 0: {'; '.join(apart)}",
                hint="start all ranks with the same configuration, run and environment (TIERSTORE_CONFIG, TIERSTORE_RUN)",
                ranks=[rank],
            )
    return b""


def rank_and_size(rank: int | None, world_size: int | None, process_group: Any = None) -> tuple[int, int]:
    """This process's rank and how many there are: as given, else those of the group, else a process alone.

    Raises:
        UsageError: They contradict each other, or the group that was given.
    """
    if process_group is not None or (world_size is None and rank is None and dist.is_available() and dist.is_initialized()):
        found = group_of(process_group)
        if (rank if rank is not None else found[0], world_size if world_size is not None else found[1]) != found:
            raise UsageError(
                f"rank {rank} of world_size {world_size} was given with a process group in which this is rank {found[0]} of {found[1]}",
                hint="leave rank and world_size out where a process group is given",
            )
        return found
    if rank is None and world_size is not None and world_size > 1:
        rank = group_of(None)[0]
    size = world_size if world_size is not None else 1 if not rank else group_of(None)[1]
    if not 0 <= (rank or 0) < size:
        raise UsageError(f"rank {rank} is not within world_size {size}", hint="pass the rank and size of the process group")
    return rank or 0, size


def ranks_of(process_group: Any, *, rank: int, world_size: int, deadline_s: float) -> Ranks:
    """The ranks of a group (None: the default group).

    Raises:
        UsageError: There is no process group, or it is another one than `rank` and `world_size` say.
    """
    found = group_of(process_group)
    if found != (rank, world_size):
        raise UsageError(
            f"the store was opened as rank {rank} of {world_size}, the process group says {found[0]} of {found[1]}",
            hint="open the store without rank= and world_size=, after torch.distributed.init_process_group(...)",
        )
    members = range(world_size) if process_group is None else dist.get_process_group_ranks(process_group)
    return Ranks(Agreement(process_group, deadline_s=deadline_s), members)


class JointSave:
    """One save of several ranks: each rank makes the same calls, `settle` then `ready`.

    Args:
        ranks: The ranks.
        step: This rank's step.
        propose: Called on rank 0: the save id of the new attempt. What it raises reaches all ranks.
        threads: Who reads the tensors whose values are compared; None: a few threads that are started for this.
        what: What is done, for messages; None: the save of the step.
    """

    def __init__(
        self, ranks: Ranks, step: int, propose: Callable[[], str], *, threads: CopyThreads | None = None, what: str | None = None
    ) -> None:
        self._ranks = ranks
        self._agreement = ranks.agreement
        self._step = step
        self._propose = propose
        self._threads = threads
        self._what = what or f"the save of step {step}"
        self.save_id = ""
        """What all ranks call the attempt, after `settle`."""
        self.under_way = False
        """Whether all ranks were `ready`: from here on the others go on whatever happens on this one."""

    def telling(self) -> AbstractContextManager[None]:
        """Around what may fail on this rank alone: the others hear of it in the next question, and raise too."""
        return telling(self._agreement, self._what)

    def settle(self, flat: FlatState) -> Ownership:
        """Agrees on the save id and on who writes what.

        Raises:
            UsageError: The ranks save different steps, or a tensor is not on all ranks that it is spread over.
            RankError, DeadlineError: A rank failed, or is missing; named.
        """
        with self.telling():
            units = units_of(flat)
            table = table_of(units, self._ranks.members)
            signature = signature_of(table)
            number, agreed = self._ranks.known(signature)
            prints = _prints(agreed, units, self._threads) if agreed is not None else {}
            digests = agreed.digests(prints) if agreed is not None else b""
        opening = _packed({"step": self._step, "number": number}, signature + digests)
        verdict, _ = _unpacked(self._agreement.agree(self._what, opening, lambda values: self._open(agreed, values)))
        self.save_id = verdict["save_id"]
        differing = verdict["differing"]
        if agreed is None or verdict["speakers"] is not None:
            agreed = self._exchange_tables(table, signature, verdict["speakers"])
            with self.telling():
                prints = _prints(agreed, units, self._threads)
            differing = self._compare(agreed, prints)
        apart = self._compare_each(agreed, prints, [(pattern, bucket) for pattern, bucket in differing]) if differing else {}
        return agreed.ownership(units, apart, self._ranks.members)

    def ready(self) -> None:
        """Returns when every rank has room for what it writes; from here on no rank can fail but by dying or by a broken device.

        Raises:
            RankError, DeadlineError: As `settle`.
        """
        self._agreement.agree(self._what, b"", lambda values: b"")
        self.under_way = True

    # ---- the questions

    def _open(self, agreed: Agreed | None, values: Sequence[bytes]) -> bytes:
        """On rank 0: all ranks save the same step; do they know who writes what, and are the values the same?"""
        told = [_unpacked(value) for value in values]
        other = next((rank for rank, (head, _) in enumerate(told) if head["step"] != self._step), None)
        if other is not None:
            raise UsageError(
                f"rank 0 saves step {self._step}, rank {other} saves step {told[other][0]['step']}",
                hint="every rank calls save with the same steps in the same order",
            )
        numbers = {head["number"] for head, _ in told}
        verdict: dict[str, Any] = {"save_id": self._propose(), "speakers": None, "differing": []}
        if agreed is None or len(numbers) > 1:
            firsts: dict[bytes, int] = {}
            verdict["speakers"] = [firsts.setdefault(body[:16], rank) for rank, (_, body) in enumerate(told)]
        else:
            verdict["differing"] = agreed.differing([body[16:] for _, body in told])
        return _packed(verdict)

    def _exchange_tables(self, table: bytes, signature: bytes, speakers: Sequence[int]) -> Agreed:
        """Makes the agreed table of the ranks' tables; of ranks with the same one the first sends it."""
        own = self._agreement.rank

        def combine(values: Sequence[bytes]) -> bytes:
            tables = {rank: values[rank] for rank in set(speakers)}
            return _packed({"number": self._ranks.next_number()}, merge(tables, speakers))

        head, merged = _unpacked(self._agreement.agree(self._what, table if speakers[own] == own else b"", combine))
        agreed = Agreed(merged, rank=own, world_size=self._agreement.world_size)
        self._ranks.remember(signature, head["number"], agreed)
        return agreed

    def _compare(self, agreed: Agreed, prints: Mapping[int, bytes]) -> Any:
        if not agreed.compares:
            return []
        told = agreed.digests(prints)
        return json.loads(self._agreement.agree(self._what, told, lambda values: json.dumps(agreed.differing(values)).encode()))

    def _compare_each(self, agreed: Agreed, prints: Mapping[int, bytes], buckets: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
        told = agreed.details(prints, buckets)
        found = self._agreement.agree(self._what, told, lambda values: json.dumps(list(agreed.apart(values, buckets).items())).encode())
        return dict(json.loads(found))


def _prints(agreed: Agreed, units: Sequence[Unit], threads: CopyThreads | None) -> dict[int, bytes]:
    """Fingerprints of this rank's units that other ranks may hold too, by the numbers of their items."""
    asked = agreed.compared(units)
    tensors = [piece.tensor for unit in asked.values() for piece in unit.leaf.pieces]
    each = iter(fingerprints(tensors, threads=threads))
    found = {number: b"".join(next(each) for _ in unit.leaf.pieces) for number, unit in asked.items()}
    return {number: digest if len(digest) == 16 else signature_of(digest) for number, digest in found.items()}


def _packed(head: Mapping[str, Any], body: bytes = b"") -> bytes:
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + body


def _unpacked(value: bytes) -> tuple[dict[str, Any], bytes]:
    head, _, body = value.partition(b"\n")
    return json.loads(head), body
