"""When background work tries again, and what it says about its failures."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum

from tierstore.errors import LockedError, OutcomeUnknownError, StorageError, TierFullError, TierStoreError

__all__ = ["Backoff", "Verdict", "judge"]


class Verdict(Enum):
    """What to do about a failure of one step."""

    WAIT = "wait"
    """Somebody else is at it, or has to come first: not an error."""
    RETRY = "retry"
    """May pass by itself (endpoint down, tier full): warn once, try again for as long as the process lives."""
    REPORT = "report"
    """Needs a person (access denied, broken storage), who may well mend it while training runs: raise once, keep trying slowly."""
    FAIL = "fail"
    """Trying again gives the same answer (damaged everywhere, condemned): raise, give this step up."""


def judge(error: BaseException) -> Verdict:
    """Sorts an error of a background step. What is not ours is a fault in the program and fails the step."""
    if isinstance(error, LockedError):
        return Verdict.WAIT
    if isinstance(error, (TierFullError, OutcomeUnknownError)) or (isinstance(error, TierStoreError) and error.retryable):
        return Verdict.RETRY
    if isinstance(error, StorageError) or (isinstance(error, OSError) and not isinstance(error, TierStoreError)):
        return Verdict.REPORT
    return Verdict.FAIL


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Exponential waits with full jitter above one half, so that the nodes of a cluster do not come back in step.

    The first wait is `base_s` seconds at most, each further one twice as long, `cap_s` at most.
    """

    base_s: float = 0.5
    cap_s: float = 60.0
    failures: int = 0
    _random: random.Random = field(default_factory=random.Random, repr=False)

    def next_s(self) -> float:
        """Counts one more failure; returns the seconds to wait."""
        wait = min(self.cap_s, self.base_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return wait * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self.failures = 0
