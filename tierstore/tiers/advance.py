"""One attempt, one tier: the next steps that bring the attempt onto that tier, computed from what the tiers hold.

`advance` is all there is to promotion: the trainer's worker calls it for its own saves, the reconciler for everything that it
finds, and each can stop at any instant and be continued by the other, for every step is found again by looking:

- a staging tier (before the authority) wants the part of each rank that a nearer tier has a receipt for, and, once the attempt is
  committed, the documents (objects, index, manifest, log) that make its replica complete in itself;
- the authority wants every rank's part, and then the commit;
- a tier after it wants the whole committed checkpoint.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tierstore.crashpoints import reach
from tierstore.errors import IncompleteError, NotFoundError, RefusedError
from tierstore.format.part import Part, decode_part
from tierstore.names import Attempt, part_name
from tierstore.tiers.commit import commit
from tierstore.tiers.copies import copy_checkpoint, document_replica, warn_only
from tierstore.tiers.copying import CopyContext, Proof, copy_file, read_document
from tierstore.tiers.recover_references import say_again
from tierstore.tiers.space_estimate import check_room
from tierstore.tiers.tier import Tier
from tierstore.tiers.view import AttemptView, further, observe, staging
from tierstore.units import format_some

__all__ = ["Outcome", "advance"]

_ASK_UNLISTED = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where an attempt stands with regard to one tier."""

    view: AttemptView
    done: bool
    """Nothing is left to do for this tier (it has its copy, or is not to have one)."""
    waiting: str = ""
    """What has to happen first, elsewhere."""


async def advance(
    context: CopyContext, attempt: Attempt, tier: Tier, *, act: bool = True, world_size: int | None = None, give_up: bool = False
) -> Outcome:
    """Brings `attempt` onto `tier` as far as it can go now; idempotent, and safe beside others that do the same.

    Args:
        context: Tiers and limits.
        attempt: What to advance.
        tier: Where to.
        act: False only looks (another process has the lock).
        world_size: How many ranks save together, where the caller knows.
        give_up: On the authority: condemn the attempt if parts are still missing.

    Raises:
        StorageError: A tier failed; nothing half-done is visible, and the same call continues.
        IntegrityError: No good copy of a file is left anywhere.
        CondemnedError: `give_up`, and ranks are missing.
    """
    view = await observe(context.tiers, attempt, world_size=world_size)
    if view.log.condemned or view.log.hidden:
        return Outcome(view=view, done=True)
    if context.tiers.is_authority(tier):
        return await _to_authority(context, view, act=act, give_up=give_up)
    if tier.name in view.dropped:
        return Outcome(view=view, done=True)
    if tier.name in [t.name for t in further(context.tiers)]:
        return await _to_further(context, view, tier, act=act)
    return await _to_staging(context, view, tier, act=act)


# ---- towards the commit: parts


async def _to_staging(context: CopyContext, view: AttemptView, tier: Tier, *, act: bool) -> Outcome:
    nodes = staging(context.tiers)
    names = [t.name for t in nodes]
    nearer = nodes[: names.index(tier.name)]
    # What is being dropped from a nearer tier is no source. Before the commit nothing is dropped, whatever a marker says.
    held = {rank for t in nearer if not (view.log.committed and t.name in view.dropped) for rank in view.ranks(t.name)}
    wanted = sorted(held - view.ranks(tier.name))
    if wanted and not act:
        return Outcome(view=view, done=False, waiting="another process is copying")
    for rank in wanted:
        await _carry(context, view, rank, tier)
    if wanted:
        view = await observe(context.tiers, view.attempt, world_size=view.world_size)
    if not view.ranks(tier.name):
        return Outcome(view=view, done=view.log.committed)  # this node has no part in it
    if not view.log.committed:
        return Outcome(view=view, done=False, waiting="the commit")
    if tier.name not in view.documented:
        if not act:
            return Outcome(view=view, done=False, waiting="another process is copying")
        await document_replica(context, view, tier)
    return Outcome(view=view, done=True)


