"""Ranks that act together agree on small values: with a deadline, without the collectives of training, and with names for who is missing.

Values travel through the store of the process group's rendezvous (under torchrun it lives in the launcher's agent), not through the
group: a rank that died or is late can then be named, nothing hangs past the deadline, and training's own collectives keep their order.
Rank 0 combines what all ranks gave; every rank gets the result. A rank that can't go on says so instead, and all ranks raise.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tierstore.errors import DeadlineError, RankError, TierStoreError, UsageError, reason_of
from tierstore.units import format_some

__all__ = ["Agreement", "group_of", "telling"]

Combine = Callable[[Sequence[bytes]], bytes]

_PIECE_NBYTES = 4 << 20
"""A TCPStore refuses values of more than 8 MiB."""

_WAIT_S = 2.0
"""How long the store itself waits for an answer, in seconds."""

_LOOK_S = 0.1
"""How often a later one is looked for."""

_GRACE_S = 15.0
"""How much longer than rank 0 the others wait: its verdict names who is missing."""


class Agreement:
    """What the ranks of one process group agree on, question by question; each rank asks the same ones in the same order.

    Args:
        group: A process group; None is the default group.
        deadline_s: How long a question waits for the slowest rank, in seconds.

    Raises:
        UsageError: torch.distributed is not initialised, or this process is not in `group`.
    """

    def __init__(self, group: Any = None, *, deadline_s: float) -> None:
        self.rank, self.world_size = group_of(group)
        self.deadline_s = deadline_s
        self._hurry_at = math.inf
        self._asked = 0
        self._told: list[int] = []
        self._heard = 0
        members = dist.get_process_group_ranks(group) if group is not None else list(range(self.world_size))
        base: Any = distributed_c10d._get_default_store()
        with contextlib.suppress(AttributeError, RuntimeError):  # a FileStore has one connection and no lock to share
            base = base.clone()  # a connection of our own: waiting on it holds up nobody else's
        # Which group, and the how-manieth agreement on it: all ranks count alike, for they open stores in the same order.
        where = f"tierstore/{members[0]}-{members[-1]}-{len(members)}"
        number = base.add(f"{where}/opened/{self.rank}", 1)
        self._store: Any = distributed_c10d.PrefixStore(f"{where}/{number}", base)

    @classmethod
    def named(cls, name: str, *, rank: int, world_size: int, deadline_s: float) -> Agreement:
        """An agreement of ranks that were told the same `name`, which nobody else uses (a save id): it asks for no group, and no order.

        Raises:
            UsageError: torch.distributed is not initialised.
        """
        group_of(None)
        made = cls.__new__(cls)
        made.rank, made.world_size, made.deadline_s, made._asked = rank, world_size, deadline_s, 0
        made._told, made._heard, made._hurry_at = [], 0, math.inf
        base: Any = distributed_c10d._get_default_store()
        with contextlib.suppress(AttributeError, RuntimeError):
            base = base.clone()
        made._store = distributed_c10d.PrefixStore(f"tierstore/named/{name}", base)
        return made

    def hurry(self, deadline_s: float) -> None:
        """The process will end soon: no question, one under way on another thread included, waits longer than `deadline_s` seconds."""
        self._hurry_at = time.monotonic() + deadline_s

    def agree(self, what: str, value: bytes, combine: Combine) -> bytes:
        """Gives `value`, and returns what rank 0's `combine` makes of all ranks' values, in the order of the ranks.

        Args:
            what: What it is about, for messages: "the save of step 5".
            value: This rank's value.
            combine: Called on rank 0 only. A `TierStoreError` that it raises reaches all ranks.

        Raises:
            DeadlineError: Ranks did not come within the deadline; ``context["ranks"]`` names them.
            RankError: A rank reported a failure with `fail`.
            TierStoreError: From `combine`; on other ranks than 0 as a RankError.
        """
        return self._question(what, b"+" + value, combine)

    def share(self, what: str, value: bytes) -> bytes:
        """Rank 0's `value`, on every rank; raises as `agree`."""
        return self.agree(what, value, lambda values: values[0])

    def hear(self, what: str, value: Callable[[], bytes]) -> bytes:
        """Rank 0's `value`, on every rank, without waiting for the others: for what is asked often. `value` is called on rank 0 only.

        Raises:
            DeadlineError: Rank 0 did not come within the deadline.
            RankError: The rendezvous can't be reached.
        """
        number, self._heard = self._heard, self._heard + 1
        key = f"told/{number}"
        if self.rank == 0:
            said = value()
            self._put(key, said)
            self._told.append(number)
            return said
        found = self._get(key, time.monotonic() + self.deadline_s)
        return found if found is not None else self._silent(what)

    def gather(self, what: str, value: bytes) -> list[bytes]:
        """All ranks' values, on every rank; for small ones. Raises as `agree`."""
        packed = self.agree(what, value, lambda values: _pack(values))
        return _unpack(packed)

    def fail(self, what: str, error: TierStoreError) -> NoReturn:
        """Takes part in the question `what` by saying that this rank can't go on; raises `error`, and a RankError on the others."""
        self.tell(what, error)
        raise error

    def tell(self, what: str, error: BaseException) -> None:
        """As `fail`, but raises nothing, and waits for nobody: for any error of this rank that the others are to hear of."""
        asked, self._asked = self._asked, self._asked + 1
        with contextlib.suppress(TierStoreError):  # where the others can't be reached any more, this rank's own error is the one to raise
            if self.rank == 0:
                self._put(f"{asked}/all", self._failed(what, [0], reason_of(error))[0])
            else:
                self._put(f"{asked}/{self.rank}", b"-" + reason_of(error).encode())

    def place(self, name: str) -> Any:
        """A part of the rendezvous store for those ranks that say the same `name` until the next question: for a group that they make."""
        return distributed_c10d.PrefixStore(f"{self._asked}/place/{name}", self._store)

    def aside(self, name: str) -> Any:
        """As `place`, over a connection of its own: for a thread that talks while this one waits."""
        base = self.place(name)
        with contextlib.suppress(AttributeError, RuntimeError):
            base = base.clone()
        return base

    # ---- inside

    def _question(self, what: str, value: bytes, combine: Combine) -> bytes:
        asked, self._asked = self._asked, self._asked + 1
        end = time.monotonic() + self.deadline_s
        if self.rank == 0:
            verdict, error = self._verdict(asked, what, value, combine, end)
            self._put(f"{asked}/all", verdict)
            if error is not None:
                raise error
        else:
            self._put(f"{asked}/{self.rank}", value)
            verdict = self._get(f"{asked}/all", end + _GRACE_S) or self._silent(what)
        kind, body = verdict[:1], verdict[1:]
        if kind == b"+":
            return body
        told = json.loads(body)
        if told["kind"] == "missing":
            raise self._missing(what, told["ranks"])
        raise RankError(told["message"], hint=told["hint"], ranks=told["ranks"])

    def _verdict(self, asked: int, what: str, own: bytes, combine: Combine, end: float) -> tuple[bytes, TierStoreError | None]:
        values = [own]
        missing: list[int] = []
        for rank in range(1, self.world_size):
            # Once somebody is missing nobody else is waited for: only who has come by now is looked at.
            found = self._get(f"{asked}/{rank}", end if not missing else time.monotonic())
            values.append(found or b"")
            if found is None:
                missing.append(rank)
        if asked and not missing:
            self._forget(asked - 1)  # all that answered this question have read the one before
            self._forget_told()
        if missing:
            return _bad("missing", ranks=missing), self._missing(what, missing)
        failed = [rank for rank, value in enumerate(values) if value[:1] != b"+"]
        if failed:
            return self._failed(what, failed, values[failed[0]][1:].decode(errors="replace"))
        try:
            return b"+" + combine([value[1:] for value in values]), None
        except TierStoreError as error:
            return _bad("failed", ranks=[0], message=error.message, hint=error.hint), error

    def _failed(self, what: str, ranks: Sequence[int], reason: str) -> tuple[bytes, TierStoreError]:
        message = f"{what}: {_ranks(ranks)} of {self.world_size} failed: {reason}"
        hint = "mend that rank; nothing was begun, so the same call may be made again on all ranks"
        return _bad("failed", ranks=list(ranks), message=message, hint=hint), RankError(message, hint=hint, ranks=list(ranks))

    def _missing(self, what: str, ranks: Sequence[int]) -> DeadlineError:
        return DeadlineError(
            f"{what}: {_ranks(ranks)} of {self.world_size} did not come {self._within(self.deadline_s)}",
            hint="see whether they died or hang (their logs, `py-spy dump`); every rank makes the same calls in the same order. "
            "Where only rank 0 is to take part, open the store there with rank=0, world_size=1",
            ranks=list(ranks),
        )

    def _silent(self, what: str) -> NoReturn:
        raise DeadlineError(
            f"{what}: rank 0 of {self.world_size} did not answer {self._within(self.deadline_s + _GRACE_S)}",
            hint="see whether rank 0 died or hangs; every rank makes the same calls in the same order",
            ranks=[0],
        )

    def _within(self, deadline_s: float) -> str:
        return f"within {deadline_s:g} s" if time.monotonic() < self._hurry_at else "in the time that was left"

    def _put(self, key: str, value: bytes) -> None:
        pieces = math.ceil(len(value) / _PIECE_NBYTES)
        try:
            for piece in range(1, pieces):
                self._store.set(f"{key}/{piece}", value[piece * _PIECE_NBYTES : (piece + 1) * _PIECE_NBYTES])
            self._store.set(key, b"%d:" % pieces + value[:_PIECE_NBYTES])
        except RuntimeError as error:
            raise _store_error(error) from error

    def _get(self, key: str, end: float) -> bytes | None:
        """The value of `key`, waiting for it until `end` (of `time.monotonic`); None: it did not come."""
        try:
            if not self._comes(key, end):
                return None
            count, _, first = self._store.get(key).partition(b":")
            return bytes(first + b"".join(self._store.get(f"{key}/{piece}") for piece in range(1, int(count))))
        except dist.DistNetworkError as error:
            raise _store_error(error) from error
        except RuntimeError as error:
            raise _store_error(error) from error

    def _comes(self, key: str, end: float) -> bool:
        """Whether `key` comes before `end`, or before the hurry's end where that is earlier, also if it is told meanwhile.

        Most answers come while the store waits. A late one is looked for now and then: the store's own wait can't be broken off.
        """
        began = time.monotonic()
        first_s = min(end - began, self._hurry_at - began, _WAIT_S)
        if first_s > 0:
            try:
                self._store.wait([key], timedelta(seconds=first_s))
                return True
            except dist.DistNetworkError:
                raise
            except RuntimeError:
                if time.monotonic() < began + first_s - 0.1:
                    raise
        while not self._store.check([key]):
            left_s = min(end, self._hurry_at) - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(left_s, _LOOK_S))
        return True

    def _forget_told(self) -> None:
        told, self._told = self._told, []
        for number in told:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(f"told/{number}")

    def _forget(self, asked: int) -> None:
        for key in [f"{asked}/all", *(f"{asked}/{rank}" for rank in range(1, self.world_size))]:
            with contextlib.suppress(RuntimeError):  # what can't be deleted only takes room; FileStore keeps it
                self._store.delete_key(key)


