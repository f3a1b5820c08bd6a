"""Opening a store's tiers: storages from the configuration, the store's descriptor on each, and a proof that the authority is one."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from tierstore.config_models import StoreConfig
from tierstore.config_retention import GcConfig
from tierstore.config_tiers import TierConfig
from tierstore.errors import (
    AccessError,
    ConfigError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    RefusedError,
    StorageError,
    TierStoreError,
)
from tierstore.names import DESCRIPTOR, attempt_of_log_path, log_root
from tierstore.storage.contract import Storage
from tierstore.storage.opening import open_storage
from tierstore.storage.packed import PackedStorage, Packing, QuantiseRule
from tierstore.storage.probe import probe
from tierstore.tiers.catalog import runs
from tierstore.tiers.costs import ReadSpeed
from tierstore.tiers.log import record_seq
from tierstore.tiers.tier import Outage, Tier, Tiers, look_at_root, make_descriptor, read_store_id, wrong_store
from tierstore.units import format_some

__all__ = ["LostAuthority", "Opener", "default_opener", "open_tiers", "rejoin"]

log = logging.getLogger(__name__)

LostAuthority = Literal["refuse", "read", "recover"]
"""What to do where the authority is empty while other tiers hold checkpoints of the store.

``refuse``: don't open it. ``read``: open it, but write nothing: `Tiers.check_writable` says why. ``recover``: write all the same; the
authority gets no descriptor yet: `rejoin` gives it one when what it has lost is rebuilt.
"""

Opener = Callable[[TierConfig, StoreConfig], Storage]
"""Makes a tier's storage; no I/O."""


def default_opener(tier: TierConfig, config: StoreConfig) -> Storage:
    """The storage that the configuration names."""
    return open_storage(
        tier.uri,
        tier.options,
        durable=tier.durable,
        threads=config.io.threads,
        nice=config.io.nice,
        request_timeout_s=config.io.request_timeout_s,
        stall_timeout_s=config.io.stall_timeout_s,
        concurrency=config.io.concurrency,
    )


async def open_tiers(config: StoreConfig, *, create: bool = True, lost: LostAuthority = "refuse", opener: Opener = default_opener) -> Tiers:
    """Opens all tiers and checks that they belong to one store.

    Args:
        config: The configuration.
        create: True: for writing. The authority and the nearest tier must work, descriptors are made where there are none, and
            create-if-absent is tried on the authority. False: nothing is written anywhere.
        lost: What to do for writing where the authority is empty while other tiers hold checkpoints of the store.
        opener: Makes a tier's storage.

    Raises:
        ConfigError: A tier belongs to another store, or the authority has no working create-if-absent.
        AccessError, TemporaryError, NotFoundError, StorageError: A tier that must work does not; names it and says what to do.
        FormatError, VersionError: With ``create=True``: a tier's descriptor is foreign, damaged, or a newer version's.
        RefusedError: With ``create=True``: the authority is empty, but other tiers hold checkpoints of the store.
        NotFoundError: With ``create=False``: there is no store on any tier that was reached.
    """
    tiers = tuple(
        Tier(
            name=each.name,
            storage=_packing(opener(each, config), each, config),
            scope=each.scope,
            durable=each.durable,
            capacity=each.capacity,
            max_bandwidth=each.max_bandwidth,
            quantise=each.quantise,
            unchanged_once=each.stores_unchanged_once,
            speed=ReadSpeed(latency_s=each.read.latency_s, bandwidth=each.read.bandwidth),
        )
        for each in config.tiers
    )
    try:
        return await _join(config, tiers, create=create, lost=lost)
    except BaseException:
        for tier in tiers:
            await tier.storage.close()
        raise


def _packing(storage: Storage, tier: TierConfig, config: StoreConfig) -> Storage:
    """The storage, with packed shards where the configuration asks for them."""
    if not tier.packs:
        return storage
    rule = None
    if (wanted := tier.quantise) is not None:
        rule = QuantiseRule(scheme=wanted.scheme, include=wanted.include, exclude=wanted.exclude or (), min_numel=wanted.min_numel)
    packing = Packing(
        codec=tier.codec.name,
        level=tier.codec.level,
        threads=tier.codec.threads,
        nice=config.io.nice,
        master_once=tier.stores_master_once,
        quantise=rule,
    )
    return PackedStorage(storage, packing)


def _reading_packed(tier: Tier) -> Tier:
    """The tier, able to read packed files whatever is written there from now on."""
    return tier if isinstance(tier.storage, PackedStorage) else replace(tier, storage=PackedStorage(tier.storage, None))


