"""Tiers: a storage with a name, a scope and limits, and the ordered list of them that makes a store."""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from tierstore.config_packing import QuantiseConfig
from tierstore.errors import (
    AccessError,
    ConfigError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    RefusedError,
    StorageError,
    TierStoreError,
    UsageError,
    VersionError,
)
from tierstore.format.descriptor import Descriptor, decode_descriptor, encode_descriptor
from tierstore.names import DESCRIPTOR
from tierstore.storage.contract import Storage
from tierstore.storage.packed import PACKED_MARKER
from tierstore.tiers.costs import BUDGET_NBYTES, ReadSpeed
from tierstore.tiers.space_account import SpaceAccount

__all__ = [
    "UPLOAD_GRACE_S",
    "Outage",
    "Scope",
    "Tier",
    "TierRoot",
    "Tiers",
    "ensure_tier",
    "look_at_root",
    "make_descriptor",
    "read_store_id",
    "recheck",
    "still_there",
    "wrong_store",
]

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 30.0

UPLOAD_GRACE_S = 24 * 3600.0
"""How long ago an upload began that has no living writer, where no policy says otherwise. Seconds."""

Scope = Literal["node", "shared"]
"""``node``: each node sees only its own files there; ``shared``: all nodes see the same files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One place that keeps checkpoints. `capacity` is in bytes, `max_bandwidth` in bytes per second; None: no limit.

    `speed` is how fast it answers reads, and `account` what it holds, as far as that is known. `quantise`: what is stored with a loss
    there; None: nothing. `unchanged_once`: bytes that an earlier checkpoint has there are not stored again.
    """

    name: str
    storage: Storage
    scope: Scope
    durable: bool = True
    capacity: int | None = None
    max_bandwidth: int | None = None
    quantise: QuantiseConfig | None = None
    unchanged_once: bool = False
    speed: ReadSpeed = field(default_factory=ReadSpeed, compare=False, repr=False)
    account: SpaceAccount = field(default_factory=SpaceAccount, compare=False, repr=False)

    @property
    def uri(self) -> str:
        return self.storage.uri

    def __str__(self) -> str:
        return f"{self.name} ({self.storage.uri})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A tier that did not answer: why, and when it was asked, in seconds of `time.monotonic`."""

    error: TierStoreError
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The tiers of a store, nearest first.

    `outages` names the tiers that did not answer when the store was opened. Their descriptor has not been checked yet: `ensure_tier`
    does so before anything is written there, and takes them off the list. `scratch_nbytes` is memory that one load may use beside what
    it fills. `refusal`: why nothing may be written, where that is so. `upload_grace_s`: an upload that began longer ago, by the server's
    clock, has no living writer. `described`: the tiers that had their descriptor when they were opened for writing.
    """

    tiers: tuple[Tier, ...]
    authority: Tier
    durable_at: Tier
    store_id: str
    outages: dict[str, Outage] = field(default_factory=dict)
    scratch_nbytes: int = BUDGET_NBYTES
    refusal: RefusedError | None = None
    upload_grace_s: float = UPLOAD_GRACE_S
    described: frozenset[str] = frozenset()

    def check_writable(self) -> None:
        """For who is about to write.

        Raises:
            RefusedError: The authority is empty, though other tiers hold checkpoints: is it mounted?
        """
        if self.refusal is not None:
            raise RefusedError(self.refusal.message, hint=self.refusal.hint, **self.refusal.context)

    @property
    def nearest(self) -> Tier:
        return self.tiers[0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.tiers)

    def get(self, name: str) -> Tier:
        """The tier called `name`; UsageError with the nearest name otherwise."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        near = difflib.get_close_matches(name, self.names, n=1)
        raise UsageError(
            f"there is no tier {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"the tiers are {', '.join(self.names)}",
            tier=name,
        )

    @property
    def unreachable(self) -> dict[str, TierStoreError]:
        """The tiers that did not answer when the store was opened, or when they were last asked again, and why."""
        return {name: outage.error for name, outage in self.outages.items()}

    def is_authority(self, tier: Tier) -> bool:
        return tier.name == self.authority.name

    def __iter__(self) -> Iterator[Tier]:
        return iter(self.tiers)

    def __len__(self) -> int:
        return len(self.tiers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRoot:
    """What a tier's root shows: the id in its descriptor, None where it has none yet; whether packed files were ever written there."""

    store_id: str | None
    packed: bool


async def read_store_id(tier: Tier) -> str | None:
    """The id in the tier's descriptor, or None where it has none yet; raises as `look_at_root`."""
    return (await look_at_root(tier)).store_id


async def look_at_root(tier: Tier) -> TierRoot:
    """Lists a tier's root, and reads its descriptor.

    Raises:
        StorageError: The tier can't be reached.
        NotFoundError: Its bucket does not exist.
        FormatError, VersionError: The descriptor is foreign, or a newer version's.
    """
    listing = await tier.storage.children("")  # also tells a missing bucket from a missing descriptor
    names = {info.path for info in listing.files}
    store_id = await _store_id(tier) if DESCRIPTOR in names else None
    return TierRoot(store_id=store_id, packed=PACKED_MARKER in names)


async def _store_id(tier: Tier) -> str:
    try:
        return decode_descriptor(await tier.storage.read(DESCRIPTOR)).store_id
    except IntegrityError as error:
        hint = error.hint if isinstance(error, VersionError) else "it is foreign or damaged: restore it from another tier of this store"
        raise type(error)(f"{DESCRIPTOR} on tier {tier.name!r} at {tier.uri}: {error.message}", hint=hint, tier=tier.name) from error


async def make_descriptor(tier: Tier, store_id: str) -> str:
    """Makes the tier part of the store, if it is of none yet; returns the id that it has then."""
    data = encode_descriptor(Descriptor(store_id=store_id))
    if not tier.storage.capabilities.create:
        await tier.storage.put(DESCRIPTOR, data)
        return store_id
    try:
        await tier.storage.create(DESCRIPTOR, data)
    except ConflictError as error:
        existing = error.context.get("existing")
        return decode_descriptor(bytes(existing) if existing is not None else await tier.storage.read(DESCRIPTOR)).store_id
    return store_id


def wrong_store(tier: Tier, found: str, wanted: str) -> ConfigError:
    """The error for a tier that belongs to another store."""
    return ConfigError(
        f"tier {tier.name!r} at {tier.storage.uri} belongs to the store {found}, the other tiers to {wanted}",
        hint="give each store places of its own; to start a new store here, use an empty folder or prefix",
        tier=tier.name,
    )


async def ensure_tier(tiers: Tiers, tier: Tier, *, create: bool = True) -> None:
    """Checks the descriptor of a tier that did not answer at opening, before anything is written there; nothing for the others.

    Raises:
        StorageError: It still does not answer.
        ConfigError: It belongs to another store.
    """
    if tier.name not in tiers.outages:
        return
    found = await read_store_id(tier)
    if found is None and create:
        found = await make_descriptor(tier, tiers.store_id)
    if found is not None and found != tiers.store_id:
        raise wrong_store(tier, found, tiers.store_id)
    tiers.outages.pop(tier.name, None)
    log.warning("tier=%s answers again", tier.name)


async def still_there(tiers: Tiers, tier: Tier) -> None:
    """Before a long-lived writer writes: whether a local tier is still the place that was opened.

    A disk that was unmounted leaves an empty folder, and writing there would make a second store, on the wrong disk, that acknowledges.

    Raises:
        AccessError: Its descriptor is gone: a person is told, and the work waits for it.
    """
    counts = tier.scope == "shared" or tiers.is_authority(tier)  # a node's own tier decides nothing, and is made anew after each boot
    path = tier.storage.local_path(DESCRIPTOR) if counts and tier.name in tiers.described else None
    if path is not None and not await asyncio.to_thread(path.exists):
        raise AccessError(
            f"tier {tier.name!r} at {tier.uri} has lost its {DESCRIPTOR} since it was opened",
            hint="is its disk still mounted? The work goes on when it is back; if it was emptied for good, end the job and run "
            "`tierstore recover`",
            tier=tier.name,
        )


async def recheck(tiers: Tiers, tier: Tier) -> None:
    """For readers: passes a tier that answers, asks one that did not again now and then, and raises its error meanwhile.

    Without this, each look at the catalog would wait for the retries of a storage that is down.

    Raises:
        StorageError, NotFoundError, ConfigError: Why the tier can't be read.
    """
    outage = tiers.outages.get(tier.name)
    if outage is None:
        return
    if time.monotonic() - outage.since < _ASK_AGAIN_S:
        raise outage.error
    try:
        await ensure_tier(tiers, tier, create=False)
    except (StorageError, NotFoundError, ConfigError) as error:
        tiers.outages[tier.name] = Outage(error=error, since=time.monotonic())
        raise