@contextlib.contextmanager
def telling(agreement: Agreement | None, what: str) -> Iterator[None]:
    """Around what may fail on this rank alone: the others hear of it in their next question, and raise too. None: a process alone."""
    try:
        yield
    except BaseException as error:
        if agreement is not None:
            agreement.tell(what, error)
        raise


def group_of(group: Any) -> tuple[int, int]:
    """This process's rank in `group` (None: the default group), and the group's size.

    Raises:
        UsageError: There is no process group, or this process is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "torch.distributed has no process group for the ranks to agree over",
            hint="call torch.distributed.init_process_group(...) before, or open the store with rank=0, world_size=1",
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise UsageError("this process is not in the process group", hint="open the store on the ranks of that group only")
    return rank, dist.get_world_size(group)


def _store_error(error: BaseException) -> RankError:
    return RankError(
        f"the rendezvous of the process group can't be reached: {str(error).splitlines()[0][:200]}",
        hint="the launcher or rank 0 is gone: restart the job; what is committed stays",
        ranks=[0],
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_some(ranks, 16)}"


def _bad(kind: str, **facts: Any) -> bytes:
    return b"-" + json.dumps({"kind": kind, **facts}).encode()


def _pack(values: Sequence[bytes]) -> bytes:
    sizes = ",".join(str(len(value)) for value in values).encode()
    return sizes + b";" + b"".join(values)


def _unpack(packed: bytes) -> list[bytes]:
    sizes, _, body = packed.partition(b";")
    found, at = [], 0
    for size in map(int, sizes.split(b",")):
        found.append(body[at : at + size])
        at += size
    return found