async def _join(config: StoreConfig, tiers: tuple[Tier, ...], *, create: bool, lost: LostAuthority) -> Tiers:
    given = {tier.name: tier for tier in tiers}
    authority = given[config.authority.name]
    must_work = {authority.name, tiers[0].name} if create else set()

    outages: dict[str, Outage] = {}
    found: dict[str, str | None] = {}
    packed: set[str] = set()

    async def look(tier: Tier) -> None:
        try:
            root = await look_at_root(tier)
            found[tier.name] = root.store_id
            packed.update([tier.name] if root.packed else [])
        except IntegrityError as error:  # not to be written over; a reader can do without this tier
            if create:
                raise
            outages[tier.name] = Outage(error=error, since=time.monotonic())
            log.warning("tier=%s is left out: %s", tier.name, error.message)
        except (StorageError, NotFoundError) as error:
            if tier.name in must_work:
                raise _unusable(tier, error, authority) from error
            outages[tier.name] = Outage(error=error, since=time.monotonic())
            log.warning("tier=%s can't be reached and is left out for now: %s", tier.name, error.message)

    looks = await asyncio.gather(*(look(tier) for tier in tiers), return_exceptions=True)
    for failure in looks:
        if failure is not None:
            raise failure
    packed.update(outages)  # what could not be looked at may have packed files
    tiers = tuple(_reading_packed(tier) if tier.name in packed else tier for tier in tiers)
    by_name = {tier.name: tier for tier in tiers}
    authority = by_name[authority.name]

    store_id = _common_id(found, authority, tiers)
    if store_id is None:
        if not create:
            if outages:
                raise next(iter(outages.values())).error
            raise NotFoundError(
                f"there is no store at {', '.join(tier.uri for tier in tiers)}",
                hint="check the paths and URIs; a store is made by the first save",
            )
        store_id = secrets.token_hex(16)
    refusal = None
    if authority.name in found and found[authority.name] is None and any(found.values()):
        refusal = await _look_at_lost_authority(authority, [t for t in tiers if found.get(t.name)], store_id)
    if refusal is not None and create and lost == "refuse":
        raise refusal
    if refusal is not None:
        log.warning("%s: %s", refusal.message, refusal.hint)

    opened = Tiers(
        tiers=tiers,
        authority=authority,
        durable_at=by_name[config.durable_tier.name],
        store_id=store_id,
        outages=outages,
        scratch_nbytes=config.io.max_scratch,
        refusal=None if lost == "recover" else refusal,
        upload_grace_s=(config.retention.gc if config.retention is not None else GcConfig()).multipart_grace_s,
    )
    if not create or opened.refusal is not None:
        return opened
    return await _make(opened, found, must_work, wait=refusal is not None)


async def _look_at_lost_authority(authority: Tier, others: Sequence[Tier], store_id: str) -> RefusedError | None:
    """An authority without a descriptor, in a store that has one elsewhere: an unmounted disk, an emptied bucket, or nothing yet.

    Returns:
        Why nothing may be written: another tier holds checkpoints, so that it was an authority, and is not any more. To write there would
        begin a new log beside the old one, below a mount point in the worst case. None where nothing was committed yet.
    """
    holding: dict[str, set[str]] = {}
    for tier in others:
        try:
            alone = Tiers(tiers=(tier,), authority=tier, durable_at=tier, store_id=store_id)
            for run in await runs(alone):
                if await _has_commits(tier, run):
                    holding.setdefault(tier.name, set()).add(run)
        except (StorageError, NotFoundError) as error:
            log.debug("tier=%s can't be looked at: %s", tier.name, error.message)
    if not holding:
        log.warning("tier=%s has no descriptor, but other tiers belong to the store %s", authority.name, store_id)
        return None
    held = format_some(sorted(set().union(*holding.values())), 4)
    what = (
        f"tier {authority.name!r} at {authority.uri}, which decides what is committed, is empty, but {', '.join(holding)} "
        f"{'hold' if len(holding) > 1 else 'holds'} checkpoints of this store (run {held})"
    )
    hint = (
        "is it mounted, and the right folder or bucket? If it is really lost, `tierstore recover` makes it anew and rebuilds its log; "
        "until then what other tiers hold can be loaded, and nothing can be saved"
    )
    return RefusedError(what, hint=hint, tier=authority.name, store_id=store_id)


async def _has_commits(tier: Tier, run: str) -> bool:
    found = (attempt_of_log_path(info.path) for info in await tier.storage.list(log_root(run)))
    return any(split is not None and record_seq(split[1]) == 0 for split in found)


async def rejoin(tiers: Tiers) -> bool:
    """Makes the authority part of the store again, after what it had lost was rebuilt; False where it is one already.

    Raises:
        ConfigError: It belongs to another store.
        StorageError: It can't be written.
    """
    found = await read_store_id(tiers.authority)
    made = found or await make_descriptor(tiers.authority, tiers.store_id)
    if made != tiers.store_id:
        raise wrong_store(tiers.authority, made, tiers.store_id)
    return found is None


