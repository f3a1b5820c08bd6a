"""What training goes on from: it stays until there is something newer to go on from (a new run once deleted it, and then failed)."""

from __future__ import annotations

import threading

from tierstore.names import Attempt
from tierstore.tiers.leases import Lease
from tierstore.tiers.retention import Reason
from tierstore.tiers.ticket import Ticket

__all__ = ["ResumeSource"]


class ResumeSource:
    """The checkpoint that this process resumed from, and its lease, until a save that was begun after that is durable. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt: Attempt | None = None
        self._lease: Lease | None = None

    @property
    def attempt(self) -> Attempt | None:
        return self._attempt

    def protected(self) -> dict[Attempt, Reason]:
        """That it is not to go, and why."""
        source = self._attempt
        why = Reason(kind="resumed-from", text="training went on from it, and no newer save is durable yet")
        return {} if source is None else {source: why}

    def set(self, attempt: Attempt | None, lease: Lease | None = None) -> None:
        """Takes a checkpoint and its lease, and lets the one before go."""
        with self._lock:
            before, self._attempt, self._lease = self._lease, attempt, lease
        if before is not None and before is not lease:
            before.let_go()

    def follow(self, ticket: Ticket) -> None:
        """A save was begun: once it is durable, it is what training would go on from."""
        source = self._attempt
        if source is not None:
            ticket.on("durable", lambda _: self._passed(source))

    def _passed(self, source: Attempt) -> None:
        if self._attempt == source:
            self.set(None)
