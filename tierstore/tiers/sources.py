"""Which tiers one checkpoint is read from, and in what order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierstore.names import INDEX, MANIFEST, OBJECTS, shard_name
from tierstore.tiers.checkpoint import CheckpointInfo
from tierstore.tiers.tier import Tier, Tiers

__all__ = ["Source", "sources_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tier to read from. `files` limits what it is expected to have (None: all); what it lacks beyond is no news.

    `quantised`: what is known of a copy that is not exact; None: it is.
    """

    tier: Tier
    files: frozenset[str] | None
    expected: bool
    quantised: Mapping[str, Any] | None = None


def sources_of(tiers: Tiers, info: CheckpointInfo) -> list[Source]:
    """Nearest first: complete copies and what node tiers hold of them. Then, as every byte is proved anyway, whatever else there is.

    A copy that is being dropped comes late: its files may go while they are read, but it may be the last good one. A quantised one comes
    last, for what no other has.
    """
    near: list[Source] = []
    rest: list[Source] = []
    going: list[Source] = []
    lossy: list[Source] = []
    for tier in tiers:
        state = info.replicas.get(tier.name)
        quantised = info.quantised_on(tier.name)
        if state is not None and quantised is not None:
            lossy.append(Source(tier=tier, files=None, expected=state == "quantised", quantised=quantised))
        elif state == "evicting":
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
    return [*near, *rest, *going, *lossy]
