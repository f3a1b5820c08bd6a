"""Waiting for a save that several ranks make together: what one rank meets all of them raise, and nobody waits for what was given up."""

from __future__ import annotations

import logging

from tierstore.errors import DeadlineError, TierStoreError, reason_of
from tierstore.state.jointly import jointly
from tierstore.store import Store
from tierstore.tiers.ticket import Ticket

__all__ = ["wait_committed"]

log = logging.getLogger(__name__)


def wait_committed(store: Store, ticket: Ticket, what: str) -> None:
    """Returns when the save is committed; all ranks call it.

    Args:
        store: The ticket's; its next call does not raise again what this one raised.
        ticket: The save's.
        what: What it is, for messages.

    Raises:
        SaveError: It did not commit, here; it is condemned.
        RankError: Another rank could not write its part.
        DeadlineError: Not within ``save.commit_timeout``; it may still commit.
    """
    timeout_s = store.config.save.commit_timeout_s
    try:
        jointly(store.agreement, what, lambda: ticket.wait("staged", timeout_s))
        ticket.wait("committed", timeout_s)
    except Exception as error:
        store.told(ticket.attempt)
        if store.rank == 0 and not isinstance(error, DeadlineError):  # what is only late still commits
            try:
                store.condemn(ticket.attempt, f"a rank failed to write: {reason_of(error)}")
            except TierStoreError as further:
                log.warning("run=%s step=%d can't be condemned: %s", store.run, ticket.attempt.step, further.message)
        raise