async def _to_authority(context: CopyContext, view: AttemptView, *, act: bool, give_up: bool) -> Outcome:
    if view.log.committed:
        return Outcome(view=view, done=True)
    authority = context.tiers.authority
    if not act:
        return Outcome(view=view, done=False, waiting="another process is copying")
    held = {rank for ranks in view.receipts.values() for rank in ranks}
    carried = sorted(held - view.parts)
    for rank in carried:
        await _carry(context, view, rank, authority)
    if carried:
        view = await observe(context.tiers, view.attempt, world_size=view.world_size)
    size = view.world_size
    if size is None and view.parts:
        size = (await _part_on_authority(context, view.attempt, min(view.parts))).world_size
    missing = await _missing(context, view, size or 0)
    if size is None or (missing and not give_up):
        waiting = f"the parts of ranks {format_some(missing, 8)}" if missing else "any rank's part"
        return Outcome(view=view, done=False, waiting=waiting)
    try:
        fate = await commit(context.tiers, view.attempt, deadline_s=0.0, clock=context.clock, world_size=size, condemn=give_up)
        await say_again(context.tiers, view.attempt, fate, clock=context.clock)
    except IncompleteError as error:
        if "missing" in error.context:  # a part is there, but what it reports is not (yet)
            return Outcome(view=view, done=False, waiting=f"the parts of ranks {format_some(error.context['missing'], 8)}")
        # All parts are there and contradict each other: no waiting mends that, and every rank should hear of it.
        await commit(context.tiers, view.attempt, deadline_s=0.0, clock=context.clock, world_size=size, condemn=True)
    return Outcome(view=await observe(context.tiers, view.attempt, world_size=size), done=True)


async def _missing(context: CopyContext, view: AttemptView, world_size: int) -> list[int]:
    """Ranks without a part on the authority; what the listing does not show is asked for by name (some file systems list late)."""
    unlisted = [rank for rank in range(world_size) if rank not in view.parts]
    missing = unlisted[_ASK_UNLISTED:]
    for rank in unlisted[:_ASK_UNLISTED]:
        try:
            await context.tiers.authority.storage.stat(view.attempt.path(part_name(rank)))
        except NotFoundError:
            missing.append(rank)
    return sorted(missing)


async def _carry(context: CopyContext, view: AttemptView, rank: int, target: Tier) -> None:
    """Copies one rank's part of an attempt: its files, then its part record, then (on a staging tier) its receipt."""
    attempt = view.attempt
    sources = [t for t in staging(context.tiers) if rank in view.receipts.get(t.name, {}) and t.name != target.name]
    receipt = view.receipts[sources[0].name][rank]
    data = await read_document(attempt, sources, part_name(rank), Proof(digest=receipt.part_digest), warn_only, wanted_by=target)
    part = decode_part(data)
    _check_part(part, attempt, rank)
    files = part.index.files()
    if target.unchanged_once:
        context.references.learned(attempt, files, part.index.block_nbytes, whole=part.world_size == 1)
    promise = await check_room(context, attempt, target, files, part.index.block_nbytes, besides=len(data), refer=True)
    taken = len(data)
    for file in files:
        info = await copy_file(context, attempt, target, sources, file, part.index.block_nbytes, warn_only, refer=True)
        taken += info.taken_nbytes
    target.account.written(promise, taken)
    await target.storage.put(attempt.path(part_name(rank)), data)
    if not context.tiers.is_authority(target):
        reach("persist.before-receipt")
        await target.storage.put(attempt.receipt_path(rank), await sources[0].storage.read(attempt.receipt_path(rank)))
        reach("persist.after-receipt")


async def _part_on_authority(context: CopyContext, attempt: Attempt, rank: int) -> Part:
    part = decode_part(await context.tiers.authority.storage.read(attempt.path(part_name(rank))))
    _check_part(part, attempt, rank)
    return part


def _check_part(part: Part, attempt: Attempt, rank: int) -> None:
    """A part record that belongs to another attempt (a stale result, a file put in the wrong place) is never used."""
    if (part.run, part.step, part.save_id, part.rank) != (attempt.run, attempt.step, attempt.save_id, rank):
        raise RefusedError(
            f"the part record of rank {rank} in {attempt.folder} belongs to step {part.step}, save id {part.save_id}, rank {part.rank}",
            hint="it was put there by hand or by another tool: run `tierstore verify`",
            run=attempt.run,
            step=attempt.step,
        )


# ---- after the commit


async def _to_further(context: CopyContext, view: AttemptView, tier: Tier, *, act: bool) -> Outcome:
    if not view.log.committed:
        return Outcome(view=view, done=False, waiting="the commit")
    if tier.name in view.log.replicated:
        return Outcome(view=view, done=True)
    if not act:
        return Outcome(view=view, done=False, waiting="another process is copying")
    await copy_checkpoint(context, view, tier)
    return Outcome(view=await observe(context.tiers, view.attempt, world_size=view.world_size), done=True)
