"""Checkpoints opened under a lease: what every reader goes through, and who ends the leases.

The lease costs a load no time: it is made, and the log is looked at, while manifest, index and objects are being read, and nobody waits
for it. A read that fails asks the log (`Lease.explain`) before it tells its caller what is wrong.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable

from tierstore.clock import Clock
from tierstore.config_models import StoreConfig
from tierstore.config_retention import GcConfig
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.documents import Run
from tierstore.tiers.leases import Lease, hold_lease
from tierstore.tiers.quarantine import Noting
from tierstore.tiers.replica import Replica, open_replica
from tierstore.tiers.tier import Tiers

__all__ = ["Leases", "lease_ttl_s"]

log = logging.getLogger(__name__)

_RELEASE_S = 5.0


def lease_ttl_s(config: StoreConfig, run: str) -> float:
    """How long a lease on a checkpoint of `run` outlives its last beat, in seconds; without a policy the default."""
    policy = config.retention_for(run)
    return (policy.gc if policy is not None else GcConfig()).lease_ttl_s


class Leases:
    """The leases that one process holds on a store's checkpoints; one for each that is open. Lives on the event loop.

    Args:
        tiers: The store's tiers.
        clock: Of the holder.
        ttl_s: The TTL of a run's leases, in seconds.

    Attributes:
        lossy_generation: Of what was read through these, the highest generation of a quantised copy that gave some of the bytes.
    """

    def __init__(self, tiers: Tiers, clock: Clock, ttl_s: Callable[[str], float]) -> None:
        self.lossy_generation = 0
        self._tiers = tiers
        self._clock = clock
        self._ttl_s = ttl_s
        self._warned: set[str] = set()
        self._noting = Noting(tiers, clock)
        self._held: weakref.WeakSet[Lease] = weakref.WeakSet()

    def hold(self, info: CheckpointInfo, *, kind: str = "reader") -> Lease:
        """A lease on a checkpoint, which is not begun yet."""
        lease = hold_lease(
            self._tiers,
            info.attempt,
            ttl_s=self._ttl_s(info.run),
            clock=self._clock,
            kind=kind,
            known=info.records[-1].seq if info.records else None,
            warned=self._warned,
        )
        self._held.add(lease)
        return lease

    async def open(self, info: CheckpointInfo, *, run: Run | None = None, objects: bool = False) -> Replica:
        """Opens a checkpoint and holds a lease on it, until `Replica.let_go`, or until nothing refers to the replica any more.

        What is found damaged meanwhile is noted in the log, in the background. Where the authority has lost its log nobody collects, and
        nothing is written there.

        Raises:
            NotFoundError: The checkpoint was deleted meanwhile.
            IntegrityError, VersionError, TemporaryError: As `open_replica`.
        """
        if info.authority_lost:
            return self._listened(await open_replica(self._tiers, info, run=run, objects=objects))
        lease = self.hold(info)
        lease.begin()
        try:
            replica = await open_replica(self._tiers, info, run=run, objects=objects, lease=lease, on_damage=self._noting.note)
            return self._listened(replica)
        except BaseException:
            lease.let_go()
            raise

    def _listened(self, replica: Replica) -> Replica:
        replica.on_lossy = self._lossy
        return replica

    def _lossy(self, generation: int) -> None:
        self.lossy_generation = max(self.lossy_generation, generation)

    async def close(self) -> None:
        """Ends all of them; one that can't be removed for a while is left to a collector. Damage is noted before."""
        await self._noting.close(_RELEASE_S)
        ending = [asyncio.ensure_future(lease.release()) for lease in self._held]
        if ending:
            _, left = await asyncio.wait(ending, timeout=_RELEASE_S)
            for task in left:
                task.cancel()
