"""Bring a committed checkpoint onto a tier because somebody asks for it: hydrate a nearer one, or copy again what a tier had dropped.

`settle` is for who brought only the files that a load wants onto a node's tier (`hydrate`): it makes count what lies there, as `bring`
does where that is all of the checkpoint, else as a node's share of it.

`advance` makes only the copies that the store wants by itself, and a tier whose copy was dropped on purpose is not to get it again.
Here a person wants it there. The drop is taken back last, when everything is there: the marker of a node's tier is removed, the others'
copy is recorded by ``replicated``. Until then the copy is what an unfinished eviction leaves, which no reader takes for whole.

Such a rest is what a collector removes. It leaves alone what a lease of the kind `BRING` holds; one that had looked before that lease
was made may still take files away, so they are looked for again when the copy is recorded, and copied once more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from tierstore.crashpoints import reach
from tierstore.errors import ConflictError, LockedError, RefusedError
from tierstore.format.digest import digest_of
from tierstore.format.manifest import Manifest
from tierstore.format.receipt import Receipt, encode_receipt
from tierstore.names import MANIFEST, Attempt, part_name
from tierstore.storage.contract import FileInfo
from tierstore.tiers.advance import advance
from tierstore.tiers.checkpoint import parse_file_name
from tierstore.tiers.copies import copy_checkpoint, copy_payload, document_replica, quarantining, record_replica, sources_of
from tierstore.tiers.copying import CopyContext, Proof, copy_document
from tierstore.tiers.locks import RunLock, lock_path
from tierstore.tiers.log import read_log
from tierstore.tiers.log_copies import copy_records
from tierstore.tiers.log_facts import LogFacts, fold
from tierstore.tiers.tier import Tier, ensure_tier
from tierstore.tiers.view import AttemptView, observe, staging

__all__ = ["BRING", "bring", "check_wanted", "is_settled", "settle"]

log = logging.getLogger(__name__)

BRING = "bring"
"""The kind of the lease under which a copy is brought back."""

_TRIES = 3


async def bring(
    context: CopyContext,
    attempt: Attempt,
    tier: Tier,
    *,
    lease: AbstractAsyncContextManager[object],
    wait_s: float | None = 0.0,
    exact: bool = False,
) -> bool:
    """Brings a committed checkpoint onto a tier, all of it and proved; idempotent, and nothing of it is visible before it is whole.

    Args:
        context: Tiers, limits and progress.
        attempt: The checkpoint.
        tier: Where to.
        lease: A lease on it of the kind `BRING`: its sources stay, and a collector leaves alone what lies on the tier already.
        wait_s: Seconds to wait for another process that works on this node; None: without end.
        exact: Store it exact also where the tier quantises, and in the place of a quantised copy.

    Returns:
        Whether there was something to do.

    Raises:
        RefusedError: It has expired, is gone, or its copy there was found damaged: `repair` mends that one.
        LockedError: Another process works on this node, or the tier's earlier copy is still being dropped.
        ConflictError: A collector took files away again and again.
        TierFullError: No room; nothing was copied.
        IntegrityError: No good copy of a file is left on any tier.
        StorageError: A tier failed; what was copied stays out of sight, and the next call continues.
    """
    lock = RunLock(lock_path(context.tiers, attempt.run), attempt.run)
    async with lock.hold(wait_s=wait_s), lease:
        await ensure_tier(context.tiers, tier)
        view = await observe(context.tiers, attempt)
        check_wanted(view, tier)
        if tier.name in {node.name for node in staging(context.tiers)}:
            return await _onto_node(context, view, tier)
        if tier.name not in view.dropped:
            lossy = exact and tier.name in view.log.quantised
            if context.tiers.is_authority(tier) or (tier.name in view.log.replicated and not lossy):
                return False
            if exact:
                await copy_checkpoint(context, view, tier, exact=True)
                return True
            return (await advance(context, attempt, tier)).done
        return await _again(context, attempt, tier, exact=exact)


def check_wanted(view: AttemptView, tier: Tier) -> None:
    """Whether something of it may be brought onto the tier.

    Raises:
        RefusedError: It is no checkpoint (any more), has expired, or its copy there was found damaged.
        LockedError: The tier's earlier copy is still being dropped.
    """
    attempt, facts = view.attempt, view.log
    named = f"step {attempt.step} of run {attempt.run!r}"
    told = {"run": attempt.run, "step": attempt.step, "tier": tier.name}
    if not facts.committed or facts.swept:
        raise RefusedError(f"{named} is no checkpoint any more", hint="`tierstore ls` shows those that are", **told)
    if facts.hidden:
        raise RefusedError(f"{named} has expired", hint="take it back first: `tierstore undelete`", **told)
    if facts.quarantined_on(tier.name) and tier.name not in view.dropped:
        raise RefusedError(
            f"the copy of {named} on tier {tier.name!r} was found damaged",
            hint=f"`tierstore repair --tier {tier.name}` writes what is bad anew",
            **told,
        )
    if tier.name in facts.evicting:
        raise LockedError(
            f"the earlier copy of {named} is still being dropped from tier {tier.name!r}",
            hint="`tierstore gc` finishes that; then ask again",
            **told,
        )


async def _onto_node(context: CopyContext, view: AttemptView, tier: Tier) -> bool:
    """All ranks' files, their receipts, and the log's records, the commit record last; then the marker goes, if there is one."""
    attempt, size = view.attempt, view.log.world_size or 1
    if tier.name not in view.dropped and tier.name in view.documented and len(view.ranks(tier.name)) == size:
        return False
    copied = await copy_payload(context, view, tier)
    for rank in sorted(found[1] for name in copied.files if (found := parse_file_name(name)) is not None and found[0] == "part"):
        await _put_receipt(tier, attempt, rank, size)
    await copy_records(context.tiers.authority, tier, attempt, view.records)
    await _finish_on_node(context, view, tier)
    return True


async def is_settled(tier: Tier, attempt: Attempt, shards: Mapping[str, int]) -> bool:
    """Whether all that a node's tier has of a checkpoint's shards counts, from its listings alone.

    Args:
        tier: The node's tier.
        attempt: The checkpoint.
        shards: All its shards, by name, with their lengths in bytes.

    Raises:
        StorageError: The tier can't be listed.
    """
    files, logs = await tier.storage.children(attempt.folder), await tier.storage.children(attempt.log_folder)
    names = {info.path for info in (*files.files, *logs.files)}
    if attempt.evicted_path in names or not {attempt.path(MANIFEST), attempt.record_path(0)} <= names:
        return False
    ranks = _ranks_of(shards, {info.path.rpartition("/")[2]: info.nbytes for info in files.files})
    return all(attempt.receipt_path(rank) in names for rank in ranks)


async def settle(context: CopyContext, attempt: Attempt, tier: Tier, manifest: Manifest, *, wait_s: float | None) -> bool:
    """Makes what a node's tier has of a committed checkpoint's shards count: listed, read first, evicted by the policy, verified.

    Where all of them are there the copy is completed, as `bring` leaves it; else they become a node's share of it: for each rank
    whose shard is there the part record and a receipt, then the documents and the log's records. The mark of an earlier drop goes last.

    Args:
        context: Tiers, limits and progress.
        attempt: The checkpoint; the caller holds a lease on it of the kind `BRING`.
        tier: The node's tier.
        manifest: The checkpoint's, proved.
        wait_s: Seconds to wait for another process that works on this node; None: without end.

    Returns:
        Whether there was something to do.

    Raises:
        LockedError, RefusedError, TierFullError, IntegrityError, StorageError: As `bring`; what lies there stays out of sight.
    """
    shards = {file.name: file.nbytes for file in manifest.files if file.kind == "shard"}
    lock = RunLock(lock_path(context.tiers, attempt.run), attempt.run)
    async with lock.hold(wait_s=wait_s):
        if await is_settled(tier, attempt, shards):
            return False
        view = await observe(context.tiers, attempt)
        check_wanted(view, tier)
        there = {info.path.rpartition("/")[2]: info.nbytes for info in (await tier.storage.children(attempt.folder)).files}
        if all(there.get(name) == nbytes for name, nbytes in shards.items()):
            return await _onto_node(context, view, tier)
        return await _share_onto_node(context, view, tier, manifest, _ranks_of(shards, there))


def _ranks_of(shards: Mapping[str, int], there: Mapping[str, int]) -> list[int]:
    """The ranks whose shard is there, whole."""
    found = [parse_file_name(name) for name, nbytes in shards.items() if there.get(name) == nbytes]
    return sorted(parsed[1] for parsed in found if parsed is not None)


async def _share_onto_node(context: CopyContext, view: AttemptView, tier: Tier, manifest: Manifest, ranks: Sequence[int]) -> bool:
    """Receipts come before the copy of the log: with it and no receipt the tier would seem to have all of the checkpoint."""
    attempt, size = view.attempt, view.log.world_size or 1
    records = {file.name: file for file in manifest.files}
    missing = [rank for rank in ranks if rank not in view.ranks(tier.name)]
    if not ranks:
        return False
    for rank in missing:
        name = part_name(rank)
        proof = Proof(digest=records[name].digest, block_nbytes=manifest.block_nbytes)
        sources = sources_of(context, view, tier, name)
        await copy_document(context, attempt, tier, sources, name, proof, quarantining(context, view))
        await _put_receipt(tier, attempt, rank, size)
    await document_replica(context, view, tier)
    await _finish_on_node(context, view, tier)
    return True


async def _put_receipt(tier: Tier, attempt: Attempt, rank: int, world_size: int) -> None:
    part = await tier.storage.read(attempt.path(part_name(rank)))
    receipt = Receipt(rank=rank, world_size=world_size, part_digest=digest_of(part))
    reach("bring.before-receipt")
    await tier.storage.put(attempt.receipt_path(rank), encode_receipt(receipt))
    reach("bring.after-receipt")


async def _finish_on_node(context: CopyContext, view: AttemptView, tier: Tier) -> None:
    """The mark of an earlier drop goes, if there is one: from now on the copy counts."""
    await _still_a_checkpoint(context, view.attempt)
    if tier.name in view.evicted:
        reach("bring.before-unmark")
        await tier.storage.delete([view.attempt.evicted_path])
        reach("bring.after-unmark")


async def _again(context: CopyContext, attempt: Attempt, tier: Tier, *, exact: bool) -> bool:
    """A copy where the log says that it was dropped; what it records last makes it count."""
    authority = context.tiers.authority
    for _ in range(_TRIES):
        view = await observe(context.tiers, attempt)
        check_wanted(view, tier)
        copied = await copy_payload(context, view, tier, exact=exact)
        if not context.tiers.is_authority(tier):
            await copy_records(authority, tier, attempt, view.records)
        if await _lost(tier, attempt, copied.files):
            continue
        if tier.name in view.dropped and not await record_replica(context, view, tier, copied):
            exact = True
            continue
        facts = await _still_a_checkpoint(context, attempt)
        if tier.name in facts.replicated and not await _lost(tier, attempt, copied.files):
            return True
        log.info("tier=%s checkpoint=%s was changed while it was copied, and is copied again", tier.name, attempt.folder)
    raise ConflictError(
        f"step {attempt.step} of run {attempt.run!r}: files on tier {tier.name!r} went again while they were copied",
        hint="a collector is at work there: `tierstore gc` finishes it; then ask again",
        run=attempt.run,
        step=attempt.step,
        tier=tier.name,
    )


async def _lost(tier: Tier, attempt: Attempt, copied: Mapping[str, FileInfo]) -> list[str]:
    """Files that are not, or not as long as they were, on the tier any more."""
    there = {info.path.rpartition("/")[2]: info.nbytes for info in (await tier.storage.children(attempt.folder)).files}
    return [name for name, info in copied.items() if there.get(name) != info.nbytes]


async def _still_a_checkpoint(context: CopyContext, attempt: Attempt) -> LogFacts:
    facts = fold(await read_log(context.tiers.authority.storage, attempt))
    if facts.hidden:
        raise RefusedError(
            f"step {attempt.step} of run {attempt.run!r} expired while it was copied",
            hint="`tierstore undelete` takes it back; `tierstore gc` removes what was copied",
            run=attempt.run,
            step=attempt.step,
        )
    return facts
