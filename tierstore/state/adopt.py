"""Taking a foreign checkpoint into a store.

Each file is one share, persisted as a rank's share of a save is: shard, part record, receipt. The shares of all files but the first are
made durable here; the first goes through the store's worker, whose ticket then tells of the commit and of every tier. A process that
dies in between leaves an attempt without its first part, which never commits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierstore.errors import StorageError, TierFullError, TierStoreError
from tierstore.names import Attempt, shard_name
from tierstore.state.adopt_plan import Adoption, plan_adoption
from tierstore.state.foreign.opening import Foreign
from tierstore.storage.sources import LocalSource
from tierstore.tiers.jobs import SaveJob
from tierstore.tiers.persist import persist
from tierstore.tiers.progress import Progress, telling
from tierstore.tiers.session import Session
from tierstore.tiers.space import SAVE_RESERVE_NBYTES
from tierstore.tiers.space_estimate import check_room_to_save
from tierstore.tiers.ticket import Ticket
from tierstore.tiers.tier import Tier, ensure_tier
from tierstore.tiers.together import together
from tierstore.tiers.view import staging

__all__ = ["adopt_foreign"]

log = logging.getLogger(__name__)


def adopt_foreign(
    session: Session,
    foreign: Foreign,
    attempt: Attempt,
    facts: Mapping[str, Any],
    *,
    rename: Any,
    link: bool,
    progress: Progress,
    submit: Callable[[SaveJob], Ticket],
    condemn: Callable[[Attempt, str], None],
) -> Ticket:
    """Takes `foreign` in; it is closed when the first share is in, or on an error.

    Args:
        session: The store's tiers.
        foreign: From `look_at`.
        attempt: What it becomes.
        facts: The usual facts of a checkpoint.
        rename: As `plan_adoption`; so is `link`.
        progress: Told as bytes arrive on tiers.
        submit: Hands the first share to the background work.
        condemn: Gives the attempt up, and says why.

    Raises:
        UsageError, UnsupportedTypeError: As `plan_adoption`; nothing was written.
        TierStoreError: A share could not be written; the attempt is condemned.
    """

    def forget() -> None:
        session.forget(foreign.close())

    try:
        adoption = session.run(plan_adoption(foreign, rename=rename, link=link))
        first, *others = [_share_job(adoption, rank, attempt, facts, forget) for rank in range(len(adoption.shares))]
        try:
            session.run(_persist_all(session, others, progress))
            session.run(_check_room(session, first))
            return submit(first)
        except TierStoreError as error:
            condemn(attempt, f"adopting {foreign.files.uri} failed: {error.message}")
            raise
    except BaseException:
        forget()
        raise


def _share_job(adoption: Adoption, rank: int, attempt: Attempt, facts: Mapping[str, Any], release: Callable[[], None]) -> SaveJob:
    """A share as the worker takes it; it holds no image in memory."""
    share = adoption.shares[rank]
    return SaveJob(
        attempt=attempt,
        rank=rank,
        world_size=len(adoption.shares),
        shard=share.open(),
        tensors=share.tensors,
        objects=adoption.objects,
        facts={**facts, **(adoption.facts if rank == 0 else {})},
        nbytes=0,
        release=release,
    )


async def _check_room(session: Session, job: SaveJob) -> None:
    """The background work waits for room as a training job does; who adopts hears at once that there is none.

    Raises:
        TierFullError: No tier has room for it.
    """
    if isinstance(job.shard, LocalSource):  # it may need none: blocks are shared, or it is a link
        return
    candidates = (*staging(session.tiers), session.tiers.authority)
    for tier in candidates:
        try:
            promise = await check_room_to_save(
                job.attempt,
                tier,
                job.shard.nbytes,
                besides=len(job.objects),
                home=session.tiers.is_authority(tier),
                reserve_nbytes=SAVE_RESERVE_NBYTES,
            )
            tier.account.written(promise, 0)  # who writes it asks again
            return
        except TierFullError:
            if tier is candidates[-1]:
                raise


async def _persist(session: Session, job: SaveJob, progress: Progress) -> None:
    """Makes one share durable on the nearest tier that takes it.

    Raises:
        StorageError: No tier does; the last one's reason.
        IntegrityError: The source is not what its header said, or changed meanwhile.
    """
    tiers = session.tiers
    candidates: tuple[Tier, ...] = (*staging(tiers), tiers.authority)
    for tier in candidates:
        try:
            await ensure_tier(tiers, tier)
            with telling(progress, tier.name, job.attempt, shard_name(job.rank, job.world_size), job.shard) as told:
                await persist(
                    tier,
                    job.attempt,
                    rank=job.rank,
                    world_size=job.world_size,
                    shard=told,
                    tensors=job.tensors,
                    objects=job.objects,
                    facts=job.facts,
                    clock=session.clock,
                    authority=tiers.is_authority(tier),
                    block_nbytes=session.config.io.block_nbytes,
                )
            return
        except StorageError as error:
            if tier is candidates[-1]:
                raise
            how = "is full" if isinstance(error, TierFullError) else "fails"
            log.warning("tier=%s %s, and is passed over for the next: %s", tier.name, how, error.message)


async def _persist_all(session: Session, jobs: Sequence[SaveJob], progress: Progress) -> None:
    """Several shares, as many at once as the configuration has threads for."""

    async def one(job: SaveJob) -> None:
        await _persist(session, job, progress)

    await together(one, jobs, at_once=session.config.io.threads)
