"""What did not come to pass in one collection: what waits, and why, and what failed. The others go on."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from tierstore.errors import ConflictError, RefusedError, TierStoreError
from tierstore.names import Attempt
from tierstore.tiers.gc.reports import Failed

__all__ = ["Tally"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Tally:
    """What waits and what failed, in the order in which it was found. `authority`: its tier's name, for messages."""

    def __init__(self, authority: str) -> None:
        self.waiting: list[tuple[Attempt, str]] = []
        self.failed: list[Failed] = []
        self._authority = authority

    async def tried(self, attempt: Attempt, tier: str, work: Coroutine[Any, Any, _T]) -> _T | None:
        """Awaits one step; what was decided otherwise meanwhile is noted as waiting, a fault as failed. `tier` empty: the log."""
        try:
            return await work
        except (ConflictError, RefusedError) as error:
            self.waiting.append((attempt, error.message))
        except TierStoreError as error:
            log.warning("tier=%s checkpoint=%s not collected: %s", tier or self._authority, attempt.folder, error.message)
            self.failed.append(Failed(attempt=attempt, tier=tier, error=error))
        return None
