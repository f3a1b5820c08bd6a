"""Lines between ranks: memory sent and received point to point over gloo, whatever backend training uses.

The group is made for one load, over the rendezvous store, among the ranks that have something to say to each other: training's own
groups see nothing of it, and where something breaks it is thrown away, which wakes those that wait at its other ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tierstore.errors import RankError, UsageError

__all__ = ["Lines", "Passing"]


class Passing:
    """A transfer under way; `wait` ends it."""

    def __init__(self, work: Any, peer: int, doing: str, timeout_s: float) -> None:
        self._work: Any = work
        self._peer, self._doing, self._timeout_s = peer, doing, timeout_s

    def wait(self) -> None:
        """Waits until the memory may be used again.

        Raises:
            RankError: The peer is gone, or did not do its part in time.
        """
        work, self._work = self._work, None
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise _broken(self._peer, self._doing, error) from None


class Lines:
    """A context manager; leaving it closes all connections.

    Args:
        store: A place of its own in the rendezvous store, the same on all members.
        rank: This rank; `members`: the ranks that are connected, in the same order on all of them.
        timeout_s: How long a transfer may take from when it was begun, in seconds.

    Raises:
        RankError: Not all members came in time.
        UsageError: This torch has no gloo.
    """

    def __init__(self, store: Any, *, rank: int, members: Sequence[int], timeout_s: float) -> None:
        if not dist.is_gloo_available():
            raise UsageError("this torch has no gloo, which ranks exchange bytes over", hint="load with LoadOptions(exchange='off')")
        self._members = {member: number for number, member in enumerate(members)}
        self._timeout_s = timeout_s
        try:
            self._group: Any = dist.ProcessGroupGloo(store, self._members[rank], len(members), timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise _broken(None, f"connecting ranks {', '.join(map(str, members[:16]))}", error) from None

    def send(self, memory: torch.Tensor, to: int, number: int) -> Passing:
        """Begins to send contiguous host memory to a rank; `number` tells transfers between the two apart."""
        return self._begin(self._group.send, memory, to, number, "sending to")

    def receive(self, memory: torch.Tensor, sender: int, number: int) -> Passing:
        """Begins to receive into contiguous host memory, as many bytes as it has."""
        return self._begin(self._group.recv, memory, sender, number, "receiving from")

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._group = None  # its connections end with it

    def _begin(self, what: Any, memory: torch.Tensor, peer: int, number: int, doing: str) -> Passing:
        try:
            return Passing(what([memory], self._members[peer], number), peer, doing, self._timeout_s)
        except RuntimeError as error:
            raise _broken(peer, doing, error) from None


def _broken(peer: int | None, doing: str, error: BaseException) -> RankError:
    told = str(error).splitlines()[0].split("] ", 1)[-1][:200]  # without the place in gloo's source
    who = "" if peer is None else f" rank {peer}"
    return RankError(
        f"exchanging bytes of a checkpoint: {doing}{who} broke: {told}",
        hint="see that rank's log: it died, hangs, or can't be reached",
        ranks=[] if peer is None else [peer],
    )
