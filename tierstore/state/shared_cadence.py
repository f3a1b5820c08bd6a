"""When to save, decided for all ranks by rank 0: clocks and losses differ from rank to rank, and a save that only some begin hangs."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tierstore.errors import UsageError
from tierstore.state.agreement import Agreement
from tierstore.tiers.cadence import Cadence

__all__ = ["SharedCadence"]


class SharedCadence:
    """Asked on every rank at the same steps. Rank 0 says with each answer at which step it can be another one; until then nobody talks.

    Args:
        cadence: The rule; only rank 0's is asked.
        agreement: The ranks.
    """

    def __init__(self, cadence: Cadence, agreement: Agreement) -> None:
        self._cadence = cadence
        self._agreement = agreement
        self._ask_again = 0

    def due(self, step: int, metrics: Mapping[str, float] | None = None) -> bool:
        """Whether all ranks save at `step`.

        Raises:
            DeadlineError: Rank 0 did not ask in time.
            UsageError: Rank 0 asks about another step.
        """
        if step < self._ask_again:
            return False

        def decide() -> bytes:
            verdict = self._cadence.look(step, metrics)
            return json.dumps([step, verdict.due, verdict.ask_again]).encode()

        asked, due, again = json.loads(self._agreement.hear(f"whether to save at step {step}", decide))
        if asked != step:
            raise UsageError(
                f"rank {self._agreement.rank} asks whether to save at step {step}, rank 0 at step {asked}",
                hint="all ranks call should_save at the same steps, in the same order",
            )
        self._ask_again = 0 if due else again
        return bool(due)
