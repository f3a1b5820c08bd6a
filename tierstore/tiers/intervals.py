"""How long to wait between saves: the arithmetic, without state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.tiers.checkpoint import CheckpointInfo

__all__ = ["ObservedFailures", "daly_interval", "observed_failures"]

_PRIOR_S = 86400.0
"""A run that has never failed is taken to fail once a day: without failures there is nothing to divide by."""


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """The time of work between two saves that loses the least of it, in seconds.

    The estimate of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
    Systems 22 (2006) 303-312, equation 37; its first term is J. W. Young's, "A first order approximation to the optimum checkpoint
    interval", Communications of the ACM 17 (1974) 530-531: ``sqrt(2 * cost * MTBF)``.

    Args:
        cost_s: How long a save keeps training from working, in seconds.
        mtbf_s: The mean time between failures of the whole job, in seconds.
    """
    if cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2.0 * mtbf_s)
    return max(cost_s, math.sqrt(2.0 * cost_s * mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedFailures:
    """What a run's own history tells: how long it ran, and how often it began again. Seconds."""

    uptime_s: float
    restarts: int

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures, with one failure and one day of uptime assumed before the run: it settles as history grows."""
        return (self.uptime_s + _PRIOR_S) / (self.restarts + 1)


def observed_failures(checkpoints: Sequence[CheckpointInfo]) -> ObservedFailures:
    """Reads restarts off the commits: another process committed than the one before. Each restart is taken for a failure.

    The time between the last commit of one process and the first of the next is not counted as uptime: the job may have waited in a queue.
    """
    commits = sorted((info.committed_at, info.records[0].actor) for info in checkpoints if info.records)
    uptime = 0.0
    restarts = 0
    for (before, old), (after, new) in itertools.pairwise(commits):
        if old == new:
            uptime += (after - before).total_seconds()
        else:
            restarts += 1
    return ObservedFailures(uptime_s=uptime, restarts=restarts)
