"""What the tiers hold of one attempt: the state that promotion is computed from (there is no journal)."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierstore.errors import IntegrityError, NotFoundError, StorageError
from tierstore.format.receipt import Receipt, decode_receipt
from tierstore.format.record import Record
from tierstore.names import MANIFEST, Attempt
from tierstore.tiers.log import read_log
from tierstore.tiers.log_facts import LogFacts, fold
from tierstore.tiers.tier import Tier, Tiers

__all__ = ["AttemptView", "further", "many_disks", "observe", "staging"]

log = logging.getLogger(__name__)

_RECEIPT = re.compile(r"receipt-(\d{5})\.json")
_PART = re.compile(r"part-(\d{5})\.safetensors")


def staging(tiers: Tiers) -> tuple[Tier, ...]:
    """The tiers before the authority, nearest first: where parts lie with receipts until the attempt is committed."""
    names = [t.name for t in tiers.tiers]
    return tiers.tiers[: names.index(tiers.authority.name)]


def further(tiers: Tiers) -> tuple[Tier, ...]:
    """The tiers after the authority, in order: where committed checkpoints are promoted to."""
    names = [t.name for t in tiers.tiers]
    return tiers.tiers[names.index(tiers.authority.name) + 1 :]


def many_disks(tiers: Tiers, tier: Tier, world_size: int) -> bool:
    """Whether the tier's name stands for as many disks as there are nodes: what is true of one says nothing of the others.

    From the authority on every process sees the same disk; where that lies on a node, the node is the only one.
    """
    return tier.scope == "node" and world_size > 1 and tier.name in {t.name for t in staging(tiers)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """One attempt as the tiers show it at one moment."""

    attempt: Attempt
    records: tuple[Record, ...]
    log: LogFacts
    receipts: Mapping[str, Mapping[int, Receipt]]
    """Staging tier → rank → its receipt; a tier that could not be read is left out."""
    documented: frozenset[str]
    """Staging tiers that have the manifest and their copy of the commit record."""
    evicted: frozenset[str]
    """Staging tiers whose copy was dropped on this node, on purpose."""
    parts: frozenset[int]
    """Ranks whose part record is on the authority."""
    world_size: int | None
    """As the receipts say; None where there is no receipt to read."""

    @property
    def dropped(self) -> frozenset[str]:
        """The tiers that are not to have a copy again by themselves, and are no source of one."""
        return self.log.dropped | self.evicted

    def ranks(self, tier: str) -> frozenset[int]:
        return frozenset(self.receipts.get(tier, {}))


async def observe(tiers: Tiers, attempt: Attempt, *, world_size: int | None = None, records: Sequence[Record] | None = None) -> AttemptView:
    """Looks at one attempt on the staging tiers and the authority (further tiers are known from the authority's log).

    Args:
        tiers: The store's tiers.
        attempt: What to look at.
        world_size: How many ranks save together, where the caller knows.
        records: Its log, where the authority has lost it; None: the authority's.

    Raises:
        StorageError: The authority can't be read. A staging tier that can't be read is passed over with a warning: what it holds
            is moved when it comes back.
    """
    nodes = staging(tiers)
    looks = [_look(tier, attempt) for tier in nodes]
    found = await asyncio.gather(*looks)
    records = await read_log(tiers.authority.storage, attempt) if records is None else tuple(records)
    state = fold(records)
    parts: frozenset[int] = frozenset()
    if state.fate is None:
        listing = await tiers.authority.storage.children(attempt.folder)
        parts = _numbers(_PART, [f.path for f in listing.files])
    receipts = {tier.name: look.receipts for tier, look in zip(nodes, found, strict=True)}
    sizes = {r.world_size for held in receipts.values() for r in held.values()}
    return AttemptView(
        attempt=attempt,
        records=records,
        log=state,
        receipts=receipts,
        documented=frozenset(tier.name for tier, look in zip(nodes, found, strict=True) if look.documented),
        evicted=frozenset(tier.name for tier, look in zip(nodes, found, strict=True) if look.evicted),
        parts=parts,
        world_size=world_size if world_size is not None else next(iter(sizes)) if len(sizes) == 1 else None,
    )


@dataclass(slots=True, kw_only=True)
class _Look:
    """What one staging tier shows."""

    receipts: dict[int, Receipt] = field(default_factory=dict)
    documented: bool = False
    evicted: bool = False


async def _look(tier: Tier, attempt: Attempt) -> _Look:
    look = _Look()
    try:
        logs = await tier.storage.children(attempt.log_folder)
        names = [f.path for f in logs.files]
        look.evicted = attempt.evicted_path in names
        for rank in sorted(_numbers(_RECEIPT, names)):
            look.receipts[rank] = decode_receipt(await tier.storage.read(attempt.receipt_path(rank)))
        if attempt.record_path(0) in names:
            files = await tier.storage.children(attempt.folder)
            look.documented = attempt.path(MANIFEST) in [f.path for f in files.files]
    except (StorageError, NotFoundError, IntegrityError) as error:  # not found: removed between a listing and a read
        log.warning("tier=%s checkpoint=%s can't be looked at: %s", tier.name, attempt.folder, error.message)
    return look


def _numbers(pattern: re.Pattern[str], paths: list[str]) -> frozenset[int]:
    found = (pattern.fullmatch(path.rpartition("/")[2]) for path in paths)
    return frozenset(int(m[1]) for m in found if m)
