"""Which tiers one checkpoint is read from, and in what order."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.names import INDEX, MANIFEST, OBJECTS, shard_name
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.tier import Tier, Tiers

__all__ = ["Source", "sources_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tier to read from. `files` limits what it is expected to have (None: all); what it lacks beyond is no news."""

    tier: Tier
    files: frozenset[str] | None
    expected: bool


def sources_of(tiers: Tiers, info: CheckpointInfo) -> list[Source]:
    """Nearest first: complete copies and what node tiers hold of them. Then, as every byte is proved anyway, whatever else there is.

    A copy that is being dropped comes last: its files may go while they are read, but it may be the last good one.
    """
    near: list[Source] = []
    rest: list[Source] = []
    going: list[Source] = []
    for tier in tiers:
        state = info.replicas.get(tier.name)
        if state == "evicting":
            going.append(Source(tier=tier, files=None, expected=False))
        elif tier.name in info.dropped:
            continue
        elif state == "complete":
            near.append(Source(tier=tier, files=None, expected=True))
        elif state == "receipt":
            own = {shard_name(rank, info.world_size) for rank in info.receipts.get(tier.name, ())}
            near.append(Source(tier=tier, files=frozenset({*own, MANIFEST, INDEX, OBJECTS}), expected=False))
        elif state is not None:
            rest.append(Source(tier=tier, files=None, expected=False))
    return [*near, *rest, *going]
