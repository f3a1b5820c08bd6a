"""Bring a committed checkpoint onto a tier because somebody asks for it: hydrate a nearer one, or copy again what a tier had dropped.

`advance` makes only the copies that the store wants by itself, and a tier whose copy was dropped on purpose is not to get it again.
Here a person wants it there. The drop is taken back last, when everything is there: the marker of a node's tier is removed, the others'
copy is recorded by ``replicated``. Until then the copy is what an unfinished eviction leaves, which no reader takes for whole.

Such a rest is what a collector removes. It leaves alone what a lease of the kind `BRING` holds; one that had looked before that lease
was made may still take files away, so they are looked for again when the copy is recorded, and copied once more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from tierstore.errors import ConflictError, LockedError, RefusedError
from tierstore.format.digest import digest_of
from tierstore.format.receipt import Receipt, encode_receipt
from tierstore.names import Attempt, part_name
from tierstore.storage.contract import FileInfo
from tierstore.tiers.advance import advance
from tierstore.tiers.checkpoint import parse_file_name
from tierstore.tiers.copies import copy_payload, record_replica
from tierstore.tiers.copying import CopyContext
from tierstore.tiers.locks import RunLock, lock_path
from tierstore.tiers.log import read_log
from tierstore.tiers.log_copies import copy_records
from tierstore.tiers.log_facts import LogFacts, fold
from tierstore.tiers.tier import Tier, ensure_tier
from tierstore.tiers.view import AttemptView, observe, staging

__all__ = ["BRING", "bring"]

log = logging.getLogger(__name__)

BRING = "bring"
"""The kind of the lease under which a copy is brought back."""

_TRIES = 3


async def bring(
    context: CopyContext, attempt: Attempt, tier: Tier, *, lease: AbstractAsyncContextManager[object], wait_s: float | None = 0.0
) -> bool:
    """Brings a committed checkpoint onto a tier, all of it and proved; idempotent, and nothing of it is visible before it is whole.

    Args:
        context: Tiers, limits and progress.
        attempt: The checkpoint.
        tier: Where to.
        lease: A lease on it of the kind `BRING`: its sources stay, and a collector leaves alone what lies on the tier already.
        wait_s: Seconds to wait for another process that works on this node; None: without end.

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
        _check(view, tier)
        if tier.name in {node.name for node in staging(context.tiers)}:
            return await _onto_node(context, view, tier)
        if tier.name not in view.dropped:
            if context.tiers.is_authority(tier) or tier.name in view.log.replicated:
                return False
            return (await advance(context, attempt, tier)).done
        return await _again(context, attempt, tier)


def _check(view: AttemptView, tier: Tier) -> None:
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
    for rank in sorted(found[1] for name in copied if (found := parse_file_name(name)) is not None and found[0] == "part"):
        part = await tier.storage.read(attempt.path(part_name(rank)))
        receipt = Receipt(rank=rank, world_size=size, part_digest=digest_of(part))
        await tier.storage.put(attempt.receipt_path(rank), encode_receipt(receipt))
    await copy_records(context.tiers.authority, tier, attempt, view.records)
    await _still_a_checkpoint(context, attempt)
    if tier.name in view.evicted:
        await tier.storage.delete([attempt.evicted_path])
    return True


async def _again(context: CopyContext, attempt: Attempt, tier: Tier) -> bool:
    """A copy where the log says that it was dropped; what it records last makes it count."""
    authority = context.tiers.authority
    for _ in range(_TRIES):
        view = await observe(context.tiers, attempt)
        _check(view, tier)
        copied = await copy_payload(context, view, tier)
        if not context.tiers.is_authority(tier):
            await copy_records(authority, tier, attempt, view.records)
        if await _lost(tier, attempt, copied):
            continue
        if tier.name in view.dropped:
            await record_replica(context, view, tier, copied)
        facts = await _still_a_checkpoint(context, attempt)
        if tier.name in facts.replicated and not await _lost(tier, attempt, copied):
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