async def _make(opened: Tiers, found: dict[str, str | None], must_work: set[str], *, wait: bool) -> Tiers:
    """Makes the descriptors that are missing, the authority's first: of two processes that begin a store at once, one decides its id.

    `wait`: not the authority's, which has lost what it should decide about.
    """
    authority = opened.authority
    ordered = [authority, *(tier for tier in opened if tier.name != authority.name)]
    store_id = opened.store_id
    for tier in ordered:
        if tier.name in opened.outages:
            continue
        try:
            if tier.name == authority.name:
                await _prove_authority(tier, new=found[tier.name] is None)
            elif tier.name in must_work:
                await _prove_writable(tier)
            if found[tier.name] is None and not (wait and tier.name == authority.name):
                made = await make_descriptor(tier, store_id)
                if tier.name == authority.name:
                    store_id = made
                elif made != store_id:
                    raise wrong_store(tier, made, store_id)
        except StorageError as error:
            if tier.name in must_work:
                raise _unusable(tier, error, authority) from error
            opened.outages[tier.name] = Outage(error=error, since=time.monotonic())
            log.warning("tier=%s can't be written and is left out for now: %s", tier.name, error.message)
    there = frozenset(t.name for t in ordered if t.name not in opened.outages and not (wait and t.name == authority.name))
    return replace(opened, store_id=store_id, described=there)


def _common_id(found: dict[str, str | None], authority: Tier, tiers: tuple[Tier, ...]) -> str | None:
    """The store's id: the authority's, or what the others agree on; None for a store that does not exist yet."""
    decided = found.get(authority.name)
    for tier in tiers:
        other = found.get(tier.name)
        if other is None:
            continue
        if decided is None:
            decided = other
        elif other != decided:
            raise wrong_store(tier, other, decided)
    return decided


async def _prove_authority(tier: Tier, *, new: bool) -> None:
    """Create-if-absent has one winner (PROTOCOLS.md §1, §3): tried in full when a store begins; later in short, and only where a server
    that may have changed since answers. A local file system's link is the kernel's, and a trial costs several fsyncs.

    Raises:
        ConfigError: It does not hold.
        StorageError: The tier can't be written.
    """
    if new:
        report = await probe(tier.storage)
        if not report.checks[0].ok:
            raise AccessError(f"it can't be written: {report.checks[0].detail.splitlines()[0]}", hint="check the permissions and the space")
        if not report.can_be_authority:
            raise _no_authority(tier, "; ".join(f"{check.name}: {check.detail.splitlines()[0]}" for check in report.failures))
        return
    if tier.storage.capabilities.local:
        await _prove_writable(tier)
        return
    path = f".tierstore-probe-{secrets.token_hex(8)}/raced"
    first, second = (f"{number} {secrets.token_hex(8)}".encode() for number in (1, 2))
    try:
        await tier.storage.create(path, first)
        try:
            await tier.storage.create(path, second)
        except ConflictError as lost:
            if lost.context.get("existing", first) == first:
                return
        raise _no_authority(tier, "create-if-absent: a name was created twice")
    finally:
        await tier.storage.delete([path])


async def _prove_writable(tier: Tier) -> None:
    """A tier that every save needs is tried now: an error here is worth more than one in the background, hours later.

    Raises:
        AccessError: It can't be written.
    """
    descriptor = tier.storage.local_path(DESCRIPTOR)
    if descriptor is not None:  # the operating system tells without a write (and without its fsync)
        if descriptor.exists() and not os.access(descriptor.parent, os.W_OK | os.X_OK):
            raise AccessError(f"{descriptor.parent} is not writable", hint="check its owner and mode, and that it is not mounted read-only")
        return
    path = f".tierstore-probe-{secrets.token_hex(8)}/written"
    try:
        await tier.storage.put(path, b"probe")
    finally:
        await tier.storage.delete([path])


def _no_authority(tier: Tier, reason: str) -> ConfigError:
    return ConfigError(
        f"tier {tier.name!r} at {tier.uri} can't be the authority that decides what is committed: {reason}",
        hint="`tierstore doctor --probe` shows what fails; put one with conditional writes first among the shared tiers",
        tier=tier.name,
    )


_REMEDY = {
    "access": "check that it is writable, and the credentials",
    "not-found": "create the bucket, or correct the name",
    "temporary": "check that the endpoint is up and reachable from here",
    "deadline": "check that the endpoint is up and reachable from here",
}


def _unusable(tier: Tier, error: TierStoreError, authority: Tier) -> TierStoreError:
    role = "decides what is committed" if tier.name == authority.name else "takes every save first"
    return type(error)(
        f"tier {tier.name!r} at {tier.uri}, which {role}, can't be used: {error.message}",
        hint=error.hint or _REMEDY.get(error.kind, "see `tierstore doctor --probe`"),
        **{**error.context, "tier": tier.name},
    )
